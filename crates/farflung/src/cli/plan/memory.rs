//! `farflung plan memory`: estimates whether a model fits into memory: GPT-2's family by published closed
//! forms, other families by what their layers keep.

mod profiled;

use std::fmt::Write as _;

use farflung::base::Bytes;
use farflung::model_shape;
use farflung::parallel::cluster::read_memory;
use farflung::parallel::memory::{
    ActivationMethod, BytesPerParameter, Degrees, Footprint, Transformer, ZeroStage,
};
use farflung::terminal::print;
use farflung::zoo::ModelSpec;
use farflung::{Error, Result};

/// Estimate the memory that training a model needs: weights, gradients, optimizer state and activations of the
/// rank that holds the most, for each ZeRO stage and each kind of recomputation, and the fewest devices into
/// which it fits.
///
/// For GPT-2's family the formulas are those of Megatron and DeepSpeed: activations in 16 bits, the first stage
/// of a pipeline under 1F1B. For other families, parameters are counted exactly, and activations are those that
/// our layers keep, in f32. It is an estimate before any plan; `farflung train` says what a run takes.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  farflung plan memory --model gpt3-175b
  farflung plan memory --model llama-70b --pipeline 8
  farflung plan memory --model mixtral-8x7b --expert 8
  farflung plan memory --model gpt3-xl --tensor 2 --pipeline 4 --data 8 --device-memory 24GB
  farflung plan memory --model gpt2 --precision f32 --batch 8 --json")]
pub(crate) struct MemoryCommand {
    /// Model preset, or the path of a config.json.
    #[arg(long, value_name = "NAME", default_value = "gpt2")]
    model: String,
    /// Tokens per sequence; overrides the preset.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    context: Option<u32>,
    /// Sequences per microbatch.
    #[arg(
        long,
        value_name = "N",
        default_value_t = 1,
        value_parser = clap::value_parser!(u32).range(1..=65536)
    )]
    batch: u32,
    /// Microbatches per step; a pipeline holds at most as many as it has stages.
    #[arg(
        long,
        short = 'm',
        value_name = "N",
        default_value_t = 4096,
        value_parser = clap::value_parser!(u32).range(1..)
    )]
    microbatches: u32,
    /// Number of tensor ranks, which share each layer.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=4096))]
    tensor: u32,
    /// Number of pipeline stages.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pipeline: u32,
    /// Number of replicas, over which ZeRO divides the state. Default: those of --expert.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65536))]
    data: Option<u32>,
    /// Number of replicas that divide the experts of a model that has some.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=4096))]
    expert: u32,
    /// Precision of the state: bytes per parameter.
    #[arg(long, value_name = "KIND", default_value = "deepspeed")]
    precision: Kind,
    /// Memory of a device, for computing the fewest devices.
    #[arg(long, value_name = "SIZE", default_value = "80GB", value_parser = memory)]
    device_memory: Bytes,
    /// Highest number of tensor ranks when computing the fewest devices: the devices of one machine.
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=64))]
    most_tensor: u32,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Kind {
    /// Weights and gradients in 16 bits, Adam's state and a copy of the weights in f32: 16 bytes.
    Deepspeed,
    /// As deepspeed, but with gradients in f32: 18 bytes.
    Megatron,
    /// Weights, gradients and Adam's state in f32, as in our trainer: 16 bytes.
    F32,
}

fn memory(text: &str) -> std::result::Result<Bytes, String> {
    read_memory(text).map_err(|error| error.to_string())
}

/// Result for a ZeRO stage and a kind of recomputation.
struct Row {
    zero: ZeroStage,
    /// Which activations are kept.
    method: &'static str,
    /// Operations that are repeated, as a fraction of all operations of a step.
    repeated: f64,
    held: Footprint,
    fewest: Option<Degrees>,
}

/// What is asked of a model.
#[derive(Debug, Clone, Copy)]
struct Asked {
    degrees: Degrees,
    each: BytesPerParameter,
    batch: u64,
    microbatches: u64,
    /// Memory of a device.
    memory: Bytes,
    most_tensor: u64,
    /// Number of replicas that divide experts.
    experts: u64,
}

impl MemoryCommand {
    pub(crate) fn run(self) -> Result<()> {
        let mut spec = model_shape(&self.model)?;
        spec.context = self.context.map_or(spec.context, |context| context as usize);
        spec.validate().map_err(Error::from)?;
        let heads = spec.blocks.iter().map(|run| run.block.attention.heads);
        let is_gpt2 = spec.names.family == "gpt2";
        // Ranks of a tensor axis divide heads of keys and values.
        let units = heads.map(|heads| if is_gpt2 { heads.query } else { heads.kv }).min().unwrap_or(1) as u64;
        if self.expert > 1 && spec.mixtures().next().is_none() {
            let expected = "1, because the model has no experts".to_owned();
            return Err(Error::Setting { field: "expert", value: self.expert.to_string(), expected });
        }
        let asked = Asked {
            degrees: self.degrees(spec.layers() as u64, units)?,
            each: match self.precision {
                Kind::Deepspeed => BytesPerParameter::DEEPSPEED,
                Kind::Megatron => BytesPerParameter::MEGATRON,
                Kind::F32 => BytesPerParameter::F32,
            },
            batch: u64::from(self.batch),
            microbatches: u64::from(self.microbatches),
            memory: self.device_memory,
            most_tensor: u64::from(self.most_tensor),
            experts: u64::from(self.expert),
        };
        let rows = if is_gpt2 { published(&spec, asked) } else { profiled::rows(&spec, asked)? };
        let parameters = Parameters { all: spec.parameters(), active: spec.active_parameters() };
        print(&if self.json {
            format!("{}\n", json(parameters, &rows))
        } else {
            text(parameters, &rows, self.device_memory)
        })
    }

    fn degrees(&self, layers: u64, units: u64) -> Result<Degrees> {
        let wrong = |field: &'static str, value: u32, expected: String| {
            Err(Error::Setting { field, value: value.to_string(), expected })
        };
        if !units.is_multiple_of(u64::from(self.tensor)) {
            return wrong("tensor", self.tensor, format!("a divisor of the {units} heads"));
        }
        let data = self.data.unwrap_or(self.expert);
        if !data.is_multiple_of(self.expert) {
            return wrong("data", data, format!("a multiple of `expert`, {}", self.expert));
        }
        if u64::from(self.pipeline) > layers {
            return wrong("pipeline", self.pipeline, format!("at most the {layers} layers"));
        }
        Ok(Degrees {
            tensor: u64::from(self.tensor),
            pipeline: u64::from(self.pipeline),
            data: u64::from(data),
        })
    }
}

/// Returns the estimates by the published forms.
fn published(spec: &ModelSpec, asked: Asked) -> Vec<Row> {
    let model = Transformer {
        layers: spec.layers() as u64,
        hidden: spec.dim as u64,
        heads: spec.blocks.first().map_or(0, |run| run.block.attention.heads.query as u64),
        sequence: spec.context as u64,
        vocabulary: spec.vocab as u64,
    };
    let Asked { degrees, each, batch, microbatches, memory, most_tensor, .. } = asked;
    let row = |zero, method: ActivationMethod| Row {
        zero,
        method: method.name(),
        repeated: method.repeated(&model),
        held: model.footprint(degrees, zero, each, method, batch, microbatches),
        fewest: model.fewest_devices(memory.0 as f64, most_tensor, zero, each, method),
    };
    ZeroStage::ALL
        .into_iter()
        .flat_map(|zero| ActivationMethod::ALL.map(|method| row(zero, method)))
        .collect()
}

fn devices(degrees: Degrees) -> u64 {
    degrees.tensor * degrees.pipeline * degrees.data
}

/// Numbers of a model's parameters.
#[derive(Debug, Clone, Copy)]
struct Parameters {
    all: u64,
    /// Those that a token meets: of experts only its own.
    active: u64,
}

fn json(parameters: Parameters, rows: &[Row]) -> serde_json::Value {
    let rows = rows.iter().map(|row| {
        let fewest = row.fewest.map(|degrees| {
            serde_json::json!({
                "devices": devices(degrees), "tensor": degrees.tensor, "pipeline": degrees.pipeline,
                "data": degrees.data,
            })
        });
        serde_json::json!({
            "zero": row.zero.number(), "activations_kept": row.method,
            "weights": row.held.state.weights, "gradients": row.held.state.gradients,
            "optimizer": row.held.state.optimizer, "activations": row.held.activations,
            "total": row.held.total(), "repeated": row.repeated, "fewest": fewest,
        })
    });
    let Parameters { all, active } = parameters;
    serde_json::json!({ "parameters": all, "active_parameters": active, "rows": rows.collect::<Vec<_>>() })
}

/// Formats a number of bytes with a unit.
fn size(bytes: f64) -> String {
    Bytes(bytes as u64).to_string()
}

fn text(parameters: Parameters, rows: &[Row], memory: Bytes) -> String {
    let Parameters { all, active } = parameters;
    let of_token = if active < all { format!(", {active} of which a token meets") } else { String::new() };
    let mut text = format!("{all} parameters{of_token}\n\n");
    let _ = writeln!(
        text,
        "{:>4} {:<29} {:>10} {:>10} {:>10} {:>11} {:>10} {:>8}  fewest of {memory} (tensor x pipeline x data)",
        "ZeRO", "activations", "weights", "gradients", "optimizer", "activations", "all", "again"
    );
    for row in rows {
        let fewest = row.fewest.map_or_else(
            || "none".to_owned(),
            |found| format!("{} ({} x {} x {})", devices(found), found.tensor, found.pipeline, found.data),
        );
        let state = &row.held.state;
        let _ = writeln!(
            text,
            "{:>4} {:<29} {:>10} {:>10} {:>10} {:>11} {:>10} {:>7.1}%  {fewest}",
            row.zero.number(),
            row.method,
            size(state.weights),
            size(state.gradients),
            size(state.optimizer),
            size(row.held.activations),
            size(row.held.total()),
            100.0 * row.repeated
        );
    }
    text.push_str(
        "\n`again`: forward operations that are recomputed, as a fraction of all operations of a step.\n",
    );
    text
}
