//! Compares a device with the cpu: every op, matrix products in 16 bits, codecs and training steps.

use std::collections::BTreeMap;

use anyhow::Result;
use farflung::compress::device::check;
use farflung::config::choice::Devices;
use farflung::config::value::Setting;
use farflung::optim::device_codec::{KERNELS, Vectors};
use farflung::tensor::{Device, Precision};
use farflung::train::Trainer;
use farflung::{TrainConfig, base, tensor};

use crate::harness::{Bench, Options, Report, Threshold};
use crate::workers::{JobTransport, again, config, farthest, job, on_all, relative_l2};

#[path = "../../../crates/tensor/tests/it/parity/mod.rs"]
mod parity;

pub(crate) const BENCH: Bench = Bench {
    name: "device-parity",
    claim: "each op and a training step on a device are within 1e-5 of the cpu (2e-2 in bf16, 2e-3 in f16), \
            integers and codecs are equal, and a second run gives the same bits",
    source: "the cpu backend, which is tested against finite differences and PyTorch",
    seed: 1,
    run,
};

/// Precisions of products with 16-bit operands, and their largest allowed relative distance from products in
/// f32.
const HALVES: [(Precision, f64); 2] = [(Precision::Bf16, 2e-2), (Precision::F16, 2e-3)];

/// Results of all cases of one op.
#[derive(Default)]
struct OpResult {
    cases: usize,
    worst: f64,
    /// Name of the case with the worst distance.
    at: String,
    unequal: usize,
    changed: usize,
}

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    // Uses CUDA if the build has it and the machine has such a GPU, otherwise the first device that wgpu can
    // use.
    let name =
        Device::list().into_iter().find(|found| found.usable).map_or_else(String::new, |found| found.name);
    let (cpu, device) = (Device::cpu(1)?, Device::open(name.parse()?, 1)?);
    let mut all: BTreeMap<&str, OpResult> = BTreeMap::new();
    let mut halves = HALVES.map(|_| [0.0_f64; 2]);
    for seed in report.seed()..report.seed() + if options.quick { 2 } else { 8 } {
        for case in parity::cases(seed) {
            let (expected, first, second) = (case.run(&cpu)?, case.run(&device)?, case.run(&device)?);
            let found = all.entry(case.op).or_default();
            found.cases += 1;
            let distance = parity::distance(&first, &expected);
            if found.cases == 1 || distance > found.worst {
                (found.worst, found.at) = (distance, case.what.clone());
            }
            found.unequal += usize::from(case.exact && !parity::same(&first, &expected));
            found.changed += usize::from(!parity::same(&first, &second));
            for ((precision, _), worst) in HALVES.into_iter().zip(&mut halves).filter(|_| case.op == "matmul")
            {
                let half = case.run(&device.with_precision(precision))?;
                let on_cpu = case.run(&cpu.with_precision(precision))?;
                worst[0] = worst[0].max(parity::distance(&half, &expected));
                worst[1] = worst[1].max(parity::distance(&half, &on_cpu));
            }
        }
    }
    for (op, found) in &all {
        let metric = format!(
            "{op}, {} cases on {name}: relative l2 distance from the cpu, worst case {}",
            found.cases, found.at
        );
        report.row(&metric, found.worst, "1", Threshold::AtMost(1e-5))?;
    }
    let total = |f: fn(&OpResult) -> usize| all.values().map(f).sum::<usize>() as f64;
    report.row(
        "cases of integers and copies whose bits differ",
        total(|f| f.unequal),
        "1",
        Threshold::AtMost(0.0),
    )?;
    report.row(
        "cases with different bits in a second run",
        total(|f| f.changed),
        "1",
        Threshold::AtMost(0.0),
    )?;

    for ((precision, most), [from_f32, from_cpu]) in HALVES.into_iter().zip(halves) {
        let metric = format!("matmul in {precision}: relative l2 from the cpu in f32");
        report.row(&metric, from_f32, "1", Threshold::AtMost(most))?;
        let metric = format!("matmul in {precision}: relative l2 from the cpu in {precision}");
        report.row(&metric, from_cpu, "1", Threshold::AtMost(1e-5))?;
    }
    codecs(report, &device)?;
    training(report, &name)
}

/// Compares the bytes, residuals, values and errors of codecs on the device with those on the host.
fn codecs(report: &mut Report<'_>, device: &Device) -> Result<()> {
    let vectors = Vectors::on(device.clone());
    let equal = |name: &&str| name.parse().is_ok_and(|spec| matches!(check(&vectors, spec), Ok(true)));
    let unequal = KERNELS.iter().filter(|name| !equal(name)).count();
    report.row(
        "codecs whose bytes, residuals, values or errors differ from the host's",
        unequal as f64,
        "1",
        Threshold::AtMost(0.0),
    )
}

/// Compares a few steps of a model on the device with those on the cpu.
fn training(report: &mut Report<'_>, name: &str) -> Result<()> {
    let (seed, steps) = (report.seed(), 3);
    let on = |device: &str, precision| TrainConfig {
        workers: 1,
        precision,
        device: Devices::parse(device).expect("a device's name"),
        ..config(seed, false)
    };
    let trace = move |worker: &mut Trainer| {
        let mut losses = Vec::new();
        let mut grads = Vec::new();
        for step in 0..steps {
            losses.push(worker.step(false)?.loss);
            if step == 0 {
                grads = worker.grads().to_vec::<f32>()?;
            }
        }
        Ok((losses, grads, worker.params().to_vec::<f32>()?))
    };
    let first = job(on("cpu", Precision::F32), JobTransport::Memory)?;
    let (losses, grads, params) = on_all(&first, trace)?.remove(0);
    let theirs = on_all(&again(&first, on(name, Precision::F32), JobTransport::Memory), trace)?.remove(0);
    let twice = on_all(&again(&first, on(name, Precision::F32), JobTransport::Memory), trace)?.remove(0);
    report.row(
        "training: first step's gradients, relative l2",
        relative_l2(&theirs.1, &grads),
        "1",
        Threshold::AtMost(1e-5),
    )?;
    for (precision, most) in HALVES {
        let half = on_all(&again(&first, on(name, precision), JobTransport::Memory), trace)?.remove(0);
        let metric =
            format!("training in {precision}: first step's gradients, relative l2 from the cpu in f32");
        report.row(&metric, relative_l2(&half.1, &grads), "1", Threshold::AtMost(most))?;
    }
    report.row(
        "training: 3 losses, largest difference",
        farthest(&theirs.0, &losses),
        "nats",
        Threshold::AtMost(1e-5),
    )?;
    report.row(
        "training: parameters after 3 steps, relative l2",
        relative_l2(&theirs.2, &params),
        "1",
        Threshold::AtMost(1e-5),
    )?;
    let changed = theirs.2.iter().zip(&twice.2).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
    report.row(
        "training: parameters with different bits in a second run",
        changed as f64,
        "1",
        Threshold::AtMost(0.0),
    )
}
