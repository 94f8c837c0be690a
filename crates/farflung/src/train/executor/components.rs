//! What an executor is made of, beside what follows from its schedule.

use std::collections::BTreeMap;

use farflung_base::{Rank, StageId};
use farflung_comm::Communicator;
use farflung_tensor::{Device, Interrupt};

use super::{Executor, Pass, Routers, Source, Wires, recomputed};
use crate::train::bind::ReplicaSchedule;
use crate::train::boundary::Boundaries;
use crate::train::kept_pass::KeptPass;
use crate::train::part::Part;
use crate::train::spent::Spent;
use crate::train::tied::TiedTable;

/// The components of a new [`Executor`]; see its fields.
#[derive(Debug)]
pub(in crate::train) struct Components {
    pub(in crate::train) comm: Communicator,
    pub(in crate::train) wires: Wires,
    pub(in crate::train) interrupt: Interrupt,
    pub(in crate::train) pipeline: Vec<Rank>,
    pub(in crate::train) device: Device,
    pub(in crate::train) parts: BTreeMap<StageId, Part>,
    pub(in crate::train) tied: TiedTable,
    pub(in crate::train) source: Source,
    pub(in crate::train) dim: usize,
    pub(in crate::train) token_weights: Vec<f32>,
    pub(in crate::train) routers: Routers,
    pub(in crate::train) kept: KeptPass,
    pub(in crate::train) boundaries: Boundaries,
}

impl Executor {
    /// Makes the executor of a rank, before any pass.
    pub(in crate::train) fn new(schedule: &ReplicaSchedule, made_of: Components) -> Self {
        let Components { comm, wires, interrupt, pipeline, device, parts, tied, source, dim, .. } = made_of;
        Self {
            comm,
            wires,
            interrupt,
            pipeline,
            device,
            parts,
            tied,
            source,
            dim,
            token_weights: made_of.token_weights,
            routers: made_of.routers,
            kept: made_of.kept,
            boundaries: made_of.boundaries,
            placement: schedule.placement().clone(),
            updates: schedule.updates(),
            microbatches: schedule.microbatches(),
            slices: schedule.slices.clone(),
            again: recomputed(schedule.schedule.order()),
            pass: Pass::Evaluation,
            passing: 0,
            losses: Vec::new(),
            held: BTreeMap::new(),
            carried: BTreeMap::new(),
            sending: Vec::new(),
            spent: Spent::default(),
        }
    }
}
