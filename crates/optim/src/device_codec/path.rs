//! Path of a vector through a codec on a device: selections and transforms, then values. The stages mirror
//! those of the host's codec. Payload headers are not handled here.

use farflung_compress::device::VectorDevice as _;
use farflung_compress::sparse::{RoundMask, SparseIndices};
use farflung_compress::{CodecId, CodecSpec, IndexCoding, Mask, RoundKey, Select, dct};
use farflung_tensor::{DType, Device, Op, Tensor};

use super::values::{Body, Values, codecs};
use super::{Result, Vectors, passed};

/// `2^96`. Coefficients of `2^32` or more overflow when multiplied by it, and the host then encodes the vector.
/// The host checks that large coefficients decode to finite values; smaller ones always do.
const OVERFLOW_PROBE: f32 = f32::from_bits((127 + 96) << 23);

/// Vector that is encoded.
#[derive(Debug)]
pub(super) enum Source<'a> {
    Read(&'a Tensor),
    /// Vector that is overwritten by the part of it that the encoding loses.
    Lose(&'a mut Tensor),
}

impl Source<'_> {
    const fn tensor(&self) -> &Tensor {
        match self {
            Self::Read(x) => x,
            Self::Lose(x) => x,
        }
    }
}

/// Stages of a codec, from the outermost to the innermost.
#[derive(Debug)]
pub(super) enum CodecStages {
    Values(Values),
    /// Keeps one of every [`Mask::stride`] elements, chosen by the mask's pattern.
    Masked(Mask, Box<Self>),
    /// Keeps the largest elements, of the whole vector or of each chunk.
    Largest(Select, Box<Self>),
    /// Transforms each square of this side length to coefficients, by multiplication with a matrix.
    Squares(u8, Tensor, Box<Self>),
}

/// Returns the length of a chunk, the number of elements kept of it, and the number kept in all; `None` if the
/// latter depends on the values.
fn largest(select: Select, len: usize) -> Option<[usize; 3]> {
    let (chunk, kept) = match select {
        Select::Largest(amount) => (len.max(1), amount.of(len)),
        Select::PerChunk { chunk, kept } => (chunk as usize, kept as usize),
        _ => return None,
    };
    Some([chunk, kept, select.most(len)])
}

impl CodecStages {
    /// Builds the path of a codec, or returns `None` if the device lacks kernels for one of its stages.
    pub(super) fn of(spec: CodecSpec, device: &Device) -> Option<Self> {
        let inner = |spec| Some(Box::new(Self::of(spec, device)?));
        if let Some((mask, spec)) = spec.mask() {
            return Some(Self::Masked(mask, inner(spec)?));
        }
        if let Some((select, spec)) = spec.select() {
            largest(select, 0)?;
            return Some(Self::Largest(select, inner(spec)?));
        }
        if let Some((side, spec)) = spec.dct() {
            let inner = inner(spec)?;
            // A device without room for the matrix has no room for a vector either.
            let matrix = device.tensor(&dct::matrix(side), [side as usize; 2]).ok()?;
            return Some(Self::Squares(u8::try_from(side).ok()?, matrix, inner));
        }
        Values::of(spec).map(Self::Values)
    }

    /// Returns the codec's number in payloads.
    pub(super) const fn id(&self) -> CodecId {
        match self {
            Self::Values(values) => values.id(),
            Self::Masked(..) => CodecId::MASKED,
            Self::Largest(..) => CodecId::SPARSE,
            Self::Squares(..) => CodecId::DCT,
        }
    }

    /// Appends the body of a vector, whose values the caller checks. Returns `false` if a stage rejects
    /// something.
    pub(super) fn encode(
        &self,
        device: &Device,
        source: Source<'_>,
        key: RoundKey,
        body: &mut Body,
    ) -> Result<bool> {
        let len = source.tensor().shape().len();
        match self {
            Self::Values(values) => match source {
                Source::Read(x) => values.encode(device, x.view(), None, None, body),
                Source::Lose(x) => {
                    let mut lost = device.empty(DType::F32, x.shape())?;
                    let encoded = values.encode(device, x.view(), None, Some(lost.view_mut()), body)?;
                    *x = lost;
                    Ok(encoded)
                }
            },
            Self::Masked(mask, inner) => {
                let drawn = RoundMask::new(*mask, key, len);
                body.prefix.extend(drawn.write(inner.id()));
                inner.encode_at(device, &masked(device, &drawn, len)?, source, key, body)
            }
            Self::Largest(select, inner) => {
                let [chunk, kept, total] =
                    largest(*select, len).expect("only selections that `largest` supports are built");
                let mut indices = device.empty(DType::U32, total)?;
                codecs(device).largest(source.tensor().view(), chunk, kept, indices.view_mut())?;
                let there = indices.to_vec()?;
                select.write(IndexCoding::Smallest, &there, len, inner.id(), &mut body.prefix);
                inner.encode_at(device, &indices, source, key, body)
            }
            Self::Squares(side, matrix, inner) => {
                let codecs = codecs(device);
                let start = body.prefix.len();
                body.prefix.extend([*side, inner.id().0, 0, 0]);
                let mut coefficients = device.empty(DType::F32, len)?;
                let mut verdict = device.empty(DType::U32, 1)?;
                codecs.squares(source.tensor().view(), matrix.view(), false, coefficients.view_mut())?;
                let encoded = inner.encode(device, Source::Read(&coefficients), key, body)?;
                // The coefficients have been encoded and are not needed again, so they are scaled in place.
                Vectors::on(device.clone()).scale(&mut coefficients, OVERFLOW_PROBE)?;
                codecs.finite(coefficients.view(), verdict.view_mut())?;
                if !encoded || !passed(&verdict)? {
                    return Ok(false);
                }
                let Source::Lose(x) = source else { return Ok(true) };
                // The loss is the difference between the vector and what the bytes decode to.
                let mut bytes = vec![0; body.len()];
                body.write(&mut bytes);
                let (mut sent, mut lost) = (coefficients, device.empty(DType::F32, x.shape())?);
                let decoded = self.decode(device, self.id(), &bytes[start..], &mut sent)?;
                codecs.difference(x.view(), sent.view(), lost.view_mut(), verdict.view_mut())?;
                *x = lost;
                Ok(decoded)
            }
        }
    }

    /// Appends the body of the elements at `indices`.
    fn encode_at(
        &self,
        device: &Device,
        indices: &Tensor,
        source: Source<'_>,
        key: RoundKey,
        body: &mut Body,
    ) -> Result<bool> {
        let codecs = codecs(device);
        let mut values = device.empty(DType::F32, indices.shape())?;
        codecs.gather(source.tensor().view(), indices.view(), values.view_mut())?;
        let Source::Lose(x) = source else {
            return self.encode(device, Source::Read(&values), key, body);
        };
        // Elements that are not sent are lost in full, so they keep their values in `x`.
        let encoded = self.encode(device, Source::Lose(&mut values), key, body)?;
        codecs.put(values.view(), indices.view(), x.view_mut())?;
        Ok(encoded)
    }

    /// Decodes an untrusted body of a codec into all of `out`. Returns `false` if it does not fit this path or
    /// is rejected.
    pub(super) fn decode(&self, device: &Device, id: CodecId, body: &[u8], out: &mut Tensor) -> Result<bool> {
        let len = out.shape().len();
        if id != self.id() {
            return Ok(false);
        }
        match self {
            Self::Values(values) => {
                Ok(values.fits(id, len, body) && values.decode(device, body, out.view_mut())?)
            }
            Self::Masked(_, inner) => {
                let Some((prefix, body)) = body.split_first_chunk() else { return Ok(false) };
                let Ok((drawn, id)) = RoundMask::read(prefix, len) else { return Ok(false) };
                inner.decode_at(device, &masked(device, &drawn, len)?, id, body, out)
            }
            Self::Largest(_, inner) => {
                let Ok(places) = SparseIndices::read(body, len) else { return Ok(false) };
                let Ok(indices) = places.indices() else { return Ok(false) };
                let indices = device.tensor(&indices, indices.len())?;
                inner.decode_at(device, &indices, places.inner(), places.values(), out)
            }
            Self::Squares(side, matrix, inner) => {
                let Some((prefix, body)) = body.split_first_chunk() else { return Ok(false) };
                let (mut coefficients, mut verdict) =
                    (device.empty(DType::F32, len)?, device.empty(DType::U32, 1)?);
                if *prefix != [*side, inner.id().0, 0, 0]
                    || !inner.decode(device, inner.id(), body, &mut coefficients)?
                {
                    return Ok(false);
                }
                codecs(device).squares(coefficients.view(), matrix.view(), true, out.view_mut())?;
                codecs(device).finite(out.view(), verdict.view_mut())?;
                Ok(passed(&verdict)?)
            }
        }
    }

    /// Decodes the elements at `indices` and sets all others to 0.
    fn decode_at(
        &self,
        device: &Device,
        indices: &Tensor,
        id: CodecId,
        body: &[u8],
        out: &mut Tensor,
    ) -> Result<bool> {
        let mut values = device.empty(DType::F32, indices.shape())?;
        if !self.decode(device, id, body, &mut values)? {
            return Ok(false);
        }
        device.run(Op::Fill { value: 0.0, y: out.view_mut() })?;
        codecs(device).put(values.view(), indices.view(), out.view_mut())?;
        Ok(true)
    }
}

/// Returns the indices that a mask keeps of a vector.
fn masked(device: &Device, drawn: &RoundMask, len: usize) -> Result<Tensor> {
    let kept = drawn.kept();
    let mask = farflung_tensor::BlockMask {
        pattern: drawn.mask().pattern,
        stride: drawn.mask().stride,
        phase: drawn.phase(),
        kept,
        taken: u32::try_from(drawn.taken(len)).expect("a device's vectors have fewer than 2^32 elements"),
        gap: drawn.gap(),
        stream: drawn.stream(),
    };
    let mut indices = device.empty(DType::U32, kept as usize)?;
    codecs(device).mask(mask, indices.view_mut())?;
    Ok(indices)
}
