//! Checks that `DiLoCo` with one inner step of SGD is data-parallel training, and that with H inner steps it
//! sends H times fewer bytes.

use anyhow::Result;
use farflung::TrainConfig;
use farflung::comm::ReduceOp;
use farflung::config::choice::SyncKind;
use farflung::optim::sync::DILOCO;
use farflung::train::Trainer;

use crate::harness::{Bench, Options, Report, Threshold};
use crate::workers::{JobTransport, again, config, job, on_all, plain_sgd, relative_l2};

pub(crate) const BENCH: Bench = Bench {
    name: "diloco-exact",
    claim: "DiLoCo with H=1, SGD as the inner optimizer, outer learning rate 1 and no momentum equals ddp; \
            with H inner steps it sends exactly H times fewer bytes",
    source: "Douillard et al. 2023, DiLoCo, algorithm 1",
    seed: 1337,
    run,
};

const STEPS: usize = 20;

/// Results of a worker's 20 steps.
struct Trace {
    losses: Vec<f64>,
    params: Vec<f32>,
    /// Bytes sent in the steps: without frames and votes, and with both.
    sent: (u64, u64),
}

/// Trains one worker. `window` is the number of steps between two votes. Each vote carries the losses of these
/// steps.
fn trace(worker: &mut Trainer, window: usize) -> Result<Trace> {
    // While trainers are built, ranks tell each other their devices. These bytes have been sent by now, and do
    // not count.
    let before = worker.comm().stats().sent;
    let mut losses = Vec::new();
    for _ in 0..STEPS {
        losses.push(worker.step(false)?.loss);
    }
    // All sends of these steps are counted by now. The barrier below keeps a rank from leaving while another
    // still needs it.
    let sent = worker.comm().stats().sent;
    let sent = (sent.payload.0 - before.payload.0, sent.wire.0 - before.wire.0);
    // Measures the bytes of a vote, which has a loss for each step since the last one and the request to stop.
    // They are subtracted below.
    let before = worker.comm().stats().sent.payload.0;
    worker.comm().all_reduce(&mut vec![0.0_f64; window + 1], ReduceOp::Sum)?;
    let vote = worker.comm().stats().sent.payload.0 - before;
    let sent = (sent.0 - vote * (STEPS / window) as u64, sent.1);
    let trace = Trace { losses, params: worker.params().to_vec()?, sent };
    worker.comm().barrier()?;
    Ok(trace)
}

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let ddp = plain_sgd(TrainConfig { workers: 4, ..config(report.seed(), !options.quick) }, 0.1);
    let first = job(ddp.clone(), JobTransport::Memory)?;
    let by_ddp = on_all(&first, |worker| trace(worker, 1))?;
    for every in [1_u64, 5, 10] {
        let config = TrainConfig {
            sync: SyncKind::of(&DILOCO),
            sync_every: every,
            outer_lr: 1.0,
            outer_momentum: 0.0,
            steps: STEPS as u64,
            ..ddp.clone()
        };
        let job = again(&first, config, JobTransport::Memory);
        let traces = on_all(&job, |worker| trace(worker, every as usize))?;
        if every == 1 {
            let both = || traces.iter().zip(&by_ddp);
            let params = both().map(|(a, b)| relative_l2(&a.params, &b.params)).fold(0.0, f64::max);
            // Both differences are relative: parameters that differ by rounding in f32 give losses that differ
            // by as much, relative to their size.
            let pairs = both().flat_map(|(a, b)| a.losses.iter().zip(&b.losses));
            let losses = pairs.map(|(a, b)| (a - b).abs() / b).fold(0.0, f64::max);
            let metric = "H=1: parameters after 20 steps compared with ddp, relative l2";
            report.row(metric, params, "", Threshold::AtMost(1e-6))?;
            let metric = "H=1: largest relative difference of 20 losses from ddp";
            report.row(metric, losses, "", Threshold::AtMost(1e-6))?;
        }
        let off = traces.iter().zip(&by_ddp).filter(|(a, b)| a.sent.0 * every != b.sent.0).count();
        let ratio = by_ddp[0].sent.0 as f64 / traces[0].sent.0 as f64;
        report.row(&format!("H={every}: payload, times smaller than ddp's"), ratio, "x", Threshold::None)?;
        let metric = format!("H={every}: ranks whose ratio is not exactly H");
        report.row(&metric, off as f64, "ranks", Threshold::AtMost(0.0))?;
    }
    report.row("ddp: payload sent by rank 0", by_ddp[0].sent.0 as f64, "B", Threshold::None)?;
    report.row("ddp: with frames", by_ddp[0].sent.1 as f64, "B", Threshold::None)?;
    report.row("ddp: loss of the first step", by_ddp[0].losses[0], "nats", Threshold::None)?;
    report.row("ddp: loss of the last step", by_ddp[0].losses[STEPS - 1], "nats", Threshold::None)
}
