//! Replicas that divide the positions of sequences: losses, gradients and bytes under every order and product,
//! and the work of each rank of a ring.

use anyhow::Result;
use farflung::TrainConfig;
use farflung::base::{Axis, ContextCut, ContextOrder, Rank};
use farflung::tensor::Device;
use farflung::train::Job;
use farflung::zoo::profile::{DividedSequences, ModelProfile};
use farflung::zoo::{AxisShare, ModelSpec, Stage};

use crate::divided::{Alone, BATCH, Divided, MICROBATCHES, small};
use crate::harness::{Bench, Options, Report, Threshold};

pub(crate) const BENCH: Bench = Bench {
    name: "context-parallel",
    claim: "replicas that divide the positions of sequences train as one process, along a ring in any order, with \
            positions exchanged for heads, and with both; they send what the closed forms say, and a ring in zigzag \
            order has the least work that a step of the ring can have",
    source: "Liu et al. 2023, Ring Attention; Brandon et al. 2023, Striped Attention; Jacobs et al. 2023, DeepSpeed \
             Ulysses; shared/facts/larger-than-a-machine.md 2",
    seed: 1337,
    run,
};

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    for family in ["gpt2", "llama"] {
        products(report, family, options.quick)?;
    }
    work(report)?;
    kept_and_sent(report)
}

fn cut(ring: u32, ulysses: u32, order: ContextOrder) -> ContextCut {
    ContextCut { ring, ulysses, order }
}

/// Compares rings, exchanges of heads and both, in pipelines and beside other replicas, with one process.
fn products(report: &mut Report<'_>, family: &str, quick: bool) -> Result<()> {
    let model = small(family)?;
    let alone = Alone::train(&model, report.seed())?;
    let mut cuts = Vec::new();
    for order in ContextOrder::ALL {
        cuts.extend([cut(2, 1, order), cut(4, 1, order), cut(2, 2, order)]);
    }
    cuts.extend([cut(1, 2, ContextOrder::Zigzag), cut(1, 4, ContextOrder::Zigzag)]);
    let heads = model.blocks[0].block.attention.heads.kv;
    cuts.retain(|cut| heads.is_multiple_of(cut.ulysses as usize));
    let mut products = vec![(1, 1), (2, 1), (1, 2), (2, 2)];
    if quick {
        products.retain(|&(stages, _)| stages == 2);
        cuts.retain(|cut| cut.ring == 2 && cut.order == ContextOrder::Zigzag);
    }
    for cut in cuts {
        for &(stages, groups) in &products {
            let readers = cut.readers() as usize;
            let plan = TrainConfig {
                workers: readers * stages * groups,
                stages,
                context_parallel: readers,
                ulysses: cut.ulysses as usize,
                context_order: cut.order,
                microbatches: Some(MICROBATCHES / groups),
                accumulate: 1,
                ..alone.base().clone()
            };
            let ContextCut { ring, ulysses, order } = cut;
            let row = |what: &str| {
                format!("{family}, ring {ring} ({order}) x heads {ulysses}, p {stages}, d {groups}: {what}")
            };
            let Divided { job, ranks } = alone.compare(report, &row, plan)?;
            let mut off = 0.0_f64;
            for (rank, of) in ranks.iter().enumerate() {
                off = off.max((of.sent as f64 / closed_form(&job, rank as u32)? - 1.0).abs());
            }
            let metric = row("bytes that ranks send, off the closed forms");
            report.row(&metric, 100.0 * off, "%", Threshold::AtMost(1.0))?;
        }
    }
    Ok(())
}

/// Returns the values that a rank sends in a layer for `b` sequences, along the ring and for heads.
fn within_a_layer(model: &ModelSpec, cut: ContextCut, b: f64) -> [f64; 2] {
    let attention = model.blocks[0].block.attention;
    let [queries, keys] =
        [attention.heads.query, attention.heads.kv].map(|heads| (heads * attention.head_dim) as f64);
    let (r, u) = (f64::from(cut.ring), f64::from(cut.ulysses));
    let positions = b * model.context as f64 / (r * u);
    // Keys and values take r - 1 hops forward and r - 1 backward, and their gradients r hops.
    let hops = if cut.ring > 1 { 3.0 * r - 2.0 } else { 0.0 };
    let ring = hops * 2.0 * positions * keys;
    let heads = 2.0 * (2.0 * queries + 2.0 * keys) * positions * (u - 1.0) / u;
    [ring, heads]
}

/// Returns the bytes that a rank sends in a step with a flush, without votes.
fn closed_form(job: &Job, rank: u32) -> Result<f64> {
    let (plan, model) = (&job.plan, &job.model);
    let at = plan.at(Rank(rank));
    let (p, d) = (plan.stages(), f64::from(plan.replicas()));
    let microbatches = f64::from(plan.microbatches[at.data as usize]);
    let ends = [at.pipeline == 0, at.pipeline + 1 == p].map(|end| f64::from(u8::from(end)));
    let own = (BATCH * model.context * model.dim) as f64 / f64::from(plan.context.readers());
    let part = &plan.parts[at.pipeline as usize].layers;
    let layers = part.len() as f64 * within_a_layer(model, plan.context, BATCH as f64).iter().sum::<f64>();
    let pipeline = (2.0 - ends[0] - ends[1]) * own;
    let stage = Stage::new(model, part.start as usize..part.end as usize, &Device::cpu(1)?)?;
    // Gradients are averaged over all replicas. The two stages of a tied table exchange its gradient.
    let averaged = 2.0 * stage.layout().count() as f64 * (d - 1.0) / d;
    let table = stage.shared_table_bytes() as f64;
    Ok(4.0 * (microbatches * (layers + pipeline) + averaged) + table)
}

/// Compares the pairs of query and key of a ring's ranks with the facts.
fn work(report: &mut Report<'_>) -> Result<()> {
    for (order, pairs) in
        [(ContextOrder::Contiguous, 58), (ContextOrder::Zigzag, 34), (ContextOrder::Striped, 40)]
    {
        let found = cut(4, 1, order).slowest_pairs(16);
        let metric =
            format!("16 tokens on a ring of 4, {order}: {found} pairs of the slowest ranks, off {pairs}");
        report.row(&metric, found.abs_diff(pairs) as f64, "pairs", Threshold::AtMost(0.0))?;
    }
    for (ring, len) in [(2, 16), (4, 64), (8, 512), (16, 4096)] {
        let least = (len * (len + 1)) as u64 / u64::from(2 * ring);
        let zigzag = cut(ring, 1, ContextOrder::Zigzag).slowest_pairs(len);
        let metric =
            format!("{len} tokens on a ring of {ring}: zigzag's pairs, off S (S + 1) / 2c = {least}");
        report.row(&metric, zigzag.abs_diff(least) as f64, "pairs", Threshold::AtMost(0.0))?;
        let ratio = cut(ring, 1, ContextOrder::Contiguous).slowest_pairs(len) as f64 / least as f64;
        let (c, s) = (f64::from(ring), len as f64);
        // c steps of the last ranks: a triangle, and c - 1 squares.
        let exact = (s / c * (s / c + 1.0) / 2.0 + (c - 1.0) * (s / c).powi(2)) / least as f64;
        let metric = format!(
            "{len} tokens on a ring of {ring}: contiguous takes {ratio:.3} times as long (2 - 1 / c = {:.3}), off the \
             closed form by",
            2.0 - 1.0 / c
        );
        report.row(&metric, (ratio - exact).abs(), "", Threshold::AtMost(1e-9))?;
    }
    Ok(())
}

/// Compares what GPT-2's block keeps and sends with the closed forms, to the value.
fn kept_and_sent(report: &mut Report<'_>) -> Result<()> {
    for name in ["gpt2", "llama-nano"] {
        let model = ModelSpec::preset(name)?;
        for cut in [
            cut(2, 1, ContextOrder::Zigzag),
            cut(8, 1, ContextOrder::Striped),
            cut(1, 2, ContextOrder::Zigzag),
            cut(4, 2, ContextOrder::Contiguous),
        ] {
            let whole = AxisShare::whole();
            let of = |sequences| ModelProfile::of_pieces(&model, [&whole; 2], sequences);
            let (alone, divided) = (of(DividedSequences::No)?, of(DividedSequences::ByContext(cut, 0))?);
            let layers = model.layers() as f64;
            let [ring, heads] = within_a_layer(&model, cut, 1.0);
            let ContextCut { ring: r, ulysses: u, order } = cut;
            for (axis, closed) in [(Axis::Context, ring), (Axis::Ulysses, heads)] {
                let off = (divided.sent_along(axis) as f64 - 4.0 * layers * closed).abs();
                let metric = format!("{name}, ring {r} x heads {u}: bytes along {axis}, off the closed form");
                report.row(&metric, off, "bytes", Threshold::AtMost(0.0))?;
            }
            let attention = model.blocks[0].block.attention;
            // The output of attention is kept by positions and by heads, if these are exchanged.
            let twice = if u > 1 { attention.heads.query * attention.head_dim * 4 } else { 0 };
            let want = (alone.blocks[0].1.saved as f64 + (twice * model.context) as f64) / f64::from(r * u);
            let off = (divided.blocks[0].1.saved as f64 - want).abs();
            let metric =
                format!("{name}, ring {r} ({order}) x heads {u}: kept bytes of a block, off 1 / {}", r * u);
            report.row(&metric, off, "bytes", Threshold::AtMost(0.0))?;
        }
    }
    Ok(())
}
