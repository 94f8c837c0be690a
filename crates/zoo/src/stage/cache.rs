//! Generation of text: the logits of new tokens, with the keys and values of those before them.

use farflung_tensor::{DType, Tensor};

use super::{Input, Stage};
use crate::ZooError;
use crate::block::KeyValues;

/// Keys and values of the tokens processed so far.
#[derive(Debug)]
pub struct Cache {
    pub(super) layers: Vec<KeyValues>,
    pub(super) len: usize,
}

impl Cache {
    /// Returns the number of tokens in the cache.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the cache has no tokens.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Removes all tokens.
    pub const fn clear(&mut self) {
        self.len = 0;
    }
}

impl Stage {
    /// Creates an empty cache of keys and values for `batch` sequences of up to the model's context.
    pub fn cache(&self, batch: usize) -> Result<Cache, ZooError> {
        let shape = [batch, self.config.context, self.config.dim];
        self.cache_of(|| Ok(self.device.empty(DType::F32, shape)?))
    }

    pub(super) fn cache_of(&self, tensor: impl Fn() -> Result<Tensor, ZooError>) -> Result<Cache, ZooError> {
        let layer = |_| Ok(KeyValues { keys: tensor()?, values: tensor()? });
        Ok(Cache { layers: self.blocks.iter().map(layer).collect::<Result<_, ZooError>>()?, len: 0 })
    }

    /// Appends new tokens `[B, T]` to the cache and returns the logits `[B, T, V]` of the next token at each
    /// position. The stage must be a whole model.
    pub fn decode(&self, params: &Tensor, cache: &mut Cache, tokens: Tensor) -> Result<Tensor, ZooError> {
        let cx = self.cx(params);
        let new = tokens.shape().cols();
        if cache.len + new > self.config.context {
            return Err(ZooError::Config {
                field: "sequence length",
                value: cache.len + new,
                expected: "at most the context",
            });
        }
        let (mut x, _) = self.enter(&cx, Input::Tokens(tokens), cache.len)?;
        for (block, seen) in self.blocks.iter().zip(&mut cache.layers) {
            x = block.decode(&cx, &x, cache.len, seen)?;
        }
        cache.len += new;
        let head =
            self.head.as_ref().ok_or(ZooError::StageInput { expected: "a stage with the whole model" })?;
        Ok(head.logits(&cx, &x)?)
    }
}
