//! Stages whose ranks divide the positions of sequences in all layers.

use std::sync::{Arc, Mutex, PoisonError};

use farflung_base::{Axis, ContextCut};

use super::{Input, Stage};
use crate::layer::{Borders, ContextBorders, ContextPieces};
use crate::{Batch, ZooError};

/// What a stage knows of a division of positions.
#[derive(Debug, Clone)]
pub(super) struct DividedContext {
    pub(super) pieces: ContextPieces,
    /// The windows of the layers.
    windows: Vec<Option<usize>>,
    /// The borders of sequences that are one document each, of the last number of sequences.
    whole: Arc<Mutex<Option<WholeBorders>>>,
}

/// The borders of some sequences that are one document each.
#[derive(Debug)]
struct WholeBorders {
    sequences: usize,
    borders: Arc<ContextBorders>,
}

impl Stage {
    /// Divides the positions of whole sequences among ranks, in all layers: tokens, targets and hidden states
    /// are then those of the positions of rank `rank` ([`Stage::own`]), and gradients of all tensors are
    /// parts of a sum over the ranks. Layers exchange along [`Axis::Context`] and [`Axis::Ulysses`]. Slices
    /// of sequences, and tokens that are generated, are not divided.
    ///
    /// Errors: [`ZooError::Config`] if ranks would have unequal numbers of positions or of heads, the model has
    /// experts or an attention whose keys are not one range for each query, or the exchange is that of another
    /// rank.
    pub fn divide_context(&mut self, cut: ContextCut, rank: u32) -> Result<(), ZooError> {
        let refuse = |field, value, expected| Err(ZooError::Config { field, value, expected });
        let pieces = ContextPieces::new(cut, rank, self.spec.context)?;
        let along = |axis| (self.exchange.rank(axis) as u32, self.exchange.size(axis) as u32);
        if along(Axis::Context) != (cut.group(rank), cut.ring)
            || along(Axis::Ulysses) != (rank % cut.ulysses, cut.ulysses)
        {
            let expected = "the rank of the exchange along the views of the context";
            return refuse("rank", rank as usize, expected);
        }
        if self.sequence.is_some() {
            return refuse("context", self.spec.context, "not divided along the tensor axis, too");
        }
        if self.spec.mixtures().next().is_some() {
            let expected = "none with sequences that ranks divide: a router takes all tokens of a sequence";
            return refuse("experts", self.spec.mixtures().count(), expected);
        }
        self.spec.check_context_pattern()?;
        let members = cut.ulysses as usize;
        for run in &self.spec.blocks {
            let heads = self.share.of(run.block.attention.heads.kv).len();
            if !heads.is_multiple_of(members) {
                let expected = "a multiple of the ranks that exchange positions for heads (`ulysses`)";
                return refuse("key-value heads", heads, expected);
            }
        }
        self.context = Some(DividedContext { pieces, windows: self.spec.windows(), whole: Arc::default() });
        Ok(())
    }

    /// Returns the number of ranks that divide the positions of a sequence in all layers.
    #[must_use]
    pub fn readers(&self) -> usize {
        self.context.as_ref().map_or(1, |context| context.pieces.readers())
    }

    /// Returns what this rank has of values by position, of whole sequences one after another: all, if no ranks
    /// divide positions.
    #[must_use]
    pub fn own<T: Copy>(&self, values: &[T]) -> Vec<T> {
        match &self.context {
            Some(context) => context.pieces.of(values),
            None => values.to_vec(),
        }
    }

    /// Returns the borders of a batch of whole sequences where ranks divide their positions.
    pub(super) fn divided_borders(
        &self,
        context: &DividedContext,
        batch: &Batch,
    ) -> Result<Borders, ZooError> {
        let of = [batch.documents.as_deref(), batch.prefixes.as_deref()];
        let sequences = batch.inputs.len() / batch.length.max(1);
        let DividedContext { pieces, windows, .. } = context;
        let made = ContextBorders::new(pieces, &self.device, sequences, of, windows)?;
        Ok(Borders { context: Some(Arc::new(made)), ..Borders::default() })
    }

    /// Returns the borders of a pass with what it needs where ranks divide positions.
    pub(super) fn with_context(
        &self,
        borders: Borders,
        input: &Input,
        sliced: bool,
    ) -> Result<Borders, ZooError> {
        let Some(context) = self.context.as_ref().filter(|_| !sliced && borders.context.is_none()) else {
            return Ok(borders);
        };
        if borders.documents.is_some() || borders.prefixes.is_some() {
            let expected = "the borders that the stage makes, since ranks divide positions";
            return Err(ZooError::StageInput { expected });
        }
        let (Input::Tokens(x) | Input::Hidden(x)) = input;
        let sequences = x.shape().dims().first().copied().unwrap_or(0);
        let mut whole = context.whole.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(same) = whole.as_ref().filter(|whole| whole.sequences == sequences) {
            return Ok(Borders { context: Some(Arc::clone(&same.borders)), ..borders });
        }
        let DividedContext { pieces, windows, .. } = context;
        let made = ContextBorders::new(pieces, &self.device, sequences, [None, None], windows)?;
        let made = Arc::new(made);
        *whole = Some(WholeBorders { sequences, borders: Arc::clone(&made) });
        Ok(Borders { context: Some(made), ..borders })
    }
}
