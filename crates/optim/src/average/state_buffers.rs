//! The state of codecs as named f32 buffers.

use std::borrow::Cow;

use farflung_compress::{StateMap, StateValue};

use crate::OptimError;

/// Appends the f32 buffers of a state to `into`. Values of other types are left out; no codec has such values
/// today.
pub(super) fn flat(map: StateMap<'_>, into: &mut Vec<(String, Vec<f32>)>) {
    for (name, value) in map {
        if let StateValue::F32(values) = value {
            into.push((name, values.into_owned()));
        }
    }
}

/// Collects the state with these names from `get`.
///
/// Errors: [`OptimError::State`] if a buffer is missing or its length does not fit.
pub(super) fn given<'a>(
    names: Vec<String>,
    expected: usize,
    get: &dyn Fn(&str) -> Option<&'a [f32]>,
    fits: impl Fn(usize) -> bool,
) -> Result<StateMap<'a>, OptimError> {
    let entry = |name: String| match get(&name) {
        Some(values) if fits(values.len()) => Ok((name, StateValue::F32(Cow::Borrowed(values)))),
        values => {
            let found = values.map_or(0, <[f32]>::len);
            Err(OptimError::State { name, found, expected })
        }
    };
    names.into_iter().map(entry).collect()
}
