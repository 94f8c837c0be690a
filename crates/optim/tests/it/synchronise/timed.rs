//! Ranks that train at different speeds, on a simulated network with a virtual clock.

use std::collections::BTreeMap;
use std::thread;

use farflung_base::{Nanos, Rank, Topology};
use farflung_comm::{Communicator, simulated};
use farflung_optim::sync::{StepEnd, SyncMethod};

use super::{CPU, Case, STEPS, layout, local, make, random};

/// The step after which the method is interrupted, and how.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Cut {
    Never,
    /// The method waits for what is in flight, as before a checkpoint.
    Settled(u64),
    /// The method waits for what is in flight, and then continues from the saved state.
    Restored(u64),
}

/// A rank's parameters after each step, and its clock at the end.
pub(crate) type Trace = (Vec<Vec<f32>>, Nanos);

/// Trains on ranks of different speeds, over a network whose latency is negligible compared with a step.
pub(crate) fn trace(method: &SyncMethod, case: Case, speeds: &[u64], cut: Cut) -> Vec<Trace> {
    let topology = Topology::uniform(speeds.len(), "10gbit,1us".parse().unwrap());
    trace_over(method, case, (speeds, &topology, &[]), cut)
}

/// Trains like [`trace`] over this network. If `regions` are given, ranks are grouped into them.
pub(crate) fn trace_over(
    method: &SyncMethod,
    case: Case,
    (speeds, topology, regions): (&[u64], &Topology, &[Vec<Rank>]),
    cut: Cut,
) -> Vec<Trace> {
    let rank = |comm: Communicator| {
        let named = |comm: Communicator| comm.with_regions(regions.to_vec()).unwrap();
        let comm = if regions.is_empty() { comm } else { named(comm) };
        let number = comm.rank().index();
        let mut params = CPU.tensor(&random(1), layout().len()).unwrap();
        let mut sync = make(method, case, comm.clone(), &[], &params);
        let mut trace = Vec::new();
        for step in 1..=STEPS {
            let after = StepEnd { step, last: step == STEPS };
            let before: Vec<f32> = params.to_vec().unwrap();
            let moved: Vec<f32> = before.iter().zip(local(number, step)).map(|(p, g)| p - 0.01 * g).collect();
            params.write(&moved).unwrap();
            comm.advance(Nanos::from_micros(speeds[number]));
            sync.mix(&mut params, after, 1.0).unwrap();
            if sync.is_due(after) {
                sync.exchange(&params, after, 1.0).unwrap();
                sync.prepare().unwrap();
                sync.commit(&mut params).unwrap();
            }
            trace.push(params.to_vec().unwrap());
            let (Cut::Settled(at) | Cut::Restored(at)) = cut else { continue };
            if at != step {
                continue;
            }
            sync.wait_in_flight().unwrap();
            let states = sync.states().into_iter().chain(sync.own_states());
            let states: BTreeMap<String, Vec<f32>> =
                states.map(|(name, state)| (name.to_owned(), state.to_vec().unwrap())).collect();
            comm.barrier().unwrap();
            if cut == Cut::Restored(step) {
                let steps = sync.steps();
                drop(sync);
                comm.barrier().unwrap();
                sync =
                    make(method, case, comm.clone(), &[], &CPU.tensor(&random(2), layout().len()).unwrap());
                sync.restore(steps, &|name| states.get(name).cloned()).unwrap();
                comm.barrier().unwrap();
            }
        }
        comm.barrier().unwrap();
        (trace, comm.now())
    };
    thread::scope(|scope| {
        let ranks: Vec<_> = simulated::cluster(topology)
            .into_iter()
            .map(|endpoint| scope.spawn(|| rank(Communicator::new(endpoint))))
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}
