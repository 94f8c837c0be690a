//! A model's layers and a file's machines in the form that the planners of the literature need.

use std::ops::Range;

use farflung_base::{Bytes, Link, Nanos, Rank, Topology};
use farflung_parallel::planner::dapple::PhaseCost;
use farflung_parallel::planner::operators::BlockShape;
use farflung_parallel::planner::uneven::{ChainLayer, ChainMachine};
use farflung_parallel::{Cluster, Machine, TensorEfficiency};
use farflung_zoo::ModelSpec;

use super::PlannedStage;
use crate::Result;
use crate::train::chain::{PipelineSizes, layers, machines};

/// Input of the planners.
pub(super) struct Facts {
    pub(super) layers: Vec<ChainLayer>,
    pub(super) devices: Vec<ChainMachine>,
    topology: Topology,
    /// Number of machines, and of devices per machine: the entries of the file if it has several and all have
    /// the same count above 1, else a single machine.
    pub(super) machines: u32,
    pub(super) each: u32,
    pub(super) microbatches: u32,
    /// Shape of a layer, for planners that split its operators.
    pub(super) block: BlockShape,
    /// The least efficiency over all machines.
    pub(super) efficiency: TensorEfficiency,
}

/// All devices treated as equal to the slowest of the file, for planners that assume equal devices.
#[derive(Debug, Clone, Copy)]
pub(super) struct EqualDevices {
    pub(super) flops: u64,
    /// The smallest memory in the file; practically unlimited if the file contains none.
    pub(super) memory: Bytes,
    /// `inside`: the slowest link within a machine; `across`: the slowest of all links.
    pub(super) inside: Link,
    pub(super) across: Link,
}

impl Facts {
    pub(super) fn new(model: &ModelSpec, cluster: &Cluster, sizes: PipelineSizes) -> Result<Self> {
        let counts: Vec<u32> = cluster.devices.iter().map(|Machine { count, .. }| *count).collect();
        let size = cluster.size() as u32;
        let measured: Vec<_> = cluster.devices.iter().map(|device| &device.tensor_efficiency).collect();
        let equal = counts.len() > 1 && counts[0] > 1 && counts.iter().all(|&count| count == counts[0]);
        let (machines_, each) = if equal { (counts.len() as u32, counts[0]) } else { (1, size) };
        Ok(Self {
            layers: layers(model, sizes.batch),
            devices: machines(model, cluster),
            topology: cluster.topology()?,
            machines: machines_,
            each,
            microbatches: sizes.microbatches,
            block: block_shape(model, sizes.batch),
            efficiency: TensorEfficiency::least(&measured),
        })
    }

    /// Returns the operations of a microbatch on layers, forward and backward.
    pub(super) fn operations(&self, layers: Range<usize>) -> u64 {
        self.layers[layers].iter().fold(0, |sum, layer| sum.saturating_add(layer.operations))
    }

    /// Returns two sums over the layers in bytes: weights, gradients and moments; and the activations of a
    /// microbatch.
    pub(super) fn memory(&self, layers: Range<usize>) -> (Bytes, Bytes) {
        let layers = &self.layers[layers];
        (layers.iter().map(|layer| layer.state).sum(), layers.iter().map(|layer| layer.activations).sum())
    }

    /// Returns the bytes of gradients of layers: a quarter of their state.
    pub(super) fn gradients(&self, layers: Range<usize>) -> Bytes {
        Bytes(self.memory(layers).0.0 / 4)
    }

    /// Returns the bytes of the hidden states of a microbatch.
    pub(super) fn hidden(&self) -> Bytes {
        self.layers[0].output
    }

    /// Returns the time of operations that these devices share equally, on the slowest of them.
    pub(super) fn compute(&self, operations: u64, devices: &[u32]) -> Nanos {
        let slowest = devices.iter().map(|&device| self.devices[device as usize].flops).min().unwrap_or(1);
        shared(operations, slowest, devices.len() as u32)
    }

    /// Returns the number of operations on whole matrices that take as long as `operations` when tensor ranks
    /// share them.
    pub(super) fn cut(&self, operations: u64, tensor: u32) -> u64 {
        operations.saturating_mul(100) / u64::from(self.efficiency.percent(tensor))
    }

    /// Returns the time of a ring's average of `bytes` over devices in this order.
    pub(super) fn ring(&self, bytes: Bytes, devices: &[u32]) -> Nanos {
        let neighbours = devices.iter().zip(devices.iter().cycle().skip(1));
        let link = self.slowest(neighbours.map(|(&a, &b)| (a, b)));
        ring(bytes, devices.len() as u32, link)
    }

    /// Returns the time to send a microbatch's hidden states from some devices to others, which share them
    /// equally.
    pub(super) fn hop(&self, from: &[u32], to: &[u32]) -> Nanos {
        let pairs = from.iter().flat_map(|&a| to.iter().map(move |&b| (a, b)));
        let share = from.len().min(to.len()).max(1) as u64;
        self.slowest(pairs).time(Bytes(self.hidden().0.div_ceil(share)))
    }

    fn slowest(&self, pairs: impl Iterator<Item = (u32, u32)>) -> Link {
        let link = |(a, b): (u32, u32)| {
            let (a, b) = (Rank(a), Rank(b));
            Link { bandwidth: self.topology.rate(a, b), latency: self.topology.link(a, b).latency }
        };
        pairs
            .filter(|(a, b)| a != b)
            .map(link)
            .max_by_key(|link| link.time(self.hidden()))
            .unwrap_or(Link::FREE)
    }

    /// Returns all devices as equal to the slowest.
    pub(super) fn equal(&self) -> EqualDevices {
        let all = self.devices.len() as u32;
        let pairs = |same: bool| {
            let each = self.each;
            (0..all)
                .flat_map(move |a| (0..all).map(move |b| (a, b)))
                .filter(move |(a, b)| !same || a / each == b / each)
        };
        EqualDevices {
            flops: self.devices.iter().map(|device| device.flops).min().unwrap_or(1),
            memory: self
                .devices
                .iter()
                .filter_map(|device| device.memory)
                .min()
                .unwrap_or(Bytes(u64::MAX / 4)),
            inside: self.slowest(pairs(true)),
            across: self.slowest(pairs(false)),
        }
    }

    /// Returns the times of the phases of a stage whose devices share each microbatch.
    pub(super) fn phases(&self, stage: &PlannedStage) -> PhaseCost {
        if let Some(phases) = stage.phases {
            return phases;
        }
        let tensor = stage.tensor.max(1);
        let operations = self.cut(self.operations(stage.layers.clone()), tensor);
        let groups = stage.devices.chunks(tensor as usize);
        // Two sums of hidden states per layer in each direction.
        let sums: Nanos = groups
            .map(|group| {
                self.ring(Bytes(self.hidden().0 * u64::from(tensor) / stage.devices.len() as u64), group)
            })
            .max()
            .unwrap_or_default();
        let sums = Nanos(sums.0.saturating_mul(2 * stage.layers.len() as u64));
        let copies: Vec<u32> = stage.devices.iter().copied().step_by(tensor as usize).collect();
        let forward = self.compute(operations / 3, &stage.devices);
        let again = if stage.recompute { forward } else { Nanos::ZERO };
        let average = self.ring(Bytes(self.gradients(stage.layers.clone()).0 / u64::from(tensor)), &copies);
        PhaseCost {
            forward: forward.saturating_add(sums),
            backward: self
                .compute(operations / 3 * 2, &stage.devices)
                .saturating_add(again)
                .saturating_add(sums),
            all_reduce: if stage.sharded { Nanos(average.0 / 2 * 3) } else { average },
        }
    }
}

/// Returns the time of operations that `devices` devices of a rate share.
pub(super) fn shared(operations: u64, flops: u64, devices: u32) -> Nanos {
    let rate = u128::from(flops.max(1)) * u128::from(devices.max(1));
    Nanos(u64::try_from(u128::from(operations) * 1_000_000_000 / rate).unwrap_or(u64::MAX))
}

/// Returns the time of a ring's average of `bytes` over `devices` devices: each sends and receives `2 (n - 1)`
/// parts.
pub(super) fn ring(bytes: Bytes, devices: u32, link: Link) -> Nanos {
    if devices < 2 {
        return Nanos::ZERO;
    }
    let part = link.time(Bytes(bytes.0.div_ceil(u64::from(devices))));
    Nanos(part.0.saturating_mul(2 * u64::from(devices - 1)))
}

/// Returns the numbers of tensor ranks that are tried for this number of devices: powers of two that divide it,
/// within one machine; if the plan must be `runnable`, only 1.
pub(super) fn tensor_degrees(devices: u32, each: u32, runnable: bool) -> Vec<u32> {
    let most = if runnable { 1 } else { devices.min(each) };
    (0..32)
        .map(|power| 1 << power)
        .take_while(|&t| t <= most)
        .filter(|t| devices.is_multiple_of(*t))
        .collect()
}

/// Returns the divisors of `n`.
pub(super) fn divisors(n: u32) -> Vec<u32> {
    (1..=n).filter(|d| n.is_multiple_of(*d)).collect()
}

/// Returns the sizes of a model's first block, for planners that divide its operators. A token's experts count
/// as one network.
fn block_shape(model: &ModelSpec, batch: u32) -> BlockShape {
    let block = model.blocks[0].block;
    let (attention, mlp) = (block.attention, block.mlp);
    let networks = block.experts.map_or(1, |experts| experts.per_token) as u64;
    BlockShape {
        tokens: u64::from(batch) * model.context as u64,
        context: model.context as u64,
        width: model.dim as u64,
        queries: attention.heads.query as u64,
        heads: attention.heads.kv as u64,
        qkv: (attention.heads.width() * attention.head_dim) as u64,
        attended: (attention.heads.query * attention.head_dim) as u64,
        inner: networks * mlp.width as u64,
        gated: mlp.gated,
        vectors: if block.norm.bias { 2 } else { 1 },
    }
}
