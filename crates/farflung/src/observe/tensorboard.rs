//! Writes event files for TensorBoard: records with a length and checksums (TFRecord), each with a message
//! `Event` of TensorBoard's `event.proto`. Only scalars are written.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use super::Observer;
use crate::train::Observation;
use crate::{Error, Result, StepMetrics};

/// An event file, created at the first step. After a failure to write, a warning is logged and nothing more is
/// written.
#[derive(Debug)]
pub struct EventFiles {
    folder: PathBuf,
    file: Option<File>,
    failed: bool,
}

impl EventFiles {
    /// Uses this folder, which is created if it does not exist.
    ///
    /// Errors: [`Error::Io`].
    pub fn new(folder: &Path) -> Result<Self> {
        fs::create_dir_all(folder).map_err(Error::io("make", folder))?;
        Ok(Self { folder: folder.to_owned(), file: None, failed: false })
    }

    /// Starts a file at this step. TensorBoard then hides points of later steps, which a killed run may have
    /// written.
    fn begin(&self, step: u64) -> std::io::Result<File> {
        let now = seconds();
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let name = format!("events.out.tfevents.{:010}.{host}.{}.0", now as u64, std::process::id());
        let mut file = File::options().create(true).append(true).open(self.folder.join(name))?;
        let version = bytes_field(3, b"brain.Event:2");
        let started = bytes_field(7, &varint_field(1, 1));
        let head = [record(&event(now, 0, &version)), record(&event(now, step, &started))].concat();
        file.write_all(&head)?;
        Ok(file)
    }

    /// Writes scalars of a step.
    fn write(&mut self, step: u64, scalars: &[(&str, f64)]) {
        if self.failed {
            return;
        }
        let written = match self.file.take().map_or_else(|| self.begin(step), Ok) {
            Ok(mut file) => {
                let summary: Vec<u8> =
                    scalars.iter().flat_map(|(tag, value)| value_of(tag, *value)).collect();
                let written = file.write_all(&record(&event(seconds(), step, &bytes_field(5, &summary))));
                self.file = Some(file);
                written
            }
            Err(error) => Err(error),
        };
        if let Err(error) = written {
            self.failed = true;
            tracing::warn!(folder = %self.folder.display(), %error, "failed to write events for TensorBoard");
        }
    }
}

impl Observer for EventFiles {
    fn step_row(&mut self, row: &StepMetrics) {
        let held_out = row.val_loss.map(|loss| ("loss/held_out", loss));
        let scalars: Vec<_> = [("loss/train", row.train_loss)].into_iter().chain(held_out).collect();
        self.write(row.step, &scalars);
    }

    fn observe(&mut self, seen: &Observation<'_>) {
        let times = seen.times;
        let mut scalars = vec![
            ("step/learning_rate".to_owned(), seen.lr),
            ("step/tokens_per_s".to_owned(), seen.tokens_per_s),
            ("step/compute_s".to_owned(), times.compute_s()),
            ("step/wait_s".to_owned(), times.wait_s),
            ("step/communicate_s".to_owned(), times.communicate_s),
            ("bytes/sent".to_owned(), times.bytes_sent as f64),
            ("bytes/received".to_owned(), seen.bytes_received as f64),
        ];
        for peer in seen.peers {
            let Some(path) = peer.path else { continue };
            let mut add =
                |what: &str, value: f64| scalars.push((format!("peer_{}/{what}", peer.peer), value));
            path.round_trip_s.into_iter().for_each(|round_trip| add("round_trip_s", round_trip));
            add("retransmissions", path.retransmissions as f64);
            add("queued_s", path.queued_s);
        }
        let scalars: Vec<_> = scalars.iter().map(|(tag, value)| (tag.as_str(), *value)).collect();
        self.write(times.step, &scalars);
    }
}

#[expect(clippy::disallowed_methods, reason = "events carry the time of day; nothing is computed from it")]
fn seconds() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

/// Encodes a message `Event`: wall time (field 1), step (field 2) and the event's own field.
fn event(time: f64, step: u64, what: &[u8]) -> Vec<u8> {
    let mut event = vec![1 << 3 | 1];
    event.extend(time.to_le_bytes());
    event.extend(varint_field(2, step));
    event.extend(what);
    event
}

/// Encodes field 1 of a `Summary`, a `Value`: tag (field 1) and simple value (field 2).
fn value_of(tag: &str, value: f64) -> Vec<u8> {
    let mut message = bytes_field(1, tag.as_bytes());
    message.push(2 << 3 | 5);
    message.extend((value as f32).to_le_bytes());
    bytes_field(1, &message)
}

fn bytes_field(number: u8, bytes: &[u8]) -> Vec<u8> {
    let mut field = vec![number << 3 | 2];
    field.extend(varint(bytes.len() as u64));
    field.extend(bytes);
    field
}

fn varint_field(number: u8, value: u64) -> Vec<u8> {
    let mut field = vec![number << 3];
    field.extend(varint(value));
    field
}

fn varint(mut value: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    while value >= 0x80 {
        bytes.push(value as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
    bytes
}

/// Encodes a TFRecord: length, checksum of the length, data, checksum of the data.
fn record(data: &[u8]) -> Vec<u8> {
    let length = (data.len() as u64).to_le_bytes();
    let mut record = length.to_vec();
    record.extend(masked(crc32c(&length)).to_le_bytes());
    record.extend(data);
    record.extend(masked(crc32c(data)).to_le_bytes());
    record
}

/// Returns a checksum in the form in which TFRecord stores it, since checksums of data that contain checksums
/// are weak.
const fn masked(crc: u32) -> u32 {
    crc.rotate_right(15).wrapping_add(0xa282_ead8)
}

/// Returns the CRC-32C (Castagnoli), computed bit by bit: records are a few hundred bytes.
fn crc32c(bytes: &[u8]) -> u32 {
    let fold = |crc: u32, byte: &u8| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| crc >> 1 ^ 0x82f6_3b78 & (crc & 1).wrapping_neg())
    };
    !bytes.iter().fold(u32::MAX, fold)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_are_those_of_the_standard_and_numbers_those_of_protobuf() {
        // RFC 3720, B.4.
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
        assert_eq!(crc32c(&(0..32).collect::<Vec<u8>>()), 0x46dd_794e);
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(varint(300), [0xac, 0x02]);
        assert_eq!(varint(0), [0]);
        assert_eq!(varint(u64::MAX).len(), 10);
    }

    #[test]
    fn a_folder_that_cannot_be_written_ends_no_run() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, "").unwrap();
        assert!(EventFiles::new(&file.join("below")).unwrap_err().to_string().contains("below"));
        let mut events = EventFiles::new(&folder.path().join("events")).unwrap();
        fs::remove_dir(folder.path().join("events")).unwrap();
        events.step_row(&StepMetrics { step: 1, ..StepMetrics::default() });
        assert!(events.failed);
        events.step_row(&StepMetrics { step: 2, ..StepMetrics::default() });
    }
}
