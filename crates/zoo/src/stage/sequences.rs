//! Stages whose ranks divide the positions of sequences, where each has whole layers.

use farflung_tensor::Tensor;

use super::Stage;
use crate::ZooError;
use crate::layer::{Borders, SequencePieces, StageContext, dims};

impl Stage {
    /// Divides the positions of whole sequences among the ranks that divide the width of layers, where each has
    /// whole layers: hidden states `[B, T, C]` in and out of the stage are then those of this rank's positions,
    /// and gradients of whole tensors are parts of a sum over the ranks. Slices of sequences, and tokens that
    /// are generated, are not divided.
    ///
    /// Errors: [`ZooError::Config`] if no ranks divide the stage, a rank would have no position, or the model
    /// has experts.
    pub fn divide_sequences(&mut self) -> Result<(), ZooError> {
        let refuse = |field, value, expected| Err(ZooError::Config { field, value, expected });
        let (ranks, context) = (self.share.ranks(), self.spec.context);
        if ranks == 1 {
            return refuse("ranks", ranks, "several that divide the width of layers, and sequences");
        }
        if self.spec.mixtures().next().is_some() {
            let expected = "none with sequences that ranks divide: a router takes all tokens of a sequence";
            return refuse("experts", self.spec.mixtures().count(), expected);
        }
        if self.share.all().any(|share| share.of(context).is_empty()) {
            return refuse("context", context, "a position for each rank along the tensor axis");
        }
        self.sequence = Some(SequencePieces::of(&self.share, context));
        Ok(())
    }

    /// Returns how many of a sequence's positions, of `len`, this rank's hidden states have.
    #[must_use]
    pub fn own_positions(&self, len: usize) -> usize {
        match &self.sequence {
            Some(pieces) if len == self.spec.context => pieces.len(),
            _ => match &self.context {
                Some(context) if len == self.spec.context => context.pieces.len(),
                _ => len,
            },
        }
    }

    /// Returns the context of a pass over whole sequences, or over slices of them.
    pub(super) fn cx_of<'a>(&'a self, borders: &'a Borders, sliced: bool) -> StageContext<'a> {
        let sequence = self.sequence.as_ref().filter(|_| !sliced);
        let context = self.context.as_ref().filter(|_| !sliced).map(|context| &context.pieces);
        StageContext { sequence, context, ..self.cx(borders) }
    }

    /// Returns the number of positions of the sequences of which `x` are hidden states.
    pub(super) fn positions_of(&self, cx: &StageContext<'_>, x: &Tensor) -> Result<usize, ZooError> {
        let here = dims(x)?[1];
        match cx.sequence {
            None => Ok(here),
            Some(pieces) if pieces.len() == here => Ok(self.spec.context),
            Some(_) => Err(ZooError::StageInput {
                expected: "sequences as long as the model's context, since ranks divide their positions",
            }),
        }
    }
}
