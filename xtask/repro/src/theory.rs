//! Compares conditions on codecs and rates of convergence from theory with measurements on vectors and on a
//! quadratic.

use anyhow::Result;
use farflung::base::{Philox, Rank};
use farflung::compress::link::{LinkSpec, MemoryStore, SampleShape};
use farflung::compress::{CodecSpec, Compressor, Payload, RoundKey};
use farflung::optim::sync::{Graph, Neighbours};

use crate::harness::{Bench, Options, Report, Threshold};

pub(crate) const BENCH: Bench = Bench {
    name: "theory",
    claim: "codecs of boundaries lose less than AQ-SGD's condition allows; on a noisy quadratic, the cost of \
            compression with feedback, of staleness and of gossip falls as 1/T, faster than the 1/sqrt(nT) \
            of exact averages",
    source: "Wang et al. 2022, AQ-SGD, Theorem 3.1; Stich and Karimireddy 2020 (feedback, delays); Lian et \
             al. 2017",
    seed: 1337,
    run,
};

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    contraction(report)?;
    rates(report, options)
}

/// The condition of AQ-SGD's theorem is `|x - Q(x)| < c |x|` with this `c`.
const CONDITION: f64 = std::f64::consts::FRAC_1_SQRT_2;
const SHAPE: SampleShape = SampleShape { positions: 128, channels: 32 };

/// Returns a standard normal number.
fn normal(draw: &Philox, i: u64) -> f64 {
    let (a, b) = (f64::from(draw.uniform(2 * i)), f64::from(draw.uniform(2 * i + 1)));
    (-2.0 * (1.0 - a).ln()).sqrt() * (std::f64::consts::TAU * b).cos()
}

/// The quantisers of boundaries, and the bound on what each may lose: the theorem's condition, or none where
/// the loss is only reported.
const QUANTISERS: [(&str, Threshold); 8] = [
    ("f16", Threshold::AtMost(CONDITION)),
    ("direct:8", Threshold::AtMost(CONDITION)),
    ("direct:4", Threshold::AtMost(CONDITION)),
    ("direct:3", Threshold::AtMost(CONDITION)),
    ("direct:2", Threshold::None),
    ("sign", Threshold::None),
    ("topk:0.1/f16", Threshold::None),
    ("topk:0.5/f16", Threshold::AtMost(CONDITION)),
];

/// Measures `c_Q`, which is `|x - Q(x)| / |x|`, of each quantiser on normal numbers, with a scale for each
/// channel.
fn contraction(report: &mut Report<'_>) -> Result<()> {
    let len = (SHAPE.positions * SHAPE.channels) as u64;
    let draw = Philox::new(report.seed(), 0);
    let x: Vec<f32> = (0..len).map(|i| normal(&draw, i) as f32).collect();
    for (name, most) in QUANTISERS {
        let spec: LinkSpec = name.parse()?;
        let mut link = spec.build(SHAPE, |samples| Ok(Box::new(MemoryStore::new(samples))))?;
        let (mut payload, mut out) = (Payload::new(), vec![0.0; x.len()]);
        link.encode(&[0], &x, RoundKey::default(), &mut payload)?;
        link.decode(&[0], payload.view(), &mut out)?;
        let lost = crate::workers::relative_l2(&out, &x);
        report.row(&format!("{name}: c_Q, which AQ-SGD requires to be below 0.7071"), lost, "", most)?;
        if name == "sign" {
            // The scale is the mean of |x|, so a fraction 1 - 2 / pi of the square is lost.
            let off = (lost / (1.0 - std::f64::consts::FRAC_2_PI).sqrt() - 1.0).abs() * 100.0;
            report.row(
                "sign: c_Q, difference from the closed form sqrt(1 - 2/pi)",
                off,
                "%",
                Threshold::AtMost(2.0),
            )?;
        }
    }
    Ok(())
}

const WORKERS: usize = 8;
const DIM: usize = 64;
/// Standard deviation of a worker's gradient in each coordinate.
const NOISE: f64 = 1.0;
/// The learning rate is this divided by the square root of T.
const RATE: f64 = 1.0;

/// How workers on the quadratic share their gradients or parameters.
enum Sharing {
    /// The exact mean of gradients.
    Mean,
    /// The mean of gradients that were encoded and decoded by a codec.
    Coded(&'static str),
    /// The mean of gradients from this many steps ago.
    Stale(usize),
    /// Each worker mixes its parameters with its neighbours'.
    Gossip(Graph),
}

/// Returns the mean over `steps` steps of the squared gradient at the mean of all workers' parameters.
///
/// The function is `sum of l_i (x_i - 1)^2 / 2` with `l` from 0.1 to 1. All workers start at 0.
fn quadratic(sharing: &Sharing, steps: u64, seed: u64) -> Result<f64> {
    let curvature: Vec<f64> = (0..DIM).map(|i| 0.1_f64.powf(i as f64 / (DIM - 1) as f64)).collect();
    let rate = RATE / (steps as f64).sqrt();
    let mut params = vec![vec![0.0_f64; DIM]; WORKERS];
    let mut codecs: Vec<Box<dyn Compressor>> = Vec::new();
    if let Sharing::Coded(name) = sharing {
        let spec: CodecSpec = name.parse()?;
        codecs = (0..WORKERS).map(|_| spec.build()).collect();
    }
    let delay = if let Sharing::Stale(delay) = sharing { *delay } else { 0 };
    let mut late = std::collections::VecDeque::new();
    let (mut payload, mut decoded) = (Payload::new(), vec![0.0_f32; DIM]);
    let mut sum = 0.0;
    for step in 0..steps {
        let mean: Vec<f64> =
            (0..DIM).map(|i| params.iter().map(|p| p[i]).sum::<f64>() / WORKERS as f64).collect();
        sum += (0..DIM).map(|i| (curvature[i] * (mean[i] - 1.0)).powi(2)).sum::<f64>();
        let gradient = |worker: usize, params: &[f64]| -> Vec<f64> {
            // All ways of sharing use the same random numbers.
            let draw = Philox::new(seed + worker as u64, step);
            // Workers have different data: their curvatures differ by up to a half, and have the common
            // curvature as their mean.
            let turn = std::f64::consts::TAU * worker as f64 / WORKERS as f64;
            let own = |i: usize| curvature[i] * (1.0 + 0.5 * (turn + i as f64).cos());
            let noisy = |i: usize| own(i) * (params[i] - 1.0) + NOISE * normal(&draw, i as u64);
            (0..DIM).map(noisy).collect()
        };
        let gradients: Vec<Vec<f64>> = (0..WORKERS).map(|w| gradient(w, &params[w])).collect();
        if let Sharing::Gossip(graph) = sharing {
            let before = params.clone();
            for (worker, params) in params.iter_mut().enumerate() {
                let Neighbours { from, .. } = graph.meeting(worker as u32, WORKERS as u32, step);
                for i in 0..DIM {
                    let other = |n: &farflung::optim::sync::Neighbour| {
                        n.weight * (before[n.rank as usize][i] - before[worker][i])
                    };
                    params[i] += from.iter().map(other).sum::<f64>() - rate * gradients[worker][i];
                }
            }
            continue;
        }
        let mut update = vec![0.0; DIM];
        for (worker, gradient) in gradients.into_iter().enumerate() {
            let values = match codecs.get_mut(worker) {
                None => gradient,
                Some(codec) => {
                    let x: Vec<f32> = gradient.iter().map(|&g| g as f32).collect();
                    let key = RoundKey { seed, round: step, shard: 0, rank: Rank(worker as u32) };
                    codec.compress(&x, key, &mut payload)?;
                    codec.decompress(payload.view(), &mut decoded)?;
                    codec.commit();
                    decoded.iter().map(|&g| f64::from(g)).collect()
                }
            };
            update.iter_mut().zip(values).for_each(|(u, g)| *u += g / WORKERS as f64);
        }
        late.push_back(update);
        let Some(update) = (late.len() > delay).then(|| late.pop_front()).flatten() else { continue };
        for params in &mut params {
            params.iter_mut().zip(&update).for_each(|(p, u)| *p -= rate * u);
        }
    }
    Ok(sum / steps as f64)
}

/// Returns the exponent of a power law through the first and the last figure.
fn exponent(steps: &[u64], figures: &[f64]) -> f64 {
    let last = steps.len() - 1;
    (figures[last] / figures[0]).ln() / (steps[last] as f64 / steps[0] as f64).ln()
}

fn rates(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let steps: &[u64] = if options.quick { &[500, 4000] } else { &[1000, 4000, 16_000, 64_000] };
    let over = |sharing: Sharing| -> Result<Vec<f64>> {
        steps.iter().map(|&steps| quadratic(&sharing, steps, report.seed())).collect()
    };
    let exact = over(Sharing::Mean)?;
    let cases = [
        ("sign with feedback", Sharing::Coded("sign+ef")),
        ("top 10 % with feedback", Sharing::Coded("topk:0.1+ef")),
        ("int2 with feedback", Sharing::Coded("int2+ef")),
        ("4 steps stale", Sharing::Stale(4)),
        ("16 steps stale", Sharing::Stale(16)),
        ("ring", Sharing::Gossip(Graph::Ring)),
        ("exponential graphs", Sharing::Gossip(Graph::Exponential)),
        ("random pairs", Sharing::Gossip(Graph::RandomPairs { seed: 5 })),
    ];
    let cases =
        cases.into_iter().map(|(name, sharing)| Ok((name, over(sharing)?))).collect::<Result<Vec<_>>>()?;
    let control = over(Sharing::Coded("topk:0.1"))?;
    let last = steps.len() - 1;
    let many = steps[last];
    report.row(&format!("exact means: squared gradient at T = {many}"), exact[last], "", Threshold::None)?;
    report.row(
        "exact means: exponent of T, in theory -1/2",
        exponent(steps, &exact),
        "",
        Threshold::AtMost(-0.45),
    )?;
    for (name, found) in cases {
        let excess: Vec<f64> =
            found.iter().zip(&exact).map(|(a, b)| (a - b).max(f64::MIN_POSITIVE)).collect();
        let share = excess[last] / exact[last] * 100.0;
        report.row(
            &format!("{name}: squared gradient above that of exact means at T = {many}"),
            share,
            "%",
            Threshold::None,
        )?;
        // The excess is of higher order: it falls faster than the error of exact averages.
        let metric = format!("{name}: exponent of T of the excess over exact means, in theory -1");
        report.row(&metric, exponent(steps, &excess), "", Threshold::AtMost(-0.75))?;
    }
    let worse = (control[last] / exact[last] - 1.0) * 100.0;
    report.row(
        &format!("top 10 % without feedback: squared gradient above that of exact means at T = {many}"),
        worse,
        "%",
        Threshold::None,
    )
}
