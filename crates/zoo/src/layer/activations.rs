//! What a block keeps of a forward pass for its backward pass: tensors by name. Recomputation, offloading and
//! counts of memory iterate over them, whatever the block is.

use farflung_tensor::Tensor;

use super::routing::Routed;

/// Whether a forward pass keeps what a backward pass needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keep {
    /// A backward pass follows.
    All,
    /// None follows: evaluation and decoding.
    Nothing,
}

/// Names of the tensors that blocks keep.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kept {
    /// Input of the block.
    Input,
    /// Statistics of the norm before attention.
    AttentionStats,
    /// Its output.
    AttentionNormed,
    /// Queries, keys and values.
    Qkv,
    /// Queries before their norm.
    Queries,
    /// Statistics of that norm.
    QueryStats,
    /// Keys before their norm.
    Keys,
    /// Statistics of that norm.
    KeyStats,
    /// Log-sum-exps of the scores.
    LogSumExp,
    /// Output of attention, before its last matrix.
    Attended,
    /// Where ranks exchange positions for heads: the same of this rank's heads.
    ByHeads,
    /// Sum of the input and of attention.
    Middle,
    /// Statistics of the norm before the feed-forward network.
    MlpStats,
    /// Its output.
    MlpNormed,
    /// Derivative of the activation at its input.
    Slope,
    /// Input of the last matrix of the feed-forward network.
    Activated,
    /// Input of the gate's activation; after the first half of the backward pass, its gradient.
    Gate,
    /// Factor of the gate; after the first half of the backward pass, its gradient.
    Up,
    /// Gradient of the block's output, for the second half of the backward pass, as all that follow.
    OutputGrad,
    /// Gradient of the input of the activation.
    UpGrad,
    /// Gradient of [`Kept::MlpNormed`].
    MlpNormedGrad,
    /// Gradient of [`Kept::Middle`].
    MiddleGrad,
    /// Gradient of [`Kept::Qkv`].
    QkvGrad,
    /// Gradient of the queries.
    QueryGrad,
    /// Gradient of the keys.
    KeyGrad,
    /// Gradient of the values.
    ValueGrad,
    /// Gradient of the queries after their norm.
    QueryNormedGrad,
    /// Gradient of the keys after their norm.
    KeyNormedGrad,
    /// Gradient of [`Kept::AttentionNormed`].
    AttentionNormedGrad,
    /// Logits of the router of experts.
    RouterLogits,
    /// Outputs of experts, before their sum.
    ExpertOutputs,
    /// Tokens of this rank's experts, by expert, where ranks divide the experts.
    ExpertInputs,
    /// Number of tokens that each rank has sent to each of this rank's experts.
    ArrivedCounts,
    /// Gradient of [`Kept::RouterLogits`].
    RouterGrad,
    /// Gradient of [`Kept::ExpertOutputs`].
    ExpertOutputGrad,
}

const KEPT: &str = "an earlier pass of the block kept the tensor";

/// The tensors that a block keeps between the passes of a microbatch.
#[derive(Debug)]
pub struct Activations {
    keep: Keep,
    tensors: Vec<(Kept, Tensor)>,
    /// What the forward pass told of its router.
    pub(crate) routed: Option<Routed>,
}

impl Activations {
    /// An empty set.
    #[must_use]
    pub const fn new(keep: Keep) -> Self {
        Self { keep, tensors: Vec::new(), routed: None }
    }

    /// Returns whether tensors are kept.
    #[must_use]
    pub fn keeps(&self) -> bool {
        self.keep == Keep::All
    }

    /// Keeps a tensor, or drops it if nothing is kept.
    pub fn put(&mut self, name: Kept, tensor: Tensor) {
        if self.keeps() {
            self.tensors.push((name, tensor));
        }
    }

    /// Returns a tensor, if it is kept.
    #[must_use]
    pub fn find(&self, name: Kept) -> Option<&Tensor> {
        self.tensors.iter().find(|(kept, _)| *kept == name).map(|(_, tensor)| tensor)
    }

    /// Returns a tensor.
    ///
    /// # Panics
    /// If the passes of the block are not called in their order.
    #[must_use]
    pub fn get(&self, name: Kept) -> &Tensor {
        self.find(name).expect(KEPT)
    }

    /// Removes a tensor.
    ///
    /// # Panics
    /// As [`Activations::get`].
    pub fn take(&mut self, name: Kept) -> Tensor {
        let at = self.tensors.iter().position(|(kept, _)| *kept == name);
        self.tensors.swap_remove(at.expect(KEPT)).1
    }

    /// Returns what the router of the block chose, if it has one and this is a forward pass that was just run.
    #[must_use]
    pub const fn routed(&self) -> Option<&Routed> {
        self.routed.as_ref()
    }

    /// Returns the names and tensors.
    pub fn iter(&self) -> impl Iterator<Item = (Kept, &Tensor)> {
        self.tensors.iter().map(|(name, tensor)| (*name, tensor))
    }
}

impl IntoIterator for Activations {
    type Item = (Kept, Tensor);
    type IntoIter = std::vec::IntoIter<(Kept, Tensor)>;

    fn into_iter(self) -> Self::IntoIter {
        self.tensors.into_iter()
    }
}

impl FromIterator<(Kept, Tensor)> for Activations {
    fn from_iter<I: IntoIterator<Item = (Kept, Tensor)>>(tensors: I) -> Self {
        Self { keep: Keep::All, tensors: tensors.into_iter().collect(), routed: None }
    }
}
