//! Compares each collective, in its blocking and its non-blocking form, with a plain loop over the ranks'
//! inputs.

#![expect(clippy::cast_possible_wrap, reason = "ranks and places are small")]

use std::ops::Range;

use farflung::base::Rank;
use farflung::comm::{CommError, Communicator, Element, Located, ReduceOp, UserOp};

use super::{LawTally, Number};

impl LawTally {
    /// Counts a result, and counts it as broken if it differs from what one process computes.
    fn equal<T: Element>(&mut self, got: &[T], wanted: &[T]) {
        self.cases += 1;
        self.broken += u64::from(got != wanted);
        let mix =
            |sum: u64, byte: &u8| (sum.rotate_left(5) ^ u64::from(*byte)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        self.bits = bytemuck::cast_slice(got).iter().fold(self.bits, mix);
    }
}

/// Returns a rank's element at `i`: a small whole number, so that every type can hold the result.
fn value(op: ReduceOp, rank: usize, i: usize, n: usize) -> i64 {
    let small = |rank: usize| ((7 * i + 3 * rank) % 5) as i64;
    match op {
        // Exactly two ranks (or the only one) contribute a factor of 3.
        ReduceOp::Product => 1 + 2 * i64::from((rank + i) % n < 2),
        // One rank has `n` more than the others.
        ReduceOp::Mean => small(0) + if i % n == rank { n as i64 } else { 0 },
        _ => small(rank),
    }
}

fn plain(op: ReduceOp, a: i64, b: i64) -> i64 {
    match op {
        ReduceOp::Sum | ReduceOp::Mean => a + b,
        ReduceOp::Max => a.max(b),
        ReduceOp::Min => a.min(b),
        ReduceOp::Product => a * b,
        ReduceOp::And => a & b,
        ReduceOp::Or => a | b,
        ReduceOp::Xor => a ^ b,
        ReduceOp::LogicalAnd => i64::from(a != 0 && b != 0),
        ReduceOp::LogicalOr => i64::from(a != 0 || b != 0),
        ReduceOp::LogicalXor => i64::from((a != 0) != (b != 0)),
    }
}

/// Returns unequal counts that add up to `len`, some of them 0.
fn uneven(len: usize, n: usize) -> Vec<usize> {
    let mut counts: Vec<usize> =
        (0..n).map(|rank| if rank % 2 == 1 { 0 } else { len / (n + rank) }).collect();
    counts[n - 1] += len - counts.iter().sum::<usize>();
    counts
}

/// All reductions of one type by one operation, over inputs that depend on the rank and the index.
struct Reductions<'a, T> {
    comm: &'a Communicator,
    len: usize,
    own: Vec<T>,
    /// Returns the reduced inputs of the ranks in a range.
    together: &'a dyn Fn(Range<usize>) -> Vec<T>,
}

impl<T: Element> Reductions<'_, T> {
    /// Checks all reductions, and the two scans if `has_scans`. `op` makes the operation for each call.
    fn check<R: Into<farflung::comm::Reduction<T>>>(
        &self,
        op: &dyn Fn() -> R,
        has_scans: bool,
        found: &mut LawTally,
    ) -> Result<(), CommError> {
        let Self { comm, len, own, together } = self;
        let (n, me) = (comm.size(), comm.rank().index());
        let all = together(0..n);

        let mut x = own.clone();
        comm.all_reduce(&mut x, op())?;
        found.equal(&x, &all);
        found.equal(&comm.start_all_reduce(own.clone(), op()).wait()?, &all);
        for root in (0..n as u32).map(Rank) {
            let mut x = own.clone();
            comm.reduce(&mut x, op(), root)?;
            let started = comm.start_reduce(own.clone(), op(), root).wait()?;
            if comm.rank() == root {
                found.equal(&x, &all);
                found.equal(&started, &all);
            }
        }
        let mut x = own.clone();
        let shard = comm.reduce_scatter(&mut x, op())?;
        found.equal(&x[shard.clone()], &all[shard.clone()]);
        let started = comm.start_reduce_scatter(own.clone(), op()).wait()?;
        found.equal(&started[shard.clone()], &all[shard]);
        let counts = uneven(*len, n);
        let mut x = own.clone();
        let shard = comm.reduce_scatter_v(&mut x, &counts, op())?;
        found.equal(&x[shard.clone()], &all[shard.clone()]);
        let started = comm.start_reduce_scatter_v(own.clone(), &counts, op()).wait()?;
        found.equal(&started[shard.clone()], &all[shard]);

        if has_scans {
            let (with, before) = (together(0..me + 1), together(0..me.max(1)));
            let mut x = own.clone();
            comm.scan(&mut x, op())?;
            found.equal(&x, &with);
            found.equal(&comm.start_scan(own.clone(), op()).wait()?, &with);
            let mut x = own.clone();
            comm.exclusive_scan(&mut x, op())?;
            found.equal(&x, &before);
            found.equal(&comm.start_exclusive_scan(own.clone(), op()).wait()?, &before);
        }
        Ok(())
    }
}

/// Checks all reductions of one type.
fn reductions<T: Number>(comm: &Communicator, len: usize, found: &mut LawTally) -> Result<(), CommError> {
    let (n, me) = (comm.size(), comm.rank().index());
    let is_float = T::STEP.is_some();
    let of_floats = [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Max, ReduceOp::Min, ReduceOp::Product];
    let has = |op: &ReduceOp| if is_float { of_floats.contains(op) } else { *op != ReduceOp::Mean };
    for op in ReduceOp::ALL.into_iter().filter(has) {
        let together = |ranks: Range<usize>| -> Vec<T> {
            let one = |i| {
                let folded = ranks.clone().map(|rank| value(op, rank, i, n)).reduce(|a, b| plain(op, a, b));
                let folded = folded.expect("there is a rank");
                T::of((if op == ReduceOp::Mean { folded / n as i64 } else { folded }) as f64)
            };
            (0..len).map(one).collect()
        };
        let own = (0..len).map(|i| T::of(value(op, me, i, n) as f64)).collect();
        let reductions = Reductions { comm, len, own, together: &together };
        reductions.check(&|| op, op != ReduceOp::Mean, found)?;
    }
    Ok(())
}

/// Checks reductions of functions `x -> a x + b` modulo 2^32, whose composition does not commute, and of values
/// with their places.
fn special(comm: &Communicator, len: usize, found: &mut LawTally) -> Result<(), CommError> {
    type Affine = [u32; 2];
    let (n, me) = (comm.size(), comm.rank().index());
    let function = |rank: usize, i: usize| [(rank * 31 + i * 7) as u32 | 1, (rank * 17 + i + 1) as u32];
    let compose = |[a, b]: Affine, [c, d]: Affine| [a.wrapping_mul(c), a.wrapping_mul(d).wrapping_add(b)];
    let together = |ranks: Range<usize>| -> Vec<Affine> {
        let one = |i| ranks.clone().map(|rank| function(rank, i)).reduce(compose).expect("there is a rank");
        (0..len).map(one).collect()
    };
    let own = (0..len).map(|i| function(me, i)).collect();
    let op = || UserOp::new("composition", compose);
    Reductions { comm, len, own, together: &together }.check(&op, true, found)?;

    for op in [ReduceOp::Max, ReduceOp::Min] {
        let place =
            |rank: usize, i: usize| Located { value: value(op, rank, i, n) as f64, place: rank as u64 };
        let together = |ranks: Range<usize>| -> Vec<Located<f64, u64>> {
            let best = |a: Located<f64, u64>, b: Located<f64, u64>| {
                let better = if op == ReduceOp::Max { b.value > a.value } else { b.value < a.value };
                if better { b } else { a }
            };
            let one = |i| ranks.clone().map(|rank| place(rank, i)).reduce(best).expect("there is a rank");
            (0..len).map(one).collect()
        };
        let own = (0..len).map(|i| place(me, i)).collect();
        Reductions { comm, len, own, together: &together }.check(&|| op, true, found)?;
    }
    Ok(())
}

/// Checks the collectives of one type that move values without reducing them.
fn moves<T: Number>(comm: &Communicator, len: usize, found: &mut LawTally) -> Result<(), CommError> {
    let (n, me) = (comm.size(), comm.rank().index());
    let at = |rank: usize, i: usize| T::of(value(ReduceOp::Sum, rank, i, n) as f64);
    let of = |rank: usize, len: usize| -> Vec<T> { (0..len).map(|i| at(rank, i)).collect() };
    let own = of(me, len);
    let counts = uneven(len, n);
    let start = |rank: usize| counts[..rank].iter().sum::<usize>();

    // The expected result: the shard of each rank, from that rank's own values.
    let shared: Vec<T> = (0..n)
        .flat_map(|r| comm.shard_of(Rank(r as u32), len).map(move |i| (r, i)))
        .map(|(r, i)| at(r, i))
        .collect();
    let mut x = own.clone();
    comm.all_gather(&mut x)?;
    found.equal(&x, &shared);
    found.equal(&comm.start_all_gather(own.clone()).wait()?, &shared);
    let shared: Vec<T> = (0..n)
        .flat_map(|r| (start(r)..start(r) + counts[r]).map(move |i| (r, i)))
        .map(|(r, i)| at(r, i))
        .collect();
    let mut x = own.clone();
    comm.all_gather_v(&mut x, &counts)?;
    found.equal(&x, &shared);
    found.equal(&comm.start_all_gather_v(own.clone(), &counts).wait()?, &shared);

    let mine = of(me, counts[me]);
    let everyones: Vec<T> = (0..n).flat_map(|rank| of(rank, counts[rank])).collect();
    for root in (0..n as u32).map(Rank) {
        let of_root = of(root.index(), len);
        let mut x = own.clone();
        comm.broadcast(&mut x, root)?;
        found.equal(&x, &of_root);
        found.equal(&comm.start_broadcast(own.clone(), root).wait()?, &of_root);
        for all in [comm.gather(&mine, &counts, root)?, comm.start_gather(&mine, &counts, root).wait()?] {
            found.broken += u64::from(all.is_some() != (comm.rank() == root));
            if let Some(all) = all {
                found.equal(&all, &everyones);
            }
        }
        let part = &of_root[start(me)..start(me) + counts[me]];
        found.equal(&comm.scatter(&own, &counts, root)?, part);
        found.equal(&comm.start_scatter(&own, &counts, root).wait()?, part);
    }

    // Rank r sends to rank j its values from index j on.
    let part = |from: usize, to: usize, len: usize| (0..len).map(move |i| (from, to + i));
    let out: Vec<T> = (0..n).flat_map(|to| part(me, to, len)).map(|(r, i)| at(r, i)).collect();
    let back: Vec<T> = (0..n).flat_map(|from| part(from, me, len)).map(|(r, i)| at(r, i)).collect();
    found.equal(&comm.all_to_all(&out)?, &back);
    found.equal(&comm.start_all_to_all(&out).wait()?, &back);
    let between = |from: usize, to: usize| (len + 3 * from + to) % (len + 1);
    let sent: Vec<usize> = (0..n).map(|to| between(me, to)).collect();
    let received: Vec<usize> = (0..n).map(|from| between(from, me)).collect();
    let out: Vec<T> = (0..n).flat_map(|to| part(me, to, sent[to])).map(|(r, i)| at(r, i)).collect();
    let back: Vec<T> =
        (0..n).flat_map(|from| part(from, me, received[from])).map(|(r, i)| at(r, i)).collect();
    found.equal(&comm.all_to_all_v(&out, &sent, &received)?, &back);
    found.equal(&comm.start_all_to_all_v(&out, &sent, &received).wait()?, &back);

    let mut near: Vec<Rank> = [1, n - 1].map(|step| Rank(((me + step) % n) as u32)).into();
    near.dedup();
    near.retain(|&rank| rank != comm.rank());
    let theirs: Vec<T> = near.iter().flat_map(|rank| of(rank.index(), len)).collect();
    found.equal(&comm.neighbor_exchange(&own, &near)?.concat(), &theirs);
    found.equal(&comm.start_neighbor_exchange(&own, &near).wait()?.concat(), &theirs);
    comm.start_barrier().wait()?;
    comm.barrier()
}

/// Checks every collective of one type.
pub(super) fn of_type<T: Number>(comm: &Communicator, sizes: &[usize]) -> Result<LawTally, CommError> {
    let mut found = LawTally::default();
    for &len in sizes {
        reductions::<T>(comm, len, &mut found)?;
        moves::<T>(comm, len, &mut found)?;
    }
    Ok(found)
}

/// Checks every reduction of elements that are not plain numbers: a user's own reduction, and values with
/// places.
pub(super) fn of_others(comm: &Communicator, sizes: &[usize]) -> Result<LawTally, CommError> {
    let mut found = LawTally::default();
    for &len in sizes {
        special(comm, len, &mut found)?;
    }
    Ok(found)
}
