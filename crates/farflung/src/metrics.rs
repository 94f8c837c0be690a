//! `metrics.jsonl`: one JSON object per step. A line is written as soon as the step's mean loss over all
//! replicas is known: at the step's end, or with local steps at the next average.

use std::fs::File;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::line_file::{self, LineFile, LineRead, Lines};
use crate::{CountedMemory, Error, PeerCounters, Result};

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
    /// Mean loss of the step's tokens, in nats, and what routers of experts add to it. JSON has no NaN, so NaN
    /// is written as `null`.
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
    /// What the routers of mixtures of experts chose in the step, by layer: on all replicas if they average
    /// gradients in each step, else on the one that writes the row.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub experts: Vec<MixtureMetrics>,
    /// Memory of the rank that writes the row, by kind, unless it returned to an earlier step meanwhile.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<CountedMemory>,
    /// Counters of what the rank that writes the row and each of its peers have exchanged since they met, with
    /// measurements of the paths between them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub peers: Vec<PeerCounters>,
}

/// What the router of a mixture of experts chose in a step. The losses are without their factors.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct MixtureMetrics {
    /// Number of the layer, from 0.
    pub layer: u64,
    /// Number of tokens that chose each expert.
    pub counts: Vec<u64>,
    /// Number of choices that found no place in their expert.
    pub dropped: u64,
    /// The balancing loss of the layer, each sequence by itself: 1 if all experts are used alike.
    #[serde(deserialize_with = "null_is_nan")]
    pub balance_loss: f64,
    /// The mean of the squared log-sum-exps of the router's logits.
    #[serde(deserialize_with = "null_is_nan")]
    pub z_loss: f64,
}

fn null_is_nan<'de, D: serde::Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or(f64::NAN))
}

/// Appends steps to a `metrics.jsonl`. Rows that cannot be written are dropped, with a warning: they do not end
/// the run.
#[derive(Debug)]
pub struct MetricsWriter {
    file: LineFile,
    last: Option<u64>,
}

impl MetricsWriter {
    /// Opens the file for the steps after `step`. Lines of later steps, and a line that a crash left
    /// incomplete, are removed. A damaged file is put aside as `metrics.jsonl.damaged-N`, and its good lines
    /// are kept.
    pub(crate) fn open(path: &Path, step: u64) -> Result<Self> {
        let (file, last) = LineFile::open(path.to_owned(), step_of, step)?;
        Ok(Self { file, last })
    }

    /// Warns the user if a run that continues after `step` steps lacks rows, because the file was lost or cut.
    /// A run that did its steps in another folder has none here.
    pub(crate) fn tell_missing(&self, step: u64, was_here: bool) {
        let first = self.last.unwrap_or(0) + 1;
        if was_here && first <= step {
            let path = self.file.path().display();
            tracing::warn!("{path} has no rows of steps {first} to {step}: the run goes on without them");
        }
    }

    /// Appends a step.
    pub fn write(&mut self, metrics: &StepMetrics) {
        self.file.append(metrics);
    }
}

fn step_of(line: &[u8]) -> Option<u64> {
    serde_json::from_slice::<StepMetrics>(line).ok().map(|row| row.step)
}

/// Reads all steps of a `metrics.jsonl`. What a crash left at the end is ignored: a line that is incomplete, or
/// lines that are not text (a power loss can leave blocks of zeros or of other data).
///
/// Errors: [`Error::Io`], [`Error::NotAFile`], [`Error::Metrics`] with the line.
pub fn read(path: &Path) -> Result<Vec<StepMetrics>> {
    line_file::check_kind(path)?;
    let mut lines = Lines::of(File::open(path).map_err(Error::io("read", path))?);
    let mut rows = Vec::new();
    let mut number = 0;
    // The first of some lines that are not text.
    let mut not_text = None;
    while let Some(line) = lines.next().map_err(Error::io("read", path))? {
        if matches!(line, LineRead::Open(_)) {
            break;
        }
        number += 1;
        let row = parse(path, number, line.bytes());
        if is_text(line.bytes()) {
            if let Some(error) = not_text.take() {
                return Err(error);
            }
            rows.push(row?);
        } else if let Err(error) = row {
            not_text.get_or_insert(error);
        }
    }
    Ok(rows)
}

fn is_text(line: &[u8]) -> bool {
    std::str::from_utf8(line).is_ok_and(|text| !text.contains('\0'))
}

fn parse(path: &Path, line: usize, text: &[u8]) -> Result<StepMetrics> {
    let wrong = |source| Error::Metrics { path: path.to_owned(), line, source };
    serde_json::from_slice(text).map_err(wrong)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Write;

    use super::*;

    fn append(path: &Path, bytes: &[u8]) {
        File::options().append(true).open(path).unwrap().write_all(bytes).unwrap();
    }

    fn at(step: u64) -> StepMetrics {
        StepMetrics { step, train_loss: 1.5, val_loss: (step == 2).then_some(2.5), ..StepMetrics::default() }
    }

    #[test]
    fn a_resumed_run_repeats_no_step() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        let mut writer = MetricsWriter::open(&path, 0).unwrap();
        (1..=5).for_each(|step| writer.write(&at(step)));
        // A line is incomplete, because the process was killed while it wrote the line.
        append(&path, b"{\"step\":6,\"ti");
        let mut writer = MetricsWriter::open(&path, 3).unwrap();
        writer.write(&at(4));
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
            (1..=3).for_each(|step| writer.write(&at(step)));
            append(&path, tail);
            assert_eq!(read(&path).unwrap(), (1..=3).map(at).collect::<Vec<_>>(), "{tail:?}");
            let mut writer = MetricsWriter::open(&path, 3).unwrap();
            writer.write(&at(4));
            assert_eq!(read(&path).unwrap(), (1..=4).map(at).collect::<Vec<_>>(), "{tail:?}");
        }
        // In the middle of the file, an invalid line is an error for a reader. A writer puts the file aside.
        let mut writer = MetricsWriter::open(&path, 2).unwrap();
        append(&path, b"\xff\n");
        writer.write(&at(4));
        let error = read(&path).unwrap_err().to_string();
        assert!(error.ends_with("metrics.jsonl:3 is not a valid line of metrics"), "{error}");
        assert_eq!(MetricsWriter::open(&path, 4).unwrap().last, Some(4));
        assert_eq!(read(&path).unwrap(), [at(1), at(2), at(4)]);
    }

    #[test]
    fn a_loss_that_is_not_a_number_is_null_and_a_bad_line_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        MetricsWriter::open(&path, 0).unwrap().write(&StepMetrics { train_loss: f64::NAN, ..at(1) });
        assert!(read(&path).unwrap()[0].train_loss.is_nan());
        fs::write(&path, "{}\n").unwrap();
        assert!(
            read(&path).unwrap_err().to_string().ends_with("metrics.jsonl:1 is not a valid line of metrics")
        );
        assert_eq!(MetricsWriter::open(&path, 9).unwrap().last, None);
        assert_eq!(fs::read(dir.path().join("metrics.jsonl.damaged-1")).unwrap(), b"{}\n");
    }
}
