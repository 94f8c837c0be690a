//! Copies to memory that is not read again soon. The stores bypass the caches, so data in use stays there, and
//! the target is not read into the caches first.

/// Minimum size in bytes of a buffer that does not fit in the caches: its first parts are evicted before its
/// last part is written.
const MIN_UNCACHED_BUFFER: usize = 8 << 20;
/// Size of a copy in bytes below which bypassing the caches has no effect.
const MIN_STREAMED_COPY: usize = 16 << 10;

/// Copies `from` to `into`, which is a part of a buffer of `whole` bytes.
///
/// # Panics
/// If the lengths differ.
pub(crate) fn copy_part(into: &mut [u8], from: &[u8], whole: usize) {
    assert_eq!(into.len(), from.len(), "the source and the target of a copy have different lengths");
    #[cfg(target_arch = "x86_64")]
    if whole >= MIN_UNCACHED_BUFFER && into.len() >= MIN_STREAMED_COPY && is_x86_feature_detected!("avx") {
        // SAFETY: the check above has detected AVX.
        #[expect(unsafe_code, reason = "calls a function compiled for instructions that the machine has")]
        unsafe {
            copy_non_temporal(into, from);
        }
        return;
    }
    into.copy_from_slice(from);
}

/// Copies with stores that bypass the caches.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx")]
fn copy_non_temporal(into: &mut [u8], from: &[u8]) {
    use std::arch::x86_64::{__m256i, _mm_sfence, _mm256_stream_si256};

    let (first, words, last) = bytemuck::pod_align_to_mut::<u8, __m256i>(into);
    let (start, rest) = from.split_at(first.len());
    let (sources, end) = rest.as_chunks::<{ size_of::<__m256i>() }>();
    first.copy_from_slice(start);
    for (word, source) in words.iter_mut().zip(sources) {
        // SAFETY: a reference is aligned and may be written.
        #[expect(unsafe_code, reason = "stores that bypass the caches take pointers")]
        unsafe {
            _mm256_stream_si256(word, bytemuck::cast(*source));
        }
    }
    last.copy_from_slice(end);
    // Stores that bypass the caches are not ordered with other stores. After this fence, a thread that is told
    // that the copy is done also sees the copied bytes.
    _mm_sfence();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_is_copied_and_none_beside() {
        let source: Vec<u8> = (0..3 * MIN_STREAMED_COPY).map(|i| (i * 31 % 251) as u8).collect();
        for whole in [0, MIN_UNCACHED_BUFFER] {
            for len in [
                0,
                1,
                MIN_STREAMED_COPY - 1,
                MIN_STREAMED_COPY,
                MIN_STREAMED_COPY + 1,
                MIN_STREAMED_COPY + 63,
                MIN_STREAMED_COPY + 64,
                2 * MIN_STREAMED_COPY + 17,
            ] {
                for at in [0, 1, 4, 16, 63, 64, 65] {
                    let mut into = vec![0xEE; 3 * MIN_STREAMED_COPY];
                    copy_part(&mut into[at..at + len], &source[7..7 + len], whole);
                    assert_eq!(into[at..at + len], source[7..7 + len]);
                    assert!(into[..at].iter().chain(&into[at + len..]).all(|&b| b == 0xEE));
                }
            }
        }
    }
}
