//! Tests of asynchronous model averaging: compared with a plain loop over the same clocks, and resumed after
//! any synchronisation.
#![cfg(feature = "sync")]
#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

use std::thread;

use crate::synchronise::{CPU, Case, PLAIN, STEPS, far, layout, local, make, random};
use farflung_base::{Nanos, Topology};
use farflung_comm::{Communicator, simulated};
use farflung_optim::sync::{ASYNC_AVERAGE, AsynchronousSettings, StepEnd};

/// Microseconds per step of each rank.
const SPEEDS: [u64; 3] = [10_000, 16_877, 25_617];
/// Weights in a mean, as of replicas with unequal numbers of tokens.
const WEIGHTS: [f64; 3] = [0.5, 1.0, 1.5];

/// Result of a rank: its parameters after each step, and the bytes that it sent.
#[derive(Debug, PartialEq)]
struct Seen {
    params: Vec<Vec<f32>>,
    sent: u64,
}

fn case(interval: u64, warmup: u64, meet_every: u64) -> Case {
    let interval = Nanos::from_micros(interval);
    let asynchronous = AsynchronousSettings { interval, warmup, meet_every, ..PLAIN.asynchronous };
    Case { asynchronous, ..PLAIN }
}

/// Trains on ranks of these speeds. With `cut`, the method is replaced by one with its saved state after that
/// step.
fn trace(case: Case, speeds: &[u64], cut: Option<u64>) -> Vec<Seen> {
    let rank = |comm: Communicator| {
        let number = comm.rank().index();
        let mut params = CPU.tensor(&random(1), layout().len()).unwrap();
        let mut sync = make(&ASYNC_AVERAGE, case, comm.clone(), &WEIGHTS[..speeds.len()], &params);
        let mut seen = Vec::new();
        let before = comm.stats().sent.payload.0;
        for step in 1..=STEPS {
            let after = StepEnd { step, last: step == STEPS };
            let mut grads = CPU.tensor(&local(number, step), layout().len()).unwrap();
            comm.advance(Nanos::from_micros(speeds[number]));
            assert_eq!(sync.averages_gradients(), step <= case.asynchronous.warmup);
            if let Some(average) = sync.gradients() {
                farflung_optim::weigh(&mut grads, WEIGHTS[number]).unwrap();
                average.all(&mut grads).unwrap();
                average.commit();
            }
            let moved: Vec<f32> = params.to_vec::<f32>().unwrap();
            let grads = grads.to_vec::<f32>().unwrap();
            let moved: Vec<f32> = moved.iter().zip(grads).map(|(p, g)| p - 0.01 * g).collect();
            params.write(&moved).unwrap();
            sync.mix(&mut params, after, 1.0).unwrap();
            if sync.is_due(after) {
                sync.exchange(&params, after, 1.0).unwrap();
                sync.rollback();
                sync.exchange(&params, after, 1.0).unwrap();
                sync.prepare().unwrap();
                sync.commit(&mut params).unwrap();
            }
            seen.push(params.to_vec().unwrap());
            if cut == Some(step) {
                sync.wait_in_flight().unwrap();
                assert!(sync.states().is_empty() && sync.own_states().is_empty());
                let steps = sync.steps();
                let other = CPU.tensor(&random(2), layout().len()).unwrap();
                sync = make(&ASYNC_AVERAGE, case, comm.clone(), &WEIGHTS[..speeds.len()], &other);
                sync.restore(steps, &|_| None).unwrap();
            }
        }
        comm.barrier().unwrap();
        Seen { params: seen, sent: comm.stats().sent.payload.0 - before }
    };
    let topology = Topology::uniform(speeds.len(), "10gbit,1us".parse().unwrap());
    thread::scope(|scope| {
        let ranks: Vec<_> = simulated::cluster(&topology)
            .into_iter()
            .map(|endpoint| scope.spawn(|| rank(Communicator::new(endpoint))))
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// A rank of the plain loop.
struct Plain {
    x: Vec<f64>,
    /// Number of rounds joined; `taken` is that of rounds applied.
    joined: usize,
    taken: usize,
    due: u64,
}

/// A round: what each rank sent, and when.
#[derive(Clone)]
struct Round(Vec<Option<(u64, Vec<f64>)>>);

impl Round {
    /// Returns when the last rank joined; `None` if some have not.
    fn arrives(&self) -> Option<u64> {
        self.0
            .iter()
            .map(|sent| sent.as_ref().map(|(at, _)| *at))
            .collect::<Option<Vec<_>>>()?
            .into_iter()
            .max()
    }

    fn moved(&self, rank: usize, i: usize) -> f64 {
        let sent = |rank: usize| self.0[rank].as_ref().unwrap().1[i];
        let ranks = self.0.len();
        (0..ranks).map(|r| WEIGHTS[r] * sent(r)).sum::<f64>() / ranks as f64 - sent(rank)
    }
}

/// Computes the method in f64: ranks finish their steps at multiples of their speeds, and a round arrives when
/// the last rank has joined. Returns the parameters of each rank after each step.
fn plain(interval: u64, speeds: &[u64]) -> Vec<Vec<Vec<f64>>> {
    let start: Vec<f64> = random(1).into_iter().map(f64::from).collect();
    let new = || Plain { x: start.clone(), joined: 0, taken: 0, due: 0 };
    let mut ranks: Vec<Plain> = speeds.iter().map(|_| new()).collect();
    let mut rounds: Vec<Round> = Vec::new();
    let mut trace = vec![Vec::new(); speeds.len()];
    let mut events: Vec<(u64, usize, u64)> = (0..speeds.len())
        .flat_map(|rank| (1..=STEPS).map(move |step| (step, rank)))
        .map(|(step, rank)| (step * speeds[rank], rank, step))
        .collect();
    events.sort_unstable();
    let join = |rounds: &mut Vec<Round>, number: usize, rank: usize, plain: &mut Plain, now: u64| {
        rounds.resize(rounds.len().max(number + 1), Round(vec![None; speeds.len()]));
        rounds[number].0[rank] = Some((now, plain.x.clone()));
        plain.joined += 1;
    };
    let take = |rounds: &[Round], rank: usize, plain: &mut Plain| {
        let round = &rounds[plain.taken];
        plain.x.iter_mut().enumerate().for_each(|(i, x)| *x += round.moved(rank, i));
        plain.taken += 1;
    };
    for (now, rank, step) in events {
        let mine = &mut ranks[rank];
        for (x, g) in mine.x.iter_mut().zip(local(rank, step)) {
            *x -= f64::from(0.01 * g);
        }
        if mine.joined > mine.taken && rounds[mine.taken].arrives().is_some_and(|at| at < now) {
            take(&rounds, rank, mine);
            mine.due = now + interval;
        }
        if mine.joined == mine.taken && step < STEPS && now >= mine.due {
            let number = mine.joined;
            join(&mut rounds, number, rank, mine, now);
        }
        trace[rank].push(mine.x.clone());
    }
    let all = ranks.iter().map(|rank| rank.joined).max().unwrap();
    for (rank, mine) in ranks.iter_mut().enumerate().filter(|(_, mine)| mine.joined < all) {
        if mine.taken < mine.joined {
            take(&rounds, rank, mine);
        }
        join(&mut rounds, all - 1, rank, mine, 0);
    }
    for (rank, mine) in ranks.iter_mut().enumerate().filter(|(_, mine)| mine.taken < all) {
        take(&rounds, rank, mine);
    }
    let count = ranks.len() as f64;
    let mean: Vec<f64> = (0..start.len())
        .map(|i| ranks.iter().zip(WEIGHTS).map(|(rank, w)| w * rank.x[i]).sum::<f64>() / count)
        .collect();
    for trace in &mut trace {
        trace.last_mut().unwrap().clone_from(&mean);
    }
    trace
}

#[test]
fn it_does_what_a_plain_loop_over_the_same_clocks_does() {
    for interval in [0, 30_000, 70_000] {
        let got = trace(case(interval, 0, 1000), &SPEEDS, None);
        let wanted = plain(interval, &SPEEDS);
        for (rank, (got, wanted)) in got.iter().zip(&wanted).enumerate() {
            for (step, (got, wanted)) in got.params.iter().zip(wanted).enumerate() {
                let off = far(got, wanted);
                assert!(off < 1e-5, "every {interval} us, rank {rank}, step {}: {off}", step + 1);
            }
        }
        assert!(got.windows(2).all(|pair| pair[0].params.last() == pair[1].params.last()));
        // Replicas train on in the meantime, so they differ.
        assert!(got[0].params[9] != got[1].params[9]);
    }
}

#[test]
fn the_timer_says_how_much_is_sent_and_a_round_is_an_average_of_parameters() {
    let values = crate::synchronise::elements().len() as u64;
    let all =
        |interval| trace(case(interval, 0, 1000), &[10_000; 3], None).iter().map(|s| s.sent).sum::<u64>();
    // One round per step, one per three steps, or one in all, and the mean after the last step; all else is
    // small messages. The last synchronisation is done twice here, so it takes two means.
    for (interval, rounds) in [(0, 26), (15_000, 9), (1_000_000, 1)] {
        let (sent, round) = (all(interval), 4 * values * 2 * 2);
        let wanted = (rounds + 2) * round;
        assert!((wanted..wanted + 800).contains(&sent), "{interval}: {sent}, not {wanted}");
    }
}

#[test]
fn in_the_warm_up_gradients_are_averaged() {
    let got = trace(case(0, STEPS, 1000), &SPEEDS, None);
    let mut x: Vec<f64> = random(1).into_iter().map(f64::from).collect();
    for step in 1..=STEPS {
        for (rank, weight) in WEIGHTS.iter().enumerate() {
            x.iter_mut().zip(local(rank, step)).for_each(|(x, g)| *x -= 0.01 * weight / 3.0 * f64::from(g));
        }
        for seen in &got {
            assert!(far(&seen.params[step as usize - 1], &x) < 1e-5, "{step}");
        }
    }
    let short = trace(case(0, 5, 1000), &SPEEDS, None);
    assert!(short.iter().all(|seen| seen.params[..5] == got[0].params[..5]));
    assert!(short[0].params[7] != short[1].params[7]);
}

#[test]
fn it_has_the_same_bits_twice_and_goes_on_from_any_meeting() {
    for (interval, warmup) in [(0, 0), (40_000, 4), (70_000, 0)] {
        let case = case(interval, warmup, 6);
        let whole = trace(case, &SPEEDS, None);
        assert!(trace(case, &SPEEDS, None) == whole);
        for cut in [2, 6, 12, 24].into_iter().filter(|&cut| cut >= 6 || cut <= warmup) {
            let again = trace(case, &SPEEDS, Some(cut));
            let params = |seen: &[Seen]| seen.iter().map(|s| s.params.clone()).collect::<Vec<_>>();
            assert!(params(&again) == params(&whole), "every {interval} us, cut after {cut}");
        }
    }
}
