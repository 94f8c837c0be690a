//! Compares version, settings, model, data, machines and plan between the processes of a job when they meet. If
//! something differs, all of them end with an error that names it, before anything is trained.

use std::fmt;

use farflung_base::Rank;
use farflung_comm::Communicator;
use farflung_parallel::Plan;

use super::job::Job;
use crate::config::choice::Resume;
use crate::config::shared::{NamedValue, is_planned};
use crate::model_shape::model_fields;
use crate::{Error, Result, TrainConfig};

/// Version of the program. It is compared, since ranks of another version may compute other values.
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// A value, and the ranks that have it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankValue {
    /// The value.
    pub value: String,
    /// The ranks with this value.
    pub ranks: Vec<Rank>,
}

impl fmt::Display for RankValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} on {}", self.value, Ranks(&self.ranks))
    }
}

/// Formats ranks for messages; at most eight are listed.
#[derive(Debug)]
pub(crate) struct Ranks<'a>(pub(crate) &'a [Rank]);

impl fmt::Display for Ranks<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 8;
        let numbers: Vec<_> = self.0.iter().take(SHOWN).map(|rank| rank.0.to_string()).collect();
        f.write_str(if self.0.len() == 1 { "rank " } else { "ranks " })?;
        f.write_str(&numbers.join(", "))?;
        match self.0.len().saturating_sub(SHOWN) {
            0 => Ok(()),
            more => write!(f, " and {more} more"),
        }
    }
}

/// Compares facts that must be the same on all ranks: first their hashes, and the facts only if these differ. A
/// collective.
///
/// `what` is the kind of the facts in error messages: "the WHAT `NAME` is ...". A fact that only some ranks
/// list counts as different, unless `optional` returns true for its name.
///
/// Errors: [`Error::RanksDiffer`] on every rank, with the first name that differs, all values and the ranks
/// that have them.
pub(super) fn same_facts(
    what: &'static str,
    facts: &[NamedValue],
    comm: &Communicator,
    optional: fn(&str) -> bool,
) -> Result<()> {
    let text = serde_json::to_vec(facts).expect("texts can be written as JSON");
    let hashes = comm.all_gather_bytes(blake3::hash(&text).as_bytes().to_vec())?;
    if hashes.iter().all(|hash| *hash == hashes[0]) {
        return Ok(());
    }
    let told = comm.all_gather_bytes(text)?;
    let read = |(rank, text): (Rank, &Vec<u8>)| {
        serde_json::from_slice::<Vec<NamedValue>>(text).map_err(|_| another_version(comm.rank(), rank))
    };
    let told: Vec<Vec<NamedValue>> = (0..).map(Rank).zip(&told).map(read).collect::<Result<_>>()?;
    let mut differing = differences(&told, optional).into_iter();
    match differing.next() {
        None => Ok(()),
        Some((field, values)) => {
            let also = differing.map(|(field, _)| field).collect();
            Err(Error::RanksDiffer { what, field, values, also })
        }
    }
}

/// Returns the error for facts that this version cannot parse.
fn another_version(mine: Rank, theirs: Rank) -> Error {
    let of = |rank, value: &str| RankValue { value: value.to_owned(), ranks: vec![rank] };
    let values = vec![of(mine, VERSION), of(theirs, "another version, which cannot be read")];
    Error::RanksDiffer { what: "program's", field: "version".to_owned(), values, also: Vec::new() }
}

/// Returns the names whose values differ, in the order of the ranks' lists, with the ranks by value.
fn differences(told: &[Vec<NamedValue>], optional: fn(&str) -> bool) -> Vec<(String, Vec<RankValue>)> {
    let mut names: Vec<&str> = Vec::new();
    for fact in told.iter().flatten() {
        if !names.contains(&fact.name.as_str()) {
            names.push(&fact.name);
        }
    }
    let mut found = Vec::new();
    for name in names {
        let mut values: Vec<RankValue> = Vec::new();
        for (rank, facts) in (0..).map(Rank).zip(told) {
            let value = match facts.iter().find(|fact| fact.name == name) {
                Some(fact) => fact.value.clone(),
                None if optional(name) => continue,
                None => "missing".to_owned(),
            };
            match values.iter_mut().find(|known| known.value == value) {
                Some(known) => known.ranks.push(rank),
                None => values.push(RankValue { value, ranks: vec![rank] }),
            }
        }
        if values.len() > 1 {
            found.push((name.to_owned(), values));
        }
    }
    found
}

/// Describes a file's content by its hash.
fn a_file(content: &[u8]) -> String {
    format!("a file with hash {}", &blake3::hash(content).to_hex()[..16])
}

/// Compares the version of the program and the settings that all ranks share. A collective.
///
/// Errors: [`Error::RanksDiffer`] on every rank.
pub(super) fn same_settings(config: &TrainConfig, comm: &Communicator) -> Result<()> {
    let always = |_: &str| false;
    same_facts("program's", &[NamedValue::new("version", VERSION)], comm, always)?;
    let mut facts = config.shared();
    let resume = match config.resume {
        Resume::Auto => "auto",
        Resume::No => "no",
        Resume::Path(_) => "a path",
    };
    facts.push(NamedValue::new("resume", resume));
    if config.plan.is_none() {
        let read = config.schedule_file.as_ref().map(std::fs::read);
        facts.push(NamedValue::new(
            "schedule-file",
            match read {
                None => "none".to_owned(),
                Some(Ok(text)) => a_file(&text),
                // This rank tells the others about the error next.
                Some(Err(_)) => "not readable".to_owned(),
            },
        ));
    }
    if config.plan.is_none() && config.codec_follows_state() {
        facts.push(NamedValue::new("state", config.state));
    }
    // A plan file replaces the settings that it decides; plans are compared next. With the same codec on all
    // ranks, each may have its own place for the state.
    same_facts("setting", &facts, comm, |name| is_planned(name) || name == "state")
}

/// What stands before a field of config.json in the name of a fact.
pub(super) const FIELD: &str = "model.";

/// Returns the facts that define a model's function, with the names of settings.
pub(super) fn model_facts(job: &Job) -> Vec<NamedValue> {
    let model = &job.model;
    let heads = model.blocks.first().map_or(0, |run| run.block.attention.heads.query);
    let mut facts = vec![
        NamedValue::new("layers", model.layers()),
        NamedValue::new("heads", heads),
        NamedValue::new("dim", model.dim),
        NamedValue::new("context", model.context),
        NamedValue::new(
            "tokenizer",
            format!("{} with a vocabulary of {}", job.tokenizer.name(), model.vocab),
        ),
    ];
    // A GPT-2 is defined by these sizes, and another model by the fields of its config.json.
    if let Some(fields) = model_fields(model) {
        facts.extend(fields.iter().map(|(field, value)| NamedValue::new(format!("{FIELD}{field}"), value)));
    }
    facts
}

/// Returns what must be the same of the data; `None` if each process has its own.
pub(super) fn data_fact(job: &Job) -> Option<NamedValue> {
    let (training, held_out) = (job.training.len(), job.held_out.len());
    let total = training + held_out;
    let text = format!("{total} tokens with hash {}, {held_out} of them held out", job.data_identity);
    (!job.config.own_data).then(|| NamedValue::new("data", text))
}

/// Compares what the ranks derived from their settings and files: the model's shape, the initial weights, the
/// data, machines and links, the plan. A collective.
///
/// Errors: [`Error::RanksDiffer`] on every rank.
pub(super) fn same_job(job: &Job, comm: &Communicator) -> Result<()> {
    let mut facts = model_facts(job);
    facts.extend(data_fact(job));
    if let Some(initial) = &job.initial {
        let hash = &initial.hash.to_hex()[..16];
        facts.push(NamedValue::new("init-from", format!("weights with hash {hash}")));
    }
    if let Some(cluster) = &job.cluster {
        facts.push(NamedValue::new("topology", a_file(cluster.to_string().as_bytes())));
    }
    same_facts("setting", &facts, comm, |_| false)?;
    same_plan(&job.plan, comm)
}

/// Compares the ranks' plans. A collective.
///
/// Errors: [`Error::RanksDiffer`] on every rank, with the first field that differs, all values and the ranks
/// that have them.
pub fn same_plan(plan: &Plan, comm: &Communicator) -> Result<()> {
    let facts: Vec<NamedValue> =
        plan.fields().into_iter().map(|(name, value)| NamedValue { name, value }).collect();
    same_facts("`plan` field", &facts, comm, |_| false)
}

#[cfg(test)]
mod tests {
    use farflung_comm::memory;

    use super::*;

    fn facts(values: [(&str, u32); 2]) -> Vec<NamedValue> {
        values.into_iter().map(|(name, value)| NamedValue::new(name, value)).collect()
    }

    /// Returns the result of each of three ranks if the second one has other facts.
    fn meet(second: &[NamedValue]) -> Vec<Result<()>> {
        let first = facts([("a", 1), ("b", 2)]);
        std::thread::scope(|scope| {
            let work = |endpoint| {
                let comm = Communicator::new(endpoint);
                let mine = if comm.rank().0 == 1 { second } else { &first };
                same_facts("setting", mine, &comm, |name| name == "b")
            };
            let ranks: Vec<_> =
                memory::cluster(3).into_iter().map(|endpoint| scope.spawn(move || work(endpoint))).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    #[test]
    fn every_rank_hears_of_a_difference_with_all_values_and_ranks() {
        for said in meet(&facts([("a", 3), ("b", 4)])) {
            let error = said.unwrap_err();
            let message = "the setting `a` is 1 on ranks 0, 2 and 3 on rank 1, expected the same on all ranks \
                           (`b` differs too)";
            assert_eq!((error.to_string().as_str(), error.exit_code()), (message, 2));
        }
        assert!(meet(&facts([("a", 1), ("b", 2)])).iter().all(Result::is_ok));
    }

    #[test]
    fn what_only_some_list_is_missing_unless_a_plan_may_decide_it() {
        assert!(meet(&facts([("a", 1), ("b", 2)])[..1]).iter().all(Result::is_ok));
        for said in meet(&facts([("a", 1), ("b", 2)])[1..]) {
            let message = said.unwrap_err().to_string();
            assert!(message.contains("`a` is 1 on ranks 0, 2 and missing on rank 1"), "{message}");
        }
    }

    #[test]
    fn many_ranks_are_counted() {
        let ranks: Vec<_> = (0..20).map(Rank).collect();
        assert_eq!(Ranks(&ranks).to_string(), "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more");
    }
}
