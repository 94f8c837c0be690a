//! Joins the parts of tensors, and of their states, that replicas saved, of which each has had a shard.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use farflung_zoo::{AxisShare, ModelSpec, TensorSpec};

use super::StoredState;
use crate::train::pieces::{TensorPart, tensor_name};

/// The states of tensors of which some parts were read.
pub(super) struct PartsOfStates {
    specs: BTreeMap<String, TensorSpec>,
    /// By the state's name, and the number along the tensor axis of the ranks that have had it.
    read: BTreeMap<(String, usize), ReadState>,
    /// Those of which all parts were read: of the token table, two stages have the same ones.
    done: BTreeSet<(String, usize)>,
}

/// A state of which some elements were read.
struct ReadState {
    parts: Parts,
    width: AxisShare,
}

/// Parts of a tensor's elements, sorted by their first element. They take the memory of what was read.
#[derive(Debug, Default)]
pub(super) struct Parts {
    len: usize,
    read: Vec<Part>,
}

#[derive(Debug)]
struct Part {
    start: usize,
    values: Vec<f32>,
}

impl Parts {
    fn add(&mut self, start: usize, values: Vec<f32>) {
        let at = self.read.partition_point(|part| part.start <= start);
        self.read.insert(at, Part { start, values });
    }

    /// Returns the number of the tensor's elements.
    pub(super) const fn len(&self) -> usize {
        self.len
    }

    /// Copies a range of elements; `None` if some were not read.
    pub(super) fn copy(&self, range: &Range<usize>, into: &mut [f32]) -> Option<()> {
        let mut next = range.start;
        for Part { start, values } in &self.read {
            let end = (start + values.len()).min(range.end);
            if *start <= next && next < end {
                into[next - range.start..end - range.start]
                    .copy_from_slice(&values[next - start..end - start]);
                next = end;
            }
        }
        (next >= range.end).then_some(())
    }

    fn whole(&self) -> Option<Vec<f32>> {
        let read: usize = self.read.iter().map(|part| part.values.len()).sum();
        // Nothing is allocated for a length of which only some was read.
        let mut values = vec![0.0; Some(self.len).filter(|len| read >= *len)?];
        self.copy(&(0..self.len), &mut values).map(|()| values)
    }
}

impl PartsOfStates {
    pub(super) fn new(model: &ModelSpec) -> Self {
        let specs = model.tensors().into_iter().map(|spec| (spec.name.clone(), spec)).collect();
        Self { specs, read: BTreeMap::new(), done: BTreeSet::new() }
    }

    /// Takes a state that ranks with the share `width` have saved. Returns it if it is that of a whole tensor,
    /// or once all of its parts were read. A part that is not of such a tensor is left out.
    pub(super) fn take(&mut self, state: StoredState, width: &AxisShare) -> Option<StoredState> {
        let StoredState { name, values } = state;
        let (kind, tensor) = name.split_once('/').unwrap_or(("", &name));
        let Some(TensorPart { tensor, elements }) = TensorPart::of(tensor) else {
            return Some(StoredState { name, values });
        };
        let len = self.specs.get(tensor)?.shape_of(width).iter().product();
        let key = (tensor_name(kind, tensor), width.rank());
        if elements.end > len || elements.len() != values.len() || self.done.contains(&key) {
            return None;
        }
        let nothing = || ReadState { parts: Parts { len, read: Vec::new() }, width: width.clone() };
        let read = self.read.entry(key.clone()).or_insert_with(nothing);
        read.parts.add(elements.start, values);
        let values = read.parts.whole()?;
        self.read.remove(&key);
        self.done.insert(key.clone());
        Some(StoredState { name: key.0, values })
    }

    /// Returns the states of which only some elements were read, of ranks with a share.
    pub(super) fn finish(self, own: &AxisShare) -> impl Iterator<Item = (String, Parts)> {
        let read = self.read.into_iter().filter(move |(_, read)| read.width == *own);
        read.map(|((name, _), read)| (name, read.parts))
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
        // The other stage with the tensor has the same.
        assert!(parts.take(of(2..5), &whole).is_none());
        let other = state("chain.v/h.0.ln_1.bias[2..5]", &[1.0, 2.0, 3.0]);
        assert!(parts.take(other, &whole).is_none());
        let left: Vec<_> = parts.finish(&whole).collect();
        let [(name, read)] = &left[..] else { panic!("{} are left", left.len()) };
        let mut copied = [0.0; 2];
        assert_eq!((&**name, read.len()), ("chain.v/h.0.ln_1.bias", len));
        assert!(read.copy(&(3..5), &mut copied).is_some());
        assert_eq!(copied.map(f32::to_bits), [2.0_f32, 3.0].map(f32::to_bits));
        assert!(read.copy(&(1..3), &mut copied).is_none() && read.copy(&(4..6), &mut copied).is_none());
    }
}
