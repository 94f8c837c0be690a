//! The process's stderr and stdout. Every write to them goes through this module. No write panics, and no write
//! to stderr stops a run.
//!
//! Progress, logs and errors go to stderr through a bounded queue, which a separate thread writes out. Stderr
//! may be closed, full or gone with its terminal: text that it does not accept is dropped. If its reader stops
//! reading (a stopped pager, Ctrl-S on a terminal), the queue fills and later messages are dropped; a line with
//! their number is written once the reader continues. Results go to stdout, where a failed write is an error.
//! SIGPIPE stays ignored, as Rust's runtime sets it: a write to a closed pipe fails like any other.

mod queue;
mod screen;

use std::io::{self, IsTerminal, Write};
use std::sync::OnceLock;

use crate::{Error, Result};
use queue::Queue;
pub(crate) use screen::Screen;

/// Returns the process's stderr. Only this function accesses it.
#[expect(clippy::disallowed_methods, reason = "this module is how the others write")]
fn stderr() -> io::Stderr {
    io::stderr()
}

/// Returns the process's stdout. Only this function accesses it.
#[expect(clippy::disallowed_methods, reason = "this module is how the others write")]
fn stdout() -> io::Stdout {
    io::stdout()
}

/// Returns the queue of text to be written to stderr.
fn queue() -> &'static Queue {
    static QUEUE: OnceLock<Queue> = OnceLock::new();
    QUEUE.get_or_init(|| Queue::new(stderr()))
}

/// Queues text for stderr. Texts are written in the order of the calls.
pub fn write_stderr(text: impl Into<Vec<u8>>) {
    queue().put(text.into());
}

/// Queues a drawing for stderr, which the next drawing replaces. It is dropped if the queue is full, because
/// the terminal is slow.
fn draw(text: String) {
    queue().offer(text.into_bytes());
}

/// Writes a result to stdout, after all text that was queued for stderr before.
///
/// Errors: [`Error::Io`] if stdout does not accept all of it.
pub fn print(text: &str) -> Result<()> {
    print_bytes(text.as_bytes())
}

/// Like [`print()`], for bytes that need not be valid UTF-8.
pub fn print_bytes(text: &[u8]) -> Result<()> {
    flush();
    let mut out = stdout().lock();
    out.write_all(text).and_then(|()| out.flush()).map_err(|source| Error::Io {
        action: "write to",
        path: "stdout".into(),
        source,
    })
}

/// Waits until stderr has accepted all queued text, or has accepted nothing for a second. Called before results
/// are printed, and at the end of the process.
pub fn flush() {
    queue().flush();
}

/// Returns whether stderr is a terminal.
#[must_use]
pub fn stderr_is_terminal() -> bool {
    stderr().is_terminal()
}

/// Returns whether stdout is a terminal.
#[must_use]
pub fn stdout_is_terminal() -> bool {
    stdout().is_terminal()
}

/// Stderr as a writer that never fails, for a log subscriber.
#[derive(Debug, Clone, Copy, Default)]
pub struct Log;

impl Write for Log {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        write_stderr(text);
        Ok(text.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
