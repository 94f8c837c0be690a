//! Writes the page that helps to choose a method for a link.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use farflung::optim::sync::{METHODS, OnMemberLoss};

use super::reproductions::cell;
use super::{ArmRecord, UnequalRecord};

const HEAD: &str = "\
# Which method for which link

Written by `cargo xtask bench --all --report` from the records in `reproductions/`; do not edit.

Eight workers train a model of 34 thousand parameters, each method on the same tokens from the same pretrained
weights. A worker has 256 tokens per step and computes 50 GFLOP/s on a virtual clock. The ratio of bytes to
operations is that of workers with 256 thousand tokens per step and 50 TFLOP/s each, whatever the model's size:
compare the step times only with each other. Latency is left out; with 25 ms, methods that communicate in each
step are slower than the table shows.

- **loss** is the held-out loss above that of f32, in percent, with the standard deviation over seeds.
- **bytes** are what a worker sends per step, without frames; **fewer** is how many times fewer than with f32.
- **step** is the mean time of a step over the whole run, warm-up included, on links of 100 Mbit/s, 1 Gbit/s and
  10 Gbit/s.
";

const NAMES: [&str; 3] = ["100 Mbit/s", "1 Gbit/s", "10 Gbit/s"];

/// Methods are recommended up to these losses above f32's, in percent.
const NEAR: f64 = 1.0;
const FAIR: f64 = 3.0;

/// Returns the text of the page.
pub(super) fn page(arms: &[ArmRecord], unequal: &[UnequalRecord]) -> String {
    let mut text = HEAD.to_owned();
    text.push_str(
        "\n| method | loss, % | bytes | fewer | step, 100 Mbit/s | 1 Gbit/s | 10 Gbit/s | what it does |\n",
    );
    text.push_str("|-|-|-|-|-|-|-|-|\n");
    let f32 = arms.iter().find(|arm| arm.name == "f32").map_or(0.0, |arm| arm.payload);
    for arm in arms {
        let fewer = if arm.payload > 0.0 { format!("{:.1}", f32 / arm.payload) } else { "-".to_owned() };
        let times: Vec<_> = arm.step_times.iter().map(|s| format!("{:.2} ms", s * 1e3)).collect();
        let _ = writeln!(
            text,
            "| {} | {:+.2} ± {:.2} | {:.0} | {fewer} | {} | {} |",
            cell(&arm.name),
            arm.gap[0],
            arm.gap[1],
            arm.payload,
            times.join(" | "),
            cell(&arm.what)
        );
    }
    text.push_str("\n## By link\n");
    for (link, name) in NAMES.iter().enumerate() {
        let _ = write!(text, "\n**{name}.** ");
        let [near, fair] = [NEAR, FAIR].map(|most| fastest(arms, link, most));
        let _ =
            writeln!(text, "Fastest step within {NEAR} % of f32's loss: {near}. Within {FAIR} %: {fair}.");
    }
    text.push_str(&machines(unequal));
    text.push_str(&members());
    text.push_str("\n## Commands\n\n`PRETRAINED` is the folder of a checkpoint.\n\n");
    for arm in arms {
        let _ = writeln!(text, "- {}: `{}`", arm.name, super::command(&arm.command));
    }
    for arm in unequal {
        let _ = writeln!(text, "- {}, {}: `{}`", arm.name, arm.machines, super::command(&arm.command));
    }
    text
}

/// Returns a table for each kind of unequal machines, with all arms measured on them.
fn machines(unequal: &[UnequalRecord]) -> String {
    let mut text = String::new();
    let mut kinds: Vec<&str> = Vec::new();
    for arm in unequal {
        if !kinds.contains(&arm.machines.as_str()) {
            kinds.push(&arm.machines);
        }
    }
    if !kinds.is_empty() {
        text.push_str(
            "\n## Unequal machines\n\nTokens per hour of the virtual clock relative to f32, and the loss \
             above f32's. f32 and other methods that\nwait for the slowest machine take a third as many \
             steps as those that do not wait.\n",
        );
    }
    for kind in kinds {
        let _ = writeln!(text, "\n**Machines: {kind}**\n");
        text.push_str("| method | tokens per hour | loss, % | bytes | what it does |\n|-|-|-|-|-|\n");
        for arm in unequal.iter().filter(|arm| arm.machines == kind) {
            let (name, what) = (cell(&arm.name), cell(&arm.what));
            let (rate, [gap, sigma], payload) = (arm.rate, arm.gap, arm.payload);
            let _ =
                writeln!(text, "| {name} | {rate:.2}x | {gap:+.2} ± {sigma:.2} | {payload:.0} | {what} |");
        }
    }
    text
}

/// Returns the section that lists what each method does when a member is lost.
fn members() -> String {
    let goes_on: Vec<String> = METHODS
        .iter()
        .filter(|row| row.on_member_loss == OnMemberLoss::MeanOfOthers)
        .map(|row| format!("`{}`", row.name))
        .collect();
    let mut reasons: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for row in METHODS {
        if let OnMemberLoss::Unsupported(reason) = row.on_member_loss {
            reasons.entry(reason).or_default().push(format!("`{}`", row.name));
        }
    }
    let mut text = format!(
        "\n## Members that join and leave\n\nIn runs whose members join and leave (`farflung host` and \
         `farflung join`), `--sync` is one of {}: a round after a loss is the mean over the remaining \
         members, weighted by their tokens. The other methods are rejected there, for these reasons (bench \
         methods):\n\n",
        goes_on.join(", ")
    );
    for (reason, names) in reasons {
        let _ = writeln!(text, "- {}: {reason}.", names.join(", "));
    }
    text
}

/// Names at most three arms with the shortest steps over a link, among those that send something, have a step
/// time for the link, and whose loss is at most `most` percent above f32's. Returns "none" if there are none.
fn fastest(arms: &[ArmRecord], link: usize, most: f64) -> String {
    let fit = |arm: &&ArmRecord| arm.gap[0] <= most && arm.payload > 0.0 && arm.step_times.len() > link;
    let mut fit: Vec<_> = arms.iter().filter(fit).collect();
    fit.sort_by(|a, b| a.step_times[link].total_cmp(&b.step_times[link]));
    let name = |arm: &&ArmRecord| format!("{} ({:.2} ms)", arm.name, arm.step_times[link] * 1e3);
    let names: Vec<_> = fit.iter().take(3).map(name).collect();
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arm(name: &str, gap: f64, time: f64) -> ArmRecord {
        ArmRecord {
            name: name.to_owned(),
            what: "does | something".to_owned(),
            command: "farflung train".to_owned(),
            seeds: 3,
            gap: [gap, 0.1],
            payload: 100.0,
            sent: 110.0,
            step_times: vec![time, time, time],
            curve: Vec::new(),
        }
    }

    #[test]
    fn the_fastest_that_learn_as_well_are_named() {
        let arms =
            [arm("f32", 0.0, 5.0), arm("poor", 9.0, 1.0), arm("fair", 2.0, 2.0), arm("good", 0.5, 3.0)];
        assert!(fastest(&arms, 0, NEAR).starts_with("good (3000.00 ms), f32"));
        assert!(fastest(&arms, 0, FAIR).starts_with("fair (2000.00 ms), good"));
        assert_eq!(fastest(&arms[1..2], 0, FAIR), "none");
        let slow = UnequalRecord {
            name: "free".to_owned(),
            what: "waits for nobody".to_owned(),
            command: "farflung train".to_owned(),
            machines: "two machines".to_owned(),
            rate: 2.5,
            gap: [-1.0, 0.2],
            payload: 10.0,
        };
        let page = page(&arms, &[slow]);
        assert!(page.contains("| free | 2.50x | -1.00 ± 0.20 | 10 | waits for nobody |"), "{page}");
        assert!(
            page.contains("| poor | +9.00 ± 0.10 | 100 | 1.0 |") && page.contains("does \\| something"),
            "{page}"
        );
    }
}
