//! Compares the pipeline schedules, list by list and figure by figure, with published or independently computed
//! ones.

use anyhow::Result;
use farflung::base::{Nanos, Rank};
use farflung::parallel::pipeline::{
    Boundary, ComputeOrder, Method, PipelineCost, Settings, Simulation, StageCost, peaks, simulate,
    slice_tokens,
};

use crate::harness::{Bench, Options, Report, Threshold};

pub(crate) const BENCH: Bench = Bench {
    name: "schedule-vectors",
    claim: "every schedule equals the published list and has the published makespans, bubbles and peaks, and \
            TeraPipe's slices are optimal",
    source: "the papers named at each method in farflung-parallel; lists of PyTorch, zbpp and DualPipe's \
             repositories",
    seed: 0,
    run,
};

macro_rules! vector {
    ($name:literal) => {
        include_str!(concat!("../../../crates/parallel/tests/vectors/", $name))
    };
}

/// Published lists for 4 ranks: the method, the number of microbatches, and the list.
const LISTS: [(Method, u32, &str); 11] = [
    (Method::OneFOneB, 8, vector!("1f1b.txt")),
    (Method::Interleaved, 8, vector!("interleaved.txt")),
    (Method::ZbH1, 8, vector!("zb-h1.txt")),
    (Method::ZbH2, 8, vector!("zb-h2.txt")),
    (Method::ZbV, 8, vector!("zbv.txt")),
    (Method::VHalf, 8, vector!("v-half.txt")),
    (Method::VMin, 8, vector!("v-min.txt")),
    (Method::Chimera, 4, vector!("chimera.txt")),
    (Method::Hanayo, 4, vector!("hanayo.txt")),
    (Method::DualPipe, 8, vector!("dualpipe.txt")),
    (Method::DualPipeV, 8, vector!("dualpipev.txt")),
];

/// Published figures for 4 ranks and 8 microbatches, with all chunk operations taking one unit: makespan, span
/// bubbles and peaks.
const FIGURES: [(Method, u64, [u64; 4], [u32; 4]); 11] = [
    (Method::GPipe, 33, [9, 6, 3, 0], [8; 4]),
    (Method::OneFOneB, 33, [9, 6, 3, 0], [4, 3, 2, 1]),
    (Method::ZbH1, 27, [3, 2, 1, 0], [4; 4]),
    (Method::ZbH2, 27, [0; 4], [7; 4]),
    (Method::Interleaved, 57, [9, 6, 3, 0], [11, 9, 7, 5]),
    (Method::BreadthFirst, 57, [9, 6, 3, 0], [16; 4]),
    (Method::ZbV, 51, [0; 4], [8; 4]),
    (Method::VHalf, 53, [5, 3, 3, 2], [6; 4]),
    (Method::VMin, 59, [11, 9, 7, 6], [4; 4]),
    (Method::DualPipeV, 54, [6, 5, 4, 3], [9; 4]),
    (Method::DualPipe, 26, [2, 1, 1, 2], [5; 4]),
];

const UNIT: u64 = 1_000_000;

fn units(time: Nanos) -> f64 {
    time.0 as f64 / UNIT as f64
}

fn with<T>(order: &ComputeOrder, cost: StageCost, of: impl Fn(&Simulation<'_>) -> T) -> Result<T> {
    let cost = PipelineCost::uniform(order, cost, Boundary::latency(Nanos::ZERO));
    Ok(of(&simulate(order, &cost)?))
}

fn run(report: &mut Report<'_>, _: &Options) -> Result<()> {
    let mut wrong = 0;
    for (method, m, list) in LISTS {
        wrong += u32::from(method.order(&Settings::new(4, m))?.to_string() != list);
    }
    report.row("lists that differ, of 11", f64::from(wrong), "lists", Threshold::AtMost(0.0))?;
    let csv = vector!("dualpipev_4rank_10mb.csv");
    let ours = Method::DualPipeV.order(&Settings::new(4, 10))?;
    let differs = ours.to_csv() != csv || ComputeOrder::from_csv(csv)? != ours;
    report.row(
        "PyTorch's CSV file of DualPipeV differs",
        f64::from(u8::from(differs)),
        "",
        Threshold::AtMost(0.0),
    )?;

    for (method, makespan, bubbles, held) in FIGURES {
        let order = method.order(&Settings::new(4, 8))?;
        let (time, found) = with(&order, StageCost::UNIT, |s| {
            let bubbles: Vec<f64> = (0..4).map(|r| units(s.span_bubble(Rank(r)))).collect();
            (units(s.makespan()), bubbles)
        })?;
        let peaks = peaks(&order);
        let off = (time - makespan as f64).abs()
            + found.iter().zip(bubbles).map(|(a, b)| (a - b as f64).abs()).sum::<f64>()
            + peaks.iter().zip(held).map(|(&a, b)| f64::from(a.abs_diff(b))).sum::<f64>();
        report.row(
            &format!("{method} 4x8: difference of makespan, bubbles and peaks"),
            off,
            "",
            Threshold::AtMost(0.0),
        )?;
    }
    gpipe_7_by_12(report)?;
    chimera_and_hanayo(report)?;
    closed_forms(report)?;
    tera_pipe(report)
}

/// Checks the example that most papers draw: forwards end with step 18, and the last microbatch's backward
/// begins at step 19.
fn gpipe_7_by_12(report: &mut Report<'_>) -> Result<()> {
    let order = Method::GPipe.order(&Settings::new(7, 12))?;
    let cost = StageCost { weight: Nanos::ZERO, ..StageCost::UNIT };
    let (forwards, turn, makespan, bubble) = with(&order, cost, |s| {
        let last = s.slots(Rank(6));
        let fraction = units(s.bubble(Rank(0))) / units(s.makespan());
        (units(last[11].end), units(last[12].start) + 1.0, units(s.makespan()), fraction)
    })?;
    for (metric, found, expected) in [
        ("gpipe 7x12: end of the forwards, difference", forwards, 18.0),
        ("gpipe 7x12: step of the first backward, difference", turn, 19.0),
        ("gpipe 7x12: makespan, difference", makespan, 36.0),
        ("gpipe 7x12: bubble, difference", bubble, 1.0 / 3.0),
    ] {
        report.row(metric, (found - expected).abs(), "", Threshold::AtMost(1e-12))?;
    }
    Ok(())
}

#[expect(clippy::redundant_closure_for_method_calls, reason = "a path to the method has only one lifetime")]
fn chimera_and_hanayo(report: &mut Report<'_>) -> Result<()> {
    let halves = StageCost { input: Nanos(UNIT / 2), weight: Nanos(UNIT / 2), ..StageCost::UNIT };
    for (p, m, slots) in [(4, 4, 10.0), (4, 8, 18.0), (8, 8, 22.0)] {
        let order = Method::Chimera.order(&Settings::new(p, m))?;
        let off = (with(&order, halves, |s| units(s.makespan()))? - slots).abs();
        report.row(&format!("chimera {p}x{m}: slots, difference"), off, "", Threshold::AtMost(0.0))?;
    }
    for (waves, ratio) in [(1, 0.368), (2, 0.238), (4, 0.135)] {
        let settings = Settings { chunks: Some(2 * waves), ..Settings::new(8, 8) };
        let order = Method::Hanayo.order(&settings)?;
        let off = (with(&order, StageCost::UNIT, |s| s.bubble_fraction())? - ratio).abs();
        report.row(
            &format!("hanayo 8x8, {waves} waves: bubble, difference"),
            off,
            "",
            Threshold::AtMost(5e-4),
        )?;
    }
    Ok(())
}

/// Compares the bubbles within a rank's span with closed forms, for unequal F, I and W.
fn closed_forms(report: &mut Report<'_>) -> Result<()> {
    let (p, m) = (4_u32, 16);
    let mut off: f64 = 0.0;
    for (f, i, w) in [(10, 12, 8), (10, 13, 7), (10, 10, 10)] {
        let stage = StageCost { forward: Nanos(f), input: Nanos(i), weight: Nanos(w), ..StageCost::UNIT };
        for (method, expected) in [
            (Method::OneFOneB, 3 * (f + i + w)),
            (Method::ZbH1, 3 * (f + i - w)),
            (Method::ZbH2, 3 * (f + i - 2 * w)),
        ] {
            let order = method.order(&Settings::new(p, m))?;
            let most = with(&order, stage, |s| (0..p).map(|r| s.span_bubble(Rank(r)).0).max())?;
            off += (most.unwrap_or_default() as f64 - expected as f64).abs();
        }
    }
    report.row(
        "1f1b, zb-h1, zb-h2 at unequal F, I, W: difference from the closed forms",
        off,
        "",
        Threshold::AtMost(0.0),
    )?;
    let order = Method::DualPipe.order(&Settings::new(8, 20))?;
    let most = with(&order, StageCost::UNIT, |s| (0..8).map(|r| s.span_bubble(Rank(r)).0).max())?;
    let off = (units(Nanos(most.unwrap_or_default())) - 6.0).abs();
    report.row(
        "dualpipe 8x20: span bubble, difference from (p/2-1)(F&B+B-3W)",
        off,
        "",
        Threshold::AtMost(0.0),
    )
}

fn tera_pipe(report: &mut Report<'_>) -> Result<()> {
    // The time of a slice of l tokens after c others is 1 + 0.01 l + 0.00002 l c units, here in millionths.
    let time = |l: u64, c: u64| Nanos(UNIT + 10_000 * l + 20 * l * c);
    let slices = |first: &[u64], count: usize| [first, &vec![128; count]].concat();
    for (tokens, stages, lengths, total) in [
        (2048, 8, slices(&[640, 256], 9), 118.997_12),
        (1024, 4, slices(&[384], 5), 38.952),
        (2048, 48, slices(&[512, 256], 10), 407.682_24),
    ] {
        let found = slice_tokens(tokens, 128, stages, Nanos::ZERO, time)?;
        let name = format!("terapipe, {tokens} tokens on {stages} stages");
        let differs = f64::from(u8::from(found.lengths != lengths));
        report.row(&format!("{name}: slices differ"), differs, "", Threshold::AtMost(0.0))?;
        let off = (units(found.total) - total).abs();
        report.row(&format!("{name}: total, difference"), off, "", Threshold::AtMost(1e-9))?;
    }
    Ok(())
}
