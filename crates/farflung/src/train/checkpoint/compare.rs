//! Compares a checkpoint with the run that continues from it. Differences in the model, the seed, the data, the
//! objective, whether documents are kept apart, the sequences of a step, or the method of synchronisation are
//! errors. A different codec is one, too, unless the number of ranks has changed. Other differences in settings
//! are reported.

use farflung_comm::Communicator;

use super::super::job::Job;
use super::super::meet::{FIELD, model_facts, same_facts};
use super::CheckpointRecord;
use crate::config::dashed;
use crate::config::shared::{NamedValue, is_planned};
use crate::{Error, Result, TrainArgs};

/// The settings of a model's shape.
const SHAPE: [&str; 7] = ["model", "layers", "heads", "dim", "context", "vocab", "attention"];

/// Checks that the run can continue from the checkpoint. Each step must have the same sequences, but the model
/// and the batch may be divided differently among ranks.
pub(super) fn check(record: &CheckpointRecord, job: &Job) -> Result<()> {
    same_model(&record.model, &model_facts(job))?;
    let words = |sequences| format!("such that a step takes {sequences} sequences");
    let (world, level) = (job.world, job.plan.outermost());
    let field = if record.world == world { "microbatches" } else { "workers" };
    // A member's checkpoint of an earlier version has the member's share, which says nothing about the setting.
    if record.plan_start.is_none() || record.microbatches.is_some() {
        same(field, words(job.plan.sequences()), &words(record.sequences))?;
    }
    // Paths may begin with one model: each has it then.
    if !record.paths.is_empty() {
        let told = |levels: &[String]| if levels.is_empty() { "none".to_owned() } else { levels.join(", ") };
        same("paths", told(&job.plan.recorded_paths()), &told(&record.paths))?;
        same("shards", job.text_parts.routing.clone(), &record.routing)?;
    }
    same("seed", job.config.seed.to_string(), &record.seed.to_string())?;
    same("sync", level.method.name.to_owned(), &record.sync)?;
    if record.world == world {
        same("codec", level.codec_name().to_owned(), &record.codec)?;
    }
    same("objective", job.config.objective.to_string(), record.objective.name())?;
    same("document-mask", job.config.document_mask.to_string(), &record.document_mask.to_string())?;
    // With own data, a rank that gets another's state keeps its own text.
    if job.has_data(&record.data_hash) {
        return Ok(());
    }
    same("data", format!("with hash {}", job.data_identity), &format!("with hash {}", record.data_hash))
}

/// Compares a value with that of the checkpoint.
fn same(field: &'static str, found: String, expected: &str) -> Result<()> {
    if found == expected {
        return Ok(());
    }
    let expected = format!("{expected}, as when the checkpoint was written");
    Err(Error::Setting { field, value: found, expected })
}

/// Compares the facts of the model with those of the checkpoint.
fn same_model(was: &[NamedValue], now: &[NamedValue]) -> Result<()> {
    for fact in now.iter().filter(|fact| !fact.name.starts_with(FIELD)) {
        let field = TrainArgs::KEYS.iter().find(|key| dashed(key) == fact.name).unwrap_or(&"model");
        let before = was.iter().find(|other| other.name == fact.name);
        let before = before.map_or("missing", |other| other.value.as_str());
        if *field == "tokenizer" && fact.value != before {
            let expected =
                format!("{before}, as when the checkpoint was written: `--tokenizer RUN` takes the run's");
            return Err(Error::Setting { field, value: fact.value.clone(), expected });
        }
        same(field, fact.value.clone(), before)?;
    }
    let alike = now.iter().all(|fact| was.contains(fact)) && was.iter().all(|fact| now.contains(fact));
    if alike { Ok(()) } else { same("model", unlike(now, was), &unlike(was, now)) }
}

/// Returns the fields of config.json in which a model differs from another. A plain GPT-2 has none.
fn unlike(model: &[NamedValue], other: &[NamedValue]) -> String {
    let fields = || model.iter().filter(|fact| fact.name.starts_with(FIELD));
    if fields().next().is_none() {
        return "a GPT-2".to_owned();
    }
    let told = fields()
        .filter(|fact| !other.contains(fact))
        .map(|NamedValue { name, value }| format!("`{}` {value}", name.trim_start_matches(FIELD)));
    format!("one with {}", told.collect::<Vec<_>>().join(", "))
}

/// Checks that all ranks continue from the same step. A collective.
///
/// Errors: [`Error::RanksDiffer`] on every rank.
pub(super) fn same_step(record: &CheckpointRecord, comm: &Communicator) -> Result<()> {
    let facts = [
        NamedValue::new("step", record.step),
        NamedValue::new("outer step", record.outer_step),
        NamedValue::new("rounds of averaging", record.rounds),
    ];
    same_facts("checkpoint's", &facts, comm, |_| false)
}

/// Returns the settings that differ from those of the checkpoint: one line for those that change the training
/// and one for the others. Settings that may differ between ranks are left out, and those of the model's shape,
/// which [`check`] compares as they result from the settings.
pub(super) fn differing_settings(settings: Option<&str>, job: &Job) -> Vec<String> {
    let Some(table) = settings.and_then(|text| text.parse::<toml::Table>().ok()) else {
        return Vec::new();
    };
    let was = |name: &str| table.get(name).map_or_else(|| "none".to_owned(), ToString::to_string);
    let (mut training, mut others) = (Vec::new(), Vec::new());
    for NamedValue { name, value } in job.settings().shared() {
        let before = was(&name);
        if SHAPE.contains(&&*name) {
            continue;
        }
        // A plan file replaced the settings that it decides.
        if before == value || table.contains_key("plan") && is_planned(&name) {
            continue;
        }
        let line = format!("`{name}` is {value}, was {before}");
        let kind = if job.given.is_training(&name) { &mut training } else { &mut others };
        kind.push(line);
    }
    let line = |intro: &str, differing: Vec<String>| {
        (!differing.is_empty()).then(|| format!("{intro}: {}", differing.join("; ")))
    };
    [
        line("warning: the training continues with settings that differ from the checkpoint's", training),
        line("settings that differ from the checkpoint's", others),
    ]
    .into_iter()
    .flatten()
    .collect()
}
