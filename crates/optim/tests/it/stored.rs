//! Tests of chains whose states are in a store: a step has the bits of one with states in memory.
#![expect(clippy::unwrap_used, clippy::float_cmp, reason = "helpers of tests fail by panicking")]

use std::ops::Range;
use std::sync::{Arc, Mutex};

use farflung_optim::local::{Averages, METHODS};
use farflung_optim::{OptimError, Prepared, Shard, StateStore};
use farflung_tensor::{Device, Tensor, View};

use crate::small_chain::{chain, flat, layout};

/// What a store has of each piece: states, and parameters.
#[derive(Debug, Default)]
struct Pieces {
    states: Vec<Vec<Vec<f32>>>,
    params: Vec<Vec<f32>>,
    next: usize,
    /// Number of calls after which it fails.
    fails_after: Option<usize>,
}

/// Keeps states as values on the host. Its tensors are as long as the longest piece.
#[derive(Debug, Clone)]
struct Host {
    device: Device,
    longest: usize,
    lengths: Vec<usize>,
    kept: Arc<Mutex<Pieces>>,
}

impl Host {
    fn new(device: &Device, pieces: &[Range<usize>], states: usize) -> Self {
        let lengths: Vec<usize> = pieces.iter().map(ExactSizeIterator::len).collect();
        let kept = Pieces {
            states: lengths.iter().map(|&len| vec![vec![0.0; len]; states]).collect(),
            params: lengths.iter().map(|&len| vec![f32::NAN; len]).collect(),
            ..Pieces::default()
        };
        let longest = lengths.iter().copied().max().unwrap_or(0) + 5;
        Self { device: device.clone(), longest, lengths, kept: Arc::new(Mutex::new(kept)) }
    }

    /// Returns a state as one buffer, or the parameters.
    fn joined(&self, state: Option<usize>) -> Vec<f32> {
        let kept = self.kept.lock().unwrap();
        match state {
            Some(state) => kept.states.iter().flat_map(|piece| piece[state].clone()).collect(),
            None => kept.params.concat(),
        }
    }
}

impl StateStore for Host {
    fn take(&mut self) -> Result<Vec<Tensor>, OptimError> {
        let mut kept = self.kept.lock().unwrap();
        if let Some(left) = &mut kept.fails_after {
            *left = left.checked_sub(1).ok_or_else(|| OptimError::Store("the disk is gone".into()))?;
        }
        let tensor = |values: &Vec<f32>| {
            // What is behind the piece is not zero.
            let mut padded = values.clone();
            padded.resize(self.longest, 7.0);
            self.device.tensor(&padded, self.longest).unwrap()
        };
        Ok(kept.states[kept.next].iter().map(tensor).collect())
    }

    fn give(&mut self, states: Vec<Tensor>, params: View<'_>) -> Result<(), OptimError> {
        let mut kept = self.kept.lock().unwrap();
        let piece = kept.next;
        let len = self.lengths[piece];
        let values = |state: &Tensor| {
            let all = state.to_vec::<f32>().unwrap();
            assert!(all[len..].iter().all(|&x| x == 7.0), "only the piece is written");
            all[..len].to_vec()
        };
        kept.states[piece] = states.iter().map(values).collect();
        kept.params[piece] = params.to_vec().unwrap();
        kept.next = (piece + 1) % self.lengths.len();
        Ok(())
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn a_step_has_the_bits_of_one_with_states_in_memory() {
    let (cpu, layout) = (Device::cpu(2).unwrap(), layout());
    let whole = 0..layout.len();
    let mut tried = 0;
    for row in METHODS.iter().filter(|row| row.averages == Averages::Gradients) {
        // From a border between tensors.
        for shard in
            [whole.clone().into(), (640..layout.len()).into(), Shard::new([0..640, 1472..layout.len()])]
        {
            let mut held = chain(row).build_shard(&cpu, &layout, shard.clone()).unwrap();
            for most in [1, 100, 640, 1 << 20] {
                let pieces = chain(row).pieces(&layout, &shard, most);
                assert!(row.per_tensor || pieces.iter().all(|piece| piece.len() <= most));
                let store = Host::new(&cpu, &pieces, chain(row).state_names().len());
                let given = (pieces, Box::new(store.clone()) as _);
                let mut chain = chain(row).build_stored(&cpu, &layout, shard.clone(), given).unwrap();
                assert!(chain.states().next().is_none() && chain.state_names().count() > 0);
                let zeros = vec![0.0; shard.len()];
                held.restore(0, |_| Some(zeros.as_slice())).unwrap();
                let [mut params, mut expected] = [(); 2].map(|()| flat(&cpu, 99));
                for step in 0..3 {
                    let grads = flat(&cpu, 10 * step);
                    let prepared = || Prepared::with_norm(1.0 + step as f64).unwrap();
                    chain.commit(&mut params, &grads, prepared()).unwrap();
                    let all = grads.to_vec::<f32>().unwrap();
                    let own = shard.ranges().iter().flat_map(|range| all[range.clone()].to_vec());
                    let own = cpu.tensor(&own.collect::<Vec<f32>>(), shard.len()).unwrap();
                    held.commit(&mut expected, &own, prepared()).unwrap();
                }
                let [params, expected] = [&params, &expected].map(|all| all.to_vec::<f32>().unwrap());
                assert_eq!(bits(&params), bits(&expected), "{}, pieces of {most}", row.name);
                let own = shard.ranges().iter().flat_map(|range| params[range.clone()].to_vec());
                assert_eq!(bits(&store.joined(None)), bits(&own.collect::<Vec<f32>>()));
                for (number, (name, state)) in held.states().enumerate() {
                    let state = state.to_vec::<f32>().unwrap();
                    assert_eq!(bits(&store.joined(Some(number))), bits(&state), "{} {name}", row.name);
                }
                tried += 1;
            }
        }
    }
    assert!(tried > 60, "{tried}");
}

#[test]
fn what_a_store_cannot_keep_is_refused_and_its_failure_is_the_steps() {
    let (cpu, layout) = (Device::cpu(1).unwrap(), layout());
    let row = |name: &str| METHODS.iter().find(|row| row.name == name).unwrap();
    let whole = 0..layout.len();
    let build = |name: &str, pieces: Vec<Range<usize>>| {
        let store = Host::new(&cpu, &pieces, 9);
        chain(row(name)).build_stored(&cpu, &layout, whole.clone().into(), (pieces, Box::new(store)))
    };
    let within = vec![0..128, 128..layout.len()];
    assert!(build("lamb", within.clone()).unwrap_err().to_string().contains("a border between tensors"));
    assert!(build("onebit-adam", within).unwrap_err().to_string().contains("more than gradients"));

    let pieces = chain(row("adamw")).pieces(&layout, &whole.clone().into(), 640);
    let store = Host::new(&cpu, &pieces, chain(row("adamw")).state_names().len());
    let given = (pieces, Box::new(store.clone()) as _);
    let mut chain = chain(row("adamw")).build_stored(&cpu, &layout, whole.into(), given).unwrap();
    store.kept.lock().unwrap().fails_after = Some(1);
    let (mut params, grads) = (flat(&cpu, 99), flat(&cpu, 1));
    let error = chain.commit(&mut params, &grads, Prepared::with_norm(1.0).unwrap()).unwrap_err();
    assert!(matches!(&error, OptimError::Store(_)) && error.to_string() == "the disk is gone");
    assert_eq!(chain.step(), 0);
    chain.resume_at(5);
    assert_eq!(chain.step(), 5);
}
