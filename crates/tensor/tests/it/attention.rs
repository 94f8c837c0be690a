//! Attention, its gradient and its cache, and the joining of heads with their rotation, against f64.
#![expect(clippy::unwrap_used, reason = "a test fails where it panics")]

use std::ops::Range;

use farflung_tensor::{AttendedKeys, Device, Heads, Mask, Op, Rotary, Tensor, TokenPositions, View};

use super::expect::{close, dot, noise, same_bits, wide};

/// Sizes of joined heads: `B` sequences of `T` tokens, and `D` values per head.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sizes {
    pub(super) batch: usize,
    pub(super) len: usize,
    pub(super) heads: Heads,
    pub(super) d: usize,
}

impl Sizes {
    pub(super) fn new(batch: usize, len: usize, (query, kv): (usize, usize), d: usize) -> Self {
        Self { batch, len, heads: Heads { query, kv }, d }
    }

    /// Returns the widths of the queries, of the keys (or values), and of all.
    pub(super) fn widths(self) -> [usize; 3] {
        [self.heads.query, self.heads.kv, self.heads.width()].map(|heads| heads * self.d)
    }

    /// Returns the index of the query (part 0), key (1) or value (2) of a token for head `h` of queries.
    fn place(self, (b, h, t): (usize, usize, usize), part: usize) -> usize {
        let Heads { query, kv } = self.heads;
        let head = if part == 0 { h } else { query + (part - 1) * kv + h / (query / kv) };
        (b * self.len + t) * self.widths()[2] + head * self.d
    }
}

/// What queries attend to.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Seen<'a> {
    /// Where the document of each token begins.
    pub(super) starts: Option<&'a [u32]>,
    /// Where its prefix ends.
    pub(super) prefixes: Option<&'a [u32]>,
    pub(super) window: Option<usize>,
}

impl<'a> Seen<'a> {
    pub(super) const ALL: Self = Self { starts: None, prefixes: None, window: None };

    fn of(starts: &'a [u32]) -> Self {
        Self { starts: Some(starts), ..Self::ALL }
    }

    fn within(self, window: usize) -> Self {
        Self { window: Some(window), ..self }
    }

    /// Returns the first key of token `at` of all sequences, which is token `t` of its own.
    fn first(self, at: usize, t: usize) -> usize {
        let begins = self.starts.map_or(0, |starts| starts[at] as usize);
        begins.max((t + 1).saturating_sub(self.window.unwrap_or(usize::MAX)))
    }

    /// Returns the keys of that token.
    pub(super) fn keys(self, at: usize, t: usize) -> Range<usize> {
        self.first(at, t)..self.prefixes.map_or(0, |ends| ends[at] as usize).max(t + 1)
    }
}

/// Returns the softmax weights of one head's query `t` over some keys, and the log-sum-exp of its scores.
fn weights(s: Sizes, qkv: &[f64], (b, h, t): (usize, usize, usize), keys: &Range<usize>) -> (Vec<f64>, f64) {
    let at = |t: usize, part: usize| &qkv[s.place((b, h, t), part)..][..s.d];
    let scores: Vec<f64> = keys.clone().map(|key| dot(at(t, 0), at(key, 1)) / (s.d as f64).sqrt()).collect();
    let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = scores.iter().map(|s| (s - top).exp()).sum();
    (scores.iter().map(|s| (s - top).exp() / sum).collect(), sum.ln() + top)
}

/// Returns `y`, `lse` and `d_qkv` by the definition.
fn reference(s: Sizes, seen: Seen<'_>, qkv: &[f64], dy: &[f64]) -> [Vec<f64>; 3] {
    let Sizes { batch, len, heads, d } = s;
    let c = s.widths()[0];
    let (mut y, mut lse) = (vec![0.0; batch * len * c], vec![0.0; batch * heads.query * len]);
    let mut d_qkv = vec![0.0; qkv.len()];
    for (b, h) in (0..batch).flat_map(|b| (0..heads.query).map(move |h| (b, h))) {
        let place = |t: usize, part: usize| s.place((b, h, t), part);
        for t in 0..len {
            let keys = seen.keys(b * len + t, t);
            let (p, sum) = weights(s, qkv, (b, h, t), &keys);
            lse[(b * heads.query + h) * len + t] = sum;
            let out = (b * len + t) * c + h * d;
            for (key, p) in keys.clone().zip(&p) {
                for i in 0..d {
                    y[out + i] += p * qkv[place(key, 2) + i];
                }
            }
            let dp: Vec<f64> =
                keys.clone().map(|key| dot(&dy[out..][..d], &qkv[place(key, 2)..][..d])).collect();
            let mean = dot(&p, &dp);
            for (key, (p, dp)) in keys.zip(p.iter().zip(&dp)) {
                let ds = p * (dp - mean) / (d as f64).sqrt();
                for i in 0..d {
                    d_qkv[place(t, 0) + i] += ds * qkv[place(key, 1) + i];
                    d_qkv[place(key, 1) + i] += ds * qkv[place(t, 0) + i];
                    d_qkv[place(key, 2) + i] += p * dy[out + i];
                }
            }
        }
    }
    [y, lse, d_qkv]
}

/// Runs attention and its gradient: returns `y`, `lse` and `d_qkv`.
pub(super) fn attention(cpu: &Device, s: Sizes, seen: Seen<'_>, qkv: &[f32], dy: &[f32]) -> [Tensor; 3] {
    let Sizes { batch, len, heads, .. } = s;
    let starts = seen.starts.map(|starts| cpu.tensor(starts, [batch, len]).unwrap());
    let ends = seen.prefixes.map(|ends| cpu.tensor(ends, [batch, len]).unwrap());
    let [documents, prefixes] = [&starts, &ends].map(|ids| ids.as_ref().map(Tensor::view));
    let mask = Mask { documents, prefixes, keys: AttendedKeys::last(seen.window) };
    let [c, _, w] = s.widths();
    let qkv = cpu.tensor(qkv, [batch, len, w]).unwrap();
    let dy = cpu.tensor(dy, [batch, len, c]).unwrap();
    let (mut y, mut lse) =
        (cpu.zeros([batch, len, c]).unwrap(), cpu.zeros([batch, heads.query, len]).unwrap());
    let mut d_qkv = cpu.zeros([batch, len, w]).unwrap();
    cpu.run(Op::Attention { heads, mask, qkv: qkv.view(), y: y.view_mut(), lse: lse.view_mut() }).unwrap();
    let (qkv, out, sums, dy, d) = (qkv.view(), y.view(), lse.view(), dy.view(), d_qkv.view_mut());
    cpu.run(Op::AttentionGrad { heads, mask, qkv, y: out, lse: sums, dy, d_qkv: d }).unwrap();
    [y, lse, d_qkv]
}

/// Runs the same sequences through a cache with spare room, each in two parts, and the gradient of the parts
/// from the last to the first. Returns `y` and `d_qkv`.
fn in_parts(cpu: &Device, s: Sizes, seen: Seen<'_>, qkv: &[f32], dy: &[f32]) -> [Tensor; 2] {
    let Sizes { batch, len, heads, .. } = s;
    let [starts, ends] =
        [seen.starts, seen.prefixes].map(|ids| ids.map(|ids| cpu.tensor(ids, [batch, len]).unwrap()));
    let mask = |start: usize, new: usize| {
        let [documents, prefixes] =
            [&starts, &ends].map(|ids| ids.as_ref().map(|ids| ids.view().part(start, [1, new]).unwrap()));
        Mask { documents, prefixes, keys: AttendedKeys::last(seen.window) }
    };
    let [c, kv, w] = s.widths();
    let first =
        seen.prefixes.and_then(|ends| ends.iter().max()).map_or(len / 3, |&end| (end as usize).min(len));
    let (mut all_y, mut all_d) = (cpu.zeros([batch, len, c]).unwrap(), cpu.zeros([batch, len, w]).unwrap());
    let (qkv, dy) = (cpu.tensor(qkv, [batch, len, w]).unwrap(), cpu.tensor(dy, [batch, len, c]).unwrap());
    for b in 0..batch {
        let cache = || cpu.zeros([1, len + 2, kv]).unwrap();
        let [mut keys, mut values, mut d_keys, mut d_values] = [cache(), cache(), cache(), cache()];
        let parts = [(0, first), (first, len - first)];
        let mut sums = parts.map(|(_, new)| cpu.zeros([1, heads.query, new]).unwrap());
        for ((past, new), lse) in parts.into_iter().zip(&mut sums) {
            let start = b * len + past;
            cpu.run(Op::AttentionCached {
                heads,
                past,
                mask: mask(start, new),
                qkv: qkv.view().part(start * w, [1, new, w]).unwrap(),
                keys: keys.view_mut(),
                values: values.view_mut(),
                y: all_y.view_mut().part(start * c, [1, new, c]).unwrap(),
                lse: Some(lse.view_mut()),
            })
            .unwrap();
        }
        for ((past, new), lse) in parts.into_iter().zip(&sums).rev() {
            let start = b * len + past;
            cpu.run(Op::AttentionCachedGrad {
                heads,
                past,
                mask: mask(start, new),
                qkv: qkv.view().part(start * w, [1, new, w]).unwrap(),
                keys: keys.view(),
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
    [all_y, all_d]
}

#[test]
fn attention_its_gradient_and_its_cache() {
    for s in [
        Sizes::new(1, 1, (1, 1), 4),
        Sizes::new(2, 5, (3, 3), 4),
        Sizes::new(1, 33, (2, 2), 20),
        Sizes::new(2, 70, (4, 4), 16),
        Sizes::new(0, 3, (2, 2), 4),
        Sizes::new(1, 0, (2, 2), 4),
        Sizes::new(1, 1, (3, 1), 5),
        Sizes::new(2, 9, (6, 2), 3),
        Sizes::new(1, 33, (4, 1), 20),
        Sizes::new(2, 70, (4, 2), 16),
        Sizes::new(1, 301, (3, 1), 12),
        Sizes::new(0, 3, (4, 2), 4),
        Sizes::new(1, 0, (4, 2), 4),
    ] {
        let [c, _, w] = s.widths();
        let (qkv, dy) = (noise(s.batch * s.len * w, 1), noise(s.batch * s.len * c, 2));
        let [y, lse, d_qkv, cached, d_cached] = same_bits(|cpu| {
            let ([y, lse, d_qkv], [cached, d_cached]) =
                (attention(cpu, s, Seen::ALL, &qkv, &dy), in_parts(cpu, s, Seen::ALL, &qkv, &dy));
            [y, lse, d_qkv, cached, d_cached]
        });
        let [want_y, want_lse, want_d] = reference(s, Seen::ALL, &wide(&qkv), &wide(&dy));
        close(&y, &want_y, 3e-6);
        close(&lse, &want_lse, 3e-6);
        close(&d_qkv, &want_d, 5e-6);
        close(&d_cached, &want_d, 5e-6);
        assert!(y.iter().zip(&cached).all(|(a, b)| a.to_bits() == b.to_bits()), "{s:?}: with a cache");
    }
}

/// Returns where documents of these lengths begin, in each of `batch` sequences.
pub(super) fn starts_of(batch: usize, lengths: &[usize]) -> Vec<u32> {
    let mut row = Vec::new();
    for &length in lengths {
        row.extend(std::iter::repeat_n(row.len() as u32, length));
    }
    row.repeat(batch)
}

/// Borders at and next to the ends of tiles of keys (256 forward, 128 backward) and of queries (144), documents
/// of one token and of one tile.
#[test]
fn queries_attend_to_their_own_documents() {
    for (s, lengths) in [
        (Sizes::new(1, 1, (1, 1), 4), &[1][..]),
        (Sizes::new(2, 9, (6, 2), 3), &[4, 1, 1, 3]),
        (Sizes::new(1, 33, (4, 1), 20), &[1; 33]),
        (Sizes::new(2, 70, (4, 2), 16), &[6, 8, 1, 55]),
        (Sizes::new(1, 301, (3, 1), 12), &[256, 45]),
        (Sizes::new(1, 301, (2, 2), 12), &[255, 2, 44]),
        (Sizes::new(1, 400, (2, 1), 8), &[127, 1, 16, 1, 255]),
        (Sizes::new(1, 560, (1, 1), 5), &[144, 257, 1, 158]),
        (Sizes::new(1, 300, (2, 1), 24), &[300]),
    ] {
        let [c, kv, w] = s.widths();
        let starts = starts_of(s.batch, lengths);
        let (qkv, dy) = (noise(s.batch * s.len * w, 1), noise(s.batch * s.len * c, 2));
        let [y, lse, d_qkv, cached, d_cached] = same_bits(|cpu| {
            let [y, lse, d_qkv] = attention(cpu, s, Seen::of(&starts), &qkv, &dy);
            let [cached, d_cached] = in_parts(cpu, s, Seen::of(&starts), &qkv, &dy);
            [y, lse, d_qkv, cached, d_cached]
        });
        let [want_y, want_lse, want_d] = reference(s, Seen::of(&starts), &wide(&qkv), &wide(&dy));
        close(&y, &want_y, 3e-6);
        close(&lse, &want_lse, 3e-6);
        close(&d_qkv, &want_d, 5e-6);
        close(&d_cached, &want_d, 5e-6);
        assert!(y.iter().zip(&cached).all(|(a, b)| a.to_bits() == b.to_bits()), "{lengths:?}: with a cache");
        let [joined, ..] = reference(s, Seen::ALL, &wide(&qkv), &wide(&dy));
        let off = joined.iter().zip(&want_y).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert_eq!(off > 1e-2, lengths.len() > 1, "{lengths:?}: without documents");

        // A document has the bits that it has alone, whatever is before it.
        let cpu = Device::cpu(1).unwrap();
        let last = *lengths.last().unwrap();
        let alone = Sizes { batch: 1, len: last, ..s };
        let mut spoilt = qkv.clone();
        spoilt[..(s.len - last) * w].fill(f32::NAN);
        let (of_qkv, of_dy) = (&qkv[(s.len - last) * w..s.len * w], &dy[(s.len - last) * c..s.len * c]);
        let [y, _, d_qkv] =
            attention(&cpu, alone, Seen::ALL, of_qkv, of_dy).map(|t| t.to_vec::<f32>().unwrap());
        for packed in [&qkv, &spoilt] {
            let [packed_y, _, packed_d] =
                attention(&cpu, s, Seen::of(&starts), packed, &dy).map(|t| t.to_vec::<f32>().unwrap());
            assert_eq!(packed_y[(s.len - last) * c..s.len * c], y, "{lengths:?}");
            assert_eq!(packed_d[(s.len - last) * w..s.len * w], d_qkv, "{lengths:?}");
        }
        let [cached, d_cached] =
            in_parts(&cpu, s, Seen::of(&starts), &spoilt, &dy).map(|t| t.to_vec::<f32>().unwrap());
        assert_eq!(cached[(s.len - last) * c..s.len * c], y, "{lengths:?} {kv}");
        assert!(d_cached[(s.len - last) * w..s.len * w].iter().all(|x| x.is_finite()), "{lengths:?}");
    }
}

/// Windows of one key, shorter and longer than register tiles, next to the ends of tiles, as long as the
/// sequence and longer.
#[test]
fn queries_attend_to_the_keys_of_their_window() {
    for (s, window) in [
        (Sizes::new(1, 1, (1, 1), 4), 1),
        (Sizes::new(2, 9, (6, 2), 3), 1),
        (Sizes::new(2, 9, (6, 2), 3), 4),
        (Sizes::new(2, 70, (4, 2), 16), 6),
        (Sizes::new(1, 70, (2, 1), 16), 69),
        (Sizes::new(1, 70, (2, 1), 16), 70),
        (Sizes::new(1, 70, (2, 1), 16), 500),
        (Sizes::new(1, 301, (3, 1), 12), 7),
        (Sizes::new(1, 301, (2, 2), 12), 45),
        (Sizes::new(1, 600, (1, 1), 5), 128),
        (Sizes::new(1, 600, (2, 1), 8), 144),
        (Sizes::new(1, 600, (2, 2), 8), 255),
        (Sizes::new(1, 800, (1, 1), 24), 257),
    ] {
        let [c, _, w] = s.widths();
        let (qkv, dy) = (noise(s.batch * s.len * w, 1), noise(s.batch * s.len * c, 2));
        let border = s.len / 2 + 1;
        let starts = starts_of(s.batch, &[border, s.len - border]);
        for seen in [Seen::ALL, Seen::of(&starts)].map(|seen| seen.within(window)) {
            let [y, lse, d_qkv, cached, d_cached] = same_bits(|cpu| {
                let [y, lse, d_qkv] = attention(cpu, s, seen, &qkv, &dy);
                let [cached, d_cached] = in_parts(cpu, s, seen, &qkv, &dy);
                [y, lse, d_qkv, cached, d_cached]
            });
            let [want_y, want_lse, want_d] = reference(s, seen, &wide(&qkv), &wide(&dy));
            close(&y, &want_y, 3e-6);
            close(&lse, &want_lse, 3e-6);
            close(&d_qkv, &want_d, 5e-6);
            close(&d_cached, &want_d, 5e-6);
            let same = y.iter().zip(&cached).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(same, "{s:?} {window}: with a cache");
        }
    }
}

/// Prefixes that end at and next to the ends of tiles (256 keys forward, 128 backward; 144 queries), of a whole
/// sequence, of one token, of documents, and with windows.
#[test]
fn queries_of_a_prefix_attend_to_all_of_it() {
    for (s, lengths, prefixes, window) in [
        (Sizes::new(1, 1, (1, 1), 4), &[1][..], &[1][..], None),
        (Sizes::new(2, 9, (6, 2), 3), &[9], &[5], None),
        (Sizes::new(2, 9, (6, 2), 3), &[4, 1, 4], &[2, 0, 4], None),
        (Sizes::new(1, 33, (4, 1), 20), &[33], &[1], None),
        (Sizes::new(1, 70, (4, 2), 16), &[70], &[70], None),
        (Sizes::new(1, 301, (3, 1), 12), &[301], &[256], None),
        (Sizes::new(1, 301, (2, 2), 12), &[301], &[129], None),
        (Sizes::new(1, 301, (2, 2), 12), &[301], &[150], None),
        (Sizes::new(1, 301, (2, 2), 12), &[301], &[127], None),
        (Sizes::new(1, 400, (2, 1), 8), &[400], &[290], None),
        (Sizes::new(1, 560, (1, 1), 5), &[144, 257, 1, 158], &[100, 257, 1, 3], None),
        (Sizes::new(1, 301, (2, 1), 8), &[301], &[147], Some(40)),
        (Sizes::new(1, 301, (2, 1), 8), &[301], &[290], Some(3)),
        (Sizes::new(1, 400, (2, 1), 8), &[127, 1, 16, 1, 255], &[3, 1, 16, 0, 200], Some(130)),
    ] {
        let [c, _, w] = s.widths();
        let (starts, mut ends) = (starts_of(s.batch, lengths), Vec::new());
        for (length, prefix) in lengths.iter().zip(prefixes) {
            ends.extend(std::iter::repeat_n((ends.len() + prefix) as u32, *length));
        }
        let ends = ends.repeat(s.batch);
        let whole = Seen { prefixes: Some(&ends), window, ..Seen::ALL };
        let seen = if lengths.len() > 1 { Seen { starts: Some(&starts), ..whole } } else { whole };
        let (qkv, dy) = (noise(s.batch * s.len * w, 1), noise(s.batch * s.len * c, 2));
        let [y, lse, d_qkv, cached, d_cached] = same_bits(|cpu| {
            let [y, lse, d_qkv] = attention(cpu, s, seen, &qkv, &dy);
            let [cached, d_cached] = in_parts(cpu, s, seen, &qkv, &dy);
            [y, lse, d_qkv, cached, d_cached]
        });
        let [want_y, want_lse, want_d] = reference(s, seen, &wide(&qkv), &wide(&dy));
        close(&y, &want_y, 3e-6);
        close(&lse, &want_lse, 3e-6);
        close(&d_qkv, &want_d, 5e-6);
        close(&d_cached, &want_d, 5e-6);
        let same = y.iter().zip(&cached).all(|(a, b)| a.to_bits() == b.to_bits());
        assert!(same, "{lengths:?} {prefixes:?}: with a cache");
        let [causal, ..] = reference(s, Seen { prefixes: None, ..seen }, &wide(&qkv), &wide(&dy));
        let off = causal.iter().zip(&want_y).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert_eq!(off > 1e-2, prefixes.iter().any(|&prefix| prefix > 1), "{prefixes:?}: without prefixes");
    }
}

#[test]
fn windows_leave_out_pairs_of_query_and_key() {
    let cpu = Device::cpu(1).unwrap();
    let zeros = |width| cpu.zeros([2, 4, width]).unwrap();
    let (qkv, mut y, mut lse) = (zeros(24), zeros(8), cpu.zeros([2, 2, 4]).unwrap());
    for (window, pairs) in [(None, 10), (Some(4), 10), (Some(2), 7), (Some(1), 4)] {
        let mask = Mask { keys: AttendedKeys::last(window), ..Mask::default() };
        let (heads, lse) = (Heads::equal(2), lse.view_mut());
        let op = Op::Attention { heads, mask, qkv: qkv.view(), y: y.view_mut(), lse };
        assert_eq!(op.flops(), 2 * 2 * pairs * 8 * 2, "{window:?}");
    }
}

/// Token by token, as text is generated: queries that share keys are computed together.
#[test]
fn tokens_one_by_one_have_the_bits_of_a_whole_sequence() {
    let cpu = Device::cpu(1).unwrap();
    for (s, window) in [
        (Sizes::new(1, 40, (4, 1), 12), None),
        (Sizes::new(1, 40, (4, 1), 12), Some(6)),
        (Sizes::new(1, 40, (12, 1), 8), Some(6)),
        (Sizes::new(1, 600, (3, 1), 8), Some(200)),
        (Sizes::new(1, 300, (2, 2), 8), Some(17)),
    ] {
        let [c, kv, w] = s.widths();
        let (qkv, dy) = (noise(s.len * w, 1), vec![0.0; s.len * c]);
        let whole = attention(&cpu, s, Seen { window, ..Seen::ALL }, &qkv, &dy)[0].to_vec::<f32>().unwrap();
        let all = cpu.tensor(&qkv, [1, s.len, w]).unwrap();
        let [mut keys, mut values] = [cpu.zeros([1, s.len, kv]).unwrap(), cpu.zeros([1, s.len, kv]).unwrap()];
        for past in 0..s.len {
            let mut y = cpu.zeros([1, 1, c]).unwrap();
            cpu.run(Op::AttentionCached {
                heads: s.heads,
                past,
                mask: Mask { keys: AttendedKeys::last(window), ..Mask::default() },
                qkv: all.view().part(past * w, [1, 1, w]).unwrap(),
                keys: keys.view_mut(),
                values: values.view_mut(),
                y: y.view_mut(),
                lse: None,
            })
            .unwrap();
            assert_eq!(y.to_vec::<f32>().unwrap(), whole[past * c..][..c], "{s:?} {window:?} {past}");
        }
    }
}

/// Heads of queries that share a head of keys compute what they would compute with copies of it.
#[test]
fn grouped_queries_have_the_bits_of_separate_heads() {
    let (s, separate) = (Sizes::new(2, 150, (6, 2), 20), Sizes::new(2, 150, (6, 6), 20));
    let ([c, kv, w], d) = (s.widths(), s.d);
    let (qkv, dy) = (noise(300 * w, 1), noise(300 * c, 2));
    let copies = |x: &[f32]| x.chunks_exact(d).flat_map(|head| head.repeat(3)).collect::<Vec<_>>();
    let spread: Vec<f32> = qkv
        .chunks_exact(w)
        .flat_map(|row| [row[..c].to_vec(), copies(&row[c..c + kv]), copies(&row[c + kv..])].concat())
        .collect();
    let cpu = Device::cpu(2).unwrap();
    let floats = |t: Tensor| t.to_vec::<f32>().unwrap();
    let [y, lse, d_qkv] = attention(&cpu, s, Seen::ALL, &qkv, &dy).map(floats);
    let [want_y, want_lse, d_spread] = attention(&cpu, separate, Seen::ALL, &spread, &dy).map(floats);
    assert_eq!((y, lse), (want_y, want_lse));
    let mut want_d = Vec::new();
    for row in wide(&d_spread).chunks_exact(3 * c) {
        want_d.extend_from_slice(&row[..c]);
        for group in row[c..].chunks_exact(3 * d) {
            want_d.extend((0..d).map(|i| group[i] + group[d + i] + group[2 * d + i]));
        }
    }
    close(&d_qkv, &want_d, 1e-6);
    for (row, want) in d_qkv.chunks_exact(w).zip(d_spread.chunks_exact(3 * c)) {
        assert_eq!(row[..c], want[..c], "the gradients of the queries");
    }
}

/// A table whose cosines and sines are of no angle, so that a swap of the two is noticed.
fn table(positions: usize, r: usize) -> Vec<f32> {
    noise(positions * r, 5)
}

/// Rotates one head in f64, by the definition.
fn rotated(x: &[f64], angles: &[f64], back: bool) -> Vec<f64> {
    let mut y = x.to_vec();
    let half = angles.len() / 2;
    for i in 0..half {
        let (a, b, cos, sin) = (x[i], x[i + half], angles[i], angles[i + half]);
        let sin = if back { -sin } else { sin };
        y[i] = a * cos - b * sin;
        y[i + half] = b * cos + a * sin;
    }
    y
}

#[test]
fn heads_are_joined_and_rotated_and_split_and_rotated_back() {
    for (s, r, start) in [
        (Sizes::new(1, 1, (1, 1), 2), 2, 0),
        (Sizes::new(2, 5, (3, 1), 5), 4, 3),
        (Sizes::new(2, 7, (4, 2), 24), 24, 0),
        (Sizes::new(3, 40, (6, 2), 20), 6, 11),
        (Sizes::new(1, 700, (2, 2), 16), 16, 1),
        (Sizes::new(2, 3, (2, 1), 8), 0, 2),
        (Sizes::new(0, 3, (2, 1), 8), 4, 0),
        (Sizes::new(2, 0, (2, 1), 8), 4, 0),
        (Sizes::new(2, 3, (2, 1), 0), 0, 0),
    ] {
        let Sizes { batch, len, heads, d } = s;
        let [c, kv, w] = s.widths();
        let n = batch * len;
        let from = [noise(n * c, 1), noise(n * kv, 2), noise(n * kv, 3)];
        let (d_joined, angles) = (noise(n * w, 4), table(start + len + 1, r));
        for rotates in [true, false] {
            let [qkv, dq, dk, dv] = same_bits(|cpu| {
                let part = |v: &[f32], width| cpu.tensor(v, [batch, len, width]).unwrap();
                let angles = cpu.tensor(&angles, [start + len + 1, r]).unwrap();
                let positions = TokenPositions::From { start, documents: None };
                let rotary = rotates.then(|| Rotary { table: angles.view(), positions });
                let [q, k, v] = [part(&from[0], c), part(&from[1], kv), part(&from[2], kv)];
                let mut qkv = part(&vec![f32::NAN; n * w], w);
                let (q, k, v, all) = (q.view(), k.view(), v.view(), qkv.view_mut());
                cpu.run(Op::JoinHeads { heads, rotary, q, k, v, qkv: all }).unwrap();
                let d_qkv = part(&d_joined, w);
                let empty = |width| part(&vec![f32::NAN; n * width], width);
                let [mut dq, mut dk, mut dv] = [empty(c), empty(kv), empty(kv)];
                let [to_q, to_k, to_v] = [dq.view_mut(), dk.view_mut(), dv.view_mut()];
                let d_qkv = d_qkv.view();
                cpu.run(Op::SplitHeads { heads, rotary, d_qkv, dq: to_q, dk: to_k, dv: to_v }).unwrap();
                [qkv, dq, dk, dv]
            });
            let (mut want, mut want_split) = (Vec::new(), [Vec::new(), Vec::new(), Vec::new()]);
            let (angles, joined) = (wide(&angles), wide(&d_joined));
            for row in 0..n {
                let at = &angles[(start + row % len) * r..][..r];
                let at = if rotates { at } else { &[] };
                let mut rest = &joined[row * w..][..w];
                for (i, count) in [heads.query, heads.kv, heads.kv].into_iter().enumerate() {
                    let own = &wide(&from[i])[row * count * d..][..count * d];
                    for head in 0..count {
                        let at = if i < 2 { at } else { &[] };
                        want.extend(rotated(&own[head * d..][..d], at, false));
                        let (first, after) = rest.split_at(d);
                        want_split[i].extend(rotated(first, at, true));
                        rest = after;
                    }
                }
            }
            close(&qkv, &want, 5e-7);
            for (got, want) in [dq, dk, dv].iter().zip(&want_split) {
                close(got, want, 5e-7);
            }
        }
    }
}

/// The rotation of a packed sequence is that of its documents, each from position 0.
#[test]
fn tokens_are_rotated_by_their_positions_in_documents() {
    let cpu = Device::cpu(1).unwrap();
    let (heads, d, len) = (Heads { query: 2, kv: 1 }, 6, 9);
    let angles = cpu.tensor(&table(len, 4), [len, 4]).unwrap();
    let of = |width: usize, seed| cpu.tensor(&noise(len * width, seed), [1, len, width]).unwrap();
    let (q, k, v) = (of(2 * d, 1), of(d, 2), of(d, 3));
    let join = |from: usize, new: usize, start: usize, starts: Option<&[u32]>| {
        let starts = starts.map(|starts| cpu.tensor(starts, [1, new]).unwrap());
        let positions = TokenPositions::From { start, documents: starts.as_ref().map(Tensor::view) };
        let rotary = Some(Rotary { table: angles.view(), positions });
        let mut to = cpu.zeros([1, new, 4 * d]).unwrap();
        let (q, k, v) = (tokens(&q, from, new), tokens(&k, from, new), tokens(&v, from, new));
        cpu.run(Op::JoinHeads { heads, rotary, q, k, v, qkv: to.view_mut() }).unwrap();
        to.to_vec::<f32>().unwrap()
    };
    let alone = [join(0, 4, 0, None), join(4, 1, 0, None), join(5, 4, 0, None)].concat();
    assert_eq!(join(0, 9, 0, Some(&[0, 0, 0, 0, 4, 5, 5, 5, 5])), alone);
    assert_ne!(join(0, 9, 0, None), alone);
    let parts = [join(0, 2, 0, Some(&[0, 0])), join(2, 7, 2, Some(&[0, 0, 4, 5, 5, 5, 5]))].concat();
    assert_eq!(parts, alone);
}

/// Returns some tokens of one sequence.
fn tokens(x: &Tensor, start: usize, count: usize) -> View<'_> {
    let width = x.shape().cols();
    x.view().part(start * width, [1, count, width]).unwrap()
}

/// A rotation of whole sequences is the rotation of their parts, each from its own position.
#[test]
fn tokens_are_rotated_by_their_positions() {
    let cpu = Device::cpu(1).unwrap();
    let (heads, d, len) = (Heads { query: 2, kv: 1 }, 6, 9);
    let angles = cpu.tensor(&table(len, 4), [len, 4]).unwrap();
    let qkv = noise(len * 4 * d, 1);
    let [q, k, v] = [(0, 2), (2, 1), (3, 1)].map(|(first, count)| {
        let rows = qkv.chunks_exact(4 * d).flat_map(|row| row[first * d..][..count * d].to_vec());
        cpu.tensor(&rows.collect::<Vec<f32>>(), [1, len, count * d]).unwrap()
    });
    let join = |start: usize, new: usize| {
        let mut to = cpu.zeros([1, new, 4 * d]).unwrap();
        let positions = TokenPositions::From { start, documents: None };
        let rotary = Some(Rotary { table: angles.view(), positions });
        let (q, k, v) = (tokens(&q, start, new), tokens(&k, start, new), tokens(&v, start, new));
        cpu.run(Op::JoinHeads { heads, rotary, q, k, v, qkv: to.view_mut() }).unwrap();
        to.to_vec::<f32>().unwrap()
    };
    assert_eq!(join(0, len), [join(0, 4), join(4, 1), join(5, 4)].concat());
}
