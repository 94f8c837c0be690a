//! Gives a chain the states of one piece after another, and takes them back.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use farflung_optim::{OptimError, StateStore};
use farflung_store::StoreError;
use farflung_tensor::{Tensor, View};

use super::memory::PieceTensors;
use super::{Shared, StateFile};
use crate::{Error, StateError};

/// The pieces of a part's states, as its chain sees them.
#[derive(Debug)]
pub(super) struct StoredPieces {
    shared: Arc<Mutex<Shared>>,
    pieces: Vec<Range<usize>>,
    /// The states of a piece on the chain's device, if that is not the host.
    on_device: Option<Vec<Tensor>>,
}

impl StoredPieces {
    pub(super) const fn new(shared: Arc<Mutex<Shared>>, pieces: Vec<Range<usize>>) -> Self {
        Self { shared, pieces, on_device: None }
    }

    fn lock(shared: &Mutex<Shared>) -> MutexGuard<'_, Shared> {
        shared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn failed(error: StoreError) -> OptimError {
    OptimError::Store(Box::new(error))
}

/// Turns an error of this crate into one of a store.
fn unavailable(error: Error) -> OptimError {
    OptimError::Store(Box::new(error))
}

impl Shared {
    /// Returns the next piece.
    fn take(&mut self) -> Result<PieceTensors, OptimError> {
        match &mut self.file {
            StateFile::Streaming(stream) => stream.take().map_err(failed),
            StateFile::Counted(buffers) => Ok(buffers.pop().expect("a piece is given back before the next")),
            StateFile::Closed | StateFile::Opened(_) => Err(unavailable(StateError::Closed.into())),
        }
    }

    /// Gives back a piece.
    fn give(&mut self, piece: PieceTensors, late: &[u32]) -> Result<(), OptimError> {
        match &mut self.file {
            StateFile::Streaming(stream) => stream.give(piece, late).map_err(failed),
            StateFile::Counted(buffers) => {
                buffers.push(piece);
                Ok(())
            }
            StateFile::Closed | StateFile::Opened(_) => Err(unavailable(StateError::Closed.into())),
        }
    }
}

impl StateStore for StoredPieces {
    fn take(&mut self) -> Result<Vec<Tensor>, OptimError> {
        let mut shared = Self::lock(&self.shared);
        let mut piece = shared.take()?;
        let Some(device) = shared.memory.away.clone() else {
            // The file was read into tensors of the chain's own device.
            let params = piece.arrays.split_off(shared.memory.states);
            let states = std::mem::replace(&mut piece.arrays, params);
            shared.taken = Some(piece);
            return Ok(states);
        };
        let mut states = match self.on_device.take() {
            Some(states) => states,
            None => shared.memory.on_device(&device).map_err(unavailable)?,
        };
        for (number, state) in states.iter_mut().enumerate() {
            state.write(piece.values(number))?;
        }
        shared.taken = Some(piece);
        Ok(states)
    }

    fn give(&mut self, states: Vec<Tensor>, params: View<'_>) -> Result<(), OptimError> {
        let mut shared = Self::lock(&self.shared);
        let mut piece = shared.taken.take().expect("a piece is taken before it is given back");
        shared.next = (shared.next + 1) % self.pieces.len();
        if shared.memory.away.is_none() {
            piece.arrays.splice(0..0, states);
        } else {
            for (number, state) in states.iter().enumerate() {
                piece.values_mut(number).copy_from_slice(&state.to_vec::<f32>()?);
            }
            self.on_device = Some(states);
        }
        let late = match &shared.file {
            StateFile::Counted(_) => Vec::new(),
            _ => piece.take_params(params, shared.memory.states)?,
        };
        shared.give(piece, &late)
    }
}
