//! Description of what an average's saved state belongs to, so that it is never restored elsewhere.

use std::fmt::Write as _;

use farflung_comm::Phase;

use super::Average;
use super::bucket_reduction::BucketReduction;

impl Average {
    /// Returns a text on the number of ranks, the parameters of each bucket, and the ranges that this rank
    /// encodes. The state that [`Average::save`] returns may be restored if this text and the codec are the
    /// same: buffers of other ranges may have equal names and lengths.
    #[must_use]
    pub fn residual_layout(&self) -> String {
        let mut text = format!("ranks {}", self.comm.size());
        for apart in &self.apart {
            let _ = write!(text, "; apart {}", apart.comm.size());
        }
        for slot in &self.slots {
            let (range, bucket, name) = (&slot.range, slot.bucket, &slot.name);
            // Writing to a string cannot fail.
            let _ = write!(text, "; {name} {}..{} in bucket {bucket}", range.start, range.end);
        }
        for (bucket, reduction) in self.warm.as_ref().unwrap_or(&self.reductions).iter().enumerate() {
            if let BucketReduction::Coded(codecs) = reduction {
                let _ = write!(text, "; bucket {bucket}");
                codecs.encoded().into_iter().for_each(|(phase, range)| {
                    let side = if phase == Phase::Worker { "worker" } else { "server" };
                    let _ = write!(text, " {side} {}..{}", range.start, range.end);
                });
            }
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use farflung_base::PeerId;
    use farflung_comm::{Communicator, memory};
    use farflung_tensor::{Device, ParamLayout, Shape};

    use super::*;
    use crate::AverageConfig;

    #[test]
    fn another_number_of_ranks_another_rank_or_other_buckets_have_another_layout() {
        let params = ["a", "b"].map(|name| (name.to_owned(), Shape::from([4, 6])));
        let layout = ParamLayout::new(params);
        let device = Device::cpu(1).unwrap();
        let of = |ranks: u32, rank: usize, bucket_bytes| {
            let end = memory::cluster(3).swap_remove(rank);
            let members: Vec<PeerId> = (0..ranks).map(PeerId).collect();
            let comm = Communicator::of_members(Arc::clone(&end) as _, &members, 1).unwrap();
            let codec = "int8:16+ef".parse().unwrap();
            let config = AverageConfig { codec, bucket_bytes, ..AverageConfig::default() };
            Average::new(comm, &device, &layout, config).unwrap().residual_layout()
        };
        let all = [of(3, 0, 1 << 20), of(3, 1, 1 << 20), of(2, 0, 1 << 20), of(1, 0, 1 << 20), of(3, 0, 96)];
        assert_eq!(of(3, 0, 1 << 20), all[0]);
        for (i, one) in all.iter().enumerate() {
            assert!(all[..i].iter().all(|other| other != one), "{one}");
        }
    }
}
