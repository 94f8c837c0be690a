//! Ctrl-C and friends: the first signal asks the loop to save and stop, the second ends the process at once, and before
//! that what it waits for of other ranks, who are told.
//!
//! It refuses to know what is saved: the loop polls [`Stop::requested`] between steps.

use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use farflung_comm::{Cancel, Communicator};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::low_level;

use crate::{Error, Result};

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

/// Signals closer than this are one: a shell, `timeout` or a scheduler signals a process and then its whole group.
const ONE_SIGNAL: Duration = Duration::from_millis(300);

/// How long a process whose collectives were cancelled may take to say goodbye.
const PARTING: Duration = Duration::from_secs(1);

/// What a second signal does.
#[derive(Clone, Copy)]
enum Repeat {
    Exits,
    Passes,
}

/// Whether a stop was asked for. Clones share the answer.
#[derive(Debug, Clone, Default)]
pub struct Stop {
    /// The signal's number, or 0.
    signal: Arc<AtomicI32>,
    cancel: Cancel,
    /// Whether there is something to cancel.
    tied: Arc<AtomicBool>,
}

impl Stop {
    /// Catches SIGINT, SIGTERM and SIGHUP for the rest of the process's life; the second one ends the process at once,
    /// with a second for the calls that are [tied](Stop::tie) to it. A SIGHUP that is ignored when the process starts, as
    /// under `nohup`, stays ignored.
    ///
    /// Errors: [`Error::Io`] if the system refuses the handlers.
    pub fn install() -> Result<Self> {
        Self::catch(Repeat::Exits)
    }

    /// As [`Stop::install`], but no signal ends the process: for one that passes them on with [`Stop::take`].
    pub fn install_passing() -> Result<Self> {
        Self::catch(Repeat::Passes)
    }

    fn catch(repeat: Repeat) -> Result<Self> {
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
                    (Repeat::Exits, Some(_)) => {
                        seen.request(signal);
                        seen.cancel.cancel();
                        if seen.tied.load(Ordering::Relaxed) {
                            thread::sleep(PARTING);
                        }
                        low_level::exit(i32::from(signal.exit_code()));
                    }
                    _ => seen.request(signal),
                }
            }
        };
        thread::Builder::new().name("signals".to_owned()).spawn(watch).map_err(failed())?;
        Ok(stop)
    }

    /// A stop that only [`Stop::request`] can raise: for tests and for callers with handlers of their own.
    #[must_use]
    pub fn manual() -> Self {
        Self::default()
    }

    /// The same communicator, whose calls a second signal ends at once: its other ranks are told by whom.
    #[must_use]
    pub fn tie(&self, comm: Communicator) -> Communicator {
        self.tied.store(true, Ordering::Relaxed);
        comm.with_cancel(&self.cancel)
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

/// Whether the process was started with SIGHUP ignored.
fn ignores_hangup() -> bool {
    #[expect(unsafe_code, reason = "there is no safe way to ask for a signal's action")]
    // SAFETY: `sigaction` is a plain C struct for which all zeros are a value. The call reads no new action, since that
    // pointer is null, and writes the old one to `action`, which lives beyond it.
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
