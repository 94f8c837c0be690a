//! Runs in which ranks divide the width of layers: the same losses and gradients as in one process under every
//! plan, files that any other division continues, times and memory that were predicted, and what cannot be
//! divided.

#![expect(clippy::unwrap_used, reason = "a test fails where it panics")]

use std::fs;

use farflung::config::pools::Numbers;
use farflung::parallel::pipeline::Method;
use farflung::parallel::whole_replicas;
use farflung::train::{Fault, FaultyValue, Job, Thoroughness, Trainer, refusal};
use farflung::{StepMetrics, TrainConfig};

use crate::experts::models;
use crate::families::{done, each_continues_any, farthest, train};
use crate::small::{config, job, on_all, takes_the_predicted_time};
use crate::tiny::{Run, json_of, output, refused, stderr};

/// Returns a folder with a text and the descriptions of a GPT-2, a LLaMA with grouped queries, and mixtures.
pub(crate) fn described() -> Run {
    let run = models();
    fs::rename(run.at("config.json"), run.at("mixtral.json")).unwrap();
    let gpt2 = serde_json::json!({
        "model_type": "gpt2", "vocab_size": 256, "n_embd": 16, "n_layer": 4, "n_head": 4, "n_positions": 8,
    });
    let llama = serde_json::json!({
        "model_type": "llama", "vocab_size": 256, "hidden_size": 16, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24,
        "max_position_embeddings": 8, "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "tie_word_embeddings": false,
    });
    fs::write(run.at("gpt2.json"), gpt2.to_string()).unwrap();
    fs::write(run.at("llama.json"), llama.to_string()).unwrap();
    run
}

#[test]
fn ranks_that_divide_layers_train_as_one_process() {
    let run = described();
    for model in ["gpt2.json", "llama.json"] {
        // A norm that is clipped is that of all pieces.
        let common = format!("--model {model} --clip 0.1");
        let alone = done(&run, &format!("{model}-alone"), &format!("{common} --accumulate 4"));
        let same = |name: &str, most: f64, args: &str| {
            let steps = done(&run, &format!("{model}-{name}"), &format!("{common} {args}"));
            let off = farthest(&steps, &alone);
            assert!(off < most, "{model} {name}: {off}");
            steps
        };
        same("two", 1e-5, "--mesh tensor=2 --accumulate 4 --check-every 1");
        same("uneven", 1e-5, "--mesh tensor=2 --tensor-weights 3,2 --accumulate 4 --check-every 1");
        if model == "gpt2.json" {
            same("four", 1e-5, "--mesh tensor=4 --accumulate 4 --check-every 1");
            same("eight", 1e-5, "--mesh data=2,tensor=4 --accumulate 2 --check-every 1");
        }
        same("replicas", 1e-5, "--mesh data=2,tensor=2 --accumulate 2 --check-every 1");
        same("at-the-end", 1e-5, "--mesh data=2,tensor=2 --accumulate 2 --overlap false");
        same("recomputed", 1e-5, "--mesh tensor=2 --accumulate 4 --recompute full");
        let listed = |method: &Method| {
            refusal(*method).is_none() && method.is_synchronous() && *method != Method::Varuna
        };
        for schedule in Method::ALL.into_iter().filter(listed) {
            let stages = "--mesh pipeline=2,tensor=2 --microbatches 4";
            same(schedule.name(), 1e-5, &format!("{stages} --schedule {}", schedule.name()));
        }
        // Ranks divide sequences, too.
        let sequences = "--sequence-parallel true --check-every 1";
        same("sequences", 1e-5, &format!("--mesh tensor=2 --accumulate 4 {sequences}"));
        let uneven = "--mesh data=2,tensor=2 --tensor-weights 3,2 --accumulate 2 --recompute full";
        same("uneven-sequences", 1e-5, &format!("{uneven} {sequences}"));
        for schedule in Method::ALL.into_iter().filter(listed).filter(|method| !method.slices()) {
            let stages = format!("--mesh pipeline=2,tensor=2 --microbatches 4 --schedule {schedule}");
            same(&format!("sequences-{schedule}"), 1e-5, &format!("{stages} {sequences}"));
        }
        let all = "--mesh data=2,pipeline=2,tensor=2 --batch 1 --microbatches 4 --check-every 1";
        same("all-axes-and-sequences", 1e-5, &format!("{all} --sequence-parallel true"));
        same("repeated", 1e-5, &format!("{all} --sequence-parallel true --deterministic true"));
        same("all-axes", 1e-5, all);
        same("recomputed-stages", 1e-5, &format!("{all} --recompute full"));
        // Averages and boundaries in codecs, also with random rounding and error feedback: what ranks do not
        // divide stays the same on all of them, or the check would stop the run.
        let sent = |steps: &[StepMetrics]| steps.last().unwrap().bytes_sent;
        let plain = sent(&same("plain", 1e-5, all));
        for coded in ["codec int8+ef", "codec topk:0.5", "codec sign+ef", "boundary int8"] {
            let steps = same(&coded.replace([' ', ':'], "-"), 0.05, &format!("{all} --{coded}"));
            assert!(sent(&steps) < plain, "{model} {coded}: {} {plain}", sent(&steps));
            let name = format!("{}-sequences", coded.replace([' ', ':'], "-"));
            same(&name, 0.05, &format!("{all} --sequence-parallel true --{coded}"));
        }
        let local = "--sync diloco --sync-every 2 --outer-lr 0.7";
        let apart =
            done(&run, &format!("{model}-apart"), &format!("{common} --workers 2 --accumulate 2 {local}"));
        let divided = format!("{common} --mesh data=2,tensor=2 --accumulate 2 {local} --check-every 1");
        let divided = done(&run, &format!("{model}-apart-divided"), &divided);
        assert!(farthest(&divided, &apart) < 1e-5, "{model}");
    }
}

#[test]
fn ranks_divide_layers_and_replicas_divide_experts() {
    let run = described();
    for model in ["mixtral.json", "switch.json"] {
        // Counts of the routers of all layers go through the stages.
        let over = if model == "mixtral.json" { "model" } else { "layer" };
        let common = format!("--model {model} --clip 0.1 --balance-over {over}");
        let alone = done(&run, &format!("{model}-alone"), &format!("{common} --accumulate 4"));
        let all = "--mesh data=2,pipeline=2,tensor=2 --expert 2 --batch 2 --microbatches 2 --check-every 1";
        for (name, most, args) in [
            ("tensor", 1e-4, "--mesh tensor=2 --accumulate 4 --check-every 1"),
            ("both", 1e-4, "--mesh data=2,tensor=2 --expert 2 --accumulate 2 --check-every 1"),
            ("all", 1e-4, all),
            ("repeated", 1e-4, &format!("{all} --deterministic true")),
            ("coded", 0.02, &format!("{all} --codec int8")),
        ] {
            let steps = done(&run, &format!("{model}-{name}"), &format!("{common} {args}"));
            let off = farthest(&steps, &alone);
            assert!(off < most, "{model} {name}: {off}");
            let counts = |steps: &[StepMetrics]| {
                steps[0].experts.iter().map(|mixture| mixture.counts.clone()).collect::<Vec<_>>()
            };
            assert_eq!(counts(&steps), counts(&alone), "{model} {name}");
        }
    }
}

/// Gradients of a step, by tensor, in the layout of the whole model.
pub(crate) fn gradients(config: &TrainConfig) -> Vec<(String, Vec<f32>)> {
    let job = job(config);
    let gathered = on_all(&job, |connection| {
        let mut rank = Trainer::new(&job, connection.comm, 1).unwrap();
        rank.step(false).unwrap();
        rank.gather_grads().unwrap().map(|grads| grads.to_vec::<f32>().unwrap())
    });
    let grads = gathered.into_iter().flatten().next().unwrap();
    let layout = farflung::zoo::Stage::whole(&job.model, &farflung::tensor::Device::cpu(1).unwrap()).unwrap();
    let params = layout.layout().params();
    params.iter().map(|param| (param.name.clone(), grads[param.range()].to_vec())).collect()
}

/// Checks that each tensor's gradient is within 1e-5 of its norm, of small tensors within 1e-5 of 0.01.
#[track_caller]
pub(crate) fn same_gradients(divided: &[(String, Vec<f32>)], alone: &[(String, Vec<f32>)], workers: usize) {
    for ((name, whole), (same, found)) in alone.iter().zip(divided) {
        let norm = |x: &[f32]| x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
        let off: Vec<f32> = whole.iter().zip(found).map(|(a, b)| a - b).collect();
        let off = norm(&off) / norm(whole).max(1e-2);
        assert!(name == same && off < 1e-5, "{workers} ranks, {name}: {off}");
    }
}

#[test]
fn the_gradient_of_each_tensor_is_that_of_one_process() {
    let (_folder, config) = config(1);
    let base = TrainConfig { heads: Some(4), clip: 0.0, accumulate: 4, workers: 1, ..config };
    let alone = gradients(&base);
    for (workers, stages, tensor, weights, sequence_parallel) in [
        (2, 1, 2, None, false),
        (4, 1, 4, None, true),
        (3, 1, 3, Some(vec![1, 2, 1]), false),
        (3, 1, 3, Some(vec![1, 2, 1]), true),
        (8, 2, 2, Some(vec![3, 1]), false),
        (8, 2, 2, None, true),
    ] {
        let replicas = whole_replicas(workers, stages, tensor);
        let divided = gradients(&TrainConfig {
            workers,
            stages,
            tensor,
            tensor_weights: weights.map(Numbers),
            sequence_parallel,
            microbatches: (stages > 1).then_some(4 / replicas),
            accumulate: if stages > 1 { 1 } else { 4 / replicas },
            ..base.clone()
        });
        same_gradients(&divided, &alone, workers);
    }
}

#[test]
fn steps_take_the_time_that_was_predicted() {
    let (_folder, config) = config(3);
    for (workers, stages, tensor, weights, sequence_parallel, dim) in [
        (2, 1, 2, None, false, 16),
        (4, 1, 2, None, false, 16),
        (4, 1, 4, None, true, 16),
        (8, 2, 2, None, false, 16),
        (8, 2, 2, None, true, 16),
        (2, 1, 2, Some(vec![3, 1]), false, 16),
        (4, 2, 2, Some(vec![3, 1]), true, 16),
        // The first and the last stage send each other a table that takes most of the step.
        (4, 2, 2, None, false, 256),
    ] {
        let what = format!("{workers} ranks, {stages} stages, {tensor}");
        let config = TrainConfig {
            heads: Some(4),
            dim: Some(dim),
            workers,
            stages,
            tensor,
            tensor_weights: weights.map(Numbers),
            sequence_parallel,
            ..config.clone()
        };
        takes_the_predicted_time(config, &what);
    }
}

#[test]
fn any_division_of_layers_continues_any_other() {
    let run = described();
    let divisions = [
        ("alone", "--accumulate 4"),
        ("halves", "--mesh tensor=2 --accumulate 4"),
        ("uneven", "--mesh data=2,tensor=2 --tensor-weights 3,1 --accumulate 2"),
        ("stages", "--mesh pipeline=2,tensor=2 --microbatches 4"),
        ("sequences", "--mesh tensor=2 --sequence-parallel true --accumulate 4"),
    ];
    for model in ["gpt2", "llama"] {
        let common = format!("--model {model}.json");
        each_continues_any(&run, (&format!("{model}-"), &common), &divisions, 1e-4);
        let whole = |out: &str| fs::read(run.at(out).join("step-00000004/model.safetensors")).unwrap();
        // Rank 0 has the whole model, in the layout of the model's files.
        let text = json_of(&output(&run, &format!("generate {model}-halves --prompt the --tokens 8 --json")));
        assert!(text["text"].as_str().is_some_and(|text| !text.is_empty()));
        let piece = format!("generate {model}-halves/ranks/rank-00001 --prompt the --tokens 8");
        let piece = stderr(&output(&run, &piece));
        assert!(piece.contains("give the folder of a rank that saves the whole model"), "{piece}");
        let eval = |out: &str| {
            let told = json_of(&output(&run, &format!("eval {model}-{out} --data text.txt --json")));
            told["loss"].as_f64().unwrap()
        };
        assert!((eval("stages") - eval("alone")).abs() < 1e-4, "{model}");
        // A rank whose folder is lost gets its state from the one with the same piece.
        let replicas = format!("{common} --mesh data=2,tensor=2 --accumulate 2");
        done(&run, &format!("{model}-whole"), &format!("{replicas} --steps 4"));
        let lost = format!("{model}-lost");
        done(&run, &lost, &format!("{replicas} --steps 2"));
        fs::remove_dir_all(run.at(&format!("{lost}/ranks/rank-00003"))).unwrap();
        done(&run, &lost, &format!("{replicas} --steps 4 --resume auto"));
        assert!(whole(&lost) == whole(&format!("{model}-whole")));
    }
}

#[test]
fn ranks_that_divide_sequences_no_more_drop_what_boundaries_stored() {
    let run = described();
    for store in ["memory", "file"] {
        let out = format!("samples-{store}");
        let common = "--model llama.json --mesh pipeline=2,tensor=2 --microbatches 4 --check-every 1";
        let coded = format!("{common} --sampling epochs --boundary aqsgd:8 --boundary-store {store}");
        done(&run, &out, &format!("{coded} --steps 2 --sequence-parallel true"));
        assert_eq!(done(&run, &out, &format!("{coded} --steps 4 --resume auto")).last().unwrap().step, 4);
    }
}

#[test]
fn texts_find_the_models_of_paths_whose_layers_are_divided() {
    let run = described();
    let paths = "--paths 2 --route-tokens 4 --sync diloco --sync-every 2 --mesh data=4,tensor=2 --accumulate 1 \
                 --steps 4";
    done(&run, "paths", &format!("--model llama.json {paths}"));
    for folder in ["paths", "paths/ranks/rank-00002"] {
        for prompt in ["the", "a", "of"] {
            let told = output(&run, &format!("generate {folder} --prompt {prompt} --tokens 4 --json"));
            assert!(json_of(&told)["text"].is_string(), "{folder}, {prompt}: {}", stderr(&told));
        }
        let known = fs::read_to_string(run.at(folder).join("step-00000004/paths.json")).unwrap();
        let known: serde_json::Value = serde_json::from_str(&known).unwrap();
        // The other ranks of these replicas, and all ranks of others, have pieces.
        let ranks = |path: usize| known["paths"][path]["ranks"].to_string();
        assert_eq!([ranks(0), ranks(1)], ["[0]", "[2]"]);
    }
}

#[test]
fn what_cannot_be_divided_is_refused_with_the_reason() {
    let run = described();
    for (args, reason) in [
        ("--workers 2 --tensor 0", "`tensor` is 0, expected 1 to 1048576"),
        ("--workers 3 --tensor 2", "a multiple of the ranks of 1 stages, each of 2 ranks"),
        ("--workers 4 --tensor 4", "enough key-value heads for each rank along the tensor axis to have one"),
        ("--workers 2 --tensor 2 --tensor-weights 1,99", "enough key-value heads"),
        ("--workers 2 --tensor 1000000000000000000", "1 to 1048576"),
        ("--workers 2 --tensor 2 --tensor-weights 1", "expected 2 numbers, one for each rank of `tensor`"),
        ("--workers 2 --tensor-weights 1,1", "expected 1 numbers, one for each rank of `tensor`"),
        ("--workers 4 --mesh tensor=2", "one of 4 ranks, as many as the run has"),
        ("--mesh tensor=2 --stages 2", "`stages` is 2, expected 1, as `mesh` says"),
        ("--mesh row=2", "axes with their sizes, such as data=2,pipeline=2,tensor=2"),
        ("--mesh tensor=2 --optimizer muon", "it works on whole tensors"),
        ("--mesh tensor=2 --optimizer lamb", "it works on whole tensors"),
        ("--mesh data=2,tensor=2 --optimizer onebit-adam", "such as adamw"),
        ("--mesh data=2,tensor=2 --sync parameter-server", "ddp or diloco with `tensor` above 1"),
        ("--mesh data=2 --sequence-parallel true", "the ranks along the tensor axis divide sequences"),
        ("--mesh data=2,tensor=2 --sequence-parallel true --sync diloco", "ddp with `sequence-parallel`"),
        (
            "--mesh pipeline=2,tensor=2 --sequence-parallel true --schedule terapipe",
            "it divides the positions of sequences itself",
        ),
        ("--mesh tensor=2 --context 1 --sequence-parallel true", "each rank has one of 1 positions"),
        ("--mesh tensor=2 --sync diloco", "because a single replica divides layers"),
        ("--mesh tensor=2 --own-data true", "read the same text"),
        ("--mesh pipeline=2,tensor=2 --schedule pipedream --clip 0", "run each microbatch together"),
        ("--mesh pipeline=2,tensor=2 --schedule varuna", "run each microbatch together"),
        ("--workers 2 --pools 1,1 --tensor 2", "run each microbatch together"),
    ] {
        refused(&train(&run, &format!("--model llama.json {args} --out no")), reason);
    }
    let mixture = "--model mixtral.json --mesh tensor=2 --sequence-parallel true --out no";
    refused(&train(&run, mixture), "whose routers take all tokens");
    let host = output(&run, "host --model llama.json --tensor 2 --data text.txt --out no");
    refused(&host, "would take its piece of each layer with it");
}

/// A bit that flips in what ranks do not divide is found, and so is one in a piece of which another replica has
/// a copy.
#[test]
fn copies_that_differ_are_found() {
    let (_folder, config) = config(2);
    let base = TrainConfig { heads: Some(4), workers: 4, tensor: 2, check_every: 1, ..config };
    let run = described();
    let described = TrainConfig { layers: None, heads: None, dim: None, context: None, ..base.clone() };
    let own_head = TrainConfig { model: run.at("llama.json").display().to_string(), ..described };
    // The bit is in the last tensor: a bias of the norm, and the head.
    for (config, copies) in
        [(base, "of the tensors that no ranks divide"), (own_head, "in the piece of rank 1")]
    {
        let fault = Fault { rank: 3, step: 1, value: FaultyValue::Parameters, element: 0, bit: 3 };
        let job = Job { fault: Some(fault), ..job(&config) };
        let found = on_all(&job, |connection| {
            let mut rank = Trainer::new(&job, connection.comm, 1).unwrap();
            rank.step(false).unwrap();
            rank.verify(Thoroughness::All).unwrap_err().to_string()
        });
        assert!(found.iter().all(|error| error.contains(copies)), "{found:?}");
    }
}

/// A rank that ends leaves no other waiting for its piece.
#[test]
fn values_that_are_not_finite_stop_all_ranks() {
    let run = described();
    let args = "--model gpt2.json --mesh data=2,tensor=2 --workers 4 --lr 1e30 --optimizer sgd --clip 0 --steps 9 \
                --deadline 20s";
    let failed = train(&run, &format!("{args} --out nan"));
    assert!(!failed.status.success());
    let text = stderr(&failed);
    assert!(text.contains("not finite"), "{text}");
    assert!(!text.contains("deadline"), "{text}");
}
