//! Sparse attention in tiles against a dense mask in f64: forward, backward and with a cache, each head with
//! its own keys; rows without keys, keys that no query attends to, and tiles that are not read.
#![expect(clippy::unwrap_used, reason = "a test fails where it panics")]

use farflung_base::{AttentionPattern, TileLists};
use farflung_tensor::{AttendedKeys, Device, Heads, Mask, Op, Tensor, TensorError, TileMask};

use super::api::refused;
use super::expect::{close, dot, noise, wide};

/// Sizes of `B` sequences of `T` tokens, with `D` values per head.
#[derive(Debug, Clone, Copy)]
struct Sizes {
    batch: usize,
    len: usize,
    heads: Heads,
    d: usize,
}

impl Sizes {
    const fn new(batch: usize, len: usize, query: usize, kv: usize, d: usize) -> Self {
        Self { batch, len, heads: Heads { query, kv }, d }
    }

    /// Returns the widths of the queries, of the keys, and of all.
    fn widths(self) -> [usize; 3] {
        [self.heads.query, self.heads.kv, self.heads.width()].map(|heads| heads * self.d)
    }

    /// Returns the index of the query (part 0), key (1) or value (2) of a token for head `h` of queries.
    fn place(self, (b, h, t): (usize, usize, usize), part: usize) -> usize {
        let Heads { query, kv } = self.heads;
        let head = if part == 0 { h } else { query + (part - 1) * kv + h / (query / kv) };
        (b * self.len + t) * self.widths()[2] + head * self.d
    }

    fn inputs(self) -> [Vec<f32>; 2] {
        let [c, _, w] = self.widths();
        [noise(self.batch * self.len * w, 1), noise(self.batch * self.len * c, 2)]
    }
}

/// Whether a head's query attends to a key, both numbered from the first of their document.
type Keeps<'a> = &'a dyn Fn(usize, usize, usize) -> bool;

/// Returns `y`, `lse` and `d_qkv` with the whole matrix of scores. `starts` says where documents begin.
fn reference(s: Sizes, starts: &[u32], keeps: Keeps<'_>, qkv: &[f64], dy: &[f64]) -> [Vec<f64>; 3] {
    let Sizes { batch, len, heads, d } = s;
    let c = s.widths()[0];
    let (mut y, mut lse) = (vec![0.0; batch * len * c], vec![0.0; batch * heads.query * len]);
    let mut d_qkv = vec![0.0; qkv.len()];
    for (b, h) in (0..batch).flat_map(|b| (0..heads.query).map(move |h| (b, h))) {
        let at = |t: usize, part: usize| s.place((b, h, t), part);
        for t in 0..len {
            let start = starts.get(b * len + t).map_or(0, |&start| start as usize);
            let keys: Vec<usize> = (start..=t).filter(|k| keeps(h, t - start, k - start)).collect();
            let scores: Vec<f64> = keys
                .iter()
                .map(|&k| dot(&qkv[at(t, 0)..][..d], &qkv[at(k, 1)..][..d]) / (d as f64).sqrt())
                .collect();
            let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = scores.iter().map(|x| (x - top).exp()).sum();
            lse[(b * heads.query + h) * len + t] = if keys.is_empty() { top } else { sum.ln() + top };
            let p: Vec<f64> = scores.iter().map(|x| (x - top).exp() / sum).collect();
            let out = (b * len + t) * c + h * d;
            let dp: Vec<f64> = keys.iter().map(|&k| dot(&dy[out..][..d], &qkv[at(k, 2)..][..d])).collect();
            let mean = dot(&p, &dp);
            for ((&k, p), dp) in keys.iter().zip(&p).zip(&dp) {
                let ds = p * (dp - mean) / (d as f64).sqrt();
                for i in 0..d {
                    y[out + i] += p * qkv[at(k, 2) + i];
                    d_qkv[at(t, 0) + i] += ds * qkv[at(k, 1) + i];
                    d_qkv[at(k, 1) + i] += ds * qkv[at(t, 0) + i];
                    d_qkv[at(k, 2) + i] += p * dy[out + i];
                }
            }
        }
    }
    [y, lse, d_qkv]
}

/// Runs attention and its gradient: returns `y`, `lse` and `d_qkv`.
fn attention(
    device: &Device,
    s: Sizes,
    starts: &[u32],
    keys: AttendedKeys<'_>,
    [qkv, dy]: &[Vec<f32>; 2],
) -> [Vec<f32>; 3] {
    let (Sizes { batch, len, heads, .. }, [c, _, w]) = (s, s.widths());
    let starts = (!starts.is_empty()).then(|| device.tensor(starts, [batch, len]).unwrap());
    let mask = Mask { documents: starts.as_ref().map(Tensor::view), keys, ..Mask::default() };
    let (qkv, dy) =
        (device.tensor(qkv, [batch, len, w]).unwrap(), device.tensor(dy, [batch, len, c]).unwrap());
    // What ops overwrite is not 0 before.
    let old = |shape: [usize; 3]| device.tensor(&vec![7.0_f32; shape.iter().product()], shape).unwrap();
    let (mut y, mut lse, mut d) =
        (old([batch, len, c]), old([batch, heads.query, len]), old([batch, len, w]));
    device.run(Op::Attention { heads, mask, qkv: qkv.view(), y: y.view_mut(), lse: lse.view_mut() }).unwrap();
    let (qkv, out, sums, dy, d_qkv) = (qkv.view(), y.view(), lse.view(), dy.view(), d.view_mut());
    device.run(Op::AttentionGrad { heads, mask, qkv, y: out, lse: sums, dy, d_qkv }).unwrap();
    [y, lse, d].map(|x| x.to_vec().unwrap())
}

/// Runs each sequence through a cache in parts of `each` tokens, and the gradients from the last part to the
/// first. Returns `y` and `d_qkv`.
fn in_parts(
    device: &Device,
    s: Sizes,
    starts: &[u32],
    keys: AttendedKeys<'_>,
    [qkv, dy]: &[Vec<f32>; 2],
    each: usize,
) -> [Vec<f32>; 2] {
    let (Sizes { batch, len, heads, .. }, [c, kv, w]) = (s, s.widths());
    let starts = (!starts.is_empty()).then(|| device.tensor(starts, [batch, len]).unwrap());
    let (qkv, dy) =
        (device.tensor(qkv, [batch, len, w]).unwrap(), device.tensor(dy, [batch, len, c]).unwrap());
    let (mut all_y, mut all_d) =
        (device.zeros([batch, len, c]).unwrap(), device.zeros([batch, len, w]).unwrap());
    for b in 0..batch {
        let cache = || device.zeros([1, len + 2, kv]).unwrap();
        let [mut cached_keys, mut values, mut d_keys, mut d_values] = [cache(), cache(), cache(), cache()];
        let parts: Vec<(usize, usize)> =
            (0..len).step_by(each).map(|past| (past, each.min(len - past))).collect();
        let mut sums: Vec<Tensor> =
            parts.iter().map(|(_, new)| device.zeros([1, heads.query, *new]).unwrap()).collect();
        let mask = |start: usize, new: usize| {
            let documents = starts.as_ref().map(|ids| ids.view().part(start, [1, new]).unwrap());
            Mask { documents, keys, ..Mask::default() }
        };
        for (&(past, new), lse) in parts.iter().zip(&mut sums) {
            let start = b * len + past;
            device
                .run(Op::AttentionCached {
                    heads,
                    past,
                    mask: mask(start, new),
                    qkv: qkv.view().part(start * w, [1, new, w]).unwrap(),
                    keys: cached_keys.view_mut(),
                    values: values.view_mut(),
                    y: all_y.view_mut().part(start * c, [1, new, c]).unwrap(),
                    lse: Some(lse.view_mut()),
                })
                .unwrap();
        }
        for (&(past, new), lse) in parts.iter().zip(&sums).rev() {
            let start = b * len + past;
            device
                .run(Op::AttentionCachedGrad {
                    heads,
                    past,
                    mask: mask(start, new),
                    qkv: qkv.view().part(start * w, [1, new, w]).unwrap(),
                    keys: cached_keys.view(),
                    values: values.view(),
                    y: all_y.view().part(start * c, [1, new, c]).unwrap(),
                    lse: lse.view(),
                    dy: dy.view().part(start * c, [1, new, c]).unwrap(),
                    d_qkv: all_d.view_mut().part(start * w, [1, new, w]).unwrap(),
                    d_keys: d_keys.view_mut(),
                    d_values: d_values.view_mut(),
                })
                .unwrap();
        }
    }
    [all_y, all_d].map(|x| x.to_vec().unwrap())
}

fn pattern_mask(device: &Device, text: &str, layer: u32, s: Sizes) -> (TileMask, AttentionPattern) {
    let pattern: AttentionPattern = text.parse().unwrap();
    // Longer than the sequences, as a model's context may be.
    let lists = TileLists::new(pattern, layer, 0..s.heads.query as u32, s.len + 5, TileMask::TILE);
    (TileMask::new(device, &lists).unwrap(), pattern)
}

/// Checks attention, its gradient and its cache on a device, with and without documents, against the dense
/// mask.
pub(super) fn patterns(device: &Device, sizes: &[(usize, usize, usize, usize, usize)], each: &[usize]) {
    for text in [
        "full",
        "window:37",
        "window:20+sinks:3",
        "strided:7",
        "strided:70",
        "fixed:3,1,3+block:5",
        "variable:1,2,3+global:0,2+random:2+block:9",
        "bigbird:3,1,2+block:8+seed:4",
    ] {
        for &(batch, len, query, kv, d) in sizes {
            let s = Sizes::new(batch, len, query, kv, d);
            let (tiles, pattern) = pattern_mask(device, text, 1, s);
            let keeps = |h: usize, q: usize, k: usize| pattern.keeps(1, h as u32, q as u64, k as u64);
            let inputs = s.inputs();
            let [qkv, dy] = inputs.each_ref().map(|x| wide(x));
            let second = |t: usize| if t < len / 3 { 0 } else { (len / 3) as u32 };
            let divided: Vec<u32> = (0..batch * len).map(|at| second(at % len)).collect();
            for starts in [&[][..], &divided] {
                let want = reference(s, starts, &keeps, &qkv, &dy);
                let found = attention(device, s, starts, AttendedKeys::Tiles(&tiles), &inputs);
                for (found, want) in found.iter().zip(&want) {
                    close(found, want, 1e-5);
                }
                for &each in each {
                    let parts = in_parts(device, s, starts, AttendedKeys::Tiles(&tiles), &inputs, each);
                    close(&parts[0], &want[0], 1e-5);
                    close(&parts[1], &want[2], 1e-5);
                }
            }
        }
    }
}

#[test]
fn patterns_are_those_of_a_dense_mask() {
    let sizes = [(2, 150, 4, 2, 12), (1, 64, 2, 2, 8), (1, 300, 3, 1, 5), (1, 7, 1, 1, 4)];
    patterns(&Device::cpu(2).unwrap(), &sizes, &[1, 70]);
}

/// Heads with pairs of their own: some queries without keys, some keys that no query attends to.
pub(super) fn rows_without_keys(device: &Device) {
    let s = Sizes::new(2, 200, 4, 2, 8);
    let keeps = |h: usize, q: usize, k: usize| match h {
        0 => false,
        1 => q.is_multiple_of(3) && k % 5 == 1,
        2 => (64..128).contains(&k) && q > 150,
        _ => k == q && q != 70,
    };
    let lists = TileLists::of_pairs(4, |h, q, k| keeps(h as usize, q, k), s.len, TileMask::TILE);
    let tiles = TileMask::new(device, &lists).unwrap();
    let inputs = s.inputs();
    let [qkv, dy] = inputs.each_ref().map(|x| wide(x));
    let want = reference(s, &[], &keeps, &qkv, &dy);
    let found = attention(device, s, &[], AttendedKeys::Tiles(&tiles), &inputs);
    close(&found[0], &want[0], 1e-5);
    close(&found[2], &want[2], 1e-5);
    for (lse, want) in found[1].iter().zip(&want[1]) {
        let is_close = (f64::from(*lse) - want).abs() < 1e-5 * want.abs().max(1.0);
        assert!(if want.is_infinite() { *lse <= -1e30 } else { is_close }, "{lse} {want}");
    }
    // Outputs and gradients of queries without keys, and of keys without queries, are 0 exactly.
    let c = s.widths()[0];
    let mut none = 0;
    for (b, h, t) in (0..2).flat_map(|b| (0..4).flat_map(move |h| (0..s.len).map(move |t| (b, h, t)))) {
        let mut zeros: Vec<f32> = Vec::new();
        if !(0..=t).any(|k| keeps(h, t, k)) {
            zeros.extend(&found[0][(b * s.len + t) * c + h * s.d..][..s.d]);
            zeros.extend(&found[2][s.place((b, h, t), 0)..][..s.d]);
        }
        let group = h / 2 * 2..h / 2 * 2 + 2;
        if !group.into_iter().any(|h| (t..s.len).any(|q| keeps(h, q, t))) {
            zeros.extend([1, 2].iter().flat_map(|part| &found[2][s.place((b, h, t), *part)..][..s.d]));
        }
        none += usize::from(!zeros.is_empty());
        assert!(zeros.iter().all(|x| *x == 0.0), "{b} {h} {t}: {zeros:?}");
    }
    assert!(none > 2 * s.len, "some of all heads");
}

#[test]
fn rows_without_keys_are_0_and_have_no_gradient() {
    rows_without_keys(&Device::cpu(2).unwrap());
}

/// NaN in the keys and values of a tile reaches queries that attend to some of the tile, and no others: neither
/// those that attend to tiles before and after it, nor the gradients of other keys.
pub(super) fn skipped_tiles(device: &Device) {
    let s = Sizes::new(1, 64 * 8, 2, 1, 8);
    // Queries of tile 1 attend to its keys and to no others; all others attend to all but these keys.
    let keeps = |_: usize, q: usize, k: usize| (q / 64 == 1) == (k / 64 == 1);
    let lists = TileLists::of_pairs(2, |h, q, k| keeps(h as usize, q, k), s.len, TileMask::TILE);
    let tiles = TileMask::new(device, &lists).unwrap();
    let [clean, dy] = s.inputs();
    let [queries, _, w] = s.widths();
    let mut poisoned = clean.clone();
    for t in 64..128 {
        poisoned[t * w + queries..(t + 1) * w].fill(f32::NAN);
    }
    let run = |qkv: Vec<f32>| attention(device, s, &[], AttendedKeys::Tiles(&tiles), &[qkv, dy.clone()]);
    let (want, found) = (run(clean), run(poisoned));
    for (found, want, width) in [(&found[0], &want[0], queries), (&found[2], &want[2], w)] {
        for (t, (found, want)) in found.chunks(width).zip(want.chunks(width)).enumerate() {
            if t / 64 != 1 {
                assert_eq!(found, want, "token {t}");
            }
        }
        assert!(found[64 * width..128 * width].iter().any(|x| x.is_nan()));
    }
}

#[test]
fn nan_in_skipped_tiles_does_not_surface() {
    skipped_tiles(&Device::cpu(1).unwrap());
}

/// All keys up to the query's own, in tiles, have the bits of dense attention.
#[test]
fn a_full_mask_has_the_bits_of_the_dense_kernel() {
    for (s, threads) in [
        (Sizes::new(2, 300, 4, 2, 16), 1),
        (Sizes::new(1, 1000, 2, 2, 64), 2),
        (Sizes::new(1, 129, 3, 1, 5), 3),
        (Sizes::new(1, 64, 1, 1, 32), 1),
    ] {
        let cpu = Device::cpu(threads).unwrap();
        let (tiles, _) = pattern_mask(&cpu, "full", 0, s);
        let inputs = s.inputs();
        let dense = attention(&cpu, s, &[], AttendedKeys::All, &inputs);
        let sparse = attention(&cpu, s, &[], AttendedKeys::Tiles(&tiles), &inputs);
        for (dense, sparse) in dense.iter().zip(&sparse) {
            assert!(dense.iter().zip(sparse).all(|(a, b)| a.to_bits() == b.to_bits()), "{s:?}");
        }
        let window = pattern_mask(&cpu, "window:100", 0, s).0;
        let as_window = attention(&cpu, s, &[], AttendedKeys::Window(100), &inputs);
        let as_tiles = attention(&cpu, s, &[], AttendedKeys::Tiles(&window), &inputs);
        for (found, want) in as_tiles.iter().zip(&as_window) {
            close(found, &wide(want), 1e-6);
        }
    }
}

#[test]
fn gradients_are_the_slopes() {
    let s = Sizes::new(1, 8, 2, 1, 3);
    let cpu = Device::cpu(1).unwrap();
    for text in ["window:3+sinks:1", "strided:3", "fixed:3,1+block:1", "bigbird:3,1,1+block:1"] {
        let (tiles, pattern) = pattern_mask(&cpu, text, 0, s);
        let keeps = |h: usize, q: usize, k: usize| pattern.keeps(0, h as u32, q as u64, k as u64);
        let inputs = s.inputs();
        let [_, _, d] = attention(&cpu, s, &[], AttendedKeys::Tiles(&tiles), &inputs);
        let [x, dy] = inputs.each_ref().map(|x| wide(x));
        let objective = |x: &[f64]| dot(&reference(s, &[], &keeps, x, &dy)[0], &dy);
        let slope = |i: usize| {
            let moved = |by: f64| {
                let mut x = x.clone();
                x[i] += by;
                objective(&x)
            };
            (moved(1e-5) - moved(-1e-5)) / 2e-5
        };
        close(&d, &(0..x.len()).map(slope).collect::<Vec<_>>(), 1e-6);
    }
}

#[test]
fn bits_do_not_depend_on_threads_and_parts_have_those_of_the_whole() {
    let s = Sizes::new(2, 333, 4, 2, 8);
    let mut found = Vec::new();
    for threads in [1, 2, 3] {
        let cpu = Device::cpu(threads).unwrap();
        for text in ["bigbird:3,1,2+block:16", "window:9+sinks:2", "strided:90"] {
            let (tiles, _) = pattern_mask(&cpu, text, 0, s);
            let inputs = s.inputs();
            let whole = attention(&cpu, s, &[], AttendedKeys::Tiles(&tiles), &inputs);
            for each in [1, 71, 150] {
                let parts = in_parts(&cpu, s, &[], AttendedKeys::Tiles(&tiles), &inputs, each);
                assert!(parts[0] == whole[0], "{text}: outputs of {each} tokens at a time");
            }
            found.push(whole);
        }
    }
    assert!(found.chunks(3).all(|other| *other == found[..3]));
}

#[test]
fn tiles_that_do_not_fit_are_refused_and_costs_are_those_of_the_tiles() {
    let (cpu, s) = (Device::cpu(1).unwrap(), Sizes::new(1, 200, 2, 1, 4));
    let (tiles, _) = pattern_mask(&cpu, "window:10", 0, s);
    let lists = |heads, tile| TileLists::new(AttentionPattern::FULL, 0, 0..heads, 206, tile);
    assert!(matches!(
        TileMask::new(&cpu, &lists(2, 32)),
        Err(TensorError::Tiles { found: 32, bound: 64, .. })
    ));
    let other_heads = TileMask::new(&cpu, &lists(1, 64)).unwrap();
    let run = |len: usize, tiles: &TileMask, prefixes: bool| {
        let [c, _, w] = s.widths();
        let (qkv, mut y) = (cpu.zeros([1, len, w]).unwrap(), cpu.zeros([1, len, c]).unwrap());
        let mut lse = cpu.zeros([1, 2, len]).unwrap();
        let ends = cpu.tensor(&vec![0_u32; len], [1, len]).unwrap();
        let prefixes = prefixes.then(|| ends.view());
        let mask = Mask { prefixes, keys: AttendedKeys::Tiles(tiles), ..Mask::default() };
        let op =
            Op::Attention { heads: s.heads, mask, qkv: qkv.view(), y: y.view_mut(), lse: lse.view_mut() };
        let flops = op.flops();
        cpu.run(op).map(|()| flops)
    };
    // The keys of the query's tile up to its own, and the tile before; two heads, four operations for each pair
    // and value.
    let own = 64 * 65 / 2;
    let computed = 3 * own + 2 * 64 * 64 + (8 * 64 + 36);
    assert_eq!(run(200, &tiles, false), Ok(computed * 2 * 4 * 4));
    refused(run(206, &tiles, false).map(drop), &["205 tokens, expected 206"]);
    refused(run(200, &other_heads, false).map(drop), &["1 heads, expected 2"]);
    refused(run(200, &tiles, true).map(drop), &["prefixes"]);
}
