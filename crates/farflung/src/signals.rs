//! Ctrl-C and friends: the first signal asks the loop to save and stop, the second ends the process at once.
//!
//! It refuses to know what is saved: the loop polls [`Stop::requested`] between steps.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

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

/// Whether a stop was asked for. Clones share the answer.
#[derive(Debug, Clone, Default)]
pub struct Stop {
    /// The signal's number, or 0.
    signal: Arc<AtomicUsize>,
}

impl Stop {
    /// Catches SIGINT and SIGTERM for the rest of the process's life.
    ///
    /// Errors: [`Error::Io`] if the system refuses the handlers.
    pub fn install() -> Result<Self> {
        let stop = Self::default();
        let once = Arc::new(AtomicBool::new(false));
        for (number, signal) in [(SIGINT, Signal::Interrupt), (SIGTERM, Signal::Terminate)] {
            // The order matters: on the first signal `once` is still false when the shutdown looks at it.
            flag::register_conditional_shutdown(number, i32::from(signal.exit_code()), Arc::clone(&once))
                .and_then(|_| flag::register(number, Arc::clone(&once)))
                .and_then(|_| flag::register_usize(number, Arc::clone(&stop.signal), number as usize))
                .map_err(Error::io("catch signals for", "this process".as_ref()))?;
        }
        Ok(stop)
    }

    /// A stop that only [`Stop::request`] can raise: for tests and for callers with handlers of their own.
    #[must_use]
    pub fn manual() -> Self {
        Self::default()
    }

    /// Asks for a stop as `signal` would.
    pub fn request(&self, signal: Signal) {
        let number = match signal {
            Signal::Interrupt => SIGINT,
            Signal::Terminate => SIGTERM,
        };
        self.signal.store(number as usize, Ordering::Relaxed);
    }

    /// The last signal that came, if one did.
    #[must_use]
    pub fn requested(&self) -> Option<Signal> {
        match self.signal.load(Ordering::Relaxed) {
            0 => None,
            n if n == SIGINT as usize => Some(Signal::Interrupt),
            _ => Some(Signal::Terminate),
        }
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
        assert_eq!(seen.requested(), Some(Signal::Interrupt));
        assert_eq!(Error::Stopped(Signal::Interrupt).exit_code(), 130);
    }
}
