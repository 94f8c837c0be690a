//! Runs in which replicas divide the optimizer's state: the bits of replicas that each have all of it, files
//! that any other division continues, times that were predicted, and what cannot be divided.

#![expect(clippy::unwrap_used, reason = "a test fails where it panics")]

use std::fs;

use farflung::TrainConfig;
use farflung::config::value::Setting as _;
use farflung::config::zero::{Weights, ZeroWithin};
use farflung::parallel::pipeline::Method;
use farflung::train::{Fault, FaultyValue, Job, Thoroughness, Trainer, refusal};

use crate::families::{describe, done, each_continues_any, farthest, llama, train};
use crate::small::{config, job, on_all, takes_the_predicted_time};
use crate::tiny::{Run, output, refused, stderr};

fn weights(run: &Run, out: &str, steps: u64) -> Vec<u8> {
    fs::read(run.at(out).join(format!("step-{steps:08}/model.safetensors"))).unwrap()
}

/// Writes the model with a head of its own.
fn untied(run: &Run) {
    describe(run, "untied.json", &[("tie_word_embeddings", false.into())]);
}

/// Writes a model whose head is its token table.
fn tied(run: &Run) {
    let tied = serde_json::json!({
        "model_type": "gpt2", "vocab_size": 256, "n_embd": 16, "n_layer": 4, "n_head": 4, "n_positions": 8,
    });
    fs::write(run.at("gpt2.json"), tied.to_string()).unwrap();
}

/// Two replicas add two numbers, so that the order of sums is the same.
#[test]
fn shards_change_no_bit() {
    let run = llama();
    for (name, args) in [
        ("two", "--workers 2 --accumulate 2"),
        ("clipped", "--workers 2 --accumulate 2 --clip 0.1"),
        ("f16", "--workers 2 --precision f16"),
        ("sgd", "--workers 2 --optimizer sgd --overlap false --bucket-mb 0.01"),
        // Their shards do not begin with the chunks in which squares are added up.
        ("lamb", "--workers 2 --optimizer lamb --clip 0"),
        ("muon", "--workers 2 --optimizer muon --clip 0"),
        ("tensor", "--mesh data=2,tensor=2 --accumulate 2"),
        ("sequences", "--mesh data=2,pipeline=2,tensor=2 --microbatches 4 --sequence-parallel true"),
    ] {
        let whole = done(&run, &format!("{name}-whole"), args);
        for (number, zero) in ["", "--zero-weights 3,1", "--zero-weights 0,1"].into_iter().enumerate() {
            let out = format!("{name}-{number}");
            let steps = done(&run, &out, &format!("{args} --zero 1 {zero} --check-every 1"));
            assert_eq!(farthest(&steps, &whole).to_bits(), 0.0_f64.to_bits(), "{args} {zero}");
            assert!(weights(&run, &out, 3) == weights(&run, &format!("{name}-whole"), 3), "{args} {zero}");
            let sent = |steps: &[farflung::StepMetrics]| steps.last().unwrap().bytes_sent as f64;
            // Of two owners, each sends what the other updates, and then what it updates itself.
            if number == 0 && name == "two" {
                let off = (sent(&steps) / sent(&whole) - 1.0).abs();
                assert!(off < 0.01, "{} {}", sent(&steps), sent(&whole));
            }
        }
    }
}

/// Owners add the gradients of a microbatch in rank order, whether each rank has summed up its own before or
/// not: with one microbatch, the bits are those of stage 1. Weights are gathered as they are.
#[test]
fn divided_gradients_and_weights_have_the_bits_of_whole_ones() {
    let run = llama();
    untied(&run);
    tied(&run);
    let mut first = None;
    for (name, args) in [
        ("three", "--workers 3"),
        ("clipped", "--workers 2 --clip 0.1"),
        ("f16", "--workers 2 --precision f16"),
        ("sgd", "--workers 2 --optimizer sgd --overlap false --bucket-mb 0.001"),
        ("lamb", "--workers 2 --optimizer lamb --clip 0"),
        ("muon", "--workers 2 --optimizer muon --clip 0"),
        ("disk", "--workers 2 --state disk"),
        ("evaluated", "--workers 3 --eval-every 2 --recompute 1 --sample-tokens 0"),
        ("within", "--workers 2 --recompute 20kb"),
        ("context", "--workers 4 --context-parallel 2"),
        (
            "stages",
            "--model untied.json --workers 4 --stages 2 --microbatches 1 --recompute each-layer --schedule gpipe",
        ),
        ("tied-stages", "--model gpt2.json --workers 4 --stages 2 --microbatches 1 --zero-weights 1,3"),
        ("both-ends", "--model gpt2.json --workers 4 --stages 2 --microbatches 1 --schedule zbv"),
        (
            "tied-tensors",
            "--model gpt2.json --workers 4 --stages 2 --microbatches 1 --optimizer muon --clip 0",
        ),
    ] {
        let whole = done(&run, &format!("{name}-1"), &format!("{args} --zero 1"));
        for stage in [2, 3] {
            let out = format!("{name}-{stage}");
            let steps = done(&run, &out, &format!("{args} --zero {stage} --check-every 1"));
            assert_eq!(farthest(&steps, &whole).to_bits(), 0.0_f64.to_bits(), "{args}, stage {stage}");
            assert!(
                weights(&run, &out, 3) == weights(&run, &format!("{name}-1"), 3),
                "{args}, stage {stage}"
            );
        }
    }
    // A head that is the token table reads it at both ends of a pass.
    for (stage, args) in [(2, ""), (3, ""), (3, "--zero-weights 1,0,4 --recompute full")] {
        let args = format!("--model gpt2.json --workers 3 --accumulate 2 --zero {stage} {args}");
        done(&run, "tied", &args);
        let found = weights(&run, "tied", 3);
        fs::remove_dir_all(run.at("tied")).unwrap();
        assert!(*first.get_or_insert_with(|| found.clone()) == found, "{args}");
    }
    // Of several microbatches, each rank sums up what it owns, and each is sent.
    let one = done(&run, "several-1", "--workers 3 --accumulate 4 --zero 1");
    let steps = done(&run, "several-2", "--workers 3 --accumulate 4 --zero 2 --check-every 1");
    assert!(farthest(&steps, &one) < 1e-6, "{}", farthest(&steps, &one));
    let sent = |steps: &[farflung::StepMetrics]| steps.last().unwrap().bytes_sent as f64;
    let [one, two, four] = [1, 2, 4]
        .map(|m| sent(&done(&run, &format!("sent-{m}"), &format!("--workers 3 --accumulate {m} --zero 2"))));
    let (each, more) = (two - one, four - two);
    assert!(each > 0.0 && (more / (2.0 * each) - 1.0).abs() < 1e-3, "{each} {more}");
    for (out, args) in [
        ("uneven", "--zero 2 --zero-weights 5,0,1"),
        ("small", "--zero 2 --bucket-mb 0.001"),
        ("weights", "--zero 3 --zero-weights 0,2,1"),
    ] {
        done(&run, out, &format!("--workers 3 --accumulate 4 {args} --check-every 1"));
        assert!(weights(&run, out, 3) == weights(&run, "several-2", 3), "{args}");
    }
}

/// Where the border between two units is within the first tensor of the second one, a rank can have two
/// pieces of that tensor.
#[test]
fn a_tensor_of_which_a_rank_has_two_pieces_is_saved() {
    let run = llama();
    let sizes = [("hidden_size", 64.into()), ("intermediate_size", 160.into())];
    describe(&run, "wide.json", &[&sizes[..], &[("tie_word_embeddings", false.into())]].concat());
    for (name, args) in [
        ("two", "--workers 2"),
        ("stages", "--workers 4 --stages 2 --microbatches 2"),
        ("shares", "--workers 3 --zero-weights 3,0,1"),
    ] {
        let args = format!("--model wide.json --digest-every 1 {args}");
        done(&run, &format!("{name}-2"), &format!("{args} --zero 2"));
        done(&run, &format!("{name}-3"), &format!("{args} --zero 3"));
        assert!(weights(&run, &format!("{name}-3"), 3) == weights(&run, &format!("{name}-2"), 3), "{args}");
        let digests = |out: &str| -> Vec<String> {
            let lines = fs::read_to_string(run.at(out).join("metrics.jsonl")).unwrap();
            let digest =
                |line: &str| serde_json::from_str::<serde_json::Value>(line).unwrap()["digest"].to_string();
            lines.lines().map(digest).collect()
        };
        assert_eq!(digests(&format!("{name}-3")), digests(&format!("{name}-2")), "{args}");
        let more = format!("{args} --zero 3 --steps 4 --resume auto");
        assert_eq!(done(&run, &format!("{name}-3"), &more).last().unwrap().step, 4);
    }
}

/// Groups change the order of sums alone; codecs change what is sent, and all ranks the same way.
#[test]
fn weights_pass_between_groups_once_an_update_and_in_few_bits() {
    let run = llama();
    tied(&run);
    untied(&run);
    let sent = |steps: &[farflung::StepMetrics]| steps.last().unwrap().bytes_sent as f64;
    for (name, within, args) in [
        ("pairs", 2, "--workers 4"),
        ("uneven", 3, "--workers 5 --zero-weights 3,0,1,2,1 --accumulate 2"),
        ("tied", 2, "--model gpt2.json --workers 4 --recompute full --eval-every 2"),
        ("stages", 2, "--model untied.json --workers 8 --stages 2 --microbatches 2"),
    ] {
        let flat = format!("{args} --check-every 1 --zero 3");
        let args = format!("{flat} --zero-within {within}");
        let flat = done(&run, &format!("{name}-flat"), &flat);
        let grouped = done(&run, &format!("{name}-groups"), &args);
        assert!(farthest(&grouped, &flat) < 1e-6, "{args}: {}", farthest(&grouped, &flat));
        let alone = format!("{args} --overlap false --bucket-mb 0.001");
        assert_eq!(farthest(&done(&run, &format!("{name}-alone"), &alone), &grouped).to_bits(), 0, "{args}");
        for codecs in ["int8,none", "none,int4:64", "bf16,int8"] {
            let out = format!("{name}-{codecs}");
            let coded = done(&run, &out, &format!("{args} --zero-codec {codecs}"));
            assert!(farthest(&coded, &flat) < 0.05, "{args} {codecs}: {}", farthest(&coded, &flat));
            assert!(sent(&coded) < sent(&grouped), "{args} {codecs}");
        }
    }
    // The weights of an update pass a border once, whatever is accumulated.
    let of = |m: usize, args: &str| {
        let out = format!("{m}-{}", args.len());
        sent(&done(&run, &out, &format!("--workers 4 --accumulate {m} --zero 3 {args} --eval-every 0")))
    };
    let [flat, grouped] = ["", "--zero-within 2"].map(|args| of(4, args) / of(1, args));
    assert!(grouped < flat, "{grouped} {flat}");
}

#[test]
fn shards_work_with_every_schedule_that_ends_a_step_at_once() {
    let run = llama();
    untied(&run);
    for method in Method::ALL.into_iter().filter(|method| refusal(*method).is_none()) {
        if !method.is_synchronous() || method.copies() > 1 || method == Method::Varuna {
            continue;
        }
        let args = format!("--workers 4 --stages 2 --microbatches 4 --schedule {method}");
        done(&run, &format!("{method}-whole"), &args);
        done(&run, &format!("{method}"), &format!("{args} --zero 1 --zero-weights 1,2 --check-every 1"));
        assert!(weights(&run, method.name(), 3) == weights(&run, &format!("{method}-whole"), 3), "{method}");
        if method == Method::TeraPipe {
            continue;
        }
        let whole = done(&run, &format!("{method}-1"), &format!("{args} --zero 1"));
        let divided = done(&run, &format!("{method}-2"), &format!("{args} --zero 2 --check-every 1"));
        assert!(farthest(&divided, &whole) < 1e-6, "{method}");
        done(&run, &format!("{method}-3"), &format!("{args} --zero 3 --check-every 1"));
        assert!(
            weights(&run, &format!("{method}-3"), 3) == weights(&run, &format!("{method}-2"), 3),
            "{method}"
        );
    }
}

/// Gradients of many replicas are added in rank order, whichever of them owns a shard.
#[test]
fn any_shards_of_many_replicas_have_the_same_bits() {
    let run = llama();
    let of = |out: &str, args: &str| {
        done(&run, out, &format!("--workers 5 --zero 1 {args} --clip 0.5 --check-every 1"))
    };
    let equal = of("equal", "");
    let whole = done(&run, "whole", "--workers 5 --clip 0.5");
    assert!(farthest(&equal, &whole) < 1e-6);
    for (out, args) in [
        ("uneven", "--zero-weights 5,1,0,2,1"),
        ("one", "--zero-weights 0,0,1,0,0"),
        ("small-buckets", "--bucket-mb 0.001"),
    ] {
        of(out, args);
        assert!(weights(&run, out, 3) == weights(&run, "equal", 3), "{args}");
    }
}

#[test]
fn any_division_of_the_state_continues_any_other() {
    let run = llama();
    let divisions = [
        ("whole", "--workers 4"),
        ("equal", "--workers 4 --zero 1"),
        ("uneven", "--workers 2 --zero 1 --zero-weights 1,3 --accumulate 2"),
        ("gradients", "--workers 2 --zero 2 --zero-weights 2,1 --accumulate 2"),
        ("weights", "--workers 4 --zero 3 --zero-weights 0,3,2,1"),
        ("stages", "--workers 4 --stages 2 --zero 3 --microbatches 2"),
        ("tensor", "--mesh data=2,tensor=2 --zero 1 --zero-weights 2,0 --accumulate 2"),
    ];
    each_continues_any(&run, ("", ""), &divisions, 1e-4);
    // A border of shards lies in the token table, which two stages have.
    tied(&run);
    let divisions = [
        ("whole", "--workers 2 --accumulate 2"),
        ("stages", "--workers 4 --stages 2 --zero 1 --zero-weights 1,3 --microbatches 2"),
    ];
    each_continues_any(&run, ("tied-", "--model gpt2.json"), &divisions, 1e-4);
    // Without the folder of a rank, no other division begins again in silence.
    for (number, args) in ["--workers 4 --zero 1", "--workers 2 --accumulate 2"].into_iter().enumerate() {
        let out = format!("beside-{number}");
        done(&run, &out, "--workers 4 --zero 1 --zero-weights 1,1,1,2 --steps 2");
        fs::remove_dir_all(run.at(&format!("{out}/ranks/rank-00002"))).unwrap();
        let other = train(&run, &format!("{args} --steps 4 --resume auto --out {out}"));
        assert!(!other.status.success() && stderr(&other).contains("rank-00002"), "{}", stderr(&other));
    }
    // Nothing is missing without that of a rank that had no share of the state.
    done(&run, "without", "--workers 3 --zero 1 --zero-weights 3,0,1 --steps 2");
    fs::remove_dir_all(run.at("without/ranks/rank-00001")).unwrap();
    assert_eq!(done(&run, "without", "--workers 3 --zero 1 --steps 4 --resume auto").last().unwrap().step, 4);
    // What one rank alone had cannot be had from another.
    done(&run, "lost", "--workers 2 --zero 1 --steps 2");
    fs::remove_dir_all(run.at("lost/ranks/rank-00001")).unwrap();
    let lost = train(&run, "--workers 2 --zero 1 --steps 4 --resume auto --out lost");
    assert!(
        stderr(&lost).contains("no other rank holds the same part of the model and of the optimizer's state")
    );
}

#[test]
fn steps_take_the_time_that_was_predicted() {
    let (_folder, config) = config(3);
    for (zero, workers, stages, tensor, shares, overlap) in [
        (1, 2, 1, 1, None, true),
        (1, 4, 1, 1, None, false),
        (1, 4, 1, 1, Some(vec![3, 0, 2, 1]), true),
        (1, 4, 2, 1, None, true),
        (1, 8, 2, 2, Some(vec![1, 3]), true),
        (2, 2, 1, 1, None, true),
        (2, 3, 1, 1, Some(vec![3, 0, 2]), false),
        (2, 6, 2, 1, Some(vec![1, 0, 2]), true),
        (3, 4, 2, 1, None, true),
        (3, 3, 1, 1, Some(vec![3, 0, 2]), false),
    ] {
        let what = format!("stage {zero}, {workers} ranks, {stages} stages, {tensor}");
        let config = TrainConfig {
            heads: Some(4),
            dim: Some(32),
            workers,
            stages,
            tensor,
            zero,
            zero_weights: shares.map(Weights),
            overlap,
            bucket_mb: 0.01,
            codec: "none".parse().unwrap(),
            ..config.clone()
        };
        takes_the_predicted_time(config, &what);
    }
    for (codec, within, overlap, accumulate) in [
        ("int8,int4", "no", true, 1),
        ("none", "2", true, 2),
        ("int8,int4", "2", false, 1),
        ("none", "no", false, 2),
    ] {
        let config = TrainConfig {
            heads: Some(4),
            dim: Some(32),
            workers: 4,
            zero: 3,
            zero_codec: codec.parse().unwrap(),
            zero_within: ZeroWithin::parse(within).unwrap(),
            overlap,
            microbatches: Some(accumulate),
            bucket_mb: 0.01,
            codec: "none".parse().unwrap(),
            ..config.clone()
        };
        takes_the_predicted_time(config, &format!("codecs {codec}, within {within}, overlap {overlap}"));
    }
}

#[test]
fn what_cannot_be_divided_is_refused_with_the_reason() {
    let run = llama();
    tied(&run);
    untied(&run);
    for (args, reason) in [
        ("--workers 4 --zero 3 --zero-within 3", "at least two groups of at least two of the 4 replicas"),
        ("--workers 4 --zero 3 --zero-within region", "with slower links between them (`topology`)"),
        (
            "--workers 2 --zero 3 --zero-codec int8",
            "the names of two codecs that remember and select nothing",
        ),
        ("--workers 2 --zero 3 --zero-codec int8+ef,int4", "the names of two codecs"),
        ("--workers 2 --zero 9", "`zero` is 9, expected 0 to 3"),
        ("--mesh data=2,tensor=2 --zero 3", "`zero` is 3, expected 0 or 1 with `tensor` above 1"),
        (
            "--workers 4 --stages 2 --schedule terapipe --zero 2 --model untied.json",
            "`zero` is 2, expected 0 or 1 with terapipe",
        ),
        ("--mesh data=2,tensor=2 --zero 2", "`zero` is 2, expected 0 or 1 with `tensor` above 1"),
        ("--workers 1 --zero 1", "there is one replica, which divides nothing"),
        ("--workers 2 --zero 1 --zero-weights 1,1,1", "expected 2 weights, one for each replica"),
        ("--workers 2 --zero 1 --zero-weights 0,0", "at least one above 0"),
        ("--workers 2 --zero 1 --codec int8", "none with `zero`"),
        ("--workers 2 --zero 1 --sync diloco", "ddp with `zero`"),
        ("--workers 2 --zero 1 --optimizer onebit-adam", "averages gradients with `zero`"),
        ("--workers 4 --stages 2 --zero 1 --schedule chimera", "0 with chimera"),
        ("--workers 4 --stages 2 --zero 1 --schedule pipedream --clip 0", "0 with pipedream"),
        ("--workers 3 --pools 1,2 --zero 1", "0 with pools"),
    ] {
        refused(&train(&run, &format!("{args} --out no")), reason);
    }
    let told = stderr(&train(&run, "--workers 3 --zero 1 --zero-weights 3,1,0 --out told"));
    assert!(told.contains("3 replicas divide the optimizer's state as 3:1:0: once a step"), "{told}");
    let host = output(&run, "host --model config.json --zero 1 --data text.txt --out no");
    refused(&host, "would take its shard of the optimizer's state with it");
}

/// A bit that flips in what one rank alone updates is in the others' copies, too; one that flips later is
/// found.
#[test]
fn copies_that_differ_are_found() {
    let (_folder, config) = config(2);
    let base = TrainConfig { workers: 2, zero: 1, check_every: 1, codec: "none".parse().unwrap(), ..config };
    let fault = Fault { rank: 1, step: 1, value: FaultyValue::Parameters, element: 0, bit: 3 };
    let job = Job { fault: Some(fault), ..job(&base) };
    let found = on_all(&job, |connection| {
        let mut rank = Trainer::new(&job, connection.comm, 1).unwrap();
        rank.step(false).unwrap();
        rank.verify(Thoroughness::All).unwrap_err().to_string()
    });
    assert!(found.iter().all(|error| error.contains("parameters")), "{found:?}");
}
