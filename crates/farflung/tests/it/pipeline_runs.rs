//! Whole runs in pipelines started through the command line: over simulated links, over TCP, resumed with other
//! stages, and runs that are rejected.

use std::process::Command;

use crate::pipeline::{Run, model, same, saved};

#[test]
fn a_run_is_cut_in_another_way_at_each_resume() {
    let run = Run::new();
    // The run continues with four stages, one process, two stages of a V, slices of tokens on two replicas, and
    // then GPipe with two stages.
    let stop_at = |steps: &str, args: &str| {
        run.done(&[], "cut", &format!("{args} --steps {steps} --lr-schedule constant --resume auto"))
    };
    let constant = run.done(&[], "constant", "--workers 1 --accumulate 8 --lr-schedule constant");
    stop_at("2", "--stages 4 --schedule zb-h1 --microbatches 8");
    stop_at("3", "--workers 1 --accumulate 8");
    stop_at("4", "--stages 2 --schedule zbv --microbatches 4");
    stop_at("5", "--workers 4 --stages 2 --schedule terapipe --microbatches 4");
    let cut = stop_at("6", "--workers 2 --stages 2 --schedule gpipe --microbatches 8 --recompute full");
    same("resumed", &cut, &constant);
    // Rank 0 has the whole model for `eval`.
    let mut eval = Command::new(env!("CARGO_BIN_EXE_farflung"));
    eval.arg("eval").arg(run.at("cut")).arg("--data").arg(run.at("text.txt"));
    let eval = eval.args(["--batches", "2", "--json"]).output().unwrap();
    assert!(eval.status.success(), "{eval:?}");
    // A step with other sequences would be another run.
    let other = run.farflung(&[], "cut", "--stages 4 --microbatches 4 --steps 7 --resume auto");
    let message = String::from_utf8_lossy(&other.stderr);
    assert!(other.status.code() == Some(2) && message.contains("16 sequences"), "{message}");
}

#[test]
fn averages_wait_for_the_end_if_told_also_where_ranks_hold_parts_in_opposite_orders() {
    let run = Run::new();
    for schedule in ["chimera", "dualpipe"] {
        let args = format!("--stages 2 --schedule {schedule} --microbatches 4 --deadline 20s");
        let early = run.done(&[], &format!("early {schedule}"), &args);
        let late = run.done(&[], &format!("late {schedule}"), &format!("{args} --overlap false"));
        same(schedule, &late, &early);
    }
}

#[test]
fn one_stage_says_what_it_has_no_use_for() {
    let run = Run::new();
    let output = run.farflung(&[], "one", "--workers 1 --steps 1 --schedule zb-h1 --chunks 2 --quiet false");
    let message = String::from_utf8_lossy(&output.stderr);
    let said = "`schedule`, `chunks` change nothing: `stages` is 1";
    assert!(output.status.success() && message.contains(said), "{message}");
}

#[test]
fn a_killed_run_resumes_with_the_same_bits() {
    let run = Run::new();
    for args in [
        "--stages 4 --schedule 1f1b",
        "--stages 2 --schedule chimera --codec int8",
        "--workers 2 --codec int8",
        "--workers 2 --optimizer onebit-adam --codec-warmup 2",
        "--workers 4 --stages 2 --microbatches 4 --optimizer qadam --codec-warmup 4",
    ] {
        let (alone, twice) = (format!("alone {args}"), format!("twice {args}"));
        let constant = format!("{args} --lr-schedule constant");
        let a = run.done(&[], &alone, &constant);
        run.done(&[], &twice, &format!("{constant} --steps 3"));
        let b = run.done(&[], &twice, &format!("{constant} --resume auto"));
        same(args, &a, &b);
        for what in ["model", "optimizer"] {
            assert!(saved(&run.at(&alone), what) == saved(&run.at(&twice), what), "{args}: {what}");
        }
    }
}

#[test]
fn processes_over_tcp_train_as_threads_over_simulated_links() {
    let run = Run::new();
    for schedule in ["zb-h1", "terapipe", "varuna", "pipedream --clip 0", "pipedream-2bw --clip 0"] {
        let args = format!("--stages 2 --schedule {schedule} --microbatches 4 --workers 2");
        let (threads, processes) = (format!("threads {schedule}"), format!("processes {schedule}"));
        let a = run.done(&[], &threads, &args);
        let b = run.done(&["launch", "-n", "2", "--"], &processes, &args);
        same(schedule, &b, &a);
        assert_eq!(model(&run.at(&threads)), model(&run.at(&processes)), "{schedule}");
    }
}

#[test]
fn a_schedule_of_ones_own_trains_as_any_other() {
    let run = Run::new();
    let whole = run.done(&[], "whole", "--workers 1 --accumulate 4");
    // This file has three parts on two ranks, and computes weight gradients later than gradients of inputs. A
    // job with another number of ranks is rejected below.
    let own = "r0: 0F0 0F1 2F0 2I0 2F1 2I1 0I0 2W0 0W0 0I1 2W1 0F2 0F3 2F2 0W1 2I2 2W2 2F3 2I3 0I2 0W2 0I3 2W3 0W3\n\
               r1: 1F0 1F1 1I0 1W0 1I1 1F2 1F3 1I2 1W1 1W2 1I3 1W3\n";
    std::fs::write(run.at("own.txt"), own).unwrap();
    let flags = |stages: u32, microbatches: u32| {
        let file = run.at("own.txt").display().to_string();
        format!("--workers {stages} --stages {stages} --microbatches {microbatches} --schedule-file {file}")
    };
    same("own", &run.done(&[], "own", &flags(2, 4)), &whole);
    // This file divides each sequence into halves, and computes weight gradients in another order.
    let halves = "r0: 0F0 0F0.1 0F1 0F1.1 0I0.1 0I0 0I1.1 0W0 0I1 0W1.1 0W0.1 0W1
                  r1: 1F0 1F0.1 1B0.1 1B0 1F1 1F1.1 1B1.1 1B1
";
    std::fs::write(run.at("own.txt"), halves).unwrap();
    same(
        "halves",
        &run.done(&[], "halves", &flags(2, 2)),
        &run.done(&[], "two", "--workers 1 --accumulate 2"),
    );
    for (args, reason) in [(flags(3, 2), "for 3 ranks"), (flags(2, 6), "of 6 microbatches")] {
        let output = run.farflung(&[], "refused", &args);
        let message = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(2) && message.contains(reason), "{args}: {message}");
    }
}

#[test]
fn stages_that_do_not_flush_learn() {
    let run = Run::new();
    for schedule in ["pipedream", "pipedream-2bw"] {
        let args = format!("--stages 4 --schedule {schedule} --clip 0 --microbatches 8");
        let rows = run.done(&[], schedule, &args);
        assert!(rows[5].train_loss < rows[0].train_loss - 0.1, "{schedule}: {rows:?}");
    }
}

/// A pass ends with an empty pipeline, so a checkpoint has one version of the weights, and any number of stages
/// can continue from it.
#[test]
fn a_run_without_a_flush_resumes_on_other_stages() {
    let run = Run::new();
    let on = |stages: u32, schedule: &str| {
        let ranks = format!("--workers {stages} --stages {stages} --microbatches 8");
        format!("{ranks} --schedule {schedule} --clip 0 --lr-schedule constant")
    };
    for schedule in ["pipedream", "pipedream-2bw"] {
        let (alone, twice) = (format!("alone {schedule}"), format!("twice {schedule}"));
        let a = run.done(&[], &alone, &on(4, schedule));
        run.done(&[], &twice, &format!("{} --steps 3", on(4, schedule)));
        let b = run.done(&[], &twice, &format!("{} --resume auto", on(4, schedule)));
        same(schedule, &a, &b);
        assert_eq!(model(&run.at(&alone)), model(&run.at(&twice)), "{schedule}");
    }
    // After three steps on four stages and one on two, the run continues in one process or on a V of two
    // stages, with the same result.
    let others = ["--workers 1 --accumulate 8 --clip 0 --lr-schedule constant", &on(2, "zbv")];
    let [whole, vee] = others.map(|other| {
        let out = format!("cut {other}");
        run.done(&[], &out, &format!("{} --steps 3", on(4, "pipedream")));
        run.done(&[], &out, &format!("{} --steps 4 --resume auto", on(2, "pipedream")));
        run.done(&[], &out, &format!("{other} --resume auto"))
    });
    same("cut", &whole, &vee);
    assert!(whole[5].train_loss < whole[0].train_loss - 0.1, "{whole:?}");
}

#[test]
fn what_does_not_run_is_refused_with_the_reason() {
    let run = Run::new();
    for (args, reason) in [
        ("--stages 4 --schedule inference", "nothing would be trained"),
        ("--stages 4 --schedule terapipe --slice-grain 5", "a divisor of the context"),
        ("--stages 4 --schedule pipedream", "there is no global norm"),
        ("--stages 4 --schedule pipedream-2bw --clip 0 --microbatches 6", "a multiple of the 4 stages"),
        ("--stages 4 --schedule interleaved --microbatches 6", "a multiple of the 4 stages"),
        ("--stages 3 --workers 4", "a multiple of the 3 stages"),
        ("--stages 4 --sync diloco --schedule chimera", "this schedule averages parts within a step"),
        ("--stages 4 --schedule dualpipe --microbatches 4", "at least 8"),
        ("--stages 4 --chunks 3", "for 1f1b 1"),
        ("--stages 4 --schedule varuna --memory 0", "at least 1"),
        ("--stages 4 --schedule 1f1b-mu --memory 2", "room for 4 microbatches"),
        ("--stages 2 --microbatches 4 --accumulate 2", "`microbatches` is 4"),
        ("--stages 4 --schedule gpip", "zb-h1"),
    ] {
        let output = run.farflung(&[], "refused", args);
        let message = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{args}: {message}");
        assert!(message.contains(reason), "{args}: {message}");
    }
    let help = Command::new(env!("CARGO_BIN_EXE_farflung")).args(["train", "--help"]).output().unwrap();
    let help = String::from_utf8_lossy(&help.stdout);
    for method in farflung::parallel::pipeline::Method::ALL {
        let refused = farflung::train::refusal(method);
        let line = help.lines().find(|l| l.trim_start().split(' ').next() == Some(method.name()));
        assert_eq!(line.unwrap().contains("not in train"), refused.is_some(), "{method}");
    }
}

#[test]
fn local_steps_of_pipelines_meet_as_those_of_whole_replicas() {
    let run = Run::new();
    let local = "--sync diloco --sync-every 2 --codec none --lr-schedule constant";
    // Two replicas of two stages each, and two replicas of one rank each, have the same sequences and averages.
    let whole = run.done(&[], "whole", &format!("--workers 2 --accumulate 4 {local}"));
    let piped = run.done(&[], "piped", &format!("--workers 4 --stages 2 --microbatches 4 {local}"));
    same("diloco", &piped, &whole);
    // A row's loss is that of all replicas, whether they synchronised in the step or not.
    let each = run.done(&[], "each", "--workers 2 --accumulate 4 --codec none --lr-schedule constant");
    assert!((whole[0].train_loss - each[0].train_loss).abs() < 1e-9, "{whole:?} {each:?}");
    // The run stops and resumes at an average, here with a lossy codec: both copies of the token table stay
    // equal.
    let lossy = "--workers 4 --stages 2 --microbatches 4 --sync diloco --sync-every 2 --codec int4:32";
    let once = run.done(&[], "once", lossy);
    run.done(&[], "twice", &format!("{lossy} --steps 4 --lr-schedule constant"));
    let twice = run.done(&[], "twice", &format!("{lossy} --lr-schedule constant --resume auto"));
    let constant = run.done(&[], "constant", &format!("{lossy} --lr-schedule constant"));
    same("lossy", &twice, &constant);
    assert_eq!(model(&run.at("twice")), model(&run.at("constant")));
    assert!(once[5].train_loss < once[0].train_loss, "{once:?}");
}

#[test]
fn momentum_of_pipelines_is_averaged_as_that_of_whole_replicas() {
    let run = Run::new();
    for optimizer in ["onebit-adam", "qadam"] {
        for momentum in ["--clip 0", "--clip 0.5"] {
            let settings = format!("--optimizer {optimizer} --codec none {momentum}");
            let done = |args: &str, warmup: u64| {
                let args = format!("{args} {settings} --codec-warmup {warmup}");
                run.done(&[], &args, &args)
            };
            let whole = done("--workers 2 --accumulate 4", 2);
            // With zbv, both copies of the token table are on one rank; with 1f1b, they are on two.
            for args in ["--schedule zbv", "--schedule 1f1b"] {
                same(args, &done(&format!("--workers 4 --stages 2 --microbatches 4 {args}"), 2), &whole);
            }
            // A single replica has no peers to average with.
            let alone = done("--workers 1 --accumulate 4", 2);
            same("one replica", &done("--workers 2 --stages 2 --microbatches 4", 2), &alone);
            let warm = done("--workers 1 --accumulate 4", 6);
            assert!((warm[5].train_loss - alone[5].train_loss).abs() > 1e-6, "the variance never froze");
        }
    }
}

#[test]
fn a_plan_with_unequal_shares_and_layers_trains_as_one_process() {
    let run = Run::new();
    let constant = "--lr-schedule constant --codec none";
    let whole = run.done(&[], "whole", &format!("--workers 1 --accumulate 6 {constant}"));
    let printed = run.farflung(
        &[],
        "unused",
        &format!("--workers 4 --stages 2 --microbatches 3 {constant} --print-plan"),
    );
    let text = String::from_utf8(printed.stdout).unwrap();
    assert!(text.contains("microbatches = [3, 3]") && text.contains("layers = \"0..2\""), "{text}");
    let text = text.replace("[3, 3]", "[4, 2]").replace("0..2", "0..3").replace("2..4", "3..4");
    let file = run.at("plan.toml");
    std::fs::write(&file, &text).unwrap();
    let plan = format!("--plan {} --lr-schedule constant", file.display());
    let planned = run.done(&[], "planned", &plan);
    same("plan", &planned, &whole);
    assert_eq!(std::fs::read_to_string(run.at("planned").join("plan.toml")).unwrap(), text);
    // The run begins under one plan and continues under others: whole replicas with unequal shares, then one
    // process.
    run.done(&[], "moved", &format!("{plan} --steps 2"));
    let one = text.replace("data=2,pipeline=2", "data=4,pipeline=1").replace("[4, 2]", "[1, 2, 1, 2]");
    let one = one.replacen("layers = \"0..3\"", "layers = \"0..4\"", 1);
    let (head, rest) = one.split_once("\n[[part]]\nlayers = \"3..4\"").unwrap();
    let level = rest.split_once("[[level]]").unwrap().1;
    std::fs::write(&file, format!("{head}\n[[level]]{level}")).unwrap();
    run.done(&[], "moved", &format!("{plan} --steps 4 --resume auto"));
    let moved = run.done(&[], "moved", &format!("--workers 1 --accumulate 6 {constant} --resume auto"));
    same("moved", &moved, &whole);
    // Settings that the plan decides cannot be given beside it; a plan that does not fit is refused with its
    // field.
    for (args, reason) in [
        (format!("{plan} --batch 3"), "`batch` is 3, expected no value with `plan`"),
        (format!("{plan} --tokenizer gpt2"), "parameters; it is for gpt-4x16 with"),
        (format!("{plan} --codec int8"), "`codec`"),
    ] {
        let output = run.farflung(&[], "refused", &args);
        let message = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(2) && message.contains(reason), "{args}: {message}");
    }
    for (from, to, reason) in [
        ("\"ddp\"", "\"dpd\"", "`level[0].method` is \"dpd\", expected one of ddp, diloco"),
        ("codec = \"none\"", "codec = \"int9\"", "`level[0].codec` is \"int9\""),
        ("[4, 2]", "[4, 0]", "`microbatches[1]` is 0"),
        ("layers = \"3..4\"", "layers = \"2..4\"", "`part[1].layers` is 2..4"),
        ("version = 1", "version = 2", "the plan has version 2"),
        ("batch = ", "batches = ", "unknown field `batches`"),
        ("forward = \"none\"", "forward = \"int9\"", "`boundary[0].forward` is \"int9\""),
    ] {
        std::fs::write(&file, text.replacen(from, to, 1)).unwrap();
        let output = run.farflung(&[], "refused", &plan);
        let message = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(2) && message.contains(reason), "{to}: {message}");
    }
}

#[test]
fn a_pipeline_says_how_many_replicas_there_are_and_what_a_step_takes() {
    let run = Run::new();
    // With P stages there are 2 P microbatches by default. A step then takes twice the sequences of the same
    // four workers without stages.
    let without = run.done(&[], "without", "--steps 1 --workers 4");
    assert_eq!(without[0].tokens, 4 * 2 * 16);
    for (args, note, tokens) in [
        ("--workers 4 --stages 2", "4 microbatches, 2 replicas: a step takes 16 sequences, 256 tokens;", 256),
        ("--workers 4 --stages 4", "8 microbatches, 1 replica: a step takes 16 sequences, 256 tokens;", 256),
        (
            "--workers 4 --stages 2 --microbatches 2",
            "2 microbatches, 2 replicas: a step takes 8 sequences, 128 tokens;",
            128,
        ),
    ] {
        let out = note.replace([' ', ',', ':', ';'], "-");
        let output = run.farflung(&[], &out, &format!("{args} --steps 1 --quiet false"));
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && stderr.contains(note), "{args}: {stderr}");
        assert_eq!(farflung::metrics::read(&run.at(&out).join("metrics.jsonl")).unwrap()[0].tokens, tokens);
    }
    let help = Command::new(env!("CARGO_BIN_EXE_farflung")).args(["train", "--help"]).output().unwrap();
    let help = String::from_utf8_lossy(&help.stdout).split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(
        help.contains(
            "workers / (P T) such replicas, with T ranks along the tensor axis, so the default four make two \
             with --stages 2"
        ),
        "{help}"
    );
}

#[test]
fn runs_are_compared_by_losses_and_digests() {
    let run = Run::new();
    let diff = |a: &str, b: &str, extra: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_farflung"));
        command.arg("diff").arg(run.at(a)).arg(run.at(b)).args(extra).output().unwrap()
    };
    let alone = "--workers 1 --accumulate 4 --digest-every 2";
    let rows = run.done(&[], "alone", alone);
    let has: Vec<bool> = rows.iter().map(|row| row.digest.is_some()).collect();
    assert_eq!(has, [false, true, false, true, false, true]);
    run.done(&[], "again", alone);
    let same = diff("alone", "again", &[]);
    assert_eq!(String::from_utf8_lossy(&same.stdout), "the same over 6 steps\n");
    assert!(same.status.success());
    // A pipeline adds in another order, so its bits differ. Its digest is over the same tensors.
    run.done(&[], "piped", "--workers 2 --stages 2 --microbatches 4 --digest-every 1");
    run.done(&[], "vee", "--workers 2 --stages 2 --schedule zbv --microbatches 4 --digest-every 1");
    let parts = diff("alone", "piped", &["--json"]);
    assert_eq!(parts.status.code(), Some(1));
    let json: serde_json::Value = serde_json::from_slice(&parts.stdout).unwrap();
    assert!(json["difference"]["field"].is_string(), "{json}");
    run.done(&[], "other", &format!("{alone} --seed 7"));
    let other = diff("alone", "other", &[]);
    assert_eq!(other.status.code(), Some(1));
    let message = String::from_utf8_lossy(&other.stderr).into_owned();
    assert!(message.starts_with("error: step 1: `train_loss` is "), "{message}");
    assert_eq!(diff("alone", "nowhere", &[]).status.code(), Some(1));
}

#[test]
fn what_is_planned_for_unequal_machines_is_what_trains() {
    let run = Run::new();
    let machines = "default = '1gbit,1ms'\n[[device]]\nname = 'fast'\nflops = '3 GFLOPS'\n\
                    [[device]]\nname = 'slow'\nflops = '1 GFLOPS'\n";
    std::fs::write(run.at("machines.toml"), machines).unwrap();
    let at = |name: &str| run.at(name).display().to_string();
    let plan =
        ["plan", &at("machines.toml"), "--model", "nano", "--sequences", "8", "--out", &at("plan.toml")];
    let planned = Command::new(env!("CARGO_BIN_EXE_farflung")).args(plan).output().unwrap();
    assert!(planned.status.success(), "{planned:?}");
    assert!(std::fs::read_to_string(run.at("plan.toml")).unwrap().contains("microbatches = [6, 2]"));
    let train = format!(
        "train --plan {} --topology {} --data {} --steps 1 --sample-tokens 0 --eval-batches 1 --quiet --threads 1",
        at("plan.toml"),
        at("machines.toml"),
        at("text.txt")
    );
    let mut command = Command::new(env!("CARGO_BIN_EXE_farflung"));
    let trained = command.args(train.split(' ')).arg("--out").arg(run.at("run")).output().unwrap();
    assert!(trained.status.success(), "{}", String::from_utf8_lossy(&trained.stderr));
    let rows = farflung::metrics::read(&run.at("run/metrics.jsonl")).unwrap();
    assert_eq!(rows[0].tokens, 8 * farflung::zoo::ModelSpec::preset("nano").unwrap().context as u64);
    // The file no longer has a machine that the plan names.
    std::fs::write(run.at("machines.toml"), machines.replace("'slow'", "'slower'")).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_farflung"));
    let refused = command.args(train.split(' ')).arg("--out").arg(run.at("no")).output().unwrap();
    let message = String::from_utf8_lossy(&refused.stderr);
    assert!(refused.status.code() == Some(2) && message.contains("the plan's machine `slow`"), "{message}");
}
