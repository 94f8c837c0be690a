//! Tests of routed evaluation, and of sequences without their first targets.

use std::path::Path;

use super::*;
use crate::data::{Corpus, HoldOut, Sharding, Shards, TextRouter};
use crate::tokenizer::Byte;

const CONTEXT: usize = 6;

/// Returns a text to evaluate, and a router of three paths, the last of which has no window of the text.
fn routed() -> (Split, TextRouter) {
    let letters = |alphabet: &[u8], len: usize| -> Vec<u8> {
        (0..len).map(|i| alphabet[i * i % 7 % alphabet.len()]).collect()
    };
    let texts = [letters(b"abc", 60), letters(b"xyz", 50), letters(b"012", 40)];
    let split = |texts: &[Vec<u8>]| {
        let corpus = Corpus::from_texts("texts", texts.iter().map(Vec::as_slice), &Byte).unwrap();
        corpus.split(HoldOut::Tokens(0)).unwrap().0
    };
    let training = split(&texts);
    let shards = Shards::new(Sharding::Files, &training, CONTEXT, 3, 1).unwrap().unwrap();
    let router = TextRouter::of(&shards, &training, 4).unwrap();
    let parts: Vec<Vec<u8>> = (0..8).map(|i| letters([&b"abc"[..], b"xyz"][i % 2], 9 + i)).collect();
    (split(&parts), router)
}

/// Returns the number of a batch's targets that count, which is whole.
fn counted(batch: &Batch) -> u64 {
    batch.counted() as u64
}

/// Returns the inputs of all sequences that have a target, step by step and rank by rank.
fn windows(world: usize, batch: usize, sampler: impl Fn(Shard) -> Sampler) -> Vec<Vec<u32>> {
    let of = |rank| sampler(Shard { rank, world, batch });
    let mut all = Vec::new();
    for step in 0..of(0).steps().unwrap() as u64 {
        for rank in 0..world {
            let sampler = of(rank);
            let drawn = sampler.batch(step).unwrap();
            let first = (step as usize * world + rank) * batch;
            assert_eq!(counted(&drawn), sampler.counted(first as u64, batch as u64).unwrap() as u64);
            let weights = drawn.weights.unwrap_or_else(|| vec![1.0; drawn.inputs.len()]);
            let rows = drawn.inputs.chunks(CONTEXT).zip(weights.chunks(CONTEXT));
            all.extend(rows.filter(|(_, weights)| weights[0] > 0.0).map(|(row, _)| row.to_vec()));
        }
    }
    all
}

#[test]
fn paths_together_evaluate_each_window_once() {
    let (split, router) = routed();
    for count in [1, 2, 17, 1000] {
        let all = |shard| Sampler::evaluation(split.clone(), shard, CONTEXT, count).unwrap();
        let all = windows(1, 1, all);
        for (world, batch) in [(1, 1), (1, 4), (2, 1), (3, 2), (2, 700)] {
            let mut together = 0;
            for path in 0..router.paths() {
                let of = |shard| {
                    Sampler::evaluation_routed(split.clone(), shard, CONTEXT, count, &router, path).unwrap()
                };
                let found = windows(world, batch, of);
                // They are in the order in which all windows are.
                let mut want = all.clone();
                want.retain(|window| router.path(&window[..4]) == path);
                assert_eq!(found, want, "{count} windows, path {path} of {world} x {batch}");
                let steps = of(Shard { rank: 0, world, batch }).steps();
                assert_eq!(steps, Some(found.len().div_ceil(world * batch)));
                together += found.len();
            }
            assert_eq!(together, all.len());
        }
    }
}

#[test]
fn a_path_without_windows_has_batches_without_targets() {
    let (split, router) = routed();
    let shard = Shard { rank: 1, world: 2, batch: 3 };
    let of = |path| Sampler::evaluation_routed(split.clone(), shard, CONTEXT, 20, &router, path).unwrap();
    let none = of(2);
    assert_eq!(none.steps(), Some(0));
    for sampler in [none.clone(), none.clone().by_documents(), none.without_first_targets(2)] {
        for step in [0, 1, u64::MAX] {
            let batch = sampler.batch(step).unwrap();
            assert_eq!((batch.inputs.len(), batch.targets.len()), (3 * CONTEXT, 3 * CONTEXT));
            assert_eq!(batch.weights, Some(vec![0.0; 3 * CONTEXT]));
            assert_eq!(sampler.counted(step.wrapping_mul(6), 6).unwrap() as u64, 0);
        }
    }
    // So have the other paths after their last window.
    let some = of(0);
    let steps = some.steps().unwrap() as u64;
    assert!(steps > 0 && some.counted(0, 6 * steps).unwrap() > 0.0);
    assert_eq!(counted(&some.batch(steps).unwrap()), 0);
}

#[test]
fn what_cannot_be_routed_is_refused() {
    let (split, router) = routed();
    let of = |split: &Split, shard, path| {
        Sampler::evaluation_routed(split.clone(), shard, CONTEXT, 20, &router, path).unwrap_err().to_string()
    };
    let message = of(&split, Shard::whole(1), 3);
    assert!(message.contains("`path` is 3, expected below 3"), "{message}");
    for shard in [
        Shard { rank: 0, world: 0, batch: 1 },
        Shard { rank: 2, world: 2, batch: 1 },
        Shard { rank: 0, world: 2, batch: usize::MAX },
    ] {
        assert!(of(&split, shard, 0).contains("sampler `"));
        assert!(Sampler::evaluation(split.clone(), shard, CONTEXT, 20).is_err());
    }
    let message = of(&rows(), Shard::whole(1), 0);
    assert!(message.contains("rows.json") && message.contains("cannot be routed"), "{message}");
}

/// Returns a split of two rows: one of two documents, and one of one document with two targets.
fn rows() -> Split {
    let json = r#"{"input_ids": [[1, 2, 3, 4, 5], [6, 7, 8, 9, 1]],
        "position_ids": [[0, 1, 0, 1, 2], [0, 1, 2, 3, 4]],
        "labels": [[1, 2, 3, 4, 5], [-100, 7, -100, 9, -100]]}"#;
    let rows = TokenRows::packed_from_bytes(Path::new("rows.json"), json.as_bytes()).unwrap();
    Corpus::from_rows(rows).split(HoldOut::Tokens(0)).unwrap().0
}

/// Compares each sequence with the one that has all targets.
fn check_left_out(plain: &Sampler, count: usize) {
    let sampler = plain.clone().without_first_targets(count);
    assert_eq!((sampler.steps(), sampler.is_divided()), (plain.steps(), plain.is_divided()));
    let per_step = plain.shard().batch as u64;
    for step in 0..plain.steps().unwrap_or(30) as u64 {
        let (all, batch) = (plain.batch(step).unwrap(), sampler.batch(step).unwrap());
        assert_eq!((&all.inputs, &all.targets), (&batch.inputs, &batch.targets));
        assert_eq!(all.documents, batch.documents);
        let mut want = all.weights.unwrap_or_else(|| vec![1.0; all.inputs.len()]);
        for row in want.chunks_mut(CONTEXT) {
            row[..count.min(CONTEXT)].fill(0.0);
        }
        let found = batch.weights.clone().unwrap_or_else(|| vec![1.0; batch.inputs.len()]);
        assert_eq!(found, want, "{count} at step {step}");
        assert_eq!(counted(&batch), sampler.counted(step * per_step, per_step).unwrap() as u64);
        // One sequence for itself counts the same.
        let alone = |i| sampler.counted(step * per_step + i, 1).unwrap() as u64;
        assert_eq!(counted(&batch), (0..per_step).map(alone).sum::<u64>());
    }
}

#[test]
fn first_targets_are_left_out_of_weights_and_counts() {
    let (split, router) = routed();
    let shard = Shard::whole(3);
    let ranges: Arc<[_]> = vec![1..15, 20..41].into();
    let samplers = [
        Sampler::random(split.clone(), 3, shard, CONTEXT).unwrap(),
        Sampler::within(split.clone(), &ranges, 3, shard, CONTEXT).unwrap(),
        Sampler::epochs(split.clone(), 3, shard, CONTEXT, 3).unwrap(),
        Sampler::evaluation(split.clone(), shard, CONTEXT, 20).unwrap(),
        Sampler::evaluation_routed(split, shard, CONTEXT, 20, &router, 1).unwrap(),
        Sampler::rows(rows(), shard, CONTEXT, 3).unwrap(),
    ];
    for sampler in samplers {
        for count in [0, 1, 2, 5, CONTEXT, CONTEXT + 1, usize::MAX] {
            check_left_out(&sampler, count);
            check_left_out(&sampler.clone().by_documents(), count);
            // The order of the two does not matter.
            let (a, b) = (sampler.clone(), sampler.clone());
            let (a, b) = (a.by_documents().without_first_targets(count), b.without_first_targets(count));
            assert_eq!(a.batch(0).unwrap(), b.by_documents().batch(0).unwrap());
        }
    }
}

#[test]
fn without_first_targets_a_border_of_documents_counts_once() {
    let texts: [&[u8]; 3] = [b"aa", b"bbb", b"cc"];
    let corpus = Corpus::from_texts("letters", texts, &Byte).unwrap();
    let (split, _) = corpus.split(HoldOut::Tokens(0)).unwrap();
    let sampler = Sampler::evaluation(split, Shard::whole(1), CONTEXT, 1).unwrap();
    // Inputs are a a b b b c; the second and the fifth have no target of their document.
    for (count, weights) in [
        (0, [1.0, 0.0, 1.0, 1.0, 0.0, 1.0]),
        (1, [0.0, 0.0, 1.0, 1.0, 0.0, 1.0]),
        (2, [0.0, 0.0, 1.0, 1.0, 0.0, 1.0]),
        (3, [0.0, 0.0, 0.0, 1.0, 0.0, 1.0]),
        (5, [0.0, 0.0, 0.0, 0.0, 0.0, 1.0]),
        (6, [0.0_f32; 6]),
    ] {
        let sampler = sampler.clone().by_documents().without_first_targets(count);
        let batch = sampler.batch(0).unwrap();
        assert_eq!(batch.weights, Some(weights.to_vec()));
        assert_eq!(batch.documents, Some(vec![0, 0, 2, 2, 2, 5]));
        assert_eq!(sampler.counted(0, 1).unwrap() as u64, weights.iter().sum::<f32>() as u64);
    }
}
