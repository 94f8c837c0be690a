//! The memory of a codec between calls, as a map from names to buffers: it can be saved, loaded, resharded,
//! committed and rolled back. This module does not depend on any file format.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;

use crate::CompressError;

/// Entries of a saved state by name. Saving borrows the buffers (nothing is copied); loading usually takes
/// owned ones.
pub type StateMap<'a> = BTreeMap<String, StateValue<'a>>;

/// One entry of a saved state.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum StateValue<'a> {
    /// A flat buffer of f32.
    F32(Cow<'a, [f32]>),
    /// Bytes in a format of the codec's own.
    Bytes(Cow<'a, [u8]>),
}

/// The memory of a codec between calls. Each method has a default for codecs without memory.
pub trait State {
    /// Adds every entry to `into`. Each name begins with `prefix` (`""` or something like `"stage0.bucket3."`).
    ///
    /// Errors: [`CompressError::Uncommitted`] between a compress and its commit or rollback.
    fn save<'a>(&'a self, prefix: &str, into: &mut StateMap<'a>) -> Result<(), CompressError> {
        let _ = (prefix, into);
        Ok(())
    }

    /// Removes the entries that [`Self::save`] wrote with this `prefix` from `from` and loads them. Entries of
    /// other owners stay in `from`. After an error the codec is unchanged.
    ///
    /// Errors: [`CompressError::MissingState`]; [`CompressError::NonFinite`] for a residual that is not finite.
    fn load(&mut self, prefix: &str, from: &mut StateMap<'_>) -> Result<(), CompressError> {
        let _ = (prefix, from);
        Ok(())
    }

    /// Moves the state from the range `held` of a larger vector to the range `wanted`. The overlap is kept, and
    /// the rest of `wanted` starts at zero.
    ///
    /// Errors: [`CompressError::LengthChanged`] if the state does not have the length of `held`;
    /// [`CompressError::Uncommitted`].
    fn reshard(&mut self, held: Range<usize>, wanted: Range<usize>) -> Result<(), CompressError> {
        let _ = (held, wanted);
        Ok(())
    }

    /// Resets the memory, the fixed vector length included.
    fn reset(&mut self) {}

    /// Makes all compresses since the last commit final. Call it once all ranks agreed on the step.
    fn commit(&mut self) {}

    /// Restores the memory of the last commit. Call it when the step was aborted.
    fn rollback(&mut self) {}
}

/// Implements [`State`] for a type by forwarding every method to an inner value.
macro_rules! state_of {
    ([$($generics:tt)*] $type:ty, $self:ident => $inner:expr) => {
        impl<$($generics)*> $crate::State for $type {
            fn save<'a>(
                &'a $self,
                prefix: &str,
                into: &mut $crate::StateMap<'a>,
            ) -> Result<(), $crate::CompressError> {
                $inner.save(prefix, into)
            }

            fn load(
                &mut $self,
                prefix: &str,
                from: &mut $crate::StateMap<'_>,
            ) -> Result<(), $crate::CompressError> {
                $inner.load(prefix, from)
            }

            fn reshard(
                &mut $self,
                held: std::ops::Range<usize>,
                wanted: std::ops::Range<usize>,
            ) -> Result<(), $crate::CompressError> {
                $inner.reshard(held, wanted)
            }

            fn reset(&mut $self) {
                $inner.reset();
            }

            fn commit(&mut $self) {
                $inner.commit();
            }

            fn rollback(&mut $self) {
                $inner.rollback();
            }
        }
    };
}
pub(crate) use state_of;

state_of!([S: State + ?Sized] Box<S>, self => (**self));
