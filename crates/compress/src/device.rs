//! Codecs of vectors that lie in a device's memory: how a backend offers them, and the law that their bytes are the host's.
//! Knows no device but the host.
//!
//! The arithmetic of each codec is fixed in `WIRE.md` so that a kernel can follow it to the bit: maxima and integer
//! operations, products and sums in a stated order, one division a block. This crate depends on no tensors, and tensors not on
//! it: whoever knows both implements [`Device`] for the backend, and has [`check`] among its tests.

use std::fmt::Debug;

use farflung_base::Philox;

use crate::{CodecSpec, CompressError, Memoryless, Payload, PayloadRef, RoundKey, mutate};

/// A place where vectors of `f32` lie.
pub trait Device {
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

    /// The codec, without its feedback and its last stage, if there are kernels of it. If not, the way is to download.
    fn codec(&self, spec: CodecSpec) -> Option<Box<dyn DeviceCodec<Self>>>;
}

/// A codec of vectors on a device, as [`Memoryless`] is one on the host: the same bytes, refusals and residuals.
pub trait DeviceCodec<D: Device + ?Sized>: Debug + Send {
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

impl Device for Host {
    type Vector = Vec<f32>;
    type Error = CompressError;

    fn upload(&self, x: &[f32]) -> Result<Vec<f32>, CompressError> {
        Ok(x.to_vec())
    }

    fn download(&self, x: &Vec<f32>, out: &mut [f32]) -> Result<(), CompressError> {
        out.copy_from_slice(x);
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

/// Lengths that end within and at words, runs, groups and blocks.
const LENGTHS: [usize; 12] = [0, 1, 2, 7, 31, 33, 255, 256, 257, 1000, 4101, 20_011];
/// Standard deviations, from subnormals to what nearly overflows.
const SIZES: [f32; 6] = [1e-41, 1e-30, 1e-3, 1.0, 3e4, 1e37];

/// The law: on `device`, the codec gives the payloads, residuals, decoded values and refusals of the host, to the bit, over
/// lengths and magnitudes of all kinds. `false` if the device does not have the codec.
///
/// Errors: the device's; [`CompressError::Device`], which says where the first difference is.
pub fn check<D: Device>(device: &D, spec: CodecSpec) -> Result<bool, D::Error> {
    let Some(codec) = device.codec(spec) else { return Ok(false) };
    let mut law = Law { device, spec, codec, host: spec.build_memoryless() };
    for (round, len) in LENGTHS.into_iter().enumerate() {
        for (stream, size) in SIZES.into_iter().enumerate() {
            let (mut x, mut e) = (vec![0.0; len], vec![0.0; len]);
            Philox::new(1, stream as u64).fill_normal(size, &mut x);
            Philox::new(2, stream as u64).fill_normal(size / 50.0, &mut e);
            let key = RoundKey { seed: 5, round: round as u64, ..RoundKey::default() };
            law.values(&x, &e, key)?;
        }
    }
    for x in [vec![0.0; 300], vec![-0.0; 300], vec![f32::MAX; 300], vec![1.0, f32::MIN, f32::from_bits(1)]] {
        law.values(&x, &vec![0.0; x.len()], RoundKey::default())?;
    }
    for (at, bad) in [(0, f32::NAN), (299, f32::INFINITY), (77, f32::NEG_INFINITY)] {
        let mut x = vec![1.0; 300];
        x[at] = bad;
        law.values(&x, &vec![0.0; 300], RoundKey::default())?;
    }
    law.untrusted()?;
    Ok(true)
}

struct Law<'a, D: Device> {
    device: &'a D,
    spec: CodecSpec,
    codec: Box<dyn DeviceCodec<D>>,
    host: Box<dyn Memoryless>,
}

impl<D: Device> Law<'_, D> {
    fn same(&self, same: bool, what: &'static str, len: usize) -> Result<(), D::Error> {
        if same {
            return Ok(());
        }
        Err(CompressError::Device { codec: self.spec.to_string(), what, len }.into())
    }

    fn bits(&self, x: &D::Vector, len: usize) -> Result<Vec<u32>, D::Error> {
        let mut host = vec![0.0; len];
        self.device.download(x, &mut host)?;
        Ok(bits(&host))
    }

    /// Both encode and decode `x`, alone and with the residual `e`.
    fn values(&mut self, x: &[f32], e: &[f32], key: RoundKey) -> Result<(), D::Error> {
        let len = x.len();
        let (mut ours, mut theirs) = (Payload::new(), Payload::new());
        let there = self.device.upload(x)?;
        let wanted = self.host.compress(x, key, &mut ours);
        let found = self.codec.compress(&there, None, key, &mut theirs);
        self.same(wanted.is_ok() == found.is_ok(), "what it refuses", len)?;
        self.same(ours == theirs, "its bytes", len)?;
        if wanted.is_ok() {
            self.decoded(ours.view(), len)?;
        }
        let (before, mut after) = (self.device.upload(e)?, self.device.upload(e)?);
        let mut next = vec![0.0; len];
        let wanted = self.host.compress_residual(x, e, &mut next, key, &mut ours);
        let residual = Residual { before: &before, after: &mut after };
        let found = self.codec.compress(&there, Some(residual), key, &mut theirs);
        self.same(wanted.is_ok() == found.is_ok(), "what it refuses with a residual", len)?;
        self.same(ours == theirs, "its bytes with a residual", len)?;
        self.same(self.bits(&before, len)? == bits(e), "the residual before, which it must not write", len)?;
        if wanted.is_ok() {
            self.same(self.bits(&after, len)? == bits(&next), "its residual", len)?;
        }
        Ok(())
    }

    /// Both decode `p`.
    fn decoded(&mut self, p: PayloadRef<'_>, len: usize) -> Result<(), D::Error> {
        let mut out = vec![0.0; len];
        let mut there = self.device.upload(&out)?;
        let wanted = self.host.decompress(p, &mut out);
        let found = self.codec.decompress(p, &mut there);
        self.same(wanted.is_ok() == found.is_ok(), "which payloads it refuses", len)?;
        if wanted.is_err() {
            return Ok(());
        }
        self.same(self.bits(&there, len)? == bits(&out), "what it decodes", len)
    }

    /// Both decode what an adversary makes of a payload.
    fn untrusted(&mut self) -> Result<(), D::Error> {
        let (mut x, mut payload) = (vec![0.0; 300], Payload::new());
        let rng = Philox::new(3, 0);
        rng.fill_normal(1.0, &mut x);
        self.host.compress(&x, RoundKey::default(), &mut payload)?;
        for case in 0..1000 {
            let mut bytes = payload.as_bytes().to_vec();
            mutate(&mut bytes, &rng, 1 << 20 | case);
            if let Ok(p) = PayloadRef::parse(&bytes) {
                self.decoded(p, x.len())?;
            }
        }
        Ok(())
    }
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}
