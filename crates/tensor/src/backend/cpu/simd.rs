//! Selection of the instruction set at run time. A kernel is written once, generic over [`Level`]; [`simd!`]
//! compiles it for every level, and an [`Isa`] selects the copy to run.
//!
//! Only register tiles use AVX-512. Everything else runs its AVX2 copy there, which was measured to be as fast.

/// Instruction set with which kernels run on this machine. A value other than [`Isa::PORTABLE`] proves that the
/// instructions were detected at run time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Isa(Tag);

/// The instruction set. The field of [`Isa`] is private, so that only [`Isa::available`] creates one beyond the
/// baseline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Tag {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Isa {
    /// The baseline of the target architecture.
    pub(crate) const PORTABLE: Self = Self(Tag::Portable);

    /// Returns the instruction sets of this machine, the best first. Cheap: the standard library caches the
    /// detection.
    pub(crate) fn available() -> impl Iterator<Item = Self> {
        #[cfg(target_arch = "x86_64")]
        let vectors = {
            let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
            let avx512 = avx2 && is_x86_feature_detected!("avx512f");
            [avx512.then_some(Self(Tag::Avx512)), avx2.then_some(Self(Tag::Avx2))]
        };
        #[cfg(not(target_arch = "x86_64"))]
        let vectors = [None];
        vectors.into_iter().flatten().chain([Self::PORTABLE])
    }

    /// Returns the best instruction set of this machine.
    pub(crate) fn detect() -> Self {
        Self::available().next().expect("the portable instruction set is always available")
    }

    /// Returns the tag to match on.
    pub(super) const fn tag(self) -> Tag {
        self.0
    }

    /// Returns whether AVX2 and FMA may be used.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn has_avx2(self) -> bool {
        self.0 != Tag::Portable
    }
}

/// Operations that differ between the levels. Everything else is left to the compiler's vectoriser.
pub(crate) trait Level {
    /// Returns `a * b + c`, with one rounding if the level has FMA, else with two. Never a call to a software
    /// `fma`.
    fn mul_add(a: f32, b: f32, c: f32) -> f32;
}

/// The level of [`Isa::PORTABLE`].
pub(crate) struct Portable;

/// The level with AVX2 and FMA.
#[cfg(target_arch = "x86_64")]
pub(crate) struct Avx2;

impl Level for Portable {
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "it is one instruction")]
    fn mul_add(a: f32, b: f32, c: f32) -> f32 {
        a * b + c
    }
}

#[cfg(target_arch = "x86_64")]
impl Level for Avx2 {
    #[inline(always)]
    #[expect(
        clippy::inline_always,
        reason = "it is one instruction only if it is inlined into a function with FMA"
    )]
    fn mul_add(a: f32, b: f32, c: f32) -> f32 {
        a.mul_add(b, c)
    }
}

/// Compiles one function for every level. The generated function takes an [`Isa`] as its first argument; its
/// body has the level as a type parameter. Loops over slices in the body, and in the `#[inline(always)]`
/// functions that it calls, are vectorised for each level. A second bound (`L: Level + Trait`) adds further
/// operations.
///
/// ```text
/// simd! {
///     /// `y += a * x`.
///     pub(crate) fn axpy<L: Level>(a: f32, x: &[f32], y: &mut [f32]) {
///         for (y, &x) in y.iter_mut().zip(x) {
///             *y = L::mul_add(a, x, *y);
///         }
///     }
/// }
/// axpy(Isa::detect(), 2.0, &x, &mut y);
/// ```
macro_rules! simd {
    (
        $(#[$meta:meta])*
        $vis:vis fn $name:ident<$level:ident: Level $(+ $bound:path)?>($($arg:ident: $type:ty),* $(,)?) $(-> $ret:ty)? $body:block
    ) => {
        $(#[$meta])*
        $vis fn $name(isa: $crate::backend::cpu::simd::Isa, $($arg: $type),*) $(-> $ret)? {
            #[inline(always)]
            fn kernel<$level: $crate::backend::cpu::simd::Level $(+ $bound)?>($($arg: $type),*) $(-> $ret)? $body

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            fn avx2($($arg: $type),*) $(-> $ret)? {
                kernel::<$crate::backend::cpu::simd::Avx2>($($arg),*)
            }

            #[cfg(target_arch = "x86_64")]
            if isa.has_avx2() {
                #[expect(unsafe_code, reason = "calls a function compiled for instructions that the machine has")]
                // SAFETY: only `Isa::available` creates an `Isa` with AVX2 or more, after it has detected AVX2
                // and FMA.
                return unsafe { avx2($($arg),*) };
            }
            kernel::<$crate::backend::cpu::simd::Portable>($($arg),*)
        }
    };
}
pub(crate) use simd;

#[cfg(test)]
mod tests {
    use super::Isa;

    simd! {
        /// `y += a * x`.
        fn axpy<L: Level>(a: f32, x: &[f32], y: &mut [f32]) {
            for (y, &x) in y.iter_mut().zip(x) {
                *y = L::mul_add(a, x, *y);
            }
        }
    }

    #[test]
    fn both_levels_compute_the_same() {
        let x: Vec<f32> = (0..37).map(|i| i as f32).collect();
        for isa in [Isa::PORTABLE, Isa::detect()] {
            let mut y = vec![1.0; x.len()];
            axpy(isa, 2.0, &x, &mut y);
            for (i, y) in y.iter().enumerate() {
                assert_eq!(y.to_bits(), (1.0 + 2.0 * i as f32).to_bits(), "{isa:?}");
            }
        }
    }

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn one_rounding_with_fma() {
        let isa = Isa::detect();
        if isa.has_avx2() {
            let eps = f32::EPSILON;
            let mut y = [-1.0];
            axpy(isa, 1.0 + eps, &[1.0 - eps], &mut y);
            assert_eq!(y[0].to_bits(), (-eps * eps).to_bits());
        }
    }
}
