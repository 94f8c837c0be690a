//! Runs in which replicas train paths through shared modules: who has the same weights, that a plan divides the
//! work in any way, files that continue and that other programs read, which text takes which path, and what
//! cannot be combined.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::collections::BTreeMap;
use std::fs;

use farflung::zoo::weights::Weights;
use serde_json::{Value, json};

use crate::families::{done, farthest, train};
use crate::tiny::{Run, json_of, output, refused, stderr};

/// A folder with a model of four blocks, and a text of four alphabets in turn.
fn alphabets() -> Run {
    let run = Run::new();
    let model = json!({
        "model_type": "llama",
        "vocab_size": 256,
        "hidden_size": 16,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 24,
        "max_position_embeddings": 16,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": true,
    });
    fs::write(run.at("config.json"), model.to_string()).unwrap();
    let text: String = (0..24).map(|turn| WORDS[turn % 4].repeat(17)).collect();
    fs::write(run.at("text.txt"), text).unwrap();
    run
}

/// Chunks of the text that are clustered have 272 tokens, and so has a turn of each.
const WORDS: [&str; 4] = ["abcd efgh bcdef ", "ijkl mnop jklmn ", "0123 4567 12345 ", "QRST UVWX RSTUV "];
const PATHS: &str = "--sync diloco --sync-every 3 --steps 6 --route-tokens 6 --check-every 1";

/// Returns the tensors of the model in a folder.
fn tensors(run: &Run, folder: &str) -> BTreeMap<String, Vec<f32>> {
    let mut weights = Weights::open(&run.at(folder)).unwrap();
    let tensors = weights.spec().tensors().into_iter();
    let read = tensors.map(|tensor| {
        let mut values = vec![0.0; tensor.count()];
        weights.tensor(&tensor.name, &mut values).unwrap();
        (tensor.name, values)
    });
    read.collect()
}

/// Returns the folder of the last checkpoint of a rank.
fn folder(out: &str, rank: u32, step: u64) -> String {
    let ranks = if rank == 0 { String::new() } else { format!("/ranks/rank-{rank:05}") };
    format!("{out}{ranks}/step-{step:08}")
}

/// Returns which of the blocks of two models are equal, and whether everything else is.
fn equal(a: &BTreeMap<String, Vec<f32>>, b: &BTreeMap<String, Vec<f32>>) -> ([bool; 4], bool) {
    let same = |block: Option<usize>| {
        a.iter().all(|(name, values)| {
            let of = (0..4).find(|block| name.contains(&format!("layers.{block}.")));
            of != block || b[name] == *values
        })
    };
    ([0, 1, 2, 3].map(|block| same(Some(block))), same(None))
}

#[test]
fn paths_have_the_same_modules_as_their_numbers_say() {
    let run = alphabets();
    let steps = done(&run, "four", &format!("{PATHS} --workers 4 --paths 2,2"));
    assert!(steps[5].train_loss < steps[0].train_loss, "{steps:?}");
    let models: Vec<_> = (0..4).map(|rank| tensors(&run, &folder("four", rank, 6))).collect();
    let [first, second, none] =
        [[true, true, false, false], [false, false, true, true], [false, false, false, false]];
    for (a, b, blocks) in
        [(0, 1, first), (2, 3, first), (0, 2, second), (1, 3, second), (0, 3, none), (1, 2, none)]
    {
        assert_eq!(equal(&models[a], &models[b]), (blocks, true), "{a} {b}");
    }
    // The plan may give levels other layers; those in no level are common.
    let plan = output(
        &run,
        &format!("train --model config.json --data text.txt --workers 4 --paths 2,2 --print-plan {PATHS}"),
    );
    let plan = String::from_utf8(plan.stdout).unwrap();
    assert!(plan.contains("[[path]]\nlayers = \"2..4\"\nmodules = 2\n"), "{plan}");
    fs::write(run.at("plan.toml"), plan.replacen("\"0..2\"", "\"1..2\"", 1)).unwrap();
    let own = "--plan plan.toml --steps 6 --route-tokens 6 --check-every 1 --warmup 0 --lr 0.01 --threads 1 \
               --sample-tokens 0 --eval-batches 2 --data text.txt --model config.json --out own";
    let trained = output(&run, &format!("train {own}"));
    assert!(trained.status.success(), "{}", stderr(&trained));
    let models: Vec<_> = (0..4).map(|rank| tensors(&run, &folder("own", rank, 6))).collect();
    assert_eq!(equal(&models[0], &models[1]), ([true, true, false, false], true));
    assert_eq!(equal(&models[0], &models[2]), ([true, false, true, true], true));
}

#[test]
fn one_path_is_diloco_and_no_division_of_work_changes_paths() {
    let run = alphabets();
    let plain = done(&run, "plain", &format!("{PATHS} --workers 4"));
    let one = done(&run, "one", &format!("{PATHS} --workers 4 --paths 1"));
    assert!(farthest(&plain, &one) <= 0.0);
    for codec in ["none", "int8"] {
        let common = format!("{PATHS} --paths 2,2 --codec {codec}");
        let alone = done(&run, &format!("{codec}-alone"), &format!("{common} --workers 4"));
        let most = if codec == "none" { 1e-5 } else { 0.02 };
        let cases = [
            ("staged", "--workers 8 --stages 2 --batch 1 --microbatches 2"),
            ("three", "--workers 12 --stages 3 --batch 1 --microbatches 2 --schedule gpipe"),
            ("looped", "--workers 8 --stages 2 --batch 1 --microbatches 2 --schedule bfs --chunks 2"),
            ("small", "--workers 4 --bucket-mb 0.001"),
            ("slow", "--workers 4 --link 1mbit,100ms"),
        ];
        for (name, args) in cases {
            let out = format!("{codec}-{name}");
            let steps = done(&run, &out, &format!("{common} {args}"));
            let off = farthest(&steps, &alone);
            assert!(off < most, "{out}: {off}");
        }
        // The first rank of each path has its whole model.
        let staged = tensors(&run, &folder(&format!("{codec}-staged"), 6, 6));
        let whole = tensors(&run, &folder(&format!("{codec}-alone"), 3, 6));
        for (name, values) in &whole {
            let off = values.iter().zip(&staged[name]).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(off < if codec == "none" { 1e-4 } else { 0.02 }, "{codec} {name}: {off}");
        }
    }
    // Two machines for each path.
    let eight = done(&run, "eight", &format!("{PATHS} --paths 2,2 --workers 8"));
    assert!(eight[5].train_loss < eight[0].train_loss);
    let same = [0, 4].map(|rank| tensors(&run, &folder("eight", rank, 6)));
    assert_eq!(equal(&same[0], &same[1]), ([true; 4], true));
}

#[test]
fn processes_train_paths_as_threads_do() {
    let run = alphabets();
    let args = format!("{PATHS} --paths 2,2 --workers 4");
    let threads = done(&run, "threads", &args);
    let launched = format!(
        "launch -n 4 -- train --json --model config.json --data text.txt --batch 2 --warmup 0 --lr-schedule constant \
         --lr 0.01 --codec none --threads 1 --eval-every 100 --eval-batches 2 --sample-tokens 5 {PATHS} --paths 2,2 \
         --out processes"
    );
    let output = output(&run, &launched);
    assert!(output.status.success(), "{}", stderr(&output));
    let steps = farflung::metrics::read(&run.at("processes/metrics.jsonl")).unwrap();
    assert!(farthest(&threads, &steps) < 1e-6);
    let report = |out: &str| -> Value {
        serde_json::from_slice(&fs::read(run.at(out).join("report.json")).unwrap()).unwrap()
    };
    assert_eq!(report("threads")["paths"], report("processes")["paths"]);
    assert_eq!(report("processes")["paths"][3]["modules"], json!([1, 1]));
    // The hash of the run is one of all paths.
    assert_eq!(report("threads")["hash"], report("processes")["hash"]);
    assert_ne!(report("processes")["hash"], report("processes")["paths"][0]["hash"]);
}

#[test]
fn a_run_continues_with_its_own_modules() {
    let run = alphabets();
    let args = format!("{PATHS} --workers 4 --paths 2,2");
    let whole = done(&run, "whole", &args);
    let copy = |from: &str, to: &str| {
        let copied =
            std::process::Command::new("cp").args(["-r", from, to]).current_dir(run.at(".")).status();
        assert!(copied.unwrap().success());
    };
    done(&run, "half", &args.replace("--steps 6", "--steps 3"));
    copy("half", "again");
    let again = done(&run, "again", &format!("{args} --resume auto"));
    assert!(farthest(&whole, &again) <= 0.0);
    for rank in 0..4 {
        let [a, b] = ["whole", "again"].map(|out| tensors(&run, &folder(out, rank, 6)));
        assert!(a == b, "{rank}");
    }
    // With stages: each path from its own folder.
    copy("half", "staged");
    let staged = "--workers 8 --stages 2 --batch 1 --microbatches 2 --resume auto";
    let steps = done(&run, "staged", &format!("{} {staged}", args.replace("--workers 4", "")));
    assert!(farthest(&whole, &steps) < 1e-5);
    copy("staged", "back");
    let longer = |args: &str| args.replace("--steps 6", "--steps 9");
    let long = done(&run, "long", &longer(&args));
    let back = done(&run, "back", &format!("{} --resume auto", longer(&args)));
    assert!(farthest(&long[..back.len()], &back) < 1e-5);
    // Other paths are refused, and so are one model and another way to choose a path.
    for (number, other) in
        ["--paths 4", "", "--paths 2,2 --shards kmeans:5", "--paths 2,2 --codec none"].into_iter().enumerate()
    {
        let out = format!("other{number}");
        copy("half", &out);
        let args = args.replace("--paths 2,2", other);
        let args = if number == 3 { args.replace("--route-tokens 6", "--route-tokens 5") } else { args };
        let told = train(&run, &format!("{args} --out {out} --resume auto"));
        refused(&told, "as when the checkpoint was written");
    }
    // A path whose only folder is lost cannot go on; with another replica of it, it can.
    copy("half", "lost");
    fs::remove_dir_all(run.at("lost/ranks/rank-00002")).unwrap();
    let failed = train(&run, &format!("{args} --out lost --resume auto"));
    assert!(!failed.status.success() && stderr(&failed).contains("rank 2"), "{}", stderr(&failed));
    // The same if its folder is there without checkpoints: nothing begins anew.
    done(&run, "later", &format!("{args} --checkpoint-every 3"));
    for step in [3, 6] {
        fs::remove_dir_all(run.at(&folder("later", 2, step))).unwrap();
    }
    fs::remove_file(run.at("later/ranks/rank-00002/latest")).unwrap();
    let failed =
        train(&run, &format!("{args} --steps 9 --out later --resume auto").replace("--steps 6 ", ""));
    assert!(!failed.status.success() && stderr(&failed).contains("rank 2"), "{}", stderr(&failed));
    let eight = args.replace("--workers 4", "--workers 8");
    let whole = done(&run, "eight", &eight);
    done(&run, "eight-half", &eight.replace("--steps 6", "--steps 3"));
    fs::remove_dir_all(run.at("eight-half/ranks/rank-00002")).unwrap();
    let again = done(&run, "eight-half", &format!("{eight} --resume auto"));
    // Its optimizer goes on from the other's moments.
    let off = farthest(&whole, &again);
    assert!(off < 0.02, "{off}");
}

#[test]
fn paths_begin_with_one_model() {
    let run = alphabets();
    let dense = format!("{PATHS} --workers 4").replace("--steps 6", "--steps 3");
    done(&run, "dense", &dense);
    let steps = done(&run, "dense", &format!("{PATHS} --workers 4 --paths 2,2 --resume auto"));
    assert_eq!(steps.len(), 6);
    let models: Vec<_> = [0, 3].iter().map(|&rank| tensors(&run, &folder("dense", rank, 6))).collect();
    assert_eq!(equal(&models[0], &models[1]), ([false; 4], true));
    // A rank that was interrupted before its first checkpoint as a path: all go on from the one model.
    fs::remove_dir_all(run.at(&folder("dense", 3, 6))).unwrap();
    fs::write(run.at("dense/ranks/rank-00003/latest"), "step-00000003\n").unwrap();
    let steps = done(&run, "dense", &format!("{PATHS} --workers 4 --paths 2,2 --resume auto"));
    assert_eq!(steps.iter().map(|step| step.step).collect::<Vec<_>>(), [1, 2, 3, 4, 5, 6]);
}

#[test]
fn a_text_takes_the_path_that_trained_on_its_kind() {
    let run = alphabets();
    let args = "--sync diloco --sync-every 5 --steps 30 --route-tokens 6 --workers 4 --paths 2,2 --lr 0.02";
    done(&run, "run", args);
    let report: Value = serde_json::from_slice(&fs::read(run.at("run/report.json")).unwrap()).unwrap();
    let eval =
        |args: &str| json_of(&output(&run, &format!("eval run --data text.txt --json --batch 2 {args}")));
    // As many windows as the run evaluates: twice twelve.
    let all = eval("--batches 12");
    let loss = |value: &Value| value.as_f64().unwrap();
    assert!((loss(&all["loss"]) - loss(&report["val_loss"])).abs() < 1e-4, "{all} {report}");
    assert_eq!(all["paths"].as_array().unwrap().len(), 4);
    // The five targets after the first of six tokens do not count.
    assert_eq!(all["tokens"], json!(24 * (16 - 5)));
    // Each kind of text takes one path, which continues it best.
    let mut taken = Vec::new();
    for (kind, words) in WORDS.iter().enumerate() {
        let file = format!("kind-{kind}.txt");
        fs::write(run.at(&file), words.repeat(100)).unwrap();
        let measured = |args: &str| {
            json_of(&output(&run, &format!("eval run --data {file} --json --batches 2 --batch 4 {args}")))
        };
        let routed = measured("");
        let paths = routed["paths"].as_array().unwrap();
        let of: Vec<usize> = (0..4).filter(|&path| paths[path]["tokens"].as_u64() > Some(0)).collect();
        assert_eq!(of.len(), 1, "{routed}");
        let losses: Vec<f64> =
            (0..4).map(|path| loss(&measured(&format!("--path {path}"))["loss"])).collect();
        let best = (0..4).min_by(|&a, &b| losses[a].total_cmp(&losses[b])).unwrap();
        assert_eq!(best, of[0], "{losses:?}");
        assert!((losses[best] - loss(&routed["loss"])).abs() < 1e-6);
        taken.push(best);
    }
    let mut all = taken.clone();
    all.sort_unstable();
    assert_eq!(all, [0, 1, 2, 3]);
    let text = |prompt: &str, path: &str| {
        let args = format!("generate run --prompt {prompt} --tokens 8 --temperature 0 --json {path}");
        json_of(&output(&run, &args))["text"].as_str().unwrap().to_owned()
    };
    for (path, words) in taken.iter().zip(["abcdefgh", "ijklmnop", "01234567", "QRSTUVWX"]) {
        assert_eq!(text(words, ""), text(words, &format!("--path {path}")));
    }
    for (args, reason) in [
        ("generate run --path 4", "below 4, the number of paths"),
        ("eval run --data text.txt --path 9", "below 4, the number of paths"),
        ("eval run --data text.txt --skip 16", "a context of more than the 16 targets"),
        ("eval run --data text.txt --context 4", "`context` is 4, expected a context of more than the 5"),
        ("generate run --stages 2", "farflung convert --path N"),
    ] {
        refused(&output(&run, args), reason);
    }
    fs::remove_dir_all(run.at("run/ranks/rank-00003")).unwrap();
    refused(&output(&run, "generate run --path 3"), "rank 3 wrote it on its machine");
    assert!(output(&run, "eval run --data text.txt --path 2").status.success());
}

#[test]
fn what_does_not_go_with_paths_is_refused_with_the_reason() {
    let run = alphabets();
    for (args, reason) in [
        ("--workers 4 --paths 2,2 --sync ddp", "diloco with `paths`"),
        ("--workers 4 --paths 2,2 --sync streaming", "diloco with `paths`"),
        ("--workers 4 --paths 0", "expected numbers of at least 1"),
        ("--workers 4 --paths 4294967295,4294967295", "whose product is at most"),
        ("--workers 3 --paths 2,2 --sync diloco", "as many as divide the 3 replicas"),
        ("--workers 32 --paths 2,2,2,2,2 --sync diloco", "at most 4 levels, so that each has a layer"),
        ("--workers 4 --paths 2,2 --sync diloco", "`route-tokens` is 32, expected less than the context, 16"),
        ("--workers 4 --paths 2,2 --sync diloco --route-tokens 0", "1 to 1048576"),
        ("--workers 4 --paths 2,2 --sync diloco --own-data true", "which text takes which path"),
        ("--workers 4 --paths 2,2 --sync diloco --sampling epochs", "random with `paths`"),
        ("--workers 4 --paths 2,2 --sync diloco --document-mask true", "the same number of targets"),
        ("--workers 4 --paths 2,2 --sync diloco --local-steps by-speed --sync-every 3", "equal with `paths`"),
        (
            "--workers 4 --paths 2 --sync diloco --stages 2 --schedule pipedream --clip 0",
            "ddp with pipedream",
        ),
        ("--workers 4 --paths 2,2 --sync diloco --shards kmeans:3 --route-tokens 6", "fewer paths"),
    ] {
        let output = train(&run, &format!("{args} --out no"));
        refused(&output, reason);
    }
    fs::write(run.at("rows.json"), r#"{"input_ids": [[1, 2, 3], [4, 5, 6]]}"#).unwrap();
    let rows = "--tokens rows.json --sync diloco --route-tokens 2 --workers 2 --paths 2 --model config.json --out no";
    refused(&output(&run, &format!("train {rows}")), "a text with `paths`");
    refused(&output(&run, "host --paths 2,2 --sync diloco --out no"), "would take its path with it");
}

#[test]
fn a_list_of_paths_that_lies_is_refused() {
    let run = alphabets();
    done(&run, "run", &format!("{PATHS} --workers 2 --paths 2"));
    let file = run.at(&folder("run", 0, 6)).join("paths.json");
    let good: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    let changed = |change: &dyn Fn(&mut Value)| {
        let mut lie = good.clone();
        change(&mut lie);
        fs::write(&file, lie.to_string()).unwrap();
        output(&run, &format!("generate {} --prompt a --tokens 1", folder("run", 0, 6)))
    };
    for (change, reason) in [
        (&(|lie: &mut Value| lie["paths"] = json!([])) as &dyn Fn(&mut Value), "0 models"),
        (&|lie: &mut Value| lie["router"]["prefix"] = json!(0), "prefix"),
        (&|lie: &mut Value| lie["router"]["centres"][0][3] = json!(7), "centres"),
        (&|lie: &mut Value| lie["paths"][0]["ranks"] = json!([-1]), "invalid value"),
        (&|lie: &mut Value| lie["paths"][0]["ranks"] = json!([1]), "different ranks"),
        (&|lie: &mut Value| lie["paths"][0]["ranks"] = json!([]), "different ranks"),
        (&|lie: &mut Value| lie["more"] = json!(1), "unknown field"),
        (&|lie: &mut Value| lie["own"] = json!("a"), "invalid type"),
    ] {
        let told = changed(change);
        assert!(!told.status.success(), "{reason}");
        assert!(stderr(&told).contains(reason), "{reason}: {}", stderr(&told));
    }
}

/// All held-out text may be that of one path, whose evaluation takes as long as all others' together.
#[test]
fn held_out_text_of_one_kind_is_measured_by_one_path() {
    let run = alphabets();
    fs::create_dir(run.at("data")).unwrap();
    fs::copy(run.at("text.txt"), run.at("data/train.txt")).unwrap();
    fs::write(run.at("data/valid.txt"), WORDS[2].repeat(60)).unwrap();
    let steps = done(&run, "run", &format!("{PATHS} --workers 4 --paths 2,2 --data data --eval-every 3"));
    assert!(steps[5].val_loss.is_some_and(f64::is_finite), "{steps:?}");
    let paths = json_of(&output(&run, "eval run --data data --json"))["paths"].clone();
    let counts: Vec<u64> =
        paths.as_array().unwrap().iter().filter_map(|path| path["tokens"].as_u64()).collect();
    assert_eq!(counts.iter().filter(|&&count| count > 0).count(), 1, "{counts:?}");
}

/// What begins every prompt does not choose its path.
#[test]
fn a_begin_of_text_token_chooses_no_path() {
    use farflung::zoo::tokenizer::Byte;
    use farflung::zoo::{Corpus, HoldOut, Sharding, Shards, TextRouter};

    let text = (0..24).map(|turn| WORDS[turn % 4].repeat(20)).collect::<String>();
    let corpus = Corpus::from_bytes("alphabets", text.as_bytes(), &Byte).unwrap();
    let (training, _) = corpus.split(HoldOut::Standard).unwrap();
    let shards = Shards::new(Sharding::KMeans(4), &training, 16, 4, 1).unwrap().unwrap();
    let router = TextRouter::of(&shards, &training, 6).unwrap();
    for words in WORDS {
        let tokens: Vec<u32> = words.bytes().map(u32::from).collect();
        assert_eq!(router.path_of(&Byte, words).unwrap(), router.path(&tokens));
    }
}
