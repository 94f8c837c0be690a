//! Ctrl-C and friends: the first signal asks a run to stop and save, the second ends the process at once, and
//! before that what it waits for of other ranks, who are told.
//!
//! A run has a moment to end its step by itself: the loop polls [`Stop::requested`] between steps. After
//! [`HURRY`] the step in flight is dropped where it computes, and after [`ABANDON`] where it waits for other
//! ranks. A run that is still loading has nothing to save and ends at once. It refuses to know what is saved.

use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use farflung_comm::{Cancel, Communicator};
use farflung_tensor::Interrupt;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::low_level;

use crate::{Error, Result, terminal};

/// A signal that asks a run to stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Signal {
    /// SIGINT: Ctrl-C.
    Interrupt,
    /// SIGTERM: a scheduler's or launcher's polite end.
    Terminate,
    /// SIGHUP: the terminal is gone, a closed ssh session for instance.
    Hangup,
}

impl Signal {
    /// All of them.
    const ALL: [Self; 3] = [Self::Interrupt, Self::Terminate, Self::Hangup];

    /// Its number on this system.
    const fn number(self) -> i32 {
        match self {
            Self::Interrupt => SIGINT,
            Self::Terminate => SIGTERM,
            Self::Hangup => SIGHUP,
        }
    }

    /// The signal with a number, if it is one of these.
    fn of(number: i32) -> Option<Self> {
        Self::ALL.into_iter().find(|signal| signal.number() == number)
    }

    /// 128 plus the signal's number, as shells have it: 130, 143 or 129.
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
        })
    }
}

/// Signals closer than this are one: a shell, `timeout` or a scheduler signals a process and then its whole
/// group.
const ONE_SIGNAL: Duration = Duration::from_millis(300);

/// How long a process whose collectives were cancelled may take to say goodbye.
const PARTING: Duration = Duration::from_millis(300);

/// How long after a signal a step may end by itself, as all ranks agree then.
pub const HURRY: Duration = Duration::from_millis(400);

/// How long after a signal a rank that has done its part of a step waits for the others. It is well behind
/// [`HURRY`], so that a step that one rank has committed arrives on those that are nearly done.
pub const ABANDON: Duration = Duration::from_millis(800);

/// How long a process that loads may take to end by itself.
const LOADING: Duration = Duration::from_millis(500);

/// What a second signal does.
#[derive(Clone, Copy)]
enum Repeat {
    Exits,
    /// As `Exits`, and the first signal interrupts nothing.
    ExitsPatiently,
    Passes,
}

/// Says an error before the process ends without its main thread.
pub type Say = fn(&Error);

/// Whether a stop was asked for. Clones share the answer.
#[derive(Debug, Clone, Default)]
pub struct Stop {
    /// The signal's number, or 0.
    signal: Arc<AtomicI32>,
    /// Ends all that waits: nothing is saved any more.
    cancel: Cancel,
    /// Ends what a step waits for of other ranks, of whom some may have done it.
    abandon: Cancel,
    /// Ends what a step needs before it counts for any rank.
    hurry: Cancel,
    /// The computing that ends with it.
    computing: Arc<Mutex<Vec<Interrupt>>>,
    /// Whether there is something to cancel.
    tied: Arc<AtomicBool>,
    /// Whether there may be something to save.
    begun: Arc<AtomicBool>,
}

impl Stop {
    /// Catches SIGINT, SIGTERM and SIGHUP for the rest of the process's life. The first one asks for a stop:
    /// see the module. The second one ends the process at once, with a moment for the calls that are
    /// [tied](Stop::tie) to it. A SIGHUP that is ignored when the process starts, as under `nohup`, stays
    /// ignored.
    ///
    /// Errors: [`Error::Io`] if the system refuses the handlers.
    pub fn install() -> Result<Self> {
        let stop = Self::catch(Repeat::Exits, |_| {})?;
        stop.begin();
        Ok(stop)
    }

    /// As [`Stop::install`], but before [`Stop::begin`] the first signal ends the process too: within half a
    /// second by itself, or then after `say`.
    ///
    /// Errors: [`Error::Io`] if the system refuses the handlers.
    pub fn install_loading(say: Say) -> Result<Self> {
        Self::catch(Repeat::Exits, say)
    }

    /// As [`Stop::install`], but no signal ends the process: for one that passes them on with [`Stop::take`].
    pub fn install_passing() -> Result<Self> {
        Self::catch(Repeat::Passes, |_| {})
    }

    /// As [`Stop::install`], but the step under way is finished, however long that takes: for a member that
    /// leaves others who go on.
    pub fn install_leaving() -> Result<Self> {
        Self::catch(Repeat::ExitsPatiently, |_| {})
    }

    fn catch(repeat: Repeat, say: Say) -> Result<Self> {
        let failed = || Error::io("catch signals for", Path::new("this process"));
        let caught = Signal::ALL.into_iter().filter(|&signal| signal != Signal::Hangup || !ignores_hangup());
        let mut signals = Signals::new(caught.map(Signal::number)).map_err(failed())?;
        let stop = Self::default();
        let seen = stop.clone();
        let watch = move || {
            let mut last: Option<Instant> = None;
            for number in signals.forever() {
                #[expect(
                    clippy::disallowed_methods,
                    reason = "how far signals are apart in real time; no result sees it"
                )]
                let now = Instant::now();
                let repeated = last.replace(now).map(|before| now - before);
                let Some(signal) = Signal::of(number) else { continue };
                match (repeat, repeated) {
                    (_, Some(apart)) if apart < ONE_SIGNAL => {}
                    (Repeat::Exits | Repeat::ExitsPatiently, Some(_)) => {
                        seen.request(signal);
                        seen.cancel_all();
                        if seen.tied.load(Ordering::Relaxed) {
                            thread::sleep(PARTING);
                        }
                        low_level::exit(i32::from(signal.exit_code()));
                    }
                    (Repeat::Exits, None) => {
                        seen.request(signal);
                        let pressing = seen.clone();
                        // This thread has to hear the second signal meanwhile.
                        let thread = thread::Builder::new().name("stop".to_owned());
                        if thread.spawn(move || pressing.press(signal, say)).is_err() {
                            seen.abandon();
                        }
                    }
                    (Repeat::ExitsPatiently, None) | (Repeat::Passes, _) => seen.request(signal),
                }
            }
        };
        thread::Builder::new().name("signals".to_owned()).spawn(watch).map_err(failed())?;
        Ok(stop)
    }

    /// What follows a first signal, in time.
    fn press(&self, signal: Signal, say: Say) {
        if self.begun.load(Ordering::Acquire) {
            thread::sleep(HURRY);
            self.hurry();
            thread::sleep(ABANDON.saturating_sub(HURRY));
            self.abandon();
            return;
        }
        self.cancel_all();
        thread::sleep(LOADING);
        say(&Error::Stopped(signal));
        terminal::flush();
        low_level::exit(i32::from(signal.exit_code()));
    }

    /// A stop that only [`Stop::request`], [`Stop::hurry`] and [`Stop::abandon`] can raise: for tests and for
    /// callers with handlers of their own.
    #[must_use]
    pub fn manual() -> Self {
        Self::default()
    }

    /// From now on there may be something to save.
    pub fn begin(&self) {
        self.begun.store(true, Ordering::Release);
    }

    /// The same communicator, whose calls a second signal ends at once: its other ranks are told by whom.
    #[must_use]
    pub fn tie(&self, comm: Communicator) -> Communicator {
        self.tied.store(true, Ordering::Relaxed);
        comm.with_cancel(&self.cancel)
    }

    /// As [`Stop::tie`], but [`Stop::abandon`] ends its calls too.
    pub(crate) fn tie_step(&self, comm: Communicator) -> Communicator {
        self.tied.store(true, Ordering::Relaxed);
        comm.with_cancel(&self.abandon)
    }

    /// As [`Stop::tie`], but [`Stop::hurry`] ends its calls too: for messages without which no rank can do the
    /// step.
    pub(crate) fn tie_messages(&self, comm: Communicator) -> Communicator {
        self.tied.store(true, Ordering::Relaxed);
        comm.with_cancel(&self.hurry)
    }

    /// While this lives, [`Stop::hurry`] raises the interrupt; it is lowered at the end.
    pub(crate) fn arm(&self, interrupt: &Interrupt) -> Armed {
        let mut computing = self.computing();
        computing.push(interrupt.clone());
        // Under the lock: whoever hurries either sees the interrupt or has switched before.
        if self.hurry.is_cancelled() {
            interrupt.raise();
        }
        drop(computing);
        Armed { stop: self.clone(), interrupt: interrupt.clone() }
    }

    fn computing(&self) -> std::sync::MutexGuard<'_, Vec<Interrupt>> {
        self.computing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Drops the step in flight where no rank can have done it yet: computing, and messages that it needs.
    pub fn hurry(&self) {
        let computing = self.computing();
        self.hurry.cancel();
        computing.iter().for_each(Interrupt::raise);
    }

    /// Drops the step in flight also where it waits for other ranks.
    pub fn abandon(&self) {
        self.hurry();
        self.abandon.cancel();
    }

    fn cancel_all(&self) {
        self.cancel.cancel();
        self.abandon();
    }

    /// Whether steps are dropped where they compute.
    pub(crate) fn is_hurried(&self) -> bool {
        self.hurry.is_cancelled()
    }

    /// Waits until steps are dropped also where they wait for other ranks, once they are dropped at all.
    pub(crate) fn wait_until_abandoned(&self) {
        const LOOK: Duration = Duration::from_millis(5);
        let mut looks = (ABANDON.as_millis() / LOOK.as_millis()) as u32;
        while self.is_hurried() && !self.abandon.is_cancelled() && looks > 0 {
            thread::sleep(LOOK);
            looks -= 1;
        }
    }

    /// The signal that cancelled what is [tied](Stop::tie) to this, if one did.
    #[must_use]
    pub fn cancelled(&self) -> Option<Signal> {
        self.requested().filter(|_| self.cancel.is_cancelled())
    }

    /// Asks for a stop as `signal` would.
    pub fn request(&self, signal: Signal) {
        self.signal.store(signal.number(), Ordering::Relaxed);
    }

    /// The last signal since the last take.
    #[must_use]
    pub fn take(&self) -> Option<Signal> {
        Signal::of(self.signal.swap(0, Ordering::Relaxed))
    }

    /// The last signal that came, if one did.
    #[must_use]
    pub fn requested(&self) -> Option<Signal> {
        Signal::of(self.signal.load(Ordering::Relaxed))
    }
}

/// Computing that [`Stop::hurry`] ends.
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

/// Whether the process was started with SIGHUP ignored.
fn ignores_hangup() -> bool {
    #[expect(unsafe_code, reason = "there is no safe way to ask for a signal's action")]
    // SAFETY: `sigaction` is a plain C struct for which all zeros are a value. The call reads no new action,
    // since that pointer is null, and writes the old one to `action`, which lives beyond it.
    let action = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        (libc::sigaction(SIGHUP, std::ptr::null(), &raw mut action) == 0).then_some(action)
    };
    action.is_some_and(|action| action.sa_sigaction == libc::SIG_IGN)
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
        assert_eq!(Signal::ALL.map(|signal| Error::Stopped(signal).exit_code()), [130, 143, 129]);
    }
}
