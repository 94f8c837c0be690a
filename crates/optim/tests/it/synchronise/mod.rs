//! A small trainer around a method of synchronisation: random local steps, and the parameters of all replicas
//! after each.
#![allow(dead_code, reason = "each suite uses its part")]
#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

pub(crate) mod timed;

use std::collections::BTreeMap;
use std::sync::LazyLock;
use std::thread;

use farflung_base::{Nanos, Philox};
use farflung_comm::{Communicator, memory};
use farflung_optim::AverageConfig;
use farflung_optim::sync::{
    AsynchronousSettings, MomentPeriods, Quorum, Servers, StepEnd, SyncMethod, SyncSettings, Synchroniser,
    WorldSettings,
};
use farflung_tensor::{Device, ParamLayout, Shape, Tensor};

pub(crate) static CPU: LazyLock<Device> = LazyLock::new(|| Device::cpu(1).unwrap());

pub(crate) const STEPS: u64 = 27;

pub(crate) fn layout() -> ParamLayout {
    let shapes = [(5, 7), (9, 3), (4, 4), (8, 8), (3, 11)];
    ParamLayout::new(shapes.iter().enumerate().map(|(i, &(r, c))| (format!("p{i}"), Shape::from([r, c]))))
}

pub(crate) fn elements() -> Vec<usize> {
    layout().params().iter().flat_map(farflung_tensor::Param::range).collect()
}

pub(crate) fn random(seed: u64) -> Vec<f32> {
    let draw = Philox::new(seed, 0);
    let mut flat = vec![0.0; layout().len()];
    for i in elements() {
        flat[i] = 2.0 * draw.uniform(i as u64) - 1.0;
    }
    flat
}

/// Returns the direction of a rank's local step.
pub(crate) fn local(rank: usize, step: u64) -> Vec<f32> {
    random(100 * step + rank as u64)
}

#[derive(Clone, Copy)]
pub(crate) struct Case {
    pub(crate) every: u64,
    pub(crate) fragments: usize,
    pub(crate) delay: u64,
    pub(crate) mixing: f64,
    pub(crate) momentum: f64,
    pub(crate) codec: &'static str,
    pub(crate) warmup: u64,
    pub(crate) rate: f64,
    pub(crate) trigger: f64,
    pub(crate) asynchronous: AsynchronousSettings,
    pub(crate) theta: f64,
    pub(crate) bits: u32,
    /// Number of steps after which ranks take no steps of their own.
    pub(crate) still_after: u64,
}

pub(crate) const PLAIN: Case = Case {
    every: 6,
    fragments: 3,
    delay: 2,
    mixing: 0.5,
    momentum: 0.9,
    codec: "none",
    warmup: 0,
    rate: 0.5,
    trigger: 0.03,
    asynchronous: AsynchronousSettings {
        servers: Servers::Sharded,
        meet_every: 9,
        buffer: 0,
        staleness: 2,
        quorum: Quorum { least: 1, grace: Nanos::ZERO },
        interval: Nanos::ZERO,
        warmup: 0,
        tokens_per_step: 1.0,
        world: WorldSettings { lr: 1.0, momentum: 0.0, every: 0, mixing: 0.75 },
    },
    theta: 0.2,
    bits: 8,
    still_after: u64::MAX,
};

pub(crate) fn make(
    method: &SyncMethod,
    case: Case,
    comm: Communicator,
    weights: &[f64],
    params: &Tensor,
) -> Box<dyn Synchroniser> {
    let average =
        AverageConfig { codec: case.codec.parse().unwrap(), warmup: case.warmup, ..AverageConfig::default() };
    (method.build)(SyncSettings {
        apart: Vec::new(),
        comm,
        device: &CPU,
        layout: &layout(),
        average,
        every: case.every,
        moments: MomentPeriods::of(case.every),
        outer_lr: 0.7,
        outer_momentum: case.momentum,
        fragments: case.fragments,
        delay: case.delay,
        mixing: case.mixing,
        consensus_rate: case.rate,
        trigger: case.trigger,
        asynchronous: case.asynchronous,
        theta: case.theta,
        bits: case.bits,
        weights: weights.to_vec(),
        rounds: None,
        params,
    })
    .unwrap()
}

/// Own parameters and common ones, after each step.
pub(crate) type Trace = Vec<(Vec<f32>, Vec<f32>)>;

/// Trains on this number of ranks. With `cut`, the method is replaced by one with its saved state after that
/// step.
pub(crate) fn trace(
    method: &SyncMethod,
    case: Case,
    ranks: usize,
    weights: &[f64],
    cut: Option<u64>,
) -> Vec<Trace> {
    let rank = |comm: Communicator| {
        let number = comm.rank().index();
        let mut params = CPU.tensor(&random(1), layout().len()).unwrap();
        let mut sync = make(method, case, comm.clone(), &weights[..ranks], &params);
        let mut trace = Vec::new();
        for step in 1..=STEPS {
            let after = StepEnd { step, last: step == STEPS };
            let moved: Vec<f32> = params.to_vec::<f32>().unwrap();
            let moved: Vec<f32> = moved.iter().zip(local(number, step)).map(|(p, g)| p - 0.01 * g).collect();
            if step <= case.still_after {
                params.write(&moved).unwrap();
            }
            sync.mix(&mut params, after, weights[number]).unwrap();
            let mut meets = sync.is_due(after);
            while meets {
                sync.exchange(&params, after, weights[number]).unwrap();
                sync.prepare().unwrap();
                sync.commit(&mut params).unwrap();
                meets = sync.needs_another_exchange();
            }
            sync.start_exchanges(&params, after, weights[number]).unwrap();
            let common = sync.common().map_or_else(Vec::new, |common| common.to_vec().unwrap());
            trace.push((params.to_vec().unwrap(), common));
            if cut == Some(step) {
                sync.wait_in_flight().unwrap();
                let states = sync.states().into_iter().chain(sync.own_states());
                let states: BTreeMap<String, Vec<f32>> =
                    states.map(|(name, state)| (name.to_owned(), state.to_vec().unwrap())).collect();
                let saved: BTreeMap<String, Vec<f32>> =
                    sync.average().save("").unwrap().into_iter().collect();
                let (steps, round) = (sync.steps(), sync.average().round());
                sync = make(
                    method,
                    case,
                    comm.clone(),
                    &weights[..ranks],
                    &CPU.tensor(&random(2), layout().len()).unwrap(),
                );
                sync.restore(steps, &|name| states.get(name).cloned()).unwrap();
                sync.average_mut().restore("", round, |name| saved.get(name).map(Vec::as_slice)).unwrap();
            }
        }
        trace
    };
    thread::scope(|scope| {
        let ranks: Vec<_> = memory::cluster(ranks)
            .into_iter()
            .map(|endpoint| scope.spawn(|| rank(Communicator::new(endpoint))))
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Returns the relative distance of two vectors.
pub(crate) fn far(got: &[f32], wanted: &[f64]) -> f64 {
    let off: f64 = got.iter().zip(wanted).map(|(g, w)| (f64::from(*g) - w).powi(2)).sum();
    (off / wanted.iter().map(|w| w * w).sum::<f64>()).sqrt()
}
