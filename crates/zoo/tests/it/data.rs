//! Tests of reading corpora from files, and of sampling.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::fs;

use farflung_zoo::tokenizer::Byte;
use farflung_zoo::{Batch, Corpus, HoldOut, Offsets, Sampler, Shard, Sharding, Shards, Split, ZooError};

fn all(split: &Split) -> Vec<u32> {
    let mut tokens = Vec::new();
    split.append_to(0, split.len(), &mut tokens);
    tokens
}

fn llm_c(tokens: &[u16]) -> Vec<u8> {
    let mut bytes = vec![0; 1024];
    for (i, word) in [20_240_520_u32, 1, tokens.len() as u32].into_iter().enumerate() {
        bytes[4 * i..4 * i + 4].copy_from_slice(&word.to_le_bytes());
    }
    bytes.extend(tokens.iter().flat_map(|t| t.to_le_bytes()));
    bytes
}

#[test]
fn text_files_and_folders() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("b")).unwrap();
    fs::write(dir.path().join("c.txt"), "third").unwrap();
    fs::write(dir.path().join("b/x.txt"), b"second \xFF ").unwrap();
    fs::write(dir.path().join("a.txt"), "first ").unwrap();
    fs::write(dir.path().join("picture"), [1, 0, 2]).unwrap();
    #[cfg(unix)]
    std::os::unix::fs::symlink(dir.path(), dir.path().join("b/loop")).unwrap();
    let corpus = Corpus::open(dir.path(), &Byte).unwrap();
    let (everything, rest) = corpus.split(HoldOut::Tokens(0)).unwrap();
    let bytes: Vec<u8> = all(&everything).iter().map(|&t| t as u8).collect();
    assert_eq!(bytes, b"first second \xFF third");
    assert!(rest.is_empty());
    assert_eq!(corpus.hash(), Corpus::from_bytes("same", &bytes, &Byte).unwrap().hash());
    let file = Corpus::open(&dir.path().join("c.txt"), &Byte).unwrap();
    assert_eq!(file.len(), 5);
    // The published BLAKE3 value of the empty input cannot be used, because an empty corpus is an error. This
    // is `b3sum` of "abc".
    assert_eq!(
        Corpus::from_bytes("abc", b"abc", &Byte).unwrap().hash(),
        "6437b3ac38465133ffb63b75273a8db548c558465d79db03fd359c6cd5bd9d85"
    );
}

#[cfg(feature = "bpe")]
#[test]
fn gpt2_ends_each_file_and_names_the_one_that_is_no_text() {
    use farflung_zoo::tokenizer::Gpt2;
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("a.txt"), "Hello world").unwrap();
    fs::write(dir.path().join("b.txt"), "Hello").unwrap();
    let corpus = Corpus::open(dir.path(), &Gpt2).unwrap();
    let (everything, _) = corpus.split(HoldOut::Tokens(0)).unwrap();
    assert_eq!(all(&everything), [15496, 995, 50256, 15496, 50256]);
    fs::write(dir.path().join("c.txt"), b"abc\xFF").unwrap();
    let message = Corpus::open(dir.path(), &Gpt2).unwrap_err().to_string();
    assert!(message.contains("c.txt") && message.contains("byte 3"), "{message}");
}

#[test]
fn token_files() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("train.bin");
    for bytes in [llm_c(&[1, 2, 255]), [1_u16, 2, 255].iter().flat_map(|t| t.to_le_bytes()).collect()] {
        fs::write(&path, bytes).unwrap();
        let (split, _) = Corpus::open(&path, &Byte).unwrap().split(HoldOut::Tokens(0)).unwrap();
        assert_eq!(all(&split), [1, 2, 255]);
    }
    // In a folder of token files, the validation file is the held-out part, and text files are ignored.
    fs::write(dir.path().join("val.bin"), llm_c(&[7, 8])).unwrap();
    fs::write(dir.path().join("interval.bin"), llm_c(&[9])).unwrap();
    fs::write(dir.path().join("input.txt"), "not this").unwrap();
    let (training, held_out) = Corpus::open(dir.path(), &Byte).unwrap().split(HoldOut::Standard).unwrap();
    assert_eq!((all(&training), all(&held_out)), (vec![9, 1, 2, 255], vec![7, 8]));

    let mut long = llm_c(&[1, 2]);
    long.push(0);
    let mut version = llm_c(&[1, 2]);
    version[4] = 2;
    let cases = [
        (llm_c(&[1, 2])[..1026].to_vec(), "length in bytes is 1026, expected 1028"),
        (llm_c(&[1, 2])[..500].to_vec(), "length in bytes is 500"),
        (long, "length in bytes is 1029"),
        (version, "version is 2"),
        (vec![1, 0, 2], "divided by 2 is 1"),
        (vec![1, 0, 0, 1], "token 256 at position 1"),
    ];
    for (bytes, expected) in cases {
        fs::write(&path, bytes).unwrap();
        let message = Corpus::open(&path, &Byte).unwrap_err().to_string();
        assert!(message.contains(expected) && message.contains("train.bin"), "{message}");
    }
}

#[test]
fn missing_empty_and_short_data() {
    let dir = tempfile::tempdir().unwrap();
    let message = Corpus::open(&dir.path().join("none.txt"), &Byte).unwrap_err().to_string();
    assert!(message.contains("none.txt"), "{message}");
    let empty = Corpus::open(dir.path(), &Byte).unwrap_err().to_string();
    assert!(empty.contains("no text: it is empty"), "{empty}");
    fs::write(dir.path().join("e.txt"), "").unwrap();
    let empty = Corpus::open(&dir.path().join("e.txt"), &Byte).unwrap_err().to_string();
    assert!(empty.contains("e.txt") && empty.contains("no data"), "{empty}");

    let corpus = Corpus::from_bytes("ten", b"0123456789", &Byte).unwrap();
    let (training, held_out) = corpus.split(HoldOut::Standard).unwrap();
    assert_eq!((training.len(), held_out.len()), (9, 1));
    assert!(Sampler::random(training.clone(), 1, Shard::whole(1), 8).is_ok());
    let message = Sampler::random(training, 1, Shard::whole(1), 9).unwrap_err().to_string();
    assert!(message.contains("training split has 9 tokens") && message.contains("10"), "{message}");
    for bad in [HoldOut::Fraction(1.0), HoldOut::Fraction(f64::NAN), HoldOut::Tokens(10)] {
        assert!(matches!(corpus.split(bad), Err(ZooError::HoldOut { .. })), "{bad:?}");
    }
    assert_eq!(corpus.split(HoldOut::Fraction(0.5)).unwrap().0.len(), 5);
}

#[test]
fn the_standard_split_rounds_the_training_part_down() {
    for (tokens, training) in [(1, 0), (2, 1), (9, 8), (10, 9), (11, 9), (19, 17), (20, 18), (1003, 902)] {
        let corpus = Corpus::from_bytes("n", &vec![b'x'; tokens], &Byte).unwrap();
        for hold_out in [HoldOut::Standard, HoldOut::Fraction(0.1)] {
            let (first, rest) = corpus.split(hold_out).unwrap();
            assert_eq!((first.len(), rest.len()), (training, tokens - training), "{hold_out:?} of {tokens}");
        }
    }
}

/// Creates a split in which each token equals its offset (below 251).
fn counting() -> Split {
    let bytes: Vec<u8> = (0..=250).collect();
    Corpus::from_bytes("counting", &bytes, &Byte).unwrap().split(HoldOut::Tokens(0)).unwrap().0
}

fn draw(sampler: &Sampler, step: u64) -> Vec<u32> {
    let batch = sampler.batch(step).unwrap();
    assert!(batch.inputs.iter().zip(&batch.targets).all(|(x, y)| x + 1 == *y));
    batch.inputs
}

#[test]
fn ranks_together_draw_what_one_worker_draws() {
    let one = Sampler::random(counting(), 5, Shard::whole(12), 16).unwrap();
    for (world, batch) in [(2, 6), (3, 4), (12, 1)] {
        for step in [0, 1, 1000] {
            let mut together = Vec::new();
            for rank in 0..world {
                let sampler = Sampler::random(counting(), 5, Shard { rank, world, batch }, 16).unwrap();
                together.extend(draw(&sampler, step));
            }
            assert_eq!(together, draw(&one, step));
        }
    }
    assert_ne!(draw(&one, 0), draw(&one, 1));
    let other = Sampler::random(counting(), 6, Shard::whole(12), 16).unwrap();
    assert_ne!(draw(&one, 0), draw(&other, 0));
}

#[test]
fn offsets_are_those_of_the_documented_stream() {
    // Computed by a Python implementation of the formula.
    let late = (1 << 40) + 7;
    let cases = [
        (1337, 3, [109, 112, 210, 194, 87, 68]),
        (late, 1_537_228_672_809_129_306, [130, 64, 124, 79, 87, 115]),
    ];
    let stream = u64::from_le_bytes(*b"sampler\0");
    assert_eq!(stream, 0x0072_656c_706d_6173);
    for (seed, step, expected) in cases {
        let (low, high) = (|word: u64| word as u32, |word: u64| (word >> 32) as u32);
        let offset = |i: u64| {
            let p = step * 6 + i;
            let counter = [low(p), high(p), low(stream), high(stream)];
            let w = farflung_base::philox::philox4x32_10(counter, [low(seed), high(seed)]);
            let x = u128::from(w[0]) << 32 | u128::from(w[1]);
            ((x * (251 - 16)) >> 64) as u32
        };
        assert_eq!((0..6).map(offset).collect::<Vec<_>>(), expected);
        for rank in 0..2 {
            let sampler = Sampler::random(counting(), seed, Shard { rank, world: 2, batch: 3 }, 16).unwrap();
            let drawn: Vec<u32> = draw(&sampler, step).chunks(16).map(|window| window[0]).collect();
            assert_eq!(drawn, expected[3 * rank..3 * rank + 3], "rank {rank}");
        }
    }
}

#[test]
fn offsets_reach_both_ends_and_are_uniform() {
    // Valid offsets are 0..=4: the split has 251 tokens, a sequence 246.
    let sampler = Sampler::random(counting(), 5, Shard::whole(1), 246).unwrap();
    let mut counts = [0_u32; 5];
    for step in 0..5000 {
        counts[draw(&sampler, step)[0] as usize] += 1;
    }
    assert!(counts.iter().all(|&n| (850..1150).contains(&n)), "{counts:?}");
}

#[test]
fn recorded_offsets_are_replayed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("offsets.bin");
    let values = [3_i64, 0, 234, 9, 8, 7];
    fs::write(&path, values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>()).unwrap();
    let offsets = Offsets::read(&path, 2).unwrap();
    let (head, tail) = offsets.clone().split_at(2);
    assert_eq!((offsets.steps(), head.steps(), tail.steps()), (3, 2, 1));
    let sampler = Sampler::recorded(counting(), offsets.clone(), Shard { rank: 1, world: 2, batch: 1 }, 16);
    let sampler = sampler.unwrap();
    assert_eq!([0, 1, 2].map(|step| draw(&sampler, step)[0]), [0, 9, 7]);
    assert!(matches!(sampler.batch(3), Err(ZooError::StepNotRecorded { step: 3, steps: 3 })));
    let error = Offsets::read(&path, 4).unwrap_err();
    assert!(matches!(error, ZooError::OffsetsLength { found: 48, row: 32, .. }), "{error:?}");
    let message = error.to_string();
    assert!(message.contains("offsets.bin") && !message.contains("token file"), "{message}");
    assert!(Sampler::recorded(counting(), offsets, Shard::whole(3), 16).is_err());
    for bad in [235, -1, i64::MAX] {
        let offsets = Offsets::new(1, vec![0, bad]).unwrap();
        let message = Sampler::recorded(counting(), offsets, Shard::whole(1), 16).unwrap_err().to_string();
        assert!(message.contains(&bad.to_string()) && message.contains("234"), "{message}");
    }
}

#[test]
fn evaluation_spans_the_split_and_never_changes() {
    let sampler = Sampler::evaluation(counting(), Shard::whole(2), 16, 6).unwrap();
    assert_eq!(sampler.steps(), Some(3));
    let first: Vec<u32> = (0..3)
        .flat_map(|s| {
            let b = draw(&sampler, s);
            [b[0], b[16]]
        })
        .collect();
    assert_eq!(first, [0, 46, 93, 140, 187, 234]);
}

/// Whatever the shard is, the windows that count are the same, and none counts twice.
#[test]
fn evaluation_has_the_same_windows_for_every_shard() {
    for windows in [1, 6, 7, 235, 1000] {
        let windows_of = |world: usize, batch: usize| {
            let (mut seen, mut counted) = (Vec::new(), 0.0);
            for rank in 0..world {
                let shard = Shard { rank, world, batch };
                let sampler = Sampler::evaluation(counting(), shard, 16, windows).unwrap();
                for step in 0..sampler.steps().unwrap() as u64 {
                    let drawn = sampler.batch(step).unwrap();
                    let first = step * (world * batch) as u64 + (rank * batch) as u64;
                    assert!((drawn.counted() - sampler.counted(first, batch as u64).unwrap()).abs() < 1e-9);
                    counted += drawn.counted();
                    let weights = drawn.weights.unwrap_or_else(|| vec![1.0; drawn.inputs.len()]);
                    let rows = drawn.inputs.chunks(16).zip(weights.chunks(16));
                    seen.extend(rows.filter(|(_, weights)| weights[0] > 0.0).map(|(row, _)| row[0]));
                }
            }
            seen.sort_unstable();
            assert!((counted - 16.0 * seen.len() as f64).abs() < 1e-9);
            seen
        };
        let expected = windows_of(1, 1);
        assert_eq!(expected.len(), windows.min(235));
        let mut once = expected.clone();
        once.dedup();
        assert_eq!(once, expected);
        for (world, batch) in [(1, 7), (2, 1), (3, 2), (8, 5), (5, 300)] {
            assert_eq!(windows_of(world, batch), expected, "{windows} windows, {world} x {batch}");
        }
    }
}

#[test]
fn bad_shards_name_the_field() {
    for (shard, field) in [
        (Shard { rank: 0, world: 0, batch: 1 }, "world"),
        (Shard { rank: 2, world: 2, batch: 1 }, "rank"),
        (Shard { rank: 0, world: 1, batch: 0 }, "batch"),
    ] {
        let message = Sampler::random(counting(), 1, shard, 8).unwrap_err().to_string();
        assert!(message.contains(field), "{message}");
    }
    assert!(Sampler::random(counting(), 1, Shard::whole(1), 0).is_err());
}

/// 41 tokens are 10 windows of 4 tokens and one last target. Each of three lanes has three windows.
#[test]
fn epochs_give_each_window_once_whoever_takes_it() {
    let text: Vec<u8> = (0..41).collect();
    let (training, _) =
        Corpus::from_bytes("numbers", &text, &Byte).unwrap().split(HoldOut::Tokens(0)).unwrap();
    let sampler = |shard| Sampler::epochs(training.clone(), 1, shard, 4, 3).unwrap();
    let whole = sampler(Shard::whole(3));
    assert_eq!(whole.windows(), Some(9));
    let mut epochs = Vec::new();
    for epoch in 0..2 {
        let mut seen = Vec::new();
        for step in 3 * epoch..3 * epoch + 3 {
            let Batch { inputs, targets, .. } = whole.batch(step).unwrap();
            for (i, row) in inputs.chunks(4).enumerate() {
                let window = whole.window(3 * step + i as u64).unwrap();
                assert_eq!(row, [0, 1, 2, 3].map(|t| 4 * window as u32 + t));
                assert_eq!(targets[4 * i..][..4], [1, 2, 3, 4].map(|t| 4 * window as u32 + t));
                assert_eq!(window / 3, i as u64, "a lane has its own windows");
                seen.push(window);
            }
            let mut shared = Vec::new();
            for rank in 0..3 {
                let own = sampler(Shard { rank, world: 3, batch: 1 }).batch(step).unwrap();
                shared.extend_from_slice(&own.inputs);
            }
            assert_eq!(shared, inputs);
        }
        epochs.push(seen.clone());
        seen.sort_unstable();
        assert_eq!(seen, (0..9).collect::<Vec<u64>>());
    }
    assert_ne!(epochs[0], epochs[1], "each epoch has its own order");
    let error = Sampler::epochs(training, 1, Shard::whole(3), 4, 11).unwrap_err().to_string();
    assert!(error.contains("11") && error.contains("at most 10"), "{error}");
}

/// Returns the tokens of each document of a split.
fn documents(split: &Split) -> Vec<Vec<u32>> {
    let tokens = all(split);
    split.documents().into_iter().map(|range| tokens[range].to_vec()).collect()
}

#[test]
fn documents_are_files_and_a_split_cuts_them() {
    let dir = tempfile::tempdir().unwrap();
    for (name, text) in [("a.txt", "aaaa"), ("b.txt", "bb"), ("c.txt", "cccc")] {
        fs::write(dir.path().join(name), text).unwrap();
    }
    let corpus = Corpus::open(dir.path(), &Byte).unwrap();
    let (training, held_out) = corpus.split(HoldOut::Tokens(3)).unwrap();
    let texts = |split: &Split| -> Vec<String> {
        documents(split).iter().map(|d| d.iter().map(|&t| t as u8 as char).collect()).collect()
    };
    assert_eq!(texts(&training), ["aaaa", "bb", "c"]);
    assert_eq!(texts(&held_out), ["ccc"]);
    assert_eq!(
        documents(&Corpus::from_bytes("one", b"a text", &Byte).unwrap().split(HoldOut::Tokens(0)).unwrap().0)
            .len(),
        1
    );
}

/// Windows are divided at the borders of documents, and the count of targets says it without drawing them.
#[test]
fn windows_are_divided_at_the_borders_of_documents() {
    let texts: Vec<Vec<u8>> =
        [3, 1, 1, 9, 2, 30, 5].iter().enumerate().map(|(i, &n)| vec![i as u8; n]).collect();
    let corpus = Corpus::from_texts("letters", texts.iter().map(Vec::as_slice), &Byte).unwrap();
    let (training, held_out) = corpus.split(HoldOut::Tokens(20)).unwrap();
    let context = 6;
    let ranges: std::sync::Arc<[_]> = vec![1..12, 14..31].into();
    let shard = Shard::whole(3);
    let samplers = [
        Sampler::random(training.clone(), 3, shard, context).unwrap(),
        Sampler::within(training.clone(), &ranges, 3, shard, context).unwrap(),
        Sampler::epochs(training.clone(), 3, shard, context, 3).unwrap(),
        Sampler::evaluation(held_out, shard, context, 7).unwrap(),
    ];
    let mut borders = 0;
    for sampler in samplers {
        let divided = sampler.clone().by_documents();
        assert!(divided.is_divided() && !sampler.is_divided());
        for step in 0..sampler.steps().unwrap_or(50) as u64 {
            let (plain, batch) = (sampler.batch(step).unwrap(), divided.batch(step).unwrap());
            assert_eq!((&plain.inputs, &plain.targets), (&batch.inputs, &batch.targets));
            assert_eq!(plain.documents, None);
            let counted = divided.counted(3 * step, 3).unwrap();
            assert!((batch.counted() - counted).abs() < 1e-9 && counted <= plain.counted());
            let (documents, weights) = (batch.documents.as_ref().unwrap(), batch.weights.as_ref().unwrap());
            for (at, (&input, &target)) in batch.inputs.iter().zip(&batch.targets).enumerate() {
                // Each document is one letter.
                let (row, position) = (at / context * context, at % context);
                let first = batch.inputs[row..=at].iter().position(|&token| token == input).unwrap();
                assert_eq!(documents[at] as usize, first);
                let has_target = plain.weights.as_ref().is_none_or(|weights| weights[at] > 0.0);
                assert_eq!(weights[at] > 0.0, has_target && input == target, "{step} {position}");
                borders += usize::from(input != target);
            }
        }
    }
    assert!(borders > 100, "{borders}");
    let whole = Sampler::random(training, 3, shard, context).unwrap().by_documents().batch(0).unwrap();
    let part = whole.clone().positions(&(2..5));
    let want: Vec<u32> =
        whole.documents.unwrap().chunks(context).flat_map(|row| row[2..5].to_vec()).collect();
    assert_eq!((part.length, part.documents), (3, Some(want)));
}

#[cfg(feature = "bpe")]
#[test]
fn an_end_of_text_token_ends_a_document() {
    use farflung_zoo::tokenizer::Gpt2;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("train.bin");
    fs::write(&path, llm_c(&[50256, 15496, 995, 50256, 15496, 995, 995])).unwrap();
    let (training, _) = Corpus::open(&path, &Gpt2).unwrap().split(HoldOut::Tokens(0)).unwrap();
    assert_eq!(documents(&training), [vec![50256], vec![15496, 995, 50256], vec![15496, 995, 995]]);
}

#[test]
fn a_sampler_within_ranges_draws_each_of_their_windows_alike_and_no_other() {
    let split = counting();
    let context = 4;
    let ranges: std::sync::Arc<[_]> = vec![3..9, 20..24, 30..36].into();
    let sampler = Sampler::within(split.clone(), &ranges, 5, Shard::whole(1), context).unwrap();
    let mut counts = std::collections::BTreeMap::<u32, u32>::new();
    for sequence in 0..4000 {
        let Batch { inputs, targets, .. } = sampler.sequences(sequence, 1).unwrap();
        assert_eq!(targets[0], inputs[0] + 1);
        *counts.entry(inputs[0]).or_default() += 1;
    }
    // A range of six tokens has two windows of four tokens with their targets; a range of four has none.
    assert_eq!(counts.keys().copied().collect::<Vec<_>>(), [3, 4, 30, 31]);
    // 1000 each are expected, with a standard deviation of 27.
    assert!(counts.values().all(|&count| (890..1110).contains(&count)), "{counts:?}");
    let none: std::sync::Arc<[_]> = std::iter::once(0..4).collect();
    let error = Sampler::within(split, &none, 5, Shard::whole(1), context).unwrap_err();
    assert!(matches!(error, ZooError::TooShort { tokens: 4, needed: 5, .. }), "{error}");
}

#[test]
fn one_range_of_everything_draws_what_no_range_does() {
    let split = counting();
    let everything: std::sync::Arc<[_]> = std::iter::once(0..split.len()).collect();
    let plain = Sampler::random(split.clone(), 9, Shard::whole(3), 4).unwrap();
    let within = Sampler::within(split, &everything, 9, Shard::whole(3), 4).unwrap();
    for step in 0..20 {
        assert_eq!(plain.batch(step).unwrap(), within.batch(step).unwrap(), "{step}");
    }
}

#[test]
fn shards_cover_all_files_once() {
    let dir = tempfile::tempdir().unwrap();
    for i in 0..9 {
        fs::write(dir.path().join(format!("{i}.txt")), vec![b'a' + i; 40 + 10 * usize::from(i)]).unwrap();
    }
    let (split, _) = Corpus::open(dir.path(), &Byte).unwrap().split(HoldOut::Tokens(0)).unwrap();
    let shards = Shards::new(Sharding::Files, &split, 8, 4, 1).unwrap().unwrap();
    let mut ranges: Vec<_> = (0..4).flat_map(|replica| shards.of(replica).iter().cloned()).collect();
    ranges.sort_by_key(|range| range.start);
    assert_eq!(ranges, split.documents());
}
