//! Tests of workers that move a model on servers, each at its own times: compared with plain loops over the
//! same times, and resumed from several steps.
#![cfg(feature = "sync")]
#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

use std::thread;

use crate::synchronise::timed::{Cut, Trace, trace};
use crate::synchronise::{CPU, Case, PLAIN, STEPS, elements, far, layout, local, make, random};
use farflung_base::{Nanos, Rank, Topology};
use farflung_comm::{Communicator, simulated};
use farflung_compress::{CodecSpec, Compressor as _, Payload, RoundKey};
use farflung_optim::sync::{
    ASYNC, AsynchronousSettings, BOUNDED_STALE, DECOUPLED, PARAMETER_SERVER, Quorum, Servers, StepEnd,
};

/// Microseconds per step of each rank. Before their last steps, no two ranks finish steps less than 553 us
/// apart.
const SPEEDS: [u64; 3] = [10_000, 16_877, 25_617];

/// Returns a case whose workers wait for answers.
fn case(servers: Servers, settings: AsynchronousSettings) -> Case {
    Case { delay: 0, every: 3, asynchronous: AsynchronousSettings { servers, ..settings }, ..PLAIN }
}

/// Asynchronous local SGD as in its paper, in f64: workers finish in the order of their clocks, and all
/// continue from a server's model. Returns the parameters of each rank after each step but the last, after
/// which all synchronise.
fn plain(every: u64, outer: (f64, f64), buffer: u64, speeds: &[u64]) -> Vec<Vec<Vec<f64>>> {
    let start: Vec<f64> = random(1).into_iter().map(f64::from).collect();
    let (lr, mu) = outer;
    let mut model = start.clone();
    let (mut momentum, mut sum, mut gathered) = (vec![0.0; model.len()], vec![0.0; model.len()], 0);
    let mut params = vec![start.clone(); speeds.len()];
    let mut base = params.clone();
    let mut trace = vec![Vec::new(); speeds.len()];
    let mut events: Vec<(u64, usize, u64)> = (0..speeds.len())
        .flat_map(|rank| (1..=STEPS).map(move |step| (step, rank)))
        .map(|(step, rank)| (step * speeds[rank], rank, step))
        .collect();
    events.sort_unstable();
    for (_, rank, step) in events {
        for (p, g) in params[rank].iter_mut().zip(local(rank, step)) {
            *p -= f64::from(0.01 * g);
        }
        if step % every == 0 {
            gathered += 1;
            for i in 0..model.len() {
                let d = base[rank][i] - params[rank][i];
                sum[i] += d;
                let mut move_by = d / buffer as f64;
                if gathered % buffer == 0 {
                    momentum[i] = mu * momentum[i] + sum[i] / buffer as f64;
                    sum[i] = 0.0;
                    move_by += mu * momentum[i];
                }
                model[i] -= lr * move_by;
            }
            params[rank].clone_from(&model);
            base[rank].clone_from(&model);
        }
        if step < STEPS {
            trace[rank].push(params[rank].clone());
        }
    }
    trace
}

fn compare(got: &[Trace], wanted: &[Vec<Vec<f64>>]) {
    for (rank, (got, wanted)) in got.iter().zip(wanted).enumerate() {
        for (step, wanted) in wanted.iter().enumerate() {
            let off = far(&got.0[step], wanted);
            assert!(off < 1e-5, "rank {rank}, step {}: {off}", step + 1);
        }
    }
    assert!(got.windows(2).all(|pair| pair[0].0.last() == pair[1].0.last()), "equal at the end");
}

#[test]
fn delayed_nesterov_does_what_plain_loops_do() {
    for servers in [Servers::Sharded, Servers::Central] {
        for (speeds, buffer, momentum) in [(&SPEEDS[..], 0, 0.9), (&SPEEDS[..2], 3, 0.9), (&SPEEDS, 2, 0.0)] {
            let case = case(servers, AsynchronousSettings { buffer, ..PLAIN.asynchronous });
            let case = Case { momentum, ..case };
            let got = trace(&ASYNC, case, speeds, Cut::Never);
            let buffer = if buffer == 0 { speeds.len() as u64 } else { buffer };
            compare(&got, &plain(3, (0.7, momentum), buffer, speeds));
        }
    }
}

#[test]
fn a_parameter_server_does_what_plain_loops_do_and_a_worker_alone_is_sgd() {
    for speeds in [&SPEEDS[..], &SPEEDS[..1]] {
        let case = case(Servers::Sharded, PLAIN.asynchronous);
        let got = trace(&PARAMETER_SERVER, case, speeds, Cut::Never);
        compare(&got, &plain(1, (1.0, 0.0), speeds.len() as u64, speeds));
    }
    let alone = trace(&PARAMETER_SERVER, case(Servers::Central, PLAIN.asynchronous), &[10_000], Cut::Never);
    let mut params: Vec<f64> = random(1).into_iter().map(f64::from).collect();
    for step in 1..=STEPS {
        params.iter_mut().zip(local(0, step)).for_each(|(p, g)| *p -= f64::from(0.01 * g));
        assert!(far(&alone[0].0[step as usize - 1], &params) < 1e-6);
    }
}

#[test]
fn nobody_waits_for_the_slowest_unless_the_bound_says_so() {
    // Time in ms at which each rank finished each step, without any synchronisation of all.
    let clock = |method, staleness| {
        let settings = AsynchronousSettings { staleness, meet_every: 1000, ..PLAIN.asynchronous };
        let case = case(Servers::Sharded, settings);
        let topology = Topology::uniform(2, "10gbit,1us".parse().unwrap());
        let rank = |comm: Communicator| {
            let number = comm.rank().index();
            let mut params = CPU.tensor(&random(1), layout().len()).unwrap();
            let mut sync = make(method, case, comm.clone(), &[], &params);
            let begun = comm.now();
            let mut done = Vec::new();
            for step in 1..=10 {
                comm.advance(Nanos::from_millis([10, 100][number]));
                sync.mix(&mut params, StepEnd { step, last: false }, 1.0).unwrap();
                done.push((comm.now() - begun).0 / 1_000_000);
            }
            comm.barrier().unwrap();
            done
        };
        thread::scope(|scope| {
            let ranks: Vec<_> = simulated::cluster(&topology)
                .into_iter()
                .map(|endpoint| scope.spawn(|| rank(Communicator::new(endpoint))))
                .collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect::<Vec<_>>()
        })
    };
    let free = clock(&PARAMETER_SERVER, 0);
    assert_eq!(free[0], (1..=10).map(|step| step * 10).collect::<Vec<_>>());
    // At most two steps ahead: the answer to step 3 waits for the slow rank's first step, and so on.
    let bound = clock(&BOUNDED_STALE, 2);
    assert_eq!(free[1], bound[1]);
    assert_eq!(bound[0][..2], free[0][..2]);
    assert_eq!(bound[0][2..], bound[1][..8]);
}

#[test]
fn a_quorum_of_all_is_diloco() {
    let settings = AsynchronousSettings {
        quorum: Quorum { least: 3, grace: Nanos::ZERO },
        meet_every: 3,
        ..PLAIN.asynchronous
    };
    let got = trace(&DECOUPLED, case(Servers::Sharded, settings), &[10_000; 3], Cut::Never);
    // If all push at once, the result is one outer step of the mean. It is applied one local step later,
    // together with the change since then.
    let n = 3.0;
    let start: Vec<f64> = random(1).into_iter().map(f64::from).collect();
    let (mut model, mut momentum) = (start.clone(), vec![0.0; start.len()]);
    let mut params = vec![start.clone(); 3];
    let mut since = vec![vec![0.0; start.len()]; 3];
    for step in 1..STEPS {
        for rank in 0..3 {
            for ((p, s), g) in params[rank].iter_mut().zip(&mut since[rank]).zip(local(rank, step)) {
                *p -= f64::from(0.01 * g);
                *s += f64::from(0.01 * g);
            }
            if step % 3 == 1 && step > 1 {
                // The answer arrived while this step was computed.
                for i in 0..model.len() {
                    params[rank][i] = model[i] - f64::from(0.01 * local(rank, step)[i]);
                }
            }
            let off = far(&got[rank].0[step as usize - 1], &params[rank]);
            assert!(off < 1e-5, "rank {rank}, step {step}: {off}");
        }
        if step % 3 == 0 {
            for i in 0..model.len() {
                let mean = (0..3).map(|rank| since[rank][i]).sum::<f64>() / n;
                momentum[i] = 0.9 * momentum[i] + mean;
                model[i] -= 0.7 * (mean + 0.9 * momentum[i]);
            }
            for since in &mut since {
                since.fill(0.0);
            }
        }
    }
}

#[test]
fn what_was_settled_goes_on_from_what_was_saved() {
    let quorum = Quorum { least: 2, grace: Nanos::from_millis(3) };
    let settings = AsynchronousSettings { quorum, ..PLAIN.asynchronous };
    for method in [&ASYNC, &PARAMETER_SERVER, &BOUNDED_STALE, &DECOUPLED] {
        for servers in [Servers::Sharded, Servers::Central] {
            for delay in [0, 1, 2] {
                let case = Case { delay, ..case(servers, settings) };
                let name = method.name;
                let twice = [(); 2].map(|()| trace(method, case, &SPEEDS, Cut::Never));
                assert!(twice[0] == twice[1], "{name}, {servers:?}, delay {delay}");
                for step in [4, 9, 12, 25] {
                    let settled = trace(method, case, &SPEEDS, Cut::Settled(step));
                    let restored = trace(method, case, &SPEEDS, Cut::Restored(step));
                    for (rank, (settled, restored)) in settled.iter().zip(&restored).enumerate() {
                        assert!(
                            settled.0 == restored.0,
                            "{name}, {servers:?}, delay {delay}, {step}, {rank}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn bytes_are_those_of_the_formula() {
    let ranks = 3_u64;
    let topology = Topology::uniform(3, "10gbit,1us".parse().unwrap());
    let values = elements().len() as u64;
    let sent = thread::scope(|scope| {
        let rank = |comm: Communicator| {
            let mut params = CPU.tensor(&random(1), layout().len()).unwrap();
            let case = case(Servers::Sharded, PLAIN.asynchronous);
            let mut sync = make(&ASYNC, case, comm.clone(), &[], &params);
            comm.barrier().unwrap();
            let before = comm.stats().sent.payload.0;
            sync.mix(&mut params, StepEnd { step: 3, last: false }, 1.0).unwrap();
            let sent = comm.stats().sent.payload.0 - before;
            comm.send(Rank((comm.rank().0 + 1) % 3), 9, &[]).unwrap();
            comm.recv(Rank((comm.rank().0 + 2) % 3), 9).unwrap();
            comm.barrier().unwrap();
            (before, sent, comm.stats().sent.payload.0)
        };
        let all: Vec<_> = simulated::cluster(&topology)
            .into_iter()
            .map(|endpoint| scope.spawn(move || rank(Communicator::new(endpoint))))
            .collect();
        all.into_iter().map(|rank| rank.join().unwrap()).collect::<Vec<_>>()
    });
    // Changes to two servers and answers from one server to two workers, with 17 and 9 bytes in front of the
    // values.
    let all: u64 = sent.iter().map(|(before, _, after)| after - before).sum();
    let changes = 2 * ranks * (17 + 9) + 2 * (ranks - 1) * 4 * values;
    assert!(all >= changes && all < changes + 200, "{all}, {changes}");
}

/// Computes a parameter server in f64 whose workers send changes to one server through a codec, with error
/// feedback.
fn plain_coded(codec: &str, speeds: &[u64], warmup: u64) -> Vec<Vec<Vec<f64>>> {
    let spec: CodecSpec = codec.parse().unwrap();
    let places = elements();
    let start = random(1);
    let pick = |flat: &[f32]| -> Vec<f32> { places.iter().map(|&i| flat[i]).collect() };
    let mut model: Vec<f64> = pick(&start).into_iter().map(f64::from).collect();
    let mut params = vec![model.clone(); speeds.len()];
    let mut lost = vec![vec![0.0_f32; model.len()]; speeds.len()];
    let mut trace = vec![Vec::new(); speeds.len()];
    let mut events: Vec<(u64, usize, u64)> = (0..speeds.len())
        .flat_map(|rank| (1..=STEPS).map(move |step| (step, rank)))
        .map(|(step, rank)| (step * speeds[rank], rank, step))
        .collect();
    events.sort_unstable();
    for (_, rank, step) in events {
        let base = params[rank].clone();
        for (p, g) in params[rank].iter_mut().zip(pick(&local(rank, step))) {
            *p -= f64::from(0.01 * g);
        }
        let change = base.iter().zip(&params[rank]).map(|(base, now)| base - now);
        let owed: Vec<f32> = change.zip(&lost[rank]).map(|(d, e)| (d + f64::from(*e)) as f32).collect();
        let mut sent = owed.clone();
        if step > warmup {
            let (mut codec, mut payload) = (spec.build_memoryless(), Payload::new());
            let key = RoundKey { seed: 0, round: step, shard: 0, rank: Rank(rank as u32) };
            codec.compress(&owed, key, &mut payload).unwrap();
            codec.decompress(payload.view(), &mut sent).unwrap();
            lost[rank] = owed.iter().zip(&sent).map(|(owed, sent)| owed - sent).collect();
        }
        for (x, d) in model.iter_mut().zip(&sent) {
            *x -= f64::from(*d) / speeds.len() as f64;
        }
        params[rank].clone_from(&model);
        if step < STEPS {
            trace[rank].push(params[rank].clone());
        }
    }
    trace
}

#[test]
fn changes_through_a_codec_are_those_of_plain_loops_with_feedback() {
    let places = elements();
    for (codec, warmup) in [("int8", 0), ("topk:0.2/f16", 0), ("sign", 5)] {
        let coded = format!("{codec}+ef").leak();
        let case = Case { codec: coded, warmup, ..case(Servers::Central, PLAIN.asynchronous) };
        let got = trace(&PARAMETER_SERVER, case, &SPEEDS, Cut::Never);
        for (rank, wanted) in plain_coded(codec, &SPEEDS, warmup).iter().enumerate() {
            for (step, wanted) in wanted.iter().enumerate() {
                let values: Vec<f32> = places.iter().map(|&i| got[rank].0[step][i]).collect();
                let off = far(&values, wanted);
                // A change that is rounded the other way is off by one step of the codec.
                assert!(off < 1e-4, "{codec}: rank {rank}, step {}: {off}", step + 1);
            }
        }
        assert!(got.windows(2).all(|pair| pair[0].0.last() == pair[1].0.last()), "equal at the end");
    }
}

#[test]
fn what_a_codec_lost_goes_on_from_what_was_saved() {
    for method in [&ASYNC, &PARAMETER_SERVER, &BOUNDED_STALE, &DECOUPLED] {
        for servers in [Servers::Sharded, Servers::Central] {
            for codec in ["int8+ef", "rolling:4/topk:0.3+ef", "topk:0.1/int4+ef:0.9"] {
                let case = Case { codec, ..case(servers, PLAIN.asynchronous) };
                let settled = trace(method, case, &SPEEDS, Cut::Settled(9));
                let restored = trace(method, case, &SPEEDS, Cut::Restored(9));
                for (settled, restored) in settled.iter().zip(&restored) {
                    assert!(settled.0 == restored.0, "{}, {servers:?}, {codec}", method.name);
                }
            }
        }
    }
}

#[test]
fn a_protocol_and_a_codec_with_momentum_are_refused() {
    for codec in ["powersgd:2", "dgc:0.1"] {
        let comm = Communicator::new(farflung_comm::memory::cluster(1).remove(0));
        let params = CPU.tensor(&random(1), layout().len()).unwrap();
        let made = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            make(&ASYNC, Case { codec, ..case(Servers::Central, PLAIN.asynchronous) }, comm, &[], &params)
        }));
        assert!(made.is_err(), "{codec}");
    }
}
