//! The only place that knows about instruction sets: a kernel is plain Rust, compiled once for the baseline and once
//! for AVX2, and chosen at run time. Both versions do the same IEEE operations in the same order (Rust neither fuses nor
//! reassociates), so they give the same bytes; a test over all codecs says so.
#![expect(unsafe_code, reason = "calling a function compiled for AVX2, after the processor was asked")]

/// A loop over plain slices. `run` must be `#[inline(always)]`, or it stays compiled for the baseline.
pub(crate) trait Kernel {
    type Output;
    fn run(self) -> Self::Output;
}

/// Which version of the kernels to run. Only [`Level::detect`] makes one that is not portable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Level {
    avx2: bool,
}

impl Level {
    /// The baseline of the target.
    #[cfg(test)]
    pub(crate) const PORTABLE: Self = Self { avx2: false };

    /// The best that this processor has.
    pub(crate) fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        let avx2 = is_x86_feature_detected!("avx2");
        #[cfg(not(target_arch = "x86_64"))]
        let avx2 = false;
        Self { avx2 }
    }

    /// Runs `kernel`.
    pub(crate) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        #[cfg(target_arch = "x86_64")]
        if self.avx2 {
            // SAFETY: `avx2` is true only if `detect` found the feature on this processor.
            return unsafe { with_avx2(kernel) };
        }
        kernel.run()
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn with_avx2<K: Kernel>(kernel: K) -> K::Output {
    kernel.run()
}
