//! Codecs of a pipeline boundary: they see which samples an activation belongs to. Direct quantisation, and AQ-SGD, which
//! sends what changed since the sample was last seen. Knows no pipeline.

mod channels;
mod store;

pub use store::{FileStore, MemoryStore, Store, checksum};

use crate::cast::Format;
use crate::chunked::{INFINITE, max_magnitude};
use crate::compressor::Memoryless;
use crate::f16::Binary16;
use crate::wire::{CodecId, HEADER};
use crate::{CompressError, Payload, PayloadRef, RoundKey};
use channels::Channels;

/// One end of a link that carries activations or their gradients, `[samples, positions, channels]`, each with the stable
/// number of its sample.
pub trait LinkCodec: std::fmt::Debug + Send {
    /// Encodes `x`, all samples of the same length.
    ///
    /// Errors: [`CompressError::NonFinite`]; [`CompressError::Samples`]; those of a store. Then `out` is empty.
    fn encode(
        &mut self,
        ids: &[u64],
        x: &[f32],
        key: RoundKey,
        out: &mut Payload,
    ) -> Result<(), CompressError>;

    /// Decodes the other end's payload for the same samples. What it writes is what the other end holds too.
    ///
    /// Errors: those of [`crate::Compressor::decompress`]; [`CompressError::CacheMiss`] if the ends do not hold the same: the
    /// sender is to [`Self::forget`] the sample and to encode it again. Then nothing was changed.
    fn decode(&mut self, ids: &[u64], p: PayloadRef<'_>, out: &mut [f32]) -> Result<(), CompressError>;

    /// Forgets what is held of these samples, so that they are sent in full.
    ///
    /// Errors: those of a store.
    fn forget(&mut self, ids: &[u64]) -> Result<(), CompressError>;

    /// The most bytes of the payload of so many samples.
    fn max_payload(&self, samples: usize) -> usize;
}

/// Any codec without memory on a link: AQ-SGD's rival, and its backward direction.
///
/// The payload is the codec's own, of the values in the order channel, sample, position if there are channels.
#[derive(Debug, Clone)]
pub struct Direct<C> {
    inner: C,
    sample: usize,
    channels: Channels,
}

impl<C: Memoryless> Direct<C> {
    /// Samples of `sample` values through `inner`.
    #[must_use]
    pub fn new(inner: C, sample: usize) -> Self {
        Self { inner, sample, channels: Channels::new(1) }
    }

    /// With the values of each of `channels` channels (the fastest dimension) together, so that a block codec whose block is
    /// the number of positions has a scale for each channel.
    ///
    /// Errors: [`CompressError::Samples`] if samples are not whole positions.
    pub fn per_channel(inner: C, sample: usize, channels: usize) -> Result<Self, CompressError> {
        if channels == 0 || !sample.is_multiple_of(channels) {
            return Err(CompressError::Samples { samples: 1, len: channels, found: sample });
        }
        Ok(Self { channels: Channels::new(channels), ..Self::new(inner, sample) })
    }
}

impl<C: Memoryless> LinkCodec for Direct<C> {
    fn encode(
        &mut self,
        ids: &[u64],
        x: &[f32],
        key: RoundKey,
        out: &mut Payload,
    ) -> Result<(), CompressError> {
        check_samples(ids, self.sample, x.len()).inspect_err(|_| out.clear())?;
        self.inner.compress(self.channels.gather(x), key, out)
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

/// Bytes of the payload before the samples' bases.
const PREFIX: usize = 8;

/// AQ-SGD: both ends keep each sample's activation as f16; what travels is the change since then, through the codec `C`. A
/// sample that is not held is sent in full, as f16.
///
/// Both ends set `m = f16(m + D(C(x - m)))`, bit for bit the same, and the receiver goes on with `m`. A change names the
/// checksum of the `m` that it is to be added to, so that ends which do not hold the same (one crashed between writing and
/// sending) find out and start the sample anew. `m` saturates at 65504. There is no rollback: a step that is given up leaves
/// both ends with the newer activation.
///
/// Bytes: `8 + 4 s`, for samples in full `2 len` each, and the body of the codec's payload of the others together.
///
/// Source: Wang et al. 2022, "Fine-tuning Language Models over Slow Networks using Activation Compression with
/// Guarantees", Alg. 1. Differs: the gate is per sample, not per epoch.
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
    store: S,
    channels: Channels,
    payload: Payload,
    /// The samples' `m` as bytes, one after the other.
    held: Vec<u8>,
    /// Checksums of what is held; 0 for a sample in full.
    bases: Vec<u32>,
    deltas: Vec<f32>,
}

impl<C: Memoryless, S: Store> AqSgd<C, S> {
    /// Changes through `inner`, activations in `store`.
    #[must_use]
    pub fn new(inner: C, store: S) -> Self {
        let (payload, channels) = (Payload::new(), Channels::new(1));
        Self { inner, store, channels, payload, held: Vec::new(), bases: Vec::new(), deltas: Vec::new() }
    }

    /// As [`Self::new`], with the values of each channel (the fastest dimension) together, as in [`Direct::per_channel`].
    ///
    /// Errors: [`CompressError::Samples`] if samples are not whole positions.
    pub fn per_channel(inner: C, store: S, channels: usize) -> Result<Self, CompressError> {
        if channels == 0 || !store.sample().is_multiple_of(channels) {
            return Err(CompressError::Samples { samples: 1, len: channels, found: store.sample() });
        }
        Ok(Self { channels: Channels::new(channels), ..Self::new(inner, store) })
    }

    /// Where activations are held.
    pub fn store(&self) -> &S {
        &self.store
    }

    /// Reads what is held of `ids` into `held` and `bases`.
    fn read(&mut self, ids: &[u64]) -> Result<(), CompressError> {
        let bytes = 2 * self.store.sample();
        self.held.resize(ids.len() * bytes, 0);
        self.bases.clear();
        for (id, held) in ids.iter().zip(self.held.chunks_mut(bytes.max(1))) {
            self.bases.push(self.store.read(*id, held)?);
        }
        Ok(())
    }

    /// Adds the changes to what is held, and keeps it.
    fn write(&mut self, ids: &[u64]) -> Result<(), CompressError> {
        let sample = self.store.sample();
        let mut deltas = self.deltas.chunks(sample.max(1));
        for ((id, base), held) in ids.iter().zip(&self.bases).zip(self.held.chunks_mut((2 * sample).max(1))) {
            if *base != 0 {
                let delta = deltas.next().expect("there is one for each sample that has a base");
                for (code, delta) in held.as_chunks_mut().0.iter_mut().zip(delta) {
                    *code = Binary16::encode(Binary16::decode(*code) + delta);
                }
            }
            self.store.write(*id, held)?;
        }
        Ok(())
    }

    /// Values that travel as changes.
    fn changed(&self) -> usize {
        self.bases.iter().filter(|base| **base != 0).count() * self.store.sample()
    }
}

impl<C: Memoryless, S: Store> LinkCodec for AqSgd<C, S> {
    fn encode(
        &mut self,
        ids: &[u64],
        x: &[f32],
        key: RoundKey,
        out: &mut Payload,
    ) -> Result<(), CompressError> {
        out.clear();
        let sample = self.store.sample();
        check_samples(ids, sample, x.len())?;
        if max_magnitude(x) >= INFINITE {
            let index = x.iter().position(|x| !x.is_finite()).expect("one was seen");
            return Err(CompressError::NonFinite { index, value: x[index] });
        }
        self.read(ids)?;
        self.deltas.clear();
        let samples = x.chunks(sample.max(1)).zip(self.held.chunks_mut((2 * sample).max(1)));
        for ((x, held), base) in samples.zip(&self.bases) {
            let codes = held.as_chunks_mut().0.iter_mut().zip(x);
            if *base == 0 {
                codes.for_each(|(code, x)| *code = Binary16::encode(*x));
            } else {
                self.deltas.extend(codes.map(|(code, x)| x - Binary16::decode(*code)));
            }
        }
        self.inner.compress(self.channels.gather(&self.deltas), key, &mut self.payload)?;
        let changes = self.payload.view();
        let Self { inner, channels, deltas, .. } = self;
        channels.scatter(deltas, |values| inner.decompress(changes, values))?;

        let in_full: usize = self.bases.iter().filter(|base| **base == 0).count();
        let len = PREFIX + 4 * ids.len() + in_full * 2 * sample + changes.body().len();
        let (bases, held) = (&self.bases, &self.held);
        out.fill(CodecId::AQ_SGD, x.len(), len, |body, crc| {
            let (prefix, rest) = body.split_at_mut(PREFIX);
            prefix[..4].copy_from_slice(&(ids.len() as u32).to_le_bytes());
            prefix[4..].copy_from_slice(&[changes.codec().0, 0, 0, 0]);
            let (words, mut rest) = rest.split_at_mut(4 * bases.len());
            for (word, base) in words.as_chunks_mut().0.iter_mut().zip(bases) {
                *word = base.to_le_bytes();
            }
            for (held, _) in held.chunks((2 * sample).max(1)).zip(bases).filter(|(_, base)| **base == 0) {
                let (here, after) = rest.split_at_mut(held.len());
                here.copy_from_slice(held);
                rest = after;
            }
            rest.copy_from_slice(changes.body());
            crc.update(body);
            Ok(())
        })?;
        self.write(ids).inspect_err(|_| out.clear())
    }

    fn decode(&mut self, ids: &[u64], p: PayloadRef<'_>, out: &mut [f32]) -> Result<(), CompressError> {
        let sample = self.store.sample();
        check_samples(ids, sample, out.len())?;
        let body = p.open(CodecId::AQ_SGD, out.len())?;
        let wrong = |wanted: usize| {
            let (wanted, found) = (wanted as u64, body.len() as u64);
            CompressError::BodyLength { codec: CodecId::AQ_SGD, count: ids.len() * sample, wanted, found }
        };
        let words = PREFIX + 4 * ids.len();
        let (head, rest) = body.split_at_checked(words).ok_or_else(|| wrong(words))?;
        let (prefix, bases) = head.split_at(PREFIX);
        let (count, inner) = prefix.split_at(4);
        if count != (ids.len() as u32).to_le_bytes() || inner[1..] != [0, 0, 0] {
            return Err(wrong(words));
        }
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
        if let Some(index) = full.as_chunks().0.iter().position(|code| Binary16::refused(*code)) {
            let code = u32::from(u16::from_le_bytes(full.as_chunks().0[index]));
            return Err(CompressError::Code { index, code });
        }
        self.deltas.resize(out.len() - in_full, 0.0);
        let changes = PayloadRef::nested(CodecId(inner[0]), self.deltas.len(), changes);
        let Self { inner, channels, deltas, .. } = self;
        channels.scatter(deltas, |values| inner.decompress(changes, values))?;
        if max_magnitude(&self.deltas) >= INFINITE {
            let index = self.deltas.iter().position(|d| !d.is_finite()).expect("one was seen");
            return Err(CompressError::Code { index, code: self.deltas[index].to_bits() });
        }
        let held = self.held.chunks_mut((2 * sample).max(1)).zip(&self.bases);
        for ((held, _), full) in held.filter(|(_, base)| **base == 0).zip(full.chunks((2 * sample).max(1))) {
            held.copy_from_slice(full);
        }
        self.write(ids)?;
        for (out, code) in out.iter_mut().zip(self.held.as_chunks().0) {
            *out = Binary16::decode(*code);
        }
        Ok(())
    }

    fn forget(&mut self, ids: &[u64]) -> Result<(), CompressError> {
        ids.iter().try_for_each(|id| self.store.forget(*id))
    }

    fn max_payload(&self, samples: usize) -> usize {
        let sample = self.store.sample();
        let of = |full: usize| (samples - full).saturating_mul(sample);
        // Each sample either way; the codec's body may have a prefix even without any.
        let split = |full: usize| {
            let changes = self.inner.max_payload(of(full)) - HEADER;
            full.saturating_mul(2 * sample).saturating_add(changes)
        };
        split(0).max(split(samples)).saturating_add(HEADER + PREFIX + 4 * samples)
    }
}
