//! What cannot be combined with replicas that divide the optimizer's state, and with state on disk.

use farflung_compress::link::LinkSpec;
use farflung_optim::local::Averages;
use farflung_parallel::Plan;

use super::{Choices, Order, Refusal, Rule, Work, refuse};
use crate::TrainConfig;
use crate::config::choice::StatePlace;

/// What replicas divide of the state that all would hold.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Zero {
    stage: usize,
    /// Whether each tensor is in one shard.
    tensors: bool,
}

impl Zero {
    pub(super) fn wished(config: &TrainConfig) -> Self {
        Self { stage: config.zero, tensors: config.optimizer.row().per_tensor }
    }

    pub(super) const fn planned(plan: &Plan) -> Self {
        Self { stage: plan.zero as usize, tensors: plan.zero_tensors }
    }
}

pub(super) const RULES: &[Rule] = &[
    Rule {
        axes: ["zero", "sync"],
        refuses: |choices| {
            let method = choices.divides_state()?.sync;
            let why = "the shards of an update belong to one step of all replicas";
            (method.name != "ddp").then(|| refuse("sync", method.name, format!("ddp with `zero`: {why}")))
        },
    },
    Rule {
        axes: ["zero", "schedule"],
        refuses: |choices| {
            let order = choices.divides_state()?.schedule.as_ref()?;
            let why = "the holders of a part update it at the end of a step, each a shard";
            (!order.updates_at_the_end()).then(|| choices.zero(format!("0 with {}: {why}", order.name)))
        },
    },
    Rule {
        axes: ["zero", "optimizer"],
        refuses: |choices| {
            let optimizer = choices.divides_state()?.optimizer;
            let why = "only gradients are averaged to the ranks that update them";
            let expected = format!("one that averages gradients with `zero`, such as adamw: {why}");
            (optimizer.averages != Averages::Gradients).then(|| refuse("optimizer", optimizer.name, expected))
        },
    },
    Rule {
        axes: ["zero", "codec"],
        refuses: |choices| {
            let level = choices.divides_state()?.levels.iter().find(|level| !level.codec.is_plain())?;
            let why = "gradients reach only the rank that updates them, as plain f32";
            Some(refuse("codec", level.codec, format!("none with `zero`: {why}")))
        },
    },
    Rule {
        axes: ["zero", "optimizer"],
        refuses: |choices| {
            let choices = choices.divides_state()?;
            let (optimizer, cut) = (choices.optimizer, !choices.zero.tensors);
            let why = "it works on whole tensors, which the plan's shards cut (`zero_tensors`)";
            let expected = format!("another than {}: {why}", optimizer.name);
            (optimizer.per_tensor && cut).then(|| refuse("optimizer", optimizer.name, expected))
        },
    },
    Rule {
        axes: ["zero", "expert"],
        refuses: |choices| {
            let why = "replicas that divide experts hold different parameters";
            (choices.divides_state()?.expert_ranks > 1)
                .then(|| choices.zero(format!("0 with `expert` above 1: {why}")))
        },
    },
    Rule {
        axes: ["zero", "paths"],
        refuses: |choices| {
            let why = "paths hold different parameters";
            (choices.divides_state()?.paths > 1).then(|| choices.zero(format!("0 with `paths`: {why}")))
        },
    },
    Rule {
        axes: ["zero", "schedule"],
        refuses: |choices| {
            let order = choices.schedule.as_ref().filter(|order| order.slices && choices.zero.stage > 1)?;
            let why = "gradients would leave after each slice of a sequence";
            Some(choices.zero(format!("0 or 1 with {}: {why}", order.name)))
        },
    },
    Rule {
        axes: ["zero", "tensor"],
        refuses: |choices| {
            let why = "these ranks add up the gradients of what they do not divide";
            (choices.zero.stage > 1 && choices.tensor.ranks > 1)
                .then(|| choices.zero(format!("0 or 1 with `tensor` above 1: {why}")))
        },
    },
];

/// Why a state on disk needs steps of all replicas together.
const EACH_STEP: &str = "the disk has the state after each step, from which all ranks continue together";

/// The pairs that cannot be combined with state on disk.
pub(super) const OF_DISK: &[Rule] = &[
    Rule {
        axes: ["state", "sync"],
        refuses: |choices| {
            let method = choices.keeps_on_disk()?.sync;
            let expected = format!("ddp with `state` disk: {EACH_STEP}");
            (method.name != "ddp").then(|| refuse("sync", method.name, expected))
        },
    },
    Rule {
        axes: ["state", "schedule"],
        refuses: |choices| {
            let order = choices.keeps_on_disk()?.schedule.as_ref()?;
            let expected = format!("device with {}: {EACH_STEP}", order.name);
            (!order.updates_at_the_end()).then(|| refuse("state", "disk", expected))
        },
    },
    Rule {
        axes: ["state", "optimizer"],
        refuses: |choices| {
            let optimizer = choices.keeps_on_disk()?.optimizer;
            let why = "replicas average values of its state, which is not in memory then";
            let expected = format!("one that averages gradients with `state` disk, such as adamw: {why}");
            (optimizer.averages != Averages::Gradients).then(|| refuse("optimizer", optimizer.name, expected))
        },
    },
    Rule {
        axes: ["state", "codec"],
        refuses: |choices| {
            let level = choices.keeps_on_disk()?.levels.iter().find(|level| !level.codec.is_plain())?;
            let why = "what a codec remembers is in memory, as large as the state";
            Some(refuse("codec", level.codec, format!("none with `state` disk: {why}")))
        },
    },
    Rule { axes: ["state", "boundary"], refuses: |choices| choices.remembered(&choices.forward, "boundary") },
    Rule {
        axes: ["state", "boundary-backward"],
        refuses: |choices| choices.remembered(&choices.backward, "boundary-backward"),
    },
    Rule {
        axes: ["state", "paths"],
        refuses: |choices| {
            let expected = format!("device with `paths`: {EACH_STEP}");
            (choices.keeps_on_disk()?.paths > 1).then(|| refuse("state", "disk", expected))
        },
    },
];

impl Order {
    /// Returns whether each rank has one list, at whose end it updates the only copy of its parts.
    fn updates_at_the_end(&self) -> bool {
        self.work == Work::Listed && self.flushes && !self.copies
    }
}

impl Choices {
    /// Returns the choices if replicas divide the optimizer's state.
    fn divides_state(&self) -> Option<&Self> {
        (self.zero.stage > 0).then_some(self)
    }

    /// Returns why the stage of ZeRO is refused.
    fn zero(&self, expected: String) -> Refusal {
        refuse("zero", self.zero.stage, expected)
    }

    /// Returns the choices if the optimizer's state is on disk.
    fn keeps_on_disk(&self) -> Option<&Self> {
        (self.state == StatePlace::Disk).then_some(self)
    }

    /// Returns why boundary codecs that store samples cannot be used.
    fn remembered(&self, specs: &[LinkSpec], field: &'static str) -> Option<Refusal> {
        self.keeps_on_disk()?;
        let spec = specs.iter().find(|spec| spec.remembers())?;
        let expected = "one that stores no samples with `state` disk, which does not have them";
        Some(refuse(field, spec, expected.to_owned()))
    }
}
