//! Tests of two levels of servers: compared with a plain loop over the same times, and resumed from several
//! steps.
#![cfg(feature = "sync")]
#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::thread;

use crate::synchronise::timed::{Cut, Trace, trace, trace_over};
use crate::synchronise::{CPU, Case, PLAIN, STEPS, elements, far, layout, local, make, random};
use farflung_base::{Link, Rank, Topology};
use farflung_comm::{Communicator, simulated};
use farflung_optim::sync::{ASYNC, AsynchronousSettings, HALOS, Servers, StepEnd, WorldSettings};

/// Microseconds per step of each rank. Steps of two ranks after which changes are sent (every third) end at
/// least 1809 us apart.
const SPEEDS: [u64; 5] = [10_000, 16_877, 25_617, 12_347, 18_211];
/// Latency between regions, in microseconds.
const AWAY: u64 = 3_331;
const EVERY: u64 = 3;

fn regions() -> Vec<Vec<Rank>> {
    vec![vec![Rank(0), Rank(2)], vec![Rank(1), Rank(3), Rank(4)]]
}

/// Returns a topology of five ranks in two regions.
fn network(away: u64) -> Topology {
    let mut topology = Topology::uniform(5, "10gbit,1us".parse().unwrap());
    let link: Link = format!("10gbit,{away}us").parse().unwrap();
    for (here, there) in [(0, 1), (0, 3), (0, 4), (2, 1), (2, 3), (2, 4)] {
        topology.set_link(Rank(here), Rank(there), link);
        topology.set_link(Rank(there), Rank(here), link);
    }
    topology
}

fn case(servers: Servers, world: WorldSettings) -> Case {
    let asynchronous = AsynchronousSettings { servers, world, ..PLAIN.asynchronous };
    Case { delay: 0, every: EVERY, asynchronous, ..PLAIN }
}

/// Delayed Nesterov in f64.
struct Server {
    model: Vec<f64>,
    momentum: Vec<f64>,
    sum: Vec<f64>,
    came: u64,
    outer: (f64, f64),
    buffer: u64,
}

impl Server {
    fn new(outer: (f64, f64), buffer: u64) -> Self {
        let model: Vec<f64> = random(1).into_iter().map(f64::from).collect();
        let zeros = vec![0.0; model.len()];
        Self { momentum: zeros.clone(), sum: zeros, model, came: 0, outer, buffer }
    }

    fn push(&mut self, change: &[f64]) {
        let ((lr, mu), part) = (self.outer, 1.0 / self.buffer as f64);
        self.came += 1;
        for (i, d) in change.iter().enumerate() {
            self.sum[i] += d;
            let mut step = d * part;
            if self.came.is_multiple_of(self.buffer) {
                self.momentum[i] = mu * self.momentum[i] + self.sum[i] * part;
                self.sum[i] = 0.0;
                step += mu * self.momentum[i];
            }
            self.model[i] -= lr * step;
        }
    }
}

/// Events of the plain loop, in the order of their times.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// A rank has finished a step.
    Step(usize, u64),
    /// A region's message has arrived at the world server.
    Sent(usize, usize),
    /// The world server's answer has arrived at a region.
    Answered(usize, usize),
}

/// Computes the method as in its paper, in f64, but without losing what workers sent in the meantime. Returns
/// the parameters of each rank after each step; after the last step, the world's model.
fn plain(outer: (f64, f64), world: WorldSettings, away: u64) -> Vec<Vec<Vec<f64>>> {
    let regions: Vec<Vec<usize>> = regions().iter().map(|r| r.iter().map(|r| r.index()).collect()).collect();
    let home = |rank: usize| regions.iter().position(|r| r.contains(&rank)).unwrap();
    let mut local_servers: Vec<Server> = regions.iter().map(|r| Server::new(outer, r.len() as u64)).collect();
    let mut global = Server::new((world.lr, world.momentum), 2);
    let start = global.model.clone();
    let mut params = vec![start.clone(); 5];
    let mut pending = vec![vec![0.0; start.len()]; 2];
    let mut came = [0_u64; 2];
    let weight = |region: usize| 2.0 * regions[region].len() as f64 / 5.0;
    let mut trace = vec![Vec::new(); 5];
    let mut messages: Vec<Vec<f64>> = Vec::new();
    let mut queue: BinaryHeap<Reverse<(u64, Event)>> = (0..5)
        .flat_map(|rank| (1..=STEPS).map(move |step| Reverse((step * SPEEDS[rank], Event::Step(rank, step)))))
        .collect();
    let until = |region: usize| if region == 0 { 0 } else { away };
    while let Some(Reverse((at, event))) = queue.pop() {
        match event {
            Event::Step(rank, step) => {
                for (p, g) in params[rank].iter_mut().zip(local(rank, step)) {
                    *p -= f64::from(0.01 * g);
                }
                if step % EVERY == 0 {
                    let region = home(rank);
                    // A worker continues from its region's model as of when it last sent a change.
                    let change: Vec<f64> = trace_base(&mut trace[rank], &start)
                        .iter()
                        .zip(&params[rank])
                        .map(|(base, now)| base - now)
                        .collect();
                    let before = local_servers[region].model.clone();
                    local_servers[region].push(&change);
                    for (i, pending) in pending[region].iter_mut().enumerate() {
                        *pending += before[i] - local_servers[region].model[i];
                    }
                    params[rank].clone_from(&local_servers[region].model);
                    came[region] += 1;
                    let every = if world.every == 0 { 2 * regions[region].len() as u64 } else { world.every };
                    if came[region].is_multiple_of(every) {
                        messages.push(std::mem::replace(&mut pending[region], vec![0.0; start.len()]));
                        let sent = Event::Sent(region, messages.len() - 1);
                        queue.push(Reverse((at + until(region), sent)));
                    }
                }
                if step < STEPS {
                    trace[rank].push(params[rank].clone());
                }
            }
            Event::Sent(region, message) => {
                let change: Vec<f64> = messages[message].iter().map(|d| weight(region) * d).collect();
                global.push(&change);
                messages.push(global.model.clone());
                let answered = Event::Answered(region, messages.len() - 1);
                queue.push(Reverse((at + until(region), answered)));
            }
            Event::Answered(region, message) => {
                for (x, world_x) in local_servers[region].model.iter_mut().zip(&messages[message]) {
                    *x = world.mixing * *x + (1.0 - world.mixing) * world_x;
                }
            }
        }
    }
    for (region, pending) in pending.iter().enumerate() {
        let change: Vec<f64> = pending.iter().map(|d| weight(region) * d).collect();
        global.push(&change);
    }
    for rank in &mut trace {
        rank.push(global.model.clone());
    }
    trace
}

/// Returns what a rank's next change is measured from: its parameters after its last change.
fn trace_base<'a>(trace: &'a mut [Vec<f64>], start: &'a Vec<f64>) -> &'a Vec<f64> {
    let done = trace.len() / EVERY as usize * EVERY as usize;
    if done == 0 { start } else { &trace[done - 1] }
}

fn compare(got: &[Trace], wanted: &[Vec<Vec<f64>>], steps: usize) {
    for (rank, (got, wanted)) in got.iter().zip(wanted).enumerate() {
        for (step, wanted) in wanted.iter().enumerate().take(steps) {
            let off = far(&got.0[step], wanted);
            assert!(off < 1e-5, "rank {rank}, step {}: {off}", step + 1);
        }
    }
    assert!(got.windows(2).all(|pair| pair[0].0.last() == pair[1].0.last()), "equal at the end");
}

#[test]
fn two_levels_do_what_a_plain_loop_does() {
    let worlds = [
        WorldSettings { lr: 1.0, momentum: 0.0, every: 0, mixing: 0.75 },
        WorldSettings { lr: 0.8, momentum: 0.0, every: 3, mixing: 0.0 },
        WorldSettings { lr: 0.6, momentum: 0.5, every: 2, mixing: 0.5 },
    ];
    for world in worlds {
        for (servers, away) in [(Servers::Central, AWAY), (Servers::Central, 1), (Servers::Sharded, 1)] {
            let network = network(away);
            let case = Case { momentum: 0.9, ..case(servers, world) };
            let got = trace_over(&HALOS, case, (&SPEEDS, &network, &regions()), Cut::Never);
            // The order in which regions send their last changes matters if a buffer is full between them.
            let steps = if world.momentum == 0.0 { STEPS } else { STEPS - 1 } as usize;
            compare(&got, &plain((0.7, 0.9), world, away), steps);
        }
    }
}

#[test]
fn one_region_that_keeps_its_model_is_async() {
    let world = WorldSettings { mixing: 1.0, every: 1, ..WorldSettings::default() };
    for servers in [Servers::Sharded, Servers::Central] {
        for delay in [0, 1] {
            let case = Case { delay, ..case(servers, world) };
            let (halos, flat) =
                (trace(&HALOS, case, &SPEEDS, Cut::Never), trace(&ASYNC, case, &SPEEDS, Cut::Never));
            for (halos, flat) in halos.iter().zip(&flat) {
                let last = STEPS as usize - 1;
                assert!(halos.0[..last] == flat.0[..last], "{servers:?}, delay {delay}");
                // The world server adds up the moves of the region's model.
                let wanted: Vec<f64> = flat.0[last].iter().map(|x| f64::from(*x)).collect();
                assert!(far(&halos.0[last], &wanted) < 1e-6, "{servers:?}, delay {delay}");
            }
        }
    }
}

#[test]
fn what_was_settled_goes_on_from_what_was_saved() {
    let network = network(AWAY);
    let world = WorldSettings { lr: 0.8, momentum: 0.5, every: 4, mixing: 0.5 };
    for servers in [Servers::Sharded, Servers::Central] {
        for (delay, codec) in [(0, "none"), (1, "none"), (1, "int8"), (0, "rolling:4/topk:0.3")] {
            let case = Case { delay, codec, ..case(servers, world) };
            let run = |cut| trace_over(&HALOS, case, (&SPEEDS, &network, &regions()), cut);
            assert!(run(Cut::Never) == run(Cut::Never), "{servers:?}, delay {delay}, {codec}");
            for step in [4, 9, 12, 25] {
                let (settled, restored) = (run(Cut::Settled(step)), run(Cut::Restored(step)));
                for (rank, (settled, restored)) in settled.iter().zip(&restored).enumerate() {
                    assert!(settled.0 == restored.0, "{servers:?}, delay {delay}, {codec}, {step}, {rank}");
                }
            }
        }
    }
}

/// Returns the payload bytes that all ranks sent in a run of this number of rounds of all workers.
fn across(codec: &'static str, rounds: u64) -> u64 {
    let topology = network(1);
    let world = WorldSettings { every: 2, ..WorldSettings::default() };
    let rank = |comm: Communicator| {
        let comm = comm.with_regions(regions()).unwrap();
        let mut params = CPU.tensor(&random(1), layout().len()).unwrap();
        let case = Case { codec, ..case(Servers::Central, world) };
        let mut sync = make(&HALOS, case, comm.clone(), &[], &params);
        for round in 1..=rounds {
            comm.barrier().unwrap();
            sync.mix(&mut params, StepEnd { step: EVERY * round, last: false }, 1.0).unwrap();
        }
        comm.barrier().unwrap();
        comm.stats().sent.payload.0
    };
    let sent: Vec<u64> = thread::scope(|scope| {
        let all: Vec<_> = simulated::cluster(&topology)
            .into_iter()
            .map(|endpoint| scope.spawn(move || rank(Communicator::new(endpoint))))
            .collect();
        all.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    sent.iter().sum()
}

#[test]
fn bytes_are_those_of_the_formula() {
    let values = elements().len() as u64;
    let used = |codec| across(codec, 4) - across(codec, 2);
    // Two rounds of five workers, of which three are not on their server's rank: 17 bytes in front of a change,
    // 9 in front of a model, and one for the kind of message. In both rounds together, the second region's six
    // changes make three messages to the world and three answers, with another byte each.
    let inside = 2 * 3 * (1 + 17 + 9 + 8 * values);
    let barriers = 2 * 200;
    let plain = inside + 3 * (2 + 17 + 9 + 8 * values);
    let got = used("none");
    assert!(got >= plain && got < plain + barriers, "{got}, {plain}");
    // The second region's three messages to the world are in 8 bits.
    let coded = plain - 3 * 3 * values;
    let got = used("int8");
    assert!(got > coded && got < coded + barriers + 3 * values / 8, "{got}, {coded}");
}
