//! Ranks that divide the width of layers: losses, gradients and bytes under every product of the axes, and
//! Megatron's efficiencies on the virtual clock.

use anyhow::Result;
use farflung::TrainConfig;
use farflung::base::{Bandwidth, Link, Nanos, Topology};
use farflung::config::pools::Numbers;
use farflung::parallel::pipeline::Method;
use farflung::parallel::{Axis, Recompute};
use farflung::tensor::Device;
use farflung::train::{Job, Machines, Prediction, plan_of};
use farflung::zoo::profile::{DividedSequences, ModelProfile};
use farflung::zoo::weights::{Dtype, TokenIds, config_text};
use farflung::zoo::{AxisShare, Cut, ModelSpec, Stage, gpt2};

use crate::divided::{Alone, BATCH, Divided, MICROBATCHES, small};
use crate::harness::{Bench, Options, Report, Threshold};

pub(crate) const BENCH: Bench = Bench {
    name: "tensor-parallel",
    claim: "ranks that divide the width of layers train as one process, under every product of the axes, and send \
            what the closed forms say; Megatron's efficiencies follow from one calibrated link, and the link at \
            which two ranks are as fast as one is the predicted one",
    source: "Shoeybi et al. 2019, Megatron-LM, figures 5 and 6; shared/facts/larger-than-a-machine.md 1",
    seed: 1337,
    run,
};

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    for family in ["gpt2", "llama"] {
        products(report, family, options.quick)?;
    }
    kept(report)?;
    megatron(report)?;
    break_even(report)
}

/// Compares all products of the axes with one process.
fn products(report: &mut Report<'_>, family: &str, quick: bool) -> Result<()> {
    let model = small(family)?;
    let alone = Alone::train(&model, report.seed())?;
    let mut shapes = Vec::new();
    for tensor in [1, 2, 4] {
        for (stages, replicas) in [(1, 1), (2, 1), (1, 2), (2, 2)] {
            shapes.push((tensor, stages, replicas, None));
        }
    }
    shapes.push((2, 2, 1, Some(vec![3, 1])));
    shapes.retain(|&(tensor, stages, replicas, _)| tensor.max(stages).max(replicas) > 1);
    if quick {
        shapes.retain(|&(tensor, stages, replicas, _)| (tensor, stages, replicas) == (2, 2, 2));
    }
    let both = shapes.into_iter().flat_map(|shape| {
        let divides = shape.0 > 1;
        std::iter::once((shape.clone(), false)).chain(divides.then_some((shape, true)))
    });
    for ((tensor, stages, replicas, weights), sequence_parallel) in both {
        let plan = TrainConfig {
            workers: tensor * stages * replicas,
            stages,
            tensor,
            tensor_weights: weights.clone().map(Numbers),
            sequence_parallel,
            microbatches: Some(MICROBATCHES / replicas),
            accumulate: 1,
            ..alone.base().clone()
        };
        let equal = weights.is_none();
        let shares = weights.map_or_else(String::new, |weights| format!(" as {weights:?}"));
        let sequences = if sequence_parallel { ", sequences too" } else { "" };
        let row =
            |what: &str| format!("{family}, t {tensor}{shares}{sequences}, p {stages}, d {replicas}: {what}");
        let Divided { job, ranks: all } = alone.compare(report, &row, plan)?;
        if sequence_parallel && !equal {
            // A rank sends more where others have longer pieces.
            continue;
        }
        let mut off = 0.0_f64;
        for (rank, of) in all.iter().enumerate() {
            let closed = closed_form(&job, rank as u32)?;
            off = off.max((of.sent as f64 / closed - 1.0).abs());
        }
        report.row(
            &row("bytes that ranks send, off the closed forms"),
            100.0 * off,
            "%",
            Threshold::AtMost(1.0),
        )?;
    }
    Ok(())
}

/// Returns the bytes that a rank sends in a step with a flush, without votes.
fn closed_form(job: &Job, rank: u32) -> Result<f64> {
    let (plan, model) = (&job.plan, &job.model);
    let at = plan.at(farflung::base::Rank(rank));
    let (t, p, d) = (f64::from(plan.tensor_ranks()), plan.stages(), f64::from(plan.replicas()));
    let microbatches = f64::from(plan.microbatches[at.data as usize]);
    let (first, last) = (at.pipeline == 0, at.pipeline + 1 == p);
    let tokens = (BATCH * model.context) as f64;
    let hidden = 4.0 * tokens * model.dim as f64;
    // An all-reduce of `n` bytes among `k` ranks.
    let sum = |n: f64, k: f64| 2.0 * n * (k - 1.0) / k;
    let layers = plan.parts[at.pipeline as usize].layers.len() as f64;
    let [at_first, at_last] = [first, last].map(|holds| f64::from(u8::from(holds)));
    // Halves of all-reduces of the hidden states. Without divided sequences: twice forward and twice backward
    // in each layer; the embedding, and the gradient of the head's input. Else two gathers and two scatters
    // forward; backward two of each, and two gathers of what was not kept; one of each of the embedding, and
    // three of the head.
    let halves = if plan.sequence_parallel {
        10.0 * layers + 2.0 * at_first + 3.0 * at_last
    } else {
        2.0 * (4.0 * layers + at_first + at_last)
    };
    // The largest logits, and the sums of exponentials with the targets' logits.
    let loss = 3.0 * 4.0 * tokens * at_last;
    let tensor = microbatches * (halves * sum(hidden, t) / 2.0 + sum(loss, t));
    let own = if plan.sequence_parallel { hidden / t } else { hidden };
    let pipeline = microbatches * (2.0 - at_first - at_last) * own;
    let share = AxisShare::new(at.tensor as usize, plan.shares_of_width())?;
    let part = &plan.parts[at.pipeline as usize].layers;
    let stage = Stage::new(model, part.start as usize..part.end as usize, &Device::cpu(1)?)?;
    let [mut pieces, mut whole, mut table] = [0.0; 3];
    for (index, (_, spec)) in stage.tensors().enumerate() {
        let own = 4.0 * spec.shape_of(&share).iter().product::<usize>() as f64;
        let cut = spec.cut != Cut::Whole && plan.tensor_ranks() > 1;
        *(if cut { &mut pieces } else { &mut whole }) += own;
        if index == 0 && stage.shared_table().is_some() {
            table = own;
        }
    }
    // Pieces are averaged over replicas, whole tensors over the ranks of the tensor axis, too. The two stages
    // of a tied table exchange its gradient.
    Ok(tensor + pipeline + sum(pieces, d) + sum(whole, d * t) + if p > 1 { table } else { 0.0 })
}

/// Compares what a block of GPT-2 keeps with the closed forms.
fn kept(report: &mut Report<'_>) -> Result<()> {
    let model = ModelSpec::preset("gpt2")?;
    let (h, a) = (model.dim as f64, model.blocks[0].block.attention.heads.query as f64);
    for ranks in [1, 2, 4] {
        let (t, share) = (ranks as f64, AxisShare::new(0, vec![1; ranks])?);
        for (sequences, floats) in [
            (DividedSequences::No, 4.0 * h + 4.0 + (12.0 * h + a) / t),
            (DividedSequences::ByWidth, (16.0 * h + a + 4.0) / t),
        ] {
            let profile = ModelProfile::of_pieces(&model, [&share, &AxisShare::whole()], sequences)?;
            let found = profile.blocks[0].1.saved as f64 / (4 * model.context) as f64;
            let name = if sequences == DividedSequences::ByWidth { ", sequences too" } else { "" };
            let metric = format!("GPT-2's block over {ranks}{name}: {found} floats kept a token, off by");
            report.row(&metric, (found - floats).abs(), "", Threshold::AtMost(0.0))?;
        }
    }
    Ok(())
}

/// A model of Megatron's figure 5: the ranks that divide it, its width, heads and layers.
const MEGATRON: [(u32, usize, usize, usize); 4] =
    [(1, 1536, 16, 40), (2, 1920, 20, 54), (4, 2304, 24, 64), (8, 3072, 32, 72)];

/// Predicts the efficiencies of Megatron's weak scaling. The rate of a GPU is that of its baseline; the rate of
/// the links is calibrated on eight ranks, so that those of two and four follow.
fn megatron(report: &mut Report<'_>) -> Result<()> {
    /// Operations of a second of the baseline: 39 TF.
    const RATE: f64 = 39e12;
    /// Bits a second of a ring in one direction: 69.5 GB/s for 16-bit values. Our sums have 32.
    const RING: u64 = 2 * 8 * 69_500_000_000;
    for (ranks, dim, heads, layers) in MEGATRON {
        let model = gpt2(layers, heads, dim, 1024, 51_200)?;
        let predicted = predicted(
            &model,
            (ranks, 8, Recompute::Full),
            RATE,
            Link { bandwidth: Bandwidth(RING), latency: Nanos::ZERO },
        )?;
        let efficiency = 100.0 * predicted.compute.as_secs_f64() / predicted.step().as_secs_f64();
        let (note, mark) = match ranks {
            1 => continue,
            2 => ("", 93.9),
            4 => ("", 85.7),
            _ => (", calibrated", 77.0),
        };
        let metric =
            format!("Megatron on {ranks} ranks: {efficiency:.1}% of ideal{note}, points off {mark}%");
        report.row(&metric, (efficiency - mark).abs(), "", Threshold::AtMost(1.0))?;
    }
    Ok(())
}

/// Predicts a step of a model that some ranks divide, on machines and links of these rates.
fn predicted(
    model: &ModelSpec,
    (ranks, batch, recompute): (u32, usize, Recompute),
    rate: f64,
    link: Link,
) -> Result<Prediction> {
    let config = TrainConfig {
        model: config_text(model, Dtype::F32, &TokenIds::default()),
        context: Some(model.context),
        workers: ranks as usize,
        tensor: ranks as usize,
        batch,
        recompute,
        schedule: Method::OneFOneB,
        codec: "none".parse()?,
        ..TrainConfig::default()
    };
    let plan = plan_of(config, ranks as usize)?;
    let machines =
        Machines { topology: Topology::uniform(ranks as usize, link), rates: vec![rate; ranks as usize] };
    assert_eq!(plan.mesh.along(Axis::Tensor), ranks, "the plan divides layers among all ranks");
    Ok(Prediction::new(&plan, model, &machines)?)
}

/// Compares two ranks with one at the link at which they are predicted to be as fast, of a model whose
/// embedding and head cost next to nothing.
fn break_even(report: &mut Report<'_>) -> Result<()> {
    for (dim, heads, rate) in [(768, 12, 50e9), (512, 8, 20e9)] {
        let model = gpt2(48, heads, dim, 1024, 256)?;
        let (h, s) = (dim as f64, model.context as f64);
        let bytes = 4.0 * rate / (9.0 * h * (1.0 + s / (6.0 * h)));
        let link = Link { bandwidth: Bandwidth((8.0 * bytes) as u64), latency: Nanos::ZERO };
        let time = |ranks| {
            let found = predicted(&model, (ranks, 1, Recompute::None), rate, link)?;
            Ok::<_, anyhow::Error>(found.step().as_secs_f64())
        };
        let ratio = time(2)? / time(1)?;
        let metric = format!(
            "width {dim} at {:.0} GFLOP/s, two ranks over {:.1} MB/s, off the time of one",
            rate / 1e9,
            bytes / 1e6
        );
        report.row(&metric, 100.0 * (ratio - 1.0).abs(), "%", Threshold::AtMost(2.0))?;
    }
    Ok(())
}
