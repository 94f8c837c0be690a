//! The harness of the benches: the command line, the rows with their conditions ([`Threshold`]), and the two
//! output formats.
//!
//! It does not depend on what is measured.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::Result;
use serde_json::{Value, json};

use crate::docs;
use crate::docs::Record;
use crate::peers::Peers;

const USAGE: &str = "\
Usage: cargo xtask bench [NAME...] [--all] [--quick] [--long] [--json] [--report FOLDER] [--against PEERS.jsonl]
                         [--beside COMMAND] [--list]
";

/// Explains how to get the file for `--against`.
const NO_PEERS: &str = "\
note: without --against FILE there are no rows that compare with other systems. FILE has the JSON lines that
note: their scripts print (run_all.sh, candle_run.sh, burn_run.sh with ANCHORS_OUT=FILE, or their output).
note: Measure them on this machine.
";

/// A claim, and the function that measures it.
#[derive(Debug, Clone, Copy)]
pub struct Bench {
    /// Name on the command line, in lower case with dashes.
    pub name: &'static str,
    /// The claim, in one sentence.
    pub claim: &'static str,
    /// Source of the claim or of the method.
    pub source: &'static str,
    /// Seed of all randomness in the bench.
    pub seed: u64,
    /// Runs the measurements and reports a row for each.
    pub run: fn(&mut Report<'_>, &Options) -> Result<()>,
}

/// Options of the command line that a bench can use.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Quick runs should take at most a minute on 2 cores; others at most 5 minutes, except long ones. A bench
    /// that takes longer is reported, but does not fail.
    pub quick: bool,
    /// Long runs have no time limit: they use the settings of the papers where possible.
    pub long: bool,
    /// Figures of other systems; empty without `--against`.
    pub peers: Peers,
    /// Shell command that measures another system, for benches that take turns with it.
    pub beside: Option<String>,
}

/// Condition on a row's value: the row passes if the value meets it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Threshold {
    /// The value must be this or larger.
    AtLeast(f64),
    /// The value must be this or smaller.
    AtMost(f64),
    /// The value is only reported.
    None,
}

impl Threshold {
    /// Returns whether `value` meets the condition, or `None` if there is no condition. NaN meets no condition.
    #[must_use]
    pub fn pass(self, value: f64) -> Option<bool> {
        match self {
            Self::AtLeast(bound) => Some(value >= bound),
            Self::AtMost(bound) => Some(value <= bound),
            Self::None => None,
        }
    }

    fn text(self) -> String {
        match self {
            Self::AtLeast(bound) => format!(">= {}", figure(bound)),
            Self::AtMost(bound) => format!("<= {}", figure(bound)),
            Self::None => String::new(),
        }
    }
}

/// Collects the rows of one bench.
pub struct Report<'a> {
    bench: &'a Bench,
    json: bool,
    out: &'a mut dyn Write,
    err: &'a mut dyn Write,
    rows: Vec<[String; 5]>,
    missed: usize,
    /// Lists that the bench adds to its record, by name.
    added: BTreeMap<&'static str, Value>,
    /// Metrics of ratio rows that had no figure to compare with.
    unmatched: Vec<String>,
}

impl std::fmt::Debug for Report<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Report")
            .field("bench", &self.bench.name)
            .field("rows", &self.rows)
            .finish_non_exhaustive()
    }
}

impl Report<'_> {
    /// Returns the bench's seed.
    #[must_use]
    pub fn seed(&self) -> u64 {
        self.bench.seed
    }

    /// Adds a row. `metric` says what was measured and in which setting (`nano tok/s, 1 thread`).
    ///
    /// Errors: stdout is closed.
    pub fn row(&mut self, metric: &str, value: f64, unit: &str, mark: Threshold) -> Result<()> {
        let pass = mark.pass(value);
        self.missed += usize::from(pass == Some(false));
        if self.json {
            let bench = self.bench;
            let line = json!({
                "bench": bench.name, "metric": metric, "value": value, "unit": unit,
                "mark": if pass.is_some() { Some(mark.text()) } else { None },
                "pass": pass, "claim": bench.claim, "seed": bench.seed,
            });
            writeln!(self.out, "{line}")?;
            self.out.flush()?;
        }
        let verdict = match pass {
            Some(true) => "ok",
            Some(false) => "MISSED",
            None => "",
        };
        self.rows.push([metric.to_owned(), figure(value), unit.to_owned(), mark.text(), verdict.to_owned()]);
        Ok(())
    }

    /// Prints a line about the measurement in progress to stderr.
    ///
    /// Errors: stderr is closed.
    pub fn progress(&mut self, text: &str) -> Result<()> {
        writeln!(self.err, "{}: {text}", self.bench.name)?;
        Ok(())
    }

    /// Adds a value to the list `name` of the bench's record. `--report` stores the list with the rows.
    pub fn add(&mut self, name: &'static str, value: Value) {
        let list = self.added.entry(name).or_insert_with(|| Value::Array(Vec::new()));
        if let Value::Array(list) = list {
            list.push(value);
        }
    }

    /// Adds a row with `ours / theirs`. Without a figure for `theirs` there is no row, and a note is printed at
    /// the end, except in runs with `--beside` and without `--against`.
    ///
    /// Errors: stdout is closed.
    pub fn ratio(&mut self, metric: &str, ours: f64, theirs: Option<f64>, mark: Threshold) -> Result<()> {
        if let Some(theirs) = theirs {
            return self.row(metric, ours / theirs, "x", mark);
        }
        self.unmatched.push(metric.to_owned());
        Ok(())
    }

    /// Prints the rows in aligned columns.
    fn table(&mut self) -> std::io::Result<()> {
        let width =
            |column: usize| self.rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
        let [a, b, c, d] = [0, 1, 2, 3].map(width);
        for [metric, value, unit, mark, verdict] in &self.rows {
            let line = format!("  {metric:<a$}  {value:>b$} {unit:<c$}  {mark:<d$}  {verdict}");
            writeln!(self.out, "{}", line.trim_end())?;
        }
        self.out.flush()
    }
}

/// Formats a number: from 1000 to 1e15 as a whole number, otherwise with at most four significant digits.
fn figure(value: f64) -> String {
    let size = value.abs();
    if value == 0.0 || !value.is_finite() || (1000.0..1e15).contains(&size) {
        format!("{value:.0}")
    } else if (1e-3..1000.0).contains(&size) {
        let digits = (3.0 - size.log10().floor()).clamp(0.0, 6.0) as usize;
        let text = format!("{value:.digits$}");
        if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
    } else {
        format!("{value:.3e}")
    }
}

/// Parsed command line.
#[expect(clippy::struct_excessive_bools, reason = "one for each flag")]
#[derive(Debug, Default)]
struct Request {
    names: Vec<String>,
    all: bool,
    quick: bool,
    long: bool,
    json: bool,
    list: bool,
    help: bool,
    report: Option<PathBuf>,
    against: Option<PathBuf>,
    beside: Option<String>,
}

impl Request {
    fn parse(args: &[String]) -> Result<Self, String> {
        let mut request = Self::default();
        let mut args = args.iter();
        while let Some(arg) = args.next() {
            match arg.as_str() {
                "--all" => request.all = true,
                "--quick" => request.quick = true,
                "--long" => request.long = true,
                "--json" => request.json = true,
                "--list" => request.list = true,
                "-h" | "--help" => request.help = true,
                "--report" => request.report = Some(args.next().ok_or("--report needs a folder")?.into()),
                "--against" => request.against = Some(args.next().ok_or("--against needs a file")?.into()),
                "--beside" => request.beside = Some(args.next().ok_or("--beside needs a command")?.clone()),
                flag if flag.starts_with('-') => return Err(format!("unknown flag `{flag}`")),
                name => request.names.push(name.to_owned()),
            }
        }
        if request.quick && request.long {
            return Err("--quick and --long cannot be combined".to_owned());
        }
        if request.all && !request.names.is_empty() {
            return Err("--all cannot be combined with names of benches".to_owned());
        }
        if request.report.is_some() && request.quick {
            return Err("--report cannot be combined with --quick: only full runs are recorded".to_owned());
        }
        Ok(request)
    }
}

/// Runs the benches that `args` select. Rows, and the answers to `--list` and `--help`, go to `out`; progress,
/// notes and errors go to `err`.
///
/// Returns the exit code: 0 if all is well; 1 if a marked row failed, a bench could not be run, or the report
/// could not be written; 2 if the command line is invalid, names an unknown bench or a file of peers that
/// cannot be read, or if there is nothing to run.
pub fn main(benches: &[Bench], args: &[String], out: &mut dyn Write, err: &mut dyn Write) -> u8 {
    // An error means that one of the two streams is closed, so it cannot be printed.
    serve(benches, args, out, err).unwrap_or(1)
}

fn serve(
    benches: &[Bench],
    args: &[String],
    out: &mut dyn Write,
    err: &mut dyn Write,
) -> std::io::Result<u8> {
    let request = match Request::parse(args) {
        Ok(request) => request,
        Err(message) => {
            write!(err, "error: {message}\n{USAGE}")?;
            return Ok(2);
        }
    };
    if request.help {
        write!(out, "{USAGE}")?;
        return Ok(0);
    }
    let known = |name: &String| benches.iter().any(|b| b.name == *name);
    if let Some(name) = request.names.iter().find(|name| !known(name)) {
        writeln!(err, "error: no bench `{name}`; the benches are:")?;
        list(benches, err)?;
        return Ok(2);
    }
    if request.list {
        list(benches, out)?;
        return Ok(0);
    }
    let chosen: Vec<&Bench> = benches
        .iter()
        .filter(|b| request.names.is_empty() || request.names.iter().any(|n| n == b.name))
        .collect();
    if chosen.is_empty() {
        writeln!(err, "error: there are no benches")?;
        return Ok(2);
    }
    let peers = match request.against.as_deref().map(Peers::load).transpose() {
        Ok(peers) => peers.unwrap_or_default(),
        Err(error) => {
            writeln!(err, "error: {error:#}")?;
            return Ok(2);
        }
    };
    let options = Options { quick: request.quick, long: request.long, peers, beside: request.beside };
    let (mut unmatched, mut bad) = (false, 0);
    for bench in &chosen {
        let outcome = run_one(bench, &options, request.json, out, err)?;
        unmatched |= outcome.unmatched;
        bad += usize::from(outcome.bad);
        let Some(folder) = &request.report else { continue };
        if let Err(error) = outcome.record.map_or(Ok(()), |record| record.save(folder)) {
            writeln!(err, "error: {}: {error:#}", bench.name)?;
            bad += usize::from(!outcome.bad);
        }
    }
    if let Some(folder) = &request.report {
        let names: Vec<_> = benches.iter().map(|bench| bench.name).collect();
        if let Err(error) = docs::write(folder, &names) {
            writeln!(err, "error: {error:#}")?;
            return Ok(1);
        }
    }
    if unmatched && options.peers.is_empty() && options.beside.is_none() {
        write!(err, "{NO_PEERS}")?;
    }
    writeln!(err, "{} of {} benches ok", chosen.len() - bad, chosen.len())?;
    Ok(u8::from(bad > 0))
}

fn list(benches: &[Bench], to: &mut dyn Write) -> std::io::Result<()> {
    let width = benches.iter().map(|b| b.name.len()).max().unwrap_or(0);
    for bench in benches {
        writeln!(to, "{:<width$}  {} [{}]", bench.name, bench.claim, bench.source)?;
    }
    Ok(())
}

struct Outcome {
    bad: bool,
    unmatched: bool,
    /// `None` if the bench did not run to its end.
    record: Option<Record>,
}

fn run_one(
    bench: &Bench,
    options: &Options,
    json: bool,
    out: &mut dyn Write,
    err: &mut dyn Write,
) -> std::io::Result<Outcome> {
    if !json {
        writeln!(out, "{}: {} [{}; seed {}]", bench.name, bench.claim, bench.source, bench.seed)?;
        out.flush()?;
    }
    let start = now();
    let mut report = Report {
        bench,
        json,
        out,
        err,
        rows: Vec::new(),
        missed: 0,
        added: BTreeMap::new(),
        unmatched: Vec::new(),
    };
    let result = (bench.run)(&mut report, options);
    let taken = now() - start;
    if !json {
        report.table()?;
    }
    let Report { rows, missed, unmatched, added, .. } = report;
    let mut bad = missed > 0;
    let record = result.is_ok().then(|| Record {
        name: bench.name.to_owned(),
        claim: bench.claim.to_owned(),
        source: bench.source.to_owned(),
        rows: rows.clone(),
        added: added.into_iter().map(|(name, value)| (name.to_owned(), value)).collect(),
    });
    if let Err(error) = result {
        writeln!(err, "error: {}: {error:#}", bench.name)?;
        bad = true;
    } else if rows.is_empty() && unmatched.is_empty() {
        writeln!(err, "error: {}: measured nothing", bench.name)?;
        bad = true;
    }
    if !options.peers.is_empty() {
        for metric in &unmatched {
            writeln!(err, "note: {}: the file has no figure for `{metric}`", bench.name)?;
        }
    }
    let limit = if options.quick { Duration::from_mins(1) } else { Duration::from_mins(5) };
    let slow = if taken > limit && !options.long {
        format!(", longer than the allowed {} s", limit.as_secs())
    } else {
        String::new()
    };
    writeln!(
        err,
        "{}: {} rows, {missed} missed, {:.1} s{slow}",
        bench.name,
        rows.len(),
        taken.as_secs_f64()
    )?;
    Ok(Outcome { bad, unmatched: !unmatched.is_empty(), record })
}

#[expect(clippy::disallowed_methods, reason = "a bench measures real time")]
fn now() -> Instant {
    Instant::now()
}

#[cfg(test)]
mod tests;
