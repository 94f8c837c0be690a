//! Text grid of a pipeline: one column per slot of time, with the op that runs in it.

use std::fmt::Write as _;

use farflung_base::{Nanos, Rank};

use crate::pipeline::Op;
use crate::{Kind, Lane, Span, Timeline};

/// Draws which op each rank's processor runs when. Each column is one unit of time: the largest unit of which
/// all starts and ends are multiples. `None` if lines would be longer than `width` characters, or if nothing
/// runs.
///
/// A cell shows an op in its first column, `=` in its further columns, and `.` while the rank waits. An
/// overlapped pair has its forward in the first column and its backward in the next. Stage numbers are omitted
/// if each rank has a single stage, with the number of the rank.
#[must_use]
pub fn cells(timeline: &Timeline, width: usize) -> Option<String> {
    let spans = || timeline.spans.iter().filter(|s| s.lane == Lane::Compute);
    let unit = spans().fold(0, |unit, s| gcd(gcd(unit, s.start.0), s.end.0));
    let columns = usize::try_from(timeline.makespan().0.checked_div(unit)?).ok()?;
    let one_stage = spans().all(|s| s.op.is_some_and(|op| op.actions().all(|a| a.stage.0 == s.rank.0)));
    let texts = |span: &Span| texts(span, one_stage);
    let cell = spans().flat_map(texts).map(|text| text.len()).max()? + 1;
    let label = format!("r{}", timeline.ranks.saturating_sub(1)).len();
    if columns.checked_mul(cell)?.checked_add(label + 2)? > width {
        return None;
    }
    let mut out = String::new();
    for rank in (0..timeline.ranks).map(Rank) {
        let mut row = vec![".".to_owned(); columns];
        for span in timeline.lane(rank, Lane::Compute) {
            let range = (span.start.0 / unit) as usize..(span.end.0 / unit) as usize;
            let texts = texts(span).chain(std::iter::repeat("=".to_owned()));
            row[range].iter_mut().zip(texts).for_each(|(to, text)| *to = text);
        }
        let _ = write!(out, "{:<label$} |", format!("r{}", rank.0));
        for text in row {
            let _ = write!(out, "{text:<cell$}");
        }
        out.truncate(out.trim_end().len());
        out.push('\n');
    }
    let _ = write!(out, "{:label$}  {columns} columns of {}", "", Nanos(unit));
    for kind in timeline.kinds().filter(|k| !matches!(k, Kind::SendActivation | Kind::SendGradient)) {
        let _ = write!(out, "; {} {kind}", kind.letter());
    }
    out.push('\n');
    Some(out)
}

/// Returns the texts for a span's first columns.
fn texts(span: &Span, one_stage: bool) -> impl Iterator<Item = String> + use<> {
    let actions = span.op.into_iter().flat_map(|op: Op| op.actions());
    let paired = span.kind == Kind::Overlapped;
    actions.map(move |action| {
        let text = action.to_string();
        let text = if one_stage { text.trim_start_matches(|c: char| c.is_ascii_digit()) } else { &text };
        if paired { format!("{text}*") } else { text.to_owned() }
    })
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}
