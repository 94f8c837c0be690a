//! How values are encoded on their way to a mean: by a named method or by the caller's own code. Does not
//! depend on buckets.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use farflung_comm::Phase;
use farflung_compress::device::Stream;
use farflung_compress::{AverageSpec, CodecSpec, CompressError, Compressor, MatrixShape, Protocol};
use farflung_tensor::Device;

use crate::OptimError;
use crate::device_codec::Vectors;

/// Function that creates a codec for one stream of vectors.
pub type MakeCompressor = dyn Fn() -> Box<dyn Compressor> + Send + Sync;

/// Function that creates a protocol for matrices of a shape, from a seed that all ranks share. It returns
/// `None` for a matrix that is to be sent as plain f32.
pub type MakeProtocol = dyn Fn(MatrixShape, u64) -> Option<Box<dyn Protocol>> + Send + Sync;

/// Encoding of averaged values: a method that has a name, or the caller's own.
///
/// ```
/// use farflung_compress::{CodecId, CompressError, Compressor, Payload, PayloadRef, RoundKey, State};
/// use farflung_optim::{AverageConfig, Coding};
///
/// /// Every value as one byte of sixteenths.
/// #[derive(Debug)]
/// struct Sixteenths;
///
/// impl State for Sixteenths {}
///
/// impl Compressor for Sixteenths {
///     fn compress(&mut self, x: &[f32], _: RoundKey, out: &mut Payload) -> Result<(), CompressError> {
///         let body: Vec<u8> = x.iter().map(|x| ((x * 16.0).round() as i8).cast_unsigned()).collect();
///         out.seal(CodecId::OWN, x.len(), body.len(), |bytes| Ok(bytes.copy_from_slice(&body)))
///     }
///     fn decompress(&self, p: PayloadRef<'_>, out: &mut [f32]) -> Result<(), CompressError> {
///         // A body of another length is somebody's mistake, or worse.
///         let (what, wanted, found) = ("the body", out.len(), p.body().len());
///         if found != wanted {
///             return Err(CompressError::LengthMismatch { what, wanted, found });
///         }
///         out.iter_mut().zip(p.body()).for_each(|(x, byte)| *x = f32::from(byte.cast_signed()) / 16.0);
///         Ok(())
///     }
///     fn max_payload(&self, len: usize) -> usize {
///         28 + len
///     }
/// }
///
/// let config = AverageConfig { codec: Coding::compressor(|| Box::new(Sixteenths)), ..Default::default() };
/// ```
#[derive(Clone)]
#[non_exhaustive]
pub enum Coding {
    /// A method with a name.
    Named(AverageSpec),
    /// The caller's own codecs, one for each stream. They work in the host's memory.
    Compressor(Arc<MakeCompressor>),
    /// The caller's own protocols, one for each matrix.
    Protocol(Arc<MakeProtocol>),
}

impl Coding {
    /// Creates a coding from the caller's own codecs.
    pub fn compressor(make: impl Fn() -> Box<dyn Compressor> + Send + Sync + 'static) -> Self {
        Self::Compressor(Arc::new(make))
    }

    /// Creates a coding from the caller's own protocols.
    pub fn protocol(
        make: impl Fn(MatrixShape, u64) -> Option<Box<dyn Protocol>> + Send + Sync + 'static,
    ) -> Self {
        Self::Protocol(Arc::new(make))
    }

    /// Returns the factory of the buckets' codecs; `None` if values are sent as plain f32 or by a protocol.
    pub(super) fn streams(&self, device: &Device) -> Result<Option<Streams>, OptimError> {
        Ok(match self {
            Self::Named(AverageSpec::Codec(spec)) if *spec == CodecSpec::default() => None,
            Self::Named(AverageSpec::Codec(spec)) => Some(Streams::Named(Vectors::of(device, *spec)?, *spec)),
            Self::Compressor(make) => Some(Streams::Own(Vectors::in_memory()?, Arc::clone(make))),
            Self::Named(AverageSpec::Protocol(_)) | Self::Protocol(_) => None,
        })
    }

    /// Returns one codec. A named one has no error feedback.
    ///
    /// Errors: [`OptimError::NotACodec`] for a protocol.
    pub(crate) fn memoryless(&self) -> Result<Box<dyn Compressor>, OptimError> {
        match self {
            Self::Named(AverageSpec::Codec(spec)) => {
                let codec: Box<dyn Compressor> = spec.build_memoryless();
                Ok(codec)
            }
            Self::Compressor(make) => Ok(make()),
            Self::Named(AverageSpec::Protocol(spec)) => Err(OptimError::NotACodec { name: spec.to_string() }),
            Self::Protocol(_) => Err(OptimError::NotACodec { name: "protocol".to_owned() }),
        }
    }

    /// Returns one codec with its error feedback; `None` if every value is sent as plain f32.
    ///
    /// Errors: [`OptimError::NotACodec`] for a protocol, and for a codec that accumulates momentum.
    pub(crate) fn compressor_alone(&self) -> Result<Option<Box<dyn Compressor>>, OptimError> {
        match self {
            Self::Named(AverageSpec::Codec(spec)) if *spec == CodecSpec::default() => Ok(None),
            Self::Named(AverageSpec::Codec(spec)) if spec.momentum().is_some() => {
                Err(OptimError::NotACodec { name: spec.to_string() })
            }
            Self::Named(AverageSpec::Codec(spec)) => Ok(Some(spec.build())),
            Self::Compressor(make) => Ok(Some(make())),
            Self::Named(AverageSpec::Protocol(_)) | Self::Protocol(_) => self.memoryless().map(Some),
        }
    }

    /// Returns the function that creates protocols, if this coding uses protocols.
    pub(super) fn protocols(&self) -> Option<Arc<MakeProtocol>> {
        match self {
            Self::Named(AverageSpec::Protocol(spec)) => {
                let spec = *spec;
                Some(Arc::new(move |shape, seed| spec.build(shape, seed)))
            }
            Self::Protocol(make) => Some(Arc::clone(make)),
            Self::Named(AverageSpec::Codec(_)) | Self::Compressor(_) => None,
        }
    }
}

/// Factory of the codecs of buckets.
pub(super) enum Streams {
    Named(Vectors, CodecSpec),
    Own(Vectors, Arc<MakeCompressor>),
}

impl Streams {
    /// Creates a codec for one phase of a reduction: the encoding by workers or by servers.
    pub(super) fn stream(&self, phase: Phase) -> Stream<Vectors> {
        match self {
            Self::Named(vectors, spec) => {
                let spec = if phase == Phase::Server { spec.of_results() } else { *spec };
                Stream::new(vectors.clone(), spec).expect("the vectors were chosen for this codec")
            }
            Self::Own(vectors, make) => Stream::on_host(vectors.clone(), make()),
        }
    }

    /// Creates a codec that is used only to compute the largest size of payloads.
    pub(super) fn sizes(&self) -> Box<dyn Compressor> {
        match self {
            Self::Named(_, spec) => spec.build(),
            Self::Own(_, make) => make(),
        }
    }
}

impl Default for Coding {
    /// Returns the coding that sends every value as plain f32.
    fn default() -> Self {
        Self::Named(AverageSpec::default())
    }
}

impl From<AverageSpec> for Coding {
    fn from(spec: AverageSpec) -> Self {
        Self::Named(spec)
    }
}

impl From<CodecSpec> for Coding {
    fn from(spec: CodecSpec) -> Self {
        Self::Named(spec.into())
    }
}

impl FromStr for Coding {
    type Err = CompressError;

    fn from_str(name: &str) -> Result<Self, CompressError> {
        name.parse().map(Self::Named)
    }
}

impl fmt::Debug for Coding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Named(spec) => fmt::Debug::fmt(spec, f),
            Self::Compressor(_) => f.write_str("Compressor"),
            Self::Protocol(_) => f.write_str("Protocol"),
        }
    }
}
