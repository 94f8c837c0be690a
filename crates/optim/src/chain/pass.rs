//! What a chain runs for parameters that are treated alike: fused passes, and links that see whole tensors
//! between them.

use std::ops::Range;

use farflung_tensor::{Param, ParamLayout, Program, ProgramBuilder};

use crate::OptimError;
use crate::group::ParamGroup;
use crate::transform::{Emit, Transform};

/// Rewritten buffers of a program besides the first: as many states as a pass can have.
const STATES: usize = 3;

/// Where a fused pass stands among those of its parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Place {
    /// It reads the gradient; others read the update that the pass before left in memory.
    pub(super) first: bool,
    /// It moves the parameters; others leave an update.
    pub(super) last: bool,
}

/// One step of a commit.
#[derive(Debug, PartialEq)]
pub(super) enum Pass {
    /// Links as one program.
    Fused {
        /// Rewritten buffer 0 holds the parameters in the last pass and the update in others; states follow.
        /// Read-only buffer 0 holds the gradient or the update, but the parameters in a pass in the middle.
        program: Program,
        place: Place,
        /// Its states among all of the chain, ascending.
        states: Vec<usize>,
    },
    /// A link that sees whole tensors.
    PerTensor(usize),
}

/// Parameters that are treated alike.
#[derive(Debug)]
pub(super) struct Class {
    /// Settings of their group. Where no link sees whole tensors, the decay is that of the first tensor:
    /// others' stand in their passes.
    pub(super) group: ParamGroup,
    pub(super) passes: Vec<Pass>,
    /// What becomes of the mean of what replicas gathered, if a link of theirs gathers.
    pub(super) gathered: Option<Program>,
    pub(super) tensors: Vec<Param>,
    /// Their ranges of the flat buffers, as long as they can be; padding goes with what stands before it.
    pub(super) ranges: Vec<Range<usize>>,
}

/// A link as the passes see it: with the indices of its first scalar and its first state.
#[derive(Clone, Copy)]
pub(super) struct Numbered<'a> {
    pub(super) index: usize,
    pub(super) link: &'a dyn Transform,
    pub(super) scalars: u16,
    pub(super) states: usize,
}

impl Numbered<'_> {
    /// States that its instructions load: a link that sees whole tensors has its own for these.
    fn fused_states(&self) -> usize {
        if self.link.per_tensor().is_some() { 0 } else { self.link.states().len() }
    }
}

/// The passes of links that are applied to parameters of one group.
pub(super) fn passes(links: &[Numbered<'_>], group: ParamGroup) -> Result<Vec<Pass>, OptimError> {
    enum Step<'a> {
        Fused(Vec<Numbered<'a>>),
        PerTensor(usize),
    }
    let (mut steps, mut open, mut held) = (Vec::new(), Vec::new(), 0);
    for &numbered in links {
        let whole = numbered.link.per_tensor().is_some();
        let states = numbered.fused_states();
        if whole || (held + states > STATES && !open.is_empty()) {
            steps.push(Step::Fused(std::mem::take(&mut open)));
            held = 0;
        }
        if whole {
            steps.push(Step::PerTensor(numbered.index));
        }
        held += states;
        open.push(numbered);
    }
    steps.push(Step::Fused(open));
    let count = steps.len();
    let pass = |(i, step)| match step {
        Step::PerTensor(link) => Ok(Pass::PerTensor(link)),
        Step::Fused(links) => fuse(&links, Place { first: i == 0, last: i + 1 == count }, group),
    };
    steps.into_iter().enumerate().map(pass).collect()
}

/// Links as one program.
fn fuse(links: &[Numbered<'_>], place: Place, group: ParamGroup) -> Result<Pass, OptimError> {
    let mut program = ProgramBuilder::new();
    let (param, mut update) = match (place.first, place.last) {
        (_, true) => (program.load(0), program.read(0)),
        (true, false) => (program.read(1), program.read(0)),
        (false, false) => (program.read(0), program.load(0)),
    };
    let (mut used, mut places) = (Vec::new(), Vec::new());
    for numbered in links {
        let states = 1 + used.len() as u16;
        let mut emit = Emit { program: &mut program, param, group, scalars: numbered.scalars, states };
        update = numbered.link.emit(&mut emit, update);
        places.push(states);
        used.extend(numbered.states..numbered.states + numbered.fused_states());
    }
    let mut stored = update;
    if place.last {
        stored = program.sub(param, update);
        for (numbered, states) in links.iter().zip(places) {
            let mut emit = Emit { program: &mut program, param, group, scalars: numbered.scalars, states };
            stored = numbered.link.finish(&mut emit, stored);
        }
    }
    program.store(0, stored);
    Ok(Pass::Fused { program: program.build()?, place, states: used })
}

/// Adds a tensor to the class with these passes, or makes it one. `last` is the class of the tensor before it
/// in the layout; returns this one's.
pub(super) fn classify(
    classes: &mut Vec<Class>,
    last: Option<usize>,
    group: ParamGroup,
    (passes, gathered): (Vec<Pass>, Option<Program>),
    param: &Param,
) -> usize {
    let whole = passes.iter().any(|pass| matches!(pass, Pass::PerTensor(_)));
    let same = |class: &Class| {
        let decays = |group: ParamGroup| group.decay.map(f64::to_bits);
        class.group.lr.to_bits() == group.lr.to_bits()
            && (!whole || decays(class.group) == decays(group))
            && class.passes == passes
            && class.gathered == gathered
    };
    let found = classes.iter().position(same).unwrap_or_else(|| {
        classes.push(Class { group, passes, gathered, tensors: Vec::new(), ranges: Vec::new() });
        classes.len() - 1
    });
    if let Some(before) = last.filter(|before| *before != found)
        && let Some(range) = classes[before].ranges.last_mut()
    {
        range.end = param.start;
    }
    let class = &mut classes[found];
    class.tensors.push(param.clone());
    match class.ranges.last_mut() {
        Some(range) if last == Some(found) => range.end = param.range().end,
        _ => class.ranges.push(param.range()),
    }
    found
}

/// Lets the last range end with the layout.
pub(super) fn close(classes: &mut [Class], last: Option<usize>, layout: &ParamLayout) {
    if let Some(range) = last.and_then(|last| classes[last].ranges.last_mut()) {
        range.end = layout.len();
    }
}
