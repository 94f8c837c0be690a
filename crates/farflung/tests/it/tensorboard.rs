//! Event files, read back by the definition of their format.
#![cfg(feature = "tensorboard")]
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::collections::BTreeMap;
use std::path::Path;

use crate::protobuf::{Value, all, fields, number, text};
use crate::tiny::{Run, farflung};
use farflung::metrics;

/// Computes CRC-32C with a table, unlike the writer.
fn crc32c(bytes: &[u8]) -> u32 {
    let entry =
        |byte: u32| (0..8).fold(byte, |crc, _| if crc & 1 == 1 { crc >> 1 ^ 0x82f6_3b78 } else { crc >> 1 });
    let table: Vec<u32> = (0..256).map(entry).collect();
    !bytes.iter().fold(!0, |crc: u32, byte| table[((crc ^ u32::from(*byte)) & 0xff) as usize] ^ crc >> 8)
}

/// Returns the stored form of a checksum.
fn masked(crc: u32) -> u32 {
    crc.rotate_right(15).wrapping_add(0xa282_ead8)
}

/// Returns the records of a file, after checking their checksums.
fn records(path: &Path) -> Vec<Vec<u8>> {
    let file = std::fs::read(path).unwrap();
    let (mut rest, mut records) = (&file[..], Vec::new());
    let word = |bytes: &[u8]| u32::from_le_bytes(bytes[..4].try_into().unwrap());
    while !rest.is_empty() {
        let length = usize::try_from(u64::from_le_bytes(rest[..8].try_into().unwrap())).unwrap();
        assert_eq!(word(&rest[8..]), masked(crc32c(&rest[..8])));
        let data = &rest[12..12 + length];
        assert_eq!(word(&rest[12 + length..]), masked(crc32c(data)));
        records.push(data.to_vec());
        rest = &rest[16 + length..];
    }
    records
}

/// Returns the only file of a folder.
fn only_file(folder: &Path) -> std::path::PathBuf {
    let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let files: Vec<_> = files.filter(|path| path.is_file()).collect();
    let [file] = &files[..] else { unreachable!("{files:?}") };
    assert!(file.file_name().unwrap().to_str().unwrap().starts_with("events.out.tfevents."));
    file.clone()
}

#[test]
fn scalars_are_those_of_the_metrics() {
    let run = Run::new();
    let (out, events) = (run.at("run"), run.at("events"));
    let (out, folder) = (out.display(), events.display());
    let args = format!("--steps 4 --out {out} --tensorboard {folder} --lr 0.001 --lr-schedule constant");
    let output = farflung().current_dir(run.at("")).args(run.args(&args)).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));

    let all_events = records(&only_file(&events));
    assert_eq!(text(&all_events[0], 3), "brain.Event:2");
    assert_eq!(fields(&all(&all_events[1], 7).concat()), [(1, Value::Varint(1))], "the session begins");
    let mut scalars: BTreeMap<(String, u64), f32> = BTreeMap::new();
    let mut times = Vec::new();
    for event in &all_events {
        times.push(f64::from_bits(number(event, 1)));
        for value in all(event, 5).iter().flat_map(|summary| all(summary, 1)) {
            let scalar = f32::from_bits(u32::try_from(number(&value, 2)).unwrap());
            let before = scalars.insert((text(&value, 1), number(event, 2)), scalar);
            assert_eq!(before, None, "once a step");
        }
    }
    assert!(times[0] > 1.7e9 && times.is_sorted(), "{times:?}");
    let rows = metrics::read(&run.at("run/metrics.jsonl")).unwrap();
    assert_eq!(rows.len(), 4);
    for row in &rows {
        let is = |tag: &str, value: f64| {
            let found = f64::from(scalars[&(tag.to_owned(), row.step)]);
            assert!(
                (found - value).abs() <= 1e-6 * value.abs(),
                "{tag} after {}: {found}, not {value}",
                row.step
            );
        };
        is("loss/train", row.train_loss);
        is("loss/held_out", row.val_loss.unwrap());
        is("step/learning_rate", 0.001);
        let scalar = |tag: &str| scalars[&(tag.to_owned(), row.step)];
        assert!(scalar("step/tokens_per_s") > 0.0 && scalar("step/compute_s") > 0.0);
        // The row's bytes include those of the step's evaluation.
        for (tag, bytes) in [("bytes/sent", row.bytes_sent), ("bytes/received", row.bytes_received)] {
            assert!(scalar(tag) > 0.0 && f64::from(scalar(tag)) <= bytes as f64 * 1.000_001);
        }
    }
}

#[test]
fn ranks_of_a_job_have_folders_and_a_run_that_goes_on_says_from_where() {
    let run = Run::new();
    let (out, events) = (run.at("run"), run.at("events"));
    let (out, folder) = (out.display(), events.display());
    for steps in [2, 3] {
        let needed = format!("--steps {steps} --out {out} --tensorboard {folder} --sync ddp --resume auto");
        let launch = ["launch", "-n", "2", "--", "train"];
        let output =
            farflung().current_dir(run.at("")).args(launch).args(run.flags(&needed)).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        if steps == 2 {
            let own = records(&only_file(&events.join("rank-00001")));
            let tags: Vec<String> = own
                .iter()
                .flat_map(|event| all(event, 5))
                .flat_map(|s| all(&s, 1))
                .map(|v| text(&v, 1))
                .collect();
            assert!(
                tags.iter().any(|tag| tag == "bytes/sent") && !tags.iter().any(|tag| tag == "loss/train")
            );
            std::fs::remove_file(only_file(&events.join("rank-00001"))).unwrap();
        }
    }
    let own = records(&only_file(&events.join("rank-00001")));
    // The file of the second start begins with an event of that start's first step, 3, so that viewers drop
    // older points from that step on.
    assert_eq!((number(&own[1], 2), number(own.last().unwrap(), 2)), (3, 3));
}
