//! A step that fails although all members answer, on a link that has become slow or since one of them computes
//! for long: it is done again by the same members under a new view, a bounded number of times, and they wait
//! twice as long for each other from then on.

use farflung_parallel::membership::View;

/// How often a step is done again. After that, the member for which the others waited is removed.
const MOST: u32 = 3;

/// How often steps were done again since the members last changed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Repeats {
    /// The last one that was stands behind so many.
    step: u64,
    times: u32,
    doublings: u32,
}

impl Repeats {
    /// So often behind this many steps. Those of another step do not count.
    pub(super) const fn times(self, step: u64) -> u32 {
        if self.step == step { self.times } else { 0 }
    }

    /// How often the deadline has doubled. It stays so until members change: what was too slow once may be so
    /// again.
    pub(super) const fn doublings(self) -> u32 {
        self.doublings
    }

    /// Whether the step behind this many may be done again.
    pub(super) const fn may(self, step: u64) -> bool {
        self.times(step) < MOST
    }

    /// The step behind so many has failed, and one view follows another.
    pub(super) fn follows(&mut self, step: u64, before: Option<&View>, view: &View) {
        let same = before.is_some_and(|before| before.members == view.members);
        *self = if same {
            Self { step, times: self.times(step) + 1, doublings: MOST.min(self.doublings + 1) }
        } else {
            Self::default()
        };
    }
}

#[cfg(test)]
mod tests {
    use farflung_parallel::membership::{Member, MemberId, Place, Start};
    use farflung_parallel::plan::Digest;

    use super::*;

    #[test]
    fn a_step_is_done_again_three_times_and_the_next_one_as_often() {
        let start = Start { weights: Digest::new([0; 32]), plan: Digest::new([0; 32]) };
        let members: Vec<Member> = (0..3).map(|n| Member::new(MemberId::number(n), n)).collect();
        let first = View::first(Place { incarnation: 1, epoch: 1 }, &members, start).unwrap();
        let same = first.again(start).unwrap();
        let mut repeats = Repeats::default();
        for times in 0..MOST {
            assert!(repeats.may(7));
            assert_eq!(repeats.times(7), times);
            repeats.follows(7, Some(&first), &same);
        }
        assert!(!repeats.may(7) && repeats.may(8));
        assert_eq!((repeats.times(7), repeats.times(8)), (MOST, 0));
        repeats.follows(8, Some(&first), &same);
        assert_eq!((repeats.times(7), repeats.times(8), repeats.doublings()), (0, 1, MOST));
        // Without one of them, or with one more, it is another step.
        let fewer = same.without(&[members[2].id].into(), start).unwrap();
        repeats.follows(8, Some(&same), &fewer);
        assert_eq!(repeats, Repeats::default());
    }
}
