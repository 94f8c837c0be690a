//! What members tell whoever asks at their gates: the settings of their run, and how it stands.

use serde::{Deserialize, Serialize};

use super::status::Status;
use crate::config::shared::{Fact, is_own};
use crate::train::job::Job;
use crate::train::meet::model_facts;
use crate::{Error, Result};

/// Members of other versions may compute other values.
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// What a newcomer is told before it connects to all members.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Welcome {
    pub(super) version: String,
    /// The settings that all members share, as TOML.
    pub(super) settings: String,
    /// What follows from them and from the data.
    pub(super) facts: Vec<Fact>,
    /// How the run stands, once it has begun.
    pub(super) status: Option<Status>,
}

/// All members take each other for lost after the same time.
const DEADLINE: &str = "deadline";

/// Settings that name files of one machine: their contents are compared, or a newcomer has no use for them.
const FILES: [&str; 2] = ["data", "init-from"];

impl Welcome {
    pub(super) fn of(job: &Job) -> Self {
        // Of pipelines, those that all plans are made from.
        let settings = job.pipelines.as_deref().unwrap_or(&job.config).to_toml();
        let shared = |line: &&str| {
            let key = line.split(" = ").next().unwrap_or_default();
            key == DEADLINE || !is_own(key) && !FILES.contains(&key)
        };
        let settings = settings.lines().filter(shared).collect::<Vec<_>>().join("\n");
        Self { version: VERSION.to_owned(), settings, facts: facts(job), status: None }
    }

    pub(super) fn to_bytes(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("texts and numbers are plain data")
    }

    /// Refuses where this machine has another version than the members.
    ///
    /// Errors: [`Error::MemberDiffers`].
    pub(super) fn check_version(&self) -> Result<()> {
        differs("program's", &[Fact::new("version", VERSION)], &[Fact::new("version", &self.version)])
    }

    /// Refuses where this machine's job is another one than the members'.
    ///
    /// Errors: [`Error::MemberDiffers`].
    pub(super) fn check_job(&self, job: &Job) -> Result<()> {
        differs("setting", &facts(job), &self.facts)
    }

    /// Reads what members say of the run.
    pub(super) fn read(bytes: &[u8]) -> Result<Self> {
        let malformed = |_| Error::Message {
            message: "what members say of the run".to_owned(),
            problem: "does not read as that",
        };
        serde_json::from_slice(bytes).map_err(malformed)
    }
}

/// What all members must have alike beside their settings.
fn facts(job: &Job) -> Vec<Fact> {
    let tokens = job.training.len() + job.held_out.len();
    let mut facts = model_facts(job);
    if !job.config.own_data {
        facts.push(Fact::new("data", format!("{tokens} tokens with hash {}", job.hash)));
    }
    facts
}

/// Refuses where this machine has another value than the members.
fn differs(what: &'static str, own: &[Fact], theirs: &[Fact]) -> Result<()> {
    let other = own.iter().find(|fact| !theirs.contains(fact));
    let Some(Fact { name, value }) = other else { return Ok(()) };
    let found = theirs.iter().find(|fact| fact.name == *name).map_or("missing", |fact| &fact.value);
    Err(Error::MemberDiffers { what, field: name.clone(), own: value.clone(), theirs: found.to_owned() })
}
