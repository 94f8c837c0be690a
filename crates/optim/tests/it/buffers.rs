//! The number of buffers that each method of synchronisation states, compared with what it holds and saves.
#![cfg(feature = "sync")]
#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

use std::thread;

use crate::synchronise::{CPU, Case, PLAIN, elements, layout, local, make, random};
use farflung_base::Topology;
use farflung_comm::{Communicator, simulated};
use farflung_optim::sync::{
    AsynchronousSettings, BufferSettings, Buffers, CHOCO, METHODS, Servers, StepEnd, SyncMethod,
    Synchroniser, ZERO_ONE,
};

const STEPS: u64 = 12;

/// Returns a debug text without its averages.
fn without_averages(text: &str) -> String {
    let mut kept = String::new();
    let mut rest = text;
    while let Some((before, average)) = rest.split_once(": Average {") {
        kept.push_str(before);
        let mut depth = 1;
        let end = average.find(|c: char| {
            depth += i32::from(c == '{') - i32::from(c == '}');
            depth == 0
        });
        rest = &average[end.unwrap()..];
    }
    kept + rest
}

/// Counts the buffers in the debug text of a method: its tensors, and its vectors of numbers. Vectors that are
/// divided among servers count in sum, and averages, which are counted elsewhere, do not count.
fn held(sync: &dyn Synchroniser) -> usize {
    let text = without_averages(&format!("{sync:?}"));
    let is_number = |word: &&str| word.contains('.') && word.parse::<f32>().is_ok();
    let numbers = text.split([',', '[', ']', ' ']).filter(is_number).count();
    text.matches("Tensor(").count() + numbers / elements().len()
}

/// Trains on three ranks. Returns the most buffers that a rank held, and the most that it would have saved.
fn measured(method: &SyncMethod, case: Case) -> Buffers {
    let rank = |comm: Communicator| {
        let number = comm.rank().index();
        let mut params = CPU.tensor(&random(1), layout().len()).unwrap();
        let mut sync = make(method, case, comm.clone(), &[1.0; 3], &params);
        let (mut most, mut saved) = (0, 0);
        for step in 1..=STEPS {
            let after = StepEnd { step, last: step == STEPS };
            let moved: Vec<f32> = params.to_vec::<f32>().unwrap();
            let moved: Vec<f32> = moved.iter().zip(local(number, step)).map(|(p, g)| p - 0.01 * g).collect();
            params.write(&moved).unwrap();
            sync.mix(&mut params, after, 1.0).unwrap();
            let mut meets = sync.is_due(after);
            while meets {
                sync.exchange(&params, after, 1.0).unwrap();
                sync.prepare().unwrap();
                most = most.max(held(&*sync));
                sync.commit(&mut params).unwrap();
                meets = sync.needs_another_exchange();
            }
            sync.start_exchanges(&params, after, 1.0).unwrap();
            most = most.max(held(&*sync));
            if step % 3 != 2 && !after.last {
                sync.gather_common(&params).unwrap();
                sync.wait_in_flight().unwrap();
                most = most.max(held(&*sync));
                let own = usize::from(sync.replicas_differ());
                saved = saved.max(sync.states().len() + sync.own_states().len() + own);
            }
            comm.barrier().unwrap();
        }
        Buffers { held: most, saved }
    };
    let topology = Topology::uniform(3, "1gbit,1ms".parse().unwrap());
    thread::scope(|scope| {
        let ranks: Vec<_> = simulated::cluster(&topology)
            .into_iter()
            .map(|endpoint| scope.spawn(|| rank(Communicator::new(endpoint))))
            .collect();
        let ranks: Vec<Buffers> = ranks.into_iter().map(|rank| rank.join().unwrap()).collect();
        let most = |of: fn(&Buffers) -> usize| ranks.iter().map(of).max().unwrap();
        Buffers { held: most(|rank| rank.held), saved: most(|rank| rank.saved) }
    })
}

#[test]
fn methods_hold_and_save_what_they_state() {
    for method in METHODS.iter().filter(|method| method.name != ZERO_ONE.name) {
        let coded = if method.codes_server_changes { "sign+ef" } else { "none" };
        let codecs = if method.name == CHOCO.name { ["sign", "sign"] } else { ["none", coded] };
        for codec in codecs {
            // The first rank serves the whole model.
            let asynchronous = AsynchronousSettings { servers: Servers::Central, ..PLAIN.asynchronous };
            let case = Case { every: 3, delay: 1, codec, asynchronous, ..PLAIN };
            let (momentum, world_momentum) = (case.momentum, case.asynchronous.world.momentum);
            let (coded, states) = (codec != "none" && method.codes_server_changes, 0);
            let settings = BufferSettings { momentum, world_momentum, states, coded, feedback: coded };
            let (stated, found) = ((method.buffers)(&settings), measured(method, case));
            let said = format!("{} {codec}: states {stated:?}, measured {found:?}", method.name);
            assert_eq!(found.saved, stated.saved, "{said}");
            // A worker need not hold all vectors at the same time, and a mean that arrives is not in the text.
            let fewer = if method.timed { 2 } else { 0 };
            assert!((stated.held - fewer..=stated.held).contains(&found.held), "{said}");
        }
    }
}
