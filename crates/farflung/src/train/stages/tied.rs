//! The token table's two users: the embedding in the model's first part and the head in its last. Each holds the table;
//! the gradient of both is the sum of the two.

use std::collections::BTreeMap;

use farflung_base::{Pending, StageId};
use farflung_comm::{CommError, Communicator, ReduceOp};
use farflung_parallel::pipeline::Placement;

use super::part::Part;
use crate::Result;

/// How this rank's table gradients meet the others.
#[derive(Debug)]
pub(super) enum Tied {
    /// The table is elsewhere, or one part has both users.
    No,
    /// Both users are on this rank.
    Here,
    /// The other user is on another rank.
    Across {
        /// The two ranks.
        pair: Communicator,
        /// The stage of this one.
        stage: StageId,
        /// Whether the gradients are those of one rank alone, so that the sum may start before any mean is there.
        early: bool,
        sum: Option<Pending<Result<Vec<f32>, CommError>>>,
    },
}

impl Tied {
    /// This rank's gradient of the table is complete; the sum may start.
    pub(super) fn start(&mut self, part: &Part) -> Result<()> {
        if let Self::Across { pair, sum, early: true, .. } = self {
            *sum = Some(pair.start_all_reduce(table(part)?, ReduceOp::Sum));
        }
        Ok(())
    }

    /// The table's gradient is the sum of both users' after this. `only` is the stage whose gradients are complete;
    /// `None` says all are.
    pub(super) fn finish(
        &mut self,
        parts: &mut BTreeMap<StageId, Part>,
        placement: &Placement,
        only: Option<StageId>,
    ) -> Result<()> {
        match self {
            Self::No => {}
            Self::Here => {
                let find = |wanted: fn(&Placement, StageId) -> bool| {
                    parts.keys().copied().find(|&stage| wanted(placement, stage))
                };
                let users = (find(Placement::is_last), find(Placement::is_first));
                let (Some(head), Some(embedding)) = users else { return Ok(()) };
                let mut sum = table(&parts[&head])?;
                sum.iter_mut().zip(table(&parts[&embedding])?).for_each(|(sum, part)| *sum += part);
                for stage in [head, embedding] {
                    write(parts, stage, &sum)?;
                }
            }
            Self::Across { pair, stage, sum, .. } => {
                if only.is_some_and(|only| only != *stage) {
                    return Ok(());
                }
                let sum = match sum.take() {
                    Some(sum) => sum.wait()?,
                    None => pair.start_all_reduce(table(&parts[stage])?, ReduceOp::Sum).wait()?,
                };
                write(parts, *stage, &sum)?;
            }
        }
        Ok(())
    }
}

/// A part's gradient of the table.
fn table(part: &Part) -> Result<Vec<f32>> {
    let range = part.table();
    Ok(part.grads.view().part(range.start, range.len())?.to_vec::<f32>()?)
}

fn write(parts: &mut BTreeMap<StageId, Part>, stage: StageId, sum: &[f32]) -> Result<()> {
    let part = parts.get_mut(&stage).expect("the table's users are on this rank");
    let range = part.table();
    Ok(part.grads.view_mut().part(range.start, range.len())?.write(sum)?)
}
