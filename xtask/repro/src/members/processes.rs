//! Runs members as processes of this machine. They are killed, or frozen and woken, one after another.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use farflung::base::Philox;
use farflung::{Event, EventKind};
use rustix::process::{Pid, Signal, kill_process};

use super::records::{events, metrics};
use super::replay::{self, EndedRun};
use super::shared_rows::{self, StepTokens};
use crate::binary::farflung;
use crate::harness::{Options, Report, Threshold};
use crate::machine::now;

/// Longest time that any wait may take.
const PATIENCE: Duration = Duration::from_mins(1);
const LOOK: Duration = Duration::from_millis(5);
/// The deadline in seconds, as given by `--deadline 2s`.
const DEADLINE: f64 = 2.0;

/// The process of a member, and its folder.
pub(super) struct Member {
    process: Child,
    pub(super) folder: PathBuf,
}

impl Member {
    pub(super) fn id(&self) -> u32 {
        self.process.id()
    }

    pub(super) fn send(&self, signal: Signal) -> Result<()> {
        send(self.process.id(), signal)
    }

    /// Waits for the process to end. Returns its exit code, or the negative number of the signal that ended it.
    pub(super) fn ends(&mut self) -> Result<i32> {
        let begun = now();
        while begun.elapsed() < PATIENCE {
            if let Some(status) = self.process.try_wait()? {
                return Ok(status.code().unwrap_or_else(|| -status.signal().unwrap_or(0)));
            }
            sleep(LOOK);
        }
        bail!("the member of {} does not end", self.folder.display())
    }

    /// Returns the number of members after the last change that it reported, and the number of changes that it
    /// has reported.
    pub(super) fn last_change(&self) -> (u64, usize) {
        last_change(&self.folder)
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// A change of members in a member's events.
#[derive(Debug, Clone, Copy)]
struct MemberChange {
    /// Number of steps done before it.
    step: u64,
    /// Number of members after it.
    members: u64,
}

/// Returns the changes of members in a folder's events.
fn changes(folder: &Path) -> Result<Vec<MemberChange>> {
    let change = |event: Event| match event.what {
        EventKind::Members { members, .. } => {
            Some(MemberChange { step: event.step, members: members as u64 })
        }
        _ => None,
    };
    Ok(events(folder)?.into_iter().filter_map(change).collect())
}

/// Returns the number of members after the last change in a folder's events, and the number of changes there.
pub(super) fn last_change(folder: &Path) -> (u64, usize) {
    let changes = changes(folder).unwrap_or_default();
    (changes.last().map_or(0, |change| change.members), changes.len())
}

pub(super) fn send(process: u32, signal: Signal) -> Result<()> {
    let pid = Pid::from_raw(i32::try_from(process)?).context("invalid process id")?;
    Ok(kill_process(pid, signal)?)
}

/// Starts a member with its own folder inside `folder`.
pub(super) fn start(folder: &Path, number: usize, mut command: Command) -> Result<Member> {
    let home = folder.join(format!("home-{number}"));
    fs::create_dir_all(&home)?;
    // The errors are kept for a reader who wants to know why the member failed.
    command.stderr(fs::File::create(home.join("said.txt"))?);
    let process = command.env("FARFLUNG_HOME", home).current_dir(folder).spawn();
    Ok(Member {
        process: process.context("failed to start `farflung`")?,
        folder: folder.join(number.to_string()),
    })
}

/// Joins with the ticket, with its own folder inside `folder`.
pub(super) fn join(folder: &Path, number: usize, ticket: &Path) -> Result<Member> {
    let (out, ticket) = (number.to_string(), ticket.display().to_string());
    let flags = ["--listen", "127.0.0.1:0", "--threads", "1", "--data", "text.txt", "--quiet"];
    start(
        folder,
        number,
        farflung(&[&["join", "--ticket-file", &ticket, "--out", &out], &flags[..]].concat())?,
    )
}

/// Waits until a member reports a new change after which there are `members` members. Returns the seconds that
/// this took.
pub(super) fn wait(member: &Member, members: u64, before: usize) -> Result<f64> {
    wait_for_any(&[(member, before)], members)
}

/// Waits until any of some members reports a new change after which there are `members` members. Each is given
/// with the number of changes that it has reported before. Returns the seconds that this took. A member that
/// has no part of the model after a change reports it later.
fn wait_for_any(any: &[(&Member, usize)], members: u64) -> Result<f64> {
    let begun = now();
    while begun.elapsed() < PATIENCE {
        let reports = |&(member, before): &(&Member, usize)| {
            let (count, changes) = member.last_change();
            changes > before && count == members
        };
        if any.iter().any(reports) {
            return Ok(begun.elapsed().as_secs_f64());
        }
        sleep(LOOK);
    }
    let told: Vec<String> = any
        .iter()
        .map(|(member, _)| format!("{}: {:?}", member.folder.display(), member.last_change()))
        .collect();
    bail!("no member reported that there are {members} members now: {}", told.join(", "))
}

/// Waits until the host has written a ticket, so that others can join.
pub(super) fn wait_for_ticket(host: &Member) -> Result<()> {
    let begun = now();
    while !host.folder.join("run.ticket").exists() {
        anyhow::ensure!(begun.elapsed() < PATIENCE, "the host wrote no ticket");
        sleep(LOOK);
    }
    Ok(())
}

/// Waits until the plan of a member has this mesh. Members of pipelines may still fetch their parts when all
/// have joined.
pub(super) fn wait_for_mesh(member: &Member, mesh: &str) -> Result<()> {
    let begun = now();
    let plan = member.folder.join("plan.toml");
    while !fs::read_to_string(&plan).is_ok_and(|text| text.contains(mesh)) {
        anyhow::ensure!(begun.elapsed() < PATIENCE, "{} has no mesh {mesh}", plan.display());
        sleep(LOOK);
    }
    Ok(())
}

/// A run whose members are killed and frozen.
struct Arm {
    name: &'static str,
    /// Flags that the run has beside those that all runs have.
    flags: &'static str,
    /// Number of members before each loss.
    members: u64,
    /// Number of losses, and of those with `--quick`.
    losses: u64,
    quick: u64,
    /// Least time before each loss.
    pause: Duration,
    /// Mesh of the plan that all members together have, before the first loss.
    mesh: &'static str,
    /// Whether they have it again before each loss.
    is_whole: bool,
    compares: Compares,
}

/// What is compared once the processes have ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Compares {
    /// The losses and tokens of steps, as each member that has a part of the model reports them.
    Rows(StepTokens),
    /// The weights of all members with each other.
    Members,
    /// Also the weights with those of a run without losses, and the tokens of each step, of which each member
    /// has this many.
    Replay { tokens: u64 },
}

const ARMS: [Arm; 6] = [
    Arm {
        name: "ddp",
        flags: "--sync ddp --layers 2 --digest-every 1 --lr-schedule constant --warmup 0",
        members: 5,
        losses: 60,
        quick: 2,
        pause: Duration::ZERO,
        mesh: "data=5,pipeline=1",
        is_whole: false,
        compares: Compares::Replay { tokens: 8 },
    },
    Arm {
        name: "diloco",
        flags: "--sync diloco --sync-every 4 --layers 2 --digest-every 4",
        members: 5,
        losses: 60,
        quick: 1,
        pause: Duration::ZERO,
        mesh: "data=5,pipeline=1",
        is_whole: false,
        compares: Compares::Members,
    },
    // Two pipelines. A spare would not hold up the others if it froze.
    Arm {
        name: "2 pipelines of 4",
        flags: "--sync ddp --layers 4 --stages 4 --microbatches 4",
        members: 8,
        losses: 60,
        quick: 1,
        pause: Duration::ZERO,
        mesh: "data=2,pipeline=4",
        is_whole: false,
        compares: Compares::Rows(StepTokens { allowed: &[32, 64], round: 0 }),
    },
    // No other member has the lost part: all go back to its copy, which must have been made before.
    Arm {
        name: "1 pipeline of 4",
        flags: "--sync ddp --layers 4 --stages 4 --microbatches 4",
        members: 4,
        losses: 60,
        quick: 1,
        pause: Duration::from_secs(1),
        mesh: "data=1,pipeline=4",
        is_whole: true,
        compares: Compares::Rows(StepTokens { allowed: &[32], round: 0 }),
    },
    // After a loss there is one pipeline, until the spare and the newcomer have fetched their parts: no other
    // member has a copy then.
    Arm {
        name: "2 pipelines of 2 with diloco",
        flags: "--sync diloco --sync-every 4 --layers 4 --stages 2 --microbatches 4",
        members: 4,
        losses: 20,
        quick: 1,
        pause: Duration::ZERO,
        mesh: "data=2,pipeline=2",
        is_whole: true,
        compares: Compares::Rows(StepTokens { allowed: &[32, 64], round: 4 }),
    },
    // A pool may have one member: its part must have been copied before.
    Arm {
        name: "pools",
        flags: "--sync ddp --layers 4 --stages 2 --microbatches 4 --pooled true",
        members: 4,
        losses: 20,
        quick: 1,
        pause: Duration::from_secs(1),
        mesh: "data=1,pipeline=4",
        is_whole: false,
        compares: Compares::Rows(StepTokens { allowed: &[32], round: 0 }),
    },
];

const FLAGS: &str = "host --listen 127.0.0.1:0 --deadline 2s --steps 100000000 --heads 2 --dim 8 --context 8 \
                     --batch 1 --threads 1 --eval-every 100000000 --eval-batches 1 --sample-tokens 0 \
                     --data text.txt --codec none --quiet --out 0 --checkpoint-every 0";

pub(super) fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    ARMS.iter().try_for_each(|arm| lose_members(arm, report, options))
}

/// Returns all members but one, each with the number of changes that it has reported.
fn others(members: &[Member], victim: usize) -> Vec<(&Member, usize)> {
    let others = members.iter().enumerate().filter(|(number, _)| *number != victim);
    others.map(|(_, member)| (member, member.last_change().1)).collect()
}

/// Steps of the members' metrics, and those among them with other tokens than those of all members.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct TokenTally {
    steps: u64,
    wrong: u64,
}

impl TokenTally {
    /// Adds the metrics of a member in whose run each member trains on `each` tokens in a step.
    fn add(&mut self, folder: &Path, each: u64) -> Result<()> {
        let (rows, changes) = (metrics(folder)?, changes(folder)?);
        for pair in rows.windows(2) {
            let (before, after) = (&pair[0], &pair[1]);
            // The members of the last change before the step. Steps before the first one have other members.
            let Some(change) = changes.iter().rfind(|change| change.step <= before.step) else {
                continue;
            };
            if after.step != before.step + 1 {
                continue;
            }
            self.steps += 1;
            let tokens = after.tokens.saturating_sub(before.tokens);
            self.wrong += u64::from(tokens != each * change.members);
        }
        Ok(())
    }
}

/// Checks that each step has the tokens of all of its members, by the metrics of each process.
fn count_tokens(
    name: &str,
    each: u64,
    (folder, started): (&Path, usize),
    report: &mut Report<'_>,
) -> Result<()> {
    let mut tally = TokenTally::default();
    (0..started).try_for_each(|number| tally.add(&folder.join(number.to_string()), each))?;
    let metric = format!("{name}, processes: steps whose tokens were counted");
    report.row(&metric, tally.steps as f64, "1", Threshold::AtLeast(100.0))?;
    let metric = format!("{name}, processes: steps with other tokens than those of all their members");
    report.row(&metric, tally.wrong as f64, "1", Threshold::AtMost(0.0))
}

/// Compares what the members of a run have written.
fn compare(arm: &Arm, run: EndedRun<'_>, report: &mut Report<'_>) -> Result<()> {
    let name = arm.name;
    if let Compares::Rows(tokens) = arm.compares {
        return shared_rows::compare(name, run, tokens, report);
    }
    let told = replay::agree(name, run, report)?;
    if let Compares::Replay { tokens } = arm.compares {
        count_tokens(name, tokens, (run.folder, run.started), report)?;
        replay::compare(name, &told, report)?;
    }
    Ok(())
}

/// Kills or freezes a random member at a random time, again and again. After each loss, a new or the woken
/// process makes the members as many as before.
fn lose_members(arm: &Arm, report: &mut Report<'_>, options: &Options) -> Result<()> {
    let Arm { name, members: count, .. } = *arm;
    let losses = if options.quick { arm.quick } else { arm.losses };
    let folder = tempfile::tempdir().context("failed to make a temporary folder")?;
    let folder = folder.path();
    fs::write(folder.join("text.txt"), "the quick brown fox ".repeat(500))?;
    let flags: Vec<&str> = FLAGS.split_whitespace().chain(arm.flags.split_whitespace()).collect();
    let mut members = vec![start(folder, 0, farflung(&flags)?)?];
    wait_for_ticket(&members[0])?;
    let mut started = 1;
    let mut add = |members: &mut Vec<Member>| -> Result<()> {
        let oldest = &members[0];
        let (.., before) = oldest.last_change();
        let newcomer = join(folder, started, &oldest.folder.join("run.ticket"))?;
        let said = folder.join(format!("home-{started}")).join("said.txt");
        started += 1;
        let told = || format!("the newcomer said {:?}", fs::read_to_string(&said).unwrap_or_default());
        wait(oldest, members.len() as u64 + 1, before).with_context(told)?;
        members.push(newcomer);
        Ok(())
    };
    while (members.len() as u64) < count {
        add(&mut members)?;
    }
    wait_for_mesh(&members[0], arm.mesh)?;
    let random = Philox::new(report.seed(), 0);
    let (mut killed, mut frozen, mut slowest, mut came_back) = (0_u32, 0_u32, 0.0_f64, 0_u32);
    for loss in 0..losses {
        let victim = random.below(3 * loss, count) as usize;
        let freeze = random.below(3 * loss + 1, 2) == 1;
        if arm.is_whole {
            members.iter().try_for_each(|member| wait_for_mesh(member, arm.mesh))?;
        }
        sleep(arm.pause + Duration::from_micros(random.below(3 * loss + 2, 50_000)));
        let watchers = others(&members, victim);
        members[victim].send(if freeze { Signal::STOP } else { Signal::KILL })?;
        slowest = slowest.max(wait_for_any(&watchers, count - 1)?);
        if freeze {
            frozen += 1;
            let watchers = others(&members, victim);
            members[victim].send(Signal::CONT)?;
            wait_for_any(&watchers, count)?;
            came_back += 1;
            // The member that came back is the youngest now.
            let youngest = members.remove(victim);
            members.push(youngest);
        } else {
            killed += 1;
            members.remove(victim);
            add(&mut members)?;
        }
        report.progress(&format!("{name}: {} of {losses} losses, slowest {slowest:.2} s", loss + 1))?;
    }
    // All end at once, so that no more members are lost.
    members.iter().try_for_each(|member| member.send(Signal::KILL))?;
    members.clear();
    compare(arm, EndedRun { folder, started, losses }, report)?;
    let metric = format!("{name}, processes: members killed");
    report.row(&metric, f64::from(killed), "1", Threshold::None)?;
    let metric = format!("{name}, processes: members frozen");
    report.row(&metric, f64::from(frozen), "1", Threshold::None)?;
    let metric = format!("{name}, processes: frozen members that woke and joined again");
    report.row(&metric, f64::from(came_back), "1", Threshold::AtLeast(f64::from(frozen)))?;
    let metric = format!("{name}, processes: longest time from the fault to the others' next step");
    report.row(&metric, slowest, "s", Threshold::AtMost(DEADLINE + 1.0))
}
