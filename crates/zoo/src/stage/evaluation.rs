//! Forward passes that keep nothing: losses and logits.

use farflung_tensor::Tensor;

use super::{Packed, Seen, Stage};
use crate::ZooError;
use crate::layer::{Head, Keep, Params, StageContext};

impl Stage {
    /// Returns the losses `[B T]` per token, without saving anything for a backward pass. The stage must be a
    /// whole model.
    pub fn losses<'a>(
        &self,
        params: impl Into<Params<'a>>,
        tokens: impl Into<Packed>,
        targets: &Tensor,
    ) -> Result<Tensor, ZooError> {
        self.check_head()?;
        self.evaluate(params.into(), tokens.into(), None, |head, cx, x| head.losses(cx, x, targets))
    }

    /// Returns the logits `[B, T, V]`. The stage must be a whole model.
    pub fn logits<'a>(
        &self,
        params: impl Into<Params<'a>>,
        tokens: impl Into<Packed>,
    ) -> Result<Tensor, ZooError> {
        self.check_head()?;
        self.evaluate(params.into(), tokens.into(), None, Head::logits)
    }

    fn check_head(&self) -> Result<(), ZooError> {
        let whole = ZooError::StageInput { expected: "a stage with the whole model" };
        self.layers.head.as_ref().map(|_| ()).ok_or(whole)
    }

    /// Runs a forward pass that keeps nothing. Returns what `last` makes of the hidden states if the stage has
    /// the head, else the hidden states.
    pub(super) fn evaluate(
        &self,
        params: Params<'_>,
        Packed { input, borders, .. }: Packed,
        mut seen: Option<Seen<'_>>,
        last: impl FnOnce(&Head, &StageContext<'_>, &Tensor) -> Result<Tensor, ZooError>,
    ) -> Result<Tensor, ZooError> {
        let borders = self.with_context(borders, &input, seen.is_some())?;
        let cx = self.cx_of(&borders, seen.is_some());
        let start = seen.as_ref().map_or(0, |seen| seen.past);
        params.begin(|| self.forward_units());
        let (mut x, _) = self.enter(params, &cx, input, start)?;
        for (i, block) in self.layers.blocks.iter().enumerate() {
            let held = params.of_layer(|| self.units_of_block(i))?;
            x = block.forward(&cx.with(&held), x, Seen::before(&mut seen, i), Keep::Nothing)?.0;
        }
        match &self.layers.head {
            Some(head) => {
                let held = params.of_layer(|| self.units_of_head(head))?;
                last(head, &cx.with(&held), &x)
            }
            None => Ok(x),
        }
    }
}
