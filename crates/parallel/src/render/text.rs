//! Text grid of a timeline: a line per rank and link, a column per slice of time.

use std::fmt::Write as _;

use farflung_base::{Nanos, Rank};

use crate::{Kind, Lane, Timeline};

/// Draws a timeline at most `width` columns wide (at least 24): a line for each rank's processor, and one for
/// each of its links that is used.
///
/// A cell shows the letter of the kind that filled most of its time ([`Kind::letter`]), or `.` if the lane was
/// busy for less than half of it. An axis and a legend follow.
#[must_use]
pub fn grid(timeline: &Timeline, width: usize) -> String {
    let label = format!("r{}", timeline.ranks.saturating_sub(1)).len();
    let cells = width.max(24) - label - 3;
    let (makespan, lanes) = (timeline.makespan(), timeline.lanes());
    let mut out = String::new();
    let rule = |out: &mut String, text: &str| {
        let _ = writeln!(out, "{:label$} |{text}|", "");
    };
    for rank in (0..timeline.ranks).map(Rank) {
        let _ = writeln!(
            out,
            "{:<label$} |{}|",
            format!("r{}", rank.0),
            row(timeline, rank, Lane::Compute, cells)
        );
        for &lane in &lanes[rank.index()][1..] {
            if timeline.lane(rank, lane).next().is_some() {
                rule(&mut out, &row(timeline, rank, lane, cells));
            }
        }
    }
    let end = makespan.to_string();
    rule(&mut out, &format!("0{end:>pad$}", pad = cells - 1));
    let _ = write!(out, "{:label$}  one column is {}", "", Nanos(makespan.0.div_ceil(cells as u64)));
    for kind in timeline.kinds() {
        let _ = write!(out, "; {} {kind}", kind.letter());
    }
    out.push('\n');
    out
}

/// Returns the cells of one lane. Cell i covers the time from i/cells to (i+1)/cells of the makespan.
fn row(timeline: &Timeline, rank: Rank, lane: Lane, cells: usize) -> String {
    let makespan = u128::from(timeline.makespan().0.max(1));
    // Times are in units of 1/cells of a nanosecond, so that the borders of cells are integers.
    let scale = cells as u128;
    let mut filled = vec![[0_u128; Kind::ALL.len()]; cells];
    for span in timeline.lane(rank, lane) {
        let (start, end) = (u128::from(span.start.0) * scale, u128::from(span.end.0) * scale);
        let kind = Kind::ALL.iter().position(|&k| k == span.kind).expect("ALL has every kind");
        let last = (end.div_ceil(makespan) as usize).min(cells);
        for (i, cell) in filled.iter_mut().enumerate().take(last).skip((start / makespan) as usize) {
            let from = i as u128 * makespan;
            cell[kind] += end.min(from + makespan).saturating_sub(start.max(from));
        }
    }
    let letter = |cell: [u128; Kind::ALL.len()]| {
        let busy: u128 = cell.iter().sum();
        let most = (0..cell.len()).max_by_key(|&k| (cell[k], std::cmp::Reverse(k))).unwrap_or_default();
        if busy * 2 < makespan { '.' } else { Kind::ALL[most].letter() }
    };
    filled.into_iter().map(letter).collect()
}
