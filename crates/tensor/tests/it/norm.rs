//! Norms and their gradients against f64, with equal bits on 1, 2 and 3 threads.
#![expect(clippy::unwrap_used, reason = "a test fails where it panics")]

use farflung_tensor::{Device, Norm, NormKind, Op};

use super::expect::{close, dot, noise, same_bits, wide};

const SIZES: [(usize, usize); 8] =
    [(1, 1), (1, 17), (3, 16), (2, 5), (7, 100), (600, 33), (257, 130), (0, 5)];

const NORMS: [Norm; 2] = [Norm { kind: NormKind::Layer, eps: 1e-5 }, Norm { kind: NormKind::Rms, eps: 1e-6 }];

/// Returns the mean of a row (0 for RMS norm), and the square of its denominator.
fn moments(norm: Norm, x: &[f64]) -> [f64; 2] {
    let mean_of = |f: &dyn Fn(f64) -> f64| x.iter().map(|&x| f(x)).sum::<f64>() / x.len() as f64;
    let mean = if norm.kind == NormKind::Rms { 0.0 } else { mean_of(&|x| x) };
    [mean, mean_of(&|x| (x - mean).powi(2)) + f64::from(norm.eps)]
}

/// Computes `y` in f64. The gradients under test are those of the loss `sum(dy y)`.
fn normalised(norm: Norm, x: &[f64], gain: &[f64], bias: Option<&[f64]>) -> Vec<f64> {
    let row = |x: &[f64]| {
        let [mean, square] = moments(norm, x);
        let scaled = |j: usize| (x[j] - mean) / square.sqrt() * gain[j];
        (0..x.len()).map(|j| scaled(j) + bias.map_or(0.0, |b| b[j])).collect::<Vec<_>>()
    };
    x.chunks_exact(gain.len()).flat_map(row).collect()
}

/// Returns the central difference of `f` in element `i` of `v`.
fn slope(v: &[f64], i: usize, f: &dyn Fn(&[f64]) -> f64) -> f64 {
    let moved = |by: f64| {
        let mut v = v.to_vec();
        v[i] += by;
        f(&v)
    };
    (moved(1e-5) - moved(-1e-5)) / 2e-5
}

#[test]
fn norms_and_their_gradients() {
    for (rows, cols) in SIZES {
        for norm in NORMS {
            for with_bias in [false, true] {
                check(norm, with_bias, rows, cols);
            }
        }
    }
}

fn check(norm: Norm, with_bias: bool, rows: usize, cols: usize) {
    let (mut x, gain, bias) = (noise(rows * cols, 1), noise(cols, 2), noise(cols, 3));
    for x in &mut x {
        *x = 3.0 * *x + 5.0;
    }
    let (dy, residual, start) = (noise(rows * cols, 4), noise(rows * cols, 5), noise(cols, 6));
    let [y, stats, dx, dx_plus, d_gain, d_bias, d_gain_plus] = same_bits(|cpu| {
        let m = |v: &[f32]| cpu.tensor(v, [rows, cols]).unwrap();
        let r = |v: &[f32]| cpu.tensor(v, cols).unwrap();
        let (x, gain, bias, dy, residual) = (m(&x), r(&gain), r(&bias), m(&dy), m(&residual));
        let (mut y, mut stats) = (cpu.zeros([rows, cols]).unwrap(), cpu.zeros([rows, 2]).unwrap());
        let (x, gain, dy) = (x.view(), gain.view(), dy.view());
        let bias = with_bias.then(|| bias.view());
        cpu.run(Op::Norm { norm, x, gain, bias, y: y.view_mut(), stats: stats.view_mut() }).unwrap();
        let mut dx = cpu.zeros([rows, cols]).unwrap();
        let mut dx_plus = cpu.zeros([rows, cols]).unwrap();
        for (dx, residual) in [(&mut dx, None), (&mut dx_plus, Some(residual.view()))] {
            let (stats, dx) = (stats.view(), dx.view_mut());
            cpu.run(Op::NormInput { norm, x, gain, stats, dy, residual, dx }).unwrap();
        }
        let [mut d_gain, mut d_bias, mut d_gain_plus, mut unused] =
            [r(&start), r(&start), r(&start), r(&start)];
        for (d_gain, d_bias, accumulate) in
            [(&mut d_gain, &mut d_bias, false), (&mut d_gain_plus, &mut unused, true)]
        {
            let d_bias = with_bias.then(|| d_bias.view_mut());
            let (stats, d_gain) = (stats.view(), d_gain.view_mut());
            cpu.run(Op::NormWeight { x, stats, dy, d_gain, d_bias, accumulate }).unwrap();
        }
        [y, stats, dx, dx_plus, d_gain, d_bias, d_gain_plus]
    });
    let (x, gain, dy) = (wide(&x), wide(&gain), wide(&dy));
    let bias = with_bias.then(|| wide(&bias));
    close(&y, &normalised(norm, &x, &gain, bias.as_deref()), 2e-6);
    for (row, s) in x.chunks_exact(cols).zip(stats.chunks_exact(2)) {
        close(&[s[0], (1.0 / s[1]).powi(2)], &moments(norm, row), 5e-6);
    }
    // Expected gradients: central differences of sum(dy y) in f64. Only the loss of the element's own row is
    // differentiated, which keeps large sizes fast.
    let want_dx: Vec<f64> = (0..x.len())
        .map(|i| {
            let row = i / cols * cols..(i / cols + 1) * cols;
            let f = |x: &[f64]| dot(&normalised(norm, x, &gain, bias.as_deref()), &dy[row.clone()]);
            slope(&x[row.clone()], i % cols, &f)
        })
        .collect();
    let scale_of_x = stats.chunks_exact(2).map(|s| f64::from(s[1])).fold(1.0, f64::max);
    close(&dx, &want_dx, 2e-5 * scale_of_x);
    let plus: Vec<f64> = want_dx.iter().zip(&residual).map(|(d, r)| d + f64::from(*r)).collect();
    close(&dx_plus, &plus, 2e-5 * scale_of_x);
    let loss = |gain: &[f64], bias: Option<&[f64]>| dot(&normalised(norm, &x, gain, bias), &dy);
    let want_gain: Vec<f64> =
        (0..cols).map(|j| slope(&gain, j, &|gain| loss(gain, bias.as_deref()))).collect();
    close(&d_gain, &want_gain, 1e-5);
    let plus: Vec<f64> = want_gain.iter().zip(&start).map(|(g, s)| g + f64::from(*s)).collect();
    close(&d_gain_plus, &plus, 1e-5);
    let want_bias: Vec<f64> = match &bias {
        Some(bias) => (0..cols).map(|j| slope(bias, j, &|bias| loss(&gain, Some(bias)))).collect(),
        None => wide(&start),
    };
    close(&d_bias, &want_bias, 1e-5);
}

/// Queries and keys are normalised per head: the same values as rows of another width.
#[test]
fn a_norm_per_head_is_a_norm_of_reshaped_rows() {
    let (tokens, heads, d) = (5, 3, 12);
    let x = noise(tokens * heads * d, 1);
    for norm in NORMS {
        let [y] = same_bits(|cpu| {
            let (x, gain) = (cpu.tensor(&x, [1, tokens, heads * d]).unwrap(), noise(d, 2));
            let gain = cpu.tensor(&gain, d).unwrap();
            let mut y = cpu.zeros([1, tokens, heads * d]).unwrap();
            let mut stats = cpu.zeros([tokens * heads, 2]).unwrap();
            let rows = [tokens * heads, d];
            let (x, to) = (x.view().reshape(rows).unwrap(), y.view_mut().reshape(rows).unwrap());
            let (gain, stats) = (gain.view(), stats.view_mut());
            cpu.run(Op::Norm { norm, x, gain, bias: None, y: to, stats }).unwrap();
            [y]
        });
        close(&y, &normalised(norm, &wide(&x), &wide(&noise(d, 2)), None), 2e-6);
    }
}

#[test]
fn rows_without_columns_have_statistics() {
    let [stats] = same_bits(|cpu| {
        let (x, g) = (cpu.zeros([3, 0]).unwrap(), cpu.zeros(0).unwrap());
        let mut y = cpu.zeros([3, 0]).unwrap();
        let mut stats = cpu.tensor(&[7.0_f32; 6], 6).unwrap();
        let (x, gain, bias) = (x.view(), g.view(), Some(g.view()));
        cpu.run(Op::Norm { norm: NORMS[0], x, gain, bias, y: y.view_mut(), stats: stats.view_mut() })
            .unwrap();
        [stats]
    });
    assert_eq!(stats, [0.0; 6]);
}

/// A row of zeros, and values whose squares are large.
#[test]
fn rms_norm_at_the_edges() {
    let cpu = Device::cpu(1).unwrap();
    let norm = NORMS[1];
    let (x, gain) = (cpu.tensor(&[0.0_f32, 0.0, 1e18, -1e18], [2, 2]).unwrap(), [1.0_f32, 2.0]);
    let gain = cpu.tensor(&gain, 2).unwrap();
    let (mut y, mut stats) = (cpu.zeros([2, 2]).unwrap(), cpu.zeros([2, 2]).unwrap());
    let (x, gain, to) = (x.view(), gain.view(), stats.view_mut());
    cpu.run(Op::Norm { norm, x, gain, bias: None, y: y.view_mut(), stats: to }).unwrap();
    close(&y.to_vec::<f32>().unwrap(), &[0.0, 0.0, 1.0, -2.0], 1e-6);
    close(&stats.to_vec::<f32>().unwrap(), &[0.0, 1000.0, 0.0, 1e-18], 1e-6);
}
