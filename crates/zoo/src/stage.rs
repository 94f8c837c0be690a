//! A stage: a range of a model's blocks, with flat parameters and gradients. The stage of all blocks is the
//! whole model.

mod activation_policy;
mod cache;
mod context;
mod evaluation;
mod made;
mod packed;
mod parameters;
mod routed;
mod sequences;
mod slices;
mod units;

use std::ops::Range;
use std::sync::Arc;

use farflung_base::Pending;
use farflung_tensor::{Device, ParamLayout, Tensor};

use crate::ZooError;
use crate::cut::AxisShare;
use crate::exchange::Exchange;
use crate::layer::{
    Activations, Before, Borders, Grads, HeadSaved, Keep, KeyValues, Later, LayerParams, Layers, Params,
    Routed, RouterPass, SequencePieces, StageContext, Targets,
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

    fn cx<'a>(&'a self, borders: &'a Borders) -> StageContext<'a> {
        StageContext {
            device: &self.device,
            layout: &self.layout,
            params: LayerParams::Units(&[]),
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
        params: Params<'_>,
        cx: &StageContext<'_>,
        input: Input,
        start: usize,
    ) -> Result<(Tensor, Option<Tensor>), ZooError> {
        match (input, &self.layers.embedding) {
            (Input::Tokens(tokens), Some(embedding)) => {
                let held = params.of_layer(|| self.units_of_embedding(embedding))?;
                Ok((embedding.forward(&cx.with(&held), &tokens, start)?, Some(tokens)))
            }
            (Input::Hidden(x), None) => Ok((x, None)),
            (Input::Tokens(_), None) => Err(ZooError::StageInput { expected: "hidden states" }),
            (Input::Hidden(_), Some(_)) => Err(ZooError::StageInput { expected: "tokens" }),
        }
    }

    /// Runs the forward pass and saves what the backward pass needs. The last stage needs
    /// `targets`. If sequences hold several documents or prefixes, each stage is told where
    /// ([`Packed`]).
    pub fn forward<'a>(
        &self,
        params: impl Into<Params<'a>>,
        input: impl Into<Packed>,
        targets: Option<Targets<'_>>,
    ) -> Result<(Output, Saved), ZooError> {
        self.forward_by(params.into(), input.into(), targets, &self.activation_policy, None)
    }

    fn forward_by(
        &self,
        params: Params<'_>,
        Packed { input, borders, sequence_weight }: Packed,
        targets: Option<Targets<'_>>,
        keeping: &ActivationPolicy,
        mut seen: Option<Seen<'_>>,
    ) -> Result<(Output, Saved), ZooError> {
        let borders = self.with_context(borders, &input, seen.is_some())?;
        let cx = self.cx_of(&borders, seen.is_some());
        let start = seen.as_ref().map_or(0, |seen| seen.past);
        params.begin(|| self.forward_units());
        let (mut x, tokens) = self.enter(params, &cx, input, start)?;
        let positions = start..start + self.positions_of(&cx, &x)?;
        let mut blocks = Vec::with_capacity(self.layers.blocks.len());
        let mut routed = RoutedPass { sequence_weight, ..RoutedPass::default() };
        for i in 0..self.layers.blocks.len() {
            let before = Seen::before(&mut seen, i);
            let held = params.of_layer(|| self.units_of_block(i))?;
            let (y, mut saved) = self.layers.blocks[i].forward(&cx.with(&held), x, before, Keep::All)?;
            routed
                .layers
                .extend(saved.routed.take().map(|routed| Routed { block: self.first_block + i, ..routed }));
            blocks.push(keeping.store(i, saved));
            x = y;
        }
        let (output, head) = match (&self.layers.head, targets) {
            (Some(head), Some(targets)) => {
                let held = params.of_layer(|| self.units_of_head(head))?;
                let (losses, saved) = head.forward(&cx.with(&held), x, targets)?;
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
    pub fn backward<'a>(
        &self,
        params: impl Into<Params<'a>>,
        saved: Saved,
        dy: Option<Tensor>,
        grads: &mut Grads<'_>,
        mut ready: impl FnMut(Range<usize>, &mut Grads<'_>),
    ) -> Result<Option<Tensor>, ZooError> {
        self.check_whole(&saved)?;
        let params = params.into();
        params.begin(|| self.backward_units());
        let mut routed = saved.routed;
        self.join_alone(&mut routed);
        let router = self.router_pass(&routed)?;
        let cx = StageContext { router, ..self.cx_of(&saved.borders, false) };
        let tied_head = self.has_tied_head();
        let mut dx = match (&self.layers.head, saved.head, dy) {
            (Some(head), Some(mut saved), None) => {
                let held = params.of_layer(|| self.units_of_head(head))?;
                let dx = head.backward_input(&cx.with(&held), &mut saved)?;
                drop(held);
                head.backward_weight(&cx, saved, grads)?;
                ready(self.span(head.params()), grads);
                dx
            }
            (None, None, Some(dy)) => dy,
            _ => return Err(ZooError::StageInput { expected: "a gradient on all stages but the last" }),
        };
        let (mut kept, mut chain) = (saved.blocks, saved.chain);
        for (i, block) in self.layers.blocks.iter().enumerate().rev() {
            let mut saved = restore_last(&mut kept, &mut chain, |i, x| self.again(params, &cx, i, x))?;
            let held = params.of_layer(|| self.units_of_block(i))?;
            dx = block.backward_input(&cx.with(&held), &mut saved, dx, Later::Nothing)?;
            drop(held);
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
    pub fn recompute<'a>(
        &self,
        params: impl Into<Params<'a>>,
        input: Input,
        saved: &mut Saved,
    ) -> Result<(), ZooError> {
        self.recompute_by(params.into(), input, saved, None)
    }

    fn recompute_by(
        &self,
        params: Params<'_>,
        input: Input,
        saved: &mut Saved,
        mut seen: Option<Seen<'_>>,
    ) -> Result<(), ZooError> {
        let cx = self.cx_of(&saved.borders, seen.is_some());
        params.begin(|| self.recompute_units(saved.forgotten));
        let (mut x, _) = self.enter(params, &cx, input, saved.positions.start)?;
        let mut again = Vec::with_capacity(self.layers.blocks.len());
        for i in 0..std::mem::take(&mut saved.forgotten) {
            let held = params.of_layer(|| self.units_of_block(i))?;
            let before = Seen::before(&mut seen, i);
            let (y, saved) = self.layers.blocks[i].forward(&cx.with(&held), x, before, Keep::All)?;
            again.push(StoredActivations::OnDevice(saved));
            x = y;
        }
        saved.blocks.splice(0..0, again);
        Ok(())
    }

    /// Runs the first half of [`Stage::backward`] and returns the gradient of the stage's input, for which the
    /// previous stage waits. No weight gradient is written; `saved` keeps what [`Stage::backward_weight`]
    /// needs.
    pub fn backward_input<'a>(
        &self,
        params: impl Into<Params<'a>>,
        saved: &mut Saved,
        dy: Option<Tensor>,
    ) -> Result<Option<Tensor>, ZooError> {
        self.backward_input_by(params.into(), saved, dy, |_| Later::Nothing)
    }

    fn backward_input_by<'l>(
        &self,
        params: Params<'_>,
        saved: &mut Saved,
        dy: Option<Tensor>,
        mut later: impl FnMut(usize) -> Later<'l>,
    ) -> Result<Option<Tensor>, ZooError> {
        self.check_whole(saved)?;
        params.begin(|| self.backward_units());
        self.join_alone(&mut saved.routed);
        let router = self.router_pass(&saved.routed)?;
        let cx = StageContext { router, ..self.cx_of(&saved.borders, false) };
        let mut dx = match (&self.layers.head, &mut saved.head, dy) {
            (Some(head), Some(saved), None) => {
                let held = params.of_layer(|| self.units_of_head(head))?;
                head.backward_input(&cx.with(&held), saved)?
            }
            (None, None, Some(dy)) => dy,
            _ => return Err(ZooError::StageInput { expected: "a gradient on all stages but the last" }),
        };
        let mut kept = std::mem::take(&mut saved.blocks);
        let mut whole = Vec::with_capacity(kept.len());
        for i in (0..kept.len()).rev() {
            let mut saved = restore_last(&mut kept, &mut saved.chain, |i, x| self.again(params, &cx, i, x))?;
            let held = params.of_layer(|| self.units_of_block(i))?;
            dx = self.layers.blocks[i].backward_input(&cx.with(&held), &mut saved, dx, later(i))?;
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
        // The weight halves do not read the parameters: an empty tensor takes their place.
        let nothing = self.device.zeros(0)?;
        let cx = self.cx_of(&saved.borders, false);
        let tied_head = self.has_tied_head();
        if let (Some(head), Some(saved)) = (&self.layers.head, saved.head) {
            head.backward_weight(&cx, saved, grads)?;
            ready(self.span(head.params()), grads);
        }
        for (i, kept) in saved.blocks.into_iter().enumerate().rev() {
            let saved = kept.restore(|x| self.again((&nothing).into(), &cx, i, x))?;
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

    /// Runs the forward pass of a block again.
    fn again(
        &self,
        params: Params<'_>,
        cx: &StageContext<'_>,
        block: usize,
        x: Tensor,
    ) -> Result<(Tensor, Activations), ZooError> {
        let held = params.of_layer(|| self.units_of_block(block))?;
        self.layers.blocks[block].forward(&cx.with(&held), x, Before::Nothing, Keep::All)
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
