//! Logs on stderr, configured by `RUST_LOG` and `--log-format`.

#![expect(clippy::doc_markdown, reason = "doc comments are the help that the terminal shows")]

use std::sync::OnceLock;

use farflung::terminal::{self, Log};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::Directive;
use tracing_subscriber::fmt;

/// Format of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Format {
    /// Plain text.
    Text,
    /// One JSON object per line.
    Json,
}

/// The options for logs and traces, which every command has.
#[derive(Debug, clap::Args)]
pub(super) struct Logging {
    /// Format of the log and of errors on stderr. RUST_LOG selects what is logged (default: warn).
    #[arg(long, global = true, value_enum, default_value_t = Format::Text, value_name = "FORMAT")]
    log_format: Format,
    /// Send traces of steps, collectives and waits to an OpenTelemetry collector at this URL, such as
    /// http://127.0.0.1:4318. Needs the feature `otlp`.
    #[arg(long, global = true, value_name = "URL", env = "FARFLUNG_OTLP")]
    otlp: Option<String>,
}

/// Default of `RUST_LOG`. `rendezvous` is the line that says where rank 0 waits for ranks of other machines.
/// The crates of iroh warn about each broken connection, which the transport reports itself, so only their
/// errors are logged.
const DEFAULT_FILTER: &str =
    "warn,rendezvous=info,iroh=error,iroh_relay=error,noq=error,noq_proto=error,netwatch=error";

/// The format that was given, once the log is installed.
static FORMAT: OnceLock<Format> = OnceLock::new();

/// Returns whether each line is a JSON object.
pub(super) fn is_json() -> bool {
    FORMAT.get() == Some(&Format::Json)
}

impl Logging {
    /// Installs the process's log. An invalid directive of `RUST_LOG` is reported and ignored.
    ///
    /// Errors: an invalid address for traces, or a build without the feature `otlp`.
    pub(super) fn install(&self) -> farflung::Result<()> {
        FORMAT.get_or_init(|| self.log_format);
        let wanted = std::env::var(EnvFilter::DEFAULT_ENV).ok().filter(|wanted| !wanted.is_empty());
        let wanted = wanted.unwrap_or_else(|| DEFAULT_FILTER.to_owned());
        // The subscriber would report invalid directives and failed writes with `eprintln!`, which panics if
        // stderr is a closed pipe.
        let make_sense = |directive: &&str| {
            let parsed = directive.parse::<Directive>();
            if let Err(error) = &parsed {
                terminal::write_stderr(format!(
                    "ignoring `{directive}` of {}: {error}\n",
                    EnvFilter::DEFAULT_ENV
                ));
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

    /// Installs the log, and also sends each span to a collector, even if the log does not show it.
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

/// Sends the remaining traces, at the end of the process.
pub(super) fn end_traces() {
    #[cfg(feature = "otlp")]
    if let Some(traces) = TRACES.get() {
        traces.end();
    }
}
