//! Objectives: sequences that a sampler makes of them, and text that is continued as they were trained.
#![expect(clippy::unwrap_used, reason = "a test fails where it panics")]

use farflung_tensor::Device;
use farflung_zoo::tokenizer::Byte;
use farflung_zoo::{
    Batch, Borders, Corpus, HoldOut, Input, Objective, Sampler, Sampling, Shard, Split, Stage, TokenRows,
    generate, gpt2,
};

const VOCAB: usize = 256 + 103;

fn text() -> Split {
    let bytes: Vec<u8> = (0..5000_u32).map(|i| (i * i / 7 % 251) as u8).collect();
    Corpus::from_bytes("text", &bytes, &Byte).unwrap().split(HoldOut::Tokens(0)).unwrap().0
}

fn sampler(objective: Objective, shard: Shard, context: usize) -> Sampler {
    let sampler = Sampler::random(text(), 3, shard, context).unwrap();
    sampler.with_objective(objective, 3, VOCAB).unwrap()
}

/// Returns the targets that count, of each row.
fn counting(batch: &Batch) -> Vec<Vec<usize>> {
    let weights = batch.weights.as_ref().unwrap().chunks(batch.length);
    let of_row = |row: &[f32]| (0..row.len()).filter(|&at| row[at] > 0.0).collect();
    weights.map(of_row).collect()
}

#[test]
fn what_follows_a_prefix_counts_and_is_counted() {
    for objective in [Objective::PrefixLm, Objective::Ul2] {
        for context in [8, 40, 129] {
            let of = sampler(objective, Shard::whole(5), context);
            assert!(of.has_prefixes() && !of.is_divided());
            for step in 0..20 {
                let batch = of.batch(step).unwrap();
                assert!(of.counted(step * 5, 5).unwrap().to_bits() == batch.counted().to_bits());
                let (ends, counting) = (batch.prefixes.as_ref().unwrap(), counting(&batch));
                assert_eq!(
                    (batch.inputs.len(), batch.targets.len(), ends.len()),
                    (5 * context, 5 * context, 5 * context)
                );
                for (row, counts) in counting.iter().enumerate() {
                    let at = row * context;
                    let end = ends[at] as usize;
                    assert!(ends[at..at + context].iter().all(|&other| other as usize == end));
                    // The last token of the prefix predicts the first one after it.
                    assert_eq!(counts[0], end - 1);
                    assert_eq!(*counts, (end - 1..end - 1 + counts.len()).collect::<Vec<_>>());
                    let last = counts[counts.len() - 1];
                    assert_eq!(batch.inputs[at + 1..=at + last], batch.targets[at..at + last]);
                    assert!(batch.inputs[at + last + 1..at + context].iter().all(|&token| token == 0));
                }
                // Ranks draw what one rank draws.
                let half = sampler(objective, Shard { rank: 0, world: 1, batch: 1 }, context);
                let alone = half.sequences(step * 5 + 3, 1).unwrap();
                assert_eq!(alone.inputs, batch.inputs[3 * context..4 * context]);
                // Without the first targets.
                let late = of.clone().without_first_targets(6);
                let found = late.batch(step).unwrap();
                assert!(late.counted(step * 5, 5).unwrap().to_bits() == found.counted().to_bits());
                assert!(found.counted() <= batch.counted() && found.inputs == batch.inputs);
            }
        }
    }
    let causal = sampler(Objective::Causal, Shard::whole(2), 8).batch(0).unwrap();
    assert_eq!((causal.weights, causal.prefixes), (None, None));
}

/// A window is the same sequence in every epoch, in an evaluation, and whatever the ranks are.
#[test]
fn a_window_always_becomes_the_same_sequence() {
    let (context, shard) = (40, Shard::whole(1));
    let epochs = Sampler::epochs(text(), 9, shard, context, 1).unwrap();
    let epochs = epochs.with_objective(Objective::Ul2, 3, VOCAB).unwrap();
    let windows = epochs.windows().unwrap();
    let mut found = vec![None; windows as usize];
    for sequence in 0..2 * windows {
        let batch = epochs.sequences(sequence, 1).unwrap();
        let window = epochs.window(sequence).unwrap() as usize;
        let before = found[window].get_or_insert_with(|| batch.clone());
        assert_eq!(*before, batch);
    }
    let evaluation = |rank, world, batch| {
        let shard = Shard { rank, world, batch };
        let of = Sampler::evaluation(text(), shard, context, 12).unwrap();
        of.with_objective(Objective::PrefixLm, 3, VOCAB).unwrap()
    };
    let whole = evaluation(0, 1, 12).batch(0).unwrap();
    for (world, rank, step) in [(4, 1, 0), (2, 0, 1), (1, 0, 3)] {
        let of = evaluation(rank, world, 3);
        let part = of.batch(step).unwrap();
        let first = (step as usize * world + rank) * 3 * context;
        let range = first..first + 3 * context;
        assert_eq!(
            (&part.inputs[..], &part.prefixes.unwrap()[..]),
            (&whole.inputs[range.clone()], &whole.prefixes.as_ref().unwrap()[range])
        );
    }
}

#[test]
fn what_does_not_go_together_is_said() {
    let random = |context| Sampler::random(text(), 3, Shard::whole(1), context).unwrap();
    for (sampler, objective, vocab, said) in [
        (random(8), Objective::Ul2, 103, "vocab"),
        (random(7), Objective::Ul2, VOCAB, "context"),
        (random(8).by_documents(), Objective::PrefixLm, VOCAB, "documents kept apart"),
    ] {
        let message = sampler.with_objective(objective, 1, vocab).unwrap_err().to_string();
        assert!(message.contains(said), "{message}");
    }
    // Rows have the prefixes of their file.
    let json = br#"{"input_ids": [[1, 2, 3]], "prefixes": [2]}"#;
    let rows = TokenRows::prefixed_from_bytes("rows.json".as_ref(), json).unwrap();
    let rows = Corpus::from_rows(rows).split(HoldOut::Standard).unwrap().0;
    let sampler = Sampler::rows(rows, Shard::whole(1), 4, 1).unwrap();
    let sampler = sampler.with_objective(Objective::PrefixLm, 1, VOCAB).unwrap();
    assert!(sampler.has_prefixes());
    let batch = sampler.batch(0).unwrap();
    assert_eq!((batch.prefixes.unwrap(), batch.inputs), (vec![2; 4], vec![1, 2, 3, 0]));
}

/// Text that is continued token by token with the cache has, for each token, the logits of a whole pass in
/// which the prompt is a prefix.
#[test]
fn prompts_are_read_in_both_directions() {
    let cpu = Device::cpu(1).unwrap();
    let stage = Stage::whole(&gpt2(2, 2, 16, 24, VOCAB).unwrap(), &cpu).unwrap();
    let params: Vec<f32> = stage.init(3).unwrap().to_vec::<f32>().unwrap().iter().map(|x| 20.0 * x).collect();
    let params = cpu.tensor(&params, params.len()).unwrap();
    let prompt: Vec<u32> = (0..9).map(|i| i * 11 % 250).collect();
    for objective in Objective::ALL {
        let sampling = Sampling { temperature: 0.0, objective, ..Sampling::default() };
        let mut drawn = Vec::new();
        let emit = |token| {
            drawn.push(token);
            true
        };
        generate(&stage, &params, &prompt, 40, &sampling, emit).unwrap();
        let first: Vec<u32> = objective.begins_with(VOCAB).into_iter().collect();
        let mut text = [&first[..], &prompt].concat();
        let mut prefix = text.len();
        for (i, &token) in drawn.iter().enumerate() {
            if text.len() > 24 {
                text = [&first[..], &text[text.len() - 12..]].concat();
                prefix = text.len();
            }
            let len = text.len();
            let ends = objective.has_prefix().then(|| stage.tokens(&vec![prefix as u32; len], len).unwrap());
            let borders = Borders { prefixes: ends, ..Borders::default() };
            let input = Input::Tokens(stage.tokens(&text, len).unwrap()).with_borders(borders);
            let logits = stage.logits(&params, input).unwrap().to_vec::<f32>().unwrap();
            assert_eq!(sampling.draw(&logits[(len - 1) * VOCAB..], i as u64), token, "{objective} {i}");
            text.push(token);
        }
    }
    let small = Stage::whole(&gpt2(2, 2, 16, 24, 103).unwrap(), &cpu).unwrap();
    let params = small.init(3).unwrap();
    let sampling = Sampling { objective: Objective::Ul2, ..Sampling::default() };
    let message = generate(&small, &params, &[1], 1, &sampling, |_| true).unwrap_err().to_string();
    assert!(message.contains("vocab"), "{message}");
}
