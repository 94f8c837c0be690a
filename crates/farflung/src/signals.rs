//! Ctrl-C and friends: the first signal asks the loop to save and stop, the second ends the process at once, and before
//! that what it waits for of other ranks, who are told.
//!
//! It refuses to know what is saved: the loop polls [`Stop::requested`] between steps.

use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use farflung_comm::{Cancel, Communicator};
use signal_hook::consts::{SIGINT, SIGTERM};
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
}

impl Signal {
    /// 128 plus the signal's number, as shells have it.
    #[must_use]
    pub const fn exit_code(self) -> u8 {
        match self {
            Self::Interrupt => 130,
            Self::Terminate => 143,
        }
    }
}

impl fmt::Display for Signal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Interrupt => "SIGINT",
            Self::Terminate => "SIGTERM",
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
    signal: Arc<AtomicUsize>,
    cancel: Cancel,
    /// Whether there is something to cancel.
    tied: Arc<AtomicBool>,
}

impl Stop {
    /// Catches SIGINT and SIGTERM for the rest of the process's life; the second one ends the process at once, with a
    /// second for the calls that are [tied](Stop::tie) to it.
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
        let mut signals = Signals::new([SIGINT, SIGTERM]).map_err(failed())?;
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
                let signal = if number == SIGINT { Signal::Interrupt } else { Signal::Terminate };
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
        let number = match signal {
            Signal::Interrupt => SIGINT,
            Signal::Terminate => SIGTERM,
        };
        self.signal.store(number as usize, Ordering::Relaxed);
    }

    /// The last signal since the last take.
    #[must_use]
    pub fn take(&self) -> Option<Signal> {
        read(self.signal.swap(0, Ordering::Relaxed))
    }

    /// The last signal that came, if one did.
    #[must_use]
    pub fn requested(&self) -> Option<Signal> {
        read(self.signal.load(Ordering::Relaxed))
    }
}

/// The signal of a number; 0 is none.
fn read(number: usize) -> Option<Signal> {
    match number {
        0 => None,
        n if n == SIGINT as usize => Some(Signal::Interrupt),
        _ => Some(Signal::Terminate),
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
        assert_eq!(Error::Stopped(Signal::Interrupt).exit_code(), 130);
    }
}
