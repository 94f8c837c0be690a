//! A transformer described by its sizes, and the memory that a rank needs for it.

use super::{ActivationMethod, BytesPerParameter, StateBytes, ZeroStage};

/// A GPT: layers of attention and a feed-forward of four times the width. The token embedding table is also the
/// output head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Transformer {
    /// Number of blocks.
    pub layers: u64,
    /// Width: values per token.
    pub hidden: u64,
    /// Number of attention heads.
    pub heads: u64,
    /// Number of tokens in a sequence.
    pub sequence: u64,
    /// Number of entries in the token table.
    pub vocabulary: u64,
}

/// Number of ranks along each axis of parallelism.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Degrees {
    /// Number of ranks that divide each layer.
    pub tensor: u64,
    /// Number of pipeline stages.
    pub pipeline: u64,
    /// Number of replicas.
    pub data: u64,
}

/// Memory of a rank of the first stage, in bytes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Footprint {
    /// Weights, gradients and optimizer state.
    pub state: StateBytes,
    /// Activations of all microbatches in flight.
    pub activations: f64,
}

impl Footprint {
    /// Returns the total.
    #[must_use]
    pub fn total(&self) -> f64 {
        self.state.total() + self.activations
    }
}

impl Transformer {
    /// Returns the parameters of a block: `12 h^2 + 13 h`.
    #[must_use]
    pub const fn block_parameters(&self) -> u64 {
        12 * self.hidden * self.hidden + 13 * self.hidden
    }

    /// Returns all parameters: `V h + S h + L (12 h^2 + 13 h) + 2 h`.
    #[must_use]
    pub const fn parameters(&self) -> u64 {
        (self.vocabulary + self.sequence) * self.hidden
            + self.layers * self.block_parameters()
            + 2 * self.hidden
    }

    /// Returns the forward operations of all layers for `batch` sequences: `24 B S L h^2 (1 + S / 6h)`.
    #[must_use]
    pub const fn forward_of_layers(&self, batch: u64) -> u128 {
        let (s, h) = (self.sequence as u128, self.hidden as u128);
        batch as u128 * self.layers as u128 * (24 * s * h * h + 4 * s * s * h)
    }

    /// Returns the operations of forward and backward for `batch` sequences:
    /// `72 B S L h^2 (1 + S / 6h + V / 12Lh)`. Source: Narayanan et al. 2021, appendix.
    #[must_use]
    pub const fn operations(&self, batch: u64) -> u128 {
        let head = 2 * self.sequence as u128 * self.hidden as u128 * self.vocabulary as u128;
        3 * (self.forward_of_layers(batch) + batch as u128 * head)
    }

    /// Returns the operations of forward and backward if all layers are recomputed:
    /// `96 B S L h^2 (1 + S / 6h + V / 16Lh)`.
    #[must_use]
    pub const fn operations_with_recompute(&self, batch: u64) -> u128 {
        self.operations(batch) + self.forward_of_layers(batch)
    }

    /// Returns the parameters of a rank of the first stage: its layers and the token and position tables,
    /// divided by the number of tensor ranks.
    #[must_use]
    pub fn parameters_of_rank(&self, degrees: Degrees) -> f64 {
        let layers = self.layers.div_ceil(degrees.pipeline.max(1));
        let tables = (self.vocabulary + self.sequence) * self.hidden;
        (layers * self.block_parameters() + tables) as f64 / degrees.tensor.max(1) as f64
    }

    /// Returns the memory of a rank of the first stage under 1F1B. It keeps the activations of as many
    /// microbatches as there are stages, or of all microbatches if there are fewer.
    ///
    /// With a single stage, the final norm and the head keep activations too, logits included:
    /// `4 S b (h + V) / t` bytes.
    #[must_use]
    pub fn footprint(
        &self,
        degrees: Degrees,
        zero: ZeroStage,
        each: BytesPerParameter,
        method: ActivationMethod,
        batch: u64,
        microbatches: u64,
    ) -> Footprint {
        let state = StateBytes::new(self.parameters_of_rank(degrees), each, zero, degrees.data, false);
        let layers = self.layers.div_ceil(degrees.pipeline.max(1));
        let held = degrees.pipeline.max(1).min(microbatches.max(1));
        let of_layers = method.bytes_per_layer(self, batch, degrees.tensor) * (layers * held) as f64;
        let tensor = degrees.tensor.max(1) as f64;
        let head = if degrees.pipeline <= 1 {
            4.0 * (self.sequence * batch * (self.hidden + self.vocabulary)) as f64 / tensor
        } else {
            0.0
        };
        // Bytes of the dropout mask of the input, one byte per value.
        let input = (self.sequence * batch * self.hidden * held) as f64 / tensor;
        // A layer that is being recomputed holds all its activations.
        let running = if method == ActivationMethod::Full {
            ActivationMethod::Tensor.bytes_per_layer(self, batch, degrees.tensor)
        } else {
            0.0
        };
        Footprint { state, activations: of_layers + head + input + running }
    }

    /// Returns the degrees with the fewest devices of `memory` bytes each that hold the model, with
    /// microbatches of one sequence. The number of devices is replicas times stages times tensor ranks. `None`
    /// if 65,536 devices are not enough.
    ///
    /// The number of tensor ranks is a power of two that divides the number of heads, at most `most_tensor` and
    /// at most 64. The number of stages divides the number of layers. The number of replicas is a power of two;
    /// it is 1 without ZeRO.
    #[must_use]
    pub fn fewest_devices(
        &self,
        memory: f64,
        most_tensor: u64,
        zero: ZeroStage,
        each: BytesPerParameter,
        method: ActivationMethod,
    ) -> Option<Degrees> {
        fewest_devices((self.layers, self.heads.min(most_tensor)), (self.heads, 1), zero, |degrees| {
            self.footprint(degrees, zero, each, method, 1, u64::MAX).total() <= memory
        })
    }
}

/// Returns the degrees with the fewest devices for which `fits` holds, as [`Transformer::fewest_devices`] does.
/// `units` are what tensor ranks divide evenly: heads, or heads of keys and values. The number of replicas is a
/// multiple of `group`, those that divide experts.
pub fn fewest_devices(
    (layers, most_tensor): (u64, u64),
    (units, group): (u64, u64),
    zero: ZeroStage,
    fits: impl Fn(Degrees) -> bool,
) -> Option<Degrees> {
    let tensors = (0..7).map(|power| 1 << power).filter(|&t| t <= most_tensor && units.is_multiple_of(t));
    let tensors: Vec<u64> = tensors.collect();
    let stages: Vec<u64> = (1..=layers).filter(|&p| layers.is_multiple_of(p)).collect();
    let mut best: Option<Degrees> = None;
    let size = |degrees: &Degrees| degrees.tensor * degrees.pipeline * degrees.data;
    for (&tensor, &pipeline) in tensors.iter().flat_map(|t| stages.iter().map(move |p| (t, p))) {
        // Without ZeRO, more replicas do not reduce the memory of each.
        let datas = (0..17).map(|power| 1 << power).take(if zero == ZeroStage::None { 1 } else { 17 });
        let found =
            datas.map(|data| Degrees { tensor, pipeline, data: group * data }).find(|degrees| fits(*degrees));
        let Some(found) = found else { continue };
        if size(&found) <= 65_536 && best.is_none_or(|best| size(&found) < size(&best)) {
            best = Some(found);
        }
    }
    best
}

impl ActivationMethod {
    /// Returns the bytes that one of `tensor` tensor-parallel ranks keeps of one layer for a microbatch of
    /// `batch` sequences.
    #[must_use]
    pub fn bytes_per_layer(self, model: &Transformer, batch: u64, tensor: u64) -> f64 {
        let (s, h, heads) = (model.sequence as f64, model.hidden as f64, model.heads as f64);
        let (sbh, t) = (s * batch as f64 * h, tensor.max(1) as f64);
        // Bytes of attention scores, their softmax and its dropout mask; they grow with the square of the
        // sequence length.
        let scores = 5.0 * heads * s / h;
        match self {
            Self::Tensor => sbh * (10.0 + 24.0 / t + scores / t),
            Self::Sequence => sbh / t * (34.0 + scores),
            Self::TensorSelective => sbh * (10.0 + 24.0 / t),
            Self::SequenceSelective => sbh * 34.0 / t,
            Self::Full => sbh * 2.0,
        }
    }

    /// Returns the recomputed forward operations as a fraction of the model's forward and backward operations.
    #[must_use]
    pub fn repeated(self, model: &Transformer) -> f64 {
        let all = model.operations(1) as f64;
        match self {
            Self::Tensor | Self::Sequence => 0.0,
            Self::TensorSelective | Self::SequenceSelective => {
                let (s, h) = (model.sequence as f64, model.hidden as f64);
                4.0 * s * s * h * model.layers as f64 / all
            }
            Self::Full => model.forward_of_layers(1) as f64 / all,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: f64 = (1_u64 << 30) as f64;

    fn model(layers: u64, hidden: u64, heads: u64, vocabulary: u64) -> Transformer {
        Transformer { layers, hidden, heads, sequence: 2048, vocabulary }
    }

    /// Activations of all layers for a microbatch of one sequence, in GiB, by the formulas of Korthikanti et
    /// al. 2022.
    #[test]
    fn activations_are_those_of_the_table() {
        let expected = [
            (model(48, 6144, 64, 51_200), [79.1, 14.8, 9.89, 2.39, 1.13]),
            (model(96, 12_288, 96, 51_200), [256.5, 51.8, 32.1, 9.56, 4.5]),
            (model(24, 2048, 24, 51_200), [14.4, 2.63, 1.81, 0.398, 0.188]),
        ];
        let columns = [
            (ActivationMethod::Tensor, 1),
            (ActivationMethod::Tensor, 8),
            (ActivationMethod::Sequence, 8),
            (ActivationMethod::SequenceSelective, 8),
            (ActivationMethod::Full, 8),
        ];
        for (model, row) in expected {
            for ((method, tensor), expected) in columns.into_iter().zip(row) {
                let bytes = method.bytes_per_layer(&model, 1, tensor) * model.layers as f64;
                // Within 0.01, or within half of the last printed digit if that is more (1.81 in the table is
                // 1.805).
                let close = if expected >= 10.0 { 0.05 } else { 0.01 };
                let off = (bytes / GIB - expected).abs();
                assert!(off <= close * 1.01, "{method:?} {tensor}: {} is not {expected}", bytes / GIB);
            }
        }
    }

    #[test]
    fn state_is_that_of_the_zero_paper() {
        // A million parameters, so that the parts are whole numbers.
        let of = |each, stage, data| StateBytes::new(1e6, each, stage, data, false).total() as u64;
        let deepspeed = |stage, data| of(BytesPerParameter::DEEPSPEED, stage, data);
        assert_eq!([1, 8].map(|d| deepspeed(ZeroStage::None, d)), [16_000_000; 2]);
        // Bytes per parameter by ZeRO stage: 4 + 12/d, 2 + 14/d, 16/d.
        assert_eq!([1, 8].map(|d| deepspeed(ZeroStage::Optimizer, d)), [16_000_000, 5_500_000]);
        assert_eq!([1, 8].map(|d| deepspeed(ZeroStage::Gradients, d)), [16_000_000, 3_750_000]);
        assert_eq!([1, 64].map(|d| deepspeed(ZeroStage::Weights, d)), [16_000_000, 250_000]);
        // Bytes per parameter: 18, and 6 + 12/d with a distributed optimizer.
        assert_eq!(of(BytesPerParameter::MEGATRON, ZeroStage::None, 4), 18_000_000);
        assert_eq!(of(BytesPerParameter::MEGATRON, ZeroStage::Optimizer, 4), 9_000_000);
        let offloaded = StateBytes::new(10.0, BytesPerParameter::F32, ZeroStage::None, 1, true);
        assert_eq!(offloaded.total() as u64, 80);
    }

    #[test]
    fn parameters_and_operations_are_the_published_ones() {
        let gpt3 = model(96, 12_288, 96, 50_257);
        assert_eq!(gpt3.parameters(), 174_604_259_328);
        let xl = model(24, 2048, 16, 50_257);
        assert_eq!(xl.parameters(), 1_315_723_264);
        let operations = xl.operations(512) as f64;
        assert!((operations / 9.514e15 - 1.0).abs() < 1e-3, "{operations}");
        let (h, s, l, v) = (2048.0, 2048.0, 24.0, 50_257.0);
        let closed = 96.0 * s * l * h * h * (1.0 + s / (6.0 * h) + v / (16.0 * l * h));
        assert!((xl.operations_with_recompute(1) as f64 / closed - 1.0).abs() < 1e-12);
        assert!(ActivationMethod::SequenceSelective.repeated(&gpt3) < 0.02);
        assert!((ActivationMethod::Full.repeated(&gpt3) - 1.0 / 3.0).abs() < 0.01);
    }

    #[test]
    fn the_fewest_devices_hold_the_model_and_fewer_do_not() {
        let gpt3 = model(96, 12_288, 96, 50_257);
        let each = BytesPerParameter::DEEPSPEED;
        let (memory, method) = (80e9, ActivationMethod::SequenceSelective);
        let mut before = u64::MAX;
        for zero in [ZeroStage::None, ZeroStage::Weights] {
            let found = gpt3.fewest_devices(memory, 8, zero, each, method).unwrap();
            assert!(gpt3.footprint(found, zero, each, method, 1, u64::MAX).total() <= memory);
            let devices = found.tensor * found.pipeline * found.data;
            // The state alone, 16 bytes per parameter, needs 35 devices.
            assert!((35..=before).contains(&devices), "{found:?}");
            before = devices;
        }
        assert_eq!(gpt3.fewest_devices(1e9, 8, ZeroStage::None, each, method), None);
    }
}
