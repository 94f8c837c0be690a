//! A bucket that is averaged by protocols. A matrix has its own protocol if [`MakeProtocol`] returns one for
//! its shape; all other values are sent as plain f32 with the first exchange. All protocols of a bucket run
//! their exchanges together.

use std::ops::Range;

use farflung_compress::{CompressError, MatrixShape, Protocol, StateMap, StateValue};
use farflung_tensor::Shape;

use super::bucket::Slot;
use super::coding::MakeProtocol;
use crate::OptimError;

/// Protocols of a bucket.
#[derive(Debug)]
pub(super) struct BucketProtocols {
    matrices: Vec<Matrix>,
    /// Ranges of the bucket that have no protocol.
    plain: Vec<Range<usize>>,
    /// Number of elements in each exchange.
    sizes: Vec<usize>,
    /// Index of the exchange in progress.
    at: usize,
    /// The bucket's values in a round.
    values: Vec<f32>,
}

#[derive(Debug)]
struct Matrix {
    name: String,
    /// Range of the matrix in the bucket.
    range: Range<usize>,
    protocol: Box<dyn Protocol>,
    sizes: Vec<usize>,
    /// Whether the protocol rejected the matrix on this rank. NaN is then sent in place of its values, so that
    /// all ranks see it and none takes the step.
    refused: bool,
}

impl Matrix {
    /// Appends the matrix's part of an exchange to `into`.
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

impl BucketProtocols {
    /// Creates the protocols for the parameters of a bucket, given in the layout's order.
    pub(super) fn new<'a>(slots: impl Iterator<Item = &'a Slot>, make: &MakeProtocol, seed: u64) -> Self {
        let (mut matrices, mut plain) = (Vec::new(), Vec::<Range<usize>>::new());
        let mut start = 0;
        for slot in slots {
            let range = start..start + slot.range.len();
            start = range.end;
            // Matrices of one shape get different seeds.
            let seed = seed.wrapping_add(slot.key);
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

    /// Returns the number of elements in each exchange of a round.
    pub(super) fn sizes(&self) -> &[usize] {
        &self.sizes
    }

    /// Begins a round with the bucket's values. Returns the values of the first exchange.
    ///
    /// Errors: those of a protocol that breaks its contract. A rejected value is not an error here.
    pub(super) fn begin(&mut self, values: Vec<f32>) -> Result<Vec<f32>, OptimError> {
        (self.at, self.values) = (0, values);
        for matrix in &mut self.matrices {
            matrix.refused = match matrix.protocol.begin(&self.values[matrix.range.clone()]) {
                Ok(()) => false,
                Err(error) if error.is_value_error() => true,
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

    /// Takes the mean of an exchange. Returns the values of the next exchange, or the bucket's mean after the
    /// last one.
    ///
    /// Errors: those of a protocol that breaks its contract. If a protocol rejects the means when the round
    /// ends ([`Protocol::end`]), the result is NaN on all ranks.
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
                Some(Err(error)) if !error.is_value_error() => return Err(error.into()),
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

    /// Returns the bytes of the protocols' state.
    pub(super) fn held(&self) -> usize {
        self.matrices.iter().map(|matrix| matrix.protocol.held().memory).sum()
    }

    /// Appends the state of the protocols; its name is `prefix`, then the parameter.
    pub(super) fn save(&self, prefix: &str, saved: &mut Vec<(String, Vec<f32>)>) -> Result<(), OptimError> {
        for matrix in &self.matrices {
            let mut map = StateMap::new();
            matrix.protocol.save(&format!("{prefix}{}.", matrix.name), &mut map)?;
            super::state_buffers::flat(map, saved);
        }
        Ok(())
    }

    /// Restores what [`Self::save`] appended. A matrix whose buffers are all empty starts anew.
    pub(super) fn restore<'a>(
        &mut self,
        prefix: &str,
        get: &dyn Fn(&str) -> Option<&'a [f32]>,
    ) -> Result<(), OptimError> {
        for matrix in &mut self.matrices {
            let prefix = format!("{prefix}{}.", matrix.name);
            let mut known = StateMap::new();
            matrix.protocol.save(&prefix, &mut known)?;
            // The protocol checks the lengths itself.
            let mut map =
                super::state_buffers::given(known.into_keys().collect(), matrix.range.len(), get, |_| true)?;
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

/// Result of an exchange.
pub(super) enum Exchanged {
    /// Values of the next exchange.
    Next(Vec<f32>),
    /// Mean of the bucket.
    Mean(Vec<f32>),
}

/// Returns the matrix shape of a parameter. With more than two dimensions, the first are the rows and all
/// others together the columns. `None` for a vector.
fn matrix(shape: Shape) -> Option<MatrixShape> {
    let (&rows, rest) = shape.dims().split_first()?;
    (!rest.is_empty()).then(|| MatrixShape { rows, columns: rest.iter().product() })
}
