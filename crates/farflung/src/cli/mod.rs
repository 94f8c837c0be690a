//! The command line: its commands, and what an error or a signal becomes.
//!
//! Results go to stdout; progress, logs and errors go to stderr.

mod args;
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
use farflung::Error;

/// Trains GPT models on far-flung machines: unequal computers joined by slow, uneven, unreliable links.
#[derive(Debug, Parser)]
#[command(
    version,
    max_term_width = 110,
    after_help = "Exit codes: 0; 1 failure; 2 usage; 75 a peer was lost, start \
    the job again; 130 and 143 after SIGINT and SIGTERM."
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

/// Prints a result on stdout; a reader that went away is an error, not a panic.
fn print(text: &str) -> farflung::Result<()> {
    use std::io::Write;
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(|source| Error::Io {
        action: "write to",
        path: "stdout".into(),
        source,
    })
}

/// Runs the command line of this process.
pub(crate) fn main() -> ExitCode {
    let cli = args::parse();
    cli.logging.install();
    let json = cli.logging.is_json();
    let outcome = match cli.command {
        Command::Train(command) => command.run(),
        Command::Generate(command) => command.run(),
        Command::Eval(command) => command.run(),
        Command::Compress(command) => command.run(),
        Command::Schedule(command) => command.run(),
        Command::Plan(command) => command.run(),
        Command::Devices(command) => command.run(),
        Command::Launch(command) => command.run(),
        Command::Net(command) => command.run(),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            report(&error, json);
            ExitCode::from(error.exit_code())
        }
    }
}

/// Prints an error and its causes, one a line; in a log of JSON as one object.
fn report(error: &Error, as_json: bool) {
    let causes = causes(error);
    if as_json {
        return eprintln!("{}", json(&error.to_string(), &causes, error.exit_code().into()));
    }
    eprintln!("error: {error}");
    for cause in causes {
        eprintln!("  cause: {cause}");
    }
}

/// What an error was caused by, but for what it says in its own words.
fn causes(error: &Error) -> Vec<String> {
    let mut causes = Vec::new();
    let mut said = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let text = error.to_string();
        if !said.contains(text.trim_end()) {
            causes.push(text.trim_end().to_owned());
        }
        said = text;
        cause = error.source();
    }
    causes
}

/// An error as one line of JSON.
fn json(error: &str, causes: &[String], exit_code: i32) -> String {
    serde_json::json!({ "error": error, "causes": causes, "exit_code": exit_code }).to_string()
}
