//! `farflung train`: trains a model, in this process or as one rank of a launched job.

use std::ffi::OsString;
use std::fmt::Write as _;

use farflung::config::choice::TransportKind;
use farflung::config::recipe::RECIPES;
use farflung::observe::Observed;
use farflung::optim::{local, sync};
use farflung::parallel::pipeline::Method;
use farflung::train::{Report, RunObserver, combination, plan_of, refusal, run, world};
use farflung::transports::{IROH, TRANSPORTS};
use farflung::{
    AccessArgs, Error, NoticeArgs, ObserveArgs, Progress, Result, Show, StepMetrics, Stop, TrainFlags,
    launch_env,
};

/// Train a model: with several workers in this process over simulated links, or with one worker per process
/// under `farflung launch`.
///
/// Without arguments, a small GPT learns from real text with four workers behind home uplinks.
#[derive(Debug, clap::Args)]
#[command(after_help = help())]
pub(crate) struct TrainCommand {
    /// Print the plan that results from the settings, as TOML for --plan, and exit.
    #[arg(long)]
    print_plan: bool,
    /// Print which choices can be combined, and why the others cannot, and exit.
    #[arg(long)]
    combinations: bool,
    #[command(flatten)]
    flags: TrainFlags,
    #[command(flatten)]
    access: AccessArgs,
    #[command(flatten)]
    notice: NoticeArgs,
    #[command(flatten)]
    observe: ObserveArgs,
}

const EXAMPLES: &str = "Examples:
  farflung train
  farflung train --model baby --data book.txt --steps 1000 --workers 2 --link 100mbit,20ms
  farflung train --sync ddp --codec int8 --out runs/mine --checkpoint-every 100
  farflung train --config runs/mine/config.toml --out runs/mine --resume auto
  farflung train --stages 4 --schedule zb-h1 --microbatches 8
  farflung train --stages 2 --print-plan > plan.toml; farflung train --plan plan.toml
  farflung launch -n 4 -- train --sync ddp
  RANK=1 WORLD_SIZE=2 MASTER_ADDR=10.0.0.1 farflung train --sync ddp --secret-file ~/job-secret
  RANK=1 WORLD_SIZE=2 farflung train --sync ddp --ticket-file ticket

Which method for which link, with measured losses, bytes and step times: docs/choosing.md
";

fn help() -> String {
    let mut text = EXAMPLES.to_owned();
    let mut list = |title: &str, rows: &mut dyn Iterator<Item = (&str, &str)>| {
        writeln!(text, "\n{title}:").expect("writing to a string cannot fail");
        for (name, summary) in rows {
            writeln!(text, "  {name:<14} {summary}").expect("writing to a string cannot fail");
        }
    };
    list("Optimizers of --optimizer", &mut local::METHODS.iter().map(|row| (row.name, row.summary)));
    list("Transports of --transport", &mut TRANSPORTS.iter().map(|row| (row.name, row.summary)));
    list("Methods of --sync", &mut sync::METHODS.iter().map(|row| (row.name, row.summary)));
    list("Methods of --recipe", &mut RECIPES.iter().map(|row| (row.name, row.summary)));
    text += "\nSchedules of --schedule (`farflung schedule` draws them):\n";
    for method in Method::ALL {
        match refusal(method) {
            None => writeln!(text, "  {method:<14} {}", method.summary()),
            Some(reason) => writeln!(text, "  {method:<14} not in train: {reason}"),
        }
        .expect("writing to a string cannot fail");
    }
    text
}

/// Shows progress on stderr.
pub(super) struct OnTerminal {
    progress: Progress,
    steps: u64,
    show: Show,
}

impl OnTerminal {
    /// Shows a run of `steps` steps, as far as is known before the run begins.
    pub(super) fn new(steps: u64, show: Show) -> Self {
        Self { progress: Progress::new(steps, 0, show), steps, show }
    }

    pub(super) fn finish(self) {
        self.progress.finish();
    }
}

impl RunObserver for OnTerminal {
    fn begin(&mut self, done: u64, steps: u64) {
        if steps != self.steps {
            self.progress = Progress::new(steps, done, self.show);
            self.steps = steps;
        }
    }
    fn step(&mut self, metrics: &StepMetrics, link_use: Option<f64>) {
        self.progress.step(metrics, link_use);
    }

    fn note(&mut self, text: &str) {
        self.progress.note(text);
    }
}

/// Parser for the words of a `train` command.
#[derive(Debug, clap::Parser)]
#[command(no_binary_name = true, args_override_self = true)]
enum Alone {
    Train(Box<TrainCommand>),
}

impl TrainCommand {
    /// Returns whether these words are a `train` command whose processes may meet over QUIC: with transport
    /// iroh, or with auto and relays. If flags are invalid it returns false; the processes then report the
    /// error.
    ///
    /// Errors: flags that say who may join, since `launch` makes the keys and the ticket.
    pub(super) fn launched_over_quic(words: &[OsString]) -> Result<bool> {
        let Ok(Alone::Train(train)) = <Alone as clap::Parser>::try_parse_from(words) else {
            return Ok(false);
        };
        let Ok(config) = train.flags.clone().resolve() else { return Ok(false) };
        let by_auto = config.transport == TransportKind::Auto && !config.run_settings().relays().is_empty();
        if !by_auto && config.transport != TransportKind::of(&IROH) {
            return Ok(false);
        }
        if train.access != AccessArgs::default() {
            let expected = "none of --ticket-file, --secret-file, --key-file, --allow, --insecure and \
                            --tls-*: `launch` creates a key for each process, and a ticket; to use these \
                            flags, start each rank by hand";
            let value = if by_auto { "auto with --relay" } else { IROH.name };
            let (field, value, expected) = ("transport", value.to_owned(), expected.to_owned());
            return Err(Error::Setting { field, value, expected });
        }
        Ok(true)
    }

    /// Returns how the processes of a `train` command are told that their machine is taken away; `None` for
    /// another command.
    pub(super) fn notice_of(words: &[OsString]) -> Option<NoticeArgs> {
        match <Alone as clap::Parser>::try_parse_from(words) {
            Ok(Alone::Train(train)) => Some(train.notice),
            Err(_) => None,
        }
    }

    pub(crate) fn run(self) -> Result<()> {
        if self.combinations {
            return super::print(&combination::table());
        }
        let print_config = self.flags.print_config;
        let config = self.flags.resolve()?;
        if print_config {
            return super::print(&config.with_own_model()?.to_toml());
        }
        let env = self.access.detect(|name| std::env::var(name).ok())?;
        if self.print_plan {
            let world = world(&config, env.as_ref())?;
            return super::print(&plan_of(config, world)?.to_string());
        }
        match &env {
            Some(env) => tracing::info!("{env}"),
            None => {
                if let Some(note) = launch_env::note_alone(|name| std::env::var(name).ok()) {
                    farflung::terminal::write_stderr(format!("note: {note}\n"));
                }
            }
        }
        let stop = Stop::install_loading(super::print_error)?;
        self.notice.watch(&stop)?;
        let show = if config.quiet || env.as_ref().is_some_and(|e| e.rank.0 != 0) {
            Show::Nothing
        } else {
            Show::Auto
        };
        let json = config.json;
        let mut watch = OnTerminal::new(config.steps, show);
        let observers = self.observe.observers(env.as_ref(), &mut |text| watch.note(text))?;
        let report = run(config, env.as_ref(), stop, &mut Observed::new(&mut watch, observers));
        watch.finish();
        print_report(report?, json)
    }
}

/// Prints a run's report.
pub(super) fn print_report(report: Option<Report>, json: bool) -> Result<()> {
    match report {
        Some(report) if json => {
            let text = serde_json::to_string(&report).map_err(|e| Error::Io {
                action: "encode",
                path: "the report".into(),
                source: e.into(),
            })?;
            super::print(&format!("{text}\n"))
        }
        Some(report) => super::print(&report.to_string()),
        None => Ok(()),
    }
}
