//! Codecs of one bucket, and the bucket's values as a coded all-reduce sees them. There is one codec for each
//! block that this rank encodes in the bucket's program, and for each phase in which it does. Vectors stay in
//! the memory where the codecs work. This module uses only the length of a bucket, not its parameters.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use farflung_base::Rank;
use farflung_comm::{
    Code, CodedAllReduce as _, CodedValues, CoderError, CommError, Communicator, Merge, Phase, Program,
};
use farflung_compress::device::{Stream, VectorDevice as _};
use farflung_compress::{CodecId, Compressor, F32, Payload, PayloadRef, RoundKey, StateMap};
use farflung_tensor::{DType, Tensor};

use super::AverageConfig;
use super::bucket::Packed;
use super::coding::Streams;
use crate::OptimError;
use crate::device_codec::Vectors;

/// Codecs of a bucket. A collective shares them and does not own them, so that their residuals survive if it
/// fails or is cancelled.
#[derive(Debug, Clone)]
pub(super) struct Codecs {
    /// Steps by which the bucket is reduced.
    program: Arc<Program>,
    state: Arc<Mutex<State>>,
}

#[derive(Debug)]
struct State {
    seed: u64,
    rank: Rank,
    bucket: usize,
    /// Ranges of the program's blocks.
    blocks: Vec<Range<usize>>,
    /// One codec for each block that this rank encodes, and for each phase in which it does.
    streams: BTreeMap<(Phase, usize), Stream<Vectors>>,
    /// Codec that only decodes.
    decoder: Stream<Vectors>,
    payload: Payload,
    /// Scratch tensor of a block's length for a decoded message that is then added.
    decoded: Option<Tensor>,
    /// Bytes of this rank's own values in this round.
    sent: u64,
    /// Phase in which this rank's own values are encoded. A program may have no [`Phase::Worker`].
    own: Phase,
    round: u64,
    /// Incremented when a round begins or ends, so that values of an abandoned round can no longer be encoded.
    era: u64,
}

impl Codecs {
    /// Creates the codecs of a bucket with `len` elements.
    ///
    /// Errors: [`OptimError::Comm`] if the algorithm has no coded form.
    pub(super) fn new(
        comm: &Communicator,
        streams: &Streams,
        config: &AverageConfig,
        bucket: usize,
        len: usize,
    ) -> Result<Self, OptimError> {
        let stream = |phase: Phase| streams.stream(phase);
        let sizes = streams.sizes();
        let payload = |values: usize| sizes.max_payload(values);
        let program = config.algorithm.coded_program(comm.rank(), &comm.coded_buffer(len, &payload))?;
        let steps = program.lanes.iter().flatten();
        let encoded = steps.flat_map(|step| &step.coding.encode).map(|&number| program.messages[number]);
        let coded = encoded.filter_map(|message| match message.code {
            Code::Plain => None,
            Code::Coded(phase) => Some(((phase, message.block), stream(phase))),
        });
        let streams: BTreeMap<_, _> = coded.collect();
        let state = State {
            seed: config.seed,
            rank: comm.rank(),
            bucket,
            blocks: (0..program.blocks).map(|block| program.elements(&(block..block + 1), len)).collect(),
            own: streams.keys().next().map_or(Phase::Worker, |&(phase, _)| phase),
            streams,
            decoder: stream(Phase::Server),
            payload: Payload::new(),
            decoded: None,
            sent: 0,
            round: 0,
            era: 0,
        };
        Ok(Self { program: Arc::new(program), state: Arc::new(Mutex::new(state)) })
    }

    /// Returns the steps by which the bucket is reduced.
    pub(super) fn program(&self) -> Arc<Program> {
        Arc::clone(&self.program)
    }

    /// Returns the ranges of the program's blocks.
    pub(super) fn blocks(&self) -> Vec<Range<usize>> {
        self.lock().blocks.clone()
    }

    /// Returns the ranges of the bucket that this rank encodes, and the phase in which it does.
    pub(super) fn encoded(&self) -> Vec<(Phase, Range<usize>)> {
        let state = self.lock();
        state.streams.keys().map(|&(phase, block)| (phase, state.blocks[block].clone())).collect()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn begin(&self, round: u64) {
        let mut state = self.lock();
        (state.round, state.sent) = (round, 0);
        state.era += 1;
    }

    /// Returns a tensor for each block, not filled yet.
    pub(super) fn empty(&self) -> Result<Packed, OptimError> {
        let state = self.lock();
        let device = state.decoder.device().device();
        let empty = |block: &Range<usize>| device.empty(DType::F32, block.len());
        Ok(Packed::Coded(state.blocks.iter().map(empty).collect::<Result<_, _>>()?))
    }

    /// Returns the bucket's values in this round in the form that a collective takes.
    pub(super) fn values(&self, blocks: Vec<Tensor>) -> Values {
        Values { codecs: self.clone(), era: self.lock().era, blocks }
    }

    /// Returns the bytes of this rank's own values in this round.
    pub(super) fn sent(&self) -> u64 {
        self.lock().sent
    }

    pub(super) fn commit(&self) {
        self.lock().end(Stream::commit);
    }

    pub(super) fn rollback(&self) {
        self.lock().end(Stream::rollback);
    }

    /// Returns the bytes of the codecs' state in the host's memory.
    pub(super) fn held(&self) -> usize {
        self.lock().streams.values().map(|stream| stream.held().memory).sum()
    }

    /// Appends the state of each codec; its name is `prefix`, then the phase (worker or server) and the block.
    pub(super) fn save(&self, prefix: &str, saved: &mut Vec<(String, Vec<f32>)>) -> Result<(), OptimError> {
        self.each(prefix, |codec, prefix, _| {
            let mut map = StateMap::new();
            codec.save(prefix, &mut map)?;
            super::state_buffers::flat(map, saved);
            Ok(())
        })
    }

    /// Restores what [`Self::save`] appended. A codec whose buffer is empty starts anew.
    pub(super) fn restore<'a>(
        &self,
        prefix: &str,
        get: &dyn Fn(&str) -> Option<&'a [f32]>,
    ) -> Result<(), OptimError> {
        self.each(prefix, |codec, prefix, expected| {
            // Saving the new codec gives the names of its buffers.
            let mut known = StateMap::new();
            codec.save(prefix, &mut known)?;
            let fits = |len| len == expected || len == 0;
            codec.load(
                prefix,
                &mut super::state_buffers::given(known.into_keys().collect(), expected, get, fits)?,
            )
        })
    }

    /// Calls `f` with each codec, the prefix of its state's names and the length of its vectors.
    fn each(
        &self,
        prefix: &str,
        mut f: impl FnMut(&mut Stream<Vectors>, &str, usize) -> Result<(), OptimError>,
    ) -> Result<(), OptimError> {
        let State { blocks, streams, .. } = &mut *self.lock();
        let results = streams.keys().filter(|(phase, _)| *phase == Phase::Server).count();
        for (&(phase, block), codec) in streams {
            let side = match phase {
                Phase::Worker => format!("worker{block}"),
                // If only one block is reduced here, its number is left out.
                Phase::Server if results == 1 => "server".to_owned(),
                Phase::Server => format!("server{block}"),
            };
            f(codec, &format!("{prefix}{side}."), blocks[block].len())?;
        }
        Ok(())
    }
}

impl State {
    fn end(&mut self, f: impl FnMut(&mut Stream<Vectors>)) {
        self.era += 1;
        self.streams.values_mut().for_each(f);
    }

    /// Returns the index of the block that has this range.
    fn block(&self, range: &Range<usize>) -> Result<usize, CommError> {
        let place = self.blocks.iter().position(|block| block == range);
        place.ok_or_else(|| unknown(range))
    }

    /// Encodes the values of a range.
    fn encode(&mut self, phase: Phase, range: &Range<usize>, x: &Tensor) -> Result<&[u8], OptimError> {
        // Empty blocks may have equal ranges; it does not matter which of their codecs is used.
        let mut streams = self.streams.iter_mut();
        let stream = streams.find(|((side, block), _)| *side == phase && self.blocks[*block] == *range);
        let (&(_, block), codec) = stream.ok_or_else(|| unknown(range))?;
        let shard = ((2 * self.bucket + phase as usize) * self.blocks.len() + block) as u32;
        let key = RoundKey { seed: self.seed, round: self.round, shard, rank: self.rank };
        match codec.compress(x, key, &mut self.payload) {
            // Values that the codec rejects are sent as plain f32. All ranks must see them, or only some would
            // take the step. The mean decides about the step: it may be finite if a value was only too large
            // for the codec. Plain f32 loses nothing, so the residual stays as it was.
            Err(OptimError::Compress(error)) if error.is_value_error() => {
                F32::new().compress(&x.to_vec::<f32>()?, key, &mut self.payload)?;
            }
            result => result?,
        }
        let bytes = self.payload.as_bytes();
        if phase == self.own {
            self.sent += bytes.len() as u64;
        }
        Ok(bytes)
    }
}

/// Returns the error for a range that is not a block of the program.
fn unknown(range: &Range<usize>) -> CommError {
    CommError::Argument { op: "average", what: "start of a block", got: range.start, want: 0 }
}

/// Decodes a message. Values that a codec rejected arrive as plain f32.
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

/// Values of a bucket in a round, by blocks.
#[derive(Debug)]
pub(super) struct Values {
    codecs: Codecs,
    era: u64,
    blocks: Vec<Tensor>,
}

impl Values {
    pub(super) fn into_packed(self) -> Packed {
        Packed::Coded(self.blocks)
    }

    /// Calls `decode` with the values of a range, or with a scratch tensor that is then added to them.
    fn merge(
        &mut self,
        range: &Range<usize>,
        merge: Merge,
        decode: impl FnOnce(&mut Stream<Vectors>, &mut Tensor) -> Result<(), OptimError>,
    ) -> Result<(), CoderError> {
        let state = &mut *self.codecs.lock();
        let out = &mut self.blocks[state.block(range)?];
        if merge == Merge::Copy {
            return Ok(decode(&mut state.decoder, out)?);
        }
        let mut decoded = match state.decoded.take().filter(|decoded| decoded.shape() == out.shape()) {
            Some(decoded) => decoded,
            None => state.decoder.device().device().empty(DType::F32, out.shape())?,
        };
        decode(&mut state.decoder, &mut decoded)?;
        state.decoder.device().add(&decoded, out)?;
        state.decoded = Some(decoded);
        Ok(())
    }
}

impl CodedValues for Values {
    fn count(&self) -> usize {
        self.blocks.iter().map(|block| block.shape().len()).sum()
    }

    fn encode(&mut self, phase: Phase, range: Range<usize>, out: &mut Vec<u8>) -> Result<(), CoderError> {
        let mut state = self.codecs.lock();
        if state.era != self.era {
            return Err(CommError::Cancelled { op: "average" }.into());
        }
        let values = &self.blocks[state.block(&range)?];
        out.extend_from_slice(state.encode(phase, &range, values)?);
        Ok(())
    }

    fn decode(&mut self, range: Range<usize>, bytes: &[u8], merge: Merge) -> Result<(), CoderError> {
        self.merge(&range, merge, |decoder, out| decode(decoder, bytes, out))
    }

    fn encode_plain(&mut self, range: Range<usize>, out: &mut Vec<u8>) -> Result<(), CoderError> {
        let values = &self.blocks[self.codecs.lock().block(&range)?];
        let mut write = |values: &[f32]| out.extend(values.iter().flat_map(|value| value.to_le_bytes()));
        match values.host() {
            Some(values) => write(values),
            None => write(&values.to_vec::<f32>()?),
        }
        Ok(())
    }

    fn decode_plain(&mut self, range: Range<usize>, bytes: &[u8], merge: Merge) -> Result<(), CoderError> {
        if bytes.len() != range.len() * size_of::<f32>() {
            return Err(format!("{} bytes of plain f32 for {} values", bytes.len(), range.len()).into());
        }
        let values: Vec<f32> =
            bytes.as_chunks::<4>().0.iter().map(|&value| f32::from_le_bytes(value)).collect();
        self.merge(&range, merge, |_, out| Ok(out.write(&values)?))
    }

    fn divide(&mut self, range: Range<usize>, by: usize) -> Result<(), CoderError> {
        let state = self.codecs.lock();
        let block = state.block(&range)?;
        Ok(state.decoder.device().scale(&mut self.blocks[block], 1.0 / by as f32)?)
    }
}
