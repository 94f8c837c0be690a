//! Which parameters travel together, and how they are packed. Knows no network.

use std::ops::Range;

use farflung_base::Pending;
use farflung_tensor::{ParamLayout, Tensor, TensorError};

use crate::OptimError;

/// A parameter that travels.
#[derive(Debug)]
pub(super) struct Slot {
    pub(super) name: String,
    /// Its elements in the flat buffer.
    pub(super) range: Range<usize>,
    pub(super) bucket: usize,
    /// Whether it is final in this round.
    pub(super) ready: bool,
}

/// Neighbouring parameters that are reduced together, without the padding between them.
#[derive(Debug, Default)]
pub(super) struct Bucket {
    /// Runs of the flat buffer without padding, in order.
    pieces: Vec<Range<usize>>,
    /// Elements of all pieces.
    pub(super) len: usize,
    pub(super) params: usize,
    /// Parameters that are not final yet in this round.
    pub(super) missing: usize,
    /// The buffer that travels, kept for the next round.
    pub(super) packed: Vec<f32>,
}

/// A bucket's elements, side by side or on their way from a device.
#[derive(Debug)]
pub(super) struct Fetch {
    packed: Vec<f32>,
    coming: Vec<Pending<Result<Vec<f32>, TensorError>>>,
}

impl Fetch {
    pub(super) fn is_here(&self) -> bool {
        self.coming.is_empty()
    }

    pub(super) fn wait(mut self) -> Result<Vec<f32>, OptimError> {
        for piece in self.coming {
            self.packed.extend(piece.wait()?);
        }
        Ok(self.packed)
    }
}

/// Cuts a layout into buckets of at most `bytes`, from its end to its start; a larger parameter is a bucket alone. The
/// slots are in the layout's order, the buckets in the opposite one.
pub(super) fn cut(layout: &ParamLayout, bytes: usize) -> (Vec<Slot>, Vec<Bucket>) {
    let mut buckets: Vec<Bucket> = Vec::new();
    let mut slots = Vec::new();
    for param in layout.params().iter().rev().filter(|p| !p.shape.is_empty()) {
        let range = param.range();
        let fits = |b: &Bucket| (b.len + range.len()).saturating_mul(size_of::<f32>()) <= bytes;
        if !buckets.last().is_some_and(fits) {
            buckets.push(Bucket::default());
        }
        let index = buckets.len() - 1;
        let bucket = &mut buckets[index];
        bucket.len += range.len();
        bucket.params += 1;
        match bucket.pieces.last_mut() {
            Some(next) if next.start == range.end => next.start = range.start,
            _ => bucket.pieces.push(range.clone()),
        }
        slots.push(Slot { name: param.name.clone(), range, bucket: index, ready: false });
    }
    slots.reverse();
    for bucket in &mut buckets {
        bucket.pieces.reverse();
    }
    (slots, buckets)
}

impl Bucket {
    /// Starts to fetch its elements of `flat`, into the buffer of the last round if that came back.
    pub(super) fn fetch(&mut self, flat: &Tensor) -> Result<Fetch, OptimError> {
        let mut packed = std::mem::take(&mut self.packed);
        packed.clear();
        packed.reserve_exact(self.len);
        let mut coming = Vec::new();
        for piece in &self.pieces {
            let part = flat.view().part(piece.start, piece.len())?;
            match part.host() {
                Some(values) => packed.extend_from_slice(values),
                None => coming.push(part.start_to_vec()),
            }
        }
        Ok(Fetch { packed, coming })
    }

    /// Writes what came back to its places in `flat`.
    pub(super) fn unpack(&self, flat: &mut Tensor) -> Result<(), OptimError> {
        let mut rest = &self.packed[..];
        for piece in &self.pieces {
            let (values, after) = rest.split_at(piece.len());
            flat.view_mut().part(piece.start, piece.len())?.write(values)?;
            rest = after;
        }
        Ok(())
    }
}

#[cfg(test)]
#[expect(
    clippy::float_cmp,
    clippy::single_range_in_vec_init,
    reason = "copies are exact, and pieces are ranges"
)]
mod tests {
    use super::*;
    use farflung_tensor::{Device, Shape};

    fn layout(lens: &[usize]) -> ParamLayout {
        ParamLayout::new(lens.iter().enumerate().map(|(i, &n)| (format!("p{i}"), Shape::from(n))))
    }

    #[test]
    fn buckets_run_from_the_end_to_the_start_and_hold_no_padding() {
        let (slots, buckets) = cut(&layout(&[64, 64, 10, 0, 200, 3]), 4 * 128);
        // 3 and 200 do not fit together; 200 is too large and stands alone; 10 + 64 fit, and 64 more do not.
        let seen: Vec<_> = buckets.iter().map(|b| (b.pieces.clone(), b.len, b.params)).collect();
        assert_eq!(
            seen,
            [(vec![448..451], 3, 1), (vec![192..392], 200, 1), (vec![64..138], 74, 2), (vec![0..64], 64, 1)]
        );
        assert_eq!(slots.iter().map(|s| s.bucket).collect::<Vec<_>>(), [3, 2, 2, 1, 0]);
        assert_eq!(cut(&layout(&[]), 1).1.len(), 0);
    }

    #[test]
    fn unpacking_undoes_packing_and_leaves_padding_alone() {
        let layout = layout(&[65, 3, 64]);
        let (_, mut buckets) = cut(&layout, usize::MAX);
        let cpu = Device::cpu(1).unwrap();
        let values: Vec<f32> = (0..layout.len()).map(|i| i as f32).collect();
        let flat = cpu.tensor(&values, layout.len()).unwrap();
        let packed = buckets[0].fetch(&flat).unwrap().wait().unwrap();
        assert_eq!(packed, [&values[..65], &values[128..131], &values[192..]].concat());
        buckets[0].packed = packed;
        let mut out = cpu.zeros(layout.len()).unwrap();
        buckets[0].unpack(&mut out).unwrap();
        let out = out.to_vec::<f32>().unwrap();
        for (i, v) in out.iter().enumerate() {
            let parameter = i < 65 || (128..131).contains(&i) || i >= 192;
            assert_eq!(*v, if parameter { i as f32 } else { 0.0 });
        }
    }
}
