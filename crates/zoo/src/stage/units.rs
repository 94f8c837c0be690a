//! The units of a stage's parameters: the embeddings, each block, and the head. Gradients are complete unit by
//! unit, and passes can get parameters likewise.

use std::ops::Range;

use farflung_base::ChainStep;

use super::Stage;
use crate::layer::{Embedding, Head, LayerUnits, Layers};

impl Stage {
    /// Returns the ranges of the flat gradients in the order in which [`Stage::backward`] completes them.
    #[must_use]
    pub fn backward_ranges(&self) -> Vec<Range<usize>> {
        let Layers { embedding, blocks, head } = &self.layers;
        let mut ranges: Vec<Range<usize>> = head.iter().map(|head| self.span(head.params())).collect();
        ranges.extend(blocks.iter().rev().map(|block| self.span_of(block.params())));
        match embedding {
            Some(embedding) => ranges.push(self.span(embedding.params())),
            None if self.has_tied_head() => ranges.push(self.span((0, 1))),
            None => {}
        }
        ranges
    }

    /// Returns the range of the flat buffers that contains `count` parameters from `first` on, padding
    /// included.
    pub(super) fn span(&self, (first, count): (usize, usize)) -> Range<usize> {
        self.span_of(first..first + count)
    }

    /// Like [`Stage::span`], of a range of parameters.
    pub(super) fn span_of(&self, indices: Range<usize>) -> Range<usize> {
        let params = self.layout.params();
        let end = params.get(indices.end).map_or(self.layout.len(), |p| p.start);
        params[indices.start].start..end
    }

    pub(super) fn has_tied_head(&self) -> bool {
        self.layers.head.as_ref().is_some_and(Head::is_tied)
    }

    /// Returns the units that the embedding reads.
    pub(super) fn units_of_embedding(&self, embedding: &Embedding) -> LayerUnits {
        vec![self.span(embedding.params())]
    }

    /// Returns the unit that a block reads.
    pub(super) fn units_of_block(&self, block: usize) -> LayerUnits {
        vec![self.span_of(self.layers.blocks[block].params())]
    }

    /// Returns the units that the head reads.
    pub(super) fn units_of_head(&self, head: &Head) -> LayerUnits {
        let own = self.span(head.params());
        let table = head.is_tied().then(|| match &self.layers.embedding {
            Some(embedding) => self.span(embedding.params()),
            None => self.span((0, 1)),
        });
        std::iter::once(own).chain(table).collect()
    }

    /// Returns the units that each layer of a forward pass reads, in order.
    #[must_use]
    pub fn forward_units(&self) -> Vec<LayerUnits> {
        let mut all = self.recompute_units(self.layers.blocks.len());
        all.extend(self.layers.head.iter().map(|head| self.units_of_head(head)));
        all
    }

    /// Returns the units that each layer of a backward pass reads, in order: the embeddings' gradients do not
    /// depend on their values.
    #[must_use]
    pub fn backward_units(&self) -> Vec<LayerUnits> {
        let head = self.layers.head.iter().map(|head| self.units_of_head(head));
        let blocks: Vec<usize> = match &self.activation_policy.steps {
            Some(steps) => {
                let backward = steps.iter().skip_while(|step| !matches!(step, ChainStep::Backward(_)));
                let read = backward.filter_map(|step| match step {
                    ChainStep::Forward(i) | ChainStep::ForwardAll(i) | ChainStep::Backward(i) => Some(i),
                    ChainStep::Keep(_) | ChainStep::Drop(_) | ChainStep::Restore(_) => None,
                });
                read.map(|&block| block as usize).collect()
            }
            None => (0..self.layers.blocks.len()).rev().collect(),
        };
        let mut all: Vec<LayerUnits> =
            head.chain(blocks.into_iter().map(|block| self.units_of_block(block))).collect();
        all.dedup();
        all
    }

    /// Returns the units that [`Stage::recompute`] reads to restore the first `blocks` blocks, in order.
    #[must_use]
    pub fn recompute_units(&self, blocks: usize) -> Vec<LayerUnits> {
        let embedding = self.layers.embedding.iter().map(|embedding| self.units_of_embedding(embedding));
        embedding.chain((0..blocks).map(|block| self.units_of_block(block))).collect()
    }
}
