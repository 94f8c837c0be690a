//! Measures how fast a machine trains a model, for its entry in a topology file.

use std::fmt;
use std::time::{Duration, Instant};

use farflung_optim::{AdamW, LrSchedule, adamw};
use farflung_tensor::{Device, Fuse, Op};
use farflung_zoo::layer::Grads;
use farflung_zoo::{Input, ModelSpec, Output, Stage, Targets, stage};
use serde::Serialize;

use crate::{Error, Result};

/// Result of a measurement.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Measured {
    /// The machine's name on its network.
    pub host: String,
    /// The device.
    pub device: String,
    /// The name of the model.
    pub model: String,
    /// Sequences per step.
    pub batch: usize,
    /// Number of timed steps.
    pub steps: usize,
    /// Median time of a step in seconds: forward, loss, backward, clipping and `AdamW`.
    pub step_s: f64,
    /// Tokens per second.
    pub tokens_per_s: f64,
    /// Mean loss of the last step, in nats.
    pub loss: f64,
    /// Operations per second; the operations of a token are counted as the virtual clock counts them.
    pub flops: f64,
    /// Rate of a matrix product that is split among 2, 4 and 8 tensor ranks, in percent of the unsplit
    /// product's rate.
    pub tensor_efficiency: Vec<u8>,
    /// Bytes of memory that a run on this machine may use; `None` if that is not known, as for a GPU.
    pub memory: Option<u64>,
}

/// Formats the device's entry of a topology file.
impl fmt::Display for Measured {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, device, model, batch, steps, tokens_per_s, .. } = self;
        writeln!(
            f,
            "# {device}: {tokens_per_s:.0} tokens/s of {model} at batch {batch}, median of {steps} steps"
        )?;
        let plain = |c: char| if c.is_ascii_alphanumeric() { c } else { '-' };
        let name: String = format!("{host}-{device}").chars().map(plain).collect();
        writeln!(f, "[[device]]\nname = \"{name}\"")?;
        writeln!(f, "flops = \"{:.0} MFLOPS\"", (self.flops / 1e6).max(1.0))?;
        if !self.tensor_efficiency.is_empty() {
            writeln!(f, "tensor_efficiency = {:?}", self.tensor_efficiency)?;
        }
        match self.memory {
            Some(bytes) => writeln!(f, "memory = \"{}MB\"", bytes / 1_000_000),
            None => writeln!(f, "# memory = \"8GB\""),
        }
    }
}

/// Parameters of a measurement.
#[derive(Debug, Clone, PartialEq)]
pub struct Trial<'a> {
    /// The model's name.
    pub name: &'a str,
    /// The model.
    pub model: ModelSpec,
    /// Sequences per step.
    pub batch: usize,
    /// Time to train; at least three steps are timed.
    pub time: Duration,
    /// Seed of the initial weights.
    pub seed: u64,
}

/// Trains a model on arbitrary tokens and measures the steps. The caller sets [`Measured::memory`].
///
/// Errors: those of the device; [`Error::Setting`] if the batch is 0; [`Error::MeasuredLossNotFinite`].
pub fn measure(device: &Device, trial: &Trial<'_>) -> Result<Measured> {
    let Trial { name, ref model, batch, time, seed } = *trial;
    if batch == 0 {
        let expected = "at least 1".to_owned();
        return Err(Error::Setting { field: "batch", value: "0".to_owned(), expected });
    }
    let tokens = batch * model.context;
    let whole = Stage::whole(model, device)?;
    let (mut params, mut grads) = (whole.init(seed)?, whole.zeros()?);
    let optimizer = adamw(AdamW {
        beta1: 0.9,
        beta2: 0.95,
        eps: 1e-8,
        weight_decay: 0.1,
        clip: Some(1.0),
        schedule: LrSchedule::constant(1e-3),
    });
    let mut chain = optimizer.build(device, whole.layout())?;
    let ids =
        |factor: usize| -> Vec<u32> { (0..tokens).map(|i| (i * factor % model.vocab) as u32).collect() };
    let (inputs, targets) = (ids(7919), ids(104_729));
    let (mut times, mut loss) = (Vec::new(), f64::NAN);
    let begun = now();
    // The first step fills memory pools and compiles kernels.
    while times.len() < 4 || begun.elapsed() < time {
        let step = now();
        let (x, y) = (whole.tokens(&inputs, model.context)?, whole.tokens(&targets, model.context)?);
        let (output, saved) =
            whole.forward(&params, Input::Tokens(x), Some(Targets::all(&y, 1.0 / tokens as f32)))?;
        if let Output::Losses(losses) = output {
            loss = stage::total(&losses)? / tokens as f64;
        }
        let into = &mut Grads::flat(&mut grads, false);
        whole.backward(&params, saved, None, into, |_, _| ())?;
        let prepared = chain.prepare(&grads)?;
        chain.commit(&mut params, &grads, prepared)?;
        device.fence()?;
        let took = step.elapsed().as_secs_f64();
        tracing::debug!(step_s = took, "step");
        times.push(took);
    }
    if !loss.is_finite() {
        return Err(Error::MeasuredLossNotFinite { steps: times.len() as u64, loss });
    }
    let mut settled = times.split_off(1);
    settled.sort_by(f64::total_cmp);
    let step_s = settled[settled.len() / 2];
    let tokens_per_s = tokens as f64 / step_s;
    let per_token = model.flops_per_token(model.context) as f64;
    Ok(Measured {
        host: rustix::system::uname().nodename().to_string_lossy().into_owned(),
        device: device.name().to_string(),
        model: name.to_owned(),
        batch,
        steps: settled.len(),
        step_s,
        tokens_per_s,
        loss,
        flops: tokens_per_s * per_token,
        tensor_efficiency: tensor_efficiency(device, tokens, model.dim)?,
        memory: None,
    })
}

/// Numbers of tensor ranks for which products are timed.
const TENSOR_RANKS: [usize; 4] = [1, 2, 4, 8];

/// Number of rounds that count, after one that does not. Each round measures every product once, so that
/// variations of the machine affect all alike.
const TURNS: usize = 15;

/// Number of products per measurement.
const REPEATS: usize = 4;

/// Returns the rate of the feed-forward layer's wider product at a half, a quarter and an eighth of its
/// columns, in percent of the rate at all columns; at most 100.
fn tensor_efficiency(device: &Device, tokens: usize, dim: usize) -> Result<Vec<u8>> {
    let columns = 4 * dim;
    let values = |len: usize| -> Vec<f32> { (0..len).map(|i| (i % 17) as f32 / 17.0 - 0.5).collect() };
    let a = device.tensor(&values(tokens * dim), [tokens, dim])?;
    let mut products = Vec::new();
    for shards in TENSOR_RANKS.into_iter().filter(|&shards| columns >= shards) {
        let n = columns / shards;
        products.push((device.tensor(&values(dim * n), [dim, n])?, device.zeros([tokens, n])?, Vec::new()));
    }
    for turn in 0..=TURNS {
        for (b, c, times) in &mut products {
            let begun = now();
            for _ in 0..REPEATS {
                device.run(Op::MatMul {
                    a: a.view(),
                    a_t: false,
                    b: b.view(),
                    b_t: false,
                    c: c.view_mut(),
                    accumulate: false,
                    scales: [1.0; 2],
                    fuse: Fuse::None,
                })?;
            }
            device.fence()?;
            // The first round fills memory pools and compiles kernels.
            if turn > 0 {
                times.push(begun.elapsed().as_secs_f64());
            }
        }
    }
    // The minimum, since other load on the machine only makes a round slower.
    let fastest = |(_, _, times): (_, _, Vec<f64>)| times.into_iter().fold(f64::INFINITY, f64::min);
    Ok(percents(&products.into_iter().map(fastest).collect::<Vec<_>>()))
}

/// Returns the rates in percent, from the times of the whole product and of its parts: a half, a quarter, and
/// so on.
fn percents(times: &[f64]) -> Vec<u8> {
    let Some((whole, parts)) = times.split_first() else { return Vec::new() };
    let ranks = TENSOR_RANKS.into_iter().skip(1);
    let percent = |(time, ranks): (&f64, usize)| {
        (100.0 * whole / (time * ranks as f64)).round().clamp(1.0, 100.0) as u8
    };
    parts.iter().zip(ranks).map(percent).collect()
}

#[expect(clippy::disallowed_methods, reason = "it measures how long a step really takes")]
fn now() -> Instant {
    Instant::now()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn efficiency_is_the_share_of_the_whole_products_rate() {
        assert_eq!(percents(&[8.0, 4.0, 2.5, 2.0]), [100, 80, 50]);
        // Noise can make a part faster than the whole, so percentages are limited to 1 to 100.
        assert_eq!(percents(&[8.0, 3.9, 1e9]), [100, 1]);
        assert_eq!(percents(&[]), [0_u8; 0]);
    }
}
