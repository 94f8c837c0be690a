//! Where the passes of a stage read its parameters: in one flat buffer, or unit by unit, each for as long as a
//! layer needs it.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use farflung_tensor::{ParamLayout, Tensor, View};

use super::{Result, StageContext};
use crate::ZooError;

/// The parameters of a stage.
#[derive(Debug, Clone, Copy)]
pub enum Params<'a> {
    /// All of them, in a flat buffer of the stage's layout.
    Flat(&'a Tensor),
    /// Those of a unit at a time, from somewhere else.
    Units(&'a dyn UnitParams),
}

impl<'a> From<&'a Tensor> for Params<'a> {
    fn from(flat: &'a Tensor) -> Self {
        Self::Flat(flat)
    }
}

/// The units that a layer reads together, as ranges of the flat buffers: its own, and for a tied head also the
/// one with the token table. They are some of [`Stage::backward_ranges`](crate::Stage::backward_ranges).
pub type LayerUnits = Vec<Range<usize>>;

/// What gives passes the parameters of units, for example from the ranks that each have a piece of them.
pub trait UnitParams: fmt::Debug {
    /// Begins a pass, with the units of each of its layers in the order in which it asks for them. What the
    /// next layer needs can be fetched while a layer computes. A pass that recomputes values may also ask for
    /// those of other layers.
    fn begin(&self, layers: Vec<LayerUnits>);

    /// Returns the parameters of a layer.
    ///
    /// Errors: [`ZooError::Exchange`], for example if a rank is lost.
    fn get(&self, units: &LayerUnits) -> Result<Vec<UnitValues>>;
}

/// The parameters of a unit.
#[derive(Debug, Clone)]
pub struct UnitValues {
    /// Its place in the flat buffers.
    pub range: Range<usize>,
    /// Its values.
    pub values: Arc<Tensor>,
}

/// The parameters that a layer reads.
#[derive(Debug, Clone, Copy)]
pub enum LayerParams<'a> {
    /// Those of the whole stage.
    Flat(&'a Tensor),
    /// Those of the layer's units.
    Units(&'a [UnitValues]),
}

impl<'a> From<&'a Tensor> for LayerParams<'a> {
    fn from(flat: &'a Tensor) -> Self {
        Self::Flat(flat)
    }
}

impl<'a> LayerParams<'a> {
    fn view(self, layout: &ParamLayout, index: usize) -> Result<View<'a>> {
        match self {
            Self::Flat(flat) => Ok(layout.view(flat, index)?),
            Self::Units(units) => {
                let start = layout.params()[index].start;
                let unit = units.iter().find(|unit| unit.range.contains(&start));
                let unit = unit.ok_or(ZooError::StageInput { expected: "the parameters of this layer" })?;
                Ok(layout.view_from(&unit.values, unit.range.start, index)?)
            }
        }
    }
}

/// The parameters of a layer, for as long as it runs.
pub(crate) enum HeldParams<'a> {
    Flat(&'a Tensor),
    Units(Vec<UnitValues>),
}

impl<'a> Params<'a> {
    /// Begins a pass over layers with these units.
    pub(crate) fn begin(self, layers: impl FnOnce() -> Vec<LayerUnits>) {
        if let Self::Units(units) = self {
            units.begin(layers());
        }
    }

    /// Returns what a layer with these units reads.
    pub(crate) fn of_layer(self, units: impl FnOnce() -> LayerUnits) -> Result<HeldParams<'a>> {
        match self {
            Self::Flat(flat) => Ok(HeldParams::Flat(flat)),
            Self::Units(all) => Ok(HeldParams::Units(all.get(&units())?)),
        }
    }
}

impl StageContext<'_> {
    /// Returns the context of a layer with these parameters.
    pub(crate) fn with<'b>(&'b self, held: &'b HeldParams<'_>) -> StageContext<'b> {
        let params = match held {
            HeldParams::Flat(flat) => LayerParams::Flat(flat),
            HeldParams::Units(units) => LayerParams::Units(units),
        };
        StageContext { params, ..*self }
    }

    /// Returns a parameter of the layer.
    pub(crate) fn param(&self, index: usize) -> Result<View<'_>> {
        self.params.view(self.layout, index)
    }
}
