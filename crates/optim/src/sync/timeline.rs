//! Steps after which fragments of the parameters leave and come back: a pure function of the step.

use crate::OptimError;

/// Departures and returns of `P` fragments, each of which leaves every `H` steps. Fragment `p` leaves after the
/// steps `(p + 1) H / P`, `(p + 1) H / P + H` and so on (rounded down). It comes back `delay` steps later, at
/// the latest when the next fragment leaves.
///
/// ```
/// use farflung_optim::sync::Timeline;
///
/// let timeline = Timeline::new(8, 2, 3)?;
/// assert_eq!((timeline.leaves(4), timeline.leaves(8), timeline.leaves(12)), (Some(0), Some(1), Some(0)));
/// assert_eq!((timeline.returns(7), timeline.returns(8), timeline.away(6)), (Some(0), None, Some(0)));
/// # Ok::<(), farflung_optim::OptimError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timeline {
    every: u64,
    fragments: u64,
    delay: u64,
}

fn require(ok: bool, field: &'static str, value: u64, expected: &'static str) -> Result<(), OptimError> {
    let refused = OptimError::Setting { transform: "sync", field, value: value as f64, expected };
    if ok { Ok(()) } else { Err(refused) }
}

impl Timeline {
    /// Creates a timeline in which each of `fragments` leaves every `every` steps.
    ///
    /// Errors: [`OptimError::Setting`] if `every` or `fragments` is 0, if there are more fragments than steps,
    /// or if a fragment would come back after the next one leaves.
    pub fn new(every: u64, fragments: u64, delay: u64) -> Result<Self, OptimError> {
        require(every > 0, "every", every, "above 0")?;
        let some = (1..=every).contains(&fragments);
        require(
            some,
            "fragments",
            fragments,
            "at least 1, and at most the number of steps between averages",
        )?;
        require(
            delay <= every / fragments,
            "delay",
            delay,
            "at most the number of steps between two fragments",
        )?;
        Ok(Self { every, fragments, delay })
    }

    /// Returns the number of fragments.
    #[must_use]
    pub const fn fragments(&self) -> usize {
        self.fragments as usize
    }

    /// Returns the number of steps between a fragment's departure and its return.
    #[must_use]
    pub const fn delay(&self) -> u64 {
        self.delay
    }

    /// Returns the fragment that leaves after a step, counted from 1.
    #[must_use]
    pub fn leaves(&self, step: u64) -> Option<usize> {
        let phase = step % self.every;
        let at = |p: &u64| (p + 1) * self.every / self.fragments % self.every == phase;
        (0..self.fragments).find(at).filter(|_| step > 0).map(|p| p as usize)
    }

    /// Returns the fragment that comes back after a step.
    #[must_use]
    pub fn returns(&self, step: u64) -> Option<usize> {
        self.leaves(step.checked_sub(self.delay)?)
    }

    /// Returns the fragment that is in flight after a step: it has left, and comes back after a later step.
    #[must_use]
    pub fn away(&self, step: u64) -> Option<usize> {
        (0..self.delay).find_map(|since| self.leaves(step.checked_sub(since)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_fragment_leaves_once_in_a_period_and_only_one_is_away() {
        for every in 1..20 {
            for fragments in 1..=every {
                for delay in 0..=every / fragments {
                    let timeline = Timeline::new(every, fragments, delay).unwrap();
                    let left: Vec<_> = (1..=every).filter_map(|step| timeline.leaves(step)).collect();
                    assert_eq!(left, (0..fragments as usize).collect::<Vec<_>>());
                    assert_eq!(timeline.leaves(every), Some(fragments as usize - 1));
                    let mut away = None;
                    for step in 0..4 * every {
                        if let Some(back) = timeline.returns(step).filter(|_| delay > 0) {
                            assert_eq!(away.take(), Some(back));
                        }
                        if let Some(leaves) = timeline.leaves(step).filter(|_| delay > 0) {
                            assert_eq!(away.replace(leaves), None);
                        }
                        assert_eq!(timeline.away(step), away, "{timeline:?} {step}");
                    }
                }
                assert!(Timeline::new(every, fragments, every / fragments + 1).is_err());
            }
            assert!(Timeline::new(every, every + 1, 0).is_err() && Timeline::new(every, 0, 0).is_err());
        }
        assert!(Timeline::new(0, 1, 0).is_err());
    }
}
