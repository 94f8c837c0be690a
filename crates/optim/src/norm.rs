//! l2 norms of flat buffers and of the tensors in them.

use std::ops::Range;

use farflung_tensor::{DType, Op, Param, Tensor, TensorError};

/// Returns the global l2 norm of a flat buffer, including its padding, which is zero. Partial sums are added in
/// f64, in order.
pub fn global_norm(flat: &Tensor) -> Result<f64, TensorError> {
    Ok(sum_of_squares(flat, 0..flat.shape().len())?.sqrt())
}

/// Returns the sum of squares of a range of a flat buffer. If a model is split over several ranks, they add up
/// these sums and take the root to get the global norm. Partial sums are added in f64, in order.
pub fn sum_of_squares(flat: &Tensor, range: Range<usize>) -> Result<f64, TensorError> {
    let x = flat.view().part(range.start, range.len())?;
    let mut partials = flat.device().empty(DType::F32, chunks(range.len()))?;
    flat.device().run(Op::SumSquares { x, partials: partials.view_mut() })?;
    Ok(match partials.host::<f32>() {
        Some(partials) => sum(partials),
        None => sum(&partials.to_vec::<f32>()?),
    })
}

/// Returns the l2 norm of each of the given tensors of a flat buffer. All partial sums are downloaded from the
/// device at once.
pub(crate) fn norms(flat: &Tensor, tensors: &[Param]) -> Result<Vec<f64>, TensorError> {
    let counts: Vec<usize> = tensors.iter().map(|tensor| chunks(tensor.shape.len())).collect();
    let mut partials = flat.device().empty(DType::F32, counts.iter().sum::<usize>())?;
    let mut start = 0;
    for (tensor, &count) in tensors.iter().zip(&counts) {
        let x = flat.view().part(tensor.start, tensor.shape.len())?;
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
    partials.iter().map(|&partial| f64::from(partial)).sum()
}
