//! Trace of a timeline in the Chrome trace-event format (JSON), for Perfetto and Chrome's tracing page.

use std::fmt::Write as _;

use farflung_base::Rank;

use crate::{Kind, Timeline};

/// Writes a timeline as a JSON object of complete (`X`) events. `pid` is the rank; `tid` is 0 for its processor
/// and higher for its links. Times are microseconds with three decimals, so they are exact.
#[must_use]
pub fn trace(timeline: &Timeline) -> String {
    let lanes = timeline.lanes();
    let mut events = Vec::new();
    for rank in (0..timeline.ranks).map(Rank) {
        let pid = rank.0;
        events.push(format!(
            "{{\"name\":\"process_name\",\"ph\":\"M\",\"pid\":{pid},\"args\":{{\"name\":\"{rank}\"}}}}"
        ));
        for (tid, name) in lanes[rank.index()].iter().enumerate() {
            events.push(format!(
                "{{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":{pid},\"tid\":{tid},\"args\":{{\"name\":\"{name}\"}}}}"
            ));
        }
    }
    for span in &timeline.spans {
        let kind = span.kind;
        let name = match (span.op, kind) {
            (Some(op), _) => op.to_string(),
            (None, Kind::Forward | Kind::Backward | Kind::AllReduce) => format!("{kind} {}", span.part),
            _ => kind.to_string(),
        };
        let tid = lanes[span.rank.index()].iter().position(|&l| l == span.lane).unwrap_or_default();
        events.push(format!(
            "{{\"name\":\"{name}\",\"cat\":\"{kind}\",\"ph\":\"X\",\"pid\":{},\"tid\":{tid},\"ts\":{},\"dur\":{},\
             \"args\":{{\"step\":{},\"part\":{},\"bytes_sent\":{}}}}}",
            span.rank.0,
            micros(span.start.0),
            micros(span.time().0),
            span.step,
            span.part,
            span.sent.0
        ));
    }
    let mut out = String::from("{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n");
    let _ = writeln!(out, "{}\n]}}", events.join(",\n"));
    out
}

fn micros(ns: u64) -> String {
    format!("{}.{:03}", ns / 1000, ns % 1000)
}
