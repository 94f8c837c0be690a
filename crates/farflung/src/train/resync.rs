//! Keeps copies of parameters equal on devices that round differently. Such devices round the same update
//! differently, so that copies differ slightly after a step. From time to time hashes are compared; if they
//! differ, all holders take the first holder's copy. This code does not depend on how parameters are trained or
//! which copies exist.

use std::ops::Range;

use farflung_base::Rank;
use farflung_comm::{Communicator, ReduceOp};
use farflung_tensor::Tensor;

use super::fingerprint::digest;
use super::job::Job;
use crate::Result;

/// Result of a comparison of all copies.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Drift {
    /// Largest relative l2 distance of a copy from the first holder's copy, before the copy was replaced.
    pub distance: f64,
    /// Bytes that this rank sent to compare copies and to make them equal.
    pub bytes: u64,
}

/// Schedule of the comparisons of copies.
#[derive(Debug)]
pub(super) struct Resync {
    /// Steps between comparisons; 0 disables them.
    every: u64,
    /// The step of the last comparison.
    last: u64,
    steps: u64,
    /// Whether copies are on devices that may round differently.
    unlike: bool,
}

impl Resync {
    /// Makes the schedule. Comparisons are disabled if the job has no `copies`, or if all ranks are on CPUs,
    /// where the update has the same bits on all of them.
    pub(super) fn new(job: &Job, comm: &Communicator, device: &str, copies: bool) -> Result<Self> {
        // The settings are the same on all ranks, but the device found by `auto` differs between machines.
        let unlike = copies && {
            let names = comm.all_gather_bytes(device.as_bytes().to_vec())?;
            names.iter().any(|name| name != b"cpu")
        };
        let every = if unlike { job.config.resync_every } else { 0 };
        Ok(Self { every, last: 0, steps: job.config.steps, unlike })
    }

    /// Returns whether copies are on devices that may round differently, so that they may differ between
    /// comparisons.
    pub(super) const fn is_unlike(&self) -> bool {
        self.unlike
    }

    /// Returns whether all copies were made equal after this step.
    pub(super) const fn is_done_at(&self, step: u64) -> bool {
        self.every > 0 && self.last == step
    }

    /// Restarts the interval at `step`, at which this rank's state was read from a checkpoint, copied from
    /// another rank, or moved to another plan.
    pub(super) const fn restart(&mut self, step: u64) {
        self.last = step;
    }

    /// Returns a comparison, if one is due after this step or if it is the last step. All ranks call it after a
    /// step on which they agreed, and do the comparison.
    pub(super) fn after_step<'a>(&mut self, step: u64, comm: &'a Communicator) -> Option<Comparison<'a>> {
        if self.every == 0 || step - self.last < self.every && step != self.steps {
            return None;
        }
        self.last = step;
        Some(Comparison { comm, before: comm.stats().sent.wire.0, distance: 0.0 })
    }
}

/// A comparison of the copies on several ranks.
#[derive(Debug)]
pub(super) struct Comparison<'a> {
    comm: &'a Communicator,
    before: u64,
    distance: f64,
}

impl Comparison<'_> {
    /// Makes the copies of a range of a flat buffer equal; all holders call it.
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

    /// Returns the result of the comparison over all ranks; all ranks call it.
    pub(super) fn done(self) -> Result<Drift> {
        let mut farthest = [self.distance];
        self.comm.all_reduce(&mut farthest, ReduceOp::Max)?;
        Ok(Drift { distance: farthest[0], bytes: self.comm.stats().sent.wire.0 - self.before })
    }
}

/// Returns the relative l2 distance.
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

    /// The last of three ranks has another copy, both in elements that all hold and in an element that only it
    /// holds.
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
