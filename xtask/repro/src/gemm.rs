//! Compares the matrix product of the cpu backend with the machine's peak and with PyTorch.

use anyhow::Result;
use farflung::tensor::{Device, Fuse, Op};

use crate::harness::{Bench, Options, Report, Threshold};
use crate::machine::{fma_peak, median, now};

pub(crate) const BENCH: Bench = Bench {
    name: "gemm",
    claim: "f32 matrix products, square and in the shapes of nano, baby and GPT-2, run near the machine's \
            FMA peak",
    source: "Goto and van de Geijn 2008, Anatomy of High-Performance Matrix Multiplication",
    seed: 0,
    run,
};

/// Sizes of square products that PyTorch's script measures too.
const SQUARE: [usize; 4] = [256, 512, 1024, 2048];

/// Products `[m, k] x [k, n]` of the forward passes: queries, keys and values (`qkv`), both halves of the MLP
/// (`fc`, `out`), and the head.
const SHAPES: [(&str, [usize; 3]); 12] = [
    ("nano qkv", [768, 128, 384]),
    ("nano fc", [768, 128, 512]),
    ("nano out", [768, 512, 128]),
    ("nano head", [768, 128, 256]),
    ("baby qkv", [2048, 384, 1152]),
    ("baby fc", [2048, 384, 1536]),
    ("baby out", [2048, 1536, 384]),
    ("baby head", [2048, 384, 256]),
    ("gpt2-124M qkv", [256, 768, 2304]),
    ("gpt2-124M fc", [256, 768, 3072]),
    ("gpt2-124M out", [256, 3072, 768]),
    ("gpt2-124M head", [256, 768, 50257]),
];

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let (samples, stretch) = if options.quick { (3, 0.04) } else { (15, 0.1) };
    for threads in [1, 2] {
        let cpu = Device::cpu(threads)?;
        let on = format!("{threads} thread{}", if threads == 1 { "" } else { "s" });
        // The clock rate of a shared machine varies, so the peak is the better of one measurement before and
        // one after.
        let before = fma_peak(threads);
        let mut rates = Vec::new();
        for n in SQUARE {
            let rate = rate(&cpu, [n, n, n], false, samples, stretch)?;
            let keys = [("n", &*n.to_string()), ("threads", &*threads.to_string())];
            let theirs = options.peers.best("gemm_f32", &keys, "gflops_med");
            report.ratio(
                &format!("{n}, {on}: speed relative to PyTorch's"),
                rate,
                theirs,
                Threshold::None,
            )?;
            rates.push((format!("{n}, {on}"), rate));
        }
        for (name, shape) in SHAPES {
            // The product of the head reads its table transposed.
            let rate = rate(&cpu, shape, name.ends_with("head"), samples, stretch)?;
            let [m, k, n] = shape;
            rates.push((format!("{name} {m}x{k}x{n}, {on}"), rate));
        }
        let peak = before.max(fma_peak(threads));
        report.row(&format!("FMA peak, {on}"), peak, "GFLOP/s", Threshold::None)?;
        for (name, rate) in rates {
            report.row(&name, rate, "GFLOP/s", Threshold::None)?;
            report.row(&format!("{name}: share of the peak"), rate / peak, "", Threshold::None)?;
        }
    }
    Ok(())
}

/// Returns the GFLOP/s of one product: the median of `samples` measurements of `stretch` seconds each.
fn rate(cpu: &Device, [m, k, n]: [usize; 3], b_t: bool, samples: usize, stretch: f64) -> Result<f64> {
    let values = |len: usize| -> Vec<f32> { (0..len).map(|i| (i % 17) as f32 / 17.0 - 0.5).collect() };
    let a = cpu.tensor(&values(m * k), [m, k])?;
    let b = cpu.tensor(&values(k * n), if b_t { [n, k] } else { [k, n] })?;
    let mut c = cpu.zeros([m, n])?;
    let mut product = || {
        let (a, b, c) = (a.view(), b.view(), c.view_mut());
        cpu.run(Op::MatMul {
            a,
            a_t: false,
            b,
            b_t,
            c,
            accumulate: false,
            scales: [1.0; 2],
            fuse: Fuse::None,
        })
    };
    product()?;
    let mut times = Vec::new();
    for _ in 0..samples {
        let start = now();
        let mut products = 0;
        while products == 0 || start.elapsed().as_secs_f64() < stretch {
            product()?;
            products += 1;
        }
        times.push(start.elapsed().as_secs_f64() / f64::from(products));
    }
    Ok(2.0 * (m * k * n) as f64 / median(times) / 1e9)
}
