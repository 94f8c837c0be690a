//! The weights of a part of which each holder keeps a shard alone (`--zero 3`): those of a unit are gathered
//! before a layer needs them, while the layer before it computes, and dropped after it.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use farflung_base::Axis;
use farflung_optim::{GatheredRange, OptimError, Shard};
use farflung_parallel::Recompute;
use farflung_tensor::{Device, MemoryKind, Tensor};
use farflung_zoo::layer::{LayerUnits, UnitParams, UnitValues};
use farflung_zoo::{Stage, ZooError};

use super::fetch_order::{Fetch, FetchOrder, own_elements};
use super::zero::PartShards;
use crate::{Error, Result};

/// The units of a part's weights on this rank.
#[derive(Debug)]
pub(super) struct DividedWeights {
    device: Device,
    /// `None` on a device that only counts.
    shards: Option<PartShards>,
    fetched: RefCell<Fetched>,
    ahead: bool,
    /// What this rank has of all weights once more, for its group, if the plan has groups.
    of_group: Option<RefCell<GroupWeights>>,
}

#[derive(Debug, Default)]
struct Fetched {
    order: FetchOrder,
    held: Vec<UnitValues>,
    coming: Vec<ComingUnit>,
}

impl Fetched {
    fn new(ahead: bool) -> Self {
        Self { order: FetchOrder::new(ahead), ..Self::default() }
    }
}

/// The part of all weights that a rank has for its group.
#[derive(Debug)]
struct GroupWeights {
    own: Shard,
    values: Tensor,
    /// The units that are there; none after an update.
    filled: BTreeSet<usize>,
}

/// A unit on its way.
#[derive(Debug)]
struct ComingUnit {
    range: Range<usize>,
    /// Whether it comes from the group.
    inside: bool,
    values: ComingValues,
}

#[derive(Debug)]
enum ComingValues {
    Gathered(Box<GatheredRange>),
    /// On a device that only counts, the room that it takes until it is a tensor.
    Counted(Tensor),
}

impl DividedWeights {
    /// Returns those of a part with these shards; without any on a device that only counts. `in_group` is what
    /// the rank has for its group; `ahead`: whether a layer's are gathered while the one before computes.
    ///
    /// Errors: those of the device.
    pub(super) fn new(
        stage: &Stage,
        shards: Option<PartShards>,
        (in_group, ahead): (Option<Shard>, bool),
    ) -> Result<Self> {
        let device = stage.device().counting_for(MemoryKind::Weights);
        let of_group = in_group.map(|own| {
            let values = device.zeros(own.len())?;
            Ok::<_, Error>(RefCell::new(GroupWeights { own, values, filled: BTreeSet::new() }))
        });
        Ok(Self {
            device,
            shards,
            fetched: RefCell::new(Fetched::new(ahead)),
            ahead,
            of_group: of_group.transpose()?,
        })
    }

    /// Drops all units, since the pass that needed them is over.
    pub(super) fn clear(&mut self) {
        self.fetched = RefCell::new(Fetched::new(self.ahead));
    }

    /// Forgets all values, since the weights have changed.
    pub(super) fn changed(&mut self) {
        self.clear();
        if let Some(group) = &mut self.of_group {
            group.get_mut().filled.clear();
        }
    }

    /// Returns what gives a pass the parameters, of which `own` is this rank's shard. Before each layer it
    /// calls `advance` with the layer's number of elements and those of all layers of the pass.
    pub(super) fn reader<'a>(&'a self, own: &'a Tensor, advance: &'a dyn Fn(u64, u64)) -> WeightReader<'a> {
        WeightReader { weights: self, own, advance }
    }

    /// Carries out a step of the order.
    fn fetch(&self, fetched: &mut Fetched, step: Fetch, own: &Tensor) -> std::result::Result<(), ZooError> {
        match step {
            Fetch::Drop(range) => fetched.held.retain(|unit| unit.range != range),
            Fetch::Start(range) => {
                let inside = self.of_group.as_ref().map(RefCell::borrow);
                let inside = inside.filter(|group| group.filled.contains(&range.start));
                let gathered = match (&self.shards, &inside) {
                    (Some(shards), Some(group)) => shards.start_gather_in_group(&range, &group.values),
                    (Some(shards), None) => shards.start_gather(&range, own).map(Some),
                    (None, _) => Ok(None),
                };
                let values = if let Some(values) = gathered.map_err(gather_error)? {
                    ComingValues::Gathered(Box::new(values))
                } else {
                    let host = self.device.counting_for(MemoryKind::Messages);
                    ComingValues::Counted(host.zeros(range.len())?)
                };
                fetched.coming.push(ComingUnit { range, inside: inside.is_some(), values });
            }
            Fetch::Wait(range) => {
                let at = fetched.coming.iter().position(|unit| unit.range == range);
                let unit = fetched.coming.swap_remove(at.expect("it was started before"));
                let values = match unit.values {
                    ComingValues::Gathered(values) => {
                        let values = values.wait().map_err(gather_error)?;
                        if let Some(group) = self.of_group.as_ref().filter(|_| !unit.inside) {
                            group.borrow_mut().fill(&range, &values)?;
                        }
                        self.device.tensor(&values, values.len())?
                    }
                    ComingValues::Counted(room) => {
                        let values = self.device.zeros(range.len())?;
                        drop(room);
                        values
                    }
                };
                fetched.held.push(UnitValues { range, values: Arc::new(values) });
            }
        }
        Ok(())
    }
}

/// Returns the number of elements of a part's weights that a rank gathers for a microbatch, its own among them.
pub(super) fn elements_of_microbatch(stage: &Stage, recompute: Recompute, depth: u32) -> u64 {
    let again = match recompute {
        recompute if !recompute.is_scheduled(depth) => Vec::new(),
        Recompute::Layers(layers) => stage.recompute_units(layers as usize),
        _ => stage.forward_units(),
    };
    let mut order = FetchOrder::new(true);
    let mut elements = 0;
    for pass in [stage.forward_units(), again, stage.backward_units()] {
        order.begin(pass.clone());
        let steps = pass.iter().flat_map(|layer| order.next(layer).0);
        let started = steps.filter_map(|step| match step {
            Fetch::Start(range) => Some(range.len() as u64),
            Fetch::Wait(_) | Fetch::Drop(_) => None,
        });
        elements += started.sum::<u64>();
    }
    elements
}

impl GroupWeights {
    /// Keeps its part of a unit.
    fn fill(&mut self, range: &Range<usize>, unit: &[f32]) -> std::result::Result<(), ZooError> {
        for piece in self.own.within(range) {
            let part = &unit[piece.flat.start - range.start..piece.flat.end - range.start];
            self.values.view_mut().part(piece.at, part.len())?.write(part)?;
        }
        self.filled.insert(range.start);
        Ok(())
    }
}

fn gather_error(error: OptimError) -> ZooError {
    let source: Box<dyn std::error::Error + Send + Sync> = match error {
        OptimError::Comm(error) => Box::new(error),
        other => Box::new(other),
    };
    ZooError::Exchange { axis: Axis::Data, source }
}

/// Gives a pass the parameters of a part.
pub(super) struct WeightReader<'a> {
    weights: &'a DividedWeights,
    own: &'a Tensor,
    advance: &'a dyn Fn(u64, u64),
}

impl fmt::Debug for WeightReader<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WeightReader").field("weights", self.weights).finish_non_exhaustive()
    }
}

impl UnitParams for WeightReader<'_> {
    fn begin(&self, layers: Vec<LayerUnits>) {
        self.weights.fetched.borrow_mut().order.begin(layers);
    }

    fn get(&self, units: &LayerUnits) -> std::result::Result<Vec<UnitValues>, ZooError> {
        let fetched = &mut *self.weights.fetched.borrow_mut();
        let (steps, moves) = fetched.order.next(units);
        for step in steps {
            self.weights.fetch(fetched, step, self.own)?;
        }
        if moves {
            (self.advance)(own_elements(units), fetched.order.elements());
        }
        let of = |unit: &Range<usize>| fetched.held.iter().find(|held| held.range == *unit).cloned();
        Ok(units.iter().filter_map(of).collect())
    }
}
