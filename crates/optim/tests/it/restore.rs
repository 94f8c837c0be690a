//! A state that cannot be restored changes nothing, in every method of synchronisation.
#![cfg(feature = "sync")]
#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

use crate::synchronise::{CPU, Case, PLAIN, layout, make, random};
use farflung_comm::{Communicator, memory};
use farflung_optim::OptimError;
use farflung_optim::sync::{
    ASYNC, BOUNDED_STALE, DECOUPLED, HALOS, METHODS, PARAMETER_SERVER, SyncMethod, Synchroniser, ZERO_ONE,
};

/// Number of steps in a restored state.
const STEPS: u64 = 41;

/// Returns a method on a single rank.
fn alone(method: &SyncMethod) -> Box<dyn Synchroniser> {
    let comm = Communicator::new(memory::cluster(1).pop().unwrap());
    let codec = if method.name == "choco" { "sign" } else { "none" };
    let params = CPU.tensor(&random(1), layout().len()).unwrap();
    make(method, Case { delay: 0, codec, ..PLAIN }, comm, &[1.0], &params)
}

/// Returns all states of a method by name, with the bits of their values.
fn states(sync: &dyn Synchroniser) -> Vec<(String, Vec<u32>)> {
    let all = sync.states().into_iter().chain(sync.own_states());
    let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect();
    all.map(|(name, state)| (name.to_owned(), bits(state.to_vec().unwrap()))).collect()
}

#[test]
fn a_state_with_a_wrong_length_changes_nothing() {
    let mut restored = Vec::new();
    // Zero-one is made for its optimizer alone, and restores no vectors.
    for method in METHODS.iter().filter(|method| method.name != ZERO_ONE.name) {
        let names: Vec<String> = states(&*alone(method)).into_iter().map(|(name, _)| name).collect();
        for wrong in &names {
            let mut sync = alone(method);
            let before = (sync.steps(), states(&*sync));
            let get = |name: &str| {
                let len = if name == wrong { 7 } else { layout().len() };
                names.iter().any(|known| known == name).then(|| vec![0.25; len])
            };
            let error = sync.restore(STEPS, &get).unwrap_err();
            let named = matches!(&error, OptimError::State { name, found: 7, .. } if name == wrong);
            assert!(named, "{}: {error}", method.name);
            assert!(error.to_string().contains("saved state"), "{error}");
            assert!((sync.steps(), states(&*sync)) == before, "{}, wrong `{wrong}`", method.name);
            // The same state with the right length is accepted.
            let get =
                |name: &str| names.iter().any(|known| known == name).then(|| vec![0.25; layout().len()]);
            sync.restore(STEPS, &get).unwrap();
        }
        restored.extend((!names.is_empty()).then_some(method.name));
    }
    for name in ["diloco", "noloco", "event", "eager", "async", "halos", "streaming"] {
        assert!(restored.contains(&name), "{restored:?}");
    }
}

#[test]
fn the_table_says_whether_replicas_differ() {
    for method in METHODS.iter().filter(|method| method.name != ZERO_ONE.name) {
        assert_eq!(method.replicas_differ, alone(method).replicas_differ(), "{}", method.name);
    }
    // A worker waits for the answer to each change, so nothing travels while it computes.
    let waits = [&PARAMETER_SERVER, &BOUNDED_STALE];
    assert!(waits.iter().all(|method| !method.overlaps && method.replicas_differ && method.timed));
    assert!([&ASYNC, &DECOUPLED, &HALOS].iter().all(|method| method.overlaps));
}

#[test]
fn vectors_in_flight_with_a_wrong_length_change_nothing() {
    for (name, in_flight) in [("eager", "mean"), ("event", "change"), ("async", "sent"), ("d-psgd", "change")]
    {
        let mut sync = alone(SyncMethod::by_name(name).unwrap());
        let before = (sync.steps(), states(&*sync));
        let get = |name: &str| Some(vec![0.25; if name == in_flight { 7 } else { layout().len() }]);
        let error = sync.restore(STEPS, &get).unwrap_err();
        assert!(matches!(&error, OptimError::State { name, found: 7, .. } if name == in_flight), "{error}");
        assert!((sync.steps(), states(&*sync)) == before, "{name}");
    }
}

#[test]
fn a_residual_that_is_not_finite_changes_nothing() {
    let comm = Communicator::new(memory::cluster(1).pop().unwrap());
    let params = CPU.tensor(&random(1), layout().len()).unwrap();
    let mut sync = make(&ASYNC, Case { delay: 0, codec: "sign+ef", ..PLAIN }, comm, &[1.0], &params);
    let before = (sync.steps(), states(&*sync));
    let get = |name: &str| Some(vec![if name == "residual" { f32::NAN } else { 0.25 }; layout().len()]);
    let error = sync.restore(STEPS, &get).unwrap_err();
    assert!(matches!(error, OptimError::Compress(_)), "{error}");
    assert!((sync.steps(), states(&*sync)) == before);
}
