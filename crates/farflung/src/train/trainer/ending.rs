//! What a run tells of its model when it is over: its hash, and a text that it continues.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use farflung_base::{Nanos, Rank, StageId};
use farflung_comm::Communicator;

use super::Trainer;
use crate::train::decoder::Decoder;
use crate::train::executor::Executor;
use crate::train::fingerprint::digest;
use crate::train::job::Job;
use crate::train::pieces::with_values;
use crate::train::report::{SampleText, sample};
use crate::{Error, Result};

/// The hash of the model's parameters, and a sample if the settings ask for one.
#[derive(Debug)]
pub(in crate::train) struct Ending {
    pub(in crate::train) hash: String,
    /// The hashes of the models of all paths, if replicas train paths.
    pub(in crate::train) paths: Vec<String>,
    pub(in crate::train) sample: Option<SampleText>,
}

/// Tag of the text that another rank sends to rank 0. Far from the tags of a step's messages.
const SAMPLE: u32 = u32::MAX - (3 << 16);

fn received(bytes: &[u8]) -> Result<Option<SampleText>> {
    serde_json::from_slice(bytes).map_err(|_| Error::Message {
        message: "the sample of the rank of the first stage".to_owned(),
        problem: "cannot be parsed",
    })
}

impl Trainer {
    /// Returns what the run tells of its model, on rank 0 of a pipeline; without stages, on each rank with
    /// `tells`. The stages of a replica generate the sample together, and the ranks that divide its layers the
    /// same one at the same time. A collective: all ranks must call it.
    pub(in crate::train) fn ending(&self, job: &Job, tells: bool) -> Result<Option<Ending>> {
        let (hash, paths) = self.digests()?;
        if !self.is_divided() && job.plan.shares() == 1 {
            let sample = tells.then(|| self.sample(job, self.comm())).transpose()?;
            return Ok(hash.zip(sample).map(|(hash, sample)| Ending { hash, paths: Vec::new(), sample }));
        }
        // The model is whole and saved: a loss during the sample does not take away the report.
        let lost = |error: Error| {
            if !error.is_peer_lost() && !matches!(error, Error::Comm(_)) {
                return Err(error);
            }
            tracing::warn!(%error, "no sample");
            Ok(None)
        };
        let replicas = job.plan.holders_of_model(job.path_of_prompt()?);
        let apart = job.plan.shares() > 1 || self.division.divides();
        let first = self.executor.pipeline[0];
        let pipeline = apart.then(|| self.comm().split(first.0, self.comm().rank().0)).transpose()?;
        let comm = pipeline.as_ref().unwrap_or(self.comm());
        // The weights of each token would be gathered again.
        let takes_part = replicas.contains(&self.replica) && !job.plan.divides_weights();
        let sample = if takes_part { self.sample(job, comm).or_else(lost)? } else { None };
        let teller = job.plan.pipeline_of(replicas.start)[0];
        let sample = self.sent_to_first(sample, teller).or_else(lost)?;
        let tells = tells && self.comm().rank() == Rank(0);
        Ok(hash.filter(|_| tells).map(|hash| Ending { hash, paths, sample }))
    }

    /// Returns the hash of the model's parameters, where [`Trainer::digest`] does, and those of the models of
    /// all paths, if there are several: the hash is then that of their hashes. A collective.
    fn digests(&self) -> Result<(Option<String>, Vec<String>)> {
        let own = self.own_digest()?;
        if self.givers.of_paths.is_empty() {
            return Ok((own, Vec::new()));
        }
        let told = self.comm().all_gather_bytes(own.clone().unwrap_or_default().into_bytes())?;
        let of_path = |rank: &Rank| {
            String::from_utf8(told[rank.index()].clone()).map_err(|_| Error::Message {
                message: format!("the hash of the path of {rank}"),
                problem: "is not text",
            })
        };
        let paths: Vec<String> = self.givers.of_paths.iter().map(of_path).collect::<Result<_>>()?;
        let all = blake3::hash(paths.join("\n").as_bytes()).to_hex().to_string();
        Ok((own.map(|_| all), paths))
    }

    /// Returns the hash of all of the model's parameters, on rank 0 and on each rank that holds a whole model;
    /// `None` elsewhere. It is computed from the hashes of the tensors, sorted by name, so that it is the same
    /// under any plan; where replicas train paths, from those of the models of all paths. A collective: all
    /// ranks must call it.
    pub(in crate::train) fn digest(&self) -> Result<Option<String>> {
        Ok(self.digests()?.0)
    }

    /// Sends the sample from the rank that has it to rank 0.
    fn sent_to_first(&self, sample: Option<SampleText>, from: Rank) -> Result<Option<SampleText>> {
        let (comm, me) = (self.comm(), self.comm().rank());
        if from == Rank(0) {
            return Ok(sample);
        }
        if me == from {
            let bytes = serde_json::to_vec(&sample).expect("texts can be written as JSON");
            comm.start_send(Rank(0), SAMPLE, bytes).wait()?;
        }
        if me == Rank(0) {
            received(&comm.clone().with_deadline(Nanos(u64::MAX)).recv(from, SAMPLE)?)
        } else {
            Ok(None)
        }
    }

    /// Generates the sample, with the ranks of this rank's pipeline, the first ones of `comm`. The text is
    /// returned on the first one.
    fn sample(&self, job: &Job, comm: &Communicator) -> Result<Option<SampleText>> {
        let Executor { parts, placement, .. } = &self.executor;
        let stages = parts.iter().map(|(&id, part)| (id, &part.stage, &part.params));
        // A run's virtual time is that of its steps.
        let mut decoder = Decoder::new((comm, placement, self.position), stages, &|_, _| Nanos::ZERO);
        let (first, me) = (placement.rank(StageId(0)), self.position);
        if !decoder.leads() {
            decoder.follow()?;
            // The text is told by rank 0.
            let told = me == Rank(0) && first != me;
            return if told {
                received(&comm.clone().with_deadline(Nanos(u64::MAX)).recv(first, SAMPLE)?)
            } else {
                Ok(None)
            };
        }
        let text = sample(job, &mut decoder)?;
        if first != Rank(0) {
            let bytes = serde_json::to_vec(&text).expect("texts can be written as JSON");
            comm.start_send(Rank(0), SAMPLE, bytes).wait()?;
        }
        Ok(text)
    }

    /// Returns the hash of the model that this replica trains, on the rank that has it whole.
    fn own_digest(&self) -> Result<Option<String>> {
        let Executor { comm, parts, .. } = &self.executor;
        let alone = !self.is_divided();
        let first = alone || comm.rank() == self.givers.to;
        let mut mine = String::new();
        if first || self.givers.replicas.contains(&self.replica) {
            for part in parts.values() {
                for (p, _) in part.stage.tensors().filter(|(_, spec)| !self.is_divided_tensor(spec)) {
                    let hash = with_values(&part.params, p.start, p.shape.len(), digest)?;
                    let _ = writeln!(mine, "{} {}", p.name, hash.to_hex());
                }
            }
        }
        let told = if alone { vec![mine.into_bytes()] } else { comm.all_gather_bytes(mine.into_bytes())? };
        // The token table is held by two parts and counts once: the hash of the lowest rank is used.
        let mut tensors = BTreeMap::new();
        let counts = |rank: Rank| alone || rank == self.givers.to || self.givers.others.contains(&rank);
        let told = (0..).map(Rank).zip(&told).filter(|(rank, _)| counts(*rank));
        for lines in told.map(|(_, bytes)| String::from_utf8_lossy(bytes)) {
            for (name, hash) in lines.lines().filter_map(|line| line.split_once(' ')) {
                tensors.entry(name.to_owned()).or_insert_with(|| hash.to_owned());
            }
        }
        tensors.extend(self.divided_digests()?.into_iter().map(|(name, hash)| (name, hash.to_string())));
        let lines: String = tensors
            .into_iter()
            .flat_map(|(name, hash)| [name, " ".to_owned(), hash, "\n".to_owned()])
            .collect();
        Ok(first.then(|| blake3::hash(lines.as_bytes()).to_hex().to_string()))
    }
}
