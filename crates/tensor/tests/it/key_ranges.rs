//! Attention to blocks of keys, a range of them for each query, as ranks of context parallelism run it.
#![expect(clippy::unwrap_used, reason = "a test fails where it panics")]

use farflung_tensor::{Device, Heads, KeyRanges, Op, Tensor};

use super::api::{refused, z};
use super::attention::{Seen, Sizes, attention, starts_of};
use super::expect::{close, dot, noise, same_bits, wide};

/// Range of each query of all sequences.
struct Ranges {
    from: Tensor,
    to: Tensor,
    pairs: u64,
}

impl Ranges {
    /// `all` has a range for each of `len` queries of each sequence.
    fn new(cpu: &Device, all: &[[u32; 2]], len: usize, keys: usize) -> Self {
        let ends = |i: usize| -> Tensor {
            let ends: Vec<u32> = all.iter().map(|range| range[i]).collect();
            cpu.tensor(&ends, [all.len().checked_div(len).unwrap_or(0), len]).unwrap()
        };
        let pairs = all.iter().map(|&[from, to]| u64::from(to.min(keys as u32).saturating_sub(from))).sum();
        Self { from: ends(0), to: ends(1), pairs }
    }

    fn view(&self) -> KeyRanges<'_> {
        KeyRanges { from: self.from.view(), to: self.to.view(), pairs: self.pairs }
    }
}

/// How a sequence is cut into the positions of ranks.
#[derive(Debug, Clone, Copy)]
enum Cut {
    Contiguous,
    Zigzag,
    Striped,
}

impl Cut {
    /// Returns the positions of each of `ranks` ranks, in ascending order.
    fn of(self, len: usize, ranks: usize) -> Vec<Vec<usize>> {
        let piece = |i: usize, of: usize| len * i / of..len * (i + 1) / of;
        let of_rank = |rank: usize| -> Vec<usize> {
            match self {
                Self::Contiguous => piece(rank, ranks).collect(),
                Self::Zigzag => {
                    piece(rank, 2 * ranks).chain(piece(2 * ranks - 1 - rank, 2 * ranks)).collect()
                }
                Self::Striped => (rank..len).step_by(ranks).collect(),
            }
        };
        (0..ranks).map(of_rank).collect()
    }
}

/// Takes the columns `first..first + width` of some positions of each sequence.
fn take(cpu: &Device, x: &[f32], s: Sizes, positions: &[usize], [first, width]: [usize; 2]) -> Tensor {
    let cols = x.len() / (s.batch * s.len);
    let mut rows = Vec::new();
    for b in 0..s.batch {
        for position in positions {
            rows.extend_from_slice(&x[(b * s.len + position) * cols + first..][..width]);
        }
    }
    cpu.tensor(&rows, [s.batch, positions.len(), width]).unwrap()
}

/// Puts such columns back.
fn put(x: &mut [f32], s: Sizes, positions: &[usize], first: usize, rows: &Tensor) {
    let (cols, width) = (x.len() / (s.batch * s.len), rows.shape().cols());
    let rows = rows.to_vec::<f32>().unwrap();
    for (i, row) in rows.chunks_exact(width).enumerate() {
        let (b, position) = (i / positions.len(), positions[i % positions.len()]);
        x[(b * s.len + position) * cols + first..][..width].copy_from_slice(row);
    }
}

/// Returns the ranges of queries at some positions among keys at others.
fn ranges(cpu: &Device, s: Sizes, seen: Seen<'_>, queries: &[usize], keys: &[usize]) -> Ranges {
    let mut all = Vec::new();
    for b in 0..s.batch {
        for &query in queries {
            let own = seen.keys(b * s.len + query, query);
            all.push([own.start, own.end].map(|end| keys.partition_point(|&key| key < end) as u32));
        }
    }
    Ranges::new(cpu, &all, queries.len(), keys.len())
}

/// Runs attention and its gradient as a ring of ranks does: each begins with its own block of keys, and then
/// gets that of the rank before it. Returns `y`, `lse` and `d_qkv` of the whole sequences.
fn ring(
    cpu: &Device,
    s: Sizes,
    seen: Seen<'_>,
    ranks: &[Vec<usize>],
    qkv: &[f32],
    dy: &[f32],
) -> [Tensor; 3] {
    let Sizes { batch, len, heads, .. } = s;
    let ([c, kv, w], count) = (s.widths(), ranks.len());
    let blocks =
        |first| -> Vec<Tensor> { ranks.iter().map(|rank| take(cpu, qkv, s, rank, [first, kv])).collect() };
    let (keys, values) = (blocks(c), blocks(c + kv));
    let zeros =
        || -> Vec<Tensor> { ranks.iter().map(|rank| cpu.zeros([batch, rank.len(), kv]).unwrap()).collect() };
    let (mut d_keys, mut d_values) = (zeros(), zeros());
    let (mut all_y, mut all_d) = (vec![0.0; batch * len * c], vec![0.0; batch * len * w]);
    let mut all_lse = vec![0.0; batch * heads.query * len];
    for (me, rank) in ranks.iter().enumerate() {
        let mut own = take(cpu, qkv, s, rank, [0, w]).to_vec::<f32>().unwrap();
        own.chunks_exact_mut(w).for_each(|token| token[c..].fill(f32::NAN));
        let own = cpu.tensor(&own, [batch, rank.len(), w]).unwrap();
        let dy = take(cpu, dy, s, rank, [0, c]);
        let mut y = cpu.tensor(&vec![f32::NAN; batch * rank.len() * c], [batch, rank.len(), c]).unwrap();
        let mut lse = cpu.zeros([batch, heads.query, rank.len()]).unwrap();
        let owners = (0..count).map(|step| (me + count - step) % count);
        for (step, owner) in owners.clone().enumerate() {
            cpu.run(Op::AttentionOver {
                heads,
                ranges: ranges(cpu, s, seen, rank, &ranks[owner]).view(),
                continues: step > 0,
                qkv: own.view(),
                keys: keys[owner].view(),
                values: values[owner].view(),
                y: y.view_mut(),
                lse: lse.view_mut(),
            })
            .unwrap();
        }
        let mut dq = cpu.zeros([batch, rank.len(), c]).unwrap();
        for owner in owners {
            cpu.run(Op::AttentionOverGrad {
                heads,
                ranges: ranges(cpu, s, seen, rank, &ranks[owner]).view(),
                qkv: own.view(),
                keys: keys[owner].view(),
                values: values[owner].view(),
                y: y.view(),
                lse: lse.view(),
                dy: dy.view(),
                dq: dq.view_mut(),
                d_keys: d_keys[owner].view_mut(),
                d_values: d_values[owner].view_mut(),
            })
            .unwrap();
        }
        put(&mut all_y, s, rank, 0, &y);
        put(&mut all_d, s, rank, 0, &dq);
        for (i, &lse) in lse.to_vec::<f32>().unwrap().iter().enumerate() {
            all_lse[i / rank.len() * len + rank[i % rank.len()]] = lse;
        }
    }
    for (rank, (dk, dv)) in ranks.iter().zip(d_keys.iter().zip(&d_values)) {
        put(&mut all_d, s, rank, c, dk);
        put(&mut all_d, s, rank, c + kv, dv);
    }
    let tensor = |x: &[f32], dims: [usize; 3]| cpu.tensor(x, dims).unwrap();
    [
        tensor(&all_y, [batch, len, c]),
        tensor(&all_lse, [batch, heads.query, len]),
        tensor(&all_d, [batch, len, w]),
    ]
}

#[test]
fn blocks_of_keys_together_give_the_attention_of_the_whole_sequence() {
    let packed = [starts_of(2, &[70, 1, 250]), starts_of(1, &[9, 31])];
    let mut ends: Vec<u32> =
        [(70, 50), (1, 70), (250, 211)].iter().flat_map(|&(n, end)| vec![end; n]).collect();
    ends.extend([(70, 0), (1, 71), (250, 321)].iter().flat_map(|&(n, end)| vec![end; n]));
    let of_one = vec![150; 603];
    let apart = Seen { starts: Some(&packed[0]), ..Seen::ALL };
    for (s, seen) in [
        (Sizes::new(1, 8, (1, 1), 4), Seen::ALL),
        (Sizes::new(2, 43, (4, 2), 5), Seen::ALL),
        (Sizes::new(2, 43, (2, 2), 12), Seen { window: Some(7), ..Seen::ALL }),
        (Sizes::new(1, 40, (3, 1), 8), Seen { starts: Some(&packed[1]), ..Seen::ALL }),
        (Sizes::new(1, 1201, (2, 1), 8), Seen::ALL),
        (Sizes::new(1, 1201, (1, 1), 16), Seen { window: Some(300), ..Seen::ALL }),
        (Sizes::new(1, 603, (2, 1), 8), Seen { prefixes: Some(&of_one), ..Seen::ALL }),
        (Sizes::new(2, 321, (4, 2), 6), apart),
        (Sizes::new(2, 321, (2, 2), 6), Seen { prefixes: Some(&ends), ..apart }),
        (Sizes::new(2, 321, (3, 3), 6), Seen { prefixes: Some(&ends), window: Some(40), ..apart }),
    ] {
        let [c, _, w] = s.widths();
        let (qkv, dy) = (noise(s.batch * s.len * w, 1), noise(s.batch * s.len * c, 2));
        let cpu = Device::cpu(2).unwrap();
        let want = attention(&cpu, s, seen, &qkv, &dy).map(|t| wide(&t.to_vec::<f32>().unwrap()));
        for cut in [Cut::Contiguous, Cut::Zigzag, Cut::Striped] {
            for count in 2..5 {
                let ranks = cut.of(s.len, count);
                let found = ring(&cpu, s, seen, &ranks, &qkv, &dy).map(|t| t.to_vec::<f32>().unwrap());
                for (found, want) in found.iter().zip(&want) {
                    close(found, want, 1e-5);
                }
            }
        }
    }
}

/// Some of these sequences, on any device.
#[cfg(feature = "wgpu")]
pub(super) fn of_a_ring(device: &Device) {
    let s = Sizes::new(2, 43, (4, 2), 8);
    let starts = starts_of(2, &[20, 1, 22]);
    let seen = Seen { starts: Some(&starts), window: Some(15), ..Seen::ALL };
    let [c, _, w] = s.widths();
    let (qkv, dy) = (noise(86 * w, 1), noise(86 * c, 2));
    let want = attention(&Device::cpu(1).unwrap(), s, seen, &qkv, &dy);
    for cut in [Cut::Contiguous, Cut::Zigzag, Cut::Striped] {
        let found = ring(device, s, seen, &cut.of(s.len, 3), &qkv, &dy);
        for (found, want) in found.iter().zip(&want) {
            close(&found.to_vec::<f32>().unwrap(), &wide(&want.to_vec::<f32>().unwrap()), 1e-5);
        }
    }
}

#[test]
fn bits_do_not_depend_on_threads() {
    let s = Sizes::new(2, 150, (6, 3), 12);
    let [c, _, w] = s.widths();
    let (qkv, dy) = (noise(300 * w, 1), noise(300 * c, 2));
    let ranks = Cut::Zigzag.of(s.len, 3);
    same_bits(|cpu| ring(cpu, s, Seen::ALL, &ranks, &qkv, &dy));
}

/// Operands of attention of some queries to some keys.
struct Block {
    s: Sizes,
    keys: usize,
    ranges: Vec<[u32; 2]>,
    /// Queries `[B, T, W]`, then keys and values `[B, K, kv D]`.
    read: [Vec<f32>; 3],
    dy: Vec<f32>,
}

impl Block {
    fn new(s: Sizes, keys: usize, ranges: Vec<[u32; 2]>) -> Self {
        let ([c, kv, w], Sizes { batch, len, .. }) = (s.widths(), s);
        let kv = batch * keys * kv;
        Self {
            s,
            keys,
            ranges,
            read: [noise(batch * len * w, 1), noise(kv, 2), noise(kv, 3)],
            dy: noise(batch * len * c, 4),
        }
    }

    /// Runs the op over these keys, from `y` and `lse` of other keys if they are given.
    fn forward(&self, cpu: &Device, before: Option<&[Vec<f32>; 2]>) -> [Vec<f32>; 2] {
        let (Sizes { batch, len, heads, .. }, [c, kv, w]) = (self.s, self.s.widths());
        let [qkv, keys, values] = &self.read;
        let qkv = cpu.tensor(qkv, [batch, len, w]).unwrap();
        let [keys, values] = [keys, values].map(|x| cpu.tensor(x, [batch, self.keys, kv]).unwrap());
        let ranges = Ranges::new(cpu, &self.ranges, len, self.keys);
        let nan = [batch * len * c, batch * heads.query * len].map(|n| vec![f32::NAN; n]);
        let [y, lse] = before.unwrap_or(&nan);
        let mut y = cpu.tensor(y, [batch, len, c]).unwrap();
        let mut lse = cpu.tensor(lse, [batch, heads.query, len]).unwrap();
        cpu.run(Op::AttentionOver {
            heads,
            ranges: ranges.view(),
            continues: before.is_some(),
            qkv: qkv.view(),
            keys: keys.view(),
            values: values.view(),
            y: y.view_mut(),
            lse: lse.view_mut(),
        })
        .unwrap();
        [y, lse].map(|t| t.to_vec::<f32>().unwrap())
    }

    /// Runs the gradient, which adds to `d`: the gradients of queries, keys and values.
    fn backward(&self, cpu: &Device, [y, lse]: &[Vec<f32>; 2], d: &[Vec<f32>; 3]) -> [Vec<f32>; 3] {
        let (Sizes { batch, len, heads, .. }, [c, kv, w]) = (self.s, self.s.widths());
        let [qkv, keys, values] = &self.read;
        let (of_queries, of_keys) = ([batch, len, c], [batch, self.keys, kv]);
        let tensor = |x: &[f32], dims: [usize; 3]| cpu.tensor(x, dims).unwrap();
        let ranges = Ranges::new(cpu, &self.ranges, len, self.keys);
        let [mut dq, mut dk, mut dv] =
            [tensor(&d[0], of_queries), tensor(&d[1], of_keys), tensor(&d[2], of_keys)];
        cpu.run(Op::AttentionOverGrad {
            heads,
            ranges: ranges.view(),
            qkv: tensor(qkv, [batch, len, w]).view(),
            keys: tensor(keys, of_keys).view(),
            values: tensor(values, of_keys).view(),
            y: tensor(y, of_queries).view(),
            lse: tensor(lse, [batch, heads.query, len]).view(),
            dy: tensor(&self.dy, of_queries).view(),
            dq: dq.view_mut(),
            d_keys: dk.view_mut(),
            d_values: dv.view_mut(),
        })
        .unwrap();
        [dq, dk, dv].map(|t| t.to_vec::<f32>().unwrap())
    }

    /// Returns gradients to add to.
    fn gradients(&self) -> [Vec<f32>; 3] {
        [noise(self.dy.len(), 5), noise(self.read[1].len(), 6), noise(self.read[2].len(), 7)]
    }

    /// Returns `y`, `lse`, and the gradients added to `d`, by the definition.
    fn definition(&self, d: &[Vec<f32>; 3]) -> [Vec<f64>; 5] {
        let (Sizes { batch, len, heads, d: dim }, [c, kv, w]) = (self.s, self.s.widths());
        let ([qkv, k, v], dy) = ([0, 1, 2].map(|i| wide(&self.read[i])), wide(&self.dy));
        let (mut y, mut sums) = (vec![0.0; dy.len()], vec![f64::NEG_INFINITY; batch * heads.query * len]);
        let [mut dq, mut dk, mut dv] = [0, 1, 2].map(|i| wide(&d[i]));
        for (b, h, t) in
            (0..batch).flat_map(|b| (0..heads.query).flat_map(move |h| (0..len).map(move |t| (b, h, t))))
        {
            let [from, to] = self.ranges[b * len + t].map(|end| (end as usize).min(self.keys));
            let (q, out) = ((b * len + t) * w + h * dim, (b * len + t) * c + h * dim);
            let at = |key: usize| (b * self.keys + key) * kv + h / (heads.query / heads.kv) * dim;
            let scale = 1.0 / (dim as f64).sqrt();
            let scores: Vec<f64> =
                (from..to).map(|key| scale * dot(&qkv[q..][..dim], &k[at(key)..][..dim])).collect();
            let sum: f64 = scores.iter().map(|s| s.exp()).sum();
            sums[(b * heads.query + h) * len + t] = sum.ln();
            let p: Vec<f64> = scores.iter().map(|s| s.exp() / sum).collect();
            let dp: Vec<f64> = (from..to).map(|key| dot(&dy[out..][..dim], &v[at(key)..][..dim])).collect();
            let mean = dot(&p, &dp);
            for (key, (p, dp)) in (from..to).zip(p.iter().zip(&dp)) {
                let ds = p * (dp - mean) * scale;
                for i in 0..dim {
                    y[out + i] += p * v[at(key) + i];
                    dq[out + i] += ds * k[at(key) + i];
                    dk[at(key) + i] += ds * qkv[q + i];
                    dv[at(key) + i] += p * dy[out + i];
                }
            }
        }
        [y, sums, dq, dk, dv]
    }
}

/// Ranges in no order, some empty, some that end after the last key.
fn any_ranges(queries: usize, keys: usize) -> Vec<[u32; 2]> {
    let draw = |i: usize| (i as u32).wrapping_mul(2_654_435_761) >> 8;
    let range = |i: usize| {
        let from = draw(3 * i + 1) % (keys as u32 + 3);
        [from, if i % 11 == 3 { u32::MAX } else { draw(3 * i + 2) % (keys as u32 + 3) }]
    };
    (0..queries).map(range).collect()
}

#[test]
fn any_ranges_have_the_attention_and_the_gradient_of_their_definition() {
    let cpu = Device::cpu(2).unwrap();
    for (s, keys) in [
        (Sizes::new(1, 1, (1, 1), 4), 1),
        (Sizes::new(1, 1, (6, 2), 4), 9),
        (Sizes::new(2, 17, (4, 2), 5), 1),
        (Sizes::new(2, 3, (2, 1), 8), 300),
        (Sizes::new(1, 310, (2, 2), 12), 40),
        (Sizes::new(2, 77, (3, 1), 24), 301),
        (Sizes::new(1, 400, (2, 1), 7), 520),
    ] {
        let block = Block::new(s, keys, any_ranges(s.batch * s.len, keys));
        let d = block.gradients();
        let [want_y, want_lse, want_d @ ..] = block.definition(&d);
        let [y, lse] = block.forward(&cpu, None);
        close(&y, &want_y, 3e-6);
        for (found, want) in lse.iter().zip(&want_lse) {
            let near = (f64::from(*found) - want).abs() < 3e-6 * want.abs().max(1.0);
            let none = [f64::from(*found), *want].iter().all(|sum| sum.is_infinite() && *sum < 0.0);
            assert!(near || none, "{found}, expected {want}");
        }
        for (found, want) in block.backward(&cpu, &[y, lse], &d).iter().zip(&want_d) {
            close(found, want, 5e-6);
        }
    }
}

#[test]
fn two_parts_have_the_known_output() {
    two_parts(&Device::cpu(1).unwrap());
}

pub(super) fn two_parts(device: &Device) {
    let part = |keys: &[f32], values: &[f32]| Block {
        s: Sizes::new(1, 1, (1, 1), 1),
        keys: keys.len(),
        ranges: vec![[0, keys.len() as u32]],
        read: [vec![1.0, f32::NAN, f32::NAN], keys.to_vec(), values.to_vec()],
        dy: vec![0.0],
    };
    let first = part(&[1.0, 2.0], &[10.0, 20.0]).forward(device, None);
    let [y, lse] = part(&[3.0], &[40.0]).forward(device, Some(&first));
    assert!((y[0] - 32.404_513).abs() < 1e-5, "{}", y[0]);
    assert!((lse[0] - 3.407_606).abs() < 1e-6, "{}", lse[0]);
}

#[test]
fn a_block_that_ends_at_each_query_is_causal_attention() {
    let cpu = Device::cpu(1).unwrap();
    for s in [Sizes::new(2, 33, (4, 2), 12), Sizes::new(1, 301, (2, 1), 16)] {
        let ([c, kv, w], n) = (s.widths(), s.batch * s.len);
        let ranges = (0..n).map(|i| [0, (i % s.len) as u32 + 1]).collect();
        let mut block = Block::new(s, s.len, ranges);
        let columns = |first: usize| -> Vec<f32> {
            block.read[0].chunks_exact(w).flat_map(|row| row[first..first + kv].to_vec()).collect()
        };
        let of_keys = [columns(c), columns(c + kv)];
        let [keys, values] = of_keys;
        (block.read[1], block.read[2]) = (keys, values);
        let [want_y, want_lse, want_d] =
            attention(&cpu, s, Seen::ALL, &block.read[0], &block.dy).map(|t| t.to_vec::<f32>().unwrap());
        let outputs = block.forward(&cpu, None);
        close(&outputs[0], &wide(&want_y), 1e-6);
        close(&outputs[1], &wide(&want_lse), 1e-6);
        let zeros = block.gradients().map(|x| vec![0.0; x.len()]);
        let [dq, dk, dv] = block.backward(&cpu, &outputs, &zeros);
        let mut joined = Vec::new();
        for ((q, k), v) in dq.chunks_exact(c).zip(dk.chunks_exact(kv)).zip(dv.chunks_exact(kv)) {
            joined.extend([q, k, v].concat());
        }
        close(&joined, &wide(&want_d), 1e-6);
    }
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// A query without keys has no output and no gradient, and a key without queries has no gradient.
#[test]
fn queries_without_keys_and_keys_without_queries_change_nothing() {
    without_partners(&Device::cpu(1).unwrap(), f32::NEG_INFINITY);
}

/// `none` is the log-sum-exp of no keys.
pub(super) fn without_partners(device: &Device, none: f32) {
    let s = Sizes::new(2, 40, (2, 1), 12);
    let ([c, kv, _], keys) = (s.widths(), 50);
    // Every third query has no key. The others have keys 10 to 40.
    let ranges = (0..80).map(|i| if i % 3 == 0 { [30, 30 - i as u32 % 2] } else { [10, 40] }).collect();
    let block = Block::new(s, keys, ranges);
    let outputs = block.forward(device, None);
    let d = block.gradients();
    let found = block.backward(device, &outputs, &d);
    let [y, lse] = &outputs;
    for i in (0..80).step_by(3) {
        assert_eq!(y[i * c..][..c], vec![0.0; c], "{i}");
        for h in 0..2 {
            let sum = lse[(i / 40 * 2 + h) * 40 + i % 40];
            assert_eq!(sum.to_bits(), none.to_bits(), "{i}");
        }
        assert_eq!(bits(&found[0][i * c..][..c]), bits(&d[0][i * c..][..c]), "{i}");
    }
    for i in 1..3 {
        for at in (0..2 * keys).filter(|at| !(10..40).contains(&(at % keys))) {
            assert_eq!(bits(&found[i][at * kv..][..kv]), bits(&d[i][at * kv..][..kv]), "{i} {at}");
        }
        assert_ne!(found[i][10 * kv..11 * kv], d[i][10 * kv..11 * kv]);
    }
    assert!(found.iter().flatten().chain(y).all(|x| x.is_finite()));
}

/// Blocks without keys, and blocks that no query attends to, leave what is there to the bit.
#[test]
fn a_block_that_nobody_sees_changes_nothing() {
    unseen_blocks(&Device::cpu(1).unwrap(), f32::NEG_INFINITY);
}

/// `none` is the log-sum-exp of no keys.
pub(super) fn unseen_blocks(device: &Device, none: f32) {
    let s = Sizes::new(2, 40, (4, 2), 12);
    let mut before = Block::new(s, 30, any_ranges(80, 30)).forward(device, None);
    before[0][5] = -0.0;
    for keys in [0, 1, 300] {
        let block = Block::new(s, keys, (0..80).map(|i| [i, [i, 0][i as usize % 2]]).collect());
        let after = block.forward(device, Some(&before));
        assert_eq!(before.each_ref().map(|x| bits(x)), after.each_ref().map(|x| bits(x)), "{keys}");
        let d = block.gradients();
        let found = block.backward(device, &before, &d);
        assert_eq!(found.each_ref().map(|x| bits(x)), d.each_ref().map(|x| bits(x)), "{keys}");
        let [y, lse] = block.forward(device, None);
        assert_eq!([bits(&y), bits(&lse)], [vec![0; y.len()], vec![none.to_bits(); lse.len()]], "{keys}");
    }
}

/// Both log-sum-exps of no keys, that of the CPU and that of GPUs, are a beginning.
#[test]
fn a_pass_continues_from_no_keys() {
    from_no_keys(&Device::cpu(1).unwrap());
}

pub(super) fn from_no_keys(device: &Device) {
    let block = Block::new(Sizes::new(1, 50, (2, 2), 16), 300, any_ranges(50, 300));
    let [y, lse] = block.forward(device, None);
    for none in [f32::NEG_INFINITY, -1e30] {
        let begin = [vec![0.0; y.len()], vec![none; lse.len()]];
        let [found, sums] = block.forward(device, Some(&begin));
        assert_eq!(bits(&found), bits(&y), "{none}");
        let kept: Vec<f32> = lse.iter().map(|&sum| if sum < -1e29 { none } else { sum }).collect();
        assert_eq!(bits(&sums), bits(&kept), "{none}");
        assert!(kept.contains(&none), "some queries have no key");
    }
}

#[test]
fn operands_that_do_not_fit_are_refused() {
    let cpu = Device::cpu(1).unwrap();
    let heads = Heads { query: 2, kv: 1 };
    let ids = |dims: &[usize]| {
        cpu.tensor(&vec![0_u32; dims.iter().product()], farflung_tensor::Shape::new(dims).unwrap()).unwrap()
    };
    // qkv, keys, values, y, lse, then dq and the gradients of keys and values.
    let shapes: [&[usize]; 8] =
        [&[2, 3, 8], &[2, 5, 2], &[2, 5, 2], &[2, 3, 4], &[2, 2, 3], &[2, 3, 4], &[2, 5, 2], &[2, 5, 2]];
    let check = |wrong: usize, dims: &[usize], ends: [&Tensor; 2], parts: &[&str], of_gradient: bool| {
        let mut all = shapes;
        if wrong < 8 {
            all[wrong] = dims;
        }
        let [qkv, keys, values, mut y, mut lse, mut dq, mut d_keys, mut d_values] =
            all.map(|dims| z(&cpu, dims));
        let dy = z(&cpu, shapes[3]);
        let ranges = KeyRanges { from: ends[0].view(), to: ends[1].view(), pairs: 0 };
        let gradient = cpu.run(Op::AttentionOverGrad {
            heads,
            ranges,
            qkv: qkv.view(),
            keys: keys.view(),
            values: values.view(),
            y: y.view(),
            lse: lse.view(),
            dy: dy.view(),
            dq: dq.view_mut(),
            d_keys: d_keys.view_mut(),
            d_values: d_values.view_mut(),
        });
        refused(gradient, &[&["attention_over_grad"], parts].concat());
        let (qkv, keys, values) = (qkv.view(), keys.view(), values.view());
        let (y, lse) = (y.view_mut(), lse.view_mut());
        let forward =
            cpu.run(Op::AttentionOver { heads, ranges, continues: false, qkv, keys, values, y, lse });
        if of_gradient {
            forward.unwrap();
        } else {
            refused(forward, &[&["attention_over"], parts].concat());
        }
    };
    let good = ids(&[2, 3]);
    check(0, &[2, 3, 9], [&good; 2], &["[2, 3, 9]", "[2, 3, 8]"], false);
    check(1, &[1, 5, 2], [&good; 2], &["[1, 5, 2]", "[2, 5, 2]"], false);
    check(1, &[2, 5, 4], [&good; 2], &["[2, 5, 4]", "[2, 5, 2]"], false);
    check(2, &[2, 4, 2], [&good; 2], &["[2, 4, 2]", "[2, 5, 2]"], false);
    check(3, &[2, 3, 5], [&good; 2], &["2 heads", "width of 5"], false);
    check(4, &[2, 2, 2], [&good; 2], &["[2, 2, 2]", "[2, 2, 3]"], false);
    check(5, &[2, 3, 8], [&good; 2], &["[2, 3, 8]", "[6, 4]"], true);
    check(6, &[2, 4, 2], [&good; 2], &["[2, 4, 2]", "[2, 5, 2]"], true);
    check(7, &[10, 2], [&good; 2], &["[10, 2]"], true);
    check(8, &[], [&ids(&[2, 2]), &good], &["[2, 2]", "[2, 3]"], false);
    check(8, &[], [&good, &ids(&[4])], &["[4]", "[2, 3]"], false);
    check(8, &[], [&good, &z(&cpu, &[2, 3])], &["u32", "f32"], false);
}

#[test]
fn costs_are_those_of_the_pairs() {
    let cpu = Device::cpu(1).unwrap();
    let (heads, ends) = (Heads { query: 2, kv: 1 }, cpu.tensor(&[0_u32; 6], [2, 3]).unwrap());
    let ranges = KeyRanges { from: ends.view(), to: ends.view(), pairs: 7 };
    let (qkv, keys, dy) = (z(&cpu, &[2, 3, 16]), z(&cpu, &[2, 5, 4]), z(&cpu, &[2, 3, 8]));
    let (mut y, mut lse) = (z(&cpu, &[2, 3, 8]), z(&cpu, &[2, 2, 3]));
    for (continues, written) in [(false, 48 + 12), (true, 2 * (48 + 12))] {
        let (qkv, keys, values, y, lse) =
            (qkv.view(), keys.view(), keys.view(), y.view_mut(), lse.view_mut());
        let op = Op::AttentionOver { heads, ranges, continues, qkv, keys, values, y, lse };
        assert_eq!((op.flops(), op.bytes()), (2 * 2 * 4 * 7 * 2, 4 * (48 + 2 * 40 + 12 + written)));
    }
    let (mut dq, mut dk, mut dv) = (z(&cpu, &[2, 3, 8]), z(&cpu, &[2, 5, 4]), z(&cpu, &[2, 5, 4]));
    let op = Op::AttentionOverGrad {
        heads,
        ranges,
        qkv: qkv.view(),
        keys: keys.view(),
        values: keys.view(),
        y: y.view(),
        lse: lse.view(),
        dy: dy.view(),
        dq: dq.view_mut(),
        d_keys: dk.view_mut(),
        d_values: dv.view_mut(),
    };
    let read = 48 + 2 * 40 + 12 + 48 + 12 + 48;
    assert_eq!((op.flops(), op.bytes()), (5 * 2 * 4 * 7 * 2, 4 * (read + 2 * (48 + 40 + 40))));
}
