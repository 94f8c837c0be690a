//! The part of a job on one machine: its description, which is sent over ssh, and how this machine starts its
//! ranks and listens for signals.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{BufRead, Read};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use rustix::process::Signal as SystemSignal;
use serde::{Deserialize, Serialize};

use super::Launch;
use super::job::{HEARD, POLL};
use crate::{Error, Result, Signal, Stop};

/// Limit on the length of the first line, in bytes.
const LONGEST: u64 = 1 << 20;

/// A machine's part of a job: the first line of its standard input, as JSON. Secrets are among the variables.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Share {
    pub(super) ranks: Range<usize>,
    pub(super) world_size: usize,
    pub(super) master: (String, u16),
    pub(super) grace: Duration,
    /// The folder in which the processes run; by default the one in which ssh starts.
    pub(super) dir: Option<PathBuf>,
    pub(super) variables: BTreeMap<String, String>,
    pub(super) args: Vec<String>,
}

/// Starts the ranks that the first line of `input` describes, as processes of `program`, and waits for them.
/// Each further line is the name of a signal, which is passed on. If the input ends, the launcher is gone: the
/// ranks are asked to end, and killed if they still run after twice `grace`.
///
/// # Errors
/// Those of [`Launch::run`]; [`Error::Setting`] for a first line that `launch --hosts` did not write;
/// [`Error::Io`] for a folder that does not exist.
pub fn serve(program: &Path, mut input: impl BufRead + Send + 'static, stop: &Stop) -> Result<()> {
    let mut line = String::new();
    let wrong = |value: &dyn ToString, expected: &str| Error::Setting {
        field: "standard input",
        value: value.to_string(),
        expected: expected.to_owned(),
    };
    let read = input.by_ref().take(LONGEST).read_line(&mut line);
    read.map_err(|error| wrong(&error, "the line that `farflung launch --hosts` writes"))?;
    let share: Share = serde_json::from_str(&line)
        .map_err(|error| wrong(&error, "the line that `farflung launch --hosts` writes"))?;
    if let Some(dir) = &share.dir {
        std::env::set_current_dir(dir).map_err(Error::io("enter the folder", dir))?;
    }
    let Share { ranks, world_size, master, grace, variables, args, .. } = share;
    let launch = Launch { ranks, world_size, master, grace, secret: None, over_quic: false };
    let args: Vec<OsString> = args.into_iter().map(OsString::from).collect();
    let listener = stop.clone();
    thread::spawn(move || listen(input, grace, &listener));
    launch.run_with(program, &args, &variables, stop)
}

/// Passes signals on until the input ends, then ends the ranks.
fn listen(input: impl BufRead, grace: Duration, stop: &Stop) {
    for line in input.lines().map_while(std::result::Result::ok) {
        match HEARD.iter().find(|(name, _)| *name == line).map(|(_, signal)| *signal) {
            Some(SystemSignal::KILL) => insist(POLL * 3, stop),
            Some(signal) => Signal::of(signal.as_raw()).into_iter().for_each(|signal| stop.request(signal)),
            None => tracing::warn!(line, "unknown name of a signal"),
        }
    }
    insist(grace, stop);
}

/// Requests a stop three times, with `between` as the pause. The third request kills the ranks.
fn insist(between: Duration, stop: &Stop) {
    for _ in 0..3 {
        stop.request(Signal::Terminate);
        thread::sleep(between);
    }
}
