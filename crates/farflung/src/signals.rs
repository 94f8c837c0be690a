//! Signals such as Ctrl-C. The first signal asks a run to stop and save. The second one cancels the operations
//! that wait for other ranks, which tells those ranks, and then ends the process at once.
//!
//! Schedulers send some signals as a warning before the end (Slurm's `--signal=USR1@120`). A warning asks as
//! any first signal does, and further warnings count as the same one: Slurm sends them to all processes of a
//! step and the launcher passes them on, and the kernel repeats SIGXCPU every second.
//!
//! The training loop polls [`Stop::requested`] between steps, so that a step may still end normally after a
//! signal. After [`CANCEL_UNCOMMITTED_AFTER`] the step is dropped if it is still computing; after
//! [`CANCEL_STEP_AFTER`] it is dropped also if it waits for other ranks. A run that is still loading has
//! nothing to save and ends at once. This module does not depend on what is saved.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use farflung_base::Nanos;
use farflung_comm::{Cancel, Communicator};
use farflung_tensor::Interrupt;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2, SIGXCPU};
use signal_hook::iterator::Signals;
use signal_hook::low_level;

use crate::{Error, Result, terminal};

/// A signal that asks a run to stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Signal {
    /// SIGINT: Ctrl-C.
    Interrupt,
    /// SIGTERM: a scheduler or launcher asks the process to end.
    Terminate,
    /// SIGHUP: the terminal was closed, for example with its ssh session.
    Hangup,
    /// SIGUSR1: a scheduler warns that the job ends soon.
    User1,
    /// SIGUSR2: like `User1`.
    User2,
    /// SIGXCPU: the limit on processor time is reached, or a scheduler warns that the job ends soon.
    ProcessorTime,
}

impl Signal {
    /// All signals of this enum.
    pub(crate) const ALL: [Self; 6] =
        [Self::Interrupt, Self::Terminate, Self::Hangup, Self::User1, Self::User2, Self::ProcessorTime];

    /// Returns the signal's number on this system.
    pub(crate) const fn number(self) -> i32 {
        match self {
            Self::Interrupt => SIGINT,
            Self::Terminate => SIGTERM,
            Self::Hangup => SIGHUP,
            Self::User1 => SIGUSR1,
            Self::User2 => SIGUSR2,
            Self::ProcessorTime => SIGXCPU,
        }
    }

    /// Returns the signal with this number, or `None` if it is not one of these.
    pub(crate) fn of(number: i32) -> Option<Self> {
        Self::ALL.into_iter().find(|signal| signal.number() == number)
    }

    /// Returns whether the signal warns of the end. It may come several times, and never ends a process at
    /// once.
    pub(crate) const fn is_warning(self) -> bool {
        matches!(self, Self::User1 | Self::User2 | Self::ProcessorTime)
    }

    /// Returns whether the signal stays ignored in a process that was started with it ignored. Shells start
    /// commands in the background with SIGINT ignored, and these must end when they are asked to.
    const fn may_stay_ignored(self) -> bool {
        !matches!(self, Self::Interrupt | Self::Terminate)
    }

    /// Returns 128 plus the signal's number, as shells do, such as 130 for SIGINT, 143 for SIGTERM and (on
    /// Linux) 138 for SIGUSR1.
    #[must_use]
    pub const fn exit_code(self) -> u8 {
        128 + self.number() as u8
    }
}

impl fmt::Display for Signal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Interrupt => "SIGINT",
            Self::Terminate => "SIGTERM",
            Self::Hangup => "SIGHUP",
            Self::User1 => "SIGUSR1",
            Self::User2 => "SIGUSR2",
            Self::ProcessorTime => "SIGXCPU",
        })
    }
}

/// Signals that arrive within this time count as one: a shell, `timeout` or a scheduler signals a process and
/// then its whole process group.
const ONE_SIGNAL: Duration = Duration::from_millis(300);

/// Time between cancelling collectives and exiting, in which the process tells the other ranks.
const PARTING: Duration = Duration::from_millis(300);

/// Time after a signal in which a step may still end normally, with the agreement of all ranks.
pub const CANCEL_UNCOMMITTED_AFTER: Duration = Duration::from_millis(400);

/// Time after a signal for which a rank that has done its part of a step waits for the others. It is well above
/// [`CANCEL_UNCOMMITTED_AFTER`], so that the ranks that have nearly finished a step still receive it after
/// another rank has committed it.
pub const CANCEL_STEP_AFTER: Duration = Duration::from_millis(800);

/// Time that a process that is still loading has to end by itself.
const LOADING: Duration = Duration::from_millis(500);

/// Effect of the signals after the first one.
#[derive(Clone, Copy)]
enum Repeat {
    Exits,
    /// Like `Exits`, but the first signal does not interrupt the step.
    ExitsPatiently,
    Passes,
}

/// The signals that a process has received so far.
#[derive(Clone, Copy)]
enum Before {
    Nothing,
    /// Only warnings.
    Warned,
    /// A signal that is not a warning, and maybe warnings.
    Asked,
}

/// Prints an error before the process exits from a thread other than its main one.
pub type PrintError = fn(&Error);

/// Handle on a stop request. Clones share its state.
#[derive(Debug, Clone, Default)]
pub struct Stop {
    /// The number of the signal that was requested, or 0.
    signal: Arc<AtomicI32>,
    /// Cancels all waiting operations. After it is raised, nothing is saved.
    cancel: Cancel,
    /// Cancels operations in which a step waits for other ranks, some of which may have committed the step
    /// already.
    step_cancel: Cancel,
    /// Cancels operations that a step needs before any rank can commit it.
    uncommitted_cancel: Cancel,
    /// Interrupts of the computations that [`Stop::cancel_uncommitted`] ends.
    computing: Arc<Mutex<Vec<Interrupt>>>,
    /// Whether there are operations to cancel.
    tied: Arc<AtomicBool>,
    /// Whether there may be something to save.
    begun: Arc<AtomicBool>,
    /// Whether the whole run is to stop, rather than this member.
    for_all: Arc<AtomicBool>,
    /// The time of the first request.
    since: Arc<OnceLock<Instant>>,
    /// The newest checkpoint.
    saved: Arc<Mutex<Option<PathBuf>>>,
    /// Time between a request and the end of the machine; `None` if it is not known.
    notice: Option<Nanos>,
}

impl Stop {
    /// Sets the time within which the process must end after a request. A member that leaves a run does not
    /// wait for an average that is farther away; see [`NoticeArgs`](crate::NoticeArgs).
    #[must_use]
    pub fn within(self, notice: Option<Nanos>) -> Self {
        Self { notice, ..self }
    }

    /// Returns the time within which the process must end after a request; `None` if it is not known.
    #[must_use]
    pub const fn notice(&self) -> Option<Nanos> {
        self.notice
    }

    /// Catches SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2 and SIGXCPU for the rest of the process's life. The
    /// first signal requests a stop (see the module). The second one, without those that are only a warning,
    /// cancels the calls that are [tied](Stop::with_stop) to this handle and ends the process a moment later. A
    /// signal other than SIGINT and SIGTERM that is ignored when the process starts, as SIGHUP is under
    /// `nohup`, stays ignored.
    ///
    /// Errors: [`Error::Io`] if the system does not accept the handlers.
    pub fn install() -> Result<Self> {
        let stop = Self::catch(Repeat::Exits, |_| {})?;
        stop.begin();
        Ok(stop)
    }

    /// Like [`Stop::install`], but before [`Stop::begin`] the first signal also ends the process: it may end by
    /// itself for half a second; after that this handle calls `say` and exits.
    ///
    /// Errors: [`Error::Io`] if the system does not accept the handlers.
    pub fn install_loading(say: PrintError) -> Result<Self> {
        Self::catch(Repeat::Exits, say)
    }

    /// Like [`Stop::install`], but no signal ends the process: for a launcher, which takes signals with
    /// [`Stop::take`] and passes them on to its children.
    pub fn install_passing() -> Result<Self> {
        Self::catch(Repeat::Passes, |_| {})
    }

    /// Like [`Stop::install_passing`], for a launcher that another launcher has started over ssh: it also takes
    /// warnings that are ignored when the process starts, since ssh is started so.
    pub fn install_serving() -> Result<Self> {
        heed_warnings();
        Self::install_passing()
    }

    /// Like [`Stop::install_loading`], but once the run has begun, the step in flight is always finished after
    /// the first signal, however long that takes: for a member that leaves while the other members go on.
    ///
    /// Errors: [`Error::Io`] if the system does not accept the handlers.
    pub fn install_leaving(say: PrintError) -> Result<Self> {
        Self::catch(Repeat::ExitsPatiently, say)
    }

    fn catch(repeat: Repeat, say: PrintError) -> Result<Self> {
        let failed = || Error::io("catch signals for", Path::new("this process"));
        let is_caught = |signal: &Signal| !(signal.may_stay_ignored() && is_ignored(*signal));
        let caught = Signal::ALL.into_iter().filter(is_caught);
        let mut signals = Signals::new(caught.map(Signal::number)).map_err(failed())?;
        let stop = Self::default();
        let seen = stop.clone();
        let watch = move || {
            let (mut last, mut before): (Option<Instant>, Before) = (None, Before::Nothing);
            for number in signals.forever() {
                #[expect(
                    clippy::disallowed_methods,
                    reason = "how far signals are apart in real time; no result sees it"
                )]
                let now = Instant::now();
                let Some(signal) = Signal::of(number) else { continue };
                // Measured from the last one that counted, so that a key that is held down gives a second one.
                if last.is_some_and(|last| now - last < ONE_SIGNAL) {
                    continue;
                }
                last = Some(now);
                match (repeat, before) {
                    (Repeat::Exits | Repeat::ExitsPatiently, Before::Asked) if !signal.is_warning() => {
                        seen.request(signal);
                        seen.cancel_all();
                        if seen.tied.load(Ordering::Relaxed) {
                            thread::sleep(PARTING);
                        }
                        let saved = seen.saved().clone();
                        say(&Error::EndedAtOnce { signal, saved });
                        terminal::flush();
                        low_level::exit(i32::from(signal.exit_code()));
                    }
                    (Repeat::Exits | Repeat::ExitsPatiently, Before::Nothing) => {
                        seen.request(signal);
                        let pressing = seen.clone();
                        // The escalation runs in another thread, since this thread must receive the second
                        // signal meanwhile.
                        let thread = thread::Builder::new().name("stop".to_owned());
                        if thread.spawn(move || pressing.escalate(signal, repeat, say)).is_err() {
                            seen.cancel_step();
                        }
                    }
                    (Repeat::Passes, _) => seen.request(signal),
                    // The stop that the warning has asked for is under way.
                    (Repeat::Exits | Repeat::ExitsPatiently, Before::Warned | Before::Asked) => {}
                }
                before = match (before, signal.is_warning()) {
                    (Before::Asked, _) | (_, false) => Before::Asked,
                    (_, true) => Before::Warned,
                };
            }
        };
        thread::Builder::new().name("signals".to_owned()).spawn(watch).map_err(failed())?;
        Ok(stop)
    }

    /// Escalates after the first signal: drops the step after [`CANCEL_UNCOMMITTED_AFTER`] and
    /// [`CANCEL_STEP_AFTER`], or ends a process that is still loading.
    fn escalate(&self, signal: Signal, repeat: Repeat, say: PrintError) {
        if self.begun.load(Ordering::Acquire) {
            if matches!(repeat, Repeat::ExitsPatiently) {
                return;
            }
            thread::sleep(CANCEL_UNCOMMITTED_AFTER);
            self.cancel_uncommitted();
            thread::sleep(CANCEL_STEP_AFTER.saturating_sub(CANCEL_UNCOMMITTED_AFTER));
            self.cancel_step();
            return;
        }
        self.cancel_all();
        thread::sleep(LOADING);
        say(&Error::Stopped(signal));
        terminal::flush();
        low_level::exit(i32::from(signal.exit_code()));
    }

    /// Returns a handle without signal handlers, on which only [`Stop::request`], [`Stop::cancel_uncommitted`]
    /// and [`Stop::cancel_step`] act: for tests and for callers with handlers of their own.
    #[must_use]
    pub fn manual() -> Self {
        Self::default()
    }

    /// Records that there may be something to save from now on.
    pub fn begin(&self) {
        self.begun.store(true, Ordering::Release);
    }

    /// Returns the same communicator, whose calls are cancelled by a second signal; its other ranks are then
    /// told which rank cancelled them.
    #[must_use]
    pub fn with_stop(&self, comm: Communicator) -> Communicator {
        self.tied.store(true, Ordering::Relaxed);
        comm.with_cancel(&self.cancel)
    }

    /// Like [`Stop::with_stop`], but [`Stop::cancel_step`] also cancels its calls.
    pub(crate) fn tie_step(&self, comm: Communicator) -> Communicator {
        self.tied.store(true, Ordering::Relaxed);
        comm.with_cancel(&self.step_cancel)
    }

    /// Like [`Stop::with_stop`], but [`Stop::cancel_uncommitted`] also cancels its calls: for messages without
    /// which no rank can do the step.
    pub(crate) fn tie_messages(&self, comm: Communicator) -> Communicator {
        self.tied.store(true, Ordering::Relaxed);
        comm.with_cancel(&self.uncommitted_cancel)
    }

    /// Registers an interrupt: until the returned guard is dropped, [`Stop::cancel_uncommitted`] raises it.
    /// Dropping the guard lowers it.
    pub(crate) fn arm(&self, interrupt: &Interrupt) -> Armed {
        let mut computing = self.computing();
        computing.push(interrupt.clone());
        // The flag is checked under the lock: a concurrent `cancel_uncommitted` either finds this interrupt in
        // the list or has set the flag before.
        if self.uncommitted_cancel.is_cancelled() {
            interrupt.raise();
        }
        drop(computing);
        Armed { stop: self.clone(), interrupt: interrupt.clone() }
    }

    /// Sets the newest checkpoint, of which the user is told if a second signal ends the process.
    pub(crate) fn note_saved(&self, path: &Path) {
        *self.saved() = Some(path.to_owned());
    }

    fn saved(&self) -> std::sync::MutexGuard<'_, Option<PathBuf>> {
        self.saved.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn computing(&self) -> std::sync::MutexGuard<'_, Vec<Interrupt>> {
        self.computing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Drops the step in flight if no rank can have committed it yet: interrupts computation and cancels the
    /// messages that the step needs.
    pub fn cancel_uncommitted(&self) {
        let computing = self.computing();
        self.uncommitted_cancel.cancel();
        computing.iter().for_each(Interrupt::raise);
    }

    /// Drops the step in flight also if it waits for other ranks.
    pub fn cancel_step(&self) {
        self.cancel_uncommitted();
        self.step_cancel.cancel();
    }

    fn cancel_all(&self) {
        self.cancel.cancel();
        self.cancel_step();
    }

    /// Returns whether [`Stop::cancel_uncommitted`] was called.
    pub(crate) fn is_uncommitted_cancelled(&self) -> bool {
        self.uncommitted_cancel.is_cancelled()
    }

    /// Waits until [`Stop::cancel_step`] is called, at most about [`CANCEL_STEP_AFTER`]. Returns at once unless
    /// [`Stop::cancel_uncommitted`] was called.
    pub(crate) fn wait_until_step_cancelled(&self) {
        const LOOK: Duration = Duration::from_millis(5);
        let mut looks = (CANCEL_STEP_AFTER.as_millis() / LOOK.as_millis()) as u32;
        while self.is_uncommitted_cancelled() && !self.step_cancel.is_cancelled() && looks > 0 {
            thread::sleep(LOOK);
            looks -= 1;
        }
    }

    /// Returns the signal that cancelled the calls [tied](Stop::with_stop) to this handle, or `None`.
    #[must_use]
    pub fn cancelled(&self) -> Option<Signal> {
        self.requested().filter(|_| self.cancel.is_cancelled())
    }

    /// Requests a stop as `signal` would.
    pub fn request(&self, signal: Signal) {
        #[expect(
            clippy::disallowed_methods,
            reason = "how long ago a stop was requested; no result sees it"
        )]
        self.since.get_or_init(Instant::now);
        self.signal.store(signal.number(), Ordering::Relaxed);
    }

    /// Returns the time since the first request; `None` if there was none.
    pub(crate) fn since(&self) -> Option<Nanos> {
        self.since.get().map(|since| since.elapsed().into())
    }

    /// Requests a stop of the whole run as `signal` would, also in a run that goes on without a member that is
    /// stopped.
    pub(crate) fn request_for_all(&self, signal: Signal) {
        self.for_all.store(true, Ordering::Relaxed);
        self.request(signal);
    }

    /// Returns whether the whole run is to stop.
    pub(crate) fn is_for_all(&self) -> bool {
        self.for_all.load(Ordering::Relaxed)
    }

    /// Returns the last signal since the last call of this function, and clears it.
    #[must_use]
    pub fn take(&self) -> Option<Signal> {
        Signal::of(self.signal.swap(0, Ordering::Relaxed))
    }

    /// Returns the last signal, or `None` if there was none.
    #[must_use]
    pub fn requested(&self) -> Option<Signal> {
        Signal::of(self.signal.load(Ordering::Relaxed))
    }
}

/// Guard of an interrupt that [`Stop::cancel_uncommitted`] raises.
#[derive(Debug)]
pub(crate) struct Armed {
    stop: Stop,
    interrupt: Interrupt,
}

impl Drop for Armed {
    fn drop(&mut self) {
        let mut computing = self.stop.computing();
        computing.retain(|other| !other.is(&self.interrupt));
        self.interrupt.lower();
    }
}

/// Returns whether the process ignores a signal: at its start, because it was started so.
fn is_ignored(signal: Signal) -> bool {
    #[expect(unsafe_code, reason = "there is no safe way to ask for a signal's action")]
    // SAFETY: `sigaction` is a plain C struct for which all zeros are a valid value. The pointer to a new
    // action is null, so the call only writes the old action to `action`, which outlives the call.
    let action = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        (libc::sigaction(signal.number(), std::ptr::null(), &raw mut action) == 0).then_some(action)
    };
    action.is_some_and(|action| action.sa_sigaction == libc::SIG_IGN)
}

/// Makes processes that this one starts heed warnings, also if this one was started with them ignored: the
/// launcher makes ssh ignore them, and a program in place of ssh may hand that down.
fn heed_warnings() {
    for signal in Signal::ALL.into_iter().filter(|signal| signal.is_warning() && is_ignored(*signal)) {
        #[expect(unsafe_code, reason = "there is no safe way to set a signal's action")]
        // SAFETY: The call installs no handler, so no code of this program runs in a signal's context.
        let before = unsafe { libc::signal(signal.number(), libc::SIG_DFL) };
        if before == libc::SIG_ERR {
            tracing::warn!(%signal, "failed to stop ignoring a signal");
        }
    }
}

/// Makes a write beyond the limit on file sizes (`ulimit -f`) fail with an error. Otherwise SIGXFSZ would end
/// the process without a message.
pub fn ignore_file_size_signal() {
    #[expect(unsafe_code, reason = "there is no safe way to ignore a signal")]
    // SAFETY: The call installs no handler, so no code of this program runs in a signal's context.
    let before = unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    if before == libc::SIG_ERR {
        tracing::warn!("failed to ignore SIGXFSZ");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clones_share_a_request() {
        let stop = Stop::manual();
        let seen = stop.clone();
        assert_eq!(seen.requested(), None);
        stop.request(Signal::Terminate);
        assert_eq!(seen.requested(), Some(Signal::Terminate));
        stop.request(Signal::Interrupt);
        assert_eq!(seen.take(), Some(Signal::Interrupt));
        assert_eq!((stop.take(), stop.requested()), (None, None));
        assert_eq!(
            Signal::ALL.map(|signal| Error::Stopped(signal).exit_code()),
            [130, 143, 129, 138, 140, 152]
        );
    }
}
