//! Shows a run's progress on stderr: a bar on a terminal, plain lines elsewhere, nothing with `--quiet`.

use std::time::Duration;

use farflung_base::Bytes;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::metrics::StepMetrics;
use crate::terminal::{self, Screen};

/// Highest number of redraws of the bar per second.
const DRAWN_HZ: u8 = 10;

/// Seconds between two plain lines.
const LINE_EVERY_S: f64 = 5.0;

/// Form in which progress is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Show {
    /// Shows a bar if stderr is a terminal, lines otherwise.
    Auto,
    /// Shows nothing.
    Nothing,
}

/// Progress display of a run.
#[derive(Debug)]
pub struct Progress {
    total: u64,
    view: View,
}

#[derive(Debug)]
enum View {
    Bar(ProgressBar),
    Lines {
        /// `wall_s` of the last line.
        last: Option<f64>,
    },
    Nothing,
}

impl Progress {
    /// Starts the display of a run of `total` steps, of which `done` are done already.
    #[must_use]
    pub fn new(total: u64, done: u64, show: Show) -> Self {
        let view = match show {
            Show::Nothing => View::Nothing,
            Show::Auto => {
                // The bar is hidden if stderr is no terminal, or one that cannot move its cursor.
                if ProgressDrawTarget::stderr().is_hidden() {
                    View::Lines { last: None }
                } else {
                    let screen = ProgressDrawTarget::term_like_with_hz(Box::new(Screen::default()), DRAWN_HZ);
                    let bar = ProgressBar::with_draw_target(Some(total), screen);
                    let style = "{bar:24} {pos}/{len}  {msg}  eta {eta}";
                    bar.set_style(ProgressStyle::with_template(style).expect("the template is valid"));
                    // The rate counts the steps of this process only, not those of an earlier start.
                    bar.set_position(done);
                    bar.reset_eta();
                    bar.enable_steady_tick(Duration::from_millis(500));
                    View::Bar(bar)
                }
            }
        };
        Self { total, view }
    }

    /// Shows a step. `link_use` is the fraction of the run's time for which this worker's sent bytes occupy its
    /// link, if links are simulated and equal.
    pub fn step(&mut self, metrics: &StepMetrics, link_use: Option<f64>) {
        let due = |last: Option<f64>| {
            metrics.step == self.total
                || metrics.val_loss.is_some()
                || last.is_none_or(|at| metrics.wall_s - at >= LINE_EVERY_S)
        };
        match &mut self.view {
            View::Bar(bar) => {
                bar.set_position(metrics.step);
                bar.set_message(describe(metrics, link_use));
            }
            View::Lines { last } if due(*last) => {
                *last = Some(metrics.wall_s);
                let text = describe(metrics, link_use);
                terminal::write_stderr(format!("step {}/{}  {text}\n", metrics.step, self.total));
            }
            View::Lines { .. } | View::Nothing => {}
        }
    }

    /// Shows that the part of this number is done, of work that is no training, after so many seconds. Lines
    /// are shown only if it takes long.
    pub fn part(&mut self, what: &str, done: u64, wall_s: f64) {
        match &mut self.view {
            View::Bar(bar) => {
                bar.set_position(done);
                bar.set_message(what.to_owned());
            }
            View::Lines { last } if wall_s - last.unwrap_or(0.0) >= LINE_EVERY_S => {
                *last = Some(wall_s);
                terminal::write_stderr(format!("{what} {done}/{}\n", self.total));
            }
            View::Lines { .. } | View::Nothing => {}
        }
    }

    /// Shows a line between steps, for example that a checkpoint was saved.
    pub fn note(&self, text: &str) {
        match &self.view {
            View::Bar(bar) => bar.suspend(|| terminal::write_stderr(format!("{text}\n"))),
            View::Lines { .. } => terminal::write_stderr(format!("{text}\n")),
            View::Nothing => {}
        }
    }

    /// Ends the bar and leaves its last state on the terminal.
    pub fn finish(self) {
        if let View::Bar(bar) = self.view {
            bar.abandon();
        }
    }
}

/// Returns the text of a step: `loss 2.345 (val 2.4)  12.3k tokens/s  sent 4.1 MB  link 37 %  clock 12.5 s`.
fn describe(metrics: &StepMetrics, link_use: Option<f64>) -> String {
    let val = metrics.val_loss.map_or(String::new(), |v| format!(" (val {v:.3})"));
    let link = link_use.map_or(String::new(), |u| format!("  link {:.0} %", u * 100.0));
    let sent = Bytes(metrics.bytes_sent);
    let rate = match metrics.tokens_per_s {
        r if r >= 1e6 => format!("{:.2}M", r / 1e6),
        r if r >= 1e4 => format!("{:.1}k", r / 1e3),
        r => format!("{r:.0}"),
    };
    format!(
        "loss {:.3}{val}  {rate} tokens/s  sent {sent}{link}  clock {:.1} s",
        metrics.train_loss, metrics.time_s
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_says_all_that_matters() {
        let metrics = StepMetrics {
            step: 3,
            time_s: 12.54,
            train_loss: 2.3456,
            val_loss: Some(2.4),
            bytes_sent: 4_100_000,
            tokens_per_s: 12_340.0,
            ..StepMetrics::default()
        };
        let text = describe(&metrics, Some(0.371));
        assert_eq!(text, "loss 2.346 (val 2.400)  12.3k tokens/s  sent 4.1 MB  link 37 %  clock 12.5 s");
        assert!(!describe(&StepMetrics { val_loss: None, ..metrics }, None).contains("val"));
    }

    #[test]
    fn lines_come_at_a_sensible_rate() {
        let mut progress = Progress { total: 100, view: View::Lines { last: None } };
        let mut lines = 0;
        for step in 1..=100 {
            let before = match progress.view {
                View::Lines { last } => last,
                _ => None,
            };
            let metrics = StepMetrics { step, wall_s: step as f64 / 10.0, ..StepMetrics::default() };
            progress.step(&metrics, None);
            lines += u32::from(matches!(progress.view, View::Lines { last } if last != before));
        }
        // Lines are shown at 0.1 s, at 5.1 s and at the end.
        assert_eq!(lines, 3);
    }
}
