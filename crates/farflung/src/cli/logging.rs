//! Logs on stderr, chosen by `RUST_LOG` and `--log-format`.

#![expect(clippy::doc_markdown, reason = "doc comments are the help that the terminal shows")]

use std::io::{self, IsTerminal};

use tracing_subscriber::EnvFilter;
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
}

impl Logging {
    /// Whether each line is an object.
    pub(super) fn is_json(&self) -> bool {
        self.log_format == Format::Json
    }

    /// Makes the process's log. A wrong `RUST_LOG` is reported by the filter itself and leaves the default.
    pub(super) fn install(&self) {
        let filter = EnvFilter::builder()
            .with_default_directive(tracing::level_filters::LevelFilter::WARN.into())
            .from_env_lossy();
        let builder = fmt().with_env_filter(filter).with_writer(io::stderr);
        match self.log_format {
            Format::Text => {
                // The convention: set and not empty means no colour.
                let plain = std::env::var_os("NO_COLOR").is_some_and(|v| !v.is_empty());
                builder.with_ansi(!plain && io::stderr().is_terminal()).init();
            }
            Format::Json => builder.json().init(),
        }
    }
}
