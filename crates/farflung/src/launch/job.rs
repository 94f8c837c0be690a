//! Processes that end together: collects their exits and their output, and passes signals on to them. It does
//! not depend on what they do.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, ChildStderr, ChildStdin, Command, ExitStatus, Stdio};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rustix::process::{Pid, Signal as SystemSignal, kill_process};

use crate::{Error, LaunchError, Result, Signal, Stop, terminal};

/// Time between two checks for exits and signals.
pub(super) const POLL: Duration = Duration::from_millis(20);

/// Description of the work of a child process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Whose {
    /// The child is this rank, on this machine.
    Rank(usize),
    /// The child is ssh to a machine that runs some of the ranks.
    Host(String),
}

impl Whose {
    /// Returns the error for a failure of this process.
    fn failed(&self, status: ExitStatus, code: u8) -> LaunchError {
        match self {
            Self::Rank(rank) => LaunchError::Child { rank: *rank, status, code },
            // ssh reports its own failures with 255; ranks never exit with that code.
            Self::Host(host) if status.code() == Some(255) => LaunchError::Ssh { host: host.clone(), code },
            Self::Host(host) => LaunchError::OnHost { host: host.clone(), status, code },
        }
    }

    /// Returns a line of this process's stderr as it is shown to the user.
    fn line(&self, line: &[u8]) -> Vec<u8> {
        match self {
            Self::Rank(rank) => [format!("[{rank}] ").as_bytes(), line, b"\n"].concat(),
            // Lines from the ranks of another machine already begin with a rank.
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
    /// Whether the launcher had asked the processes to end before this failure.
    pub(super) asked: bool,
}

impl Failure {
    /// Returns the process's exit code, as a shell would show it.
    pub(super) fn code(&self) -> u8 {
        exit_code(self.status)
    }

    /// Returns the error of a job that failed because of this process.
    pub(super) fn error(&self, code: u8) -> LaunchError {
        self.whose.failed(self.status, code)
    }
}

/// Exit code of wrong usage, for which a restart does not help.
pub(super) const USAGE: u8 = 2;

/// Exit code of a job that can be started again.
pub(super) const LOST: u8 = 75;

/// Returns the failure that caused a job to fail, and the job's exit code; `failed` is in the order of time. A
/// rank that was started wrongly comes first, then one that failed by itself, then one that was killed: other
/// ranks only failed because they lost it.
fn origin(failed: &[Failure]) -> Option<(&Failure, u8)> {
    let own =
        |f: &&Failure| !f.asked && f.status.code().is_some_and(|code| code < 128 && code != i32::from(LOST));
    let killed = |f: &&Failure| !f.asked && exit_code(f.status) >= 128;
    let wrong = failed.iter().find(|f| f.status.code() == Some(USAGE.into()));
    if let Some(found) = wrong.or_else(|| failed.iter().find(own)) {
        return Some((found, exit_code(found.status)));
    }
    // If at least half of the failed ranks ended before they were asked to, they probably lost a rank that was
    // stuck. The first rank that ended only when asked is then the origin.
    let stuck = failed.iter().filter(|f| f.asked).count() * 2 <= failed.len();
    let stuck = failed.iter().find(|f| stuck && f.asked);
    let found = failed.iter().find(killed).or(stuck).or_else(|| failed.first());
    found.map(|found| (found, LOST))
}

/// Makes the child end when the thread that starts it ends, since a launcher that is killed cannot signal it.
#[cfg(target_os = "linux")]
fn end_with_parent(command: &mut Command) {
    let parent = rustix::process::getpid();
    #[expect(unsafe_code, reason = "what runs between fork and exec has to be vouched for")]
    // SAFETY: The closure runs in the child between fork and exec, where only async-signal-safe calls are
    // allowed. Both calls are plain system calls, and neither allocates.
    unsafe {
        command.pre_exec(move || {
            rustix::process::set_parent_process_death_signal(Some(SystemSignal::TERM))?;
            // The parent may have died before the call.
            if rustix::process::getppid() == Some(parent) {
                Ok(())
            } else {
                Err(std::io::ErrorKind::BrokenPipe.into())
            }
        });
    }
}

/// Other systems have no such call: there, ranks whose launcher was killed run on until they lose a peer.
#[cfg(not(target_os = "linux"))]
fn end_with_parent(_: &mut Command) {}

/// A child process and its exit status.
#[derive(Debug)]
struct Running {
    child: Child,
    whose: Whose,
    /// The child's standard input, if it reads the names of signals there instead of getting signals.
    listens: Option<ChildStdin>,
    status: Option<ExitStatus>,
}

/// The child processes of a job.
#[derive(Debug, Default)]
pub(super) struct Job {
    children: Vec<Running>,
    readers: Vec<JoinHandle<()>>,
}

impl Job {
    /// Starts a child. If its standard input is a pipe, it gets no signals but reads their names there, one per
    /// line.
    pub(super) fn start(&mut self, mut command: Command, whose: Whose) -> std::io::Result<()> {
        end_with_parent(&mut command);
        if matches!(whose, Whose::Host(_)) {
            ignore_warnings(&mut command);
        }
        // The child gets a process group of its own. A terminal's Ctrl-C goes to the whole group of the
        // launcher; the child would then get the signal from the terminal and again from the launcher.
        let mut child = command.process_group(0).stderr(Stdio::piped()).spawn()?;
        let listens = child.stdin.take();
        let by = whose.clone();
        self.readers.extend(child.stderr.take().map(|stderr| thread::spawn(move || pass_on(&by, stderr))));
        self.children.push(Running { child, whose, listens, status: None });
        Ok(())
    }

    /// Writes a line to the last child that was started. If that child has ended, the line is dropped; its exit
    /// is noticed elsewhere.
    pub(super) fn tell_last(&mut self, line: &str) {
        if let Some(running) = self.children.last_mut() {
            running.tell(line);
        }
    }

    /// Waits for all children, as described for [`Launch::run`](super::Launch::run).
    pub(super) fn run(mut self, grace: Duration, stop: &Stop) -> Result<()> {
        let outcome = self.watch(grace, stop);
        self.drain();
        outcome
    }

    /// Polls until all children have ended.
    fn watch(&mut self, grace: Duration, stop: &Stop) -> Result<()> {
        let mut failed: Vec<Failure> = Vec::new();
        let mut forwarded: Option<Signal> = None;
        let mut passed = 0;
        // Time since the first failure, counted in polls, so that no clock is needed.
        let mut waited = Duration::ZERO;
        let mut asked = false;
        while self.poll(&mut failed, asked)? {
            thread::sleep(POLL);
            if let Some(signal) = stop.take() {
                forwarded.get_or_insert(signal);
                passed += u32::from(!signal.is_warning());
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
            // After this time, the ssh process is killed too: its machine can no longer be reached.
            if waited >= grace * 3 {
                self.end();
            }
        }
        let ended = |signal: Signal| failed.iter().any(|f| exit_code(f.status) == signal.exit_code());
        match (forwarded, origin(&failed)) {
            (_, None) => Ok(()),
            // A child that was ended by the signal that was passed on has not failed.
            (Some(signal), Some((_, code))) if ended(signal) && code != USAGE => Err(Error::Stopped(signal)),
            (_, Some((failure, code))) => Err(failure.error(code).into()),
        }
    }

    /// Passes a signal on; `passed` is the number of signals so far, including this one but without warnings.
    pub(super) fn pass_signal(&mut self, signal: Signal, passed: u32) {
        // Children save at the first signal and end at the second; those that ignore both are killed.
        self.signal(if passed > 2 { SystemSignal::KILL } else { system(signal) });
        // A suspended process would neither save nor end, so SIGCONT resumes it.
        self.signal(SystemSignal::CONT);
    }

    pub(super) fn ask_to_end(&mut self) {
        self.signal(SystemSignal::TERM);
        self.signal(SystemSignal::CONT);
    }

    pub(super) fn kill(&mut self) {
        self.signal(SystemSignal::KILL);
    }

    /// Returns the number of children that have succeeded.
    pub(super) fn succeeded(&self) -> usize {
        self.children.iter().filter(|running| running.status.is_some_and(|status| status.success())).count()
    }

    /// Records which children have ended and adds failed ones to `failed`. Returns false once all have ended.
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

    /// Waits up to a second for the children's last lines. A grandchild that outlives its parent may hold the
    /// pipe open, so the wait is limited.
    pub(super) fn drain(&self) {
        let mut polls = 0..50;
        while self.readers.iter().any(|reader| !reader.is_finished()) && polls.next().is_some() {
            thread::sleep(POLL);
        }
    }

    /// Returns the children that are still running.
    fn running(&mut self) -> impl Iterator<Item = &mut Running> {
        self.children.iter_mut().filter(|running| running.status.is_none())
    }

    /// Sends a signal to all children that are still running.
    fn signal(&mut self, signal: SystemSignal) {
        self.running().for_each(|running| running.signal(signal));
    }

    /// Kills the children on this machine that are still running. Processes that they have started on other
    /// machines are not killed.
    fn end(&mut self) {
        for running in self.running() {
            // An error means that the child has ended already.
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
            tracing::warn!(pid = self.child.id(), %error, "failed to send a signal to a process");
        }
    }

    fn tell(&mut self, line: &str) {
        if let Some(listens) = &mut self.listens {
            // Errors are ignored: a process that no longer reads has ended, or is killed later.
            drop(listens.write_all(format!("{line}\n").as_bytes()).and_then(|()| listens.flush()));
        }
    }
}

/// Names of signals for processes that read them from standard input. Signals without a name are not passed on
/// to such a process.
pub(super) const HEARD: [(&str, SystemSignal); 7] = [
    ("interrupt", SystemSignal::INT),
    ("terminate", SystemSignal::TERM),
    ("hangup", SystemSignal::HUP),
    ("user1", SystemSignal::USR1),
    ("user2", SystemSignal::USR2),
    ("processor-time", SystemSignal::XCPU),
    ("kill", SystemSignal::KILL),
];

/// Returns a signal as it is sent to processes.
const fn system(signal: Signal) -> SystemSignal {
    match signal {
        Signal::Interrupt => SystemSignal::INT,
        Signal::Terminate => SystemSignal::TERM,
        Signal::Hangup => SystemSignal::HUP,
        Signal::User1 => SystemSignal::USR1,
        Signal::User2 => SystemSignal::USR2,
        Signal::ProcessorTime => SystemSignal::XCPU,
    }
}

/// Makes a child ignore warnings of a scheduler: ssh would end, and its machine would take that for the end of
/// the launcher.
fn ignore_warnings(command: &mut Command) {
    let warnings = Signal::ALL.map(|signal| (signal.is_warning(), signal.number()));
    #[expect(unsafe_code, reason = "what runs between fork and exec has to be vouched for")]
    // SAFETY: The closure runs in the child between fork and exec, where only async-signal-safe calls are
    // allowed. `signal` is one of these, and nothing allocates.
    unsafe {
        command.pre_exec(move || {
            for (_, number) in warnings.into_iter().filter(|(is_warning, _)| *is_warning) {
                libc::signal(number, libc::SIG_IGN);
            }
            Ok(())
        });
    }
}

impl Drop for Job {
    /// Kills the remaining children if a start or a wait failed.
    fn drop(&mut self) {
        self.end();
        for running in self.running() {
            drop(running.child.wait());
        }
    }
}

/// Returns the code that a shell would show: the exit code, or 128 plus the signal's number.
fn exit_code(status: ExitStatus) -> u8 {
    let code = status.code().or_else(|| status.signal().map(|s| 128 + s)).unwrap_or(1);
    u8::try_from(code).unwrap_or(1)
}

/// Copies lines to our stderr, prefixed with their source, until the child closes its stderr.
fn pass_on(whose: &Whose, stderr: ChildStderr) {
    let mut lines = BufReader::new(stderr);
    let mut line = Vec::new();
    while matches!(lines.read_until(b'\n', &mut line), Ok(n) if n > 0) {
        while line.last().is_some_and(|&b| b == b'\n' || b == b'\r') {
            line.pop();
        }
        // `write_stderr` never fails and never blocks for long, even if our own stderr is closed or full.
        terminal::write_stderr(whose.line(&line));
        line.clear();
    }
}
