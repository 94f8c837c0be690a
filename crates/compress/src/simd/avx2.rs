//! Hand-written AVX2 and F16C versions of the hottest loops, which compilers do not vectorize well. Results
//! equal those of the portable kernels bit for bit. These loops do not depend on blocks or headers.
//!
//! Decoders read as many codes as `out` has elements, and return true if a code is one that no encoder writes.
//! With `STREAM` they use non-temporal stores, and `out` must be aligned to 16 bytes. All encoders but
//! `encode_f16` take finite values only. The `residual_*` encoders also replace each value by its quantization
//! error.
#![expect(unsafe_code, reason = "loads and stores of whole registers")]

use std::arch::x86_64::{
    __m256, __m256i, _MM_FROUND_TO_NEAREST_INT, _MM_HINT_T0, _mm_loadl_epi64, _mm_prefetch, _mm_storeu_si128,
    _mm_stream_ps, _mm256_and_si256, _mm256_castps_si256, _mm256_castps256_ps128, _mm256_castsi256_ps,
    _mm256_castsi256_si128, _mm256_cmpeq_epi8, _mm256_cmpeq_epi16, _mm256_cvtepi8_epi32, _mm256_cvtepi32_ps,
    _mm256_cvtepu16_epi32, _mm256_cvtph_ps, _mm256_cvtps_epi32, _mm256_cvtps_ph, _mm256_extractf128_ps,
    _mm256_extracti128_si256, _mm256_loadu_ps, _mm256_loadu_si256, _mm256_max_epi32, _mm256_max_ps,
    _mm256_min_ps, _mm256_movemask_epi8, _mm256_mul_ps, _mm256_or_si256, _mm256_packs_epi16,
    _mm256_packs_epi32, _mm256_permutevar8x32_epi32, _mm256_set1_epi8, _mm256_set1_epi16, _mm256_set1_epi32,
    _mm256_set1_ps, _mm256_setr_epi32, _mm256_setzero_ps, _mm256_setzero_si256, _mm256_slli_epi32,
    _mm256_srai_epi32, _mm256_srli_epi32, _mm256_storeu_ps, _mm256_storeu_si256, _mm256_sub_ps,
};

use crate::scale::Scale;

/// Prefetch distance of the codes, in bytes. Decoding a page of codes takes longer than the memory's latency.
const AHEAD: usize = 4096;

#[inline]
#[target_feature(enable = "avx2,f16c")]
pub(super) fn f16<const STREAM: bool>((): (), codes: &[u8], out: &mut [[f32; 16]]) -> bool {
    let exponent = _mm256_set1_epi16(0x7c00);
    let mut refused = _mm256_setzero_si256();
    for (codes, out) in codes.as_chunks().0.iter().zip(out) {
        prefetch_codes(codes);
        let words = load(codes);
        let infinite = _mm256_cmpeq_epi16(_mm256_and_si256(words, exponent), exponent);
        refused = _mm256_or_si256(refused, infinite);
        let [low, high] = halves(out);
        put::<STREAM>(_mm256_cvtph_ps(_mm256_castsi256_si128(words)), low);
        put::<STREAM>(_mm256_cvtph_ps(_mm256_extracti128_si256::<1>(words)), high);
    }
    any(refused)
}

#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn bf16<const STREAM: bool>((): (), codes: &[u8], out: &mut [[f32; 16]]) -> bool {
    let exponent = _mm256_set1_epi16(0x7f80);
    let mut refused = _mm256_setzero_si256();
    for (codes, out) in codes.as_chunks().0.iter().zip(out) {
        prefetch_codes(codes);
        let words = load(codes);
        let infinite = _mm256_cmpeq_epi16(_mm256_and_si256(words, exponent), exponent);
        refused = _mm256_or_si256(refused, infinite);
        let upper = |words| _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(words)));
        let [low, high] = halves(out);
        put::<STREAM>(upper(_mm256_castsi256_si128(words)), low);
        put::<STREAM>(upper(_mm256_extracti128_si256::<1>(words)), high);
    }
    any(refused)
}

#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn int8<const STREAM: bool>(scale: Scale, codes: &[u8], out: &mut [[f32; 32]]) -> bool {
    let (scale, least) = (_mm256_set1_ps(scale.get()), _mm256_set1_epi8(i8::MIN));
    let mut refused = _mm256_setzero_si256();
    for (codes, out) in codes.as_chunks().0.iter().zip(out) {
        prefetch_codes(codes);
        refused = _mm256_or_si256(refused, _mm256_cmpeq_epi8(load(codes), least));
        for (codes, out) in codes.as_chunks::<8>().0.iter().zip(out.as_chunks_mut().0) {
            // SAFETY: eight bytes are read.
            let eight = unsafe { _mm_loadl_epi64(codes.as_ptr().cast()) };
            put::<STREAM>(_mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight)), scale), out);
        }
    }
    any(refused)
}

#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn int4<const STREAM: bool>(scale: Scale, codes: &[u8], out: &mut [[f32; 64]]) -> bool {
    let scale = _mm256_set1_ps(scale.get());
    let (low, high) = (_mm256_set1_epi8(0x0f), _mm256_set1_epi8(0xf0_u8.cast_signed()));
    let (least_low, least_high) = (_mm256_set1_epi8(8), _mm256_set1_epi8(i8::MIN));
    let mut refused = _mm256_setzero_si256();
    for (codes, out) in codes.as_chunks().0.iter().zip(out) {
        let mut words = load(codes);
        let lows = _mm256_cmpeq_epi8(_mm256_and_si256(words, low), least_low);
        let highs = _mm256_cmpeq_epi8(_mm256_and_si256(words, high), least_high);
        refused = _mm256_or_si256(refused, _mm256_or_si256(lows, highs));
        for out in out.as_chunks_mut().0 {
            let codes = _mm256_srai_epi32::<28>(_mm256_slli_epi32::<28>(words));
            put::<STREAM>(_mm256_mul_ps(_mm256_cvtepi32_ps(codes), scale), out);
            words = _mm256_srli_epi32::<4>(words);
        }
    }
    any(refused)
}

#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn sign<const STREAM: bool>(scale: f32, codes: &[u8], out: &mut [[f32; 256]]) -> bool {
    let scale = _mm256_set1_epi32(scale.to_bits().cast_signed());
    for (codes, out) in codes.as_chunks().0.iter().zip(out) {
        let mut words = load(codes);
        for out in out.as_chunks_mut().0 {
            let signed = _mm256_or_si256(_mm256_slli_epi32::<31>(words), scale);
            put::<STREAM>(_mm256_castsi256_ps(signed), out);
            words = _mm256_srli_epi32::<1>(words);
        }
    }
    false
}

/// Returns the bits of the largest magnitude, which are at least infinity's if a value is not finite.
#[inline]
#[target_feature(enable = "avx2,f16c")]
pub(super) fn encode_f16(x: &[[f32; 8]], codes: &mut [u8]) -> i32 {
    let (most, magnitude) = (_mm256_set1_ps(65504.0), _mm256_set1_epi32(i32::MAX));
    let mut largest = _mm256_setzero_si256();
    for (x, codes) in x.iter().zip(codes.as_chunks_mut::<16>().0) {
        let x = read(x);
        largest = _mm256_max_epi32(largest, _mm256_and_si256(_mm256_castps_si256(x), magnitude));
        // Values that would round to infinity become the largest finite value.
        let x = _mm256_max_ps(_mm256_min_ps(x, most), _mm256_sub_ps(_mm256_setzero_ps(), most));
        let halves = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x);
        // SAFETY: 16 bytes are written, at any address.
        unsafe { _mm_storeu_si128(codes.as_mut_ptr().cast(), halves) };
    }
    let mut lanes = [0; 8];
    // SAFETY: 32 bytes are written, at any address.
    unsafe { _mm256_storeu_si256(lanes.as_mut_ptr().cast(), largest) };
    lanes.into_iter().fold(0, i32::max)
}

#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn encode_int8(scale: Scale, x: &[[f32; 32]], codes: &mut [u8]) {
    let factor = _mm256_set1_ps(scale.factor());
    for (x, codes) in x.iter().zip(codes.as_chunks_mut().0) {
        let rounded = |i: usize| round(read(&x.as_chunks().0[i]), factor);
        store(narrow([rounded(0), rounded(1), rounded(2), rounded(3)]), codes);
    }
}

#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn residual_int8(scale: Scale, v: &mut [[f32; 32]], codes: &mut [u8]) {
    let (factor, scale) = (_mm256_set1_ps(scale.factor()), _mm256_set1_ps(scale.get()));
    for (v, codes) in v.iter_mut().zip(codes.as_chunks_mut().0) {
        let mut rounded = |i: usize| quantize_residual(&mut v.as_chunks_mut().0[i], factor, scale);
        store(narrow([rounded(0), rounded(1), rounded(2), rounded(3)]), codes);
    }
}

#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn encode_int4(scale: Scale, x: &[[f32; 64]], codes: &mut [u8]) {
    let factor = _mm256_set1_ps(scale.factor());
    for (x, codes) in x.iter().zip(codes.as_chunks_mut().0) {
        let mut words = _mm256_setzero_si256();
        for x in x.as_chunks().0 {
            words = push4(words, round(read(x), factor));
        }
        store(words, codes);
    }
}

#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn residual_int4(scale: Scale, v: &mut [[f32; 64]], codes: &mut [u8]) {
    let (factor, scale) = (_mm256_set1_ps(scale.factor()), _mm256_set1_ps(scale.get()));
    for (v, codes) in v.iter_mut().zip(codes.as_chunks_mut().0) {
        let mut words = _mm256_setzero_si256();
        for v in v.as_chunks_mut().0 {
            words = push4(words, quantize_residual(v, factor, scale));
        }
        store(words, codes);
    }
}

#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn encode_sign(_: f32, x: &[[f32; 256]], codes: &mut [u8]) {
    let negative = _mm256_set1_epi32(i32::MIN);
    for (x, codes) in x.iter().zip(codes.as_chunks_mut().0) {
        let mut words = _mm256_setzero_si256();
        for x in x.as_chunks().0 {
            let sign = _mm256_and_si256(_mm256_castps_si256(read(x)), negative);
            words = _mm256_or_si256(_mm256_srli_epi32::<1>(words), sign);
        }
        store(words, codes);
    }
}

#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn residual_sign(scale: f32, v: &mut [[f32; 256]], codes: &mut [u8]) {
    let (negative, scale) = (_mm256_set1_epi32(i32::MIN), _mm256_castps_si256(_mm256_set1_ps(scale)));
    for (v, codes) in v.iter_mut().zip(codes.as_chunks_mut().0) {
        let mut words = _mm256_setzero_si256();
        for v in v.as_chunks_mut().0 {
            let value = read(v);
            let sign = _mm256_and_si256(_mm256_castps_si256(value), negative);
            words = _mm256_or_si256(_mm256_srli_epi32::<1>(words), sign);
            let sent = _mm256_castsi256_ps(_mm256_or_si256(sign, scale));
            put::<false>(_mm256_sub_ps(value, sent), v);
        }
        store(words, codes);
    }
}

/// Returns `x * factor` rounded to nearest, ties to even, in the processor's default rounding mode.
#[inline]
#[target_feature(enable = "avx2")]
fn round(x: __m256, factor: __m256) -> __m256i {
    _mm256_cvtps_epi32(_mm256_mul_ps(x, factor))
}

/// Returns the codes of `v` and replaces `v` by its quantization error.
#[inline]
#[target_feature(enable = "avx2")]
fn quantize_residual(v: &mut [f32; 8], factor: __m256, scale: __m256) -> __m256i {
    let value = read(v);
    let codes = round(value, factor);
    put::<false>(_mm256_sub_ps(value, _mm256_mul_ps(_mm256_cvtepi32_ps(codes), scale)), v);
    codes
}

/// Narrows 32 codes to eight bits each, in order.
#[inline]
#[target_feature(enable = "avx2")]
fn narrow([a, b, c, d]: [__m256i; 4]) -> __m256i {
    // The pack instructions work on each half of a register, so the result holds four codes of each input in
    // turn.
    let packed = _mm256_packs_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
    _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7))
}

/// Shifts the words right by four bits and inserts eight codes of four bits at the top.
#[inline]
#[target_feature(enable = "avx2")]
fn push4(words: __m256i, codes: __m256i) -> __m256i {
    _mm256_or_si256(_mm256_srli_epi32::<4>(words), _mm256_slli_epi32::<28>(codes))
}

#[inline]
#[target_feature(enable = "avx2")]
fn read(x: &[f32; 8]) -> __m256 {
    // SAFETY: eight elements are read, at any address.
    unsafe { _mm256_loadu_ps(x.as_ptr()) }
}

#[inline]
#[target_feature(enable = "avx2")]
fn store(words: __m256i, bytes: &mut [u8; 32]) {
    // SAFETY: 32 bytes are written, at any address.
    unsafe { _mm256_storeu_si256(bytes.as_mut_ptr().cast(), words) };
}

#[inline]
#[target_feature(enable = "avx2")]
fn load(bytes: &[u8; 32]) -> __m256i {
    // SAFETY: 32 bytes are read, at any address.
    unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) }
}

/// Stores eight values. With `STREAM` the stores are non-temporal, and `out` must be aligned to 16 bytes.
#[inline]
#[target_feature(enable = "avx2")]
fn put<const STREAM: bool>(values: __m256, out: &mut [f32; 8]) {
    if STREAM {
        let (low, high) = out.split_at_mut(4);
        // SAFETY: four elements each; the caller has checked that `out` is aligned.
        unsafe {
            _mm_stream_ps(low.as_mut_ptr(), _mm256_castps256_ps128(values));
            _mm_stream_ps(high.as_mut_ptr(), _mm256_extractf128_ps::<1>(values));
        }
    } else {
        // SAFETY: eight elements are written, at any address.
        unsafe { _mm256_storeu_ps(out.as_mut_ptr(), values) };
    }
}

/// Prefetches the codes that lie `AHEAD` bytes after these.
#[inline]
#[target_feature(enable = "avx2")]
fn prefetch_codes(codes: &[u8; 32]) {
    _mm_prefetch::<_MM_HINT_T0>(codes.as_ptr().wrapping_add(AHEAD).cast());
}

fn halves(out: &mut [f32; 16]) -> [&mut [f32; 8]; 2] {
    let (low, high) = out.split_first_chunk_mut().expect("16 are more than 8");
    [low, high.first_chunk_mut().expect("8 are left")]
}

#[inline]
#[target_feature(enable = "avx2")]
fn any(mask: __m256i) -> bool {
    _mm256_movemask_epi8(mask) != 0
}
