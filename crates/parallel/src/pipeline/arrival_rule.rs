//! The rule for ranks that work in the order of arrivals instead of by a fixed list.

/// Varuna's opportunistic rule. A free rank runs the next backward if its gradient has arrived, else the next
/// forward if its input has arrived, else it waits for the first of the two. Microbatches keep their order in
/// each direction, so gradients are summed in the same order whatever the times of arrival.
///
/// No deadlock: sending does not block, and the rank that holds the most advanced microbatch always becomes
/// free.
///
/// Source: Athlur et al. 2022, "Varuna", section 3.2.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ArrivalRule {
    /// Maximum number of microbatches between the first stage's forward and its backward. No rank holds more.
    pub in_flight: u32,
}

impl ArrivalRule {
    /// Returns whether another microbatch may enter the first stage after this many forwards and backwards of
    /// it.
    #[must_use]
    pub const fn admits(self, forwards: u32, backwards: u32) -> bool {
        forwards - backwards < self.in_flight
    }
}
