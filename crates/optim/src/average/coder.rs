//! Codecs of one bucket, and its values as a coded all-reduce sees them: a codec for each shard that this rank sends, one
//! for the shard that it reduces. Vectors stay where the codecs are. Knows no bucket but by its length.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use farflung_base::Rank;
use farflung_comm::{CodedValues, CoderError, CommError, Communicator, Fold, Phase};
use farflung_compress::device::{Device as _, Stream};
use farflung_compress::{CodecId, Compressor, F32, Payload, PayloadRef, RoundKey};
use farflung_tensor::{DType, Tensor};

use super::AverageConfig;
use super::bucket::Packed;
use crate::OptimError;
use crate::device_codec::Vectors;

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
    worker: Vec<Stream<Vectors>>,
    server: Stream<Vectors>,
    payload: Payload,
    /// What a message says, while it is added: of the own shard's length.
    decoded: Option<Tensor>,
    /// Bytes of this rank's own values in this round.
    sent: u64,
    round: u64,
    /// Counts beginnings and ends, so that values of a round that was given up cannot be encoded any more.
    era: u64,
}

impl Codecs {
    pub(super) fn new(
        comm: &Communicator,
        vectors: &Vectors,
        config: AverageConfig,
        bucket: usize,
        shards: Vec<Range<usize>>,
    ) -> Self {
        let stream = || Stream::new(vectors.clone(), config.codec).expect("they were chosen for this codec");
        Self(Arc::new(Mutex::new(State {
            seed: config.seed,
            rank: comm.rank(),
            bucket,
            worker: shards.iter().map(|_| stream()).collect(),
            server: stream(),
            shards,
            payload: Payload::new(),
            decoded: None,
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

    /// Shards without values yet.
    pub(super) fn shards(&self) -> Result<Packed, OptimError> {
        let state = self.lock();
        let device = state.server.device().device();
        let empty = |shard: &Range<usize>| device.empty(DType::F32, shard.len());
        Ok(Packed::Coded(state.shards.iter().map(empty).collect::<Result<_, _>>()?))
    }

    /// The bucket's values in this round, for a collective.
    pub(super) fn values(&self, shards: Vec<Tensor>) -> Values {
        Values { codecs: self.clone(), era: self.lock().era, shards }
    }

    /// Bytes of this rank's own values in this round.
    pub(super) fn sent(&self) -> u64 {
        self.lock().sent
    }

    pub(super) fn commit(&self) {
        self.lock().end(Stream::commit);
    }

    pub(super) fn rollback(&self) {
        self.lock().end(Stream::rollback);
    }

    /// Calls `f` with each codec, the prefix of its state's names and the length of its vectors.
    pub(super) fn each(
        &self,
        prefix: &str,
        mut f: impl FnMut(&mut Stream<Vectors>, &str, usize) -> Result<(), OptimError>,
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
    fn end(&mut self, mut f: impl FnMut(&mut Stream<Vectors>)) {
        self.era += 1;
        self.worker.iter_mut().for_each(&mut f);
        f(&mut self.server);
    }

    /// The shard of a range. Empty shards may be equal; which of their codecs encodes nothing does not matter.
    fn shard(&self, range: &Range<usize>) -> Result<usize, CommError> {
        self.shards.iter().position(|s| s == range).ok_or(CommError::Argument {
            op: "average",
            what: "start of a shard",
            got: range.start,
            want: self.shards[self.rank.index()].start,
        })
    }

    fn encode(&mut self, phase: Phase, j: usize, x: &Tensor) -> Result<&[u8], OptimError> {
        let (codec, side) = match phase {
            Phase::Worker => (&mut self.worker[j], 0),
            Phase::Server => (&mut self.server, 1),
        };
        let shard = ((2 * self.bucket + side) * self.shards.len() + j) as u32;
        let key = RoundKey { seed: self.seed, round: self.round, shard, rank: self.rank };
        match codec.compress(x, key, &mut self.payload) {
            // All ranks must see the values, or some would step and some would not. The mean decides; it may be
            // finite if a value was only too large for the codec. Plain f32 loses nothing of the values, so the
            // residual stays as it was.
            Err(OptimError::Compress(error)) if error.refuses_a_value() => {
                F32::new().compress(&x.to_vec::<f32>()?, key, &mut self.payload)?;
            }
            result => result?,
        }
        let bytes = self.payload.as_bytes();
        if phase == Phase::Worker {
            self.sent += bytes.len() as u64;
        }
        Ok(bytes)
    }
}

/// The codec of plain f32 takes what others refuse.
fn decode(codec: &mut Stream<Vectors>, bytes: &[u8], out: &mut Tensor) -> Result<(), OptimError> {
    let payload = PayloadRef::parse(bytes)?;
    if payload.codec() != CodecId::F32 {
        return codec.decompress(payload, out);
    }
    if let Some(out) = out.host_mut() {
        return Ok(F32::new().decompress(payload, out)?);
    }
    let mut values = vec![0.0; out.shape().len()];
    F32::new().decompress(payload, &mut values)?;
    Ok(out.write(&values)?)
}

/// A bucket's values in a round.
#[derive(Debug)]
pub(super) struct Values {
    codecs: Codecs,
    era: u64,
    shards: Vec<Tensor>,
}

impl Values {
    pub(super) fn into_packed(self) -> Packed {
        Packed::Coded(self.shards)
    }
}

impl CodedValues for Values {
    fn count(&self) -> usize {
        self.shards.iter().map(|shard| shard.shape().len()).sum()
    }

    fn encode(&mut self, phase: Phase, range: Range<usize>, out: &mut Vec<u8>) -> Result<(), CoderError> {
        let mut state = self.codecs.lock();
        if state.era != self.era {
            return Err(CommError::Cancelled { op: "average" }.into());
        }
        let j = state.shard(&range)?;
        out.extend_from_slice(state.encode(phase, j, &self.shards[j])?);
        Ok(())
    }

    fn decode(&mut self, range: Range<usize>, bytes: &[u8], fold: Fold) -> Result<(), CoderError> {
        let state = &mut *self.codecs.lock();
        let out = &mut self.shards[state.shard(&range)?];
        if fold == Fold::Replace {
            return Ok(decode(&mut state.server, bytes, out)?);
        }
        let mut decoded = match state.decoded.take().filter(|decoded| decoded.shape() == out.shape()) {
            Some(decoded) => decoded,
            None => state.server.device().device().empty(DType::F32, out.shape())?,
        };
        decode(&mut state.server, bytes, &mut decoded)?;
        state.server.device().add(&decoded, out)?;
        state.decoded = Some(decoded);
        Ok(())
    }

    fn divide(&mut self, range: Range<usize>, by: usize) -> Result<(), CoderError> {
        let state = self.codecs.lock();
        let j = state.shard(&range)?;
        Ok(state.server.device().scale(&mut self.shards[j], 1.0 / by as f32)?)
    }
}
