//! `test`: runs the test suite, with cargo-nextest if it is installed, and the doc tests.

use std::process::ExitCode;

use anyhow::{Result, bail};

use crate::workspace::Workspace;
use crate::{features, setup, shell};

pub(crate) const HELP: &str = "\
Run the tests of every crate, then the doc tests.

Usage: cargo xtask test [--doc] [--no-wgpu] [ARGS...]

  --doc      run only the doc tests
  --no-wgpu  leave out the tests of the GPU kernels. They need a Vulkan driver; if there is none, a software
             driver is installed (`cargo xtask setup wgpu`)
  -p NAME    run only this crate's tests and doc tests (may be repeated)
  ARGS       all other arguments are passed to the test runner (cargo-nextest if it is installed, otherwise
             `cargo test`); the doc tests do not run then

Without -p, every light feature of every crate is enabled, and wgpu.
The last line counts everything that ran: `tests: 120 passed, 0 failed, 0 skipped`.

Examples:
  cargo xtask test
  cargo xtask test -p farflung-comm
  cargo xtask test -p farflung-comm ring
  cargo xtask test --doc
";

pub(crate) fn main(args: &[String]) -> Result<ExitCode> {
    check(&Plan::parse(args)?)?;
    Ok(ExitCode::SUCCESS)
}

/// Runs all tests except the doc tests.
pub(crate) fn check_units() -> Result<()> {
    check(&Plan { docs: false, ..Plan::default() })
}

/// Runs the doc tests.
pub(crate) fn check_docs() -> Result<()> {
    check(&Plan { units: false, ..Plan::default() })
}

fn check(plan: &Plan) -> Result<()> {
    if plan.wgpu && plan.packages.is_empty() {
        setup::vulkan()?;
    }
    let mut tally = Tally::default();
    let mut result = Ok(());
    if plan.units {
        result = units(plan, &mut tally);
    }
    if plan.docs && result.is_ok() {
        result = docs(plan, &mut tally);
    }
    println!("tests: {} passed, {} failed, {} skipped", tally.passed, tally.failed, tally.skipped);
    result?;
    if tally.passed == 0 {
        bail!("no test ran");
    }
    Ok(())
}

/// Which tests to run, as parsed from the command line.
#[derive(Debug, PartialEq, Eq)]
struct Plan {
    units: bool,
    docs: bool,
    packages: Vec<String>,
    /// Whether to include the tests of the GPU kernels. Without effect if `packages` is not empty.
    wgpu: bool,
    /// Arguments for the test runner.
    rest: Vec<String>,
}

impl Default for Plan {
    fn default() -> Self {
        Self { units: true, docs: true, packages: Vec::new(), wgpu: true, rest: Vec::new() }
    }
}

impl Plan {
    fn parse(args: &[String]) -> Result<Self> {
        let mut plan = Self::default();
        let mut args = args.iter();
        while let Some(arg) = args.next() {
            if arg == "--doc" {
                plan.units = false;
            } else if arg == "--no-wgpu" {
                plan.wgpu = false;
            } else if arg == "-p" || arg == "--package" {
                let name = args.next().ok_or_else(|| crate::Usage(format!("{arg} needs a crate's name")))?;
                plan.packages.push(name.clone());
            } else if let Some(name) = arg.strip_prefix("--package=") {
                plan.packages.push(name.to_owned());
            } else {
                plan.rest.push(arg.clone());
            }
        }
        // Filters and flags of the runner may not apply to the doc tests, so leave these out unless `--doc` was
        // given.
        plan.docs = !plan.units || plan.rest.is_empty();
        Ok(plan)
    }

    /// Returns the arguments that select packages and features.
    fn selection(&self, workspace: &Workspace) -> Vec<String> {
        if self.packages.is_empty() {
            let mut selection = vec!["--workspace".to_owned()];
            selection.extend(features::all_light_and(workspace, if self.wgpu { &["wgpu"] } else { &[] }));
            return selection;
        }
        self.packages.iter().flat_map(|name| ["--package".to_owned(), name.clone()]).collect()
    }
}

fn units(plan: &Plan, tally: &mut Tally) -> Result<()> {
    let [units, _] = runners();
    run(units, plan, tally)
}

/// Returns cargo's arguments for the unit and integration tests, with cargo-nextest if it is installed, and
/// those for the doc tests.
pub(crate) fn runners() -> [&'static [&'static str]; 2] {
    let nextest = shell::succeeds(&mut shell::cargo(&["nextest", "--version"]));
    let units: &[&str] = if nextest { &["nextest", "run"] } else { &["test", "--all-targets"] };
    [units, &["test", "--doc"]]
}

fn docs(plan: &Plan, tally: &mut Tally) -> Result<()> {
    let workspace = Workspace::load()?;
    let has_library = |name: &String| workspace.package(name).is_none_or(|p| p.has_library);
    if !plan.packages.is_empty() && !plan.packages.iter().any(has_library) {
        eprintln!("no doc tests: there is no library among {}", plan.packages.join(", "));
        return Ok(());
    }
    let [_, docs] = runners();
    run(docs, plan, tally)
}

fn run(runner: &[&str], plan: &Plan, tally: &mut Tally) -> Result<()> {
    let mut args: Vec<String> = runner.iter().map(|&word| word.to_owned()).collect();
    args.push("--no-fail-fast".to_owned());
    args.extend(plan.selection(&Workspace::load()?));
    args.extend(plan.rest.iter().cloned());
    let teed = shell::tee(&mut shell::cargo(&args))?;
    // libtest prints its summary to stdout, nextest to stderr.
    tally.add(&teed.stdout);
    tally.add(&teed.stderr);
    teed.result
}

/// Numbers of tests, from the summary lines of the runners.
#[derive(Debug, Default, PartialEq, Eq)]
struct Tally {
    passed: u64,
    failed: u64,
    skipped: u64,
}

impl Tally {
    fn add(&mut self, output: &str) {
        let lines: Vec<String> = output.lines().map(without_colour).collect();
        // nextest repeats the output of a failed test, which ends with a summary of libtest.
        let is_nextest = lines.iter().any(|line| line.trim().starts_with("Summary ["));
        for line in &lines {
            let line = line.trim();
            let counts = if let Some(rest) = line.strip_prefix("test result: ").filter(|_| !is_nextest) {
                rest.split_once(". ").map(|(_, counts)| counts)
            } else if line.starts_with("Summary [") {
                line.split_once("run: ").map(|(_, counts)| counts)
            } else {
                None
            };
            for count in counts.unwrap_or_default().split([',', ';']) {
                self.count(count.trim());
            }
        }
    }

    /// Adds one count, such as `3 failed`, `1 passed (1 slow)`, `2 timed out`.
    fn count(&mut self, text: &str) {
        let Some((number, what)) = text.split_once(' ') else { return };
        let Ok(number) = number.parse::<u64>() else { return };
        match what.split(' ').next().unwrap_or_default() {
            "passed" => self.passed += number,
            "failed" | "timed" | "exec" => self.failed += number,
            "skipped" | "ignored" => self.skipped += number,
            _ => {}
        }
    }
}

/// Removes terminal escape sequences of the form `ESC [ ... letter`.
fn without_colour(line: &str) -> String {
    let mut plain = String::new();
    let mut chars = line.chars();
    while let Some(c) = chars.next() {
        if c == '\u{1b}' {
            let _ = chars.by_ref().find(char::is_ascii_alphabetic);
        } else {
            plain.push(c);
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(line: &str) -> Plan {
        Plan::parse(&line.split_whitespace().map(str::to_owned).collect::<Vec<_>>()).unwrap()
    }

    #[test]
    fn filters_leave_the_doc_tests_out() {
        let all = plan("");
        assert!(all.units && all.docs);
        let one = plan("-p a --package=b");
        assert!(one.units && one.docs);
        assert_eq!(one.packages, ["a", "b"]);
        let filtered = plan("-p a ring --release");
        assert!(filtered.units && !filtered.docs);
        assert_eq!(filtered.rest, ["ring", "--release"]);
        assert!(all.wgpu && !plan("--no-wgpu").wgpu && plan("--no-wgpu").docs);
        let docs = plan("--doc ring");
        assert!(!docs.units && docs.docs);
    }

    #[test]
    fn a_package_flag_without_a_name_is_a_usage_error() {
        assert!(Plan::parse(&["-p".to_owned()]).unwrap_err().is::<crate::Usage>());
    }

    #[test]
    fn closing_lines_of_both_runners_are_counted() {
        let mut tally = Tally::default();
        tally.add(
            "test result: ok. 12 passed; 0 failed; 1 ignored; 0 measured; 3 filtered out; finished in 0.01s",
        );
        tally.add("test result: FAILED. 1 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out");
        assert_eq!(tally, Tally { passed: 13, failed: 2, skipped: 1 });
        let mut tally = Tally::default();
        tally.add(
            "\u{1b}[32;1m     Summary\u{1b}[0m [   0.018s] 8/9 tests run: \u{1b}[1m4\u{1b}[0m passed (1 slow), 2 failed, 1 timed out, 1 exec failed, 5 skipped",
        );
        assert_eq!(tally, Tally { passed: 4, failed: 4, skipped: 5 });
        // A failed test counts once, though its own output is shown.
        let mut tally = Tally::default();
        tally.add("    test result: FAILED. 0 passed; 1 failed; 0 ignored\n Summary [ 1s] 2 tests run: 1 passed, 1 failed, 0 skipped");
        assert_eq!(tally, Tally { passed: 1, failed: 1, skipped: 0 });
    }

    #[test]
    fn other_lines_count_for_nothing() {
        let mut tally = Tally::default();
        tally.add("3 passed\nSummary of 3 passed\nrunning 4 tests\n");
        assert_eq!(tally, Tally::default());
    }
}
