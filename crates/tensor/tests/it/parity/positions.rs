//! Ops that read a table at the positions of tokens, and their gradients.

use super::super::tensor::{Device, Op, Result, Rotary, Tensor, TokenPositions};
use super::{Sizes, documents, ids, noise};

/// What says where tokens are, beside the position of the first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Given {
    Nothing,
    Documents,
    Positions,
}

impl Given {
    pub(super) const ALL: [Self; 3] = [Self::Nothing, Self::Documents, Self::Positions];

    /// Returns what is given for each token. Positions are below `start + t`, in no order.
    fn read(self, device: &Device, seed: u64, tokens: [usize; 2], start: usize) -> Result<Option<Tensor>> {
        match self {
            Self::Nothing | Self::Documents => {
                documents(device, seed, tokens, start, self == Self::Documents)
            }
            Self::Positions => ids(device, seed, start + tokens[1], tokens).map(Some),
        }
    }

    fn positions(self, start: usize, each: Option<&Tensor>) -> TokenPositions<'_> {
        match (self, each) {
            (Self::Positions, Some(each)) => TokenPositions::At(each.view()),
            _ => TokenPositions::From { start, documents: each.map(Tensor::view) },
        }
    }
}

pub(super) fn joined_heads(
    d: &Device,
    seed: u64,
    s: Sizes,
    start: usize,
    rotated: Option<usize>,
    given: Given,
) -> Result<Vec<Tensor>> {
    let (Sizes { b, t, heads, .. }, [c, kv, w]) = (s, s.widths());
    let (q, k) = (noise(d, seed, 1.0, [b, t, c])?, noise(d, seed + 1, 1.0, [b, t, kv])?);
    let (v, d_qkv) = (noise(d, seed + 2, 1.0, [b, t, kv])?, noise(d, seed + 3, 1.0, [b, t, w])?);
    let table = rotated.map(|r| noise(d, seed + 4, 1.0, [start + t, r])).transpose()?;
    let each = given.read(d, seed + 6, [b, t], start)?;
    let positions = given.positions(start, each.as_ref());
    let rotary = table.as_ref().map(|table| Rotary { table: table.view(), positions });
    let mut qkv = d.zeros([b, t, w])?;
    let (from_q, from_k, from_v, to) = (q.view(), k.view(), v.view(), qkv.view_mut());
    d.run(Op::JoinHeads { heads, rotary, q: from_q, k: from_k, v: from_v, qkv: to })?;
    let (mut dq, mut dk, mut dv) = (d.zeros([b, t, c])?, d.zeros([b, t, kv])?, d.zeros([b, t, kv])?);
    let (to_q, to_k, to_v) = (dq.view_mut(), dk.view_mut(), dv.view_mut());
    d.run(Op::SplitHeads { heads, rotary, d_qkv: d_qkv.view(), dq: to_q, dk: to_k, dv: to_v })?;
    Ok(vec![qkv, dq, dk, dv])
}

pub(super) fn embedding(
    d: &Device,
    seed: u64,
    ([b, t, vocabulary, cols], first): ([usize; 4], Option<u32>),
    start: usize,
    positioned: bool,
    given: Given,
) -> Result<Vec<Tensor>> {
    let each = given.read(d, seed + 6, [b, t], start)?;
    let at = given.positions(start, each.as_ref());
    let tokens = ids(d, seed, if first.is_some() { 2 * vocabulary } else { vocabulary }, [b, t])?;
    let table = noise(d, seed + 1, 1.0, [vocabulary, cols])?;
    let positions = noise(d, seed + 2, 1.0, [start + t, cols])?;
    let mut y = d.zeros([b, t, cols])?;
    d.run(Op::Embed {
        tokens: tokens.view(),
        first,
        positions: at,
        tokens_table: table.view(),
        positions_table: positioned.then(|| positions.view()),
        y: y.view_mut(),
    })?;
    let dy = noise(d, seed + 3, 1.0, [b, t, cols])?;
    let mut d_table = noise(d, seed + 4, 1.0, [vocabulary, cols])?;
    let mut d_positions = noise(d, seed + 5, 1.0, [start + t, cols])?;
    d.run(Op::EmbedGrad {
        tokens: tokens.view(),
        first,
        positions: at,
        dy: dy.view(),
        d_tokens_table: d_table.view_mut(),
        d_positions_table: positioned.then(|| d_positions.view_mut()),
    })?;
    Ok(vec![y, d_table, d_positions])
}
