//! The process's stderr and stdout: every write to them goes through here, none panics, and none to stderr
//! stops a run.
//!
//! Progress, logs and errors go to stderr through a bounded queue that a thread of its own writes out. Stderr
//! may be closed, full or gone with its terminal: what it does not take is dropped. If its reader stands still
//! (a stopped pager, Ctrl-S on a terminal), the queue fills and later messages are dropped; a line counts them
//! once the reader goes on. Results go to stdout, where a write that fails is an error. SIGPIPE stays ignored,
//! as Rust's runtime has it: a write to a closed pipe fails like any other.

mod queue;
mod screen;

use std::io::{self, IsTerminal, Write};
use std::sync::OnceLock;

use crate::{Error, Result};
use queue::Queue;
pub(crate) use screen::Screen;

/// The process's stderr. The only place that names it.
#[expect(clippy::disallowed_methods, reason = "this module is how the others write")]
fn stderr() -> io::Stderr {
    io::stderr()
}

/// The process's stdout. The only place that names it.
#[expect(clippy::disallowed_methods, reason = "this module is how the others write")]
fn stdout() -> io::Stdout {
    io::stdout()
}

/// What is on its way to stderr.
fn queue() -> &'static Queue {
    static QUEUE: OnceLock<Queue> = OnceLock::new();
    QUEUE.get_or_init(|| Queue::new(stderr()))
}

/// Writes text to stderr, if stderr takes it. What is said first is written first.
pub fn say(text: impl Into<Vec<u8>>) {
    queue().put(text.into());
}

/// Draws on stderr what the next drawing replaces: it is left out where older text still waits for a slow
/// terminal.
fn draw(text: String) {
    queue().offer(text.into_bytes());
}

/// Writes a result to stdout, after what stderr takes of what was said before.
///
/// Errors: [`Error::Io`] if stdout does not take all of it.
pub fn print(text: &str) -> Result<()> {
    print_bytes(text.as_bytes())
}

/// [`print()`] of text that need not be whole characters.
pub fn print_bytes(text: &[u8]) -> Result<()> {
    flush();
    let mut out = stdout().lock();
    out.write_all(text).and_then(|()| out.flush()).map_err(|source| Error::Io {
        action: "write to",
        path: "stdout".into(),
        source,
    })
}

/// Waits until stderr has taken what was said, or takes nothing for a second. For the end of the process.
pub fn flush() {
    queue().flush();
}

/// Whether stderr is a terminal.
#[must_use]
pub fn stderr_is_terminal() -> bool {
    stderr().is_terminal()
}

/// Whether stdout is a terminal.
#[must_use]
pub fn stdout_is_terminal() -> bool {
    stdout().is_terminal()
}

/// Stderr as a writer, for a log's subscriber; it never fails.
#[derive(Debug, Clone, Copy, Default)]
pub struct Log;

impl Write for Log {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        say(text);
        Ok(text.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
