//! Where a backward pass writes the gradients of a stage: one flat buffer, or a buffer for each unit of its
//! parameters, which the caller takes away when it is final.

use std::ops::Range;

use farflung_tensor::{Device, ParamLayout, Tensor, ViewMut};

use super::Result;

/// The gradients of a stage.
#[derive(Debug)]
pub struct Grads<'a> {
    into: Destination<'a>,
    accumulate: bool,
}

#[derive(Debug)]
enum Destination<'a> {
    Flat(&'a mut Tensor),
    Units(&'a mut UnitGrads),
}

impl<'a> Grads<'a> {
    /// Returns gradients in a flat buffer of the stage's layout. `accumulate`: whether they are added to those
    /// that it has, instead of overwriting them.
    pub const fn flat(flat: &'a mut Tensor, accumulate: bool) -> Self {
        Self { into: Destination::Flat(flat), accumulate }
    }

    /// Returns the gradients of one microbatch in a buffer for each unit, which exists from the first gradient
    /// in it until [`Grads::take`].
    pub const fn by_unit(units: &'a mut UnitGrads) -> Self {
        Self { into: Destination::Units(units), accumulate: false }
    }

    /// Returns whether a layer adds to the gradients instead of overwriting them.
    #[must_use]
    pub const fn accumulate(&self) -> bool {
        self.accumulate
    }

    /// Returns the flat buffer; `None` if each unit has its own.
    #[must_use]
    pub const fn as_flat(&self) -> Option<&Tensor> {
        match &self.into {
            Destination::Flat(flat) => Some(flat),
            Destination::Units(_) => None,
        }
    }

    /// Takes the buffer of a unit, whose range of the flat order this is. `None` if gradients are in one flat
    /// buffer, or if no gradient of the unit was written.
    pub fn take(&mut self, unit: &Range<usize>) -> Option<Tensor> {
        match &mut self.into {
            Destination::Flat(_) => None,
            Destination::Units(units) => units.take(unit),
        }
    }

    /// Returns the gradients of parameters `first..first + N`, which are of one unit.
    pub(crate) fn of<const N: usize>(
        &mut self,
        layout: &ParamLayout,
        first: usize,
    ) -> Result<[ViewMut<'_>; N]> {
        match &mut self.into {
            Destination::Flat(flat) => Ok(layout.views_mut(flat, first)?),
            Destination::Units(units) => units.of(layout, first),
        }
    }
}

/// The units of a stage's parameters, which are [`Stage::backward_ranges`](crate::Stage::backward_ranges), with
/// the buffers of those whose gradients are being computed.
#[derive(Debug)]
pub struct UnitGrads {
    device: Device,
    units: Vec<Range<usize>>,
    /// In the order of `units`.
    open: Vec<Option<Tensor>>,
}

impl UnitGrads {
    pub(crate) fn new(device: Device, units: Vec<Range<usize>>) -> Self {
        Self { device, open: units.iter().map(|_| None).collect(), units }
    }

    /// Drops the buffers of a pass that was not finished.
    pub fn clear(&mut self) {
        self.open.fill_with(|| None);
    }

    /// Returns the number of the unit with an element.
    fn unit_of(&self, element: usize) -> usize {
        self.units.partition_point(|unit| unit.end <= element)
    }

    fn take(&mut self, unit: &Range<usize>) -> Option<Tensor> {
        let at = self.unit_of(unit.start);
        self.units.get(at).filter(|range| *range == unit)?;
        self.open[at].take()
    }

    fn of<const N: usize>(&mut self, layout: &ParamLayout, first: usize) -> Result<[ViewMut<'_>; N]> {
        let at = self.unit_of(layout.params()[first].start);
        let unit = &self.units[at];
        let buffer = match &mut self.open[at] {
            Some(buffer) => buffer,
            // Zeros, for the padding between tensors.
            none => none.insert(self.device.zeros(unit.len())?),
        };
        Ok(layout.views_mut_from(buffer, unit.start, first)?)
    }
}
