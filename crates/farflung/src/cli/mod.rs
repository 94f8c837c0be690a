//! The command line: its commands, and what an error or a signal becomes.
//!
//! Results go to stdout; progress, logs and errors go to stderr.

mod compress;
mod devices;
mod eval;
mod generate;
pub(crate) mod launch;
mod logging;
mod model;
mod net;
mod plan;
mod relay;
mod schedule;
mod train;

use std::error::Error as _;
use std::process::ExitCode;

use clap::Parser;
use clap::builder::StyledStr;
use farflung::Error;
use farflung::terminal::{self, print};

/// Trains GPT models on far-flung machines: unequal computers joined by slow, uneven, unreliable links.
#[derive(Debug, Parser)]
#[command(
    version,
    max_term_width = 110,
    after_help = "Exit codes: 0; 1 failure; 2 usage; 75 a peer was lost, start \
    the job again; 130, 143 and 129 after SIGINT, SIGTERM and SIGHUP."
)]
struct Cli {
    #[command(flatten)]
    logging: logging::Logging,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
#[expect(clippy::large_enum_variant, reason = "there is one of it in a process")]
enum Command {
    Train(train::TrainCommand),
    Generate(generate::GenerateCommand),
    Eval(eval::EvalCommand),
    Compress(compress::CompressCommand),
    Schedule(schedule::ScheduleCommand),
    Plan(plan::PlanCommand),
    Devices(devices::DevicesCommand),
    Launch(launch::LaunchCommand),
    Net(net::NetCommand),
}

/// Runs the command line of this process.
pub(crate) fn main() -> ExitCode {
    let code = match Cli::try_parse() {
        Ok(cli) => exit_code(cli.run()),
        Err(wrong) if wrong.use_stderr() => {
            terminal::say(styled(&wrong.render(), terminal::stderr_is_terminal()));
            // Every error of the command line is one of usage.
            2
        }
        Err(help) => exit_code(print(&styled(&help.render(), terminal::stdout_is_terminal()))),
    };
    terminal::flush();
    ExitCode::from(code)
}

impl Cli {
    fn run(self) -> farflung::Result<()> {
        self.logging.install();
        match self.command {
            Command::Train(command) => command.run(),
            Command::Generate(command) => command.run(),
            Command::Eval(command) => command.run(),
            Command::Compress(command) => command.run(),
            Command::Schedule(command) => command.run(),
            Command::Plan(command) => command.run(),
            Command::Devices(command) => command.run(),
            Command::Launch(command) => command.run(),
            Command::Net(command) => command.run(),
        }
    }
}

/// Whether a stream shows colours. The convention: `NO_COLOR` set and not empty means none.
fn has_colours(is_terminal: bool) -> bool {
    is_terminal && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

/// What the parser of the command line has to say.
fn styled(text: &StyledStr, is_terminal: bool) -> String {
    if has_colours(is_terminal) { text.ansi().to_string() } else { text.to_string() }
}

/// The process's exit code; an error is said first.
fn exit_code(outcome: farflung::Result<()>) -> u8 {
    match outcome {
        Ok(()) => 0,
        Err(error) => {
            terminal::say(described(&error));
            error.exit_code()
        }
    }
}

/// An error and its causes, one a line.
fn described(error: &Error) -> String {
    let mut lines = format!("error: {error}\n");
    let mut said = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        // Some errors say their cause in their own words.
        let text = error.to_string();
        if !said.contains(text.trim_end()) {
            lines.extend(["  cause: ", text.trim_end(), "\n"]);
        }
        said = text;
        cause = error.source();
    }
    lines
}
