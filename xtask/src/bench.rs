//! `bench`: builds and runs `xtask/repro` in release, with the `farflung` command that some benches run.

use std::process::{ExitCode, Stdio};

use anyhow::{Context, Result};

use crate::shell;

pub(crate) const HELP: &str = "\
Run the reproductions of xtask/repro in release: every claim that we make, measured.

Usage: cargo xtask bench [NAME...] [--quick] [--json] [--against PEERS.jsonl]
       cargo xtask bench --list

  NAME...         only these benches; all of them without a name
  --quick         shorter runs: at most 20 s a bench instead of 3 minutes
  --json          an object a line: bench, metric, value, unit, mark, pass, claim, seed
  --against FILE  the JSON lines that the peers' scripts print; adds the ratio rows
  --list          the benches, with their claims and sources

Exit code: 0, 1 if a marked row fails or a bench cannot run, 2 for a wrong command line.

Examples:
  cargo xtask bench --list
  cargo xtask bench gpt-step --quick
  cargo xtask bench gpt-step gemm --against peers.jsonl --json
";

pub(crate) fn main(args: &[String]) -> Result<ExitCode> {
    let build = ["build", "--release", "--package", "farflung-repro", "--package", "farflung", "--bins"];
    shell::run(&mut shell::cargo(&build))?;
    let mut command = shell::cargo(&["run", "--release", "--package", "farflung-repro"]);
    // FILE is relative to where the user stands, so the command runs there and not in the root.
    command.arg("--manifest-path").arg(shell::root().join("Cargo.toml")).arg("--").args(args);
    command.current_dir(std::env::current_dir().context("failed to find the current folder")?);
    let status = command.stdin(Stdio::null()).status().context("failed to start cargo")?;
    Ok(status.code().and_then(|c| u8::try_from(c).ok()).map_or(ExitCode::FAILURE, ExitCode::from))
}
