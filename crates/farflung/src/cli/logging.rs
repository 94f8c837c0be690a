//! Logs on stderr, chosen by `RUST_LOG` and `--log-format`.

#![expect(clippy::doc_markdown, reason = "doc comments are the help that the terminal shows")]

use std::sync::OnceLock;

use farflung::terminal::{self, Log};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::Directive;
use tracing_subscriber::fmt;

/// How log lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Format {
    /// For people.
    Text,
    /// An object a line.
    Json,
}

/// The options of every command that concern logs.
#[derive(Debug, clap::Args)]
pub(super) struct Logging {
    /// Form of the log and of errors on stderr; RUST_LOG says what is logged (default: warn).
    #[arg(long, global = true, value_enum, default_value_t = Format::Text, value_name = "FORMAT")]
    log_format: Format,
    /// Send traces of steps, collectives and waits to an OpenTelemetry collector, such as
    /// http://127.0.0.1:4318. Needs the feature `otlp`.
    #[arg(long, global = true, value_name = "URL", env = "FARFLUNG_OTLP")]
    otlp: Option<String>,
}

/// What is logged where `RUST_LOG` says nothing. The crates of iroh warn of each connection that breaks, which
/// the transport reports itself.
const UNLESS_TOLD: &str = "warn,iroh=error,iroh_relay=error,noq=error,noq_proto=error,netwatch=error";

/// What was given, once it is.
static FORMAT: OnceLock<Format> = OnceLock::new();

/// Whether each line is an object.
pub(super) fn is_json() -> bool {
    FORMAT.get() == Some(&Format::Json)
}

impl Logging {
    /// Makes the process's log. A directive of `RUST_LOG` that makes no sense is said and left out.
    ///
    /// Errors: an address for traces that is none, or a build that sends none.
    pub(super) fn install(&self) -> farflung::Result<()> {
        FORMAT.get_or_init(|| self.log_format);
        let wanted = std::env::var(EnvFilter::DEFAULT_ENV).ok().filter(|wanted| !wanted.is_empty());
        let wanted = wanted.unwrap_or_else(|| UNLESS_TOLD.to_owned());
        // The subscriber would report wrong directives, and writes that fail, by `eprintln!`, which panics
        // where stderr is a closed pipe.
        let make_sense = |directive: &&str| {
            let parsed = directive.parse::<Directive>();
            if let Err(error) = &parsed {
                terminal::say(format!("ignoring `{directive}` of {}: {error}\n", EnvFilter::DEFAULT_ENV));
            }
            parsed.is_ok()
        };
        let directives: Vec<&str> = wanted.split(',').filter(|d| !d.is_empty()).filter(make_sense).collect();
        let filter = EnvFilter::builder()
            .with_default_directive(tracing::level_filters::LevelFilter::WARN.into())
            .parse_lossy(directives.join(","));
        if let Some(url) = &self.otlp {
            return self.install_with_traces(url, filter);
        }
        let builder = fmt().with_env_filter(filter).with_writer(Log::default).log_internal_errors(false);
        match self.log_format {
            Format::Text => builder.with_ansi(super::has_colours(terminal::stderr_is_terminal())).init(),
            Format::Json => builder.json().init(),
        }
        Ok(())
    }

    #[cfg(not(feature = "otlp"))]
    #[expect(clippy::unused_self, reason = "the build that sends traces has use for it")]
    fn install_with_traces(&self, url: &str, _: EnvFilter) -> farflung::Result<()> {
        Err(farflung::observe::lacks("otlp", url.to_owned()))
    }

    /// The same with each span sent to a collector, whatever the log shows.
    #[cfg(feature = "otlp")]
    fn install_with_traces(&self, url: &str, filter: EnvFilter) -> farflung::Result<()> {
        use tracing_subscriber::Layer as _;
        use tracing_subscriber::layer::SubscriberExt as _;
        use tracing_subscriber::util::SubscriberInitExt as _;

        let traces = farflung::observe::otlp::Traces::to(url)?;
        let layer = fmt::layer().with_writer(Log::default).log_internal_errors(false);
        let log = match self.log_format {
            Format::Text => layer.with_ansi(super::has_colours(terminal::stderr_is_terminal())).boxed(),
            Format::Json => layer.json().boxed(),
        };
        tracing_subscriber::registry().with(log.with_filter(filter)).with(traces.layer()).init();
        TRACES.get_or_init(|| traces);
        Ok(())
    }
}

#[cfg(feature = "otlp")]
static TRACES: OnceLock<farflung::observe::otlp::Traces> = OnceLock::new();

/// Sends what is left of traces, at the end of the process.
pub(super) fn end_traces() {
    #[cfg(feature = "otlp")]
    if let Some(traces) = TRACES.get() {
        traces.end();
    }
}
