//! Vectors of a checkpoint, by the names that [`Synchroniser::states`](super::Synchroniser::states) returned.

use crate::OptimError;

/// Function that returns a vector of a checkpoint by its name.
pub(super) type Get<'a> = &'a dyn Fn(&str) -> Option<Vec<f32>>;

/// Returns a vector that a checkpoint may lack.
///
/// Errors: [`OptimError::State`] if it has another length.
pub(super) fn optional(get: Get<'_>, name: &str, expected: usize) -> Result<Option<Vec<f32>>, OptimError> {
    match get(name) {
        Some(values) if values.len() != expected => {
            Err(OptimError::State { name: name.to_owned(), found: values.len(), expected })
        }
        values => Ok(values),
    }
}

/// Returns the vectors before the first one that the checkpoint lacks.
///
/// Errors: [`OptimError::State`] if one of them has another length.
pub(super) fn optional_prefix(
    get: Get<'_>,
    names: &[&str],
    expected: usize,
) -> Result<Vec<Vec<f32>>, OptimError> {
    names.iter().map_while(|name| optional(get, name, expected).transpose()).collect()
}

/// Returns a vector that a checkpoint must contain.
///
/// Errors: [`OptimError::State`] if it is missing or has another length.
pub(super) fn required(get: Get<'_>, name: &str, expected: usize) -> Result<Vec<f32>, OptimError> {
    let missing = || OptimError::State { name: name.to_owned(), found: 0, expected };
    optional(get, name, expected)?.ok_or_else(missing)
}
