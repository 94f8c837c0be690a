//! Lets a newcomer take the place of a lost rank of a pipeline or of a pool at any time within a step. It
//! fetches its part while the members train.

use anyhow::{Context, Result};
use farflung::TrainConfig;
use farflung::base::{Nanos, PeerId};
use farflung::comm::simulated::Faults;
use farflung::train::Job;

use super::moments::{self, Moments};
use super::throughput::{Expected, JoinedRun, RiseTally, predicted_rate};
use super::{Notes, in_pools, job, report as report_of, times, watched};
use crate::harness::{Report, Threshold};

const MEMBERS: usize = 4;
const STEPS: u64 = 24;
/// Steps before those that are compared: a member is lost in the second one.
const COUNTED_AFTER: u64 = 3;
/// The member that is lost, by rank: the second stage of the second pipeline.
const LOST: PeerId = PeerId(3);
/// Estimated number of sequential messages of a change of members in pipelines: the vote and the view, then
/// about a dozen all-gathers and splits among four members, of three messages each.
const MESSAGES: f64 = 60.0;

/// Returns the job of members that form pipelines of two stages, or pools of two members by choice.
fn pipelines(seed: u64, members: usize, pooled: bool) -> Result<Job> {
    let job = job(seed, members, |config| {
        config.layers = Some(2);
        config.stages = 2;
        config.microbatches = Some(4);
        config.steps = STEPS;
        // The copies of each part are compared after each step.
        config.check_every = 1;
        // A step takes seconds, so that the links carry its record in the meantime.
        config.compute_rate = 1e6;
        config.deadline = Nanos::from_millis(10_000);
        config.pooled = pooled;
        // Copies to the next rank would take part of some steps.
        config.copy_share = 0.0;
    })?;
    if pooled { in_pools(&job, &[MEMBERS as u32 / 2; 2]) } else { Ok(job) }
}

/// A newcomer that follows parts.
struct Case<'a> {
    name: &'a str,
    job: Job,
    /// The newcomer's endpoint, the last one of the network.
    newcomer: PeerId,
    /// A spare that joins before the newcomer, and when.
    spare: Option<(PeerId, Nanos)>,
    /// A member that is lost before the newcomer comes, and when.
    lost: Option<(PeerId, Nanos)>,
    /// A text in the note that the newcomer takes part.
    joined: &'a str,
    /// Tokens per second with the newcomer, divided by those without it, as the two plans predict.
    rise: f64,
}

impl Case<'_> {
    const fn ends(&self) -> usize {
        self.newcomer.0 as usize + 1
    }

    fn faults(&self) -> Faults {
        self.lost.map_or_else(Faults::new, |(peer, at)| Faults::new().at(at).crash(peer))
    }

    /// Returns the endpoints that join the run, with a newcomer that comes at `come`.
    fn arrivals(&self, come: Nanos) -> Vec<(PeerId, Nanos)> {
        self.spare.into_iter().chain([(self.newcomer, come)]).collect()
    }

    /// Runs the job with a newcomer that comes at `come`. Returns the report, the notes, and the number of
    /// members that failed.
    fn run(&self, come: Nanos) -> Result<(farflung::train::Report, Notes, usize)> {
        let mut notes = Notes::default();
        let ended = watched(&self.job, self.ends(), &self.arrivals(come), &self.faults(), &mut notes)?;
        let is_lost = |number: usize| self.lost.is_some_and(|(peer, _)| peer.0 as usize == number);
        let failed = ended.iter().enumerate().filter(|(n, ended)| !is_lost(*n) && ended.is_err()).count();
        let report = ended.iter().find_map(report_of).context("no member ends with a report")?.clone();
        Ok((report, notes, failed))
    }

    /// Returns the moments between two times at which something reaches a rank, in a run without the newcomer.
    fn moments(&self, span: (Nanos, Nanos), most: usize) -> Result<Moments> {
        let (arrivals, faults) = (self.arrivals(Nanos::MAX), self.faults());
        moments::events_with(&self.job, self.ends(), (&arrivals, &faults), span, most)
    }
}

/// Measures newcomers at `most` moments within two steps: to pipelines and to pools in place of a lost member,
/// and to a pipeline with a spare, beside which a further one begins.
pub(super) fn followed_part(report: &mut Report<'_>, most: usize) -> Result<()> {
    for (name, pooled) in [("followed part", false), ("followed part of a pool", true)] {
        let job = pipelines(report.seed(), MEMBERS, pooled)?;
        // After the loss, the member that is left of the second stages gets all microbatches of a step.
        let config = TrainConfig {
            microbatches: Some(job.plan.all_microbatches() as usize),
            ..TrainConfig::clone(&job.given)
        };
        let fewer = in_pools(&job.with_config(config, MEMBERS)?, &[2, 1])?;
        let rise = predicted_rate(&job)? / predicted_rate(&fewer)?;
        let (newcomer, spare) = (PeerId(MEMBERS as u32), None);
        let lost = Some((LOST, Nanos::from_millis(1_000)));
        let joined = "member 4 joined";
        follow_part(report, most, &Case { name, job, newcomer, spare, lost, joined, rise })?;
    }
    let job = pipelines(report.seed(), 2, false)?;
    let rise = predicted_rate(&pipelines(report.seed(), MEMBERS, false)?)? / predicted_rate(&job)?;
    let (name, joined) = ("followed parts of a further pipeline", "2 pipelines of 2");
    // The spare joins in the second step. It and the newcomer form the second pipeline.
    let (newcomer, spare) = (PeerId(3), Some((PeerId(2), Nanos::from_millis(1_000))));
    follow_part(report, most, &Case { name, job, newcomer, spare, lost: None, joined, rise })
}

fn follow_part(report: &mut Report<'_>, most: usize, case: &Case<'_>) -> Result<()> {
    let &Case { name, ref job, joined, rise, .. } = case;
    let (calm, ..) = case.run(Nanos::MAX)?;
    let calm_times = times(&calm);
    let usual = calm_times[4] - calm_times[3];
    let span = [3, 5].map(|step: usize| Nanos((calm_times[step] * 1e9) as u64));
    let moments = case.moments((span[0], span[1]), most)?;
    let link = job.config.link;
    let record = calm.parameters as f64 * 4.0;
    let transfer = record * 8.0 / link.bandwidth.0 as f64;
    let expected = Expected { rise, joined, skipped: COUNTED_AFTER, every: 1 };
    let mut rises = RiseTally::new(1);
    let (mut broken, mut waited, mut slowest, mut slowed) = (0_usize, 0_u32, 0.0_f64, 0.0_f64);
    for &at in &moments.chosen {
        let (found, notes, failed) = case.run(at)?;
        broken += failed;
        rises.add(&JoinedRun { report: &found, notes: &notes, appeared: at }, &expected)?;
        let joined = notes.0.iter().find(|note| note.contains(joined));
        waited +=
            u32::from(joined.is_none() || !notes.0.iter().any(|note| note.contains("of the last step")));
        // Steps after the loss: the one that takes longest is that at whose begin the newcomer joins.
        let times = times(&found);
        let longer: Vec<f64> = (3..times.len()).map(|n| times[n] - times[n - 1]).collect();
        let came = 3 + (0..longer.len()).max_by(|&a, &b| longer[a].total_cmp(&longer[b])).unwrap_or(0);
        slowest = slowest.max(longer.iter().copied().fold(0.0, f64::max));
        slowed = slowed.max(times[came - 1] / calm_times[came - 1] - 1.0);
    }
    let metric = format!("{name}: moments of two steps at which something reaches a rank");
    report.row(&metric, moments.all as f64, "1", Threshold::None)?;
    let metric = format!("{name}: newcomers, each at one of these moments");
    report.row(&metric, moments.chosen.len() as f64, "1", Threshold::None)?;
    let metric = format!("{name}: members that failed, or whose copies of a part differ");
    report.row(&metric, broken as f64, "1", Threshold::AtMost(0.0))?;
    let metric = format!("{name}: newcomers for which all waited for more than a step's record");
    report.row(&metric, f64::from(waited), "1", Threshold::AtMost(0.0))?;
    report.row(&format!("{name}: a step without newcomers"), usual, "s", Threshold::None)?;
    report.row(&format!("{name}: record of the whole model on one link"), transfer, "s", Threshold::None)?;
    let bound = usual + transfer + MESSAGES * link.latency.as_secs_f64();
    report.row(&format!("{name}: longest time between two steps"), slowest, "s", Threshold::AtMost(bound))?;
    let metric = format!("{name}: members slower while the newcomer fetches");
    report.row(&metric, 100.0 * slowed, "%", Threshold::AtMost(1.0))?;
    rises.rows(report, name, rise)
}
