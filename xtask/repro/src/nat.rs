//! Two homes behind routers that translate addresses, and a relay between them. Both train one model: over a
//! direct path if the routers let them find one, else over the relay. In some runs the relay is killed, and in
//! some of these it is started again.

mod world;

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};

use crate::binary::farflung;
use crate::harness::{Bench, Options, Report, Threshold};
use crate::machine::now;
use crate::trained::Trained;
use world::{OPEN, Translation, World};

pub(crate) const BENCH: Bench = Bench {
    name: "nat",
    claim: "two machines behind address translation train together, with the same bits as a run over TCP; \
            with a direct path the end of the relay costs nothing, and without one its end and restart cost \
            at most the step in progress",
    source: "network namespaces with nft (`cargo xtask setup nat`), iroh's relay server, no service outside",
    seed: 0,
    run,
};

/// The relay's port.
const PORT: &str = "3340";
/// Time for which the relay is away.
const AWAY: Duration = Duration::from_secs(4);
/// Longest time that a run may take.
const LIMIT: Duration = Duration::from_mins(4);

/// A job of two ranks.
struct Job<'a> {
    folder: &'a Path,
    steps: u32,
}

/// A process, killed when this is dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // The process may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The results of a run over QUIC.
struct RunResult {
    trained: Trained,
    /// Times at which the steps were done, in seconds.
    done: Vec<f64>,
    /// Bytes that the last relay passed on: after its return, or in the whole run if it did not die; 0 if it
    /// did not return.
    carried: f64,
    /// Bytes that both ranks sent.
    sent: f64,
}

impl Job<'_> {
    fn args(&self, out: &Path) -> Vec<String> {
        let (steps, out) = (self.steps.to_string(), out.display().to_string());
        let args = ["train", "--model", "nano", "--steps", &steps, "--workers", "2", "--threads", "1"];
        let more = ["--sync", "ddp", "--sample-tokens", "0", "--eval-every", &steps, "--out", &out];
        args.iter().chain(&more).map(|&arg| arg.to_owned()).collect()
    }

    fn command(&self, args: &[String]) -> Result<Command> {
        let mut command = farflung(&args.iter().map(String::as_str).collect::<Vec<_>>())?;
        command.current_dir(self.folder);
        Ok(command)
    }

    /// Runs the same job over TCP on the loopback.
    fn over_tcp(&self) -> Result<Trained> {
        let out = self.folder.join("tcp");
        let mut args: Vec<String> = ["launch", "-n", "2", "--"].map(str::to_owned).to_vec();
        args.extend(self.args(&out));
        let said = self.command(&args)?.stderr(Stdio::piped()).output()?;
        ensure!(said.status.success(), "the run over TCP failed: {}", String::from_utf8_lossy(&said.stderr));
        Trained::read(&out)
    }

    /// Starts a relay in the open network, and waits until it listens.
    fn relay(&self, world: &World) -> Result<Running> {
        let listen = format!("{OPEN}:{PORT}");
        let relay = self.command(&["relay", "--listen", &listen].map(str::to_owned))?;
        let mut started =
            Running(world.in_the_open(&relay).stdout(Stdio::piped()).stderr(Stdio::null()).spawn()?);
        let said = started.0.stdout.as_mut().context("stdout is not piped")?;
        let mut line = String::new();
        BufReader::new(said).read_line(&mut line)?;
        ensure!(line.starts_with("http://"), "the relay printed `{line}`, expected its address");
        Ok(started)
    }

    /// Starts a rank in its home.
    fn rank(&self, world: &World, rank: u32, ticket: &Path, out: &Path) -> Result<Running> {
        let mut args = self.args(out);
        args.extend(["--transport", "iroh", "--ticket-file"].map(str::to_owned));
        args.push(ticket.display().to_string());
        let mut command = world.at_home(rank + 1, &self.command(&args)?);
        command.current_dir(self.folder).env("FARFLUNG_HOME", self.home(rank));
        command.env("RANK", rank.to_string()).env("WORLD_SIZE", "2");
        command.stdin(Stdio::null()).stdout(Stdio::null());
        command.stderr(fs::File::create(out.with_extension(format!("{rank}.stderr")))?);
        Ok(Running(command.spawn()?))
    }

    fn home(&self, rank: u32) -> PathBuf {
        self.folder.join(format!("home-{rank}"))
    }

    /// Makes a ticket of rank 0 whose only address is the relay.
    fn ticket(&self) -> Result<PathBuf> {
        let path = self.folder.join("ticket");
        let (address, out) = (format!("http://{OPEN}:{PORT}"), path.display().to_string());
        let args = ["ticket", "--address", &address, "--out", &out].map(str::to_owned);
        let said = self.command(&args)?.env("FARFLUNG_HOME", self.home(0)).stderr(Stdio::piped()).output()?;
        ensure!(said.status.success(), "`farflung ticket` failed: {}", String::from_utf8_lossy(&said.stderr));
        Ok(path)
    }

    /// Runs both ranks. The relay is killed after `dies` steps, and started again after [`AWAY`] if it
    /// `returns`.
    fn over_quic(
        &self,
        name: &str,
        by: Translation,
        dies: Option<usize>,
        returns: bool,
    ) -> Result<RunResult> {
        let world = World::make(by)?;
        let mut relay = Some(self.relay(&world)?);
        let ticket = self.ticket()?;
        let out = self.folder.join(name);
        let start = now();
        let mut ranks =
            (0..2).map(|rank| self.rank(&world, rank, &ticket, &out)).collect::<Result<Vec<_>>>()?;
        if let Some(steps) = dies {
            while rows(&out).len() < steps {
                check(&out, &mut ranks, start)?;
                std::thread::sleep(Duration::from_millis(5));
            }
            // SIGKILL, so that the relay cannot send anything to its peers.
            drop(relay.take());
            if returns {
                std::thread::sleep(AWAY);
                relay = Some(self.relay(&world)?);
            }
        }
        while !ranks.iter_mut().all(|rank| rank.0.try_wait().is_ok_and(|ended| ended.is_some())) {
            check(&out, &mut ranks, start)?;
            std::thread::sleep(Duration::from_millis(20));
        }
        check(&out, &mut ranks, start)?;
        let carried = relay.map_or(Ok(0.0), carried)?;
        let rows = rows(&out);
        let sent = rows.last().map_or(0.0, |row| row.sent);
        Ok(RunResult {
            trained: Trained::read(&out)?,
            done: rows.iter().map(|row| row.wall).collect(),
            carried,
            sent,
        })
    }
}

/// Fails if a rank has failed, or after [`LIMIT`].
fn check(out: &Path, ranks: &mut [Running], start: Instant) -> Result<()> {
    for (rank, running) in ranks.iter_mut().enumerate() {
        let said = || fs::read_to_string(out.with_extension(format!("{rank}.stderr"))).unwrap_or_default();
        let failed = running.0.try_wait()?.filter(|status| !status.success());
        ensure!(failed.is_none(), "rank {rank} failed: {failed:?}\n{}", said());
        ensure!(start.elapsed() < LIMIT, "the run did not end within {LIMIT:?}; rank {rank}:\n{}", said());
    }
    Ok(())
}

/// A line of the metrics.
struct Row {
    /// Seconds since the start.
    wall: f64,
    /// Bytes that both ranks have sent so far.
    sent: f64,
}

fn rows(out: &Path) -> Vec<Row> {
    let text = fs::read_to_string(out.join("metrics.jsonl")).unwrap_or_default();
    let read = |line: &str| {
        let row: serde_json::Value = serde_json::from_str(line).ok()?;
        let (sent, received) = (row["bytes_sent"].as_f64()?, row["bytes_received"].as_f64()?);
        Some(Row { wall: row["wall_s"].as_f64()?, sent: sent + received })
    };
    text.lines().filter_map(read).collect()
}

/// Ends a relay with SIGTERM. Its last line has the bytes that it passed on.
fn carried(mut relay: Running) -> Result<f64> {
    let pid = Pid::from_raw(relay.0.id().cast_signed()).context("invalid process id")?;
    kill_process(pid, Signal::TERM)?;
    let mut said = String::new();
    relay.0.stdout.take().context("stdout is not piped")?.read_to_string(&mut said)?;
    let bytes = said.lines().find_map(|line| line.strip_suffix(" bytes carried"));
    Ok(bytes
        .with_context(|| format!("the relay printed `{said}`, expected the bytes that it carried"))?
        .parse()?)
}

/// Returns the longest time between the ends of two consecutive steps, and how many such times are longer than
/// `limit`.
fn waits(done: &[f64], limit: f64) -> (f64, usize) {
    let waits = || done.windows(2).map(|pair| pair[1] - pair[0]);
    (waits().fold(0.0, f64::max), waits().filter(|wait| *wait > limit).count())
}

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let job = Job { folder: folder.path(), steps: if options.quick { 24 } else { 150 } };
    let wanted = job.over_tcp()?;
    let half = job.steps as usize / 2;
    report.row("steps of each run", f64::from(job.steps), "1", Threshold::None)?;
    let runs = [
        ("ports kept, relay killed", Translation::Kept, Some(half), false),
        ("ports random", Translation::Random, None, false),
        ("ports random, relay killed and restarted", Translation::Random, Some(half), true),
    ];
    for (index, (name, by, dies, returns)) in runs.into_iter().enumerate() {
        let ran = job.over_quic(&format!("run-{index}"), by, dies, returns)?;
        let unlike = f64::from(u8::from(ran.trained != wanted));
        report.row(
            &format!("{name}: losses or weights with bits other than over TCP"),
            unlike,
            "1",
            Threshold::AtMost(0.0),
        )?;
        let share = ran.carried / ran.sent;
        match (by, returns) {
            // A killed relay prints no count.
            (Translation::Kept, _) => {}
            (Translation::Random, false) => {
                report.row(
                    &format!("{name}: bytes relayed, relative to bytes sent"),
                    share,
                    "1",
                    Threshold::AtLeast(1.0),
                )?;
            }
            (Translation::Random, true) => {
                let after = Threshold::AtLeast(0.2);
                report.row(
                    &format!("{name}: bytes relayed after the restart, relative to all bytes sent"),
                    share,
                    "1",
                    after,
                )?;
            }
        }
        let (longest, late) = waits(&ran.done, 0.8 * AWAY.as_secs_f64());
        report.row(&format!("{name}: longest step"), longest, "s", Threshold::None)?;
        let most = if returns { 1.0 } else { 0.0 };
        report.row(&format!("{name}: steps that waited"), late as f64, "1", Threshold::AtMost(most))?;
    }
    Ok(())
}
