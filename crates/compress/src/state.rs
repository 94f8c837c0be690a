//! The memory of a codec between calls, as a map from names to buffers: it can be saved, loaded, resharded,
//! committed and rolled back. This module does not depend on any file format.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::iter::Sum;
use std::ops::{Add, Range};

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

/// The bytes that a codec's memory takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct HeldBytes {
    /// In the host's memory: buffers for values that are not committed yet, and spare ones, included.
    pub memory: usize,
    /// In files: their lengths.
    pub files: usize,
}

impl HeldBytes {
    /// Returns the bytes of buffers of values in the host's memory.
    pub(crate) fn of_values<const N: usize>(buffers: [&Vec<f32>; N]) -> Self {
        let values: usize = buffers.into_iter().map(Vec::capacity).sum();
        Self { memory: values * size_of::<f32>(), files: 0 }
    }
}

impl Add for HeldBytes {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self { memory: self.memory + other.memory, files: self.files + other.files }
    }
}

impl Sum for HeldBytes {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self::default(), Add::add)
    }
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

    /// Returns the bytes that the memory takes now. Buffers in a device's memory are not counted here: the
    /// device counts them.
    fn held(&self) -> HeldBytes {
        HeldBytes::default()
    }
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

            fn held(&$self) -> $crate::HeldBytes {
                $inner.held()
            }
        }
    };
}
pub(crate) use state_of;

state_of!([S: State + ?Sized] Box<S>, self => (**self));

#[cfg(test)]
mod tests {
    use crate::link::{FileStore, MemoryStore, Samples, Staged, Store as _};
    use crate::{HeldBytes, Payload, RoundKey, State as _};

    #[test]
    fn codecs_hold_their_residuals_before_and_after_a_commit() {
        let spec: crate::CodecSpec = "int8:64+ef".parse().unwrap();
        let (mut codec, mut out) = (spec.build(), Payload::new());
        assert_eq!(codec.held(), HeldBytes::default());
        codec.compress(&[1.0; 100], RoundKey::default(), &mut out).unwrap();
        assert_eq!(codec.held(), HeldBytes { memory: 2 * 400, files: 0 });
        codec.commit();
        assert_eq!(codec.held().memory, 2 * 400, "the buffer of the next residual is kept");
    }

    #[test]
    fn stores_hold_samples_in_memory_or_in_files() {
        let samples = Samples::f16(10);
        let mut memory = Staged::new(MemoryStore::new(samples));
        memory.write(7, &[1; 20]).unwrap();
        assert_eq!(memory.held().memory, 20, "not committed yet");
        memory.commit();
        assert_eq!(memory.held(), HeldBytes { memory: 20 + 32, files: 0 });
        let folder = std::env::temp_dir().join(format!("farflung-held-{}", std::process::id()));
        let file = FileStore::open(&folder, samples, 5).unwrap();
        let length = std::fs::metadata(&folder).unwrap().len() as usize;
        std::fs::remove_file(&folder).unwrap();
        assert_eq!(file.held(), HeldBytes { memory: 24, files: length });
    }
}
