//! Attention and its gradient, with and without a cache.

use super::super::base::{Philox, TileLists};
use super::super::tensor::{AttendedKeys, Device, KeyRanges, Mask, Op, Result, Tensor, TileMask};
use super::{Sizes, documents, ids, noise};

/// Returns where the prefixes of these documents end, each somewhere in its own tokens; `None` unless
/// `prefixed`.
fn prefixes(
    device: &Device,
    seed: u64,
    [b, t]: [usize; 2],
    past: usize,
    documents: Option<&Tensor>,
    prefixed: bool,
) -> Result<Option<Tensor>> {
    let draws = Philox::new(seed, 13);
    let starts = documents.map_or_else(|| Ok(vec![0; b * t]), Tensor::to_vec::<u32>)?;
    let mut ends = Vec::with_capacity(b * t);
    for document in starts.chunks(t.max(1)).flat_map(|row| row.chunk_by(|a, b| a == b)) {
        let end = past + ends.len() % t + document.len();
        let start = document[0] as usize;
        let end = start + draws.below(ends.len() as u64, (end - start) as u64 + 1) as usize;
        ends.extend(std::iter::repeat_n(end as u32, document.len()));
    }
    prefixed.then(|| device.tensor(&ends, [b, t])).transpose()
}

/// What queries attend to.
#[derive(Debug, Clone, Copy)]
pub(super) struct Seen {
    pub(super) documents: bool,
    pub(super) prefixes: bool,
    pub(super) window: Option<usize>,
}

pub(super) fn attention(d: &Device, seed: u64, s: Sizes, seen: Seen) -> Result<Vec<Tensor>> {
    let Sizes { b, t, .. } = s;
    let documents = documents(d, seed + 6, [b, t], 0, seen.documents)?;
    let prefixes = prefixes(d, seed + 7, [b, t], 0, documents.as_ref(), seen.prefixes)?;
    let [documents, prefixes] = [&documents, &prefixes].map(|ids| ids.as_ref().map(Tensor::view));
    let mask = Mask { documents, prefixes, keys: AttendedKeys::last(seen.window) };
    attention_with(d, seed, s, mask)
}

/// Runs attention with a pattern, and its gradient.
pub(super) fn sparse_attention(
    d: &Device,
    seed: u64,
    s: Sizes,
    pattern: &str,
    divided: bool,
) -> Result<Vec<Tensor>> {
    let documents = documents(d, seed + 6, [s.b, s.t], 0, divided)?;
    let pattern = pattern.parse().expect("a pattern");
    let lists = TileLists::new(pattern, 1, 0..s.heads.query as u32, s.t, TileMask::TILE);
    let tiles = TileMask::new(d, &lists)?;
    let keys = AttendedKeys::Tiles(&tiles);
    let mask = Mask { documents: documents.as_ref().map(Tensor::view), keys, ..Mask::default() };
    attention_with(d, seed, s, mask)
}

fn attention_with(d: &Device, seed: u64, s: Sizes, mask: Mask<'_>) -> Result<Vec<Tensor>> {
    let (Sizes { b, t, heads, .. }, [c, _, w]) = (s, s.widths());
    let (qkv, dy) = (noise(d, seed, 1.0, [b, t, w])?, noise(d, seed + 1, 1.0, [b, t, c])?);
    let (mut y, mut lse) = (d.zeros([b, t, c])?, d.zeros([b, heads.query, t])?);
    let mut d_qkv = d.zeros([b, t, w])?;
    d.run(Op::Attention { heads, mask, qkv: qkv.view(), y: y.view_mut(), lse: lse.view_mut() })?;
    d.run(Op::AttentionGrad {
        heads,
        mask,
        qkv: qkv.view(),
        y: y.view(),
        lse: lse.view(),
        dy: dy.view(),
        d_qkv: d_qkv.view_mut(),
    })?;
    Ok(vec![y, lse, d_qkv])
}

pub(super) fn attention_cached(
    d: &Device,
    seed: u64,
    s: Sizes,
    past: usize,
    seen: Seen,
) -> Result<Vec<Tensor>> {
    let (Sizes { b, t, heads, .. }, [c, kv, w], capacity) = (s, s.widths(), 120);
    let documents = documents(d, seed + 6, [b, t], past, seen.documents)?;
    let prefixes = prefixes(d, seed + 7, [b, t], past, documents.as_ref(), seen.prefixes)?;
    let [documents, prefixes] = [&documents, &prefixes].map(|ids| ids.as_ref().map(Tensor::view));
    let mask = Mask { documents, prefixes, keys: AttendedKeys::last(seen.window) };
    let (qkv, dy) = (noise(d, seed, 1.0, [b, t, w])?, noise(d, seed + 1, 1.0, [b, t, c])?);
    let mut keys = noise(d, seed + 2, 1.0, [b, capacity, kv])?;
    let mut values = noise(d, seed + 3, 1.0, [b, capacity, kv])?;
    let (mut y, mut lse) = (d.zeros([b, t, c])?, d.zeros([b, heads.query, t])?);
    d.run(Op::AttentionCached {
        heads,
        past,
        mask,
        qkv: qkv.view(),
        keys: keys.view_mut(),
        values: values.view_mut(),
        y: y.view_mut(),
        lse: Some(lse.view_mut()),
    })?;
    let mut d_qkv = d.zeros([b, t, w])?;
    let mut d_keys = noise(d, seed + 4, 1.0, [b, capacity, kv])?;
    let mut d_values = noise(d, seed + 5, 1.0, [b, capacity, kv])?;
    d.run(Op::AttentionCachedGrad {
        heads,
        past,
        mask,
        qkv: qkv.view(),
        keys: keys.view(),
        values: values.view(),
        y: y.view(),
        lse: lse.view(),
        dy: dy.view(),
        d_qkv: d_qkv.view_mut(),
        d_keys: d_keys.view_mut(),
        d_values: d_values.view_mut(),
    })?;
    Ok(vec![keys, values, y, lse, d_qkv, d_keys, d_values])
}

/// Runs attention to blocks of keys, each query to any range of each, and the gradient of all blocks.
pub(super) fn attention_over(d: &Device, seed: u64, s: Sizes, blocks: &[usize]) -> Result<Vec<Tensor>> {
    let (Sizes { b, t, heads, .. }, [c, kv, w]) = (s, s.widths());
    let (qkv, dy) = (noise(d, seed, 1.0, [b, t, w])?, noise(d, seed + 1, 1.0, [b, t, c])?);
    let (mut y, mut lse) = (noise(d, seed + 2, 1.0, [b, t, c])?, d.zeros([b, heads.query, t])?);
    let mut all = Vec::new();
    for (i, &keys) in blocks.iter().enumerate() {
        let seed = seed + 10 * (i as u64 + 1);
        let [k, v] = [noise(d, seed, 1.0, [b, keys, kv])?, noise(d, seed + 1, 1.0, [b, keys, kv])?];
        // Each query attends to a key of the first block. Some ranges are empty, some end after the last key.
        let mut from = ids(d, seed + 2, keys.max(1), [b, t])?;
        let to = if i == 0 {
            let from = from.to_vec::<u32>()?;
            d.tensor(&from.iter().map(|from| from + 1 + from % 50).collect::<Vec<u32>>(), [b, t])?
        } else {
            ids(d, seed + 3, keys + 5, [b, t])?
        };
        if i == 2 {
            from = d.tensor(&vec![0_u32; b * t], [b, t])?;
        }
        let ranges = KeyRanges { from: from.view(), to: to.view(), pairs: 1 };
        d.run(Op::AttentionOver {
            heads,
            ranges,
            continues: i > 0,
            qkv: qkv.view(),
            keys: k.view(),
            values: v.view(),
            y: y.view_mut(),
            lse: lse.view_mut(),
        })?;
        all.push((from, to, k, v));
    }
    let mut dq = noise(d, seed + 3, 1.0, [b, t, c])?;
    let mut results = Vec::new();
    for (from, to, k, v) in all {
        let shape = k.shape();
        let [mut d_keys, mut d_values] = [noise(d, seed + 4, 1.0, shape)?, noise(d, seed + 5, 1.0, shape)?];
        d.run(Op::AttentionOverGrad {
            heads,
            ranges: KeyRanges { from: from.view(), to: to.view(), pairs: 1 },
            qkv: qkv.view(),
            keys: k.view(),
            values: v.view(),
            y: y.view(),
            lse: lse.view(),
            dy: dy.view(),
            dq: dq.view_mut(),
            d_keys: d_keys.view_mut(),
            d_values: d_values.view_mut(),
        })?;
        results.extend([d_keys, d_values]);
    }
    results.extend([y, lse, dq]);
    Ok(results)
}
