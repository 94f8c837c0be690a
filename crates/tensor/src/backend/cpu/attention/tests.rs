//! Compares attention with its definition in f64, and its gradient with central differences of the definition.

use super::*;

/// Returns reproducible numbers of about unit size.
fn noise(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f64 / f64::from(1 << 24) - 0.5
    };
    (0..len).map(|_| (2.0 * (next() + next() + next())) as f32).collect()
}

fn layout(batch: usize, (query, kv): (usize, usize), tokens: usize, head_dim: usize) -> Layout {
    Layout { batch, tokens, heads: Heads { query, kv }, head_dim, window: usize::MAX }
}

/// Returns the number of floats of one token's queries, keys and values.
fn joined(l: Layout) -> usize {
    l.heads.width() * l.head_dim
}

/// Returns the index of a token's queries (part 0), keys (1) or values (2) for head `h` of queries.
fn place(l: Layout, (b, h, t): (usize, usize, usize), part: usize) -> usize {
    let Heads { query, kv } = l.heads;
    let head = if part == 0 { h } else { query + (part - 1) * kv + h / (query / kv) };
    (b * l.tokens + t) * joined(l) + head * l.head_dim
}

/// Returns the probabilities of one row, and its log-sum-exp.
fn row_probabilities(q: &[f64], keys: &[&[f64]]) -> (Vec<f64>, f64) {
    let scale = 1.0 / (q.len() as f64).sqrt();
    let s: Vec<f64> =
        keys.iter().map(|k| scale * q.iter().zip(*k).map(|(q, k)| q * k).sum::<f64>()).collect();
    let top = s.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = s.iter().map(|s| (s - top).exp()).sum();
    (s.iter().map(|s| (s - top).exp() / sum).collect(), top + sum.ln())
}

/// Computes `(y, lse)` of `qkv` by the definition.
fn reference(l: Layout, qkv: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let (c, d) = (l.width(), l.head_dim);
    let (mut y, mut lse) = (vec![0.0; l.batch * l.tokens * c], Vec::new());
    for b in 0..l.batch {
        for h in 0..l.heads.query {
            let at = |t: usize, part: usize| &qkv[place(l, (b, h, t), part)..][..d];
            for i in 0..l.tokens {
                let keys: Vec<&[f64]> = (0..=i).map(|j| at(j, 1)).collect();
                let (p, e) = row_probabilities(at(i, 0), &keys);
                lse.push(e);
                for (j, p) in p.iter().enumerate() {
                    for (x, v) in at(j, 2).iter().enumerate() {
                        y[(b * l.tokens + i) * c + h * d + x] += p * v;
                    }
                }
            }
        }
    }
    (y, lse)
}

/// Computes `d_qkv` of `qkv` and `dy`: dV = Pᵀ dY, dP = dY Vᵀ, dS = P (dP - rowsum(P dP)), dQ = dS K, dK = dSᵀ
/// Q.
fn reference_gradient(l: Layout, qkv: &[f64], dy: &[f64]) -> Vec<f64> {
    let (c, d) = (l.width(), l.head_dim);
    let scale = 1.0 / (d as f64).sqrt();
    let mut g = vec![0.0; qkv.len()];
    for b in 0..l.batch {
        for h in 0..l.heads.query {
            let at = |t: usize, part: usize| place(l, (b, h, t), part);
            let row = |t: usize, part: usize| &qkv[at(t, part)..][..d];
            for i in 0..l.tokens {
                let keys: Vec<&[f64]> = (0..=i).map(|j| row(j, 1)).collect();
                let (p, _) = row_probabilities(row(i, 0), &keys);
                let dy = &dy[(b * l.tokens + i) * c + h * d..][..d];
                let dp: Vec<f64> =
                    (0..=i).map(|j| dy.iter().zip(row(j, 2)).map(|(a, b)| a * b).sum()).collect();
                let mean: f64 = p.iter().zip(&dp).map(|(p, dp)| p * dp).sum();
                for j in 0..=i {
                    let ds = p[j] * (dp[j] - mean) * scale;
                    for x in 0..d {
                        g[at(j, 2) + x] += p[j] * dy[x];
                        g[at(i, 0) + x] += ds * row(j, 1)[x];
                        g[at(j, 1) + x] += ds * row(i, 0)[x];
                    }
                }
            }
        }
    }
    g
}

fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().copied().map(f64::from).collect()
}

#[track_caller]
fn assert_close(got: &[f32], want: &[f64], tolerance: f64, what: &str) {
    assert_eq!(got.len(), want.len());
    let size = want.iter().fold(1.0, |m: f64, w| m.max(w.abs()));
    for (i, (&g, &w)) in got.iter().zip(want).enumerate() {
        assert!((f64::from(g) - w).abs() <= tolerance * size, "{what}: element {i} is {g}, not {w}");
    }
}

/// Returns `(y, lse, d_qkv)`. The outputs are NaN at first, so that elements that are not written are detected.
fn run(isa: Isa, threads: usize, l: Layout, qkv: &[f32], dy: &[f32]) -> [Vec<f32>; 3] {
    let pool = Pool::new(threads).unwrap();
    let mut y = vec![f32::NAN; dy.len()];
    let mut lse = vec![f32::NAN; l.query_heads() * l.tokens];
    forward(isa, &pool, (l, Attended::Before(None)), qkv, &mut y, &mut lse);
    let mut d_qkv = vec![f32::NAN; qkv.len()];
    backward(isa, &pool, (l, Attended::Before(None)), [qkv, &y, &lse, dy], &mut d_qkv);
    [y, lse, d_qkv]
}

#[test]
fn matches_the_definition_at_any_size() {
    let sizes = [
        (1, (1, 1), 1, 1),
        (2, (3, 3), 2, 3),
        (1, (2, 2), 7, 8),
        (2, (1, 1), 17, 5),
        (1, (2, 2), 65, 32),
        (2, (2, 2), 64, 16),
        (1, (1, 1), 67, 33),
        (1, (1, 1), 133, 80),
        (1, (1, 1), 100, 128),
        (1, (2, 2), 256, 64),
        (1, (1, 1), 257, 24),
        (1, (1, 1), 600, 20),
        (1, (3, 1), 1, 5),
        (2, (6, 2), 19, 3),
        (1, (4, 1), 150, 24),
        (2, (4, 2), 300, 16),
    ];
    for (b, h, t, d) in sizes {
        let l = layout(b, h, t, d);
        let (qkv, dy) = (noise(b * t * joined(l), 1), noise(b * t * l.width(), 2));
        let (want_y, want_lse) = reference(l, &wide(&qkv));
        let want_g = reference_gradient(l, &wide(&qkv), &wide(&dy));
        for isa in Isa::available() {
            let [y, lse, g] = run(isa, 1, l, &qkv, &dy);
            let what = format!("{isa:?} {l:?}");
            assert_close(&y, &want_y, 2e-6, &what);
            assert_close(&lse, &want_lse, 2e-6, &what);
            assert_close(&g, &want_g, 5e-6, &what);
        }
    }
}

#[test]
fn levels_agree_and_threads_do_not_matter() {
    for heads in [(3, 3), (6, 2)] {
        let l = layout(2, heads, 301, 40);
        let (qkv, dy) = (noise(2 * 301 * joined(l), 3), noise(2 * 301 * l.width(), 4));
        let one = run(Isa::detect(), 1, l, &qkv, &dy);
        for threads in [2, 3] {
            let more = run(Isa::detect(), threads, l, &qkv, &dy);
            for (a, b) in one.iter().zip(&more) {
                assert!(a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits()), "{threads} threads");
            }
        }
        for isa in Isa::available() {
            let same = isa != Isa::PORTABLE;
            for (a, b) in one.iter().zip(&run(isa, 1, l, &qkv, &dy)) {
                assert_close(a, &wide(b), 1e-5, "portable");
                assert!(!same || a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits()), "{isa:?}");
            }
        }
    }
}

#[test]
fn gradient_is_the_slope() {
    let l = layout(1, (4, 2), 5, 3);
    let (qkv, dy) = (noise(5 * joined(l), 5), noise(5 * l.width(), 6));
    let [_, _, g] = run(Isa::detect(), 1, l, &qkv, &dy);
    let (x, dy) = (wide(&qkv), wide(&dy));
    let objective = |x: &[f64]| reference(l, x).0.iter().zip(&dy).map(|(y, dy)| y * dy).sum::<f64>();
    let slope: Vec<f64> = (0..x.len())
        .map(|i| {
            let moved = |by: f64| {
                let mut x = x.clone();
                x[i] += by;
                objective(&x)
            };
            (moved(1e-5) - moved(-1e-5)) / 2e-5
        })
        .collect();
    assert_close(&g, &slope, 1e-6, "slope");
}

/// The objective of a packed sequence is the sum of its documents', each alone.
#[test]
fn gradient_of_documents_is_the_slope() {
    let (l, lengths) = (layout(1, (4, 2), 6, 3), [2, 1, 3]);
    let (w, c) = (joined(l), l.width());
    let (qkv, dy) = (noise(6 * w, 5), noise(6 * c, 6));
    let starts = [0, 0, 2, 3, 3, 3];
    let documents = Documents::of_starts(&starts, 6);
    let pool = Pool::new(1).unwrap();
    let (mut y, mut lse, mut g) = (vec![f32::NAN; 6 * c], vec![f32::NAN; 4 * 6], vec![f32::NAN; 6 * w]);
    for isa in Isa::available() {
        forward(isa, &pool, (l, Attended::Before(Some(&documents))), &qkv, &mut y, &mut lse);
        backward(isa, &pool, (l, Attended::Before(Some(&documents))), [&qkv, &y, &lse, &dy], &mut g);
        let (x, dy) = (wide(&qkv), wide(&dy));
        let objective = |x: &[f64]| {
            let mut first = 0;
            let of = |&tokens: &usize| {
                let alone = Layout { tokens, ..l };
                let (y, _) = reference(alone, &x[first * w..(first + tokens) * w]);
                let dy = &dy[first * c..(first + tokens) * c];
                first += tokens;
                y.iter().zip(dy).map(|(y, dy)| y * dy).sum::<f64>()
            };
            lengths.iter().map(of).sum::<f64>()
        };
        let slope: Vec<f64> = (0..x.len())
            .map(|i| {
                let moved = |by: f64| {
                    let mut x = x.clone();
                    x[i] += by;
                    objective(&x)
                };
                (moved(1e-5) - moved(-1e-5)) / 2e-5
            })
            .collect();
        assert_close(&g, &slope, 1e-6, "slope");
    }
}

/// Tiles of each height: keys of a prefix that ends within a tile have the gradients of all its queries.
#[test]
fn levels_agree_on_prefixes() {
    let cpu = crate::Device::cpu(1).unwrap();
    let (t, pool) = (300, Pool::new(1).unwrap());
    let l = layout(1, (2, 1), t, 5);
    let (qkv, dy) = (noise(t * joined(l), 3), noise(t * l.width(), 4));
    for prefix in [1_u32, 100, 127, 129, 147, 200, 257, 299] {
        let ends = cpu.tensor(&vec![prefix; t], [1, t]).unwrap();
        let mask = Mask { prefixes: Some(ends.view()), ..Mask::default() };
        let documents = Documents::of_tokens("test", &mask, 0, Shape::from([1, t, l.width()])).unwrap();
        let mut found: Vec<[Vec<f32>; 2]> = Vec::new();
        for isa in Isa::available() {
            let (mut y, mut lse) = (vec![f32::NAN; dy.len()], vec![f32::NAN; l.query_heads() * t]);
            let mut d_qkv = vec![f32::NAN; qkv.len()];
            forward(isa, &pool, (l, Attended::Before(documents.as_ref())), &qkv, &mut y, &mut lse);
            backward(
                isa,
                &pool,
                (l, Attended::Before(documents.as_ref())),
                [&qkv, &y, &lse, &dy],
                &mut d_qkv,
            );
            found.push([y, d_qkv]);
        }
        let [y, d_qkv] = &found[0];
        for other in &found[1..] {
            assert_close(&other[0], &wide(y), 1e-5, &format!("output, prefix {prefix}"));
            assert_close(&other[1], &wide(d_qkv), 1e-5, &format!("gradient, prefix {prefix}"));
        }
        assert!(d_qkv.iter().all(|x| x.is_finite()), "{prefix}");
    }
}

/// Tiles of each height: ranges that begin and end within blocks of queries and tiles of keys, in no order.
#[test]
fn levels_agree_on_ranges() {
    let (t, keys, pool) = (310, 520, Pool::new(1).unwrap());
    let l = layout(1, (4, 2), t, 5);
    let draw = |i: u32| (i.wrapping_mul(2_654_435_761) >> 8) % 530;
    let (from, to): (Vec<u32>, Vec<u32>) = (0..t as u32).map(|i| (draw(2 * i), draw(2 * i + 1))).unzip();
    let read = [noise(t * joined(l), 3), noise(keys * l.kv_width(), 4), noise(keys * l.kv_width(), 5)];
    let dy = noise(t * l.width(), 6);
    let mut found: Vec<[Vec<f32>; 4]> = Vec::new();
    for isa in Isa::available() {
        let over = Over { isa, layout: l, keys, ranges: Ranges { from: &from, to: &to } };
        let (mut y, mut lse) = (vec![f32::NAN; dy.len()], vec![f32::NAN; l.query_heads() * t]);
        over.forward(&pool, read.each_ref().map(|x| &x[..]), false, &mut y, &mut lse);
        let mut d = [vec![1.0; dy.len()], vec![2.0; read[1].len()], vec![3.0; read[2].len()]];
        let all = [&read[0], &read[1], &read[2], &y, &lse, &dy].map(|x| &x[..]);
        over.backward(&pool, all, d.each_mut().map(|x| &mut x[..]));
        let [dq, dk, dv] = d;
        found.push([y, dq, dk, dv]);
    }
    assert!(found[0].iter().flatten().all(|x| x.is_finite()));
    for other in &found[1..] {
        for (found, want) in other.iter().zip(&found[0]) {
            assert_close(found, &wide(want), 1e-5, "ranges");
        }
    }
}

/// Returns the rows of `t` tokens from token `past` on, of each of `b` sequences of `total` tokens.
fn some_tokens(data: &[f32], width: usize, (b, total): (usize, usize), past: usize, t: usize) -> Vec<f32> {
    (0..b).flat_map(|b| data[(b * total + past) * width..][..t * width].to_vec()).collect()
}

#[test]
fn tokens_that_come_in_pieces_have_the_same_outputs_and_gradients() {
    let (b, d, capacity) = (2, 12, 310);
    for (h, pieces) in [
        ((2, 2), vec![1, 1, 1]),
        ((2, 2), vec![5, 1, 2]),
        ((2, 2), vec![64, 3, 70, 1]),
        ((2, 2), vec![255, 1, 1, 40]),
        ((2, 2), vec![130, 7, 150]),
        ((2, 2), vec![20, 280]),
        ((2, 2), vec![7]),
        ((4, 2), vec![5, 1, 2]),
        ((3, 1), vec![255, 1, 1, 40]),
        ((6, 2), vec![130, 7, 150]),
    ] {
        let total: usize = pieces.iter().sum();
        let l = layout(b, h, total, d);
        let (w, c, kv) = (joined(l), l.width(), l.kv_width());
        let (qkv, dy) = (noise(b * total * w, 7), noise(b * total * c, 8));
        let want = reference_gradient(l, &wide(&qkv), &wide(&dy));
        let all = (b, total);
        let in_pieces = |isa, threads| {
            let pool = Pool::new(threads).unwrap();
            // Old contents after the last token must not affect results.
            let (mut keys, mut values) =
                (vec![f32::NAN; b * capacity * kv], vec![f32::NAN; b * capacity * kv]);
            let (mut forwards, mut past) = (Vec::new(), 0);
            for &t in &pieces {
                let qkv = some_tokens(&qkv, w, all, past, t);
                let (mut y, mut lse) = (vec![f32::NAN; b * t * c], vec![f32::NAN; b * h.0 * t]);
                let (l, cache) = (layout(b, h, t, d), Cache { past, capacity });
                let caches = [&mut keys[..], &mut values[..]];
                forward_over(
                    isa,
                    &pool,
                    NewTokens { layout: l, cache, attended: Attended::Before(None) },
                    &qkv,
                    caches,
                    &mut y,
                    Some(&mut lse),
                );
                forwards.push((l, cache, qkv, y, lse));
                past += t;
            }
            let (mut d_keys, mut d_values) = (vec![0.0; b * capacity * kv], vec![0.0; b * capacity * kv]);
            let mut outputs = Vec::new();
            for (l, cache, qkv, y, lse) in forwards.into_iter().rev() {
                let dy = some_tokens(&dy, c, all, cache.past, l.tokens);
                let mut d_qkv = vec![f32::NAN; qkv.len()];
                let read = [&qkv, &keys, &values, &y, &lse, &dy].map(|x| &x[..]);
                backward_over(
                    isa,
                    &pool,
                    NewTokens { layout: l, cache, attended: Attended::Before(None) },
                    read,
                    [&mut d_qkv, &mut d_keys, &mut d_values],
                );
                outputs.push((cache.past, l.tokens, y, d_qkv));
            }
            outputs
        };
        let want: Vec<f32> = want.iter().map(|&x| x as f32).collect();
        for isa in Isa::available() {
            let whole = run(isa, 1, l, &qkv, &dy);
            let one = in_pieces(isa, 1);
            for (past, t, y, d_qkv) in &one {
                let what = format!("{isa:?}: {t} after {past}");
                assert_eq!(*y, some_tokens(&whole[0], c, all, *past, *t), "{what}");
                assert_close(d_qkv, &wide(&some_tokens(&want, w, all, *past, *t)), 5e-6, &what);
            }
            assert_eq!(one, in_pieces(isa, 3), "threads do not matter");
        }
    }
}

#[test]
fn large_logits_stay_finite() {
    let l = layout(1, (1, 1), 300, 16);
    let qkv: Vec<f32> = noise(300 * 48, 8).iter().map(|x| x * 200.0).collect();
    let dy = noise(300 * 16, 9);
    let (want, _) = reference(l, &wide(&qkv));
    for isa in Isa::available() {
        let outputs = run(isa, 1, l, &qkv, &dy);
        assert!(outputs[1].iter().any(|&e| e > 1e4), "the logits are large");
        assert!(outputs.iter().flatten().all(|x| x.is_finite()));
        assert_close(&outputs[0], &want, 2e-3, "saturated");
    }
}

#[test]
fn a_nan_stays_close_and_does_not_outlive_its_call() {
    let (t, d) = (70, 8);
    let l = layout(1, (2, 2), t, d);
    let mut qkv = noise(t * 6 * d, 10);
    // A NaN in the last token's value, first head. Masked weights are zeros, and zero times NaN is NaN, so
    // queries in the same register tile may get it, but no others.
    qkv[((t - 1) * 3 + 2) * 2 * d] = f32::NAN;
    let [y, ..] = run(Isa::detect(), 1, l, &qkv, &vec![0.0; t * 2 * d]);
    let nans: Vec<usize> = (0..y.len()).filter(|&i| y[i].is_nan()).collect();
    assert!(nans.contains(&((t - 1) * 2 * d)));
    assert!(nans.iter().all(|i| i % (2 * d) == 0 && i / (2 * d) + 8 >= t), "{nans:?}");
    // The scratch memory that contained the NaN is reused for other heads.
    let clean = noise(t * 6 * d, 11);
    let outputs = run(Isa::detect(), 1, l, &clean, &noise(t * 2 * d, 12));
    assert!(outputs.iter().flatten().all(|x| x.is_finite()));
}

#[test]
fn nothing_to_do() {
    let pool = Pool::new(1).unwrap();
    let l = layout(0, (2, 2), 3, 4);
    train_forward(&pool, l, Attended::Before(None), &[], &mut [], &mut []);
    train_backward(&pool, l, Attended::Before(None), [&[]; 4], &mut []);
}
