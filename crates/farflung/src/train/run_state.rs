//! The state of a rank as values: what one member sends to another, what a newcomer replays, and what is kept
//! to return to an earlier step. Tensors have the names of a checkpoint: parameters have their own, and each
//! other kind of state comes before them (`chain.m/wte.weight`). Any rank of any plan of the run can take the
//! tensors of its parts.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use farflung_parallel::plan::Needed;
use farflung_tensor::{Param, ParamLayout};
use serde::{Deserialize, Serialize};

use super::fault::Fault;
use super::pieces::{FlatValues, StateKind, tensor_name, with_values};
use crate::floats::floats;
use crate::{Error, Result};

/// Counters of a run at the step to which some values belong.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct RunCounters {
    /// Number of steps done.
    pub(super) step: u64,
    /// Number of averages that the method of synchronisation has committed.
    pub(super) outer_steps: u64,
    /// Number of rounds of averages.
    pub(super) rounds: u64,
    /// Number of microbatches of all replicas so far; 0 where each member has the whole model, and members
    /// tell each other this number with their plan.
    pub(super) microbatches: u64,
    /// Those of the optimizer; zero in a state that replicas with different optimizers have in common.
    pub(super) optimizer: OptimizerCounters,
    /// The kinds of state that each tensor has beside its parameters.
    pub(super) kinds: Vec<String>,
}

/// Counters of a replica's optimizer.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct OptimizerCounters {
    pub(super) updates: u64,
    /// The saved loss scale.
    pub(super) scale: Vec<f32>,
}

/// Tensors of a rank's state, and the counters to which they belong.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct RunState {
    pub(super) counted: RunCounters,
    /// The layers of each part of the rank whose state it is, in the order of the parts.
    pub(super) layers: Vec<Range<usize>>,
    /// In the record of a step on parts of the model: sum of the squares of all gradients.
    pub(super) squares: Option<f64>,
    pub(super) tensors: BTreeMap<String, Vec<f32>>,
}

/// Most bytes of all names together, for each byte of the encoded state.
const MOST_NAMES: usize = 16;

/// What comes before the values.
#[derive(Serialize, Deserialize)]
struct Head {
    counted: RunCounters,
    layers: Vec<(usize, usize)>,
    squares: Option<f64>,
    /// The kinds of state that occur.
    kinds: Vec<String>,
    /// The tensors, in the order of the values.
    tensors: Vec<HeadTensor>,
}

/// The values of one tensor.
#[derive(Serialize, Deserialize)]
struct HeadTensor {
    name: String,
    /// Number of elements of each kind.
    len: u64,
    /// Indices of the kinds of state whose values follow, in their order.
    kinds: Vec<u32>,
}

impl RunCounters {
    /// Returns what a rank needs that holds these tensors, given with their numbers of elements.
    pub(super) fn needed(&self, tensors: &BTreeMap<String, usize>) -> Vec<Needed> {
        let kinds = || std::iter::once("").chain(self.kinds.iter().map(String::as_str));
        let of = |(name, &len): (&String, &usize)| {
            let bytes = (len * size_of::<f32>()) as u64;
            let needed = |kind| Needed { name: tensor_name(kind, name), bytes };
            kinds().map(needed).collect::<Vec<_>>()
        };
        tensors.iter().flat_map(of).collect()
    }

    /// Returns the counters that replicas with different optimizers have in common.
    fn without_optimizer(self) -> Self {
        let kinds = self.kinds.into_iter().filter(|kind| !StateKind::is_optimizer(kind)).collect();
        Self { optimizer: OptimizerCounters::default(), kinds, ..self }
    }
}

impl RunState {
    /// Returns the names of its tensors.
    pub(super) fn names(&self) -> BTreeSet<String> {
        self.tensors.keys().cloned().collect()
    }

    /// Returns the number of steps after which it was taken.
    pub(super) const fn step(&self) -> u64 {
        self.counted.step
    }

    /// Returns the values of a tensor.
    pub(super) fn get(&self, name: &str) -> Option<&[f32]> {
        self.tensors.get(name).map(Vec::as_slice)
    }

    /// Adds the tensors of a flat buffer of this kind.
    ///
    /// Errors: those of the device.
    pub(super) fn add<'a>(
        &mut self,
        layout: &ParamLayout,
        kind: &StateKind,
        flat: impl Into<FlatValues<'a>>,
    ) -> Result<()> {
        let flat = flat.into();
        for param in layout.params() {
            let values = with_values(flat, param.start, param.shape.len(), <[f32]>::to_vec)?;
            self.tensors.insert(kind.of(&param.name), values);
        }
        Ok(())
    }

    /// Returns what replicas with different optimizers have in common.
    pub(super) fn without_optimizer(self) -> Self {
        let tensors = self.tensors.into_iter().filter(|(name, _)| !StateKind::is_optimizer(name)).collect();
        Self { counted: self.counted.without_optimizer(), tensors, ..self }
    }

    /// Merges states of the same step; `None` if there are none. If several have the same tensor, the first one
    /// counts.
    pub(super) fn merge(all: impl IntoIterator<Item = Self>) -> Option<Self> {
        all.into_iter().reduce(|mut all, more| {
            for (name, values) in more.tensors {
                all.tensors.entry(name).or_insert(values);
            }
            all.layers.extend(more.layers);
            all
        })
    }

    /// Flips the bit that a test requests, in the last tensor.
    pub(super) fn inject_fault(&mut self, fault: Fault) {
        fault.flip_bit_in_last(&mut self.tensors);
    }

    /// Encodes as bytes: the length of the head (`u64`, little endian), the head (counters, layers, names and
    /// lengths), then all values as little-endian `f32`.
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let kinds: BTreeSet<&str> = self.tensors.keys().map(|name| split(name).0).collect();
        let mut by_tensor: BTreeMap<(&str, usize), Vec<u32>> = BTreeMap::new();
        for (name, values) in &self.tensors {
            let (kind, tensor) = split(name);
            let number = kinds.range(..kind).count() as u32;
            by_tensor.entry((tensor, values.len())).or_default().push(number);
        }
        let tensor = |((name, len), kinds): ((&str, usize), Vec<u32>)| HeadTensor {
            name: name.to_owned(),
            len: len as u64,
            kinds,
        };
        let head = Head {
            counted: self.counted.clone(),
            layers: self.layers.iter().map(|range| (range.start, range.end)).collect(),
            squares: self.squares,
            kinds: kinds.into_iter().map(str::to_owned).collect(),
            tensors: by_tensor.into_iter().map(tensor).collect(),
        };
        let encoded = postcard::to_stdvec(&head).expect("numbers and names are plain data");
        let mut bytes = (encoded.len() as u64).to_le_bytes().to_vec();
        bytes.extend(encoded);
        for tensor in &head.tensors {
            for kind in &tensor.kinds {
                let name = tensor_name(&head.kinds[*kind as usize], &tensor.name);
                bytes.extend(self.tensors[&name].iter().flat_map(|value| value.to_le_bytes()));
            }
        }
        bytes
    }

    /// Decodes the output of [`RunState::to_bytes`]. Returns `None` if the bytes are not valid. Lengths in
    /// untrusted bytes are checked before anything is allocated.
    pub(super) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (len, rest) = bytes.split_first_chunk::<8>()?;
        let (head, mut rest) = rest.split_at_checked(usize::try_from(u64::from_le_bytes(*len)).ok()?)?;
        let head: Head = postcard::from_bytes(head).ok()?;
        let (mut tensors, mut names) = (BTreeMap::new(), 0_usize);
        if head.kinds.iter().any(|kind| kind.contains('/')) {
            return None;
        }
        for HeadTensor { name, len, kinds } in &head.tensors {
            let count = usize::try_from(*len).ok()?;
            if name.contains('/') {
                return None;
            }
            for &kind in kinds {
                let (values, behind) = rest.split_at_checked(count.checked_mul(size_of::<f32>())?)?;
                rest = behind;
                let name = tensor_name(head.kinds.get(kind as usize)?, name);
                // A long name that the head has once would otherwise be made once for each tensor.
                names = names.checked_add(name.len()).filter(|&names| names <= MOST_NAMES * bytes.len())?;
                if tensors.insert(name, floats(values, count)?).is_some() {
                    return None;
                }
            }
        }
        let layers = head.layers.into_iter().map(|(start, end)| start..end).collect();
        rest.is_empty().then_some(Self { counted: head.counted, layers, squares: head.squares, tensors })
    }
}

/// Splits a name into the kind of state and the tensor's name.
fn split(name: &str) -> (&str, &str) {
    name.split_once('/').unwrap_or(("", name))
}

/// Returns the values of a tensor by its name.
pub(super) type Get<'g, 'a> = &'g dyn Fn(&str) -> Option<&'a [f32]>;

fn values_of<'a>(param: &Param, kind: &StateKind, get: Get<'_, 'a>) -> Result<&'a [f32]> {
    let name = kind.of(&param.name);
    let values = get(&name).filter(|values| values.len() == param.shape.len());
    values.ok_or_else(|| Error::Message {
        message: format!("{name} of the run's state"),
        problem: "is missing or has the wrong length",
    })
}

/// Checks that all tensors of a kind are there.
///
/// Errors: [`Error::Message`] if a tensor is missing or has another length.
pub(super) fn check_flat(layout: &ParamLayout, kind: &StateKind, get: Get<'_, '_>) -> Result<()> {
    layout.params().iter().try_for_each(|param| values_of(param, kind, get).map(drop))
}

/// Returns a flat buffer of a kind.
///
/// Errors: as [`check_flat`].
pub(super) fn flat_of(layout: &ParamLayout, kind: &StateKind, get: Get<'_, '_>) -> Result<Vec<f32>> {
    let mut flat = vec![0.0; layout.len()];
    for param in layout.params() {
        flat[param.range()].copy_from_slice(values_of(param, kind, get)?);
    }
    Ok(flat)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state() -> RunState {
        let counted = RunCounters {
            step: 7,
            outer_steps: 2,
            rounds: 3,
            microbatches: 28,
            optimizer: OptimizerCounters { updates: 7, scale: vec![1.0] },
            kinds: vec!["chain.m".to_owned(), "outer.anchor".to_owned()],
        };
        let names = ["chain.m/a", "a", "outer.anchor/a"].map(str::to_owned);
        let tensors = names.into_iter().zip([vec![1.0, -2.0], vec![3.0, 0.5], vec![4.0, f32::MIN]]).collect();
        RunState { counted, layers: vec![0..2, 4..6], squares: Some(2.5), tensors }
    }

    #[test]
    fn states_come_back_and_other_bytes_are_none() {
        let state = state();
        let bytes = state.to_bytes();
        assert_eq!(RunState::from_bytes(&bytes), Some(state));
        for end in 0..bytes.len() {
            assert_eq!(RunState::from_bytes(&bytes[..end]), None);
        }
        assert_eq!(RunState::from_bytes(&[&bytes[..], &[0]].concat()), None);
        // The largest possible length of the head.
        assert_eq!(RunState::from_bytes(&[0xFF; 40]), None);
    }

    #[test]
    fn a_tensor_that_comes_twice_and_a_kind_that_is_not_listed_are_refused() {
        let read = |kinds: &[&str], of: &[(&str, &[u32])]| {
            let tensor = |&(name, kinds): &(&str, &[u32])| {
                let (name, kinds) = (name.to_owned(), kinds.to_vec());
                HeadTensor { name, len: 1, kinds }
            };
            let head = Head {
                counted: RunCounters::default(),
                layers: Vec::new(),
                squares: None,
                kinds: kinds.iter().map(|&kind| kind.to_owned()).collect(),
                tensors: of.iter().map(tensor).collect(),
            };
            let head = postcard::to_stdvec(&head).unwrap();
            let values = of.iter().map(|(_, kinds)| kinds.len()).sum::<usize>() * 4;
            RunState::from_bytes(&[&(head.len() as u64).to_le_bytes()[..], &head, &vec![0; values]].concat())
        };
        let both = read(&["", "chain.m"], &[("a", &[0, 1]), ("b", &[1])]).unwrap();
        assert_eq!(both.names(), ["a", "chain.m/a", "chain.m/b"].map(str::to_owned).into());
        for (kinds, of) in [
            (&[""][..], &[("a", &[0][..]), ("a", &[0])][..]),
            (&[""], &[("a", &[0, 0])]),
            (&["", ""], &[("a", &[0, 1])]),
            (&[""], &[("a", &[1])]),
            (&["b/c"], &[("a", &[0])]),
            (&[""], &[("b/a", &[0])]),
        ] {
            assert_eq!(read(kinds, of), None, "{kinds:?} {of:?}");
        }
    }

    #[test]
    fn a_long_name_does_not_become_many() {
        let read = |count: usize| {
            let tensor = |n: usize| HeadTensor { name: format!("{n}"), len: 0, kinds: vec![0] };
            let head = Head {
                counted: RunCounters::default(),
                layers: Vec::new(),
                squares: None,
                kinds: vec!["k".repeat(10_000)],
                tensors: (0..count).map(tensor).collect(),
            };
            let head = postcard::to_stdvec(&head).unwrap();
            RunState::from_bytes(&[&(head.len() as u64).to_le_bytes()[..], &head].concat())
        };
        assert!(read(10).is_some());
        assert_eq!(read(1_000), None);
    }

    #[test]
    fn what_replicas_have_in_common_has_no_optimizer() {
        let common = state().without_optimizer();
        assert_eq!(common.names(), ["a", "outer.anchor/a"].map(str::to_owned).into());
        assert_eq!(common.counted.kinds, ["outer.anchor"]);
        assert_eq!((common.counted.optimizer, common.counted.step), (OptimizerCounters::default(), 7));
    }

    #[test]
    fn each_kind_of_a_tensor_is_needed() {
        let needed = state().counted.needed(&[("a".to_owned(), 2)].into());
        let names: Vec<&str> = needed.iter().map(|needed| needed.name.as_str()).collect();
        assert_eq!(names, ["a", "chain.m/a", "outer.anchor/a"]);
        assert!(needed.iter().all(|needed| needed.bytes == 8));
    }
}
