//! The memory of a model of any family: its parameters counted, and what its layers keep when each runs once on
//! a device that only counts.

use std::collections::BTreeMap;

use farflung::Result;
use farflung::parallel::memory::{Degrees, Footprint, StateBytes, ZeroStage, fewest_devices};
use farflung::zoo::profile::{LayerProfile, ModelProfile};
use farflung::zoo::{AxisShare, ModelSpec};

use super::{Asked, Row};

/// What layers keep.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kept {
    All,
    /// Only each layer's input.
    Inputs,
}

impl Kept {
    const ALL: [Self; 2] = [Self::All, Self::Inputs];

    const fn name(self) -> &'static str {
        match self {
            Self::All => "all that layers keep",
            Self::Inputs => "full recompute",
        }
    }
}

/// The profile of a rank's piece, by the number of ranks that divide the width.
type Profiles = BTreeMap<u64, ModelProfile>;

/// Returns the estimates of a model.
///
/// Errors: those of [`ModelProfile::of_share`].
pub(super) fn rows(spec: &ModelSpec, asked: Asked) -> Result<Vec<Row>> {
    let units = spec.each_block().map(|block| block.attention.heads.kv).min().unwrap_or(1) as u64;
    let tensors = (0..7).map(|power| 1 << power).filter(|&ranks| units.is_multiple_of(ranks));
    let mut profiles = Profiles::new();
    let experts = AxisShare::new(0, vec![1; asked.experts as usize])?;
    for ranks in tensors.chain([asked.degrees.tensor]) {
        let share = AxisShare::new(0, vec![1; ranks as usize])?;
        profiles.insert(ranks, ModelProfile::of_shares(spec, [&share, &experts])?);
    }
    let layers = spec.layers() as u64;
    let row = |zero: ZeroStage, kept: Kept| {
        let fits = |degrees: Degrees| {
            let alone = Asked { degrees, batch: 1, microbatches: u64::MAX, ..asked };
            footprint(&profiles, alone, zero, kept).total() <= asked.memory.0 as f64
        };
        Row {
            zero,
            method: kept.name(),
            repeated: if kept == Kept::Inputs { repeated(&profiles[&1]) } else { 0.0 },
            held: footprint(&profiles, asked, zero, kept),
            fewest: fewest_devices((layers, asked.most_tensor), (units, asked.experts), zero, fits),
        }
    };
    Ok(ZeroStage::ALL.into_iter().flat_map(|zero| Kept::ALL.map(|kept| row(zero, kept))).collect())
}

/// Returns the memory of a rank of the first stage under 1F1B. With a single stage it has the head, too.
fn footprint(profiles: &Profiles, asked: Asked, zero: ZeroStage, kept: Kept) -> Footprint {
    let Asked { degrees, each, batch, microbatches, .. } = asked;
    let profile = &profiles[&degrees.tensor];
    let count = (profile.layers() as u64).div_ceil(degrees.pipeline.max(1)) as usize;
    let blocks = || profile.each_block().take(count);
    let is_alone = degrees.pipeline <= 1;
    let sum = |of: fn(&LayerProfile) -> u64| blocks().map(of).sum::<u64>();
    let head = if is_alone { profile.head.parameters } else { 0 };
    let parameters = profile.embedding.parameters + sum(|block| block.parameters) + head;
    // Experts are copied in one replica of each group that divides them.
    let experts = sum(|block| block.experts);
    let state = StateBytes::new((parameters - experts) as f64, each, zero, degrees.data, false)
        + StateBytes::new(experts as f64, each, zero, degrees.data / asked.experts, false);
    let held = degrees.pipeline.max(1).min(microbatches.max(1));
    let of_blocks = match kept {
        Kept::All => sum(|block| block.saved) * held,
        // The layer that is being recomputed keeps all.
        Kept::Inputs => {
            let most = blocks().map(|block| block.saved).max().unwrap_or(0);
            profile.hidden * count as u64 * held + most
        }
    };
    let of_head = if is_alone { profile.head.saved + profile.head.logits } else { 0 };
    let activations = profile.embedding.saved * held + of_blocks + of_head;
    Footprint { state, activations: activations as f64 * batch as f64 }
}

/// Returns the operations of the forward passes of all blocks, as a fraction of those of a step with them.
fn repeated(profile: &ModelProfile) -> f64 {
    let of = |layer: &LayerProfile| layer.products_per_token(profile.context).iter().sum::<u64>() as f64;
    let blocks: f64 = profile.each_block().map(of).sum();
    blocks / (3.0 * (blocks + of(&profile.head)))
}
