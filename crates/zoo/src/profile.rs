//! What a layer costs, found by running it on the device that only counts ([`Device::sizes`]): parameters,
//! operations, and bytes. Nothing here is a formula of a model's shape.

use std::sync::Arc;

use farflung_base::{Axis, ContextCut};
use farflung_tensor::{Device, ParamLayout, Tensor, Work};

use crate::exchange::{AxisBytes, Counted};
use crate::layer::{
    Activations, Before, Borders, Builder, ContextBorders, ContextPieces, Grads, Keep, Later, LayerKind,
    Result, RouterPass, SequencePieces, StageContext, Targets,
};
use crate::spec::{BlockSpec, HeadSpec, ModelSpec};
use crate::{AxisShare, TensorKind};

/// What one layer costs for one sequence of the model's context. All but the parameters grows with the number
/// of sequences.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LayerProfile {
    /// Number of parameters. A tied head has those of its norm.
    pub parameters: u64,
    /// How many of them are experts.
    pub experts: u64,
    /// Values that the parameters take in a flat buffer, padding included.
    pub padded_parameters: u64,
    /// The forward pass.
    pub forward: Work,
    /// The gradient of the input.
    pub input: Work,
    /// The gradient of the weights.
    pub weight: Work,
    /// Bytes that are kept from the forward pass to the backward pass, the layer's input included, without
    /// logits.
    pub saved: u64,
    /// Bytes of logits that are kept.
    pub logits: u64,
    /// Bytes that the gradient of the input adds to those that are kept, for the gradient of the weights.
    pub between: u64,
    /// Most bytes that the forward pass uses besides its input, what it keeps and its output.
    pub forward_temporary: u64,
    /// Most bytes that the backward pass uses besides what was kept: with the gradients of output and input.
    pub backward_temporary: u64,
    /// Bytes that a rank sends to the others in the forward pass.
    pub sent_forward: AxisBytes,
    /// Bytes that a rank sends to the others in the backward pass.
    pub sent_backward: AxisBytes,
}

/// How ranks divide the positions of sequences.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DividedSequences {
    /// They do not.
    #[default]
    No,
    /// Those that divide the width of layers do, where each has whole layers
    /// ([`Stage::divide_sequences`](crate::Stage::divide_sequences)).
    ByWidth,
    /// In all layers: what a rank has ([`Stage::divide_context`](crate::Stage::divide_context)).
    ByContext(ContextCut, u32),
}

/// What the layers of a model cost.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelProfile {
    /// Number of tokens of the sequence.
    pub context: usize,
    /// Bytes of the hidden states of a sequence.
    pub hidden: u64,
    /// The embedding.
    pub embedding: LayerProfile,
    /// Each run of blocks: their number, and one of them.
    pub blocks: Vec<(usize, LayerProfile)>,
    /// The head.
    pub head: LayerProfile,
    /// Number of values of the token table.
    pub table: u64,
    /// Whether the head uses the token table.
    pub tied: bool,
}

impl ModelProfile {
    /// Runs each layer of a model once on the counting device.
    ///
    /// Errors: those of [`ModelSpec::validate`].
    pub fn of(spec: &ModelSpec) -> Result<Self> {
        Self::of_share(spec, &AxisShare::whole())
    }

    /// Runs one rank's piece of each layer, among the ranks that divide the width of layers.
    ///
    /// Errors: as [`ModelProfile::of`]; [`ZooError::Config`](crate::ZooError::Config) if a rank has no piece
    /// of a layer.
    pub fn of_share(spec: &ModelSpec, share: &AxisShare) -> Result<Self> {
        Self::of_shares(spec, [share, &AxisShare::whole()])
    }

    /// Runs one rank's part of each layer, among the ranks that divide the width of layers, and among those
    /// that divide the experts, with even routing.
    ///
    /// Errors: as [`ModelProfile::of_share`]; [`ZooError::Config`](crate::ZooError::Config) if a rank has no
    /// expert.
    pub fn of_shares(spec: &ModelSpec, shares: [&AxisShare; 2]) -> Result<Self> {
        Self::of_pieces(spec, shares, DividedSequences::No)
    }

    /// As [`ModelProfile::of_shares`], with sequences whose positions ranks divide.
    ///
    /// Errors: as [`ModelProfile::of_shares`]; those of [`ContextPieces::new`].
    pub fn of_pieces(
        spec: &ModelSpec,
        [share, experts]: [&AxisShare; 2],
        sequences: DividedSequences,
    ) -> Result<Self> {
        spec.validate()?;
        spec.check_cut(share)?;
        spec.check_experts(experts)?;
        let pieces =
            (sequences == DividedSequences::ByWidth).then(|| SequencePieces::of(share, spec.context));
        let (along, windows);
        let context = match sequences {
            DividedSequences::ByContext(cut, rank) if cut.divides() => {
                spec.check_context_pattern()?;
                along = AxisShare::along_context(cut, rank)?;
                Some((ContextPieces::new(cut, rank, spec.context)?, along.each_ref()))
            }
            _ => None,
        };
        windows = spec.windows();
        let windows = &windows[..];
        let tokens = context.as_ref().map_or(spec.context, |(pieces, _)| pieces.len());
        let (positions, sequence) = (pieces.as_ref().map_or(tokens, SequencePieces::len), pieces.as_ref());
        let of = Pieces { shares: [share, experts], sequence, context, windows, tokens, positions };
        let blocks = spec.blocks.iter().map(|run| Ok((run.count, block(spec, &run.block, of)?)));
        Ok(Self {
            context: spec.context,
            hidden: (positions * spec.dim * size_of::<f32>()) as u64,
            embedding: embedding(spec, of)?,
            blocks: blocks.collect::<Result<_>>()?,
            head: head(spec, of)?,
            table: share.of(spec.vocab).len() as u64 * spec.dim as u64,
            tied: spec.head == HeadSpec::Tied,
        })
    }

    /// Returns the number of blocks.
    #[must_use]
    pub fn layers(&self) -> usize {
        self.blocks.iter().map(|(count, _)| count).sum()
    }

    /// Returns the profile of each block in order.
    pub fn each_block(&self) -> impl Iterator<Item = &LayerProfile> {
        self.blocks.iter().flat_map(|(count, profile)| std::iter::repeat_n(profile, *count))
    }

    /// Returns the bytes that a rank sends along an axis for a sequence, forward and backward.
    #[must_use]
    pub fn sent_along(&self, axis: Axis) -> u64 {
        let sent = |layer: &LayerProfile| layer.sent_forward.along(axis) + layer.sent_backward.along(axis);
        let of_blocks: u64 = self.blocks.iter().map(|(count, block)| *count as u64 * sent(block)).sum();
        sent(&self.embedding) + of_blocks + sent(&self.head)
    }

    /// Returns the floating-point operations of the matrix products of forward and backward pass, per token:
    /// three times those of a forward pass. Attention is counted in full, even if a causal kernel skips half of
    /// it.
    #[must_use]
    pub fn flops_per_token(&self) -> u64 {
        let layers = [(1, &self.embedding), (1, &self.head)].into_iter();
        let blocks = self.blocks.iter().map(|(count, profile)| (*count, profile));
        layers
            .chain(blocks)
            .map(|(count, profile)| count as u64 * profile.flops_per_token(self.context))
            .sum()
    }
}

impl LayerProfile {
    /// Returns the operations of matrix products of a forward pass per token: those of matrices, and those of
    /// attention over a whole context.
    #[must_use]
    pub fn products_per_token(&self, context: usize) -> [u64; 2] {
        let tokens = context as u64;
        // Causal attention has (T + 1) / 2 pairs of query and key per query, of T.
        let full = u128::from(self.forward.attention) * 2 * u128::from(tokens) / u128::from(tokens + 1);
        [self.forward.products / tokens, full as u64 / tokens]
    }

    /// Returns the operations of the layer's matrix products of forward and backward pass, per token: see
    /// [`ModelProfile::flops_per_token`].
    #[must_use]
    pub fn flops_per_token(&self, context: usize) -> u64 {
        3 * self.products_per_token(context).iter().sum::<u64>()
    }
}

impl ModelSpec {
    /// Returns the floating-point operations of the matrix products of forward and backward pass, per token of
    /// a sequence of `context` tokens: see [`ModelProfile::flops_per_token`].
    ///
    /// # Panics
    /// If the description is not valid ([`ModelSpec::validate`]).
    #[must_use]
    pub fn flops_per_token(&self, context: usize) -> u64 {
        let spec = Self { context, ..self.clone() };
        ModelProfile::of(&spec).expect("the description is valid").flops_per_token()
    }
}

fn bytes<'a>(tensors: impl IntoIterator<Item = &'a Tensor>) -> u64 {
    tensors.into_iter().map(|t| (t.shape().len() * t.dtype().size()) as u64).sum()
}

fn kept(saved: &Activations) -> u64 {
    bytes(saved.iter().map(|(_, tensor)| tensor))
}

/// What a rank has of layers.
#[derive(Clone, Copy)]
struct Pieces<'a> {
    /// Of their width, and of their experts.
    shares: [&'a AxisShare; 2],
    /// Of the positions of sequences, if ranks divide them.
    sequence: Option<&'a SequencePieces>,
    /// Of the positions of sequences in all layers, if ranks divide them there.
    context: Option<(ContextPieces, [&'a (Axis, AxisShare); 2])>,
    windows: &'a [Option<usize>],
    /// The number of tokens, and of positions of hidden states.
    tokens: usize,
    positions: usize,
}

/// A layer's parameters on the counting device.
struct Bench<'a> {
    device: Device,
    layout: ParamLayout,
    params: Tensor,
    exchange: Counted,
    borders: Borders,
    sequence: Option<&'a SequencePieces>,
    context: Option<ContextPieces>,
}

impl<'a> Bench<'a> {
    fn new(device: Device, builder: &Builder, of: Pieces<'a>) -> Result<Self> {
        let [share, experts] = of.shares;
        let layout = builder.layout()?;
        let params = device.zeros(layout.len())?;
        let mut shares = vec![(Axis::Tensor, share.clone()), (Axis::Expert, experts.clone())];
        let mut borders = Borders::default();
        if let Some((pieces, along)) = &of.context {
            shares.extend(along.iter().map(|&along| along.clone()));
            let whole = ContextBorders::new(pieces, &device, 1, [None, None], of.windows)?;
            borders.context = Some(Arc::new(whole));
        }
        let (exchange, context) = (Counted::new(shares), of.context.map(|(pieces, _)| pieces));
        Ok(Self { device, layout, params, exchange, borders, sequence: of.sequence, context })
    }

    fn cx(&self) -> StageContext<'_> {
        let Self { device, layout, params, exchange, borders, sequence, context } = self;
        let router = RouterPass::NONE;
        StageContext {
            device,
            layout,
            params: params.into(),
            exchange,
            gradient_scale: 1.0,
            router,
            borders,
            sequence: *sequence,
            context: context.as_ref(),
        }
    }

    fn meter(&self) -> Meter<'_> {
        Meter::new(&self.device, &self.exchange)
    }

    /// Returns a buffer for the gradients of the parameters.
    fn gradients(&self) -> Result<Tensor> {
        Ok(self.device.zeros(self.layout.len())?)
    }
}

/// What one pass of a layer takes.
struct Pass {
    work: Work,
    /// Most bytes beyond those in use at its start.
    peak: u64,
    sent: AxisBytes,
}

/// Measures passes of a layer, one after the other.
struct Meter<'a> {
    device: &'a Device,
    exchange: &'a Counted,
    used: usize,
    work: Work,
}

impl<'a> Meter<'a> {
    fn new(device: &'a Device, exchange: &'a Counted) -> Self {
        device.reset_peak();
        Self { device, exchange, used: device.in_use(), work: device.work() }
    }

    /// Returns what was taken since the start or the last call.
    fn read(&mut self) -> Pass {
        let peak = self.device.peak_in_use().saturating_sub(self.used) as u64;
        let (work, sent) = (self.device.work() - self.work, self.exchange.take());
        *self = Self::new(self.device, self.exchange);
        Pass { work, peak, sent }
    }
}

/// The passes of a layer: forward, and the two halves of the backward pass.
struct Passes {
    forward: Pass,
    input: Pass,
    weight: Pass,
    /// Bytes that are kept from the forward pass, without logits.
    saved: u64,
    logits: u64,
    /// Bytes of the forward pass's output.
    output: u64,
    /// Bytes that the first half adds to those that are kept.
    between: u64,
    /// Bytes of the gradient of the output, where it is no output of the layer itself.
    output_gradient: u64,
    /// Bytes of the input, and of its gradient.
    hidden: u64,
}

impl Passes {
    fn profile(self, layout: &ParamLayout) -> LayerProfile {
        let Self { forward, input, weight, saved, logits, output, between, output_gradient, hidden } = self;
        LayerProfile {
            parameters: layout.count() as u64,
            experts: 0,
            padded_parameters: layout.len() as u64,
            forward: forward.work,
            input: input.work,
            weight: weight.work,
            saved,
            logits,
            between,
            // The input was there before, and is among what is kept.
            forward_temporary: (forward.peak + hidden).saturating_sub(saved + logits + output),
            backward_temporary: (input.peak + output_gradient).max(between + hidden + weight.peak),
            sent_forward: forward.sent,
            sent_backward: input.sent + weight.sent,
        }
    }
}

fn block(spec: &ModelSpec, block: &BlockSpec, of: Pieces<'_>) -> Result<LayerProfile> {
    let (device, [share, experts]) = (Device::sizes(), of.shares);
    let mut builder = Builder::new(spec).share(share.clone()).experts_of(experts.clone()).on(&device);
    let layer = builder.block(spec, block)?;
    let bench = Bench::new(device, &builder, of)?;
    let (cx, mut flat) = (bench.cx(), bench.gradients()?);
    let x = cx.empty([1, of.positions, spec.dim])?;
    let hidden = bytes([&x]);
    let mut meter = bench.meter();
    let (y, mut saved) = layer.forward(&cx, x, Before::Nothing, Keep::All)?;
    let (forward, saved_bytes) = (meter.read(), kept(&saved));
    // The block's output is not needed any more; its gradient takes its place.
    let dx = layer.backward_input(&cx, &mut saved, y, Later::Nothing)?;
    let (input, between) = (meter.read(), kept(&saved) - saved_bytes);
    layer.backward_weight(&cx, &saved, &mut Grads::flat(&mut flat, false))?;
    let passes = Passes {
        forward,
        input,
        weight: meter.read(),
        saved: saved_bytes,
        logits: 0,
        output: hidden,
        between,
        output_gradient: hidden,
        hidden: bytes([&dx]),
    };
    let sizes = bench.layout.params().iter().map(|param| param.shape.len() as u64);
    let kinds = builder.into_specs().into_iter().map(|(_, spec)| spec.kind);
    let of_experts = sizes.zip(kinds).filter(|(_, kind)| *kind == TensorKind::Expert);
    let experts = of_experts.map(|(size, _)| size).sum();
    Ok(LayerProfile { experts, ..passes.profile(&bench.layout) })
}

fn embedding(spec: &ModelSpec, of: Pieces<'_>) -> Result<LayerProfile> {
    let mut builder = Builder::new(spec).share(of.shares[0].clone());
    let layer = builder.embedding(spec);
    let bench = Bench::new(Device::sizes(), &builder, of)?;
    let (cx, mut flat) = (bench.cx(), bench.gradients()?);
    let tokens = bench.device.tensor(&vec![0_u32; of.tokens], [1, of.tokens])?;
    let mut meter = bench.meter();
    let y = layer.forward(&cx, &tokens, 0)?;
    let forward = meter.read();
    layer.backward(&cx, &tokens, 0, &y, &mut Grads::flat(&mut flat, false), false)?;
    let weight = meter.read();
    Ok(LayerProfile {
        parameters: bench.layout.count() as u64,
        padded_parameters: bench.layout.len() as u64,
        forward: forward.work,
        weight: weight.work,
        sent_forward: forward.sent,
        sent_backward: weight.sent,
        saved: bytes([&tokens]),
        backward_temporary: weight.peak,
        ..LayerProfile::default()
    })
}

fn head(spec: &ModelSpec, of: Pieces<'_>) -> Result<LayerProfile> {
    let share = of.shares[0];
    // A tied head uses the token table, whose parameters are the embedding's.
    let mut builder = Builder::new(spec).share(share.clone());
    builder.layer(spec, LayerKind::Head)?;
    let own = builder.layout()?;
    let mut builder = Builder::new(spec).share(share.clone());
    let layer = builder.head(spec);
    let bench = Bench::new(Device::sizes(), &builder, of)?;
    let (cx, mut flat) = (bench.cx(), bench.gradients()?);
    let x = cx.empty([1, of.positions, spec.dim])?;
    let targets = bench.device.tensor(&vec![0_u32; of.tokens], [1, of.tokens])?;
    let mut meter = bench.meter();
    let (losses, mut saved) = layer.forward(&cx, x, Targets::all(&targets, 1.0))?;
    let (forward, saved_bytes) = (meter.read(), bytes(saved.tensors()));
    let (logits, output) = (bytes([saved.logits()]), bytes([&losses]));
    drop(losses);
    let mut meter = bench.meter();
    let dx = layer.backward_input(&cx, &mut saved)?;
    let (input, between) = (meter.read(), bytes(saved.tensors()) - saved_bytes);
    layer.backward_weight(&cx, saved, &mut Grads::flat(&mut flat, false))?;
    let passes = Passes {
        forward,
        input,
        weight: meter.read(),
        saved: saved_bytes,
        logits,
        output,
        between,
        output_gradient: 0,
        hidden: bytes([&dx]),
    };
    Ok(passes.profile(&own))
}
