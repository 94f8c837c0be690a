//! When windows of gradients leave, pass on and arrive: as data, which a reduction carries out and a prediction
//! prices.

use std::collections::VecDeque;

use crate::Shards;

/// What a rank does with a window of gradients, by its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReductionStep {
    /// Sends it: to the owners, or, where ranks are in groups, to those of the own group that add it up.
    Start(usize),
    /// Waits for the sums of the own group, and sends them to the owners.
    PassOn(usize),
    /// Waits for what others have sent to this owner.
    Arrive(usize),
}

/// The windows that are on their way, [`Shards::IN_FLIGHT`] at most.
///
/// ```
/// use farflung_optim::{ReductionOrder, ReductionStep::*};
///
/// let mut order = ReductionOrder::new(true);
/// assert_eq!(order.start(), [Start(0)]);
/// assert_eq!(order.start(), [PassOn(0), Start(1)]);
/// assert_eq!(order.start(), [Arrive(0), PassOn(1), Start(2)]);
/// assert_eq!(order.finish(), [Arrive(1), PassOn(2), Arrive(2)]);
/// ```
#[derive(Debug, Clone, Default)]
pub struct ReductionOrder {
    in_groups: bool,
    begun: usize,
    /// The windows on their way, and whether they wait to be passed on.
    going: VecDeque<GoingWindow>,
}

#[derive(Debug, Clone, Copy)]
struct GoingWindow {
    number: usize,
    waits: bool,
}

impl ReductionOrder {
    /// Returns the order of a rank without windows. `in_groups`: whether groups of ranks add up first.
    #[must_use]
    pub fn new(in_groups: bool) -> Self {
        Self { in_groups, ..Self::default() }
    }

    /// Returns the steps until the next window has left.
    pub fn start(&mut self) -> Vec<ReductionStep> {
        let mut steps = Vec::new();
        while self.going.len() >= Shards::IN_FLIGHT {
            self.arrive(&mut steps);
        }
        if let Some(last) = self.going.back_mut().filter(|last| last.waits) {
            last.waits = false;
            steps.push(ReductionStep::PassOn(last.number));
        }
        steps.push(ReductionStep::Start(self.begun));
        self.going.push_back(GoingWindow { number: self.begun, waits: self.in_groups });
        self.begun += 1;
        steps
    }

    /// Returns the steps until all windows have arrived.
    pub fn finish(&mut self) -> Vec<ReductionStep> {
        let mut steps = Vec::new();
        while !self.going.is_empty() {
            self.arrive(&mut steps);
        }
        steps
    }

    fn arrive(&mut self, steps: &mut Vec<ReductionStep>) {
        let Some(GoingWindow { number, waits }) = self.going.pop_front() else { return };
        if waits {
            steps.push(ReductionStep::PassOn(number));
        }
        steps.push(ReductionStep::Arrive(number));
    }
}
