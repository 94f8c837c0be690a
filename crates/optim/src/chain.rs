//! A chain of transforms, fused: one pass for the norm if a link needs it, one pass for everything else.

use farflung_tensor::{DType, Device, Op, ParamLayout, Program, ProgramBuilder, Tensor, TensorError};

use crate::OptimError;
use crate::transform::{Emit, StepInfo, Transform};

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
        // Rewritten buffer 0 holds the parameters, the states follow; read-only buffer 0 holds the gradient, 1 the mask.
        let mut program = ProgramBuilder::new();
        let (param, mut update) = (program.load(0), program.read(0));
        let (mut scalars, mut states, mut masked) = (0, 1, false);
        for link in &self.links {
            let mut decay_mask = |p: &mut ProgramBuilder| {
                masked = true;
                p.read(1)
            };
            let mut emit =
                Emit { program: &mut program, param, decay_mask: &mut decay_mask, scalars, states };
            update = link.emit(&mut emit, update);
            scalars += link.scalar_count();
            states += link.states().len() as u16;
        }
        let moved = program.sub(param, update);
        program.store(0, moved);
        let program = program.build()?;

        let mask = if masked {
            let mut mask = vec![0.0_f32; layout.len()];
            for p in layout.params().iter().filter(|p| p.shape.dims().len() >= 2) {
                mask[p.range()].fill(1.0);
            }
            Some(device.tensor(&mask, layout.len())?)
        } else {
            None
        };
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
            program,
            mask,
            states: named,
            step: 0,
            len: layout.len(),
            scalars: Vec::new(),
        })
    }
}

/// A chain of transforms bound to a layout, with its state.
#[derive(Debug)]
pub struct Chain {
    links: Vec<Box<dyn Transform>>,
    program: Program,
    mask: Option<Tensor>,
    states: Vec<(String, Tensor)>,
    step: u64,
    len: usize,
    scalars: Vec<f32>,
}

/// A step that was prepared and not yet committed. Dropping it leaves everything as it was.
#[derive(Debug, Clone, Copy, PartialEq)]
#[must_use = "a prepared step changes nothing until it is committed"]
pub struct Prepared {
    norm: Option<f64>,
}

impl Prepared {
    /// Global l2 norm of the gradient before clipping, if a link needs it.
    #[must_use]
    pub const fn norm(&self) -> Option<f64> {
        self.norm
    }
}

/// Global l2 norm of a flat buffer, padding (which is zero) included; partial sums are added in f64 in order.
pub fn global_norm(flat: &Tensor) -> Result<f64, TensorError> {
    let device = flat.device();
    let len = flat.shape().len();
    let mut partials = device.empty(DType::F32, len.div_ceil(Op::SQUARES_CHUNK))?;
    device.run(Op::SumSquares { x: flat.view(), partials: partials.view_mut() })?;
    let sum: f64 = match partials.host::<f32>() {
        Some(partials) => partials.iter().map(|&s| f64::from(s)).sum(),
        None => partials.to_vec::<f32>()?.iter().map(|&s| f64::from(s)).sum(),
    };
    Ok(sum.sqrt())
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

    /// What a step needs before any element moves. Changes nothing, so a step that is given up here never was.
    ///
    /// Errors: [`OptimError::NotFinite`] if the norm is asked for and is not finite.
    pub fn prepare(&self, grads: &Tensor) -> Result<Prepared, OptimError> {
        let norm = if self.links.iter().any(|l| l.needs_norm()) {
            let norm = global_norm(grads)?;
            if !norm.is_finite() {
                return Err(OptimError::NotFinite { norm });
            }
            Some(norm)
        } else {
            None
        };
        Ok(Prepared { norm })
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
        let gradient = grads.view();
        let reads = [gradient, self.mask.as_ref().map_or(gradient, Tensor::view)];
        let reads = &reads[..self.program.reads()];
        let (program, scalars) = (&self.program, &self.scalars);
        let p = params.view_mut();
        match self.states.as_mut_slice() {
            [] => device.run(Op::Map { program, scalars, reads, writes: &mut [p] })?,
            [(_, a)] => device.run(Op::Map { program, scalars, reads, writes: &mut [p, a.view_mut()] })?,
            [(_, a), (_, b)] => {
                let writes = &mut [p, a.view_mut(), b.view_mut()];
                device.run(Op::Map { program, scalars, reads, writes })?;
            }
            more => {
                let mut writes: Vec<_> =
                    std::iter::once(p).chain(more.iter_mut().map(|(_, s)| s.view_mut())).collect();
                device.run(Op::Map { program, scalars, reads, writes: &mut writes })?;
            }
        }
        self.step += 1;
        Ok(())
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
    use crate::{Schedule, diloco_outer};
    use farflung_tensor::Shape;

    #[test]
    fn a_commit_is_one_pass_of_one_program() {
        let cpu = Device::cpu(1).unwrap();
        let layout =
            ParamLayout::new([("w".to_owned(), Shape::from([8, 9])), ("b".to_owned(), Shape::from(9))]);
        let adamw = Chain::new()
            .then(clip_by_global_norm(1.0))
            .then(scale_by_adam(0.9, 0.95, 1e-8))
            .then(add_decayed_weights(0.1))
            .then(scale_by_schedule(Schedule::constant(0.01)));
        for (builder, reads, writes) in [(adamw, 2, 3), (diloco_outer(0.7, 0.9), 1, 2)] {
            let mut chain = builder.build(&cpu, &layout).unwrap();
            // Parameters and states are each stored once, and each read-only buffer is read once.
            assert_eq!((chain.program.reads(), chain.program.writes()), (reads, writes));
            assert_eq!(chain.program.stores().len(), writes);
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
                let mask = f32::from(layout.params()[0].range().contains(&i));
                chain.program.eval(&chain.scalars, &[grad[i], mask][..reads], &mut element);
                let after: Vec<f32> = std::iter::once(got[i]).chain(states.iter().map(|s| s[i])).collect();
                assert_eq!(after, element, "{i}");
            }
        }
    }
}
