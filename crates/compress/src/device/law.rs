//! The check that a device's codecs give the same results as the host's, bit for bit.

use farflung_base::Philox;

use super::{DeviceCodec, Residual, Stream, VectorDevice};
use crate::{
    CodecSpec, CompressError, Compressor, Memoryless, Payload, PayloadRef, RoundKey, StateMap, mutate,
};

/// Lengths that end within or at the end of words, runs, groups and blocks.
const LENGTHS: [usize; 12] = [0, 1, 2, 7, 31, 33, 255, 256, 257, 1000, 4101, 20_011];
/// Standard deviations, from subnormal values to values that nearly overflow.
const SIZES: [f32; 6] = [1e-41, 1e-30, 1e-3, 1.0, 3e4, 1e37];

/// Checks that a codec on `device` gives the same payloads, residuals and decoded values as on the host, bit
/// for bit, and rejects the same vectors and payloads, over many lengths and magnitudes, alone and as a
/// [`Stream`] with feedback. Returns `false` if the device does not have the codec.
///
/// Errors: the device's; [`CompressError::Device`] with the first difference.
pub fn check<D: VectorDevice + Clone>(device: &D, spec: CodecSpec) -> Result<bool, D::Error> {
    let Some(codec) = device.codec(spec) else { return Ok(false) };
    let mut law = DeviceCheck { device, spec, codec, host: spec.build_memoryless() };
    for (round, len) in LENGTHS.into_iter().enumerate() {
        for (stream, size) in SIZES.into_iter().enumerate() {
            let (mut x, mut e) = (vec![0.0; len], vec![0.0; len]);
            Philox::new(1, stream as u64).fill_normal(size, &mut x);
            Philox::new(2, stream as u64).fill_normal(size / 50.0, &mut e);
            let key = RoundKey { seed: 5, round: round as u64, ..RoundKey::default() };
            law.values(&x, &e, key)?;
        }
    }
    let (mut alone, mut turns) = (vec![0.0; 300], vec![f32::MAX; 300]);
    alone[70] = f32::MAX;
    turns.iter_mut().step_by(2).for_each(|x| *x = f32::MIN);
    let edges = [vec![f32::MAX; 300], vec![1e38; 300], alone, turns, vec![1.0, f32::MIN, f32::from_bits(1)]];
    for x in edges.iter().chain(&[vec![0.0; 300], vec![-0.0; 300]]) {
        law.values(x, &vec![0.0; x.len()], RoundKey::default())?;
        law.values(x, &x.iter().map(|x| x * -1e-3).collect::<Vec<_>>(), RoundKey::default())?;
    }
    for (at, bad) in [(0, f32::NAN), (299, f32::INFINITY), (77, f32::NEG_INFINITY)] {
        let mut x = vec![1.0; 300];
        x[at] = bad;
        law.values(&x, &vec![0.0; 300], RoundKey::default())?;
    }
    law.untrusted()?;
    law.arithmetic()?;
    law.stream(spec.with_feedback())?;
    if let Ok(spec) = format!("{spec}+ef:0.9+lz4").parse() {
        law.stream(spec)?;
    }
    Ok(true)
}

struct DeviceCheck<'a, D: VectorDevice> {
    device: &'a D,
    spec: CodecSpec,
    codec: Box<dyn DeviceCodec<D>>,
    host: Box<dyn Memoryless>,
}

impl<D: VectorDevice> DeviceCheck<'_, D> {
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

    /// Encodes `x` on host and device, alone and with the residual `e`, and decodes the payload of `x` alone.
    fn values(&mut self, x: &[f32], e: &[f32], key: RoundKey) -> Result<(), D::Error> {
        let len = x.len();
        let (mut ours, mut theirs) = (Payload::new(), Payload::new());
        let there = self.device.upload(x)?;
        let wanted = self.host.compress(x, key, &mut ours);
        let found = self.codec.compress(&there, None, key, &mut theirs);
        self.same(wanted.is_ok() == found.is_ok(), "which vectors are rejected", len)?;
        self.same(ours == theirs, "the encoded bytes", len)?;
        if wanted.is_ok() {
            self.decoded(ours.view(), len)?;
        }
        let (before, mut after) = (self.device.upload(e)?, self.device.upload(e)?);
        let mut next = vec![0.0; len];
        let wanted = self.host.compress_residual(x, e, &mut next, key, &mut ours);
        let residual = Residual { before: &before, after: &mut after };
        let found = self.codec.compress(&there, Some(residual), key, &mut theirs);
        self.same(wanted.is_ok() == found.is_ok(), "which vectors with a residual are rejected", len)?;
        self.same(ours == theirs, "the encoded bytes with a residual", len)?;
        self.same(self.bits(&before, len)? == bits(e), "the old residual, which must not be written", len)?;
        if wanted.is_ok() {
            self.same(self.bits(&after, len)? == bits(&next), "the new residual", len)?;
        }
        Ok(())
    }

    /// Decodes `p` on host and device.
    fn decoded(&mut self, p: PayloadRef<'_>, len: usize) -> Result<(), D::Error> {
        let mut out = vec![0.0; len];
        let mut there = self.device.upload(&out)?;
        let wanted = self.host.decompress(p, &mut out);
        let found = self.codec.decompress(p, &mut there);
        self.same(wanted.is_ok() == found.is_ok(), "which payloads are rejected", len)?;
        if wanted.is_err() {
            return Ok(());
        }
        self.same(self.bits(&there, len)? == bits(&out), "the decoded values", len)
    }

    /// Adds and scales vectors on host and device.
    fn arithmetic(&self) -> Result<(), D::Error> {
        let (mut x, mut y) = (vec![0.0; 1000], vec![0.0; 1000]);
        Philox::new(6, 0).fill_normal(1.0, &mut x);
        Philox::new(6, 1).fill_normal(1e-3, &mut y);
        let (there, mut sum) = (self.device.upload(&x)?, self.device.upload(&y)?);
        self.device.add(&there, &mut sum)?;
        y.iter_mut().zip(&x).for_each(|(y, x)| *y += x);
        self.same(self.bits(&sum, y.len())? == bits(&y), "the sum of two vectors", y.len())?;
        self.device.scale(&mut sum, 1.0 / 3.0)?;
        for y in &mut y {
            *y *= 1.0 / 3.0;
        }
        self.same(self.bits(&sum, y.len())? == bits(&y), "a scaled vector", y.len())
    }

    /// Runs a stream on host and device, rolls one step back, then saves it and continues from the saved state.
    fn stream(&self, spec: CodecSpec) -> Result<(), D::Error>
    where
        D: Clone,
    {
        let Some(mut ours) = Stream::new(self.device.clone(), spec) else {
            return self.same(false, "whether a stream can be created", 0);
        };
        let (len, mut theirs) = (1000, spec.build());
        let (mut here, mut there) = (Payload::new(), Payload::new());
        for round in 0..6 {
            let mut x = vec![0.0; len];
            Philox::new(4, round).fill_normal(1.0, &mut x);
            let key = RoundKey { seed: 5, round, ..RoundKey::default() };
            theirs.compress(&x, key, &mut here)?;
            ours.compress(&self.device.upload(&x)?, key, &mut there)?;
            self.same(here == there, "a stream's encoded bytes", len)?;
            let (mut y, mut out) = (vec![0.0; len], self.device.upload(&x)?);
            theirs.decompress(here.view(), &mut y)?;
            ours.decompress(here.view(), &mut out)?;
            self.same(self.bits(&out, len)? == bits(&y), "a stream's decoded values", len)?;
            match round {
                1 => (theirs.rollback(), ours.rollback()),
                2 => ((), ()),
                _ => (theirs.commit(), ours.commit()),
            };
        }
        let (mut kept, mut saved) = (StateMap::new(), StateMap::new());
        theirs.save("a.", &mut kept)?;
        ours.save("a.", &mut saved)?;
        self.same(kept == saved, "a stream's saved state", len)?;
        let mut restored =
            Stream::new(self.device.clone(), spec).expect("a stream of this codec was created above");
        restored.load("a.", &mut saved)?;
        let x = vec![1.0; len];
        theirs.compress(&x, RoundKey::default(), &mut here)?;
        restored.compress(&self.device.upload(&x)?, RoundKey::default(), &mut there)?;
        self.same(here == there, "the encoded bytes of a restored stream", len)
    }

    /// Decodes corrupted payloads on host and device.
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
