//! The scale of a block of integer or minifloat codes: a bfloat16 of two bytes on the wire.

/// The bits of an f32 that a bfloat16 keeps.
const UPPER: u32 = 0xffff_0000;

/// The scale of a block of codes, and the factor that elements are multiplied by before rounding.
#[derive(Debug, Clone, Copy)]
pub struct Scale {
    scale: f32,
    factor: f32,
}

impl Scale {
    /// Returns the smallest bfloat16 scale for which `q`, the largest number of the codes, represents at least
    /// `top`, up to rounding.
    pub(crate) fn up_to(top: f32, q: f32) -> Self {
        let scale = bf16_above(top * (1.0 / q));
        // `q` times the scale must be finite, so for the largest magnitudes the scale is a little too small.
        if q * scale == f32::INFINITY {
            return Self { scale: f32::from_bits((f32::MAX / q).to_bits() & UPPER), factor: q / top };
        }
        Self { scale, factor: 1.0 / scale }
    }

    pub(crate) fn write(self, header: &mut [u8]) {
        header.copy_from_slice(&self.scale.to_le_bytes()[2..]);
    }

    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    pub(crate) fn get(self) -> f32 {
        self.scale
    }

    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    pub(crate) fn factor(self) -> f32 {
        self.factor
    }

    /// Reads a scale and checks that it is at least `2^-116` and that its product with `q` is finite.
    ///
    /// Errors: the rejected scale.
    pub(crate) fn read(header: &[u8], q: f32) -> Result<Self, f32> {
        let &[low, high] = header else { unreachable!("the header has two bytes") };
        let scale = f32::from_le_bytes([0, 0, low, high]);
        // No encoder writes a scale below 2^-100 / 57344.
        let good = scale >= f32::from_bits((127 - 116) << 23) && (scale * q).is_finite();
        if good { Ok(Self { scale, factor: 0.0 }) } else { Err(scale) }
    }
}

/// Returns the smallest bfloat16 that is not below the positive `x`.
pub(crate) fn bf16_above(x: f32) -> f32 {
    f32::from_bits((x.to_bits() + !UPPER) & UPPER)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scale_covers_the_top_and_is_hardly_larger() {
        let smallest = (127 - 100) << 23;
        for q in [1.0, 3.0, 7.0, 127.0] {
            for bits in (smallest..f32::INFINITY.to_bits()).step_by(40_009).chain([f32::MAX.to_bits()]) {
                let top = f32::from_bits(bits);
                let Scale { scale, factor } = Scale::up_to(top, q);
                assert_eq!(scale.to_bits() & !UPPER, 0);
                assert!((q * scale).is_finite());
                let code = (top * factor).round_ties_even();
                assert!(code <= q && code >= q - 1.0, "{top:e} {code}");
                // The rounding up to eight significant bits adds at most `2^-7`.
                let reach = f64::from(q) * f64::from(scale) / f64::from(top);
                assert!(reach < 1.0 + 2_f64.powi(-7) + 1e-6, "{top:e} {reach}");
                assert!(reach > 1.0 - 1e-6 || top > 3.3e38, "{top:e} {reach}");
                let mut header = [0; 2];
                Scale::up_to(top, q).write(&mut header);
                assert_eq!(Scale::read(&header, q).map(Scale::get), Ok(scale));
            }
        }
    }
}
