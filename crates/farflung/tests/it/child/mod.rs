//! Processes that a test starts, signals and waits for.

#![expect(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]

use std::fs;
use std::ops::{Deref, DerefMut};
use std::process::Child;
use std::thread;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

/// Time limit of every wait.
const PATIENCE: Duration = Duration::from_mins(2);

/// A process that is killed with all processes that it has started, if it still runs when the test ends.
pub(crate) struct Guarded(pub(crate) Child);

impl Deref for Guarded {
    type Target = Child;

    fn deref(&self) -> &Child {
        &self.0
    }
}

impl DerefMut for Guarded {
    fn deref_mut(&mut self) -> &mut Child {
        &mut self.0
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        if self.0.try_wait().is_ok_and(|ended| ended.is_none()) {
            kill_tree(self.0.id());
            let _ = self.0.wait();
        }
    }
}

/// Kills a process and then those that it has started.
fn kill_tree(process: u32) {
    let children = fs::read_to_string(format!("/proc/{process}/task/{process}/children")).unwrap_or_default();
    let _ = kill_process(Pid::from_raw(i32::try_from(process).unwrap()).unwrap(), Signal::KILL);
    children.split_whitespace().filter_map(|child| child.parse().ok()).for_each(kill_tree);
}

pub(crate) fn send(process: u32, signal: Signal) {
    kill_process(Pid::from_raw(i32::try_from(process).unwrap()).unwrap(), signal).unwrap();
}

#[allow(dead_code, reason = "some tests tell more")]
pub(crate) fn wait_until<T>(what: &str, done: impl FnMut() -> Option<T>) -> T {
    wait_until_or(|| what.to_owned(), done)
}

/// Like `wait_until`, with a function that returns the description for the panic message.
pub(crate) fn wait_until_or<T>(what: impl Fn() -> String, mut done: impl FnMut() -> Option<T>) -> T {
    let pause = Duration::from_millis(10);
    for _ in 0..PATIENCE.as_millis() / pause.as_millis() {
        if let Some(value) = done() {
            return value;
        }
        thread::sleep(pause);
    }
    panic!("waited in vain for {}", what())
}

/// Returns the number of other processes with which a process currently shares memory.
pub(crate) fn shares_with(process: u32) -> usize {
    let maps = fs::read_to_string(format!("/proc/{process}/maps")).unwrap_or_default();
    maps.lines().filter(|line| line.contains("memfd:farflung")).count()
}
