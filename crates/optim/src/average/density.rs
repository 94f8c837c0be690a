//! Warm-up of the density, which is the share of elements that a selecting codec keeps.

use farflung_compress::{AverageSpec, CodecSpec};

use super::Coding;

/// Factor by which the kept share falls from stage to stage. The first share is `1 / STAGE_FACTOR`.
const STAGE_FACTOR: u32 = 4;
const WHOLE: u32 = 1_000_000;

/// A codec that keeps more elements at first: a quarter of them, then a sixteenth and so on, down to its own
/// share. All stages have the same length.
///
/// Source: Lin et al. 2018, "Deep Gradient Compression", section 3.3: 25 %, 6.25 %, 1.5625 %, 0.4 % and 0.1 %
/// in the first epochs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct DensityWarmup {
    spec: CodecSpec,
    own: u32,
    /// Number of rounds in all stages before the codec's own share.
    rounds: u64,
}

impl DensityWarmup {
    /// Creates a warm-up over `rounds` rounds; `None` if that is 0 or the codec does not keep a share of the
    /// elements.
    pub(super) fn new(codec: &Coding, rounds: u64) -> Option<Self> {
        let Coding::Named(AverageSpec::Codec(spec)) = codec else { return None };
        let own = spec.density().filter(|_| rounds > 0)?;
        Some(Self { spec: *spec, own, rounds })
    }

    /// Returns the shares that the stages before the last one keep, in millionths. The last stage keeps the
    /// codec's own share.
    fn shares(&self) -> impl Iterator<Item = u32> {
        let own = self.own;
        std::iter::successors(Some(WHOLE / STAGE_FACTOR), |share| Some(share / STAGE_FACTOR))
            .take_while(move |&s| s > own)
    }

    /// Returns the stage of a round; rounds are counted from the first that uses the codec.
    pub(super) fn stage(&self, round: u64) -> usize {
        let count = self.shares().count();
        if round >= self.rounds {
            return count;
        }
        (u128::from(round) * count as u128 / u128::from(self.rounds)) as usize
    }

    /// Returns the codec of a stage.
    pub(super) fn codec(&self, stage: usize) -> Coding {
        self.shares().nth(stage).map_or(self.spec, |share| self.spec.with_density(share)).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn densities_are_the_papers() {
        let warmup = DensityWarmup::new(&"dgc:0.001".parse().unwrap(), 8).unwrap();
        let names: Vec<String> = (0..10)
            .map(|round| match warmup.codec(warmup.stage(round)) {
                Coding::Named(spec) => spec.to_string(),
                other => panic!("{other:?}"),
            })
            .collect();
        let stages =
            ["0.25", "0.0625", "0.015625", "0.003906", "0.001"].map(|s| format!("topk:{s}/none+dgc"));
        let wanted: Vec<String> = stages.into_iter().flat_map(|name| [name.clone(), name]).collect();
        assert_eq!(names, wanted);
        // A share above a quarter has no warm-up, and other codecs have no density.
        let dense = DensityWarmup::new(&"topk:0.5".parse().unwrap(), 8).unwrap();
        assert_eq!((dense.stage(0), dense.stage(100)), (0, 0));
        for other in ["none", "int8", "topk:64", "topk:4of16", "powersgd:2"] {
            assert_eq!(DensityWarmup::new(&other.parse().unwrap(), 8), None, "{other}");
        }
        assert_eq!(DensityWarmup::new(&"dgc:0.001".parse().unwrap(), 0), None);
        let short = DensityWarmup::new(&"dgc:0.001".parse().unwrap(), 1).unwrap();
        assert_eq!((short.stage(0), short.stage(1), short.stage(u64::MAX)), (0, 4, 4));
    }
}
