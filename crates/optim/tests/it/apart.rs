//! Tests of averages in which some parameters are averaged over fewer ranks than the others.
#![cfg(feature = "sync")]
#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

use std::thread;

use farflung_base::{Algorithm, Nanos};
use farflung_comm::{Communicator, memory};
use farflung_optim::{ApartHolders, Average, AverageConfig};
use farflung_tensor::{Device, ParamLayout, Shape};

/// Averages `[rank + 1; 12]` over four ranks; the second and fourth of four tensors over the ranks with the
/// same rest by `groups`, times a half. Returns the values of each rank, the tensors apart.
fn averaged(codec: &str, algorithm: Algorithm, groups: u32) -> Vec<[Vec<f32>; 4]> {
    let layout = ParamLayout::new(["a", "b", "c", "d"].map(|name| (name.to_owned(), Shape::from(64))));
    let rank = |comm: Communicator| {
        let cpu = Device::cpu(1).unwrap();
        let mine = comm.rank().0;
        let holders = vec![ApartHolders { comm: comm.split(mine % groups, mine).unwrap(), factor: 0.5 }];
        let config = AverageConfig {
            codec: codec.parse().unwrap(),
            algorithm,
            bucket_bytes: 100 * 4,
            apart: vec![vec![64..128, 192..256]],
            ..AverageConfig::default()
        };
        let mut average = Average::with_apart(comm, holders, &cpu, &layout, config).unwrap();
        let mut flat = cpu.tensor(&vec![mine as f32 + 1.0; layout.len()], layout.len()).unwrap();
        let mut averaging = average.begin();
        for start in [192, 128, 64, 0] {
            averaging.ready(start..start + 64, &flat).unwrap();
        }
        assert_eq!(averaging.finish(&mut flat).unwrap().elements, 256);
        average.commit();
        let values = flat.to_vec::<f32>().unwrap();
        [0, 64, 128, 192].map(|start| values[start..start + 64].to_vec())
    };
    on_four(rank)
}

/// Runs `rank` on four ranks.
fn on_four<T: Send>(rank: impl Fn(Communicator) -> T + Sync) -> Vec<T> {
    thread::scope(|scope| {
        let rank = &rank;
        let comms = memory::cluster(4).into_iter().map(|end| Communicator::new(end));
        let comms = comms.map(|comm| comm.with_deadline(Nanos::from_millis(20_000)));
        let ranks: Vec<_> = comms.map(|comm| scope.spawn(move || rank(comm))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

fn all_are(values: &[f32], expected: f32, within: f32) -> bool {
    values.iter().all(|value| (value - expected).abs() <= within)
}

#[test]
fn each_tensor_is_averaged_over_its_holders() {
    for (codec, algorithm) in
        [("none", Algorithm::Direct), ("f16", Algorithm::Direct), ("f16", Algorithm::Ring)]
    {
        for (rank, [a, b, c, d]) in averaged(codec, algorithm, 2).into_iter().enumerate() {
            // Ranks 0 and 2 have 1 and 3, ranks 1 and 3 have 2 and 4.
            let apart = if rank % 2 == 0 { 1.0 } else { 1.5 };
            for (values, expected) in [(a, 2.5), (b, apart), (c, 2.5), (d, apart)] {
                assert!(all_are(&values, expected, 0.0), "{codec}, rank {rank}: {values:?}, not {expected}");
            }
        }
    }
}

#[test]
fn what_one_rank_alone_holds_goes_through_no_codec() {
    for (rank, [a, b, _, d]) in averaged("sign", Algorithm::Direct, 4).into_iter().enumerate() {
        assert!(all_are(&a, 2.5, 0.5), "{a:?}");
        for values in [b, d] {
            assert!(all_are(&values, f32::midpoint(rank as f32, 1.0), 0.0), "rank {rank}: {values:?}");
        }
    }
}

#[test]
fn each_entry_has_holders_of_its_own() {
    // Two levels of two modules: ranks 0 and 1 have the same first module, ranks 0 and 2 the same second one.
    let layout = ParamLayout::new(["a", "b", "c"].map(|name| (name.to_owned(), Shape::from(64))));
    let of_rank = |comm: Communicator| {
        let cpu = Device::cpu(1).unwrap();
        let mine = comm.rank().0;
        let among = |color| ApartHolders { comm: comm.split(color, mine).unwrap(), factor: 1.0 };
        let holders = vec![among(mine / 2), among(mine % 2)];
        let config = AverageConfig {
            codec: "int8".parse().unwrap(),
            apart: vec![std::iter::once(64..128).collect(), std::iter::once(128..192).collect()],
            ..AverageConfig::default()
        };
        let mut average = Average::with_apart(comm, holders, &cpu, &layout, config).unwrap();
        let mut flat = cpu.tensor(&vec![(1 << mine) as f32; layout.len()], layout.len()).unwrap();
        assert_eq!(average.all(&mut flat).unwrap().buckets, 3);
        average.commit();
        let values = flat.to_vec::<f32>().unwrap();
        [0, 64, 128].map(|start| values[start..start + 64].to_vec())
    };
    let expected = [[3.75, 1.5, 2.5], [3.75, 1.5, 5.0], [3.75, 6.0, 2.5], [3.75, 6.0, 5.0]];
    for (ranks, expected) in on_four(of_rank).into_iter().zip(expected) {
        for (values, expected) in ranks.iter().zip(expected) {
            assert!(all_are(values, expected, 0.05 * expected), "{values:?}, not {expected}");
        }
    }
}
