//! Tests of chains: compared with PyTorch's optimizers, single transforms compared with f64 loops, and laws
//! that hold for all chains.
#![expect(
    clippy::float_cmp,
    clippy::unwrap_used,
    reason = "names, exact arithmetic, and helpers of tests that fail by panicking"
)]

use std::sync::LazyLock;

use farflung_base::Philox;
use farflung_optim::local::{LocalSettings, Lookahead, METHODS};
use farflung_optim::transform::{
    MuonScale, Outputs, add_decayed_weights, clip_by_global_norm, lookahead, orthogonalize, scale_by_adam,
    scale_by_schedule, trace,
};
use farflung_optim::{
    AdamW, Chain, ChainBuilder, Decay, LrSchedule, OptimError, OuterOptimizer, Sgd, adamw, diloco_outer,
    global_norm, sgd,
};
use farflung_tensor::{Device, ParamLayout, Shape, Tensor};

static CPU: LazyLock<Device> = LazyLock::new(|| Device::cpu(1).unwrap());

/// Returns a layout with a matrix and a vector, and padding after both.
fn layout() -> ParamLayout {
    ParamLayout::new([("w".to_owned(), Shape::from([9, 13])), ("b".to_owned(), Shape::from(13))])
}

fn flat(values: &[f32]) -> Tensor {
    CPU.tensor(values, values.len()).unwrap()
}

fn random(layout: &ParamLayout, seed: u64, scale: f32) -> Vec<f32> {
    let draw = Philox::new(seed, 0);
    let mut flat = vec![0.0; layout.len()];
    for i in layout.params().iter().flat_map(farflung_tensor::Param::range) {
        flat[i] = scale * (2.0 * draw.uniform(i as u64) - 1.0);
    }
    flat
}

fn step(chain: &mut Chain, params: &mut Tensor, grads: &[f32]) -> f64 {
    let grads = flat(grads);
    let prepared = chain.prepare(&grads).unwrap();
    chain.commit(params, &grads, prepared).unwrap();
    prepared.norm()
}

/// Returns some presets, some transforms alone before a learning rate, two chains of several transforms, and
/// every method with Lookahead.
fn all_chains() -> Vec<(&'static str, ChainBuilder)> {
    let schedule = LrSchedule::new(0.1, 0.01, 2, 8, Decay::Cosine).unwrap();
    let rate = || scale_by_schedule(schedule);
    let mut chains = vec![
        ("adamw", adamw(AdamW { weight_decay: 0.1, clip: Some(1.0), schedule, ..AdamW::default() })),
        (
            "sgd",
            sgd(Sgd {
                momentum: 0.9,
                nesterov: true,
                weight_decay: 0.1,
                clip: Some(1.0),
                schedule,
                ..Sgd::default()
            }),
        ),
        ("plain sgd", sgd(Sgd { schedule, ..Sgd::default() })),
        ("outer", diloco_outer(0.7, 0.9)),
        ("clip", Chain::new().then(clip_by_global_norm(0.5)).then(rate())),
        ("adam", Chain::new().then(scale_by_adam(0.9, 0.95, 1e-8)).then(rate())),
        ("trace", Chain::new().then(trace(0.9, false)).then(rate())),
        ("decay", Chain::new().then(add_decayed_weights(0.2)).then(rate())),
        // Three rewritten buffers: one pass.
        ("two traces", Chain::new().then(trace(0.9, false)).then(trace(0.5, true)).then(rate())),
        // Five rewritten buffers: two passes.
        (
            "five buffers",
            Chain::new()
                .then(trace(0.1, false))
                .then(scale_by_adam(0.9, 0.9, 1e-8))
                .then(trace(0.1, false))
                .then(rate()),
        ),
    ];
    let settings = LocalSettings {
        weight_decay: 0.1,
        clip: Some(1.0),
        schedule,
        centered: true,
        lookahead: Some(Lookahead { every: 2, alpha: 0.5 }),
        // Methods with local steps take some, so that all of their buffers are filled.
        freeze: 2,
        ..LocalSettings::default()
    };
    chains.extend(METHODS.iter().map(|method| (method.name, method.chain(settings))));
    chains
}

/// The transforms as loops in f64 over one parameter vector.
struct Reference {
    m: Vec<f64>,
    v: Vec<f64>,
    t: i32,
}

impl Reference {
    fn new(len: usize) -> Self {
        Self { m: vec![0.0; len], v: vec![0.0; len], t: 0 }
    }
    fn clip(u: &mut [f64], max: f64) {
        let norm = u.iter().map(|x| x * x).sum::<f64>().sqrt();
        for x in u {
            *x *= (max / (norm + 1e-6)).min(1.0);
        }
    }
    fn adam(&mut self, u: &mut [f64], b1: f64, b2: f64, eps: f64) {
        self.t += 1;
        for (i, g) in u.iter_mut().enumerate() {
            self.m[i] = b1 * self.m[i] + (1.0 - b1) * *g;
            self.v[i] = b2 * self.v[i] + (1.0 - b2) * *g * *g;
            let (m, v) = (self.m[i] / (1.0 - b1.powi(self.t)), self.v[i] / (1.0 - b2.powi(self.t)));
            *g = m / (v.sqrt() + eps);
        }
    }
    fn trace(&mut self, u: &mut [f64], mu: f64, nesterov: bool) {
        for (b, g) in self.m.iter_mut().zip(u) {
            *b = mu * *b + *g;
            *g = if nesterov { *g + mu * *b } else { *b };
        }
    }
    fn decay(u: &mut [f64], p: &[f64], layout: &ParamLayout, by: f64) {
        for i in layout.params()[0].range() {
            u[i] += by * p[i];
        }
    }
}

/// A transform as loops. Arguments: the reference's state, the update, the parameters before the step, the
/// layout.
type Rule = fn(&mut Reference, &mut [f64], &[f64], &ParamLayout);

#[test]
fn transforms_do_what_plain_loops_do() {
    let layout = layout();
    let schedule = LrSchedule::new(0.1, 0.01, 2, 8, Decay::Linear).unwrap();
    let rules: [(&str, ChainBuilder, Rule); 6] = [
        ("clip", Chain::new().then(clip_by_global_norm(2.0)), |_, u, _, _| Reference::clip(u, 2.0)),
        ("adam", Chain::new().then(scale_by_adam(0.8, 0.9, 1e-3)), |r, u, _, _| r.adam(u, 0.8, 0.9, 1e-3)),
        ("trace", Chain::new().then(trace(0.9, false)), |r, u, _, _| r.trace(u, 0.9, false)),
        ("nesterov", Chain::new().then(trace(0.9, true)), |r, u, _, _| r.trace(u, 0.9, true)),
        ("decay", Chain::new().then(add_decayed_weights(0.3)), |_, u, p, l| Reference::decay(u, p, l, 0.3)),
        (
            "all",
            Chain::new()
                .then(clip_by_global_norm(2.0))
                .then(add_decayed_weights(0.3))
                .then(scale_by_adam(0.8, 0.9, 1e-3))
                .then(trace(0.0, false)),
            |r, u, p, l| {
                Reference::clip(u, 2.0);
                Reference::decay(u, p, l, 0.3);
                r.adam(u, 0.8, 0.9, 1e-3);
            },
        ),
    ];
    for (name, chain, rule) in rules {
        let mut chain = chain.then(scale_by_schedule(schedule)).build(&CPU, &layout).unwrap();
        let start = random(&layout, 1, 1.0);
        let mut params = flat(&start);
        let mut want: Vec<f64> = start.iter().map(|&x| f64::from(x)).collect();
        let mut reference = Reference::new(want.len());
        for t in 0..10 {
            // Norms of about 0.7 and 7: below and above the bound of the clipping.
            let grads = random(&layout, 100 + t, if t % 2 == 0 { 0.1 } else { 1.0 });
            step(&mut chain, &mut params, &grads);
            let mut update: Vec<f64> = grads.iter().map(|&g| f64::from(g)).collect();
            rule(&mut reference, &mut update, &want, &layout);
            for (p, u) in want.iter_mut().zip(update) {
                *p -= schedule.rate(t) * u;
            }
            for (got, want) in params.to_vec::<f32>().unwrap().iter().zip(&want) {
                assert!((f64::from(*got) - want).abs() < 2e-6, "{name}, step {t}: {got} {want}");
            }
        }
    }
}

#[test]
fn presets_do_what_pytorch_does() {
    let shapes = [("w", vec![3, 4]), ("b", vec![5])];
    let layout = ParamLayout::new(shapes.map(|(n, s)| (n.to_owned(), Shape::new(&s).unwrap())));
    let constant = LrSchedule::constant(0.01);
    let warmup = LrSchedule::new(0.1, 0.1, 3, 5, Decay::Constant).unwrap();
    let adam =
        AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, clip: None, schedule: constant };
    let plain = Sgd { schedule: constant, ..Sgd::default() };
    let nesterov = Sgd { momentum: 0.9, nesterov: true, ..plain };
    let presets = [
        ("adamw", adamw(adam)),
        ("adamw-clip", adamw(AdamW { clip: Some(1.0), ..adam })),
        ("adamw-warmup", adamw(AdamW { clip: Some(1.0), schedule: warmup, ..adam })),
        ("sgd", sgd(Sgd { weight_decay: 0.1, ..plain })),
        ("sgd-momentum", sgd(Sgd { momentum: 0.9, weight_decay: 0.1, ..plain })),
        ("sgd-nesterov", sgd(nesterov)),
        ("sgd-nesterov-clip", sgd(Sgd { weight_decay: 0.1, clip: Some(1.0), schedule: warmup, ..nesterov })),
    ];
    let fixture = include_str!("../fixtures/steps.txt");
    let unpack = |line: &str| {
        let values: Vec<f64> = line.split(' ').map(|v| v.parse().unwrap()).collect();
        assert_eq!(values.len(), layout.count());
        values
    };
    let pack = |values: &[f64]| {
        let mut flat = vec![0.0; layout.len()];
        for (i, v) in layout.params().iter().flat_map(farflung_tensor::Param::range).zip(values) {
            flat[i] = *v as f32;
        }
        flat
    };
    let starting = |prefix: &str| {
        let prefix = format!("{prefix} ");
        let found: Vec<_> = fixture.lines().filter_map(|l| l.strip_prefix(&prefix)).collect();
        assert!(!found.is_empty(), "{prefix}");
        found
    };
    let start = unpack(starting("start")[0]);
    let grads: Vec<_> = starting("grad").into_iter().map(unpack).collect();
    for (name, chain) in presets {
        let mut chain = chain.build(&CPU, &layout).unwrap();
        let mut params = flat(&pack(&start));
        let lines = starting(name);
        assert_eq!(lines.len(), 5);
        for (t, line) in lines.into_iter().enumerate() {
            let (number, line) = line.split_once(' ').unwrap();
            assert_eq!(number, t.to_string());
            let (norm, line) = line.split_once(' ').unwrap();
            let (got, want): (f64, f64) =
                (step(&mut chain, &mut params, &pack(&grads[t])), norm.parse().unwrap());
            assert!((got - want).abs() < 1e-6 * want, "{name}, step {t}: norm {got} {want}");
            let got = params.to_vec::<f32>().unwrap();
            for (got, want) in got.iter().zip(pack(&unpack(line))) {
                assert!((got - want).abs() < 1e-6, "{name}, step {t}: {got} {want}");
            }
        }
    }
}

#[test]
fn clipping_below_the_norm_changes_no_bit() {
    let layout = layout();
    let plain = Sgd { schedule: LrSchedule::constant(0.1), ..Sgd::default() };
    let grads = random(&layout, 3, 0.1);
    let run = |clip: Option<f64>| {
        let mut chain = sgd(Sgd { clip, ..plain }).build(&CPU, &layout).unwrap();
        let mut params = flat(&random(&layout, 4, 1.0));
        step(&mut chain, &mut params, &grads);
        params.to_vec::<f32>().unwrap()
    };
    let norm = global_norm(&flat(&grads)).unwrap();
    assert_eq!(run(None), run(Some(norm * 1.01)));
    assert_ne!(run(None), run(Some(norm * 0.99)));
}

#[test]
fn vectors_do_not_decay() {
    let layout = layout();
    let start = random(&layout, 5, 1.0);
    for chain in [
        adamw(AdamW { weight_decay: 0.5, ..AdamW::default() }),
        sgd(Sgd { weight_decay: 0.5, ..Sgd::default() }),
    ] {
        let mut chain = chain.build(&CPU, &layout).unwrap();
        let mut params = flat(&start);
        step(&mut chain, &mut params, &vec![0.0; layout.len()]);
        let after = params.to_vec::<f32>().unwrap();
        let [w, b] = [0, 1].map(|i| layout.params()[i].range());
        assert_eq!(after[b.clone()], start[b]);
        for i in w {
            assert!((after[i] - start[i] * (1.0 - 5e-4)).abs() < 1e-7);
        }
    }
}

#[test]
fn padding_stays_zero_and_outside_the_norm() {
    let layout = layout();
    for (name, chain) in all_chains() {
        let mut chain = chain.build(&CPU, &layout).unwrap();
        let mut params = flat(&random(&layout, 6, 1.0));
        for t in 0..4 {
            let grads = random(&layout, 60 + t, 1.0);
            let want = grads.iter().map(|&g| f64::from(g).powi(2)).sum::<f64>().sqrt();
            let norm = step(&mut chain, &mut params, &grads);
            assert!((norm - want).abs() < 1e-5 * want, "{name}");
        }
        for buffer in std::iter::once(&params).chain(chain.states().map(|(_, s)| s)) {
            let values = buffer.to_vec::<f32>().unwrap();
            let [w, b] = [0, 1].map(|i| layout.params()[i].range());
            let padding = values[w.end..b.start].iter().chain(&values[b.end..]);
            assert!(padding.clone().count() > 0);
            assert!(padding.into_iter().all(|v| v.to_bits() == 0), "{name}");
            // Muon has second moments of vectors only.
            assert!([w, b].into_iter().any(|range| values[range].iter().any(|&v| v != 0.0)), "{name}");
        }
    }
}

#[test]
fn a_gradient_that_is_not_finite_changes_nothing() {
    let layout = layout();
    for (bad, clip) in [(f32::NAN, Some(1.0)), (f32::INFINITY, Some(1.0)), (f32::NEG_INFINITY, None)] {
        let mut chain = adamw(AdamW { clip, ..AdamW::default() }).build(&CPU, &layout).unwrap();
        let mut params = flat(&random(&layout, 7, 1.0));
        step(&mut chain, &mut params, &random(&layout, 8, 1.0));
        let state = |chain: &Chain| -> Vec<(String, Vec<f32>)> {
            chain.states().map(|(n, s)| (n.to_owned(), s.to_vec().unwrap())).collect()
        };
        let before = (params.to_vec::<f32>().unwrap(), state(&chain), chain.step());
        let mut grads = random(&layout, 9, 1.0);
        grads[100] = bad;
        let error = chain.prepare(&flat(&grads)).unwrap_err();
        assert!(matches!(error, OptimError::NotFinite { norm } if !norm.is_finite()), "{error}");
        assert_eq!((params.to_vec::<f32>().unwrap(), state(&chain), chain.step()), before);
    }
}

#[test]
fn a_restored_chain_continues_with_the_same_bits() {
    let layout = layout();
    for ((name, chain), (_, again)) in all_chains().into_iter().zip(all_chains()) {
        let mut chain = chain.build(&CPU, &layout).unwrap();
        let mut params = flat(&random(&layout, 10, 1.0));
        let grads: Vec<_> = (0..6).map(|t| random(&layout, 80 + t, 1.0)).collect();
        for g in &grads[..3] {
            step(&mut chain, &mut params, g);
        }
        let saved: Vec<(String, Vec<f32>)> =
            chain.states().map(|(n, s)| (n.to_owned(), s.to_vec().unwrap())).collect();
        let mut names: Vec<_> = saved.iter().map(|(n, _)| n).collect();
        names.dedup();
        assert_eq!(names.len(), saved.len(), "{name}");
        let mut copy = flat(&params.to_vec::<f32>().unwrap());
        let mut restored = again.build(&CPU, &layout).unwrap();
        let get = |n: &str| saved.iter().find(|(name, _)| name == n).map(|(_, v)| v.as_slice());
        if !saved.is_empty() {
            let last = &saved[saved.len() - 1].0;
            let missing = restored.restore(3, |n| get(n).filter(|_| n != last));
            assert!(matches!(missing, Err(OptimError::State { found: 0, .. })), "{name}");
            let short = restored.restore(3, |n| get(n).map(|v| if n == last { &v[1..] } else { v }));
            assert!(matches!(short, Err(OptimError::State { .. })), "{name}");
            let untouched = |s: &Tensor| s.to_vec::<f32>().unwrap().iter().all(|&v| v == 0.0);
            assert!(restored.step() == 0 && restored.states().all(|(_, s)| untouched(s)), "{name}");
        }
        restored.restore(chain.step(), get).unwrap();
        for g in &grads[3..] {
            step(&mut chain, &mut params, g);
            step(&mut restored, &mut copy, g);
        }
        let bits = |t: &Tensor| t.to_vec::<f32>().unwrap().iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&params), bits(&copy), "{name}");
        assert_eq!((chain.step(), restored.step()), (6, 6));
    }
}

#[test]
fn settings_outside_their_domain_are_refused() {
    let layout = layout();
    let field = |chain: ChainBuilder| match chain.build(&CPU, &layout) {
        Err(OptimError::Setting { transform, field, .. }) => format!("{transform}.{field}"),
        other => format!("{other:?}"),
    };
    let a = AdamW::default();
    assert_eq!(field(adamw(AdamW { beta1: 1.0, ..a })), "adam.beta1");
    assert_eq!(field(adamw(AdamW { beta2: -0.1, ..a })), "adam.beta2");
    assert_eq!(field(adamw(AdamW { eps: 0.0, ..a })), "adam.eps");
    assert_eq!(field(adamw(AdamW { eps: f64::NAN, ..a })), "adam.eps");
    assert_eq!(field(adamw(AdamW { weight_decay: f64::NAN, ..a })), "decay.decay");
    assert_eq!(field(adamw(AdamW { clip: Some(0.0), ..a })), "clip.max");
    assert_eq!(field(diloco_outer(0.7, f64::NAN)), "trace.momentum");
    assert_eq!(field(diloco_outer(0.7, 1.0)), "trace.momentum");
    assert_eq!(field(Chain::new().then(trace(0.9, false)).then(clip_by_global_norm(1.0))), "clip.position");
    assert_eq!(field(Chain::new().then(lookahead(5, 0.5)).then(trace(0.9, false))), "lookahead.position");
    assert_eq!(field(Chain::new().then(lookahead(0, 0.5))), "lookahead.every");
    assert_eq!(field(Chain::new().then(lookahead(5, 0.0))), "lookahead.alpha");
    // A vector cannot be orthogonalized.
    let all = Chain::new().then(orthogonalize(MuonScale::Original, Outputs::Rows));
    let error = all.build(&CPU, &layout).unwrap_err().to_string();
    assert_eq!(error, "orthogonalize: parameter `b` is [13], expected two dimensions");
}

#[test]
fn diloco_follows_the_trace_of_torchft() {
    // torchft/test_fixtures, streaming_diloco regression test 0, fragment 0: weights 1, gradients 2, inner rate
    // 1, outer rate 2; the fragment is synchronised after three steps.
    let layout = ParamLayout::new([("w".to_owned(), Shape::from([2, 3]))]);
    let settings = Sgd { schedule: LrSchedule::constant(1.0), ..Sgd::default() };
    let mut inner = sgd(settings).build(&CPU, &layout).unwrap();
    let mut start = vec![0.0; layout.len()];
    start[..6].fill(1.0);
    let mut grads = vec![0.0; layout.len()];
    grads[..6].fill(2.0);
    let mut params = flat(&start);
    let mut outer =
        OuterOptimizer::new(diloco_outer(2.0, 0.0).build(&CPU, &layout).unwrap(), &params).unwrap();
    let mut seen = vec![1.0];
    for t in 1..=4 {
        step(&mut inner, &mut params, &grads);
        if t == 3 {
            assert_eq!(outer.delta(&params).unwrap().to_vec::<f32>().unwrap()[0], 6.0);
            let prepared = outer.prepare().unwrap();
            outer.commit(&mut params, prepared).unwrap();
        }
        seen.push(params.to_vec::<f32>().unwrap()[0]);
    }
    assert_eq!(seen, [1.0, -1.0, -3.0, -11.0, -13.0]);
    assert_eq!(outer.anchor().to_vec::<f32>().unwrap()[5], -11.0);
}

#[test]
fn the_outer_momentum_is_nesterovs_and_survives_a_restart() {
    // The delta is 1 each time: v_t = (1 - mu^t) / (1 - mu), and the move is lr (1 + mu v_t); 1.33 at first.
    let layout = ParamLayout::new([("w".to_owned(), Shape::from(1))]);
    let (lr, mu) = (0.7, 0.9_f64);
    let new = |params: &Tensor| {
        OuterOptimizer::new(diloco_outer(lr, mu).build(&CPU, &layout).unwrap(), params).unwrap()
    };
    let mut params = CPU.zeros(layout.len()).unwrap();
    let mut outer = new(&params);
    let mut at = 0.0;
    for t in 1..=20 {
        if t == 7 {
            let saved: Vec<(String, Vec<f32>)> =
                outer.states().map(|(n, s)| (n.to_owned(), s.to_vec().unwrap())).collect();
            assert_eq!(
                saved.iter().map(|(n, _)| n.as_str()).collect::<Vec<_>>(),
                ["trace.momentum", "anchor"]
            );
            let get = |n: &str| saved.iter().find(|(name, _)| name == n).map(|(_, v)| v.as_slice());
            let mut restored = new(&CPU.zeros(layout.len()).unwrap());
            let missing = restored.restore(6, |n| get(n).filter(|_| n != "anchor"));
            assert!(matches!(missing, Err(OptimError::State { .. })));
            restored.restore(outer.step(), get).unwrap();
            outer = restored;
        }
        let moved: Vec<f32> = params
            .to_vec::<f32>()
            .unwrap()
            .iter()
            .enumerate()
            .map(|(i, p)| if i == 0 { p - 1.0 } else { *p })
            .collect();
        params.write(&moved).unwrap();
        outer.delta(&params).unwrap();
        let prepared = outer.prepare().unwrap();
        outer.commit(&mut params, prepared).unwrap();
        at -= lr * (1.0 + mu * (1.0 - mu.powi(t)) / (1.0 - mu));
        if t == 1 {
            assert!((at + 1.33).abs() < 1e-12);
        }
        let got = f64::from(params.to_vec::<f32>().unwrap()[0]);
        assert!((got - at).abs() < 1e-5 * at.abs(), "{t}: {got} {at}");
    }
    assert_eq!(outer.step(), 20);
}

/// A model in two parts, each with its own chain, takes the same step as the whole if both use the global norm.
#[test]
fn parts_that_know_the_global_norm_step_as_the_whole() {
    let shapes = [("w", Shape::from([8, 8])), ("b", Shape::from(64))].map(|(n, s)| (n.to_owned(), s));
    let whole = ParamLayout::new(shapes.clone());
    let values = |seed: f32| (0..128).map(|i| (i as f32 * 0.37 + seed).sin() * 3.0).collect::<Vec<f32>>();
    let (start, grad) = (values(0.0), values(1.0));
    let builder = || adamw(AdamW { clip: Some(1.0), ..AdamW::default() });
    let mut chain = builder().build(&CPU, &whole).unwrap();
    let (mut params, grads) = (CPU.tensor(&start, 128).unwrap(), CPU.tensor(&grad, 128).unwrap());
    let prepared = chain.prepare(&grads).unwrap();
    chain.commit(&mut params, &grads, prepared).unwrap();
    let squares = [0..64, 64..128].map(|range| farflung_optim::sum_of_squares(&grads, range).unwrap());
    let norm = squares.iter().sum::<f64>().sqrt();
    assert!(norm > 1.0 && (norm - prepared.norm()).abs() < 1e-6 * norm);
    for (i, shape) in shapes.into_iter().enumerate() {
        let at = 64 * i..64 * (i + 1);
        let mut chain = builder().build(&CPU, &ParamLayout::new([shape])).unwrap();
        let mut part = CPU.tensor(&start[at.clone()], 64).unwrap();
        let grads = CPU.tensor(&grad[at.clone()], 64).unwrap();
        let prepared = farflung_optim::Prepared::with_norm(norm).unwrap();
        chain.commit(&mut part, &grads, prepared).unwrap();
        let (got, want) = (part.to_vec::<f32>().unwrap(), params.to_vec::<f32>().unwrap());
        assert!(got.iter().zip(&want[at]).all(|(a, b)| (a - b).abs() < 1e-6), "{i}");
    }
    assert!(farflung_optim::Prepared::with_norm(f64::NAN).is_err());
}

#[test]
fn an_outer_step_that_would_not_be_finite_changes_nothing() {
    let layout = ParamLayout::new([("w".to_owned(), Shape::from(4))]);
    let flat = |value: f32| CPU.tensor(&vec![value; layout.len()], layout.len()).unwrap();
    let mut outer =
        OuterOptimizer::new(diloco_outer(1e25, 0.9).build(&CPU, &layout).unwrap(), &flat(1.0)).unwrap();
    let mut params = flat(-1e15);
    // The average is finite, but the step is not.
    outer.delta(&params).unwrap();
    let prepared = outer.prepare().unwrap();
    let before: Vec<_> = outer.states().map(|(_, state)| state.to_vec::<f32>().unwrap()).collect();
    for _ in 0..2 {
        let error = outer.try_step(prepared).unwrap_err();
        assert_eq!(
            error.to_string(),
            "the step would produce parameters that are not finite; it was not taken"
        );
        assert!(outer.commit(&mut params, prepared).is_err());
        let now: Vec<_> = outer.states().map(|(_, state)| state.to_vec::<f32>().unwrap()).collect();
        assert_eq!((now, outer.step()), (before.clone(), 0));
        assert_eq!(params.to_vec::<f32>().unwrap()[0], -1e15);
    }
    // A step that was tried and undone changes nothing.
    let mut outer =
        OuterOptimizer::new(diloco_outer(0.7, 0.9).build(&CPU, &layout).unwrap(), &flat(1.0)).unwrap();
    outer.delta(&flat(0.5)).unwrap();
    let prepared = outer.prepare().unwrap();
    outer.try_step(prepared).unwrap();
    outer.undo();
    assert_eq!((outer.step(), outer.anchor().to_vec::<f32>().unwrap()[0]), (0, 1.0));
}

/// In a pipeline a rank holds some of a model's tensors. In every optimizer the step of a tensor does not
/// depend on other tensors, to the bit.
#[test]
fn a_part_of_a_model_steps_as_within_the_whole() {
    let shapes: [(&str, &[usize]); 4] =
        [("h.0.w", &[9, 13]), ("h.0.b", &[13]), ("wte.weight", &[5, 4]), ("h.1.w", &[6, 4])];
    let shapes = shapes.map(|(name, shape)| (name.to_owned(), Shape::new(shape).unwrap()));
    let whole = ParamLayout::new(shapes.clone());
    let (start, grads) = (random(&whole, 20, 1.0), [random(&whole, 21, 1.0), random(&whole, 22, 0.1)]);
    let schedule = LrSchedule::constant(0.1);
    for method in METHODS {
        let settings = LocalSettings { weight_decay: 0.1, schedule, ..LocalSettings::default() };
        let steps = |layout: &ParamLayout, from: usize| {
            let at = from..from + layout.len();
            let mut chain = method.chain(settings).build(&CPU, layout).unwrap();
            let mut params = flat(&start[at.clone()]);
            for grads in &grads {
                step(&mut chain, &mut params, &grads[at.clone()]);
            }
            params.to_vec::<f32>().unwrap()
        };
        let all = steps(&whole, 0);
        for (param, shape) in whole.params().iter().zip(&shapes) {
            let part = ParamLayout::new([shape.clone()]);
            assert_eq!(steps(&part, param.start), all[param.start..][..part.len()], "{}", method.name);
        }
    }
}

#[test]
fn groups_decide_rates_and_decay_and_rules_without_effect_change_no_bit() {
    let layout = layout();
    let start = random(&layout, 30, 1.0);
    let grads = random(&layout, 31, 1.0);
    let run = |rules: &str| {
        let settings = AdamW { weight_decay: 0.1, clip: Some(1.0), ..AdamW::default() };
        let mut chain = adamw(settings).groups(rules.parse().unwrap()).build(&CPU, &layout).unwrap();
        let mut params = flat(&start);
        step(&mut chain, &mut params, &grads);
        params.to_vec::<f32>().unwrap()
    };
    let plain = run("none:lr=3");
    assert_eq!(run("*:lr=1"), plain);
    assert_eq!(run("w:decay=0.1;b:decay=0"), plain);
    let [w, b] = [0, 1].map(|i| layout.params()[i].range());
    let still = run("w:lr=0");
    assert_eq!((&still[w.clone()], &still[b.clone()]), (&start[w.clone()], &plain[b.clone()]));
    let all = run("*:decay=0.1");
    assert_eq!(all[w.clone()], plain[w]);
    for i in b {
        assert!((f64::from(plain[i] - all[i]) - 1e-3 * 0.1 * f64::from(start[i])).abs() < 2e-7);
    }
}
