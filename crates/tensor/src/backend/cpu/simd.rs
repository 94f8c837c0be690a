//! Instruction sets, chosen at run time. A kernel is written once, generic over [`Level`], and [`simd!`]
//! compiles it for every level; an [`Isa`] says which copy to run. Register tiles have AVX-512 as well; all
//! else runs as AVX2 there, which was measured to be as fast. It refuses to know what the kernels compute.

/// The instruction set that kernels run with on this machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Isa(Tag);

/// Which it is. The field of [`Isa`] is private, so that only [`Isa::available`] can claim what the machine
/// has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Tag {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Isa {
    /// What the compiler assumes of every machine of this architecture.
    pub(crate) const PORTABLE: Self = Self(Tag::Portable);

    /// What this machine has, the best first. Cheap: the standard library keeps the answer.
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

    /// The best that this machine has.
    pub(crate) fn detect() -> Self {
        Self::available().next().expect("the portable one is always there")
    }

    /// Which it is.
    pub(super) const fn tag(self) -> Tag {
        self.0
    }

    /// Whether AVX2 and FMA may be used.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn has_avx2(self) -> bool {
        self.0 != Tag::Portable
    }
}

/// What a kernel may ask of the instruction set that it is compiled for. Everything else is left to the
/// vectoriser.
pub(crate) trait Level {
    /// `a * b + c`, with one rounding where the hardware has it, else with two (never a call of a software
    /// `fma`).
    fn mul_add(a: f32, b: f32, c: f32) -> f32;
}

/// Level of [`Isa::PORTABLE`].
pub(crate) struct Portable;

/// AVX2 and FMA.
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
    #[expect(clippy::inline_always, reason = "only inlined into a function with FMA is it one instruction")]
    fn mul_add(a: f32, b: f32, c: f32) -> f32 {
        a.mul_add(b, c)
    }
}

/// Compiles one function for every level. The function gets an [`Isa`] as its first argument; its body sees the
/// level as a type. Loops over slices in the body (and in the `#[inline(always)]` functions that it calls) are
/// vectorised for each level. A second bound (`L: Level + Trait`) may ask for more than [`Level`] offers.
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
                // SAFETY: only `Isa::available` makes an `Isa` with AVX2 or more, after it has found AVX2 and
                // FMA.
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
