//! `bench`: builds and runs `xtask/repro` in release mode, and the `farflung` command that some benches use.

use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context, Result, ensure};

use crate::{setup, shell};

pub(crate) const HELP: &str = "\
Run the benches of xtask/repro in release mode. Each bench measures one claim.

Usage: cargo xtask bench [NAME... | --all] [--quick | --long] [--json] [--report] [--against PEERS.jsonl]
                         [--beside COMMAND]
       cargo xtask bench --list

  NAME...         run only these benches; without a name, all of them
  --all           run all of them, as without a name
  --report        write the results to docs/: the records, reproductions.md, choosing.md and two charts;
                  the records of benches that did not run are kept
  --quick         shorter runs: at most one minute per bench instead of 5
  --long          runs without a time limit, as `diloco-500` needs for its 10,000 steps
  --json          print one JSON object per line: bench, metric, value, unit, mark, pass, claim, seed
  --against FILE  a file of the JSON lines that the scripts of other systems print; adds the rows that
                  compare with these systems
  --beside COMMAND
                  for gpt-step and llama-step: a command that measures another system, as
                  xtask/repro/src/training_step/torch_step.py does. `sh` runs it before each turn, with the
                  model in $CONFIG and the number of threads in $THREADS. The lines that it prints are added
                  to FILE, so that both systems are measured in the same minutes
  --cuda          build with CUDA, on which device-parity and gpu then run
  --iroh          build with the transport iroh, which `transports` and `collective-laws` then include;
                  `nat` implies it
  --list          list the benches, with their claims and sources

Without a name, the benches run that need no GPU interface. device-parity, device-train and gpu are built with
the feature `wgpu` when they are named. With `--cuda` (first run `cargo xtask setup cuda`), device-parity and
gpu run on the first NVIDIA GPU; device-train still uses wgpu. engines and transports are built with the feature
`mpi` when they are named and MPI is installed (`cargo xtask setup mpi`).

Exit code: 0, 1 if a marked row fails or a bench cannot run, 2 for a wrong command line.

Examples:
  cargo xtask bench --list
  cargo xtask bench gpt-step --quick
  cargo xtask bench diloco bagua --report
  cargo xtask bench gpt-step gemm --against peers.jsonl --json
  cargo xtask bench gpt-step --beside 'RAYON_NUM_THREADS=$THREADS burn_gpt $CONFIG 3'
";

pub(crate) fn main(args: &[String]) -> Result<ExitCode> {
    let flags = ["--cuda", "--iroh"];
    let (built, args): (Vec<String>, Vec<String>) =
        args.iter().cloned().partition(|arg| flags.contains(&arg.as_str()));
    let docs = shell::root().join("docs").display().to_string();
    let args = with_folder(&args, &docs);
    let features = features(&args, &built, setup::has_mpi);
    build(&features)?;
    let mut command = reproductions(&features);
    // Paths on the command line are relative to the user's folder, so run the command there instead of in the
    // root.
    command.arg("--manifest-path").arg(shell::root().join("Cargo.toml")).arg("--").args(&args);
    command.current_dir(std::env::current_dir().context("failed to find the current folder")?);
    let status = command.stdin(Stdio::null()).status().context("failed to start cargo")?;
    Ok(status.code().and_then(|c| u8::try_from(c).ok()).map_or(ExitCode::FAILURE, ExitCode::from))
}

/// Adds the output folder after `--report`.
fn with_folder(args: &[String], docs: &str) -> Vec<String> {
    let folder = |arg: &String| (arg == "--report").then(|| docs.to_owned());
    args.iter().flat_map(|arg| std::iter::once(arg.clone()).chain(folder(arg))).collect()
}

/// Builds the reproductions and the `farflung` command.
fn build(features: &[String]) -> Result<()> {
    let build = ["build", "--release", "--package", "farflung-repro", "--package", "farflung", "--bins"];
    shell::run(shell::cargo(&build).args(features))
}

/// Returns the command that runs the reproductions. Features must equal those of [`build`], so that nothing is
/// built twice.
fn reproductions(features: &[String]) -> Command {
    let mut command = shell::cargo(&["run", "--release", "--package", "farflung-repro"]);
    command.args(features);
    command
}

/// Listed benches that `ci` does not run: their result depends on the machine's speed and load, or they need a
/// tool that may be missing.
const BY_THE_CLOCK: [&str; 14] = [
    "gpt-step",
    "llama-step",
    "gemm",
    "relay",
    "all-reduce",
    "all-reduce-limit",
    "codec-speed",
    "instructions",
    "default-run",
    "disk",
    "simulate-scale",
    "secure-tcp",
    "pacing",
    "shared-memory",
];

/// Runs the short form of every listed bench that is not in [`BY_THE_CLOCK`].
pub(crate) fn check() -> Result<()> {
    build(&[])?;
    let list = ["--quiet", "--", "--list"];
    let listed = reproductions(&[]).args(list).output().context("failed to start cargo")?;
    ensure!(listed.status.success(), "the benches cannot be listed: {}", listed.status);
    let listed = String::from_utf8_lossy(&listed.stdout);
    let names = everywhere(&listed);
    ensure!(!names.is_empty(), "no bench is listed");
    shell::run(reproductions(&[]).arg("--").args(names).arg("--quick"))
}

/// Runs the bench `transports`, built with MPI.
pub(crate) fn check_mpi() -> Result<()> {
    let features = ["--features", "farflung-repro/mpi"].map(str::to_owned);
    build(&features)?;
    shell::run(reproductions(&features).args(["--", "transports"]))
}

/// Returns the listed benches that are not in [`BY_THE_CLOCK`].
fn everywhere(listed: &str) -> Vec<&str> {
    let names = listed.lines().filter_map(|line| line.split_whitespace().next());
    names.filter(|name| !BY_THE_CLOCK.contains(name)).collect()
}

/// Benches that run on GPU devices.
const OF_DEVICES: [&str; 3] = ["device-parity", "device-train", "gpu"];

/// Benches that are built with the feature `mpi`, if MPI is installed.
const OF_MPI: [&str; 2] = ["engines", "transports"];

/// Returns the arguments that enable the features of the named benches and of the flags `built`. `has_mpi` is
/// called only if a bench of [`OF_MPI`] is named.
fn features(args: &[String], built: &[String], has_mpi: impl Fn() -> bool) -> Vec<String> {
    let names = |benches: &[&str]| args.iter().any(|a| benches.contains(&a.as_str()));
    let flag = |name: &str| built.iter().any(|flag| flag == name);
    let wanted = [
        ("farflung-repro/wgpu", names(&OF_DEVICES)),
        ("farflung-repro/cuda", flag("--cuda")),
        ("farflung-repro/iroh", flag("--iroh") || names(&["nat"])),
        ("farflung-repro/mpi", names(&OF_MPI) && has_mpi()),
    ];
    let wanted = wanted.into_iter().filter(|(_, wanted)| *wanted);
    wanted.flat_map(|(feature, _)| ["--features".to_owned(), feature.to_owned()]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_clock_decides_is_left_out() {
        let listed = "gemm    f32 products\nsoak    ends [ours]\n\nrelay x\npacing y\nresume  same bits\n";
        assert_eq!(everywhere(listed), ["soak", "resume"]);
    }

    #[test]
    fn a_report_goes_to_the_docs() {
        let args = ["--all", "--report", "--json"].map(str::to_owned);
        assert_eq!(with_folder(&args, "folder/docs"), ["--all", "--report", "folder/docs", "--json"]);
    }

    #[test]
    fn only_the_benches_of_devices_build_them() {
        let words = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        let with_mpi = |line, flags, has_mpi| features(&words(line), &words(flags), || has_mpi);
        let features = |line, flags| with_mpi(line, flags, true);
        assert!(features("gemm --quick", "").is_empty());
        assert_eq!(features("gpu --quick", ""), ["--features", "farflung-repro/wgpu"]);
        assert_eq!(features("device-train gemm", ""), ["--features", "farflung-repro/wgpu"]);
        assert_eq!(features("nat --quick", ""), ["--features", "farflung-repro/iroh"]);
        assert_eq!(features("transports", "--iroh")[..2], ["--features", "farflung-repro/iroh"]);
        assert_eq!(features("device-parity", "--cuda")[2..], ["--features", "farflung-repro/cuda"]);
        assert_eq!(features("engines", ""), ["--features", "farflung-repro/mpi"]);
        assert!(with_mpi("engines transports", "", false).is_empty());
    }
}
