//! Checks that weights and states are finite; errors name the tensor.

use farflung_tensor::ParamLayout;

use crate::{Error, Result};

/// Checks that a tensor contains no NaN and no infinity.
///
/// Errors: [`Error::NotFinite`] with the tensor's name and the first element that is not finite.
pub fn check(tensor: &str, values: &[f32]) -> Result<()> {
    check_from(tensor, 0, values)
}

/// Checks a part of a tensor, which begins with its element `first`.
///
/// Errors: as [`check`].
pub fn check_from(tensor: &str, first: usize, values: &[f32]) -> Result<()> {
    if farflung_optim::all_finite(values) {
        return Ok(());
    }
    match values.iter().position(|x| !x.is_finite()) {
        None => Ok(()),
        Some(index) => {
            let value = values[index].to_string();
            Err(Error::NotFinite { tensor: tensor.to_owned(), index: first + index, value })
        }
    }
}

/// Checks that all tensors of a flat buffer are finite; elements between tensors are ignored. `prefix` is put
/// before the tensors' names in errors.
///
/// Errors: [`Error::NotFinite`] with the first tensor that is not finite.
pub fn check_flat(prefix: &str, layout: &ParamLayout, flat: &[f32]) -> Result<()> {
    layout.params().iter().try_for_each(|p| check(&format!("{prefix}{}", p.name), &flat[p.range()]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_element_that_is_not_finite_is_named() {
        check("w", &[]).unwrap();
        check("w", &[0.0, -0.0, f32::MAX, f32::MIN_POSITIVE, 1e-45, f32::MIN]).unwrap();
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let error = check("h.0.attn.c_attn.weight", &[1.0, f32::MAX, bad, f32::NAN]).unwrap_err();
            let message = format!("tensor `h.0.attn.c_attn.weight` is not finite: its element 2 is {bad}");
            assert_eq!(error.to_string(), message);
        }
    }
}
