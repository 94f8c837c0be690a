//! The check of device codecs passes on the host, and finds every fault of a faulty device.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

use farflung_compress::device::{DeviceCodec, Host, Residual, VectorDevice, check};
use farflung_compress::{CodecSpec, CompressError, Payload, PayloadRef, RoundKey};

#[test]
fn the_host_keeps_the_law() {
    for name in [
        "none",
        "f16",
        "bf16",
        "int8",
        "int4:128",
        "int3:100",
        "int2",
        "int4-sr",
        "uint4",
        "sign",
        "sign-l2:64",
        "e4m3",
        "e3m0",
        "natural",
        "minmax8",
        "meanstd8:512",
        "quantile4:300",
        "qsgd4",
        "terngrad",
        "topk:0.1",
        "sampled:0.05/int8",
        "rolling:3/sign",
        "unbiased:4/f16",
        "dct:8/topk:5of64",
    ] {
        assert!(check(&Host, name.parse().unwrap()).unwrap(), "{name}");
    }
}

/// A host with one fault of a kind that kernels can have.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Faulty {
    /// The lowest bit of the payload is wrong.
    Bytes,
    /// The residual is rounded differently.
    Residual,
    /// A value that is not finite is not rejected.
    Infinity,
    /// A decoded value is rounded differently.
    Decoded,
    /// Codes are not checked when decoding.
    Trusting,
    /// `add` overwrites the sum instead of adding to it.
    Sum,
    /// `scale` does nothing.
    Scale,
    /// The device has no kernels.
    None,
}

#[derive(Debug)]
struct Wrong(Faulty, Box<dyn DeviceCodec<Host>>);

impl VectorDevice for Faulty {
    type Vector = Vec<f32>;
    type Error = CompressError;

    fn upload(&self, x: &[f32]) -> Result<Vec<f32>, CompressError> {
        Host.upload(x)
    }

    fn download(&self, x: &Vec<f32>, out: &mut [f32]) -> Result<(), CompressError> {
        Host.download(x, out)
    }

    fn count(x: &Vec<f32>) -> usize {
        x.len()
    }

    fn add(&self, x: &Vec<f32>, y: &mut Vec<f32>) -> Result<(), CompressError> {
        if *self == Self::Sum {
            y.fill(0.0);
        }
        Host.add(x, y)
    }

    fn scale(&self, x: &mut Vec<f32>, factor: f32) -> Result<(), CompressError> {
        Host.scale(x, if *self == Self::Scale { 1.0 } else { factor })
    }

    fn codec(&self, spec: CodecSpec) -> Option<Box<dyn DeviceCodec<Self>>> {
        (*self != Self::None).then(|| Box::new(Wrong(*self, Host.codec(spec).unwrap())) as Box<_>)
    }
}

impl DeviceCodec<Faulty> for Wrong {
    fn compress(
        &mut self,
        x: &Vec<f32>,
        residual: Option<Residual<'_, Vec<f32>>>,
        key: RoundKey,
        out: &mut Payload,
    ) -> Result<(), CompressError> {
        let Self(fault, codec) = self;
        if *fault == Faulty::Infinity {
            let x: Vec<f32> = x.iter().map(|x| x.clamp(-f32::MAX, f32::MAX)).collect();
            return codec.compress(&x, residual, key, out);
        }
        match residual {
            None => codec.compress(x, None, key, out)?,
            Some(Residual { before, after }) => {
                codec.compress(x, Some(Residual { before, after: &mut *after }), key, out)?;
                if *fault == Faulty::Residual {
                    for e in after.iter_mut() {
                        *e *= 1.000_000_1;
                    }
                }
            }
        }
        let (id, count, mut body) = (out.codec(), out.view().count() as usize, out.view().body().to_vec());
        if let (Faulty::Bytes, Some(last)) = (*fault, body.last_mut()) {
            *last ^= 1;
        }
        out.seal(id, count, body.len(), |bytes| {
            bytes.copy_from_slice(&body);
            Ok(())
        })
    }

    fn decompress(&mut self, p: PayloadRef<'_>, out: &mut Vec<f32>) -> Result<(), CompressError> {
        let result = self.1.decompress(p, out);
        match self.0 {
            Faulty::Decoded => out.iter_mut().for_each(|o| *o *= 1.000_000_1),
            Faulty::Trusting => return Ok(()),
            _ => {}
        }
        result
    }
}

#[test]
fn every_fault_is_found() {
    for (fault, wanted) in [
        (Faulty::Bytes, "the encoded bytes"),
        (Faulty::Residual, "the new residual"),
        (Faulty::Infinity, "which vectors are rejected"),
        (Faulty::Decoded, "the decoded values"),
        (Faulty::Trusting, "which payloads are rejected"),
        (Faulty::Sum, "the sum of two vectors"),
        (Faulty::Scale, "a scaled vector"),
    ] {
        for name in ["int8", "int4:128", "topk:0.1/f16"] {
            let error = check(&fault, name.parse().unwrap()).unwrap_err();
            let CompressError::Device { codec, what, .. } = &error else { unreachable!("{error}") };
            assert_eq!((*what, codec.parse::<CodecSpec>()), (wanted, name.parse()), "{error}");
        }
    }
    assert!(!check(&Faulty::None, "int8".parse().unwrap()).unwrap());
}
