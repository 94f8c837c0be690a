//! Encoding of the values after all selections: in blocks by kernels, or as plain f32. Payload headers are not
//! handled here.

use farflung_compress::{CodecId, CodecSpec};
use farflung_tensor::{BlockCodec, Code, Codecs, DType, Device, Op, View, ViewMut};

use super::{Result, passed};

/// Body of a payload that is being built.
#[derive(Debug, Default)]
pub(super) struct Body {
    /// Bytes before the values.
    pub(super) prefix: Vec<u8>,
    /// Encoded values; the last word is padded.
    words: Vec<u32>,
    /// Number of bytes of the encoded values without the padding.
    bytes: usize,
}

impl Body {
    pub(super) const fn len(&self) -> usize {
        self.prefix.len() + self.bytes
    }

    /// Writes the body to `bytes`, which has the same length.
    pub(super) fn write(&self, bytes: &mut [u8]) {
        let (prefix, rest) = bytes.split_at_mut(self.prefix.len());
        prefix.copy_from_slice(&self.prefix);
        for (bytes, word) in rest.chunks_mut(4).zip(&self.words) {
            bytes.copy_from_slice(&word.to_le_bytes()[..bytes.len()]);
        }
    }
}

/// Encoding of values on a device.
#[derive(Debug, Clone, Copy)]
pub(super) enum Values {
    /// f32, bit for bit.
    Plain,
    Blocks(CodecId, BlockCodec),
}

impl Values {
    /// Returns the encoding of a codec without selections, if there are kernels for it.
    pub(super) fn of(spec: CodecSpec) -> Option<Self> {
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

    pub(super) const fn id(self) -> CodecId {
        match self {
            Self::Plain => CodecId::F32,
            Self::Blocks(id, _) => id,
        }
    }

    /// Returns the number of bytes of `len` values.
    pub(super) const fn bytes(self, len: usize) -> usize {
        match self {
            Self::Plain => 4 * len,
            Self::Blocks(_, codec) => codec.bytes(len),
        }
    }

    /// Returns whether a body has this encoding's codec, length and parameters. The values are not checked.
    pub(super) fn fits(self, id: CodecId, len: usize, body: &[u8]) -> bool {
        let begins = match self {
            Self::Plain => true,
            Self::Blocks(_, codec) => body.starts_with(&codec.parameters()),
        };
        id == self.id() && body.len() == self.bytes(len) && begins
    }

    /// Appends the body of `x` to `body`, or that of `x + before` for an encoding in blocks, and writes what is
    /// lost to `lost`. Returns `false` if a value is rejected.
    pub(super) fn encode(
        self,
        device: &Device,
        x: View<'_>,
        before: Option<View<'_>>,
        lost: Option<ViewMut<'_>>,
        body: &mut Body,
    ) -> Result<bool> {
        let mut refused = 0;
        body.words = if let Self::Blocks(_, codec) = self {
            let mut out = device.empty(DType::U32, 1 + codec.words(x.len()))?;
            codecs(device).encode(codec, x, before, lost, out.view_mut())?;
            let mut words = out.to_vec::<u32>()?;
            // The first word is the kernel's verdict. It is fetched together with the values, because two
            // fetches would wait for the device twice.
            refused = words.remove(0);
            words
        } else {
            lost.map_or(Ok(()), |y| device.run(Op::Fill { value: 0.0, y }))?;
            x.to_vec::<f32>()?.into_iter().map(f32::to_bits).collect()
        };
        body.bytes = self.bytes(x.len());
        Ok(refused == 0)
    }

    /// Decodes a body that [`fits`](Self::fits). Returns `false` if it is rejected.
    pub(super) fn decode(self, device: &Device, body: &[u8], mut y: ViewMut<'_>) -> Result<bool> {
        let body = words(body);
        let Self::Blocks(_, codec) = self else {
            let values: Vec<f32> = body.into_iter().map(f32::from_bits).collect();
            y.write(&values)?;
            return Ok(values.iter().all(|value| value.is_finite()));
        };
        let body = device.tensor(&body, body.len())?;
        let mut verdict = device.empty(DType::U32, 1)?;
        codecs(device).decode(codec, body.view(), y, verdict.view_mut())?;
        passed(&verdict)
    }
}

pub(super) fn codecs(device: &Device) -> Codecs<'_> {
    device.codecs().expect("only such devices have kernels")
}

/// Returns a body as words; the last one is padded.
fn words(body: &[u8]) -> Vec<u32> {
    let (whole, rest) = body.as_chunks::<4>();
    let mut last = [0; 4];
    last[..rest.len()].copy_from_slice(rest);
    let last = (!rest.is_empty()).then_some(last);
    whole.iter().copied().chain(last).map(u32::from_le_bytes).collect()
}
