//! Figures of other systems on the same machine, as their scripts print them: JSON, one object per line.
//!
//! It does not interpret the figures: the bench decides which system and which setting to compare with.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use serde_json::{Map, Value};

/// Integer keys that belong to the setting of a measurement, not to its result.
const SETTINGS: &[&str] = &["n", "threads", "thr2", "nproc", "kib", "mb", "world"];

/// The lines of the file for `--against`; empty without one.
#[derive(Debug, Clone, Default)]
pub struct Peers {
    lines: Vec<Map<String, Value>>,
}

impl Peers {
    /// Reads a file of JSON lines. Lines that do not begin with `{` are other output of the scripts and are
    /// skipped.
    ///
    /// Errors: the file cannot be read, has no objects, or has a line that begins with `{` but is not a JSON
    /// object.
    pub fn load(path: &Path) -> Result<Self> {
        let text =
            std::fs::read_to_string(path).with_context(|| format!("failed to read {}", path.display()))?;
        Self::parse(&text).with_context(|| format!("failed to parse {}", path.display()))
    }

    /// Does the same as [`Peers::load`], from a text.
    pub fn parse(text: &str) -> Result<Self> {
        let mut peers = Self::default();
        peers.add(text)?;
        ensure!(!peers.is_empty(), "there is no JSON object");
        Ok(peers)
    }

    fn add(&mut self, text: &str) -> Result<()> {
        for (number, line) in text.lines().enumerate() {
            if line.trim_start().starts_with('{') {
                self.lines.push(serde_json::from_str(line).with_context(|| format!("line {}", number + 1))?);
            }
        }
        Ok(())
    }

    /// Runs a command in a shell, with `settings` in its environment, and adds the figures that it prints. The
    /// command may print none.
    ///
    /// Errors: the command fails, or prints a line that begins with `{` but is not a JSON object.
    pub fn measure(&mut self, command: &str, settings: &[(&str, &str)]) -> Result<()> {
        let mut shell = Command::new("sh");
        shell
            .args(["-c", command])
            .envs(settings.iter().copied())
            .stdin(Stdio::null())
            .stderr(Stdio::inherit());
        let output = shell.output().context("failed to start a shell")?;
        ensure!(output.status.success(), "`{command}` failed with {settings:?}: {}", output.status);
        let text = String::from_utf8_lossy(&output.stdout);
        self.add(&text).with_context(|| format!("failed to parse what `{command}` printed"))
    }

    /// Returns whether there are no figures at all, as without `--against`.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.lines.is_empty()
    }

    /// Returns the highest figure that a system reached. Use it for throughputs.
    ///
    /// Uses the lines of `bench` whose keys have the values of `keys`. Numbers and text are compared by their
    /// text, and an empty value means that the key is absent. The lines are grouped by their settings: every
    /// text field, and the counts among `n, threads, nproc, ...`. The result is the highest of the groups'
    /// medians. So repeated runs count by their median, and a setting that is not given, such as `mode` here,
    /// counts by its best value:
    ///
    /// ```
    /// # use farflung_repro::peers::Peers;
    /// let peers = Peers::parse(
    ///     r#"{"bench": "gpt_step", "config": "nano", "threads": 1, "mode": "eager", "tok_s": 7000}
    ///        {"bench": "gpt_step", "config": "nano", "threads": 1, "mode": "eager", "tok_s": 7200}
    ///        {"bench": "gpt_step", "config": "nano", "threads": 1, "mode": "compile", "tok_s": 6900}"#,
    /// )?;
    /// let best = peers.best("gpt_step", &[("config", "nano"), ("threads", "1")], "tok_s");
    /// assert_eq!(best, Some(7100.0));
    /// # Ok::<(), anyhow::Error>(())
    /// ```
    #[must_use]
    pub fn best(&self, bench: &str, keys: &[(&str, &str)], field: &str) -> Option<f64> {
        self.medians(bench, keys, field).into_iter().max_by(f64::total_cmp)
    }

    /// Does the same as [`Peers::best`], but returns the lowest figure. Use it for times and memory.
    #[must_use]
    pub fn least(&self, bench: &str, keys: &[(&str, &str)], field: &str) -> Option<f64> {
        self.medians(bench, keys, field).into_iter().min_by(f64::total_cmp)
    }

    /// Returns one median for each setting that has the figure.
    fn medians(&self, bench: &str, keys: &[(&str, &str)], field: &str) -> Vec<f64> {
        let mut groups: BTreeMap<String, Vec<f64>> = BTreeMap::new();
        for line in &self.lines {
            let matches = as_text(line.get("bench")) == bench
                && keys.iter().all(|(key, value)| as_text(line.get(*key)) == *value);
            if let (true, Some(figure)) = (matches, line.get(field).and_then(Value::as_f64)) {
                groups.entry(setting(line)).or_default().push(figure);
            }
        }
        groups.into_values().map(median).collect()
    }
}

/// Returns text without its quotes, numbers as written, and an empty string for an absent key.
fn as_text(value: Option<&Value>) -> String {
    match value {
        None => String::new(),
        Some(Value::String(text)) => text.clone(),
        Some(other) => other.to_string(),
    }
}

/// Returns the setting of a line as one string.
fn setting(line: &Map<String, Value>) -> String {
    let fields = line.iter().filter(|(key, value)| value.is_string() || SETTINGS.contains(&key.as_str()));
    fields.map(|(key, value)| format!("{key}={}", as_text(Some(value)))).collect::<Vec<_>>().join(" ")
}

/// Returns the median of at least one value. For an even number it is the mean of the two in the middle.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let half = values.len() / 2;
    if values.len().is_multiple_of(2) { f64::midpoint(values[half - 1], values[half]) } else { values[half] }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINES: &str = r#"bg {'cpu0': 0.0}
{"bench": "gpt_step", "config": "nano", "threads": 1, "mode": "eager", "steps": 90, "tok_s": 7400.0, "peak_rss_mb": 740, "bg": {"cpu0": 0.1}}
{"bench": "gpt_step", "config": "nano", "threads": 1, "mode": "eager", "steps": 80, "tok_s": 7000.0, "peak_rss_mb": 744}
{"bench": "gpt_step", "config": "nano", "threads": 1, "mode": "eager", "steps": 85, "tok_s": 9000.0, "peak_rss_mb": 742}
{"bench": "gpt_step", "config": "nano", "threads": 1, "mode": "compile", "steps": 85, "tok_s": 7300.0, "peak_rss_mb": 900}
{"bench": "gpt_step", "config": "nano", "threads": 2, "mode": "eager", "tok_s": 11243.0}
{"bench": "burn_flex_step", "config": "nano", "threads": "1", "tok_s": 3027.0}
{"bench": "candle_gemm", "n": 512, "gflops_med": 70.0}
{"thr2":1,"bench": "candle_gemm", "n": 512, "gflops_med": 110.0}
{"bench": "gloo", "op": "all_reduce", "nproc": 2, "kib": 1, "ms": 1.4}
{"bench": "gloo", "op": "all_reduce", "nproc": 2, "kib": 1, "error": "timed out"}
"#;

    #[test]
    fn repeated_lines_give_their_median_and_open_settings_their_best() {
        let peers = Peers::parse(LINES).unwrap();
        let nano = [("config", "nano"), ("threads", "1")];
        // Eager has the median 7400 (its best is 9000); compiled has 7300.
        assert_eq!(peers.best("gpt_step", &nano, "tok_s"), Some(7400.0));
        assert_eq!(peers.least("gpt_step", &nano, "tok_s"), Some(7300.0));
        assert_eq!(peers.least("gpt_step", &nano, "peak_rss_mb"), Some(742.0));
        assert_eq!(peers.best("gpt_step", &[("threads", "2")], "tok_s"), Some(11243.0));
        assert_eq!(median(vec![4.0, 1.0, 2.0, 3.0]).to_string(), "2.5");
    }

    #[test]
    fn numbers_match_as_text_and_an_empty_value_means_absent() {
        let peers = Peers::parse(LINES).unwrap();
        assert_eq!(peers.best("burn_flex_step", &[("threads", "1")], "tok_s"), Some(3027.0));
        assert_eq!(peers.best("candle_gemm", &[("n", "512"), ("thr2", "")], "gflops_med"), Some(70.0));
        assert_eq!(peers.best("candle_gemm", &[("n", "512"), ("thr2", "1")], "gflops_med"), Some(110.0));
        assert_eq!(peers.best("gloo", &[("op", "all_reduce"), ("kib", "1")], "ms"), Some(1.4));
    }

    #[test]
    fn what_is_not_there_is_none() {
        let peers = Peers::parse(LINES).unwrap();
        assert_eq!(peers.best("gpt_step", &[("config", "baby")], "tok_s"), None);
        assert_eq!(peers.best("gpt_step", &[], "no_such_field"), None);
        assert_eq!(Peers::default().best("gpt_step", &[], "tok_s"), None);
    }

    #[test]
    fn a_command_adds_what_it_prints_for_its_settings() {
        let mut peers = Peers::default();
        let command = r#"echo warming up; [ $CONFIG = nano ] || exit 0; echo "{\"bench\": \"x\", \"threads\": $THREADS, \"v\": 5}""#;
        peers.measure(command, &[("CONFIG", "baby"), ("THREADS", "1")]).unwrap();
        assert!(peers.is_empty());
        peers.measure(command, &[("CONFIG", "nano"), ("THREADS", "2")]).unwrap();
        assert_eq!(peers.best("x", &[("threads", "2")], "v"), Some(5.0));
        let error = peers.measure("exit 3", &[("CONFIG", "nano")]).unwrap_err();
        assert!(error.to_string().contains("exit 3") && error.to_string().contains("nano"), "{error}");
        assert!(peers.measure("echo '{\"a\": }'", &[]).is_err());
    }

    #[test]
    fn broken_files_name_the_line() {
        let error = Peers::parse("{\"a\": 1}\n{\"a\": }\n").unwrap_err();
        assert!(format!("{error:#}").starts_with("line 2: "), "{error:#}");
        assert_eq!(Peers::parse("nothing here\n").unwrap_err().to_string(), "there is no JSON object");
        let error = Peers::load(Path::new("no/such/file")).unwrap_err();
        assert!(error.to_string().contains("no/such/file"));
    }
}
