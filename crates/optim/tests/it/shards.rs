//! Tests of shards: each rank gets the mean of what it updates, updates that, and sends it to the others.
#![cfg(feature = "sync")]
#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

use std::thread;

use farflung_base::Nanos;
use farflung_comm::{Communicator, memory};
use farflung_optim::local::{Averages, LocalMethod, METHODS};
use farflung_optim::{Average, AverageConfig, OptimError, Prepared, Shard, ShardReduction, Shards};
use farflung_tensor::{Device, Tensor};

use crate::small_chain::{chain, flat, layout};

/// Trains three steps on three ranks, each of which updates a shard. Returns the parameters of each, or an
/// error.
fn trained(row: &LocalMethod, lengths: Option<[usize; 3]>, bucket: usize) -> Vec<Vec<f32>> {
    let layout = layout();
    let rank = |comm: Communicator| {
        let cpu = Device::cpu(1).unwrap();
        let me = comm.rank().index();
        let shards = Shards::new(lengths.unwrap_or([layout.len(), 0, 0]));
        let own = shards.of(me).clone();
        let config =
            AverageConfig { bucket_bytes: bucket, shards: Some(shards.clone()), ..Default::default() };
        let mut average = Average::new(comm.clone(), &cpu, &layout, config).unwrap();
        let mut chain = chain(row).build_shard(&cpu, &layout, own.clone()).unwrap();
        assert!(chain.states().all(|(_, state)| state.shape().len() == own.len()));
        let mut params = flat(&cpu, 99);
        for step in 0..3 {
            let mut grads = flat(&cpu, 10 * step + me);
            average.all(&mut grads).unwrap();
            average.commit();
            let prepared = Prepared::with_norm(1.0).unwrap();
            chain.commit(&mut params, &grads, prepared).unwrap();
            shards.gather(&comm, &mut params, 100).unwrap();
        }
        params.to_vec::<f32>().unwrap()
    };
    on_three(rank)
}

/// Runs `rank` on three ranks.
fn on_three<T: Send>(rank: impl Fn(Communicator) -> T + Sync) -> Vec<T> {
    thread::scope(|scope| {
        let rank = &rank;
        let comms = memory::cluster(3).into_iter().map(|end| Communicator::new(end));
        let comms = comms.map(|comm| comm.with_deadline(Nanos::from_millis(20_000)));
        let ranks: Vec<_> = comms.map(|comm| scope.spawn(move || rank(comm))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Whoever updates what, all ranks have the bits of one rank that updates everything.
#[test]
fn the_bits_do_not_depend_on_who_updates_what() {
    let len = layout().len();
    for row in METHODS.iter().filter(|row| row.averages == Averages::Gradients) {
        let alone = trained(row, None, 1 << 20);
        let start = flat(&Device::cpu(1).unwrap(), 99).to_vec::<f32>().unwrap();
        assert!(alone[0].iter().all(|x| x.is_finite()) && alone[0] != start, "{}", row.name);
        let cuts: &[[usize; 3]] = if row.per_tensor {
            // The borders of tensors: 640 and 1472.
            &[[640, 832, len - 1472], [704, 0, len - 704]]
        } else {
            &[[640, 832, len - 1472], [0, 64, len - 64], [128, len - 128, 0]]
        };
        for &lengths in cuts {
            for bucket in [256, 1 << 20] {
                for (rank, params) in trained(row, Some(lengths), bucket).iter().enumerate() {
                    let same = params.iter().zip(&alone[0]).all(|(a, b)| a.to_bits() == b.to_bits());
                    assert!(same, "{}, {lengths:?}, buckets of {bucket}, rank {rank}", row.name);
                }
            }
        }
    }
}

/// Buffers that have the shard alone take the steps of whole ones.
#[test]
fn parameters_of_a_shard_take_the_steps_of_all() {
    let (cpu, layout) = (Device::cpu(1).unwrap(), layout());
    let shard = Shard::new([64..640, 704..1472]);
    let of_shard = |all: &Tensor| {
        let all = all.to_vec::<f32>().unwrap();
        let own: Vec<f32> = shard.ranges().iter().flat_map(|range| all[range.clone()].to_vec()).collect();
        cpu.tensor(&own, own.len()).unwrap()
    };
    for row in METHODS.iter().filter(|row| row.averages == Averages::Gradients && !row.per_tensor) {
        let mut whole = chain(row).build_shard(&cpu, &layout, shard.clone()).unwrap();
        let mut alone = chain(row).build_shard(&cpu, &layout, shard.clone()).unwrap();
        let mut params = flat(&cpu, 99);
        let mut own = of_shard(&params);
        for step in 0..3 {
            let grads = flat(&cpu, step);
            whole.commit(&mut params, &grads, Prepared::with_norm(1.0).unwrap()).unwrap();
            alone.commit(&mut own, &of_shard(&grads), Prepared::with_norm(1.0).unwrap()).unwrap();
        }
        assert_eq!(own.to_vec::<f32>().unwrap(), of_shard(&params).to_vec::<f32>().unwrap(), "{}", row.name);
    }
}

#[test]
fn what_cannot_be_updated_in_shards_is_refused() {
    let (cpu, layout) = (Device::cpu(1).unwrap(), layout());
    let refused = |name: &str, shard| {
        let row = METHODS.iter().find(|row| row.name == name).unwrap();
        chain(row).build_shard(&cpu, &layout, shard).unwrap_err().to_string()
    };
    assert!(refused("lamb", 0..128).contains("a border between tensors"));
    assert!(refused("onebit-adam", 0..640).contains("more than gradients is averaged"));
    let comm = Communicator::new(memory::cluster(1).remove(0));
    for (shards, codec, reason) in [
        (Shards::new([layout.len(), 0]), "none", "one for each rank"),
        (Shards::new([layout.len() - 1]), "none", "the elements of the layout"),
        (Shards::new([layout.len()]), "int8", "none with a codec"),
    ] {
        let config =
            AverageConfig { shards: Some(shards), codec: codec.parse().unwrap(), ..Default::default() };
        let error = Average::new(comm.clone(), &cpu, &layout, config).unwrap_err();
        assert!(matches!(error, OptimError::Setting { field: "shards", .. }), "{error}");
        assert!(error.to_string().contains(reason), "{error}");
    }
}

/// A rank on a GPU, whose buffers pass through the host in pieces, has what the others have.
#[cfg(feature = "wgpu")]
#[test]
fn a_rank_on_a_gpu_gets_and_sends_its_shard() {
    use farflung_tensor::Param;

    use crate::small_chain::value;

    let layout = layout();
    let shards = Shards::new([640, 0, layout.len() - 640]);
    let of_shard = |me: usize, all: &[f32]| -> Vec<f32> {
        shards.of(me).ranges().iter().flat_map(|range| all[range.clone()].to_vec()).collect()
    };
    let rank = |comm: Communicator| {
        let me = comm.rank().index();
        let device = if me == 2 { Device::wgpu(0).unwrap() } else { Device::cpu(1).unwrap() };
        let config = AverageConfig { bucket_bytes: 512, shards: Some(shards.clone()), ..Default::default() };
        let mut average = Average::new(comm.clone(), &device, &layout, config).unwrap();
        let mut grads = flat(&device, me);
        average.all(&mut grads).unwrap();
        average.commit();
        let own = of_shard(me, &grads.to_vec::<f32>().unwrap());
        shards.gather(&comm, &mut grads, 100).unwrap();
        (own, grads.to_vec::<f32>().unwrap())
    };
    let ranks = on_three(rank);
    let mean = |i: usize| (0..3).skip(1).fold(value(0, i), |sum, seed| sum + value(seed, i)) / 3.0;
    for (me, (own, all)) in ranks.iter().enumerate() {
        assert!(own.iter().zip(of_shard(me, all)).all(|(a, b)| a.to_bits() == b.to_bits()), "{me}");
        for i in layout.params().iter().flat_map(Param::range) {
            assert_eq!(all[i].to_bits(), mean(i).to_bits(), "{me} {i}");
        }
    }
}

/// Gradients of several rounds that each rank keeps for its shard alone are those of whole buffers, to the bit,
/// whatever the windows and the ranges are.
#[test]
fn sums_of_units_reach_their_owners() {
    let len = layout().len();
    let cuts = [
        Shards::new([0, len, 0]),
        Shards::new([640, 832, len - 1472]),
        Shards::of_all([vec![0..100, 700..900], vec![], vec![100..700, 900..len]].map(Shard::new).to_vec()),
    ];
    let units = [0..640, 640..1472, 1472..len];
    for (shards, most) in cuts.iter().flat_map(|cut| [7, 300, 1 << 20].map(|most| (cut, most))) {
        let ranks = on_three(|comm| {
            let cpu = Device::cpu(1).unwrap();
            let me = comm.rank().index();
            let own = shards.of(me).clone();
            let mut sums = flat(&cpu, 3);
            sums = cpu.tensor(&sums.to_vec::<f32>().unwrap()[..own.len()], own.len()).unwrap();
            let mut reduction = ShardReduction::new(comm, shards.clone(), most);
            for round in 0..2 {
                let grads = flat(&cpu, 10 * round + me).to_vec::<f32>().unwrap();
                for unit in units.iter().rev() {
                    let values = cpu.tensor(&grads[unit.clone()], unit.len()).unwrap();
                    reduction.start(unit.clone(), &values, round > 0, &mut sums).unwrap();
                }
            }
            reduction.finish(&mut sums).unwrap();
            (own, sums.to_vec::<f32>().unwrap())
        });
        let cpu = Device::cpu(1).unwrap();
        let all = |round: usize| [0, 1, 2].map(|me| flat(&cpu, 10 * round + me).to_vec::<f32>().unwrap());
        let mean = |[a, b, c]: &[Vec<f32>; 3], at: usize| (a[at] + b[at] + c[at]) / 3.0;
        let rounds = [all(0), all(1)];
        let mut seen = 0;
        for (own, sums) in ranks {
            for (at, sum) in own.ranges().iter().cloned().flatten().zip(sums) {
                let want = mean(&rounds[0], at) + mean(&rounds[1], at);
                assert_eq!(sum.to_bits(), want.to_bits(), "element {at}, windows of {most}");
                seen += 1;
            }
        }
        assert_eq!(seen, len);
    }
}
