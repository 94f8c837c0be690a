//! One stream of vectors in a device's memory: a codec with its feedback and its last stage. Knows no codec.

use std::borrow::Cow;
use std::fmt;

use super::{Device, DeviceCodec, Residual};
use crate::lossless::{Packer, Unpacker};
use crate::{
    CodecId, CodecSpec, CompressError, Compressor as _, Memoryless, MomentumCorrection, Packing, Payload,
    PayloadRef, RoundKey, State as _, StateMap, StateValue,
};

/// What [`CodecSpec::build`] gives on the host, with the residual in the device's memory: the same bytes, and the same state,
/// so that what one saved the other continues.
///
/// As with [`crate::ErrorFeedback`], a compress is only prepared: [`Self::commit`] makes it final.
pub struct Stream<D: Device> {
    device: D,
    codec: Box<dyn DeviceCodec<D>>,
    feedback: Option<Feedback<D::Vector>>,
    /// Takes the place of codec and feedback where momentum is gathered, which is done in the host's memory.
    corrected: Option<Corrected>,
    last: Option<Last>,
}

/// Momentum correction, and a vector on its way to it.
struct Corrected {
    codec: MomentumCorrection<Box<dyn Memoryless>>,
    x: Vec<f32>,
}

impl<D: Device> fmt::Debug for Stream<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stream").field("codec", &self.codec).finish_non_exhaustive()
    }
}

/// What earlier vectors lost.
struct Feedback<V> {
    /// What is kept of it from one vector to the next.
    share: f32,
    /// `None` before the first commit, when it is zero.
    committed: Option<V>,
    /// The latest, if that was not committed yet.
    latest: Option<V>,
    /// Takes the next one.
    spare: Option<V>,
}

/// The last stage, which sees bytes.
struct Last {
    packing: Packing,
    packer: Packer,
    unpacker: Unpacker,
    /// Says how many bytes there are at most.
    host: Box<dyn Memoryless>,
}

impl<D: Device> Stream<D> {
    /// A stream of a codec, if the device has kernels of it.
    pub fn new(device: D, spec: CodecSpec) -> Option<Self> {
        let codec = device.codec(spec)?;
        let feedback =
            spec.feedback_share().map(|share| Feedback { share, committed: None, latest: None, spare: None });
        let last = spec.packing().map(|packing| Last {
            packing,
            packer: Packer::default(),
            unpacker: Unpacker::default(),
            host: spec.build_memoryless(),
        });
        let corrected = spec.momentum().map(|factor| Corrected {
            codec: MomentumCorrection::new(spec.build_memoryless(), factor).expect("the name was checked"),
            x: Vec::new(),
        });
        Some(Self { device, codec, feedback, corrected, last })
    }

    /// Where its vectors lie.
    #[must_use]
    pub const fn device(&self) -> &D {
        &self.device
    }

    /// Encodes `x`, and what earlier ones lost.
    ///
    /// Errors: those of [`crate::Compressor::compress`], as the device's. Then `out` is empty.
    pub fn compress(&mut self, x: &D::Vector, key: RoundKey, out: &mut Payload) -> Result<(), D::Error> {
        let Self { device, codec, feedback, corrected, last } = self;
        match feedback {
            None if corrected.is_some() => {
                let Corrected { codec, x: held } = corrected.as_mut().expect("it was just looked at");
                held.resize(D::count(x), 0.0);
                device.download(x, held)?;
                codec.compress(held, key, out)?;
            }
            None => codec.compress(x, None, key, out)?,
            Some(feedback) => feedback.compress(device, &mut **codec, x, key, out)?,
        }
        if let Some(Last { packing, packer, .. }) = last {
            packer.pack_payload(*packing, out);
        }
        Ok(())
    }

    /// Decodes `p`, which is untrusted, into all of `out`.
    ///
    /// Errors: those of [`crate::Compressor::decompress`], as the device's.
    pub fn decompress(&mut self, p: PayloadRef<'_>, out: &mut D::Vector) -> Result<(), D::Error> {
        let Self { codec, last, .. } = self;
        match last {
            Some(Last { packing, unpacker, host, .. }) if p.codec() == CodecId::PACKED => {
                let len = D::count(out);
                codec.decompress(unpacker.open(*packing, p, len, host.max_payload(len))?, out)
            }
            _ => codec.decompress(p, out),
        }
    }

    /// Makes final what was compressed since the last commit.
    pub fn commit(&mut self) {
        if let Some(corrected) = &mut self.corrected {
            corrected.codec.commit();
        }
        if let Some(feedback) = &mut self.feedback
            && let Some(latest) = feedback.latest.take()
        {
            feedback.spare = feedback.committed.replace(latest);
        }
    }

    /// Goes back to the last commit.
    pub fn rollback(&mut self) {
        if let Some(corrected) = &mut self.corrected {
            corrected.codec.rollback();
        }
        if let Some(feedback) = &mut self.feedback
            && let Some(latest) = feedback.latest.take()
        {
            feedback.spare = Some(latest);
        }
    }

    /// Adds what it remembers to `into`, under the name that the host's codec gives it.
    ///
    /// Errors: the device's; [`CompressError::Uncommitted`].
    pub fn save(&self, prefix: &str, into: &mut StateMap<'_>) -> Result<(), D::Error> {
        if let Some(corrected) = &self.corrected {
            let mut saved = StateMap::new();
            corrected.codec.save(prefix, &mut saved)?;
            for (name, value) in saved {
                if let StateValue::F32(values) = value {
                    into.insert(name, StateValue::F32(Cow::Owned(values.into_owned())));
                }
            }
            return Ok(());
        }
        let Some(feedback) = &self.feedback else { return Ok(()) };
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

    /// Takes what [`Self::save`], or the host's codec, put there. On error it is as it was.
    ///
    /// Errors: the device's; those of [`crate::State::load`].
    pub fn load(&mut self, prefix: &str, from: &mut StateMap<'_>) -> Result<(), D::Error> {
        if let Some(corrected) = &mut self.corrected {
            return Ok(corrected.codec.load(prefix, from)?);
        }
        let Some(feedback) = &mut self.feedback else { return Ok(()) };
        let residual = crate::memory::Memory::load(residual_name(prefix), from)?;
        let committed = if residual.is_empty() { None } else { Some(self.device.upload(&residual)?) };
        *feedback = Feedback { share: feedback.share, committed, latest: None, spare: None };
        Ok(())
    }
}

fn residual_name(prefix: &str) -> String {
    format!("{prefix}residual")
}

impl<V> Feedback<V> {
    fn compress<D: Device<Vector = V>>(
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
        let before = held.or(first.as_ref()).expect("the first has zeros");
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
