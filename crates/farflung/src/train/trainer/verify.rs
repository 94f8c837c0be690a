//! Checks every `--check-every` steps and before a checkpoint: all values are finite, and copies are equal to
//! the bit.

use std::collections::BTreeMap;
use std::fmt::Display;

use farflung_base::Rank;
use farflung_tensor::Param;
use farflung_zoo::{Cut, Stage, TensorSpec};
use serde::{Deserialize, Serialize};

use super::Trainer;
use crate::config::shared::NamedValue;
use crate::train::apart::{ApartParams, kind_of};
use crate::train::fingerprint::Hasher;
use crate::train::part::Part;
use crate::train::pieces::{FlatState, FlatValues, PieceValues, Scope, StateKind, with_values};
use crate::{Error, Result, finite};

/// Amount of values that are checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Thoroughness {
    /// Only what is cheap to check: values in the host's memory, and copies that were just made equal.
    Usual,
    /// All values, as before a checkpoint, for which values on a device are downloaded anyway.
    All,
}

/// Report of a rank about its values, sent to the others.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ChecksumMessage {
    /// Hashes of values that other ranks may hold too, by name.
    copies: Vec<NamedValue>,
    /// Message of the failure, if a value is not finite or cannot be read.
    broken: Option<String>,
}

impl Trainer {
    /// Checks that all values of all ranks are finite, and that copies of parameters are equal, and those of
    /// optimizer states if the method keeps them equal. Replicas must have the same parameters when it is
    /// called. A collective.
    ///
    /// If devices round differently, copies are compared only when they have just been made equal. Their
    /// optimizer states are not compared, since nothing makes them equal.
    ///
    /// Errors: on all ranks together, [`Error::NotFinite`] or [`Error::OnRank`]; [`Error::Diverged`].
    pub fn verify(&self, thoroughness: Thoroughness) -> Result<()> {
        let mine = self.checksum_message(thoroughness);
        let (told, failed) = match mine {
            Ok(told) => (told, None),
            Err(error) => (
                ChecksumMessage { broken: Some(error.to_string()), ..ChecksumMessage::default() },
                Some(error),
            ),
        };
        let text = serde_json::to_vec(&told).expect("texts can be written as JSON");
        let all = self.comm().all_gather_bytes(text)?;
        if let Some(error) = failed {
            return Err(error);
        }
        let read = |(rank, text): (usize, &Vec<u8>)| {
            serde_json::from_slice::<ChecksumMessage>(text).map_err(|_| Error::Message {
                message: format!("the report of rank {rank} about its values"),
                problem: "cannot be parsed",
            })
        };
        let all: Vec<ChecksumMessage> = all.iter().enumerate().map(read).collect::<Result<_>>()?;
        if let Some((rank, told)) = all.iter().enumerate().find(|(_, told)| told.broken.is_some()) {
            let message = told.broken.clone().unwrap_or_default();
            let rank = self.members.get(rank).map_or(rank, |rank| rank.index());
            return Err(Error::OnRank { rank, message, code: 1 });
        }
        self.compare_copies(&all)
    }

    /// Returns the hashes of the values that this rank holds.
    ///
    /// Errors: [`Error::NotFinite`].
    fn checksum_message(&self, thoroughness: Thoroughness) -> Result<ChecksumMessage> {
        let (placement, unlike) = (&self.executor.placement, self.resync.is_unlike());
        let compared = !unlike || self.resync.is_done_at(self.step);
        let whole = placement.depth() == 1;
        let mut copies = Vec::new();
        for (&stage, part) in &self.executor.parts {
            let on_host = part.params.host::<f32>().is_some();
            let all = on_host || thoroughness == Thoroughness::All;
            if !all && !compared {
                continue;
            }
            let number = placement.part(stage);
            let of = |what: &str| if whole { what.to_owned() } else { format!("{what} of part {number}") };
            let held = self.apart.get(&number).map_or(&[][..], |held| &held.params);
            let copy_of = |param: &Param, spec: &TensorSpec| self.copy_of(held, param, spec);
            let told = |what: &str, hashes: Hashes| {
                let named = hashes
                    .into_iter()
                    .map(|(of_which, hash)| NamedValue::new(of(&format!("{what}{of_which}")), hash));
                named.collect::<Vec<_>>()
            };
            let params = if part.weights.is_none() {
                hash(&part.stage, &copy_of, [("", (&part.params).into())])?
            } else {
                let all = part.states(self.each_step);
                let params = all.iter().filter(|state| state.kind == StateKind::Parameters);
                params.into_iter().try_for_each(|state| check_shard(part, state))?;
                Hashes::new()
            };
            // States on disk have checksums.
            let states = all && (part.disk.is_none() || thoroughness == Thoroughness::All);
            let shared = if states { shared_states(part, &copy_of, self.each_step)? } else { Vec::new() };
            if compared {
                copies.extend(told("parameters", params));
                let table = part.table();
                if !table.is_empty() && part.weights.is_none() {
                    let values = part.params.view().part(table.start, table.len())?;
                    let mut hasher = Hasher::default();
                    hasher.update(&values.to_vec::<f32>()?);
                    let (param, spec) = part.stage.tensors().next().expect("the table is its first tensor");
                    let name = format!("token table{}", self.copy_of(&[], param, spec));
                    copies.push(NamedValue::new(name, hasher.finish()));
                }
            }
            let shared = shared.into_iter().filter(|_| !unlike);
            copies.extend(shared.flat_map(|(what, hashes)| told(what, hashes)));
        }
        Ok(ChecksumMessage { copies, broken: None })
    }

    /// Returns which copy of a tensor of a part this rank has, in the words that follow what is compared; empty
    /// if all holders of the part have the same.
    fn copy_of(&self, held: &[ApartParams], param: &Param, spec: &TensorSpec) -> String {
        let of_some = kind_of(held, param).map(|kind| format!(" of {}", held[kind].name));
        let piece = self.division.divides_width() && spec.cut != Cut::Whole;
        let piece = piece.then(|| format!(" in the piece of rank {} of the tensor axis", self.tensor));
        of_some.unwrap_or_default() + &piece.unwrap_or_default()
    }

    /// Compares the reports of all ranks.
    ///
    /// Errors: [`Error::Diverged`].
    fn compare_copies(&self, all: &[ChecksumMessage]) -> Result<()> {
        let mut names: Vec<&str> = Vec::new();
        for fact in all.iter().flat_map(|told| &told.copies) {
            if !names.contains(&fact.name.as_str()) {
                names.push(&fact.name);
            }
        }
        for name in names {
            let mut held: Vec<(&str, Vec<Rank>)> = Vec::new();
            for (&rank, told) in self.members.iter().zip(all) {
                for fact in told.copies.iter().filter(|fact| fact.name == name) {
                    match held.iter_mut().find(|(hash, _)| *hash == fact.value) {
                        Some((_, ranks)) => ranks.push(rank),
                        None => held.push((&fact.value, vec![rank])),
                    }
                }
            }
            if held.len() > 1 {
                let SuspectRanks { ranks, majority } =
                    odd(held.into_iter().map(|(_, ranks)| ranks).collect());
                return Err(Error::Diverged { step: self.step, what: name.to_owned(), ranks, majority });
            }
        }
        Ok(())
    }
}

/// Ranks whose copies may be wrong.
#[derive(Debug, PartialEq, Eq)]
struct SuspectRanks {
    ranks: Vec<Rank>,
    /// Whether more than half of all ranks agree with each other; `ranks` are then the others, else all ranks.
    majority: bool,
}

/// Returns the ranks outside the majority, or all ranks if there is no majority. Each of the `groups` has equal
/// copies.
fn odd(groups: Vec<Vec<Rank>>) -> SuspectRanks {
    let all: usize = groups.iter().map(Vec::len).sum();
    let most = groups.iter().position(|ranks| 2 * ranks.len() > all);
    let others = groups.into_iter().enumerate().filter(|(group, _)| Some(*group) != most);
    let mut ranks: Vec<Rank> = others.flat_map(|(_, ranks)| ranks).collect();
    ranks.sort_unstable();
    ranks.dedup();
    SuspectRanks { ranks, majority: most.is_some() }
}

/// The hashes of flat buffers, by the copies to which they belong.
type Hashes = BTreeMap<String, String>;

/// Returns the copy to which a tensor belongs: [`Trainer::copy_of`].
type CopyOf<'a> = &'a dyn Fn(&Param, &TensorSpec) -> String;

/// Returns the hashes of flat buffers, without padding.
///
/// Errors: [`Error::NotFinite`] with the tensor's name, after the buffer's name.
fn hash<'a>(
    stage: &Stage,
    copy_of: CopyOf<'_>,
    flats: impl IntoIterator<Item = (impl Display, FlatValues<'a>)>,
) -> Result<Hashes> {
    let mut hashers: BTreeMap<String, Hasher> = BTreeMap::new();
    for (name, flat) in flats {
        for (param, spec) in stage.tensors() {
            let (hasher, name) =
                (hashers.entry(copy_of(param, spec)).or_default(), format!("{name}{}", param.name));
            for chunk in flat.chunks(param.range()) {
                with_values(flat, chunk.start, chunk.len(), |values| {
                    finite::check_from(&name, chunk.start - param.start, values)?;
                    hasher.update(values);
                    Ok::<_, Error>(())
                })??;
            }
        }
    }
    Ok(hashers.into_iter().map(|(copy, hasher)| (copy, hasher.finish())).collect())
}

/// Returns the hashes of a part's states that all of its ranks share, with what they are. States of a replica
/// are checked, too.
fn shared_states(part: &Part, copy_of: CopyOf<'_>, each_step: bool) -> Result<Vec<(&'static str, Hashes)>> {
    let all = part.states(each_step);
    let is_method =
        |state: &&FlatState<'_>| matches!(state.kind, StateKind::Method(_)) && state.scope == Scope::Run;
    let is_optimizer = |state: &&FlatState<'_>| matches!(state.kind, StateKind::Optimizer(_));
    let groups: [(_, Vec<&FlatState<'_>>); 2] = [
        ("optimizer state", all.iter().filter(is_optimizer).collect()),
        ("outer state", all.iter().filter(is_method).collect()),
    ];
    let mut hashes = Vec::new();
    for (what, states) in groups {
        let (states, shards): (Vec<_>, Vec<_>) =
            states.into_iter().partition(|state| state.values.len() == part.stage.layout().len());
        shards.into_iter().try_for_each(|shard| check_shard(part, shard))?;
        let named = states.iter().map(|state| (format!("{}/", state.kind.name()), state.values));
        let hash = hash(&part.stage, copy_of, named)?;
        if !states.is_empty() && states.iter().all(|state| state.scope == Scope::Run) {
            hashes.push((what, hash));
        }
    }
    Ok(hashes)
}

/// Checks that the values of a shard, which no other rank has, are finite.
///
/// Errors: [`Error::NotFinite`] with the tensor.
fn check_shard(part: &Part, shard: &FlatState<'_>) -> Result<()> {
    shard.pieces(&part.stage).into_iter().try_for_each(|piece| match piece.values {
        PieceValues::Flat(flat, start) => flat.chunks(start..start + piece.len()).try_for_each(|chunk| {
            let first = chunk.start - start;
            with_values(flat, chunk.start, chunk.len(), |values| {
                finite::check_from(&piece.name, first, values)
            })?
        }),
        _ => Ok(()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_odd_ones_out_are_those_outside_a_majority() {
        let ranks = |numbers: &[u32]| numbers.iter().map(|&n| Rank(n)).collect::<Vec<_>>();
        let found = |groups: &[&[u32]]| odd(groups.iter().map(|group| ranks(group)).collect());
        let of = |numbers: &[u32], majority| SuspectRanks { ranks: ranks(numbers), majority };
        assert_eq!(found(&[&[0, 1, 3], &[2]]), of(&[2], true));
        assert_eq!(found(&[&[2], &[0, 1, 3]]), of(&[2], true));
        assert_eq!(found(&[&[0], &[1]]), of(&[0, 1], false));
        assert_eq!(found(&[&[0, 2], &[1, 3]]), of(&[0, 1, 2, 3], false));
        assert_eq!(found(&[&[0, 1, 2], &[3], &[4]]), of(&[3, 4], true));
    }
}
