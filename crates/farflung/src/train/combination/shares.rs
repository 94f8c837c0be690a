//! What cannot be combined with ranks that divide the width of layers, and with replicas that hold different
//! parameters: those that divide the experts of a mixture, and those that train different paths.

use farflung_compress::link::LinkSpec;
use farflung_optim::local::Averages;

use super::{Choices, Refusal, Rule, TensorAxis, Uneven, Work, refuse};
use crate::config::choice::SamplingKind;

pub(super) const RULES: &[Rule] = &[
    Rule {
        axes: ["tensor", "schedule"],
        refuses: |choices| {
            let why = "ranks that divide layers run each microbatch together, between two updates";
            (choices.tensor.ranks > 1).then(|| unlisted(choices, "tensor", "1", why))?
        },
    },
    Rule {
        axes: ["tensor", "optimizer"],
        refuses: |choices| {
            let optimizer = Some(choices.optimizer).filter(|_| choices.tensor.ranks > 1)?;
            let why = "it works on whole tensors, of which each rank has a piece";
            let whole =
                || refuse("tensor", choices.tensor.ranks, format!("1 with {}: {why}", optimizer.name));
            optimizer.per_tensor.then(whole).or_else(|| averaging(choices, "`tensor` above 1"))
        },
    },
    Rule {
        axes: ["expert", "sync"],
        refuses: |choices| {
            let method = Some(choices.sync).filter(|method| choices.experts() && method.name != "ddp")?;
            let why = "replicas that divide experts take each step together";
            Some(refuse("sync", method.name, format!("ddp with `expert` above 1: {why}")))
        },
    },
    Rule {
        axes: ["tensor", "sync"],
        refuses: |choices| {
            let averages = ["ddp", "diloco"].contains(&choices.sync.name);
            let method = Some(choices.sync).filter(|_| choices.tensor.ranks > 1 && !averages)?;
            let why = "what the ranks of the tensor axis do not divide must be averaged over them, too";
            Some(refuse("sync", method.name, format!("ddp or diloco with `tensor` above 1: {why}")))
        },
    },
    Rule {
        axes: ["tensor", "tensor"],
        refuses: |choices| {
            let TensorAxis { ranks, divide_sequences } = choices.tensor;
            let why = "the ranks along the tensor axis divide sequences";
            (divide_sequences && ranks < 2)
                .then(|| refuse("sequence-parallel", true, format!("false with `tensor` 1: {why}")))
        },
    },
    Rule {
        axes: ["tensor", "sync"],
        refuses: |choices| {
            let method = Some(choices.sync).filter(|_| choices.tensor.divide_sequences)?;
            let why = "the parts of gradients that ranks have are added up where gradients are averaged";
            let refused = || refuse("sync", method.name, format!("ddp with `sequence-parallel`: {why}"));
            (method.name != "ddp").then(refused)
        },
    },
    Rule {
        axes: ["tensor", "schedule"],
        refuses: |choices| {
            let divides = choices.tensor.divide_sequences;
            let order = choices.schedule.as_ref().filter(|order| divides && order.slices)?;
            let why = "it divides the positions of sequences itself";
            Some(refuse("sequence-parallel", true, format!("false with {}: {why}", order.name)))
        },
    },
    Rule {
        axes: ["tensor", "expert"],
        refuses: |choices| {
            let why = "routers of experts take all tokens of a sequence";
            (choices.tensor.divide_sequences && choices.experts())
                .then(|| refuse("sequence-parallel", true, format!("false with `expert` above 1: {why}")))
        },
    },
    Rule {
        axes: ["tensor", "paths"],
        refuses: |choices| {
            let why = "gradients of paths are not averaged";
            (choices.tensor.divide_sequences && choices.paths())
                .then(|| refuse("sequence-parallel", true, format!("false with `paths`: {why}")))
        },
    },
    Rule {
        axes: ["tensor", "own-data"],
        refuses: |choices| {
            let why = "ranks that divide layers read the same text";
            (choices.own_data && choices.tensor.ranks > 1)
                .then(|| refuse("own-data", true, format!("false with `tensor` above 1: {why}")))
        },
    },
    Rule {
        axes: ["paths", "sync"],
        refuses: |choices| {
            let method = Some(choices.sync).filter(|method| choices.paths() && method.name != "diloco")?;
            let why = "each path takes steps of its own, and modules are averaged after them";
            Some(refuse("sync", method.name, format!("diloco with `paths`: {why}")))
        },
    },
    Rule {
        axes: ["expert", "paths"],
        refuses: |choices| {
            let why = "a path has all experts of its modules";
            (choices.experts() && choices.paths())
                .then(|| refuse("expert", choices.expert_ranks, format!("1 with `paths`: {why}")))
        },
    },
    Rule {
        axes: ["expert", "schedule"],
        refuses: |choices| {
            let why = "replicas that divide experts run each microbatch together, between two updates";
            choices.experts().then(|| unlisted(choices, "expert", "1", why))?
        },
    },
    Rule {
        axes: ["paths", "schedule"],
        refuses: |choices| {
            let why = "each path is a pipeline of its own, whose parts change at the end of a step";
            let order = choices.schedule.as_ref().filter(|order| choices.paths() && order.copies);
            let copies = order.map(|order| {
                let why = "copies of a part in one pipeline are averaged within a step";
                refuse("paths", "given", format!("none with {}: {why}", order.name))
            });
            copies.or_else(|| choices.paths().then(|| unlisted(choices, "paths", "none", why))?)
        },
    },
    Rule {
        axes: ["own-data", "expert"],
        refuses: |choices| {
            let why = "texts of other lengths have other numbers of held-out sequences, which must be equal";
            (choices.own_data && choices.experts())
                .then(|| refuse("own-data", true, format!("false with `expert` above 1: {why}")))
        },
    },
    Rule {
        axes: ["own-data", "paths"],
        refuses: |choices| {
            let why = "all ranks must know which text takes which path";
            (choices.own_data && choices.paths())
                .then(|| refuse("own-data", true, format!("false with `paths`: {why}")))
        },
    },
    Rule {
        axes: ["sampling", "paths"],
        refuses: |choices| {
            let why = "paths train on parts of the text, whose windows are not numbered over the whole";
            (choices.sampling != SamplingKind::Random && choices.paths())
                .then(|| refuse("sampling", choices.sampling, format!("random with `paths`: {why}")))
        },
    },
    Rule {
        axes: ["boundary", "paths"],
        refuses: |choices| choices.paths().then(|| remembering("boundary", &choices.forward))?,
    },
    Rule {
        axes: ["boundary-backward", "paths"],
        refuses: |choices| choices.paths().then(|| remembering("boundary-backward", &choices.backward))?,
    },
    Rule {
        axes: ["document-mask", "paths"],
        refuses: |choices| {
            choices.uneven("document-mask").filter(|_| choices.paths()).map(Uneven::with_paths)
        },
    },
    Rule {
        axes: ["objective", "paths"],
        refuses: |choices| choices.uneven("objective").filter(|_| choices.paths()).map(Uneven::with_paths),
    },
    Rule {
        axes: ["codec", "expert"],
        refuses: |choices| choices.experts().then(|| accumulating(choices, "`expert` above 1", "experts"))?,
    },
    Rule {
        axes: ["codec", "paths"],
        refuses: |choices| choices.paths().then(|| accumulating(choices, "`paths`", "modules"))?,
    },
    Rule {
        axes: ["expert", "optimizer"],
        refuses: |choices| choices.experts().then(|| averaging(choices, "`expert` above 1"))?,
    },
    Rule {
        axes: ["paths", "optimizer"],
        refuses: |choices| choices.paths().then(|| averaging(choices, "`paths`"))?,
    },
];

impl Choices {
    const fn experts(&self) -> bool {
        self.expert_ranks > 1
    }

    const fn paths(&self) -> bool {
        self.paths > 1
    }
}

/// Rejects schedules whose order of work is not a list, or that change parameters within a step.
pub(super) fn unlisted(choices: &Choices, field: &'static str, allowed: &str, why: &str) -> Option<Refusal> {
    let order = choices.schedule.as_ref()?;
    let expected = format!("{allowed} with {}: {why}", order.name);
    (order.work != Work::Listed || !order.flushes).then(|| refuse(field, "given", expected))
}

/// Rejects codecs that store samples.
fn remembering(field: &'static str, specs: &[LinkSpec]) -> Option<Refusal> {
    let spec = specs.iter().find(|spec| spec.remembers())?;
    let why = "the windows of a path's text are drawn at random, and never come again";
    Some(refuse(field, spec, format!("a codec without memory with `paths`: {why}")))
}

/// Rejects codecs that take a part of the momentum.
fn accumulating(choices: &Choices, with: &str, what: &str) -> Option<Refusal> {
    let level = choices.levels.iter().find(|level| {
        level.codec.codec().is_some_and(|codec| {
            codec.momentum().is_some() || codec.feedback_share().is_some_and(|share| share < 1.0)
        })
    })?;
    let why = format!("{what} that one replica alone has go through no codec");
    let expected = format!("a codec that takes no part of the momentum with {with}: {why}");
    Some(refuse("codec", level.codec, expected))
}

/// Rejects optimizers that average more than gradients.
pub(super) fn averaging(choices: &Choices, with: &str) -> Option<Refusal> {
    let optimizer = choices.optimizer;
    let why =
        "only gradients, or changes of parameters, are averaged over the replicas that hold the same ones";
    let expected = format!("one that averages gradients with {with}, such as adamw: {why}");
    (optimizer.averages != Averages::Gradients).then(|| refuse("optimizer", optimizer.name, expected))
}
