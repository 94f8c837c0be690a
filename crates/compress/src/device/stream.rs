//! One stream of vectors in a device's memory: a codec with its error feedback and its last stage.

use std::borrow::Cow;
use std::fmt;

use super::{DeviceCodec, Residual, VectorDevice};
use crate::lossless::{Packer, Unpacker};
use crate::{
    CodecId, CodecSpec, CompressError, Compressor, HeldBytes, Memoryless, Packing, Payload, PayloadRef,
    RoundKey, StateMap, StateValue,
};

/// The device's counterpart of [`CodecSpec::build`]. The residual is in the device's memory, unless the codec
/// works in the host's ([`Self::on_host`], and codecs with momentum correction). Payloads and state are the
/// same as on the host, so either can continue from the other's saved state.
///
/// As with [`crate::ErrorFeedback`], a compress is only prepared; [`Self::commit`] makes it final.
#[derive(Debug)]
pub struct Stream<D: VectorDevice> {
    device: D,
    codec: StreamCodec<D>,
}

/// The memory in which a stream's codec works.
enum StreamCodec<D: VectorDevice> {
    /// In the device's memory, where the vectors are.
    Device { codec: Box<dyn DeviceCodec<D>>, feedback: Option<Feedback<D::Vector>>, last: Option<Last> },
    /// In the host's memory; vectors are copied to `held` and back.
    Host { codec: Box<dyn Compressor>, held: Vec<f32> },
}

impl<D: VectorDevice> fmt::Debug for StreamCodec<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Device { codec, .. } => {
                f.debug_struct("Device").field("codec", codec).finish_non_exhaustive()
            }
            Self::Host { codec, .. } => f.debug_struct("Host").field("codec", codec).finish_non_exhaustive(),
        }
    }
}

/// The residual of error feedback.
struct Feedback<V> {
    /// Share of the residual that is kept from one vector to the next.
    share: f32,
    /// The committed residual. `None` before the first commit means zeros.
    committed: Option<V>,
    /// The latest residual, while it is not committed.
    latest: Option<V>,
    /// A buffer for the next residual.
    spare: Option<V>,
}

/// The lossless last stage, which works on bytes.
struct Last {
    packing: Packing,
    packer: Packer,
    unpacker: Unpacker,
    /// The same codec on the host, which gives the largest size of a payload.
    host: Box<dyn Memoryless>,
}

impl<D: VectorDevice> Stream<D> {
    /// Creates a stream of a codec, or returns `None` if the device has no kernels for it. Momentum correction
    /// runs in the host's memory.
    pub fn new(device: D, spec: CodecSpec) -> Option<Self> {
        let codec = device.codec(spec)?;
        if spec.momentum().is_some() {
            return Some(Self::on_host(device, spec.build()));
        }
        let feedback =
            spec.feedback_share().map(|share| Feedback { share, committed: None, latest: None, spare: None });
        let last = spec.packing().map(|packing| Last {
            packing,
            packer: Packer::default(),
            unpacker: Unpacker::default(),
            host: spec.build_memoryless(),
        });
        Some(Self { device, codec: StreamCodec::Device { codec, feedback, last } })
    }

    /// Creates a stream of any codec, which works in the host's memory.
    pub fn on_host(device: D, codec: Box<dyn Compressor>) -> Self {
        Self { device, codec: StreamCodec::Host { codec, held: Vec::new() } }
    }

    /// Returns the device that holds the vectors.
    #[must_use]
    pub const fn device(&self) -> &D {
        &self.device
    }

    /// Encodes `x`, plus the residual if there is one.
    ///
    /// Errors: those of [`crate::Compressor::compress`], as the device's error type. After an error `out` is
    /// empty.
    pub fn compress(&mut self, x: &D::Vector, key: RoundKey, out: &mut Payload) -> Result<(), D::Error> {
        let Self { device, codec: place } = self;
        match place {
            StreamCodec::Host { codec, held } => {
                held.resize(D::count(x), 0.0);
                device.download(x, held)?;
                codec.compress(held, key, out)?;
            }
            StreamCodec::Device { codec, feedback, last } => {
                match feedback {
                    None => codec.compress(x, None, key, out)?,
                    Some(feedback) => feedback.compress(device, &mut **codec, x, key, out)?,
                }
                if let Some(Last { packing, packer, .. }) = last {
                    packer.pack_payload(*packing, out);
                }
            }
        }
        Ok(())
    }

    /// Decodes the untrusted payload `p` into all of `out`.
    ///
    /// Errors: those of [`crate::Compressor::decompress`], as the device's error type.
    pub fn decompress(&mut self, p: PayloadRef<'_>, out: &mut D::Vector) -> Result<(), D::Error> {
        match &mut self.codec {
            StreamCodec::Host { codec, held } => {
                held.resize(D::count(out), 0.0);
                codec.decompress(p, held)?;
                self.device.write(held, out)
            }
            StreamCodec::Device { codec, last: Some(Last { packing, unpacker, host, .. }), .. }
                if p.codec() == CodecId::PACKED =>
            {
                let len = D::count(out);
                codec.decompress(unpacker.open(*packing, p, len, host.max_payload(len))?, out)
            }
            StreamCodec::Device { codec, .. } => codec.decompress(p, out),
        }
    }

    /// Makes all compresses since the last commit final.
    pub fn commit(&mut self) {
        match &mut self.codec {
            StreamCodec::Host { codec, .. } => codec.commit(),
            StreamCodec::Device { feedback: Some(feedback), .. } => {
                if let Some(latest) = feedback.latest.take() {
                    feedback.spare = feedback.committed.replace(latest);
                }
            }
            StreamCodec::Device { .. } => {}
        }
    }

    /// Restores the residual of the last commit.
    pub fn rollback(&mut self) {
        match &mut self.codec {
            StreamCodec::Host { codec, .. } => codec.rollback(),
            StreamCodec::Device { feedback: Some(feedback), .. } => {
                if let Some(latest) = feedback.latest.take() {
                    feedback.spare = Some(latest);
                }
            }
            StreamCodec::Device { .. } => {}
        }
    }

    /// Returns the bytes that it holds in the host's memory. The device counts its residual.
    #[must_use]
    pub fn held(&self) -> HeldBytes {
        match &self.codec {
            StreamCodec::Host { codec, held } => codec.held() + HeldBytes::of_values([held]),
            StreamCodec::Device { .. } => HeldBytes::default(),
        }
    }

    /// Adds the state to `into`, under the names that the host's codec uses.
    ///
    /// Errors: the device's; [`CompressError::Uncommitted`].
    pub fn save<'a>(&'a self, prefix: &str, into: &mut StateMap<'a>) -> Result<(), D::Error> {
        let feedback = match &self.codec {
            StreamCodec::Host { codec, .. } => return Ok(codec.save(prefix, into)?),
            StreamCodec::Device { feedback, .. } => feedback,
        };
        let Some(feedback) = feedback else { return Ok(()) };
        if feedback.latest.is_some() {
            return Err(CompressError::Uncommitted.into());
        }
        let mut residual = vec![0.0; feedback.committed.as_ref().map_or(0, D::count)];
        if let Some(committed) = &feedback.committed {
            self.device.download(committed, &mut residual)?;
        }
        into.insert(residual_name(prefix), StateValue::F32(Cow::Owned(residual)));
        Ok(())
    }

    /// Loads the state that [`Self::save`] or the host's codec saved. After an error the stream is unchanged.
    ///
    /// Errors: the device's; those of [`crate::State::load`].
    pub fn load(&mut self, prefix: &str, from: &mut StateMap<'_>) -> Result<(), D::Error> {
        let feedback = match &mut self.codec {
            StreamCodec::Host { codec, .. } => return Ok(codec.load(prefix, from)?),
            StreamCodec::Device { feedback, .. } => feedback,
        };
        let Some(feedback) = feedback else { return Ok(()) };
        let residual = crate::two_phase_buffer::TwoPhaseBuffer::load(residual_name(prefix), from)?;
        let committed = if residual.is_empty() { None } else { Some(self.device.upload(&residual)?) };
        *feedback = Feedback { share: feedback.share, committed, latest: None, spare: None };
        Ok(())
    }
}

fn residual_name(prefix: &str) -> String {
    format!("{prefix}residual")
}

impl<V> Feedback<V> {
    fn compress<D: VectorDevice<Vector = V>>(
        &mut self,
        device: &D,
        codec: &mut dyn DeviceCodec<D>,
        x: &V,
        key: RoundKey,
        out: &mut Payload,
    ) -> Result<(), D::Error> {
        let len = D::count(x);
        let zeros = || device.upload(&vec![0.0; len]);
        let held = self.latest.as_ref().or(self.committed.as_ref());
        if let Some(held) = held.map(D::count).filter(|held| *held != len) {
            out.clear();
            return Err(CompressError::LengthChanged { held, found: len }.into());
        }
        let first = if held.is_none() { Some(zeros()?) } else { None };
        let before = held.or(first.as_ref()).expect("the first vector has a residual of zeros");
        let mut after = match self.spare.take().filter(|spare| D::count(spare) == len) {
            Some(spare) => spare,
            None => zeros()?,
        };
        let residual = Residual { before, after: &mut after };
        let mut result = codec.compress(x, Some(residual), key, out);
        if result.is_ok() && self.share < 1.0 {
            result = device.scale(&mut after, self.share);
        }
        self.spare = match result {
            Ok(()) => self.latest.replace(after),
            Err(_) => Some(after),
        };
        result
    }
}
