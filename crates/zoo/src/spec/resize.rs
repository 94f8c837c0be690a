//! Other sizes for a model of the same kind.

use farflung_tensor::Heads;

use super::bounds::LAYERS as MOST_LAYERS;
use super::{ModelSpec, Run};
use crate::ZooError;

/// New sizes of a model; `None` leaves a size as it is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Resize {
    /// Number of blocks. Blocks that differ are repeated in their order.
    pub layers: Option<usize>,
    /// Heads of queries of each block. Heads of keys and values keep their share of them.
    pub heads: Option<usize>,
    /// Width of the hidden states. Heads and feed-forward networks keep their widths relative to it.
    pub dim: Option<usize>,
    /// Most tokens of a sequence.
    pub context: Option<usize>,
    /// Number of token ids.
    pub vocab: Option<usize>,
}

impl ModelSpec {
    /// Returns a model of the same kind with other sizes, checked.
    ///
    /// Errors: [`ZooError::Config`] with the invalid size.
    pub fn resized(&self, to: Resize) -> Result<Self, ZooError> {
        let wrong = |field, value, expected| ZooError::Config { field, value, expected };
        let mut spec = self.clone();
        spec.context = to.context.unwrap_or(self.context);
        spec.vocab = to.vocab.unwrap_or(self.vocab);
        spec.dim = to.dim.unwrap_or(self.dim);
        if let Some(layers) = to.layers {
            spec.blocks = match spec.blocks.as_slice() {
                [run] => vec![Run { count: layers, ..*run }],
                _ if !(1..=MOST_LAYERS).contains(&layers) => {
                    return Err(wrong("layers", layers, "1 to 16384"));
                }
                _ => self.each_block().cycle().take(layers).map(|&block| Run { count: 1, block }).collect(),
            };
        }
        // Products of sizes below are of sizes within bounds.
        let bounded = |field, value: usize| match value {
            1..=0x4_0000 => Ok(value),
            _ => Err(wrong(field, value, "1 to 262144")),
        };
        let (before, dim) = (bounded("dim", self.dim)?, bounded("dim", spec.dim)?);
        for run in &mut spec.blocks {
            let attention = &mut run.block.attention;
            let heads = bounded("heads", to.heads.unwrap_or(attention.heads.query))?;
            if to.dim.is_some() || to.heads.is_some() {
                let all = attention.heads.query * attention.head_dim * dim;
                if !all.is_multiple_of(before * heads) {
                    return Err(wrong("heads", heads, "a divisor of `dim`"));
                }
                let (head_dim, old) = (all / (before * heads), attention.head_dim);
                if let Some(rotary) = &mut attention.rotary {
                    // Where a head is rotated as a whole, an odd width is refused by the check below.
                    let is_whole = rotary.width == old;
                    let width = rotary.width * head_dim / old.max(1);
                    rotary.width = if is_whole { width } else { (width / 2 * 2).max(2) };
                }
                attention.head_dim = head_dim;
            }
            if to.heads.is_some() {
                let kv = heads * attention.heads.kv;
                if !kv.is_multiple_of(attention.heads.query.max(1)) {
                    return Err(wrong(
                        "heads",
                        heads,
                        "a multiple of the query heads of each key-value head",
                    ));
                }
                attention.heads = Heads { query: heads, kv: kv / attention.heads.query.max(1) };
            }
            if to.dim.is_some() {
                let width = run.block.mlp.width * dim;
                run.block.mlp.width = width.div_ceil(before);
            }
        }
        spec.validate()?;
        Ok(spec)
    }
}
