//! A chain of transforms, fused: one pass over memory for the norm, and for the update one pass where all links
//! fit into it.

mod accumulated;
mod commit;
mod contribution;
mod pass;
mod shard;
mod stored;

use std::fmt;
use std::ops::Range;

use farflung_tensor::{Device, Op, Param, ParamLayout, Program, Tensor};

use crate::group::{Groups, ParamGroup};
use crate::norm::global_norm;
use crate::per_tensor::factor;
use crate::transform::{StateKind, SyncSchedule, Transform};
use crate::{OptimError, Shard};
pub use accumulated::AccumulatedUpdate;
use pass::{ChainPiece, Class, Numbered, classify, close, passes};
pub use stored::StateStore;
use stored::StoredStates;

/// Predicate that tells whether a link applies to a parameter.
type Select = Box<dyn Fn(&Param) -> bool + Send>;

/// Parameters that a link applies to.
enum AppliesTo {
    All,
    Some(Select),
    /// Parameters that the previous link skips. The link shares the state buffers of that link.
    Others,
}

/// A transform, and the parameters that it applies to.
struct Link {
    transform: Box<dyn Transform>,
    applies_to: AppliesTo,
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let some = if matches!(self.applies_to, AppliesTo::All) { "" } else { " for some parameters" };
        write!(f, "{:?}{some}", self.transform)
    }
}

/// The state buffers of links, and what each link uses.
struct NumberedLinks {
    names: Vec<String>,
    kinds: Vec<StateKind>,
    /// Indices of each link's first scalar and first state.
    numbers: Vec<(u16, usize)>,
}

/// Links in order, not yet bound to a device and a layout.
#[derive(Debug, Default)]
pub struct ChainBuilder {
    links: Vec<Link>,
    groups: Groups,
}

impl ChainBuilder {
    /// Appends a link.
    #[must_use]
    pub fn then(mut self, link: impl Transform + 'static) -> Self {
        self.links.push(Link { transform: Box::new(link), applies_to: AppliesTo::All });
        self
    }

    /// Appends a link that applies to the selected parameters only; the others skip it. Its state buffers still
    /// have the layout's length.
    #[must_use]
    pub fn then_for(
        mut self,
        select: impl Fn(&Param) -> bool + Send + 'static,
        link: impl Transform + 'static,
    ) -> Self {
        self.links.push(Link { transform: Box::new(link), applies_to: AppliesTo::Some(Box::new(select)) });
        self
    }

    /// Appends a link that applies to the parameters that the previous link skips: all that
    /// [`ChainBuilder::then_for`] did not select. No parameter uses both links, so they share state buffers:
    /// those of the previous link, and more if this one has more states.
    #[must_use]
    pub fn otherwise(mut self, link: impl Transform + 'static) -> Self {
        self.links.push(Link { transform: Box::new(link), applies_to: AppliesTo::Others });
        self
    }

    /// Returns for each link whether it applies to a parameter.
    fn selection(&self, param: &Param) -> Vec<bool> {
        let mut last = true;
        let each = self.links.iter().map(|link| {
            last = match &link.applies_to {
                AppliesTo::All => true,
                AppliesTo::Some(select) => select(param),
                AppliesTo::Others => !last,
            };
            last
        });
        each.collect()
    }

    /// Sets rules for parameters by name. Without rules, tensors of two or more dimensions decay and vectors do
    /// not.
    #[must_use]
    pub fn groups(mut self, groups: Groups) -> Self {
        self.groups = groups;
        self
    }

    /// Binds the chain to a device and a layout.
    ///
    /// Links are fused into one pass over memory. A new pass begins at a link that works on whole tensors, and
    /// at a link that would bring the pass to more than three state buffers. Between two passes the update is
    /// kept in a buffer of the layout's length.
    ///
    /// Errors: [`OptimError::Setting`] if a setting of a link is invalid, if a link that needs the incoming
    /// gradient's norm is not first, or if a link that rewrites moved parameters is not last; those of
    /// [`PerTensor::check`](crate::PerTensor::check), such as [`OptimError::NotAMatrix`];
    /// [`OptimError::Tensor`] if a link needs more buffers than a pass can have.
    pub fn build(self, device: &Device, layout: &ParamLayout) -> Result<Chain, OptimError> {
        self.build_shard(device, layout, 0..layout.len())
    }

    /// Binds the chain to a shard of a layout's flat buffers, of which other ranks update the rest (Rajbhandari
    /// et al. 2020, "ZeRO", stage 1). State buffers have the shard's length. [`Chain::commit`] reads and writes
    /// only the shard.
    ///
    /// Errors: as [`ChainBuilder::build`]; [`OptimError::Setting`] if a link works on whole tensors and a range
    /// of the shard begins or ends within one, or if replicas average more than gradients.
    pub fn build_shard(
        self,
        device: &Device,
        layout: &ParamLayout,
        shard: impl Into<Shard>,
    ) -> Result<Chain, OptimError> {
        let shard = shard.into();
        self.check_shard(layout, &shard)?;
        self.bind(device, layout, shard, None)
    }

    /// Binds the chain to a shard of a layout's flat buffers. `stored` says where its states are, unless they
    /// are in the device's memory.
    fn bind(
        self,
        device: &Device,
        layout: &ParamLayout,
        shard: Shard,
        stored: Option<StoredStates>,
    ) -> Result<Chain, OptimError> {
        self.check()?;
        let named = self.numbered();
        let numbers = &named.numbers;
        let passes_of = |selected: &[bool], group: ParamGroup| {
            let all = self.links.iter().zip(numbers).enumerate().filter(|(i, _)| selected[*i]);
            let all: Vec<_> = all
                .map(|(index, (link, &(scalars, states)))| Numbered {
                    index,
                    link: &*link.transform,
                    scalars,
                    states,
                })
                .collect();
            passes(&all, group)
        };
        // Checks the chain even if the layout has no parameters.
        passes_of(&vec![true; self.links.len()], ParamGroup { lr: 1.0, decay: None })?;
        let (mut classes, mut last) = (Vec::new(), None);
        for param in layout.params() {
            let selected = self.selection(param);
            for (link, _) in self.links.iter().zip(&selected).filter(|(_, selected)| **selected) {
                link.transform.per_tensor().map_or(Ok(()), |link| link.check(param))?;
            }
            let group = self.groups.of(param);
            let passes = passes_of(&selected, group)?;
            let mut links = self.links.iter().zip(&selected).filter(|(_, selected)| **selected);
            let link = links.find(|(link, _)| link.transform.accumulates().is_some());
            let gathered = link.map(|(link, _)| accumulated::program(&*link.transform, group)).transpose()?;
            last = Some(classify(&mut classes, last, group, (passes, gathered), param));
        }
        close(&mut classes, last, layout);
        let ranges = stored.as_ref().map_or_else(|| shard.ranges().to_vec(), |stored| stored.pieces.clone());
        let piece = |range: Range<usize>| {
            let at = shard.within(&range).next().map_or(0, |piece| piece.at);
            let first_of_shard = range.start - at;
            // The states of a piece in a store are buffers of their own.
            let first = if stored.is_some() { range.start } else { first_of_shard };
            ChainPiece { range, first, first_of_shard }
        };
        let pieces: Vec<ChainPiece> = ranges.into_iter().map(piece).collect();
        for class in &mut classes {
            class.cut(&pieces);
        }
        let several = classes.iter().any(|class| class.passes.len() > 1);
        let longest = match &stored {
            Some(stored) => stored.pieces.iter().map(ExactSizeIterator::len).max().unwrap_or(0),
            None => shard.len(),
        };
        let update = several.then(|| device.zeros(longest)).transpose()?;
        let here = if stored.is_some() { 0 } else { named.names.len() };
        let states = (0..here).map(|_| device.zeros(shard.len())).collect::<Result<_, _>>()?;
        let first_states = named.numbers.iter().map(|&(_, states)| states).collect();
        Ok(Chain {
            links: self.links.into_iter().map(|link| link.transform).collect(),
            classes,
            pieces,
            contribution: contribution::program()?,
            names: named.names,
            states,
            store: stored.map(|stored| stored.store),
            kinds: named.kinds,
            first_states,
            update,
            factor: factor()?,
            step: 0,
            shard,
            scalars: Vec::new(),
        })
    }

    /// Returns the names of the state buffers, and which of them and of the scalars each link uses.
    fn numbered(&self) -> NumberedLinks {
        let mut all = NumberedLinks { names: Vec::new(), kinds: Vec::new(), numbers: Vec::new() };
        let (mut scalars, mut begun) = (0, 0);
        for (i, Link { transform: link, applies_to: is_for }) in self.links.iter().enumerate() {
            // The states of a second link of the same name are numbered: `trace2.momentum`.
            let before = self.links[..i].iter().filter(|l| l.transform.name() == link.name()).count();
            let number = if before == 0 { String::new() } else { (before + 1).to_string() };
            begun = if matches!(is_for, AppliesTo::Others) { begun } else { all.names.len() };
            all.numbers.push((scalars, begun));
            scalars += link.scalar_count();
            for (i, state) in link.states().iter().enumerate().skip(all.names.len() - begun) {
                all.names.push(format!("{}{number}.{state}", link.name()));
                all.kinds.push(link.state_kind(i));
            }
        }
        all
    }

    /// Returns the names of the chain's state buffers, in the order of [`Chain::states`].
    #[must_use]
    pub fn state_names(&self) -> Vec<String> {
        self.numbered().names
    }

    /// Checks the settings and the position of each link.
    fn check(&self) -> Result<(), OptimError> {
        let links = self.links.iter().map(|link| &link.transform);
        for (i, link) in links.clone().enumerate() {
            link.validate()?;
            let position = |expected| {
                let (transform, field, value) = (link.name(), "position", i as f64);
                Err(OptimError::Setting { transform, field, value, expected })
            };
            if link.needs_norm() && i > 0 {
                return position("0, because it needs the norm of the incoming gradient");
            }
            if link.finishes() && links.clone().skip(i).any(|link| !link.finishes()) {
                return position("the last, because it rewrites parameters after the update");
            }
        }
        Ok(())
    }
}

/// A chain of transforms bound to a layout, with its state.
#[derive(Debug)]
pub struct Chain {
    links: Vec<Box<dyn Transform>>,
    classes: Vec<Class>,
    /// Ranges of the flat buffers that are updated one after another: the whole shard, unless states are in
    /// `store`.
    pieces: Vec<ChainPiece>,
    /// Program that computes, from a state and the gradient, the values that replicas average.
    contribution: Program,
    /// Names of the state buffers.
    names: Vec<String>,
    /// The state buffers; none if they are in `store`.
    states: Vec<Tensor>,
    store: Option<Box<dyn StateStore>>,
    /// Kind of each state buffer.
    kinds: Vec<StateKind>,
    /// Index of each link's first state buffer.
    first_states: Vec<usize>,
    /// Update of a piece between two passes; `None` if no class of parameters has several passes.
    update: Option<Tensor>,
    /// Program that multiplies a tensor's update by a factor.
    factor: Program,
    step: u64,
    /// What the chain updates of the flat buffers.
    shard: Shard,
    scalars: Vec<f32>,
}

/// A step that was prepared but not yet committed. Dropping it changes nothing.
#[derive(Debug, Clone, Copy, PartialEq)]
#[must_use = "a prepared step changes nothing until it is committed"]
pub struct Prepared {
    norm: f64,
}

impl Prepared {
    /// Prepares a step of a chain that holds only a part of a model. `norm` is the global l2 norm of the whole
    /// gradient: the root of the sum of [`sum_of_squares`](crate::sum_of_squares) over all parts. For a chain
    /// that holds the whole model use [`Chain::prepare`].
    ///
    /// Errors: [`OptimError::NotFinite`] if `norm` is not finite.
    pub fn with_norm(norm: f64) -> Result<Self, OptimError> {
        if norm.is_finite() { Ok(Self { norm }) } else { Err(OptimError::NotFinite { norm }) }
    }

    /// Returns the global l2 norm of the gradient before clipping.
    #[must_use]
    pub const fn norm(&self) -> f64 {
        self.norm
    }
}

impl Chain {
    /// Returns the builder of an empty chain, to which links are added.
    #[expect(clippy::new_ret_no_self, reason = "chains are usually written as `Chain::new().then(..)`")]
    #[must_use]
    pub fn new() -> ChainBuilder {
        ChainBuilder::default()
    }

    /// Returns the number of steps committed so far.
    #[must_use]
    pub const fn step(&self) -> u64 {
        self.step
    }

    /// Returns the learning rate of the last committed step, without the factors of parameter groups; `None`
    /// before the first one, and if no link has a schedule.
    #[must_use]
    pub fn last_rate(&self) -> Option<f64> {
        let step = self.step.checked_sub(1)?;
        self.links.iter().find_map(|link| link.rate(step))
    }

    /// Returns in which steps replicas average gradients and which steps are local, if a link decides this.
    #[must_use]
    pub fn rounds(&self) -> Option<SyncSchedule> {
        self.links.iter().find_map(|link| link.rounds())
    }

    /// Returns whether replicas average something other than gradients in the next step; see
    /// [`Chain::contribute`].
    #[must_use]
    pub fn contributes(&self) -> bool {
        self.links.iter().any(|link| link.contribution(self.step).is_some())
    }

    /// Writes to `into` what replicas average in the next step in place of a range of the gradient. For most
    /// chains that is the gradient itself; for 1-bit Adam after its warm-up it is the momentum. The chain then
    /// takes the mean as its gradient. `share` is a factor of the state's term: 1 unless several contributions
    /// are added up to one.
    ///
    /// Errors: [`OptimError::Tensor`] for a range that is not in the buffers.
    pub fn contribute(
        &self,
        grads: &Tensor,
        range: Range<usize>,
        share: f32,
        into: &mut Tensor,
    ) -> Result<(), OptimError> {
        for (link, &first) in self.links.iter().zip(&self.first_states) {
            if let Some(contribution) = link.contribution(self.step) {
                let own = &self.states[first..first + link.states().len()];
                let mut buffers = contribution::Buffers { states: own, grads, share, into };
                let Some(scale) = contribution.scale else {
                    return buffers.blend(&self.contribution, contribution, range, 1.0);
                };
                let tensors =
                    self.classes.iter().flat_map(|class| &class.parts).flat_map(|part| &part.tensors);
                for tensor in tensors.filter(|tensor| range.contains(&tensor.start)) {
                    let number = buffers.number(scale, tensor.start)?;
                    buffers.blend(&self.contribution, contribution, tensor.range(), number)?;
                }
                return Ok(());
            }
        }
        let x = grads.view().part(range.start, range.len())?;
        let y = into.view_mut().part(range.start, range.len())?;
        Ok(grads.device().run(Op::Cast { x, y })?)
    }

    /// Prepares a step: computes the gradient's norm. Changes nothing, so the step can still be abandoned.
    ///
    /// Errors: [`OptimError::NotFinite`] if the gradient's norm is not finite, even if no link uses it: the
    /// step could write NaN or infinity into the parameters.
    pub fn prepare(&self, grads: &Tensor) -> Result<Prepared, OptimError> {
        Prepared::with_norm(global_norm(grads)?)
    }

    /// Undoes what the last committed step did to the chain's own state; the caller restores the parameters.
    /// `states` are copies of the states before that step, in the order of [`Chain::states`].
    pub(crate) fn take_back(&mut self, states: Vec<Tensor>) {
        for (state, before) in self.states.iter_mut().zip(states) {
            *state = before;
        }
        self.step -= 1;
    }

    /// Returns what it updates of the layout's flat buffers: all, unless
    /// [`ChainBuilder::build_shard`] made it.
    #[must_use]
    pub const fn shard(&self) -> &Shard {
        &self.shard
    }

    /// Returns the names of the state buffers.
    pub fn state_names(&self) -> impl Iterator<Item = &str> {
        self.names.iter().map(String::as_str)
    }

    /// Returns the state buffers with their names; each has the length of [`Chain::shard`]. None, if a
    /// [`StateStore`] has them.
    pub fn states(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.state_names().zip(&self.states)
    }

    /// Returns the state buffers with their kinds, in the order of [`Chain::states`].
    pub fn kinds(&self) -> impl Iterator<Item = (StateKind, &Tensor)> {
        self.kinds.iter().copied().zip(&self.states)
    }

    /// Returns the state buffers with their kinds for writing, so that a mean over replicas can replace them.
    pub fn kinds_mut(&mut self) -> impl Iterator<Item = (StateKind, &mut Tensor)> {
        self.kinds.iter().copied().zip(&mut self.states)
    }

    /// Returns the number of buffers of the shard's length that are used only during a step.
    #[must_use]
    pub const fn work_buffers(&self) -> usize {
        self.update.is_some() as usize
    }

    /// Restores the step counter and all state buffers, which are in memory; `get` returns each buffer by its
    /// name.
    ///
    /// Errors: [`OptimError::State`] if a buffer is missing or has another length; nothing has changed then.
    pub fn restore<'a>(
        &mut self,
        step: u64,
        get: impl Fn(&str) -> Option<&'a [f32]>,
    ) -> Result<(), OptimError> {
        let mut found = Vec::with_capacity(self.states.len());
        for name in &self.names {
            let values = get(name).filter(|v| v.len() == self.shard.len());
            let len = get(name).map_or(0, <[f32]>::len);
            found.push(values.ok_or_else(|| OptimError::State {
                name: name.clone(),
                found: len,
                expected: self.shard.len(),
            })?);
        }
        for (state, values) in self.states.iter_mut().zip(found) {
            state.write(values)?;
        }
        self.step = step;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::pass::Pass;
    use super::*;
    use crate::transform::{add_decayed_weights, clip_by_global_norm, scale_by_adam, scale_by_schedule};
    use crate::{LrSchedule, diloco_outer};
    use farflung_tensor::Shape;

    #[test]
    fn a_commit_is_one_pass_over_memory() {
        let cpu = Device::cpu(1).unwrap();
        let layout =
            ParamLayout::new([("w".to_owned(), Shape::from([8, 9])), ("b".to_owned(), Shape::from(9))]);
        let adamw = Chain::new()
            .then(clip_by_global_norm(1.0))
            .then(scale_by_adam(0.9, 0.95, 1e-8))
            .then(add_decayed_weights(0.1))
            .then(scale_by_schedule(LrSchedule::constant(0.01)));
        for (builder, count, writes) in [(adamw, 2, 3), (diloco_outer(0.7, 0.9), 1, 2)] {
            let mut chain = builder.build(&cpu, &layout).unwrap();
            // Each class has one program, which reads one buffer (the gradient) and stores the parameters and
            // each state once.
            assert!(chain.update.is_none());
            let programs: Vec<_> = chain
                .classes
                .iter()
                .map(|class| match &class.passes[..] {
                    [Pass::Fused { program, .. }] => program.clone(),
                    passes => panic!("{passes:?}"),
                })
                .collect();
            for program in &programs {
                assert_eq!((program.reads(), program.writes()), (1, writes));
                assert_eq!(program.stores().len(), writes);
            }
            // AdamW's weight decay splits the layout into ranges of matrices and of vectors. Together the
            // ranges cover the layout.
            let parts = chain.classes.iter().flat_map(|class| &class.parts);
            let ranges: Vec<_> = parts.flat_map(|part| part.ranges.clone()).collect();
            assert_eq!(ranges.len(), count);
            assert!(ranges.windows(2).all(|p| p[0].end == p[1].start));
            assert_eq!((ranges[0].start, ranges[count - 1].end), (0, layout.len()));
            let values = |f: fn(usize) -> f32| {
                let mut values = vec![0.0; layout.len()];
                for i in layout.params().iter().flat_map(Param::range) {
                    values[i] = f(i);
                }
                values
            };
            let (start, grad) = (values(|i| (i as f32).sin()), values(|i| (i as f32 * 0.7).cos()));
            let mut params = cpu.tensor(&start, layout.len()).unwrap();
            let grads = cpu.tensor(&grad, layout.len()).unwrap();
            let prepared = chain.prepare(&grads).unwrap();
            chain.commit(&mut params, &grads, prepared).unwrap();
            // The step is one evaluation of the program per element, to the bit.
            let got = params.to_vec::<f32>().unwrap();
            let states: Vec<Vec<f32>> = chain.states().map(|(_, s)| s.to_vec().unwrap()).collect();
            for i in 0..layout.len() {
                let mut element = vec![0.0; writes];
                element[0] = start[i];
                let class = ranges.iter().position(|range| range.contains(&i)).unwrap();
                let program = &programs[class];
                program.eval(&chain.scalars, &[grad[i]], &mut element);
                let after: Vec<f32> = std::iter::once(got[i]).chain(states.iter().map(|s| s[i])).collect();
                assert_eq!(after, element, "{i}");
            }
        }
    }
}
