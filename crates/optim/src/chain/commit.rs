//! A step of a chain: the passes of each class of parameters, piece by piece.

use farflung_tensor::{Op, Program, Tensor, ViewMut};

use super::pass::{ChainPiece, Pass, PassPosition};
use super::{Chain, Prepared};
use crate::OptimError;
use crate::per_tensor::Tensors;
use crate::transform::StepInfo;

impl Chain {
    /// Takes the step in place. If all links fit into one pass, it goes over parameters, gradients and state
    /// once. `params` and `grads` each have either the length of the layout's flat buffers, or that of
    /// [`Chain::shard`] alone.
    ///
    /// Errors: those of the device; those of a [`StateStore`](super::StateStore), after which some parameters
    /// have taken the step and others have not.
    pub fn commit(
        &mut self,
        params: &mut Tensor,
        grads: &Tensor,
        prepared: Prepared,
    ) -> Result<(), OptimError> {
        let of_shard = params.shape().len() == self.shard.len();
        for piece in 0..self.pieces.len() {
            let taken = self.store.as_mut().map(|store| store.take()).transpose()?;
            let held = taken.map(|taken| std::mem::replace(&mut self.states, taken));
            self.commit_piece(piece, params, grads, prepared)?;
            if let (Some(store), Some(held)) = (&mut self.store, held) {
                let ChainPiece { range, first_of_shard, .. } = &self.pieces[piece];
                let start = range.start - if of_shard { *first_of_shard } else { 0 };
                let taken = std::mem::replace(&mut self.states, held);
                store.give(taken, params.view().part(start, range.len())?)?;
            }
        }
        self.step += 1;
        Ok(())
    }

    /// Takes the step of a piece, whose states are in place.
    fn commit_piece(
        &mut self,
        piece: usize,
        params: &mut Tensor,
        grads: &Tensor,
        prepared: Prepared,
    ) -> Result<(), OptimError> {
        let ChainPiece { first, first_of_shard, .. } = self.pieces[piece];
        let first_of = |buffer: &Tensor| {
            let of_shard = buffer.shape().len() == self.shard.len();
            if of_shard { first_of_shard } else { 0 }
        };
        let (first_param, first_gradient) = (first_of(params), first_of(grads));
        for class in &self.classes {
            let part = &class.parts[piece];
            if part.ranges.is_empty() {
                continue;
            }
            let info = StepInfo { step: self.step, norm: prepared.norm(), lr: class.group.lr };
            self.scalars.clear();
            for link in &self.links {
                link.scalars(info, &mut self.scalars);
            }
            for pass in &class.passes {
                match pass {
                    Pass::PerTensor(link) => {
                        let own = self.first_states[*link]..;
                        let count = self.links[*link].states().len();
                        let tensors = &mut Tensors {
                            list: &part.tensors,
                            first: first - first_param,
                            params,
                            update: self.update.as_mut().expect(IN_MEMORY),
                            factor: &self.factor,
                            states: &mut self.states[own][..count],
                            step: self.step,
                            decay: class.group.decay,
                        };
                        self.links[*link].per_tensor().map_or(Ok(()), |link| link.rewrite(tensors))?;
                    }
                    Pass::Fused { program, place, states } => {
                        let mut buffers = Buffers {
                            params: &mut *params,
                            grads,
                            update: self.update.as_mut(),
                            states: &mut self.states,
                            first,
                            first_param,
                            first_gradient,
                        };
                        for range in &part.ranges {
                            let (start, len) = (range.start, range.len());
                            buffers.run(program, &self.scalars, *place, states, start, len)?;
                        }
                    }
                }
            }
        }
        Ok(())
    }
}

/// Reason why the update buffer exists, for `expect`.
const IN_MEMORY: &str = "a chain with several passes has a buffer for the update";

/// The flat buffers of a step.
struct Buffers<'a> {
    params: &'a mut Tensor,
    grads: &'a Tensor,
    update: Option<&'a mut Tensor>,
    states: &'a mut [Tensor],
    /// Index in the flat buffers of the first element of `update` and `states`.
    first: usize,
    /// Those of the first elements of `params` and of `grads`.
    first_param: usize,
    first_gradient: usize,
}

impl Buffers<'_> {
    /// Runs a fused pass over a range of the flat buffers.
    fn run(
        &mut self,
        program: &Program,
        scalars: &[f32],
        place: PassPosition,
        states: &[usize],
        start: usize,
        len: usize,
    ) -> Result<(), OptimError> {
        let device = self.grads.device();
        let scalars = &scalars[..program.scalars()];
        let grads = self.grads.view().part(start - self.first_gradient, len)?;
        let own = start - self.first;
        let param = start - self.first_param;
        let (reads, first) = match (place.first, place.last) {
            (true, true) => ([grads, grads], self.params.view_mut().part(param, len)?),
            (true, false) => {
                let update = self.update.as_mut().expect(IN_MEMORY);
                ([grads, self.params.view().part(param, len)?], update.view_mut().part(own, len)?)
            }
            (false, true) => {
                let update = self.update.as_ref().expect(IN_MEMORY).view().part(own, len)?;
                ([update, update], self.params.view_mut().part(param, len)?)
            }
            (false, false) => {
                let params = self.params.view().part(param, len)?;
                let update = self.update.as_mut().expect(IN_MEMORY);
                ([params, params], update.view_mut().part(own, len)?)
            }
        };
        let reads = &reads[..program.reads()];
        let picked = self.states.iter_mut().enumerate().filter(|(i, _)| states.contains(i));
        let mut picked = picked.map(|(_, state)| state.view_mut().part(own, len));
        let mut next = || -> Result<ViewMut<'_>, OptimError> {
            Ok(picked.next().expect("a program has as many states as its links")?)
        };
        match program.writes() {
            1 => device.run(Op::Map { program, scalars, reads, writes: &mut [first] })?,
            2 => device.run(Op::Map { program, scalars, reads, writes: &mut [first, next()?] })?,
            3 => device.run(Op::Map { program, scalars, reads, writes: &mut [first, next()?, next()?] })?,
            _ => {
                let writes = &mut [first, next()?, next()?, next()?];
                device.run(Op::Map { program, scalars, reads, writes })?;
            }
        }
        Ok(())
    }
}
