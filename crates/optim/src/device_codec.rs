//! Codecs for vectors in the memory of a tensor device. If the device has kernels for a codec, vectors are
//! encoded and decoded in its memory, and only compressed bytes cross the bus. If its memory is the host's, the
//! host's codecs work in place. This module connects tensors with codecs, whose crates do not depend on each
//! other. It does not decide when the bytes are exchanged, or with which ranks.
//!
//! There are kernels for `sign`, `sign-l2`, `int8` and `int4`, alone or after any of `rolling`, `permuted`,
//! `random`, `topk` and `dct`, and for `none` after one of these. Indices of `topk` cross the bus as four bytes
//! each, because the host chooses how they are encoded.
//!
//! ```
//! use farflung_base::Philox;
//! use farflung_compress::device::{VectorDevice as _, DeviceCodec as _};
//! use farflung_compress::{Payload, RoundKey};
//! use farflung_optim::device_codec::Vectors;
//! use farflung_tensor::Device;
//!
//! let vectors = Vectors::on(Device::cpu(1)?);
//! let mut codec = vectors.codec("int8:64".parse()?).expect("every device has integers");
//! let mut gradient = vec![0.0; 1000];
//! Philox::new(1, 0).fill_normal(1.0, &mut gradient);
//! let x = vectors.upload(&gradient)?;
//! let (mut payload, mut y) = (Payload::new(), vectors.upload(&[0.0; 1000])?);
//! codec.compress(&x, None, RoundKey::default(), &mut payload)?;
//! codec.decompress(payload.view(), &mut y)?;
//! assert_eq!(payload.as_bytes().len(), 28 + 4 + 1000 + 16 * 2);
//! assert!(y.to_vec::<f32>()?.iter().zip(&gradient).all(|(y, x)| (y - x).abs() < 0.03));
//! # Ok::<(), farflung_optim::OptimError>(())
//! ```

mod path;
mod values;

use std::convert::Infallible;
use std::sync::LazyLock;

use farflung_compress::device::{self, DeviceCodec, Residual};
use farflung_compress::{CodecId, CodecSpec, Memoryless, Payload, PayloadRef, RoundKey};
use farflung_tensor::{DType, Device, Op, Program, ProgramBuilder, Tensor, TensorError};

use self::path::{CodecStages, Source};
use self::values::{Body, Values, codecs};
use crate::OptimError;

type Result<T, E = OptimError> = std::result::Result<T, E>;

/// Names of codecs that every device with kernels supports, alone and after selections and transforms. For
/// tests that compare the kernels with the host.
pub const KERNELS: [&str; 17] = [
    "sign",
    "sign:100",
    "sign-l2:33",
    "int8",
    "int8:1000",
    "int4",
    "int4:71",
    "rolling:10x128/int8:64",
    "permuted:3",
    "random:7/sign:100",
    "topk:0.1",
    "topk:0.02/sign-l2",
    "topk:4of64/int8:64",
    "topk:0.3x128/int4:128",
    "rolling:10x128/topk:0.2x128/int4:128",
    "dct:8/topk:4of64/sign",
    "dct:20/topk:0.05/int8",
];

/// Program `y += x`.
static ADD: LazyLock<Program> = LazyLock::new(|| {
    let mut program = ProgramBuilder::new();
    let (y, x) = (program.load(0), program.read(0));
    let sum = program.add(y, x);
    program.store(0, sum);
    program.build().expect("each operand is defined before it is used")
});

/// Program `x *= factor`.
static SCALE: LazyLock<Program> = LazyLock::new(|| {
    let mut program = ProgramBuilder::new();
    let (x, factor) = (program.load(0), program.scalar(0));
    let product = program.mul(x, factor);
    program.store(0, product);
    program.build().expect("each operand is defined before it is used")
});

/// A tensor device as codecs see it: its f32 tensors, of any shape, are the vectors.
#[derive(Debug, Clone)]
pub struct Vectors(Device);

impl Vectors {
    /// Wraps a device.
    #[must_use]
    pub const fn on(device: Device) -> Self {
        Self(device)
    }
}

impl Vectors {
    /// Returns the place where a codec works: the device if it has kernels for all of the codec (or if its
    /// memory is the host's) and the codec keeps no momentum, otherwise the host's memory.
    ///
    /// Errors: those of opening the processor as a device.
    pub fn of(device: &Device, spec: CodecSpec) -> Result<Self> {
        let there = Self(device.clone());
        let works = device::VectorDevice::codec(&there, spec).is_some() && spec.momentum().is_none();
        if works { Ok(there) } else { Self::in_memory() }
    }

    /// Returns the host's memory.
    ///
    /// Errors: those of opening the processor as a device.
    pub fn in_memory() -> Result<Self> {
        Ok(Self(Device::cpu(1)?))
    }

    /// Returns the device.
    #[must_use]
    pub const fn device(&self) -> &Device {
        &self.0
    }
}

impl device::VectorDevice for Vectors {
    type Vector = Tensor;
    type Error = OptimError;

    fn upload(&self, x: &[f32]) -> Result<Tensor> {
        Ok(self.0.tensor(x, x.len())?)
    }

    fn download(&self, x: &Tensor, out: &mut [f32]) -> Result<()> {
        out.copy_from_slice(&x.to_vec()?);
        Ok(())
    }

    fn write(&self, x: &[f32], out: &mut Tensor) -> Result<()> {
        Ok(out.write(x)?)
    }

    fn count(x: &Tensor) -> usize {
        x.shape().len()
    }

    fn add(&self, x: &Tensor, y: &mut Tensor) -> Result<()> {
        if let (Some(x), Some(y)) = (x.host::<f32>(), y.host_mut::<f32>()) {
            y.iter_mut().zip(x).for_each(|(y, x)| *y += x);
            return Ok(());
        }
        let reads = &[x.view()];
        Ok(self.0.run(Op::Map { program: &ADD, scalars: &[], reads, writes: &mut [y.view_mut()] })?)
    }

    fn scale(&self, x: &mut Tensor, factor: f32) -> Result<()> {
        if let Some(x) = x.host_mut::<f32>() {
            for x in x {
                *x *= factor;
            }
            return Ok(());
        }
        let writes = &mut [x.view_mut()];
        Ok(self.0.run(Op::Map { program: &SCALE, scalars: &[factor], reads: &[], writes })?)
    }

    fn codec(&self, spec: CodecSpec) -> Option<Box<dyn DeviceCodec<Self>>> {
        let host = spec.build_memoryless();
        if self.0.codecs().is_none() {
            return Some(Box::new(InPlace(host)));
        }
        let device = self.0.clone();
        match CodecStages::of(spec, &device)? {
            // `none` keeps all bits, so there is nothing to compute on the device.
            CodecStages::Values(Values::Plain) => None,
            path => Some(Box::new(Kernels { device, path, host })),
        }
    }
}

/// A codec of the host that works in place on tensors in the host's memory.
#[derive(Debug)]
struct InPlace(Box<dyn Memoryless>);

/// Returns the error for a tensor that is not f32 in the host's memory.
fn not_in_host_memory(x: &Tensor) -> OptimError {
    if x.dtype() == DType::F32 {
        let (expected, found) = ("cpu".to_owned(), x.device().name().to_owned());
        return TensorError::DeviceMismatch { op: "codec", expected, found }.into();
    }
    TensorError::DTypeMismatch { op: "codec", expected: DType::F32, found: x.dtype() }.into()
}

fn floats(x: &Tensor) -> Result<&[f32]> {
    x.host().ok_or_else(|| not_in_host_memory(x))
}

fn floats_mut(x: &mut Tensor) -> Result<&mut [f32]> {
    if x.host::<f32>().is_none() {
        return Err(not_in_host_memory(x));
    }
    Ok(x.host_mut().expect("the tensor is f32 in the host's memory"))
}

impl DeviceCodec<Vectors> for InPlace {
    fn compress(
        &mut self,
        x: &Tensor,
        residual: Option<Residual<'_, Tensor>>,
        key: RoundKey,
        out: &mut Payload,
    ) -> Result<()> {
        out.clear();
        let x = floats(x)?;
        match residual {
            None => self.0.compress(x, key, out)?,
            Some(Residual { before, after }) => {
                self.0.compress_residual(x, floats(before)?, floats_mut(after)?, key, out)?;
            }
        }
        Ok(())
    }

    fn decompress(&mut self, p: PayloadRef<'_>, out: &mut Tensor) -> Result<()> {
        Ok(self.0.decompress(p, floats_mut(out)?)?)
    }
}

/// Returns whether a kernel's verdict is 0, which means that it found nothing wrong.
fn passed(verdict: &Tensor) -> Result<bool> {
    Ok(verdict.to_vec::<u32>()? == [0])
}

/// Seals `body` as a payload.
fn seal(out: &mut Payload, id: CodecId, count: usize, body: &Body) {
    let sealed: Result<(), Infallible> = out.seal(id, count, body.len(), |bytes| {
        body.write(bytes);
        Ok(())
    });
    let Ok(()) = sealed;
}

/// Encodes on the host. Used for input that a kernel rejects: the host's codec encodes it or reports exactly
/// what is wrong. [`decompress_on_host`] does the same for payloads, and decodes those with other parameters.
fn compress_on_host(
    host: &mut dyn Memoryless,
    x: &Tensor,
    residual: Option<Residual<'_, Tensor>>,
    key: RoundKey,
    out: &mut Payload,
) -> Result<()> {
    let x = x.to_vec::<f32>()?;
    match residual {
        None => host.compress(&x, key, out)?,
        Some(Residual { before, after }) => {
            let mut lost = vec![0.0; x.len()];
            host.compress_residual(&x, &before.to_vec::<f32>()?, &mut lost, key, out)?;
            after.write(&lost)?;
        }
    }
    Ok(())
}

fn decompress_on_host(host: &dyn Memoryless, p: PayloadRef<'_>, out: &mut Tensor) -> Result<()> {
    let mut values = vec![0.0; out.shape().len()];
    host.decompress(p, &mut values)?;
    Ok(out.write(&values)?)
}

/// A codec for which the device has kernels.
#[derive(Debug)]
struct Kernels {
    device: Device,
    path: CodecStages,
    host: Box<dyn Memoryless>,
}

impl Kernels {
    /// Encodes `x`, or `x + before` if there is a residual. Returns the body, or `None` if a kernel rejects a
    /// value.
    fn encode(
        &self,
        x: &Tensor,
        residual: Option<(&Tensor, &mut Tensor)>,
        key: RoundKey,
    ) -> Result<Option<Body>> {
        let mut body = Body::default();
        if let CodecStages::Values(values) = &self.path {
            // One kernel adds the residual, checks, encodes and computes the new residual.
            let (before, lost) = residual.map(|(before, after)| (before.view(), after.view_mut())).unzip();
            let encoded = values.encode(&self.device, x.view(), before, lost, &mut body)?;
            return Ok(encoded.then_some(body));
        }
        let codecs = codecs(&self.device);
        let mut verdict = self.device.empty(DType::U32, 1)?;
        let source = if let Some((before, after)) = residual {
            codecs.sum(x.view(), before.view(), after.view_mut(), verdict.view_mut())?;
            Source::Lose(after)
        } else {
            codecs.finite(x.view(), verdict.view_mut())?;
            Source::Read(x)
        };
        let encoded = self.path.encode(&self.device, source, key, &mut body)?;
        Ok((encoded && passed(&verdict)?).then_some(body))
    }
}

impl DeviceCodec<Vectors> for Kernels {
    fn compress(
        &mut self,
        x: &Tensor,
        mut residual: Option<Residual<'_, Tensor>>,
        key: RoundKey,
        out: &mut Payload,
    ) -> Result<()> {
        out.clear();
        let Some(body) = self.encode(x, residual.as_mut().map(|r| (r.before, &mut *r.after)), key)? else {
            return compress_on_host(&mut *self.host, x, residual, key, out);
        };
        seal(out, self.path.id(), x.shape().len(), &body);
        Ok(())
    }

    fn decompress(&mut self, p: PayloadRef<'_>, out: &mut Tensor) -> Result<()> {
        let fits = p.count() == out.shape().len() as u64;
        if fits && self.path.decode(&self.device, p.codec(), p.body(), out)? {
            return Ok(());
        }
        decompress_on_host(&*self.host, p, out)
    }
}

#[cfg(test)]
mod tests {
    use farflung_compress::device::check;

    use super::*;

    fn law(device: &Device, name: &str) -> bool {
        check(&Vectors::on(device.clone()), name.parse().unwrap()).unwrap()
    }

    #[test]
    fn where_the_memory_is_the_hosts_all_codecs_are() {
        let cpu = Device::cpu(1).unwrap();
        for name in ["none", "sign", "int8", "int4-sr:64", "topk:0.1/int8", "dct:8/topk:4of64/sign"] {
            assert!(law(&cpu, name), "{name}");
        }
    }

    #[test]
    fn tensors_that_are_no_vectors_are_refused() {
        let cpu = Device::cpu(1).unwrap();
        let mut codec =
            device::VectorDevice::codec(&Vectors::on(cpu.clone()), "sign".parse().unwrap()).unwrap();
        let (x, mut out) = (cpu.empty(DType::U32, 3).unwrap(), Payload::new());
        let error = codec.compress(&x, None, RoundKey::default(), &mut out).unwrap_err();
        assert_eq!(error.to_string(), "codec: expected type f32, found u32");
    }

    #[cfg(feature = "wgpu")]
    #[test]
    fn kernels_give_the_hosts_bytes_residuals_values_and_refusals() {
        let gpu = Device::wgpu(0).unwrap();
        for name in KERNELS {
            assert!(law(&gpu, name), "{name}");
        }
        assert!(["none", "quantile8", "sampled:0.1"].iter().all(|name| !law(&gpu, name)));
    }
}
