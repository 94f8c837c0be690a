//! A bucket that is averaged by protocols: a protocol for each matrix that gains by one; what does not travels
//! as it is with their first exchange. All of a bucket's protocols go through their exchanges together.

use std::ops::Range;

use farflung_compress::{CompressError, MatrixShape, Protocol, StateMap, StateValue};
use farflung_tensor::Shape;

use super::bucket::Slot;
use super::coding::MakeProtocol;
use crate::OptimError;

/// The protocols of a bucket.
#[derive(Debug)]
pub(super) struct Rounds {
    matrices: Vec<Matrix>,
    /// Runs of the bucket that have no protocol.
    plain: Vec<Range<usize>>,
    /// Elements of each exchange.
    sizes: Vec<usize>,
    /// The exchange under way.
    at: usize,
    /// The bucket's values in a round.
    values: Vec<f32>,
}

#[derive(Debug)]
struct Matrix {
    name: String,
    /// Where it lies in the bucket.
    range: Range<usize>,
    protocol: Box<dyn Protocol>,
    sizes: Vec<usize>,
    /// Its values were refused here. All must see that, so that no rank takes the step: NaN travels in their
    /// place.
    refused: bool,
}

impl Matrix {
    /// Its part of an exchange.
    fn outgoing(&self, exchange: usize, into: &mut Vec<f32>) -> Result<(), OptimError> {
        let Some(&size) = self.sizes.get(exchange) else { return Ok(()) };
        if self.refused {
            into.resize(into.len() + size, f32::NAN);
            return Ok(());
        }
        let values = self.protocol.outgoing().ok_or(CompressError::Exchange)?;
        check("an exchange of a protocol", values.len(), size)?;
        into.extend_from_slice(values);
        Ok(())
    }
}

fn check(what: &'static str, found: usize, wanted: usize) -> Result<(), CompressError> {
    if found == wanted { Ok(()) } else { Err(CompressError::LengthMismatch { what, wanted, found }) }
}

impl Rounds {
    /// For the parameters of a bucket, in the layout's order.
    pub(super) fn new<'a>(slots: impl Iterator<Item = &'a Slot>, make: &MakeProtocol, seed: u64) -> Self {
        let (mut matrices, mut plain) = (Vec::new(), Vec::<Range<usize>>::new());
        let mut start = 0;
        for slot in slots {
            let range = start..start + slot.range.len();
            start = range.end;
            // Matrices of one shape begin from seeds of their own.
            let seed = seed.wrapping_add(slot.range.start as u64);
            match matrix(slot.shape).and_then(|shape| make(shape, seed)) {
                Some(protocol) => {
                    let (name, sizes) = (slot.name.clone(), protocol.exchanges());
                    matrices.push(Matrix { name, range, protocol, sizes, refused: false });
                }
                None => match plain.last_mut() {
                    Some(before) if before.end == range.start => before.end = range.end,
                    _ => plain.push(range),
                },
            }
        }
        let most = matrices.iter().map(|matrix| matrix.sizes.len()).max().unwrap_or(0).max(1);
        let mut sizes = vec![0; most];
        sizes[0] = plain.iter().map(Range::len).sum();
        for matrix in &matrices {
            sizes.iter_mut().zip(&matrix.sizes).for_each(|(all, size)| *all += size);
        }
        Self { matrices, plain, sizes, at: 0, values: Vec::new() }
    }

    /// Elements of each exchange of a round.
    pub(super) fn sizes(&self) -> &[usize] {
        &self.sizes
    }

    /// Begins a round with the bucket's values; what is to be averaged first.
    ///
    /// Errors: a protocol that breaks its own rules. Values that one refuses are no error here.
    pub(super) fn begin(&mut self, values: Vec<f32>) -> Result<Vec<f32>, OptimError> {
        (self.at, self.values) = (0, values);
        for matrix in &mut self.matrices {
            matrix.refused = match matrix.protocol.begin(&self.values[matrix.range.clone()]) {
                Ok(()) => false,
                Err(error) if error.refuses_a_value() => true,
                Err(error) => return Err(error.into()),
            };
        }
        let mut first = Vec::with_capacity(self.sizes[0]);
        for range in &self.plain {
            first.extend_from_slice(&self.values[range.clone()]);
        }
        self.outgoing(first)
    }

    fn outgoing(&self, mut values: Vec<f32>) -> Result<Vec<f32>, OptimError> {
        self.matrices.iter().try_for_each(|matrix| matrix.outgoing(self.at, &mut values))?;
        Ok(values)
    }

    /// Takes the mean of an exchange; what is to be averaged next, or the bucket's mean.
    ///
    /// Errors: a protocol that breaks its own rules. A mean that one refuses is NaN on all ranks.
    pub(super) fn incoming(&mut self, mean: &[f32]) -> Result<Exchanged, OptimError> {
        check("the mean of an exchange", mean.len(), self.sizes[self.at])?;
        let mut start = 0;
        let mut take = |len: usize| {
            start += len;
            &mean[start - len..start]
        };
        if self.at == 0 {
            for range in &self.plain {
                self.values[range.clone()].copy_from_slice(take(range.len()));
            }
        }
        for matrix in &mut self.matrices {
            let Some(&size) = matrix.sizes.get(self.at) else { continue };
            let mean = take(size);
            if !matrix.refused {
                matrix.protocol.incoming(mean)?;
            }
        }
        self.at += 1;
        if self.at < self.sizes.len() {
            return Ok(Exchanged::Next(self.outgoing(Vec::with_capacity(self.sizes[self.at]))?));
        }
        for matrix in &mut self.matrices {
            let out = &mut self.values[matrix.range.clone()];
            let ended = if matrix.refused { None } else { Some(matrix.protocol.end(out)) };
            match ended {
                Some(Ok(())) => {}
                Some(Err(error)) if !error.refuses_a_value() => return Err(error.into()),
                Some(Err(_)) | None => out.fill(f32::NAN),
            }
        }
        Ok(Exchanged::Mean(std::mem::take(&mut self.values)))
    }

    pub(super) fn commit(&mut self) {
        self.matrices.iter_mut().for_each(|matrix| matrix.protocol.commit());
    }

    pub(super) fn rollback(&mut self) {
        self.matrices.iter_mut().for_each(|matrix| matrix.protocol.rollback());
    }

    /// Adds what the protocols remember, named by the parameter behind `prefix`.
    pub(super) fn save(&self, prefix: &str, saved: &mut Vec<(String, Vec<f32>)>) -> Result<(), OptimError> {
        for matrix in &self.matrices {
            let mut map = StateMap::new();
            matrix.protocol.save(&format!("{prefix}{}.", matrix.name), &mut map)?;
            super::flat(map, saved);
        }
        Ok(())
    }

    /// Restores what [`Self::save`] gave. A matrix of which all buffers are empty begins anew.
    pub(super) fn restore<'a>(
        &mut self,
        prefix: &str,
        get: &dyn Fn(&str) -> Option<&'a [f32]>,
    ) -> Result<(), OptimError> {
        for matrix in &mut self.matrices {
            let prefix = format!("{prefix}{}.", matrix.name);
            let mut known = StateMap::new();
            matrix.protocol.save(&prefix, &mut known)?;
            // The protocol knows the lengths.
            let mut map = super::given(known.into_keys().collect(), matrix.range.len(), get, |_| true)?;
            let empty =
                |value: &StateValue<'_>| matches!(value, StateValue::F32(values) if values.is_empty());
            if map.values().all(empty) {
                continue;
            }
            matrix.protocol.load(&prefix, &mut map).map_err(|error| match error {
                CompressError::LengthMismatch { wanted, found, .. } => {
                    OptimError::State { name: prefix, found, expected: wanted }
                }
                error => error.into(),
            })?;
        }
        Ok(())
    }
}

/// What follows an exchange.
pub(super) enum Exchanged {
    /// The values of the next one.
    Next(Vec<f32>),
    /// The bucket's mean.
    Mean(Vec<f32>),
}

/// A parameter as a matrix: of more than two dimensions, the first by all others. `None` for a vector.
fn matrix(shape: Shape) -> Option<MatrixShape> {
    let (&rows, rest) = shape.dims().split_first()?;
    (!rest.is_empty()).then(|| MatrixShape { rows, columns: rest.iter().product() })
}
