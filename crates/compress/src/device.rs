//! Codecs of vectors that lie in a device's memory: how a backend offers them, and the law that their bytes are
//! the host's. Knows no device but the host.
//!
//! The arithmetic of each codec is fixed in `WIRE.md` so that a kernel can follow it to the bit: maxima and
//! integer operations, products and sums in a stated order, one division a block. This crate depends on no
//! tensors, and tensors not on it: whoever knows both implements [`VectorDevice`] for the backend, and has
//! [`check`] among its tests.

mod law;
mod stream;

use std::fmt::Debug;

use crate::{CodecSpec, CompressError, Memoryless, Payload, PayloadRef, RoundKey};

pub use law::check;
pub use stream::Stream;

/// A place where vectors of `f32` lie.
pub trait VectorDevice {
    /// A vector there; its length does not change.
    type Vector;
    /// What can go wrong there.
    type Error: From<CompressError>;

    /// Copies a vector there.
    ///
    /// Errors: the device's.
    fn upload(&self, x: &[f32]) -> Result<Self::Vector, Self::Error>;

    /// Copies a vector of the length of `out` back.
    ///
    /// Errors: the device's.
    fn download(&self, x: &Self::Vector, out: &mut [f32]) -> Result<(), Self::Error>;

    /// Overwrites a vector of that length.
    ///
    /// Errors: the device's.
    fn write(&self, x: &[f32], out: &mut Self::Vector) -> Result<(), Self::Error> {
        *out = self.upload(x)?;
        Ok(())
    }

    /// Elements of a vector.
    fn count(x: &Self::Vector) -> usize;

    /// `y += x`, element by element; both are of one length.
    ///
    /// Errors: the device's.
    fn add(&self, x: &Self::Vector, y: &mut Self::Vector) -> Result<(), Self::Error>;

    /// `x *= factor`.
    ///
    /// Errors: the device's.
    fn scale(&self, x: &mut Self::Vector, factor: f32) -> Result<(), Self::Error>;

    /// The codec, without its feedback and its last stage, if there are kernels of it: [`Stream`] has these
    /// too. If not, the way is to download.
    fn codec(&self, spec: CodecSpec) -> Option<Box<dyn DeviceCodec<Self>>>;
}

/// A codec of vectors on a device, as [`Memoryless`] is one on the host: the same bytes, refusals and
/// residuals.
pub trait DeviceCodec<D: VectorDevice + ?Sized>: Debug + Send {
    /// Encodes `x`, or with a residual `x + residual.before`. A kernel fills the body: [`Payload::seal`].
    ///
    /// Errors: those of [`Memoryless::compress_residual`], as the device's. Then `out` is empty.
    fn compress(
        &mut self,
        x: &D::Vector,
        residual: Option<Residual<'_, D::Vector>>,
        key: RoundKey,
        out: &mut Payload,
    ) -> Result<(), D::Error>;

    /// Decodes `p`, which is untrusted, into all of `out`.
    ///
    /// Errors: those of [`crate::Compressor::decompress`], as the device's.
    fn decompress(&mut self, p: PayloadRef<'_>, out: &mut D::Vector) -> Result<(), D::Error>;
}

/// What earlier payloads lost, and where to write what is lost now. Both are of the vector's length.
#[derive(Debug)]
pub struct Residual<'a, V> {
    /// Read only: a failure leaves it as it was.
    pub before: &'a V,
    /// Unspecified after a failure.
    pub after: &'a mut V,
}

/// The host as a device: what others are compared with.
#[derive(Debug, Clone, Copy, Default)]
pub struct Host;

impl VectorDevice for Host {
    type Vector = Vec<f32>;
    type Error = CompressError;

    fn upload(&self, x: &[f32]) -> Result<Vec<f32>, CompressError> {
        Ok(x.to_vec())
    }

    fn download(&self, x: &Vec<f32>, out: &mut [f32]) -> Result<(), CompressError> {
        out.copy_from_slice(x);
        Ok(())
    }

    fn count(x: &Vec<f32>) -> usize {
        x.len()
    }

    fn add(&self, x: &Vec<f32>, y: &mut Vec<f32>) -> Result<(), CompressError> {
        y.iter_mut().zip(x).for_each(|(y, x)| *y += x);
        Ok(())
    }

    fn scale(&self, x: &mut Vec<f32>, factor: f32) -> Result<(), CompressError> {
        for x in x {
            *x *= factor;
        }
        Ok(())
    }

    fn codec(&self, spec: CodecSpec) -> Option<Box<dyn DeviceCodec<Self>>> {
        Some(Box::new(OnHost(spec.build_memoryless())))
    }
}

#[derive(Debug)]
struct OnHost(Box<dyn Memoryless>);

impl DeviceCodec<Host> for OnHost {
    fn compress(
        &mut self,
        x: &Vec<f32>,
        residual: Option<Residual<'_, Vec<f32>>>,
        key: RoundKey,
        out: &mut Payload,
    ) -> Result<(), CompressError> {
        match residual {
            None => self.0.compress(x, key, out),
            Some(Residual { before, after }) => self.0.compress_residual(x, before, after, key, out),
        }
    }

    fn decompress(&mut self, p: PayloadRef<'_>, out: &mut Vec<f32>) -> Result<(), CompressError> {
        self.0.decompress(p, out)
    }
}
