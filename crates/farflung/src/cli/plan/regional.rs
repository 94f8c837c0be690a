//! Describes the plans by region of `farflung plan auto`, as JSON and as text.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use farflung::base::Nanos;
use farflung::parallel::Cluster;
use farflung::parallel::planner::regional::Direction;
use farflung::train::auto::{ByRegion, RegionalCandidate};

/// Number of machines from which on plans are made by region.
pub(super) const MACHINES: u64 = 257;

/// Returns a description of the plan for users.
fn what(candidate: &RegionalCandidate, found: &ByRegion) -> String {
    let plan = &candidate.found;
    let (pipelines, stages) = (plan.pipelines.len(), plan.stages.len());
    let groups = match plan.groups.len() {
        1 => "all sites together".to_owned(),
        n if n == found.sites.all.len() => "each site alone".to_owned(),
        n => format!("sites in {n} groups"),
    };
    let direction = match plan.direction {
        Direction::Across => "across",
        Direction::Along => "along",
    };
    let again = if candidate.is_recomputed { ", recomputed" } else { "" };
    format!("{pipelines} pipelines of {stages} {direction}, {groups}, {}{again}", plan.algorithm)
}

/// Returns the number of machines that a plan uses.
fn ranks(candidate: &RegionalCandidate) -> usize {
    candidate.found.pipelines.iter().map(Vec::len).sum()
}

/// Returns by how much a plan's ranks exceed the limit of a run; `None` if the plan can run.
fn above_limit(candidate: &RegionalCandidate) -> Option<u64> {
    (ranks(candidate) as u64).checked_sub(Cluster::MAX_RANKS).filter(|&over| over > 0)
}

fn ratio(step: Nanos, bound: Nanos) -> f64 {
    step.as_secs_f64() / bound.as_secs_f64().max(1e-9)
}

/// Returns one JSON object; `plan` is the chosen plan as TOML.
pub(super) fn json(found: &ByRegion, plan: &str, tokens: u64) -> serde_json::Value {
    let chosen = &found.plans[0];
    let step = chosen.found.time.step();
    let each = found.plans.iter().map(|candidate| {
        let time = candidate.found.time;
        serde_json::json!({
            "what": what(candidate, found), "step_s": time.step().as_secs_f64(),
            "pipelines_s": time.pipelines.as_secs_f64(), "tied_s": time.tied.as_secs_f64(),
            "averages_s": time.averages.as_secs_f64(), "replicas": candidate.found.pipelines.len(),
            "stages": candidate.found.stages.len(), "held": candidate.held.0,
        })
    });
    serde_json::json!({
        "plan": plan, "step_s": step.as_secs_f64(), "tokens_per_s": tokens as f64 / step.as_secs_f64(),
        "lower_bound_s": found.bound.as_secs_f64(), "priced": found.priced,
        "ranks": ranks(chosen), "machines_left_out": found.sites.size() - ranks(chosen),
        "ranks_above_limit": above_limit(chosen),
        "sites": found.sites.all.len(), "candidates": each.collect::<Vec<_>>(),
    })
}

/// Returns the chosen plan by site and stage, and the next best plans, as text.
pub(super) fn text(found: &ByRegion, tokens: u64, top: usize) -> String {
    let plan = &found.plans[0].found;
    let mut text = format!("{:>16} {:>9} {:>9} {:>12}\n", "site", "machines", "in use", "stages");
    for (at, site) in found.sites.all.iter().enumerate() {
        let mut used: BTreeMap<usize, usize> = BTreeMap::new();
        for row in &plan.pipelines {
            let here = row.iter().enumerate().filter(|(_, rank)| found.sites.site(**rank) == at);
            for (stage, _) in here {
                *used.entry(stage).or_default() += 1;
            }
        }
        let stages = match (used.keys().next(), used.keys().next_back()) {
            (Some(first), Some(last)) => format!("{first}..{}", last + 1),
            _ => "none".to_owned(),
        };
        let (all, busy) = (site.machines.len(), used.values().sum::<usize>());
        let _ = writeln!(text, "{:>16} {all:>9} {busy:>9} {stages:>12}", site.name);
    }
    let most = plan.stages.iter().map(ExactSizeIterator::len).max().unwrap_or(0);
    let held = found.plans[0].held;
    let _ =
        writeln!(text, "\nA stage has at most {most} layers, and a machine needs at most {held} of memory.");
    let (few, many) = (plan.microbatches.iter().min(), plan.microbatches.iter().max());
    let (few, many) = (few.copied().unwrap_or(0), many.copied().unwrap_or(0));
    let (busy, all) = (ranks(&found.plans[0]), found.sites.size());
    let _ = writeln!(text, "{busy} of {all} machines are in use, {} are left out.", all - busy);
    if let Some(over) = above_limit(&found.plans[0]) {
        let _ = writeln!(
            text,
            "A run can have at most {} ranks: this plan has {over} too many. Its time is predicted here, but \
             it cannot be trained.",
            Cluster::MAX_RANKS
        );
    }
    let _ = writeln!(text, "Pipelines have {few} to {many} microbatches each.\n");
    let _ = writeln!(
        text,
        "  {:<74} {:>9} {:>9} {:>9} {:>9} {:>10}",
        "", "a step", "pipelines", "tied", "averages", "tokens/s"
    );
    for (at, candidate) in found.plans.iter().take(top.max(1)).enumerate() {
        let time = candidate.found.time;
        let mark = if at == 0 { '>' } else { ' ' };
        let _ = writeln!(
            text,
            "{mark} {:<74} {:>9} {:>9} {:>9} {:>9} {:>10.0}",
            what(candidate, found),
            time.step(),
            time.pipelines,
            time.tied,
            time.averages,
            tokens as f64 / time.step().as_secs_f64().max(1e-9)
        );
    }
    let _ = writeln!(
        text,
        "\n{} layouts were compared with closed-form costs. No plan of contiguous stages takes less than {}: \
         the first one takes {:.2} times as long.",
        found.priced,
        found.bound,
        ratio(plan.time.step(), found.bound)
    );
    text
}
