//! The method that averages vectors over ranks, by name: a codec or a protocol. An [`AverageSpec`] is plain
//! data: printing and parsing give the same spec again.

use std::fmt;
use std::str::FromStr;

use crate::{CodecSpec, CompressError, ProtocolSpec};

/// A method of averaging, as data: the name of a [`CodecSpec`] or of a [`ProtocolSpec`].
///
/// ```
/// use farflung_compress::AverageSpec;
///
/// let spec: AverageSpec = "powersgd:4".parse()?;
/// assert_eq!((spec.to_string().as_str(), spec.codec()), ("powersgd:4", None));
/// let spec: AverageSpec = "int8:64".parse()?;
/// assert_eq!(spec.with_feedback().to_string(), "int8:64+ef");
/// # Ok::<(), farflung_compress::CompressError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AverageSpec {
    /// Each rank's values are encoded, and so is the reduced result.
    Codec(CodecSpec),
    /// Buffers of f32 are averaged in several exchanges.
    Protocol(ProtocolSpec),
}

impl AverageSpec {
    /// Returns true for the codec `none`, which sends plain f32.
    #[must_use]
    pub fn is_plain(&self) -> bool {
        *self == Self::default()
    }

    /// Returns the codec, if the method is one.
    #[must_use]
    pub const fn codec(&self) -> Option<CodecSpec> {
        match self {
            Self::Codec(codec) => Some(*codec),
            Self::Protocol(_) => None,
        }
    }

    /// Returns true if the method keeps a residual from one average to the next.
    #[must_use]
    pub fn feedback(&self) -> bool {
        self.codec().is_none_or(|codec| codec.feedback())
    }

    /// Adds error feedback to a lossy codec that has none: [`CodecSpec::with_feedback`]. A protocol is returned
    /// unchanged, since it has its own.
    #[must_use]
    pub fn with_feedback(self) -> Self {
        match self {
            Self::Codec(codec) => Self::Codec(codec.with_feedback()),
            Self::Protocol(_) => self,
        }
    }

    /// Returns the names for a help text: codecs, then protocols.
    #[must_use]
    pub fn names() -> Vec<String> {
        crate::names().into_iter().chain(ProtocolSpec::names()).collect()
    }
}

/// The codec `none`: plain f32.
impl Default for AverageSpec {
    fn default() -> Self {
        Self::Codec(CodecSpec::default())
    }
}

impl From<CodecSpec> for AverageSpec {
    fn from(codec: CodecSpec) -> Self {
        Self::Codec(codec)
    }
}

impl FromStr for AverageSpec {
    type Err = CompressError;

    fn from_str(name: &str) -> Result<Self, CompressError> {
        match name.parse() {
            Ok(protocol) => Ok(Self::Protocol(protocol)),
            Err(CompressError::UnknownCodec { .. }) => name.parse().map(Self::Codec),
            Err(wrong) => Err(wrong),
        }
    }
}

impl fmt::Display for AverageSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Codec(codec) => codec.fmt(f),
            Self::Protocol(protocol) => protocol.fmt(f),
        }
    }
}
