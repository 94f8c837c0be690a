//! Every op as a test case that runs on any device, to compare its results with the CPU's. Shapes are drawn
//! from a seed, and most are not multiples of a tile. The bench `device-parity` includes this file too, by
//! `#[path]`: the parent module must import the crates under the names `base` and `tensor`.

mod attention;
mod positions;

use half::{bf16, f16};

use self::attention::{Seen, attention, attention_cached, attention_over, sparse_attention};
use self::positions::{Given, embedding, joined_heads};
use super::base::Philox;
use super::tensor::{
    DType, Device, Fuse, Gelu, Heads, Norm, NormKind, Op, Program, ProgramBuilder, Result, Shape, Tensor,
};

type Run = Box<dyn Fn(&Device) -> Result<Vec<Tensor>>>;

/// An op with operands of given shapes.
pub(crate) struct Case {
    /// Name of the op.
    pub(crate) op: &'static str,
    /// Description of its shapes and settings.
    pub(crate) what: String,
    /// Whether all devices must give the same bits.
    pub(crate) exact: bool,
    run: Run,
}

impl Case {
    /// Runs the op and returns the elements of all results, concatenated.
    pub(crate) fn run(&self, device: &Device) -> Result<Vec<f32>> {
        let mut all = Vec::new();
        for tensor in (self.run)(device)? {
            match tensor.dtype() {
                DType::F32 => all.extend(tensor.to_vec::<f32>()?),
                DType::F16 => all.extend(tensor.to_vec::<f16>()?.iter().map(|x| x.to_f32())),
                DType::Bf16 => all.extend(tensor.to_vec::<bf16>()?.iter().map(|x| x.to_f32())),
                DType::U32 => all.extend(tensor.to_vec::<u32>()?.iter().map(|&x| f32::from_bits(x))),
                DType::U8 => all.extend(tensor.to_vec::<u8>()?.iter().map(|&x| f32::from(x))),
            }
        }
        device.fence()?;
        Ok(all)
    }
}

/// Returns the relative L2 distance of `found` from `expected`; not finite if lengths differ or a value is not
/// finite in only one of them.
pub(crate) fn distance(found: &[f32], expected: &[f32]) -> f64 {
    if found.len() != expected.len() {
        return f64::INFINITY;
    }
    let (mut off, mut all) = (0.0_f64, 0.0_f64);
    for (&f, &e) in found.iter().zip(expected) {
        if f.to_bits() != e.to_bits() {
            off += (f64::from(f) - f64::from(e)).powi(2);
        }
        all += f64::from(e).powi(2);
    }
    (off / all.max(f64::MIN_POSITIVE)).sqrt()
}

/// Returns whether all bits are equal.
pub(crate) fn same(found: &[f32], expected: &[f32]) -> bool {
    found.len() == expected.len() && found.iter().zip(expected).all(|(f, e)| f.to_bits() == e.to_bits())
}

fn noise(device: &Device, seed: u64, scale: f32, shape: impl Into<Shape>) -> Result<Tensor> {
    let shape = shape.into();
    let mut values = vec![0.0; shape.len()];
    Philox::new(seed, shape.len() as u64).fill_normal(scale, &mut values);
    device.tensor(&values, shape)
}

fn ids(device: &Device, seed: u64, bound: usize, shape: impl Into<Shape>) -> Result<Tensor> {
    let shape = shape.into();
    let draws = Philox::new(seed, 7);
    let values: Vec<u32> = (0..shape.len() as u64).map(|i| draws.below(i, bound as u64) as u32).collect();
    device.tensor(&values, shape)
}

/// Returns where the documents of `t` tokens of `b` sequences begin, after `past` others; `None` unless
/// `divided`.
fn documents(
    device: &Device,
    seed: u64,
    [b, t]: [usize; 2],
    past: usize,
    divided: bool,
) -> Result<Option<Tensor>> {
    let draws = Philox::new(seed, 11);
    let mut starts = Vec::with_capacity(b * t);
    for row in 0..b {
        let mut start = draws.below(row as u64, past as u64 + 1) as u32;
        for token in 0..t {
            // A fourth of the tokens begin a document.
            if draws.below((b + row * t + token) as u64, 4) == 0 {
                start = (past + token) as u32;
            }
            starts.push(start);
        }
    }
    divided.then(|| device.tensor(&starts, [b, t])).transpose()
}

/// Source of random sizes.
struct Draw {
    random: Philox,
    taken: u64,
}

impl Draw {
    fn size(&mut self, least: usize, most: usize) -> usize {
        self.taken += 1;
        least + self.random.below(self.taken, (most - least + 1) as u64) as usize
    }

    fn coin(&mut self) -> bool {
        self.size(0, 1) == 1
    }
}

/// Returns AdamW's step with clipping: read buffer 0 is the gradient, updated buffers are the weights and both
/// moments.
fn adamw() -> Result<Program> {
    let mut p = ProgramBuilder::new();
    let (g, w, m, v) = (p.read(0), p.load(0), p.load(1), p.load(2));
    let [clip, keep_m, keep_v, rate, decay] = [0, 1, 2, 3, 4].map(|i| p.scalar(i));
    let (one, eps) = (p.constant(1.0), p.constant(1e-8));
    let g = p.mul(g, clip);
    let (take_m, take_v) = (p.sub(one, keep_m), p.sub(one, keep_v));
    let (m, new) = (p.mul(m, keep_m), p.mul(g, take_m));
    let m = p.add(m, new);
    let squared = p.mul(g, g);
    let (v, new) = (p.mul(v, keep_v), p.mul(squared, take_v));
    let v = p.add(v, new);
    let root = p.sqrt(v);
    let root = p.add(root, eps);
    let step = p.div(m, root);
    let shrunk = p.mul(w, decay);
    let step = p.add(step, shrunk);
    let step = p.mul(step, rate);
    let w = p.sub(w, step);
    for (i, value) in [w, m, v].into_iter().enumerate() {
        p.store(i as u16, value);
    }
    p.build()
}

/// Returns a program of the instructions that AdamW does not use.
fn others() -> Result<Program> {
    let mut p = ProgramBuilder::new();
    let (a, b, c) = (p.read(0), p.load(0), p.load(1));
    let (abs, sign) = (p.abs(a), p.sign(b));
    let (most, least) = (p.max(a, b), p.min(c, abs));
    let x = p.mul(sign, most);
    p.store(0, x);
    p.store(1, least);
    p.build()
}

/// Sizes of an attention.
#[derive(Debug, Clone, Copy)]
struct Sizes {
    b: usize,
    t: usize,
    heads: Heads,
    dim: usize,
}

impl Sizes {
    /// Returns the widths of the queries, of the keys (or values), and of all.
    fn widths(self) -> [usize; 3] {
        [self.heads.query, self.heads.kv, self.heads.width()].map(|heads| heads * self.dim)
    }
}

fn norms(
    d: &Device,
    seed: u64,
    norm: Norm,
    size: [usize; 2],
    biased: bool,
    accumulate: bool,
) -> Result<Vec<Tensor>> {
    let [rows, cols] = size;
    let x = noise(d, seed, 2.0, size)?;
    let (gain, bias) = (noise(d, seed + 1, 1.0, cols)?, noise(d, seed + 2, 1.0, cols)?);
    let (mut y, mut stats) = (d.zeros(size)?, d.zeros([rows, 2])?);
    let (x, gain) = (x.view(), gain.view());
    let (bias, to) = (biased.then(|| bias.view()), stats.view_mut());
    d.run(Op::Norm { norm, x, gain, bias, y: y.view_mut(), stats: to })?;
    let (dy, past) = (noise(d, seed + 3, 1.0, size)?, noise(d, seed + 4, 1.0, size)?);
    let (mut dx, stats_, dy) = (d.zeros(size)?, stats.view(), dy.view());
    let residual = accumulate.then(|| past.view());
    d.run(Op::NormInput { norm, x, gain, stats: stats_, dy, residual, dx: dx.view_mut() })?;
    let (mut d_gain, mut d_bias) = (noise(d, seed + 5, 1.0, cols)?, noise(d, seed + 6, 1.0, cols)?);
    let (to_gain, to_bias) = (d_gain.view_mut(), biased.then(|| d_bias.view_mut()));
    d.run(Op::NormWeight { x, stats: stats_, dy, d_gain: to_gain, d_bias: to_bias, accumulate })?;
    Ok(vec![y, stats, dx, d_gain, d_bias])
}

#[expect(clippy::too_many_lines, reason = "a few lines for each op")]
/// Returns cases that cover all ops and their settings, with shapes drawn from `seed`. A gradient is in the
/// case of its forward op.
pub(crate) fn cases(seed: u64) -> Vec<Case> {
    let mut draw = Draw { random: Philox::new(seed, 0), taken: 0 };
    let mut all = Vec::new();
    let mut add = |op, what: String, exact, run: Run| {
        all.push(Case { op, what, exact, run });
    };

    let (len, at) = (draw.size(1, 300), draw.size(0, 70));
    add(
        "fill",
        format!("{len} from {at}"),
        true,
        Box::new(move |d| {
            let mut y = noise(d, seed, 1.0, len + at + 3)?;
            d.run(Op::Fill { value: -2.5, y: y.view_mut().part(at, len)? })?;
            Ok(vec![y])
        }),
    );

    for half in [DType::F16, DType::Bf16] {
        let (len, at) = (draw.size(1, 300), draw.size(0, 5));
        add(
            "cast",
            format!("{len} to and from {half}, from {at}"),
            true,
            Box::new(move |d| {
                let x = noise(d, seed, 1e-3, len)?;
                let mut y = d.empty(half, len + at + 2)?;
                match half {
                    DType::F16 => y.write(&vec![f16::ONE; len + at + 2])?,
                    _ => y.write(&vec![bf16::ONE; len + at + 2])?,
                }
                d.run(Op::Cast { x: x.view(), y: y.view_mut().part(at, len)? })?;
                let mut back = d.zeros(len)?;
                d.run(Op::Cast { x: y.view().part(at, len)?, y: back.view_mut() })?;
                let mut moved = noise(d, seed, 1.0, len + at + 2)?;
                d.run(Op::Cast { x: x.view(), y: moved.view_mut().part(at, len)? })?;
                Ok(vec![y, back, moved])
            }),
        );
    }

    for form in 0..16_u64 {
        let (a_t, b_t, accumulate) = (form & 1 == 1, form & 2 == 2, draw.coin());
        let (m, k, n) = (draw.size(1, 70), draw.size(1, 70), draw.size(1, 70));
        let fuse = [
            "none",
            "bias",
            "gelu",
            "gelu for inference",
            "bias and residual",
            "times",
            "residual",
            "gelu with erf",
        ][(form % 8) as usize];
        let what =
            format!("[{m}, {k}] x [{k}, {n}], transposed {a_t} {b_t}, adding {accumulate}, then {fuse}");
        add(
            "matmul",
            what,
            false,
            Box::new(move |d| {
                let a = noise(d, seed + 1, 1.0, if a_t { [k, m] } else { [m, k] })?;
                let b = noise(d, seed + 2, 1.0, if b_t { [n, k] } else { [k, n] })?;
                let (bias, extra) = (noise(d, seed + 3, 1.0, n)?, noise(d, seed + 4, 1.0, [m, n])?);
                let (mut c, mut slope) = (noise(d, seed + 5, 1.0, [m, n])?, d.zeros([m, n])?);
                let fuse = match fuse {
                    "bias" => Fuse::Bias(bias.view()),
                    "gelu" => {
                        Fuse::BiasGelu { gelu: Gelu::Tanh, bias: bias.view(), slope: Some(slope.view_mut()) }
                    }
                    "gelu with erf" => {
                        Fuse::BiasGelu { gelu: Gelu::Erf, bias: bias.view(), slope: Some(slope.view_mut()) }
                    }
                    "gelu for inference" => {
                        Fuse::BiasGelu { gelu: Gelu::Tanh, bias: bias.view(), slope: None }
                    }
                    "residual" => Fuse::Add { residual: extra.view() },
                    "bias and residual" => Fuse::BiasAdd { bias: bias.view(), residual: extra.view() },
                    "times" => Fuse::Times { factor: extra.view() },
                    _ => Fuse::None,
                };
                d.run(Op::MatMul {
                    a: a.view(),
                    a_t,
                    b: b.view(),
                    b_t,
                    c: c.view_mut(),
                    accumulate,
                    scales: [1.0, 1024.0],
                    fuse,
                })?;
                Ok(vec![c, slope])
            }),
        );
    }

    for accumulate in [false, true] {
        let (rows, cols) = (draw.size(1, 200), draw.size(1, 90));
        add(
            "sum_rows",
            format!("[{rows}, {cols}], adding {accumulate}"),
            false,
            Box::new(move |d| {
                let (x, mut y) = (noise(d, seed, 1.0, [rows, cols])?, noise(d, seed + 1, 1.0, cols)?);
                d.run(Op::SumRows { x: x.view(), y: y.view_mut(), accumulate })?;
                Ok(vec![y])
            }),
        );
    }

    for form in 0..4 {
        let kind = if form % 2 == 0 { NormKind::Layer } else { NormKind::Rms };
        let (norm, accumulate, biased) = (Norm { kind, eps: 1e-5 }, draw.coin(), form / 2 == 0);
        let size = [draw.size(1, 150), draw.size(2, 150)];
        let what = format!("{kind:?} {size:?} and gradients, with a bias {biased}, adding {accumulate}");
        add("norm", what, false, Box::new(move |d| norms(d, seed, norm, size, biased, accumulate)));
    }

    for (kv, rotates) in [(None, false), (None, true), (Some(2), true), (Some(1), true)] {
        let (b, t, count) = (draw.size(1, 2), draw.size(1, 75), draw.size(1, 3));
        // Heads of keys and values, each for one or for several heads of queries.
        let heads = kv.map_or(Heads::equal(count), |kv| Heads { query: kv * (count + 1), kv });
        let dim = if draw.coin() { 4 * draw.size(1, 9) } else { draw.size(2, 18) };
        let s = Sizes { b, t, heads, dim };
        let past = draw.size(0, 40);
        let (start, pairs) = (draw.size(0, 20), draw.size(1, dim / 2));
        let rotated = rotates.then_some(2 * pairs);
        let narrow = draw.size(1, 30);
        for (documents, prefixes, window) in [
            (false, false, None),
            (true, false, None),
            (false, false, Some(narrow)),
            (true, false, Some(narrow)),
            (false, true, None),
            (true, true, Some(narrow)),
        ] {
            let seen = Seen { documents, prefixes, window };
            let what = format!("{s:?} and gradient, {seen:?}");
            add("attention", what, false, Box::new(move |d| attention(d, seed, s, seen)));
            let what = format!("{s:?} after {past}, and gradient, {seen:?}");
            let run = move |d: &Device| attention_cached(d, seed, s, past, seen);
            add("attention_cached", what, false, Box::new(run));
        }
        for pattern in ["window:9+sinks:2", "strided:7", "fixed:2,1,2+block:3", "bigbird:3,1,1+block:4"] {
            for divided in [false, true] {
                // Of two tiles at least.
                let s = Sizes { t: t + 64, ..s };
                let what = format!("{s:?}, {pattern}, and gradient, documents {divided}");
                let run = move |d: &Device| sparse_attention(d, seed, s, pattern, divided);
                add("attention", what, false, Box::new(run));
            }
        }
        for given in Given::ALL {
            let what = format!("{s:?} from {start}, {rotated:?} values rotated, and gradient, {given:?}");
            let run = move |d: &Device| joined_heads(d, seed, s, start, rotated, given);
            add("join_heads", what, false, Box::new(run));
        }
    }

    for _ in 0..2 {
        let (len, at) = (draw.size(7, 500), draw.size(0, 70));
        add(
            "swiglu",
            format!("{len} from {at}, and gradient"),
            false,
            Box::new(move |d| {
                let (mut gate, mut up) = (noise(d, seed, 4.0, len + at)?, noise(d, seed + 1, 1.0, len + at)?);
                let (mut y, mut dy) = (d.zeros(len)?, noise(d, seed + 2, 1.0, len)?);
                // Where the exponentials of either sign would overflow.
                let ends = d.tensor(&[-1e30_f32, -200.0, -104.0, -20.0, 20.0, 104.0], 6)?;
                d.run(Op::Cast { x: ends.view(), y: gate.view_mut().part(at, 6)? })?;
                let (g, u) = (gate.view().part(at, len)?, up.view().part(at, len)?);
                d.run(Op::SwiGlu { gate: g, up: u, y: y.view_mut() })?;
                let (g, u) = (gate.view_mut().part(at, len)?, up.view_mut().part(at, len)?);
                d.run(Op::SwiGluGrad { gate: g, up: u, dy: dy.view_mut() })?;
                Ok(vec![y, gate, up, dy])
            }),
        );
    }

    for (positioned, given) in [
        (true, Given::Nothing),
        (false, Given::Nothing),
        (true, Given::Documents),
        (true, Given::Positions),
        (false, Given::Positions),
    ] {
        let size = [draw.size(1, 4), draw.size(1, 40), draw.size(2, 40), draw.size(1, 90)];
        let start = draw.size(0, 20);
        let [b, t, vocabulary, cols] = size;
        let what = format!(
            "[{b}, {t}] of {vocabulary}, {cols} wide, positions {positioned} from {start}, {given:?}, and gradient"
        );
        // A piece of the table has some of the ids alone.
        for first in [None, Some(0), Some(3)] {
            let (what, table) = (format!("{what}, first {first:?}"), (size, first));
            add("embed", what, false, Box::new(move |d| embedding(d, seed, table, start, positioned, given)));
        }
    }

    for (each, weighted, adds) in [(1, false, false), (1, true, false), (2, true, true), (3, false, true)] {
        let (rows, taken, cols) = (draw.size(1, 40), draw.size(1, 60), draw.size(1, 90));
        add(
            "combine_rows",
            format!("{each} of {rows} for {taken}, {cols} wide, factors {weighted}, added {adds}"),
            false,
            Box::new(move |d| {
                let (x, b) = (noise(d, seed, 1.0, [rows, cols])?, noise(d, seed + 1, 1.0, [taken, cols])?);
                // Some numbers are of no row.
                let (of_x, of_b) =
                    (ids(d, seed + 2, rows + 3, [taken, each])?, ids(d, seed + 3, taken + 3, rows)?);
                let factors = noise(d, seed + 4, 1.0, [taken, each])?;
                let (mut y, mut dots) = (d.zeros([taken, cols])?, d.zeros(rows)?);
                d.run(Op::CombineRows {
                    x: x.view(),
                    rows: of_x.view(),
                    factors: weighted.then(|| factors.view()),
                    add: adds.then(|| b.view()),
                    y: y.view_mut(),
                })?;
                d.run(Op::RowDots { a: x.view(), b: b.view(), rows: of_b.view(), y: dots.view_mut() })?;
                Ok(vec![y, dots])
            }),
        );
    }

    for (grad_scale, weighted) in [(None, false), (Some(0.25), false), (None, true), (Some(0.25), true)] {
        let (rows, cols) = (draw.size(1, 40), draw.size(1, 300));
        add(
            "cross_entropy",
            format!("[{rows}, {cols}], gradient {}, weights {weighted}", grad_scale.is_some()),
            false,
            Box::new(move |d| {
                let (mut logits, targets) =
                    (noise(d, seed, 4.0, [rows, cols])?, ids(d, seed + 1, cols, rows)?);
                let mut losses = d.zeros(rows)?;
                // Every third row has no target; its gradient is 0 whatever its logits are.
                let weight: Vec<f32> = (0..rows).map(|row| (row % 3) as f32 * 0.75).collect();
                let weights = d.tensor(&weight, rows)?;
                if weighted && grad_scale.is_some() {
                    logits.view_mut().part(0, 1)?.write(&[f32::NAN])?;
                }
                d.run(Op::CrossEntropy {
                    logits: logits.view_mut(),
                    targets: targets.view(),
                    weights: weighted.then(|| weights.view()),
                    losses: losses.view_mut(),
                    grad_scale,
                })?;
                Ok(vec![logits, losses])
            }),
        );
    }

    for first in [0, 7] {
        let (rows, cols) = (draw.size(1, 40), draw.size(1, 300));
        add(
            "logit_stats",
            format!("[{rows}, {cols}] from {first}"),
            false,
            Box::new(move |d| {
                // Some targets are in other pieces.
                let (mut logits, targets) =
                    (noise(d, seed, 4.0, [rows, cols])?, ids(d, seed + 1, 2 * cols, rows)?);
                let mut stats = d.zeros([rows, 3])?;
                d.run(Op::LogitStats {
                    logits: logits.view(),
                    first,
                    targets: targets.view(),
                    stats: stats.view_mut(),
                })?;
                let weight: Vec<f32> = (0..rows).map(|row| (row % 3) as f32 * 0.75).collect();
                let (weights, log_sums) = (d.tensor(&weight, rows)?, noise(d, seed + 2, 4.0, rows)?);
                d.run(Op::LogitGrad {
                    logits: logits.view_mut(),
                    first,
                    targets: targets.view(),
                    weights: (first > 0).then(|| weights.view()),
                    log_sums: log_sums.view(),
                    scale: 0.25,
                })?;
                Ok(vec![stats, logits])
            }),
        );
    }

    for heads in [Heads::equal(1), Heads::equal(3), Heads { query: 4, kv: 2 }, Heads { query: 3, kv: 1 }] {
        let (b, t, dim) = (draw.size(1, 2), draw.size(1, 75), draw.size(1, 24));
        let (s, blocks) = (Sizes { b, t, heads, dim }, [draw.size(1, 90), draw.size(0, 90), draw.size(1, 9)]);
        let what = format!("{s:?} to blocks of {blocks:?} keys, and gradient");
        add("attention_over", what, false, Box::new(move |d| attention_over(d, seed, s, &blocks)));
    }

    let len = Op::SQUARES_CHUNK + draw.size(1, 2000);
    add(
        "sum_squares",
        format!("{len}"),
        false,
        Box::new(move |d| {
            let (x, mut partials) = (noise(d, seed, 1.0, len)?, d.zeros(len.div_ceil(Op::SQUARES_CHUNK))?);
            d.run(Op::SumSquares { x: x.view(), partials: partials.view_mut() })?;
            Ok(vec![partials])
        }),
    );

    for (name, exact) in [("AdamW", false), ("signs and extremes", true)] {
        let (len, at) = (draw.size(1, 500), draw.size(0, 70));
        add(
            "map",
            format!("{name} on {len} from {at}"),
            exact,
            Box::new(move |d| {
                let program = if exact { others()? } else { adamw()? };
                let g = noise(d, seed, 1.0, len)?;
                let mut w = Vec::new();
                for i in 0..program.writes() {
                    w.push(noise(d, seed + 1, 1.0 + i as f32, len + at)?);
                    // The second moment must not be negative.
                    let squares: Vec<f32> =
                        w[i].to_vec::<f32>()?.iter().map(|x| if i == 2 { x * x } else { *x }).collect();
                    w[i].write(&squares)?;
                }
                let mut to = w.iter_mut().map(|w| w.view_mut().part(at, len)).collect::<Result<Vec<_>>>()?;
                let scalars = &[0.5, 0.9, 0.95, 1e-2, 0.1][..program.scalars()];
                d.run(Op::Map { program: &program, scalars, reads: &[g.view()], writes: &mut to })?;
                Ok(w)
            }),
        );
    }
    all
}
