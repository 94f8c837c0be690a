//! Starts a job of several processes on this machine and stays until the last one ended.
//!
//! One thread a child reads its stderr; the caller's thread polls for exits and signals. It refuses to know
//! what the children do.

use std::ffi::OsString;
use std::io::{BufRead, BufReader};
use std::net::{SocketAddr, TcpListener};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, ChildStderr, Command, ExitStatus, Stdio};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use farflung_comm::secure::JoinSecret;
use rustix::process::{Pid, Signal as SystemSignal, kill_process};

use crate::{Error, Result, Signal, Stop, terminal};

/// How often exits and signals are looked for.
const POLL: Duration = Duration::from_millis(20);

/// A job to start.
#[derive(Debug, Clone)]
pub struct Launch {
    /// Number of processes.
    pub processes: usize,
    /// Host and port of rank 0; port 0 is any free one.
    pub master: (String, u16),
    /// How long the others may go on after one failed, and again how long they may take to end when asked to.
    pub grace: Duration,
    /// A join secret for the processes, in `FARFLUNG_SECRET`, unless they have one from elsewhere.
    pub secret: Option<JoinSecret>,
}

impl Launch {
    /// Starts `program` with `args` as ranks `0..processes` and waits for all of them.
    ///
    /// Each gets RANK, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT`; lines
    /// of its stderr appear behind `[rank]`, stdout passes through. Each signal of `stop` is passed on, the
    /// third as SIGKILL, also to those that stand still. After the first failure the others have `grace` to end
    /// by themselves, then SIGTERM and `grace`, then SIGKILL. On Linux they get SIGTERM as well where the
    /// thread that runs this ends first, however it ends.
    ///
    /// Errors: [`Error::Child`] with the rank that the job failed by, [`Error::Stopped`] if a signal ended the
    /// job, [`Error::Start`], [`Error::Io`] if no port is free.
    pub fn run(&self, program: &Path, args: &[OsString], stop: &Stop) -> Result<()> {
        let port = match self.master.1 {
            0 => free_port(&self.master.0)?,
            port => port,
        };
        let mut job = Job { children: Vec::new(), readers: Vec::new() };
        for rank in 0..self.processes {
            let mut command = Command::new(program);
            end_with_parent(&mut command);
            let mut child = command
                .args(args)
                .env("RANK", rank.to_string())
                .env("LOCAL_RANK", rank.to_string())
                .env("WORLD_SIZE", self.processes.to_string())
                .env("LOCAL_WORLD_SIZE", self.processes.to_string())
                .env("MASTER_ADDR", &self.master.0)
                .env("MASTER_PORT", port.to_string())
                .envs(self.secret.iter().map(|secret| (crate::access::SECRET, as_text(secret))))
                // A terminal's Ctrl-C goes to a whole group: the children would get it twice, and the second
                // kills.
                .process_group(0)
                .stdin(Stdio::null())
                .stderr(Stdio::piped())
                .spawn()
                .map_err(|source| Error::Start { rank, source })?;
            job.readers.extend(child.stderr.take().map(|stderr| thread::spawn(move || prefix(rank, stderr))));
            job.children.push((child, None));
        }
        let outcome = self.watch(&mut job, stop);
        job.drain();
        outcome
    }

    /// Polls until all ended.
    fn watch(&self, job: &mut Job, stop: &Stop) -> Result<()> {
        let mut failed: Vec<Failure> = Vec::new();
        let mut forwarded: Option<Signal> = None;
        let mut passed = 0;
        // Time since the first failure, or since a signal was passed on, in polls: no clock is needed.
        let mut waited = Duration::ZERO;
        let mut asked = false;
        while job.poll(&mut failed, asked)? {
            thread::sleep(POLL);
            if let Some(signal) = stop.take() {
                forwarded.get_or_insert(signal);
                passed += 1;
                job.signal(match signal {
                    // The children save at the first and end at the second; whoever ignores both is not asked
                    // again.
                    _ if passed > 2 => SystemSignal::KILL,
                    Signal::Interrupt => SystemSignal::INT,
                    Signal::Terminate => SystemSignal::TERM,
                    Signal::Hangup => SystemSignal::HUP,
                });
                // One that is stopped would neither save nor end.
                job.signal(SystemSignal::CONT);
            }
            if !failed.is_empty() {
                waited += POLL;
            }
            if !asked && waited >= self.grace {
                tracing::warn!("ending the other ranks");
                job.signal(SystemSignal::TERM);
                job.signal(SystemSignal::CONT);
                asked = true;
            }
            if waited >= self.grace * 2 {
                job.signal(SystemSignal::KILL);
            }
        }
        let ended = |signal: Signal| failed.iter().any(|f| exit_code(f.status) == signal.exit_code());
        match (forwarded, origin(&failed)) {
            (_, None) => Ok(()),
            // A child that ended by the signal that we passed on did as it was told.
            (Some(signal), Some((_, code))) if ended(signal) && code != USAGE => Err(Error::Stopped(signal)),
            (_, Some((&Failure { rank, status, .. }, code))) => Err(Error::Child { rank, status, code }),
        }
    }
}

/// A rank that failed.
#[derive(Debug)]
struct Failure {
    rank: usize,
    status: ExitStatus,
    /// Whether the others had been asked to end by then.
    asked: bool,
}

/// Exit code of what no restart can mend.
const USAGE: u8 = 2;

/// Exit code of a job that can be started again.
const LOST: u8 = 75;

/// What a job failed by, of those that failed in their order, and its exit code. A rank that says that it was
/// started wrongly comes first, then one that failed by itself, then one that was killed; the others lost it.
fn origin(failed: &[Failure]) -> Option<(&Failure, u8)> {
    let own =
        |f: &&Failure| !f.asked && f.status.code().is_some_and(|code| code < 128 && code != i32::from(LOST));
    let killed = |f: &&Failure| !f.asked && exit_code(f.status) >= 128;
    let wrong = failed.iter().find(|f| f.status.code() == Some(USAGE.into()));
    if let Some(found) = wrong.or_else(|| failed.iter().find(own)) {
        return Some((found, exit_code(found.status)));
    }
    // Where half of the ranks ended by themselves, it is for one that did not.
    let stuck = failed.iter().filter(|f| f.asked).count() * 2 <= failed.len();
    let stuck = failed.iter().find(|f| stuck && f.asked);
    let found = failed.iter().find(killed).or(stuck).or_else(|| failed.first());
    found.map(|found| (found, LOST))
}

/// Has the child end when the thread that starts it does: a launcher that is killed cannot pass that on.
#[cfg(target_os = "linux")]
fn end_with_parent(command: &mut Command) {
    let parent = rustix::process::getpid();
    #[expect(unsafe_code, reason = "what runs between fork and exec has to be vouched for")]
    // SAFETY: The closure runs in the child before it executes the program, where only calls are allowed that
    // are safe in a signal handler: both are plain system calls, and neither allocates.
    unsafe {
        command.pre_exec(move || {
            rustix::process::set_parent_process_death_signal(Some(SystemSignal::TERM))?;
            // It may have died before it was asked for.
            if rustix::process::getppid() == Some(parent) {
                Ok(())
            } else {
                Err(std::io::ErrorKind::BrokenPipe.into())
            }
        });
    }
}

/// Other systems have no such call: there, ranks end once their launcher's end has cost them a peer.
#[cfg(not(target_os = "linux"))]
fn end_with_parent(_: &mut Command) {}

/// The running children, and their exits.
struct Job {
    children: Vec<(Child, Option<ExitStatus>)>,
    readers: Vec<JoinHandle<()>>,
}

impl Job {
    /// Notes who ended; those that failed go to `failed`. False once all ended.
    fn poll(&mut self, failed: &mut Vec<Failure>, asked: bool) -> Result<bool> {
        let mut alive = false;
        for (rank, (child, status)) in self.children.iter_mut().enumerate() {
            if status.is_none() {
                *status = child.try_wait().map_err(Error::io("wait for", "a child process".as_ref()))?;
                match status {
                    None => alive = true,
                    Some(s) if s.success() => {}
                    Some(status) => failed.push(Failure { rank, status: *status, asked }),
                }
            }
        }
        Ok(alive)
    }

    /// Lets the last lines appear. A grandchild that outlives its parent may hold the pipe: it is not waited
    /// for.
    fn drain(&self) {
        let mut polls = 0..50;
        while self.readers.iter().any(|reader| !reader.is_finished()) && polls.next().is_some() {
            thread::sleep(POLL);
        }
    }

    /// Sends a signal to all that still run.
    fn signal(&self, signal: SystemSignal) {
        for (child, _) in self.children.iter().filter(|(_, status)| status.is_none()) {
            let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
            if let Some(Err(error)) = pid.map(|pid| kill_process(pid, signal)) {
                tracing::warn!(pid = child.id(), %error, "could not signal");
            }
        }
    }
}

impl Drop for Job {
    /// Leaves nobody behind when a start or a wait failed.
    fn drop(&mut self) {
        for (child, _) in self.children.iter_mut().filter(|(_, status)| status.is_none()) {
            // An error here means that it ended already.
            drop(child.kill());
            drop(child.wait());
        }
    }
}

/// The code that a shell would show: the exit code, or 128 plus the signal's number.
fn exit_code(status: ExitStatus) -> u8 {
    let code = status.code().or_else(|| status.signal().map(|s| 128 + s)).unwrap_or(1);
    u8::try_from(code).unwrap_or(1)
}

/// Copies lines to our stderr behind `[rank]`, until the child closes its end.
fn prefix(rank: usize, stderr: ChildStderr) {
    let mut lines = BufReader::new(stderr);
    let mut line = Vec::new();
    while matches!(lines.read_until(b'\n', &mut line), Ok(n) if n > 0) {
        while line.last().is_some_and(|&b| b == b'\n' || b == b'\r') {
            line.pop();
        }
        // Never fails and never stops for long: the child goes on whatever our own stderr is.
        terminal::say([format!("[{rank}] ").as_bytes(), &line, b"\n"].concat());
        line.clear();
    }
}

/// A secret as the text of a variable.
fn as_text(secret: &JoinSecret) -> String {
    secret.bytes().iter().fold(String::new(), |text, byte| text + &format!("{byte:02x}"))
}

/// A port on which rank 0 can listen.
fn free_port(host: &str) -> Result<u16> {
    TcpListener::bind((host, 0))
        .and_then(|listener| listener.local_addr())
        .map(|addr: SocketAddr| addr.port())
        .map_err(Error::io("find a free port at", host.as_ref()))
}
