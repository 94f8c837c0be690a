//! Generation of text: the logits of new tokens, with the keys and values of those before them.

use farflung_tensor::{DType, Tensor};

use super::{Input, Packed, Seen, Stage};
use crate::ZooError;
use crate::layer::{Block, Head, KeyValues};

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
        self.cache_of(batch, |shape| Ok(self.device.empty(DType::F32, shape)?))
    }

    /// Creates a cache of tensors of the given shapes.
    pub(super) fn cache_of(
        &self,
        batch: usize,
        tensor: impl Fn([usize; 3]) -> Result<Tensor, ZooError>,
    ) -> Result<Cache, ZooError> {
        let layer = |block: &Block| {
            let shape = [batch, self.spec.context, block.cached_width()];
            Ok(KeyValues { keys: tensor(shape)?, values: tensor(shape)? })
        };
        Ok(Cache { layers: self.layers.blocks.iter().map(layer).collect::<Result<_, ZooError>>()?, len: 0 })
    }

    /// Appends new tokens `[B, T]` to the cache and returns the logits `[B, T, V]` of the next token at each
    /// position. The stage must be a whole model.
    ///
    /// Errors: [`ZooError::StageInput`] for hidden states; [`ZooError::Config`] if the cache has no room.
    pub fn decode(
        &self,
        params: &Tensor,
        cache: &mut Cache,
        tokens: impl Into<Packed>,
    ) -> Result<Tensor, ZooError> {
        let tokens = tokens.into();
        let Input::Tokens(ids) = &tokens.input else {
            return Err(ZooError::StageInput { expected: "tokens" });
        };
        let new = ids.shape().cols();
        if cache.len + new > self.spec.context {
            return Err(ZooError::Config {
                field: "sequence length",
                value: cache.len + new,
                expected: "at most the context",
            });
        }
        let seen = Seen { past: cache.len, layers: &mut cache.layers };
        let logits = self.evaluate(params, tokens, Some(seen), Head::logits)?;
        cache.len += new;
        Ok(logits)
    }
}
