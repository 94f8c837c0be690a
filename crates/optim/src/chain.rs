//! A chain of transforms, fused: one pass for the norm, one pass for everything else.

use std::ops::Range;

use farflung_tensor::{DType, Device, Op, ParamLayout, Program, ProgramBuilder, Tensor, TensorError};

use crate::OptimError;
use crate::transform::{Contribution, Emit, StepInfo, Transform};

/// Links in order, before they are bound to a device and a layout.
#[derive(Debug, Default)]
pub struct ChainBuilder {
    links: Vec<Box<dyn Transform>>,
}

impl ChainBuilder {
    /// Adds a link at the end.
    #[must_use]
    pub fn then(mut self, link: impl Transform + 'static) -> Self {
        self.links.push(Box::new(link));
        self
    }

    /// Binds the chain to a device and a layout: matrices of the layout decay, vectors do not.
    ///
    /// Errors: [`OptimError::Setting`] for a link's setting, or for a link that needs the incoming gradient's norm but
    /// does not stand first; [`OptimError::Tensor`] when the links together need more buffers than a pass can have.
    pub fn build(self, device: &Device, layout: &ParamLayout) -> Result<Chain, OptimError> {
        for (i, link) in self.links.iter().enumerate() {
            link.validate()?;
            if link.needs_norm() && i > 0 {
                return Err(OptimError::Setting {
                    transform: link.name(),
                    field: "position",
                    value: i as f64,
                    expected: "0: it needs the norm of the incoming gradient",
                });
            }
        }
        let mut contribution = ProgramBuilder::new();
        let (state, gradient) = (contribution.read(0), contribution.read(1));
        let (keep, take) = (contribution.scalar(0), contribution.scalar(1));
        let (kept, taken) = (contribution.mul(keep, state), contribution.mul(take, gradient));
        let blended = contribution.add(kept, taken);
        contribution.store(0, blended);
        let contribution = contribution.build()?;
        let (decayed, plain) = (program(&self.links, true)?, program(&self.links, false)?);
        let parts = if decayed == plain { vec![(0..layout.len(), true)] } else { parts(layout) };
        let mut named = Vec::new();
        for (i, link) in self.links.iter().enumerate() {
            // The second of two alike has names of its own.
            let before = self.links[..i].iter().filter(|l| l.name() == link.name()).count();
            let number = if before == 0 { String::new() } else { (before + 1).to_string() };
            for state in link.states() {
                named.push((format!("{}{number}.{state}", link.name()), device.zeros(layout.len())?));
            }
        }
        Ok(Chain {
            links: self.links,
            decayed,
            plain,
            contribution,
            parts,
            states: named,
            step: 0,
            len: layout.len(),
            scalars: Vec::new(),
        })
    }
}

/// All links as one program. Rewritten buffer 0 holds the parameters, the states follow; read-only buffer 0 holds the
/// gradient.
fn program(links: &[Box<dyn Transform>], decays: bool) -> Result<Program, OptimError> {
    let mut program = ProgramBuilder::new();
    let (param, mut update) = (program.load(0), program.read(0));
    let (mut scalars, mut states) = (0, 1);
    for link in links {
        let mut emit = Emit { program: &mut program, param, decays, scalars, states };
        update = link.emit(&mut emit, update);
        scalars += link.scalar_count();
        states += link.states().len() as u16;
    }
    let moved = program.sub(param, update);
    program.store(0, moved);
    Ok(program.build()?)
}

/// Ranges of a layout's flat buffer that decay (matrices) and that do not (vectors), as long as they can be; padding
/// goes with what stands before it.
fn parts(layout: &ParamLayout) -> Vec<(Range<usize>, bool)> {
    let mut parts: Vec<(Range<usize>, bool)> = Vec::new();
    for p in layout.params() {
        let decays = p.shape.dims().len() >= 2;
        match parts.last_mut() {
            Some((range, same)) if *same == decays => range.end = p.range().end,
            last => {
                if let Some((range, _)) = last {
                    range.end = p.start;
                }
                parts.push((p.range(), decays));
            }
        }
    }
    if let Some((range, _)) = parts.last_mut() {
        range.end = layout.len();
    }
    parts
}

/// A chain of transforms bound to a layout, with its state.
#[derive(Debug)]
pub struct Chain {
    links: Vec<Box<dyn Transform>>,
    /// For parameters that decay, and for those that do not.
    decayed: Program,
    plain: Program,
    /// From a state and the gradient to what replicas average.
    contribution: Program,
    /// Ranges of the flat buffers, and whether they decay.
    parts: Vec<(Range<usize>, bool)>,
    states: Vec<(String, Tensor)>,
    step: u64,
    len: usize,
    scalars: Vec<f32>,
}

/// A step that was prepared and not yet committed. Dropping it leaves everything as it was.
#[derive(Debug, Clone, Copy, PartialEq)]
#[must_use = "a prepared step changes nothing until it is committed"]
pub struct Prepared {
    norm: f64,
}

impl Prepared {
    /// A step of a part of a model whose whole gradient has this global l2 norm: the root of what
    /// [`sum_of_squares`] gives, summed over all parts. [`Chain::prepare`] is for a chain that has the whole model.
    ///
    /// Errors: [`OptimError::NotFinite`].
    pub fn with_norm(norm: f64) -> Result<Self, OptimError> {
        if norm.is_finite() { Ok(Self { norm }) } else { Err(OptimError::NotFinite { norm }) }
    }

    /// Global l2 norm of the gradient before clipping.
    #[must_use]
    pub const fn norm(&self) -> f64 {
        self.norm
    }
}

/// Global l2 norm of a flat buffer, padding (which is zero) included; partial sums are added in f64 in order.
pub fn global_norm(flat: &Tensor) -> Result<f64, TensorError> {
    Ok(sum_of_squares(flat, 0..flat.shape().len())?.sqrt())
}

/// Sum of the squares of a part of a flat buffer: what several holders of a model add up to a global norm. Partial sums
/// are added in f64 in order.
pub fn sum_of_squares(flat: &Tensor, range: Range<usize>) -> Result<f64, TensorError> {
    let x = flat.view().part(range.start, range.len())?;
    let mut partials = flat.device().empty(DType::F32, range.len().div_ceil(Op::SQUARES_CHUNK))?;
    flat.device().run(Op::SumSquares { x, partials: partials.view_mut() })?;
    Ok(match partials.host::<f32>() {
        Some(partials) => partials.iter().map(|&s| f64::from(s)).sum(),
        None => partials.to_vec::<f32>()?.iter().map(|&s| f64::from(s)).sum(),
    })
}

impl Chain {
    /// An empty chain, to be built link by link.
    #[expect(
        clippy::new_ret_no_self,
        reason = "`Chain::new().then(..)` is how chains are written in the field"
    )]
    #[must_use]
    pub fn new() -> ChainBuilder {
        ChainBuilder::default()
    }

    /// Steps committed so far.
    #[must_use]
    pub const fn step(&self) -> u64 {
        self.step
    }

    /// Whether replicas average something else than gradients in the next step: [`Chain::contribute`].
    #[must_use]
    pub fn contributes(&self) -> bool {
        self.links.iter().any(|link| link.contribution(self.step).is_some())
    }

    /// What replicas average in the next step in the place of a range of the gradient, and the chain then takes
    /// for it: 1-bit Adam's momentum. The gradient itself for most chains. `share` is the state's part in it,
    /// 1 but where several contributions are added up to one.
    ///
    /// Errors: [`OptimError::Tensor`] for a range that is not in the buffers.
    pub fn contribute(
        &self,
        grads: &Tensor,
        range: Range<usize>,
        share: f32,
        into: &mut Tensor,
    ) -> Result<(), OptimError> {
        let x = grads.view().part(range.start, range.len())?;
        let y = into.view_mut().part(range.start, range.len())?;
        let device = grads.device();
        let mut states = 0;
        for link in &self.links {
            if let Some(Contribution { state, keep, take }) = link.contribution(self.step) {
                let (_, state) = &self.states[states + usize::from(state)];
                let reads = &[state.view().part(range.start, range.len())?, x];
                let (program, scalars) = (&self.contribution, &[share * keep, take]);
                return Ok(device.run(Op::Map { program, scalars, reads, writes: &mut [y] })?);
            }
            states += link.states().len();
        }
        Ok(device.run(Op::Cast { x, y })?)
    }

    /// What a step needs before any element moves. Changes nothing, so a step that is given up here never was.
    ///
    /// Errors: [`OptimError::NotFinite`] if the gradient's norm is not finite, whether or not a link asks for it: a step
    /// that would leave no number in the parameters is not taken.
    pub fn prepare(&self, grads: &Tensor) -> Result<Prepared, OptimError> {
        Prepared::with_norm(global_norm(grads)?)
    }

    /// Takes the step: one pass over parameters, gradients and state, in place.
    pub fn commit(
        &mut self,
        params: &mut Tensor,
        grads: &Tensor,
        prepared: Prepared,
    ) -> Result<(), OptimError> {
        let info = StepInfo { step: self.step, norm: prepared.norm };
        self.scalars.clear();
        for link in &self.links {
            link.scalars(info, &mut self.scalars);
        }
        let device = grads.device().clone();
        for (range, decays) in &self.parts {
            let program = if *decays { &self.decayed } else { &self.plain };
            let scalars = &self.scalars[..program.scalars()];
            let (start, len) = (range.start, range.len());
            let reads = &[grads.view().part(start, len)?][..program.reads()];
            let p = params.view_mut().part(start, len)?;
            let mut states = self.states.iter_mut().map(|(_, s)| s.view_mut().part(start, len));
            let mut next = || states.next().expect("a program has as many states as its links");
            match program.writes() {
                1 => device.run(Op::Map { program, scalars, reads, writes: &mut [p] })?,
                2 => device.run(Op::Map { program, scalars, reads, writes: &mut [p, next()?] })?,
                3 => device.run(Op::Map { program, scalars, reads, writes: &mut [p, next()?, next()?] })?,
                _ => {
                    let writes = &mut [p, next()?, next()?, next()?];
                    device.run(Op::Map { program, scalars, reads, writes })?;
                }
            }
        }
        self.step += 1;
        Ok(())
    }

    /// Takes the last committed step back: `states` are copies of the states before it, in their order.
    pub(crate) fn take_back(&mut self, states: Vec<Tensor>) {
        for ((_, state), before) in self.states.iter_mut().zip(states) {
            *state = before;
        }
        self.step -= 1;
    }

    /// Named state buffers, each of the layout's length.
    pub fn states(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.states.iter().map(|(name, t)| (name.as_str(), t))
    }

    /// Restores the step counter and all state buffers; `get` gives each by name.
    ///
    /// Errors: [`OptimError::State`] for a buffer that is missing or of another length; nothing has changed then.
    pub fn restore<'a>(
        &mut self,
        step: u64,
        get: impl Fn(&str) -> Option<&'a [f32]>,
    ) -> Result<(), OptimError> {
        let mut found = Vec::with_capacity(self.states.len());
        for (name, _) in &self.states {
            let values = get(name).filter(|v| v.len() == self.len);
            let len = get(name).map_or(0, <[f32]>::len);
            found.push(values.ok_or_else(|| OptimError::State {
                name: name.clone(),
                found: len,
                expected: self.len,
            })?);
        }
        for ((_, state), values) in self.states.iter_mut().zip(found) {
            state.write(values)?;
        }
        self.step = step;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
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
        for (builder, parts, writes) in [(adamw, 2, 3), (diloco_outer(0.7, 0.9), 1, 2)] {
            let mut chain = builder.build(&cpu, &layout).unwrap();
            // Parameters and states are each stored once, and each read-only buffer is read once.
            assert_eq!((chain.decayed.reads(), chain.decayed.writes()), (1, writes));
            assert_eq!(chain.decayed.stores().len(), writes);
            // Links that tell matrices from vectors cut the pass where one kind ends, and leave nothing out.
            assert_eq!(chain.parts.len(), parts);
            assert!(chain.parts.windows(2).all(|p| p[0].0.end == p[1].0.start));
            assert_eq!((chain.parts[0].0.start, chain.parts[parts - 1].0.end), (0, layout.len()));
            let values = |f: fn(usize) -> f32| {
                let mut values = vec![0.0; layout.len()];
                for i in layout.params().iter().flat_map(farflung_tensor::Param::range) {
                    values[i] = f(i);
                }
                values
            };
            let (start, grad) = (values(|i| (i as f32).sin()), values(|i| (i as f32 * 0.7).cos()));
            let mut params = cpu.tensor(&start, layout.len()).unwrap();
            let grads = cpu.tensor(&grad, layout.len()).unwrap();
            let prepared = chain.prepare(&grads).unwrap();
            chain.commit(&mut params, &grads, prepared).unwrap();
            // One evaluation of the program for each element is the whole step, to the bit.
            let got = params.to_vec::<f32>().unwrap();
            let states: Vec<Vec<f32>> = chain.states().map(|(_, s)| s.to_vec().unwrap()).collect();
            for i in 0..layout.len() {
                let mut element = vec![0.0; writes];
                element[0] = start[i];
                let matrix = layout.params()[0].range().contains(&i);
                let program = if matrix { &chain.decayed } else { &chain.plain };
                program.eval(&chain.scalars, &[grad[i]], &mut element);
                let after: Vec<f32> = std::iter::once(got[i]).chain(states.iter().map(|s| s[i])).collect();
                assert_eq!(after, element, "{i}");
            }
        }
    }
}
