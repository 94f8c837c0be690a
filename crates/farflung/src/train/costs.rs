//! Predicted costs of parts of a model: operations, bytes, and times at a machine's rate.

use std::ops::Range;

use farflung_base::{Bytes, Nanos, Topology};
use farflung_parallel::pipeline::StageCost;
use farflung_parallel::{Cluster, Part, Plan, Recompute, Speed};
use farflung_zoo::profile::{DividedSequences, ModelProfile};
use farflung_zoo::{AxisShare, ModelSpec};

use super::activations::{budgeted, of_readers, profile, repeated};
use super::links;
use crate::{Result, RunSettings, TrainConfig};

/// Returns the predicted time of `flops` operations at a rate in FLOP/s.
pub(super) fn modelled(flops: f64, rate: f64) -> Nanos {
    Nanos::from_secs_f64(flops / rate)
}

/// The machines on which a plan runs.
#[derive(Debug, Clone, PartialEq)]
pub struct Machines {
    /// The links between the plan's ranks.
    pub topology: Topology,
    /// Speed of each rank's machine in FLOP/s.
    pub rates: Vec<f64>,
}

impl Machines {
    /// Returns the machines of a topology file that a plan names, in the order of its ranks.
    ///
    /// Errors: [`Error::Setting`](crate::Error::Setting) for a machine that the file does not have; those of
    /// [`Cluster::topology`].
    pub fn of_plan(plan: &Plan, model: &ModelSpec, cluster: &Cluster) -> Result<Self> {
        // With a topology file, the settings are not used.
        let config = TrainConfig::default().run_settings();
        let topology = links::of_plan(&config, plan, Some(cluster))?;
        Ok(Self { topology, rates: rates(&config, model, plan, Some(cluster)) })
    }
}

/// Returns the rate of each rank's machine in FLOP/s: from the topology file, else from the settings.
pub(super) fn rates(
    config: &RunSettings,
    model: &ModelSpec,
    plan: &Plan,
    cluster: Option<&Cluster>,
) -> Vec<f64> {
    let Some(cluster) = cluster else { return vec![config.compute_rate; plan.ranks() as usize] };
    let names = cluster.rank_names();
    let per_token = model.flops_per_token(model.context) as f64;
    let rate = |name: &String| {
        let device = names.iter().position(|n| n == name).and_then(|i| cluster.ranks().nth(i));
        match device.map(|device| device.speed) {
            Some(Speed::Flops(rate)) => rate as f64,
            Some(Speed::TokensPerSecond(tokens)) => tokens as f64 * per_token,
            None => config.compute_rate,
        }
    };
    plan.machines.iter().map(rate).collect()
}

/// A microbatch of a model, for computing costs.
#[derive(Debug, Clone)]
pub(super) struct Work {
    /// What a rank has of each layer.
    profile: ModelProfile,
    /// The whole layers. What a memory budget recomputes is the same on all ranks that divide them.
    whole: ModelProfile,
    /// Number of sequences.
    batch: usize,
}

impl Work {
    /// Runs the model's layers on the counting device.
    pub(super) fn new(model: &ModelSpec, batch: usize) -> Self {
        let whole = profile(model);
        Self { profile: whole.clone(), whole, batch }
    }

    /// Runs what each of the ranks along the tensor axis of a plan has of the model's layers; of replicas that
    /// divide sequences, the one with the most work.
    ///
    /// Errors: a rank has no piece of a layer, or of sequences.
    pub(super) fn of_each(model: &ModelSpec, plan: &Plan) -> Result<Vec<Self>> {
        let (whole, batch) = (of_readers(model, plan.context)?, plan.batch as usize);
        let weights = plan.shares_of_width();
        if weights.len() == 1 && !plan.context.divides() {
            return Ok(vec![Self::new(model, batch)]);
        }
        let positions = DividedSequences::ByContext(plan.context, plan.context.readers() - 1);
        let piece = |rank| {
            let share = AxisShare::new(rank, weights.clone())?;
            let profile = ModelProfile::of_pieces(model, [&share, &AxisShare::whole()], positions)?;
            Ok(Self { profile, whole: whole.clone(), batch })
        };
        (0..weights.len()).map(piece).collect()
    }

    /// Returns the positions of a whole sequence.
    pub(super) const fn positions(&self) -> Range<usize> {
        0..self.profile.context
    }

    /// Returns the bytes of the hidden states of a microbatch.
    pub(super) const fn hidden_bytes(&self) -> Bytes {
        Bytes(self.batch as u64 * self.profile.hidden)
    }

    /// Returns the forward operations of one token on a part: of its matrices, of its attention over a whole
    /// context, and of its head.
    fn token_flops(&self, layers: &Range<u32>) -> [f64; 3] {
        let context = self.profile.context;
        let mut blocks = [0.0; 2];
        for block in self.profile.each_block().skip(layers.start as usize).take(layers.len()) {
            let products = block.products_per_token(context);
            blocks.iter_mut().zip(products).for_each(|(sum, more)| *sum += more as f64);
        }
        let is_last = layers.end as usize == self.profile.layers();
        let head = if is_last { self.profile.head.products_per_token(context)[0] as f64 } else { 0.0 };
        [blocks[0], blocks[1], head]
    }

    /// Returns the operations of a part for a slice of a microbatch, forward and backward. Summed over all
    /// slices, they equal those of the whole microbatch.
    pub(super) fn slice_flops(&self, layers: &Range<u32>, slice: &Range<usize>) -> f64 {
        let [matrices, attention, head] = self.token_flops(layers);
        let context = self.profile.context;
        let pairs = |tokens: usize| (tokens * (tokens + 1)) as f64;
        let seen = (pairs(slice.end) - pairs(slice.start)) / pairs(context) * context as f64;
        3.0 * self.batch as f64 * (slice.len() as f64 * (matrices + head) + seen * attention)
    }

    /// Returns the operations of a part that adds `positions` of one sequence to its cache and, at the end of
    /// the model, computes the logits of the last one.
    pub(super) fn decoding_flops(&self, layers: &Range<u32>, positions: &Range<usize>) -> f64 {
        let [.., head] = self.token_flops(layers);
        let forward = self.slice_flops(layers, positions) / (3.0 * self.batch as f64);
        forward - head * (positions.len().saturating_sub(1)) as f64
    }

    /// Returns the bytes of the hidden states of one token.
    pub(super) const fn hidden_bytes_per_token(&self) -> Bytes {
        Bytes(self.profile.hidden / self.profile.context as u64)
    }

    /// Returns the predicted times of a part for a microbatch, on a machine of rate `rate`. Summed over all
    /// parts, they equal those of the whole model.
    ///
    /// Errors: a memory budget into which the part's layers do not fit.
    pub(super) fn stage_cost(&self, part: &Part, rate: f64) -> Result<StageCost> {
        let tokens = (self.batch * self.profile.context) as f64;
        let [matrices, attention, head] = self.token_flops(&part.layers);
        let time = |flops: f64| modelled(tokens * flops, rate);
        let forward = matrices + attention;
        let count = part.layers.end - part.layers.start;
        let within = budgeted(part, &self.whole, self.batch)?;
        let repeated = within.map_or(0, |plan| repeated(&plan, part.layers.len()));
        Ok(StageCost {
            forward: time(forward + head),
            input: time(matrices + 2.0 * attention + head),
            weight: time(matrices + head),
            recompute: match part.recompute {
                Recompute::Layers(_) if count == 0 => Nanos::ZERO,
                Recompute::Layers(again) => time(forward * f64::from(again) / f64::from(count)),
                Recompute::Within(_) => time(forward * repeated as f64 / f64::from(count)),
                Recompute::Full if part.layers.len() < self.profile.layers() => time(forward + head),
                Recompute::Full | Recompute::EachLayer => time(forward),
                Recompute::None => Nanos::ZERO,
            },
            ..StageCost::default()
        })
    }
}
