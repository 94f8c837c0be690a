//! Tests of 1-bit LAMB: compared with the paper's algorithm in f64 with its compression errors, and resumed
//! from several steps.
#![cfg(feature = "sync")]
#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

use std::collections::BTreeMap;
use std::sync::LazyLock;
use std::thread;

use crate::signs::{Reduce, plain_mean};
use farflung_base::{Algorithm, Philox};
use farflung_comm::{Communicator, memory};
use farflung_optim::transform::FrozenLamb;
use farflung_optim::{Average, AverageConfig, Chain, LrSchedule, OptimError, onebit_lamb};
use farflung_tensor::{Device, Param, ParamLayout, Shape, Tensor};

static CPU: LazyLock<Device> = LazyLock::new(|| Device::cpu(1).unwrap());

const FREEZE: u64 = 12;
const STEPS: u64 = 40;
const RANKS: usize = 3;
const RATE: f64 = 0.01;
const SETTINGS: FrozenLamb =
    FrozenLamb { beta1: 0.9, beta2: 0.95, eps: 1e-6, freeze: FREEZE, weight_decay: 0.1 };

fn layout() -> ParamLayout {
    ParamLayout::new([
        ("w".to_owned(), Shape::from([8, 8])),
        ("b".to_owned(), Shape::from(5)),
        ("z".to_owned(), Shape::from([4, 6])),
    ])
}

fn random(seed: u64) -> Vec<f32> {
    let draw = Philox::new(seed, 0);
    let mut flat = vec![0.0; layout().len()];
    for (n, i) in layout().params().iter().flat_map(Param::range).enumerate() {
        flat[i] = 2.0 * draw.uniform(n as u64) - 1.0;
    }
    flat
}

/// Returns a rank's gradient in a step. Tensors have different sizes, and one element has no gradient in the
/// warm-up.
fn gradient(rank: usize, step: u64) -> Vec<f32> {
    let (layout, mut values) = (layout(), random(100 + 10 * step + rank as u64));
    for (param, scale) in layout.params().iter().zip([1.0, 30.0, 0.01]) {
        values[param.range()].iter_mut().for_each(|g| *g *= scale);
    }
    // Gradients become smaller, so that the factors of the coefficients change.
    let shrinks = if step < 20 { 1.0 } else { 0.3 };
    for g in &mut values {
        *g *= shrinks;
    }
    if step < FREEZE {
        values[layout.params()[1].range().end - 1] = 0.0;
    }
    values
}

fn flat(values: &[f32]) -> Tensor {
    CPU.tensor(values, values.len()).unwrap()
}

struct Rank {
    number: usize,
    chain: Chain,
    average: Average,
    params: Tensor,
}

impl Rank {
    fn new(comm: Communicator, settings: FrozenLamb, codec: &str) -> Self {
        let chain = onebit_lamb(settings, None, LrSchedule::constant(RATE));
        let average = AverageConfig {
            codec: codec.parse().unwrap(),
            algorithm: Algorithm::Direct,
            warmup: settings.freeze,
            ..AverageConfig::default()
        };
        Self {
            number: comm.rank().index(),
            chain: chain.build(&CPU, &layout()).unwrap(),
            average: Average::new(comm, &CPU, &layout(), average).unwrap(),
            params: flat(&random(1)),
        }
    }

    fn step(&mut self, step: u64) -> Vec<f32> {
        let grads = flat(&gradient(self.number, step));
        let mut sent = CPU.zeros(layout().len()).unwrap();
        // In two pieces, as when gradients become final one after the other.
        let cut = layout().params()[1].start;
        for range in [cut..layout().len(), 0..cut] {
            self.chain.contribute(&grads, range, 1.0, &mut sent).unwrap();
        }
        self.average.all(&mut sent).unwrap();
        let prepared = self.chain.prepare(&sent).unwrap();
        self.chain.commit(&mut self.params, &sent, prepared).unwrap();
        self.average.commit();
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

/// Computes the algorithm in f64 on values without padding. Checks that the factors of the coefficients change.
fn reference(settings: FrozenLamb, signs: bool) -> Vec<f64> {
    let FrozenLamb { beta1, beta2, eps, freeze, weight_decay } = settings;
    let layout = layout();
    let pick = |flat: Vec<f32>| -> Vec<f64> {
        layout.params().iter().flat_map(|p| flat[p.range()].to_vec()).map(f64::from).collect()
    };
    let mut tensors = Vec::new();
    let mut start = 0;
    for param in layout.params() {
        let len = param.shape.len();
        let decay = if param.shape.dims().len() > 1 { weight_decay } else { 0.0 };
        tensors.push((start..start + len, decay));
        start += len;
    }
    let longest = (1.0 - beta1) / ((1.0 - beta2) * (1.0 - beta1 * beta1 / beta2)).sqrt();
    let norm = |x: &[f64]| x.iter().map(|x| x * x).sum::<f64>().sqrt();
    let mut x = pick(random(1));
    let (mut m, mut v, mut w) = (vec![0.0; start], vec![0.0; start], vec![0.0; start]);
    let mut numbers = vec![[0.0, 1.0, 1.0]; tensors.len()];
    let (mut reduce, mut least, mut most) = (Reduce::default(), f64::INFINITY, 0.0_f64);
    for step in 0..STEPS {
        let grads: Vec<Vec<f64>> = (0..RANKS).map(|rank| pick(gradient(rank, step))).collect();
        let before = m.clone();
        if step < freeze {
            let g = plain_mean(&grads);
            for i in 0..start {
                m[i] = beta1 * m[i] + (1.0 - beta1) * g[i];
                v[i] = beta2 * v[i] + (1.0 - beta2) * g[i] * g[i];
                w[i] = v[i];
            }
        } else {
            let mut each = grads;
            for values in &mut each {
                for ((range, _), [_, _, s]) in tensors.iter().zip(&numbers) {
                    for i in range.clone() {
                        values[i] = s * (beta1 * m[i] + (1.0 - beta1) * values[i]);
                    }
                }
            }
            let mean = if signs { reduce.mean(&each) } else { plain_mean(&each) };
            for ((range, _), [_, _, s]) in tensors.iter().zip(&numbers) {
                for i in range.clone() {
                    m[i] = mean[i] / s;
                    let g = (m[i] - beta1 * before[i]) / (1.0 - beta1);
                    w[i] = beta2 * w[i] + (1.0 - beta2) * g * g;
                }
            }
        }
        for ((range, decay), [c, f, s]) in tensors.iter().zip(&mut numbers) {
            let of = |flat: &[f64]| flat[range.clone()].to_vec();
            let (mm, vv, ww, xx) = (of(&m), of(&v), of(&w), of(&x));
            let alone: Vec<f64> = mm.iter().zip(&vv).map(|(m, v)| m / (v.sqrt() + eps)).collect();
            let guarded: Vec<f64> = alone
                .iter()
                .zip(&vv)
                .map(|(u, v)| if *v > 0.0 { u.clamp(-longest, longest) } else { 0.0 })
                .collect();
            let alone = if step < freeze { alone } else { guarded };
            let update: Vec<f64> = alone.iter().zip(&xx).map(|(u, x)| u + decay * x).collect();
            let coefficient = if step < freeze {
                let ratio = (norm(&xx) / norm(&update)).clamp(0.01, 10.0);
                *c = 0.9 * *c + 0.1 * ratio;
                ratio
            } else {
                let ratios = vv.iter().zip(&ww).map(|(v, w)| (v.sqrt() + eps) / (w.sqrt() + eps));
                let mut factor = ratios.fold(0.0, f64::max);
                if *decay > 0.0 {
                    let share = (norm(&alone) / norm(&update)).min(1.0);
                    factor = factor * share + 1.0 - share;
                }
                *f = factor.clamp(0.5, 4.0).clamp(*f * 0.9, *f * 1.1);
                (least, most) = (least.min(*f), most.max(*f));
                *c * *f
            };
            if step + 1 == freeze {
                *s = (mm.len() as f64).sqrt() / norm(&mm);
            }
            range.clone().zip(update).for_each(|(i, u)| x[i] -= RATE * coefficient * u);
        }
    }
    assert!(freeze >= STEPS || most > 1.5 * least, "the factors stood still: {least} to {most}");
    x
}

#[test]
fn it_is_the_papers_algorithm_with_its_compression_errors() {
    for (settings, codec) in [
        (SETTINGS, "none"),
        (SETTINGS, "sign+ef"),
        (FrozenLamb { weight_decay: 0.0, ..SETTINGS }, "sign+ef"),
        (FrozenLamb { freeze: STEPS, ..SETTINGS }, "sign+ef"),
    ] {
        let wanted = reference(settings, codec != "none");
        let layout = layout();
        for got in on_ranks(|comm| {
            let mut rank = Rank::new(comm, settings, codec);
            (0..STEPS).map(|step| rank.step(step)).last().unwrap()
        }) {
            let got: Vec<f32> = layout.params().iter().flat_map(|p| got[p.range()].to_vec()).collect();
            let off = got.iter().zip(&wanted).map(|(g, w)| (f64::from(*g) - w).powi(2)).sum::<f64>();
            let off = (off / wanted.iter().map(|w| w * w).sum::<f64>()).sqrt();
            assert!(off < 1e-5, "{settings:?} {codec}: {off:e}");
        }
    }
}

#[test]
fn a_run_goes_on_from_any_step() {
    let trace = |comm: Communicator, cut: Option<u64>| {
        let mut rank = Rank::new(comm.clone(), SETTINGS, "sign+ef");
        let mut seen = Vec::new();
        for step in 0..STEPS {
            if cut == Some(step) {
                let states: BTreeMap<String, Vec<f32>> =
                    rank.chain.states().map(|(n, s)| (n.to_owned(), s.to_vec().unwrap())).collect();
                let saved: BTreeMap<String, Vec<f32>> = rank.average.save("").unwrap().into_iter().collect();
                let params = rank.params.to_vec::<f32>().unwrap();
                rank = Rank::new(comm.clone(), SETTINGS, "sign+ef");
                rank.params = flat(&params);
                rank.chain.restore(step, |name| states.get(name).map(Vec::as_slice)).unwrap();
                rank.average.restore("", step, |name| saved.get(name).map(Vec::as_slice)).unwrap();
            }
            seen.push(rank.step(step));
        }
        seen
    };
    let whole = on_ranks(|comm| trace(comm, None));
    assert!(whole.windows(2).all(|pair| pair[0] == pair[1]));
    for cut in [1, FREEZE - 1, FREEZE, FREEZE + 1, STEPS - 1] {
        assert!(on_ranks(|comm| trace(comm, Some(cut))) == whole, "cut at {cut}");
    }
}

#[test]
fn a_tensor_too_short_for_its_numbers_is_refused() {
    let short = ParamLayout::new([("b".to_owned(), Shape::from(2))]);
    let refused = onebit_lamb(SETTINGS, None, LrSchedule::constant(RATE)).build(&CPU, &short).unwrap_err();
    assert!(matches!(refused, OptimError::Setting { field: "elements", .. }), "{refused}");
}
