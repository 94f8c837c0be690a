//! Runs three ranks of a job, and gives one of them another value of one setting, for each setting of
//! `train --help` except `job` and `relay`.

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};

use anyhow::{Context, Result, ensure};
use farflung::{TrainArgs, TrainConfig};

use crate::binary::farflung;
use crate::harness::{Bench, Options, Report, Threshold};

pub(crate) const BENCH: Bench = Bench {
    name: "mismatch",
    claim: "a setting that differs on one of three ranks changes no result, or all ranks reject it by name \
            and exit with code 2",
    source: "ours",
    seed: 1337,
    run,
};

const RANKS: usize = 3;

/// Names of training modes, and their flags.
const CASES: [(&str, &[(&str, &str)]); 3] =
    [("ddp", &[]), ("pipeline", &[("stages", "3")]), ("diloco", &[("sync", "diloco"), ("sync-every", "2")])];

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let folder = tempfile::tempdir().context("failed to make a temporary folder")?;
    let fixtures = Fixtures::new(folder.path())?;
    let cases = if options.quick { 2 } else { CASES.len() };
    for (name, flags) in &CASES[..cases] {
        let mut jobs = Jobs { fixtures: &fixtures, flags, count: 0 };
        let (expected, _) = jobs.run(None)?;
        let expected = Outcome::of(&expected, "");
        ensure!(matches!(expected, Outcome::Trained(_)), "{name}: the job itself failed: {expected:?}");
        let (mut tried, mut refused, mut wrong) = (0_u32, 0_u32, Vec::new());
        // A rank with another job's name belongs to another job: it is rejected, and the others keep waiting. A
        // rank with relays needs a ticket and a build with QUIC; without them it ends before it meets the
        // others. So `job` and `relay` are left out.
        for key in TrainArgs::KEYS.iter().filter(|key| !["job", "relay"].contains(*key)) {
            let setting = key.replace('_', "-");
            let Some(value) = fixtures.other_value(&setting, name) else {
                wrong.push(format!("{setting}: no other value was found"));
                continue;
            };
            tried += 1;
            let (outputs, said) = jobs.run(Some((&setting, &value)))?;
            match Outcome::of(&outputs, &setting) {
                Outcome::Refused => refused += 1,
                found if found == expected => {}
                found => wrong.push(format!("{setting} {value}: {found:?}\n{said}")),
            }
        }
        for line in &wrong {
            report.row(&format!("{name}: {}", line.trim_end()), 1.0, "", Threshold::AtMost(0.0))?;
        }
        report.row(
            &format!("{name}: settings that were changed, one at a time"),
            f64::from(tried),
            "",
            Threshold::AtLeast(65.0),
        )?;
        report.row(
            &format!("{name}: settings rejected by name"),
            f64::from(refused),
            "",
            Threshold::AtLeast(40.0),
        )?;
        let metric = format!("{name}: settings neither rejected on all ranks nor without effect");
        report.row(&metric, wrong.len() as f64, "settings", Threshold::AtMost(0.0))?;
    }
    Ok(())
}

/// Outcome of a job.
#[derive(Debug, PartialEq)]
enum Outcome {
    /// All ranks ended with 0, and rank 0 reports this hash of the parameters and this loss.
    Trained(String),
    /// All ranks ended with 2 and named the setting.
    Refused,
    /// Any other outcome, with the exit codes.
    Wrong(Vec<Option<i32>>),
}

impl Outcome {
    fn of(outputs: &[Output], setting: &str) -> Self {
        let codes: Vec<_> = outputs.iter().map(|output| output.status.code()).collect();
        let name = format!("`{setting}`");
        let names = |output: &Output| String::from_utf8_lossy(&output.stderr).contains(&name);
        if codes.iter().all(|code| *code == Some(2)) && outputs.iter().all(names) {
            return Self::Refused;
        }
        let report: Option<serde_json::Value> = serde_json::from_slice(&outputs[0].stdout).ok();
        match report {
            Some(report) if codes.iter().all(|code| *code == Some(0)) => {
                Self::Trained(format!("{} {} {}", report["hash"], report["val_loss"], report["train_loss"]))
            }
            _ => Self::Wrong(codes),
        }
    }
}

/// Files to train on, and other files for the settings that are paths.
struct Fixtures {
    folder: PathBuf,
}

impl Fixtures {
    fn new(folder: &Path) -> Result<Self> {
        let fixtures = Self { folder: folder.to_owned() };
        fs::write(fixtures.path("data"), "the quick brown fox ".repeat(500))?;
        fs::write(fixtures.path("other-data"), "the lazy dog sleeps ".repeat(500))?;
        let plan = fixtures.farflung(&["--batch", "3", "--workers", "3", "--print-plan"])?;
        fs::write(fixtures.path("other-plan"), plan.stdout)?;
        let machines = "default = '1gbit,1ms'\n[[device]]\nname = 'here'\ncount = 3\nflops = '3 GFLOPS'\n";
        fs::write(fixtures.path("other-topology"), machines)?;
        let schedule = farflung(&["schedule", "gpipe", "-p", "3", "-m", "6", "--format", "ops"])?
            .stdout(Stdio::piped())
            .output()?;
        ensure!(schedule.status.success(), "{}", String::from_utf8_lossy(&schedule.stderr));
        fs::write(fixtures.path("other-schedule-file"), schedule.stdout)?;
        let weights = fixtures.path("weights").display().to_string();
        fixtures.farflung(&["--workers", "1", "--steps", "1", "--seed", "5", "--out", &weights])?;
        fs::rename(fixtures.path("weights/step-00000001"), fixtures.path("other-init-from"))?;
        Ok(fixtures)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// Runs `train` on the small model.
    fn farflung(&self, args: &[&str]) -> Result<Output> {
        let mut command = farflung(&["train"])?;
        let mut base = self.base();
        base.retain(|(flag, _)| !args.contains(&format!("--{flag}").as_str()));
        command.args(base.iter().flat_map(|(flag, value)| [format!("--{flag}"), value.clone()])).args(args);
        let output = command.stdout(Stdio::piped()).stderr(Stdio::piped()).output()?;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Ok(output)
    }

    /// Returns the settings of all ranks.
    fn base(&self) -> Vec<(String, String)> {
        let data = self.path("data").display().to_string();
        let settings = [
            ("layers", "3"),
            ("heads", "2"),
            ("dim", "8"),
            ("context", "8"),
            ("batch", "2"),
            ("warmup", "0"),
            ("steps", "4"),
            ("eval-every", "2"),
            ("eval-batches", "2"),
            ("checkpoint-every", "2"),
            ("sample-tokens", "2"),
            ("threads", "1"),
            ("deadline", "20s"),
            ("json", "true"),
            ("data", &data),
        ];
        settings.map(|(name, value)| (name.to_owned(), value.to_owned())).into()
    }

    /// Returns another value for a setting, chosen by its type: a fixture for a path, another number, the
    /// opposite truth value, or another of the words that the error for a wrong value lists.
    fn other_value(&self, setting: &str, case: &str) -> Option<String> {
        if setting == "out" {
            return Some(self.path(&format!("other-out-{case}")).display().to_string());
        }
        if setting == "pools" {
            return Some("1,2".to_owned());
        }
        if setting == "mesh" {
            // With other stages than the job's, the rank would contradict itself.
            return Some(if case == "pipeline" { "pipeline=3" } else { "tensor=3" }.to_owned());
        }
        if setting == "zero-codec" {
            return Some("int8,int4".to_owned());
        }
        if setting == "group" {
            return Some("*.bias:lr=0.5".to_owned());
        }
        let fixture = self.path(&format!("other-{setting}"));
        if fixture.exists() {
            return Some(fixture.display().to_string());
        }
        let base = self.base();
        let given = base.iter().find(|(name, _)| name == setting).map(|(_, value)| value.clone());
        let default = TrainConfig::default().get(setting);
        let read = |value: &str| TrainArgs::from_toml(&format!("{setting} = {value}"), Path::new("bench"));
        let now = given.or_else(|| default.map(|value| value.to_string()));
        let now = now.unwrap_or_default();
        let mut candidates = Vec::new();
        if let Ok(n) = now.parse::<u64>() {
            candidates.extend([(n + 1).to_string(), (2 * n).to_string()]);
        }
        if let Ok(x) = now.parse::<f64>() {
            candidates.push((x / 2.0).to_string());
        }
        candidates.extend(["true", "false", "2"].map(str::to_owned));
        if let Err(refusal) = read("\"?\"") {
            let text = refusal.to_string();
            let words = text.split(|c: char| !(c.is_alphanumeric() || c == '-'));
            candidates.extend(words.map(|word| format!("{word:?}")));
        }
        candidates.push("\"another\"".to_owned());
        let bare = |value: &str| value.trim_matches('"').to_owned();
        let good = |value: &&String| {
            bare(value) != bare(&now) && read(value).is_ok_and(|args| args != TrainArgs::default())
        };
        candidates.iter().find(good).map(|value| bare(value))
    }
}

/// Starts jobs of one training mode.
struct Jobs<'a> {
    fixtures: &'a Fixtures,
    flags: &'a [(&'a str, &'a str)],
    count: usize,
}

impl Jobs<'_> {
    /// Runs a job in which rank 1 has another value of a setting, if `change` gives one. Returns the outputs of
    /// the ranks, and the text of their errors.
    fn run(&mut self, change: Option<(&str, &str)>) -> Result<(Vec<Output>, String)> {
        self.count += 1;
        let folder = self.fixtures.path(&format!("job-{}-{}", self.flags.len(), self.count));
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let mut children = Vec::new();
        for rank in 0..RANKS {
            let out = folder.join(rank.to_string()).display().to_string();
            let mut settings = self.fixtures.base();
            let own = change.filter(|_| rank == 1);
            for (name, value) in self.flags.iter().copied().chain([("out", out.as_str())]).chain(own) {
                settings.retain(|(known, _)| known != name);
                settings.push((name.to_owned(), value.to_owned()));
            }
            // Settings that the plan decides must not be given together with a plan.
            if own.is_some_and(|(name, _)| name == "plan") {
                let decided = TrainArgs::DECIDED;
                settings.retain(|(name, _)| !decided.contains(&name.replace('-', "_").as_str()));
            }
            let mut command = farflung(&["train"])?;
            command.args(settings.iter().map(|(name, value)| format!("--{name}={value}")));
            command.env("RANK", rank.to_string()).env("WORLD_SIZE", RANKS.to_string());
            command.env("LOCAL_RANK", rank.to_string()).env("LOCAL_WORLD_SIZE", RANKS.to_string());
            command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
            command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
            children.push(command.spawn().context("failed to start `farflung`")?);
        }
        let mut outputs = Vec::new();
        for child in children {
            outputs.push(child.wait_with_output().context("failed to wait for `farflung`")?);
        }
        let said =
            outputs.iter().map(|output| String::from_utf8_lossy(&output.stderr).into_owned()).collect();
        Ok((outputs, said))
    }
}
