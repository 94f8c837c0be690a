//! Checks the laws of all pipeline schedules at many sizes.

use anyhow::{Result, bail};
use farflung::base::{Nanos, Philox, Rank};
use farflung::parallel::ParallelError;
use farflung::parallel::pipeline::{
    Boundary, ComputeOrder, Lowering, Method, PipelineCost, Schedule, Settings, StageCost, lower_bound,
    peaks, simulate,
};

use crate::harness::{Bench, Options, Report, Threshold};

pub(crate) const BENCH: Bench = Bench {
    name: "schedule-laws",
    claim: "at every size, a schedule runs each microbatch once on each stage in an order without deadlock, \
            pairs its messages, stays within its stated memory, can be printed and read back, and has the \
            bubble of its closed form; sizes that a method does not support are rejected with the reason",
    source: "ours",
    seed: 4,
    run,
};

#[derive(Default)]
struct Count {
    orders: u32,
    refused: u32,
    over_peak: u32,
    not_read_back: u32,
    below_bound: u32,
    off_closed_form: u32,
}

/// Random numbers, drawn one after the other.
struct Draw {
    philox: Philox,
    at: u64,
}

impl Draw {
    fn below(&mut self, n: u32) -> u32 {
        self.at += 1;
        self.philox.word(self.at) % n
    }
}

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let rounds = if options.quick { 20 } else { 150 };
    let mut draw = Draw { philox: Philox::new(report.seed(), 0), at: 0 };
    let mut count = Count::default();
    for _ in 0..rounds {
        for method in Method::ALL {
            one(method, &mut draw, &mut count)?;
        }
    }
    let rows = [
        ("orders that were made", count.orders, Threshold::AtLeast(f64::from(rounds * 10))),
        ("sizes rejected with the reason", count.refused, Threshold::None),
        ("orders over the stated memory", count.over_peak, Threshold::AtMost(0.0)),
        ("orders not read back as printed", count.not_read_back, Threshold::AtMost(0.0)),
        ("orders faster than the lower bound", count.below_bound, Threshold::AtMost(0.0)),
        (
            "orders with a bubble different from the closed form",
            count.off_closed_form,
            Threshold::AtMost(0.0),
        ),
    ];
    for (metric, value, mark) in rows {
        report.row(metric, f64::from(value), "orders", mark)?;
    }
    Ok(())
}

/// Tests one method at a random size with random costs. [`ComputeOrder`] and [`Schedule`] check when they are
/// made that the order is complete and ends, and that its messages pair. A violation is an error here.
fn one(method: Method, draw: &mut Draw, count: &mut Count) -> Result<()> {
    let p = 1 + draw.below(12);
    let m = if draw.below(2) == 0 { p * (1 + draw.below(4)) } else { 1 + draw.below(40) };
    let several = matches!(method, Method::Interleaved | Method::BreadthFirst | Method::Hanayo);
    let mut time = || Nanos(u64::from(1 + draw.below(20)));
    let stage = StageCost { forward: time(), input: time(), weight: time(), ..StageCost::UNIT };
    let settings = Settings {
        chunks: several.then(|| 2 * (1 + draw.below(2))),
        slices: 1 + draw.below(3) as u16,
        cost: vec![stage],
        hop: Nanos(u64::from(draw.below(40))),
        ..Settings::new(p, m)
    };
    let order = match method.order(&settings) {
        Ok(order) => order,
        Err(ParallelError::NotAdmitted { .. }) => {
            count.refused += 1;
            return Ok(());
        }
        Err(other) => bail!("{method} {p}x{m}: {other}"),
    };
    count.orders += 1;
    let within = |(rank, &held): (u32, &u32)| u64::from(held) <= method.peak_bound(&settings, rank);
    count.over_peak += u32::from(!(0..).zip(&peaks(&order)).all(within));
    let read = order.to_string().parse::<ComputeOrder>()?.with_updates(order.updates());
    count.not_read_back += u32::from(read != order);

    let cost = PipelineCost::uniform(&order, stage, Boundary::latency(settings.hop));
    count.below_bound += u32::from(simulate(&order, &cost)?.makespan() < lower_bound(&order, &cost));
    let free = PipelineCost::uniform(&order, stage, Boundary::latency(Nanos::ZERO));
    if let Some(closed) =
        closed_form(method, p, m, stage).filter(|_| settings.slices == 1 || method != Method::TeraPipe)
    {
        let bubble = simulate(&order, &free)?.bubble(Rank(0));
        count.off_closed_form += u32::from(bubble != closed);
    }
    Schedule::new(order, &Lowering { replicas: true, tied: true, ..Lowering::default() })?;
    Ok(())
}

/// Returns the bubble of the first rank over free links, if the literature has a formula.
fn closed_form(method: Method, p: u32, m: u32, stage: StageCost) -> Option<Nanos> {
    let gap = u64::from(p - 1);
    match method {
        // With fewer microbatches than ranks, the second chunk waits for the first.
        Method::BreadthFirst if m < p => None,
        Method::GPipe
        | Method::OneFOneB
        | Method::PipeDream
        | Method::PipeDream2Bw
        | Method::Interleaved
        | Method::TeraPipe
        | Method::BreadthFirst => Some((stage.forward + stage.backward()) * gap),
        Method::Inference => Some(stage.forward * gap),
        _ => None,
    }
}
