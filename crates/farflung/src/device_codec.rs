//! The codecs of a tensor device: where there are kernels, vectors are encoded and decoded in the device's memory, and only
//! compressed bytes cross the bus; where the memory is the host's, the host's codecs work in place. The one place that knows
//! both tensors and codecs; it refuses to know when and with whom the bytes are exchanged.
//!
//! ```
//! use farflung::base::Philox;
//! use farflung::compress::device::{Device as _, DeviceCodec as _};
//! use farflung::compress::{Payload, RoundKey};
//! use farflung::device_codec::Vectors;
//! use farflung::tensor::Device;
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
//! # Ok::<(), farflung::Error>(())
//! ```

use std::convert::Infallible;

use farflung_compress::device::{self, DeviceCodec, Residual};
use farflung_compress::sparse::Drawn;
use farflung_compress::{CodecId, CodecSpec, Mask, Memoryless, Pattern, Payload, PayloadRef, RoundKey};
use farflung_tensor::{BlockCodec, Code, Codecs, DType, Device, Op, Tensor, TensorError, View, ViewMut};

use crate::{Error, Result};

/// A device whose f32 tensors, of any shape, are the vectors that codecs take.
#[derive(Debug, Clone)]
pub struct Vectors(Device);

impl Vectors {
    /// Those of that device.
    #[must_use]
    pub const fn on(device: Device) -> Self {
        Self(device)
    }
}

/// What values go through on a device.
#[derive(Debug, Clone, Copy)]
enum Values {
    /// f32, bit for bit.
    Plain,
    Blocks(CodecId, BlockCodec),
}

impl Values {
    /// Those of a codec without selections, if there are kernels of it.
    fn of(spec: CodecSpec) -> Option<Self> {
        let (method, block) = spec.method()?;
        let (id, code) = match method {
            "none" => return Some(Self::Plain),
            "sign" => (CodecId::SIGN, Code::SignL1),
            "sign-l2" => (CodecId::SIGN, Code::SignL2),
            "int4" => (CodecId::INT, Code::Int4),
            "int8" => (CodecId::INT, Code::Int8),
            _ => return None,
        };
        Some(Self::Blocks(id, BlockCodec::new(code, block)?))
    }

    const fn id(self) -> CodecId {
        match self {
            Self::Plain => CodecId::F32,
            Self::Blocks(id, _) => id,
        }
    }

    /// Bytes of so many values.
    const fn bytes(self, len: usize) -> usize {
        match self {
            Self::Plain => 4 * len,
            Self::Blocks(_, codec) => codec.bytes(len),
        }
    }

    /// Whether a body of that codec is one of ours, without a look at its values.
    fn fits(self, id: CodecId, len: usize, body: &[u8]) -> bool {
        let begins = match self {
            Self::Plain => true,
            Self::Blocks(_, codec) => body.starts_with(&codec.parameters()),
        };
        id == self.id() && body.len() == self.bytes(len) && begins
    }

    /// The body of `x` or `x + before` in words, and in `lost` what it loses; `None` if something is refused.
    fn encode(
        self,
        device: &Device,
        x: View<'_>,
        before: Option<View<'_>>,
        lost: Option<ViewMut<'_>>,
    ) -> Result<Option<Vec<u32>>> {
        let Self::Blocks(_, codec) = self else {
            let words = x.to_vec::<f32>()?.into_iter().map(f32::to_bits).collect();
            return Ok(Some(words));
        };
        let mut out = device.empty(DType::U32, 1 + codec.words(x.len()))?;
        codecs(device).encode(codec, x, before, lost, out.view_mut())?;
        let mut words = out.to_vec::<u32>()?;
        // Copied within the host's memory rather than fetched in two parts, each of which would wait for the device.
        Ok((words.remove(0) == 0).then_some(words))
    }

    /// Decodes a body that fits; false if it is refused.
    fn decode(self, device: &Device, body: &[u8], mut y: ViewMut<'_>) -> Result<bool> {
        let body = words(body);
        let Self::Blocks(_, codec) = self else {
            let values: Vec<f32> = body.into_iter().map(f32::from_bits).collect();
            y.write(&values)?;
            return Ok(values.iter().all(|value| value.is_finite()));
        };
        let body = device.tensor(&body, body.len())?;
        let mut verdict = device.empty(DType::U32, 1)?;
        codecs(device).decode(codec, body.view(), y, verdict.view_mut())?;
        Ok(verdict.to_vec::<u32>()? == [0])
    }
}

fn codecs(device: &Device) -> Codecs<'_> {
    device.codecs().expect("only such devices have kernels")
}

impl device::Device for Vectors {
    type Vector = Tensor;
    type Error = Error;

    fn upload(&self, x: &[f32]) -> Result<Tensor> {
        Ok(self.0.tensor(x, x.len())?)
    }

    fn download(&self, x: &Tensor, out: &mut [f32]) -> Result<()> {
        out.copy_from_slice(&x.to_vec()?);
        Ok(())
    }

    fn codec(&self, spec: CodecSpec) -> Option<Box<dyn DeviceCodec<Self>>> {
        let host = spec.build_memoryless();
        if self.0.codecs().is_none() {
            return Some(Box::new(InPlace(host)));
        }
        let device = self.0.clone();
        if let Some((mask, inner)) = spec.mask() {
            return Some(Box::new(Masked { device, mask, values: Values::of(inner)?, host }));
        }
        match Values::of(spec)? {
            // All bits pass: there is nothing to do on the device.
            Values::Plain => None,
            values @ Values::Blocks(..) => Some(Box::new(Blocks { device, values, host })),
        }
    }
}

/// A codec of the host on tensors in its memory.
#[derive(Debug)]
struct InPlace(Box<dyn Memoryless>);

/// What is not the host's f32.
fn elsewhere(x: &Tensor) -> Error {
    if x.dtype() == DType::F32 {
        let (expected, found) = ("cpu".to_owned(), x.device().name().to_owned());
        return TensorError::DeviceMismatch { op: "codec", expected, found }.into();
    }
    TensorError::DTypeMismatch { op: "codec", expected: DType::F32, found: x.dtype() }.into()
}

fn floats(x: &Tensor) -> Result<&[f32]> {
    x.host().ok_or_else(|| elsewhere(x))
}

fn floats_mut(x: &mut Tensor) -> Result<&mut [f32]> {
    if x.host::<f32>().is_none() {
        return Err(elsewhere(x));
    }
    Ok(x.host_mut().expect("it is the host's f32"))
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

/// A body in words, the last one filled up.
fn words(body: &[u8]) -> Vec<u32> {
    let (whole, rest) = body.as_chunks::<4>();
    let mut last = [0; 4];
    last[..rest.len()].copy_from_slice(rest);
    let last = (!rest.is_empty()).then_some(last);
    whole.iter().copied().chain(last).map(u32::from_le_bytes).collect()
}

/// Seals a payload of a prefix and words, of which the last may be too long.
fn seal(out: &mut Payload, id: CodecId, count: usize, body: usize, prefix: &[u8], words: &[u32]) {
    let sealed: Result<(), Infallible> = out.seal(id, count, body, |bytes| {
        let (head, rest) = bytes.split_at_mut(prefix.len());
        head.copy_from_slice(prefix);
        for (bytes, word) in rest.chunks_mut(4).zip(words) {
            bytes.copy_from_slice(&word.to_le_bytes()[..bytes.len()]);
        }
        Ok(())
    });
    let Ok(()) = sealed;
}

/// The host's way, for what kernels refuse, and for payloads of other parameters: it says exactly what is wrong.
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

/// A codec in blocks that a device has kernels of.
#[derive(Debug)]
struct Blocks {
    device: Device,
    values: Values,
    host: Box<dyn Memoryless>,
}

impl DeviceCodec<Vectors> for Blocks {
    fn compress(
        &mut self,
        x: &Tensor,
        mut residual: Option<Residual<'_, Tensor>>,
        key: RoundKey,
        out: &mut Payload,
    ) -> Result<()> {
        out.clear();
        let (before, lost) = match &mut residual {
            None => (None, None),
            Some(r) => (Some(r.before.view()), Some(r.after.view_mut())),
        };
        let Some(words) = self.values.encode(&self.device, x.view(), before, lost)? else {
            return compress_on_host(&mut *self.host, x, residual, key, out);
        };
        let len = x.shape().len();
        seal(out, self.values.id(), len, self.values.bytes(len), &[], &words);
        Ok(())
    }

    fn decompress(&mut self, p: PayloadRef<'_>, out: &mut Tensor) -> Result<()> {
        let len = out.shape().len();
        let fits = p.count() == len as u64 && self.values.fits(p.codec(), len, p.body());
        if fits && self.values.decode(&self.device, p.body(), out.view_mut())? {
            return Ok(());
        }
        decompress_on_host(&*self.host, p, out)
    }
}

/// A mask whose elements are drawn and gathered on the device, before values that it has kernels of.
#[derive(Debug)]
struct Masked {
    device: Device,
    mask: Mask,
    values: Values,
    host: Box<dyn Memoryless>,
}

impl Masked {
    /// The indices of a mask of a vector.
    fn indices(&self, drawn: &Drawn, len: usize) -> Result<Tensor> {
        let kept = drawn.kept();
        let mask = farflung_tensor::Mask {
            pattern: match drawn.mask().pattern {
                Pattern::Rolling => farflung_tensor::Pattern::Rolling,
                Pattern::Permuted => farflung_tensor::Pattern::Permuted,
                Pattern::Random => farflung_tensor::Pattern::Random,
            },
            stride: drawn.mask().stride,
            phase: drawn.phase(),
            kept,
            taken: u32::try_from(drawn.taken(len)).expect("a device's vectors have fewer than 2^32 elements"),
            gap: drawn.gap(),
            stream: drawn.stream(),
        };
        let mut indices = self.device.empty(DType::U32, kept as usize)?;
        codecs(&self.device).mask(mask, indices.view_mut())?;
        Ok(indices)
    }

    /// The body of the masked values of `x`, or of `x + before`; `None` if something is refused.
    fn encode(
        &self,
        drawn: &Drawn,
        x: &Tensor,
        residual: Option<(&Tensor, &mut Tensor)>,
    ) -> Result<Option<Vec<u32>>> {
        let (device, codecs, kept) = (&self.device, codecs(&self.device), drawn.kept() as usize);
        let indices = self.indices(drawn, x.shape().len())?;
        let mut values = device.empty(DType::F32, kept)?;
        let mut verdict = device.empty(DType::U32, 1)?;
        let words = if let Some((before, after)) = residual {
            // What is not sent is lost as it is.
            codecs.sum(x.view(), before.view(), after.view_mut(), verdict.view_mut())?;
            codecs.gather(after.view(), indices.view(), values.view_mut())?;
            let mut lost = device.zeros(kept)?;
            let words = self.values.encode(device, values.view(), None, Some(lost.view_mut()))?;
            codecs.put(lost.view(), indices.view(), after.view_mut())?;
            words
        } else {
            codecs.finite(x.view(), verdict.view_mut())?;
            codecs.gather(x.view(), indices.view(), values.view_mut())?;
            self.values.encode(device, values.view(), None, None)?
        };
        let finite = verdict.to_vec::<u32>()? == [0];
        Ok(words.filter(|_| finite))
    }

    /// Decodes a payload of our values; false if it is not one, or refused.
    fn decode(&self, p: PayloadRef<'_>, out: &mut Tensor) -> Result<bool> {
        let len = out.shape().len();
        let Some((prefix, body)) = p.body().split_first_chunk() else { return Ok(false) };
        let Ok((drawn, inner)) = Drawn::read(prefix, len) else { return Ok(false) };
        let kept = drawn.kept() as usize;
        if p.codec() != CodecId::MASKED || p.count() != len as u64 || !self.values.fits(inner, kept, body) {
            return Ok(false);
        }
        let mut values = self.device.empty(DType::F32, kept)?;
        if !self.values.decode(&self.device, body, values.view_mut())? {
            return Ok(false);
        }
        let indices = self.indices(&drawn, len)?;
        self.device.run(Op::Fill { value: 0.0, y: out.view_mut() })?;
        codecs(&self.device).put(values.view(), indices.view(), out.view_mut())?;
        Ok(true)
    }
}

impl DeviceCodec<Vectors> for Masked {
    fn compress(
        &mut self,
        x: &Tensor,
        mut residual: Option<Residual<'_, Tensor>>,
        key: RoundKey,
        out: &mut Payload,
    ) -> Result<()> {
        out.clear();
        let len = x.shape().len();
        let drawn = Drawn::new(self.mask, key, len);
        let Some(words) = self.encode(&drawn, x, residual.as_mut().map(|r| (r.before, &mut *r.after)))?
        else {
            return compress_on_host(&mut *self.host, x, residual, key, out);
        };
        let body = Drawn::BYTES + self.values.bytes(drawn.kept() as usize);
        seal(out, CodecId::MASKED, len, body, &drawn.write(self.values.id()), &words);
        Ok(())
    }

    fn decompress(&mut self, p: PayloadRef<'_>, out: &mut Tensor) -> Result<()> {
        if self.decode(p, out)? {
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
        let mut codec = device::Device::codec(&Vectors::on(cpu.clone()), "sign".parse().unwrap()).unwrap();
        let (x, mut out) = (cpu.empty(DType::U32, 3).unwrap(), Payload::new());
        let error = codec.compress(&x, None, RoundKey::default(), &mut out).unwrap_err();
        assert_eq!(error.to_string(), "codec: takes f32, not u32");
    }

    #[cfg(feature = "wgpu")]
    #[test]
    fn kernels_give_the_hosts_bytes_residuals_values_and_refusals() {
        let gpu = Device::wgpu(0).unwrap();
        for name in [
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
        ] {
            assert!(law(&gpu, name), "{name}");
        }
        assert!(!law(&gpu, "quantile8"));
    }
}
