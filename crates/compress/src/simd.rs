//! Instruction sets: a kernel is plain Rust, compiled once for the baseline and once for AVX2; the version is
//! chosen at run time. Both versions do the same IEEE operations in the same order (Rust neither fuses nor
//! reassociates them), so they give the same bytes. A test over codecs of each fixed rate checks this.
#![expect(
    unsafe_code,
    reason = "calls of functions compiled for AVX2, once it was detected; non-temporal stores; prefetches"
)]

#[cfg(target_arch = "x86_64")]
mod avx2;
mod dispatch;

pub(crate) use dispatch::{Avx2Token, FiniteValues};

/// A loop over plain slices. `run` must be `#[inline(always)]`; otherwise it is compiled for the baseline only.
pub(crate) trait Kernel {
    type Output;
    fn run(self) -> Self::Output;
}

/// The version of the kernels to run. AVX2 and F16C form one level, since every processor with AVX2 has F16C.
/// Only [`Level::detect`] returns a level with AVX2.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Level {
    avx2: bool,
}

impl Level {
    /// The baseline of the target.
    #[cfg(test)]
    pub(crate) const PORTABLE: Self = Self { avx2: false };

    /// Returns the best level that this processor supports.
    pub(crate) fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c");
        #[cfg(not(target_arch = "x86_64"))]
        let avx2 = false;
        Self { avx2 }
    }

    /// Returns the proof that AVX2 was detected, which the AVX2 encoders need.
    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    pub(crate) fn avx2_token(self) -> Option<Avx2Token> {
        Avx2Token::new(self, None, &[])
    }

    /// Runs `kernel` at this level.
    pub(crate) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        #[cfg(target_arch = "x86_64")]
        if self.avx2 {
            // SAFETY: `avx2` is true only if `detect` found the feature on this processor.
            return unsafe { with_avx2(kernel) };
        }
        kernel.run()
    }
}

/// Copies values to long vectors with non-temporal stores. Such stores do not read the target's cache lines and
/// do not evict data that is still needed.
#[derive(Debug)]
pub(crate) struct NonTemporalStores(Level);

/// Smallest length, in elements, of a vector that is written with non-temporal stores. Such a vector (8 MiB)
/// would not stay in the cache.
const LONG: usize = 1 << 21;

impl NonTemporalStores {
    /// Returns the writer for a vector of `len` elements, or `None` if ordinary stores are better.
    pub(crate) fn for_len(level: Level, len: usize) -> Option<Self> {
        (level.avx2 && len >= LONG).then_some(Self(level))
    }

    /// Copies `from` to `to`, which have equal lengths. Other threads may read `to` only after `self` was
    /// dropped.
    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    pub(crate) fn copy(&self, from: &[f32], to: &mut [f32]) {
        #[cfg(target_arch = "x86_64")]
        if self.0.avx2 {
            // SAFETY: `avx2` is true only if `detect` found the feature on this processor.
            return unsafe { stream_avx2(from, to) };
        }
        to.copy_from_slice(from);
    }
}

impl Drop for NonTemporalStores {
    fn drop(&mut self) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: every x86-64 processor has SSE.
        unsafe {
            std::arch::x86_64::_mm_sfence();
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
#[inline]
fn stream_avx2(from: &[f32], to: &mut [f32]) {
    use std::arch::x86_64::{_mm_stream_si32, _mm256_loadu_ps, _mm256_stream_ps};
    assert_eq!(from.len(), to.len());
    let one = |(from, to): (&f32, &mut f32)| {
        // SAFETY: an f32 is aligned to four bytes, as this store needs.
        unsafe { _mm_stream_si32(std::ptr::from_mut(to).cast(), from.to_bits().cast_signed()) };
    };
    // A cache line should not get both kinds of stores, since ordinary stores would read it; so unaligned ends
    // are written with non-temporal stores of one element.
    let head = to.as_ptr().align_offset(32).min(to.len());
    let ((from_head, from), (to_head, to)) = (from.split_at(head), to.split_at_mut(head));
    from_head.iter().zip(to_head).for_each(one);
    let ((from, from_tail), (to, to_tail)) = (from.as_chunks::<8>(), to.as_chunks_mut::<8>());
    for (from, to) in from.iter().zip(to) {
        // SAFETY: both are eight elements, and every chunk of `to` is at a multiple of 32 bytes.
        unsafe { _mm256_stream_ps(to.as_mut_ptr(), _mm256_loadu_ps(from.as_ptr())) };
    }
    from_tail.iter().zip(to_tail).for_each(one);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,f16c")]
fn with_avx2<K: Kernel>(kernel: K) -> K::Output {
    kernel.run()
}

/// Prefetches as many cache lines as `x` spans, beginning `ahead` elements after its first one. The address may
/// lie outside of any vector, since a prefetch is only a hint.
#[expect(clippy::inline_always, reason = "part of kernels")]
#[inline(always)]
pub(crate) fn prefetch(x: &[f32], ahead: usize) {
    #[cfg(target_arch = "x86_64")]
    for at in (0..x.len()).step_by(16) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: every x86-64 processor has SSE, and a prefetch of any address at all is harmless.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(x.as_ptr().wrapping_add(ahead + at).cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (x, ahead);
}

#[cfg(test)]
mod tests {
    use farflung_base::Philox;

    use crate::{
        Bf16, Codebook, E3M0, E4M3, F16, F32, Int2, Int3, Int4, Int8, Memoryless, MinMaxUint8, Natural,
        Payload, RoundKey, Sign, Uint3, Uint8,
    };

    #[test]
    fn every_version_gives_the_same_bytes_and_residuals() {
        type Pair = (Box<dyn Memoryless>, Box<dyn Memoryless>);
        macro_rules! both {
            ($codec:expr) => {
                (Box::new($codec), Box::new($codec.portable()))
            };
        }
        let table: [Pair; 18] = [
            both!(F32::new()),
            both!(F16::new()),
            both!(Bf16::new()),
            both!(Int8::new(256).unwrap()),
            both!(Int8::new(9).unwrap()),
            both!(Int8::stochastic(5000).unwrap()),
            both!(Int4::new(128).unwrap()),
            both!(Int3::new(300).unwrap()),
            both!(Int2::tern_grad(64).unwrap()),
            both!(Uint8::new(256).unwrap()),
            both!(Uint3::stochastic(100).unwrap()),
            both!(Sign::l1(4096).unwrap()),
            both!(Sign::l2(1000).unwrap()),
            both!(E4M3::new(64).unwrap()),
            both!(E3M0::new(64).unwrap()),
            both!(MinMaxUint8::new(64).unwrap()),
            both!(Natural::new()),
            both!(Codebook::<4>::quantiles(640).unwrap()),
        ];
        for (mut fast, mut portable) in table {
            for n in [0, 1, 15, 33, 2048, 20_011] {
                for std in [1e-41, 1e-6, 1.0, 3e4, 1e37] {
                    let (mut x, mut e) = (vec![0.0; n], vec![0.0; n]);
                    Philox::new(1, n as u64).fill_normal(std, &mut x);
                    Philox::new(2, n as u64).fill_normal(std / 100.0, &mut e);
                    let bits = |v: &[f32]| v.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
                    let run = |codec: &mut Box<dyn Memoryless>| {
                        let (mut p, mut q) = (Payload::new(), Payload::new());
                        let (mut next, mut out) = (vec![0.0; n], vec![0.0; n]);
                        codec.compress(&x, RoundKey::default(), &mut p).unwrap();
                        codec.compress_residual(&x, &e, &mut next, RoundKey::default(), &mut q).unwrap();
                        codec.decompress(q.view(), &mut out).unwrap();
                        (p, q, bits(&next), bits(&out))
                    };
                    assert_eq!(run(&mut fast), run(&mut portable), "{fast:?} n {n} std {std}");
                }
            }
        }
    }

    /// Long vectors are written with non-temporal stores, at addresses of different alignment.
    #[test]
    fn long_vectors_come_out_the_same_wherever_they_lie() {
        type Pair = (Box<dyn Memoryless>, Box<dyn Memoryless>);
        macro_rules! both {
            ($codec:expr) => {
                (Box::new($codec), Box::new($codec.portable()))
            };
        }
        let table: [Pair; 7] = [
            both!(F16::new()),
            both!(Bf16::new()),
            both!(Int8::new(100).unwrap()),
            both!(Int4::new(128).unwrap()),
            both!(Int4::new(999).unwrap()),
            both!(Sign::default()),
            both!(Sign::l1(5000).unwrap()),
        ];
        let n = super::LONG + 77;
        let (mut x, mut e) = (vec![0.0; n], vec![0.0; n]);
        Philox::new(1, 0).fill_normal(1.0, &mut x);
        Philox::new(2, 0).fill_normal(0.1, &mut e);
        // Blocks of zeros take another path.
        x[4096..12_288].fill(0.0);
        e[4096..12_288].fill(0.0);
        for (mut fast, mut portable) in table {
            let run = |codec: &mut Box<dyn Memoryless>, from: usize| {
                let (mut p, mut next, mut out) = (Payload::new(), vec![1.0; n + from], vec![1.0; n + from]);
                codec.compress_residual(&x, &e, &mut next[from..], RoundKey::default(), &mut p).unwrap();
                codec.decompress(p.view(), &mut out[from..]).unwrap();
                assert!(next[..from].iter().chain(&out[..from]).all(|v| v.to_bits() == 1_f32.to_bits()));
                let bits = |v: &[f32]| v[from..].iter().map(|v| v.to_bits()).collect::<Vec<_>>();
                (p, bits(&next), bits(&out))
            };
            let wanted = run(&mut portable, 0);
            for from in [0, 1, 4] {
                assert!(run(&mut fast, from) == wanted, "{fast:?} from {from}");
            }
        }
    }

    /// A code that no encoder writes is found at every position, also by the AVX2 decoders.
    #[test]
    fn refused_codes_are_found_everywhere() {
        let n = 300;
        let x = vec![1.0; n];
        let refused = |codec: &mut dyn Memoryless, head: usize, len: usize, spoil: &dyn Fn(&mut u8)| {
            let mut p = Payload::new();
            codec.compress(&x, RoundKey::default(), &mut p).unwrap();
            let mut out = vec![0.0; n];
            for at in head..len {
                let mut bytes = p.as_bytes().to_vec();
                spoil(&mut bytes[28 + at]);
                crate::mutate::reseal(&mut bytes);
                let result = codec.decompress(crate::PayloadRef::parse(&bytes).unwrap(), &mut out);
                assert!(result.is_err(), "{codec:?} byte {at}");
            }
        };
        refused(&mut Int8::new(300).unwrap(), 6, 306, &|b| *b = 0x80);
        refused(&mut Int4::new(300).unwrap(), 6, 156, &|b| *b = *b & 0x0f | 0x80);
        refused(&mut Int4::new(300).unwrap(), 6, 156, &|b| *b = *b & 0xf0 | 0x08);
    }
}
