//! Scale of gradients in 16-bit floats: fixed, or found by trial as the largest at which nothing overflows.
//! This module only computes the scale; the caller applies it.

/// Initial value of a dynamic scale, as in PyTorch's `GradScaler`.
const START: f32 = 65_536.0;
/// Number of steps without an overflow after which the scale doubles.
const GROW_EVERY: u32 = 2000;
/// Upper bound of a dynamic scale, 2^24. The smallest positive f16, 2^-24, then stands for a gradient of 2^-48.
const MOST: f32 = 16_777_216.0;

/// Power of two that multiplies gradients so that small ones do not vanish in f16. It is either fixed, or
/// halved at each overflow and doubled after 2000 steps without one, between 1 and 2^24 (Micikevicius et al.
/// 2018, section 3.2; dynamic scaling as in PyTorch's `GradScaler`).
///
/// Differs from PyTorch in what an overflow costs. PyTorch skips the step. Here the caller computes the same
/// step again with half the scale, so that no batch is lost and all ranks count the same steps.
///
/// ```
/// use farflung_optim::LossScale;
///
/// let mut scale = LossScale::dynamic();
/// assert_eq!(scale.get(), 65536.0);
/// assert!(scale.overflowed()); // try the step again
/// assert_eq!(scale.get(), 32768.0);
/// (0..2000).for_each(|_| scale.taken());
/// assert_eq!(scale.get(), 65536.0);
/// assert!(!LossScale::fixed(1024.0).overflowed()); // nothing else to try
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LossScale {
    scale: f32,
    dynamic: bool,
    /// Number of steps taken since the scale last changed, modulo 2000; 0 if the scale is fixed.
    taken: u32,
}

impl LossScale {
    /// Creates a scale that never changes.
    #[must_use]
    pub const fn fixed(scale: f32) -> Self {
        Self { scale, dynamic: false, taken: 0 }
    }

    /// Creates a dynamic scale, which starts at 65536.
    #[must_use]
    pub const fn dynamic() -> Self {
        Self { scale: START, dynamic: true, taken: 0 }
    }

    /// Returns the scale.
    #[must_use]
    pub const fn get(&self) -> f32 {
        self.scale
    }

    /// Returns whether the scale is dynamic, which means found by trial.
    #[must_use]
    pub const fn is_dynamic(&self) -> bool {
        self.dynamic
    }

    /// Records that a step's gradients were not finite. Returns whether to compute the step again; the scale
    /// has been halved then. Returns `false` if the scale is fixed or already 1, since there is no other scale
    /// to try.
    #[must_use]
    pub fn overflowed(&mut self) -> bool {
        let again = self.dynamic && self.scale > 1.0;
        if again {
            self.scale /= 2.0;
            self.taken = 0;
        }
        again
    }

    /// Records that a step was taken. A dynamic scale doubles after 2000 such steps in a row, up to 2^24.
    pub fn taken(&mut self) {
        if !self.dynamic {
            return;
        }
        self.taken += 1;
        if self.taken == GROW_EVERY {
            self.scale = (self.scale * 2.0).min(MOST);
            self.taken = 0;
        }
    }

    /// Returns the state to save: the scale, and the number of steps taken since it last changed (modulo 2000).
    #[must_use]
    pub const fn save(&self) -> [f32; 2] {
        [self.scale, self.taken as f32]
    }

    /// Restores a saved state. Does nothing if the scale is fixed or the state is invalid: the scale must be a
    /// power of two between 1 and 2^24, and the number of steps must be below 2000.
    pub fn restore(&mut self, state: &[f32]) {
        if let [scale, taken] = *state
            && self.dynamic
            && (1.0..=MOST).contains(&scale)
            && scale.log2().fract() == 0.0
            && (0.0..GROW_EVERY as f32).contains(&taken)
        {
            (self.scale, self.taken) = (scale, taken as u32);
        }
    }
}

#[cfg(test)]
#[expect(clippy::float_cmp, reason = "powers of two are exact")]
mod tests {
    use super::*;

    #[test]
    fn it_halves_down_to_one_and_doubles_up_to_the_most() {
        let mut scale = LossScale::dynamic();
        assert_eq!((0..100).take_while(|_| scale.overflowed()).count(), 16);
        assert_eq!(scale.get(), 1.0);
        (0..GROW_EVERY * 30).for_each(|_| scale.taken());
        assert_eq!(scale.get(), MOST);
        (1..GROW_EVERY).for_each(|_| scale.taken());
        assert!(scale.overflowed());
        scale.taken();
        assert_eq!(scale.get(), MOST / 2.0, "an overflow starts the count anew");
    }

    #[test]
    fn a_saved_scale_goes_on_and_a_wrong_one_is_not_taken() {
        let mut scale = LossScale::dynamic();
        assert!(scale.overflowed());
        (0..1999).for_each(|_| scale.taken());
        let mut other = LossScale::dynamic();
        other.restore(&scale.save());
        assert_eq!(other, scale);
        other.taken();
        assert_eq!(other.get(), 65_536.0);
        for wrong in [&[0.0, 0.0][..], &[3.0, 0.0], &[f32::NAN, 0.0], &[2.0, -1.0], &[2.0, 1e9], &[2.0], &[]]
        {
            other.restore(wrong);
            assert_eq!(other.get(), 65_536.0);
        }
        let mut fixed = LossScale::fixed(8.0);
        fixed.restore(&scale.save());
        fixed.taken();
        assert_eq!(fixed, LossScale::fixed(8.0), "a run that is resumed saves what one saves that was not");
    }
}
