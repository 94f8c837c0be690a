//! l2 norms of flat buffers and of the tensors in them.

use std::ops::Range;

use farflung_tensor::{DType, Device, MemoryKind, Op, Param, Tensor, TensorError};

/// Returns the global l2 norm of a flat buffer, including its padding, which is zero. Partial sums are added in
/// f64, in order.
pub fn global_norm(flat: &Tensor) -> Result<f64, TensorError> {
    Ok(sum_of_squares(flat, 0..flat.shape().len())?.sqrt())
}

/// Returns the sum of squares of a range of a flat buffer. If a model is split over several ranks, they add up
/// these sums and take the root to get the global norm. Squares are added up in chunks of
/// [`Op::SQUARES_CHUNK`] elements, counted from the buffer's start, and the chunks in f64 with compensation:
/// ranges that begin and end with a chunk have the sum of the whole, up to the last bit of f64.
pub fn sum_of_squares(flat: &Tensor, range: Range<usize>) -> Result<f64, TensorError> {
    let aligned = range.start.next_multiple_of(Op::SQUARES_CHUNK).min(range.end);
    let mut total = Total::default();
    for part in [range.start..aligned, aligned..range.end] {
        let x = flat.view().part(part.start, part.len())?;
        let mut partials = beside(flat).empty(DType::F32, chunks(part.len()))?;
        flat.device().run(Op::SumSquares { x, partials: partials.view_mut() })?;
        match partials.host::<f32>() {
            Some(partials) => total.add(partials),
            None => total.add(&partials.to_vec::<f32>()?),
        }
    }
    Ok(total.get())
}

/// Returns the device of a flat buffer, for tensors that are not of its kind of memory.
fn beside(flat: &Tensor) -> Device {
    flat.device().counting_for(MemoryKind::Activations)
}

/// Returns the l2 norm of each of the given tensors of a flat buffer, whose places are counted from `first` on.
/// All partial sums are downloaded from the device at once.
pub(crate) fn norms(flat: &Tensor, tensors: &[Param], first: usize) -> Result<Vec<f64>, TensorError> {
    let counts: Vec<usize> = tensors.iter().map(|tensor| chunks(tensor.shape.len())).collect();
    let mut partials = beside(flat).empty(DType::F32, counts.iter().sum::<usize>())?;
    let mut start = 0;
    for (tensor, &count) in tensors.iter().zip(&counts) {
        let x = flat.view().part(first + tensor.start, tensor.shape.len())?;
        let partials = partials.view_mut().part(start, count)?;
        flat.device().run(Op::SumSquares { x, partials })?;
        start += count;
    }
    let partials = partials.to_vec::<f32>()?;
    let mut rest = &partials[..];
    Ok(counts
        .into_iter()
        .map(|count| {
            let (mine, others) = rest.split_at(count);
            rest = others;
            sum(mine).sqrt()
        })
        .collect())
}

fn chunks(len: usize) -> usize {
    len.div_ceil(Op::SQUARES_CHUNK)
}

fn sum(partials: &[f32]) -> f64 {
    let mut total = Total::default();
    total.add(partials);
    total.get()
}

/// A sum in f64 with what its additions have lost (Neumaier 1974).
#[derive(Default)]
struct Total {
    sum: f64,
    lost: f64,
}

impl Total {
    fn add(&mut self, partials: &[f32]) {
        for partial in partials.iter().copied().map(f64::from) {
            let sum = self.sum + partial;
            // Partial sums of squares are not negative.
            let (larger, smaller) =
                if self.sum >= partial { (self.sum, partial) } else { (partial, self.sum) };
            self.lost += (larger - sum) + smaller;
            self.sum = sum;
        }
    }

    fn get(&self) -> f64 {
        // If the sum is infinite, `lost` is NaN.
        if self.sum.is_finite() { self.sum + self.lost } else { self.sum }
    }
}

#[cfg(test)]
mod tests {
    use farflung_tensor::Device;

    use super::*;

    #[test]
    fn ranges_of_chunks_add_up_to_the_whole() {
        let cpu = Device::cpu(1).unwrap();
        let len = 7 * Op::SQUARES_CHUNK + 77;
        let values: Vec<f32> = (0..len).map(|i| ((i * 7919) % 1013) as f32 * 1.37e-3).collect();
        let flat = cpu.tensor(&values, len).unwrap();
        let exact: f64 = values.iter().map(|&x| f64::from(x).powi(2)).sum();
        let of = |range| sum_of_squares(&flat, range).unwrap();
        let whole = of(0..len);
        assert!((whole / exact - 1.0).abs() < 1e-7);
        for cut in [1, 3, 7].map(|chunks| chunks * Op::SQUARES_CHUNK) {
            assert!((of(0..cut) + of(cut..len) - whole).abs() <= whole * f64::EPSILON, "{cut}");
            // The same chunks count for a range that begins elsewhere.
            assert!((of(5..cut) + of(cut..len) - of(5..len)).abs() <= whole * f64::EPSILON, "{cut}");
        }
        assert!(of(3..3).abs() < f64::MIN_POSITIVE);
        let wrong = |value: f32| sum_of_squares(&cpu.tensor(&[1.0, value, 2.0], 3).unwrap(), 0..3).unwrap();
        assert!(wrong(f32::NAN).is_nan() && wrong(f32::INFINITY).is_infinite());
    }
}
