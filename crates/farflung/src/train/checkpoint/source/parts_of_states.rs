//! Joins the parts of the states of tensors that replicas saved, of which each has had a shard.

use std::collections::BTreeMap;
use std::ops::Range;

use farflung_zoo::{AxisShare, ModelSpec, TensorSpec};

use super::StoredState;
use crate::train::pieces::{TensorPart, tensor_name};

/// The states of tensors of which some parts were read.
pub(super) struct PartsOfStates {
    specs: BTreeMap<String, TensorSpec>,
    /// By the state's name, and the number along the tensor axis of the ranks that have had it.
    read: BTreeMap<(String, usize), ReadState>,
}

/// A state of which some elements were read.
pub(super) struct ReadState {
    pub(super) values: Vec<f32>,
    pub(super) parts: Parts,
    width: AxisShare,
}

/// Ranges of elements, in order and apart.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Parts(Vec<Range<usize>>);

impl Parts {
    fn add(&mut self, part: Range<usize>) {
        self.0.push(part);
        self.0.sort_by_key(|part| part.start);
        let mut joined: Vec<Range<usize>> = Vec::new();
        for part in self.0.drain(..) {
            match joined.last_mut() {
                Some(last) if part.start <= last.end => last.end = last.end.max(part.end),
                _ => joined.push(part),
            }
        }
        self.0 = joined;
    }

    /// Returns whether all elements of a range are in them.
    pub(super) fn has(&self, range: &Range<usize>) -> bool {
        self.0.iter().any(|part| part.start <= range.start && range.end <= part.end)
    }
}

impl PartsOfStates {
    pub(super) fn new(model: &ModelSpec) -> Self {
        let specs = model.tensors().into_iter().map(|spec| (spec.name.clone(), spec)).collect();
        Self { specs, read: BTreeMap::new() }
    }

    /// Takes a state that ranks with the share `width` have saved. Returns it if it is that of a whole tensor,
    /// or once all of its parts were read. A part that is not of such a tensor is left out.
    pub(super) fn take(&mut self, state: StoredState, width: &AxisShare) -> Option<StoredState> {
        let StoredState { name, values } = state;
        let Some((kind, TensorPart { tensor, elements })) =
            name.split_once('/').and_then(|(kind, tensor)| Some((kind, TensorPart::of(tensor)?)))
        else {
            return Some(StoredState { name, values });
        };
        let len = self.specs.get(tensor)?.shape_of(width).iter().product();
        if elements.end > len || elements.len() != values.len() {
            return None;
        }
        let key = (tensor_name(kind, tensor), width.rank());
        let nothing = || ReadState { values: vec![0.0; len], parts: Parts::default(), width: width.clone() };
        let read = self.read.entry(key.clone()).or_insert_with(nothing);
        read.values[elements.clone()].copy_from_slice(&values);
        read.parts.add(elements);
        if !read.parts.has(&(0..len)) {
            return None;
        }
        self.read.remove(&key).map(|read| StoredState { name: key.0, values: read.values })
    }

    /// Returns the states of which only some elements were read, of ranks with a share.
    pub(super) fn finish(self, own: &AxisShare) -> impl Iterator<Item = (String, ReadState)> {
        let read = self.read.into_iter().filter(move |(_, read)| read.width == *own);
        read.map(|((name, _), read)| (name, read))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(name: &str, values: &[f32]) -> StoredState {
        StoredState { name: name.to_owned(), values: values.to_vec() }
    }

    #[test]
    fn parts_join_to_whole_states_and_others_stay_parts() {
        let model = farflung_zoo::family::preset("nano").unwrap().spec();
        let bias = "h.0.ln_1.bias";
        let len = model.tensors().iter().find(|spec| spec.name == bias).unwrap().count();
        let mut parts = PartsOfStates::new(&model);
        let whole = AxisShare::whole();
        let of = |range: Range<usize>| {
            state(&format!("chain.m/{bias}[{}..{}]", range.start, range.end), &vec![1.5; range.len()])
        };
        assert!(parts.take(of(3..len), &whole).is_none());
        // Nothing is allocated for a range that the tensor does not have, or that the values are not.
        assert!(parts.take(state(&format!("chain.m/{bias}[0..{}]", usize::MAX), &[1.0]), &whole).is_none());
        assert!(parts.take(state(&format!("chain.m/{bias}[0..2]"), &[1.0]), &whole).is_none());
        assert!(parts.take(state("chain.m/none[0..1]", &[1.0]), &whole).is_none());
        let joined = parts.take(of(0..3), &whole).unwrap();
        assert_eq!((joined.name, joined.values), (format!("chain.m/{bias}"), vec![1.5; len]));
        assert!(parts.take(of(2..5), &whole).is_none());
        let left: Vec<_> = parts.finish(&whole).collect();
        let [(name, read)] = &left[..] else { panic!("{} are left", left.len()) };
        assert_eq!(
            (&**name, read.parts.has(&(2..5)), read.parts.has(&(1..3))),
            (&*format!("chain.m/{bias}"), true, false)
        );
    }
}
