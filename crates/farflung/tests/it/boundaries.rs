//! Codecs between the stages of pipelines, in whole runs started through the command line.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::path::{Path, PathBuf};

use crate::pipeline::{Run, model, same};

const AQ: &str = "--sampling epochs --boundary aqsgd:4 --boundary-backward int8";

fn bytes(rows: &[farflung::StepMetrics]) -> u64 {
    rows.last().unwrap().bytes_sent
}

/// Returns the files in which a rank stores samples.
fn stores(rank: &Path) -> Vec<PathBuf> {
    let mut files: Vec<_> =
        std::fs::read_dir(rank.join("boundaries")).unwrap().map(|file| file.unwrap().path()).collect();
    files.sort();
    files
}

#[test]
fn schedules_train_through_coded_boundaries() {
    let run = Run::new();
    for schedule in [
        "--stages 4 --schedule 1f1b",
        "--stages 4 --schedule zb-h1",
        "--stages 2 --schedule chimera",
        "--stages 2 --schedule zbv",
        "--stages 2 --schedule terapipe",
        "--stages 2 --schedule pipedream --clip 0",
        "--workers 4 --stages 2 --schedule gpipe --microbatches 4",
    ] {
        let with = |name: &str, args: &str| {
            run.done(&[], &format!("{schedule} {name}"), &format!("{schedule} {args}"))
        };
        let plain = with("plain", "--sampling epochs");
        for (name, boundary, most) in [
            ("f16", "--sampling epochs --boundary f16 --boundary-backward f16", 2e-3),
            ("int8", "--sampling epochs --boundary int8:16 --boundary-backward int8:16", 0.03),
            ("aq", AQ, 0.1),
        ] {
            let coded = with(name, boundary);
            for (coded, plain) in coded.iter().zip(&plain) {
                let off = (coded.train_loss - plain.train_loss).abs();
                assert!(off < most, "{schedule} {boundary}: {coded:?} {plain:?}");
            }
            assert!(bytes(&coded) < bytes(&plain), "{schedule} {boundary}");
            let differ = coded.iter().zip(&plain).any(|(c, p)| (c.train_loss - p.train_loss).abs() > 1e-9);
            assert!(differ, "{schedule} {boundary}: nothing was packed");
        }
    }
}

/// A lossless codec changes only the number of bytes.
#[test]
fn packed_hidden_states_are_the_same_hidden_states() {
    let run = Run::new();
    let plain = run.done(&[], "plain", "--stages 2");
    let packed = run.done(&[], "packed", "--stages 2 --boundary none+lz4 --boundary-backward none+lz4");
    same("packed", &packed, &plain);
    assert_eq!(model(&run.at("plain")), model(&run.at("packed")));
}

#[test]
fn processes_hold_the_samples_that_threads_hold() {
    let run = Run::new();
    let args = format!("--stages 2 --workers 2 --microbatches 4 {AQ}");
    let threads = run.done(&[], "threads", &args);
    for (name, store) in [("processes", "memory"), ("files", "file"), ("maps", "mapped")] {
        let with = format!("{args} --boundary-store {store}");
        same(name, &run.done(&["launch", "-n", "2", "--"], name, &with), &threads);
        assert_eq!(model(&run.at("threads")), model(&run.at(name)), "{name}");
    }
    let rank = |out: &str, rank: &str| stores(&run.at(out).join(rank));
    for out in ["files", "maps"] {
        let (sender, receiver) = (rank(out, ""), rank(out, "ranks/rank-00001"));
        assert_eq!(sender.len(), 1);
        let held = std::fs::read(&sender[0]).unwrap();
        assert!(held == std::fs::read(&receiver[0]).unwrap() && held.iter().any(|b| *b != 0), "{out}");
    }
}

#[test]
fn a_run_goes_on_with_the_samples_that_it_held() {
    let run = Run::new();
    // An epoch is a few steps, so that samples return before and after the checkpoint.
    let text = (0..40).map(|i| format!("{} is the square of {i}. ", i * i)).collect::<Vec<_>>().concat();
    std::fs::write(run.at("text.txt"), text).unwrap();
    let args = format!("--stages 4 --microbatches 8 --steps 12 --lr-schedule constant {AQ}");
    let alone = run.done(&[], "alone", &args);
    run.done(&[], "twice", &args.replace("--steps 12", "--steps 5"));
    let twice = run.done(&[], "twice", &format!("{args} --resume auto"));
    same("resumed", &twice, &alone);
    let last = |out: &str| std::fs::read(run.at(out).join("step-00000012/model.safetensors")).unwrap();
    assert!(last("alone") == last("twice"));
    // With other stages, no rank has the samples that others stored: the run continues, and at first sends
    // samples in full.
    run.done(&[], "cut", &args.replace("--steps 12", "--steps 5"));
    let cut = args.replace("--stages 4", "--stages 2 --workers 2");
    let rows = run.done(&[], "cut", &format!("{cut} --resume auto"));
    assert!(rows[11].train_loss < rows[0].train_loss, "{rows:?}");
}

/// The file of one end is damaged: a sample does not fit its checksum, and the second half is empty. Both ends
/// drop the samples that differ, and train.
#[test]
fn ends_whose_files_differ_start_those_samples_anew() {
    let run = Run::new();
    let text = (0..40).map(|i| format!("{} is the square of {i}. ", i * i)).collect::<Vec<_>>().concat();
    std::fs::write(run.at("text.txt"), text).unwrap();
    let args = format!("--stages 2 --workers 2 --microbatches 4 --lr-schedule constant {AQ}");
    for store in ["file", "mapped"] {
        let with = format!("{args} --boundary-store {store}");
        run.done(&[], store, &format!("{with} --steps 4"));
        let files = stores(&run.at(store).join("ranks/rank-00001"));
        let mut held = std::fs::read(&files[0]).unwrap();
        // Changes a value of the first sample, so that its checksum no longer fits, and clears the second half
        // of the file.
        held[24] ^= 1;
        let half = held.len() / 2;
        held[half..].fill(0);
        std::fs::write(&files[0], held).unwrap();
        let rows = run.done(&[], store, &format!("{with} --steps 16 --resume auto"));
        assert!(rows[15].train_loss < rows[0].train_loss, "{rows:?}");
        let sender = stores(&run.at(store));
        assert!(std::fs::read(&sender[0]).unwrap() == std::fs::read(&files[0]).unwrap(), "{store}");
    }
}

#[test]
fn what_no_boundary_can_be_is_refused_with_the_reason() {
    let run = Run::new();
    for (args, reason) in [
        ("--stages 2 --boundary aqsgd:4", "`sampling` is random, expected epochs with boundary aqsgd:4"),
        ("--stages 2 --boundary aqsgd:5", "needs a number of bits: 2, 3, 4 or 8"),
        ("--stages 2 --boundary int8+ef", "cannot be used on a boundary"),
        ("--stages 2 --boundary nonsense", "aqsgd:BITS"),
        ("--workers 1 --sampling epochs --batch 8000", "the number of windows of 16 tokens in the data"),
    ] {
        let output = run.farflung(&[], "refused", args);
        let message = String::from_utf8_lossy(&output.stderr);
        assert_ne!(output.status.code(), Some(0), "{args}: {message}");
        assert!(message.contains(reason), "{args}: {message}");
    }
    let output = run.farflung(&[], "idle", "--workers 1 --steps 1 --boundary int8 --quiet false");
    let message = String::from_utf8_lossy(&output.stderr);
    assert!(message.contains("`boundary` changes nothing: `stages` is 1"), "{message}");
}

/// Epochs have the same windows for any number of ranks.
#[test]
fn epochs_do_not_depend_on_who_trains() {
    let run = Run::new();
    let one = run.done(&[], "one", "--workers 1 --accumulate 8 --sampling epochs");
    let replicas = run.done(&[], "replicas", "--workers 4 --accumulate 2 --sampling epochs");
    let staged = run.done(&[], "staged", "--stages 4 --microbatches 8 --sampling epochs");
    same("replicas", &replicas, &one);
    same("staged", &staged, &one);
    let random = run.done(&[], "random", "--workers 1 --accumulate 8");
    assert!((random[0].train_loss - one[0].train_loss).abs() > 1e-9, "epochs took random windows");
}
