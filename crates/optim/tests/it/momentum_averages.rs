//! Tests of chains whose momentum replicas average: compared with the papers' algorithms in f64, with averages
//! that are uncompressed at first.
#![cfg(feature = "sync")]
#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

use std::sync::LazyLock;
use std::thread;

use farflung_base::Philox;
use farflung_comm::{Communicator, memory};
use farflung_optim::{
    AdamW, Average, AverageConfig, Chain, ChainBuilder, LrSchedule, OnebitAdam, adamw, onebit_adam, qadam,
};
use farflung_tensor::{Device, ParamLayout, Shape, Tensor};

static CPU: LazyLock<Device> = LazyLock::new(|| Device::cpu(1).unwrap());

const FREEZE: u64 = 6;
const STEPS: u64 = 20;
const SETTINGS: OnebitAdam = OnebitAdam {
    beta1: 0.9,
    beta2: 0.95,
    eps: 1e-6,
    freeze: FREEZE,
    weight_decay: 0.1,
    clip: None,
    schedule: LrSchedule::constant(0.01),
};

fn layout() -> ParamLayout {
    ParamLayout::new([("w".to_owned(), Shape::from([8, 8])), ("b".to_owned(), Shape::from(5))])
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

fn flat(values: &[f32]) -> Tensor {
    CPU.tensor(values, values.len()).unwrap()
}

/// Returns random values of parameters; padding is zero.
fn random(layout: &ParamLayout, seed: u64) -> Vec<f32> {
    let draw = Philox::new(seed, 0);
    let mut flat = vec![0.0; layout.len()];
    for i in layout.params().iter().flat_map(farflung_tensor::Param::range) {
        flat[i] = 2.0 * draw.uniform(i as u64) - 1.0;
    }
    flat
}

/// Returns a rank's gradient in a step. The last element has no gradient in the warm-up.
fn gradient(layout: &ParamLayout, rank: usize, step: u64) -> Vec<f32> {
    let mut values = random(layout, 100 + 10 * step + rank as u64);
    if step < FREEZE {
        values[layout.params()[1].range().end - 1] = 0.0;
    }
    values
}

struct Rank {
    chain: Chain,
    average: Average,
    params: Tensor,
}

impl Rank {
    fn new(builder: ChainBuilder, comm: Communicator, codec: &str) -> Self {
        let layout = layout();
        let config =
            AverageConfig { codec: codec.parse().unwrap(), warmup: FREEZE, ..AverageConfig::default() };
        Self {
            chain: builder.build(&CPU, &layout).unwrap(),
            average: Average::new(comm, &CPU, &layout, config).unwrap(),
            params: flat(&random(&layout, 1)),
        }
    }

    fn step(&mut self, rank: usize, step: u64) {
        let layout = layout();
        let grads = flat(&gradient(&layout, rank, step));
        let mut sent = CPU.zeros(layout.len()).unwrap();
        assert_eq!(self.chain.contributes(), step >= FREEZE);
        self.chain.contribute(&grads, 0..layout.len(), 1.0, &mut sent).unwrap();
        self.average.all(&mut sent).unwrap();
        let prepared = self.chain.prepare(&sent).unwrap();
        self.chain.commit(&mut self.params, &sent, prepared).unwrap();
        self.average.commit();
    }

    fn bits(&self) -> Vec<u32> {
        self.params.to_vec::<f32>().unwrap().into_iter().map(f32::to_bits).collect()
    }
}

/// Computes algorithm 1 of 1-bit Adam in f64, with a lossless compressor; with `corrects`, `QAdam`.
fn reference(ranks: usize, corrects: bool) -> Vec<f64> {
    let layout = layout();
    let mut x: Vec<f64> = random(&layout, 1).into_iter().map(f64::from).collect();
    let (mut m, mut v) = (vec![0.0; x.len()], vec![0.0; x.len()]);
    let OnebitAdam { beta1, beta2, eps, weight_decay, .. } = SETTINGS;
    for step in 0..STEPS {
        let grads: Vec<Vec<f32>> = (0..ranks).map(|rank| gradient(&layout, rank, step)).collect();
        for i in 0..x.len() {
            let of_rank = |grads: &Vec<f32>| beta1 * m[i] + (1.0 - beta1) * f64::from(grads[i]);
            let mean_m = grads.iter().map(of_rank).sum::<f64>() / ranks as f64;
            let mean_g = grads.iter().map(|g| f64::from(g[i])).sum::<f64>() / ranks as f64;
            m[i] = mean_m;
            if step < FREEZE {
                v[i] = beta2 * v[i] + (1.0 - beta2) * mean_g * mean_g;
            }
            let t = step + 1;
            let (fix_m, fix_v) = if corrects {
                (1.0 - beta1.powi(t as i32), 1.0 - beta2.powi(t.min(FREEZE) as i32))
            } else {
                (1.0, 1.0)
            };
            let decay = if layout.params()[0].range().contains(&i) { weight_decay } else { 0.0 };
            let moves = if v[i] == 0.0 { 0.0 } else { m[i] / fix_m / ((v[i] / fix_v).sqrt() + eps) };
            // Largest value of `m / sqrt(v)` for any gradients, by the Cauchy-Schwarz inequality.
            let longest = (1.0 - beta1) / (1.0 - beta2).sqrt() / (1.0 - beta1 * beta1 / beta2).sqrt();
            let moves = if step < FREEZE { moves } else { moves.clamp(-longest, longest) };
            x[i] -= 0.01 * (moves + decay * x[i]);
        }
    }
    x
}

#[test]
fn without_loss_they_are_the_papers_algorithms() {
    for (corrects, builder) in [
        (false, onebit_adam as fn(OnebitAdam) -> ChainBuilder),
        (true, qadam as fn(OnebitAdam) -> ChainBuilder),
    ] {
        let params = on_ranks(3, |comm| {
            let number = comm.rank().index();
            let mut rank = Rank::new(builder(SETTINGS), comm, "none");
            (0..STEPS).for_each(|step| rank.step(number, step));
            rank.params.to_vec::<f32>().unwrap()
        });
        let wanted = reference(3, corrects);
        let off = |params: &Vec<f32>| {
            let errors = params.iter().zip(&wanted).map(|(a, b)| (f64::from(*a) - b).powi(2)).sum::<f64>();
            (errors / wanted.iter().map(|b| b * b).sum::<f64>()).sqrt()
        };
        assert!(
            params.iter().all(|params| off(params) < 1e-6),
            "{:?}",
            params.iter().map(off).collect::<Vec<_>>()
        );
    }
}

#[test]
fn in_its_warm_up_qadam_is_adam_to_the_bit() {
    let settings = OnebitAdam { freeze: STEPS, ..SETTINGS };
    let OnebitAdam { beta1, beta2, eps, weight_decay, clip, schedule, .. } = settings;
    let mut chains = [qadam(settings), adamw(AdamW { beta1, beta2, eps, weight_decay, clip, schedule })]
        .map(|chain| (chain.build(&CPU, &layout()).unwrap(), flat(&random(&layout(), 1))));
    for step in 0..STEPS {
        for (chain, params) in &mut chains {
            let grads = flat(&random(&layout(), 100 + step));
            let prepared = chain.prepare(&grads).unwrap();
            chain.commit(params, &grads, prepared).unwrap();
        }
        let [one, other] = chains.each_ref().map(|(_, params)| params.to_vec::<f32>().unwrap());
        assert_eq!(one, other, "step {step}");
    }
}

#[test]
fn rounds_of_the_warm_up_are_exact_and_a_run_goes_on_from_any_round() {
    for codec in ["sign+ef", "int4+ef", "powersgd:2"] {
        let trace = |comm: Communicator, cut: Option<u64>| {
            let number = comm.rank().index();
            let mut rank = Rank::new(onebit_adam(SETTINGS), comm.clone(), codec);
            let mut bits = Vec::new();
            for step in 0..STEPS {
                if cut == Some(step) {
                    let saved = rank.average.save("x.").unwrap();
                    assert_eq!(step < FREEZE, saved.is_empty(), "{saved:?}");
                    let states: Vec<(String, Vec<f32>)> =
                        rank.chain.states().map(|(n, s)| (n.to_owned(), s.to_vec().unwrap())).collect();
                    let params = rank.params.to_vec::<f32>().unwrap();
                    rank = Rank::new(onebit_adam(SETTINGS), comm.clone(), codec);
                    rank.params = flat(&params);
                    let of = |all: &[(String, Vec<f32>)], name: &str| all.iter().position(|(n, _)| n == name);
                    rank.chain.restore(step, |name| of(&states, name).map(|i| &states[i].1[..])).unwrap();
                    rank.average
                        .restore("x.", step, |name| of(&saved, name).map(|i| &saved[i].1[..]))
                        .unwrap();
                }
                rank.step(number, step);
                bits.push(rank.bits());
            }
            bits
        };
        let whole = on_ranks(2, |comm| trace(comm, None));
        let plain = on_ranks(2, |comm| {
            let number = comm.rank().index();
            let mut rank = Rank::new(onebit_adam(SETTINGS), comm, "none");
            (0..STEPS)
                .map(|step| {
                    rank.step(number, step);
                    rank.bits()
                })
                .collect::<Vec<_>>()
        });
        assert_eq!(whole[0], whole[1], "{codec}");
        let warm = FREEZE as usize;
        assert_eq!(whole[0][..warm], plain[0][..warm], "{codec}");
        assert_ne!(whole[0][warm], plain[0][warm], "{codec}");
        for cut in [0, FREEZE - 1, FREEZE, FREEZE + 1, STEPS - 1] {
            assert_eq!(on_ranks(2, |comm| trace(comm, Some(cut))), whole, "{codec}, cut at {cut}");
        }
    }
}
