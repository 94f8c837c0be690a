//! Settings on the command line: negative numbers, notes on settings without effect, names of models, errors as
//! JSON.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

fn farflung(args: &str) -> Output {
    Command::new(env!("CARGO_BIN_EXE_farflung")).args(args.split(' ')).output().unwrap()
}

/// Trains a small model; the run's folder is created in `folder/runs`.
fn train(folder: &Path, steps: &str, args: &str) -> Output {
    let text = folder.join("text.txt");
    std::fs::write(&text, "the quick brown fox jumps over the lazy dog ".repeat(100)).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_farflung"));
    command.current_dir(folder).arg("train").arg("--data").arg(text);
    let small = "--heads 2 --dim 16 --context 16 --batch 1 --warmup 0 --eval-batches 1 --sample-tokens 0";
    command.args(small.split(' ')).args(["--steps", steps]).args(args.split(' ')).output().unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

#[test]
fn a_number_below_zero_is_a_value_that_is_out_of_range() {
    for (args, said) in [
        ("train --temperature -1", "`temperature` is -1, expected 0 or more"),
        ("train --lr -1e-3", "`lr` is -0.001, expected 0 or more"),
        (
            "train --steps -5",
            "invalid value '-5' for '--steps <N>': expected a whole number that is not negative",
        ),
        ("train --topology -5 --batch -1", "invalid value '-1' for '--batch <N>'"),
        ("plan links.toml --overhead -1", "invalid value '-1' for '--overhead <PERCENT>'"),
        ("schedule 1f1b -p -4", "invalid value '-4' for '--stages <P>'"),
        ("launch -n -2 -- train", "invalid value '-2' for '--nproc <N>'"),
        ("net bench --iterations -3", "invalid value '-3' for '--iterations <N>'"),
        ("eval run --batches -3", "invalid value '-3' for '--batches <N>'"),
        ("compress analyze f --values -3", "invalid value '-3' for '--values <N>'"),
    ] {
        let output = farflung(args);
        assert_eq!(output.status.code(), Some(2), "{args}: {output:?}");
        assert!(stderr(&output).contains(said), "{args}: {}", stderr(&output));
    }
    // The number is parsed, and out of range like those of `train`.
    let generated = farflung("generate no-such-run --temperature -1.5 --top-p -0.5");
    assert_eq!(generated.status.code(), Some(2), "{generated:?}");
    assert!(stderr(&generated).contains("`temperature` is -1.5"), "{}", stderr(&generated));
}

#[test]
fn errors_are_json_where_the_log_is() {
    let object = |output: &Output| -> Value {
        let text = stderr(output);
        let line = text.lines().last().unwrap();
        serde_json::from_str(line).unwrap_or_else(|_| panic!("{text}"))
    };
    let setting = farflung("--log-format json train --lr -1");
    let said = serde_json::json!({"error": "`lr` is -1, expected 0 or more", "causes": [], "exit_code": 2});
    assert_eq!((object(&setting), setting.status.code()), (said, Some(2)));
    assert_eq!(stderr(&setting).lines().count(), 1);

    let cause = farflung("plan /no/such/file --log-format=json");
    let object_of_cause = object(&cause);
    assert_eq!((&object_of_cause["exit_code"], cause.status.code()), (&1.into(), Some(1)));
    assert_eq!(object_of_cause["error"], "failed to read /no/such/file");
    assert!(object_of_cause["causes"][0].as_str().unwrap().contains("No such file"), "{object_of_cause}");

    let unknown = farflung("plan spott --log-format json");
    let said = object(&unknown)["error"].to_string();
    assert!(
        said.contains("there is no shipped topology `spott` (known: ") && said.contains("spot,"),
        "{said}"
    );

    for (args, error) in [
        ("train --log-format json --stepz 3", "unexpected argument '--stepz' found"),
        ("--log-format=json fly", "unrecognized subcommand 'fly'"),
        (
            "train --log-format json --topology two-regions --workers 4",
            "`topology` is 8 ranks in two-regions, expected 4, the number of workers: --workers 8 for all of them",
        ),
        ("--log-format json", "'farflung' requires a subcommand"),
        ("--log-format json compress", "a command is missing"),
        ("--log-format json train --codec topk:0", "\"topk:0\" selects no elements"),
        ("--log-format json train --batch 1000000000", "the run needs about "),
    ] {
        let output = farflung(args);
        let object = object(&output);
        assert_eq!((&object["exit_code"], output.status.code()), (&2.into(), Some(2)), "{args}");
        assert!(object["error"].as_str().unwrap().contains(error), "{args}: {object}");
        assert_eq!(stderr(&output).lines().count(), 1, "{args}: {}", stderr(&output));
    }
    let text = farflung("train --stepz 3 --log-format text");
    assert!(stderr(&text).starts_with("error: unexpected argument '--stepz'"), "{}", stderr(&text));
    let help = farflung("--log-format json --help");
    assert!(help.status.success() && String::from_utf8(help.stdout).unwrap().contains("Usage: farflung"));
}

#[test]
fn a_run_says_what_changes_nothing_and_what_its_model_is_called() {
    let folder = tempfile::tempdir().unwrap();
    let args = "--layers 2 --workers 1 --codec sign --schedule gpipe --recompute 3 --json true";
    let output = train(folder.path(), "2", args);
    assert!(output.status.success(), "{}", stderr(&output));
    for note in [
        "`codec` changes nothing: the run has one worker",
        "`schedule` changes nothing: `stages` is 1, so there is no pipeline",
        "`recompute` is 3 and the model has 2 layers: all of them are recomputed",
    ] {
        assert_eq!(
            stderr(&output).lines().filter(|line| line.starts_with(note)).count(),
            1,
            "{}",
            stderr(&output)
        );
    }
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&report["model"], &report["folder"]), (&"gpt-2x16".into(), &"runs/gpt-2x16-1".into()));
    let plot = std::fs::read_to_string(folder.path().join("runs/gpt-2x16-1/loss.svg")).unwrap();
    assert!(plot.contains("gpt-2x16, 1 worker") && !plot.contains("nano"));

    // Resuming with the run's own file gives the same notes as before.
    let own = "--config runs/gpt-2x16-1/config.toml --out runs/gpt-2x16-1 --resume auto";
    let again = train(folder.path(), "3", own);
    let said = stderr(&again);
    assert!(again.status.success() && said.contains("resumed at step 2"), "{said}");
    assert!(said.contains("`codec` changes nothing") && !said.contains("`sync-every`"), "{said}");
    assert!(!said.contains("`link`") && !said.contains("`momentum`"), "{said}");
}

#[test]
fn notes_are_about_the_settings_as_they_were_given() {
    let folder = tempfile::tempdir().unwrap();
    let output = train(folder.path(), "1", "--workers 2 --codec int4:128 --error-feedback true");
    let (said, shown) = (stderr(&output), String::from_utf8(output.stdout.clone()).unwrap());
    assert!(output.status.success() && !said.contains("`error-feedback` changes nothing"), "{said}");
    // Without local steps, the table at the end compares with the period of `sync-every`.
    assert!(shown.contains("diloco(every 20)"), "{shown}");
    let said = stderr(&train(folder.path(), "1", "--workers 2 --sync diloco --local-steps by-speed"));
    assert!(said.contains("`local-steps`") && said.contains("same speed"), "{said}");
}
