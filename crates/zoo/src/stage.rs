//! A stage: a range of a model's blocks with flat parameters and gradients. The whole model is the stage of all
//! blocks.

mod kept;
mod slices;

use std::ops::Range;
use std::path::Path;

use farflung_base::Pending;
use farflung_tensor::{DType, Device, ParamLayout, Shape, Tensor, TensorError};

use crate::block::{Cx, Embedding, Grads, Head, HeadSaved, KeyValues, Transformer, TransformerSaved, dims};
use crate::weights::{self, Weights, WriteOptions};
use crate::{GptConfig, TensorSpec, ZooError};

pub use kept::Keeping;
pub use slices::Slices;

use kept::{Chain, Kept, bring_last};

/// A range of a model's layers; the first stage has the embeddings, the last the head. A range between two
/// layers has no parameters and gives what it takes.
#[derive(Debug, Clone)]
pub struct Stage {
    config: GptConfig,
    device: Device,
    layout: ParamLayout,
    /// Place of each of this stage's tensors among those of the whole model, and how it starts.
    specs: Vec<(usize, TensorSpec)>,
    embedding: Option<Embedding>,
    blocks: Vec<Transformer>,
    head: Option<Head>,
    /// What gradients are multiplied with where products round them.
    gradient_scale: f32,
    keeping: Keeping,
}

/// What a stage takes: tokens `[B, T]` (u32) on the first, hidden states `[B, T, C]` on the others.
#[derive(Debug)]
pub enum Input {
    /// Token ids.
    Tokens(Tensor),
    /// Hidden states.
    Hidden(Tensor),
}

/// What a stage gives: hidden states for the next stage, or the losses `[B T]` of each token on the last.
#[derive(Debug)]
pub enum Output {
    /// Hidden states.
    Hidden(Tensor),
    /// Losses in nats.
    Losses(Tensor),
}

/// What a forward pass keeps for the backward pass.
#[derive(Debug)]
pub struct Saved {
    /// The positions that it is of.
    positions: Range<usize>,
    tokens: Option<Tensor>,
    /// Blocks whose part was let go of; those behind them follow in `blocks`.
    forgotten: usize,
    blocks: Vec<Kept>,
    /// How the backward pass comes to what was not kept, where steps say it.
    chain: Option<Chain>,
    head: Option<HeadSaved>,
    /// The gradient at the embedding's output, between the two halves of the backward pass.
    dx: Option<Tensor>,
}

impl Saved {
    /// Lets go of what the first `layers` blocks keep, or all of them if there are fewer, until
    /// [`Stage::recompute`].
    pub fn forget(&mut self, layers: usize) {
        let layers = layers.min(self.blocks.len());
        self.blocks.drain(..layers);
        self.forgotten += layers;
    }

    /// Moves what `layers` blocks keep to the host's memory, behind those that were let go of: see
    /// [`Keeping::offload`].
    pub fn offload(&mut self, layers: usize) {
        let keeping = Keeping { offload: layers, ..Keeping::default() };
        let kept = std::mem::take(&mut self.blocks).into_iter().enumerate();
        self.blocks = kept.map(|(i, kept)| kept.again(|saved| keeping.keep(i, saved))).collect();
    }
}

impl Stage {
    /// All of a model.
    pub fn whole(config: GptConfig, device: &Device) -> Result<Self, ZooError> {
        Self::new(config, 0..config.layers, device)
    }

    /// The given layers of a model.
    ///
    /// Errors: [`ZooError::Config`] for a bad config, or a range that is not within its layers; it may be empty
    /// between two of them.
    pub fn new(config: GptConfig, layers: Range<usize>, device: &Device) -> Result<Self, ZooError> {
        config.validate()?;
        let between = layers.start == layers.end && layers.start > 0 && layers.end < config.layers;
        if (layers.is_empty() && !between) || layers.end > config.layers {
            return Err(ZooError::Config {
                field: "layers",
                value: layers.end,
                expected: "a range within the model's layers, at least one long at either end",
            });
        }
        let (first, last) = (layers.start == 0, layers.end == config.layers);
        let per_block = Transformer::PARAMS;
        let wanted = |i: usize| match i {
            0 => first || last,
            1 => first,
            i if i >= 2 + per_block * config.layers => last,
            i => layers.contains(&((i - 2) / per_block)),
        };
        let specs: Vec<_> = config.tensors().into_iter().enumerate().filter(|(i, _)| wanted(*i)).collect();
        let named = |(_, s): &(usize, TensorSpec)| Ok((s.name.clone(), Shape::new(&s.shape)?));
        let layout = ParamLayout::new(specs.iter().map(named).collect::<farflung_tensor::Result<Vec<_>>>()?);
        let place = |name: &str| layout.find(name);
        let embedding = first.then_some(Embedding { first: 0, dim: config.dim });
        let blocks = layers
            .map(|l| Ok(Transformer { first: place(&format!("h.{l}.ln_1.weight"))?, heads: config.heads }))
            .collect::<farflung_tensor::Result<_>>()?;
        let head = if last {
            Some(Head { norm: place("ln_f.weight")?, table: 0, vocab: config.vocab })
        } else {
            None
        };
        let device = device.clone();
        let keeping = Keeping::default();
        Ok(Self { config, device, layout, specs, embedding, blocks, head, gradient_scale: 1.0, keeping })
    }

    /// The model's config.
    #[must_use]
    pub const fn config(&self) -> &GptConfig {
        &self.config
    }

    /// Where it runs.
    #[must_use]
    pub const fn device(&self) -> &Device {
        &self.device
    }

    /// Whether it takes tokens rather than hidden states.
    #[must_use]
    pub const fn takes_tokens(&self) -> bool {
        self.embedding.is_some()
    }

    /// Whether it gives losses rather than hidden states.
    #[must_use]
    pub const fn gives_losses(&self) -> bool {
        self.head.is_some()
    }

    /// Multiplies gradients with a power of two where products of the backward pass round them to the device's
    /// precision, and divides the products by it: loss scaling (Micikevicius et al. 2018) around each product,
    /// so that all gradients that leave it are those of the loss itself. What overflows nevertheless leaves
    /// gradients that are not finite.
    pub const fn set_gradient_scale(&mut self, scale: f32) {
        self.gradient_scale = scale;
    }

    /// Says how it holds less between forward and backward passes, beginning during the forward pass; of whole
    /// sequences, since slices see each other. Of a pass that is over, [`Saved::forget`] and [`Saved::offload`]
    /// let go.
    pub fn set_keeping(&mut self, keeping: Keeping) {
        self.keeping = keeping;
    }

    /// Where each parameter lies in the flat buffers.
    #[must_use]
    pub const fn layout(&self) -> &ParamLayout {
        &self.layout
    }

    /// New parameters, a pure function of the seed: the same values in each stage as in the whole model.
    pub fn init(&self, seed: u64) -> Result<Tensor, ZooError> {
        let mut values = vec![0.0; self.layout.len()];
        for (p, (index, spec)) in self.layout.params().iter().zip(&self.specs) {
            spec.fill(seed, *index, &mut values[p.range()]);
        }
        Ok(self.device.tensor(&values, self.layout.len())?)
    }

    /// Parameters from opened weights, each by its name.
    ///
    /// Errors: as [`Weights::tensor`].
    pub fn load(&self, weights: &mut Weights) -> Result<Tensor, ZooError> {
        let mut values = vec![0.0; self.layout.len()];
        for p in self.layout.params() {
            weights.tensor(&p.name, &mut values[p.range()])?;
        }
        Ok(self.device.tensor(&values, self.layout.len())?)
    }

    /// Writes all of a model to a folder in Hugging Face's layout, as [`weights::write`] does, so that
    /// [`Stage::load`] gives `params` back: to the bit from F32, the default type.
    ///
    /// Errors: [`ZooError::Config`] if the stage is a part of a model; [`ZooError::Tensor`] unless `params` is
    /// a flat buffer of the stage's layout; [`ZooError::Io`]. Nothing is written where one of the first two is
    /// returned.
    ///
    /// ```
    /// use farflung_tensor::Device;
    /// use farflung_zoo::{GptConfig, Stage, weights::{Weights, WriteOptions}};
    ///
    /// let folder = tempfile::tempdir()?;
    /// let model = Stage::whole(GptConfig::new(2, 2, 16, 8, 11)?, &Device::cpu(1)?)?;
    /// let params = model.init(1337)?;
    /// model.store(&params, folder.path(), WriteOptions::default())?;
    /// let loaded = model.load(&mut Weights::open(folder.path())?)?;
    /// assert_eq!(loaded.to_vec::<f32>()?, params.to_vec::<f32>()?);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn store(&self, params: &Tensor, folder: &Path, options: WriteOptions) -> Result<(), ZooError> {
        if !(self.takes_tokens() && self.gives_losses()) {
            return Err(ZooError::Config {
                field: "layers",
                value: self.blocks.len(),
                expected: "all of the model's, since a folder of weights holds a whole model",
            });
        }
        let (lhs, rhs) = (params.shape(), Shape::from(self.layout.len()));
        if lhs.len() != rhs.len() {
            return Err(TensorError::ShapeMismatch { op: "store", lhs, rhs }.into());
        }
        let values = params.to_vec::<f32>()?;
        weights::write(folder, &self.config, options, |index, _, out| {
            out.copy_from_slice(&values[self.layout.params()[index].range()]);
            Ok(())
        })
    }

    /// A zeroed buffer of the stage's layout: for gradients or moments.
    pub fn zeros(&self) -> Result<Tensor, ZooError> {
        Ok(self.device.zeros(self.layout.len())?)
    }

    /// Token ids as a tensor `[B, T]` on the stage's device.
    pub fn tokens(&self, ids: &[u32], len: usize) -> Result<Tensor, ZooError> {
        if len == 0 || ids.is_empty() || !ids.len().is_multiple_of(len) || len > self.config.context {
            return Err(ZooError::Config {
                field: "sequence length",
                value: len,
                expected: "at least 1, at most the context, and a divisor of the number of tokens",
            });
        }
        Ok(self.device.tensor(ids, [ids.len() / len, len])?)
    }

    fn cx<'a>(&'a self, params: &'a Tensor) -> Cx<'a> {
        Cx { device: &self.device, layout: &self.layout, params, gradient_scale: self.gradient_scale }
    }

    fn enter(&self, cx: &Cx<'_>, input: Input, start: usize) -> Result<(Tensor, Option<Tensor>), ZooError> {
        match (input, &self.embedding) {
            (Input::Tokens(tokens), Some(embedding)) => {
                Ok((embedding.forward(cx, &tokens, start)?, Some(tokens)))
            }
            (Input::Hidden(x), None) => Ok((x, None)),
            (Input::Tokens(_), None) => Err(ZooError::StageInput { expected: "hidden states" }),
            (Input::Hidden(_), Some(_)) => Err(ZooError::StageInput { expected: "tokens" }),
        }
    }

    /// Runs the blocks and keeps what the backward pass needs. The last stage takes the targets `[B, T]` (u32)
    /// and the scale of the loss's gradient: one over the tokens of the whole step.
    pub fn forward(
        &self,
        params: &Tensor,
        input: Input,
        targets: Option<(&Tensor, f32)>,
    ) -> Result<(Output, Saved), ZooError> {
        self.forward_by(params, input, 0, targets, &self.keeping, |cx, i, x| {
            Ok(self.blocks[i].forward(cx, x)?)
        })
    }

    fn forward_by(
        &self,
        params: &Tensor,
        input: Input,
        start: usize,
        targets: Option<(&Tensor, f32)>,
        keeping: &Keeping,
        mut block: impl FnMut(&Cx<'_>, usize, Tensor) -> Result<(Tensor, TransformerSaved), ZooError>,
    ) -> Result<(Output, Saved), ZooError> {
        let cx = self.cx(params);
        let (mut x, tokens) = self.enter(&cx, input, start)?;
        let positions = start..start + dims(&x)?[1];
        let mut blocks = Vec::with_capacity(self.blocks.len());
        for i in 0..self.blocks.len() {
            let (y, saved) = block(&cx, i, x)?;
            blocks.push(keeping.keep(i, saved));
            x = y;
        }
        let (output, head) = match (&self.head, targets) {
            (Some(head), Some((targets, scale))) => {
                let (losses, saved) = head.forward(&cx, x, targets, scale)?;
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
                forgotten: 0,
                blocks,
                chain: Chain::after_forward(keeping),
                head,
                dx: None,
            },
        ))
    }

    /// The backward pass of one microbatch. `dy` is the gradient of the hidden states that this stage gave; the
    /// last stage takes none. Returns the gradient of the hidden states that it took; the first stage gives
    /// none.
    ///
    /// `ready` is called with each range of the flat gradients as soon as it is final for this microbatch, from
    /// the last parameters to the first: where a reduction can start while the rest is being computed.
    pub fn backward(
        &self,
        params: &Tensor,
        saved: Saved,
        dy: Option<Tensor>,
        grads: &mut Grads<'_>,
        mut ready: impl FnMut(Range<usize>, &Tensor),
    ) -> Result<Option<Tensor>, ZooError> {
        self.check_whole(&saved)?;
        let cx = self.cx(params);
        let has_head = saved.head.is_some();
        let mut dx = match (&self.head, saved.head, dy) {
            (Some(head), Some(mut saved), None) => {
                let dx = head.backward_input(&cx, &mut saved)?;
                head.backward_weight(&cx, saved, grads)?;
                ready(self.span(head.norm, 2), grads.flat);
                dx
            }
            (None, None, Some(dy)) => dy,
            _ => return Err(ZooError::StageInput { expected: "a gradient on all stages but the last" }),
        };
        let (mut kept, mut chain) = (saved.blocks, saved.chain);
        for block in self.blocks.iter().rev() {
            let mut saved = bring_last(&mut kept, &mut chain, |i, x| self.blocks[i].forward(&cx, x))?;
            dx = block.backward_input(&cx, &mut saved, dx)?;
            block.backward_weight(&cx, saved, grads)?;
            ready(self.span(block.first, Transformer::PARAMS), grads.flat);
        }
        if let (Some(embedding), Some(tokens)) = (&self.embedding, saved.tokens) {
            embedding.backward(&cx, &tokens, saved.positions.start, &dx, grads, has_head)?;
            ready(self.span(0, 2), grads.flat);
            return Ok(None);
        }
        if has_head {
            ready(self.span(0, 1), grads.flat);
        }
        Ok(Some(dx))
    }

    /// Runs the blocks again whose part of `saved` was let go of, on the input of the forward pass: the same
    /// bits are back.
    pub fn recompute(&self, params: &Tensor, input: Input, saved: &mut Saved) -> Result<(), ZooError> {
        self.recompute_by(params, input, saved, |cx, i, x| Ok(self.blocks[i].forward(cx, x)?))
    }

    fn recompute_by(
        &self,
        params: &Tensor,
        input: Input,
        saved: &mut Saved,
        mut block: impl FnMut(&Cx<'_>, usize, Tensor) -> Result<(Tensor, TransformerSaved), ZooError>,
    ) -> Result<(), ZooError> {
        let cx = self.cx(params);
        let (mut x, _) = self.enter(&cx, input, saved.positions.start)?;
        let mut again = Vec::with_capacity(self.blocks.len());
        for i in 0..std::mem::take(&mut saved.forgotten) {
            let (y, saved) = block(&cx, i, x)?;
            again.push(Kept::Here(saved));
            x = y;
        }
        saved.blocks.splice(0..0, again);
        Ok(())
    }

    /// The first half of [`Stage::backward`]: the gradient that the stage before waits for. What the weights
    /// need stays in `saved`; no gradient is written.
    pub fn backward_input(
        &self,
        params: &Tensor,
        saved: &mut Saved,
        dy: Option<Tensor>,
    ) -> Result<Option<Tensor>, ZooError> {
        self.backward_input_by(params, saved, dy, |cx, i, saved, dy| {
            Ok(self.blocks[i].backward_input(cx, saved, dy)?)
        })
    }

    fn backward_input_by(
        &self,
        params: &Tensor,
        saved: &mut Saved,
        dy: Option<Tensor>,
        mut block: impl FnMut(&Cx<'_>, usize, &mut TransformerSaved, Tensor) -> Result<Tensor, ZooError>,
    ) -> Result<Option<Tensor>, ZooError> {
        self.check_whole(saved)?;
        let cx = self.cx(params);
        let mut dx = match (&self.head, &mut saved.head, dy) {
            (Some(head), Some(saved), None) => head.backward_input(&cx, saved)?,
            (None, None, Some(dy)) => dy,
            _ => return Err(ZooError::StageInput { expected: "a gradient on all stages but the last" }),
        };
        let mut kept = std::mem::take(&mut saved.blocks);
        let mut whole = Vec::with_capacity(kept.len());
        for i in (0..kept.len()).rev() {
            let mut saved = bring_last(&mut kept, &mut saved.chain, |i, x| self.blocks[i].forward(&cx, x))?;
            dx = block(&cx, i, &mut saved, dx)?;
            whole.push(Kept::Here(saved));
        }
        whole.reverse();
        saved.blocks = whole;
        if self.embedding.is_none() {
            return Ok(Some(dx));
        }
        saved.dx = Some(dx);
        Ok(None)
    }

    /// The second half of [`Stage::backward`]: the gradients of the weights, the same bits as at once. It needs
    /// no parameters.
    ///
    /// # Panics
    /// If [`Stage::backward_input`] did not run before.
    pub fn backward_weight(&self, saved: Saved, grads: &mut Grads<'_>) -> Result<(), ZooError> {
        // The halves for the weights look at shapes alone, which the gradients share.
        let nothing = self.device.zeros(0)?;
        let cx = self.cx(&nothing);
        let has_head = saved.head.is_some();
        if let (Some(head), Some(saved)) = (&self.head, saved.head) {
            head.backward_weight(&cx, saved, grads)?;
        }
        for (block, kept) in self.blocks.iter().zip(saved.blocks).rev() {
            let saved = kept.bring(|x| block.forward(&cx, x))?;
            block.backward_weight(&cx, saved, grads)?;
        }
        if let (Some(embedding), Some(tokens)) = (&self.embedding, saved.tokens) {
            let dx = saved.dx.expect("backward_input runs before backward_weight");
            embedding.backward(&cx, &tokens, saved.positions.start, &dx, grads, has_head)?;
        }
        Ok(())
    }

    fn check_whole(&self, saved: &Saved) -> Result<(), ZooError> {
        if saved.blocks.len() == self.blocks.len() {
            return Ok(());
        }
        Err(ZooError::StageInput { expected: "what was let go of, computed again" })
    }

    /// The ranges of the flat gradients as [`Stage::backward`] makes them final, in order.
    #[must_use]
    pub fn backward_ranges(&self) -> Vec<Range<usize>> {
        let mut ranges: Vec<Range<usize>> = self.head.iter().map(|head| self.span(head.norm, 2)).collect();
        ranges.extend(self.blocks.iter().rev().map(|block| self.span(block.first, Transformer::PARAMS)));
        match (&self.embedding, &self.head) {
            (Some(_), _) => ranges.push(self.span(0, 2)),
            (None, Some(_)) => ranges.push(self.span(0, 1)),
            (None, None) => {}
        }
        ranges
    }

    /// Elements of the flat buffers that `count` parameters from `first` on take, padding included.
    fn span(&self, first: usize, count: usize) -> Range<usize> {
        let params = self.layout.params();
        let end = params.get(first + count).map_or(self.layout.len(), |p| p.start);
        params[first].start..end
    }

    /// Losses `[B T]` of each token without anything kept for a backward pass. For a stage that is the whole
    /// model.
    pub fn losses(&self, params: &Tensor, tokens: Tensor, targets: &Tensor) -> Result<Tensor, ZooError> {
        let cx = self.cx(params);
        let (mut x, _) = self.enter(&cx, Input::Tokens(tokens), 0)?;
        for block in &self.blocks {
            x = block.forward(&cx, x)?.0;
        }
        let head = self.head.as_ref().ok_or(ZooError::StageInput { expected: "the whole model" })?;
        Ok(head.losses(&cx, &x, targets)?)
    }

    /// Logits `[B, T, V]`. For a stage that is the whole model.
    pub fn logits(&self, params: &Tensor, tokens: Tensor) -> Result<Tensor, ZooError> {
        let cx = self.cx(params);
        let (mut x, _) = self.enter(&cx, Input::Tokens(tokens), 0)?;
        for block in &self.blocks {
            x = block.forward(&cx, x)?.0;
        }
        let head = self.head.as_ref().ok_or(ZooError::StageInput { expected: "the whole model" })?;
        Ok(head.logits(&cx, &x)?)
    }

    /// An empty cache of keys and values for `batch` sequences of up to the model's context.
    pub fn cache(&self, batch: usize) -> Result<Cache, ZooError> {
        let shape = [batch, self.config.context, self.config.dim];
        self.cache_of(|| Ok(self.device.empty(DType::F32, shape)?))
    }

    fn cache_of(&self, tensor: impl Fn() -> Result<Tensor, ZooError>) -> Result<Cache, ZooError> {
        let layer = |_| Ok(KeyValues { keys: tensor()?, values: tensor()? });
        Ok(Cache { layers: self.blocks.iter().map(layer).collect::<Result<_, ZooError>>()?, len: 0 })
    }

    /// Appends new tokens `[B, T]` to the cache and gives the logits `[B, T, V]` of their successors. For a
    /// stage that is the whole model.
    pub fn decode(&self, params: &Tensor, cache: &mut Cache, tokens: Tensor) -> Result<Tensor, ZooError> {
        let cx = self.cx(params);
        let new = tokens.shape().cols();
        if cache.len + new > self.config.context {
            return Err(ZooError::Config {
                field: "sequence length",
                value: cache.len + new,
                expected: "at most the context",
            });
        }
        let (mut x, _) = self.enter(&cx, Input::Tokens(tokens), cache.len)?;
        for (block, seen) in self.blocks.iter().zip(&mut cache.layers) {
            x = block.decode(&cx, &x, cache.len, seen)?;
        }
        cache.len += new;
        let head = self.head.as_ref().ok_or(ZooError::StageInput { expected: "the whole model" })?;
        Ok(head.logits(&cx, &x)?)
    }
}

/// Keys and values of the tokens seen so far.
#[derive(Debug)]
pub struct Cache {
    layers: Vec<KeyValues>,
    len: usize,
}

impl Cache {
    /// Tokens in it.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether it holds none.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Forgets all tokens.
    pub const fn clear(&mut self) {
        self.len = 0;
    }
}

/// Sum of losses in f64, in order: the same on every machine.
pub fn total(losses: &Tensor) -> Result<f64, ZooError> {
    start_total(losses).wait()
}

/// Starts to fetch the losses for [`total`], so that the device goes on meanwhile.
pub fn start_total(losses: &Tensor) -> Pending<Result<f64, ZooError>> {
    losses.start_to_vec::<f32>().map(|losses| Ok(losses?.iter().map(|&l| f64::from(l)).sum()))
}
