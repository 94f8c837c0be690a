//! What a codec remembers between calls, by name, and how it is kept: saved, loaded, cut anew, committed,
//! rolled back. Knows no file format: a state is a map from names to buffers.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;

use crate::CompressError;

/// Named entries of a saved state; borrowed when saving (nothing is copied), usually owned when loading.
pub type StateMap<'a> = BTreeMap<String, StateValue<'a>>;

/// One entry of a saved state.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum StateValue<'a> {
    /// A flat buffer.
    F32(Cow<'a, [f32]>),
    /// Something that is not numbers of one kind.
    Bytes(Cow<'a, [u8]>),
}

/// Memory between calls. Every method has a default for a codec that has none.
pub trait State {
    /// Adds every entry to `into`, each name beginning with `prefix` (`""` or something like
    /// `"stage0.bucket3."`).
    ///
    /// Errors: [`CompressError::Uncommitted`] between a compress and its commit or rollback.
    fn save<'a>(&'a self, prefix: &str, into: &mut StateMap<'a>) -> Result<(), CompressError> {
        let _ = (prefix, into);
        Ok(())
    }

    /// Takes the entries that [`Self::save`] made with this `prefix` out of `from`; what is left in it
    /// afterwards was not this codec's. On error the codec is as it was.
    ///
    /// Errors: [`CompressError::MissingState`]; [`CompressError::NonFinite`] for a residual that is not finite.
    fn load(&mut self, prefix: &str, from: &mut StateMap<'_>) -> Result<(), CompressError> {
        let _ = (prefix, from);
        Ok(())
    }

    /// Moves the state from the range `held` of a larger vector to the range `wanted`: what lies in both is
    /// kept, the rest of `wanted` starts at zero.
    ///
    /// Errors: [`CompressError::LengthChanged`] if the state is not of `held`'s length;
    /// [`CompressError::Uncommitted`].
    fn reshard(&mut self, held: Range<usize>, wanted: Range<usize>) -> Result<(), CompressError> {
        let _ = (held, wanted);
        Ok(())
    }

    /// Forgets everything, the length included.
    fn reset(&mut self) {}

    /// Makes final what was compressed since the last commit: all ranks agreed on the step.
    fn commit(&mut self) {}

    /// Goes back to the last commit, as if nothing had been compressed since: the step was aborted.
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
