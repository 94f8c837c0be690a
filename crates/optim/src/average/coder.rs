//! Codecs of one bucket as a coder of a compressed all-reduce: one for each shard that this rank sends, one for the
//! shard that it reduces. Knows no bucket but by its length.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use farflung_base::Rank;
use farflung_comm::{Coder, CoderError, CommError, Communicator, Phase};
use farflung_compress::{CodecId, CompressError, Compressor, F32, Payload, PayloadRef, RoundKey};

use super::AverageConfig;
use crate::OptimError;

/// The codecs of a bucket. They stay here while a collective uses them, so that one that fails or is cancelled cannot
/// take their residuals along.
#[derive(Debug, Clone)]
pub(super) struct Codecs(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    seed: u64,
    rank: Rank,
    bucket: usize,
    /// The shards of the bucket, by rank.
    shards: Vec<Range<usize>>,
    worker: Vec<Box<dyn Compressor>>,
    server: Box<dyn Compressor>,
    payload: Payload,
    /// Bytes of this rank's own values in this round.
    sent: u64,
    round: u64,
    /// Counts beginnings and ends, so that a coder of a round that was given up cannot encode any more.
    era: u64,
}

impl Codecs {
    pub(super) fn new(comm: &Communicator, config: AverageConfig, bucket: usize, len: usize) -> Self {
        let shards: Vec<_> = (0..comm.size() as u32).map(|r| comm.shard_of(Rank(r), len)).collect();
        Self(Arc::new(Mutex::new(State {
            seed: config.seed,
            rank: comm.rank(),
            bucket,
            worker: shards.iter().map(|_| config.codec.build()).collect(),
            server: config.codec.build(),
            shards,
            payload: Payload::new(),
            sent: 0,
            round: 0,
            era: 0,
        })))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn begin(&self, round: u64) {
        let mut state = self.lock();
        (state.round, state.sent) = (round, 0);
        state.era += 1;
    }

    /// The coder of this round.
    pub(super) fn coder(&self) -> Box<dyn Coder> {
        Box::new(RoundCoder { codecs: self.clone(), era: self.lock().era })
    }

    /// Bytes of this rank's own values in this round.
    pub(super) fn sent(&self) -> u64 {
        self.lock().sent
    }

    pub(super) fn commit(&self) {
        self.lock().end(|codec| codec.commit());
    }

    pub(super) fn rollback(&self) {
        self.lock().end(|codec| codec.rollback());
    }

    /// Calls `f` with each codec, the prefix of its state's names and the length of its vectors.
    pub(super) fn each(
        &self,
        prefix: &str,
        mut f: impl FnMut(&mut Box<dyn Compressor>, &str, usize) -> Result<(), OptimError>,
    ) -> Result<(), OptimError> {
        let state = &mut *self.lock();
        let bucket = state.bucket;
        for (j, (codec, shard)) in state.worker.iter_mut().zip(&state.shards).enumerate() {
            f(codec, &format!("{prefix}bucket{bucket}.worker{j}."), shard.len())?;
        }
        let own = state.shards[state.rank.index()].len();
        f(&mut state.server, &format!("{prefix}bucket{bucket}.server."), own)
    }
}

impl State {
    fn end(&mut self, mut f: impl FnMut(&mut Box<dyn Compressor>)) {
        self.era += 1;
        self.worker.iter_mut().for_each(&mut f);
        f(&mut self.server);
    }
}

struct RoundCoder {
    codecs: Codecs,
    era: u64,
}

impl Coder for RoundCoder {
    fn encode(
        &mut self,
        phase: Phase,
        range: Range<usize>,
        x: &[f32],
        out: &mut Vec<u8>,
    ) -> Result<(), CoderError> {
        let state = &mut *self.codecs.lock();
        if state.era != self.era {
            return Err(CommError::Cancelled { op: "average" }.into());
        }
        let size = state.shards.len();
        // Empty shards may be equal; which of their codecs encodes nothing does not matter.
        let j = state.shards.iter().position(|s| *s == range).ok_or(CommError::Argument {
            op: "average",
            what: "start of a shard",
            got: range.start,
            want: state.shards[state.rank.index()].start,
        })?;
        let (codec, side) = match phase {
            Phase::Worker => (&mut state.worker[j], 0),
            Phase::Server => (&mut state.server, 1),
        };
        let shard = ((2 * state.bucket + side) * size + j) as u32;
        let key = RoundKey { seed: state.seed, round: state.round, shard, rank: state.rank };
        match codec.compress(x, key, &mut state.payload) {
            // All ranks must see it, or some would step and some would not.
            Err(CompressError::NonFinite { .. }) => F32::new().compress(x, key, &mut state.payload)?,
            result => result?,
        }
        let bytes = state.payload.as_bytes();
        if phase == Phase::Worker {
            state.sent += bytes.len() as u64;
        }
        out.extend_from_slice(bytes);
        Ok(())
    }

    fn decode(&mut self, _: Range<usize>, bytes: &[u8], out: &mut [f32]) -> Result<(), CoderError> {
        let payload = PayloadRef::parse(bytes)?;
        if payload.codec() == CodecId::F32 {
            return Ok(F32::new().decompress(payload, out)?);
        }
        Ok(self.codecs.lock().server.decompress(payload, out)?)
    }
}
