//! Accumulation over local steps, and how a chain applies the mean when replicas synchronise.

use std::ops::Range;

use farflung_tensor::{Device, Op, Program, ProgramBuilder, Tensor};

use super::Chain;
use crate::OptimError;
use crate::group::ParamGroup;
use crate::transform::{Accumulated, Emit, Transform};

/// Builds the program of a synchronisation for parameters of one group. Rewritten buffer 0 holds the
/// parameters; the link's states follow. The read-only buffers are the mean and the anchor.
pub(super) fn program(link: &dyn Transform, group: ParamGroup) -> Result<Program, OptimError> {
    let mut program = ProgramBuilder::new();
    let (mean, param) = (program.read(0), program.read(1));
    let mut emit = Emit { program: &mut program, param, group, scalars: 0, states: 1 };
    let next = link.emit_accumulated(&mut emit, mean);
    program.store(0, next);
    Ok(program.build()?)
}

/// Buffers and steps of a synchronisation.
#[derive(Debug)]
pub struct AccumulatedUpdate<'a> {
    /// Mean over replicas of what they accumulated.
    pub mean: &'a Tensor,
    /// Anchor: the parameters at the previous synchronisation.
    pub anchor: &'a Tensor,
    /// Steps taken since the previous synchronisation, counted from 0.
    pub steps: Range<u64>,
}

impl Chain {
    /// Returns the transform that accumulates a value over local steps, which value, and the index of the
    /// transform's first state among those of the chain. `None` if no transform does.
    fn accumulating_link(&self) -> Option<(&dyn Transform, Accumulated, usize)> {
        let mut links = self.links.iter().zip(&self.first_states);
        links.find_map(|(link, &first)| Some((&**link, link.accumulates()?, first)))
    }

    /// Returns what was accumulated since the previous synchronisation, for replicas to average; `None` if no
    /// link accumulates.
    #[must_use]
    pub fn accumulated(&self) -> Option<&Tensor> {
        let (_, gathered, states) = self.accumulating_link()?;
        self.states.get(states + usize::from(gathered.state))
    }

    /// Applies the mean of what all replicas accumulated. Parameters, moments and accumulators are then the
    /// same on all of them. Does nothing if no link accumulates.
    ///
    /// Errors: [`OptimError::Tensor`] if a buffer is shorter than the layout.
    pub fn apply_accumulated(
        &mut self,
        meets: AccumulatedUpdate<'_>,
        params: &mut Tensor,
    ) -> Result<(), OptimError> {
        let AccumulatedUpdate { mean, anchor, steps } = meets;
        let Some((link, _, first)) = self.accumulating_link() else { return Ok(()) };
        let count = link.states().len();
        let device: Device = params.device().clone();
        let classes = self.classes.iter().filter_map(|class| Some((class, class.accumulated.as_ref()?)));
        let runs = classes.map(|(class, program)| {
            let mut scalars = Vec::new();
            link.accumulated_scalars(class.group.lr, steps.clone(), &mut scalars);
            let ranges = class.parts.iter().flat_map(|part| part.ranges.clone());
            (program, ranges.collect::<Vec<_>>(), scalars)
        });
        for (program, ranges, scalars) in runs.collect::<Vec<_>>() {
            for Range { start, end } in ranges {
                let len = end - start;
                let reads = &[mean.view().part(start, len)?, anchor.view().part(start, len)?];
                let mut writes = vec![params.view_mut().part(start, len)?];
                for state in &mut self.states[first..first + count] {
                    writes.push(state.view_mut().part(start, len)?);
                }
                device.run(Op::Map { program, scalars: &scalars, reads, writes: &mut writes })?;
            }
        }
        Ok(())
    }
}
