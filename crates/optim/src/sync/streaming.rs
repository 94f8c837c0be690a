//! Streaming `DiLoCo`.

use super::{BufferSettings, Buffers, Delayed, DelayedSettings, IN_FLIGHT, Merge, SyncMethod};

/// Row of [`METHODS`](super::METHODS) for streaming `DiLoCo`: [`Delayed`] outer steps of fragments, which
/// replicas mix with their own parameters.
///
/// Source: Douillard et al. 2025, "Streaming `DiLoCo` with overlapping communication", Alg. 2. Differs: a
/// fragment is a run of neighbouring parameters with its share of all elements; in the paper it consists of
/// every n-th layer. After the last step all parameters are averaged once more.
pub const STREAMING: SyncMethod = SyncMethod {
    name: "streaming",
    summary: "as diloco, but in fragments, which are averaged while the next steps are computed and applied \
              --sync-delay steps later",
    each_step: false,
    reads: &["sync-every", "outer-lr", "outer-momentum", "fragments", "sync-delay", "mixing"],
    overlaps: true,
    replicas_differ: true,
    timed: false,
    every: None,
    codec: None,
    codes_server_changes: false,
    compensates: false,
    changing_weights: true,
    outer_momentum: None,
    on_member_loss: IN_FLIGHT,
    buffers: |&BufferSettings { momentum, .. }| {
        let momentum = usize::from(momentum != 0.0);
        // Held: anchor, momentum, their next values, delta, mean. Saved: the same without next values, and own
        // parameters.
        Buffers { held: 4 + 2 * momentum, saved: 4 + momentum }
    },
    build: |s| {
        let merge = Merge::Mix(s.mixing);
        let (every, fragments, delay) = (s.every, s.fragments, s.delay);
        let (outer_lr, outer_momentum) = (s.outer_lr, s.outer_momentum);
        let settings = DelayedSettings { every, fragments, delay, outer_lr, outer_momentum, merge };
        Ok(Box::new(Delayed::new(s, settings)?))
    },
};
