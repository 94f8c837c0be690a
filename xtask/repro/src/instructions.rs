//! Counts the instructions per element of the hot codecs. This figure does not vary with the load of the
//! machine.
//!
//! It needs valgrind, which counts them, and a processor with AVX2, for which the figures were recorded.

use std::collections::BTreeMap;
use std::io::Write;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use farflung::compress::{Compressor, Payload, RoundKey, State, parse};

use crate::harness::{Bench, Options, Report, Threshold};
use crate::normal::values;

pub(crate) const BENCH: Bench = Bench {
    name: "instructions",
    claim: "no frequently used codec takes more instructions per element than were recorded",
    source: "valgrind's callgrind; records/instructions.txt, on x86-64 with AVX2",
    seed: 6,
    run,
};

/// First argument of this program when its instructions are counted.
pub(crate) const CHILD: &str = "--one-of-each-codec";

/// Elements of a vector: 32 chunks, which fit into a cache.
const LEN: usize = 1 << 16;

/// Lines with a codec, then its instructions per element for encoding and for decoding.
const RECORD: &str = include_str!("../records/instructions.txt");
/// Allowed factor, since a new release of the compiler or of the allocator may change the count slightly.
const TOLERANCE: f64 = 1.03;

const INSTALL: &str =
    "failed to run valgrind, which counts the instructions: install it (apt-get install valgrind)";

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let recorded: Vec<(&str, [f64; 2])> = RECORD
        .lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| {
            let mut fields = line.split_whitespace();
            let name = fields.next().context("a line has no codec")?;
            let mut figure =
                || -> Result<f64> { Ok(fields.next().context("a line has too few figures")?.parse()?) };
            Ok((name, [figure()?, figure()?]))
        })
        .collect::<Result<_>>()
        .context("failed to read the record")?;
    // Slow codecs take several seconds under valgrind.
    let names: Vec<&str> = recorded
        .iter()
        .filter(|(_, [encode, _])| !options.quick || *encode < 20.0)
        .map(|(name, _)| *name)
        .collect();
    let counted = count(&names)?;
    for (name, marks) in recorded.iter().filter(|(name, _)| names.contains(name)) {
        for (what, mark) in ["encode", "decode"].into_iter().zip(marks) {
            let found = *counted
                .get(&format!("{name} {what}"))
                .with_context(|| format!("valgrind counted nothing for {name}"))?;
            report.row(
                &format!("{name}: {what}, instructions per element"),
                found,
                "",
                Threshold::AtMost(mark * TOLERANCE),
            )?;
        }
    }
    Ok(())
}

/// Counts the instructions per element under valgrind. The keys are `NAME encode` and `NAME decode` for each
/// codec.
fn count(names: &[&str]) -> Result<BTreeMap<String, f64>> {
    let dir = tempfile::tempdir()?;
    let program = std::env::current_exe().context("failed to find this program")?;
    let out = dir.path().join("count");
    let mut valgrind = Command::new("valgrind");
    // Only code that runs inside `measured` is counted. Each return from it starts a new output file.
    let measured = concat!(module_path!(), "::measured*");
    valgrind
        .arg("--tool=callgrind")
        .arg(format!("--callgrind-out-file={}", out.display()))
        // Valgrind would ignore a second option with the same pattern, so the two patterns differ.
        .arg(format!("--toggle-collect=*{measured}"))
        .arg(format!("--dump-after={measured}"))
        .arg(program)
        .arg(CHILD)
        .args(names)
        .stdin(Stdio::null());
    let run = valgrind.output().context(INSTALL)?;
    ensure!(
        run.status.success(),
        "running the codecs under valgrind failed: {}",
        String::from_utf8_lossy(&run.stderr)
    );
    let steps = String::from_utf8(run.stdout)?;
    let mut counted = BTreeMap::new();
    for (i, step) in steps.lines().enumerate() {
        let path = out.with_extension((i + 1).to_string());
        let text =
            std::fs::read_to_string(&path).with_context(|| format!("valgrind wrote no file for {step}"))?;
        let total =
            text.lines().find_map(|line| line.strip_prefix("totals: ")).context("the file has no total")?;
        counted.insert(step.to_owned(), total.trim().parse::<f64>()? / LEN as f64);
    }
    Ok(counted)
}

/// Encodes and decodes once with each codec, after a warm-up, and prints a line after each.
pub(crate) fn child(names: &[String], out: &mut dyn Write) -> Result<()> {
    let x = values(LEN, BENCH.seed);
    let mut decoded = vec![0.0; LEN];
    for name in names {
        let (mut codec, mut payload) = (parse(name)?, Payload::new());
        for _ in 0..2 {
            codec.compress(&x, RoundKey::default(), &mut payload)?;
            codec.commit();
        }
        let mut result = Ok(());
        measured(&mut || result = codec.compress(&x, RoundKey::default(), &mut payload));
        result?;
        writeln!(out, "{name} encode")?;
        let mut result = Ok(());
        measured(&mut || result = codec.decompress(payload.view(), &mut decoded));
        result?;
        writeln!(out, "{name} decode")?;
        if decoded.iter().any(|value| !value.is_finite()) {
            bail!("{name} decoded a value that is not finite");
        }
    }
    Ok(())
}

/// Runs `work`. Valgrind recognises this function by its name.
#[inline(never)]
fn measured(work: &mut dyn FnMut()) {
    work();
}
