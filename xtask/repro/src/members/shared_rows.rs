//! Compares the rows that the processes of a run have written for the same step. Members of pipelines and pools
//! hold parts of the model, so their weights cannot be compared with each other. The loss and the tokens of a
//! step are those of all members, and each member that has a part writes them.

use std::collections::BTreeMap;

use anyhow::Result;
use farflung::StepMetrics;

use super::records::{events, metrics};
use super::replay::{EndedRun, Views};
use crate::harness::{Report, Threshold};

/// Loss, as its bits, and tokens of all steps so far.
type Row = (u64, u64);

/// The rows of each step, by its number. Steps that were done again count as they were done last.
#[derive(Debug, Default)]
struct SharedRows {
    by_step: BTreeMap<u64, Vec<Row>>,
    /// Rows of steps that others have done again without the member that wrote them.
    dropped: u64,
}

impl SharedRows {
    /// Adds the rows of a member, in their order. `own` are the views that it has reported, `all` those that
    /// any member has. A step was done last under the newest view that began before it. A member does not
    /// report the view with which it joins, but its rows begin there.
    fn add(&mut self, rows: &[(u64, Row)], own: &Views, all: &Views) {
        let (mut last, mut joined) = (None, None);
        for &(step, row) in rows {
            if last.is_none_or(|last| step != last + 1) {
                joined = all.joined_after(step - 1);
            }
            last = Some(step);
            if own.newest_before(step).max(joined) == all.newest_before(step) {
                self.by_step.entry(step).or_default().push(row);
            } else {
                self.dropped += 1;
            }
        }
    }
}

/// The tokens of the steps of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct StepTokens {
    /// Numbers of tokens that a step may have: all microbatches of one pipeline, or of two.
    pub(super) allowed: &'static [u64],
    /// Local steps in a round. The steps of a round in which a member is lost may have other tokens.
    pub(super) round: u64,
}

/// Compares the loss and the tokens of each step that several members have written.
pub(super) fn compare(
    name: &str,
    run: EndedRun<'_>,
    tokens: StepTokens,
    report: &mut Report<'_>,
) -> Result<()> {
    let folders: Vec<_> = (0..run.started).map(|number| run.folder.join(number.to_string())).collect();
    let told = folders.iter().map(|folder| events(folder)).collect::<Result<Vec<_>>>()?;
    let mut all = Views::default();
    for told in &told {
        all.add(told);
    }
    let mut shared = SharedRows::default();
    for (folder, told) in folders.iter().zip(&told) {
        let mut own = Views::default();
        own.add(told);
        let row = |row: &StepMetrics| (row.step, (row.train_loss.to_bits(), row.tokens));
        shared.add(&metrics(folder)?.iter().map(row).collect::<Vec<_>>(), &own, &all);
    }
    let compared: BTreeMap<u64, Vec<Row>> =
        shared.by_step.into_iter().filter(|(_, rows)| rows.len() > 1).collect();
    let differs = |part: fn(&Row) -> u64| {
        let differs = |rows: &&Vec<Row>| rows.iter().any(|row| part(row) != part(&rows[0]));
        compared.values().filter(differs).count() as f64
    };
    let after_losses = all.losses().into_iter().filter(|step| compared.contains_key(&(step + 1))).count();
    let mut by_tokens: BTreeMap<u64, u64> = BTreeMap::new();
    for (step, rows) in &compared {
        let Some(before) = compared.get(&(step - 1)) else { continue };
        *by_tokens.entry(rows[0].1.saturating_sub(before[0].1)).or_default() += 1;
    }
    report.progress(&format!("{name}: numbers of steps by their tokens: {by_tokens:?}"))?;
    let is_other = |(count, _): &(&u64, &u64)| !tokens.allowed.contains(count);
    let other: u64 = by_tokens.iter().filter(is_other).map(|(_, steps)| steps).sum();
    let none = Threshold::AtMost(0.0);
    let metric = format!("{name}, processes: steps whose loss and tokens were compared");
    report.row(&metric, compared.len() as f64, "1", Threshold::AtLeast(1.0))?;
    let metric = format!("{name}, processes: of the steps compared, those right after a loss");
    report.row(&metric, after_losses as f64, "1", Threshold::AtLeast(run.losses as f64))?;
    let metric =
        format!("{name}, processes: views of which members report different steps or numbers of members");
    report.row(&metric, f64::from(all.differing), "1", none)?;
    let metric = format!("{name}, processes: steps of which members report different losses");
    report.row(&metric, differs(|row| row.0), "1", none)?;
    let metric = format!("{name}, processes: steps of which members report different tokens");
    report.row(&metric, differs(|row| row.1), "1", none)?;
    let metric = format!("{name}, processes: steps with other tokens than those of all their microbatches");
    let most = Threshold::AtMost((run.losses * tokens.round) as f64);
    report.row(&metric, other as f64, "1", most)?;
    let metric = format!("{name}, processes: rows of lost members for steps that were done again");
    report.row(&metric, shared.dropped as f64, "1", Threshold::None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_counts_as_it_was_done_last() {
        // One member is lost after its step 6; the others go back to step 3 and do steps 4 to 6 again. Another
        // one joins after step 5.
        let lost = Views::of(&[(1, 0, 2)]);
        let left = Views::of(&[(1, 0, 2), (2, 3, 1), (3, 5, 2)]);
        let rows =
            |from: u64, loss: u64| (from..=6).map(move |step| (step, (loss, step))).collect::<Vec<_>>();
        let mut shared = SharedRows::default();
        shared.add(&rows(1, 1), &lost, &left);
        shared.add(&rows(1, 2), &left, &left);
        shared.add(&rows(6, 3), &Views::default(), &left);
        assert_eq!(shared.dropped, 3);
        let losses = |step: u64| shared.by_step[&step].iter().map(|row| row.0).collect::<Vec<_>>();
        assert_eq!([3, 4, 6].map(losses), [vec![1, 2], vec![2], vec![2, 3]]);
    }

    #[test]
    fn a_newcomer_that_is_lost_at_once_has_rows_of_no_step() {
        // It joined after step 5; then the others went back to step 3.
        let all = Views::of(&[(1, 0, 2), (2, 5, 3), (3, 3, 2)]);
        let mut shared = SharedRows::default();
        shared.add(&[(6, (1, 6)), (7, (1, 7))], &Views::default(), &all);
        assert!(shared.by_step.is_empty() && shared.dropped == 2, "{shared:?}");
    }
}
