//! What a chain gathers over local steps, and what it makes of the mean where replicas meet.

use std::ops::Range;

use farflung_tensor::{Device, Op, Program, ProgramBuilder, Tensor};

use super::Chain;
use crate::OptimError;
use crate::group::ParamGroup;
use crate::transform::{Emit, Gathered, Transform};

/// The program of a meeting for parameters of one group. Rewritten buffer 0 holds the parameters, the link's
/// states follow; read-only are the mean and the anchor.
pub(super) fn program(link: &dyn Transform, group: ParamGroup) -> Result<Program, OptimError> {
    let mut program = ProgramBuilder::new();
    let (mean, param) = (program.read(0), program.read(1));
    let mut emit = Emit { program: &mut program, param, group, scalars: 0, states: 1 };
    let next = link.emit_gathered(&mut emit, mean);
    program.store(0, next);
    Ok(program.build()?)
}

/// The flat buffers of a meeting.
#[derive(Debug)]
pub struct Meets<'a> {
    /// The mean of what replicas gathered.
    pub mean: &'a Tensor,
    /// The parameters as they were when replicas last met.
    pub anchor: &'a Tensor,
    /// Steps since then, counted from 0.
    pub steps: Range<u64>,
}

impl Chain {
    /// The link that gathers, what, and where its states begin.
    fn gathering(&self) -> Option<(&dyn Transform, Gathered, usize)> {
        let mut links = self.links.iter().zip(&self.first_states);
        links.find_map(|(link, &first)| Some((&**link, link.gathers()?, first)))
    }

    /// What was gathered since replicas last met, if a link gathers: they average it.
    #[must_use]
    pub fn gathered(&self) -> Option<&Tensor> {
        let (_, gathered, states) = self.gathering()?;
        self.states.get(states + usize::from(gathered.state)).map(|(_, state)| state)
    }

    /// Takes the mean of what all replicas gathered: parameters, moments and what is gathered are the same on
    /// all of them then. Nothing happens where no link gathers.
    ///
    /// Errors: [`OptimError::Tensor`] for buffers of other lengths.
    pub fn take_gathered(&mut self, meets: Meets<'_>, params: &mut Tensor) -> Result<(), OptimError> {
        let Meets { mean, anchor, steps } = meets;
        let Some((link, _, first)) = self.gathering() else { return Ok(()) };
        let count = link.states().len();
        let device: Device = params.device().clone();
        let classes = self.classes.iter().filter_map(|class| Some((class, class.gathered.as_ref()?)));
        let runs = classes.map(|(class, program)| {
            let mut scalars = Vec::new();
            link.gathered_scalars(class.group.lr, steps.clone(), &mut scalars);
            (program, class.ranges.clone(), scalars)
        });
        for (program, ranges, scalars) in runs.collect::<Vec<_>>() {
            for Range { start, end } in ranges {
                let len = end - start;
                let reads = &[mean.view().part(start, len)?, anchor.view().part(start, len)?];
                let mut writes = vec![params.view_mut().part(start, len)?];
                for (_, state) in &mut self.states[first..first + count] {
                    writes.push(state.view_mut().part(start, len)?);
                }
                device.run(Op::Map { program, scalars: &scalars, reads, writes: &mut writes })?;
            }
        }
        Ok(())
    }
}
