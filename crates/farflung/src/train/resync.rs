//! Replicas on devices that round differently: they compute the same update in other orders, and move apart by a rounding
//! at each step. Now and then their hashes are compared, and where they differ all take rank 0's parameters. It refuses to
//! know how parameters are trained.

use farflung_comm::{Communicator, ReduceOp};
use farflung_tensor::Tensor;
use farflung_zoo::Stage;

use super::job::Job;
use super::worker::hash;
use crate::Result;

/// What a comparison of the replicas found.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Drift {
    /// The largest relative l2 distance of a replica's parameters from rank 0's, before all had those again.
    pub distance: f64,
    /// Bytes that this process sent to compare, and to make them equal.
    pub bytes: u64,
}

/// When to compare.
#[derive(Debug)]
pub(super) struct Resync {
    /// Steps between comparisons; 0 is never.
    every: u64,
    /// The step of the last.
    last: u64,
    steps: u64,
}

impl Resync {
    /// Where all ranks are on processors there is nothing to compare: the update has the same bits on all of them.
    pub(super) fn new(job: &Job, comm: &Communicator, device: &str) -> Result<Self> {
        let every = match job.config.resync_every {
            // Nobody needs to say where it is: settings are the job's, but what `auto` found differs between machines.
            every if every > 0 && comm.size() > 1 => {
                let names = comm.all_gather_bytes(device.as_bytes().to_vec())?;
                if names.iter().all(|name| name == b"cpu") { 0 } else { every }
            }
            _ => 0,
        };
        Ok(Self { every, last: 0, steps: job.config.steps })
    }

    /// Begins anew after `step`: all replicas were read from one checkpoint.
    pub(super) const fn restart(&mut self, step: u64) {
        self.last = step;
    }

    /// After a step that all agreed on: compares where that is due, and at the last step. All ranks call it.
    pub(super) fn after_step(
        &mut self,
        step: u64,
        comm: &Communicator,
        stage: &Stage,
        params: &mut Tensor,
    ) -> Result<Option<Drift>> {
        if self.every == 0 || step - self.last < self.every && step != self.steps {
            return Ok(None);
        }
        self.last = step;
        let before = comm.stats().sent.wire.0;
        let hashes = comm.all_gather_bytes(hash(stage, params)?.as_bytes().to_vec())?;
        let mut distance = 0.0;
        if hashes.iter().any(|h| *h != hashes[0]) {
            let mine = params.to_vec::<f32>()?;
            let mut first = mine.clone();
            comm.broadcast(&mut first, farflung_base::Rank(0))?;
            let mut farthest = [relative(&mine, &first)];
            comm.all_reduce(&mut farthest, ReduceOp::Max)?;
            params.write(&first)?;
            distance = farthest[0];
        }
        Ok(Some(Drift { distance, bytes: comm.stats().sent.wire.0 - before }))
    }
}

/// Relative l2 distance.
fn relative(x: &[f32], from: &[f32]) -> f64 {
    let square = |x: f32| f64::from(x) * f64::from(x);
    let off: f64 = x.iter().zip(from).map(|(x, f)| (f64::from(*x) - f64::from(*f)).powi(2)).sum();
    let all: f64 = from.iter().map(|&f| square(f)).sum();
    if off == 0.0 { 0.0 } else { (off / all).sqrt() }
}

#[cfg(test)]
#[expect(clippy::float_cmp, reason = "these distances are exact")]
mod tests {
    use super::*;

    #[test]
    fn distances() {
        assert_eq!(relative(&[1.0, 2.0], &[1.0, 2.0]), 0.0);
        assert_eq!(relative(&[0.0; 3], &[0.0; 3]), 0.0);
        assert!((relative(&[3.0, 4.5], &[3.0, 4.0]) - 0.1).abs() < 1e-12);
        assert_eq!(relative(&[1.0], &[0.0]), f64::INFINITY);
    }
}
