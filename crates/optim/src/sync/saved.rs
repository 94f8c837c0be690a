//! Vectors of a checkpoint, by the names that [`Synchroniser::states`](super::Synchroniser::states) gave them.

use crate::OptimError;

/// Gives a vector of a checkpoint by its name.
pub(super) type Get<'a> = &'a dyn Fn(&str) -> Option<Vec<f32>>;

/// A vector that a checkpoint may lack.
///
/// Errors: [`OptimError::State`] for one of another length.
pub(super) fn optional(get: Get<'_>, name: &str, expected: usize) -> Result<Option<Vec<f32>>, OptimError> {
    match get(name) {
        Some(values) if values.len() != expected => {
            Err(OptimError::State { name: name.to_owned(), found: values.len(), expected })
        }
        values => Ok(values),
    }
}

/// A vector that a checkpoint must have.
///
/// Errors: [`OptimError::State`] for one that is missing or of another length.
pub(super) fn required(get: Get<'_>, name: &str, expected: usize) -> Result<Vec<f32>, OptimError> {
    let missing = || OptimError::State { name: name.to_owned(), found: 0, expected };
    optional(get, name, expected)?.ok_or_else(missing)
}
