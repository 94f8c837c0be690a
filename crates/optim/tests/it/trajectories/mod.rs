//! Every optimizer whose gradients are averaged, as a case that any device can run: 20 steps, compared with
//! PyTorch's trajectory, or with NumPy's by the paper's formulas where PyTorch has none
//! (`fixtures/make_local.py`). The bench `local-optimizers` includes this file too, so the including module
//! must name the crates `optim` and `tensor`.

use super::optim::local::{
    AdaBelief, AdaBound, AdaGrad, Adam, AdamW, Lamb, Lion, Muon, RmsProp, Sgd, Signum, adabelief, adabound,
    adagrad, adam, adamw, amsgrad, lamb, lion, muon, radam, rmsprop, sgd, signum,
};
use super::optim::transform::{MuonScale, lookahead};
use super::optim::{ChainBuilder, Decay, Groups, LrSchedule, OptimError};
use super::tensor::{Device, ParamLayout, Shape};

const FIXTURE: &str = include_str!("../../fixtures/local.txt");
/// Number of steps of a trajectory.
pub(crate) const STEPS: u64 = 20;

/// Largest error of a trajectory, relative to the parameters' l2 norm: after the first step, and after the
/// last.
pub(crate) const MOST: [f64; 2] = [1e-6, 1e-5];

fn layout() -> ParamLayout {
    let shapes: [(&str, &[usize]); 5] = [
        ("h.0.wide", &[3, 5]),
        ("h.0.tall", &[5, 2]),
        ("wte.weight", &[3, 2]),
        ("h.0.bias", &[4]),
        ("h.0.zero", &[3]),
    ];
    ParamLayout::new(
        shapes.map(|(name, shape)| (name.to_owned(), Shape::new(shape).expect("two dimensions at most"))),
    )
}

/// Returns the initial parameters by the formulas of `make_local.py`; all values are exact in f32.
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

/// Returns the cases by name. A name begins with that of an optimizer or with `lookahead`, or is `groups`
/// (rules by name, with AdamW) or `signsgd` (Signum without momentum).
pub(crate) fn chains() -> Vec<(&'static str, ChainBuilder)> {
    let schedule = LrSchedule::constant(0.05);
    let warm = LrSchedule::new(0.05, 0.05, 5, STEPS, Decay::Constant).expect("rates are finite");
    let (beta1, beta2, eps, weight_decay) = (0.8, 0.9, 1e-3, 0.1);
    let adam_settings = Adam { beta1, beta2, eps, weight_decay, clip: None, schedule };
    let adamw_settings = AdamW { beta1, beta2, eps, weight_decay, clip: None, schedule };
    let rms = RmsProp { rho: 0.9, eps, weight_decay, schedule, ..RmsProp::default() };
    let muon_settings = Muon { momentum: 0.9, beta1, beta2, eps, weight_decay, schedule, ..Muon::default() };
    let bound =
        AdaBound { beta1, beta2, eps, weight_decay, gamma: 0.1, schedule: warm, ..AdaBound::default() };
    let sign = Signum { momentum: 0.9, weight_decay, clip: None, schedule };
    let rules: Groups = "h.0.*:lr=0.5;*.bias:lr=2,decay=0.3".parse().expect("they are rules");
    vec![
        (
            "sgd-dampening",
            sgd(Sgd { momentum: 0.8, dampening: 0.3, weight_decay, schedule, ..Sgd::default() }),
        ),
        ("adam", adam(adam_settings)),
        ("adamw", adamw(adamw_settings)),
        ("amsgrad", amsgrad(adam_settings)),
        ("rmsprop", rmsprop(rms)),
        ("rmsprop-momentum", rmsprop(RmsProp { momentum: 0.7, ..rms })),
        ("rmsprop-centered", rmsprop(RmsProp { momentum: 0.7, centered: true, ..rms })),
        ("adagrad", adagrad(AdaGrad { lr_decay: 0.1, eps, weight_decay, clip: None, schedule })),
        ("radam", radam(Adam { beta1, beta2: 0.95, eps, weight_decay, clip: None, schedule })),
        ("lookahead-adamw", adamw(AdamW { schedule: warm, ..adamw_settings }).then(lookahead(3, 0.4))),
        ("groups", adamw(adamw_settings).groups(rules)),
        // Five rewritten buffers, where a pass can have four.
        ("lookahead-amsgrad", amsgrad(adam_settings).then(lookahead(3, 0.4))),
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
    let line =
        FIXTURE.lines().find_map(|line| line.strip_prefix(&prefix)).expect("the fixture has all cases");
    line.split(' ').map(|value| value.parse().expect("the fixture has numbers")).collect()
}

/// Returns the relative l2 distance of a device's trajectory from the fixture's, after the first step and the
/// last.
pub(crate) fn errors(device: &Device, name: &str, chain: ChainBuilder) -> Result<[f64; 2], OptimError> {
    let layout = layout();
    let count = layout.count();
    let flat = |value: &dyn Fn(usize) -> f32| {
        let packed: Vec<f32> = (0..count).map(value).collect();
        device.tensor(&layout.unpack(&packed)?, layout.len())
    };
    let mut chain = chain.build(device, &layout)?;
    let mut params = flat(&|i| start(i, count))?;
    let mut errors = [f64::NAN; 2];
    for step in 0..STEPS {
        let grads = flat(&|i| gradient(i, step, count))?;
        let prepared = chain.prepare(&grads)?;
        chain.commit(&mut params, &grads, prepared)?;
        if step == 0 || step + 1 == STEPS {
            let got = layout.pack(&params.to_vec::<f32>()?)?;
            let want = expected(name, step + 1);
            assert_eq!(got.len(), want.len());
            let off: f64 = got.iter().zip(&want).map(|(g, w)| (f64::from(*g) - w).powi(2)).sum();
            let all: f64 = want.iter().map(|w| w * w).sum();
            errors[usize::from(step > 0)] = (off / all).sqrt();
        }
    }
    Ok(errors)
}
