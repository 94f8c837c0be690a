//! Checks whether values are finite.

use farflung_tensor::{TensorError, View};

/// Returns whether all values are finite. It reads all of them without an early exit, so that the loop runs at
/// the speed of memory.
#[must_use]
pub fn all_finite(values: &[f32]) -> bool {
    values.iter().fold(true, |all, value| all & value.is_finite())
}

/// Returns whether all elements of an f32 view are finite.
///
/// Errors: those of downloading from the view's device.
pub(crate) fn is_finite(x: View<'_>) -> Result<bool, TensorError> {
    match x.host::<f32>() {
        Some(values) => Ok(all_finite(values)),
        None => Ok(all_finite(&x.to_vec::<f32>()?)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_element_is_enough() {
        assert!(all_finite(&[]) && all_finite(&[0.0, -0.0, f32::MAX, f32::MIN, f32::MIN_POSITIVE, 1e-45]));
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for at in 0..100 {
                let mut values = [f32::MAX; 100];
                values[at] = bad;
                assert!(!all_finite(&values), "{bad} at {at}");
            }
        }
    }
}
