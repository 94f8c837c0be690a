//! Stops all members of a run, together or one after another, as people do at the end of the day, and starts
//! the run again: no step is lost. Where replicas agree at each step, two members that are started again have
//! the same bits; with local steps, the same member has them twice.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use farflung::base::Philox;
use farflung::{EventKind, StepMetrics};
use rustix::process::Signal;

use super::processes::{Member, join, start, wait, wait_for_mesh, wait_for_ticket};
use super::records::{events, metrics};
use crate::binary::farflung;
use crate::harness::{Bench, Options, Report, Threshold};
use crate::machine::now;

pub(crate) const BENCH: Bench = Bench {
    name: "stop-together",
    claim: "members that stop, together or one after another, by any signal and under any plan, lose no step: a \
            host that is started again in the folder of any of them continues from the last one",
    source: "README: a member leaves cleanly with Ctrl-C, SIGTERM saves and ends the run",
    seed: 1337,
    run,
};

const FLAGS: &str = "--listen 127.0.0.1:0 --heads 2 --dim 8 --context 8 --batch 1 --layers 2 --threads 1 \
                     --eval-every 100000000 --eval-batches 1 --sample-tokens 0 --data text.txt --quiet \
                     --digest-every 1 --keep-last 0";
/// Steps between two checkpoints.
const EVERY: u64 = 20;
/// Steps that a run takes after it was started again.
const MORE: u64 = 5;

/// A run that is stopped.
struct Arm {
    name: &'static str,
    flags: &'static str,
    members: u64,
    /// Mesh of the plan of all members.
    mesh: &'static str,
}

const ARMS: [Arm; 7] = [
    Arm { name: "ddp", flags: "--balance equal", members: 3, mesh: "data=3,pipeline=1" },
    Arm { name: "ddp, shares by speed", flags: "--microbatches 8", members: 3, mesh: "data=3,pipeline=1" },
    Arm {
        name: "diloco",
        flags: "--sync diloco --sync-every 4 --codec int8 --microbatches 2",
        members: 3,
        mesh: "data=3,pipeline=1",
    },
    Arm {
        name: "1 pipeline of 2",
        flags: "--stages 2 --microbatches 4 --copy-share 0",
        members: 2,
        mesh: "data=1,pipeline=2",
    },
    Arm {
        name: "2 pipelines of 2",
        flags: "--stages 2 --microbatches 4",
        members: 4,
        mesh: "data=2,pipeline=2",
    },
    Arm {
        name: "pools",
        flags: "--stages 2 --pooled true --microbatches 4",
        members: 3,
        mesh: "data=1,pipeline=3",
    },
    Arm {
        name: "2 pipelines of 2, diloco",
        flags: "--stages 2 --microbatches 4 --sync diloco --sync-every 4",
        members: 4,
        mesh: "data=2,pipeline=2",
    },
];

/// How the members stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    AllAtOnce,
    /// Each one 0 to 3 s after the one before, in a random order.
    OneAfterAnother,
    /// The host, or in every other try another member, leaves, and the others go on for a while.
    OneLeaves,
    AllKilled,
    /// All at once, while another machine joins.
    NewcomerWaits,
}

const WAYS: [Way; 5] =
    [Way::AllAtOnce, Way::OneAfterAnother, Way::OneLeaves, Way::AllKilled, Way::NewcomerWaits];

/// The signals that ask a process to stop, with their exit codes.
const SIGNALS: [(Signal, i32); 5] =
    [(Signal::INT, 130), (Signal::TERM, 143), (Signal::HUP, 129), (Signal::USR1, 138), (Signal::XCPU, 152)];

/// What went wrong in the tries of an arm.
#[derive(Default)]
struct Tally {
    tries: u64,
    lost: u64,
    codes: u64,
    other_bits: u64,
    failed: u64,
    slowest: f64,
}

/// How a try ended.
#[derive(Default)]
struct Outcome {
    lost: u64,
    wrong_codes: u64,
    /// What has other bits; empty if nothing has.
    differs: String,
    took: f64,
}

fn flags(more: &str) -> Vec<String> {
    FLAGS.split_whitespace().chain(more.split_whitespace()).map(str::to_owned).collect()
}

fn host(more: &str) -> Result<Command> {
    let flags = flags(more);
    farflung(&std::iter::once("host").chain(flags.iter().map(String::as_str)).collect::<Vec<_>>())
}

/// Returns the newest step in the records of some members.
fn newest_step(folder: &Path, members: u64) -> Result<u64> {
    let mut newest = 0;
    for number in 0..members {
        let rows = metrics(&folder.join(number.to_string()))?;
        newest = newest.max(rows.last().map_or(0, |row: &StepMetrics| row.step));
    }
    Ok(newest)
}

/// Returns the newest step of which all members have saved a checkpoint.
fn saved_by_all(folder: &Path, members: u64) -> Result<u64> {
    let mut counts: BTreeMap<u64, u64> = BTreeMap::new();
    for number in 0..members {
        for event in events(&folder.join(number.to_string()))? {
            if matches!(event.what, EventKind::Saved { .. }) {
                *counts.entry(event.step).or_default() += 1;
            }
        }
    }
    Ok(counts.into_iter().rev().find(|(_, count)| *count == members).map_or(0, |(step, _)| step))
}

/// Returns the steps that the members have lost while they trained.
fn lost_steps(folder: &Path, members: u64) -> Result<u64> {
    let mut lost = 0;
    for number in 0..members {
        for event in events(&folder.join(number.to_string()))? {
            if let EventKind::Members { lost_steps, .. } = event.what {
                lost = lost.max(lost_steps);
            }
        }
    }
    Ok(lost)
}

/// Returns the hash of the weights in the checkpoints of a step, as `--digest-every` computes it; `None` if the
/// members' copies of a tensor differ.
fn saved_digest(folder: &Path, members: u64, step: u64) -> Result<Option<String>> {
    let mut tensors: BTreeMap<String, String> = BTreeMap::new();
    for number in 0..members {
        let path = folder.join(format!("{number}/step-{step:08}/model.safetensors"));
        let Ok(bytes) = fs::read(&path) else { continue };
        let (len, rest) = bytes.split_first_chunk::<8>().context("a file of weights is cut")?;
        let len = usize::try_from(u64::from_le_bytes(*len))?;
        let (head, data) = rest.split_at_checked(len).context("a file of weights is cut")?;
        let head: serde_json::Map<String, serde_json::Value> = serde_json::from_slice(head)?;
        for (name, tensor) in head.into_iter().filter(|(name, _)| name != "__metadata__") {
            let at = |index: usize| tensor["data_offsets"][index].as_u64().map(|at| at as usize);
            let (from, to) = at(0).zip(at(1)).context("a tensor has no place")?;
            let hash = blake3::hash(data.get(from..to).context("a tensor is cut")?).to_hex().to_string();
            if tensors.insert(name, hash.clone()).is_some_and(|other| other != hash) {
                return Ok(None);
            }
        }
    }
    let line = |(name, hash): (String, String)| [name, " ".to_owned(), hash, "\n".to_owned()];
    let lines: String = tensors.into_iter().flat_map(line).collect();
    Ok(Some(blake3::hash(lines.as_bytes()).to_hex().to_string()))
}

/// The end of a run that was started again.
struct Continued {
    /// The step from which it has continued.
    from: u64,
    /// The hash of its weights after its last step.
    digest: String,
}

/// Starts a run again in a copy of its folders, as the host of a member's folder, up to step `until`.
fn start_again(folder: &Path, (arm, number): (&Arm, u64), until: u64) -> Result<Continued> {
    let copy = tempfile::tempdir().context("failed to make a temporary folder")?;
    let copied = Command::new("cp").arg("-a").arg(folder.join(".")).arg(copy.path()).status()?;
    ensure!(copied.success(), "failed to copy the folders of a run");
    let more = format!("{} --out {number} --resume auto --deadline 500ms --steps {until}", arm.flags);
    let at = usize::try_from(number)?;
    let mut member = start(copy.path(), at, host(&more)?)?;
    let code = member.ends()?;
    let said = fs::read_to_string(copy.path().join(format!("home-{number}/said.txt"))).unwrap_or_default();
    ensure!(code == 0, "member {number} cannot be started again, exit code {code}: {said}");
    let resumed =
        events(&member.folder)?.into_iter().rfind(|event| matches!(event.what, EventKind::Resumed { .. }));
    let rows = metrics(&member.folder)?;
    let last = rows.last().filter(|row| row.step == until).context("the run has not taken all steps")?;
    Ok(Continued {
        from: resumed.map_or(0, |event| event.step),
        digest: last.digest.clone().context("the last step has no hash")?,
    })
}

/// Returns some members in a random order.
fn shuffled(count: u64, random: &Philox, at: u64) -> Vec<usize> {
    let mut order: Vec<usize> = (0..count as usize).collect();
    for index in (1..order.len()).rev() {
        order.swap(index, random.below(at + index as u64, index as u64 + 1) as usize);
    }
    order
}

fn try_once(
    arm: &Arm,
    way: Way,
    (signal, code): (Signal, i32),
    (random, at): (&Philox, u64),
) -> Result<Outcome> {
    let folder = tempfile::tempdir().context("failed to make a temporary folder")?;
    let folder = folder.path();
    fs::write(folder.join("text.txt"), "the quick brown fox ".repeat(500))?;
    let every = if way == Way::AllKilled { EVERY } else { 0 };
    let more = format!("{} --out 0 --deadline 2s --steps 100000000 --checkpoint-every {every}", arm.flags);
    let mut members: Vec<Member> = vec![start(folder, 0, host(&more)?)?];
    wait_for_ticket(&members[0])?;
    let ticket = members[0].folder.join("run.ticket");
    for number in 1..arm.members {
        let (.., before) = members[0].last_change();
        members.push(join(folder, number as usize, &ticket)?);
        wait(&members[0], number + 1, before)?;
    }
    members.iter().try_for_each(|member| wait_for_mesh(member, arm.mesh))?;
    sleep(Duration::from_millis(300 + random.below(at, 700)));
    if way == Way::AllKilled {
        let begun = now();
        while saved_by_all(folder, arm.members)? == 0 {
            ensure!(begun.elapsed() < Duration::from_secs(30), "the members save no checkpoint");
            sleep(Duration::from_millis(20));
        }
    }
    let newcomer = if way == Way::NewcomerWaits {
        let newcomer = join(folder, arm.members as usize, &ticket)?;
        sleep(Duration::from_millis(random.below(at + 1, 900)));
        Some(newcomer)
    } else {
        None
    };
    let order = match way {
        Way::OneAfterAnother => shuffled(arm.members, random, at + 10),
        // The host, or the last member.
        Way::OneLeaves if random.below(at + 2, 2) == 0 => (0..members.len()).rev().collect(),
        _ => (0..members.len()).collect(),
    };
    let mut last_signal = now();
    let mut wrong_codes = 0;
    let mut codes = vec![None; members.len()];
    for (nth, &member) in order.iter().enumerate() {
        match way {
            Way::OneAfterAnother => sleep(Duration::from_millis(random.below(at + 20 + nth as u64, 3_000))),
            Way::OneLeaves if nth == 1 => {
                codes[order[0]] = Some(members[order[0]].ends()?);
                let before = newest_step(folder, arm.members)?;
                let begun = now();
                while newest_step(folder, arm.members)? < before + MORE {
                    ensure!(begun.elapsed() < Duration::from_secs(30), "the others do not go on");
                    sleep(Duration::from_millis(20));
                }
            }
            _ => {}
        }
        last_signal = now();
        members[member].send(if way == Way::AllKilled { Signal::KILL } else { signal })?;
    }
    for (member, known) in members.iter_mut().zip(&codes) {
        let got = known.map_or_else(|| member.ends(), Ok)?;
        wrong_codes += u64::from(way != Way::AllKilled && got != code);
    }
    let took = last_signal.elapsed().as_secs_f64();
    if let Some(mut newcomer) = newcomer {
        newcomer.send(signal)?;
        // It may have noticed before that the run is gone.
        wrong_codes += u64::from(![code, 75].contains(&newcomer.ends()?));
    }
    let done = newest_step(folder, arm.members + 1)?;
    let expected = if way == Way::AllKilled { saved_by_all(folder, arm.members)? } else { done };
    let last = *order.last().context("there are members")? as u64;
    let until = done + MORE;
    // With local steps, each replica has its own optimizer.
    let others = if arm.flags.contains("diloco") { [last, last] } else { [0, last] };
    let again = others.map(|number| start_again(folder, (arm, number), until));
    let [first, other] = again;
    let (first, other) = (first?, other?);
    let digests: Vec<String> = (0..=arm.members)
        .map(|number| metrics(&folder.join(number.to_string())))
        .collect::<Result<Vec<_>>>()?
        .into_iter()
        .flatten()
        .filter(|row| row.step == first.from)
        .filter_map(|row| row.digest)
        .collect();
    let saved = saved_digest(folder, arm.members + 1, first.from)?;
    let differs = [
        ("the two continue from other steps", first.from != other.from),
        ("the two have other weights", first.digest != other.digest),
        ("copies of a saved tensor differ", saved.is_none()),
        ("no member has told a hash of the step", digests.is_empty()),
        ("a hash is not that of what was saved", digests.iter().any(|told| Some(told) != saved.as_ref())),
    ];
    let differs: Vec<&str> = differs.into_iter().filter(|(_, found)| *found).map(|(what, _)| what).collect();
    let lost = expected.saturating_sub(first.from) + lost_steps(folder, arm.members)?;
    Ok(Outcome { lost, wrong_codes, differs: differs.join(", "), took })
}

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    ensure!(cfg!(unix), "this bench sends signals to processes");
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored =
        status.lines().find_map(|line| u64::from_str_radix(line.strip_prefix("SigIgn:")?.trim(), 16).ok());
    ensure!(
        ignored.is_none_or(|signals| signals & 1 == 0),
        "SIGHUP is ignored here, as under nohup: members would ignore it, too"
    );
    let tries = if options.quick { ARMS.len() as u64 } else { 84 };
    let random = Philox::new(report.seed(), 0);
    let mut tallies: Vec<Tally> = ARMS.iter().map(|_| Tally::default()).collect();
    for number in 0..tries {
        let (arm, round) = ((number % ARMS.len() as u64) as usize, number / ARMS.len() as u64);
        let way = WAYS[((round + arm as u64) % WAYS.len() as u64) as usize];
        let signal = SIGNALS[((round / WAYS.len() as u64 + arm as u64) % SIGNALS.len() as u64) as usize];
        let tally = &mut tallies[arm];
        tally.tries += 1;
        let what = format!("try {} of {tries}, {}, {way:?}, {:?}", number + 1, ARMS[arm].name, signal.0);
        match try_once(&ARMS[arm], way, signal, (&random, 1_000 * number)) {
            Ok(Outcome { lost, wrong_codes, differs, took }) => {
                tally.lost += lost;
                tally.codes += wrong_codes;
                tally.other_bits += u64::from(!differs.is_empty());
                tally.slowest = tally.slowest.max(took);
                report.progress(&format!(
                    "{what}: {lost} steps lost, {wrong_codes} wrong exit codes, {took:.2} s, bits: {}",
                    if differs.is_empty() { "equal" } else { &differs }
                ))?;
            }
            Err(error) => {
                tally.failed += 1;
                report.progress(&format!("{what}: failed: {error:#}"))?;
            }
        }
    }
    for (Arm { name, .. }, tally) in ARMS.iter().zip(tallies) {
        let Tally { tries, lost, codes, other_bits, failed, slowest } = tally;
        let none = Threshold::AtMost(0.0);
        report.row(&format!("{name}: tries"), tries as f64, "1", Threshold::None)?;
        report.row(&format!("{name}: tries that could not be continued"), failed as f64, "1", none)?;
        report.row(&format!("{name}: steps lost beyond the one in flight"), lost as f64, "1", none)?;
        report.row(&format!("{name}: exit codes other than that of the signal"), codes as f64, "1", none)?;
        report.row(&format!("{name}: tries continued with other bits"), other_bits as f64, "1", none)?;
        let metric = format!("{name}: longest time from the last signal to the last end");
        report.row(&metric, slowest, "s", Threshold::None)?;
    }
    Ok(())
}
