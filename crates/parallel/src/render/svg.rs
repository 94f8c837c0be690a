//! SVG of a timeline: a bar per span, coloured by kind, with a legend and an axis.

use std::fmt::Write as _;

use farflung_base::{Nanos, Rank};

use crate::{Kind, Span, Timeline};

const LEFT: u32 = 56;
const TOP: u32 = 40;
const LANE: u32 = 18;
const GAP: u32 = 10;
const WIDTH: u32 = 960;
const RIGHT: u32 = 24;

/// Okabe and Ito's palette, which colour-blind readers can distinguish, and a grey.
const fn colour(kind: Kind) -> &'static str {
    match kind {
        Kind::Forward => "#56b4e9",
        Kind::Backward | Kind::BackwardInput => "#009e73",
        Kind::BackwardWeight | Kind::OuterStep => "#cc79a7",
        Kind::Overlapped => "#0072b2",
        Kind::Recompute => "#999999",
        Kind::Optimizer => "#f0e442",
        Kind::AllReduce | Kind::SendActivation => "#e69f00",
        Kind::OuterSync | Kind::SendGradient => "#d55e00",
    }
}

/// Draws a timeline as a standalone SVG, 960 units wide. A tooltip describes each bar.
///
/// Each rank has a row for its processor and a row for each of its links that is used. In pipelines, bars that
/// are wide enough show their op. Times on the axis are in milliseconds.
#[must_use]
pub fn svg(timeline: &Timeline) -> String {
    let lanes = timeline.lanes();
    let band = lanes.iter().map(Vec::len).max().unwrap_or(1) as u32 * LANE;
    let rows = timeline.ranks * (band + GAP);
    let height = TOP + rows + 44;
    let makespan = timeline.makespan().0.max(1);
    let x = |t: Nanos| f64::from(LEFT) + f64::from(WIDTH - LEFT - RIGHT) * t.0 as f64 / makespan as f64;
    let top = |rank: Rank| TOP + rank.0 * (band + GAP);
    let row = |span: &Span| {
        let lane = lanes[span.rank.index()].iter().position(|&l| l == span.lane).unwrap_or_default();
        top(span.rank) + lane as u32 * LANE
    };
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" \
         height=\"{height}\" font-family=\"sans-serif\" font-size=\"11\">\n\
         <rect width=\"{WIDTH}\" height=\"{height}\" fill=\"#ffffff\"/>\n"
    );
    legend(&mut out, timeline);
    axis(&mut out, makespan, TOP + rows, &x);
    for rank in (0..timeline.ranks).map(Rank) {
        let y = top(rank);
        let _ = writeln!(
            out,
            "<text x=\"{}\" y=\"{}\" text-anchor=\"end\">rank {}</text>\n\
             <rect x=\"{LEFT}\" y=\"{y}\" width=\"{}\" height=\"{}\" fill=\"#f2f2f2\"/>",
            LEFT - 6,
            y + band / 2 + 4,
            rank.0,
            WIDTH - LEFT - RIGHT,
            band
        );
    }
    for span in &timeline.spans {
        let (from, to) = (x(span.start), x(span.end));
        let _ = writeln!(
            out,
            "<rect x=\"{from:.2}\" y=\"{}\" width=\"{:.2}\" height=\"{}\" fill=\"{}\" stroke=\"#ffffff\" \
             stroke-width=\"0.5\"><title>{}</title></rect>",
            row(span),
            to - from,
            LANE,
            colour(span.kind),
            title(span)
        );
        let text = span.op.map(|op| op.to_string()).unwrap_or_default();
        if !text.is_empty() && to - from >= 6.0 * text.len() as f64 {
            let (middle, base) = (f64::midpoint(from, to), row(span) + LANE - 5);
            let _ = writeln!(
                out,
                "<text x=\"{middle:.2}\" y=\"{base}\" text-anchor=\"middle\" font-size=\"9\" \
                 pointer-events=\"none\">{text}</text>"
            );
        }
    }
    out.push_str("</svg>\n");
    out
}

fn title(span: &Span) -> String {
    let (kind, step, part) = (span.kind, span.step, span.part);
    if let Some(op) = span.op {
        let sent = if span.sent.0 > 0 { format!(", {} sent", span.sent) } else { String::new() };
        return format!("{op}: {kind}{sent}, {} from {}", span.time(), span.start);
    }
    let what = match kind {
        Kind::Forward | Kind::Backward => format!("{kind} of microbatch {part}"),
        Kind::AllReduce if span.sent.0 == 0 => format!("{kind} of stage {part}"),
        Kind::AllReduce => format!("{kind} of bucket {part}, {} sent", span.sent),
        Kind::OuterSync => format!("{kind}, {} sent", span.sent),
        _ => kind.to_string(),
    };
    format!("step {step}: {what}, {} from {}", span.time(), span.start)
}

fn legend(out: &mut String, timeline: &Timeline) {
    let mut x = LEFT;
    for kind in timeline.kinds() {
        let _ = writeln!(
            out,
            "<rect x=\"{x}\" y=\"12\" width=\"12\" height=\"12\" fill=\"{}\"/>\n\
             <text x=\"{}\" y=\"22\">{kind}</text>",
            colour(kind),
            x + 16
        );
        x += 110;
    }
}

fn axis(out: &mut String, makespan: u64, bottom: u32, x: &dyn Fn(Nanos) -> f64) {
    let step = tick(makespan);
    // Number of decimals with which the times of two neighbouring ticks, in milliseconds, are printed
    // differently.
    let decimals = 6_usize.saturating_sub(step.ilog10() as usize);
    for time in (0..=makespan / step).map(|i| Nanos(i * step)) {
        let at = x(time);
        let _ = writeln!(
            out,
            "<line x1=\"{at:.2}\" y1=\"{TOP}\" x2=\"{at:.2}\" y2=\"{}\" stroke=\"#cccccc\"/>\n\
             <text x=\"{at:.2}\" y=\"{}\" text-anchor=\"middle\">{:.decimals$}</text>",
            bottom + 4,
            bottom + 18,
            time.0 as f64 / 1e6
        );
    }
    let middle = f64::midpoint(f64::from(LEFT), f64::from(WIDTH - RIGHT));
    let _ = writeln!(out, "<text x=\"{middle:.2}\" y=\"{}\" text-anchor=\"middle\">ms</text>", bottom + 34);
}

/// Returns the time between two ticks: the smallest of 1, 2 and 5 times a power of ten that gives at most ten
/// intervals.
fn tick(makespan: u64) -> u64 {
    let powers = (0..20).map(|e| 10_u64.saturating_pow(e));
    let mut ticks = powers.flat_map(|p| [p, p.saturating_mul(2), p.saturating_mul(5)]);
    ticks.find(|&t| makespan / t <= 10).unwrap_or(u64::MAX)
}
