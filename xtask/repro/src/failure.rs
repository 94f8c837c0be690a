//! Checks what the other ranks observe when one of eight ranks, or a link between two of them, fails during a
//! collective.

pub(crate) mod processes;

use anyhow::Result;
use farflung::base::{Nanos, PeerId, Rank, Topology};
use farflung::comm::simulated::{Faults, cluster_with};
use farflung::comm::{Algorithm, CommError, Communicator, ReduceOp, Transport};

use crate::harness::{Bench, Options, Report, Threshold};
use crate::ranks::{Cluster, on_ranks};

pub(crate) const BENCH: Bench = Bench {
    name: "failure",
    claim: "whatever happens to one of eight ranks or links (crash, freeze, cut, a corrupted frame), at any \
            moment of any collective: every survivor fails within the deadline of 2 s, names the faulty rank \
            or link, gets no partly reduced result, and continues with the others; the same holds for real \
            processes that are killed, stopped, or connected by a bad link",
    source: "the rules in the README of farflung-comm; torchft and torchtitan issues on hangs",
    seed: 0,
    run,
};

const N: usize = 8;
const DEADLINE: Nanos = Nanos::from_millis(2_000);
const VICTIM: PeerId = PeerId(5);
const NEIGHBOR: PeerId = PeerId(6);

/// A fault that is injected into the job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum InjectedFault {
    Crash,
    Freeze,
    Cut,
    Corrupt,
}

impl InjectedFault {
    fn at(self, time: Nanos) -> Faults {
        let at = Faults::new().at(time);
        match self {
            Self::Crash => at.crash(VICTIM),
            Self::Freeze => at.freeze(VICTIM, Nanos::from_millis(3_600_000)),
            Self::Cut => at.cut(VICTIM, NEIGHBOR),
            Self::Corrupt => at.corrupt(VICTIM, NEIGHBOR),
        }
    }

    /// Returns the peers that an error may name. For a link these are both ends.
    const fn culprits(self) -> &'static [PeerId] {
        match self {
            Self::Crash | Self::Freeze => &[VICTIM],
            Self::Cut | Self::Corrupt => &[VICTIM, NEIGHBOR],
        }
    }
}

/// A collective over a buffer of ones, and the value that each element must have afterwards.
type Collective = (Algorithm, fn(&Communicator, &mut [f32]) -> Result<(), CommError>, f32);

fn collectives() -> Vec<Collective> {
    let mut all: Vec<Collective> = Algorithm::ALL
        .into_iter()
        .map(|a| -> Collective { (a, |comm, x| comm.all_reduce(x, ReduceOp::Sum), N as f32) })
        .collect();
    let ring = Algorithm::Ring;
    all.extend([
        (ring, scatter as fn(&Communicator, &mut [f32]) -> _, N as f32),
        (ring, |comm, x| comm.all_gather(x), 1.0),
        (ring, |comm, x| comm.broadcast(x, Rank(VICTIM.0)), 1.0),
        (ring, |comm, x| reduce(comm, x), N as f32),
        (ring, |comm, x| comm.all_to_all(x).map(|y| x.copy_from_slice(&y)), 1.0),
        (ring, |comm, _| comm.barrier(), 1.0),
    ]);
    all
}

/// Runs a reduce-scatter, and fills the buffer with the first value of the rank's own shard. The other shards
/// have no defined value.
fn scatter(comm: &Communicator, x: &mut [f32]) -> Result<(), CommError> {
    let own = comm.reduce_scatter(x, ReduceOp::Sum)?;
    let value = x[own.start];
    x.fill(value);
    Ok(())
}

fn reduce(comm: &Communicator, x: &mut [f32]) -> Result<(), CommError> {
    comm.reduce(x, ReduceOp::Sum, Rank(0))?;
    if comm.rank() != Rank(0) {
        x.fill(N as f32);
    }
    Ok(())
}

/// Observations of one rank.
struct RankObservation {
    /// Time from the start to the end of the call that failed.
    took: Nanos,
    error: Option<CommError>,
    half: bool,
    goes_on: bool,
    end: Nanos,
}

fn run_once(collective: &Collective, faults: &Faults) -> Result<Vec<RankObservation>> {
    let topology = Topology::uniform(N, "100mbit,20ms".parse()?);
    let cluster: Cluster =
        cluster_with(&topology, faults).into_iter().map(|t| t as std::sync::Arc<dyn Transport>).collect();
    let &(algorithm, call, want) = collective;
    on_ranks(cluster, |comm| {
        let comm = comm.with_deadline(DEADLINE).with_algorithm(algorithm);
        let mut x = vec![1.0_f32; 40_000];
        let mut start = comm.now();
        let mut result = call(&comm, &mut x);
        let end = comm.now();
        let whole = |value: f32| x.iter().all(|v| v.to_bits() == value.to_bits());
        // A failed call that does not work in place leaves its input unchanged.
        let half = match &result {
            Ok(()) => !whole(want),
            Err(_) => !x.iter().all(|v| v.is_nan()) && !whole(1.0),
        };
        for _ in 0..4 {
            // A rank that needed nothing more from the lost one detects the loss in these calls.
            if result.is_ok() {
                start = comm.now();
                result = comm.barrier();
            }
        }
        let took = comm.now() - start;
        let goes_on = result.is_err()
            && comm.shrink().is_ok_and(|left| {
                let mut y = [1_u64];
                left.all_reduce(&mut y, ReduceOp::Sum).is_ok() && y[0] as usize == left.size()
            });
        Ok(RankObservation { took, error: result.err(), half, goes_on, end })
    })
}

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let moments = if options.quick { 4 } else { 24 };
    let (mut runs, mut survivors) = (0_u32, 0_u32);
    let (mut unnoticed, mut late, mut innocent, mut half, mut stuck) = (0_u32, 0_u32, 0_u32, 0_u32, 0_u32);
    let mut slowest = Nanos::ZERO;
    for collective in collectives() {
        let calm = run_once(&collective, &Faults::new())?;
        let length = calm.iter().map(|seen| seen.end).max().unwrap_or(Nanos::ZERO);
        for fault in [InjectedFault::Crash, InjectedFault::Freeze, InjectedFault::Cut, InjectedFault::Corrupt]
        {
            for moment in 0..moments {
                let at = Nanos(length.0 * moment / moments);
                runs += 1;
                let seen = run_once(&collective, &fault.at(at))?;
                let hit = |rank: usize| fault.culprits().contains(&PeerId(rank as u32));
                let noticed = seen.iter().any(|seen| seen.error.is_some());
                for (_, seen) in seen.iter().enumerate().filter(|(rank, _)| !hit(*rank)) {
                    survivors += 1;
                    half += u32::from(seen.half);
                    let Some(error) = &seen.error else {
                        // A cut or a corrupted frame that no rank noticed affected no later frame. It is not a
                        // failure.
                        unnoticed += u32::from(
                            noticed || matches!(fault, InjectedFault::Crash | InjectedFault::Freeze),
                        );
                        continue;
                    };
                    slowest = slowest.max(seen.took);
                    late += u32::from(seen.took > DEADLINE + Nanos::from_millis(50));
                    let right = error.peer().is_some_and(|peer| fault.culprits().contains(&peer));
                    innocent += u32::from(!right);
                    stuck += u32::from(!seen.goes_on);
                }
            }
        }
    }
    report.row("runs", f64::from(runs), "1", Threshold::None)?;
    report.row("survivors", f64::from(survivors), "1", Threshold::None)?;
    report.row("survivors that noticed nothing", f64::from(unnoticed), "1", Threshold::AtMost(0.0))?;
    report.row("longest time to notice", slowest.as_secs_f64(), "s", Threshold::AtMost(2.05))?;
    report.row("survivors that noticed after the deadline", f64::from(late), "1", Threshold::AtMost(0.0))?;
    report.row("partly reduced results", f64::from(half), "1", Threshold::AtMost(0.0))?;
    report.row("survivors that name an innocent rank", f64::from(innocent), "1", Threshold::AtMost(0.0))?;
    report.row("survivors that could not continue", f64::from(stuck), "1", Threshold::AtMost(0.0))?;
    processes::run(report, options)
}
