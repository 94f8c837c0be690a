//! State of a run as read from its files: takes lines and documents, and returns a [`Snapshot`]. Pure; memory
//! is bounded for any input.

use std::collections::{BTreeMap, VecDeque};

use farflung_parallel::Plan;
use serde_json::Value;

use super::curve::Curve;
use super::event_text::{EventLine, cut};
use super::snapshot::{EventFacts, Goodput, Latest, Phase, Problem, RunFacts, Snapshot, Summary};
use super::timeline::Timeline;
use super::who::Who;
use crate::train::DeclaredLinks;
use crate::train::elastic::Status;
use crate::{StepMetrics, StepTimes};

/// Highest number of events that are kept.
pub const MOST_EVENTS: usize = 200;
/// Number of newest steps over which recent rates are computed.
const RECENT: usize = 32;
/// Highest number of problems that are kept.
const MOST_PROBLEMS: usize = 20;
/// Highest number of ranks listed with an event.
const MOST_NAMED: usize = 64;
/// Most layers with experts, and experts of a layer, that are shown.
const MOST_LAYERS: usize = 128;
const MOST_EXPERTS: usize = 256;

/// A file of lines in a run's folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Lines {
    /// `metrics.jsonl`.
    Metrics,
    /// `events.jsonl` of a rank.
    Events(u32),
    /// `times.jsonl` of a rank.
    Times(u32),
}

impl Lines {
    /// Returns the file's path within the run's folder.
    #[must_use]
    pub fn path(self) -> String {
        let of = |rank: u32, name: &str| match rank {
            0 => name.to_owned(),
            rank => format!("{}/rank-{rank:05}/{name}", crate::run_dir::RANKS),
        };
        match self {
            Self::Metrics => crate::run_dir::METRICS.to_owned(),
            Self::Events(rank) => of(rank, crate::events::EVENTS),
            Self::Times(rank) => of(rank, crate::step_times::TIMES),
        }
    }
}

/// A small file in a run's folder that is always replaced as a whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Document {
    /// `plan.toml`.
    Plan,
    /// `config.toml`.
    Config,
    /// `links.json`.
    Links,
    /// `report.json`.
    Report,
}

impl Document {
    /// All documents.
    pub const ALL: [Self; 4] = [Self::Plan, Self::Config, Self::Links, Self::Report];

    /// Returns the file's name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Plan => "plan.toml",
            Self::Config => "config.toml",
            Self::Links => crate::train::LINKS,
            Self::Report => "report.json",
        }
    }
}

/// The values of a step from which rates are computed.
#[derive(Debug, Clone, Copy, Default)]
struct RateSample {
    step: u64,
    time_s: f64,
    wall_s: f64,
    tokens: u64,
    bytes_sent: u64,
}

impl RateSample {
    fn of(row: &StepMetrics) -> Self {
        let StepMetrics { step, time_s, wall_s, tokens, bytes_sent, .. } = *row;
        Self { step, time_s, wall_s, tokens, bytes_sent }
    }

    /// Returns the growth from `before` to `of`, divided by `per` seconds or steps; `None` if `per` is not
    /// positive.
    fn rate(of: u64, before: u64, per: f64) -> Option<f64> {
        (per > 0.0).then(|| of.saturating_sub(before) as f64 / per)
    }
}

/// State of a run, as far as it is known.
#[derive(Debug, Default)]
pub struct State {
    name: String,
    curve: Curve,
    latest: Option<StepMetrics>,
    val_loss: Option<f64>,
    /// Values from which rates over all steps are counted: 0 if the first known step is step 1, else those of
    /// the first known step.
    base: RateSample,
    /// Values of the newest steps. The first are those of the step before them, or `base`.
    recent: VecDeque<RateSample>,
    timeline: Timeline,
    events: Vec<EventFacts>,
    more_events: u64,
    /// Seconds of the run's clock during which members changed; `None` before the first change.
    changing_s: Option<f64>,
    /// The step after which the run ended, and why; `None` if rank 0's last event is not the end of a run.
    ended: Option<(u64, String)>,
    who: Who,
    simulated: Option<bool>,
    steps: Option<u64>,
    reported: Option<u64>,
    problems: BTreeMap<String, Problem>,
    version: u64,
}

impl State {
    /// Makes the state of a run of which only the folder's name is known.
    #[must_use]
    pub fn new(name: &str) -> Self {
        Self { name: cut(name), ..Self::default() }
    }

    /// Returns a number that changes whenever the state does.
    #[must_use]
    pub const fn version(&self) -> u64 {
        self.version
    }

    /// Drops the lines of a file that has been replaced or cut.
    pub fn restart(&mut self, file: Lines) {
        self.version += 1;
        self.problems.remove(&file.path());
        match file {
            Lines::Metrics => {
                self.curve.clear();
                (self.latest, self.val_loss, self.base) = (None, None, RateSample::default());
                self.recent.clear();
            }
            Lines::Events(rank) => {
                self.events.iter_mut().for_each(|event| event.ranks.retain(|&other| other != rank));
                self.events.retain(|event| !event.ranks.is_empty());
                if rank == 0 {
                    (self.changing_s, self.ended, self.more_events) = (None, None, 0);
                    self.who.forget_changes();
                }
            }
            Lines::Times(rank) => self.timeline.clear(rank),
        }
    }

    /// Takes a complete line of a file. Lines of the wrong form are counted.
    pub fn line(&mut self, file: Lines, line: &[u8]) {
        self.version += 1;
        let taken = match file {
            Lines::Metrics => self.metrics(line),
            Lines::Events(rank) => self.event(rank, line),
            Lines::Times(rank) => self.timeline.line(rank, line),
        };
        if let Err(what) = taken {
            self.problem(&file.path(), &what, |problem| problem.bad_lines += 1);
        }
    }

    /// Counts a line that was too long to be read.
    pub fn long_line(&mut self, file: Lines) {
        self.version += 1;
        self.problem(&file.path(), "too long", |problem| problem.long_lines += 1);
    }

    /// Takes a document; `None` if it does not exist.
    pub fn document(&mut self, document: Document, text: Option<&str>) {
        self.version += 1;
        self.problems.remove(document.name());
        let taken = match (document, text) {
            (Document::Plan, text) => read(text, checked_plan).map(|plan| self.who.plan = plan),
            (Document::Config, text) => read(text, steps_of).map(|steps| self.steps = steps.flatten()),
            (Document::Links, text) => read(text, links_of).map(|links| {
                self.simulated = links.as_ref().map(|links| links.simulated);
                self.who.topology = links.and_then(|links| links.topology);
            }),
            (Document::Report, text) => read(text, reported_steps).map(|steps| self.reported = steps),
        };
        if let Err(what) = taken {
            self.problem(document.name(), &what, |_| ());
        }
    }

    /// Records that a document could not be read.
    pub fn unreadable(&mut self, name: &str, what: &str) {
        self.version += 1;
        self.problem(name, what, |_| ());
    }

    /// Takes the status that a member reported, or the reason why no member answered.
    pub fn asked(&mut self, answer: Result<Option<Status>, String>) {
        const MEMBERS: &str = "members";
        self.version += 1;
        self.problems.remove(MEMBERS);
        match answer {
            Ok(status) => self.who.status = status,
            Err(what) => {
                self.who.status = None;
                self.problem(MEMBERS, &what, |_| ());
            }
        }
    }

    fn problem(&mut self, file: &str, what: &str, count: impl FnOnce(&mut Problem)) {
        if self.problems.len() == MOST_PROBLEMS && !self.problems.contains_key(file) {
            return;
        }
        let problem = self.problems.entry(file.to_owned()).or_insert_with(|| Problem {
            file: cut(file),
            bad_lines: 0,
            long_lines: 0,
            what: String::new(),
        });
        problem.what = cut(what);
        count(problem);
    }

    fn metrics(&mut self, line: &[u8]) -> Result<(), String> {
        let mut row: StepMetrics = serde_json::from_slice(line).map_err(|error| error.to_string())?;
        if [row.time_s, row.wall_s].iter().any(|time| !(0.0..1e12).contains(time)) {
            return Err("its times are negative or too large".to_owned());
        }
        let sample = RateSample::of(&row);
        while self.recent.back().is_some_and(|last| last.step >= row.step) {
            self.recent.pop_back();
        }
        if self.latest.is_none() {
            // If this is the folder of a member that joined later, the run's tokens and time before its first
            // step do not count.
            self.base = if row.step == 1 { RateSample::default() } else { sample };
            self.recent.push_back(self.base);
        }
        if self.recent.back().is_none_or(|last| last.step < row.step) {
            self.recent.push_back(sample);
        }
        if self.recent.len() > RECENT + 1 {
            self.recent.pop_front();
        }
        self.curve.push(&row);
        self.val_loss = row.val_loss.filter(|loss| loss.is_finite()).or(self.val_loss);
        row.experts.truncate(MOST_LAYERS);
        row.experts.iter_mut().for_each(|mixture| mixture.counts.truncate(MOST_EXPERTS));
        self.latest = Some(row);
        Ok(())
    }

    fn event(&mut self, rank: u32, line: &[u8]) -> Result<(), String> {
        let event = EventLine::parse(line)?;
        if rank == 0 {
            if let Some(change) = event.change() {
                *self.changing_s.get_or_insert_default() += change.took_s;
                self.who.change(&change);
            }
            if let Some(shares) = event.shares() {
                self.who.share(shares);
            }
            if event.kind == "resumed" {
                self.who.forget_changes();
            }
            self.ended = event.ends().map(|reason| (event.step, reason));
        }
        let text = event.text();
        // Ranks report the same event with different paths.
        let alike = |other: &EventFacts| {
            other.step == event.step
                && other.kind == event.kind
                && (other.text == text || other.kind == "saved")
                && !other.ranks.contains(&rank)
        };
        if let Some(same) = self.events.iter_mut().rev().find(|other| alike(other)) {
            if same.ranks.len() < MOST_NAMED {
                same.ranks.push(rank);
                same.ranks.sort_unstable();
            }
            return Ok(());
        }
        let facts = EventFacts {
            step: event.step,
            time_s: event.time_s,
            alarming: event.is_alarming(),
            kind: event.kind,
            text,
            ranks: vec![rank],
        };
        // Rank 0's events are in order; those of other ranks are inserted by their time.
        let at = if rank == 0 {
            self.events.len()
        } else {
            self.events.iter().rposition(|other| other.time_s <= facts.time_s).map_or(0, |before| before + 1)
        };
        self.events.insert(at, facts);
        if self.events.len() > MOST_EVENTS {
            self.events.remove(0);
            self.more_events += 1;
        }
        Ok(())
    }

    /// Returns all data for the page.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        Snapshot { summary: self.summary(), curve: self.curve.clone() }
    }

    fn summary(&self) -> Summary {
        let (members, more_members) = self.who.members();
        let members: Vec<_> = members
            .into_iter()
            .map(|mut member| {
                let told = member.rank.and_then(|rank| self.last_times(rank));
                member.step = told.map(|times| times.step);
                member.bytes_sent = member.bytes_sent.or(told.map(|times| times.bytes_sent));
                member
            })
            .collect();
        Summary {
            run: self.run(),
            phase: self.phase(),
            latest: self.latest(),
            goodput: self.goodput(),
            links: self.who.links(&members),
            members,
            more_members,
            timeline: self.timeline.facts(self.who.ranks()),
            experts: self.latest.as_ref().map_or_else(Vec::new, |row| row.experts.clone()),
            memory: self.latest.as_ref().and_then(|row| row.memory),
            events: self.events.clone(),
            more_events: self.more_events,
            problems: self.problems.values().cloned().collect(),
        }
    }

    /// Returns the last times that a rank reported. If members come and go, the folder has the files of only
    /// one of them.
    fn last_times(&self, rank: u32) -> Option<&StepTimes> {
        let folder = if self.who.ranks().is_some() { rank } else { 0 };
        self.timeline.last(folder).filter(|times| times.rank == rank)
    }

    fn run(&self) -> RunFacts {
        let plan = self.who.plan.as_ref();
        RunFacts {
            name: self.name.clone(),
            model: plan.map(|plan| cut(&plan.model.name)),
            parameters: plan.map(|plan| plan.model.parameters),
            steps: self.steps,
            replicas: plan.filter(|_| self.who.ranks().is_some()).map(Plan::replicas),
            stages: plan.map(Plan::stages),
            tensor: plan.map(Plan::tensor_ranks),
            method: plan.map(|plan| cut(&plan.outermost().method)),
            codec: plan.map(|plan| cut(&plan.outermost().codec)),
            simulated: self.simulated,
        }
    }

    fn phase(&self) -> Phase {
        let step = self.latest.as_ref().map(|row| row.step);
        match (step, &self.ended) {
            (Some(_), _) if self.reported == step => Phase::Finished,
            (step, Some((ended, reason))) if step.is_none_or(|step| step <= *ended) => {
                Phase::Ended { reason: reason.clone() }
            }
            (Some(_), _) => Phase::Running,
            (None, _) => Phase::Waiting,
        }
    }

    /// Returns the first and the last of the samples in `recent`.
    fn recent(&self) -> Option<(RateSample, RateSample)> {
        self.recent.front().copied().zip(self.recent.back().copied())
    }

    fn latest(&self) -> Latest {
        let Some(row) = &self.latest else { return Latest::default() };
        let recent = self.recent();
        let steps = recent.map(|(first, last)| last.step.saturating_sub(first.step) as f64);
        let recent = recent.zip(steps).filter(|(_, steps)| *steps > 0.0);
        Latest {
            step: row.step,
            time_s: row.time_s,
            wall_s: row.wall_s,
            tokens: row.tokens,
            train_loss: Some(row.train_loss).filter(|loss| loss.is_finite()),
            val_loss: self.val_loss,
            bytes_sent: row.bytes_sent,
            bytes_received: row.bytes_received,
            bytes_per_step: recent
                .and_then(|((a, b), steps)| RateSample::rate(b.bytes_sent, a.bytes_sent, steps)),
            step_s: recent.map(|((a, b), steps)| (b.time_s - a.time_s).max(0.0) / steps),
        }
    }

    fn goodput(&self) -> Goodput {
        let Some(row) = &self.latest else { return Goodput::default() };
        let (base, last) = (self.base, RateSample::of(row));
        let asked = self.who.status.as_ref().map(Status::goodput).filter(|share| share.is_finite());
        let told = self.changing_s.filter(|_| last.time_s > 0.0);
        Goodput {
            tokens_per_s: RateSample::rate(last.tokens, base.tokens, last.wall_s - base.wall_s),
            recent_tokens_per_s: self
                .recent()
                .and_then(|(a, b)| RateSample::rate(b.tokens, a.tokens, b.wall_s - a.wall_s)),
            clock_tokens_per_s: RateSample::rate(last.tokens, base.tokens, last.time_s - base.time_s),
            unchanged: asked.or(told.map(|changing| (1.0 - changing / last.time_s).clamp(0.0, 1.0))),
        }
    }
}

/// Parses a document; `None` if it does not exist.
fn read<T>(text: Option<&str>, parse: impl FnOnce(&str) -> Result<T, String>) -> Result<Option<T>, String> {
    text.map(parse).transpose()
}

fn checked_plan(text: &str) -> Result<Plan, String> {
    let plan: Plan = text.parse().map_err(|error: farflung_parallel::ParallelError| error.to_string())?;
    plan.check().map_err(|error| error.to_string())?;
    Ok(plan)
}

fn steps_of(text: &str) -> Result<Option<u64>, String> {
    let table: toml::Table = text.parse().map_err(|error: toml::de::Error| error.message().to_owned())?;
    Ok(table.get("steps").and_then(toml::Value::as_integer).and_then(|steps| u64::try_from(steps).ok()))
}

fn links_of(text: &str) -> Result<DeclaredLinks, String> {
    serde_json::from_str(text).map_err(|error| error.to_string())
}

fn reported_steps(text: &str) -> Result<u64, String> {
    let report: Value = serde_json::from_str(text).map_err(|error| error.to_string())?;
    report["steps"].as_u64().ok_or_else(|| "it has no number of steps".to_owned())
}

#[cfg(test)]
mod tests;
