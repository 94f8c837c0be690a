//! Lets a newcomer join at any time within a step.

use anyhow::{Context, Result};
use farflung::TrainConfig;
use farflung::base::{AccessLink, Bandwidth, Link, Nanos, PeerId, Rank, Topology};
use farflung::comm::simulated::Faults;
use farflung::config::choice::SyncKind;
use farflung::optim::sync::DILOCO;
use farflung::train::Job;

use super::join_parts::followed_part;
use super::throughput::{Expected, JoinedRun, RiseTally, predicted_rate};
use super::{Notes, job, longest_wait, moments, over, report as report_of, run as run_once, times, watched};
use crate::harness::{Bench, Options, Report, Threshold};

pub(crate) const BENCH: Bench = Bench {
    name: "join-anywhere",
    claim: "a newcomer that fetches its state, or in pipelines and pools its part, while members train costs \
            them a step's record, and at most a hundredth of their time before that; within three steps of \
            its admission, the tokens per second rise as the plans predict, within 3%; one for which all wait, \
            whenever something reaches a rank: all end with the same bits, its sequences are in a step at most \
            three steps after it is ready, and no member waits longer than a step plus the time to send the state \
            over its link; members with unequal uplinks send parts of the state in proportion to their rates: \
            the wait is the size of the state divided by the sum of these rates, within 5%, and as long as \
            predicted, within 10%",
    source: "the design of farflung (issue 22)",
    seed: 1337,
    run,
};

const MEMBERS: usize = 3;
/// Enough steps for a newcomer to join and to train.
const STEPS: u64 = 12;
/// Estimated number of sequential messages between the step before the newcomer and the step after it:
/// presence, promises, votes and the view; then which step each member has reached and hashes of the state,
/// which go around a ring of all members.
const MESSAGES: f64 = 24.0;
/// Sequential messages until a newcomer is ready: a probe, its answer, and the report of the result.
const READY: f64 = 3.0;
/// Size of the state, divided by the size of all probes from one member together.
const PROBED: f64 = 16.0;

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let most = if options.quick { 6 } else { usize::MAX };
    followed(report, most, ("followed", 1))?;
    followed(report, most, ("followed diloco", 4))?;
    followed_part(report, most)?;
    for (name, every) in [("ddp", 1), ("diloco", 2)] {
        let job = job(report.seed(), MEMBERS, |config| {
            config.steps = STEPS;
            if every > 1 {
                config.sync = SyncKind::of(&DILOCO);
                config.sync_every = every;
            }
        })?;
        // All wait while the newcomer takes the state.
        let job = Job { barrier: true, ..job };
        let calm = run_once(&job, MEMBERS, &[], &Faults::new())?;
        let calm = report_of(&calm[0]).context("the run without newcomers has no report")?;
        let (calm_times, usual) = (times(calm), longest_wait(calm));
        let span = [1, 3].map(|step: usize| Nanos((calm_times[step] * 1e9) as u64));
        let moments = moments::events(&job, MEMBERS, (span[0], span[1]), most)?.chosen;
        // State per parameter: the weight and two moments.
        let state = calm.parameters as f64 * 12.0;
        let link = job.config.link;
        let transfer = state * 8.0 / link.bandwidth.0 as f64;
        let bound = usual + transfer + MESSAGES * link.latency.as_secs_f64();
        let (mut runs, mut apart, mut late, mut slowest) = (0_u32, 0_u32, 0_u32, 0.0_f64);
        for at in moments {
            let ended = run_once(&job, MEMBERS + 1, &[(PeerId(MEMBERS as u32), at)], &Faults::new())?;
            runs += 1;
            let all: Vec<_> = ended.iter().filter_map(report_of).collect();
            let same = all.len() == MEMBERS + 1 && all.iter().all(|report| report.hash == all[0].hash);
            apart += u32::from(!same);
            let Some(first) = all.first() else { continue };
            slowest = slowest.max(longest_wait(first));
            // `full` is the first step with the sequences of four members. Before the newcomer is ready, it
            // measures its links, which are busy with a step.
            let probes = READY * link.latency.as_secs_f64() + transfer / PROBED;
            let ready = at.0 as f64 + (usual + probes) * 1e9;
            let sequences = |n: usize| {
                let before = if n == 0 { 0 } else { first.rows[n - 1].tokens };
                (first.rows[n].tokens - before) / job.model.context as u64
            };
            let came = first.rows.iter().position(|row| row.time_s * 1e9 > ready).unwrap_or(0);
            let full = (0..first.rows.len()).find(|&n| sequences(n) == MEMBERS as u64 + 1);
            late += u32::from(full.is_none_or(|full| full > came + 3));
        }
        report.row(&format!("{name}: newcomers"), f64::from(runs), "1", Threshold::None)?;
        report.row(
            &format!("{name}: runs whose members differ"),
            f64::from(apart),
            "1",
            Threshold::AtMost(0.0),
        )?;
        let metric = format!("{name}: newcomers whose sequences are in no step within three steps");
        report.row(&metric, f64::from(late), "1", Threshold::AtMost(0.0))?;
        report.row(&format!("{name}: a step without newcomers"), usual, "s", Threshold::None)?;
        report.row(&format!("{name}: time of the state on one link"), transfer, "s", Threshold::None)?;
        let metric = format!("{name}: longest time between two steps");
        report.row(&metric, slowest, "s", Threshold::AtMost(bound))?;
    }
    homes(report)
}

/// Lets a newcomer take the state while the members train on, and replay the steps since. With local steps,
/// replicas meet after every `every` of them, and the newcomer replays these meetings.
fn followed(report: &mut Report<'_>, most: usize, (name, every): (&str, u64)) -> Result<()> {
    let job = job(report.seed(), MEMBERS, |config| {
        // Rounds before the newcomer, and after it.
        config.steps = STEPS * every.max(2);
        // The time of a step is that of the plan, without evaluations.
        config.eval_every = config.steps;
        if every > 1 {
            config.sync = SyncKind::of(&DILOCO);
            config.sync_every = every;
        }
        // A step takes half a second, so that the links carry its record in the meantime.
        config.compute_rate = 1e6;
    })?;
    let calm = run_once(&job, MEMBERS, &[], &Faults::new())?;
    let calm = report_of(&calm[0]).context("a run without newcomers ends")?;
    let (calm_times, usual) = (times(calm), longest_wait(calm));
    let span = [1, 3].map(|step: usize| Nanos((calm_times[step] * 1e9) as u64));
    let moments = moments::events(&job, MEMBERS, (span[0], span[1]), most)?.chosen;
    let link = job.config.link;
    let transfer = |bytes: f64| bytes * 8.0 / link.bandwidth.0 as f64;
    let record = calm.parameters as f64 * 4.0;
    let unit = if every > 1 { "round" } else { "step" };
    let steps_of = |times: &[f64]| times.windows(2).map(|pair| pair[1] - pair[0]).collect::<Vec<f64>>();
    let calm_steps = steps_of(&calm_times);
    let larger = TrainConfig { workers: MEMBERS + 1, ..TrainConfig::clone(&job.given) };
    let rise = predicted_rate(&job.with_config(larger, MEMBERS + 1)?)? / predicted_rate(&job)?;
    let joined = format!("member {MEMBERS} joined");
    let expected = Expected { rise, joined: &joined, skipped: every, every };
    let mut rises = RiseTally::new(every);
    let (mut apart, mut waited, mut slowest, mut slowed) = (0_u32, 0_u32, 0.0_f64, 0.0_f64);
    let newcomers = moments.len();
    for at in moments {
        let come = [(PeerId(MEMBERS as u32), at)];
        let mut notes = Notes::default();
        let ended = watched(&job, MEMBERS + 1, &come, &Faults::new(), &mut notes)?;
        let all: Vec<_> = ended.iter().filter_map(report_of).collect();
        let same = all.len() == MEMBERS + 1 && all.iter().all(|report| report.hash == all[0].hash);
        apart += u32::from(!same);
        waited += u32::from(!notes.0.iter().any(|note| note.contains(&format!("of the last {unit}"))));
        let Some(first) = all.first() else { continue };
        rises.add(&JoinedRun { report: first, notes: &notes, appeared: at }, &expected)?;
        slowest = slowest.max(longest_wait(first));
        // The newcomer is admitted at the beginning of the step that becomes longest through it. It fetches
        // during the steps before.
        let times = times(first);
        let longer: Vec<f64> =
            steps_of(&times).iter().zip(&calm_steps).map(|(step, calm)| step - calm).collect();
        let came = (0..longer.len()).max_by(|&a, &b| longer[a].total_cmp(&longer[b])).unwrap_or(0);
        slowed = slowed.max(times[came] / calm_times[came] - 1.0);
    }
    let bound = usual + transfer(record) + MESSAGES * link.latency.as_secs_f64();
    report.row(&format!("{name}: newcomers"), newcomers as f64, "1", Threshold::None)?;
    report.row(
        &format!("{name}: runs whose members differ"),
        f64::from(apart),
        "1",
        Threshold::AtMost(0.0),
    )?;
    let metric = format!("{name}: newcomers for which all waited for more than a {unit}'s record");
    report.row(&metric, f64::from(waited), "1", Threshold::AtMost(0.0))?;
    let metric = if every > 1 { "longest step without newcomers" } else { "a step without newcomers" };
    report.row(&format!("{name}: {metric}"), usual, "s", Threshold::None)?;
    // With local steps: parameters, anchor, outer momentum and the optimizer's two moments.
    let state = if every > 1 { 5.0 } else { 3.0 } * record;
    report.row(&format!("{name}: the state on one link"), transfer(state), "s", Threshold::None)?;
    report.row(&format!("{name}: a {unit}'s record on one link"), transfer(record), "s", Threshold::None)?;
    report.row(&format!("{name}: longest time between two steps"), slowest, "s", Threshold::AtMost(bound))?;
    let metric = format!("{name}: members slower while the newcomer fetches");
    report.row(&metric, 100.0 * slowed, "%", Threshold::AtMost(1.0))?;
    rises.rows(report, name, rise)
}

/// Uplinks of homes, in Mbit/s. All have ten times as much down.
const UPLINKS: [u64; 5] = [10, 40, 20, 20, 40];

/// Lets a newcomer take its state from members with unequal uplinks.
fn homes(report: &mut Report<'_>) -> Result<()> {
    let members = UPLINKS.len() - 1;
    let job = job(report.seed(), members, |config| {
        config.dim = Some(512);
        config.heads = Some(8);
        config.steps = 6;
        config.eval_every = 100;
        config.deadline = Nanos::from_millis(60_000);
        config.codec = "int8".parse().unwrap_or_default();
    })?;
    let job = Job { barrier: true, ..job };
    let link: Link = "1gbit,10ms".parse()?;
    let mut topology = Topology::uniform(members + 1, link);
    for (rank, up) in (0..).map(Rank).zip(UPLINKS) {
        topology.set_access_link(
            rank,
            AccessLink { up: Bandwidth(up * 1_000_000), down: Bandwidth(up * 10_000_000) },
        );
    }
    let mut notes = Notes::default();
    // The newcomer joins in the middle of a step, while the step's averages use the links.
    let come = [(PeerId(members as u32), Nanos::from_millis(5_000))];
    let ended = over(&job, &topology, &come, &Faults::new(), &mut notes)?;
    let all: Vec<_> = ended.iter().filter_map(report_of).collect();
    let same = all.len() == members + 1 && all.iter().all(|report| report.hash == all[0].hash);
    anyhow::ensure!(same, "members differ: {:?}", notes.0);
    let first = all[0];
    let last = times(first);
    let step = last[last.len() - 1] - last[last.len() - 2];
    let waited = longest_wait(first) - step;
    let state = first.parameters as f64 * 12.0;
    let uplinks = UPLINKS[..members].iter().sum::<u64>() as f64 * 1e6;
    let (transfer, view) = (state * 8.0 / uplinks, MESSAGES * link.latency.as_secs_f64());
    let said =
        notes.0.iter().find_map(|note| note.split_once(", about ")).context("no note has a prediction")?.1;
    let said: Nanos = said.split(' ').next().context("the note has no time")?.parse()?;
    report.row("homes: size of the state", state / 1e6, "MB", Threshold::None)?;
    report.row("homes: time of the state over all uplinks together", transfer, "s", Threshold::None)?;
    report.row("homes: time of the messages of the change", view, "s", Threshold::None)?;
    report.row("homes: time that the members waited", waited, "s", Threshold::None)?;
    let off = |a: f64, b: f64| (a / b - 1.0).abs() * 100.0;
    report.row(
        "homes: waiting time, difference from transfer plus messages",
        off(waited, transfer + view),
        "%",
        Threshold::AtMost(5.0),
    )?;
    report.row("homes: predicted waiting time", said.as_secs_f64(), "s", Threshold::None)?;
    let metric = "homes: predicted waiting time, difference from the measured one";
    report.row(metric, off(said.as_secs_f64(), waited), "%", Threshold::AtMost(10.0))?;
    let slowest = UPLINKS[..members].iter().min().copied().unwrap_or(1) as f64 * 1e6;
    let equal = state * 8.0 / members as f64 / slowest;
    report.row("homes: time if all members sent equal parts", equal, "s", Threshold::None)?;
    Ok(())
}
