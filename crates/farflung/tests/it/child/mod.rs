//! Processes that a test starts, signals and waits for.

#![expect(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]

use std::thread;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

/// Time limit of every wait.
const PATIENCE: Duration = Duration::from_mins(2);

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
    let maps = std::fs::read_to_string(format!("/proc/{process}/maps")).unwrap_or_default();
    maps.lines().filter(|line| line.contains("memfd:farflung")).count()
}
