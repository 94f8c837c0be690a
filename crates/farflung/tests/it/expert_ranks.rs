//! Runs in which replicas divide the experts of a mixture: the same losses as in one process under every plan,
//! files that any other division continues, and what cannot be divided.

use std::fs;

use farflung::StepMetrics;
use farflung::parallel::pipeline::Method;
use farflung::train::refusal;

use crate::experts::models;
use crate::families::{done, each_continues_any, farthest, train};
use crate::tiny::{json_of, output, refused, stderr};

#[test]
fn ranks_that_divide_the_experts_train_as_one_process() {
    let run = models();
    for model in ["config.json", "switch.json"] {
        // A norm that is clipped is that of all experts.
        let common = format!("--model {model} --clip 0.1");
        let alone = done(&run, &format!("{model}-alone"), &format!("{common} --accumulate 4"));
        let same = |name: &str, most: f64, args: &str| {
            let steps = done(&run, &format!("{model}-{name}"), &format!("{common} {args}"));
            let off = farthest(&steps, &alone);
            assert!(off < most, "{model} {name}: {off}");
            for (step, whole) in steps.iter().zip(&alone) {
                let counts = |step: &StepMetrics| {
                    step.experts.iter().map(|mixture| mixture.counts.clone()).collect::<Vec<_>>()
                };
                assert_eq!(counts(step), counts(whole), "{model} {name}");
            }
        };
        same("two", 1e-4, "--workers 2 --expert 2 --accumulate 2 --check-every 1");
        same("groups", 1e-4, "--workers 4 --expert 2 --batch 1 --accumulate 2 --check-every 1");
        same("uneven", 1e-4, "--workers 4 --expert 2 --expert-weights 2,1 --batch 1 --accumulate 2");
        same("all-at-the-end", 1e-4, "--workers 4 --expert 2 --batch 1 --accumulate 2 --overlap false");
        let runs =
            |method: &Method| refusal(*method).is_none() && !method.slices() && method.is_synchronous();
        for schedule in Method::ALL.into_iter().filter(runs).filter(|&method| method != Method::Varuna) {
            let name = schedule.name();
            let stages = "--workers 4 --stages 2 --expert 2 --batch 1 --microbatches 4";
            same(name, 1e-4, &format!("{stages} --schedule {name}"));
        }
        same("recomputed", 1e-4, "--workers 2 --expert 2 --accumulate 2 --recompute full");
        let stages = "--workers 4 --stages 2 --expert 2 --batch 1 --microbatches 4";
        same("recomputed-stages", 1e-4, &format!("{stages} --recompute full"));
        // Coded averages, also among the two holders of each expert, and coded tokens.
        let groups = "--workers 4 --expert 2 --batch 1 --accumulate 2";
        let sent = |steps: &[StepMetrics]| steps.last().unwrap().bytes_sent;
        let plain = sent(&done(&run, &format!("{model}-plain"), &format!("{common} {groups}")));
        for coded in ["codec f16", "codec int8+ef", "expert-codec f16", "expert-codec int8"] {
            let name = format!("{model}-{}", coded.replace(' ', "-"));
            let steps = done(&run, &name, &format!("{common} {groups} --{coded}"));
            let off = farthest(&steps, &alone);
            assert!(off > 0.0 && off < 0.02, "{model} {coded}: {off}");
            assert!(sent(&steps) < plain, "{model} {coded}: {} {plain}", sent(&steps));
        }
    }
}

#[test]
fn faster_machines_have_more_experts() {
    let run = models();
    let machine = |name: &str, flops: &str| {
        format!("[[device]]\nname = \"{name}\"\nflops = \"{flops}\"\nmemory = \"8GB\"\n")
    };
    let fast_and_slow = [machine("a", "9 GFLOPS"), machine("b", "3 GFLOPS")].concat();
    fs::write(run.at("two.toml"), format!("default = \"1gbit,1ms\"\n{fast_and_slow}")).unwrap();
    let args = "--workers 2 --expert 2 --topology two.toml --accumulate 2";
    let plan = output(&run, &format!("train --model config.json {args} --print-plan"));
    let text = String::from_utf8_lossy(&plan.stdout).into_owned();
    assert!(text.contains("experts = [3, 1]"), "{text}");
    let shared = done(&run, "by-speed", args);
    let alone = done(&run, "alone", "--accumulate 4");
    assert!(farthest(&shared, &alone) < 1e-4);
    let own = format!("train --model config.json {args} --expert-weights 1,1 --print-plan");
    assert!(String::from_utf8_lossy(&output(&run, &own).stdout).contains("experts = [1, 1]"));
    // The order of the machines does not matter.
    let slow_and_fast = [machine("b", "3 GFLOPS"), machine("a", "9 GFLOPS")].concat();
    fs::write(run.at("two.toml"), format!("default = \"1gbit,1ms\"\n{slow_and_fast}")).unwrap();
    let plan = output(&run, &format!("train --model config.json {args} --print-plan"));
    let text = String::from_utf8_lossy(&plan.stdout).into_owned();
    assert!(text.contains("experts = [1, 3]"), "{text}");
}

/// Groups within regions: their averages cross the slow links, their tokens do not.
#[test]
fn groups_within_regions_average_across_them() {
    let run = models();
    let args = "train --model config.json --workers 4 --expert 2 --batch 1 --codec none --print-plan";
    let plan = String::from_utf8(output(&run, args).stdout).unwrap();
    let plan = plan.replace("microbatches = [1, 1, 1, 1]", "microbatches = [2, 2, 2, 2]");
    let (head, level) = plan.split_once("[[level]]").unwrap();
    let alone = done(&run, "alone", "--accumulate 4");
    for (codec, most) in [("none", 1e-4), ("int8", 0.02)] {
        let inside = if codec == "none" { "ring" } else { "direct" };
        let [inner, outer] = [(inside, "none", "[[0, 1], [2, 3]]"), ("hierarchical", codec, "[]")].map(
            |(algorithm, codec, groups)| {
                let level = level.replace("groups = []", &format!("groups = {groups}"));
                let level = level.replace("codec = \"none\"", &format!("codec = \"{codec}\""));
                level.replace("algorithm = \"ring\"", &format!("algorithm = \"{algorithm}\""))
            },
        );
        fs::write(run.at("plan.toml"), format!("{head}[[level]]{inner}\n[[level]]{outer}")).unwrap();
        let args = "--plan plan.toml --steps 3 --warmup 0 --lr-schedule constant --lr 0.01 --threads 1 \
                    --eval-every 100 --eval-batches 2 --sample-tokens 0 --data text.txt";
        let out = format!("regions-{codec}");
        let trained = output(&run, &format!("train --model config.json {args} --out {out}"));
        assert!(trained.status.success(), "{}", stderr(&trained));
        let steps = farflung::metrics::read(&run.at(&out).join("metrics.jsonl")).unwrap();
        let off = farthest(&steps, &alone);
        assert!(off < most, "{codec}: {off}");
    }
}

#[test]
fn any_division_of_experts_continues_any_other() {
    let run = models();
    let divisions = [
        ("alone", "--accumulate 4"),
        ("halves", "--workers 2 --expert 2 --accumulate 2"),
        ("stages", "--workers 4 --stages 2 --expert 2 --expert-weights 3,1 --microbatches 2"),
    ];
    each_continues_any(&run, ("", ""), &divisions, 1e-3);
    let whole = |out: &str| fs::read(run.at(out).join("step-00000004/model.safetensors")).unwrap();
    // A rank's older checkpoint of this division is not used where there is a newer one of another.
    let by_two = "--workers 2 --expert 2 --accumulate 2";
    done(&run, "back", &format!("{by_two} --steps 1"));
    done(&run, "back", "--accumulate 4 --steps 3 --resume auto");
    done(&run, "back", &format!("{by_two} --steps 4 --resume auto"));
    let steps = farflung::metrics::read(&run.at("back").join("metrics.jsonl")).unwrap();
    assert_eq!(steps.iter().map(|step| step.step).collect::<Vec<_>>(), [1, 2, 3, 4]);
    let same = done(&run, "back-alone", "--accumulate 4 --steps 4");
    assert!(farthest(&steps, &same) < 1e-4);
    // Rank 0 has the whole model.
    let text = json_of(&output(&run, "generate halves --prompt the --tokens 8 --json"));
    assert!(text["text"].as_str().is_some_and(|text| !text.is_empty()));
    // A rank whose folder is lost gets its state from the one with the same experts.
    let groups = "--workers 4 --expert 2 --accumulate 1";
    done(&run, "groups", &format!("{groups} --steps 4"));
    done(&run, "lost", &format!("{groups} --steps 2"));
    fs::remove_dir_all(run.at("lost/ranks/rank-00003")).unwrap();
    done(&run, "lost", &format!("{groups} --steps 4 --resume auto"));
    assert!(whole("lost") == whole("groups"));
}

#[test]
fn what_cannot_be_divided_is_refused_with_the_reason() {
    let run = models();
    for (args, reason) in [
        ("--workers 2 --expert 0", "`expert` is 0, expected 1 to 1048576"),
        ("--workers 3 --expert 2", "a divisor of the 3 replicas"),
        ("--workers 8 --expert 8", "weights with which each replica has one of the 4 experts"),
        ("--workers 2 --expert 1000000000000000000", "1 to 1048576"),
        ("--workers 2 --expert 2 --expert-weights 1,9", "each replica has one of the 4 experts"),
        (
            "--workers 2 --expert 2 --expert-weights 1,1,1",
            "expected 2 numbers, one for each replica of `expert`",
        ),
        ("--workers 2 --expert-weights 3,1", "expected 1 numbers, one for each replica of `expert`"),
        ("--workers 2 --expert 2 --model nano", "nothing, because the model has no experts"),
        (
            "--workers 2 --expert 2 --expert-codec aqsgd:4",
            "a codec without memory, because no token comes again",
        ),
        ("--workers 2 --expert 2 --expert-codec int8+ef", "int8+ef"),
        ("--workers 2 --expert 2 --own-data true", "must be equal"),
        ("--workers 2 --expert 2 --codec topk:0.5+dgc:0.9", "takes no part of the momentum"),
        ("--workers 2 --expert 2 --sync diloco", "replicas that divide experts take each step together"),
        (
            "--workers 2 --expert 2 --optimizer onebit-adam",
            "are averaged over the replicas that hold the same ones",
        ),
        ("--workers 4 --expert 2 --stages 2 --schedule pipedream --clip 0", "run each microbatch together"),
        ("--workers 4 --expert 2 --stages 2 --schedule varuna", "run each microbatch together"),
    ] {
        let model = if args.contains("--model") { "" } else { "--model config.json" };
        refused(&train(&run, &format!("{model} {args} --out no")), reason);
    }
}

/// Of equal logits the first experts are chosen: with a router of zeros, one rank gets all tokens and the other
/// none.
#[test]
fn a_rank_whose_experts_get_no_token_takes_part() {
    let run = models();
    done(&run, "first", "--steps 1");
    assert!(output(&run, "convert first folder").status.success());
    let path = run.at("folder").join("model.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    let header = u64::from_le_bytes(*bytes.first_chunk().unwrap()) as usize;
    let tensors: serde_json::Value = serde_json::from_slice(&bytes[8..8 + header]).unwrap();
    for (name, tensor) in
        tensors.as_object().unwrap().iter().filter(|(name, _)| name.contains(".gate.weight"))
    {
        let at = |index: usize| 8 + header + tensor["data_offsets"][index].as_u64().unwrap() as usize;
        assert!(at(0) < at(1), "{name}");
        bytes[at(0)..at(1)].fill(0);
    }
    fs::write(&path, bytes).unwrap();
    let common = "--init-from folder --steps 2 --lr 1e-6 --optimizer sgd --balance-loss 0 --z-loss 0";
    let alone = done(&run, "alone", &format!("{common} --accumulate 2"));
    assert!(alone[0].experts.iter().all(|layer| layer.counts[2..] == [0, 0]), "{:?}", alone[0].experts);
    for (name, args) in [("two", "--expert 2"), ("coded", "--expert 2 --expert-codec int8")] {
        let steps = done(&run, name, &format!("{common} --workers 2 {args}"));
        let off = farthest(&steps, &alone);
        assert!(off < if name == "two" { 1e-6 } else { 0.02 }, "{name}: {off}");
    }
}

/// A router that gives no numbers stops the run on all ranks, which say so, and none waits for another.
#[test]
fn values_that_are_not_finite_stop_all_ranks() {
    let run = models();
    let args = "--workers 4 --expert 2 --batch 1 --lr 1e30 --optimizer sgd --clip 0 --steps 9 --deadline 20s";
    let failed = train(&run, &format!("{args} --out nan"));
    assert!(!failed.status.success());
    let text = stderr(&failed);
    assert!(text.contains("not finite"), "{text}");
    assert!(!text.contains("deadline"), "{text}");
}

#[test]
fn the_memory_of_a_published_mixture_is_divided_with_its_experts() {
    let run = models();
    let weights = |args: &str| {
        let args = format!("plan memory --model mixtral-8x7b --context 16 --precision f32 --json {args}");
        json_of(&output(&run, &args))["rows"][0]["weights"].as_f64().unwrap()
    };
    // 45,097,156,608 of 46,702,792,704 parameters are experts.
    let [all, experts] = [46_702_792_704.0, 45_097_156_608.0].map(|count: f64| 4.0 * count);
    assert!((weights("") - all).abs() < 1.0);
    assert!((weights("--expert 8") - (all - experts * 7.0 / 8.0)).abs() < 1.0);
    refused(&output(&run, "plan memory --model gpt2 --expert 2"), "the model has no experts");
    refused(
        &output(&run, "plan memory --model mixtral-8x7b --expert 2 --data 3"),
        "a multiple of `expert`, 2",
    );
}
