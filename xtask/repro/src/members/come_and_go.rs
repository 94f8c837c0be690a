//! Members come and go many times: what the host holds does not grow.

use std::fs;
use std::path::Path;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::process::Signal;

use super::processes::{Member, join, start, wait, wait_for_ticket};
use crate::binary::farflung;
use crate::harness::{Bench, Options, Report, Threshold};

pub(crate) const BENCH: Bench = Bench {
    name: "come-and-go",
    claim: "after the first ten, machines that join and leave, or are killed, cost the host nothing that stays: \
            after 200 of them its descriptors and its resident memory are the same within 5 %, over shared \
            memory and over TCP, with and without local steps",
    source: "the design of farflung (issue 44)",
    seed: 0,
    run,
};

/// A run that members join and leave.
struct Arm {
    name: &'static str,
    flags: &'static str,
    /// The signal by which each member goes.
    signal: Signal,
}

const ARMS: [Arm; 8] = [
    Arm { name: "shared memory, ddp, members that leave", flags: MEMORY_DDP, signal: Signal::INT },
    Arm { name: "shared memory, ddp, members that are killed", flags: MEMORY_DDP, signal: Signal::KILL },
    Arm { name: "shared memory, diloco, members that leave", flags: MEMORY_DILOCO, signal: Signal::INT },
    Arm {
        name: "shared memory, diloco, members that are killed",
        flags: MEMORY_DILOCO,
        signal: Signal::KILL,
    },
    Arm { name: "TCP, ddp, members that leave", flags: TCP_DDP, signal: Signal::INT },
    Arm { name: "TCP, ddp, members that are killed", flags: TCP_DDP, signal: Signal::KILL },
    Arm { name: "TCP, diloco, members that leave", flags: TCP_DILOCO, signal: Signal::INT },
    Arm { name: "TCP, diloco, members that are killed", flags: TCP_DILOCO, signal: Signal::KILL },
];

const MEMORY_DDP: &str = "--transport auto --sync ddp";
const MEMORY_DILOCO: &str = "--transport auto --sync diloco --sync-every 4";
const TCP_DDP: &str = "--transport tcp --sync ddp";
const TCP_DILOCO: &str = "--transport tcp --sync diloco --sync-every 4";

const FLAGS: &str = "host --listen 127.0.0.1:0 --deadline 2s --steps 100000000 --layers 2 --heads 2 --dim 8 \
                     --context 8 --batch 1 --threads 1 --eval-every 100000000 --eval-batches 1 --sample-tokens 0 \
                     --data text.txt --quiet --out 0 --checkpoint-every 0";

/// Number of departures that are not compared: buffers reach their largest size meanwhile.
const WARM: usize = 10;
/// Number of departures of which the median counts.
const COMPARED: usize = 10;
/// Largest allowed quotient of the last and the first median.
const MOST: f64 = 1.05;

/// What a process holds.
#[derive(Debug, Clone, Copy)]
struct Held {
    descriptors: usize,
    /// Resident memory in bytes, shared memory included.
    resident: u64,
}

impl Held {
    fn of(process: u32) -> Result<Self> {
        let descriptors = fs::read_dir(format!("/proc/{process}/fd"))?.count();
        let status = fs::read_to_string(format!("/proc/{process}/status"))?;
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).context("no resident memory")?;
        let kib: u64 = line.split_whitespace().nth(1).context("no number")?.parse()?;
        Ok(Self { descriptors, resident: 1024 * kib })
    }
}

fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    ARMS.iter().try_for_each(|arm| come_and_go(arm, report, options))
}

/// Starts a host and a member that stays. Then one member after the other joins, and goes once it is admitted.
fn come_and_go(arm: &Arm, report: &mut Report<'_>, options: &Options) -> Result<()> {
    let departures = if options.quick { 30 } else { 200 };
    let folder = tempfile::tempdir().context("failed to make a temporary folder")?;
    let folder = folder.path();
    fs::write(folder.join("text.txt"), "the quick brown fox ".repeat(500))?;
    let flags: Vec<&str> = FLAGS.split_whitespace().chain(arm.flags.split_whitespace()).collect();
    let host = start(folder, 0, farflung(&flags)?)?;
    wait_for_ticket(&host)?;
    let stays = admitted(folder, &host, 1)?;
    let mut held = Vec::with_capacity(departures);
    for turn in 0..departures {
        let member = admitted(folder, &host, 2)?;
        let (.., before) = host.last_change();
        member.send(arm.signal)?;
        wait(&host, 2, before)?;
        drop(member);
        fs::remove_dir_all(folder.join("2")).context("failed to remove the folder of a former member")?;
        // The connection ends shortly after the change.
        sleep(Duration::from_millis(50));
        held.push(Held::of(host.id())?);
        let Held { descriptors, resident } = held[turn];
        let memory = resident / 1_000_000;
        report.progress(&format!(
            "{}: {} of {departures} gone, the host has {descriptors} descriptors and {memory} MB",
            arm.name,
            turn + 1
        ))?;
    }
    drop(stays);
    let (first, last) = (&held[WARM..WARM + COMPARED], &held[departures - COMPARED..]);
    let of = |held: &[Held], value: fn(&Held) -> f64| median(held.iter().map(value));
    let name = arm.name;
    let files: fn(&Held) -> f64 = |held| held.descriptors as f64;
    let memory: fn(&Held) -> f64 = |held| held.resident as f64 / 1e6;
    let [before, after] = [of(first, files), of(last, files)];
    report.row(
        &format!("{name}: descriptors after the last ten"),
        after,
        "1",
        Threshold::AtMost(MOST * before),
    )?;
    let [before, after] = [of(first, memory), of(last, memory)];
    report.row(
        &format!("{name}: resident memory after departures 11 to 20"),
        before,
        "MB",
        Threshold::None,
    )?;
    report.row(
        &format!("{name}: resident memory after the last ten"),
        after,
        "MB",
        Threshold::AtMost(MOST * before),
    )
}

/// Starts a member in folder `number`, and waits until the host has admitted it.
fn admitted(folder: &Path, host: &Member, number: usize) -> Result<Member> {
    let (members, before) = host.last_change();
    let member = join(folder, number, &host.folder.join("run.ticket"))?;
    let said = folder.join(format!("home-{number}")).join("said.txt");
    let told = || format!("the newcomer said {:?}", fs::read_to_string(&said).unwrap_or_default());
    wait(host, members.max(1) + 1, before).with_context(told)?;
    Ok(member)
}
