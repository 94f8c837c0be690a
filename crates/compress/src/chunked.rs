//! Codecs of a fixed rate that encode every chunk of a vector on its own: one loop over chunks for all of them,
//! alone or on several threads, with and without feedback. Knows no format: that is a [`Chunks`].

use crate::compressor::Memoryless;
use crate::noise::Noise;
use crate::simd::Level;
use crate::staging::StagingBuffer;
use crate::threads;
use crate::values::Values;
use crate::wire::{CodecId, HEADER, check_body};
use crate::{CompressError, Compressor, Payload, PayloadRef, RoundKey, State};

/// Elements, roughly, that are encoded and hashed at a time: few enough that all the buffers stay near.
const CHUNK: usize = 2048;

/// How one chunk becomes bytes.
///
/// Only this crate has formats; the trait is public so that [`Chunked`] can be named.
pub trait Chunks: Clone + std::fmt::Debug + Send + Sync {
    /// The number on the wire.
    const ID: CodecId;
    /// Elements that are encoded on their own; only the vector's last chunk may have fewer.
    fn unit(&self) -> usize;

    /// Bytes of `len` elements that begin a unit; `usize::MAX` if they are too many.
    fn bytes(&self, len: usize) -> usize;

    /// What a decoder must know, in front of all chunks.
    fn parameters(&self) -> Option<[u8; 4]> {
        None
    }

    /// The format that such parameters mean.
    fn with_parameters(&self, _: [u8; 4]) -> Result<Self, CompressError> {
        Ok(self.clone())
    }

    /// Encodes whole units, the first of them with the element `at`, into exactly their bytes, with noise for
    /// codecs that draw; true if it must refuse a value that is not finite, or of which more is lost than f32
    /// holds (then nothing else matters but what was lost until there).
    fn encode(&self, pass: &mut Pass, at: usize, values: Values<'_>, out: &mut [u8], noise: Noise) -> bool;

    /// Decodes whole units, the first of them with the element `at`.
    fn decode(&self, pass: &mut Pass, at: usize, bytes: &[u8], out: &mut [f32]) -> Result<(), CompressError>;
}

/// How a thread goes over a vector: with which instructions, and where it makes the values that it writes.
#[derive(Debug)]
pub struct Pass {
    pub(crate) level: Level,
    pub(crate) staging: StagingBuffer,
}

impl Pass {
    /// Over a short vector.
    pub(crate) fn short(level: Level) -> Self {
        Self { level, staging: StagingBuffer::InPlace }
    }
}

/// A codec that encodes chunk by chunk, each with a fixed number of bytes.
///
/// It has no memory, allocates nothing but the payload's buffer, and gives the same bytes for any number of
/// threads.
#[derive(Debug, Clone)]
pub struct Chunked<C> {
    pub(crate) chunks: C,
    pub(crate) level: Level,
    threads: usize,
}

impl<C: Chunks> Chunked<C> {
    pub(crate) fn of(chunks: C) -> Self {
        Self { chunks, level: Level::detect(), threads: 1 }
    }

    /// The codec on up to so many threads: [`Compressor::set_threads`].
    #[must_use]
    pub fn threads(mut self, threads: usize) -> Self {
        self.set_threads(threads);
        self
    }

    /// The codec compiled for the baseline of the target.
    #[cfg(test)]
    pub(crate) fn portable(self) -> Self {
        Self { level: Level::PORTABLE, ..self }
    }

    fn prefix(&self) -> usize {
        self.chunks.parameters().map_or(0, |p| p.len())
    }

    fn body_len(&self, len: usize) -> usize {
        self.chunks.bytes(len).saturating_add(self.prefix())
    }

    /// Elements of a chunk: whole units, at least one.
    fn chunk(&self) -> usize {
        let unit = self.chunks.unit();
        unit * (CHUNK / unit).max(1)
    }

    fn encode(&self, values: Values<'_>, key: RoundKey, out: &mut Payload) -> Result<(), CompressError> {
        let len = values.len();
        let noise = Noise::private(key);
        out.fill(C::ID, len, self.body_len(len), |body, crc| {
            let (head, body) = body.split_at_mut(self.prefix());
            head.copy_from_slice(self.chunks.parameters().as_ref().map_or(&[], |p| p));
            crc.update(head);
            let (hash, result) = self.encode_part(threads::worth(self.threads, len), 0, values, body, noise);
            crc.combine(&hash);
            result
        })
    }

    /// How a part of so many elements is gone over.
    fn pass(&self, len: usize) -> Pass {
        Pass { level: self.level, staging: StagingBuffer::new(self.level, len, self.chunk()) }
    }

    /// Encodes `values`, which begin at `at`, on so many threads; with the checksum of the bytes.
    fn encode_part(
        &self,
        pieces: usize,
        at: usize,
        values: Values<'_>,
        out: &mut [u8],
        noise: Noise,
    ) -> (crc32fast::Hasher, Result<(), CompressError>) {
        let (left, middle) = self.halves(pieces, values.len());
        if left == 0 {
            let mut crc = crc32fast::Hasher::new();
            let result = self.encode_here(at, values, out, noise, &mut crc);
            return (crc, result);
        }
        let (a, b) = values.split_at(middle);
        let (out_a, out_b) = out.split_at_mut(self.chunks.bytes(middle));
        std::thread::scope(|scope| {
            let b = scope.spawn(|| self.encode_part(pieces - left, at + middle, b, out_b, noise));
            let (mut crc, a) = self.encode_part(left, at, a, out_a, noise);
            let (crc_b, b) = b.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            crc.combine(&crc_b);
            (crc, a.and(b))
        })
    }

    /// The pieces of the first half and where it ends; 0 pieces if there is nothing to halve.
    fn halves(&self, pieces: usize, len: usize) -> (usize, usize) {
        let left = pieces / 2;
        let middle = (len as u128 * left as u128 / pieces as u128) as usize;
        let middle = middle / self.chunk() * self.chunk();
        (if middle == 0 { 0 } else { left }, middle)
    }

    fn encode_here(
        &self,
        mut at: usize,
        mut rest: Values<'_>,
        mut out: &mut [u8],
        noise: Noise,
        crc: &mut crc32fast::Hasher,
    ) -> Result<(), CompressError> {
        let mut pass = self.pass(rest.len());
        while rest.len() > 0 {
            let len = self.chunk().min(rest.len());
            let (mut values, next) = rest.split_at(len);
            let (bytes, next_out) = out.split_at_mut(self.chunks.bytes(len));
            let refused = self.chunks.encode(&mut pass, at, values.again(), bytes, noise);
            if refused {
                return Err(values.refusal(at));
            }
            crc.update(bytes);
            (at, rest, out) = (at + len, next, next_out);
        }
        Ok(())
    }

    fn decode_part(
        &self,
        pieces: usize,
        at: usize,
        body: &[u8],
        out: &mut [f32],
    ) -> Result<(), CompressError> {
        let (left, middle) = self.halves(pieces, out.len());
        if left == 0 {
            let (chunk, unit) = (self.chunk(), self.chunks.bytes(self.chunk()));
            let mut pass = self.pass(out.len());
            for (i, (out, bytes)) in out.chunks_mut(chunk).zip(body.chunks(unit)).enumerate() {
                self.chunks.decode(&mut pass, at + i * chunk, bytes, out)?;
            }
            return Ok(());
        }
        let (body_a, body_b) = body.split_at(self.chunks.bytes(middle));
        let (out_a, out_b) = out.split_at_mut(middle);
        std::thread::scope(|scope| {
            let b = scope.spawn(|| self.decode_part(pieces - left, at + middle, body_b, out_b));
            let a = self.decode_part(left, at, body_a, out_a);
            let b = b.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            a.and(b)
        })
    }
}

impl<C> State for Chunked<C> {}

impl<C: Chunks> Memoryless for Chunked<C> {
    fn compress_residual(
        &mut self,
        x: &[f32],
        e: &[f32],
        next: &mut [f32],
        key: RoundKey,
        out: &mut Payload,
    ) -> Result<(), CompressError> {
        crate::compressor::check_lengths(x, e, next).inspect_err(|_| out.clear())?;
        self.encode(Values::Feedback { x, e, next }, key, out)
    }
}

impl<C: Chunks> Compressor for Chunked<C> {
    fn compress(&mut self, x: &[f32], key: RoundKey, out: &mut Payload) -> Result<(), CompressError> {
        self.encode(Values::Read(x), key, out)
    }

    fn decompress(&self, p: PayloadRef<'_>, out: &mut [f32]) -> Result<(), CompressError> {
        let body = p.open(C::ID, out.len())?;
        let Some((head, chunks)) = body.split_at_checked(self.prefix()) else {
            return check_body(C::ID, out.len(), self.body_len(out.len()), body.len());
        };
        let theirs = match <[u8; 4]>::try_from(head) {
            Ok(parameters) => self.chunks.with_parameters(parameters)?,
            Err(_) => self.chunks.clone(),
        };
        let codec = Self { chunks: theirs, ..*self };
        check_body(C::ID, out.len(), codec.body_len(out.len()), body.len())?;
        codec.decode_part(threads::worth(self.threads, out.len()), 0, chunks, out)
    }

    fn max_payload(&self, len: usize) -> usize {
        self.body_len(len).saturating_add(HEADER)
    }

    fn set_threads(&mut self, threads: usize) {
        self.threads = threads.max(1);
    }
}
