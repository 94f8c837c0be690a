//! Tests of the state of a part on disk, in several pieces.

use farflung_optim::transform::{scale_by_adam, scale_by_schedule};
use farflung_optim::{LrSchedule, Prepared};
use farflung_tensor::{Shape, Tensor};

use super::*;

fn adam() -> ChainBuilder {
    farflung_optim::Chain::new()
        .then(scale_by_adam(0.9, 0.95, 1e-8))
        .then(scale_by_schedule(LrSchedule::constant(0.01)))
}

fn layout() -> ParamLayout {
    ParamLayout::new([("a".to_owned(), Shape::from([50, 70])), ("b".to_owned(), Shape::from(900))])
}

fn values(seed: usize) -> Vec<f32> {
    (0..layout().len()).map(|i| ((seed * 7919 + i * 104_729) % 1013) as f32 / 997.0 - 0.5).collect()
}

fn step(disk: &DiskState, chain: &mut farflung_optim::Chain, params: &mut Tensor, number: u64) {
    let grads = params.device().tensor(&values(number as usize), layout().len()).unwrap();
    disk.begin(number);
    chain.commit(params, &grads, Prepared::with_norm(1.0).unwrap()).unwrap();
    disk.commit(number.to_string().into_bytes(), params).unwrap();
}

/// Moments and parameters of a shard are read in any ranges, over the borders of pieces, and continue.
#[test]
fn states_are_read_in_ranges_and_continued() {
    let (dir, cpu, layout) = (tempfile::tempdir().unwrap(), Device::cpu(1).unwrap(), layout());
    let path = dir.path().join("state");
    for shard in [0..layout.len(), 1024..layout.len()] {
        let _ = std::fs::remove_file(&path);
        let make = || {
            let disk = DiskState::of_pieces(&adam(), &cpu, &layout, &shard.clone().into(), 1000).unwrap();
            let chain = adam().build_stored(&cpu, &layout, shard.clone().into(), disk.stored()).unwrap();
            (disk, chain)
        };
        let mut held = adam().build_shard(&cpu, &layout, shard.clone()).unwrap();
        let [mut params, mut expected] = [(); 2].map(|()| cpu.tensor(&values(99), layout.len()).unwrap());
        {
            let (disk, mut chain) = make();
            assert!(disk.pieces.len() >= 3 && !disk.is_started());
            assert_eq!(disk.open(&path).unwrap(), []);
            disk.start(None).unwrap();
            assert_eq!(disk.read(0, 5..20).unwrap(), [0.0; 15]);
            (1..=5).for_each(|number| step(&disk, &mut chain, &mut params, number));
            disk.wait().unwrap();
            let bytes = disk.pieces.iter().map(|piece| (4 * piece.len() as u64).next_multiple_of(4096));
            let (bytes, pieces) = (bytes.sum::<u64>(), disk.pieces.len() as u64);
            // Two states are read, and written with the parameters; each piece has a header.
            let (sizes, [read, written]) = (disk.sizes(), disk.moved());
            assert_eq!(sizes.read, 2 * bytes);
            assert_eq!(sizes.written, 3 * bytes + 4096 * pieces + 4096);
            // The first step reads nothing, and the parameters were not read at all.
            assert!(read >= 4 * sizes.read && read < 4 * sizes.read + (1 << 18), "{read} {sizes:?}");
            assert!(written >= 5 * sizes.written && written < 5 * sizes.written + (1 << 18), "{written}");
        }
        for number in 1..=5 {
            let grads = cpu.tensor(&values(number), layout.len()).unwrap();
            held.commit(&mut expected, &grads, Prepared::with_norm(1.0).unwrap()).unwrap();
        }
        let (disk, mut chain) = make();
        let found = disk.open(&path).unwrap();
        assert_eq!(found.iter().map(|one| one.number).collect::<Vec<_>>(), [5, 4]);
        assert_eq!(found[0].record, b"5");
        disk.check(5).unwrap();
        disk.start(Some(5)).unwrap();
        let states: Vec<Vec<f32>> = held.states().map(|(_, state)| state.to_vec().unwrap()).collect();
        let own = expected.to_vec::<f32>().unwrap()[shard.clone()].to_vec();
        for (array, all) in states.iter().chain([&own]).enumerate() {
            for range in [0..all.len(), 0..1, 999..1001, 500..2700, all.len() - 1..all.len()] {
                assert_eq!(disk.read(array, range.clone()).unwrap(), all[range.clone()], "{array} {range:?}");
            }
        }
        chain.resume_at(5);
        step(&disk, &mut chain, &mut params, 6);
        let grads = cpu.tensor(&values(6), layout.len()).unwrap();
        held.commit(&mut expected, &grads, Prepared::with_norm(1.0).unwrap()).unwrap();
        let after = [&params, &expected].map(|all| all.to_vec::<f32>().unwrap()[shard.clone()].to_vec());
        assert_eq!(after[0], after[1]);
    }
}

#[test]
fn a_whole_generation_is_written_from_elsewhere() {
    let (dir, cpu, layout) = (tempfile::tempdir().unwrap(), Device::cpu(1).unwrap(), layout());
    let disk = DiskState::of_pieces(&adam(), &cpu, &layout, &(0..layout.len()).into(), 1000).unwrap();
    disk.open(&dir.path().join("state")).unwrap();
    disk.start(None).unwrap();
    let fill = |array: usize, range: Range<usize>, into: &mut [f32]| {
        for (at, value) in range.zip(into) {
            *value = (array * 10_000 + at) as f32;
        }
        Ok(())
    };
    let mut params = cpu.tensor(&values(1), layout.len()).unwrap();
    disk.fill((7, b"seven".to_vec()), &params, fill).unwrap();
    assert_eq!(disk.read(1, 1990..2010).unwrap(), (11_990..12_010).map(|x| x as f32).collect::<Vec<_>>());
    assert_eq!(disk.read(2, 1990..2010).unwrap(), values(1)[1990..2010]);
    // The next step is 8.
    let mut chain = adam().build_stored(&cpu, &layout, (0..layout.len()).into(), disk.stored()).unwrap();
    chain.resume_at(7);
    step(&disk, &mut chain, &mut params, 8);
    disk.wait().unwrap();
    assert_eq!(disk.read(2, 0..layout.len()).unwrap(), params.to_vec::<f32>().unwrap());
}
