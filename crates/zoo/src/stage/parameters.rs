//! The parameters of a stage: initial values, and weights of files.

use std::ops::Range;
use std::path::Path;

use farflung_tensor::{MemoryKind, Param, Shape, Tensor, TensorError};

use super::Stage;
use crate::layer::UnitGrads;
use crate::weights::{self, Weights, WriteOptions};
use crate::{TensorKind, TensorSpec, ZooError};

impl Stage {
    /// Returns the stage's tensors with their places in its flat buffers, which have the shapes of this rank's
    /// pieces ([`TensorSpec::shape_of`]).
    pub fn tensors(&self) -> impl Iterator<Item = (&Param, &TensorSpec)> {
        self.layout.params().iter().zip(self.specs.iter().map(|(_, spec)| spec))
    }

    /// Returns the ranges of the flat buffers with tensors of some kind, in order and as few as possible.
    #[must_use]
    pub fn ranges_of(&self, wanted: impl Fn(&Param, &TensorSpec) -> bool) -> Vec<Range<usize>> {
        let mut ranges: Vec<Range<usize>> = Vec::new();
        let mut follows = false;
        for (p, spec) in self.tensors() {
            let is_wanted = wanted(p, spec);
            match ranges.last_mut().filter(|_| follows) {
                Some(last) if is_wanted => last.end = p.range().end,
                _ if is_wanted => ranges.push(p.range()),
                _ => {}
            }
            follows = is_wanted;
        }
        ranges
    }

    /// Returns the ranges of the flat buffers with experts, in order and as few as possible. Where ranks divide
    /// the experts, others hold other values there.
    #[must_use]
    pub fn expert_ranges(&self) -> Vec<Range<usize>> {
        self.ranges_of(|_, spec| spec.kind == TensorKind::Expert)
    }

    /// Returns the range of the flat buffers with those of some blocks of the model that this stage has.
    #[must_use]
    pub fn range_of_blocks(&self, blocks: Range<usize>) -> Range<usize> {
        let here = |block: usize| block.saturating_sub(self.first_block).min(self.layers.blocks.len());
        match &self.layers.blocks[here(blocks.start)..here(blocks.end).max(here(blocks.start))] {
            [] => 0..0,
            [first, .., last] => self.span_of(first.params().start..last.params().end),
            [block] => self.span_of(block.params()),
        }
    }

    /// Returns buffers for gradients of one microbatch: one for each of [`Stage::backward_ranges`], from its
    /// first gradient until it is taken.
    #[must_use]
    pub fn unit_grads(&self) -> UnitGrads {
        let units = self.backward_ranges().into_iter().rev().collect();
        UnitGrads::new(self.device.counting_for(MemoryKind::Gradients), units)
    }

    /// Creates initial parameters, a pure function of the seed. They are equal for a stage and for the same
    /// layers of the whole model.
    pub fn init(&self, seed: u64) -> Result<Tensor, ZooError> {
        self.init_within(seed, std::slice::from_ref(&(0..self.layout.len())))
    }

    /// Like [`Stage::init`], of ranges of the flat buffers alone, one after another.
    pub fn init_within(&self, seed: u64, ranges: &[Range<usize>]) -> Result<Tensor, ZooError> {
        self.filled(ranges, |_, (index, spec), whole| {
            spec.fill(seed, *index, whole);
            Ok(())
        })
    }

    /// Reads the parameters from opened weights, by name.
    ///
    /// Errors: those of [`Weights::tensor`].
    pub fn load(&self, weights: &mut Weights) -> Result<Tensor, ZooError> {
        self.load_within(weights, std::slice::from_ref(&(0..self.layout.len())))
    }

    /// Like [`Stage::load`], of ranges of the flat buffers alone, one after another.
    ///
    /// Errors: as [`Stage::load`].
    pub fn load_within(&self, weights: &mut Weights, ranges: &[Range<usize>]) -> Result<Tensor, ZooError> {
        self.filled(ranges, |p, _, whole| weights.tensor(&p.name, whole))
    }

    /// Returns ranges of the flat buffers, of tensors that `fill` writes whole. Besides what is returned, one
    /// tensor is in memory at a time.
    fn filled(
        &self,
        ranges: &[Range<usize>],
        mut fill: impl FnMut(&Param, &(usize, TensorSpec), &mut [f32]) -> Result<(), ZooError>,
    ) -> Result<Tensor, ZooError> {
        let mut values = vec![0.0; ranges.iter().map(ExactSizeIterator::len).sum()];
        for (p, spec) in self.layout.params().iter().zip(&self.specs) {
            let mut at = 0;
            let mut piece: Option<Vec<f32>> = None;
            for range in ranges {
                let shared = range.start.max(p.start)..range.end.min(p.range().end);
                if shared == p.range() {
                    let into = at + p.start - range.start;
                    let into = &mut values[into..into + p.shape.len()];
                    spec.1.fill_piece(&self.share, into, |whole| fill(p, spec, whole))?;
                } else if !shared.is_empty() {
                    if piece.is_none() {
                        let mut whole = vec![0.0; p.shape.len()];
                        spec.1.fill_piece(&self.share, &mut whole, |whole| fill(p, spec, whole))?;
                        piece = Some(whole);
                    }
                    let into = at + shared.start - range.start;
                    let from =
                        piece.iter().flat_map(|all| &all[shared.start - p.start..shared.end - p.start]);
                    values[into..into + shared.len()].iter_mut().zip(from).for_each(|(to, from)| *to = *from);
                }
                at += range.len();
            }
        }
        Ok(self.device.counting_for(MemoryKind::Weights).tensor(&values, values.len())?)
    }

    /// Writes a whole model to a folder in Hugging Face's layout, as [`weights::write`] does. [`Stage::load`]
    /// reads the same values, exactly if the type is F32 (the default).
    ///
    /// Errors: [`ZooError::Config`] if the stage is not a whole model; [`ZooError::Tensor`] unless `params` is
    /// a flat buffer of the stage's layout; [`ZooError::Io`]. With one of the first two, nothing is written.
    ///
    /// ```
    /// use farflung_tensor::Device;
    /// use farflung_zoo::{Stage, gpt2, weights::{Weights, WriteOptions}};
    ///
    /// let folder = tempfile::tempdir()?;
    /// let model = Stage::whole(&gpt2(2, 2, 16, 8, 11)?, &Device::cpu(1)?)?;
    /// let params = model.init(1337)?;
    /// model.store(&params, folder.path(), WriteOptions::default())?;
    /// let loaded = model.load(&mut Weights::open(folder.path())?)?;
    /// assert_eq!(loaded.to_vec::<f32>()?, params.to_vec::<f32>()?);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn store(&self, params: &Tensor, folder: &Path, options: WriteOptions) -> Result<(), ZooError> {
        if !(self.takes_tokens()
            && self.gives_losses()
            && self.share.ranks() == 1
            && self.experts.ranks() == 1)
        {
            return Err(ZooError::Config {
                field: "layers",
                value: self.layers.blocks.len(),
                expected: "all layers of the model in their whole width and with all experts, because a folder \
                           of weights contains a whole model",
            });
        }
        let (lhs, rhs) = (params.shape(), Shape::from(self.layout.len()));
        if lhs.len() != rhs.len() {
            return Err(TensorError::ShapeMismatch { op: "store", lhs, rhs }.into());
        }
        let values = params.to_vec::<f32>()?;
        weights::write(folder, &self.spec, options, |index, _, out| {
            out.copy_from_slice(&values[self.layout.params()[index].range()]);
            Ok(())
        })
    }
}
