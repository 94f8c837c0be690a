//! Compares each optimizer's trajectory with PyTorch's or its paper's, and reports the loss that each reaches
//! on text.

use anyhow::Result;
use farflung::config::choice::{OptimizerKind, SyncKind};
use farflung::config::value::Setting as _;
use farflung::optim::local::METHODS;
use farflung::tensor::Device;
use farflung::{TrainConfig, optim, tensor};

use crate::harness::{Bench, Options, Report, Threshold};
use crate::workers::{JobTransport, again, config, job, on_all};

#[path = "../../../crates/optim/tests/it/trajectories/mod.rs"]
mod trajectories;

use trajectories::{MOST, STEPS, chains, errors};

pub(crate) const BENCH: Bench = Bench {
    name: "local-optimizers",
    claim: "20 steps of each optimizer are within 1e-5 of PyTorch's, or of its paper's formulas, in f64",
    source: "PyTorch 2.15; the papers that crates/optim names",
    seed: 1337,
    run,
};

/// Number of steps on text, in a full and in a quick run.
const TEXT_STEPS: [u64; 2] = [100, 10];

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let device = Device::cpu(1)?;
    for (name, chain) in chains() {
        let [first, last] = errors(&device, name, chain)?;
        report.row(&format!("{name}: error after 1 step"), first, "", Threshold::AtMost(MOST[0]))?;
        report.row(&format!("{name}: error after {STEPS} steps"), last, "", Threshold::AtMost(MOST[1]))?;
    }
    // There is no condition on these losses: most optimizers use the same learning rate, and no rate was tuned.
    let steps = TEXT_STEPS[usize::from(options.quick)];
    let first = TrainConfig { steps, workers: 1, ..config(report.seed(), !options.quick) };
    let text = job(first.clone(), JobTransport::Memory)?;
    for method in METHODS {
        let row = OptimizerKind::of(method);
        let rate = RATES.iter().find(|(name, _)| *name == method.name).map_or(1e-3, |(_, rate)| *rate);
        let own = |setting, or| method.default_of(setting).unwrap_or(or);
        let sync = method.averages.sync().and_then(SyncKind::parse);
        let config = TrainConfig {
            optimizer: row,
            sync: sync.unwrap_or(first.sync),
            lr: rate,
            beta2: own("beta2", first.beta2),
            eps: own("eps", first.eps),
            momentum: own("momentum", first.momentum),
            nesterov: own("nesterov", 0.0) != 0.0,
            ..first.clone()
        };
        let losses = on_all(&again(&text, config, JobTransport::Memory), |worker| {
            for _ in 0..steps {
                worker.step(false)?;
            }
            Ok(worker.evaluate()?)
        })?;
        let metric = format!("{}, rate {rate}: validation loss after {steps} steps", method.name);
        report.row(&metric, losses[0], "nats", Threshold::None)?;
    }
    Ok(())
}

/// Learning rates of some optimizers; the others use 1e-3.
const RATES: [(&str, f64); 5] =
    [("sgd", 1e-1), ("adagrad", 1e-2), ("lamb", 1e-2), ("lion", 1e-4), ("signum", 1e-4)];
