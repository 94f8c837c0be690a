//! The command line: the commands, and how errors and signals become messages and exit codes.
//!
//! Results go to stdout; progress, logs and errors go to stderr.

mod args;
mod compress;
mod convert;
mod devices;
mod diff;
mod eval;
mod generate;
pub(crate) mod launch;
mod launched_members;
mod logging;
mod members;
mod status;
mod model;
mod net;
mod own_address;
mod plan;
mod relay;
mod relay_server;
mod schedule;
mod ticket;
mod tokenizer;
mod train;
mod watch;

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
    after_help = "Exit codes: 0 success; 1 failure; 2 usage error; 75 a peer was lost, \
    and the job can be started again; 128 plus the number of the signal that stopped a run, such as 130 after \
    SIGINT, 143 after SIGTERM and 138 after SIGUSR1."
)]
struct Cli {
    #[command(flatten)]
    logging: logging::Logging,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    Train(train::TrainCommand),
    Host(members::HostCommand),
    Join(members::JoinCommand),
    Status(status::StatusCommand),
    Watch(watch::WatchCommand),
    Generate(generate::GenerateCommand),
    Eval(eval::EvalCommand),
    Convert(convert::ConvertCommand),
    Tokenizer(tokenizer::TokenizerCommand),
    Compress(compress::CompressCommand),
    Schedule(schedule::ScheduleCommand),
    Plan(plan::PlanCommand),
    Devices(devices::DevicesCommand),
    Diff(diff::DiffCommand),
    Launch(launch::LaunchCommand),
    Net(net::NetCommand),
    Ticket(ticket::TicketCommand),
    Relay(relay_server::RelayCommand),
}

/// Runs the command line of this process.
pub(crate) fn main() -> ExitCode {
    farflung::ignore_file_size_signal();
    let code = match args::parse() {
        Ok((cli, repeated)) => {
            let installed = cli.logging.install();
            // All ranks of a job have the same flags.
            if std::env::var("RANK").is_ok_and(|rank| rank != "0") {
                tracing::debug!(?repeated, "flags that are given more than once");
            } else {
                for flag in repeated {
                    tracing::warn!("`{flag}` is given more than once: the last one counts");
                }
            }
            let code = exit_code(installed.and_then(|()| cli.run()));
            logging::end_traces();
            code
        }
        Err(wrong) if wrong.use_stderr() => {
            let text = if args::wants_json(std::env::args_os().skip(1)) {
                json(&args::said(&wrong), &[], None, 2) + "\n"
            } else {
                styled(&wrong.render(), terminal::stderr_is_terminal())
            };
            terminal::write_stderr(text);
            // All errors of the command line are usage errors.
            2
        }
        Err(help) => exit_code(print(&styled(&help.render(), terminal::stdout_is_terminal()))),
    };
    terminal::flush();
    farflung::transports::leave(code);
    ExitCode::from(code)
}

impl Cli {
    fn run(self) -> farflung::Result<()> {
        match self.command {
            Command::Train(command) => command.run(),
            Command::Host(command) => command.run(),
            Command::Join(command) => command.run(),
            Command::Status(command) => command.run(),
            Command::Watch(command) => command.run(),
            Command::Generate(command) => command.run(),
            Command::Eval(command) => command.run(),
            Command::Convert(command) => command.run(),
            Command::Tokenizer(command) => command.run(),
            Command::Compress(command) => command.run(),
            Command::Schedule(command) => command.run(),
            Command::Plan(command) => command.run(),
            Command::Devices(command) => command.run(),
            Command::Diff(command) => command.run(),
            Command::Launch(command) => command.run(),
            Command::Net(command) => command.run(),
            Command::Ticket(command) => command.run(),
            Command::Relay(command) => command.run(),
        }
    }
}

/// Returns whether output to a stream is coloured. By convention, `NO_COLOR` set and not empty disables
/// colours.
fn has_colours(is_terminal: bool) -> bool {
    is_terminal && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

/// Returns a text of the command-line parser, coloured if the stream supports it.
fn styled(text: &StyledStr, is_terminal: bool) -> String {
    if has_colours(is_terminal) { text.ansi().to_string() } else { text.to_string() }
}

/// Returns the process's exit code; prints an error first.
fn exit_code(outcome: farflung::Result<()>) -> u8 {
    match outcome {
        Ok(()) => 0,
        Err(error) => {
            print_error(&error);
            error.exit_code()
        }
    }
}

/// Prints an error on stderr in the format of the log.
fn print_error(error: &Error) {
    terminal::write_stderr(described(error, logging::is_json()));
}

/// Returns an error and its causes, one per line, or as one JSON object.
fn described(error: &Error, as_json: bool) -> String {
    let causes = error.causes();
    if as_json {
        return json(&error.to_string(), &causes, error.advice(), error.exit_code()) + "\n";
    }
    let mut lines = format!("error: {error}\n");
    for cause in &causes {
        lines.extend(["  cause: ", cause, "\n"]);
    }
    if let Some(advice) = error.advice() {
        lines.extend(["  advice: ", advice, "\n"]);
    }
    lines
}

/// Returns an error as one line of JSON.
fn json(error: &str, causes: &[String], advice: Option<&str>, exit_code: u8) -> String {
    let mut object = serde_json::json!({ "error": error, "causes": causes, "exit_code": exit_code });
    if let Some(advice) = advice {
        object["advice"] = advice.into();
    }
    object.to_string()
}
