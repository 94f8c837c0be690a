//! Runs the `farflung` command as users run it.

use std::process::{Command, Stdio};

use anyhow::{Context, Result};

/// Returns the command `farflung` with these arguments and no output. The binary must be in the folder of this
/// program: `cargo xtask bench` builds both.
///
/// Errors: the binary is not there.
pub(crate) fn farflung(args: &[&str]) -> Result<Command> {
    let here = std::env::current_exe().context("failed to find this program")?;
    let binary = here.with_file_name(format!("farflung{}", std::env::consts::EXE_SUFFIX));
    anyhow::ensure!(
        binary.is_file(),
        "{} does not exist: run `cargo xtask bench`, or first `cargo build --release -p farflung`",
        binary.display()
    );
    let mut command = Command::new(binary);
    command.args(args).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    Ok(command)
}

/// Runs a `farflung train` to its end; its standard error must be piped.
///
/// Errors: a run that fails, with what it said.
pub(crate) fn finish(command: &mut Command) -> Result<()> {
    let output = command.output().context("failed to start `farflung`")?;
    let message = String::from_utf8_lossy(&output.stderr);
    anyhow::ensure!(output.status.success(), "`farflung train`, {}: {message}", output.status);
    Ok(())
}
