//! Generation of text: the logits of new tokens, with the keys and values of those before them.

use farflung_tensor::{DType, Op, Tensor};

use super::{Input, Packed, Seen, Stage, StageContext};
use crate::ZooError;
use crate::layer::{Block, Head, KeyValues, Params, dims};

/// Keys and values of the tokens processed so far.
#[derive(Debug)]
pub struct Cache {
    pub(super) layers: Vec<KeyValues>,
    pub(super) len: usize,
    context: usize,
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

    /// Removes all tokens if there is no room for `new` more.
    pub const fn make_room(&mut self, new: usize) {
        if self.len + new > self.context {
            self.clear();
        }
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
        let layers = self.layers.blocks.iter().map(layer).collect::<Result<_, ZooError>>()?;
        Ok(Cache { layers, len: 0, context: self.spec.context })
    }

    /// Appends `T` new positions to the cache of this stage's own layers. Returns the logits `[B, T, V]` of the
    /// next token at each position if the stage has the head, and the hidden states `[B, T, D]` that the next
    /// stage takes as its input otherwise. The first stage takes tokens `[B, T]`, each other one hidden states.
    ///
    /// Errors: [`ZooError::StageInput`] for the input of another stage; [`ZooError::Config`] if the cache has
    /// no room.
    pub fn decode<'a>(
        &self,
        params: impl Into<Params<'a>>,
        cache: &mut Cache,
        input: impl Into<Packed>,
    ) -> Result<Tensor, ZooError> {
        self.decode_by(params.into(), cache, input.into(), Head::logits)
    }

    /// Like [`Stage::decode`] for one sequence, but returns the logits `[1, 1, V]` of the token after the last
    /// position only.
    ///
    /// Errors: as [`Stage::decode`].
    pub fn decode_last<'a>(
        &self,
        params: impl Into<Params<'a>>,
        cache: &mut Cache,
        input: impl Into<Packed>,
    ) -> Result<Tensor, ZooError> {
        self.decode_by(params.into(), cache, input.into(), |head, cx, x| {
            let [_, positions, width] = dims(x)?;
            let mut last = self.device.empty(DType::F32, [1, 1, width])?;
            let row = x.view().part((positions - 1) * width, [1, 1, width])?;
            self.device.run(Op::Cast { x: row, y: last.view_mut() })?;
            head.logits(cx, &last)
        })
    }

    fn decode_by(
        &self,
        params: Params<'_>,
        cache: &mut Cache,
        input: Packed,
        last: impl FnOnce(&Head, &StageContext<'_>, &Tensor) -> Result<Tensor, ZooError>,
    ) -> Result<Tensor, ZooError> {
        let new = match &input.input {
            Input::Tokens(ids) => ids.shape().cols(),
            Input::Hidden(x) => dims(x)?[1],
        };
        if cache.len + new > self.spec.context {
            return Err(ZooError::Config {
                field: "sequence length",
                value: cache.len + new,
                expected: "at most the context",
            });
        }
        let seen = Seen { past: cache.len, layers: &mut cache.layers };
        let output = self.evaluate(params, input, Some(seen), last)?;
        cache.len += new;
        Ok(output)
    }
}
