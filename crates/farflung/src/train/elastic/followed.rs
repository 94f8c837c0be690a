//! Whether a process that follows the run has the optimizer with which a newcomer begins, where each replica
//! has its own.

use super::offers::{Offer, Offered, Offers};
use crate::train::trainer::ReplayedParts;

/// Returns the optimizer that is to be fetched, if a member offers it and this newcomer lacks it.
pub(super) fn lacked_optimizer(followed: &ReplayedParts, offers: &Offers) -> Option<Offered<Offer>> {
    if followed.optimizer_age() == Some(0) { None } else { offers.optimizer(followed.step()) }
}

/// Returns whether the optimizer is that which a newcomer has after the next synchronisation. If no member
/// offers a newer one, the members have not begun the next round.
pub(super) fn has_optimizer(followed: &ReplayedParts, each_step: bool, offers: &Offers) -> bool {
    each_step
        || followed.optimizer_age().is_some_and(|since| since <= 1)
            && lacked_optimizer(followed, offers).is_none()
}
