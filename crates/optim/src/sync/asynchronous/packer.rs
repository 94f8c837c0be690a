//! Compression of a worker's changes for a server. What a codec loses of a change is added to the next one.

use farflung_base::Rank;
use farflung_compress::{CompressError, Compressor, Payload, RoundKey, StateMap, StateValue};

use crate::{AverageConfig, OptimError};

/// A worker's codec for the changes that it sends to one server.
#[derive(Debug)]
pub(super) struct Packer {
    codec: Box<dyn Compressor>,
    seed: u64,
    /// Last round whose change is sent uncompressed.
    warmup: u64,
    worker: Rank,
    server: Rank,
}

const RESIDUAL: &str = "residual";

impl Packer {
    /// Creates the packer of a worker for a server, with the seed and the warm-up of `average`.
    pub(super) const fn new(
        codec: Box<dyn Compressor>,
        average: &AverageConfig,
        worker: Rank,
        server: Rank,
    ) -> Self {
        let AverageConfig { seed, warmup, .. } = *average;
        Self { codec, seed, warmup, worker, server }
    }

    /// Returns the payload of a round's change; rounds are counted from 1. Returns `None` in the warm-up, and
    /// if the codec rejects a value: the change is then sent uncompressed, and the residual stays.
    ///
    /// Errors: those of a codec that breaks its contract.
    pub(super) fn pack(&mut self, change: &[f32], round: u64) -> Result<Option<Vec<u8>>, OptimError> {
        if round <= self.warmup {
            return Ok(None);
        }
        let key = RoundKey { seed: self.seed, round, shard: self.server.0, rank: self.worker };
        let mut payload = Payload::new();
        match self.codec.compress(change, key, &mut payload) {
            Ok(()) => {
                self.codec.commit();
                Ok(Some(payload.as_bytes().to_vec()))
            }
            Err(error) if error.is_value_error() => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Returns what was lost of the changes so far, `[len]`; zeros before the first.
    ///
    /// Errors: those of saving the codec's state.
    pub(super) fn residual(&self, len: usize) -> Result<Vec<f32>, OptimError> {
        let mut saved = StateMap::new();
        self.codec.save("", &mut saved)?;
        match saved.remove(RESIDUAL) {
            Some(StateValue::F32(values)) if values.len() == len => Ok(values.into_owned()),
            _ => Ok(vec![0.0; len]),
        }
    }

    /// Restores what [`Packer::residual`] returned.
    ///
    /// Errors: values that are not finite.
    pub(super) fn restore(&mut self, residual: &[f32]) -> Result<(), CompressError> {
        let mut saved = StateMap::new();
        self.codec.save("", &mut saved)?;
        if !saved.contains_key(RESIDUAL) {
            return Ok(());
        }
        let mut from = StateMap::from([(RESIDUAL.to_owned(), StateValue::F32(residual.to_vec().into()))]);
        self.codec.load("", &mut from)
    }
}
