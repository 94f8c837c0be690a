//! Runs in which replicas divide the positions of their sequences: the same losses and gradients as in one
//! process under every plan, files that any other division continues, times and memory that were predicted, and
//! what cannot be divided.

#![expect(clippy::unwrap_used, reason = "a test fails where it panics")]

use farflung::base::ContextOrder;
use farflung::parallel::pipeline::Method;
use farflung::parallel::whole_replicas;
use farflung::train::refusal;
use farflung::{StepMetrics, TrainConfig};

use crate::families::{done, each_continues_any, farthest, train};
use crate::small::{config, takes_the_predicted_time};
use crate::tensor_ranks::{described, gradients, same_gradients};
use crate::tiny::{Run, output, refused, stderr};

/// Adds the description of a model whose layers have different windows.
fn windowed(run: &Run) {
    let qwen = serde_json::json!({
        "model_type": "qwen2", "vocab_size": 256, "hidden_size": 16, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24, "hidden_act": "silu",
        "max_position_embeddings": 8, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "sliding_window": 3,
        "use_sliding_window": true, "max_window_layers": 2, "tie_word_embeddings": true,
    });
    std::fs::write(run.at("qwen.json"), qwen.to_string()).unwrap();
}

#[test]
fn ranks_that_divide_sequences_train_as_one_process() {
    let run = described();
    for model in ["gpt2.json", "llama.json"] {
        let common = format!("--model {model} --clip 0.1");
        let alone = done(&run, &format!("{model}-alone"), &format!("{common} --accumulate 4"));
        let same = |name: &str, most: f64, args: &str| {
            let steps = done(&run, &format!("{model}-{name}"), &format!("{common} {args}"));
            let off = farthest(&steps, &alone);
            assert!(off < most, "{model} {name}: {off}");
            steps
        };
        for order in ContextOrder::ALL {
            for ranks in [2, 4] {
                let args =
                    format!("--mesh context={ranks} --accumulate 4 --check-every 1 --context-order {order}");
                same(&format!("{order}-{ranks}"), 1e-5, &args);
            }
        }
        same("ulysses", 1e-5, "--mesh context=2 --ulysses 2 --accumulate 4 --check-every 1");
        let both = "--mesh context=4 --ulysses 2 --accumulate 4 --check-every 1";
        same("both", 1e-5, both);
        same("both-recomputed", 1e-5, &format!("{both} --recompute full --context-order striped"));
        same("replicas", 1e-5, "--mesh data=2,context=2 --accumulate 2 --check-every 1");
        same("at-the-end", 1e-5, "--workers 4 --context-parallel 2 --accumulate 2 --overlap false");
        same("shards", 1e-5, "--mesh data=2,context=2 --accumulate 2 --zero 1 --zero-weights 3,0,2,1");
        same("on-disk", 1e-5, "--mesh context=2 --accumulate 4 --state disk");
        same("tensor", 1e-5, "--mesh context=2,tensor=2 --accumulate 4 --check-every 1");
        let listed = |method: &Method| {
            refusal(*method).is_none()
                && method.is_synchronous()
                && !method.slices()
                && *method != Method::Varuna
        };
        for schedule in Method::ALL.into_iter().filter(listed) {
            let stages = format!("--mesh pipeline=2,context=2 --microbatches 4 --schedule {schedule}");
            same(&format!("stages-{schedule}"), 1e-5, &stages);
        }
        let all = "--mesh data=2,pipeline=2,context=2,tensor=2 --batch 1 --microbatches 4 --check-every 1";
        same("all-axes", 1e-5, all);
        same("repeated", 1e-5, &format!("{all} --deterministic true"));
        same("recomputed-stages", 1e-5, &format!("{all} --recompute full"));
        let sent = |steps: &[StepMetrics]| steps.last().unwrap().bytes_sent;
        let plain = sent(&same("plain", 1e-5, all));
        for coded in ["codec int8+ef", "codec topk:0.5", "boundary int8"] {
            let steps = same(&coded.replace([' ', ':'], "-"), 0.05, &format!("{all} --{coded}"));
            assert!(sent(&steps) < plain, "{model} {coded}: {} {plain}", sent(&steps));
        }
    }
}

#[test]
fn windows_are_those_of_whole_sequences() {
    let run = described();
    windowed(&run);
    let alone = done(&run, "alone", "--model qwen.json --accumulate 4");
    for (division, args) in [
        ("ring", "--mesh context=4 --accumulate 4"),
        ("striped", "--mesh context=2 --context-order striped --accumulate 4"),
        ("both", "--mesh data=2,context=4 --ulysses 2 --accumulate 2"),
        ("stages", "--mesh pipeline=2,context=2 --microbatches 4"),
    ] {
        let steps = done(&run, division, &format!("--model qwen.json {args} --check-every 1"));
        let off = farthest(&steps, &alone);
        assert!(off < 1e-5, "{division}: {off}");
    }
}

#[test]
fn the_gradient_of_each_tensor_is_that_of_one_process() {
    let (_folder, config) = config(1);
    let base = TrainConfig { heads: Some(4), clip: 0.0, accumulate: 4, workers: 1, ..config };
    let alone = gradients(&base);
    for (workers, stages, readers, ulysses, context_order) in [
        (2, 1, 2, 1, ContextOrder::Zigzag),
        (4, 1, 4, 1, ContextOrder::Striped),
        (4, 1, 4, 4, ContextOrder::Zigzag),
        (8, 1, 8, 2, ContextOrder::Contiguous),
        (8, 2, 2, 1, ContextOrder::Zigzag),
    ] {
        let groups = whole_replicas(workers, stages, readers);
        let divided = gradients(&TrainConfig {
            workers,
            stages,
            context_parallel: readers,
            ulysses,
            context_order,
            microbatches: (stages > 1).then_some(4 / groups),
            accumulate: if stages > 1 { 1 } else { 4 / groups },
            ..base.clone()
        });
        same_gradients(&divided, &alone, workers);
    }
}

#[test]
fn steps_take_the_time_that_was_predicted() {
    let (_folder, config) = config(3);
    for (workers, stages, readers, ulysses, tensor) in
        [(2, 1, 2, 1, 1), (4, 1, 4, 2, 1), (4, 1, 4, 4, 1), (8, 2, 2, 1, 1), (8, 2, 2, 1, 2)]
    {
        let what = format!("{workers} ranks, {readers} x {ulysses}");
        let config = TrainConfig {
            heads: Some(4),
            workers,
            stages,
            tensor,
            context_parallel: readers,
            ulysses,
            ..config.clone()
        };
        takes_the_predicted_time(config, &what);
    }
}

#[test]
fn any_division_of_sequences_continues_any_other() {
    let run = described();
    let divisions = [
        ("alone", "--accumulate 4"),
        ("ring", "--mesh context=4 --accumulate 4"),
        ("both", "--mesh data=2,context=2 --ulysses 2 --accumulate 2"),
        ("stages", "--mesh pipeline=2,context=2,tensor=2 --microbatches 4"),
    ];
    each_continues_any(&run, ("", "--model llama.json"), &divisions, 1e-4);
}

#[test]
fn ranks_that_divide_sequences_no_more_drop_what_boundaries_stored() {
    let run = described();
    for store in ["memory", "file"] {
        let out = format!("samples-{store}");
        let common = "--model llama.json --workers 4 --stages 2 --batch 1 --check-every 1";
        let coded = format!("{common} --sampling epochs --boundary aqsgd:8 --boundary-store {store}");
        done(&run, &out, &format!("{coded} --steps 2 --context-parallel 2 --microbatches 4"));
        let steps = done(&run, &out, &format!("{coded} --steps 4 --microbatches 2 --resume auto"));
        assert_eq!(steps.last().unwrap().step, 4);
    }
}

/// Rows without a batch are divided among the ranks that read different ones.
#[test]
fn rows_are_read_once_by_those_that_divide_them() {
    let run = described();
    let row = |n: usize| (0..33).map(|i| (i * (n + 3)) % 200).collect::<Vec<_>>();
    let rows: Vec<_> = (0..8).map(row).collect();
    let rows = serde_json::json!({ "input_ids": rows });
    std::fs::write(run.at("rows.json"), rows.to_string()).unwrap();
    let common = "--layers 2 --heads 4 --dim 16 --context 40 --tokens rows.json --workers 4";
    let losses = ["", "--context-parallel 2", "--context-parallel 4"].map(|args| {
        let out = format!("rows-{}", args.replace(' ', "-"));
        let given = format!("train --json {common} {args} --steps 2 --codec none --threads 1 --out {out}");
        let told = output(&run, &format!("{given} --sample-tokens 0 --eval-every 0"));
        assert!(told.status.success(), "{args}: {}", stderr(&told));
        farflung::metrics::read(&run.at(&out).join("metrics.jsonl")).unwrap()
    });
    assert!(losses.iter().all(|steps| farthest(steps, &losses[0]) < 1e-5));
}

/// Ranks that divide sequences need a part of the memory, so that runs are not refused for that of whole ones.
#[test]
fn the_memory_of_whole_sequences_is_not_asked_for() {
    let run = described();
    let logits = |args: &str| {
        let given = format!("--layers 4 --heads 4 --dim 256 --context 4096 --batch 4096 --workers 4 {args}");
        let told = stderr(&output(&run, &format!("train {given} --data text.txt --codec none --out no")));
        let at = told.find("logits ").unwrap_or_else(|| panic!("{told}")) + "logits ".len();
        told[at..].split(' ').next().unwrap().parse::<f64>().unwrap()
    };
    assert!((logits("--context-parallel 4") / logits("") - 0.25).abs() < 0.01);
}

#[test]
fn what_cannot_be_divided_is_refused_with_the_reason() {
    let run = described();
    for (args, reason) in [
        ("--workers 2 --context-parallel 0", "`context-parallel` is 0, expected 1 to 1048576"),
        ("--workers 3 --context-parallel 2", "a divisor of the 3 replicas"),
        ("--workers 2 --context-parallel 2 --ulysses 0", "`ulysses` is 0, expected a divisor of"),
        ("--workers 4 --context-parallel 4 --ulysses 3", "`ulysses` is 3, expected a divisor of"),
        ("--workers 4 --context-parallel 4 --ulysses 4", "a divisor of the 2 key-value heads"),
        ("--workers 2 --context-parallel 2 --context-order round", "zigzag striped contiguous"),
        ("--mesh context=2 --context 6", "4 divides the context of 6"),
        ("--mesh context=2,tensor=2 --sequence-parallel true", "only one of them divides the positions"),
        ("--mesh data=2,context=2 --sync diloco", "ddp with `context-parallel` above 1"),
        ("--mesh data=2,context=2 --optimizer onebit-adam", "such as adamw"),
        ("--mesh context=2 --own-data true", "read the same text"),
        ("--mesh context=2 --shards kmeans:2", "random with `context-parallel` above 1"),
        ("--mesh pipeline=2,context=2 --schedule terapipe", "it divides the positions of sequences itself"),
        ("--mesh pipeline=2,context=2 --schedule pipedream --clip 0", "run each microbatch together"),
        ("--mesh pipeline=2,context=2 --schedule varuna", "run each microbatch together"),
    ] {
        refused(&train(&run, &format!("--model llama.json {args} --out no")), reason);
    }
    refused(&train(&run, "--model mixtral.json --mesh context=2 --out no"), "take all tokens of a sequence");
    let host = output(&run, "host --model llama.json --context-parallel 2 --data text.txt --out no");
    refused(&host, "would take its positions of each sequence with it");
}

/// A rank that ends leaves no other waiting for its keys.
#[test]
fn values_that_are_not_finite_stop_all_ranks() {
    let run = described();
    let args = "--model gpt2.json --mesh data=2,context=2 --workers 4 --lr 1e30 --optimizer sgd --clip 0 --steps 9 \
                --deadline 20s";
    let failed = train(&run, &format!("{args} --out nan"));
    assert!(!failed.status.success());
    let text = stderr(&failed);
    assert!(text.contains("not finite"), "{text}");
    assert!(!text.contains("deadline"), "{text}");
}
