//! Copies of parameters on devices that round differently: they take the same update in other orders, and move
//! apart by a rounding at each step. Now and then their hashes are compared, and where they differ all take the
//! first holder's. It refuses to know how parameters are trained, and which copies there are.

use std::ops::Range;

use farflung_base::Rank;
use farflung_comm::{Communicator, ReduceOp};
use farflung_tensor::Tensor;

use super::fingerprint::digest;
use super::job::Job;
use crate::Result;

/// What a comparison of all copies found.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Drift {
    /// The largest relative l2 distance of a copy from its first holder's, before all had those parameters
    /// again.
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
    /// Whether copies are on devices that may round differently.
    unlike: bool,
}

impl Resync {
    /// There is nothing to compare where there are no `copies` in all of the job, nor where all ranks are on
    /// processors: the update has the same bits on all of them.
    pub(super) fn new(job: &Job, comm: &Communicator, device: &str, copies: bool) -> Result<Self> {
        // Settings are the job's, but what `auto` found differs between machines.
        let unlike = copies && {
            let names = comm.all_gather_bytes(device.as_bytes().to_vec())?;
            names.iter().any(|name| name != b"cpu")
        };
        let every = if unlike { job.config.resync_every } else { 0 };
        Ok(Self { every, last: 0, steps: job.config.steps, unlike })
    }

    /// Whether copies are on devices that may round differently, so that they move apart between comparisons.
    pub(super) const fn is_unlike(&self) -> bool {
        self.unlike
    }

    /// Whether all copies were made equal after this step.
    pub(super) const fn is_done_at(&self, step: u64) -> bool {
        self.every > 0 && self.last == step
    }

    /// Counts anew from `step`, at which a checkpoint was read.
    pub(super) const fn restart(&mut self, step: u64) {
        self.last = step;
    }

    /// After a step that all agreed on: a comparison, where one is due. It is at the last step too. All ranks
    /// call it, and carry the comparison out.
    pub(super) fn after_step<'a>(&mut self, step: u64, comm: &'a Communicator) -> Option<Comparison<'a>> {
        if self.every == 0 || step - self.last < self.every && step != self.steps {
            return None;
        }
        self.last = step;
        Some(Comparison { comm, before: comm.stats().sent.wire.0, distance: 0.0 })
    }
}

/// A comparison of all that several ranks hold.
#[derive(Debug)]
pub(super) struct Comparison<'a> {
    comm: &'a Communicator,
    before: u64,
    distance: f64,
}

impl Comparison<'_> {
    /// Makes one thing's copies equal: elements of a flat buffer on each of its holders, who all call it.
    pub(super) fn mend(
        &mut self,
        holders: &Communicator,
        flat: &mut Tensor,
        elements: Range<usize>,
    ) -> Result<()> {
        let mine = flat.view().part(elements.start, elements.len())?.to_vec::<f32>()?;
        let hashes = holders.all_gather_bytes(digest(&mine).as_bytes().to_vec())?;
        if hashes.iter().any(|hash| *hash != hashes[0]) {
            let mut first = mine.clone();
            holders.broadcast(&mut first, Rank(0))?;
            self.distance = self.distance.max(relative(&mine, &first));
            flat.view_mut().part(elements.start, elements.len())?.write(&first)?;
        }
        Ok(())
    }

    /// What all ranks together found; all call it.
    pub(super) fn done(self) -> Result<Drift> {
        let mut farthest = [self.distance];
        self.comm.all_reduce(&mut farthest, ReduceOp::Max)?;
        Ok(Drift { distance: farthest[0], bytes: self.comm.stats().sent.wire.0 - self.before })
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
    use farflung_comm::memory;
    use farflung_tensor::Device;

    use super::*;

    #[test]
    fn distances() {
        assert_eq!(relative(&[1.0, 2.0], &[1.0, 2.0]), 0.0);
        assert_eq!(relative(&[0.0; 3], &[0.0; 3]), 0.0);
        assert!((relative(&[3.0, 4.5], &[3.0, 4.0]) - 0.1).abs() < 1e-12);
        assert_eq!(relative(&[1.0], &[0.0]), f64::INFINITY);
    }

    /// Of three ranks the last has another copy, in elements that are held by all and in one of its own.
    #[test]
    fn holders_take_the_first_ones_elements_and_keep_their_own() {
        let device = Device::cpu(1).unwrap();
        let mended = |comm: &Communicator| {
            let rank = comm.rank().0 as f32;
            let mut flat = device.tensor(&[rank, 3.0, if rank < 2.0 { 4.0 } else { 4.5 }], 3).unwrap();
            let mut comparison = Comparison { comm, before: 0, distance: 0.0 };
            comparison.mend(comm, &mut flat, 1..3).unwrap();
            (comparison.done().unwrap().distance, flat.to_vec::<f32>().unwrap())
        };
        let ranks: Vec<_> = std::thread::scope(|scope| {
            let comms = memory::cluster(3).into_iter().map(|transport| Communicator::new(transport));
            let ranks: Vec<_> = comms.map(|comm| scope.spawn(move || mended(&comm))).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        for (rank, (distance, values)) in ranks.into_iter().enumerate() {
            assert!((distance - 0.1).abs() < 1e-12, "{distance}");
            assert_eq!(values, [rank as f32, 3.0, 4.0]);
        }
    }
}
