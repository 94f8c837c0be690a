//! A stage: a range of a model's blocks, with flat parameters and gradients. The stage of all blocks is the
//! whole model.

mod activation_policy;
mod cache;
mod context;
mod made;
mod packed;
mod parameters;
mod routed;
mod sequences;
mod slices;

use std::ops::Range;
use std::sync::Arc;

use farflung_base::Pending;
use farflung_tensor::{Device, ParamLayout, Tensor};

use crate::ZooError;
use crate::cut::AxisShare;
use crate::exchange::Exchange;
use crate::layer::{
    Activations, Before, Borders, Grads, Head, HeadSaved, Keep, KeyValues, Later, Layers, Routed, RouterPass,
    SequencePieces, StageContext, Targets,
};
use crate::spec::{HeadSpec, ModelSpec};
use crate::tensor_spec::TensorSpec;

pub use activation_policy::ActivationPolicy;
pub use cache::Cache;
pub use packed::Packed;
pub use slices::Slices;

use activation_policy::{Chain, StoredActivations, restore_last};
use context::DividedContext;
use routed::RoutedPass;

/// A range of a model's layers. The first stage also has the embeddings, the last one the head. An empty range
/// between two layers has no parameters and returns its input.
#[derive(Debug, Clone)]
pub struct Stage {
    spec: ModelSpec,
    device: Device,
    layout: ParamLayout,
    /// For each of this stage's tensors, its index among those of the whole model, and its spec.
    specs: Vec<(usize, TensorSpec)>,
    /// What this rank has of the layers' width and of the experts, and how it exchanges with the ranks that
    /// have the rest.
    share: AxisShare,
    experts: AxisShare,
    exchange: Arc<dyn Exchange>,
    /// Which positions of whole sequences this rank has, if ranks divide them.
    sequence: Option<SequencePieces>,
    /// Which positions it has in all layers, if ranks divide them there.
    context: Option<DividedContext>,
    layers: Layers,
    /// Factor of gradients before matrix products round them.
    gradient_scale: f32,
    activation_policy: ActivationPolicy,
    /// Number of the first block in the model.
    first_block: usize,
}

/// Input of a stage: tokens `[B, T]` (u32) for the first stage, hidden states `[B, T, C]` for the others.
#[derive(Debug)]
pub enum Input {
    /// Token ids.
    Tokens(Tensor),
    /// Hidden states.
    Hidden(Tensor),
}

/// Output of a stage: losses `[B T]` per token for the last stage, hidden states for the others.
#[derive(Debug)]
pub enum Output {
    /// Hidden states.
    Hidden(Tensor),
    /// Losses in nats.
    Losses(Tensor),
}

/// Values that a forward pass saves for the backward pass.
#[derive(Debug)]
pub struct Saved {
    /// Token positions of the pass.
    positions: Range<usize>,
    tokens: Option<Tensor>,
    /// Where the documents of the pass's tokens begin and prefixes end.
    borders: Borders,
    /// Number of leading blocks whose values were dropped. `blocks` contains the blocks after them.
    forgotten: usize,
    blocks: Vec<StoredActivations>,
    /// State of the steps that recompute missing values, if [`ActivationPolicy::steps`] are set.
    chain: Option<Chain>,
    head: Option<HeadSaved>,
    /// Gradient of the embedding's output, between the two halves of the backward pass.
    dx: Option<Tensor>,
    /// What the routers chose.
    routed: RoutedPass,
}

impl Saved {
    /// Drops the saved values of the first `layers` blocks that still have them (at most all).
    /// [`Stage::recompute`] restores them.
    pub fn drop_activations(&mut self, layers: usize) {
        let layers = layers.min(self.blocks.len());
        self.blocks.drain(..layers);
        self.forgotten += layers;
    }

    /// Moves the saved values of `layers` blocks to host memory, beginning with the first block that was not
    /// dropped: see [`ActivationPolicy::offload`].
    pub fn offload(&mut self, layers: usize) {
        let keeping = ActivationPolicy { offload: layers, ..ActivationPolicy::default() };
        let kept = std::mem::take(&mut self.blocks).into_iter().enumerate();
        self.blocks = kept.map(|(i, kept)| kept.map_on_device(|saved| keeping.store(i, saved))).collect();
    }
}

impl Stage {
    /// Returns the model's description.
    #[must_use]
    pub const fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    /// Returns the range of the token table in the flat buffers, if the head uses it and another stage has it
    /// too: the first stage for the embedding, the last one for the head.
    #[must_use]
    pub fn shared_table(&self) -> Option<Range<usize>> {
        let tied = self.spec.head == HeadSpec::Tied;
        (tied && self.takes_tokens() != self.gives_losses()).then(|| self.layout.params()[0].range())
    }

    /// Returns the bytes of [`Stage::shared_table`]; 0 if there is none.
    #[must_use]
    pub fn shared_table_bytes(&self) -> u64 {
        self.shared_table().map_or(0, |range| (range.len() * size_of::<f32>()) as u64)
    }

    /// Returns what this rank has of the width of layers.
    #[must_use]
    pub const fn share(&self) -> &AxisShare {
        &self.share
    }

    /// Returns the stage's device.
    #[must_use]
    pub const fn device(&self) -> &Device {
        &self.device
    }

    /// Returns whether the input is tokens (true for the first stage).
    #[must_use]
    pub const fn takes_tokens(&self) -> bool {
        self.layers.embedding.is_some()
    }

    /// Returns whether the output is losses (true for the last stage).
    #[must_use]
    pub const fn gives_losses(&self) -> bool {
        self.layers.head.is_some()
    }

    /// Sets the scale of gradients in the backward pass: matrix products multiply gradients by it before they
    /// are rounded to the device's precision, and divide the result by it. `scale` must be a power of two.
    ///
    /// This is loss scaling (Micikevicius et al. 2018) per matrix product, so the resulting gradients are not
    /// scaled. Gradients that overflow in spite of it are not finite.
    pub const fn set_gradient_scale(&mut self, scale: f32) {
        self.gradient_scale = scale;
    }

    /// Sets how later forward passes save memory until their backward pass. It applies to whole sequences only,
    /// not to slices, because slices use each other's keys and values. For a forward pass that has ended, use
    /// [`Saved::drop_activations`] and [`Saved::offload`].
    pub fn set_activation_policy(&mut self, keeping: ActivationPolicy) {
        self.activation_policy = keeping;
    }

    /// Returns the layout of the parameters in flat buffers.
    #[must_use]
    pub const fn layout(&self) -> &ParamLayout {
        &self.layout
    }

    /// Creates a buffer of zeros in the stage's layout, for gradients or moments.
    pub fn zeros(&self) -> Result<Tensor, ZooError> {
        Ok(self.device.zeros(self.layout.len())?)
    }

    /// Creates a tensor `[B, T]` of token ids on the stage's device, with T = `len`.
    pub fn tokens(&self, ids: &[u32], len: usize) -> Result<Tensor, ZooError> {
        if len == 0 || ids.is_empty() || !ids.len().is_multiple_of(len) || len > self.spec.context {
            return Err(ZooError::Config {
                field: "sequence length",
                value: len,
                expected: "at least 1, at most the context, and a divisor of the number of tokens",
            });
        }
        Ok(self.device.tensor(ids, [ids.len() / len, len])?)
    }

    fn cx<'a>(&'a self, params: &'a Tensor, borders: &'a Borders) -> StageContext<'a> {
        StageContext {
            device: &self.device,
            layout: &self.layout,
            params,
            exchange: &*self.exchange,
            gradient_scale: self.gradient_scale,
            router: RouterPass::NONE,
            borders,
            sequence: None,
            context: None,
        }
    }

    fn enter(
        &self,
        cx: &StageContext<'_>,
        input: Input,
        start: usize,
    ) -> Result<(Tensor, Option<Tensor>), ZooError> {
        match (input, &self.layers.embedding) {
            (Input::Tokens(tokens), Some(embedding)) => {
                Ok((embedding.forward(cx, &tokens, start)?, Some(tokens)))
            }
            (Input::Hidden(x), None) => Ok((x, None)),
            (Input::Tokens(_), None) => Err(ZooError::StageInput { expected: "hidden states" }),
            (Input::Hidden(_), Some(_)) => Err(ZooError::StageInput { expected: "tokens" }),
        }
    }

    /// Runs the forward pass and saves what the backward pass needs. The last stage needs
    /// `targets`. If sequences hold several documents or prefixes, each stage is told where
    /// ([`Packed`]).
    pub fn forward(
        &self,
        params: &Tensor,
        input: impl Into<Packed>,
        targets: Option<Targets<'_>>,
    ) -> Result<(Output, Saved), ZooError> {
        self.forward_by(params, input.into(), targets, &self.activation_policy, None)
    }

    fn forward_by(
        &self,
        params: &Tensor,
        Packed { input, borders, sequence_weight }: Packed,
        targets: Option<Targets<'_>>,
        keeping: &ActivationPolicy,
        mut seen: Option<Seen<'_>>,
    ) -> Result<(Output, Saved), ZooError> {
        let borders = self.with_context(borders, &input, seen.is_some())?;
        let cx = self.cx_of(params, &borders, seen.is_some());
        let start = seen.as_ref().map_or(0, |seen| seen.past);
        let (mut x, tokens) = self.enter(&cx, input, start)?;
        let positions = start..start + self.positions_of(&cx, &x)?;
        let mut blocks = Vec::with_capacity(self.layers.blocks.len());
        let mut routed = RoutedPass { sequence_weight, ..RoutedPass::default() };
        for i in 0..self.layers.blocks.len() {
            let before = Seen::before(&mut seen, i);
            let (y, mut saved) = self.layers.blocks[i].forward(&cx, x, before, Keep::All)?;
            routed
                .layers
                .extend(saved.routed.take().map(|routed| Routed { block: self.first_block + i, ..routed }));
            blocks.push(keeping.store(i, saved));
            x = y;
        }
        let (output, head) = match (&self.layers.head, targets) {
            (Some(head), Some(targets)) => {
                let (losses, saved) = head.forward(&cx, x, targets)?;
                (Output::Losses(losses), Some(saved))
            }
            (None, None) => (Output::Hidden(x), None),
            (Some(_), None) => return Err(ZooError::StageInput { expected: "targets" }),
            (None, Some(_)) => return Err(ZooError::StageInput { expected: "no targets" }),
        };
        Ok((
            output,
            Saved {
                positions,
                tokens,
                borders,
                forgotten: 0,
                blocks,
                chain: Chain::after_forward(keeping),
                head,
                dx: None,
                routed,
            },
        ))
    }

    /// Runs the backward pass of one microbatch. `dy` is the gradient of the stage's output; `None` for the
    /// last stage. Returns the gradient of the stage's input; `None` for the first stage.
    ///
    /// `ready` is called with each of [`Stage::backward_ranges`] when its gradients are final for this
    /// microbatch, from the last parameters to the first. The caller can start to reduce them while
    /// the rest is computed.
    pub fn backward(
        &self,
        params: &Tensor,
        saved: Saved,
        dy: Option<Tensor>,
        grads: &mut Grads<'_>,
        mut ready: impl FnMut(Range<usize>, &mut Grads<'_>),
    ) -> Result<Option<Tensor>, ZooError> {
        self.check_whole(&saved)?;
        let mut routed = saved.routed;
        self.join_alone(&mut routed);
        let router = self.router_pass(&routed)?;
        let cx = StageContext { router, ..self.cx_of(params, &saved.borders, false) };
        let tied_head = self.has_tied_head();
        let mut dx = match (&self.layers.head, saved.head, dy) {
            (Some(head), Some(mut saved), None) => {
                let dx = head.backward_input(&cx, &mut saved)?;
                head.backward_weight(&cx, saved, grads)?;
                ready(self.span(head.params()), grads);
                dx
            }
            (None, None, Some(dy)) => dy,
            _ => return Err(ZooError::StageInput { expected: "a gradient on all stages but the last" }),
        };
        let (mut kept, mut chain) = (saved.blocks, saved.chain);
        for block in self.layers.blocks.iter().rev() {
            let mut saved = restore_last(&mut kept, &mut chain, |i, x| self.again(&cx, i, x))?;
            dx = block.backward_input(&cx, &mut saved, dx, Later::Nothing)?;
            block.backward_weight(&cx, &saved, grads)?;
            drop(saved);
            ready(self.span_of(block.params()), grads);
        }
        if let (Some(embedding), Some(tokens)) = (&self.layers.embedding, saved.tokens) {
            embedding.backward(&cx, &tokens, saved.positions.start, &dx, grads, tied_head)?;
            ready(self.span(embedding.params()), grads);
            return Ok(None);
        }
        if tied_head {
            ready(self.span((0, 1)), grads);
        }
        Ok(Some(dx))
    }

    /// Recomputes the values that [`Saved::drop_activations`] dropped. `input` must be the input of the forward
    /// pass. The values are bit-identical.
    pub fn recompute(&self, params: &Tensor, input: Input, saved: &mut Saved) -> Result<(), ZooError> {
        self.recompute_by(params, input, saved, None)
    }

    fn recompute_by(
        &self,
        params: &Tensor,
        input: Input,
        saved: &mut Saved,
        mut seen: Option<Seen<'_>>,
    ) -> Result<(), ZooError> {
        let cx = self.cx_of(params, &saved.borders, seen.is_some());
        let (mut x, _) = self.enter(&cx, input, saved.positions.start)?;
        let mut again = Vec::with_capacity(self.layers.blocks.len());
        for i in 0..std::mem::take(&mut saved.forgotten) {
            let (y, saved) = self.layers.blocks[i].forward(&cx, x, Seen::before(&mut seen, i), Keep::All)?;
            again.push(StoredActivations::OnDevice(saved));
            x = y;
        }
        saved.blocks.splice(0..0, again);
        Ok(())
    }

    /// Runs the first half of [`Stage::backward`] and returns the gradient of the stage's input, for which the
    /// previous stage waits. No weight gradient is written; `saved` keeps what [`Stage::backward_weight`]
    /// needs.
    pub fn backward_input(
        &self,
        params: &Tensor,
        saved: &mut Saved,
        dy: Option<Tensor>,
    ) -> Result<Option<Tensor>, ZooError> {
        self.backward_input_by(params, saved, dy, |_| Later::Nothing)
    }

    fn backward_input_by<'l>(
        &self,
        params: &Tensor,
        saved: &mut Saved,
        dy: Option<Tensor>,
        mut later: impl FnMut(usize) -> Later<'l>,
    ) -> Result<Option<Tensor>, ZooError> {
        self.check_whole(saved)?;
        self.join_alone(&mut saved.routed);
        let router = self.router_pass(&saved.routed)?;
        let cx = StageContext { router, ..self.cx_of(params, &saved.borders, false) };
        let mut dx = match (&self.layers.head, &mut saved.head, dy) {
            (Some(head), Some(saved), None) => head.backward_input(&cx, saved)?,
            (None, None, Some(dy)) => dy,
            _ => return Err(ZooError::StageInput { expected: "a gradient on all stages but the last" }),
        };
        let mut kept = std::mem::take(&mut saved.blocks);
        let mut whole = Vec::with_capacity(kept.len());
        for i in (0..kept.len()).rev() {
            let mut saved = restore_last(&mut kept, &mut saved.chain, |i, x| self.again(&cx, i, x))?;
            dx = self.layers.blocks[i].backward_input(&cx, &mut saved, dx, later(i))?;
            whole.push(StoredActivations::OnDevice(saved));
        }
        whole.reverse();
        saved.blocks = whole;
        if self.layers.embedding.is_none() {
            return Ok(Some(dx));
        }
        saved.dx = Some(dx);
        Ok(None)
    }

    /// Runs the second half of [`Stage::backward`]: computes the weight gradients, bit-identical to those of
    /// the undivided pass. It does not need the parameters. `ready` is called as in [`Stage::backward`].
    ///
    /// # Panics
    /// If [`Stage::backward_input`] was not called before.
    pub fn backward_weight(
        &self,
        saved: Saved,
        grads: &mut Grads<'_>,
        mut ready: impl FnMut(Range<usize>, &mut Grads<'_>),
    ) -> Result<(), ZooError> {
        // The weight halves do not read the parameters, so an empty tensor is passed in their place.
        let nothing = self.device.zeros(0)?;
        let cx = self.cx_of(&nothing, &saved.borders, false);
        let tied_head = self.has_tied_head();
        if let (Some(head), Some(saved)) = (&self.layers.head, saved.head) {
            head.backward_weight(&cx, saved, grads)?;
            ready(self.span(head.params()), grads);
        }
        for (i, kept) in saved.blocks.into_iter().enumerate().rev() {
            let saved = kept.restore(|x| self.again(&cx, i, x))?;
            let block = &self.layers.blocks[i];
            block.backward_weight(&cx, &saved, grads)?;
            ready(self.span_of(block.params()), grads);
        }
        if let (Some(embedding), Some(tokens)) = (&self.layers.embedding, saved.tokens) {
            let dx = saved.dx.expect("`backward_input` is called before `backward_weight`");
            embedding.backward(&cx, &tokens, saved.positions.start, &dx, grads, tied_head)?;
            ready(self.span(embedding.params()), grads);
        } else if tied_head {
            ready(self.span((0, 1)), grads);
        }
        Ok(())
    }

    fn check_whole(&self, saved: &Saved) -> Result<(), ZooError> {
        if saved.blocks.len() == self.layers.blocks.len() {
            return Ok(());
        }
        Err(ZooError::StageInput { expected: "saved values that were recomputed after they were dropped" })
    }

    /// Returns the ranges of the flat gradients in the order in which [`Stage::backward`] completes them.
    #[must_use]
    pub fn backward_ranges(&self) -> Vec<Range<usize>> {
        let Layers { embedding, blocks, head } = &self.layers;
        let mut ranges: Vec<Range<usize>> = head.iter().map(|head| self.span(head.params())).collect();
        ranges.extend(blocks.iter().rev().map(|block| self.span_of(block.params())));
        match embedding {
            Some(embedding) => ranges.push(self.span(embedding.params())),
            None if self.has_tied_head() => ranges.push(self.span((0, 1))),
            None => {}
        }
        ranges
    }

    /// Returns the range of the flat buffers that contains `count` parameters from `first` on, padding
    /// included.
    fn span(&self, (first, count): (usize, usize)) -> Range<usize> {
        self.span_of(first..first + count)
    }

    /// Like [`Stage::span`], of a range of parameters.
    fn span_of(&self, indices: Range<usize>) -> Range<usize> {
        let params = self.layout.params();
        let end = params.get(indices.end).map_or(self.layout.len(), |p| p.start);
        params[indices.start].start..end
    }

    fn has_tied_head(&self) -> bool {
        self.layers.head.as_ref().is_some_and(Head::is_tied)
    }

    /// Runs the forward pass of a block again.
    fn again(
        &self,
        cx: &StageContext<'_>,
        block: usize,
        x: Tensor,
    ) -> Result<(Tensor, Activations), ZooError> {
        self.layers.blocks[block].forward(cx, x, Before::Nothing, Keep::All)
    }

    /// Returns the losses `[B T]` per token, without saving anything for a backward pass. The stage must be a
    /// whole model.
    pub fn losses(
        &self,
        params: &Tensor,
        tokens: impl Into<Packed>,
        targets: &Tensor,
    ) -> Result<Tensor, ZooError> {
        self.check_head()?;
        self.evaluate(params, tokens.into(), None, |head, cx, x| head.losses(cx, x, targets))
    }

    /// Returns the logits `[B, T, V]`. The stage must be a whole model.
    pub fn logits(&self, params: &Tensor, tokens: impl Into<Packed>) -> Result<Tensor, ZooError> {
        self.check_head()?;
        self.evaluate(params, tokens.into(), None, Head::logits)
    }

    fn check_head(&self) -> Result<(), ZooError> {
        let whole = ZooError::StageInput { expected: "a stage with the whole model" };
        self.layers.head.as_ref().map(|_| ()).ok_or(whole)
    }

    /// Runs a forward pass that keeps nothing. Returns what `last` makes of the hidden states if the stage has
    /// the head, else the hidden states.
    fn evaluate(
        &self,
        params: &Tensor,
        Packed { input, borders, .. }: Packed,
        mut seen: Option<Seen<'_>>,
        last: impl FnOnce(&Head, &StageContext<'_>, &Tensor) -> Result<Tensor, ZooError>,
    ) -> Result<Tensor, ZooError> {
        let borders = self.with_context(borders, &input, seen.is_some())?;
        let cx = self.cx_of(params, &borders, seen.is_some());
        let start = seen.as_ref().map_or(0, |seen| seen.past);
        let (mut x, _) = self.enter(&cx, input, start)?;
        for (i, block) in self.layers.blocks.iter().enumerate() {
            x = block.forward(&cx, x, Seen::before(&mut seen, i), Keep::Nothing)?.0;
        }
        match &self.layers.head {
            Some(head) => last(head, &cx, &x),
            None => Ok(x),
        }
    }
}

/// The keys and values of the tokens before those of a pass, by block.
struct Seen<'a> {
    past: usize,
    layers: &'a mut [KeyValues],
}

impl Seen<'_> {
    /// Returns what a block has seen.
    fn before(this: &mut Option<Self>, block: usize) -> Before<'_> {
        match this {
            Some(seen) => Before::Cached { past: seen.past, seen: &mut seen.layers[block] },
            None => Before::Nothing,
        }
    }
}

/// Returns the sum of the losses, added in f64 and in order, so that it is equal on every machine.
pub fn total(losses: &Tensor) -> Result<f64, ZooError> {
    start_total(losses).wait()
}

/// Starts to compute [`total`] and returns without waiting for the device.
pub fn start_total(losses: &Tensor) -> Pending<Result<f64, ZooError>> {
    losses.start_to_vec::<f32>().map(|losses| Ok(losses?.iter().map(|&l| f64::from(l)).sum()))
}
