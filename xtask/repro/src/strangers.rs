//! Opens up to ten thousand hostile connections to the store of a running job, and measures their cost.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use farflung::base::{Nanos, Philox};
use farflung::comm::secure::{Identity, JoinSecret, Security, Ticket, unix_seconds};
use farflung::comm::tcp::{Config, Store, StoreHost, join};
use farflung::comm::{CommError, Communicator, ReduceOp};

use crate::harness::{Bench, Options, Report, Threshold};
use crate::machine::{now, resident};

pub(crate) const BENCH: Bench = Bench {
    name: "strangers",
    claim: "10,000 hostile connections (garbage, half-open, slow, replayed, wrong keys and secrets, expired \
            tickets, floods) cost a running job no step and no bit, and a bounded time each; each is \
            rejected with a named reason, and legitimate clients can connect at the same time",
    source: "each step's sum against its closed form; the job's CPU time with and without them",
    seed: 0x57a9,
    run,
};

/// First argument of this program when it runs as the job.
pub(crate) const CHILD: &str = "--strangers-job";

const JOB: &str = "night";
const SECRET: &[u8] = b"a secret of this bench alone";
const RANKS: u32 = 3;
/// Time that the job waits between steps.
const PACE: Duration = Duration::from_millis(5);

fn identity(number: u8) -> Identity {
    Identity::from_seed([number; 32])
}

fn secret() -> Result<JoinSecret> {
    Ok(JoinSecret::from_text(SECRET)?)
}

/// Returns the job's security. It accepts the job's own key and that of the legitimate clients.
fn member() -> Result<Security> {
    Ok(Security::by_secret(&identity(1), &secret()?).allowing([identity(2).public()]))
}

fn friend() -> Result<Security> {
    Ok(Security::by_secret(&identity(2), &secret()?))
}

/// Returns the seconds of processor time that this process has used.
fn used() -> Result<f64> {
    let text = std::fs::read_to_string("/proc/self/stat")?;
    let fields: Vec<&str> =
        text.rsplit_once(')').context("failed to parse /proc/self/stat")?.1.split_whitespace().collect();
    // User and system time, in hundredths of a second on Linux.
    Ok(fields[11..13].iter().map(|ticks| ticks.parse::<f64>().unwrap_or(0.0)).sum::<f64>() / 100.0)
}

/// Runs steps of one rank until `over` is set on any rank. Returns the number of steps, and how many of them
/// had a wrong bit.
fn steps(comm: &Communicator, over: &AtomicBool) -> Result<[u64; 2], CommError> {
    let (mut count, mut wrong) = (0, 0);
    loop {
        let mut x: Vec<f32> = (0..50_000).map(|i| ((i + count) % 1000) as f32).collect();
        comm.all_reduce(&mut x, ReduceOp::Sum)?;
        let right =
            |(i, v): (u64, &f32)| v.to_bits() == (RANKS as f32 * ((i + count) % 1000) as f32).to_bits();
        wrong += u64::from(!(0..).zip(&x).all(right));
        count += 1;
        let mut ends = [f32::from(u8::from(over.load(Ordering::Relaxed)))];
        comm.all_reduce(&mut ends, ReduceOp::Max)?;
        if ends[0] > 0.0 {
            // A process that exits at once on a busy machine may reset a connection before the others have read
            // it.
            comm.barrier()?;
            thread::sleep(Duration::from_secs(2));
            return Ok([count, wrong]);
        }
        thread::sleep(PACE);
    }
}

/// Runs the job. It prints the address of its store, takes steps until its input ends, and prints its results,
/// one per line.
pub(crate) fn child(args: &[String], out: &mut dyn Write) -> Result<()> {
    ensure!(args.is_empty(), "expected no arguments");
    let security = member()?;
    let host = StoreHost::bind("127.0.0.1:0", JOB, &security)?;
    let master = TcpListener::bind("127.0.0.1:0")?.local_addr()?.to_string();
    let joined = |rank| -> Result<Communicator> {
        let mut config = Config::new(rank, RANKS, master.clone());
        config.security = member()?;
        Ok(Communicator::new(join(&config)?).with_deadline(Nanos::from_millis(60_000)))
    };
    let over = Arc::new(AtomicBool::new(false));
    let results = thread::scope(|scope| {
        let ranks: Vec<_> = (0..RANKS)
            .map(|rank| {
                let (joined, over) = (&joined, &over);
                scope.spawn(move || Ok::<_, anyhow::Error>(steps(&joined(rank)?, over)?))
            })
            .collect();
        writeln!(out, "{}", host.address())?;
        out.flush()?;
        let mut rest = String::new();
        std::io::stdin().read_to_string(&mut rest)?;
        over.store(true, Ordering::Relaxed);
        let ended = ranks.into_iter().map(|rank| rank.join().expect("no rank panics"));
        ended.collect::<Result<Vec<_>>>()
    })?;
    let wrong: u64 = results.iter().map(|[_, wrong]| wrong).sum();
    writeln!(out, "steps {}\nwrong {wrong}\ncpu {}", results[0][0], used()?)?;
    writeln!(out, "memory {}", resident().map_or(0, |(_, most)| most))?;
    for (kind, count) in security.refused().counts() {
        writeln!(out, "refused {count} {kind}")?;
    }
    Ok(())
}

/// A job in a separate process, with its output and the address of its store.
struct Running {
    child: Child,
    said: BufReader<std::process::ChildStdout>,
    store: SocketAddr,
}

#[derive(Debug, Default)]
struct JobReport {
    numbers: BTreeMap<String, f64>,
    refused: BTreeMap<String, u64>,
}

impl Running {
    fn start() -> Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg(CHILD).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::inherit());
        let mut child = command.spawn()?;
        let mut said = BufReader::new(child.stdout.take().context("stdout is not piped")?);
        let mut line = String::new();
        said.read_line(&mut line)?;
        Ok(Self { child, said, store: line.trim().parse()? })
    }

    fn end(mut self) -> Result<JobReport> {
        drop(self.child.stdin.take());
        let mut told = JobReport::default();
        for line in self.said.lines() {
            let line = line?;
            let mut words = line.splitn(3, ' ');
            match (words.next(), words.next(), words.next()) {
                (Some("refused"), Some(count), Some(kind)) => {
                    told.refused.insert(kind.to_owned(), count.parse()?);
                }
                (Some(name), Some(value), None) => {
                    told.numbers.insert(name.to_owned(), value.parse()?);
                }
                _ => bail!("the job printed an unexpected line: `{line}`"),
            }
        }
        let status = self.child.wait()?;
        ensure!(status.success(), "the job failed: {status}");
        Ok(told)
    }
}

/// Returns all bytes that a legitimate client sends, as an eavesdropper would record them.
fn captured(store: SocketAddr) -> Result<Vec<u8>> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let at = listener.local_addr()?.to_string();
    let kept = thread::spawn(move || -> Result<Vec<u8>> {
        let (client, _) = listener.accept()?;
        let server = TcpStream::connect(store)?;
        let (mut back_from, mut back_to) = (server.try_clone()?, client.try_clone()?);
        thread::spawn(move || std::io::copy(&mut back_from, &mut back_to));
        let (mut client, mut server, mut kept) = (client, server, Vec::new());
        let mut buffer = [0; 4096];
        while let Ok(count @ 1..) = client.read(&mut buffer) {
            kept.extend_from_slice(&buffer[..count]);
            server.write_all(&buffer[..count])?;
        }
        let _ = server.shutdown(Shutdown::Both);
        Ok(kept)
    });
    drop(Store::connect(&at, JOB, &friend()?, Duration::from_secs(10))?);
    kept.join().expect("a relay does not panic")
}

/// Kinds of hostile connections, and the reasons by which the job may reject each.
const KINDS: [(&str, &[&str]); 9] = [
    ("garbage", &["no TLS", "malformed handshake", "too many bytes"]),
    ("half-open", &["silent", "too many"]),
    ("slow", &["silent", "too many", "no TLS", "gave up"]),
    ("replay", &["replayed or changed"]),
    ("stranger's key", &["stranger's key"]),
    ("wrong secret", &["wrong secret"]),
    ("expired ticket", &["expired ticket"]),
    ("not encrypted", &["not encrypted"]),
    ("flood", &["too many bytes", "malformed handshake"]),
];

/// Makes hostile connections of all kinds.
struct Attack {
    store: SocketAddr,
    replay: Vec<u8>,
    by_others: [Security; 4],
    rng: Philox,
}

impl Attack {
    fn new(store: SocketAddr, seed: u64) -> Result<Self> {
        let (past, host) = (unix_seconds() - 3600, identity(1).public());
        let ticket = Ticket {
            addresses: vec!["127.0.0.1:1".to_owned()],
            host,
            secret: secret()?.until(past),
            expiry: past,
        };
        let by_others = [
            Security::by_secret(&identity(9), &secret()?),
            Security::by_secret(&identity(2), &JoinSecret::generate()?),
            Security::by_ticket(&identity(2), &ticket),
            Security::unencrypted(),
        ];
        Ok(Self { store, replay: captured(store)?, by_others, rng: Philox::new(seed, 1) })
    }

    /// Makes one hostile connection, of the kind that follows from `number`.
    fn connect(&self, number: u64) {
        let Ok(mut stream) = TcpStream::connect(self.store) else { return };
        let bytes =
            |count: u64| -> Vec<u8> { (0..count).map(|i| self.rng.word(number * 8192 + i) as u8).collect() };
        let _ = stream.set_read_timeout(Some(Duration::from_secs(2)));
        match number % KINDS.len() as u64 {
            0 => {
                let _ = stream.write_all(&bytes(40 + number % 400));
            }
            // Nothing is sent, and the connection is closed after at most 39 ms.
            1 => thread::sleep(Duration::from_millis(number % 40)),
            2 => {
                for byte in [0x16, 3, 1, 2, 0].into_iter().chain(bytes(5)) {
                    let _ = stream.write_all(&[byte]);
                    thread::sleep(Duration::from_millis(2));
                }
            }
            3 => {
                let _ = stream.write_all(&self.replay);
                let _ = stream.read_to_end(&mut Vec::new());
            }
            kind @ 4..=7 => {
                drop(stream);
                let security = &self.by_others[kind as usize - 4];
                let limit = Duration::from_secs(2);
                let refused = Store::connect(&self.store.to_string(), JOB, security, limit);
                assert!(refused.is_err(), "a hostile connection was accepted: {}", KINDS[kind as usize].0);
            }
            _ => {
                let record = [&[0x16, 3, 1, 0x3F, 0][..], &vec![1; 60_000]].concat();
                let _ = stream.write_all(&record);
            }
        }
    }
}

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let hostile: u64 = if options.quick { 900 } else { 10_000 };
    let job = Running::start()?;
    let attack = Attack::new(job.store, report.seed())?;
    let next = AtomicU64::new(0);
    let start = now();
    let (friends, slowest) = thread::scope(|scope| -> Result<(u64, f64)> {
        let strikers: Vec<_> = (0..8)
            .map(|_| {
                scope.spawn(|| {
                    loop {
                        let number = next.fetch_add(1, Ordering::Relaxed);
                        if number >= hostile {
                            return;
                        }
                        attack.connect(number);
                    }
                })
            })
            .collect();
        let (mut friends, mut slowest) = (0, 0.0_f64);
        while strikers.iter().any(|striker| !striker.is_finished()) {
            let start = now();
            let store = Store::connect(&job.store.to_string(), JOB, &friend()?, Duration::from_secs(30))?;
            store.put("friend", &friends.to_string().into_bytes())?;
            slowest = slowest.max(start.elapsed().as_secs_f64());
            friends += 1;
            thread::sleep(Duration::from_millis(50));
        }
        Ok((friends, slowest))
    })?;
    let took = start.elapsed();
    let under_fire = job.end()?;
    // Runs the job once more without attacks, for the same time.
    let job = Running::start()?;
    thread::sleep(took);
    let in_peace = job.end()?;

    let number = |told: &JobReport, name: &str| told.numbers.get(name).copied().unwrap_or(f64::NAN);
    report.row("hostile connections", hostile as f64, "", Threshold::AtLeast(hostile as f64))?;
    report.row("steps during the attack", number(&under_fire, "steps"), "", Threshold::AtLeast(10.0))?;
    report.row(
        "steps in the same time without an attack",
        number(&in_peace, "steps"),
        "",
        Threshold::None,
    )?;
    report.row("steps with a wrong bit", number(&under_fire, "wrong"), "", Threshold::AtMost(0.0))?;
    report.row("legitimate clients that connected", friends as f64, "", Threshold::AtLeast(1.0))?;
    report.row("slowest legitimate client", slowest, "s", Threshold::AtMost(10.0))?;
    // Compared per step, since each step costs CPU time too and the numbers of steps differ.
    let each = number(&in_peace, "cpu") / number(&in_peace, "steps").max(1.0);
    let cost = number(&under_fire, "cpu") - each * number(&under_fire, "steps");
    report.row(
        "CPU time of a hostile connection",
        cost / hostile as f64 * 1e3,
        "ms",
        Threshold::AtMost(5.0),
    )?;
    let more = number(&under_fire, "memory") - number(&in_peace, "memory");
    report.row("memory above that without an attack", more / 1e6, "MB", Threshold::AtMost(64.0))?;
    report.row("bytes that a connection may send before its proof", 4096.0, "", Threshold::None)?;
    let refused: u64 = under_fire.refused.values().sum();
    report.row(
        "connections rejected with a named reason",
        refused as f64,
        "",
        Threshold::AtLeast(0.9 * hostile as f64),
    )?;
    for (name, count) in &under_fire.refused {
        report.row(&format!("rejected: {name}"), *count as f64, "", Threshold::None)?;
    }
    for (kind, names) in KINDS {
        let known: u64 = names.iter().filter_map(|name| under_fire.refused.get(*name)).sum();
        report.row(
            &format!("{kind}: rejected as {}", names.join(", ")),
            known as f64,
            "",
            Threshold::AtLeast(1.0),
        )?;
    }
    Ok(())
}
