//! The time that an average takes, as a function that the caller passes in. This crate does not compute the
//! time of a collective itself: `farflung-comm` computes it from the lists of steps that it runs, and
//! `farflung` passes that function on.

use farflung_base::{Algorithm, Bytes, Nanos};

use crate::Codec;

/// Returns the time that all ranks take to average this number of values, encoded by this codec, with this
/// algorithm. `None` if the algorithm does not support the codec or must not be considered.
pub type AllReduceTime<'a> = &'a dyn Fn(Algorithm, &Codec, u64) -> Option<Nanos>;

/// Returns the bytes that each rank sends in a ring all-reduce of `bytes` over `n` ranks: 2(n-1)/n of them,
/// rounded up. In any algorithm, ranks send at least this number of bytes on average.
#[must_use]
pub fn all_reduce_bytes(n: u32, bytes: Bytes) -> Bytes {
    let n = u64::from(n.max(1));
    let sent = (u128::from(bytes.0) * u128::from(2 * (n - 1))).div_ceil(u128::from(n));
    Bytes(u64::try_from(sent).unwrap_or(u64::MAX))
}

#[cfg(test)]
pub(crate) mod closed_forms {
    //! Times of averages for tests: `n` ranks, every pair joined by the same link, in the alpha-beta model.
    //!
    //! Source: Thakur et al. 2005, "Optimization of collective communication operations in MPICH"; Patarasuk
    //! and Yuan 2009.

    use farflung_base::Link;

    use super::*;

    /// Returns the times of a ring, of recursive halving and doubling (for a power of two of ranks), and of a
    /// direct exchange of equal shards (for all codecs).
    pub(crate) fn price(n: u32, link: Link) -> impl Fn(Algorithm, &Codec, u64) -> Option<Nanos> {
        move |algorithm, codec, values| {
            let messages = match algorithm {
                Algorithm::Ring if *codec == Codec::F32 => 2 * (n - 1),
                Algorithm::HalvingDoubling if *codec == Codec::F32 && n.is_power_of_two() => 2 * n.ilog2(),
                Algorithm::Direct if *codec != Codec::F32 => 2,
                _ => return None,
            };
            let latency = Nanos(link.latency.0 * u64::from(messages));
            let bytes = all_reduce_bytes(n, codec.bytes(values));
            Some(latency.saturating_add(link.bandwidth.transfer(bytes)))
        }
    }

    #[test]
    fn the_table_of_the_facts() {
        // 8 ranks on links of 1 Gbit/s and 10 ms.
        let price = price(8, "1gbit,10ms".parse().unwrap());
        for (values, ring, halving) in
            [(250, 0.140, 0.060), (250_000, 0.154, 0.074), (25_000_000, 1.54, 1.46)]
        {
            for (algorithm, want) in [(Algorithm::Ring, ring), (Algorithm::HalvingDoubling, halving)] {
                let time = price(algorithm, &Codec::F32, values).unwrap().as_secs_f64();
                assert!((time - want).abs() < 0.005 * f64::max(want, 0.1), "{algorithm}: {time}");
            }
        }
        assert_eq!(all_reduce_bytes(4, Bytes(1 << 22)), Bytes(6_291_456));
    }
}
