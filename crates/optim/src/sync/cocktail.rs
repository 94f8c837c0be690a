//! The loop of `CocktailSGD`.

use super::{Buffers, Delayed, DelayedSettings, IN_FLIGHT, Merge, SyncMethod};

/// After each step the difference from the common model leaves, and its mean is taken up one step later: a
/// whole step's compute hides the exchange.
///
/// Source: Wang et al. 2023, "`CocktailSGD`", Alg. 1, whose compressor is the codec `rolling:10/topk:0.2/int4`.
/// Differs: what the codec dropped waits in its residual, where theirs stays in the copy's parameters.
pub const COCKTAIL: SyncMethod = SyncMethod {
    name: "cocktail",
    summary: "a mean of parameters at each step, taken up one step later, while the next is computed",
    each_step: false,
    reads: &[],
    overlaps: true,
    timed: false,
    every: Some(1),
    codec: Some("rolling:10/topk:0.2/int4"),
    codes_changes: false,
    compensates: false,
    outer_momentum: None,
    missing: IN_FLIGHT,
    // Anchor, what it becomes, delta, mean; saved with a copy's own parameters.
    buffers: |_| Buffers { held: 4, saved: 4 },
    build: |s| {
        let (every, fragments, delay, outer_lr, outer_momentum) = (1, 1, 1, 1.0, 0.0);
        let merge = Merge::Rebase;
        let settings = DelayedSettings { every, fragments, delay, outer_lr, outer_momentum, merge };
        Ok(Box::new(Delayed::new(s, settings)?))
    },
};
