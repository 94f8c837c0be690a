//! Tests of the harness, with benches that measure nothing.

use anyhow::bail;
use serde_json::Value;

use super::*;

const BENCHES: &[Bench] = &[
    bench("good", |report, options| {
        let quick = if options.quick { 1.0 } else { 0.0 };
        report.row("quick", quick, "1", Threshold::None)?;
        report.row("speed", 7411.6, "tok/s", Threshold::AtLeast(7000.0))?;
        report.row("seed", report.seed() as f64, "1", Threshold::AtMost(1337.0))?;
        let theirs = options.peers.best("theirs", &[], "tok_s");
        report.ratio("speed over theirs", 7000.0, theirs, Threshold::AtLeast(1.5))
    }),
    bench("missed", |report, _| report.row("loss", 2.5, "nats", Threshold::AtMost(2.4))),
    bench("broken", |_, _| bail!("no such device")),
    bench("silent", |_, _| Ok(())),
    bench("nan", |report, _| report.row("loss", f64::NAN, "nats", Threshold::AtMost(2.4))),
];

const fn bench(name: &'static str, run: fn(&mut Report<'_>, &Options) -> Result<()>) -> Bench {
    Bench { name, claim: "a claim", source: "a paper", seed: 1337, run }
}

/// Returns the exit code, stdout and stderr.
fn run(line: &str) -> (u8, String, String) {
    let args: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
    let (mut out, mut err) = (Vec::new(), Vec::new());
    let code = main(BENCHES, &args, &mut out, &mut err);
    (code, String::from_utf8(out).unwrap(), String::from_utf8(err).unwrap())
}

fn rows(line: &str) -> (u8, Vec<Value>) {
    let (code, out, _) = run(line);
    (code, out.lines().map(|line| serde_json::from_str(line).unwrap()).collect())
}

#[test]
fn json_rows_have_the_agreed_shape() {
    let (code, rows) = rows("good --json --quick");
    assert_eq!(code, 0);
    assert_eq!(
        rows[0],
        json!({"bench": "good", "metric": "quick", "value": 1.0, "unit": "1", "mark": null, "pass": null,
               "claim": "a claim", "seed": 1337})
    );
    assert_eq!(rows[1]["mark"], ">= 7000");
    assert_eq!(rows[1]["value"], 7411.6);
    assert_eq!((&rows[1]["pass"], &rows[2]["pass"]), (&Value::Bool(true), &Value::Bool(true)));
    assert_eq!(rows.len(), 3, "no ratio row without --against");
}

#[test]
fn tables_are_aligned_and_say_ok_or_missed() {
    let (code, out, _) = run("good missed");
    assert_eq!(code, 1);
    assert_eq!(
        out,
        "good: a claim [a paper; seed 1337]\n  \
           quick     0 1\n  \
           speed  7412 tok/s  >= 7000  ok\n  \
           seed   1337 1      <= 1337  ok\n\
         missed: a claim [a paper; seed 1337]\n  \
           loss  2.5 nats  <= 2.4  MISSED\n"
    );
}

#[test]
fn exit_codes() {
    for (line, code) in [
        ("good", 0),
        ("missed", 1),
        ("broken", 1),
        ("silent", 1),
        ("nan", 1),
        ("good good", 0),
        ("", 1),
        ("--list", 0),
    ] {
        assert_eq!(run(line).0, code, "{line}");
    }
    for line in [
        "nothing",
        "good nothing",
        "--fast",
        "--against",
        "--beside",
        "good --against no/such/file",
        "good --quick --long",
        "good --all",
        "good --report",
        "good --quick --report docs",
    ] {
        let (code, out, err) = run(line);
        assert_eq!((code, out.as_str()), (2, ""), "{line}");
        assert!(err.starts_with("error: "), "{err}");
    }
    let mut err = Vec::new();
    assert_eq!(main(&[], &[], &mut Vec::new(), &mut err), 2);
    assert_eq!(main(&[], &["--list".to_owned()], &mut Vec::new(), &mut err), 0);
}

#[test]
fn an_unknown_name_lists_the_benches() {
    let (_, _, err) = run("nothing");
    assert!(err.contains("`nothing`") && err.contains("missed  a claim [a paper]"), "{err}");
}

#[test]
fn what_went_wrong_is_said() {
    assert!(run("broken").2.contains("error: broken: no such device"));
    assert!(run("silent").2.contains("error: silent: measured nothing"));
    assert_eq!(rows("nan --json").1[0]["pass"], Value::Bool(false));
}

#[test]
fn ratio_rows_come_with_the_peers() {
    assert!(run("good").2.contains("without --against FILE"));
    let path = std::env::temp_dir().join(format!("peers-{}.jsonl", std::process::id()));
    std::fs::write(&path, "{\"bench\": \"theirs\", \"tok_s\": 3500}\n").unwrap();
    let (code, rows) = rows(&format!("good --json --against {}", path.display()));
    assert_eq!((code, &rows[3]["value"], &rows[3]["pass"]), (0, &json!(2.0), &json!(true)));
    std::fs::write(&path, "{\"bench\": \"others\", \"tok_s\": 3500}\n").unwrap();
    let (code, _, err) = run(&format!("good --against {}", path.display()));
    assert_eq!(code, 0);
    assert!(err.contains("the file has no figure for `speed over theirs`"), "{err}");
    std::fs::remove_file(&path).unwrap();
}

#[test]
fn figures_keep_four_digits() {
    for (value, text) in [
        (0.0, "0"),
        (7411.6, "7412"),
        (123.456, "123.5"),
        (9.5, "9.5"),
        (0.012_345, "0.01235"),
        (-2.0, "-2"),
        (1.5e-6, "1.500e-6"),
        (f64::NAN, "NaN"),
    ] {
        assert_eq!(figure(value), text);
    }
}
