//! Checks the results of collectives: they are exact on whole numbers, and the same on all ranks and on all
//! transports.

mod every;

use anyhow::Result;
use farflung::base::{Philox, Rank, Topology};
use farflung::comm::{
    Algorithm, AllReduce as _, CommError, Communicator, Element, Program, ReduceOp, bf16, butterfly, direct,
    double_tree, f16, hierarchical,
};

use crate::harness::{Bench, Options, Report, Threshold};
use crate::ranks::{Cluster, NETWORK_KINDS, on_ranks, over_links, over_memory, over_tcp};

pub(crate) const BENCH: Bench = Bench {
    name: "collective-laws",
    claim: "every collective, operation, type and root gives the result of one process, blocking or not; \
            every all-reduce of every type is exact on whole numbers, otherwise within n - 1 rounding steps \
            of the true sum, and has the same bits on every rank and every transport; small integers wrap, \
            min and max return NaN if an input is NaN, 16-bit floats are rounded once per reduction, and a \
            user's reduction is applied in the order of ranks",
    source: "the rules in the README of farflung-comm",
    seed: 11,
    run,
};

/// Returns the program of a rank, from the rank, the number of ranks and the number of elements.
type Make = Box<dyn Fn(Rank, usize, usize) -> Program + Send + Sync>;

/// Returns every algorithm of `Algorithm::ALL`, and further shapes: other groups, chunks and shards.
fn programs() -> Vec<(String, Make)> {
    let mut all: Vec<(String, Make)> = Vec::new();
    for algorithm in Algorithm::ALL {
        let make: Make = Box::new(move |rank, n, _| algorithm.program(rank, n));
        all.push((format!("{algorithm:?}"), make));
    }
    for size in [2, 3, 5] {
        let make: Make = Box::new(move |rank, n, _| {
            let ranks: Vec<Rank> = (0..n as u32).map(Rank).collect();
            let groups: Vec<Vec<Rank>> = ranks.chunks(size).map(<[Rank]>::to_vec).collect();
            hierarchical(rank, &groups, 2)
        });
        all.push((format!("hierarchical in groups of {size}"), make));
    }
    all.push(("double tree in 3".to_owned(), Box::new(|rank, n, _| double_tree(rank, n, 3))));
    all.push(("direct in 3".to_owned(), Box::new(|rank, n, _| direct(rank, n, 3))));
    let uneven: Make = Box::new(|rank, n, len| {
        // Rank 0 reduces the remaining elements; every second rank reduces none.
        let mut counts: Vec<usize> = (0..n).map(|r| if r % 2 == 1 { 0 } else { len / (n + r) }).collect();
        counts[0] = len - counts[1..].iter().sum::<usize>();
        butterfly(rank, &counts, 2)
    });
    all.push(("uneven butterfly".to_owned(), uneven));
    all
}

/// An element type, with conversions from and to f64.
trait Number: Element {
    /// Converts to the nearest value; integers wrap.
    fn of(value: f64) -> Self;
    fn value(self) -> f64;
    /// One rounding step at 1; `None` for integers.
    const STEP: Option<f64>;
}

macro_rules! number {
    ($t:ident, $step:expr, $of:expr, $value:expr) => {
        impl Number for $t {
            fn of(value: f64) -> Self {
                ($of)(value)
            }
            fn value(self) -> f64 {
                ($value)(self)
            }
            const STEP: Option<f64> = $step;
        }
    };
}
macro_rules! integers {
    ($($t:ident)*) => {$(number!($t, None, |v| v as i64 as Self, |v| v as f64);)*};
}
integers!(i8 i16 i32 i64 u8 u16 u32 u64);
number!(f64, Some(f64::EPSILON), |v| v, |v| v);
number!(f32, Some(1.0 / 8_388_608.0), |v| v as Self, f64::from);
number!(f16, Some(1.0 / 1024.0), Self::from_f64, Self::to_f64);
number!(bf16, Some(1.0 / 128.0), Self::from_f64, Self::to_f64);

/// Result of one rank: number of cases, broken laws, and a checksum of all results that should not be NaN.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct LawTally {
    cases: u64,
    broken: u64,
    bits: u64,
}

impl LawTally {
    fn check<T: Number>(&mut self, x: &[T], law: impl Fn(usize, T) -> bool) {
        self.cases += 1;
        self.broken += u64::from(!x.iter().enumerate().all(|(i, &v)| law(i, v)));
        // Every value that passes a law is exact as an f64, so the checksum uses the f64's bits.
        let mix =
            |sum: u64, v: &T| (sum.rotate_left(5) ^ v.value().to_bits()).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        self.bits = x.iter().fold(self.bits, mix);
    }
}

/// Checks all laws for one type and one program. Every rank must call it.
fn laws<T: Number>(
    comm: &Communicator,
    make: &Make,
    sizes: &[usize],
    seed: u64,
) -> Result<LawTally, CommError> {
    let (n, me) = (comm.size(), comm.rank().index());
    let mut found = LawTally::default();
    let reduced = |op, len: usize, value: &dyn Fn(usize) -> f64| {
        let mut x: Vec<T> = (0..len).map(|i| T::of(value(i))).collect();
        comm.all_reduce_by(make(comm.rank(), n, len), &mut x, op).map(|()| x)
    };
    let whole = |rank: usize, i: usize| ((7 * i + 3 * rank) % 5) as f64;
    for &len in sizes {
        let x = reduced(ReduceOp::Sum, len, &|i| whole(me, i))?;
        found.check(&x, |i, v| v == T::of((0..n).map(|r| whole(r, i)).sum()));
    }
    let len = sizes.iter().copied().max().unwrap_or(0);
    let x = reduced(ReduceOp::Max, len, &|i| whole(me, i))?;
    found.check(&x, |i, v| v == T::of((0..n).map(|r| whole(r, i)).fold(0.0, f64::max)));
    let x = reduced(ReduceOp::Min, len, &|i| whole(me, i))?;
    found.check(&x, |i, v| v == T::of((0..n).map(|r| whole(r, i)).fold(9.0, f64::min)));
    // Exactly two ranks (or the only one) contribute a factor of 3.
    let x = reduced(ReduceOp::Product, len, &|i| if (me + i) % n < 2 { 3.0 } else { 1.0 })?;
    found.check(&x, |_, v| v == T::of(if n == 1 { 3.0 } else { 9.0 }));

    let Some(step) = T::STEP else {
        // From 2 ranks on the sum is beyond the range of i8, from 3 ranks on beyond that of u8.
        let x = reduced(ReduceOp::Sum, len, &|_| 100.0)?;
        found.check(&x, |_, v| v == T::of(100.0 * n as f64));
        return Ok(found);
    };
    let real = |rank: usize, i: usize| {
        T::of(0.5 + f64::from(Philox::new(seed, rank as u64).uniform(i as u64))).value()
    };
    let x = reduced(ReduceOp::Sum, len, &|i| real(me, i))?;
    found.check(&x, |i, v| {
        let sum: f64 = (0..n).map(|r| real(r, i)).sum();
        (v.value() - sum).abs() <= (n - 1) as f64 * step * sum
    });
    // One rank has `n` more than the others. The sum is at most 80, which is exact with eight bits of
    // precision.
    let x = reduced(ReduceOp::Mean, len, &|i| whole(0, i) + if i % n == me { n as f64 } else { 0.0 })?;
    found.check(&x, |i, v| v == T::of(whole(0, i) + 1.0));
    for op in [ReduceOp::Max, ReduceOp::Min, ReduceOp::Sum] {
        let x = reduced(op, len, &|i| if (i + me) % n == 0 { f64::NAN } else { 1.0 })?;
        found.cases += 1;
        found.broken += u64::from(!x.iter().all(|v| v.value().is_nan()));
    }
    Ok(found)
}

/// Checks every collective for every type over one cluster, and returns each rank's result.
fn every_over(cluster: Cluster, sizes: &[usize]) -> Result<Vec<LawTally>> {
    let laws = [
        every::of_type::<f32>,
        every::of_type::<bf16>,
        every::of_type::<f16>,
        every::of_type::<f64>,
        every::of_type::<i8>,
        every::of_type::<i16>,
        every::of_type::<i32>,
        every::of_type::<i64>,
        every::of_type::<u8>,
        every::of_type::<u16>,
        every::of_type::<u32>,
        every::of_type::<u64>,
        every::of_others,
    ];
    on_ranks(cluster, |comm| {
        let mut all = LawTally::default();
        for law in laws {
            let found = law(&comm, sizes)?;
            all.cases += found.cases;
            all.broken += found.broken;
            all.bits = all.bits.rotate_left(1) ^ found.bits;
        }
        Ok(all)
    })
}

/// Checks one program with all types.
fn all_laws(comm: &Communicator, make: &Make, sizes: &[usize], seed: u64) -> Result<LawTally, CommError> {
    let laws = [
        laws::<f32>,
        laws::<bf16>,
        laws::<f16>,
        laws::<f64>,
        laws::<i8>,
        laws::<i16>,
        laws::<i32>,
        laws::<i64>,
        laws::<u8>,
        laws::<u16>,
        laws::<u32>,
        laws::<u64>,
    ];
    let mut all = LawTally::default();
    for law in laws {
        let found = law(comm, make, sizes, seed)?;
        all.cases += found.cases;
        all.broken += found.broken;
        all.bits = all.bits.rotate_left(1) ^ found.bits;
    }
    Ok(all)
}

/// Checks all programs over one cluster, and returns each rank's result.
fn over(cluster: Cluster, sizes: &[usize], seed: u64) -> Result<Vec<LawTally>> {
    let programs = programs();
    on_ranks(cluster, |comm| {
        let mut all = LawTally::default();
        for (_, make) in &programs {
            let found = all_laws(&comm, make, sizes, seed)?;
            all.cases += found.cases;
            all.broken += found.broken;
            all.bits = all.bits.rotate_left(1) ^ found.bits;
        }
        Ok(all)
    })
}

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let ranks: &[usize] = if options.quick {
        &[1, 2, 3, 5, 8]
    } else {
        &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]
    };
    let (mut cases, mut broken, mut unlike, mut elsewhere) = (0, 0, 0, 0);
    for &n in ranks {
        let sizes = [0, 1, n - 1, 101];
        let found = over(over_memory(n), &sizes, report.seed())?;
        cases += found[0].cases;
        broken += found.iter().map(|f| f.broken).sum::<u64>();
        unlike += found.iter().filter(|f| f.bits != found[0].bits).count();
        if [2, 3, 5, 8].contains(&n) {
            let links = Topology::uniform(n, "1gbit,1ms".parse()?);
            for cluster in [over_links(&links), over_tcp(n)?] {
                let there = over(cluster, &sizes, report.seed())?;
                elsewhere += there.iter().filter(|f| **f != found[0]).count();
            }
        }
    }
    let worlds: &[usize] = if options.quick { &[1, 2, 5] } else { &[1, 2, 3, 4, 5, 6, 7, 8, 9] };
    let every = on_every_transport(worlds)?;
    report.row("programs", programs().len() as f64, "1", Threshold::None)?;
    report.row("collectives checked on every rank", cases as f64, "1", Threshold::None)?;
    report.row("results that break a law", broken as f64, "1", Threshold::AtMost(0.0))?;
    report.row("ranks whose bits differ from rank 0's", unlike as f64, "1", Threshold::AtMost(0.0))?;
    report.row(
        "ranks whose bits differ over tcp or simulated links",
        elsewhere as f64,
        "1",
        Threshold::AtMost(0.0),
    )?;
    report.row("results of every collective, blocking and not", every.cases as f64, "1", Threshold::None)?;
    report.row(
        "results of collectives that differ from those of one process",
        every.broken as f64,
        "1",
        Threshold::AtMost(0.0),
    )?;
    report.row(
        "ranks whose results differ over another transport",
        every.elsewhere as f64,
        "1",
        Threshold::AtMost(0.0),
    )
}

/// Sums of the results of every collective.
#[derive(Debug, Default)]
struct Every {
    cases: u64,
    broken: u64,
    /// Number of ranks whose results over another transport have other bits than over memory.
    elsewhere: usize,
}

fn on_every_transport(worlds: &[usize]) -> Result<Every> {
    let mut all = Every::default();
    for &n in worlds {
        let sizes = [0, 1, n - 1, 43];
        let here = every_over(over_memory(n), &sizes)?;
        for way in &NETWORK_KINDS[1..] {
            let there = every_over((way.open)(n)?, &sizes)?;
            all.elsewhere += there.iter().zip(&here).filter(|(there, here)| there != here).count();
            all.cases += there.iter().map(|found| found.cases).sum::<u64>();
            all.broken += there.iter().map(|found| found.broken).sum::<u64>();
        }
        all.cases += here.iter().map(|found| found.cases).sum::<u64>();
        all.broken += here.iter().map(|found| found.broken).sum::<u64>();
    }
    Ok(all)
}
