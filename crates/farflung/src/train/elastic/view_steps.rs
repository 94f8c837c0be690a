//! The steps after which the last views began. A machine that joins again learns from them which of the steps
//! that it did earlier count: after the loss of a member, the others may go back, or do a step anew that this
//! member had already done.

use farflung_parallel::membership::ViewId;
use serde::{Deserialize, Serialize};

/// Number of views that are kept.
const KEPT: usize = 7;

/// Views and the steps after which they began, oldest first.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::train) struct ViewSteps([Option<(ViewId, u64)>; KEPT]);

impl ViewSteps {
    /// Adds a view that begins after `step` steps. If there are too many, the two oldest become one, with the
    /// smaller step: then fewer steps count than could.
    pub(in crate::train) fn note(&mut self, view: ViewId, step: u64) {
        if self.0.iter().flatten().any(|(known, _)| *known >= view) {
            return;
        }
        let free = self.0.iter().position(Option::is_none).unwrap_or_else(|| {
            if let (Some((_, first)), Some((_, second))) = (self.0[0], &mut self.0[1]) {
                *second = first.min(*second);
            }
            self.0.rotate_left(1);
            KEPT - 1
        });
        self.0[free] = Some((view, step));
    }

    /// Returns the number of steps that count of those that a member did whose last view was `former`; `None`
    /// if all do. Without a former view, none counts.
    pub(in crate::train) fn that_count(&self, former: Option<ViewId>) -> Option<u64> {
        let Some(former) = former else { return Some(0) };
        self.0.iter().flatten().filter(|(view, _)| *view > former).map(|&(_, step)| step).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(epoch: u64) -> ViewId {
        ViewId { incarnation: 1, epoch }
    }

    #[test]
    fn the_steps_before_the_others_went_back_count() {
        let mut views = ViewSteps::default();
        assert_eq!(views.that_count(None), Some(0));
        for (epoch, step) in [(1, 0), (2, 30), (3, 20), (5, 60)] {
            views.note(at(epoch), step);
        }
        assert_eq!(views.that_count(Some(at(1))), Some(20));
        assert_eq!(views.that_count(Some(at(3))), Some(60));
        assert_eq!(views.that_count(Some(at(5))), None);
        // Another start of the host went back to a checkpoint.
        views.note(ViewId { incarnation: 2, epoch: 1 }, 10);
        assert_eq!(views.that_count(Some(at(5))), Some(10));
        // A view that is known already.
        views.note(at(4), 1);
        assert_eq!(views.that_count(Some(at(5))), Some(10));
    }

    #[test]
    fn of_many_views_those_that_are_left_out_count_with_the_next() {
        let mut views = ViewSteps::default();
        for epoch in 1..=KEPT as u64 + 3 {
            views.note(at(epoch), if epoch == 2 { 5 } else { 100 + epoch });
        }
        assert_eq!(views.0.iter().flatten().count(), KEPT);
        assert_eq!(views.that_count(Some(at(1))), Some(5));
        assert_eq!(views.that_count(Some(at(KEPT as u64))), Some(101 + KEPT as u64));
    }
}
