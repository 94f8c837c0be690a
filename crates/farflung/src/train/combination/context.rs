//! What cannot be combined with replicas that divide the positions of their sequences.

use super::shares::{averaging, unlisted};
use super::{Choices, Refusal, Rule, refuse};

pub(super) const RULES: &[Rule] = &[
    Rule {
        axes: ["context-parallel", "sync"],
        refuses: |choices| {
            let method =
                Some(choices.sync).filter(|method| choices.reads_together() && method.name != "ddp")?;
            let why = "the parts of gradients that ranks have are added up where gradients are averaged";
            Some(refuse("sync", method.name, format!("ddp with `context-parallel` above 1: {why}")))
        },
    },
    Rule {
        axes: ["context-parallel", "optimizer"],
        refuses: |choices| {
            choices.reads_together().then(|| averaging(choices, "`context-parallel` above 1"))?
        },
    },
    Rule {
        axes: ["context-parallel", "schedule"],
        refuses: |choices| {
            let order = choices.schedule.as_ref().filter(|order| choices.reads_together() && order.slices);
            let why = "it divides the positions of sequences itself";
            let sliced = order.map(|order| alone(choices, &order.name, why));
            let why = "ranks that divide sequences run each microbatch together, between two updates";
            let unlisted = || unlisted(choices, "context-parallel", "1", why);
            sliced.or_else(|| choices.reads_together().then(unlisted)?)
        },
    },
    Rule {
        axes: ["context-parallel", "tensor"],
        refuses: |choices| {
            let why = "only one of them divides the positions of sequences";
            (choices.reads_together() && choices.tensor.divide_sequences)
                .then(|| alone(choices, "`sequence-parallel`", why))
        },
    },
    Rule {
        axes: ["context-parallel", "attention"],
        refuses: |choices| {
            let pattern = choices.tiles.filter(|_| choices.reads_together())?;
            let why = "of the keys of another rank, a query has one range, as with full and window";
            Some(alone(choices, &format!("`attention` {pattern}"), why))
        },
    },
    Rule {
        axes: ["context-parallel", "expert"],
        refuses: |choices| {
            let why = "routers of experts take all tokens of a sequence";
            (choices.reads_together() && choices.expert_ranks > 1)
                .then(|| alone(choices, "`expert` above 1", why))
        },
    },
    Rule {
        axes: ["context-parallel", "paths"],
        refuses: |choices| {
            let why = "each replica trains a path of its own";
            (choices.reads_together() && choices.paths > 1).then(|| alone(choices, "`paths`", why))
        },
    },
    Rule {
        axes: ["context-parallel", "own-data"],
        refuses: |choices| {
            let why = "replicas that divide sequences read the same text";
            (choices.own_data && choices.reads_together())
                .then(|| refuse("own-data", true, format!("false with `context-parallel` above 1: {why}")))
        },
    },
];

impl Choices {
    /// Returns whether replicas divide the positions of the same sequences.
    const fn reads_together(&self) -> bool {
        self.readers > 1
    }
}

fn alone(choices: &Choices, with: &str, why: &str) -> Refusal {
    refuse("context-parallel", choices.readers, format!("1 with {with}: {why}"))
}
