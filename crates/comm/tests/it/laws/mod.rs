//! The contract of every transport, as laws: the results of ranks, and the ways in which they fail, do not
//! depend on the transport. The tests of this crate and the bench `transports` both include this file; each has
//! modules `base` and `comm` in scope beside it.
#![allow(dead_code, reason = "each suite uses its part")]

use std::fmt;
use std::panic::Location;
use std::process::{Command, Stdio};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use super::base::{Nanos, PeerId, Rank};
use super::comm::{Algorithm, Cancel, CommError, Communicator, FRAME_BYTES, ReduceOp};

/// Result of a law (a test that every transport must pass) on one rank.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Found {
    /// Number of checks that failed.
    pub(crate) broken: u64,
    /// Line in this file of the first check that failed.
    pub(crate) line: u32,
    /// Hash of the bits of the rank's results.
    pub(crate) bits: u64,
}

impl Found {
    #[track_caller]
    fn holds(&mut self, law: bool) {
        if !law {
            if self.broken == 0 {
                self.line = Location::caller().line();
            }
            self.broken += 1;
        }
    }

    fn got(&mut self, values: &[f32]) {
        let mix = |bits: u64, v: &f32| {
            (bits.rotate_left(7) ^ u64::from(v.to_bits())).wrapping_mul(0x9E37_79B9_7F4A_7C15)
        };
        self.bits = values.iter().fold(self.bits, mix);
    }
}

/// Marks the result in a line of a rank's output.
const MARK: &str = "found: ";

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{MARK}{} {} {}", self.broken, self.line, self.bits)
    }
}

impl FromStr for Found {
    type Err = &'static str;

    /// Parses a line that ends with a formatted [`Found`].
    fn from_str(line: &str) -> Result<Self, Self::Err> {
        let (_, numbers) = line.split_once(MARK).ok_or("nothing found")?;
        let numbers: Result<Vec<u64>, _> = numbers.split_whitespace().map(str::parse).collect();
        let Ok([broken, line, bits]) = numbers.as_deref() else { return Err("three numbers wanted") };
        Ok(Self {
            broken: *broken,
            line: u32::try_from(*line).map_err(|_| "a line's number wanted")?,
            bits: *bits,
        })
    }
}

/// How the ranks are run.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Among<'a> {
    /// As threads of one process. They share this cancel switch.
    Threads(&'a Cancel),
    /// As separate processes.
    Processes,
}

type Rule = fn(&Communicator, Among<'_>, &mut Found) -> Result<(), CommError>;

/// One law of the contract.
pub(crate) struct Law {
    pub(crate) name: &'static str,
    /// Number of ranks.
    pub(crate) ranks: usize,
    rule: Rule,
    /// Law that holds instead if the transport's members are [`fixed`](super::comm::Transport::fixed).
    pub(crate) refusal: Option<Rule>,
}

const fn law(name: &'static str, ranks: usize, rule: Rule) -> Law {
    Law { name, ranks, rule, refusal: None }
}

/// All laws.
pub(crate) const LAWS: &[Law] = &[
    law("collectives", 4, collectives),
    law("order", 3, order),
    law("deadlines", 3, deadlines),
    law("cancel", 3, cancel),
    Law { refusal: Some(shrink_refused), ..law("shrink", 4, shrink) },
    Law { refusal: Some(admit_refused), ..law("admit", 4, admit) },
    law("a lost peer", 4, lost),
    law("unlike calls", 2, unlike),
];

impl Law {
    /// Returns the law with this name.
    pub(crate) fn named(name: &str) -> Option<&'static Self> {
        LAWS.iter().find(|law| law.name == name)
    }

    /// Runs the law on this rank, and returns its result.
    pub(crate) fn hold(&self, comm: Communicator, among: Among<'_>) -> Result<Found, CommError> {
        let comm = comm.with_deadline(ms(20_000));
        let rule = self.refusal.filter(|_| comm.transport().fixed().is_some()).unwrap_or(self.rule);
        let mut found = Found::default();
        rule(&comm, among, &mut found)?;
        Ok(found)
    }
}

/// Returns a command that runs `mpirun` with this number of processes, also as root and on fewer cores.
pub(crate) fn mpirun(ranks: usize) -> Command {
    let mut mpirun = Command::new("mpirun");
    mpirun.args(["--allow-run-as-root", "--oversubscribe", "-n", &ranks.to_string()]);
    mpirun.stdin(Stdio::null());
    mpirun
}

const fn ms(millis: u64) -> Nanos {
    Nanos::from_millis(millis)
}

fn own(comm: &Communicator, len: usize) -> Vec<f32> {
    let me = comm.rank().0 as f32;
    (0..len).map(|i| (i as f32 * 0.37 + me).sin() * 10_f32.powf(me - 1.0)).collect()
}

fn collectives(comm: &Communicator, _: Among<'_>, found: &mut Found) -> Result<(), CommError> {
    let (n, me) = (comm.size(), comm.rank().index());
    for algorithm in Algorithm::ALL {
        let comm = comm.clone().with_algorithm(algorithm);
        for len in [0, 1, 1000, FRAME_BYTES / 4 + 17, 300_003] {
            let mut x = own(&comm, len);
            comm.all_reduce(&mut x, ReduceOp::Mean)?;
            found.got(&x);
            let mut whole: Vec<f32> = (0..len).map(|i| ((i % 100) * (me + 1)) as f32).collect();
            comm.all_reduce(&mut whole, ReduceOp::Sum)?;
            let sum = |i: usize| ((i % 100) * n * (n + 1) / 2) as f32;
            found.holds(whole.iter().enumerate().all(|(i, v)| v.to_bits() == sum(i).to_bits()));
        }
    }
    let mut x = own(comm, 100_001);
    let shard = comm.reduce_scatter(&mut x, ReduceOp::Sum)?;
    found.got(&x[shard]);
    comm.all_gather(&mut x)?;
    found.got(&x);
    comm.broadcast(&mut x, Rank(1))?;
    found.got(&x);
    comm.scan(&mut x, ReduceOp::Sum)?;
    found.got(&x);
    found.got(&comm.all_to_all(&own(comm, n * 5000))?);
    comm.barrier()?;
    let all = comm.all_gather_bytes(vec![me as u8; me * FRAME_BYTES / 2])?;
    found.holds(all.iter().enumerate().all(|(from, bytes)| {
        bytes.len() == from * FRAME_BYTES / 2 && bytes.iter().all(|&b| b as usize == from)
    }));
    Ok(())
}

fn order(comm: &Communicator, _: Among<'_>, found: &mut Found) -> Result<(), CommError> {
    let (n, me) = (comm.size() as u32, comm.rank().0);
    let (next, last) = (Rank((me + 1) % n), Rank((me + n - 1) % n));
    // Sends more frames than all windows hold before any is taken. Tags are received in another order.
    let long = comm.start_send(next, 9, vec![me as u8; 12 << 20]);
    let sent: Vec<_> = (0..200_u32).map(|i| comm.start_send(next, i % 5, i.to_le_bytes().to_vec())).collect();
    for tag in (0..5).rev() {
        for turn in 0..40_u32 {
            found.holds(comm.recv(last, tag)? == (5 * turn + tag).to_le_bytes());
        }
    }
    let got = comm.recv(last, 9)?;
    found.holds(got.len() == 12 << 20 && got.iter().all(|&b| u32::from(b) == last.0));
    for send in sent {
        send.wait()?;
    }
    long.wait()?;
    // Operations are waited for in the reverse order of their start.
    let started: Vec<_> =
        (0..20).map(|i| comm.start_all_reduce(own(comm, 10 + 1000 * i), ReduceOp::Sum)).collect();
    for pending in started.into_iter().rev() {
        found.got(&pending.wait()?);
    }
    Ok(())
}

fn deadlines(comm: &Communicator, _: Among<'_>, found: &mut Found) -> Result<(), CommError> {
    if comm.rank().0 == 2 {
        // Rank 2 takes no part in the collective until the others are done with it.
        return comm.recv(Rank(0), 1).map(|_| ());
    }
    let short = comm.clone().with_deadline(ms(300));
    let mut x = vec![1.0_f32; 10];
    let error = short.all_reduce(&mut x, ReduceOp::Sum).err();
    found.holds(matches!(error, Some(CommError::Deadline { .. } | CommError::Aborted { .. })));
    found.holds(error.is_some_and(|error| error.peer() == Some(PeerId(2))));
    found.holds(x.iter().all(|v| v.is_nan()));
    found.holds(matches!(short.barrier(), Err(CommError::Poisoned(_))));
    let kept = short.start_all_reduce(vec![1.0_f32], ReduceOp::Sum).wait();
    found.holds(matches!(kept, Err(CommError::Poisoned(_))));
    let (from, to) = (Rank(1 - comm.rank().0), comm.rank());
    comm.send(from, 2, &[to.0 as u8])?;
    comm.recv(from, 2)?;
    if to.0 == 0 { comm.send(Rank(2), 1, b"done") } else { Ok(()) }
}

fn cancel(comm: &Communicator, among: Among<'_>, found: &mut Found) -> Result<(), CommError> {
    // A pause in which rank 0 normally falls asleep in its wait. The result does not depend on it.
    let later = || std::thread::sleep(Duration::from_millis(20));
    if comm.rank().0 == 0 {
        let own = Cancel::new();
        let switch = if let Among::Threads(switch) = among { switch } else { &own };
        let cancellable = comm.clone().with_cancel(switch);
        let ended = std::thread::scope(|scope| {
            if let Among::Processes = among {
                scope.spawn(|| {
                    later();
                    switch.cancel();
                });
            }
            cancellable.recv(Rank(1), 4)
        });
        found.holds(matches!(ended, Err(CommError::Cancelled { op: "recv" })));
        if let Among::Processes = among {
            comm.send(Rank(1), 5, b"cancelled")?;
        }
        // The next receive gets the message that the cancelled one did not.
        found.holds(comm.recv(Rank(1), 4)? == b"late");
        let mut x = [1.0_f32];
        let ended = cancellable.all_reduce(&mut x, ReduceOp::Sum);
        found.holds(matches!(ended, Err(CommError::Cancelled { .. })) && x[0].is_nan());
    } else {
        if comm.rank().0 == 1 {
            match among {
                Among::Threads(switch) => {
                    later();
                    switch.cancel();
                }
                Among::Processes => found.holds(comm.recv(Rank(0), 5)? == b"cancelled"),
            }
            comm.send(Rank(0), 4, b"late")?;
        }
        let mut x = [1.0_f32];
        let ended = comm.all_reduce(&mut x, ReduceOp::Sum);
        found.holds(matches!(ended, Err(CommError::CancelledBy { peer: PeerId(0), .. })) && x[0].is_nan());
    }
    // No rank is lost.
    let all = comm.shrink()?;
    found.holds(all.size() == 3);
    let mut x = own(&all, 1000);
    all.all_reduce(&mut x, ReduceOp::Sum)?;
    found.got(&x);
    Ok(())
}

fn shrink(comm: &Communicator, _: Among<'_>, found: &mut Found) -> Result<(), CommError> {
    if comm.rank().0 == 1 {
        return Ok(());
    }
    let failed = comm.all_reduce(&mut own(comm, 1000), ReduceOp::Sum).err();
    found.holds(failed.is_some_and(|error| error.peer() == Some(PeerId(1))));
    let left = comm.shrink()?;
    found.holds((left.size(), left.rank().0) == (3, comm.rank().0.saturating_sub(1)));
    let mut x = own(&left, 100_000);
    left.all_reduce(&mut x, ReduceOp::Sum)?;
    found.got(&x);
    found.holds(matches!(comm.barrier(), Err(CommError::Poisoned(_))));
    Ok(())
}

fn admit(comm: &Communicator, _: Among<'_>, found: &mut Found) -> Result<(), CommError> {
    let transport = Arc::clone(comm.transport());
    let me = transport.me().0;
    let all = if me >= 2 {
        let first = Communicator::wait_for_admission(&transport, ms(20_000))?;
        if me == 2 { first.admit(&[PeerId(3)])? } else { first }
    } else {
        let pair = Communicator::of_first(transport, 2)?.with_deadline(ms(20_000));
        let three = pair.admit(&[PeerId(2)])?;
        let all = three.admit(&[PeerId(3)])?;
        // The old communicator still works.
        pair.barrier()?;
        all
    };
    found.holds((all.rank().0, all.size()) == (me, 4));
    let mut x = own(&all, 1000);
    all.all_reduce(&mut x, ReduceOp::Sum)?;
    found.got(&x);
    Ok(())
}

/// If members are fixed, a member that has left cannot be replaced: `shrink` returns an error.
fn shrink_refused(comm: &Communicator, _: Among<'_>, found: &mut Found) -> Result<(), CommError> {
    if comm.rank().0 == 1 {
        return Ok(());
    }
    let failed = comm.all_reduce(&mut own(comm, 1000), ReduceOp::Sum).err();
    found.holds(failed.is_some_and(|error| error.peer() == Some(PeerId(1))));
    found.holds(is_refused("shrink", comm, &comm.shrink()));
    // The remaining ranks can still exchange messages, so that they end properly.
    match comm.rank().0 {
        0 => comm.send(Rank(2), 6, b"the end")?,
        2 => found.holds(comm.recv(Rank(0), 6)? == b"the end"),
        _ => {}
    }
    Ok(())
}

fn admit_refused(comm: &Communicator, _: Among<'_>, found: &mut Found) -> Result<(), CommError> {
    let transport = Arc::clone(comm.transport());
    let awaited = Communicator::wait_for_admission(&transport, ms(20_000));
    found.holds(is_refused("wait_for_admission", comm, &awaited));
    if transport.me().0 < 2 {
        let pair = Communicator::of_first(transport, 2)?.with_deadline(ms(20_000));
        found.holds(is_refused("admit", comm, &pair.admit(&[PeerId(2)])));
        pair.barrier()?;
    }
    comm.barrier()
}

fn is_refused(name: &str, comm: &Communicator, outcome: &Result<Communicator, CommError>) -> bool {
    let reason = comm.transport().fixed();
    matches!(outcome, Err(CommError::Fixed { op, reason: said }) if *op == name && Some(*said) == reason)
}

fn lost(comm: &Communicator, _: Among<'_>, found: &mut Found) -> Result<(), CommError> {
    if comm.rank().0 == 3 {
        // A message that was sent before the rank leaves still arrives.
        return comm.send(Rank(0), 7, &vec![7; 100_000]);
    }
    let mut x = vec![1.0_f32; 300_000];
    let error = comm.all_reduce(&mut x, ReduceOp::Sum).err();
    found.holds(error.is_some_and(|error| error.peer() == Some(PeerId(3))));
    found.holds(x.iter().all(|v| v.is_nan()));
    if comm.rank().0 == 0 {
        found.holds(comm.recv(Rank(3), 7)? == vec![7; 100_000]);
        found.holds(matches!(comm.recv(Rank(3), 7), Err(CommError::PeerDown { peer: PeerId(3), .. })));
    }
    Ok(())
}

fn unlike(comm: &Communicator, _: Among<'_>, found: &mut Found) -> Result<(), CommError> {
    let mut x = vec![1.0_f32; 10 + comm.rank().index()];
    let error = comm.all_reduce(&mut x, ReduceOp::Sum).err();
    found.holds(matches!(error, Some(CommError::Mismatch { .. } | CommError::Aborted { .. })));
    // Messages still work on the failed communicator.
    let other = Rank(1 - comm.rank().0);
    comm.send(other, 3, b"still here")?;
    found.holds(comm.recv(other, 3)? == b"still here");
    Ok(())
}
