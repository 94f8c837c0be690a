//! What a change goes through on its way to a server. What a codec loses of it waits for the next.

use farflung_base::Rank;
use farflung_compress::{CompressError, Compressor, Payload, RoundKey, StateMap, StateValue};

use crate::{AverageConfig, OptimError};

/// A worker's codec for the changes that it sends to one server.
#[derive(Debug)]
pub(super) struct Packer {
    codec: Box<dyn Compressor>,
    seed: u64,
    /// The last round whose change travels as it is.
    warmup: u64,
    worker: Rank,
    server: Rank,
}

const RESIDUAL: &str = "residual";

impl Packer {
    /// Of a worker for a server, which draws by `average`'s seed and holds behind its warm-up.
    pub(super) const fn new(
        codec: Box<dyn Compressor>,
        average: &AverageConfig,
        worker: Rank,
        server: Rank,
    ) -> Self {
        let AverageConfig { seed, warmup, .. } = *average;
        Self { codec, seed, warmup, worker, server }
    }

    /// The payload of a round's change, counted from 1; `None` in the warm-up, and for values that the codec
    /// refuses: these travel as they are, and the residual stays.
    ///
    /// Errors: a codec that breaks its own rules.
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
            Err(error) if error.refuses_a_value() => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// What was lost of the changes so far: so many values, or none before the first.
    ///
    /// Errors: a codec that remembers something else.
    pub(super) fn residual(&self, len: usize) -> Result<Vec<f32>, OptimError> {
        let mut saved = StateMap::new();
        self.codec.save("", &mut saved)?;
        match saved.remove(RESIDUAL) {
            Some(StateValue::F32(values)) if values.len() == len => Ok(values.into_owned()),
            _ => Ok(vec![0.0; len]),
        }
    }

    /// Goes on with what [`Packer::residual`] gave.
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
