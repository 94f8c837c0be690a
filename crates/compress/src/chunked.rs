//! Codecs of fixed rate that encode every chunk of a vector on its own. They share one loop over chunks, on one
//! or several threads, with and without feedback; each format is a [`Chunks`].

use crate::compressor::Memoryless;
use crate::noise::Noise;
use crate::simd::Level;
use crate::staging::StagingBuffer;
use crate::threads;
use crate::values::Values;
use crate::wire::{CodecId, HEADER, check_body};
use crate::{CompressError, Compressor, Payload, PayloadRef, RoundKey, State};

/// Approximate number of elements that are encoded and hashed at a time, so that all buffers stay in a near
/// cache.
const CHUNK: usize = 2048;

/// Encodes and decodes one chunk.
///
/// Formats are implemented in this crate only; the trait is public because [`Chunked`] names it.
pub trait Chunks: Clone + std::fmt::Debug + Send + Sync {
    /// Number of the codec in the wire format.
    const ID: CodecId;
    /// Returns the number of elements in a unit, which is encoded on its own. Only the vector's last unit may
    /// be shorter.
    fn unit(&self) -> usize;

    /// Returns the number of bytes of `len` elements that start at a unit's boundary, or `usize::MAX` if there
    /// are too many.
    fn bytes(&self, len: usize) -> usize;

    /// Returns the parameters that the decoder needs. They are written before all chunks.
    fn parameters(&self) -> Option<[u8; 4]> {
        None
    }

    /// Returns the format with these parameters, which a payload holds.
    fn with_parameters(&self, _: [u8; 4]) -> Result<Self, CompressError> {
        Ok(self.clone())
    }

    /// Encodes whole units into `out`, whose length is exactly their number of bytes. `at` is the index of the
    /// first element; `noise` is for codecs that round stochastically.
    ///
    /// Returns true if a value or a compression error is not finite. The output is then unspecified, with one
    /// exception: if all values are finite, the compression errors up to the first that is not finite are
    /// valid.
    fn encode(&self, pass: &mut Pass, at: usize, values: Values<'_>, out: &mut [u8], noise: Noise) -> bool;

    /// Decodes whole units. `at` is the index of the first element.
    fn decode(&self, pass: &mut Pass, at: usize, bytes: &[u8], out: &mut [f32]) -> Result<(), CompressError>;
}

/// How one thread processes a vector: the instruction set, and the staging buffer for the values it writes.
#[derive(Debug)]
pub struct Pass {
    pub(crate) level: Level,
    pub(crate) staging: StagingBuffer,
}

impl Pass {
    /// Creates a pass for a short vector, without a staging buffer.
    pub(crate) fn short(level: Level) -> Self {
        Self { level, staging: StagingBuffer::InPlace }
    }
}

/// A codec that encodes chunk by chunk, each with a fixed number of bytes.
///
/// It has no memory, allocates nothing but the payload's buffer, and writes the same bytes for any number of
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

    /// Sets the largest number of threads, as [`Compressor::set_threads`] does.
    #[must_use]
    pub fn threads(mut self, threads: usize) -> Self {
        self.set_threads(threads);
        self
    }

    /// Returns the codec with kernels compiled for the target's baseline.
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

    /// Returns the number of elements in a chunk: whole units, at least one.
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
            let (hash, result) =
                self.encode_part(threads::threads_for(self.threads, len), 0, values, body, noise);
            crc.combine(&hash);
            result
        })
    }

    /// Creates the pass for a part of `len` elements.
    fn pass(&self, len: usize) -> Pass {
        Pass { level: self.level, staging: StagingBuffer::new(self.level, len, self.chunk()) }
    }

    /// Encodes `values`, whose first element has the index `at`, on `pieces` threads. Returns the checksum of
    /// the bytes too.
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

    /// Splits `pieces` and `len` in two. Returns the number of pieces in the first half and its length; 0
    /// pieces if the part cannot be split.
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
            let refused = self.chunks.encode(&mut pass, at, values.reborrow(), bytes, noise);
            if refused {
                return Err(values.value_error(at));
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
        codec.decode_part(threads::threads_for(self.threads, out.len()), 0, chunks, out)
    }

    fn max_payload(&self, len: usize) -> usize {
        self.body_len(len).saturating_add(HEADER)
    }

    fn set_threads(&mut self, threads: usize) {
        self.threads = threads.max(1);
    }
}
