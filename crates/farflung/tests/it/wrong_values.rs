//! Values that are not finite and copies that are not equal: they are never saved, and the error names the
//! values and the ranks.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::path::Path;
use std::process::Output;

use crate::tiny::{Run, farflung};
use farflung::config::choice::{LrScheduleKind, Resume, SyncKind, TransportKind};
use farflung::optim::sync::{COCKTAIL, D_PSGD, DILOCO, SHIFT_ONE, STREAMING};
use farflung::train::{Failure, Fault, FaultyValue, Job, Moment, Quiet, connections, run_job};
use farflung::transports::MEMORY;
use farflung::{Checkpoint, Error, EventKind, Result, Stop, TrainConfig, events};

fn train(run: &Run, before: &[&str], args: &str) -> Output {
    let args = format!("--out {} {args}", run.at("run").display());
    farflung().args(before).args(run.args(&args)).output().unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Returns the step of a run's newest checkpoint, whose weights must all be finite; 0 without a checkpoint.
fn newest(run: &Path) -> u64 {
    let Ok(latest) = std::fs::read_to_string(run.join("latest")) else { return 0 };
    let checkpoint = Checkpoint::open(&run.join(latest.trim())).unwrap();
    for name in ["model.safetensors", "optimizer.safetensors"] {
        let bytes = checkpoint.read(name).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        for (tensor, view) in file.iter() {
            let (words, _) = view.data().as_chunks::<4>();
            assert!(words.iter().all(|&word| f32::from_le_bytes(word).is_finite()), "{name}: {tensor}");
        }
    }
    checkpoint.step()
}

#[test]
fn an_outer_step_that_is_not_finite_is_not_taken_by_any_rank() {
    for (before, args) in [
        (&[][..], "--workers 2"),
        (&["launch", "-n", "2", "--"], ""),
        (&[], "--workers 4 --stages 2 --microbatches 2"),
        (&["launch", "-n", "4", "--"], "--stages 2 --microbatches 2"),
    ] {
        let run = Run::new();
        let diloco = "--sync diloco --sync-every 2 --steps 6 --checkpoint-every 1 --deadline 20s";
        let output = train(&run, before, &format!("{diloco} --codec none {args}"));
        assert!(output.status.success(), "{args}: {}", stderr(&output));
        let run = Run::new();
        let output = train(&run, before, &format!("{diloco} --outer-lr 1e40 --codec none {args}"));
        let said = stderr(&output);
        assert_eq!(output.status.code(), Some(1), "{args}: {said}");
        let reason = "the step would produce parameters";
        let ranks = if before.is_empty() { 1 } else { before[2].parse().unwrap() };
        assert_eq!(said.matches(reason).count(), ranks, "{args}: {said}");
        assert_eq!(newest(&run.at("run")), 0);
    }
}

#[test]
fn weights_whose_loss_is_not_finite_are_not_saved() {
    // The weights are finite after the outer step, but the loss with them is not.
    let run = Run::new();
    let args = "--sync diloco --sync-every 2 --outer-lr 1e25 --eval-every 0 --codec none";
    for steps in ["--steps 2", "--steps 4"] {
        let output = train(&run, &[], &format!("{args} {steps}"));
        let said = stderr(&output);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains("not finite") || said.contains("norm is NaN"), "{said}");
        assert_eq!(newest(&run.at("run")), 0);
        std::fs::remove_dir_all(run.at("run")).unwrap();
    }
}

#[test]
fn a_last_step_that_is_not_finite_is_not_saved() {
    // One step of this size leaves infinities, and no later step's gradients would show them.
    let run = Run::new();
    let args = "--steps 1 --optimizer sgd --clip 0 --weight-decay 1e30 --lr 1e30 --lr-schedule constant";
    let output = train(&run, &[], args);
    let said = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("tensor `") && said.contains("is not finite"), "{said}");
    assert_eq!(newest(&run.at("run")), 0);
    assert!(!run.at("run/report.json").exists());
}

#[test]
fn weights_that_are_not_finite_are_refused_by_name() {
    let run = Run::new();
    assert!(train(&run, &[], "--steps 1 --compress-checkpoints false").status.success());
    let folder = run.at("weights");
    std::fs::create_dir(&folder).unwrap();
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(run.at("run/step-00000001").join(name), folder.join(name)).unwrap();
    }
    let path = folder.join("model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let end = bytes.len();
    bytes[end - 4..].copy_from_slice(&f32::NAN.to_le_bytes());
    std::fs::write(&path, bytes).unwrap();
    let weights = folder.display().to_string();
    let data = run.at("text.txt").display().to_string();
    let init = format!("--steps 1 --init-from {weights}");
    let commands: [Vec<String>; 3] = [
        ["generate", &weights].map(str::to_owned).into(),
        ["eval", &weights, "--data", &data].map(str::to_owned).into(),
        run.args(&init),
    ];
    for args in commands {
        let output = farflung().args(&args).output().unwrap();
        let said = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {said}");
        assert!(said.contains("tensor `") && said.contains("is not finite"), "{args:?}: {said}");
    }
}

/// Trains six steps with this fault.
fn with_fault(folder: &Path, config: TrainConfig, fault: Fault) -> Result<()> {
    let mut job = six_steps(folder, config)?;
    job.fault = Some(fault);
    run_job(&job, connections(&job, None)?, &mut Quiet).map(|_| ())
}

/// Returns a job of six small steps.
fn six_steps(folder: &Path, config: TrainConfig) -> Result<Job> {
    let data = folder.join("text.txt");
    std::fs::write(&data, "the quick brown fox ".repeat(500)).unwrap();
    let config = TrainConfig {
        data: Some(data),
        layers: Some(2),
        heads: Some(2),
        dim: Some(8),
        context: Some(8),
        batch: 1,
        steps: 6,
        warmup: 0,
        lr_schedule: LrScheduleKind::Constant,
        transport: TransportKind::of(&MEMORY),
        threads: 1,
        eval_batches: 1,
        sample_tokens: 0,
        checkpoint_every: config.checkpoint_every,
        ..config
    };
    let mut job = Job::new(config.clone(), config.workers, Stop::manual())?;
    job.out = Some(folder.join("run"));
    Ok(job)
}

/// If a rank fails at any moment of a step, the last checkpoint is complete, and a run that continues from it
/// has the bits of one that never failed.
#[test]
fn a_rank_may_fail_at_any_moment_of_a_step() {
    let diloco = TrainConfig { sync: SyncKind::of(&DILOCO), sync_every: 2, ..TrainConfig::default() };
    let pipeline = TrainConfig { stages: 2, microbatches: Some(2), ..TrainConfig::default() };
    // Averages are in flight when the checkpoint is written, and when the rank fails.
    let delayed = |sync| TrainConfig {
        sync: SyncKind::of(sync),
        sync_every: 2,
        fragments: Some(2),
        codec: "int4+ef".parse().unwrap(),
        ..TrainConfig::default()
    };
    let (streaming, local) = (delayed(&STREAMING), delayed(&COCKTAIL));
    let cocktail = TrainConfig { sync_every: 1, ..local.clone() };
    let gossip = |sync| TrainConfig { codec: "none".parse().unwrap(), ..delayed(sync) };
    let piped =
        TrainConfig { sync: SyncKind::of(&STREAMING), sync_every: 2, fragments: Some(2), ..pipeline.clone() };
    // Workers, and the step of the newest checkpoint before the fourth step: the averages of local steps of
    // cocktail arrive one step late, and it is saved there.
    let shards = TrainConfig { zero: 1, codec: "none".parse().unwrap(), ..TrainConfig::default() };
    let ways = vec![
        (TrainConfig::default(), 3, 2),
        (TrainConfig { zero: 3, ..shards.clone() }, 3, 2),
        (shards, 3, 2),
        (diloco, 3, 2),
        (streaming, 3, 2),
        (cocktail, 3, 2),
        (local, 3, 3),
        (gossip(&D_PSGD), 3, 2),
        (gossip(&SHIFT_ONE), 4, 2),
        (pipeline, 4, 2),
        (piped, 4, 2),
    ];
    for (config, workers, saved) in ways {
        let config = TrainConfig { workers, checkpoint_every: 2, ..config };
        let train = |folder: &Path, resume: Resume, failure: Option<Failure>| {
            let job = six_steps(folder, TrainConfig { resume, ..config.clone() }).unwrap();
            let job = Job { failure, ..job };
            run_job(&job, connections(&job, None).unwrap(), &mut Quiet)
        };
        let whole = tempfile::tempdir().unwrap();
        let hash = train(whole.path(), Resume::No, None).unwrap().unwrap().hash;
        for moment in Moment::ALL {
            let folder = tempfile::tempdir().unwrap();
            let failure = Failure { rank: 1, step: 4, moment };
            let error = train(folder.path(), Resume::No, Some(failure)).unwrap_err();
            let said = error.to_string();
            let at = format!("moment {} of step 4", moment.number());
            assert!(said.contains(&at) || said.contains("rank 1"), "{moment:?}: {said}");
            assert_eq!(newest(&folder.path().join("run")), saved, "{moment:?}: {said}");
            let again = train(folder.path(), Resume::Auto, None).unwrap().unwrap().hash;
            assert_eq!(again, hash, "{moment:?}");
        }
    }
}

/// A rank's parameters overflow: its contribution to the average is not finite, with any codec, and all ranks
/// name that rank.
#[test]
fn a_rank_whose_gradients_are_not_finite_is_named() {
    let codec = |codec: &str| TrainConfig { codec: codec.parse().unwrap(), ..TrainConfig::default() };
    let pipeline = TrainConfig { stages: 2, microbatches: Some(2), ..TrainConfig::default() };
    for (config, workers, rank, named) in [
        (codec("none"), 3, 1, &[1][..]),
        (codec("int8"), 3, 2, &[2]),
        (codec("int4"), 3, 0, &[0]),
        (pipeline.clone(), 4, 1, &[1]),
        (TrainConfig { sync: SyncKind::of(&DILOCO), sync_every: 4, ..TrainConfig::default() }, 3, 1, &[1]),
    ] {
        let folder = tempfile::tempdir().unwrap();
        // The highest bit of the exponent, in the last layer norm: the value is about 1, and then out of range.
        let fault = Fault { rank, step: 3, value: FaultyValue::Parameters, element: 0, bit: 30 };
        let config = TrainConfig { workers, check_every: 0, ..config };
        let error =
            with_fault(folder.path(), TrainConfig { checkpoint_every: 0, ..config }, fault).unwrap_err();
        let Error::StepNotFinite { step: 4, tries: 3, ranks, .. } = &error else { unreachable!("{error:?}") };
        assert_eq!(ranks.iter().map(|rank| rank.0).collect::<Vec<_>>(), named, "{error}");
        let last = events::read(&folder.path().join("run/events.jsonl")).unwrap().pop().unwrap();
        if !matches!(last.what, EventKind::Lost { .. }) {
            let EventKind::Named { ranks, reason } = last.what else { unreachable!("{last:?}") };
            assert_eq!((ranks.as_slice(), reason.starts_with(&error.to_string())), (named, true));
        }
    }
}

#[test]
fn a_bit_that_changes_on_one_replica_is_found_before_the_next_checkpoint() {
    let values = [FaultyValue::Reduced, FaultyValue::Parameters, FaultyValue::Moments];
    let diloco = TrainConfig { sync: SyncKind::of(&DILOCO), sync_every: 2, ..TrainConfig::default() };
    let pipeline = TrainConfig { stages: 2, microbatches: Some(2), ..TrainConfig::default() };
    for (config, workers, values, odd, names) in [
        (TrainConfig::default(), 3, &values[..], &[1][..], ""),
        (TrainConfig::default(), 2, &values, &[0, 1], ""),
        (diloco, 3, &values[..1], &[1], ""),
        (pipeline.clone(), 6, &values, &[1], "of part 1"),
        (pipeline, 4, &values, &[1, 3], "of part 1"),
    ] {
        for &value in values {
            let folder = tempfile::tempdir().unwrap();
            let fault = Fault { rank: 1, step: 4, value, element: 5, bit: 20 };
            let error = with_fault(
                folder.path(),
                TrainConfig { workers, checkpoint_every: 2, ..config.clone() },
                fault,
            )
            .unwrap_err();
            let Error::Diverged { step: 4, what, ranks, majority } = &error else { unreachable!("{error}") };
            assert_eq!(ranks.iter().map(|rank| rank.0).collect::<Vec<_>>(), odd, "{error}");
            assert!(what.ends_with(names) && error.exit_code() == 1, "{error}");
            assert_eq!(*majority, odd.len() == 1, "{error}");
            let run = folder.path().join("run");
            assert_eq!(newest(&run), 2, "the last good checkpoint stays");
            let last = events::read(&run.join("events.jsonl")).unwrap().pop().unwrap();
            let EventKind::Named { ranks, reason } = last.what else { unreachable!("{last:?}") };
            assert_eq!((last.step, ranks.as_slice(), reason), (4, odd, error.to_string()));
        }
    }
}
