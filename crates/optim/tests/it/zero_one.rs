//! Tests of 0/1 Adam: compared with the paper's algorithm in f64 with its compression errors, and resumed after
//! any synchronisation.
#![cfg(feature = "sync")]
#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

use std::collections::BTreeMap;
use std::sync::LazyLock;
use std::thread;

use crate::signs::{Reduce, plain_mean};
use farflung_base::{Algorithm, Philox};
use farflung_comm::{Communicator, memory};
use farflung_optim::sync::{
    AsynchronousSettings, MomentPeriods, StepEnd, SyncSettings, Synchroniser, ZERO_ONE,
};
use farflung_optim::transform::{SyncSchedule, ZeroOneAdam};
use farflung_optim::{AverageConfig, Chain, LrSchedule, OnebitAdam, OptimError, onebit_adam, zero_one_adam};
use farflung_tensor::{Device, ParamLayout, Shape, Tensor};

static CPU: LazyLock<Device> = LazyLock::new(|| Device::cpu(1).unwrap());

const STEPS: u64 = 40;
const RANKS: usize = 3;
/// Weights in a mean, as of replicas with unequal numbers of tokens.
const WEIGHTS: [f64; RANKS] = [0.5, 1.0, 1.5];

const ROUNDS: SyncSchedule = SyncSchedule { freeze: 13, variance_doubling: 3, local_doubling: 6, most: 4 };

fn settings(rounds: SyncSchedule) -> ZeroOneAdam {
    let schedule = LrSchedule::new(0.02, 0.001, 5, STEPS, farflung_optim::Decay::Linear).unwrap();
    ZeroOneAdam { beta1: 0.9, beta2: 0.95, eps: 1e-6, rounds, schedule, weight_decay: 0.1 }
}

fn layout() -> ParamLayout {
    ParamLayout::new([("w".to_owned(), Shape::from([8, 8])), ("b".to_owned(), Shape::from(5))])
}

/// Returns the indices of parameters in flat buffers.
fn places() -> Vec<usize> {
    layout().params().iter().flat_map(farflung_tensor::Param::range).collect()
}

fn random(seed: u64) -> Vec<f32> {
    let draw = Philox::new(seed, 0);
    let mut flat = vec![0.0; layout().len()];
    for (n, i) in places().into_iter().enumerate() {
        flat[i] = 2.0 * draw.uniform(n as u64) - 1.0;
    }
    flat
}

/// Returns a rank's gradient in a step. The last element has no gradient before the variance is frozen.
fn gradient(rank: usize, step: u64) -> Vec<f32> {
    let mut values = random(100 + 10 * step + rank as u64);
    if step < ROUNDS.freeze {
        values[*places().last().unwrap()] = 0.0;
    }
    values
}

struct Replica {
    number: usize,
    weight: f64,
    chain: Chain,
    sync: Box<dyn Synchroniser>,
    params: Tensor,
}

fn flat(values: &[f32]) -> Tensor {
    CPU.tensor(values, values.len()).unwrap()
}

impl Replica {
    fn new(comm: Communicator, rounds: SyncSchedule, codec: &str, weight: f64) -> Self {
        let params = flat(&random(1));
        let number = comm.rank().index();
        let chain = zero_one_adam(settings(rounds), None).build(&CPU, &layout()).unwrap();
        let average = AverageConfig {
            codec: codec.parse().unwrap(),
            algorithm: Algorithm::Direct,
            ..AverageConfig::default()
        };
        let sync = (ZERO_ONE.build)(of(comm, average, chain.rounds(), &params)).unwrap();
        Self { number, weight, chain, sync, params }
    }

    /// Takes a step. Returns whether replicas are the same after it.
    fn step(&mut self, step: u64) -> bool {
        let mut grads = gradient(self.number, step);
        let average = self.sync.gradients();
        assert_eq!(average.is_some(), step < self.chain.rounds().unwrap().freeze);
        if let Some(average) = average {
            for g in &mut grads {
                *g *= self.weight as f32;
            }
            let mut mean = flat(&grads);
            average.all(&mut mean).unwrap();
            grads = mean.to_vec().unwrap();
        }
        let grads = flat(&grads);
        let prepared = self.chain.prepare(&grads).unwrap();
        self.chain.commit(&mut self.params, &grads, prepared).unwrap();
        if let Some(average) = self.sync.gradients() {
            average.commit();
        }
        let after = StepEnd { step: step + 1, last: step + 1 == STEPS };
        self.sync.mix(&mut self.params, after, 1.0).unwrap();
        if !self.sync.is_due(after) {
            return false;
        }
        // A synchronisation that is rolled back changes nothing.
        self.sync.exchange_accumulated(&self.params, &self.chain, after, self.weight).unwrap();
        self.sync.rollback();
        self.sync.exchange_accumulated(&self.params, &self.chain, after, self.weight).unwrap();
        self.sync.prepare().unwrap();
        self.sync.commit_accumulated(&mut self.params, &mut self.chain).unwrap();
        true
    }

    fn values(&self) -> Vec<f32> {
        self.params.to_vec().unwrap()
    }
}

fn of(
    comm: Communicator,
    average: AverageConfig,
    rounds: Option<SyncSchedule>,
    params: &Tensor,
) -> SyncSettings<'_> {
    static LAYOUT: LazyLock<ParamLayout> = LazyLock::new(layout);
    SyncSettings {
        apart: Vec::new(),
        comm,
        device: &CPU,
        layout: &LAYOUT,
        average,
        every: 4,
        moments: MomentPeriods::of(1),
        outer_lr: 1.0,
        outer_momentum: 0.0,
        fragments: 1,
        delay: 0,
        mixing: 0.0,
        trigger: 0.0,
        asynchronous: AsynchronousSettings::default(),
        consensus_rate: 0.5,
        theta: 0.1,
        bits: 8,
        weights: WEIGHTS.to_vec(),
        rounds,
        params,
    }
}

fn on_ranks<T: Send>(n: usize, rank: impl Fn(Communicator) -> T + Sync) -> Vec<T> {
    thread::scope(|scope| {
        let rank = &rank;
        let ranks: Vec<_> = memory::cluster(n)
            .into_iter()
            .map(|endpoint| scope.spawn(move || rank(Communicator::new(endpoint))))
            .collect();
        ranks.into_iter().map(|r| r.join().unwrap()).collect()
    })
}

/// Computes the algorithm in f64 on values without padding: with compression if `signs`, otherwise exactly.
fn reference(rounds: SyncSchedule, signs: bool) -> Vec<f64> {
    let ZeroOneAdam { beta1, beta2, eps, schedule, weight_decay, .. } = settings(rounds);
    let places = places();
    let matrix = layout().params()[0].range();
    let pick = |flat: Vec<f32>| -> Vec<f64> { places.iter().map(|&i| f64::from(flat[i])).collect() };
    let anchor = pick(random(1));
    let len = anchor.len();
    let mut reduce = Reduce::default();
    let mut mean = |each: &[Vec<f64>], reset: bool| {
        if reset {
            reduce = Reduce::default();
        }
        if signs { reduce.mean(each) } else { plain_mean(each) }
    };
    // Largest value of `m / sqrt(v)` for any gradients, by the Cauchy-Schwarz inequality.
    let longest = (1.0 - beta1) / ((1.0 - beta2) * (1.0 - beta1 * beta1 / beta2)).sqrt();
    let toward = |x: f64, v: f64, most: f64| {
        if v == 0.0 { 0.0 } else { (x / (v.sqrt() + eps)).clamp(-most, most) }
    };
    let decay = |i: usize| if matrix.contains(&places[i]) { weight_decay } else { 0.0 };
    let mut anchor = anchor;
    let mut x = vec![anchor.clone(); RANKS];
    let mut m = vec![vec![0.0; len]; RANKS];
    let mut u = vec![vec![0.0; len]; RANKS];
    let (mut v, mut rates) = (vec![0.0; len], 0.0);
    // Step in which the variance changes next, and the number of its changes so far.
    let (mut next, mut changes) = (0, 0);
    let mut adam = true;
    for step in 0..STEPS {
        let rate = schedule.rate(step);
        let grads: Vec<Vec<f64>> = (0..RANKS).map(|rank| pick(gradient(rank, step))).collect();
        let weighted = |each: &[Vec<f64>]| -> Vec<Vec<f64>> {
            each.iter().zip(WEIGHTS).map(|(x, w)| x.iter().map(|x| x * w).collect()).collect()
        };
        let local = step >= rounds.freeze;
        let used = if local {
            grads
        } else if step == next {
            next += 1 << (changes / rounds.variance_doubling);
            changes += 1;
            let g = plain_mean(&weighted(&grads));
            for i in 0..len {
                v[i] = beta2 * v[i] + (1.0 - beta2) * g[i] * g[i];
            }
            vec![g; RANKS]
        } else {
            adam = false;
            vec![mean(&weighted(&grads), false); RANKS]
        };
        let most = if adam && !local { f64::INFINITY } else { longest };
        for rank in 0..RANKS {
            for i in 0..len {
                m[rank][i] = beta1 * m[rank][i] + (1.0 - beta1) * used[rank][i];
                if local {
                    u[rank][i] += rate * m[rank][i];
                }
                let moves = toward(m[rank][i], v[i], most);
                x[rank][i] -= rate * (moves + decay(i) * x[rank][i]);
            }
        }
        if !local {
            anchor.clone_from(&x[0]);
            continue;
        }
        rates += rate;
        if rounds.synchronises(step) || step + 1 == STEPS {
            let all = mean(&weighted(&u), step == rounds.freeze);
            for i in 0..len {
                let moves = toward(all[i], v[i], longest * rates);
                anchor[i] -= moves + rates * decay(i) * anchor[i];
                for rank in 0..RANKS {
                    (m[rank][i], u[rank][i], x[rank][i]) = (all[i] / rates, 0.0, anchor[i]);
                }
            }
            rates = 0.0;
        }
    }
    x.swap_remove(0)
}

fn trained(rounds: SyncSchedule, codec: &str) -> Vec<Vec<f32>> {
    on_ranks(RANKS, |comm| {
        let weight = WEIGHTS[comm.rank().index()];
        let mut replica = Replica::new(comm, rounds, codec, weight);
        for step in 0..STEPS {
            replica.step(step);
        }
        replica.values()
    })
}

#[test]
fn it_is_the_papers_algorithm_with_its_compression_errors() {
    for (rounds, codec) in [
        (ROUNDS, "sign+ef"),
        (ROUNDS, "none"),
        (SyncSchedule { freeze: STEPS, ..ROUNDS }, "sign+ef"),
        (SyncSchedule { freeze: 5, local_doubling: 1, most: 3, ..ROUNDS }, "sign+ef"),
    ] {
        let wanted = reference(rounds, codec != "none");
        let places = places();
        for got in trained(rounds, codec) {
            let off = places.iter().zip(&wanted).map(|(&i, w)| (f64::from(got[i]) - w).powi(2)).sum::<f64>();
            let off = (off / wanted.iter().map(|w| w * w).sum::<f64>()).sqrt();
            assert!(off < 1e-5, "{rounds:?} {codec}: {off:e}");
        }
    }
}

#[test]
fn while_every_step_changes_the_variance_it_is_adam_without_bias_correction() {
    let rounds = SyncSchedule { freeze: STEPS, variance_doubling: STEPS, ..ROUNDS };
    let ZeroOneAdam { beta1, beta2, eps, schedule, weight_decay, .. } = settings(rounds);
    let adam = OnebitAdam { beta1, beta2, eps, freeze: STEPS, weight_decay, clip: None, schedule };
    let got = on_ranks(1, |comm| {
        let mut replica = Replica::new(comm, rounds, "sign+ef", 1.0);
        (0..STEPS).for_each(|step| assert!(replica.step(step)));
        replica.values()
    });
    let mut chain = onebit_adam(adam).build(&CPU, &layout()).unwrap();
    let mut params = flat(&random(1));
    for step in 0..STEPS {
        let grads = flat(&gradient(0, step));
        let prepared = chain.prepare(&grads).unwrap();
        chain.commit(&mut params, &grads, prepared).unwrap();
    }
    assert_eq!(got[0], params.to_vec::<f32>().unwrap());
}

#[test]
fn replicas_are_the_same_where_they_meet_and_a_run_goes_on_from_there() {
    let trace = |comm: Communicator, cut: Option<u64>| {
        let weight = WEIGHTS[comm.rank().index()];
        let mut replica = Replica::new(comm.clone(), ROUNDS, "sign+ef", weight);
        let (mut seen, mut met) = (Vec::new(), Vec::new());
        for step in 0..STEPS {
            let meets = replica.step(step);
            seen.push(replica.values());
            met.push(meets);
            if cut != Some(step) {
                continue;
            }
            assert!(meets, "a run is saved where replicas have met");
            let states: BTreeMap<String, Vec<f32>> =
                replica.chain.states().map(|(n, s)| (n.to_owned(), s.to_vec().unwrap())).collect();
            let residuals: BTreeMap<String, Vec<f32>> =
                replica.sync.average().save("").unwrap().into_iter().collect();
            let (steps, round) = (replica.sync.steps(), replica.sync.average().round());
            replica = Replica::new(comm.clone(), ROUNDS, "sign+ef", weight);
            replica.params = flat(seen.last().unwrap());
            replica.chain.restore(step + 1, |name| states.get(name).map(Vec::as_slice)).unwrap();
            replica.sync.on_params_set(&replica.params).unwrap();
            replica.sync.restore(steps, &|_| None).unwrap();
            let average = replica.sync.average_mut();
            average.restore("", round, |name| residuals.get(name).map(Vec::as_slice)).unwrap();
        }
        (seen, met)
    };
    let whole = on_ranks(RANKS, |comm| trace(comm, None));
    let met: Vec<u64> = (0..STEPS).filter(|&step| whole[0].1[step as usize]).collect();
    assert!(met.len() < STEPS as usize);
    for &step in &met {
        assert!(whole.windows(2).all(|pair| pair[0].0[step as usize] == pair[1].0[step as usize]), "{step}");
    }
    for cut in met {
        assert!(on_ranks(RANKS, |comm| trace(comm, Some(cut))) == whole, "cut after {cut}");
    }
}

#[test]
fn an_optimizer_without_rounds_is_refused() {
    on_ranks(1, |comm| {
        let params = flat(&random(1));
        let refused = (ZERO_ONE.build)(of(comm, AverageConfig::default(), None, &params)).unwrap_err();
        assert!(matches!(refused, OptimError::Setting { field: "optimizer", .. }), "{refused}");
    });
}
