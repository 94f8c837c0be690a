//! Repetition of a step that fails although all members answer, because a link has become slow or a member
//! computes for long. The same members repeat it under a new view, a bounded number of times. Each repetition
//! doubles their deadline, up to three times until the members change.

use farflung_parallel::membership::View;

/// Maximum repetitions of a step. After that, the member for which the others waited is removed.
const MOST: u32 = 3;

/// Repetitions of steps since the members last changed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Repeats {
    /// Number of steps done before the step that was last repeated.
    step: u64,
    times: u32,
    doublings: u32,
}

impl Repeats {
    /// Returns how often the step after `step` steps has been repeated.
    pub(super) const fn times(self, step: u64) -> u32 {
        if self.step == step { self.times } else { 0 }
    }

    /// Returns how often the deadline has been doubled. It stays doubled until the members change, since
    /// whatever was too slow once may be so again.
    pub(super) const fn doublings(self) -> u32 {
        self.doublings
    }

    /// Returns whether the step after `step` steps may be repeated.
    pub(super) const fn may(self, step: u64) -> bool {
        self.times(step) < MOST
    }

    /// Counts a failure of the step after `step` steps: view `before` was replaced by `view`. If the members
    /// differ, counting starts anew.
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
    use farflung_parallel::membership::{Member, MemberId, Start, ViewId};
    use farflung_parallel::plan::Digest;

    use super::*;

    #[test]
    fn a_step_is_done_again_three_times_and_the_next_one_as_often() {
        let start = Start { weights: Digest::new([0; 32]), plan: Digest::new([0; 32]) };
        let members: Vec<Member> = (0..3).map(|n| Member::new(MemberId::number(n), n)).collect();
        let first = View::first(ViewId { incarnation: 1, epoch: 1 }, &members, start).unwrap();
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
        // With other members, counting starts anew.
        let fewer = same.without(&[members[2].id].into(), start).unwrap();
        repeats.follows(8, Some(&same), &fewer);
        assert_eq!(repeats, Repeats::default());
    }
}
