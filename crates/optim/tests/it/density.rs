//! Tests of the density warm-up: each stage uses its codec with the state of the stage before it, and a run can
//! resume from any round.
#![cfg(feature = "sync")]
#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

use std::sync::LazyLock;
use std::thread;

use farflung_base::{Algorithm, Philox, Rank};
use farflung_comm::{Communicator, memory};
use farflung_compress::{CodecSpec, Compressor, Payload, RoundKey, StateMap};
use farflung_optim::{Average, AverageConfig};
use farflung_tensor::{Device, ParamLayout, Shape, Tensor};

static CPU: LazyLock<Device> = LazyLock::new(|| Device::cpu(1).unwrap());

const RANKS: usize = 3;
const ROUNDS: u64 = 14;
/// Number of rounds that are sent uncompressed; `FALLING` is that of rounds with a falling density.
const WARM: u64 = 2;
const FALLING: u64 = 7;
/// Shares in the rounds after the first two, for a codec that keeps 1 %: three stages over seven rounds, then 1
/// %.
const SHARES: [&str; 12] = [
    "0.25", "0.25", "0.25", "0.0625", "0.0625", "0.015625", "0.015625", "0.01", "0.01", "0.01", "0.01",
    "0.01",
];

fn layout() -> ParamLayout {
    ParamLayout::new([("w".to_owned(), Shape::from([32, 64]))])
}

fn values(rank: usize, round: u64) -> Vec<f32> {
    let draw = Philox::new(100 * round + rank as u64, 0);
    (0..layout().len()).map(|i| 2.0 * draw.uniform(i as u64) - 1.0).collect()
}

fn flat(values: &[f32]) -> Tensor {
    CPU.tensor(values, values.len()).unwrap()
}

fn average(comm: Communicator, codec: &str) -> Average {
    let config = AverageConfig {
        codec: codec.parse().unwrap(),
        algorithm: Algorithm::AllGather,
        warmup: WARM,
        density_warmup: FALLING,
        ..AverageConfig::default()
    };
    Average::new(comm, &CPU, &layout(), config).unwrap()
}

fn on_ranks<T: Send>(rank: impl Fn(Communicator) -> T + Sync) -> Vec<T> {
    thread::scope(|scope| {
        let rank = &rank;
        let ranks: Vec<_> = memory::cluster(RANKS)
            .into_iter()
            .map(|endpoint| scope.spawn(move || rank(Communicator::new(endpoint))))
            .collect();
        ranks.into_iter().map(|r| r.join().unwrap()).collect()
    })
}

/// Returns the means of each round. With `cut`, the average is replaced by one with its saved state after that
/// round. Before each round, another one is rolled back.
fn trace(comm: &Communicator, codec: &str, cut: Option<u64>) -> Vec<Vec<u32>> {
    let mut it = average(comm.clone(), codec);
    let mut seen = Vec::new();
    for round in 0..ROUNDS {
        let mut mean = flat(&values(comm.rank().index(), round));
        it.all(&mut flat(&values(comm.rank().index(), 99))).unwrap();
        it.rollback();
        it.all(&mut mean).unwrap();
        it.commit();
        seen.push(mean.to_vec::<f32>().unwrap().into_iter().map(f32::to_bits).collect());
        if cut == Some(round) {
            let saved = it.save("x.").unwrap();
            it = average(comm.clone(), codec);
            let get = |name: &str| saved.iter().find(|(n, _)| n == name).map(|(_, v)| v.as_slice());
            it.restore("x.", round + 1, get).unwrap();
        }
    }
    seen
}

/// Computes the means with codecs alone. Each stage's codec loads the state of the stage before it.
fn written_out(codec: &str) -> Vec<Vec<u32>> {
    let mut codecs: Vec<Box<dyn Compressor>> = Vec::new();
    let mut rounds = Vec::new();
    for round in 0..ROUNDS {
        let mut sum = vec![0.0_f32; layout().len()];
        let share = SHARES.get((round - WARM.min(round)) as usize).unwrap();
        let spec: CodecSpec = codec.replace("0.01", share).parse().unwrap();
        let next = (0..RANKS).map(|rank| {
            let mut next = spec.build();
            let mut state = StateMap::new();
            if let Some(last) = codecs.get(rank) {
                last.save("", &mut state).unwrap();
                next.load("", &mut state).unwrap();
            }
            next
        });
        codecs = next.collect();
        for (rank, codec) in codecs.iter_mut().enumerate() {
            let x = values(rank, round);
            let mut decoded = x.clone();
            if round >= WARM {
                let key = RoundKey { seed: 0, round, shard: 0, rank: Rank(rank as u32) };
                let mut payload = Payload::new();
                codec.compress(&x, key, &mut payload).unwrap();
                codec.decompress(payload.view(), &mut decoded).unwrap();
                codec.commit();
            }
            sum.iter_mut().zip(&decoded).for_each(|(s, d)| *s += d);
        }
        if round >= WARM {
            rounds.push(sum.iter().map(|s| (s * (1.0 / RANKS as f32)).to_bits()).collect());
        }
    }
    rounds
}

#[test]
fn each_stage_has_the_bits_of_its_codec_with_what_the_one_before_remembered() {
    for codec in ["topk:0.01+ef", "dgc:0.01", "topk:0.01/int8+ef"] {
        let wanted = written_out(codec);
        let whole = on_ranks(|comm| trace(&comm, codec, None));
        assert!(whole.windows(2).all(|pair| pair[0] == pair[1]), "{codec}");
        assert!(whole[0][WARM as usize..] == wanted, "{codec}");
        for cut in 0..ROUNDS {
            assert!(on_ranks(|comm| trace(&comm, codec, Some(cut))) == whole, "{codec} cut after {cut}");
        }
    }
}
