//! `farflung plan` and its planners, through the command line.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::process::{Command, Output};

fn plan(args: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_farflung"));
    command.arg("plan").args(args.split_whitespace()).output().unwrap()
}

fn json(args: &str) -> serde_json::Value {
    let output = plan(&format!("{args} --json"));
    assert!(output.status.success(), "{args}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Returns the message of a usage error.
fn refused(args: &str) -> String {
    let output = plan(args);
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(2) && output.stdout.is_empty(), "{args}: {message}");
    message
}

#[test]
fn dtfm_says_what_a_layout_costs() {
    let close = |value: &serde_json::Value, expected: f64| {
        assert!((value.as_f64().unwrap() - expected).abs() < 1e-4, "{value} is not {expected}");
    };
    let seen = json("dtfm --case 5 --layout contig");
    close(&seen["data_parallel"], 4.62);
    close(&seen["pipeline"], 54.8169);
    close(&seen["total"], 59.4369);
    assert_eq!(seen["order"].to_string(), "[0,1,5,6,7,2,3,4]");
    assert_eq!(seen["groups"][7].to_string(), "[56,57,58,59,60,61,62,63]");
    assert_eq!(seen["evaluations"], 1);
    close(&json("dtfm --case 3 --layout transp")["total"], 16.0868);
}

#[test]
fn a_search_is_no_worse_than_pipelines_of_neighbours_and_is_repeated_by_its_seed() {
    for case in 1..=5 {
        let given = json(&format!("dtfm --case {case} --layout transp"))["total"].as_f64().unwrap();
        let found = json(&format!("dtfm --case {case} --layout search --evaluations 50 --seed 3"));
        assert!(found["total"].as_f64().unwrap() <= given, "{found}");
        assert_eq!(found["evaluations"], 50);
    }
    let args = "dtfm --case 2 --layout paper --evaluations 120 --seed";
    assert_eq!(json(&format!("{args} 4")), json(&format!("{args} 4")));
    assert_ne!(json(&format!("{args} 4"))["groups"], json(&format!("{args} 5"))["groups"]);
}

#[test]
fn simulation_may_choose_another_layout_than_the_cost() {
    let seen = json("dtfm --case 5 --layout search --evaluations 20 --by simulation");
    let steps: Vec<f64> =
        seen["finalists"].as_array().unwrap().iter().map(|f| f["simulated_s"].as_f64().unwrap()).collect();
    assert!(steps.len() > 2 && steps.is_sorted(), "{steps:?}");
    assert_eq!(seen["simulated_s"].as_f64(), steps.first().copied());
    assert!(
        seen["total"].as_f64().unwrap() > 49.3,
        "the small batch gains from averages inside regions: {seen}"
    );
}

#[test]
fn dtfm_takes_a_file_and_says_what_is_wrong_with_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("machines.toml");
    let file = "default = \"100mbit,5ms\"\n[[device]]\nname = \"d\"\ncount = 8\nflops = \"1 TFLOPS\"\n";
    std::fs::write(&path, file).unwrap();
    let path = path.to_str().unwrap();
    let seen = json(&format!("dtfm --topology {path} --stages 4"));
    assert_eq!((&seen["optimal"], &seen["evaluations"]), (&true.into(), &105.into()));
    assert!(refused(&format!("dtfm --topology {path} --stages 3")).contains("divisor of the 8 devices"));
    assert!(refused("dtfm --case 6").contains("1..=5"));
    assert!(refused("dtfm").contains("--case"));
    assert!(refused("dtfm --case 1 --evaluations 0").contains("evaluations"));
    assert!(refused("dtfm --case 1 --layout exhaustive").contains("at most 16"));
    assert!(refused("dtfm --case 1 --batch 100").contains("multiple of the 8 pipelines"));
    assert!(refused("dtfm --case 1 --layers 4").contains("at least one"));
}

#[test]
fn auto_names_the_fastest_plan_and_what_would_help() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let file = "default = \"1gbit,1ms\"\n[[device]]\nname = \"fast\"\nflops = \"300 GFLOPS\"\n\
                [[device]]\nname = \"slow\"\ncount = 2\nflops = \"100 GFLOPS\"\n";
    std::fs::write(at("machines.toml"), file).unwrap();
    let args = format!("auto {} --model nano -m 12 --out {}", at("machines.toml"), at("plan.toml"));
    let seen = json(&format!("{args} --map {}", at("map.svg")));
    let map = std::fs::read_to_string(at("map.svg")).unwrap();
    assert!(map.starts_with("<svg") && map.contains("fast") && map.contains("layers 0.."), "{map}");
    let steps: Vec<f64> =
        seen["candidates"].as_array().unwrap().iter().map(|c| c["step_s"].as_f64().unwrap()).collect();
    assert!(steps.len() > 5 && steps.is_sorted() && steps[0] > 0.0, "{steps:?}");
    assert_eq!(seen["step_s"].as_f64(), steps.first().copied());
    let written = std::fs::read_to_string(at("plan.toml")).unwrap();
    assert_eq!(seen["plan"].as_str(), Some(written.as_str()));
    let plan: farflung::parallel::Plan = written.parse().unwrap();
    assert_eq!(plan.all_microbatches(), 12);
    assert!(!seen["would_help"].as_array().unwrap().is_empty(), "{seen}");
    let alone = json(&format!("{args} --only pipeline"));
    assert!(alone["step_s"].as_f64().unwrap() >= steps[0], "{alone}");
    let text = String::from_utf8(plan_output(&args)).unwrap();
    assert!(text.contains("times as fast") && text.contains("Microbatches of each replica"), "{text}");
}

fn plan_output(args: &str) -> Vec<u8> {
    let output = plan(args);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    output.stdout
}

#[test]
fn auto_refuses_a_model_that_fits_nowhere_and_a_kind_that_does_not_exist() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("small.toml");
    let file =
        "default = \"lan\"\n[[device]]\nname = \"d\"\ncount = 2\nflops = \"1 TFLOPS\"\nmemory = \"1MB\"\n";
    std::fs::write(&path, file).unwrap();
    let output = plan(&format!("auto {} --model nano", path.display()));
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && stderr.contains("all machines have 2 MB"), "{stderr}");
    assert!(stderr.contains("more are needed, on machines with more memory each"), "{stderr}");
    std::fs::write(&path, file.replace("count = 2", "count = 1").replace("1MB", "1GB")).unwrap();
    let message = refused(&format!("auto {} --model nano --only data", path.display()));
    assert!(message.contains("`only` is data"), "{message}");
}

#[test]
fn auto_divides_the_state_where_machines_hold_it_but_not_the_averages_and_refuses_less() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("machines.toml");
    // A model that is larger than the windows in which replicas send each other shards.
    let args = format!("auto {} --model gpt2 --only data", path.display());
    let write = |memory: &str| {
        let file = format!(
            "default = \"lan\"\n[[device]]\nname = \"d\"\ncount = 2\nflops = \"1 TFLOPS\"\nmemory = \"{memory}\"\n"
        );
        std::fs::write(&path, file).unwrap();
    };
    write("10GB");
    let seen = json(&args);
    let needs = seen["memory"]["d.0"].as_u64().unwrap();
    let kinds = seen["memory_by_kind"]["d.0"].as_object().unwrap();
    assert_eq!(kinds.values().map(|bytes| bytes.as_u64().unwrap()).sum::<u64>(), needs);
    let messages = kinds["messages"].as_u64().unwrap();
    assert!(messages > 0, "{seen}");
    write(&format!("{needs}B"));
    assert!(json(&args)["memory"]["d.0"].as_u64().unwrap() <= needs, "just enough");
    write(&format!("{}B", needs - messages / 8));
    // Half of the state is enough.
    let divided = json(&args);
    let what = divided["candidates"][0]["what"].as_str().unwrap();
    assert!(what.ends_with(", state divided"), "{what}");
    assert!(divided["plan"].as_str().unwrap().contains("\nzero = 1\n"), "{divided}");
    write(&format!("{}B", needs - messages / 2));
    // Half of the gradients, too, which need no buckets.
    let divided = json(&args);
    let what = divided["candidates"][0]["what"].as_str().unwrap();
    assert!(what.ends_with(", state and gradients divided"), "{what}");
    let less = (1..20).map(|step| {
        write(&format!("{}B", needs - messages / 2 - step * (needs / 40)));
        plan(&args)
    });
    let output = less.into_iter().find(|output| !output.status.success()).unwrap();
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && output.stdout.is_empty(), "{message}");
    assert!(
        message.contains("`only` is data, expected a kind of plan that fits these machines"),
        "{message}"
    );
}

/// Two machines with prices and power, joined by a link of 300 Mbit/s.
const PRICED: &str = r#"
default = "20mbit,1ms"
[[device]]
name = "fast"
flops = "30 GFLOPS"
price = "1.50/h"
power = "400W"
[[device]]
name = "slow"
flops = "20 GFLOPS"
price = "0.50/h"
power = "0.1kW"
[[link]]
between = ["fast", "slow"]
link = "300mbit,1ms"
"#;

/// Four machines that hold GPT-2 only if they divide its layers' width; and a plan of that kind is executed.
#[test]
fn auto_divides_layers_among_machines_that_hold_the_model_only_so() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("four.toml");
    let device = "[[device]]\nname = \"a\"\ncount = 4\nflops = \"20 TFLOPS\"\nmemory = \"1100MB\"\n";
    std::fs::write(&file, format!("default = \"100gbit,10us\"\n{device}")).unwrap();
    let file = file.display();
    let found = json(&format!("auto {file} --model gpt2"));
    let first = &found["candidates"][0];
    assert_eq!(
        (first["what"].as_str(), first["tensor"].as_u64()),
        (Some("layers over 4"), Some(4)),
        "{first}"
    );
    let most = found["memory"].as_object().unwrap().values().map(|held| held.as_u64().unwrap()).max();
    assert!(most.unwrap() < 1_100_000_000, "{most:?}");
    let text = String::from_utf8(plan_output(&format!("auto {file} --model gpt2"))).unwrap();
    assert!(text.contains("0..12 1/4"), "{text}");
    let plan = folder.path().join("plan.toml");
    let of_nano = json(&format!("auto {file} --model nano --only tensor --out {}", plan.display()));
    assert!(of_nano["candidates"][0]["tensor"].as_u64().unwrap() > 1, "{of_nano}");
    let train = Command::new(env!("CARGO_BIN_EXE_farflung"))
        .args([
            "train",
            "--model",
            "nano",
            "--steps",
            "1",
            "--eval-batches",
            "1",
            "--sample-tokens",
            "0",
            "--quiet",
        ])
        .arg("--plan")
        .arg(&plan)
        .arg("--out")
        .arg(folder.path().join("run"))
        .output()
        .unwrap();
    assert!(train.status.success(), "{}", String::from_utf8_lossy(&train.stderr));
}

#[test]
fn auto_tells_the_bottleneck_the_costs_and_what_a_change_makes_of_a_step() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("machines.toml");
    std::fs::write(&path, PRICED).unwrap();
    let base = format!("auto {} --model nano -m 12", path.display());
    let seen = json(&format!(
        "{base} --what-if fast:slow*4 --what-if drop:slow --what-if fast*2 --what-if add:fast"
    ));
    let of = |value: &serde_json::Value| value.as_f64().unwrap();
    let (step, bottleneck) = (of(&seen["step_s"]), &seen["bottleneck"]);
    let best = &seen["would_help"][0];
    assert!(best["what"].as_str().unwrap().starts_with(bottleneck["what"].as_str().unwrap()), "{seen}");
    assert!(of(&bottleneck["step_s"]) <= of(&best["step_s"]) && of(&best["step_s"]) < step, "{seen}");
    let answers = seen["what_if"].as_array().unwrap();
    let whats: Vec<&str> = answers.iter().map(|answer| answer["what"].as_str().unwrap()).collect();
    assert_eq!(whats[0], "the link `fast` - `slow` 4 times as fast");
    assert!(answers.iter().all(|answer| of(&answer["step_s"]) <= step || answer["machines"] == 1), "{seen}");
    // Each answer is that of a file with the change.
    let changed = |from: &str, to: &str| {
        assert!(PRICED.contains(from), "{from}");
        std::fs::write(&path, PRICED.replace(from, to)).unwrap();
        json(&base)["step_s"].clone()
    };
    assert_eq!(answers[0]["step_s"], changed("300mbit", "1200mbit"));
    assert_eq!(answers[2]["step_s"], changed("30 GFLOPS", "60 GFLOPS"));
    assert_eq!(answers[3]["step_s"], changed("name = \"fast\"", "name = \"fast\"\ncount = 2"));
    let alone = &PRICED[..PRICED.find("[[device]]\nname = \"slow\"").unwrap()];
    std::fs::write(&path, alone).unwrap();
    let single = json(&base);
    assert_eq!((&answers[1]["step_s"], &answers[1]["machines"]), (&single["step_s"], &1.into()));
    // A billion tokens on one machine: hours times its price, hours times its power.
    let hours = 1e9 / of(&single["tokens_per_s"]) / 3600.0;
    for (key, each) in [("price_per_billion_tokens", 1.5), ("kwh_per_billion_tokens", 0.4)] {
        assert!((of(&single[key]) / (hours * each) - 1.0).abs() < 1e-6, "{key}: {single}");
    }
    let text = String::from_utf8(plan_output(&format!("{base} --what-if fast*2"))).unwrap();
    for word in
        ["Bottleneck: ", "What if `fast` 2 times as fast: a step takes", "A billion tokens cost ", " kWh."]
    {
        assert!(text.contains(word), "`{word}` is not in: {text}");
    }
    std::fs::write(&path, alone.replace("price = \"1.50/h\"\n", "")).unwrap();
    assert!(json(&base)["price_per_billion_tokens"].is_null(), "no price is no cost of 0");
    assert!(refused(&format!("{base} --what-if bert*2")).contains("a machine of the file: `fast`"));
    assert!(refused(&format!("{base} --what-if fast*0")).contains("a factor above 0"));
}

#[test]
fn memory_is_that_of_the_published_tables() {
    let seen = json("memory --model gpt3-175b --tensor 8 --pipeline 1 --data 64");
    assert_eq!(seen["parameters"], 174_604_259_328_u64);
    let rows = seen["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 20);
    let row = |zero: u64, kept: &str| {
        rows.iter().find(|row| row["zero"] == zero && row["activations_kept"] == kept).unwrap()
    };
    let plain = row(0, "tensor + sequence");
    let state =
        ["weights", "gradients", "optimizer"].map(|kind| plain[kind].as_f64().unwrap()).iter().sum::<f64>();
    assert!((state / (16.0 * 174_604_259_328.0 / 8.0) - 1.0).abs() < 1e-6, "{plain}");
    let sharded = row(3, "tensor + sequence");
    assert!(sharded["weights"].as_f64().unwrap() * 64.0 / plain["weights"].as_f64().unwrap() > 0.999);
    // 32.1 GiB of activations, plus those of input and head.
    let activations = plain["activations"].as_f64().unwrap() / f64::from(1 << 30);
    assert!((32.0..32.5).contains(&activations), "{activations}");
    assert!(refused("memory --model gpt3-175b --tensor 7").contains("divisor of the 96 heads"));
    assert!(refused("memory --model gpt2 --pipeline 13").contains("at most the 12 layers"));
    assert!(refused("memory --model gpt2 --device-memory lots").contains("lots"));
    assert!(refused("memory --model gpt9").contains("gpt9"));
}

#[test]
fn by_region_every_machine_is_named_once_and_no_step_is_below_the_bound() {
    let seen = json("auto dtfm-5 --model gpt2 --microbatches 64 --by-region");
    let busy = seen["ranks"].as_u64().unwrap();
    assert_eq!(busy + seen["machines_left_out"].as_u64().unwrap(), 64, "{seen}");
    assert!(seen["ranks_above_limit"].is_null());
    let (step, bound) = (seen["step_s"].as_f64().unwrap(), seen["lower_bound_s"].as_f64().unwrap());
    assert!(bound > 0.0 && step >= bound, "{step} below {bound}");
    assert_eq!(seen["sites"], 8);
    let steps: Vec<f64> =
        seen["candidates"].as_array().unwrap().iter().map(|c| c["step_s"].as_f64().unwrap()).collect();
    assert!(steps.is_sorted() && steps[0].to_bits() == step.to_bits(), "{steps:?}");
    let plan: farflung::parallel::Plan = seen["plan"].as_str().unwrap().parse().unwrap();
    let mut machines = plan.machines.clone();
    machines.sort();
    machines.dedup();
    assert_eq!(machines.len(), plan.machines.len());
    assert_eq!(plan.all_microbatches(), 64);
    assert!(refused("auto dtfm-5 --model gpt2 --by-region --only data").contains("only"));
}

#[test]
fn ways_of_going_on_are_compared_under_one_trace() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace.txt");
    let args = "churn lan --model gpt2 --mtbf 2h --absence 20min --hours 6 --microbatches 32";
    let seen = json(&format!("{args} --seed 4 --trace-out {}", path.display()));
    let policies = seen["policies"].as_array().unwrap();
    let names: Vec<&str> = policies.iter().map(|way| way["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["restart", "varuna", "oobleck", "recycle", "parcae"]);
    assert!(policies.iter().all(|way| (0.1..1.05).contains(&way["share"].as_f64().unwrap())), "{seen}");
    // The trace in the file is the one that was simulated.
    let again = json(&format!(
        "churn lan --model gpt2 --mtbf 2h --absence 20min --microbatches 32 --trace {}",
        path.display()
    ));
    assert_eq!(again["policies"], seen["policies"]);
    assert!(refused(&format!("churn home --trace {} --mtbf 0", path.display())).contains("mtbf"));
    std::fs::write(&path, "machines 8 time 1h\n5s lost 9\n").unwrap();
    assert!(refused(&format!("churn lan --trace {}", path.display())).contains("line 2"));
    // There are as many machines as in the trace, and its mean lifetime decides how often to save.
    let seen = json("churn lan --model gpt2 --microbatches 32 --trace ec2-p3");
    assert_eq!((&seen["machines"], &seen["losses"]), (&32.into(), &167.into()));
    let again = json("churn lan --model gpt2 --microbatches 32 --trace ec2-p3 --mtbf 24h");
    assert!(seen["interval_s"].as_f64().unwrap() < again["interval_s"].as_f64().unwrap() / 3.0, "{seen}");
    assert!(refused("churn lan --trace ec2-p4").contains("(known: ec2-p3, ec2-g4dn)"));
}

#[test]
fn a_mean_time_between_failures_says_how_often_to_save() {
    let of = |mtbf: &str| {
        let args = "auto one-box --model nano --microbatches 8 --only data";
        json(&format!("{args} --mtbf {mtbf} --disk 100mbit --restart 10s"))["churn"].clone()
    };
    let (rare, often) = (of("1000h"), of("1h"));
    let value = |churn: &serde_json::Value, key: &str| churn[key].as_f64().unwrap();
    assert!(value(&rare, "goodput") > value(&often, "goodput"), "{rare} {often}");
    assert!(value(&rare, "interval_s") > 20.0 * value(&often, "interval_s"), "{rare} {often}");
    let sum = value(&often, "goodput") + value(&often, "saving") + value(&often, "lost");
    assert!((sum - 1.0).abs() < 1e-9);
    assert!(json("auto one-box --model nano --microbatches 8 --only data")["churn"].is_null());
}

#[test]
fn a_step_of_the_plan_is_drawn() {
    let folder = tempfile::tempdir().unwrap();
    for (name, only) in [("step.svg", "data"), ("step.json", "pipeline")] {
        let path = folder.path().join(name);
        let args = format!("auto one-box --model nano --microbatches 8 --only {only}");
        let seen = json(&format!("{args} --timeline {}", path.display()));
        let drawn = std::fs::read_to_string(&path).unwrap();
        assert!(seen["step_s"].as_f64().unwrap() > 0.0);
        if name == "step.svg" {
            assert!(drawn.starts_with("<svg") && drawn.contains("forward"), "{drawn}");
            continue;
        }
        // Each microbatch's forward and backward on each stage; the trace ends with the step.
        let trace: serde_json::Value = serde_json::from_str(&drawn).unwrap();
        let events = trace["traceEvents"].as_array().or(trace.as_array()).unwrap();
        let ends = events.iter().filter_map(|event| Some(event["ts"].as_f64()? + event["dur"].as_f64()?));
        let last = ends.fold(0.0, f64::max) / 1e6;
        assert!((last / seen["step_s"].as_f64().unwrap() - 1.0).abs() < 0.01, "{last} {}", seen["step_s"]);
    }
    assert!(refused("auto dtfm-5 --model gpt2 --by-region --timeline step.svg").contains("timeline"));
}

/// The planners of the literature return stages with all layers; if the trainer can run them, also a plan.
#[test]
fn planners_of_the_literature_say_what_they_choose() {
    let out = tempfile::tempdir().unwrap();
    let file = out.path().join("plan.toml");
    for planner in ["alpa", "pipedream", "piper", "galvatron", "dapple"] {
        for more in ["", " --runnable"] {
            let seen = json(&format!("{planner} lan --model nano --microbatches 16{more}"));
            assert_eq!(seen["planner"], planner);
            let stages = seen["stages"].as_array().unwrap();
            let mut next = 0;
            for stage in stages {
                assert_eq!(stage["layers"][0], next, "{seen}");
                next = stage["layers"][1].as_u64().unwrap();
                let machines = stage["machines"].as_array().unwrap().len() as u64;
                assert_eq!(stage["tensor"].as_u64().unwrap() * stage["copies"].as_u64().unwrap(), machines);
            }
            assert_eq!(next, 4, "{seen}");
            let positive = |key: &str| seen[key].as_f64().unwrap() > 0.0;
            assert!(positive("model_step_s") && positive("simulated_step_s"), "{seen}");
            assert_ne!(seen["plan"].is_null(), seen["runnable"].as_bool().unwrap());
            assert_eq!(seen["refused"].is_null(), seen["runnable"].as_bool().unwrap());
            assert!(more.is_empty() || planner == "pipedream" || seen["runnable"] == true, "{seen}");
        }
    }
    let chosen =
        json(&format!("dapple lan --model nano --microbatches 16 --runnable --out {}", file.display()));
    let written: farflung::parallel::Plan = std::fs::read_to_string(&file).unwrap().parse().unwrap();
    assert_eq!(chosen["plan"].as_str().unwrap(), written.to_string());
    // DAPPLE's plan is among the candidates of `auto`.
    let best = json("auto lan --model nano --microbatches 16");
    assert!(best["step_s"].as_f64() <= chosen["simulated_step_s"].as_f64(), "{best}");
    let tried = best["candidates"].as_array().unwrap().iter();
    assert!(tried.filter(|one| one["what"].as_str().unwrap().contains("DAPPLE")).count() > 0);
}

/// Four devices of 8 GB do not hold GPT-2 XL in four stages, nor with all weights on each. With weights split
/// among them it fits, and takes more time.
#[test]
fn alpa_cuts_weights_where_memory_asks_for_it() {
    let out = tempfile::tempdir().unwrap();
    let file = out.path().join("four.toml");
    let mut step = 0.0;
    for (memory, cuts_weights) in [(24, false), (8, true)] {
        let text = format!(
            "default = \"10gbit,5us\"\n[[device]]\nname = \"gpu\"\ncount = 4\nflops = \"60 TFLOPS\"\nmemory = \"{memory}GB\"\n"
        );
        std::fs::write(&file, text).unwrap();
        let seen = json(&format!("alpa {} --model gpt2-xl --microbatches 4 --batch 1", file.display()));
        assert_eq!(seen["stages"][0]["tensor"].as_u64().unwrap() > 1, cuts_weights, "{seen}");
        assert!(seen["model_step_s"].as_f64().unwrap() > step, "{seen}");
        step = seen["model_step_s"].as_f64().unwrap();
    }
    std::fs::write(&file, std::fs::read_to_string(&file).unwrap().replace("8GB", "6GB")).unwrap();
    let said = refused(&format!("alpa {} --model gpt2-xl --microbatches 4 --batch 1", file.display()));
    assert!(said.contains("expected a model that fits"), "{said}");
}

#[test]
fn a_choice_that_cannot_be_run_is_not_written() {
    let said = refused("piper lan --model gpt2 --microbatches 32 --out /nowhere/plan.toml");
    assert!(said.contains("--runnable") && said.contains("unequal numbers of copies"), "{said}");
    let said = refused("dapple one-box --model gpt3-175b");
    assert!(said.contains("expected a model that fits"), "{said}");
}
