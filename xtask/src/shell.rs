//! Runs other programs in the workspace's root. [`run`] and [`tee`] print the command before it runs. The error
//! of a failed command contains the command.

use std::fmt::Write as _;
use std::io::{BufRead, BufReader, IsTerminal, Read, Write};
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

/// Returns the workspace's root folder.
pub(crate) fn root() -> PathBuf {
    // Prefer the run-time variable: cargo sets it for `cargo run`, and it is right even if the checkout was
    // moved after the build.
    let xtask = std::env::var("CARGO_MANIFEST_DIR").unwrap_or_else(|_| env!("CARGO_MANIFEST_DIR").to_owned());
    let mut root = PathBuf::from(xtask);
    root.pop();
    root
}

/// Returns the command `program ARGS`, to be run in the root.
pub(crate) fn command<S: AsRef<str>>(program: &str, args: &[S]) -> Command {
    let mut command = Command::new(program);
    command.args(args.iter().map(AsRef::as_ref)).current_dir(root());
    command
}

/// Returns the command `cargo ARGS`, to be run in the root with the cargo that runs this program.
pub(crate) fn cargo<S: AsRef<str>>(args: &[S]) -> Command {
    command(&std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned()), args)
}

/// Formats the command as it would be typed in a shell.
pub(crate) fn shown(command: &Command) -> String {
    let mut text = String::new();
    for (name, value) in command.get_envs() {
        if let Some(value) = value {
            let _ = write!(text, "{}={} ", name.display(), quoted(&value.to_string_lossy()));
        }
    }
    // Print only the file name: the path of the toolchain's cargo is noise.
    text.push_str(&PathBuf::from(command.get_program()).file_name().unwrap_or_default().to_string_lossy());
    for arg in command.get_args() {
        let _ = write!(text, " {}", quoted(&arg.to_string_lossy()));
    }
    text
}

fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_alphanumeric() || "-_./=,:+@%".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

/// Runs a command with our stdout and stderr. Fails if the command fails.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let shown = shown(command);
    eprintln!("$ {shown}");
    let status =
        command.stdin(Stdio::null()).status().with_context(|| format!("failed to start `{shown}`"))?;
    if !status.success() {
        bail!("`{shown}` failed ({status})");
    }
    Ok(())
}

/// Runs a command and returns its stdout; its stderr is ours. Fails if the command fails.
pub(crate) fn output(command: &mut Command) -> Result<Vec<u8>> {
    let shown = shown(command);
    let output = command
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("failed to start `{shown}`"))?;
    if !output.status.success() {
        bail!("`{shown}` failed ({})", output.status);
    }
    Ok(output.stdout)
}

/// Returns whether the command starts and succeeds. Its output is discarded.
pub(crate) fn succeeds(command: &mut Command) -> bool {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

/// Output of a command that was run with [`tee`].
#[derive(Debug)]
pub(crate) struct CommandOutput {
    pub(crate) stdout: String,
    pub(crate) stderr: String,
    /// Error if the command failed.
    pub(crate) result: Result<()>,
}

/// Runs a command, prints both streams as they arrive, and returns them.
#[expect(clippy::disallowed_methods, reason = "a tool's own terminal")]
pub(crate) fn tee(command: &mut Command) -> Result<CommandOutput> {
    let shown = shown(command);
    eprintln!("$ {shown}");
    if std::io::stderr().is_terminal() && std::env::var_os("CARGO_TERM_COLOR").is_none() {
        // Cargo writes to a pipe here and would not use colours.
        command.env("CARGO_TERM_COLOR", "always");
    }
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("failed to start `{shown}`"))?;
    let out = child.stdout.take().expect("stdout is piped");
    let err = child.stderr.take().expect("stderr is piped");
    let (stdout, stderr) = std::thread::scope(|scope| {
        let err = scope.spawn(|| copy_lines(err, &mut std::io::stderr()));
        let stdout = copy_lines(out, &mut std::io::stdout());
        (stdout, err.join().expect("copying lines does not panic"))
    });
    let status = child.wait().with_context(|| format!("failed to wait for `{shown}`"))?;
    let result = if status.success() { Ok(()) } else { Err(anyhow::anyhow!("`{shown}` failed ({status})")) };
    Ok(CommandOutput { stdout: stdout?, stderr: stderr?, result })
}

/// Copies line by line, so that lines of two streams do not mix, and returns the text with invalid UTF-8
/// replaced.
fn copy_lines(from: impl Read, to: &mut impl Write) -> std::io::Result<String> {
    let mut from = BufReader::new(from);
    let mut kept = String::new();
    let mut line = Vec::new();
    while from.read_until(b'\n', &mut line)? > 0 {
        to.write_all(&line)?;
        to.flush()?;
        kept.push_str(&String::from_utf8_lossy(&line));
        line.clear();
    }
    Ok(kept)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_shown_as_typed() {
        let mut command = command("/usr/bin/cargo", &["run", "--", "a b", "it's"]);
        command.env("RUSTDOCFLAGS", "-D warnings");
        assert_eq!(shown(&command), r"RUSTDOCFLAGS='-D warnings' cargo run -- 'a b' 'it'\''s'");
    }

    #[test]
    fn tee_keeps_both_streams_and_the_failure() {
        let teed = tee(&mut command("sh", &["-c", "echo out; echo err >&2; exit 3"])).unwrap();
        assert_eq!((teed.stdout.as_str(), teed.stderr.as_str()), ("out\n", "err\n"));
        assert!(teed.result.unwrap_err().to_string().contains("exit status: 3"));
    }

    #[test]
    fn run_names_the_command_that_failed_or_is_missing() {
        assert!(run(&mut command("sh", &["-c", "exit 0"])).is_ok());
        let failed = run(&mut command("sh", &["-c", "exit 7"])).unwrap_err().to_string();
        assert!(failed.contains("sh -c") && failed.contains("exit status: 7"), "{failed}");
        let missing = run(&mut command("no-such-program", &["x"])).unwrap_err().to_string();
        assert_eq!(missing, "failed to start `no-such-program x`");
    }
}
