//! Processes that end together: their exits, what they say, and the signals that are passed on to them. It
//! depends on nothing of what they do.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, ChildStderr, ChildStdin, Command, ExitStatus, Stdio};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rustix::process::{Pid, Signal as SystemSignal, kill_process};

use crate::{Error, Result, Signal, Stop, terminal};

/// How often exits and signals are looked for.
pub(super) const POLL: Duration = Duration::from_millis(20);

/// Which ranks a process is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Whose {
    /// A rank on this machine.
    Rank(usize),
    /// ssh to a machine that has some of the ranks.
    Host(String),
}

impl Whose {
    /// What ended the job.
    fn failed(&self, status: ExitStatus, code: u8) -> Error {
        match self {
            Self::Rank(rank) => Error::Child { rank: *rank, status, code },
            // ssh's own failures; a rank's code never is that.
            Self::Host(host) if status.code() == Some(255) => Error::Ssh { host: host.clone(), code },
            Self::Host(host) => Error::OnHost { host: host.clone(), status, code },
        }
    }

    /// A line that it said, as it is shown.
    fn line(&self, line: &[u8]) -> Vec<u8> {
        match self {
            Self::Rank(rank) => [format!("[{rank}] ").as_bytes(), line, b"\n"].concat(),
            // The ranks' lines have their ranks already.
            Self::Host(_) if line.starts_with(b"[") => [line, b"\n"].concat(),
            Self::Host(host) => [format!("[{host}] ").as_bytes(), line, b"\n"].concat(),
        }
    }
}

/// A process that failed.
#[derive(Debug)]
pub(super) struct Failure {
    pub(super) whose: Whose,
    pub(super) status: ExitStatus,
    /// Whether the others had been asked to end by then.
    pub(super) asked: bool,
}

impl Failure {
    /// Its exit code, as a shell would show it.
    pub(super) fn code(&self) -> u8 {
        exit_code(self.status)
    }

    /// What ended the job, where it was this.
    pub(super) fn error(&self, code: u8) -> Error {
        self.whose.failed(self.status, code)
    }
}

/// Exit code of what no restart can mend.
pub(super) const USAGE: u8 = 2;

/// Exit code of a job that can be started again.
pub(super) const LOST: u8 = 75;

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

/// A running child, and its exit.
#[derive(Debug)]
struct Running {
    child: Child,
    whose: Whose,
    /// Where it hears of signals, if it is not sent them.
    listens: Option<ChildStdin>,
    status: Option<ExitStatus>,
}

/// The running children.
#[derive(Debug, Default)]
pub(super) struct Job {
    children: Vec<Running>,
    readers: Vec<JoinHandle<()>>,
}

impl Job {
    /// Starts one more. One whose standard input is a pipe is not sent signals: it reads their names there,
    /// one a line.
    pub(super) fn start(&mut self, mut command: Command, whose: Whose) -> std::io::Result<()> {
        end_with_parent(&mut command);
        // A terminal's Ctrl-C goes to a whole group: the children would get it twice, and the second kills.
        let mut child = command.process_group(0).stderr(Stdio::piped()).spawn()?;
        let listens = child.stdin.take();
        let by = whose.clone();
        self.readers.extend(child.stderr.take().map(|stderr| thread::spawn(move || pass_on(&by, stderr))));
        self.children.push(Running { child, whose, listens, status: None });
        Ok(())
    }

    /// Tells the last one that was started something. One that has ended is noticed elsewhere.
    pub(super) fn tell_last(&mut self, line: &str) {
        if let Some(running) = self.children.last_mut() {
            running.tell(line);
        }
    }

    /// Waits for all, as [`Launch::run`](super::Launch::run) says.
    pub(super) fn run(mut self, grace: Duration, stop: &Stop) -> Result<()> {
        let outcome = self.watch(grace, stop);
        self.drain();
        outcome
    }

    /// Polls until all ended.
    fn watch(&mut self, grace: Duration, stop: &Stop) -> Result<()> {
        let mut failed: Vec<Failure> = Vec::new();
        let mut forwarded: Option<Signal> = None;
        let mut passed = 0;
        // Time since the first failure, or since a signal was passed on, in polls: no clock is needed.
        let mut waited = Duration::ZERO;
        let mut asked = false;
        while self.poll(&mut failed, asked)? {
            thread::sleep(POLL);
            if let Some(signal) = stop.take() {
                forwarded.get_or_insert(signal);
                passed += 1;
                self.pass_signal(signal, passed);
            }
            if !failed.is_empty() {
                waited += POLL;
            }
            if !asked && waited >= grace {
                tracing::warn!("ending the other ranks");
                self.ask_to_end();
                asked = true;
            }
            if waited >= grace * 2 {
                self.kill();
            }
            // A machine that is not reached any more.
            if waited >= grace * 3 {
                self.end();
            }
        }
        let ended = |signal: Signal| failed.iter().any(|f| exit_code(f.status) == signal.exit_code());
        match (forwarded, origin(&failed)) {
            (_, None) => Ok(()),
            // A child that ended by the signal that we passed on did as it was told.
            (Some(signal), Some((_, code))) if ended(signal) && code != USAGE => Err(Error::Stopped(signal)),
            (_, Some((failure, code))) => Err(failure.error(code)),
        }
    }

    /// Passes on a signal, the so-manieth.
    pub(super) fn pass_signal(&mut self, signal: Signal, passed: u32) {
        self.signal(match signal {
            // The children save at the first and end at the second; whoever ignores both is not asked again.
            _ if passed > 2 => SystemSignal::KILL,
            Signal::Interrupt => SystemSignal::INT,
            Signal::Terminate => SystemSignal::TERM,
            Signal::Hangup => SystemSignal::HUP,
        });
        // One that is stopped would neither save nor end.
        self.signal(SystemSignal::CONT);
    }

    pub(super) fn ask_to_end(&mut self) {
        self.signal(SystemSignal::TERM);
        self.signal(SystemSignal::CONT);
    }

    pub(super) fn kill(&mut self) {
        self.signal(SystemSignal::KILL);
    }

    /// How many have ended well.
    pub(super) fn succeeded(&self) -> usize {
        self.children.iter().filter(|running| running.status.is_some_and(|status| status.success())).count()
    }

    /// Notes who ended; those that failed go to `failed`. False once all ended.
    pub(super) fn poll(&mut self, failed: &mut Vec<Failure>, asked: bool) -> Result<bool> {
        let mut alive = false;
        for running in self.children.iter_mut().filter(|running| running.status.is_none()) {
            let ended = running.child.try_wait();
            running.status = ended.map_err(Error::io("wait for", "a child process".as_ref()))?;
            match running.status {
                None => alive = true,
                Some(s) if s.success() => {}
                Some(status) => failed.push(Failure { whose: running.whose.clone(), status, asked }),
            }
        }
        Ok(alive)
    }

    /// Lets the last lines appear. A grandchild that outlives its parent may hold the pipe: it is not waited
    /// for.
    pub(super) fn drain(&self) {
        let mut polls = 0..50;
        while self.readers.iter().any(|reader| !reader.is_finished()) && polls.next().is_some() {
            thread::sleep(POLL);
        }
    }

    /// Those that still run.
    fn running(&mut self) -> impl Iterator<Item = &mut Running> {
        self.children.iter_mut().filter(|running| running.status.is_none())
    }

    /// Sends a signal to all that still run.
    fn signal(&mut self, signal: SystemSignal) {
        self.running().for_each(|running| running.signal(signal));
    }

    /// Ends what still runs here, whatever it has begun elsewhere.
    fn end(&mut self) {
        for running in self.running() {
            // An error here means that it ended already.
            drop(running.child.kill());
        }
    }
}

impl Running {
    fn signal(&mut self, signal: SystemSignal) {
        if self.listens.is_some() {
            if let Some((name, _)) = HEARD.iter().find(|(_, heard)| *heard == signal) {
                self.tell(name);
            }
            return;
        }
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        if let Some(Err(error)) = pid.map(|pid| kill_process(pid, signal)) {
            tracing::warn!(pid = self.child.id(), %error, "could not signal");
        }
    }

    fn tell(&mut self, line: &str) {
        if let Some(listens) = &mut self.listens {
            // What does not listen any more has ended, or will be.
            drop(listens.write_all(format!("{line}\n").as_bytes()).and_then(|()| listens.flush()));
        }
    }
}

/// How a process that is not sent signals is told of them. Others have no name: it does what they are for by
/// itself.
pub(super) const HEARD: [(&str, SystemSignal); 4] = [
    ("interrupt", SystemSignal::INT),
    ("terminate", SystemSignal::TERM),
    ("hangup", SystemSignal::HUP),
    ("kill", SystemSignal::KILL),
];

impl Drop for Job {
    /// Leaves nobody behind when a start or a wait failed.
    fn drop(&mut self) {
        self.end();
        for running in self.running() {
            drop(running.child.wait());
        }
    }
}

/// The code that a shell would show: the exit code, or 128 plus the signal's number.
fn exit_code(status: ExitStatus) -> u8 {
    let code = status.code().or_else(|| status.signal().map(|s| 128 + s)).unwrap_or(1);
    u8::try_from(code).unwrap_or(1)
}

/// Copies lines to our stderr, with whose they are, until the child closes its end.
fn pass_on(whose: &Whose, stderr: ChildStderr) {
    let mut lines = BufReader::new(stderr);
    let mut line = Vec::new();
    while matches!(lines.read_until(b'\n', &mut line), Ok(n) if n > 0) {
        while line.last().is_some_and(|&b| b == b'\n' || b == b'\r') {
            line.pop();
        }
        // Never fails and never stops for long: the child goes on whatever our own stderr is.
        terminal::say(whose.line(&line));
        line.clear();
    }
}
