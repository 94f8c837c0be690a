//! `CocktailSGD`: averages that are applied one step after they were sent, with local steps if wanted.

use super::{Buffers, Delayed, DelayedSettings, IN_FLIGHT, Merge, SyncMethod};

/// Row of [`METHODS`](super::METHODS) for `CocktailSGD`. After each step, or after some local steps, a replica
/// sends its difference from the common model. The mean is applied one step later, so that the exchange
/// overlaps with the computation of a whole step.
///
/// Source: Wang et al. 2023, "`CocktailSGD`", Alg. 1, whose compressor is the codec `rolling:10/topk:0.2/int4`.
/// Differs: what the codec drops stays in its residual; in the paper it stays in the replica's parameters.
pub const COCKTAIL: SyncMethod = SyncMethod {
    name: "cocktail",
    summary: "parameters are averaged every --sync-every steps (1 by default), while the next one is computed; \
              the mean is applied one step later",
    each_step: false,
    reads: &["sync-every"],
    overlaps: true,
    replicas_differ: true,
    timed: false,
    every: Some(1),
    codec: Some("rolling:10/topk:0.2/int4"),
    codes_server_changes: false,
    compensates: false,
    changing_weights: true,
    outer_momentum: None,
    on_member_loss: IN_FLIGHT,
    // Held: anchor, next anchor, delta, mean. Saved: anchor, delta, mean, the replica's own parameters.
    buffers: |_| Buffers { held: 4, saved: 4 },
    build: |s| {
        let (fragments, delay, outer_lr, outer_momentum) = (1, 1, 1.0, 0.0);
        let (every, merge) = (s.every, Merge::Rebase);
        let settings = DelayedSettings { every, fragments, delay, outer_lr, outer_momentum, merge };
        Ok(Box::new(Delayed::new(s, settings)?))
    },
};
