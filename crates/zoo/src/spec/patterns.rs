//! Which keys the layers of a model attend to.

use farflung_base::{AttentionPattern, LayerPatterns};
use farflung_tensor::TileMask;

use super::{ModelSpec, Run};
use crate::ZooError;

impl ModelSpec {
    /// Returns the model with other patterns of attention.
    #[must_use]
    pub fn with_patterns(mut self, patterns: &LayerPatterns) -> Self {
        let mut blocks: Vec<Run> = Vec::new();
        for (layer, block) in self.each_block().enumerate() {
            let mut block = *block;
            block.attention.pattern = patterns.of(layer);
            match blocks.last_mut() {
                Some(run) if run.block == block => run.count += 1,
                _ => blocks.push(Run { count: 1, block }),
            }
        }
        self.blocks = blocks;
        self
    }

    /// Returns the patterns of the blocks' attention; `None` for a model without blocks.
    #[must_use]
    pub fn patterns(&self) -> Option<LayerPatterns> {
        LayerPatterns::of_layers(self.each_block().map(|block| block.attention.pattern).collect())
    }

    /// Returns a pattern with which the keys of a query are not one range, if a block has one.
    #[must_use]
    pub fn pattern_of_tiles(&self) -> Option<AttentionPattern> {
        self.patterns()?.of_tiles()
    }

    /// Checks that ranks can divide the positions of sequences: of a block of keys, each query has one range.
    ///
    /// Errors: [`ZooError::Config`] otherwise.
    pub(crate) fn check_context_pattern(&self) -> Result<(), ZooError> {
        let others = self.each_block().filter(|block| !block.attention.pattern.is_one_range()).count();
        if others == 0 {
            return Ok(());
        }
        let expected = "none where ranks divide positions: of their keys, a query has one range";
        Err(ZooError::Config { field: "layers with a sparse pattern", value: others, expected })
    }

    /// Returns the window that all blocks have; `None` if one has another, or another pattern.
    pub(crate) fn window_of_all(&self) -> Option<usize> {
        match self.windows()[..] {
            [window] if self.pattern_of_tiles().is_none() => window,
            _ => None,
        }
    }

    /// Returns the different windows of the blocks' attention, where the keys of each query are one range.
    pub(crate) fn windows(&self) -> Vec<Option<usize>> {
        let mut windows: Vec<_> =
            self.blocks.iter().map(|run| run.block.attention.pattern.window()).collect();
        windows.sort_unstable();
        windows.dedup();
        windows
    }
}

impl Run {
    /// Returns a number of words that the lists of tiles of one of its blocks do not exceed.
    pub(super) fn words_of_tiles(&self, context: usize) -> u64 {
        let attention = &self.block.attention;
        if attention.pattern.is_one_range() {
            return 0;
        }
        let heads = u32::try_from(attention.heads.query).unwrap_or(u32::MAX);
        attention.pattern.most_words(heads, context, TileMask::TILE)
    }
}
