//! `cargo xtask`: development commands of the workspace.
//!
//! It does not depend on the crates that it checks. It reads `cargo metadata` and files, and runs cargo.

#![expect(clippy::print_stdout, reason = "a command line tool answers on stdout")]
#![expect(clippy::print_stderr, reason = "its progress and its errors go to stderr")]

mod shell;
mod workspace;

mod bench;
mod browser;
mod ci;
mod deps;
mod examples;
mod features;
mod files;
mod packages;
mod setup;
mod test;
mod tidy;

use std::fmt;
use std::process::ExitCode;

/// A subcommand. `run` takes the arguments after the subcommand's name and returns the exit code.
struct Command {
    name: &'static str,
    help: &'static str,
    run: fn(&[String]) -> anyhow::Result<ExitCode>,
}

const COMMANDS: &[Command] = &[
    Command { name: "test", help: test::HELP, run: test::main },
    Command { name: "ci", help: ci::HELP, run: ci::main },
    Command { name: "bench", help: bench::HELP, run: bench::main },
    Command { name: "deps", help: deps::HELP, run: deps::main },
    Command { name: "tidy", help: tidy::HELP, run: tidy::main },
    Command { name: "packages", help: packages::HELP, run: packages::main },
    Command { name: "setup", help: setup::HELP, run: setup::main },
];

/// Error of an invalid command line. The program prints the usage and exits with code 2.
#[derive(Debug)]
struct Usage(String);

impl fmt::Display for Usage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Usage {}

/// Fails if there are arguments.
fn no_arguments(args: &[String]) -> anyhow::Result<()> {
    match args.first() {
        Some(arg) => Err(Usage(format!("unexpected argument `{arg}`")).into()),
        None => Ok(()),
    }
}

fn overview() -> String {
    let mut text = String::from("Usage: cargo xtask COMMAND [ARGS]\n\nCommands:\n");
    for command in COMMANDS {
        let summary = command.help.lines().next().unwrap_or_default();
        text.push_str(&format_args!("  {:<8} {summary}\n", command.name).to_string());
    }
    text.push_str("\n`cargo xtask COMMAND --help` explains one of them, with examples.\n");
    text
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let Some(name) = args.first() else {
        eprint!("{}", overview());
        return ExitCode::from(2);
    };
    if ["-h", "--help", "help"].contains(&name.as_str()) {
        print!("{}", overview());
        return ExitCode::SUCCESS;
    }
    let Some(command) = COMMANDS.iter().find(|c| c.name == name) else {
        eprint!("error: no command `{name}`\n\n{}", overview());
        return ExitCode::from(2);
    };
    let args = &args[1..];
    if args.iter().take_while(|a| *a != "--").any(|a| a == "-h" || a == "--help") {
        print!("{}", command.help);
        return ExitCode::SUCCESS;
    }
    match (command.run)(args) {
        Ok(code) => code,
        Err(error) if error.is::<Usage>() => {
            eprint!("error: {error}\n\n{}", command.help);
            ExitCode::from(2)
        }
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
