//! `metrics.jsonl`: one JSON object per step. A line is written as soon as the step's mean loss over all
//! replicas is known: at the step's end, or with local steps at the next average.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::line_file::LinesFromEnd;
use crate::{Error, PeerCounters, Result};

/// Metrics after a step. Counts are totals since the run's first step, over all its resumes.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct StepMetrics {
    /// Number of steps done.
    pub step: u64,
    /// The run's clock in seconds: virtual on simulated links.
    pub time_s: f64,
    /// Seconds of real time.
    pub wall_s: f64,
    /// Number of tokens on which all workers together trained.
    pub tokens: u64,
    /// Mean loss of the step's tokens, in nats. JSON has no NaN, so NaN is written as `null`.
    #[serde(deserialize_with = "null_is_nan")]
    pub train_loss: f64,
    /// Mean loss of held-out tokens, in nats, if the step evaluated.
    pub val_loss: Option<f64>,
    /// Bytes sent by this process's workers.
    pub bytes_sent: u64,
    /// Bytes received by this process's workers.
    pub bytes_received: u64,
    /// Tokens of all workers in the step per second of `time_s`.
    pub tokens_per_s: f64,
    /// Largest relative l2 distance of a copy of parameters from the first holder's copy, if copies are on
    /// devices that round differently and the step compared them. All copies were then set to the first
    /// holder's copy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drift: Option<f64>,
    /// Hash of all parameters by tensor, the same under any plan, if it was due in this step
    /// (`--digest-every`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<String>,
    /// Counters of what the rank that writes the row and each of its peers have exchanged since they met, with
    /// measurements of the paths between them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub peers: Vec<PeerCounters>,
}

fn null_is_nan<'de, D: serde::Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or(f64::NAN))
}

/// Appends steps to a `metrics.jsonl`.
#[derive(Debug)]
pub struct MetricsWriter {
    path: PathBuf,
    file: File,
}

impl MetricsWriter {
    /// Opens the file for the steps after `step`. Lines of later steps, and a line that a crash left
    /// incomplete, are removed.
    pub(crate) fn open(path: &Path, step: u64) -> Result<Self> {
        let mut file = File::options()
            .create(true)
            .truncate(false)
            .read(true)
            .write(true)
            .open(path)
            .map_err(Error::io("open", path))?;
        let keep = length_up_to(path, &file, step)?;
        file.set_len(keep)
            .and_then(|()| std::io::Seek::seek(&mut file, std::io::SeekFrom::End(0)))
            .map_err(Error::io("cut", path))?;
        Ok(Self { path: path.to_owned(), file })
    }

    /// Appends a step.
    pub fn write(&mut self, metrics: &StepMetrics) -> Result<()> {
        let mut line = serde_json::to_vec(metrics).expect("numbers can be written as JSON");
        line.push(b'\n');
        self.file.write_all(&line).map_err(Error::io("write", &self.path))
    }
}

/// Returns the length of the file with its rows up to `step`. Rows are in the order of their steps, so only
/// those after it are read.
fn length_up_to(path: &Path, file: &File, step: u64) -> Result<u64> {
    let read = || Error::io("read", path);
    let mut lines = LinesFromEnd::new(file).map_err(read())?;
    // What a crash has left at the end.
    let mut is_left = true;
    loop {
        let end = lines.end();
        let Some(line) = lines.pop().map_err(read())? else { return Ok(0) };
        is_left &= !(line.ends_with(b"\n") && is_text(&line));
        if is_left {
            continue;
        }
        let begins = usize::try_from(lines.end()).unwrap_or(usize::MAX);
        let number =
            || fs::read(path).map_or(0, |all| all.iter().take(begins).filter(|&&b| b == b'\n').count());
        if parse(path, || number() + 1, &line)?.step <= step {
            return Ok(end);
        }
    }
}

/// Reads all steps of a `metrics.jsonl`; a line that a crash left incomplete at the end is ignored.
///
/// Errors: [`Error::Io`], [`Error::Metrics`] with the line.
pub fn read(path: &Path) -> Result<Vec<StepMetrics>> {
    let bytes = fs::read(path).map_err(Error::io("read", path))?;
    let lines = whole(&bytes).split_inclusive(|&b| b == b'\n');
    lines.enumerate().map(|(i, line)| parse(path, || i + 1, line)).collect()
}

/// Returns the bytes of all complete lines. A crash can leave, at the end, a line without a newline or lines
/// that are not text (a power loss can leave blocks of zeros or of other data).
fn whole(bytes: &[u8]) -> &[u8] {
    let ended = bytes.iter().rposition(|&b| b == b'\n').map_or(0, |last| last + 1);
    let mut end = 0;
    let mut at = 0;
    for line in bytes[..ended].split_inclusive(|&b| b == b'\n') {
        at += line.len();
        if is_text(line) {
            end = at;
        }
    }
    &bytes[..end]
}

fn is_text(line: &[u8]) -> bool {
    std::str::from_utf8(line).is_ok_and(|text| !text.contains('\0'))
}

fn parse(path: &Path, line: impl FnOnce() -> usize, text: &[u8]) -> Result<StepMetrics> {
    let wrong = |source| Error::Metrics { path: path.to_owned(), line: line(), source };
    serde_json::from_slice(text).map_err(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(step: u64) -> StepMetrics {
        StepMetrics { step, train_loss: 1.5, val_loss: (step == 2).then_some(2.5), ..StepMetrics::default() }
    }

    #[test]
    fn a_resumed_run_repeats_no_step() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        let mut writer = MetricsWriter::open(&path, 0).unwrap();
        (1..=5).for_each(|step| writer.write(&at(step)).unwrap());
        // A line is incomplete, because the process was killed while it wrote the line.
        writer.file.write_all(b"{\"step\":6,\"ti").unwrap();
        let mut writer = MetricsWriter::open(&path, 3).unwrap();
        writer.write(&at(4)).unwrap();
        let rows = read(&path).unwrap();
        assert_eq!(rows, (1..=4).map(at).collect::<Vec<_>>());
        assert!(fs::read_to_string(&path).unwrap().contains("\"val_loss\":null"));
        MetricsWriter::open(&path, 0).unwrap();
        assert!(read(&path).unwrap().is_empty());
    }

    #[test]
    fn what_a_crash_left_at_the_end_is_dropped_whatever_its_bytes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        let tails: [&[u8]; 6] = [
            b"{\"step\":4,\"ti",
            b"{\"step\":4\xe2\x82",
            b"\xff\xfe\x80",
            b"{\"step\":4\xff}\n\xff\n",
            &[0; 4096],
            b"\0\0\n\0\xff",
        ];
        for tail in tails {
            let mut writer = MetricsWriter::open(&path, 0).unwrap();
            (1..=3).for_each(|step| writer.write(&at(step)).unwrap());
            writer.file.write_all(tail).unwrap();
            assert_eq!(read(&path).unwrap(), (1..=3).map(at).collect::<Vec<_>>(), "{tail:?}");
            let mut writer = MetricsWriter::open(&path, 3).unwrap();
            writer.write(&at(4)).unwrap();
            assert_eq!(read(&path).unwrap(), (1..=4).map(at).collect::<Vec<_>>(), "{tail:?}");
        }
        // In the middle of the file, an invalid line is an error. To cut the file, only later lines are read.
        let mut writer = MetricsWriter::open(&path, 2).unwrap();
        writer.file.write_all(b"\xff\n").unwrap();
        writer.write(&at(4)).unwrap();
        for error in [read(&path).unwrap_err(), MetricsWriter::open(&path, 3).unwrap_err()] {
            assert!(error.to_string().ends_with("metrics.jsonl:3 is not a valid line of metrics"), "{error}");
        }
    }

    #[test]
    fn a_loss_that_is_not_a_number_is_null_and_a_bad_line_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        MetricsWriter::open(&path, 0).unwrap().write(&StepMetrics { train_loss: f64::NAN, ..at(1) }).unwrap();
        assert!(read(&path).unwrap()[0].train_loss.is_nan());
        fs::write(&path, "{}\n").unwrap();
        assert!(
            read(&path).unwrap_err().to_string().ends_with("metrics.jsonl:1 is not a valid line of metrics")
        );
        assert!(MetricsWriter::open(&path, 0).is_err());
    }
}
