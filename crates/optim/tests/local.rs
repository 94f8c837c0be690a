//! Every optimizer against PyTorch, or against its paper's formulas in NumPy where PyTorch has none: 20 steps.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

use farflung_optim::local::{
    AdaBelief, AdaBound, AdaGrad, Adam, AdamW, AmsGrad, Lamb, Lion, METHODS, Muon, RAdam, RmsProp, Sgd,
    Signum, adabelief, adabound, adagrad, adam, adamw, amsgrad, lamb, lion, muon, radam, rmsprop, sgd,
    signum,
};
use farflung_optim::transform::{MuonScale, lookahead};
use farflung_optim::{ChainBuilder, Decay, LrSchedule};
use farflung_tensor::{Device, ParamLayout, Shape};

const FIXTURE: &str = include_str!("fixtures/local.txt");
const STEPS: u64 = 20;

fn layout() -> ParamLayout {
    let shapes: [(&str, &[usize]); 5] = [
        ("h.0.wide", &[3, 5]),
        ("h.0.tall", &[5, 2]),
        ("wte.weight", &[3, 2]),
        ("h.0.bias", &[4]),
        ("h.0.zero", &[3]),
    ];
    ParamLayout::new(shapes.map(|(name, shape)| (name.to_owned(), Shape::new(shape).unwrap())))
}

/// The formulas of `make_local.py`; all values are exact in f32.
fn start(i: usize, count: usize) -> f32 {
    if i >= count - 3 { 0.0 } else { ((i * 61) % 127) as f32 / 32.0 - 63.0 / 32.0 }
}

fn gradient(i: usize, step: u64, count: usize) -> f32 {
    let (i, step) = (i as u64, step as i32);
    let vector = i as usize >= count - 7;
    if i == 0 || step == 3 || (step == 7 && vector) {
        return 0.0;
    }
    let t = step as u64;
    (((t * 7919 + i * 10473 + t * i * 31) % 509) as f32 - 254.0) / 128.0 * 2.0_f32.powi(step % 5 - 3)
}

fn chains() -> Vec<(&'static str, ChainBuilder)> {
    let schedule = LrSchedule::constant(0.05);
    let warm = LrSchedule::new(0.05, 0.05, 5, STEPS, Decay::Constant).unwrap();
    let (beta1, beta2, eps, weight_decay) = (0.8, 0.9, 1e-3, 0.1);
    let adam_settings = Adam { beta1, beta2, eps, weight_decay, clip: None, schedule };
    let adamw_settings = AdamW { beta1, beta2, eps, weight_decay, clip: None, schedule };
    let amsgrad_settings = AmsGrad { beta1, beta2, eps, weight_decay, clip: None, schedule };
    let rms = RmsProp { rho: 0.9, eps, weight_decay, schedule, ..RmsProp::default() };
    let muon_settings = Muon { momentum: 0.9, beta1, beta2, eps, weight_decay, schedule, ..Muon::default() };
    let bound =
        AdaBound { beta1, beta2, eps, weight_decay, gamma: 0.1, schedule: warm, ..AdaBound::default() };
    let sign = Signum { momentum: 0.9, weight_decay, clip: None, schedule };
    vec![
        (
            "sgd-dampening",
            sgd(Sgd { momentum: 0.8, dampening: 0.3, weight_decay, schedule, ..Sgd::default() }),
        ),
        ("adam", adam(adam_settings)),
        ("adamw", adamw(adamw_settings)),
        ("amsgrad", amsgrad(amsgrad_settings)),
        ("rmsprop", rmsprop(rms)),
        ("rmsprop-momentum", rmsprop(RmsProp { momentum: 0.7, ..rms })),
        ("rmsprop-centered", rmsprop(RmsProp { momentum: 0.7, centered: true, ..rms })),
        ("adagrad", adagrad(AdaGrad { lr_decay: 0.1, eps, weight_decay, clip: None, schedule })),
        ("radam", radam(RAdam { beta1, beta2: 0.95, eps, weight_decay, clip: None, schedule })),
        ("lookahead-adamw", adamw(AdamW { schedule: warm, ..adamw_settings }).then(lookahead(3, 0.4))),
        ("groups", adamw(adamw_settings).groups("h.0.*:lr=0.5;*.bias:lr=2,decay=0.3".parse().unwrap())),
        // Five buffers to rewrite: a pass has room for four.
        ("lookahead-amsgrad", amsgrad(amsgrad_settings).then(lookahead(3, 0.4))),
        ("muon", muon(muon_settings)),
        ("muon-match", muon(Muon { scale: MuonScale::MatchAdamW, ..muon_settings })),
        ("lamb", lamb(Lamb { beta1, beta2, eps, weight_decay, clip: None, schedule })),
        ("adabelief", adabelief(AdaBelief { beta1, beta2, eps: 1e-4, weight_decay, clip: None, schedule })),
        ("adabound", adabound(bound)),
        ("lion", lion(Lion { beta1: 0.85, beta2: 0.95, weight_decay, clip: None, schedule })),
        ("signum", signum(sign)),
        ("signsgd", signum(Signum { momentum: 0.0, ..sign })),
    ]
}

fn expected(name: &str, step: u64) -> Vec<f64> {
    let prefix = format!("{name} {step} ");
    let line = FIXTURE.lines().find_map(|line| line.strip_prefix(&prefix)).unwrap();
    line.split(' ').map(|value| value.parse().unwrap()).collect()
}

/// Relative l2 distance of what a device computes from the fixture, after steps 1 and 20.
fn errors(device: &Device, name: &str, chain: ChainBuilder) -> [f64; 2] {
    let layout = layout();
    let count = layout.count();
    let flat = |value: &dyn Fn(usize) -> f32| {
        let packed: Vec<f32> = (0..count).map(value).collect();
        device.tensor(&layout.unpack(&packed).unwrap(), layout.len()).unwrap()
    };
    let mut chain = chain.build(device, &layout).unwrap();
    let mut params = flat(&|i| start(i, count));
    let mut errors = [f64::NAN; 2];
    for step in 0..STEPS {
        let grads = flat(&|i| gradient(i, step, count));
        let prepared = chain.prepare(&grads).unwrap();
        chain.commit(&mut params, &grads, prepared).unwrap();
        if step == 0 || step + 1 == STEPS {
            let got = layout.pack(&params.to_vec::<f32>().unwrap()).unwrap();
            let want = expected(name, step + 1);
            assert_eq!(got.len(), want.len());
            let off: f64 = got.iter().zip(&want).map(|(g, w)| (f64::from(*g) - w).powi(2)).sum();
            let all: f64 = want.iter().map(|w| w * w).sum();
            errors[usize::from(step > 0)] = (off / all).sqrt();
        }
    }
    errors
}

#[test]
fn optimizers_do_what_pytorch_and_the_papers_do() {
    let device = Device::cpu(1).unwrap();
    for (name, chain) in chains() {
        let [first, last] = errors(&device, name, chain);
        assert!(
            first < 1e-6 && last < 1e-5,
            "{name}: off by {first:e} after one step, {last:e} after {STEPS}"
        );
    }
    // No method is left out.
    for method in METHODS {
        let found = chains().into_iter().any(|(name, _)| name.split('-').next() == Some(method.name));
        assert!(found, "{}", method.name);
    }
}

/// What a device's driver fuses or divides less exactly stays within the tolerance of the fixture.
#[cfg(feature = "wgpu")]
#[test]
fn a_device_does_the_same() {
    let device = Device::wgpu(0).unwrap();
    for (name, chain) in chains() {
        let [first, last] = errors(&device, name, chain);
        assert!(
            first < 1e-6 && last < 1e-5,
            "{name}: off by {first:e} after one step, {last:e} after {STEPS}"
        );
    }
}
