//! Compares a GPU with PyTorch on the same card and with the card's own memory: products, a training step of
//! GPT-2, codecs. Without `--against` it runs PyTorch itself, if it is installed. On a software device only
//! `--quick` runs, with sizes that say nothing about speed.

use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use farflung::optim::{AdamW, LrSchedule, adamw};
use farflung::tensor::{BlockCodec, Code, DType, Device, Fuse, Op, Precision};
use farflung::zoo::layer::Grads;
use farflung::zoo::{Input, Stage, Targets, gpt2};

use crate::harness::{Bench, Options, Report, Threshold};
use crate::machine::{median, now};
use crate::peers::Peers;

pub(crate) const BENCH: Bench = Bench {
    name: "gpu",
    claim: "on an NVIDIA GPU, matrix products in bf16 reach 0.6 times PyTorch's speed, and a training step \
            of gpt2-124M reaches half the speed of its eager mode, in no more memory",
    source: "PyTorch with its fused attention and AdamW, on the same card",
    seed: 1337,
    run,
};

/// The script that measures PyTorch.
const TORCH: &str = include_str!("gpu/torch_gpu.py");

/// Sizes of the measurements.
struct Sizes {
    products: &'static [usize],
    /// Shape of the model: layers, heads, width, context, vocabulary.
    model: [usize; 5],
    batch: usize,
    /// Elements that the codecs encode.
    elements: usize,
    repeats: usize,
}

const OF_A_GPU: Sizes = Sizes {
    products: &[4096, 8192],
    model: [12, 12, 768, 1024, 50257],
    batch: 8,
    elements: 1 << 26,
    repeats: 10,
};

const OF_SOFTWARE: Sizes =
    Sizes { products: &[48], model: [2, 2, 16, 16, 64], batch: 2, elements: 1 << 12, repeats: 2 };

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let all = Device::list();
    let why = || all.iter().map(|f| format!("{}: {}", f.name, f.about)).collect::<Vec<_>>().join("; ");
    let found =
        all.iter().find(|f| f.usable && f.gpu).or_else(|| all.iter().find(|f| f.usable && f.name != "cpu"));
    let found = found.with_context(|| format!("no GPU that this build can use ({})", why()))?;
    ensure!(
        found.gpu || options.quick,
        "{} ({}) is not a GPU but this machine's processor, on which only --quick runs",
        found.name,
        found.about
    );
    let sizes = if found.gpu { OF_A_GPU } else { OF_SOFTWARE };
    let device = Device::open(found.name.parse()?, 1)?;
    let theirs = if options.peers.is_empty() && found.gpu { torch(&sizes)? } else { options.peers.clone() };

    // The step runs first, so that the peak of memory is the step's.
    let (tokens, memory) = step(&device.with_precision(Precision::Bf16), &sizes, report.seed())?;
    report.row("training step in bf16", tokens, "tok/s", Threshold::None)?;
    report.row("training step in bf16: memory", memory / f64::from(1 << 20), "MiB", Threshold::None)?;
    let torch = |field: &str| theirs.best("gpu_step", &[("mode", "eager")], field);
    report.ratio(
        "training step: speed relative to PyTorch's",
        tokens,
        torch("tok_s"),
        Threshold::AtLeast(0.5),
    )?;
    report.ratio(
        "training step: memory relative to PyTorch's",
        memory,
        torch("peak_bytes"),
        Threshold::AtMost(1.0),
    )?;
    let bandwidth = copying(&device, &sizes)?;
    report.row(
        &format!("{} ({}): copies within the device", found.name, found.about),
        bandwidth / 1e9,
        "GB/s",
        Threshold::None,
    )?;
    for &n in sizes.products {
        for (precision, mark) in
            [(Precision::Bf16, Threshold::AtLeast(0.6)), (Precision::F32, Threshold::None)]
        {
            let tflops = product(&device.with_precision(precision), n, &sizes)?;
            report.row(&format!("matmul {n} in {precision}"), tflops, "TFLOP/s", Threshold::None)?;
            let keys = [("n", &*n.to_string()), ("dtype", &precision.to_string())];
            let torch = theirs.best("gpu_gemm", &keys, "tflops");
            report.ratio(
                &format!("matmul {n} in {precision}: speed relative to PyTorch's"),
                tflops,
                torch,
                mark,
            )?;
        }
    }
    for (name, code) in [("sign", Code::SignL1), ("int8", Code::Int8), ("int4", Code::Int4)] {
        let codec = BlockCodec::new(code, 256).context("invalid block size")?;
        let rate = encoding(&device, codec, &sizes)?;
        report.row(
            &format!("{name} with feedback: bytes moved per second, relative to copies"),
            rate / bandwidth,
            "x",
            Threshold::None,
        )?;
    }
    Ok(())
}

/// Returns PyTorch's figures on this machine. There are none if PyTorch or its CUDA is missing, which its own
/// message says.
fn torch(sizes: &Sizes) -> Result<Peers> {
    let [layers, heads, width, context, vocab] = sizes.model;
    let mut command = Command::new("python3");
    command.args(["-c", TORCH]);
    command.args([layers, heads, width, context, vocab, sizes.batch].map(|n| n.to_string()));
    command.args(sizes.products.iter().map(ToString::to_string));
    let output = command.stdin(Stdio::null()).stderr(Stdio::inherit()).output();
    match output {
        Ok(output) if output.status.success() => Peers::parse(&String::from_utf8_lossy(&output.stdout)),
        _ => Ok(Peers::default()),
    }
}

/// Returns the median seconds of `work`, each run ended by a fence. Runs it once before as warm-up.
fn seconds(device: &Device, repeats: usize, mut work: impl FnMut() -> Result<()>) -> Result<f64> {
    work()?;
    device.fence()?;
    let mut times = Vec::new();
    for _ in 0..repeats {
        let start = now();
        work()?;
        device.fence()?;
        times.push(start.elapsed().as_secs_f64());
    }
    Ok(median(times))
}

/// Returns the bytes per second of a copy within the device, reads and writes counted.
fn copying(device: &Device, sizes: &Sizes) -> Result<f64> {
    let x = device.zeros(sizes.elements)?;
    let mut y = device.empty(DType::F32, sizes.elements)?;
    let took = seconds(device, sizes.repeats, || Ok(device.run(Op::Cast { x: x.view(), y: y.view_mut() })?))?;
    Ok(8.0 * sizes.elements as f64 / took)
}

/// Returns the TFLOP/s of `[n, n] x [n, n]`, including the rounding of f32 operands.
fn product(device: &Device, n: usize, sizes: &Sizes) -> Result<f64> {
    let values: Vec<f32> = (0..n * n).map(|i| (i % 251) as f32 / 251.0 - 0.5).collect();
    let (a, b) = (device.tensor(&values, [n, n])?, device.tensor(&values, [n, n])?);
    let mut c = device.zeros([n, n])?;
    let took = seconds(device, sizes.repeats, || {
        Ok(device.run(Op::MatMul {
            a: a.view(),
            a_t: false,
            b: b.view(),
            b_t: false,
            c: c.view_mut(),
            accumulate: false,
            scales: [1.0; 2],
            fuse: Fuse::None,
        })?)
    })?;
    Ok(2.0 * (n as f64).powi(3) / took / 1e12)
}

/// Returns the bytes per second that encoding with a residual moves at least: two vectors read, one written,
/// and the body.
fn encoding(device: &Device, codec: BlockCodec, sizes: &Sizes) -> Result<f64> {
    let n = sizes.elements;
    let values: Vec<f32> = (0..n).map(|i| (i % 997) as f32 / 997.0 - 0.5).collect();
    let (x, before) = (device.tensor(&values, n)?, device.zeros(n)?);
    let mut after = device.empty(DType::F32, n)?;
    let mut out = device.empty(DType::U32, 1 + codec.words(n))?;
    let codecs = device.codecs().context("the device has no codecs")?;
    let took = seconds(device, sizes.repeats, || {
        let (before, after) = (Some(before.view()), Some(after.view_mut()));
        Ok(codecs.encode(codec, x.view(), before, after, out.view_mut())?)
    })?;
    Ok((12 * n + codec.bytes(n)) as f64 / took)
}

/// Returns the tokens per second of a training step, and the most bytes that the device held.
fn step(device: &Device, sizes: &Sizes, seed: u64) -> Result<(f64, f64)> {
    let [layers, heads, width, context, vocab] = sizes.model;
    let model = gpt2(layers, heads, width, context, vocab)?;
    let tokens = sizes.batch * context;
    let stage = Stage::whole(&model, device)?;
    let (mut params, mut grads) = (stage.init(seed)?, stage.zeros()?);
    let schedule = LrSchedule::constant(1e-3);
    let adamw =
        adamw(AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, clip: Some(1.0), schedule });
    let mut chain = adamw.build(device, stage.layout())?;
    let some = |factor: usize| -> Vec<u32> { (0..tokens).map(|i| (i * factor % vocab) as u32).collect() };
    let (inputs, targets) = (some(7919), some(104_729));
    let took = seconds(device, sizes.repeats, || {
        let (x, y) = (stage.tokens(&inputs, context)?, stage.tokens(&targets, context)?);
        let (_, saved) =
            stage.forward(&params, Input::Tokens(x), Some(Targets::all(&y, 1.0 / tokens as f32)))?;
        let into = &mut Grads::flat(&mut grads, false);
        stage.backward(&params, saved, None, into, |_, _| ())?;
        let prepared = chain.prepare(&grads)?;
        Ok(chain.commit(&mut params, &grads, prepared)?)
    })?;
    Ok((tokens as f64 / took, device.memory().1 as f64))
}
