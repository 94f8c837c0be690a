//! An exchange between threads, for pieces of layers. The parent module must import the crates under the names
//! `tensor` and `zoo`.

use std::sync::{Arc, Barrier, Mutex};

use super::tensor::Tensor;
use super::zoo::ZooError;
use super::zoo::exchange::{Alone, Axis, Exchange};

const LOCK: &str = "no thread panicked";

/// One of some threads that add up in the order of ranks.
#[derive(Debug)]
pub(crate) struct Threads {
    rank: usize,
    all: Arc<Meeting>,
}

#[derive(Debug)]
struct Meeting {
    values: Mutex<Vec<Vec<f32>>>,
    barrier: Barrier,
}

impl Threads {
    pub(crate) fn group(ranks: usize) -> Vec<Self> {
        let values = Mutex::new(vec![Vec::new(); ranks]);
        let all = Arc::new(Meeting { values, barrier: Barrier::new(ranks) });
        (0..ranks).map(|rank| Self { rank, all: Arc::clone(&all) }).collect()
    }
}

impl Exchange for Threads {
    fn size(&self, axis: Axis) -> usize {
        if axis == Axis::Tensor { self.all.values.lock().expect(LOCK).len() } else { 1 }
    }

    fn rank(&self, axis: Axis) -> usize {
        if axis == Axis::Tensor { self.rank } else { 0 }
    }

    fn all_reduce(&self, axis: Axis, values: &mut Tensor) -> Result<(), ZooError> {
        assert_eq!(axis, Axis::Tensor);
        let own = values.to_vec()?;
        self.all.values.lock().expect(LOCK)[self.rank] = own;
        self.all.barrier.wait();
        let sum = {
            let all = self.all.values.lock().expect(LOCK);
            (0..all[0].len()).map(|at| all.iter().map(|of_rank| of_rank[at]).sum::<f32>()).collect::<Vec<_>>()
        };
        values.write(&sum)?;
        self.all.barrier.wait();
        Ok(())
    }

    fn gather(&self, _: Axis, piece: Tensor, dim: usize, lengths: &[usize]) -> Result<Tensor, ZooError> {
        Alone.gather(Axis::Tensor, piece, dim, lengths)
    }

    fn scatter(&self, _: Axis, whole: Tensor, dim: usize, lengths: &[usize]) -> Result<Tensor, ZooError> {
        Alone.scatter(Axis::Tensor, whole, dim, lengths)
    }

    fn all_to_all(&self, _: Axis, values: Tensor, split: usize, join: usize) -> Result<Tensor, ZooError> {
        Alone.all_to_all(Axis::Tensor, values, split, join)
    }
}
