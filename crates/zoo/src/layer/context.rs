//! Attention over sequences whose positions ranks divide (context parallelism).
//!
//! Along a ring, keys and values pass from rank to rank, and each rank adds what its queries see of them (Liu
//! et al. 2023, "Ring Attention with Blockwise Transformers"); the backward pass takes the final
//! log-sum-exps, and the gradients of keys and values pass on until they are back at their rank. The ranks of
//! a group exchange positions for heads before it and back after it (Jacobs et al. 2023, "DeepSpeed
//! Ulysses"). What a query sees of a block of keys is one range, whatever the order of positions, the window,
//! the documents and the prefixes.

use std::sync::Arc;

use farflung_base::{Axis, ContextCut, Pending};
use farflung_tensor::{Device, Heads, KeyRanges, Op, Tensor};

use super::{Result, StageContext, dims};
use crate::ZooError;

/// The positions of sequences that a rank has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ContextPieces {
    cut: ContextCut,
    rank: u32,
    len: usize,
}

impl ContextPieces {
    /// Divides sequences of `len` positions.
    ///
    /// Errors: [`ZooError::Config`] if ranks would have unequal numbers of positions, or there is no such rank.
    pub fn new(cut: ContextCut, rank: u32, len: usize) -> Result<Self> {
        let refuse = |field, value, expected| Err(ZooError::Config { field, value, expected });
        if !cut.divides() || rank >= cut.readers() {
            return refuse("rank", rank as usize, "one of several that divide the positions of sequences");
        }
        if !cut.fits(len) {
            let expected = "a multiple of the ranks that divide it; in a ring with zigzag, of twice as many";
            return refuse("context", len, expected);
        }
        Ok(Self { cut, rank, len })
    }

    /// Returns the number of positions of this rank.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.cut.each(self.len)
    }

    /// Returns whether this rank has no position.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the number of ranks that divide the positions.
    #[must_use]
    pub const fn readers(&self) -> usize {
        self.cut.readers() as usize
    }

    /// Returns what this rank has of values by position, of whole sequences one after another.
    #[must_use]
    pub fn of<T: Copy>(&self, values: &[T]) -> Vec<T> {
        let own = self.cut.positions(self.rank, self.len);
        values.chunks_exact(self.len).flat_map(|row| own.iter().map(|&at| row[at as usize])).collect()
    }
}

/// What passes over divided sequences are told: the positions of this rank's tokens, and which keys its queries
/// see of each block.
#[derive(Debug)]
pub struct ContextBorders {
    /// u32 `[B, T]`: positions in documents, of this rank's tokens.
    pub(super) positions: Tensor,
    /// By window, the ranges of each group's keys.
    windows: Vec<(Option<usize>, Vec<Ranges>)>,
}

/// For the queries of a group, the ranges of another's keys.
#[derive(Debug)]
struct Ranges {
    from: Tensor,
    to: Tensor,
    pairs: u64,
}

impl ContextBorders {
    /// Makes those of `batch` sequences. `documents` and `prefixes` are those of whole sequences, as in
    /// [`Batch`](crate::Batch); `windows` are those of the model's layers.
    ///
    /// Errors: those of the device.
    pub(crate) fn new(
        pieces: &ContextPieces,
        device: &Device,
        batch: usize,
        [documents, prefixes]: [Option<&[u32]>; 2],
        windows: &[Option<usize>],
    ) -> Result<Self> {
        let ContextPieces { cut, rank, len } = *pieces;
        let of = |values: Option<&[u32]>, sequence: usize, at: u32| {
            values.and_then(|values| values.get(sequence * len + at as usize)).copied().unwrap_or(0)
        };
        let own = cut.positions(rank, len);
        let tokens = (0..batch).flat_map(|sequence| own.iter().map(move |&at| (sequence, at)));
        let positions: Vec<u32> =
            tokens.map(|(sequence, at)| at.saturating_sub(of(documents, sequence, at))).collect();
        let queries = cut.of_group(cut.group(rank), len);
        let shape = [batch, queries.len()];
        let of_keys = |window: Option<usize>, keys: &[u32]| {
            let (mut from, mut to, mut pairs) = (Vec::new(), Vec::new(), 0);
            for sequence in 0..batch {
                for &at in &queries {
                    let window = window.map_or(0, |window| (at + 1).saturating_sub(window.max(1) as u32));
                    let first = of(documents, sequence, at).max(window);
                    let end = (at + 1).max(of(prefixes, sequence, at));
                    let count = |before: u32| keys.partition_point(|&key| key < before) as u32;
                    let (first, end) = (count(first), count(end));
                    pairs += u64::from(end.saturating_sub(first));
                    from.push(first);
                    to.push(end);
                }
            }
            Ok(Ranges { from: device.tensor(&from, shape)?, to: device.tensor(&to, shape)?, pairs })
        };
        let groups = || (0..cut.ring).map(|group| cut.of_group(group, len));
        let of_window = |&window: &Option<usize>| {
            Ok((window, groups().map(|keys| of_keys(window, &keys)).collect::<Result<_>>()?))
        };
        Ok(Self {
            positions: device.tensor(&positions, [batch, own.len()])?,
            windows: windows.iter().map(of_window).collect::<Result<_>>()?,
        })
    }
}

/// The attention of a layer over divided sequences.
pub(super) struct DividedAttention<'a> {
    cx: &'a StageContext<'a>,
    pieces: &'a ContextPieces,
    borders: &'a Arc<ContextBorders>,
    /// Heads of this rank before the exchange of positions for heads.
    heads: Heads,
    head_dim: usize,
    window: Option<usize>,
}

/// Keys and values, or the gradients of both, that come from the rank before along the ring.
enum Coming {
    /// The ring has one rank.
    Own([Tensor; 2]),
    Sent([Pending<Result<Tensor>>; 2]),
}

impl Coming {
    fn wait(self) -> Result<[Tensor; 2]> {
        match self {
            Self::Own(pair) => Ok(pair),
            Self::Sent([keys, values]) => Ok([keys.wait()?, values.wait()?]),
        }
    }
}

/// What a forward pass makes of queries, keys and values.
pub(super) struct Attended {
    /// Queries, keys and values of all positions of the group, of this rank's heads.
    pub(super) qkv: Tensor,
    /// Their output, if it is of other positions than `y`.
    pub(super) by_heads: Option<Tensor>,
    pub(super) lse: Tensor,
    /// The output `[B, T, C]` of this rank's positions.
    pub(super) y: Tensor,
}

impl<'a> DividedAttention<'a> {
    /// Returns the attention if ranks divide the sequences of the pass.
    pub(super) fn of(
        cx: &'a StageContext<'a>,
        (heads, head_dim): (Heads, usize),
        window: Option<usize>,
    ) -> Option<Self> {
        let (pieces, borders) = (cx.context?, cx.borders.context.as_ref()?);
        Some(Self { cx, pieces, borders, heads, head_dim, window })
    }

    fn members(&self) -> usize {
        self.pieces.cut.ulysses as usize
    }

    /// Returns this rank's heads after the exchange of positions for heads.
    fn own_heads(&self) -> Heads {
        Heads { query: self.heads.query / self.members(), kv: self.heads.kv / self.members() }
    }

    /// Returns the groups whose keys arrive, in their order: first the own.
    fn sources(&self) -> impl Iterator<Item = usize> + use<> {
        let (cut, own) = (self.pieces.cut, self.pieces.cut.group(self.pieces.rank));
        (0..cut.ring).map(move |step| cut.source(own, step) as usize)
    }

    /// Returns the ranges of a group's keys, for costs and for the kernels.
    fn ranges(&self, group: usize) -> KeyRanges<'_> {
        let of_window = self.borders.windows.iter().find(|(window, _)| *window == self.window);
        let (_, ranges) = of_window.expect("borders are made for the windows of all layers");
        let Ranges { from, to, pairs } = &ranges[group];
        KeyRanges { from: from.view(), to: to.view(), pairs: *pairs }
    }

    /// Exchanges positions for heads in a tensor `[B, T, heads D]`.
    fn by_heads(&self, x: Tensor) -> Result<Tensor> {
        if self.members() == 1 { Ok(x) } else { self.cx.exchange.all_to_all(Axis::Ulysses, x, 2, 1) }
    }

    /// Exchanges heads for positions.
    fn by_positions(&self, x: Tensor) -> Result<Tensor> {
        if self.members() == 1 { Ok(x) } else { self.cx.exchange.all_to_all(Axis::Ulysses, x, 1, 2) }
    }

    fn pass_on(&self, [keys, values]: &[Tensor; 2]) -> Result<Coming> {
        let pass = |x: &Tensor| self.cx.exchange.pass_on(Axis::Context, x);
        Ok(Coming::Sent([pass(keys)?, pass(values)?]))
    }

    fn split(&self, qkv: &Tensor, heads: Heads) -> Result<[Tensor; 3]> {
        self.cx.split_heads(qkv, (heads, self.head_dim), None)
    }

    fn join(&self, parts: &[Tensor; 3], heads: Heads) -> Result<Tensor> {
        self.cx.join_heads(parts, (heads, self.head_dim), None)
    }

    /// Computes the attention of this rank's positions `[B, T, W]`. `keeps` says whether a backward pass
    /// follows.
    pub(super) fn forward(&self, qkv: Tensor, keeps: bool) -> Result<Attended> {
        let heads = self.own_heads();
        let mut qkv = qkv;
        if self.members() > 1 {
            let [q, k, v] = self.split(&qkv, self.heads)?;
            drop(qkv);
            qkv = self.join(&[self.by_heads(q)?, self.by_heads(k)?, self.by_heads(v)?], heads)?;
        }
        let [b, t, _] = dims(&qkv)?;
        let mut y = self.cx.empty([b, t, heads.query * self.head_dim])?;
        let mut lse = self.cx.empty([b, heads.query, t])?;
        let [_, keys, values] = self.split(&qkv, heads)?;
        let mut block = [keys, values];
        let last = self.pieces.cut.ring as usize - 1;
        for (step, group) in self.sources().enumerate() {
            let arriving = if step < last { Some(self.pass_on(&block)?) } else { None };
            let ranges = self.ranges(group);
            if step == 0 || ranges.pairs > 0 {
                let (continues, qkv, [keys, values]) =
                    (step > 0, qkv.view(), block.each_ref().map(Tensor::view));
                let (y, lse) = (y.view_mut(), lse.view_mut());
                self.cx.device.run(Op::AttentionOver {
                    heads,
                    ranges,
                    continues,
                    qkv,
                    keys,
                    values,
                    y,
                    lse,
                })?;
            }
            if let Some(arriving) = arriving {
                block = arriving.wait()?;
            }
        }
        drop(block);
        if self.members() == 1 {
            return Ok(Attended { qkv, by_heads: None, lse, y });
        }
        if !keeps {
            return Ok(Attended { qkv, by_heads: None, lse, y: self.by_positions(y)? });
        }
        let mut same = self.cx.empty(y.shape())?;
        self.cx.device.run(Op::Cast { x: y.view(), y: same.view_mut() })?;
        Ok(Attended { qkv, by_heads: Some(y), lse, y: self.by_positions(same)? })
    }

    /// Returns the gradient `[B, T, W]` of this rank's queries, keys and values, given what the forward pass
    /// has made and the gradient of its output. `y` is the output of this rank's heads.
    pub(super) fn backward(&self, [qkv, y, lse]: [&Tensor; 3], dy: Tensor) -> Result<Tensor> {
        let heads = self.own_heads();
        let dy = self.by_heads(dy)?;
        let mut dq = self.cx.device.zeros(y.shape())?;
        let [_, keys, values] = self.split(qkv, heads)?;
        let mut block = [keys, values];
        let last = self.pieces.cut.ring as usize - 1;
        let mut coming: Option<Coming> = None;
        for (step, group) in self.sources().enumerate() {
            let arriving = if step < last { Some(self.pass_on(&block)?) } else { None };
            let zeros = |x: &Tensor| Ok::<_, ZooError>(self.cx.device.zeros(x.shape())?);
            let mut gradients = [zeros(&block[0])?, zeros(&block[1])?];
            let ranges = self.ranges(group);
            if ranges.pairs > 0 {
                let [d_keys, d_values] = gradients.each_mut().map(Tensor::view_mut);
                let [keys, values] = block.each_ref().map(Tensor::view);
                self.cx.device.run(Op::AttentionOverGrad {
                    heads,
                    ranges,
                    qkv: qkv.view(),
                    keys,
                    values,
                    y: y.view(),
                    lse: lse.view(),
                    dy: dy.view(),
                    dq: dq.view_mut(),
                    d_keys,
                    d_values,
                })?;
            }
            // What the ranks before this one have added to the gradients of the same keys.
            if let Some(before) = coming.take() {
                for (sum, more) in gradients.iter_mut().zip(before.wait()?) {
                    self.cx.add(sum, &more)?;
                }
            }
            coming = Some(if last == 0 {
                Coming::Own(gradients)
            } else {
                let sent = self.pass_on(&gradients)?;
                drop(gradients);
                sent
            });
            if let Some(arriving) = arriving {
                block = arriving.wait()?;
            }
        }
        drop((block, dy));
        let [dk, dv] = coming.expect("a ring has a rank").wait()?;
        let parts = [self.by_positions(dq)?, self.by_positions(dk)?, self.by_positions(dv)?];
        self.join(&parts, self.heads)
    }
}
