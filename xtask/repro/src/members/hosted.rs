//! Runs real processes behind slow links, while machines join and leave by a script.

use std::collections::BTreeMap;
use std::fs;
use std::net::TcpListener;
use std::path::Path;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result};
use farflung::base::{Nanos, Philox};
use farflung::relay::{LinkEmulator, Relaying};
use rustix::process::Signal;

use super::processes::{Member, start, wait, wait_for_ticket};
use super::replay::{EndedRun, held_out_losses};
use crate::binary::farflung;
use crate::harness::{Bench, Options, Report, Threshold};
use crate::lab::spread;
use crate::machine::now;

pub(crate) const BENCH: Bench = Bench {
    name: "host-join",
    claim: "eight machines behind links of 100 Mbit/s and 20 ms join, are killed, freeze, wake and leave by \
            a script, the host included: the run needs no help, all members have the same weights, and the \
            loss is that of an undisturbed run with as many workers in each step, within two standard \
            deviations of other seeds",
    source: "the design of farflung (issue 22); hivemind and Psyche lose peers or batches",
    seed: 1337,
    run,
};

/// Number of machines.
const SLOTS: usize = 8;
/// Least number of members. With three, any one may be lost without notice.
const LEAST: usize = 3;
const SETTINGS: &str = "--layers 2 --heads 2 --dim 64 --context 32 --batch 4 --threads 1 --warmup 0 --lr-schedule constant \
                        --lr 0.002 --sync ddp --codec none --eval-every 25 --eval-batches 16 --sample-tokens 0 --quiet \
                        --checkpoint-every 0";

/// Tokens of one member in a step.
const TOKENS: u64 = 4 * 32;

/// A machine: its listening address, and the link through which others reach it.
struct Slot {
    listen: String,
    link: Relaying,
    member: Option<Member>,
    /// Number of the change with which its member joined.
    joined: usize,
}

impl Slot {
    fn new() -> Result<Self> {
        let free = TcpListener::bind("127.0.0.1:0")?.local_addr()?.to_string();
        let mut link = LinkEmulator::new("127.0.0.1:0", &free);
        (link.rate, link.delay) = ("100mbit".parse()?, Nanos::from_millis(20));
        Ok(Self { listen: free, link: link.start()?, member: None, joined: 0 })
    }
}

/// A change that the script makes to the run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum ScriptedChange {
    Join,
    Kill,
    Freeze,
    Leave,
}

impl ScriptedChange {
    const fn name(self) -> &'static str {
        match self {
            Self::Join => "machines that joined",
            Self::Kill => "members killed",
            Self::Freeze => "members that were frozen, woke and joined again",
            Self::Leave => "members that left",
        }
    }
}

/// State of the run, as the script knows it.
struct Script<'a> {
    folder: &'a Path,
    slots: Vec<Slot>,
    started: usize,
    changes: usize,
    done: BTreeMap<ScriptedChange, u32>,
    /// Longest time from a fault, or a request to leave, to the others' next step, in seconds.
    slowest: f64,
    /// Folders of all members that were ever started.
    folders: Vec<std::path::PathBuf>,
    host_went: bool,
}

impl Script<'_> {
    fn here(&self) -> Vec<usize> {
        (0..SLOTS).filter(|&slot| self.slots[slot].member.is_some()).collect()
    }

    /// Returns the member that joined first, except the one at slot `but`.
    fn oldest(&self, but: Option<usize>) -> Result<&Member> {
        let others = self.here().into_iter().filter(|&slot| Some(slot) != but);
        let oldest =
            others.min_by_key(|&slot| self.slots[slot].joined).context("no other member is in the run")?;
        self.slots[oldest].member.as_ref().context("the slot has no member")
    }

    /// Starts a machine and waits until it is a member.
    fn join(&mut self, slot: usize) -> Result<()> {
        let oldest = self.oldest(None)?;
        let (.., before) = oldest.last_change();
        let ticket = oldest.folder.join("run.ticket").display().to_string();
        let (out, listen) = (self.started.to_string(), self.slots[slot].listen.clone());
        let address = self.slots[slot].link.address().to_string();
        let args =
            ["join", "--ticket-file", &ticket, "--out", &out, "--listen", &listen, "--address", &address];
        let more = ["--threads", "1", "--quiet"];
        let member = start(self.folder, self.started, farflung(&[&args[..], &more].concat())?)?;
        wait(self.oldest(None)?, self.here().len() as u64 + 1, before)?;
        self.add_member(slot, member);
        Ok(())
    }

    fn add_member(&mut self, slot: usize, member: Member) {
        self.folders.push(member.folder.clone());
        self.started += 1;
        self.changes += 1;
        self.slots[slot].joined = self.changes;
        self.slots[slot].member = Some(member);
    }

    /// Makes a member fail or leave. A frozen member is woken again.
    fn disrupt(&mut self, slot: usize, act: ScriptedChange) -> Result<()> {
        let (watcher, left) = (self.oldest(Some(slot))?, self.here().len() as u64 - 1);
        let (.., before) = watcher.last_change();
        let victim = self.slots[slot].member.as_ref().context("the slot has no member")?;
        victim.send(match act {
            ScriptedChange::Freeze => Signal::STOP,
            ScriptedChange::Leave => Signal::INT,
            ScriptedChange::Kill | ScriptedChange::Join => Signal::KILL,
        })?;
        let took = wait(watcher, left, before)?;
        if act == ScriptedChange::Freeze {
            let (.., before) = watcher.last_change();
            victim.send(Signal::CONT)?;
            wait(watcher, left + 1, before)?;
        }
        self.slowest = self.slowest.max(took);
        self.host_went |= victim.folder == self.folder.join("0");
        self.changes += 1;
        self.slots[slot].joined = self.changes;
        if act != ScriptedChange::Freeze {
            self.slots[slot].member = None;
        }
        Ok(())
    }

    /// Makes the next change. It is random, with three exceptions: a machine joins if there are at most
    /// [`LEAST`] members, and none joins if all places are taken (then one is killed); in the second half of
    /// the script the member that fails or leaves is the host, if it is still there.
    fn make_change(&mut self, random: &Philox, turn: u64, part: f64) -> Result<()> {
        let here = self.here();
        let free: Vec<usize> = (0..SLOTS).filter(|slot| !here.contains(slot)).collect();
        let of =
            |slots: &[usize], lane: u64| slots[random.below(4 * turn + lane, slots.len() as u64) as usize];
        let act = match random.below(4 * turn, 6) {
            _ if here.len() <= LEAST => ScriptedChange::Join,
            0 | 1 if !free.is_empty() => ScriptedChange::Join,
            0 | 2 => ScriptedChange::Kill,
            3 => ScriptedChange::Freeze,
            4 => ScriptedChange::Leave,
            _ if free.is_empty() => ScriptedChange::Kill,
            _ => ScriptedChange::Join,
        };
        if act == ScriptedChange::Join {
            self.join(of(&free, 1))?;
        } else {
            let host = here.iter().copied().find(|&slot| {
                self.slots[slot].member.as_ref().is_some_and(|member| member.folder == self.folder.join("0"))
            });
            let victim = host.filter(|_| part > 0.5).unwrap_or_else(|| of(&here, 2));
            self.disrupt(victim, act)?;
        }
        *self.done.entry(act).or_default() += 1;
        Ok(())
    }
}

/// Returns the rows of a member's metrics.
fn rows(folder: &Path) -> Vec<serde_json::Value> {
    let text = fs::read_to_string(folder.join("metrics.jsonl")).unwrap_or_default();
    text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

/// Returns the last loss on the held-out text, with the tokens and steps before it.
fn last_loss(rows: &[serde_json::Value]) -> Result<(f64, u64, u64)> {
    let of = |row: &serde_json::Value| {
        Some((row["val_loss"].as_f64()?, row["tokens"].as_u64()?, row["step"].as_u64()?))
    };
    rows.iter().rev().find_map(of).context("the metrics have no held-out loss")
}

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let folder = tempfile::tempdir().context("failed to make a temporary folder")?;
    let ran = run_in(report, options, folder.path());
    ran.map_err(|error| {
        let kept = folder.keep();
        error.context(format!("the files of the members are in {}", kept.display()))
    })
}

fn run_in(report: &mut Report<'_>, options: &Options, folder: &Path) -> Result<()> {
    let seconds = if options.long {
        900
    } else if options.quick {
        30
    } else {
        180
    };
    let slots = (0..SLOTS).map(|_| Slot::new()).collect::<Result<Vec<_>>>()?;
    let (listen, address) = (slots[0].listen.clone(), slots[0].link.address().to_string());
    // The run uses sockets only, so that all traffic passes the relays.
    let text = format!(
        "host --transport tcp --listen {listen} --address {address} --deadline 10s --steps 100000000 \
         --digest-every 10 --out 0 {SETTINGS}"
    );
    let args: Vec<&str> = text.split_whitespace().collect();
    let host = start(folder, 0, farflung(&args)?)?;
    wait_for_ticket(&host)?;
    let (done, folders) = (BTreeMap::new(), Vec::new());
    let mut script =
        Script { folder, slots, started: 0, changes: 0, done, slowest: 0.0, folders, host_went: false };
    script.add_member(0, host);
    let (begun, random) = (now(), Philox::new(report.seed(), 0));
    let mut turn = 0;
    while begun.elapsed() < Duration::from_secs(seconds) {
        let part = begun.elapsed().as_secs_f64() / seconds as f64;
        script
            .make_change(&random, turn, part)
            .with_context(|| format!("at change {turn}, after {:?}", script.done))?;
        turn += 1;
        let at = begun.elapsed().as_secs_f64();
        report.progress(&format!("{at:.0} of {seconds} s, {} members", script.here().len()))?;
        sleep(Duration::from_millis(500 + random.below(4 * turn + 3, 2_000)));
    }
    let oldest = script.oldest(None)?.folder.clone();
    let ticket = oldest.join("run.ticket").display().to_string();
    let status = farflung(&["status", "--ticket-file", &ticket])?
        .env("FARFLUNG_HOME", folder.join("home-eye"))
        .status()?;
    let here = script.here();
    for slot in here {
        script.slots[slot].member.as_ref().context("the slot has no member")?.send(Signal::INT)?;
    }
    sleep(Duration::from_secs(3));
    for (act, count) in &script.done {
        report.row(act.name(), f64::from(*count), "1", Threshold::None)?;
    }
    report.row(
        "changes hit the host",
        f64::from(u8::from(script.host_went)),
        "1",
        Threshold::AtLeast(1.0),
    )?;
    let metric = "longest time from a fault to the others' next step";
    report.row(metric, script.slowest, "s", Threshold::AtMost(11.0))?;
    report.row(
        "`farflung status` answers at the end",
        f64::from(u8::from(status.success())),
        "1",
        Threshold::AtLeast(1.0),
    )?;
    judge_steps(report, &script)?;
    let (loss, tokens, steps) = last_loss(&rows(&oldest))?;
    let members = tokens as f64 / (steps * TOKENS) as f64;
    let seeds = if options.quick { 3 } else { 5 };
    // The reference has as many workers in each step as this run had members, and so as many tokens, and its
    // seed. The others have other seeds.
    let (started, losses) = (script.started, 0);
    let losses = held_out_losses(EndedRun { folder, started, losses }, steps, seeds, report)?;
    let (&expected, others) = losses.split_first().context("the run was not repeated")?;
    let sigma = spread(others).sigma;
    report.row("members per step, mean", members, "1", Threshold::None)?;
    report.row("tokens", tokens as f64, "1", Threshold::None)?;
    report.row("held-out loss", loss, "nat", Threshold::None)?;
    report.row(
        "held-out loss of an undisturbed run with as many workers in each step",
        expected,
        "nat",
        Threshold::None,
    )?;
    report.row("standard deviation of such runs with other seeds", sigma, "nat", Threshold::None)?;
    // Two seeds are too few to estimate the spread.
    let mark = if options.quick { Threshold::None } else { Threshold::AtMost(2.0) };
    report.row(
        "held-out loss, difference from that of the undisturbed run, in standard deviations",
        (loss - expected).abs() / sigma,
        "sigma",
        mark,
    )
}

/// Checks that all members had the same weights after each step that several of them reported.
fn judge_steps(report: &mut Report<'_>, script: &Script<'_>) -> Result<()> {
    let mut digests: BTreeMap<u64, Vec<String>> = BTreeMap::new();
    let mut most = 0;
    for folder in &script.folders {
        for row in rows(folder) {
            let step = row["step"].as_u64().context("a row of the metrics has no step")?;
            most = most.max(step);
            if let Some(digest) = row["digest"].as_str() {
                digests.entry(step).or_default().push(digest.to_owned());
            }
        }
    }
    let shared: Vec<&Vec<String>> = digests.values().filter(|digests| digests.len() > 1).collect();
    let apart = shared.iter().filter(|digests| digests.iter().any(|digest| *digest != digests[0])).count();
    report.row("steps", most as f64, "1", Threshold::AtLeast(1.0))?;
    report.row(
        "steps for which several members reported their weights",
        shared.len() as f64,
        "1",
        Threshold::AtLeast(1.0),
    )?;
    report.row(
        "steps for which members reported different weights",
        apart as f64,
        "1",
        Threshold::AtMost(0.0),
    )
}
