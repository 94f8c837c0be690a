//! Compares hystereses of the balance of pools: how long steps take whose measured times are noisy, and whose
//! ranks become slow and fast again, with the time that changes cost.

use anyhow::{Context, Result};
use farflung::base::{Nanos, Philox};
use farflung::parallel::pipeline::Pools;
use farflung::parallel::plan::{Hysteresis, Measured, PoolAdvice, PoolBalance, rates_of};

use crate::harness::{Report, Threshold};

/// Number of members of the pool of each stage at the beginning.
const POOL: usize = 3;
const STAGES: usize = 4;
const MICROBATCHES: u32 = 32;
const STEPS: u64 = 600;
/// Every so many steps, another member becomes slow, and the one before is fast again.
const CALM: u64 = 120;
/// Time of a microbatch on the middle member.
const MICROBATCH: f64 = 0.1;
/// Standard deviation of a measured time, relative to it.
const NOISE: f32 = 0.08;
/// Seconds that a move costs: the state of a stage, over a slow and a fast link. Where a move costs little, a
/// hysteresis of one step is better, by about a tenth: it reacts sooner, and its mistakes cost little. The
/// usual one is for slow links, and has no bound beside the best where moves are cheap.
const MOVES: [(f64, Threshold); 2] = [(30.0, Threshold::AtMost(1.05)), (3.0, Threshold::None)];
/// Seconds that new routes cost: an agreement between two steps.
const ROUTES: f64 = 0.2;

/// Which member is in which pool, and the rates with which microbatches are routed.
struct Swarm {
    members: Vec<Vec<usize>>,
    rates: Vec<u32>,
}

#[derive(Debug, Default, Clone, Copy)]
struct Tally {
    seconds: f64,
    routes: u32,
    moves: u32,
}

impl Swarm {
    fn pools(&self) -> Pools {
        Pools {
            sizes: self.members.iter().map(|pool| pool.len() as u32).collect(),
            rates: self.rates.clone(),
        }
    }

    /// Moves the member of a rank to the end of another pool. All rates are then those of these times.
    fn moves(&mut self, rank: usize, to: usize, time: impl Fn(usize) -> Nanos) -> Result<()> {
        let member = *self.members.concat().get(rank).context("a rank of the swarm")?;
        self.members.iter_mut().for_each(|pool| pool.retain(|&other| other != member));
        self.members.get_mut(to).context("a stage of the swarm")?.push(member);
        let times: Vec<Nanos> = self.members.concat().into_iter().map(time).collect();
        self.rates = rates_of(&Pools { rates: vec![1; times.len()], ..self.pools() }, &times);
        Ok(())
    }
}

/// Trains with one hysteresis.
fn trained(seed: u64, hysteresis: Hysteresis, a_move: f64) -> Result<Tally> {
    let count = POOL * STAGES;
    let members = (0..STAGES).map(|stage| (stage * POOL..(stage + 1) * POOL).collect()).collect();
    let mut swarm = Swarm { members, rates: vec![1; count] };
    let mut balance = PoolBalance::new(hysteresis);
    let mut seen = Tally::default();
    let draw = |at: u64| {
        let mut drawn = vec![0.0_f32; count];
        Philox::new(seed, at).fill_normal(1.0, &mut drawn);
        drawn
    };
    let usual = draw(u64::MAX);
    for step in 0..STEPS {
        let noise = draw(step);
        let slow = (step / CALM) as usize * 5 % count;
        let time = |member: usize| {
            let own = f64::from(0.3 * usual[member]).exp() * if member == slow { 3.0 } else { 1.0 };
            Nanos::from_secs_f64(MICROBATCH * own * f64::from(NOISE * noise[member]).exp())
        };
        let pools = swarm.pools();
        let ranks = swarm.members.concat();
        let mut busy = vec![0.0; count];
        for rank in pools.routes(MICROBATCHES)?.iter().flatten() {
            busy[rank.index()] += time(ranks[rank.index()]).as_secs_f64();
        }
        seen.seconds += busy.iter().copied().fold(0.0, f64::max);
        let measured: Vec<Measured> =
            ranks.iter().map(|&member| Measured { microbatch: time(member), rest: Nanos::ZERO }).collect();
        match balance.observe(&pools, MICROBATCHES, &measured, &[1.0; STAGES]) {
            PoolAdvice::Stay => {}
            PoolAdvice::Rates(rates) => {
                (swarm.rates, seen.routes) = (rates, seen.routes + 1);
                seen.seconds += ROUTES;
            }
            PoolAdvice::Moves { rank, to } => {
                swarm.moves(rank as usize, to as usize, time)?;
                seen.moves += 1;
                seen.seconds += a_move;
            }
        }
    }
    Ok(seen)
}

pub(super) fn run(report: &mut Report<'_>, quick: bool) -> Result<()> {
    MOVES.into_iter().try_for_each(|a_move| compared(report, if quick { 3 } else { 20 }, a_move))
}

/// Compares hystereses where a move costs `a_move` seconds, with `seeds` runs of each. `beside_best` is the
/// bound of the usual one beside the best.
fn compared(report: &mut Report<'_>, seeds: u32, (a_move, beside_best): (f64, Threshold)) -> Result<()> {
    let first = report.seed();
    let mean = |hysteresis: Hysteresis| -> Result<Tally> {
        let mut all = Tally::default();
        for seed in 0..seeds {
            let one = trained(first + u64::from(seed), hysteresis, a_move)?;
            all.seconds += one.seconds / f64::from(seeds);
            (all.routes, all.moves) = (all.routes + one.routes, all.moves + one.moves);
        }
        Ok(all)
    };
    let changes = |seen: Tally| f64::from(seen.routes + seen.moves) / f64::from(seeds);
    let usual = mean(Hysteresis::default())?;
    let none = mean(Hysteresis { percent: 0, steps: 1 })?;
    let mut best = f64::INFINITY;
    let of = format!("hysteresis, a move costs {a_move:.0} s");
    for percent in [0, 5, 10, 20, 40] {
        for steps in [1, 5, 20] {
            let seen = mean(Hysteresis { percent, steps })?;
            best = best.min(seen.seconds);
            let (time, name) = (seen.seconds / usual.seconds, format!("{of}: {percent}% in {steps} steps"));
            report.row(&format!("{name}: time, relative to the usual one"), time, "x", Threshold::None)?;
            report.row(&format!("{name}: changes in a run"), changes(seen), "1", Threshold::None)?;
        }
    }
    let time = usual.seconds / best;
    let metric = format!("{of}: time of the usual one, relative to the best of these");
    report.row(&metric, time, "x", beside_best)?;
    let metric = format!("{of}: time of the usual one, relative to none");
    report.row(&metric, usual.seconds / none.seconds, "x", Threshold::AtMost(0.95))?;
    let metric = format!("{of}: changes of the usual one, relative to none");
    report.row(&metric, changes(usual) / changes(none), "x", Threshold::AtMost(0.2))
}
