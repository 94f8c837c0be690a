//! Runs the `farflung` command as users run it.

use std::path::Path;
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

/// Returns a command behind another one, such as strace with its flags; itself if `wrapper` is empty.
pub(crate) fn behind(wrapper: &[String], plain: Command) -> Command {
    let Some((program, flags)) = wrapper.split_first() else { return plain };
    let mut wrapped = Command::new(program);
    wrapped.args(flags).arg(plain.get_program()).args(plain.get_args());
    wrapped
}

/// Returns the command that lets a system call fail at the `nth` time that a thread makes it for a path.
pub(crate) fn failing(path: &Path, (call, nth): (&str, u64), error: &str) -> Vec<String> {
    let path = path.display().to_string();
    let (trace, inject) = (format!("trace={call}"), format!("inject={call}:error={error}:when={nth}"));
    let words = ["strace", "-f", "-qq", "-o", "/dev/null", "-P", &path, "-e", &trace, "-e", &inject];
    words.map(str::to_owned).to_vec()
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
