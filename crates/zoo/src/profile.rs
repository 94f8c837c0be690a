//! What a layer costs, found by running it on the device that only counts ([`Device::sizes`]): parameters,
//! operations, and bytes. Nothing here is a formula of a model's shape.

use farflung_tensor::{Device, Result, Tensor, Work};

use crate::ZooError;
use crate::layer::{Activations, Before, Builder, Grads, Keep, Later, LayerKind, StageContext, Targets};
use crate::spec::{BlockSpec, HeadSpec, ModelSpec};

/// What one layer costs for one sequence of the model's context. All but the parameters grows with the number
/// of sequences.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LayerProfile {
    /// Number of parameters. A tied head has those of its norm.
    pub parameters: u64,
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
    pub fn of(spec: &ModelSpec) -> std::result::Result<Self, ZooError> {
        spec.validate()?;
        let blocks = spec.blocks.iter().map(|run| Ok((run.count, block(spec, &run.block)?)));
        Ok(Self {
            context: spec.context,
            hidden: (spec.context * spec.dim * size_of::<f32>()) as u64,
            embedding: embedding(spec)?,
            blocks: blocks.collect::<Result<_>>()?,
            head: head(spec)?,
            table: spec.vocab as u64 * spec.dim as u64,
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

/// Measures passes of a layer, one after the other.
struct Meter<'a> {
    device: &'a Device,
    used: usize,
    work: Work,
}

impl<'a> Meter<'a> {
    fn new(device: &'a Device) -> Self {
        device.reset_peak();
        Self { device, used: device.in_use(), work: device.work() }
    }

    /// Returns the work since the start or the last call, and the most bytes that were used beyond those in use
    /// then.
    fn read(&mut self) -> (Work, u64) {
        let peak = self.device.peak_in_use().saturating_sub(self.used) as u64;
        let work = self.device.work() - self.work;
        *self = Self::new(self.device);
        (work, peak)
    }
}

fn block(spec: &ModelSpec, block: &BlockSpec) -> Result<LayerProfile> {
    let device = Device::sizes();
    let mut builder = Builder::new(spec).on(&device);
    let layer = builder.block(spec, block)?;
    let layout = builder.layout()?;
    let (params, mut flat) = (device.zeros(layout.len())?, device.zeros(layout.len())?);
    let cx = StageContext {
        device: &device,
        layout: &layout,
        params: &params,
        gradient_scale: 1.0,
        documents: None,
    };
    let shape = [1, spec.context, spec.dim];
    let x = cx.empty(shape)?;
    let hidden = bytes([&x]);
    let mut meter = Meter::new(&device);
    let (y, mut saved) = layer.forward(&cx, x, Before::Nothing, Keep::All)?;
    let (forward, peak) = meter.read();
    let saved_bytes = kept(&saved);
    // The input was there before, and is among what is kept.
    let forward_temporary = (peak + hidden).saturating_sub(saved_bytes + bytes([&y]));
    let mut meter = Meter::new(&device);
    // The block's output is not needed any more; its gradient takes its place.
    let dx = layer.backward_input(&cx, &mut saved, y, Later::Nothing)?;
    let (input, peak) = meter.read();
    let between = kept(&saved) - saved_bytes;
    layer.backward_weight(&cx, &saved, &mut Grads { flat: &mut flat, accumulate: false })?;
    let (weight, more) = meter.read();
    let held = between + bytes([&dx]);
    Ok(LayerProfile {
        parameters: layout.count() as u64,
        padded_parameters: layout.len() as u64,
        forward,
        input,
        weight,
        saved: saved_bytes,
        logits: 0,
        between,
        forward_temporary,
        backward_temporary: (peak + hidden).max(held + more),
    })
}

fn embedding(spec: &ModelSpec) -> Result<LayerProfile> {
    let device = Device::sizes();
    let mut builder = Builder::new(spec);
    let layer = builder.embedding(spec);
    let layout = builder.layout()?;
    let (params, mut flat) = (device.zeros(layout.len())?, device.zeros(layout.len())?);
    let cx = StageContext {
        device: &device,
        layout: &layout,
        params: &params,
        gradient_scale: 1.0,
        documents: None,
    };
    let tokens = device.tensor(&vec![0_u32; spec.context], [1, spec.context])?;
    let mut meter = Meter::new(&device);
    let y = layer.forward(&cx, &tokens, 0)?;
    let (forward, _) = meter.read();
    layer.backward(&cx, &tokens, 0, &y, &mut Grads { flat: &mut flat, accumulate: false }, false)?;
    let (weight, backward_temporary) = meter.read();
    Ok(LayerProfile {
        parameters: layout.count() as u64,
        padded_parameters: layout.len() as u64,
        forward,
        weight,
        saved: bytes([&tokens]),
        backward_temporary,
        ..LayerProfile::default()
    })
}

fn head(spec: &ModelSpec) -> Result<LayerProfile> {
    let device = Device::sizes();
    // A tied head uses the token table, whose parameters are the embedding's.
    let mut builder = Builder::new(spec);
    builder.layer(spec, LayerKind::Head)?;
    let own = builder.layout()?;
    let mut builder = Builder::new(spec);
    let layer = builder.head(spec);
    let layout = builder.layout()?;
    let (params, mut flat) = (device.zeros(layout.len())?, device.zeros(layout.len())?);
    let cx = StageContext {
        device: &device,
        layout: &layout,
        params: &params,
        gradient_scale: 1.0,
        documents: None,
    };
    let x = cx.empty([1, spec.context, spec.dim])?;
    let hidden = bytes([&x]);
    let targets = device.tensor(&vec![0_u32; spec.context], [1, spec.context])?;
    let mut meter = Meter::new(&device);
    let (losses, mut saved) = layer.forward(&cx, x, Targets::all(&targets, 1.0))?;
    let (forward, peak) = meter.read();
    let (saved_bytes, logits) = (bytes(saved.tensors()), bytes([saved.logits()]));
    let forward_temporary = (peak + hidden).saturating_sub(saved_bytes + logits + bytes([&losses]));
    drop(losses);
    let mut meter = Meter::new(&device);
    let dx = layer.backward_input(&cx, &mut saved)?;
    let (input, peak) = meter.read();
    let between = bytes(saved.tensors()) - saved_bytes;
    layer.backward_weight(&cx, saved, &mut Grads { flat: &mut flat, accumulate: false })?;
    let (weight, more) = meter.read();
    let held = between + bytes([&dx]);
    Ok(LayerProfile {
        parameters: own.count() as u64,
        padded_parameters: own.len() as u64,
        forward,
        input,
        weight,
        saved: saved_bytes,
        logits,
        between,
        forward_temporary,
        backward_temporary: peak.max(held + more),
    })
}
