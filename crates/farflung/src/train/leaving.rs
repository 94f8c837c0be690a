//! The gradients of a part that leave while a backward pass computes the rest: to the average of all holders,
//! or to the holders that keep them.

use std::ops::Range;

use farflung_optim::sync::Synchroniser;
use farflung_optim::{Average, Chain};
use farflung_tensor::Tensor;
use farflung_zoo::layer::Grads;

use super::divided_gradients::{DividedGradients, LeavingUnits};
use crate::Result;

/// Progress of the average of a step's gradients.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reducing {
    /// The average was not started.
    No,
    /// The average is open: ranges are sent as they become final.
    Ranges,
    /// All ranges have been sent.
    All,
}

/// Writes this replica's contribution to the average, for a range of the gradients, into `into`. For a token
/// table that another part also has, only half of the chain's state is added, so that the sum of both
/// contributions is that of the whole gradient.
pub(super) fn contribute(
    chain: &Chain,
    grads: &Tensor,
    range: Range<usize>,
    shared: &Range<usize>,
    into: &mut Tensor,
) -> Result<()> {
    let inside = shared.start.clamp(range.start, range.end)..shared.end.clamp(range.start, range.end);
    for (piece, share) in
        [(range.start..inside.start, 1.0), (inside.clone(), 0.5), (inside.end..range.end, 1.0)]
    {
        if !piece.is_empty() {
            chain.contribute(grads, piece, share, into)?;
        }
    }
    Ok(())
}

/// Where gradients go as they become final.
pub(super) enum Leaving<'a> {
    ToAverage(LeavingRanges<'a>),
    ToOwners(LeavingUnits<'a>, Result<()>),
}

impl<'a> Leaving<'a> {
    /// Returns where a backward pass writes gradients, and where they go.
    pub(super) fn new(
        divided: &'a mut Option<DividedGradients>,
        (grads, accumulate): (&'a mut Tensor, bool),
        ranges: LeavingRanges<'a>,
    ) -> (Grads<'a>, Self) {
        match divided {
            Some(divided) => {
                let (grads, units) = divided.split(grads, accumulate);
                (grads, Self::ToOwners(units, Ok(())))
            }
            None => (Grads::flat(grads, accumulate), Self::ToAverage(ranges)),
        }
    }

    pub(super) fn leave(&mut self, range: Range<usize>, grads: &mut Grads<'_>) {
        match self {
            Self::ToAverage(ranges) => {
                if let Some(flat) = grads.as_flat() {
                    ranges.leave(range, flat);
                }
            }
            Self::ToOwners(units, result @ Ok(())) => *result = units.leave(range, grads),
            Self::ToOwners(_, Err(_)) => {}
        }
    }

    pub(super) fn result(self) -> Result<()> {
        match self {
            Self::ToAverage(LeavingRanges { result, .. }) | Self::ToOwners(_, result) => result,
        }
    }
}

/// Sends ranges of gradients to the other holders of a part as they become final, if its average is open.
pub(super) struct LeavingRanges<'a> {
    average: Option<&'a mut Average>,
    chain: &'a Chain,
    contribution: &'a mut Option<Tensor>,
    shared: Range<usize>,
    result: Result<()>,
}

impl<'a> LeavingRanges<'a> {
    pub(super) fn new(
        reducing: Reducing,
        sync: &'a mut Option<Box<dyn Synchroniser>>,
        chain: &'a Chain,
        contribution: &'a mut Option<Tensor>,
        shared: Range<usize>,
    ) -> Self {
        let open = sync.as_mut().filter(|_| reducing == Reducing::Ranges);
        Self { average: open.and_then(|sync| sync.gradients()), chain, contribution, shared, result: Ok(()) }
    }

    fn leave(&mut self, range: Range<usize>, flat: &Tensor) {
        if let (Some(average), Ok(())) = (&mut self.average, &self.result) {
            self.result = match self.contribution {
                Some(into) => contribute(self.chain, flat, range.clone(), &self.shared, into)
                    .and_then(|()| Ok(average.ready(range, into)?)),
                None => average.ready(range, flat).map_err(Into::into),
            };
        }
    }
}
