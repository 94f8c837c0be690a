//! Writes the page of claims: published figures, our measurements, and whether each claim holds.

use std::fmt::Write as _;

use serde_json::Value;

use super::Record;

const HEAD: &str = "\
# Reproductions

Written by `cargo xtask bench --all --report` from the records in `reproductions/`; do not edit. Most claims
have their paper's figure, ours, the setting, and whether the claim holds in that setting. Times are those of
a virtual clock, bytes are as counted by the transport. The trained models are small, so losses show how
methods compare with each other, not how good a model is. Where a command says `--init-from PRETRAINED`, the
model has 34 thousand parameters, and `PRETRAINED` is the folder of a checkpoint: [choosing.md](choosing.md)
has the command that makes it.

A claim is the paper's sentence; a mark in the tables is the bound that our own bench must keep. So a claim
may not hold here while the mark is kept. `H`: local steps between two averages; f32: averages of gradients as
32-bit floats at each step, the method that the others are compared with; arm: one of the runs that a bench
compares.

![Held-out loss against bytes sent](loss-by-bytes.svg)
![Held-out loss against simulated time](loss-by-time.svg)
";

/// Returns the text of the page.
pub(super) fn page(records: &[Record]) -> String {
    let mut text = HEAD.to_owned();
    for record in records {
        let _ =
            write!(text, "\n## {}\n\nClaim: {}.\n\nSource: {}.\n", record.name, record.claim, record.source);
        for published in record.list("published") {
            text.push_str(&claim(published));
        }
        let judged: Vec<_> = record.rows.iter().filter(|row| !row[3].is_empty()).collect();
        if !judged.is_empty() {
            text.push_str("\n| measured | value | mark | |\n|-|-|-|-|\n");
        }
        for [metric, value, unit, mark, verdict] in judged {
            let _ = writeln!(text, "| {} | {value} {unit} | {mark} | {verdict} |", cell(metric));
        }
        let others = record.rows.iter().filter(|row| row[3].is_empty()).count();
        if others > 0 {
            let _ =
                writeln!(text, "\n{others} more figures: [{0}.json](reproductions/{0}.json)", record.name);
        }
    }
    text
}

/// Returns the list item of a published figure and ours.
fn claim(value: &Value) -> String {
    let field = |name: &str| value[name].as_str().unwrap_or_default().trim().to_owned();
    let holds = value["holds"].as_bool() == Some(true);
    let verdict = if holds { "Holds in our setting." } else { "Does not hold in our setting." };
    let note = match field("note") {
        note if note.is_empty() => String::new(),
        note => format!(" Note: {note}."),
    };
    let mut text = format!("\n- **{}**\n", field("what"));
    let _ = writeln!(text, "  - Paper: {}.", field("paper"));
    let _ = writeln!(text, "  - Ours: {}.", field("ours"));
    let _ = writeln!(text, "  - Setting: `{}`.", super::command(&field("setting")));
    let _ = writeln!(text, "  - {verdict}{note}");
    text
}

/// Escapes a text for a table's cell.
pub(super) fn cell(text: &str) -> String {
    text.replace('|', "\\|")
}
