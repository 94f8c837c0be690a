//! Runs of tiny models with experts: the same losses, routers' included, under every plan, and what the metrics
//! say of their routers.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::fs;

use farflung::StepMetrics;
use farflung::parallel::pipeline::Method;
use farflung::train::refusal;
use serde_json::json;

use crate::families::{done, farthest, train};
use crate::tiny::{Run, json_of, output, refused};

/// A folder with a text, and models of which each token has two of four experts, or one with a capacity.
pub(crate) fn models() -> Run {
    let run = Run::new();
    let mixtral = json!({
        "model_type": "mixtral",
        "vocab_size": 256,
        "hidden_size": 16,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 24,
        "max_position_embeddings": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        // Large enough that a wrong gradient shows.
        "router_aux_loss_coef": 0.5,
        "router_z_loss_coef": 0.1,
        "router_aux_loss_over": "layer",
        "tie_word_embeddings": true,
    });
    let switch = json!({
        "model_type": "gpt2-switch",
        "vocab_size": 256,
        "n_embd": 16,
        "n_layer": 4,
        "n_head": 2,
        "n_positions": 8,
        "activation_function": "gelu_new",
        "num_experts": 3,
        "capacity_factor": 1.0,
        "expert_inner": 24,
        "router_aux_loss_coef": 0.5,
        "router_aux_loss_over": "layer",
    });
    fs::write(run.at("config.json"), mixtral.to_string()).unwrap();
    fs::write(run.at("switch.json"), switch.to_string()).unwrap();
    run
}

/// Returns the number of choices, and the balancing losses, by step and layer.
fn routed(steps: &[StepMetrics]) -> (Vec<Vec<u64>>, Vec<Vec<f64>>) {
    let of = |step: &StepMetrics| step.experts.iter().map(|mixture| mixture.counts.iter().sum()).collect();
    let balance = |step: &StepMetrics| step.experts.iter().map(|mixture| mixture.balance_loss).collect();
    (steps.iter().map(of).collect(), steps.iter().map(balance).collect())
}

#[test]
fn they_train_under_every_plan_as_in_one_process() {
    let run = models();
    for model in ["config.json", "switch.json"] {
        let alone = done(&run, &format!("{model}-alone"), &format!("--model {model} --accumulate 4"));
        let (counts, balance) = routed(&alone);
        // Four microbatches of two sequences of eight tokens.
        let each = if model == "config.json" { vec![128; 4] } else { vec![64; 2] };
        assert_eq!(counts, vec![each; 3], "{model}");
        assert!(alone[2].train_loss < alone[0].train_loss, "{alone:?}");
        let same = |name: &str, args: &str| {
            let steps = done(&run, &format!("{model}-{name}"), &format!("--model {model} {args}"));
            let off = farthest(&steps, &alone);
            assert!(off < 1e-4, "{model} {name}: {off}");
            let (other_counts, others) = routed(&steps);
            assert_eq!(other_counts, counts, "{model} {name}");
            let pairs = others.concat().into_iter().zip(balance.concat());
            let off = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert!(off < 1e-3, "{model} {name}: {off}");
        };
        let runs =
            |method: &Method| refusal(*method).is_none() && !method.slices() && method.is_synchronous();
        for schedule in Method::ALL.into_iter().filter(runs) {
            let name = schedule.name();
            same(name, &format!("--workers 2 --stages 2 --microbatches 4 --schedule {name}"));
        }
        same("replicas", "--workers 2 --accumulate 2");
        same("batches", "--workers 2 --batch 4 --accumulate 1");
        same("both", "--workers 4 --stages 2 --microbatches 2");
        same("recomputed", "--workers 2 --stages 2 --microbatches 4 --recompute full");
    }
}

/// Losses that take layers together need what the routers of all stages chose.
#[test]
fn layers_that_are_balanced_together_are_so_across_stages() {
    let run = models();
    for over in ["model", "batch"] {
        let args = format!("--balance-over {over}");
        let alone = done(&run, &format!("{over}-alone"), &format!("{args} --accumulate 4"));
        let apart = done(&run, &format!("{over}-layer"), "--accumulate 4");
        assert!(farthest(&alone, &apart) > 1e-4, "the losses of layers together are others");
        for (name, plan) in [
            ("two", "--workers 2 --stages 2 --microbatches 4 --boundary none"),
            ("four", "--workers 4 --stages 4 --microbatches 4"),
            ("chunks", "--workers 2 --stages 2 --microbatches 4 --schedule interleaved --chunks 2"),
            ("zb", "--workers 2 --stages 2 --microbatches 4 --schedule zbv"),
            ("both", "--workers 4 --stages 2 --microbatches 2"),
            ("recomputed", "--workers 2 --stages 2 --microbatches 4 --recompute full"),
        ] {
            let steps = done(&run, &format!("{over}-{name}"), &format!("{args} {plan}"));
            let off = farthest(&steps, &alone);
            assert!(off < 1e-4, "{over} {name}: {off}");
        }
        // Coded hidden states, whose messages have the counts behind them.
        let coded = format!("{args} --workers 2 --stages 2 --microbatches 4 --boundary int8");
        let off = farthest(&done(&run, &format!("{over}-coded"), &coded), &alone);
        assert!(off < 0.02, "{over}: {off}");
    }
}

#[test]
fn settings_of_experts_change_a_run_and_are_told() {
    let run = models();
    let tight = done(&run, "tight", "--model switch.json --capacity-factor 0.5");
    let dropped: u64 = tight.iter().flat_map(|step| &step.experts).map(|mixture| mixture.dropped).sum();
    assert!(dropped > 0, "{tight:?}");
    let free = done(&run, "free", "--model switch.json --capacity-factor 3");
    assert!(free.iter().flat_map(|step| &step.experts).all(|mixture| mixture.dropped == 0));
    // A strong pull to balance shows.
    let mean = |steps: &[StepMetrics]| steps.last().unwrap().experts[0].balance_loss;
    let longer = "--steps 40 --accumulate 2";
    let pulled = done(&run, "pulled", &format!("{longer} --balance-loss 5 --z-loss 0"));
    let left = done(&run, "left", &format!("{longer} --balance-loss 0 --z-loss 0"));
    assert!(mean(&pulled) < mean(&left), "{} {}", mean(&pulled), mean(&left));
    refused(&train(&run, "--model nano --balance-loss 0.1 --out no"), "the model has no experts");
    refused(&train(&run, "--balance-loss -1 --out no"), "`balance-loss` is -1, expected 0 or more");
    refused(&train(&run, "--balance-over world --out no"), "one of layer model batch");
    let sliced = "--workers 2 --stages 2 --schedule terapipe --out no";
    refused(&train(&run, sliced), "since the experts of the model have a capacity");
    let sliced = "--workers 2 --stages 2 --microbatches 2 --schedule terapipe --balance-loss 0";
    done(&run, "sliced", sliced);
}

#[test]
fn they_are_resumed_generated_from_and_converted() {
    let run = models();
    for (model, names) in [
        ("config.json", "model.layers.0.block_sparse_moe.experts.3.w2.weight"),
        ("switch.json", "h.1.mlp.experts.expert_2.wo.weight"),
    ] {
        for (name, args) in [("one", "--accumulate 2"), ("two", "--workers 2 --stages 2 --microbatches 2")] {
            let (whole, parts) = (format!("{model}-{name}-whole"), format!("{model}-{name}-parts"));
            let args = format!("--model {model} {args} --balance-over model");
            done(&run, &whole, &format!("{args} --steps 4"));
            done(&run, &parts, &format!("{args} --steps 2"));
            done(&run, &parts, &format!("{args} --steps 4 --resume auto"));
            for file in ["model", "optimizer"] {
                let read = |out: &str| {
                    fs::read(run.at(out).join(format!("step-00000004/{file}.safetensors"))).unwrap()
                };
                assert!(read(&whole) == read(&parts), "{model} {name}: {file}");
            }
        }
        let from = format!("{model}-two-whole");
        let text = json_of(&output(&run, &format!("generate {from} --prompt the --tokens 12 --json")));
        assert!(text["text"].as_str().is_some_and(|text| !text.is_empty()));
        let to = format!("{model}-folder");
        assert!(output(&run, &format!("convert {from} {to}")).status.success());
        let written = fs::read(run.at(&to).join("model.safetensors")).unwrap();
        assert!(String::from_utf8_lossy(&written).contains(names), "{names}");
        let config = fs::read_to_string(run.at(&to).join("config.json")).unwrap();
        assert!(config.contains("\"router_aux_loss_over\": \"model\""), "{config}");
        let tuned = json_of(&train(&run, &format!("--init-from {to} --out {model}-tuned")));
        assert!(tuned["val_loss_before"].as_f64().unwrap().is_finite());
    }
}
