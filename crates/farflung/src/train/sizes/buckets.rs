//! Memory that a rank needs to average a part of the model over its holders.

use farflung_comm::waiting_at_owner;
use farflung_compress::AverageSpec;
use farflung_optim::Shards;

/// Bytes of an f32.
const F32: u128 = size_of::<f32>() as u128;

/// Bytes that a rank holds for averages of a part.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(in crate::train) struct AverageBytes {
    /// Buckets of values to be sent.
    pub(in crate::train) buckets: u128,
    /// Peak bytes of messages in the host's memory.
    pub(in crate::train) messages: u128,
    /// State of codecs, before and after a step on which ranks have not agreed yet.
    pub(in crate::train) residuals: u128,
    /// Bytes of `residuals` in a checkpoint.
    pub(in crate::train) saved: u128,
}

/// Returns the bytes of messages on their way to other ranks, of values that `holders` ranks divide.
fn to_others(values: u128, holders: usize) -> u128 {
    let holders = holders.max(1) as u128;
    values / holders * (holders - 1)
}

/// Returns the bytes for a part of `model` bytes that `holders` ranks (two or more) average in buckets of at
/// most `bucket` bytes.
pub(in crate::train) fn averaging(
    codec: &AverageSpec,
    model: u128,
    holders: usize,
    bucket: usize,
) -> AverageBytes {
    let holders = holders.max(1) as u128;
    let share = model / holders;
    let Some(packs) = codec.codec().filter(|_| !codec.is_plain()) else {
        // The shards of two buckets are in flight to all others. Measured: up to three buckets if some ranks
        // are ahead of others.
        let messages = to_others(model.min(2 * bucket as u128), holders as usize);
        let plain = AverageBytes { buckets: model, messages, ..AverageBytes::default() };
        if codec.is_plain() {
            return plain;
        }
        // A protocol keeps three copies of its state in the host's memory: the committed, the latest and the
        // next one.
        return AverageBytes { residuals: model.saturating_mul(3), saved: model, ..plain };
    };
    let block = 4096_u128;
    let packed = packs.build().max_payload(block as usize) as u128;
    // Messages are sent and received, both for values and for means. Only a part of each is in memory at a
    // time.
    let messages = model.saturating_mul(packed) / (block * F32) * 3 / 2;
    let saved = if codec.feedback() { model.saturating_add(share) } else { 0 };
    AverageBytes { buckets: model.saturating_add(share), messages, residuals: saved.saturating_mul(2), saved }
}

/// Bytes of shards besides those of [`averaging`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::train) struct SharingBytes {
    /// Room for the sum of what the rank owns, and the contributions that came before others.
    pub(in crate::train) sums: u128,
    /// The windows in which it sends what it has updated and gets the rest, after the passes of a step, with
    /// their messages.
    pub(in crate::train) windows: u128,
}

/// Returns the bytes for a part of `model` bytes that `holders` ranks have, of which the rank updates `own`.
pub(in crate::train) fn sharing(model: u128, own: u128, holders: usize, bucket: usize) -> SharingBytes {
    let buckets = model.div_ceil((bucket as u128).max(1)).max(1);
    let of_bucket = usize::try_from(own / buckets / F32).unwrap_or(usize::MAX);
    // Its own contribution and the next one do not wait.
    let others = holders.saturating_sub(2) as u128;
    let waiting = waiting_at_owner(of_bucket) as u128 * F32 * buckets * others;
    let windows = model.min(Shards::IN_FLIGHT as u128 * bucket as u128);
    SharingBytes { sums: own + waiting, windows: windows + to_others(windows, holders) }
}

/// Returns the peak bytes of the windows in which `holders` ranks send each other the gradients of units of
/// at most `unit` bytes, in place of [`averaging`]: values, messages, the sum of what the rank owns
/// of them (`own` bytes of a part of `model`), and contributions that came before others.
pub(in crate::train) fn scattering(
    unit: u128,
    (own, model): (u128, u128),
    holders: usize,
    bucket: usize,
) -> u128 {
    let window = unit.min(bucket as u128);
    let owned = window.saturating_mul(own).div_ceil(model.max(1));
    let of_window = usize::try_from(owned / F32).unwrap_or(usize::MAX);
    let others = holders.saturating_sub(2) as u128;
    let waiting = waiting_at_owner(of_window) as u128 * F32 * others;
    Shards::IN_FLIGHT as u128 * (window + to_others(window, holders) + owned + waiting)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_averages_hold_their_buckets_and_codecs_their_residuals_twice() {
        let of = |codec: &str, holders| averaging(&codec.parse().unwrap(), 8000, holders, 4000);
        assert_eq!(of("none", 2), AverageBytes { buckets: 8000, messages: 4000, residuals: 0, saved: 0 });
        assert_eq!(of("none", 4).messages, 6000);
        let int8 = of("int8", 4);
        assert_eq!((int8.buckets, int8.messages < 4000), (10_000, true));
        let spec: AverageSpec = "int8".parse().unwrap();
        let fed_back = averaging(&spec.with_feedback(), 8000, 4, 4000);
        assert_eq!((fed_back.residuals, fed_back.saved), (20_000, 10_000));
    }
}
