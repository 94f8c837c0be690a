//! Tests of `DES-LOC`: compared with its algorithm in f64, at periods where it reduces to other methods, and
//! resumed after any synchronisation.
#![cfg(feature = "sync")]
#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

use std::collections::BTreeMap;
use std::sync::LazyLock;
use std::thread;

use farflung_base::{Algorithm, Philox};
use farflung_comm::{Communicator, memory};
use farflung_optim::local::{Adam, Sgd, adam, sgd};
use farflung_optim::sync::{
    AsynchronousSettings, DES_LOC, DILOCO, MomentPeriods, StepEnd, SyncSettings, Synchroniser,
};
use farflung_optim::{AverageConfig, Chain, ChainBuilder, OptimError};
use farflung_tensor::{Device, Param, ParamLayout, Shape, Tensor};

static CPU: LazyLock<Device> = LazyLock::new(|| Device::cpu(1).unwrap());
static LAYOUT: LazyLock<ParamLayout> = LazyLock::new(|| {
    ParamLayout::new([("w".to_owned(), Shape::from([8, 9])), ("b".to_owned(), Shape::from(5))])
});

const STEPS: u64 = 31;
const RANKS: usize = 3;
/// Weights in a mean, as of replicas with unequal numbers of tokens.
const WEIGHTS: [f64; RANKS] = [0.5, 1.0, 1.5];
const BETAS: [f64; 2] = [0.9, 0.95];
const EPS: f64 = 1e-3;
const RATE: f64 = 0.02;

/// Numbers of steps between averages of parameters, first moments and second moments.
#[derive(Debug, Clone, Copy)]
struct Periods {
    params: u64,
    moments: MomentPeriods,
}

const fn periods(params: u64, first: u64, second: u64) -> Periods {
    Periods { params, moments: MomentPeriods { first, second } }
}

/// Returns the indices of parameters in flat buffers.
fn places() -> Vec<usize> {
    LAYOUT.params().iter().flat_map(Param::range).collect()
}

fn random(seed: u64) -> Vec<f32> {
    let draw = Philox::new(seed, 0);
    let mut flat = vec![0.0; LAYOUT.len()];
    for (n, i) in places().into_iter().enumerate() {
        flat[i] = 2.0 * draw.uniform(n as u64) - 1.0;
    }
    flat
}

fn gradient(rank: usize, step: u64) -> Vec<f32> {
    random(100 + 10 * step + rank as u64)
}

fn flat(values: &[f32]) -> Tensor {
    CPU.tensor(values, values.len()).unwrap()
}

fn settings(comm: Communicator, periods: Periods, params: &Tensor) -> SyncSettings<'_> {
    SyncSettings {
        apart: Vec::new(),
        comm,
        device: &CPU,
        layout: &LAYOUT,
        average: AverageConfig { algorithm: Algorithm::Ring, ..AverageConfig::default() },
        every: periods.params,
        moments: periods.moments,
        outer_lr: 0.3,
        outer_momentum: 0.9,
        fragments: 1,
        delay: 0,
        mixing: 0.0,
        trigger: 0.0,
        asynchronous: AsynchronousSettings::default(),
        consensus_rate: 0.5,
        theta: 0.1,
        bits: 8,
        weights: WEIGHTS.to_vec(),
        rounds: None,
        params,
    }
}

struct Replica {
    number: usize,
    chain: Chain,
    sync: Box<dyn Synchroniser>,
    params: Tensor,
}

fn adam_of() -> ChainBuilder {
    let [beta1, beta2] = BETAS;
    let schedule = farflung_optim::LrSchedule::constant(RATE);
    adam(Adam { beta1, beta2, eps: EPS, weight_decay: 0.0, clip: None, schedule })
}

impl Replica {
    fn new(comm: Communicator, periods: Periods, chain: ChainBuilder) -> Self {
        let params = flat(&random(1));
        let number = comm.rank().index();
        let chain = chain.build(&CPU, &LAYOUT).unwrap();
        let sync = (DES_LOC.build)(settings(comm, periods, &params)).unwrap();
        Self { number, chain, sync, params }
    }

    /// Takes a step. Returns whether replicas synchronised after it.
    fn step(&mut self, step: u64) -> bool {
        let grads = flat(&gradient(self.number, step));
        let prepared = self.chain.prepare(&grads).unwrap();
        self.chain.commit(&mut self.params, &grads, prepared).unwrap();
        let after = StepEnd { step: step + 1, last: step + 1 == STEPS };
        if !self.sync.is_due(after) {
            return false;
        }
        let weight = WEIGHTS[self.number];
        // A synchronisation that is rolled back changes nothing.
        self.sync.exchange_accumulated(&self.params, &self.chain, after, weight).unwrap();
        self.sync.rollback();
        self.sync.exchange_accumulated(&self.params, &self.chain, after, weight).unwrap();
        self.sync.prepare().unwrap();
        self.sync.commit_accumulated(&mut self.params, &mut self.chain).unwrap();
        true
    }

    fn values(&self) -> Vec<f32> {
        self.params.to_vec().unwrap()
    }
}

fn on_ranks<T: Send>(rank: impl Fn(Communicator) -> T + Sync) -> Vec<T> {
    thread::scope(|scope| {
        let rank = &rank;
        let ranks: Vec<_> = memory::cluster(RANKS)
            .into_iter()
            .map(|endpoint| scope.spawn(move || rank(Communicator::new(endpoint))))
            .collect();
        ranks.into_iter().map(|r| r.join().unwrap()).collect()
    })
}

/// Computes Alg. 1 of the paper in f64 on values without padding. Before a step whose number, counted from 0,
/// is a multiple of a period, the values with that period are set to their mean. After the last step all
/// parameters are set to their mean.
fn reference(periods: Periods) -> Vec<f64> {
    let places = places();
    let pick = |flat: Vec<f32>| -> Vec<f64> { places.iter().map(|&i| f64::from(flat[i])).collect() };
    let len = places.len();
    let mean = |each: &mut [Vec<f64>]| {
        for i in 0..len {
            let all: f64 = each.iter().zip(WEIGHTS).map(|(x, weight)| weight * x[i]).sum();
            for x in &mut *each {
                x[i] = all / WEIGHTS.iter().sum::<f64>();
            }
        }
    };
    let mut x = vec![pick(random(1)); RANKS];
    let (mut m, mut v) = (vec![vec![0.0; len]; RANKS], vec![vec![0.0; len]; RANKS]);
    let [beta1, beta2] = BETAS;
    for t in 0..=STEPS {
        if t % periods.params == 0 || t == STEPS {
            mean(&mut x);
        }
        if t % periods.moments.first == 0 {
            mean(&mut m);
        }
        if t % periods.moments.second == 0 {
            mean(&mut v);
        }
        if t == STEPS {
            break;
        }
        let fix = |beta: f64| 1.0 - beta.powi(t as i32 + 1);
        for rank in 0..RANKS {
            let g = pick(gradient(rank, t));
            for i in 0..len {
                m[rank][i] = beta1 * m[rank][i] + (1.0 - beta1) * g[i];
                v[rank][i] = beta2 * v[rank][i] + (1.0 - beta2) * g[i] * g[i];
                x[rank][i] -= RATE * (m[rank][i] / fix(beta1)) / ((v[rank][i] / fix(beta2)).sqrt() + EPS);
            }
        }
    }
    x.swap_remove(0)
}

fn trained(periods: Periods, chain: fn() -> ChainBuilder) -> Vec<Vec<f32>> {
    on_ranks(|comm| {
        let mut replica = Replica::new(comm, periods, chain());
        for step in 0..STEPS {
            replica.step(step);
        }
        replica.values()
    })
}

fn off(got: &[f32], wanted: &[f64]) -> f64 {
    let pairs = || places().into_iter().zip(wanted);
    let off: f64 = pairs().map(|(i, w)| (f64::from(got[i]) - w).powi(2)).sum();
    (off / wanted.iter().map(|w| w * w).sum::<f64>()).sqrt()
}

#[test]
fn it_is_the_papers_algorithm() {
    // The paper's multiples, other orders of the periods, local Adam, averages at each step, and moments that
    // are never averaged.
    for periods in [
        periods(2, 6, 12),
        periods(2, 4, 6),
        periods(3, 9, 3),
        periods(4, 4, 4),
        periods(1, 1, 1),
        periods(5, 100, 100),
    ] {
        let wanted = reference(periods);
        let got = trained(periods, adam_of);
        assert!(got.windows(2).all(|pair| pair[0] == pair[1]), "{periods:?}: replicas differ");
        let off = off(&got[0], &wanted);
        assert!(off < 1e-5, "{periods:?}: {off:e}");
    }
    // Each period matters: no two of these runs have equal results by chance.
    let all = [periods(2, 6, 12), periods(2, 4, 12), periods(2, 6, 6), periods(4, 8, 12)].map(reference);
    for (i, one) in all.iter().enumerate() {
        for other in &all[..i] {
            let apart: f64 = one.iter().zip(other).map(|(a, b)| (a - b).abs()).sum();
            assert!(apart > 1e-3, "{apart}");
        }
    }
}

#[test]
fn with_momentum_at_each_step_it_is_an_average_of_gradients() {
    let chain = || sgd(Sgd { momentum: 0.9, ..Sgd::default() });
    let got = trained(periods(1, 1, 1), chain);
    let alone = on_ranks(|_| {
        let mut chain = chain().build(&CPU, &LAYOUT).unwrap();
        let mut params = flat(&random(1));
        for step in 0..STEPS {
            let mut mean = vec![0.0; LAYOUT.len()];
            for (rank, weight) in WEIGHTS.iter().enumerate() {
                let part = (weight / RANKS as f64) as f32;
                mean.iter_mut().zip(gradient(rank, step)).for_each(|(mean, g)| *mean += part * g);
            }
            let grads = flat(&mean);
            let prepared = chain.prepare(&grads).unwrap();
            chain.commit(&mut params, &grads, prepared).unwrap();
        }
        params.to_vec::<f32>().unwrap()
    });
    let places = places();
    let wanted: Vec<f64> = places.iter().map(|&i| f64::from(alone[0][i])).collect();
    assert!(off(&got[0], &wanted) < 1e-6);
}

#[test]
fn it_goes_on_from_any_meeting_with_the_same_bits() {
    let of = periods(2, 4, 6);
    let trace = |comm: Communicator, cut: Option<u64>| {
        let mut replica = Replica::new(comm.clone(), of, adam_of());
        let mut seen = Vec::new();
        for step in 0..STEPS {
            let meets = replica.step(step);
            seen.push(replica.values());
            if cut != Some(step) || !meets {
                continue;
            }
            let kept = |states: Vec<(&str, &Tensor)>| -> BTreeMap<String, Vec<f32>> {
                states.into_iter().map(|(name, state)| (name.to_owned(), state.to_vec().unwrap())).collect()
            };
            let chain = kept(replica.chain.states().collect());
            let (sync, steps) = (kept(replica.sync.states()), replica.sync.steps());
            replica = Replica::new(comm.clone(), of, adam_of());
            replica.params = flat(seen.last().unwrap());
            replica.chain.restore(step + 1, |name| chain.get(name).map(Vec::as_slice)).unwrap();
            replica.sync.on_params_set(&replica.params).unwrap();
            replica.sync.restore(steps, &|name| sync.get(name).cloned()).unwrap();
        }
        seen
    };
    let whole = on_ranks(|comm| trace(comm, None));
    for cut in (1..STEPS - 1).step_by(2) {
        assert!(on_ranks(|comm| trace(comm, Some(cut))) == whole, "cut after {cut}");
    }
}

/// A replica alone that replays the synchronisations of three others has their parameters, and those states of
/// the optimizer that they average.
#[test]
fn one_that_takes_no_part_replays_synchronisations_with_the_same_bits() {
    let of = periods(2, 4, 8);
    for method in [&DES_LOC, &DILOCO] {
        let replayed = on_ranks(|comm| {
            let build = |comm, params: &Tensor| (method.build)(settings(comm, of, params)).unwrap();
            let mut replica = Replica::new(comm.clone(), of, adam_of());
            replica.sync = build(comm, &replica.params);
            let alone = Communicator::new(memory::cluster(1).remove(0));
            let mut follower = Replica::new(alone.clone(), of, adam_of());
            follower.sync = build(alone, &follower.params);
            let mut moments = Vec::new();
            for step in 0..STEPS {
                if !replica.step(step) {
                    continue;
                }
                let averaged = replica.sync.averaged();
                moments.push(averaged.len() - 1);
                let averaged: BTreeMap<String, Vec<f32>> =
                    averaged.into_iter().map(|(name, x)| (name, x.to_vec().unwrap())).collect();
                let cut = |name: &str| averaged.get(name).map(|values| values[1..].to_vec());
                let refused = follower.sync.set_averaged(&follower.chain, &cut).unwrap_err();
                assert!(matches!(refused, OptimError::State { .. }), "{refused}");
                follower.sync.set_averaged(&follower.chain, &|name| averaged.get(name).cloned()).unwrap();
                follower.sync.prepare().unwrap();
                follower.sync.commit_accumulated(&mut follower.params, &mut follower.chain).unwrap();
                assert_eq!(follower.values(), replica.values(), "{} after {step}", method.name);
                let states = |replica: &Replica| -> Vec<Vec<f32>> {
                    replica.chain.states().map(|(_, state)| state.to_vec().unwrap()).collect()
                };
                let (own, others) = (states(&follower), states(&replica));
                assert_eq!(follower.sync.averaged_states(), replica.sync.averaged_states());
                for &number in replica.sync.averaged_states() {
                    assert_eq!(own[number], others[number], "state {number} after {step}");
                }
            }
            moments
        });
        let expected = [0, 1, 0, 2].into_iter().cycle().take(15).chain([0]);
        let expected: Vec<usize> = expected.map(|n| if method.name == "des-loc" { n } else { 0 }).collect();
        assert_eq!(replayed[0], expected, "{}", method.name);
    }
}

#[test]
fn a_rank_sends_what_the_periods_say() {
    let of = periods(2, 6, 12);
    let sent = on_ranks(|comm| {
        let mut replica = Replica::new(comm.clone(), of, adam_of());
        // Each synchronisation is done twice here.
        let before = comm.stats().sent.payload.0;
        for step in 0..12 {
            replica.step(step);
        }
        (comm.stats().sent.payload.0 - before) / 2
    });
    let (values, ranks) = (places().len() as u64, RANKS as u64);
    // Six means of parameters, two of first moments and one of second moments, by ring all-reduces.
    let wanted = 9 * 4 * values * 2 * (ranks - 1);
    assert_eq!(sent.iter().sum::<u64>(), wanted);
}

#[test]
fn periods_that_are_no_multiples_are_refused() {
    on_ranks(|comm| {
        let params = flat(&random(1));
        for (of, field) in
            [(periods(2, 3, 6), "first-moment-every"), (periods(2, 6, 0), "second-moment-every")]
        {
            let refused = (DES_LOC.build)(settings(comm.clone(), of, &params)).unwrap_err();
            assert!(matches!(refused, OptimError::Setting { field: f, .. } if f == field), "{refused}");
        }
    });
}
