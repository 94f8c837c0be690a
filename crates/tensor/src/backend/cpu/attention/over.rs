//! Attention to given keys, a range of them for each query, which may be one of several blocks.

use super::super::IN_HOST;
use super::super::pool::Pool;
use super::super::simd::Isa;
use super::seen::Ranges;
use super::{Attended, Backward, Cache, Forward, Layout, Output, outputs, packed};
use crate::op::KeyRanges;
use crate::{Shape, View};

/// Queries, and the keys that they attend to.
#[derive(Debug, Clone, Copy)]
pub(in super::super) struct Over<'a> {
    pub(super) isa: Isa,
    pub(super) layout: Layout,
    /// Number of keys of each sequence.
    pub(super) keys: usize,
    /// Range of each query of all sequences.
    pub(super) ranges: Ranges<'a>,
}

impl<'a> Over<'a> {
    /// `keys` is the shape `[B, K, kv D]`.
    pub(in super::super) fn new(layout: Layout, ranges: &KeyRanges<'a>, keys: Shape) -> Self {
        let [from, to] = [&ranges.from, &ranges.to].map(|ends: &View<'a>| ends.host().expect(IN_HOST));
        let keys = *keys.dims().get(1).expect("keys have shape [B, K, kv D]");
        Self { isa: Isa::detect(), layout, keys, ranges: Ranges { from, to } }
    }

    /// Returns the layout of the keys as that of a cache without room.
    const fn cache(self) -> Cache {
        Cache { past: 0, capacity: self.keys }
    }

    /// Computes attention of the queries in `qkv` `[B, T, W]` to `keys` and `values` `[B, K, kv D]`: writes
    /// `y` `[B, T, C]` and `lse` `[B, query, T]`, or updates them if it `continues`.
    pub(in super::super) fn forward(
        self,
        pool: &Pool,
        [qkv, keys, values]: [&[f32]; 3],
        continues: bool,
        y: &mut [f32],
        lse: &mut [f32],
    ) {
        let l = self.layout;
        if self.keys == 0 {
            if !continues {
                y.fill(0.0);
                lse.fill(f32::NEG_INFINITY);
            }
            return;
        }
        let place = self.cache().head_layout(l);
        let (q, k, v) = ((qkv, packed(l)[0]), (keys, place), (values, place));
        let attended = Attended::Ranges(self.ranges);
        let pass = Forward { isa: self.isa, layout: l, keys: self.keys, q, k, v, attended, continues };
        pass.run(pool, y, Some(lse));
    }

    /// Adds the gradients of the queries, `[B, T, C]`, of the keys and of the values, `[B, K, kv D]`, given
    /// `qkv`, keys, values, `y`, `lse` and `dy`.
    pub(in super::super) fn backward(
        self,
        pool: &Pool,
        [qkv, keys, values, y, lse, dy]: [&[f32]; 6],
        gradients: [&mut [f32]; 3],
    ) {
        let l = self.layout;
        if self.keys == 0 {
            return;
        }
        let place = self.cache().head_layout(l);
        let pass = Backward {
            isa: self.isa,
            layout: l,
            keys: self.keys,
            q: (qkv, packed(l)[0]),
            k: (keys, place),
            v: (values, place),
            y,
            lse,
            dy,
            attended: Attended::Ranges(self.ranges),
            accumulate_queries: true,
            accumulate: true,
        };
        let [dq, dk, dv] = gradients.map(Output::new);
        pass.run(pool, [(dq, outputs(l)), (dk, place), (dv, place)]);
    }
}
