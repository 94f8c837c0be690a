//! What rules about combinations know of a pipeline's schedule.

use farflung_parallel::pipeline::{ComputeOrder, Method, Settings};
use farflung_parallel::plan::POOLS;

use crate::train::planned::refusal;

/// The properties of a pipeline's schedule that rules examine.
#[derive(Debug, Clone)]
pub(super) struct Order {
    pub(super) name: String,
    /// Why the schedule does not train, if it does not.
    pub(super) idle: Option<&'static str>,
    /// Whether ranks hold several copies of the model.
    pub(super) copies: bool,
    /// Whether all updates happen at the end of a step.
    pub(super) flushes: bool,
    /// Whether sequences are cut into slices, which are computed one after another.
    pub(super) slices: bool,
    pub(super) work: Work,
}

/// How the ranks of a schedule know what to compute next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Work {
    /// From lists.
    Listed,
    /// By what has arrived.
    Arrivals,
    /// From lists of pools of ranks.
    Pools,
}

impl Order {
    pub(super) fn named(method: Method) -> Self {
        Self {
            name: method.name().to_owned(),
            idle: refusal(method),
            copies: method.copies() > 1,
            flushes: method.is_synchronous(),
            slices: method.slices(),
            work: match method.arrivals(&Settings::new(2, 4)) {
                Some(_) => Work::Arrivals,
                None => Work::Listed,
            },
        }
    }

    pub(super) fn own(text: &str) -> Self {
        let order = text.parse::<ComputeOrder>();
        Self {
            name: "own".to_owned(),
            idle: None,
            copies: order.as_ref().is_ok_and(|order| order.placement().copies() > 1),
            flushes: true,
            slices: order.is_ok_and(|order| order.slices() > 1),
            work: Work::Listed,
        }
    }

    pub(super) fn pools() -> Self {
        Self {
            name: POOLS.to_owned(),
            idle: None,
            copies: true,
            flushes: true,
            slices: false,
            work: Work::Pools,
        }
    }
}
