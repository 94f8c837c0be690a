//! Codecs of a pipeline boundary, which get the number of the sample of each activation: direct quantization,
//! and AQ-SGD, which sends the change since the sample was last seen. This module does not depend on pipelines.

mod channels;
#[cfg(feature = "mmap")]
mod mapped;
mod samples;
mod spec;
mod staged;
mod store;

#[cfg(feature = "mmap")]
pub use mapped::MappedStore;
pub use samples::Samples;
pub use spec::{LinkSpec, SampleShape, names};
pub use staged::Staged;
pub use store::{FileStore, MemoryStore, Store, checksum};

use crate::cast::Format;
use crate::compressor::{Memoryless, check_finite};
use crate::f16::Binary16;
use crate::state::state_of;
use crate::wire::{CodecId, HEADER};
use crate::{CompressError, Payload, PayloadRef, RoundKey, State};
use channels::Channels;
use samples::read_f16;

/// One end of a link that carries activations or their gradients, `[samples, positions, channels]`, each with a
/// stable sample number. Its state is the stored samples. [`State::commit`] and [`State::rollback`] have an
/// effect only if the store is [`Staged`].
pub trait LinkCodec: State + std::fmt::Debug + Send {
    /// Encodes `x`, samples of equal length.
    ///
    /// Errors: [`CompressError::NonFinite`]; [`CompressError::Overflow`]; [`CompressError::Samples`]; those of
    /// a store. After an error `out` is empty.
    fn encode(
        &mut self,
        ids: &[u64],
        x: &[f32],
        key: RoundKey,
        out: &mut Payload,
    ) -> Result<(), CompressError>;

    /// Decodes the other end's payload for the same samples. Afterwards both ends hold the same samples.
    ///
    /// Errors: those of [`crate::Compressor::decompress`]; [`CompressError::CacheMiss`] if the ends hold
    /// different copies of a sample. Nothing is changed then: the sender must [`Self::forget`] the sample and
    /// encode it again.
    fn decode(&mut self, ids: &[u64], p: PayloadRef<'_>, out: &mut [f32]) -> Result<(), CompressError>;

    /// Drops the stored copies of these samples, so that they are sent in full next time.
    ///
    /// Errors: those of a store.
    fn forget(&mut self, ids: &[u64]) -> Result<(), CompressError>;

    /// Returns the [`checksum`] of each sample's stored copy, or 0 if there is none. If both ends compare
    /// checksums and [`Self::forget`] the samples that differ, [`CompressError::CacheMiss`] does not occur.
    ///
    /// Errors: those of a store.
    fn checksums(&mut self, ids: &[u64]) -> Result<Vec<u32>, CompressError> {
        Ok(vec![0; ids.len()])
    }

    /// Returns the largest size in bytes of a payload of this many samples.
    fn max_payload(&self, samples: usize) -> usize;

    /// Returns the largest size in bytes of a payload of this many samples if both ends have copies of all of
    /// them.
    fn max_delta_payload(&self, samples: usize) -> usize {
        self.max_payload(samples)
    }
}

/// Sends activations encoded by any codec without memory. It is the baseline of AQ-SGD, and the codec of
/// AQ-SGD's backward direction.
///
/// The payload is the codec's own. If there are channels, the values are in the order channel, sample,
/// position.
#[derive(Debug, Clone)]
pub struct Direct<C> {
    inner: C,
    sample: usize,
    channels: Channels,
}

impl<C: Memoryless> Direct<C> {
    /// Creates a link whose samples have `sample` values each, encoded by `inner`.
    #[must_use]
    pub fn new(inner: C, sample: usize) -> Self {
        Self { inner, sample, channels: Channels::new(1) }
    }

    /// Like [`Self::new`], but puts the values of each of `channels` channels (the fastest dimension) together.
    /// A block codec whose block size is the number of positions then has one scale for each channel of each
    /// sample.
    ///
    /// Errors: [`CompressError::Samples`] if `sample` is not a multiple of `channels`.
    pub fn per_channel(inner: C, sample: usize, channels: usize) -> Result<Self, CompressError> {
        if channels == 0 || !sample.is_multiple_of(channels) {
            return Err(CompressError::Samples { samples: 1, len: channels, found: sample });
        }
        Ok(Self { channels: Channels::new(channels), ..Self::new(inner, sample) })
    }
}

/// A direct link stores nothing.
impl<C> State for Direct<C> {}

impl<C: Memoryless> LinkCodec for Direct<C> {
    fn encode(
        &mut self,
        ids: &[u64],
        x: &[f32],
        key: RoundKey,
        out: &mut Payload,
    ) -> Result<(), CompressError> {
        check_samples(ids, self.sample, x.len()).inspect_err(|_| out.clear())?;
        let encoded = self.inner.compress(self.channels.gather(x), key, out);
        encoded.map_err(|error| error.moved(|at| self.channels.source(at, x.len()), x))
    }

    fn decode(&mut self, ids: &[u64], p: PayloadRef<'_>, out: &mut [f32]) -> Result<(), CompressError> {
        check_samples(ids, self.sample, out.len())?;
        let Self { inner, channels, .. } = self;
        channels.scatter(out, |values| inner.decompress(p, values))
    }

    fn forget(&mut self, _: &[u64]) -> Result<(), CompressError> {
        Ok(())
    }

    fn max_payload(&self, samples: usize) -> usize {
        self.inner.max_payload(samples.saturating_mul(self.sample))
    }
}

fn check_samples(ids: &[u64], len: usize, found: usize) -> Result<(), CompressError> {
    if ids.len().checked_mul(len) == Some(found) {
        return Ok(());
    }
    Err(CompressError::Samples { samples: ids.len(), len, found })
}

/// Number of payload bytes before the samples' checksums.
const PREFIX: usize = 8;

/// AQ-SGD: both ends keep a copy `m` of each sample's activation; the change since then is sent, encoded by the
/// codec `C`. A sample without a copy is sent in full, as f16.
///
/// Both ends compute `a = f16(m + D(C(x - m)))`, bit for bit the same. The receiver outputs `a`, and both ends
/// store it in place of `m`: as f16, or in fewer bits ([`Samples`]), and the next change is relative to the
/// stored bits. A payload names the checksum of the copy that each change is relative to, so ends with
/// different copies (after a crash between writing and sending) detect it and send the sample in full. `a`
/// saturates at 65504. If a step is abandoned, both ends keep the newer activation, unless the store is
/// [`Staged`].
///
/// Bytes of the body for `s` samples: `8 + 4 s`, plus `2 len` for each sample in full, plus the body of the
/// codec's payload for all other samples together. State: that of the store.
///
/// Source: Wang et al. 2022, "Fine-tuning Language Models over Slow Networks using Activation Compression with
/// Guarantees", Alg. 1. Differs: a sample is sent in full if there is no copy, rather than in the first epoch.
///
/// ```
/// use farflung_compress::link::{AqSgd, LinkCodec, MemoryStore};
/// use farflung_compress::{Int4, Payload, RoundKey};
///
/// let end = || AqSgd::per_channel(Int4::new(128)?, MemoryStore::new(128 * 128), 128);
/// let (mut sender, mut receiver) = (end()?, end()?);
/// let (mut payload, mut out) = (Payload::new(), vec![0.0; 128 * 128]);
/// for epoch in 0..3 {
///     let x: Vec<f32> = (0..128 * 128).map(|i| (i as f32 + epoch as f32 * 0.01).sin()).collect();
///     sender.encode(&[7], &x, RoundKey::default(), &mut payload)?;
///     receiver.decode(&[7], payload.view(), &mut out)?;
/// }
/// assert_eq!(payload.view().body().len(), 8 + 4 + 4 + 128 * 128 / 2 + 2 * 128);
/// # Ok::<(), farflung_compress::CompressError>(())
/// ```
#[derive(Debug)]
pub struct AqSgd<C, S> {
    inner: C,
    pub(crate) store: S,
    channels: Channels,
    payload: Payload,
    /// The stored bytes of one sample's `m`.
    held: Vec<u8>,
    /// All samples' `m`, then `a`.
    values: Vec<f32>,
    /// Checksum of each sample's copy; 0 for a sample that is sent in full.
    bases: Vec<u32>,
    /// `x - m` of the samples with a copy, then the decoded changes.
    deltas: Vec<f32>,
}

impl<C: Memoryless, S: Store> AqSgd<C, S> {
    /// Creates a link whose changes are encoded by `inner`; activations are kept in `store`.
    #[must_use]
    pub fn new(inner: C, store: S) -> Self {
        let (payload, channels) = (Payload::new(), Channels::new(1));
        let (held, values, bases, deltas) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        Self { inner, store, channels, payload, held, values, bases, deltas }
    }

    /// Like [`Self::new`], but puts the values of each channel (the fastest dimension) together, as
    /// [`Direct::per_channel`] does.
    ///
    /// Errors: [`CompressError::Samples`] if a sample's length is not a multiple of `channels`.
    pub fn per_channel(inner: C, store: S, channels: usize) -> Result<Self, CompressError> {
        let len = store.samples().len();
        if channels == 0 || !len.is_multiple_of(channels) {
            return Err(CompressError::Samples { samples: 1, len: channels, found: len });
        }
        Ok(Self { channels: Channels::new(channels), ..Self::new(inner, store) })
    }

    /// Returns the store of the activations.
    pub fn store(&self) -> &S {
        &self.store
    }

    /// Reads the copies of the samples `ids` into `values` and their checksums into `bases`.
    fn read(&mut self, ids: &[u64]) -> Result<(), CompressError> {
        let samples = self.store.samples();
        self.held.resize(samples.bytes(), 0);
        self.values.resize(ids.len() * samples.len(), 0.0);
        self.bases.clear();
        for (id, values) in ids.iter().zip(self.values.chunks_mut(samples.len().max(1))) {
            let base = self.store.read(*id, &mut self.held)?;
            // Bytes that cannot be decoded were not written by this codec; treat the sample as missing.
            let whole = base != 0 && samples.read(&self.held, values).is_ok();
            self.bases.push(if whole { base } else { 0 });
        }
        // Samples without values have no chunks above, and nothing to change.
        self.bases.resize(ids.len(), 0);
        Ok(())
    }

    /// Adds the decoded changes to `values`, and stores the result.
    fn write(&mut self, ids: &[u64]) -> Result<(), CompressError> {
        let Self { store, held, values, bases, deltas, .. } = self;
        let samples = store.samples();
        let mut deltas = deltas.chunks(samples.len().max(1));
        for ((id, base), values) in ids.iter().zip(bases).zip(values.chunks_mut(samples.len().max(1))) {
            if *base != 0 {
                let delta = deltas.next().expect("each sample with a base has a change");
                values.iter_mut().zip(delta).for_each(|(value, delta)| *value = f16(*value + delta));
            }
            samples.write(values, held);
            store.write(*id, held)?;
        }
        Ok(())
    }

    /// Returns the index among all samples' values of the change at index `at` of the inner codec's vector.
    fn source(&self, at: usize) -> usize {
        let (at, len) = (self.channels.source(at, self.deltas.len()), self.store.samples().len());
        let changed = (0..self.bases.len()).filter(|sample| self.bases[*sample] != 0).nth(at / len);
        changed.expect("each change belongs to a sample with a base") * len + at % len
    }

    /// Returns the number of values that are sent as changes.
    fn changed(&self) -> usize {
        self.bases.iter().filter(|base| **base != 0).count() * self.store.samples().len()
    }
}

/// Rounds to f16; larger magnitudes become the largest finite one.
fn f16(x: f32) -> f32 {
    Binary16::decode(Binary16::encode(x))
}

state_of!([C: Memoryless, S: Store] AqSgd<C, S>, self => self.store);

impl<C: Memoryless, S: Store> LinkCodec for AqSgd<C, S> {
    fn encode(
        &mut self,
        ids: &[u64],
        x: &[f32],
        key: RoundKey,
        out: &mut Payload,
    ) -> Result<(), CompressError> {
        out.clear();
        let samples = self.store.samples();
        check_samples(ids, samples.len(), x.len())?;
        check_finite(x)?;
        self.read(ids)?;
        self.deltas.clear();
        let each = x.chunks(samples.len().max(1)).zip(self.values.chunks_mut(samples.len().max(1)));
        for ((x, values), base) in each.zip(&self.bases) {
            if *base == 0 {
                values.iter_mut().zip(x).for_each(|(value, x)| *value = f16(*x));
            } else {
                self.deltas.extend(x.iter().zip(values).map(|(x, value)| x - *value));
            }
        }
        let encoded = self.inner.compress(self.channels.gather(&self.deltas), key, &mut self.payload);
        encoded.map_err(|error| error.moved(|at| self.source(at), x))?;
        let changes = self.payload.view();
        let Self { inner, channels, deltas, .. } = self;
        channels.scatter(deltas, |values| inner.decompress(changes, values))?;

        let in_full = x.len() - self.changed();
        let len = PREFIX + 4 * ids.len() + 2 * in_full + changes.body().len();
        let (bases, values) = (&self.bases, &self.values);
        out.fill(CodecId::AQ_SGD, x.len(), len, |body, crc| {
            let (prefix, rest) = body.split_at_mut(PREFIX);
            prefix[..4].copy_from_slice(&(ids.len() as u32).to_le_bytes());
            prefix[4..].copy_from_slice(&[changes.codec().0, samples.tag(), 0, 0]);
            let (words, rest) = rest.split_at_mut(4 * bases.len());
            for (word, base) in words.as_chunks_mut().0.iter_mut().zip(bases) {
                *word = base.to_le_bytes();
            }
            let (full, rest) = rest.split_at_mut(2 * in_full);
            let each = values.chunks(samples.len().max(1)).zip(bases);
            let unheld = each.filter(|(_, base)| **base == 0).flat_map(|(values, _)| values);
            for (code, value) in full.as_chunks_mut().0.iter_mut().zip(unheld) {
                *code = Binary16::encode(*value);
            }
            rest.copy_from_slice(changes.body());
            crc.update(body);
            Ok(())
        })?;
        self.write(ids).inspect_err(|_| out.clear())
    }

    fn decode(&mut self, ids: &[u64], p: PayloadRef<'_>, out: &mut [f32]) -> Result<(), CompressError> {
        let samples = self.store.samples();
        check_samples(ids, samples.len(), out.len())?;
        let body = p.open(CodecId::AQ_SGD, out.len())?;
        let wrong = |wanted: usize| {
            let (wanted, found) = (wanted as u64, body.len() as u64);
            CompressError::BodyLength { codec: CodecId::AQ_SGD, count: out.len(), wanted, found }
        };
        let words = PREFIX + 4 * ids.len();
        let (head, rest) = body.split_at_checked(words).ok_or_else(|| wrong(words))?;
        let (&[a, b, c, d, inner, tag, 0, 0], bases) =
            head.split_first_chunk::<PREFIX>().expect("the head contains the prefix")
        else {
            return Err(wrong(words));
        };
        if [a, b, c, d] != (ids.len() as u32).to_le_bytes() {
            return Err(wrong(words));
        }
        samples.check_tag(tag)?;
        self.read(ids)?;
        for ((base, id), held) in bases.as_chunks().0.iter().zip(ids).zip(&mut self.bases) {
            let wanted = u32::from_le_bytes(*base);
            if wanted != 0 && wanted != *held {
                return Err(CompressError::CacheMiss { id: *id, wanted, found: *held });
            }
            *held = wanted;
        }
        let in_full = out.len() - self.changed();
        let (full, changes) = rest.split_at_checked(2 * in_full).ok_or_else(|| wrong(words + 2 * in_full))?;
        self.deltas.resize(out.len() - in_full, 0.0);
        let changes = PayloadRef::nested(CodecId(inner), self.deltas.len(), changes);
        let Self { inner, channels, deltas, values, bases, .. } = self;
        channels.scatter(deltas, |values| inner.decompress(changes, values))?;
        if let Some(index) = deltas.iter().position(|delta| !delta.is_finite()) {
            return Err(CompressError::Code { index, code: deltas[index].to_bits() });
        }
        let each = values.chunks_mut(samples.len().max(1)).zip(&*bases).filter(|(_, base)| **base == 0);
        for ((values, _), full) in each.zip(full.chunks((2 * samples.len()).max(1))) {
            read_f16(full, values)?;
        }
        self.write(ids)?;
        out.copy_from_slice(&self.values);
        Ok(())
    }

    fn forget(&mut self, ids: &[u64]) -> Result<(), CompressError> {
        ids.iter().try_for_each(|id| self.store.forget(*id))
    }

    fn checksums(&mut self, ids: &[u64]) -> Result<Vec<u32>, CompressError> {
        self.held.resize(self.store.samples().bytes(), 0);
        ids.iter().map(|id| self.store.read(*id, &mut self.held)).collect()
    }

    fn max_payload(&self, samples: usize) -> usize {
        let len = self.store.samples().len();
        let of = |full: usize| (samples - full).saturating_mul(len);
        // A payload is largest if all samples are sent as changes, or all in full. The inner codec's body may
        // have a prefix even for no values.
        let split = |full: usize| {
            let changes = self.inner.max_payload(of(full)) - HEADER;
            full.saturating_mul(2 * len).saturating_add(changes)
        };
        split(0).max(split(samples)).saturating_add(HEADER + PREFIX + 4 * samples)
    }

    fn max_delta_payload(&self, samples: usize) -> usize {
        let values = samples.saturating_mul(self.store.samples().len());
        self.inner.max_payload(values).saturating_add(PREFIX + 4 * samples)
    }
}
