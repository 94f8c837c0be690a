//! Checks that a job of processes forms when ranks start late, restart, or start twice, and when strangers
//! connect.

use std::io::Write;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, ExitStatus};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use farflung::base::Philox;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::binary::farflung;
use crate::harness::{Bench, Options, Report, Threshold};
use crate::machine::now;

pub(crate) const BENCH: Bench = Bench {
    name: "rendezvous",
    claim: "with ranks that are late, early, killed and restarted or started twice, with strangers and with \
            1,000 idle connections, the right job forms and trains within its deadline, and no other job does",
    source: "ours",
    seed: 1337,
    run,
};

const RANKS: u32 = 4;
/// Value of the ranks' `--deadline`, and the longest time of a trial.
const DEADLINE: Duration = Duration::from_secs(20);
const IDLE: usize = 1000;

/// A disturbance while the ranks connect.
#[derive(Debug, Clone, Copy)]
enum Trouble {
    /// Each rank starts at a random time, the master included.
    Late,
    /// One rank is killed while another is awaited, and is started again.
    Restart,
    /// The master is killed and started again.
    MasterRestarts,
    /// One rank is started twice.
    Twice,
    /// Ranks of another job or another size connect, and connections that send noise.
    Strangers,
    /// Connections that send nothing.
    Idle,
}

impl Trouble {
    const ALL: [Self; 6] =
        [Self::Late, Self::Restart, Self::MasterRestarts, Self::Twice, Self::Strangers, Self::Idle];

    const fn name(self) -> &'static str {
        match self {
            Self::Late => "late and early ranks",
            Self::Restart => "a rank is restarted",
            Self::MasterRestarts => "the master is restarted",
            Self::Twice => "a rank is started twice",
            Self::Strangers => "strangers",
            Self::Idle => "1,000 idle connections",
        }
    }
}

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let folder = tempfile::tempdir().context("failed to make a temporary folder")?;
    let text = folder.path().join("text.txt");
    std::fs::write(&text, "the quick brown fox jumps over the lazy dog. ".repeat(500))?;
    // This process holds the idle connections, so it needs a higher limit of open files.
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit })?;
    let times = if options.quick { 2 } else { 8 };
    for (stream, trouble) in (0..).zip(Trouble::ALL) {
        let random = Philox::new(report.seed(), stream);
        let (mut failed, mut slowest) = (0_u32, 0.0_f64);
        for time in 0..times {
            let out = folder.path().join(format!("{stream}-{time}"));
            let draw = |number: u64, below: u64| random.below(time * 16 + number, below);
            let meeting = Meeting { port: free_port()?, text: &text, out: &out };
            let start = now();
            let formed = meeting.hold(trouble, &draw).with_context(|| trouble.name())?;
            failed += u32::from(!formed);
            slowest = slowest.max(start.elapsed().as_secs_f64());
        }
        let name = trouble.name();
        report.row(
            &format!("{name}: jobs that did not form"),
            f64::from(failed),
            "1",
            Threshold::AtMost(0.0),
        )?;
        let metric = format!("{name}: slowest job");
        report.row(&metric, slowest, "s", Threshold::AtMost(DEADLINE.as_secs_f64()))?;
    }
    Ok(())
}

fn free_port() -> Result<u16> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port())
}

/// Address, text and folder of a job.
struct Meeting<'a> {
    port: u16,
    text: &'a Path,
    out: &'a Path,
}

/// Name and size of a job.
#[derive(Clone, Copy)]
struct Job {
    name: &'static str,
    size: u32,
}

const RIGHT: Job = Job { name: "right", size: RANKS };

impl Meeting<'_> {
    fn start(&self, rank: u32, job: Job) -> Result<Running> {
        let model =
            ["train", "--layers", "2", "--heads", "2", "--dim", "8", "--context", "8", "--batch", "1"];
        let mut command = farflung(&model)?;
        command.args([
            "--warmup",
            "0",
            "--threads",
            "1",
            "--steps",
            "2",
            "--eval-batches",
            "1",
            "--sync",
            "ddp",
        ]);
        command.args(["--sample-tokens", "0", "--deadline", "20s", "--job", job.name]);
        command.arg("--data").arg(self.text).arg("--out").arg(self.out.with_extension(job.name));
        command.env("RANK", rank.to_string()).env("LOCAL_RANK", rank.to_string());
        command.env("WORLD_SIZE", job.size.to_string()).env("MASTER_ADDR", "127.0.0.1");
        command.env("MASTER_PORT", self.port.to_string());
        Ok(Running(command.spawn().context("failed to start `farflung`")?))
    }

    /// Returns true if the right job formed, trained and ended well, and no other job did.
    fn hold(&self, trouble: Trouble, draw: &dyn Fn(u64, u64) -> u64) -> Result<bool> {
        let until = now() + DEADLINE;
        let moment = |number| Duration::from_millis(draw(number, 700));
        let last = RANKS - 1;
        let mut others = Vec::new();
        let mut idle = Vec::new();
        let mut ranks = Vec::new();
        match trouble {
            Trouble::Late => {
                let mut order: Vec<(Duration, u32)> =
                    (0..RANKS).map(|rank| (moment(rank.into()), rank)).collect();
                order.sort_unstable();
                let mut passed = Duration::ZERO;
                for (at, rank) in order {
                    thread::sleep(at.saturating_sub(passed));
                    passed = at;
                    ranks.push(self.start(rank, RIGHT)?);
                }
            }
            Trouble::Restart | Trouble::MasterRestarts => {
                for rank in 0..last {
                    ranks.push(self.start(rank, RIGHT)?);
                }
                thread::sleep(moment(0));
                let again = if let Trouble::Restart = trouble {
                    1 + draw(1, u64::from(last) - 1) as usize
                } else {
                    0
                };
                ranks[again].kill()?;
                ranks[again] = self.start(again as u32, RIGHT)?;
                thread::sleep(moment(2));
                ranks.push(self.start(last, RIGHT)?);
            }
            Trouble::Twice => {
                for rank in 0..last {
                    ranks.push(self.start(rank, RIGHT)?);
                }
                thread::sleep(moment(0));
                others.push(self.start(1, RIGHT)?);
                thread::sleep(moment(1));
                ranks.push(self.start(last, RIGHT)?);
            }
            Trouble::Strangers => {
                ranks.push(self.start(0, RIGHT)?);
                thread::sleep(moment(0));
                others.push(self.start(1, Job { name: "other", ..RIGHT })?);
                others.push(self.start(1, Job { size: RANKS + 1, ..RIGHT })?);
                others.push(self.start(RANKS + 1, Job { size: RANKS + 2, ..RIGHT })?);
                idle.extend(self.connections(30));
                for (number, stream) in (0..).zip(&mut idle) {
                    let noise: Vec<u8> = (0..100).map(|i| draw(number * 100 + i, 256) as u8).collect();
                    // The connection may have been rejected already.
                    let _ = stream.write_all(&noise);
                }
                for rank in 1..RANKS {
                    ranks.push(self.start(rank, RIGHT)?);
                }
            }
            Trouble::Idle => {
                ranks.push(self.start(0, RIGHT)?);
                idle.extend(self.connections(IDLE));
                for rank in 1..RANKS {
                    ranks.push(self.start(rank, RIGHT)?);
                }
            }
        }
        let ended =
            |running: &mut Running| running.end(until).map(|status| status.is_some_and(|s| s.success()));
        let mut right = ranks.iter_mut().map(ended).collect::<Result<Vec<_>>>()?;
        let wrong = others.iter_mut().map(ended).collect::<Result<Vec<_>>>()?;
        if let Trouble::Twice = trouble {
            // Exactly one of the two may succeed.
            let one = right[1] != wrong[0];
            right[1] = true;
            return Ok(one && right.iter().all(|&well| well));
        }
        Ok(right.iter().all(|&well| well) && wrong.iter().all(|&well| !well))
    }

    /// Returns `count` connections to the master, once it listens; fewer if it does not within [`DEADLINE`].
    fn connections(&self, count: usize) -> Vec<TcpStream> {
        let until = now() + DEADLINE;
        let mut all = Vec::new();
        while all.len() < count && now() < until {
            match TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)) {
                Ok(stream) => all.push(stream),
                Err(_) => thread::sleep(Duration::from_millis(2)),
            }
        }
        all
    }
}

/// A rank's process. Dropping this kills it.
struct Running(Child);

impl Running {
    fn kill(&mut self) -> Result<()> {
        self.0.kill()?;
        self.0.wait()?;
        Ok(())
    }

    /// Waits until a time and returns the exit status; `None` if the process has not ended by then.
    fn end(&mut self, until: Instant) -> Result<Option<ExitStatus>> {
        loop {
            if let Some(status) = self.0.try_wait()? {
                return Ok(Some(status));
            }
            if now() >= until {
                return Ok(None);
            }
            thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // The process may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
