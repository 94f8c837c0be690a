//! Passes that a chain runs for a class of parameters: fused programs, and links on whole tensors between them.

use std::ops::Range;

use farflung_tensor::{Param, ParamLayout, Program, ProgramBuilder};

use crate::OptimError;
use crate::group::ParamGroup;
use crate::transform::{Emit, Transform};

/// Largest number of states in a pass: a program's rewritten buffers besides the first.
const STATES: usize = 3;

/// Position of a fused pass among the passes of its parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PassPosition {
    /// Whether it is the first pass. It reads the gradient; others read the update that the pass before left in
    /// memory.
    pub(super) first: bool,
    /// Whether it is the last pass. It moves the parameters; others leave an update in memory.
    pub(super) last: bool,
}

/// One step of a commit.
#[derive(Debug, PartialEq)]
pub(super) enum Pass {
    /// Several links as one program.
    Fused {
        /// Rewritten buffer 0 holds the parameters in the last pass and the update in others; states follow.
        /// Read-only buffer 0 holds the gradient in the first pass (even if it is also the last), the
        /// parameters in a middle pass, and the update in the last of several. Read-only buffer 1 holds the
        /// parameters in a first pass that is not the last.
        program: Program,
        place: PassPosition,
        /// Indices of its states among all states of the chain, ascending.
        states: Vec<usize>,
    },
    /// Index of a link that works on whole tensors.
    PerTensor(usize),
}

/// Parameters that have the same passes and the same factor of the learning rate.
#[derive(Debug)]
pub(super) struct Class {
    /// Settings of their group. `decay` is that of the class's first tensor. Only links on whole tensors read
    /// it, and in a class with such a link all tensors have the same decay; fused programs contain the decay as
    /// a constant.
    pub(super) group: ParamGroup,
    pub(super) passes: Vec<Pass>,
    /// Program that applies the mean of what replicas accumulated; `None` if no link of the class accumulates.
    pub(super) accumulated: Option<Program>,
    /// What the class has of each piece of the flat buffers.
    pub(super) parts: Vec<ClassPart>,
}

/// A range of the flat buffers that a step updates at a time.
#[derive(Debug, Clone)]
pub(super) struct ChainPiece {
    pub(super) range: Range<usize>,
    /// Place in the flat buffers of the first element of the buffers of the update and of states. It may be
    /// before the range, which other pieces in the same buffers precede.
    pub(super) first: usize,
    /// Likewise of buffers of the shard's length.
    pub(super) first_of_shard: usize,
}

/// What a class has of a piece of the flat buffers.
#[derive(Debug, Default)]
pub(super) struct ClassPart {
    /// The tensors that the chain updates as a whole, with their places in the piece's state buffers.
    pub(super) tensors: Vec<Param>,
    /// Ranges of the flat buffers, merged where they adjoin. Padding belongs to the range before it.
    pub(super) ranges: Vec<Range<usize>>,
}

impl Class {
    /// Returns its only part, while the flat buffers are not cut into pieces.
    fn uncut(&mut self) -> &mut ClassPart {
        &mut self.parts[0]
    }

    /// Cuts the flat buffers into pieces, of which it keeps what the class has.
    pub(super) fn cut(&mut self, pieces: &[ChainPiece]) {
        let whole = std::mem::take(self.uncut());
        self.parts = pieces.iter().map(|piece| whole.within(piece)).collect();
    }
}

impl ClassPart {
    /// Returns what is in a range of the flat buffers.
    fn within(&self, ChainPiece { range: piece, first, .. }: &ChainPiece) -> Self {
        let inside = |tensor: &&Param| piece.start <= tensor.start && tensor.range().end <= piece.end;
        let moved = |tensor: &Param| Param { start: tensor.start - first, ..tensor.clone() };
        let cut = |range: &Range<usize>| range.start.max(piece.start)..range.end.min(piece.end);
        Self {
            tensors: self.tensors.iter().filter(inside).map(moved).collect(),
            ranges: self.ranges.iter().map(cut).filter(|range| !range.is_empty()).collect(),
        }
    }
}

/// A link with its index in the chain and the indices of its first scalar and its first state.
#[derive(Clone, Copy)]
pub(super) struct Numbered<'a> {
    pub(super) index: usize,
    pub(super) link: &'a dyn Transform,
    pub(super) scalars: u16,
    pub(super) states: usize,
}

impl Numbered<'_> {
    /// Returns the number of states that the link's instructions load: 0 for a link on whole tensors.
    fn fused_states(&self) -> usize {
        if self.link.per_tensor().is_some() { 0 } else { self.link.states().len() }
    }
}

/// Splits the links that apply to parameters of one group into passes.
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
        Step::Fused(links) => fuse(&links, PassPosition { first: i == 0, last: i + 1 == count }, group),
    };
    steps.into_iter().enumerate().map(pass).collect()
}

/// Fuses links into one program.
fn fuse(links: &[Numbered<'_>], place: PassPosition, group: ParamGroup) -> Result<Pass, OptimError> {
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

/// Adds a tensor to the class with these passes, or to a new class. `last` is the class of the previous tensor
/// in the layout. Returns the index of the tensor's class.
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
            && class.accumulated == gathered
    };
    let found = classes.iter().position(same).unwrap_or_else(|| {
        classes.push(Class { group, passes, accumulated: gathered, parts: vec![ClassPart::default()] });
        classes.len() - 1
    });
    if let Some(before) = last.filter(|before| *before != found)
        && let Some(range) = classes[before].uncut().ranges.last_mut()
    {
        range.end = param.start;
    }
    let class = classes[found].uncut();
    class.tensors.push(param.clone());
    match class.ranges.last_mut() {
        Some(range) if last == Some(found) => range.end = param.range().end,
        _ => class.ranges.push(param.range()),
    }
    found
}

/// Extends the last range to the end of the layout.
pub(super) fn close(classes: &mut [Class], last: Option<usize>, layout: &ParamLayout) {
    if let Some(range) = last.and_then(|last| classes[last].uncut().ranges.last_mut()) {
        range.end = layout.len();
    }
}
