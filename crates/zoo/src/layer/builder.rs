//! Makes the layers of a model in order and collects their tensors.

use std::ops::Range;
use std::sync::Arc;

use farflung_base::{AttentionPattern, Axis, TileLists};
use farflung_tensor::{Device, ParamLayout, Shape, Tensor, TileMask};

use super::rotary;
use super::vocabulary::VocabularyPiece;
use super::{Block, Embedding, Experts, Head, Result};
use crate::cut::{AxisShare, Cut};
use crate::naming::{HeadsInFiles, Slot};
use crate::spec::{BlockSpec, ExpertsSpec, HeadSpec, MlpSpec, ModelSpec, RotarySpec, Run};
use crate::tensor_spec::{ColumnOrder, Init, TensorKind, TensorSpec};

/// A layer of a model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum LayerKind<'a> {
    /// The first one.
    Embedding,
    /// A block.
    Block(&'a BlockSpec),
    /// The last one.
    Head,
}

/// Standard deviation of the initial weights.
const INIT_STD: f32 = 0.02;

/// Collects the tensors of the layers that are made with it. Tensors are counted over the whole model, also
/// those of layers that are not wanted.
#[derive(Debug)]
pub struct Builder {
    spec: ModelSpec,
    /// What this rank has of what is cut.
    share: AxisShare,
    /// What it has of the experts.
    experts: AxisShare,
    /// The block whose tensors are added; `None` outside of blocks.
    block: Option<usize>,
    /// Number of tensors so far.
    next: usize,
    wanted: bool,
    specs: Vec<(usize, TensorSpec)>,
    /// Rotation angles for which tables were made.
    tables: Vec<(RotarySpec, Arc<Tensor>)>,
    /// Heads for which tiles were made.
    tiles: Vec<(TiledHeads, Arc<TileMask>)>,
    /// Where tables are made; without a device, there are none.
    device: Option<Device>,
}

/// Heads of queries of a layer that have a pattern.
#[derive(Debug, PartialEq, Eq)]
struct TiledHeads {
    pattern: AttentionPattern,
    /// 0 if all layers have the same keys.
    layer: u32,
    heads: Range<u32>,
}

/// The layers of a stage.
#[derive(Debug, Clone, Default)]
pub(crate) struct Layers {
    pub(crate) embedding: Option<Embedding>,
    pub(crate) blocks: Vec<Block>,
    pub(crate) head: Option<Head>,
}

impl Builder {
    /// Starts before the first layer of a model.
    #[must_use]
    pub fn new(spec: &ModelSpec) -> Self {
        let (spec, share) = (spec.clone(), AxisShare::whole());
        Self {
            spec,
            share,
            experts: AxisShare::whole(),
            block: None,
            next: 0,
            wanted: true,
            specs: Vec::new(),
            tables: Vec::new(),
            tiles: Vec::new(),
            device: None,
        }
    }

    /// Makes one rank's piece of the layers, among the ranks that divide their width.
    #[must_use]
    pub fn share(self, share: AxisShare) -> Self {
        Self { share, ..self }
    }

    /// Makes one rank's part of the experts, among the ranks that divide them.
    #[must_use]
    pub fn experts_of(self, experts: AxisShare) -> Self {
        Self { experts, ..self }
    }

    /// Returns which of `count` experts each rank has, and this rank's number among them.
    pub(super) fn expert_ranges(&self, count: usize) -> (Vec<Range<usize>>, usize) {
        (self.experts.all().map(|rank| rank.of(count)).collect(), self.experts.rank())
    }

    /// Runs `add` with tensors that are not this rank's if `own` is false: they are counted alone.
    pub(super) fn only_if<T>(&mut self, own: bool, add: impl FnOnce(&mut Self) -> T) -> T {
        let wanted = self.wanted;
        self.wanted &= own;
        let added = add(self);
        self.wanted = wanted;
        added
    }

    /// Returns the order of heads in files.
    pub(super) const fn heads_in_files(&self) -> HeadsInFiles {
        self.spec.names.heads
    }

    /// Returns which of `units` units of a layer the rank has.
    pub(super) fn units(&self, units: usize) -> Range<usize> {
        self.share.of(units)
    }

    /// Makes tables of rotation angles on a device.
    #[must_use]
    pub fn on(self, device: &Device) -> Self {
        Self { device: Some(device.clone()), ..self }
    }

    /// Returns the tensors of the wanted layers, each with its index in the whole model.
    #[must_use]
    pub fn into_specs(self) -> Vec<(usize, TensorSpec)> {
        self.specs
    }

    /// Returns the layout of the tensors so far.
    pub fn layout(&self) -> Result<ParamLayout> {
        let named =
            |(_, s): &(usize, TensorSpec)| Ok((s.name.clone(), Shape::new(&s.shape_of(&self.share))?));
        Ok(ParamLayout::new(self.specs.iter().map(named).collect::<Result<Vec<_>>>()?))
    }

    /// Returns this rank's piece of the vocabulary, if ranks divide it.
    pub(super) fn piece_of_vocabulary(&self, vocab: usize) -> Option<VocabularyPiece> {
        (self.share.ranks() > 1).then(|| VocabularyPiece::of(&self.share, vocab))
    }

    /// Adds a tensor with a row or a value for each token, and returns its index among those of the wanted
    /// layers. Ranks divide the tokens.
    pub(super) fn vocabulary_tensor(&mut self, slot: Slot, kind: TensorKind, shape: &[usize]) -> usize {
        let cut = Cut::Along { axis: Axis::Tensor, dim: 0, units: shape[0], sections: vec![shape[0]] };
        self.cut_tensor((slot, kind), shape, cut, ColumnOrder::AsInMemory)
    }

    /// Adds a tensor that every rank has whole, and returns its index among those of the wanted layers.
    pub(super) fn tensor(&mut self, slot: Slot, kind: TensorKind, shape: &[usize]) -> usize {
        self.cut_tensor((slot, kind), shape, Cut::Whole, ColumnOrder::AsInMemory)
    }

    /// Adds a tensor and returns its index among those of the wanted layers. `shape` is that of the whole
    /// tensor, `columns` the order of its last dimension in files.
    pub(super) fn cut_tensor(
        &mut self,
        (slot, kind): (Slot, TensorKind),
        shape: &[usize],
        cut: Cut,
        columns: ColumnOrder,
    ) -> usize {
        let index = self.specs.len();
        if self.wanted {
            let name = self.spec.names.of(self.block, slot, kind);
            let init = match kind {
                TensorKind::Bias => Init::Zeros,
                TensorKind::Gain => Init::Ones,
                TensorKind::Table => Init::Normal(INIT_STD),
                TensorKind::Matrix | TensorKind::Router | TensorKind::Expert => Init::Normal(match slot {
                    Slot::AttentionOut | Slot::Down | Slot::ExpertDown(_) => {
                        (f64::from(INIT_STD) / (2.0 * self.spec.layers() as f64).sqrt()) as f32
                    }
                    _ => INIT_STD,
                }),
            };
            self.specs
                .push((self.next, TensorSpec { name, kind, shape: shape.to_vec(), cut, columns, init }));
        }
        self.next += 1;
        index
    }

    /// Returns the table of rotation angles of a model's positions, `[context, width]`. `None` without a
    /// device.
    pub(super) fn rotary(&mut self, rotary: &RotarySpec) -> Result<Option<Arc<Tensor>>> {
        let Some(device) = self.device.as_ref().filter(|_| self.wanted) else { return Ok(None) };
        if let Some((_, table)) = self.tables.iter().find(|(known, _)| known == rotary) {
            return Ok(Some(Arc::clone(table)));
        }
        let values = rotary::table(rotary, self.spec.context);
        let table = Arc::new(device.tensor(&values, [self.spec.context, rotary.width])?);
        self.tables.push((*rotary, Arc::clone(&table)));
        Ok(Some(table))
    }

    /// Returns the tiles of a pattern for some heads of the block, of sequences of a model's context. `None`
    /// without a device, and if the keys of each query are one range.
    pub(super) fn tiles(
        &mut self,
        pattern: AttentionPattern,
        heads: Range<u32>,
    ) -> Result<Option<Arc<TileMask>>> {
        let Some(device) = self.device.as_ref().filter(|_| self.wanted && !pattern.is_one_range()) else {
            return Ok(None);
        };
        let layer = self.block.filter(|_| pattern.differs_by_layer()).unwrap_or(0) as u32;
        let of = TiledHeads { pattern, layer, heads: heads.clone() };
        if let Some((_, tiles)) = self.tiles.iter().find(|(known, _)| *known == of) {
            return Ok(Some(Arc::clone(tiles)));
        }
        let lists = TileLists::new(pattern, layer, heads, self.spec.context, TileMask::TILE);
        let tiles = Arc::new(TileMask::new(device, &lists)?);
        self.tiles.push((of, Arc::clone(&tiles)));
        Ok(Some(tiles))
    }

    /// Makes one layer by itself. A tied head has no table then.
    pub(crate) fn layer(&mut self, spec: &ModelSpec, layer: LayerKind<'_>) -> Result<()> {
        match layer {
            LayerKind::Embedding => drop(self.embedding(spec)),
            LayerKind::Block(block) => drop(self.block(spec, block)?),
            LayerKind::Head => drop(Head::new(self, spec, None)),
        }
        Ok(())
    }

    /// Makes the embedding by itself.
    pub fn embedding(&mut self, spec: &ModelSpec) -> Embedding {
        let table = Embedding::table(self, spec);
        Embedding::new(self, spec, table)
    }

    /// Makes a block by itself.
    pub fn block(&mut self, spec: &ModelSpec, block: &BlockSpec) -> Result<Block> {
        self.block = Some(0);
        Block::new(self, spec.dim, block)
    }

    /// Makes a mixture of experts by itself.
    pub fn experts(&mut self, dim: usize, mlp: &MlpSpec, experts: &ExpertsSpec) -> Experts {
        self.block = Some(0);
        Experts::new(self, dim, mlp, experts)
    }

    /// Makes the head by itself, with the token table if it is tied.
    pub fn head(&mut self, spec: &ModelSpec) -> Head {
        let tied = (spec.head == HeadSpec::Tied).then(|| Embedding::table(self, spec));
        Head::new(self, spec, tied)
    }

    /// Makes the layers of a whole model. `wanted` says of each block whether it is made; the embedding belongs
    /// to the first block, the head to the last.
    pub(crate) fn model(&mut self, spec: &ModelSpec, wanted: impl Fn(usize) -> bool) -> Result<Layers> {
        let (first, last) = (wanted(0), wanted(spec.layers() - 1));
        let mut layers = Layers::default();
        // A tied head needs the token table, which is the first tensor.
        let tied = spec.head == HeadSpec::Tied;
        self.wanted = first || (last && tied);
        let table = Embedding::table(self, spec);
        self.wanted = first;
        let embedding = Embedding::new(self, spec, table);
        layers.embedding = first.then_some(embedding);
        for (at, block) in spec.each_block().enumerate() {
            (self.block, self.wanted) = (Some(at), wanted(at));
            let made = Block::new(self, spec.dim, block)?;
            if self.wanted {
                layers.blocks.push(made);
            }
        }
        (self.block, self.wanted) = (None, last);
        let head = Head::new(self, spec, tied.then_some(table));
        layers.head = last.then_some(head);
        Ok(layers)
    }
}

impl ModelSpec {
    /// Returns all tensors of the model, with the names that its family gives them.
    ///
    /// The order is that of the layers; the initial values of a tensor depend on its place in this order.
    /// Initial values are those of nanoGPT: weights N(0, 0.02), projections onto the residual stream N(0, 0.02
    /// / sqrt(2 L)), biases 0, gains of norms 1 and their biases 0.
    ///
    /// # Panics
    /// If the description is not valid ([`ModelSpec::validate`]).
    #[must_use]
    pub fn tensors(&self) -> Vec<TensorSpec> {
        let mut builder = Builder::new(self);
        builder.model(self, |_| true).expect("without a device, no tensor is made");
        builder.into_specs().into_iter().map(|(_, spec)| spec).collect()
    }

    /// Returns the number of parameters of one layer. A tied head has only its norm.
    #[must_use]
    pub fn parameters_of(&self, layer: LayerKind<'_>) -> u64 {
        let mut builder = Builder::new(self);
        builder.layer(self, layer).expect("without a device, no tensor is made");
        builder.into_specs().iter().map(|(_, spec)| spec.count() as u64).sum()
    }

    /// Returns the number of parameters that a token meets: of each mixture of experts only as many experts as
    /// a token has.
    #[must_use]
    pub fn active_parameters(&self) -> u64 {
        let unused = |run: &Run| {
            let Some(experts) = &run.block.experts else { return 0 };
            let mut builder = Builder::new(self);
            builder.layer(self, LayerKind::Block(&run.block)).expect("without a device, no tensor is made");
            let all = builder.into_specs().into_iter().filter(|(_, spec)| spec.kind == TensorKind::Expert);
            let all: u64 = all.map(|(_, spec)| spec.count() as u64).sum();
            let (count, used) = (experts.count as u64, experts.per_token as u64);
            run.count as u64 * (all / count * (count - used))
        };
        self.parameters() - self.blocks.iter().map(unused).sum::<u64>()
    }

    /// Returns the exact number of parameters, with a tied head counted once.
    #[must_use]
    pub fn parameters(&self) -> u64 {
        let of = |kind: LayerKind<'_>| self.parameters_of(kind);
        let blocks: u64 =
            self.blocks.iter().map(|run| run.count as u64 * of(LayerKind::Block(&run.block))).sum();
        of(LayerKind::Embedding) + blocks + of(LayerKind::Head)
    }
}
