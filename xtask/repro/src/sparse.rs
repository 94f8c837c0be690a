//! Sparse attention: each pattern against a dense mask, and time and memory against the dense kernel.

use anyhow::{Result, ensure};
use farflung::base::{AttentionPattern, Philox, TileLists};
use farflung::tensor::{AttendedKeys, Device, Heads, Mask, Op, TileMask};

use crate::allocations::counted;
use crate::harness::{Bench, Options, Report, Threshold};
use crate::machine::{median, now};

pub(crate) const BENCH: Bench = Bench {
    name: "sparse",
    claim: "patterns of attention, run in tiles, give what a dense mask gives, forward and backward; all keys give \
            the bits of the dense kernel; 16k tokens with a window of 256 take a fifth of its time, no more than \
            its memory, and 25.9 times fewer tiles",
    source: "Child et al. 2019, Sparse Transformers; DeepSpeed, Sparse Attention (10x longer, 6.3x faster); Dong et \
             al. 2024, FlexAttention; shared/facts/larger-than-a-machine.md 5",
    seed: 7,
    run,
};

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    patterns(report)?;
    bits(report)?;
    nothing(report)?;
    tiles(report)?;
    time_and_memory(report, options.quick)?;
    lengths(report, options.quick)
}

/// Tokens, heads and values of a head of one sequence.
#[derive(Clone, Copy)]
struct Sizes {
    len: usize,
    heads: Heads,
    dim: usize,
}

/// Inputs of attention and of its gradient.
struct Inputs {
    qkv: Vec<f32>,
    dy: Vec<f32>,
}

/// Results of attention and of its gradient.
struct Outputs {
    y: Vec<f32>,
    d_qkv: Vec<f32>,
}

impl Sizes {
    fn widths(self) -> [usize; 2] {
        [self.heads.width() * self.dim, self.heads.query * self.dim]
    }

    fn inputs(self, seed: u64) -> Inputs {
        let [all, queries] = self.widths();
        let noise = |stream, len| {
            let mut values = vec![0.0; len];
            Philox::new(seed, stream).fill_normal(1.0, &mut values);
            values
        };
        Inputs { qkv: noise(1, self.len * all), dy: noise(2, self.len * queries) }
    }

    /// Returns the first value of a token's query (part 0), key (1) or value (2) for a head of queries.
    fn place(self, head: usize, token: usize, part: usize) -> usize {
        let Heads { query, kv } = self.heads;
        let column = if part == 0 { head } else { query + (part - 1) * kv + head / (query / kv) };
        token * self.widths()[0] + column * self.dim
    }

    /// Runs attention and its gradient `samples` times. Returns the last results, and the seconds of each run.
    fn attend(
        self,
        device: &Device,
        keys: AttendedKeys<'_>,
        inputs: &Inputs,
        samples: usize,
    ) -> Result<(Outputs, Vec<f64>)> {
        let (Self { len, heads, .. }, [all, queries]) = (self, self.widths());
        let mask = Mask { keys, ..Mask::default() };
        let qkv = device.tensor(&inputs.qkv, [1, len, all])?;
        let dy = device.tensor(&inputs.dy, [1, len, queries])?;
        let (mut y, mut lse) = (device.zeros([1, len, queries])?, device.zeros([1, heads.query, len])?);
        let mut d = device.zeros([1, len, all])?;
        let mut seconds = Vec::new();
        for _ in 0..samples {
            let start = now();
            device.run(Op::Attention {
                heads,
                mask,
                qkv: qkv.view(),
                y: y.view_mut(),
                lse: lse.view_mut(),
            })?;
            device.run(Op::AttentionGrad {
                heads,
                mask,
                qkv: qkv.view(),
                y: y.view(),
                lse: lse.view(),
                dy: dy.view(),
                d_qkv: d.view_mut(),
            })?;
            seconds.push(start.elapsed().as_secs_f64());
        }
        Ok((Outputs { y: y.to_vec()?, d_qkv: d.to_vec()? }, seconds))
    }

    /// Returns the same with the whole matrix of scores, in f64.
    fn dense(self, keeps: &dyn Fn(usize, usize, usize) -> bool, inputs: &Inputs) -> [Vec<f64>; 2] {
        let Self { len, heads, dim } = self;
        let wide = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
        let (x, dy) = (wide(&inputs.qkv), wide(&inputs.dy));
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let (mut y, mut d) = (vec![0.0; dy.len()], vec![0.0; x.len()]);
        for (head, query) in (0..heads.query).flat_map(|head| (0..len).map(move |query| (head, query))) {
            let at = |token: usize, part: usize| self.place(head, token, part);
            let keys: Vec<usize> = (0..=query).filter(|&key| keeps(head, query, key)).collect();
            let scale = 1.0 / (dim as f64).sqrt();
            let score = |&key: &usize| scale * dot(&x[at(query, 0)..][..dim], &x[at(key, 1)..][..dim]);
            let scores: Vec<f64> = keys.iter().map(score).collect();
            let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = scores.iter().map(|score| (score - top).exp()).sum();
            let p: Vec<f64> = scores.iter().map(|score| (score - top).exp() / sum).collect();
            let out = query * self.widths()[1] + head * dim;
            let dp: Vec<f64> =
                keys.iter().map(|&key| dot(&dy[out..][..dim], &x[at(key, 2)..][..dim])).collect();
            let mean = dot(&p, &dp);
            for ((&key, p), dp) in keys.iter().zip(&p).zip(&dp) {
                let ds = p * (dp - mean) * scale;
                for i in 0..dim {
                    y[out + i] += p * x[at(key, 2) + i];
                    d[at(query, 0) + i] += ds * x[at(key, 1) + i];
                    d[at(key, 1) + i] += ds * x[at(query, 0) + i];
                    d[at(key, 2) + i] += p * dy[out + i];
                }
            }
        }
        [y, d]
    }
}

/// Returns the largest difference, relative to the largest magnitude of what is wanted.
fn worst(found: &[f32], want: &[f64]) -> f64 {
    let most = want.iter().fold(f64::MIN_POSITIVE, |most, x| most.max(x.abs()));
    let off = found.iter().zip(want).map(|(found, want)| (f64::from(*found) - want).abs());
    // A NaN is larger than any mark.
    off.fold(0.0, |worst, off| if off <= worst { worst } else { off }) / most
}

fn mask_of(device: &Device, pattern: AttentionPattern, sizes: Sizes) -> Result<TileMask> {
    let lists = TileLists::new(pattern, 0, 0..sizes.heads.query as u32, sizes.len, TileMask::TILE);
    Ok(TileMask::new(device, &lists)?)
}

/// Each pattern, of four heads that share two heads of keys, against a dense mask.
fn patterns(report: &mut Report<'_>) -> Result<()> {
    let sizes = Sizes { len: 601, heads: Heads { query: 4, kv: 2 }, dim: 16 };
    let (device, inputs) = (Device::cpu(2)?, sizes.inputs(report.seed()));
    for text in [
        "full",
        "window:100",
        "window:64+sinks:4",
        "strided:24",
        "fixed:4,1,4",
        "fixed:24,8+block:1",
        "variable:1,2,3+global:0+random:1",
        "bigbird:3,1,2",
    ] {
        let pattern: AttentionPattern = text.parse()?;
        let keeps =
            |head: usize, query: usize, key: usize| pattern.keeps(0, head as u32, query as u64, key as u64);
        let [y, d] = sizes.dense(&keeps, &inputs);
        let mask = mask_of(&device, pattern, sizes)?;
        let (found, _) = sizes.attend(&device, AttendedKeys::Tiles(&mask), &inputs, 1)?;
        for (pass, off) in [("forward", worst(&found.y, &y)), ("backward", worst(&found.d_qkv, &d))] {
            let metric = format!("{text}, {pass}: largest error against a dense mask in f64");
            report.row(&metric, off, "", Threshold::AtMost(1e-5))?;
        }
    }
    Ok(())
}

/// Counts values whose bits differ from those of the dense kernel if all keys are kept.
fn bits(report: &mut Report<'_>) -> Result<()> {
    let sizes = Sizes { len: 1500, heads: Heads { query: 4, kv: 2 }, dim: 64 };
    let (device, inputs) = (Device::cpu(2)?, sizes.inputs(report.seed()));
    let mask = mask_of(&device, AttentionPattern::FULL, sizes)?;
    let (dense, _) = sizes.attend(&device, AttendedKeys::All, &inputs, 1)?;
    let (tiled, _) = sizes.attend(&device, AttendedKeys::Tiles(&mask), &inputs, 1)?;
    let differ = |a: &[f32], b: &[f32]| a.iter().zip(b).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
    let count = differ(&dense.y, &tiled.y) + differ(&dense.d_qkv, &tiled.d_qkv);
    let metric = "full causal mask in tiles: values whose bits are not the dense kernel's";
    report.row(metric, count as f64, "", Threshold::AtMost(0.0))
}

/// Queries without keys, and NaN in keys and values of tiles that other queries do not attend to.
fn nothing(report: &mut Report<'_>) -> Result<()> {
    let sizes = Sizes { len: 512, heads: Heads { query: 2, kv: 1 }, dim: 16 };
    let (device, mut inputs) = (Device::cpu(2)?, sizes.inputs(report.seed()));
    // Queries of the fourth tile have no key; keys of the second are those of its own queries alone.
    let keeps = |_: usize, query: usize, key: usize| {
        query / 64 != 3 && (query / 64 == 1) == (key / 64 == 1) && key / 64 != 3
    };
    let lists = TileLists::of_pairs(2, |head, q, k| keeps(head as usize, q, k), sizes.len, TileMask::TILE);
    let mask = TileMask::new(&device, &lists)?;
    let [y, d] = sizes.dense(&keeps, &inputs);
    let [all, queries] = sizes.widths();
    for token in 64..128 {
        inputs.qkv[token * all + queries..(token + 1) * all].fill(f32::NAN);
    }
    let (found, _) = sizes.attend(&device, AttendedKeys::Tiles(&mask), &inputs, 1)?;
    let (mut wrong, mut other) = (0, 0.0_f64);
    for (found, want, width) in [(&found.y, &y, queries), (&found.d_qkv, &d, all)] {
        let (mut kept, mut expected) = (Vec::new(), Vec::new());
        for (token, (found, want)) in found.chunks(width).zip(want.chunks(width)).enumerate() {
            match token / 64 {
                1 => {}
                3 => wrong += found.iter().filter(|x| **x != 0.0).count(),
                _ => {
                    kept.extend(found);
                    expected.extend(want);
                }
            }
        }
        other = other.max(worst(&kept, &expected));
    }
    let metric = "queries without keys, keys without queries: values other than 0";
    report.row(metric, wrong as f64, "", Threshold::AtMost(0.0))?;
    let metric = "NaN in skipped tiles: largest error of the others";
    report.row(metric, other, "", Threshold::AtMost(1e-5))
}

/// Tiles and pairs of 16k tokens, in closed form.
fn tiles(report: &mut Report<'_>) -> Result<()> {
    let of =
        |text: &str, tile| -> Result<TileLists> { Ok(TileLists::new(text.parse()?, 0, 0..1, 16_384, tile)) };
    for (tile, touched, full, all) in
        [(16, 17_272, 15_240, 524_800), (64, 1_270, 762, 32_896), (128, 381, 127, 8_256)]
    {
        let (window, dense) = (of("window:256", tile)?, of("full", tile)?);
        let found = [window.head(0).touched(), window.head(0).full(), dense.head(0).touched()];
        ensure!(found == [touched, full, all], "tiles of {tile}: {found:?}");
        let exact = all as f64 / touched as f64;
        let metric = format!("window of 256 in 16384 tokens, tiles of {tile}: times fewer than causal");
        report.row(&metric, found[2] as f64 / found[0] as f64, "", Threshold::AtLeast(exact))?;
    }
    let fixed = of("fixed:4,1", 16)?.head(0).touched();
    let metric = "fixed:4,1 in 1024 blocks: operations of a dense layer over its own";
    ensure!(fixed == 133_120, "blocks of fixed:4,1: {fixed}");
    report.row(metric, 1024.0 * 1024.0 / fixed as f64, "", Threshold::AtLeast(7.876))?;
    // The paper's 10 times longer: with as many scores as a dense layer of the length has.
    let (dense, window) = (2_560_usize, 256_usize);
    let scores = |len: usize| window * len - window * (window - 1) / 2;
    let longest = (dense..20 * dense).rfind(|&len| scores(len) <= dense * dense).unwrap_or(dense);
    let metric = "window of 256: times longer than a dense layer of 2560 with as many scores";
    report.row(metric, longest as f64 / dense as f64, "", Threshold::AtLeast(10.0))
}

/// Time and memory of a window of 256 against the dense kernel.
fn time_and_memory(report: &mut Report<'_>, quick: bool) -> Result<()> {
    let len = if quick { 4_096 } else { 16_384 };
    let samples = if quick { 1 } else { 3 };
    let sizes = Sizes { len, heads: Heads::equal(1), dim: 64 };
    let inputs = sizes.inputs(report.seed());
    let measure = |text: &str| -> Result<(f64, usize)> {
        // A thread of its own, so that its scratch memory is counted, too.
        let work = || {
            counted(|| -> Result<f64> {
                let device = Device::cpu(1)?;
                let pattern: AttentionPattern = text.parse()?;
                let mask = if pattern.is_full() { None } else { Some(mask_of(&device, pattern, sizes)?) };
                let keys = mask.as_ref().map_or(AttendedKeys::All, AttendedKeys::Tiles);
                Ok(median(sizes.attend(&device, keys, &inputs, samples)?.1))
            })
        };
        let (seconds, count) = std::thread::scope(|scope| scope.spawn(work).join())
            .map_err(|_| anyhow::anyhow!("the measurement panicked"))?;
        Ok((seconds?, count.peak))
    };
    let (dense, most) = measure("full")?;
    report.row(&format!("dense kernel, {len} tokens, forward and backward"), dense, "s", Threshold::None)?;
    report.row(&format!("dense kernel, {len} tokens: peak memory"), most as f64, "bytes", Threshold::None)?;
    // The mark is one of 16k tokens.
    let at_most = if quick { Threshold::None } else { Threshold::AtMost(0.2) };
    // Of a short run's memory, most is scratch memory that does not grow with its length.
    let of_scores = if quick { 1.0 } else { 0.5 };
    for text in ["window:256", "window:256+sinks:4", "strided:128", "fixed:16,1", "bigbird:5,1,2"] {
        let (seconds, peak) = measure(text)?;
        let mark = if text == "window:256" { at_most } else { Threshold::None };
        let metric = format!("{text}, {len} tokens: time over the dense kernel's");
        report.row(&metric, seconds / dense, "", mark)?;
        let mark = if text == "window:256" { Threshold::AtMost(1.1) } else { Threshold::None };
        let metric = format!("{text}, {len} tokens: peak memory over the dense kernel's");
        report.row(&metric, peak as f64 / most as f64, "", mark)?;
        let scores = len * len * size_of::<f32>();
        let metric = format!("{text}, {len} tokens: peak memory over a matrix of scores");
        report.row(&metric, peak as f64 / scores as f64, "", Threshold::AtMost(of_scores))?;
    }
    Ok(())
}

/// Memory of the dense kernel beside a matrix of scores, as its length grows.
fn lengths(report: &mut Report<'_>, quick: bool) -> Result<()> {
    let mut last: Option<f64> = None;
    for len in [1_024, 2_048, 4_096, 8_192, 16_384] {
        if quick && len > 4_096 {
            break;
        }
        let sizes = Sizes { len, heads: Heads::equal(1), dim: 64 };
        let inputs = sizes.inputs(report.seed());
        let work = || counted(|| sizes.attend(&Device::cpu(1)?, AttendedKeys::All, &inputs, 1));
        let (done, count) = std::thread::scope(|scope| scope.spawn(work).join())
            .map_err(|_| anyhow::anyhow!("the measurement panicked"))?;
        done?;
        let metric = format!("dense kernel, {len} tokens: peak memory, forward and backward");
        report.row(&metric, count.peak as f64, "bytes", Threshold::None)?;
        if let Some(last) = last {
            // It grows with the number of tokens; with its square it would be 4 times as much.
            let metric = format!("dense kernel, {len} tokens: peak memory over that of half as many");
            report.row(&metric, count.peak as f64 / last, "", Threshold::AtMost(2.1))?;
        }
        last = Some(count.peak as f64);
    }
    Ok(())
}
