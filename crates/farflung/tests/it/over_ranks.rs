//! The exchanges of layers over ranks, against sums and pieces of the tensors of all ranks.
#![expect(clippy::unwrap_used, reason = "a test fails where it panics")]

use std::sync::Arc;

use farflung::{Error, OverRanks};
use farflung_base::{Axis, Bytes, PeerId, Rank};
use farflung_comm::{Communicator, Transport, memory};
use farflung_tensor::{Device, Tensor};
use farflung_zoo::AxisShare;
use farflung_zoo::exchange::{Counted, Exchange, row_message_bytes};

const SHAPE: [usize; 3] = [2, 6, 4];

/// Returns the value of rank `rank` at a place.
fn value(rank: usize, at: [usize; 3]) -> f32 {
    (1000 * rank + 100 * at[0] + 10 * at[1] + at[2]) as f32
}

fn tensor(device: &Device, shape: [usize; 3], of: impl Fn([usize; 3]) -> f32) -> Tensor {
    let [a, b, c] = shape;
    let values: Vec<f32> =
        (0..a).flat_map(|i| (0..b).flat_map(move |j| (0..c).map(move |k| [i, j, k]))).map(of).collect();
    device.tensor(&values, shape).unwrap()
}

/// What a rank gets from each exchange, and the bytes that it sends in each.
type Results = Vec<(Vec<usize>, Vec<f32>, u64)>;

/// Runs all exchanges of a rank: its pieces have these lengths along the second dimension.
fn exchanged(over: &dyn Exchange, sent: &dyn Fn() -> u64, lengths: &[usize]) -> Results {
    let device = Device::cpu(1).unwrap();
    let rank = over.rank(Axis::Tensor);
    let begin: usize = lengths[..rank].iter().sum();
    let full = || tensor(&device, SHAPE, |at| value(rank, at));
    let piece = tensor(&device, [2, lengths[rank], 4], |[i, j, k]| value(rank, [i, begin + j, k]));
    let mut results = Vec::new();
    let mut note = |result: Tensor, before: u64| {
        results.push((result.shape().dims().to_vec(), result.to_vec().unwrap(), sent() - before));
    };
    let (mut sum, before) = (full(), sent());
    over.all_reduce(Axis::Tensor, &mut sum).unwrap();
    note(sum, before);
    let before = sent();
    note(over.gather(Axis::Tensor, &piece, 1, lengths).unwrap(), before);
    let before = sent();
    note(over.scatter(Axis::Tensor, full(), 1, lengths).unwrap(), before);
    let before = sent();
    note(over.all_to_all(Axis::Tensor, full(), 1, 2).unwrap(), before);
    results
}

fn on_ranks<T: Send>(ranks: usize, work: impl Fn(Communicator) -> T + Sync) -> Vec<T> {
    let work = &work;
    std::thread::scope(|scope| {
        let ends = memory::cluster(ranks).into_iter().map(|end| end as Arc<dyn Transport>);
        let all: Vec<_> = ends.map(|end| scope.spawn(move || work(Communicator::new(end)))).collect();
        all.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn each_exchange_gives_what_it_says() {
    for lengths in [vec![2, 2, 2], vec![3, 0, 3], vec![1, 2, 3], vec![3, 3], vec![6]] {
        let ranks = lengths.len();
        let all = on_ranks(ranks, |comm| {
            let over = OverRanks::new([(Axis::Tensor, comm.clone())]);
            assert_eq!((over.size(Axis::Tensor), over.size(Axis::Data)), (ranks, 1));
            exchanged(&over, &|| comm.stats().sent.payload.0, &lengths)
        });
        let owner = |j: usize| {
            let mut end = 0;
            lengths.iter().position(|len| (end += len, j < end).1).unwrap()
        };
        let cpu = Device::cpu(1).unwrap();
        let expected = |shape: [usize; 3], of: &dyn Fn([usize; 3]) -> f32| {
            (shape.to_vec(), tensor(&cpu, shape, of).to_vec::<f32>().unwrap())
        };
        let sum = |at| (0..ranks).map(|rank| value(rank, at)).sum::<f32>();
        for (rank, results) in all.iter().enumerate() {
            let begin: usize = lengths[..rank].iter().sum();
            let each = 6 / lengths.len();
            for ((dims, values, _), (shape, right)) in results.iter().zip([
                expected(SHAPE, &sum),
                expected(SHAPE, &|at| value(owner(at[1]), at)),
                expected([2, lengths[rank], 4], &|[i, j, k]| sum([i, begin + j, k])),
                // The pieces of the ranks stand one behind the other along the last dimension.
                expected([2, each, 4 * ranks], &|[i, j, k]| value(k / 4, [i, rank * each + j, k % 4])),
            ]) {
                assert_eq!((dims, values), (&shape, &right), "rank {rank} of {lengths:?}");
            }
        }
    }
}

#[test]
fn a_dry_run_counts_the_bytes_that_ranks_send() {
    // Equal pieces: headers of frames are not counted.
    for ranks in [1, 2, 3] {
        let lengths = [vec![6], vec![3; 2], vec![2; 3]][ranks - 1].clone();
        let all = on_ranks(ranks, |comm| {
            let over = OverRanks::new([(Axis::Tensor, comm.clone())]);
            exchanged(&over, &|| comm.stats().sent.payload.0, &lengths)
        });
        for (rank, results) in all.iter().enumerate() {
            let counted = Counted::new([(Axis::Tensor, AxisShare::new(rank, vec![1; ranks]).unwrap())]);
            let total = std::cell::Cell::new(0);
            let sent = || {
                total.set(total.get() + counted.take().along(Axis::Tensor));
                total.get()
            };
            let dry = exchanged(&counted, &sent, &lengths);
            for ((dims, _, bytes), (dry_dims, _, dry_bytes)) in results.iter().zip(&dry) {
                assert_eq!((dims, Bytes(*bytes)), (dry_dims, Bytes(*dry_bytes)), "rank {rank} of {ranks}");
            }
        }
    }
}

/// Rank `from` sends `from + 2 to + expert` rows for expert `expert` of rank `to`.
#[test]
fn rows_reach_the_ranks_for_which_they_are_counted() {
    const COLS: usize = 3;
    for ranks in [1, 2, 3] {
        let experts = |rank: usize| 1 + rank % 2;
        let count = |from: usize, to: usize, expert: usize| (from + 2 * to + expert) as u32;
        let counts = |from: usize| -> Vec<Vec<u32>> {
            (0..ranks).map(|to| (0..experts(to)).map(|expert| count(from, to, expert)).collect()).collect()
        };
        let all = on_ranks(ranks, |comm| {
            let rank = comm.rank().index();
            let over = OverRanks::new([(Axis::Expert, comm.clone())]);
            let counts = counts(rank);
            let rows: u32 = counts.iter().flatten().sum();
            // Two more rows than are sent.
            let values: Vec<f32> =
                (0..(rows as usize + 2) * COLS).map(|i| (1000 * rank + i) as f32).collect();
            let rows = Device::cpu(1).unwrap().tensor(&values, [rows as usize + 2, COLS]).unwrap();
            let before = comm.stats().sent.payload.0;
            let came = over.all_to_all_rows(Axis::Expert, &rows, &counts, None).unwrap();
            let sent = comm.stats().sent.payload.0 - before;
            let more = vec![vec![1 << 20]; ranks];
            let refused = over.all_to_all_rows(Axis::Expert, &rows, &more, None).unwrap_err().to_string();
            assert!(refused.contains("at most as many rows"), "{refused}");
            (came.rows.to_vec::<f32>().unwrap(), came.counts, sent)
        });
        for (to, (rows, received, sent)) in all.iter().enumerate() {
            assert_eq!(received.len(), ranks);
            let mut want = Vec::new();
            for (from, received) in received.iter().enumerate() {
                let before: u32 = counts(from)[..to].concat().iter().sum();
                let own: u32 = counts(from)[to].iter().sum();
                let values = before as usize * COLS..(before + own) as usize * COLS;
                want.extend(values.map(|i| (1000 * from + i) as f32));
                assert_eq!(received, &counts(from)[to]);
            }
            assert_eq!(rows, &want, "rank {to} of {ranks}");
            let message = |(of, counts): (usize, &Vec<u32>)| {
                let rows: u32 = counts.iter().sum();
                if of == to { 0 } else { row_message_bytes(rows as usize, COLS, counts.len()) as u64 }
            };
            assert_eq!(*sent, counts(to).iter().enumerate().map(message).sum::<u64>());
        }
    }
}

#[test]
fn pieces_that_do_not_fit_the_ranks_are_refused_without_waiting() {
    let refused = on_ranks(2, |comm| {
        let over = OverRanks::new([(Axis::Tensor, comm)]);
        let device = Device::cpu(1).unwrap();
        let full = || tensor(&device, SHAPE, |at| value(0, at));
        let gathered = over.gather(Axis::Tensor, &full(), 1, &[6]).unwrap_err().to_string();
        let scattered = over.scatter(Axis::Tensor, full(), 1, &[2, 2, 2]).unwrap_err().to_string();
        [gathered, scattered, over.all_to_all(Axis::Tensor, full(), 3, 1).unwrap_err().to_string()]
    });
    for [gathered, scattered, _] in refused {
        assert!(gathered.contains("`pieces` is 1") && scattered.contains("`pieces` is 3"), "{gathered}");
    }
}

#[test]
fn a_lost_rank_is_an_error_that_names_the_rank() {
    let errors = on_ranks(2, |comm| {
        let over = OverRanks::new([(Axis::Tensor, comm.clone())]);
        if comm.rank() == Rank(1) {
            return None;
        }
        let device = Device::cpu(1).unwrap();
        let mut values = tensor(&device, SHAPE, |at| value(0, at));
        let failed = over.all_reduce(Axis::Tensor, &mut values).unwrap_err();
        assert!(failed.to_string().contains("along the axis tensor"), "{failed}");
        Some(Error::from(failed))
    });
    assert!(matches!(errors[0], Some(Error::PeerLost { peer: PeerId(1), .. })), "{:?}", errors[0]);
}
