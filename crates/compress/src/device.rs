//! Codecs of vectors in a device's memory: the traits that a backend implements, and the check that its
//! payloads equal the host's. The host is the only device in this crate.
//!
//! `WIRE.md` fixes the arithmetic of each codec, so that a kernel can reproduce it bit for bit: maxima and
//! integer operations, products and sums in a stated order, one division for each block. This crate and the
//! tensor crate do not depend on each other. A crate that depends on both implements [`VectorDevice`] for a
//! backend, and runs [`check`] in its tests.

mod law;
mod stream;

use std::fmt::Debug;

use crate::{CodecSpec, CompressError, Memoryless, Payload, PayloadRef, RoundKey};

pub use law::check;
pub use stream::Stream;

/// A device whose memory holds vectors of `f32`.
pub trait VectorDevice {
    /// A vector in the device's memory. Its length does not change.
    type Vector;
    /// The device's error type.
    type Error: From<CompressError>;

    /// Copies a vector to the device.
    ///
    /// Errors: the device's.
    fn upload(&self, x: &[f32]) -> Result<Self::Vector, Self::Error>;

    /// Copies a vector, which has the length of `out`, to the host.
    ///
    /// Errors: the device's.
    fn download(&self, x: &Self::Vector, out: &mut [f32]) -> Result<(), Self::Error>;

    /// Overwrites a vector of the length of `x`.
    ///
    /// Errors: the device's.
    fn write(&self, x: &[f32], out: &mut Self::Vector) -> Result<(), Self::Error> {
        *out = self.upload(x)?;
        Ok(())
    }

    /// Returns the number of elements of a vector.
    fn count(x: &Self::Vector) -> usize;

    /// Computes `y += x`, element by element. Both have the same length.
    ///
    /// Errors: the device's.
    fn add(&self, x: &Self::Vector, y: &mut Self::Vector) -> Result<(), Self::Error>;

    /// Computes `x *= factor`.
    ///
    /// Errors: the device's.
    fn scale(&self, x: &mut Self::Vector, factor: f32) -> Result<(), Self::Error>;

    /// Returns the codec if the device has kernels for it, without its feedback and its last stage, which
    /// [`Stream`] adds. If it returns `None`, download the vector and encode it on the host.
    fn codec(&self, spec: CodecSpec) -> Option<Box<dyn DeviceCodec<Self>>>;
}

/// A codec of vectors on a device, like [`Memoryless`] on the host: it has the same payloads, errors and
/// residuals.
pub trait DeviceCodec<D: VectorDevice + ?Sized>: Debug + Send {
    /// Encodes `x`, or with a residual `x + residual.before`. A kernel writes the body by [`Payload::seal`].
    ///
    /// Errors: those of [`Memoryless::compress_residual`], as the device's error type. After an error `out` is
    /// empty.
    fn compress(
        &mut self,
        x: &D::Vector,
        residual: Option<Residual<'_, D::Vector>>,
        key: RoundKey,
        out: &mut Payload,
    ) -> Result<(), D::Error>;

    /// Decodes the untrusted payload `p` into all of `out`.
    ///
    /// Errors: those of [`crate::Compressor::decompress`], as the device's error type.
    fn decompress(&mut self, p: PayloadRef<'_>, out: &mut D::Vector) -> Result<(), D::Error>;
}

/// The residual before a compress, and the buffer for the residual after it. Both have the vector's length.
#[derive(Debug)]
pub struct Residual<'a, V> {
    /// Residual of earlier compresses. It is only read, so an error leaves it unchanged.
    pub before: &'a V,
    /// Residual after this compress. Its contents are unspecified after an error.
    pub after: &'a mut V,
}

/// The host as a device: the reference for other devices.
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
