//! The answer of members to a peer that asks at their gates: the settings of the run, and its status.

use serde::{Deserialize, Serialize};

use super::run_id::RunId;
use super::status::Status;
use crate::config::choice::TokenizerKind;
use crate::config::shared::{NamedValue, is_own};
use crate::train::job::Job;
use crate::train::meet::{data_fact, model_facts};
use crate::{Error, Result};

/// Version of this program. All members need the same one, since another may compute other values. The number
/// after the sign is that of the messages between members: it grows with each change of one that an earlier
/// program could not read.
const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "+members.3");

/// Information for a newcomer before it connects to all members.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct NewcomerInfo {
    pub(super) version: String,
    /// Identity of the run, once it has one.
    #[serde(default)]
    pub(super) run: Option<RunId>,
    /// The settings that all members share, as TOML.
    pub(super) settings: String,
    /// Facts about the model and the data, which must be the same on all members.
    pub(super) facts: Vec<NamedValue>,
    /// Status of the run, once it has begun.
    pub(super) status: Option<Status>,
}

/// Setting that is shared although it is one of the settings that may differ between ranks: all members must
/// give up a silent member after the same time.
const DEADLINE: &str = "deadline";
/// Setting that is shared unless it is the path of a file.
const TOKENIZER: &str = "tokenizer";

/// Settings that are not shared because they name files on one machine: the contents are compared instead, or a
/// newcomer does not need them.
const FILES: [&str; 3] = ["data", "tokens", "init-from"];

impl NewcomerInfo {
    pub(super) fn of(job: &Job) -> Self {
        // `job.config` is for the current plan only; newcomers need the settings from which every plan is made.
        let settings = job.settings().to_toml();
        let has_name = !matches!(job.given.tokenizer, TokenizerKind::File(_));
        let shared = |line: &&str| {
            let key = line.split(" = ").next().unwrap_or_default();
            let is_shared = key == DEADLINE || key == TOKENIZER && has_name;
            is_shared || !is_own(key) && !FILES.contains(&key)
        };
        let settings = settings.lines().filter(shared).collect::<Vec<_>>().join("\n");
        Self { version: VERSION.to_owned(), run: None, settings, facts: facts(job), status: None }
    }

    pub(super) fn to_bytes(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("texts and numbers are plain data")
    }

    /// Checks that this machine has the same version as the members.
    ///
    /// Errors: [`Error::MemberDiffers`].
    pub(super) fn check_version(&self) -> Result<()> {
        differs(
            "program's",
            &[NamedValue::new("version", VERSION)],
            &[NamedValue::new("version", &self.version)],
        )
    }

    /// Checks that this machine has the same settings, model and data as the members.
    ///
    /// Errors: [`Error::MemberDiffers`].
    pub(super) fn check_job(&self, job: &Job) -> Result<()> {
        let values = |settings: &str| {
            let value = |line: &str| {
                let (name, value) = line.split_once(" = ").unwrap_or((line, ""));
                NamedValue::new(name, value)
            };
            settings.lines().map(value).collect::<Vec<_>>()
        };
        let is = |fact: &&NamedValue| fact.name == TOKENIZER;
        if let (Some(own), Some(theirs)) = (model_facts(job).iter().find(is), self.facts.iter().find(is))
            && theirs.value.starts_with("tokenizer.json")
            && own.value != theirs.value
        {
            let (field, value) = (TOKENIZER, own.value.clone());
            let expected =
                format!("{}, the members': give the path of that file by --tokenizer", theirs.value);
            return Err(Error::Setting { field, value, expected });
        }
        differs("setting", &values(&Self::of(job).settings), &values(&self.settings))?;
        differs("setting", &facts(job), &self.facts)
    }

    /// Decodes an answer.
    ///
    /// Errors: [`Error::Message`] if it is malformed.
    pub(super) fn read(bytes: &[u8]) -> Result<Self> {
        let told: Self = serde_json::from_slice(bytes).map_err(|_| Self::wrong("cannot be parsed"))?;
        Ok(told.without_controls())
    }

    /// Replaces characters that control a terminal, which no member sends by itself.
    fn without_controls(mut self) -> Self {
        let facts = self.facts.iter_mut().flat_map(|NamedValue { name, value }| [name, value]);
        let status = self.status.iter_mut().flat_map(Status::texts_mut);
        for text in facts.chain(status).chain([&mut self.version, &mut self.settings]) {
            if text.chars().any(is_control) {
                *text = text.replace(is_control, "\u{FFFD}");
            }
        }
        self
    }

    /// Returns the error of an answer with this problem.
    pub(super) fn wrong(problem: &'static str) -> Error {
        Error::Message { message: "the members' description of the run".to_owned(), problem }
    }
}

/// Returns whether a character controls a terminal. Settings have several lines.
fn is_control(c: char) -> bool {
    c.is_control() && c != '\n'
}

/// Returns the facts that must be the same on all members, beside their settings.
fn facts(job: &Job) -> Vec<NamedValue> {
    let mut facts = model_facts(job);
    facts.extend(data_fact(job));
    facts
}

/// Fails if a value of this machine differs from the members'.
fn differs(what: &'static str, own: &[NamedValue], theirs: &[NamedValue]) -> Result<()> {
    let other = own.iter().find(|fact| !theirs.contains(fact));
    let Some(NamedValue { name, value }) = other else { return Ok(()) };
    let found = theirs.iter().find(|fact| fact.name == *name).map_or("missing", |fact| &fact.value);
    Err(Error::MemberDiffers { what, field: name.clone(), own: value.clone(), theirs: found.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Stop, TrainConfig};

    fn job(layers: usize, data: &str) -> Job {
        let config = TrainConfig {
            layers: Some(layers),
            workers: 1,
            data: Some(std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(data)),
            context: Some(8),
            batch: 1,
            ..TrainConfig::default()
        };
        Job::new(config, 1, Stop::manual()).unwrap()
    }

    /// Returns what a newcomer is told that may not join; `None` if it may.
    fn refused(members: &NewcomerInfo, newcomer: &Job) -> Option<String> {
        let read = NewcomerInfo::read(&members.to_bytes()).unwrap();
        read.check_version().and_then(|()| read.check_job(newcomer)).err().map(|error| error.to_string())
    }

    #[cfg(feature = "tokenizers")]
    #[test]
    fn the_path_of_a_tokenizer_may_differ_but_not_the_tokenizer() {
        use farflung_zoo::Tokenizer as _;
        use farflung_zoo::tokenizer::{FileTokenizer, TrainOptions};

        let folder = tempfile::tempdir().unwrap();
        let with = |name: &str, text: &str| {
            let options = TrainOptions { vocab: 270, ..TrainOptions::default() };
            let trained = FileTokenizer::train([text].into_iter(), &options, |_| ()).unwrap();
            let path = folder.path().join(name);
            for (_, bytes) in trained.files().into_iter().take(1) {
                std::fs::write(&path, bytes).unwrap();
            }
            let config = TrainConfig {
                tokenizer: TokenizerKind::File(path),
                workers: 1,
                context: Some(8),
                ..TrainConfig::default()
            };
            Job::new(config, 1, Stop::manual()).unwrap()
        };
        let (a, same) = (with("a.json", "slow slow links"), with("same.json", "slow slow links"));
        let members = NewcomerInfo::of(&a);
        assert!(!members.settings.contains("a.json"), "{}", members.settings);
        assert_eq!(refused(&members, &same), None);
        let other = refused(&members, &with("b.json", "other texts texts")).unwrap();
        let byte = Job::new(
            TrainConfig { workers: 1, context: Some(8), ..TrainConfig::default() },
            1,
            Stop::manual(),
        );
        let byte = refused(&members, &byte.unwrap()).unwrap();
        for refused in [other, byte] {
            assert!(refused.contains("--tokenizer") && refused.contains(a.tokenizer.name()), "{refused}");
        }
    }

    #[test]
    fn newcomers_with_another_version_model_or_data_are_refused_with_the_reason() {
        let members = NewcomerInfo::of(&job(1, "Cargo.toml"));
        assert_eq!(refused(&members, &job(1, "Cargo.toml")), None);
        let old = NewcomerInfo { version: "0.0.9".to_owned(), ..members.clone() };
        let says = |refused: Option<String>, words: [&str; 3]| {
            let refused = refused.unwrap();
            assert!(words.iter().all(|word| refused.contains(word)), "{refused}");
        };
        says(refused(&old, &job(1, "Cargo.toml")), ["version", VERSION, "0.0.9"]);
        says(refused(&members, &job(2, "Cargo.toml")), ["layers", "1", "2"]);
        says(
            refused(&members, &job(1, "README.md")),
            [
                "data",
                "tokens with hash",
                &members.facts.iter().find(|fact| fact.name == "data").unwrap().value,
            ],
        );
        assert!(NewcomerInfo::read(&members.to_bytes()[1..]).is_err());
        // Another program can send any text; it does not control the terminal.
        let status = Status { changes: vec!["\u{1b}[2Jx".to_owned()], ..Status::default() };
        let odd = NewcomerInfo { version: "1\u{7}".to_owned(), status: Some(status), ..members };
        let read = NewcomerInfo::read(&odd.to_bytes()).unwrap();
        assert_eq!((&read.version[..], &read.status.unwrap().changes[0][..]), ("1\u{FFFD}", "\u{FFFD}[2Jx"));
        assert_eq!(read.settings, odd.settings);
    }
}
