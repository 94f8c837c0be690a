//! An exchange between threads, for pieces of layers. The parent module must import the crates under the names
//! `tensor` and `zoo`.

use std::sync::{Arc, Barrier, Mutex};

use super::tensor::Tensor;
use super::zoo::ZooError;
use super::zoo::exchange::{Alone, ArrivedRows, Axis, Exchange, Pending, rows_for, with_length};

const LOCK: &str = "no thread panicked";

/// One of some threads that add up in the order of ranks.
#[derive(Debug)]
pub(crate) struct Threads {
    axis: Axis,
    rank: usize,
    all: Arc<Meeting>,
}

/// Numbers of rows, and the rows.
type RowMessage = (Vec<u32>, Vec<f32>);

#[derive(Debug)]
struct Meeting {
    values: Mutex<Vec<Vec<f32>>>,
    /// What each rank sends to each.
    rows: Mutex<Vec<Vec<RowMessage>>>,
    barrier: Barrier,
}

impl Threads {
    /// Makes the ranks along the tensor axis.
    pub(crate) fn group(ranks: usize) -> Vec<Self> {
        Self::along(Axis::Tensor, ranks)
    }

    pub(crate) fn along(axis: Axis, ranks: usize) -> Vec<Self> {
        let values = Mutex::new(vec![Vec::new(); ranks]);
        let rows = Mutex::new(vec![Vec::new(); ranks]);
        let all = Arc::new(Meeting { values, rows, barrier: Barrier::new(ranks) });
        (0..ranks).map(|rank| Self { axis, rank, all: Arc::clone(&all) }).collect()
    }
}

impl Threads {
    /// Returns what each rank tells.
    fn told(&self, own: Vec<f32>) -> Vec<Vec<f32>> {
        self.all.values.lock().expect(LOCK)[self.rank] = own;
        self.all.barrier.wait();
        let all = self.all.values.lock().expect(LOCK).clone();
        self.all.barrier.wait();
        all
    }

    fn reduce(&self, axis: Axis, values: &mut Tensor, by: fn(f32, f32) -> f32) -> Result<(), ZooError> {
        if axis != self.axis {
            return Alone.all_reduce(axis, values);
        }
        let all = self.told(values.to_vec()?);
        let of = |at: usize| all.iter().map(|of_rank| of_rank[at]).reduce(by).unwrap_or_default();
        Ok(values.write(&(0..all[0].len()).map(of).collect::<Vec<f32>>())?)
    }
}

impl Exchange for Threads {
    fn size(&self, axis: Axis) -> usize {
        if axis == self.axis { self.all.values.lock().expect(LOCK).len() } else { 1 }
    }

    fn rank(&self, axis: Axis) -> usize {
        if axis == self.axis { self.rank } else { 0 }
    }

    fn all_reduce(&self, axis: Axis, values: &mut Tensor) -> Result<(), ZooError> {
        self.reduce(axis, values, |sum, value| sum + value)
    }

    fn all_reduce_max(&self, axis: Axis, values: &mut Tensor) -> Result<(), ZooError> {
        self.reduce(axis, values, f32::max)
    }

    fn gather(&self, axis: Axis, piece: &Tensor, dim: usize, lengths: &[usize]) -> Result<Tensor, ZooError> {
        if axis != self.axis {
            return Alone.gather(axis, piece, dim, lengths);
        }
        let all = self.told(piece.to_vec()?);
        let shape = piece.shape();
        let dims = shape.dims();
        let (outer, inner): (usize, usize) = (dims[..dim].iter().product(), dims[dim + 1..].iter().product());
        let run = |row: usize, rank: usize| {
            let len = lengths[rank] * inner;
            all[rank][row * len..][..len].to_vec()
        };
        let whole: Vec<f32> = (0..outer)
            .flat_map(|row| (0..all.len()).flat_map(|rank| run(row, rank)).collect::<Vec<_>>())
            .collect();
        let shape = with_length(piece.shape(), dim, lengths.iter().sum())?;
        Ok(piece.device().tensor(&whole, shape)?)
    }

    fn scatter(&self, _: Axis, whole: Tensor, dim: usize, lengths: &[usize]) -> Result<Tensor, ZooError> {
        Alone.scatter(Axis::Tensor, whole, dim, lengths)
    }

    fn all_to_all(&self, _: Axis, values: Tensor, split: usize, join: usize) -> Result<Tensor, ZooError> {
        Alone.all_to_all(Axis::Tensor, values, split, join)
    }

    fn pass_on(&self, axis: Axis, values: &Tensor) -> Result<Pending<Result<Tensor, ZooError>>, ZooError> {
        assert_eq!(axis, self.axis);
        let mut all = self.told(values.to_vec()?);
        let before = (self.rank + all.len() - 1) % all.len();
        Ok(Pending::ready(Ok(values.device().tensor(&all.swap_remove(before), values.shape())?)))
    }

    fn all_to_all_rows(
        &self,
        axis: Axis,
        rows: &Tensor,
        counts: &[Vec<u32>],
        _known: Option<usize>,
    ) -> Result<ArrivedRows, ZooError> {
        assert_eq!(axis, self.axis);
        let cols = rows.shape().cols();
        let values = rows.to_vec::<f32>()?;
        let mut start = 0;
        let messages =
            rows_for(rows.shape(), counts, counts.len())?.into_iter().zip(counts).map(|(rows, counts)| {
                start += rows * cols;
                (counts.clone(), values[start - rows * cols..start].to_vec())
            });
        self.all.rows.lock().expect(LOCK)[self.rank] = messages.collect();
        self.all.barrier.wait();
        let (counts, received): (Vec<_>, Vec<_>) = {
            let all = self.all.rows.lock().expect(LOCK);
            all.iter().map(|from| from[self.rank].clone()).unzip()
        };
        self.all.barrier.wait();
        let received = received.concat();
        let shape = [received.len() / cols, cols];
        Ok(ArrivedRows { rows: rows.device().tensor(&received, shape)?, counts })
    }
}
