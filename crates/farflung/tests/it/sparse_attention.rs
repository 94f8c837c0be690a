//! Runs of models with patterns of attention: the same under every plan, in files and when they continue, and
//! what is refused before anything is trained.

use farflung::StepMetrics;

use crate::families::{done, farthest, train};
use crate::tensor_ranks::described;
use crate::tiny::{refused, stderr};

/// Patterns for models of 8 tokens.
const PATTERNS: [&str; 4] =
    ["window:3/full", "strided:3+sinks:1", "fixed:2,1,2+block:2/window:3+sinks:2", "bigbird:1,1,1+block:2"];

#[test]
fn every_plan_trains_as_one_process() {
    let run = described();
    for (at, attention) in PATTERNS.into_iter().enumerate() {
        let model = ["gpt2.json", "llama.json"][at % 2];
        let common = format!("--model {model} --attention {attention}");
        let alone = done(&run, &format!("{at}-alone"), &format!("{common} --accumulate 4"));
        let full = done(&run, &format!("{at}-full"), &format!("--model {model} --accumulate 4"));
        assert!(farthest(&full, &alone) > 1e-5, "{attention} changes nothing");
        for (name, args) in [
            ("replicas", "--workers 2 --accumulate 2"),
            ("stages", "--workers 2 --stages 2 --microbatches 4"),
            ("slices", "--workers 2 --stages 2 --microbatches 4 --schedule terapipe"),
            ("tensor", "--workers 2 --tensor 2 --accumulate 4"),
            ("sequences", "--workers 2 --tensor 2 --sequence-parallel true --accumulate 4"),
            ("recomputed", "--accumulate 4 --recompute full"),
            ("all", "--mesh data=2,pipeline=2,tensor=2 --batch 1 --microbatches 4"),
        ] {
            let steps = done(&run, &format!("{at}-{name}"), &format!("{common} {args} --check-every 1"));
            let off = farthest(&steps, &alone);
            assert!(off < 1e-5, "{attention}, {name}: {off}");
        }
        if at == 0 {
            let divided = format!("{common} --mesh context=2 --accumulate 4");
            let off = farthest(&done(&run, "context", &divided), &alone);
            assert!(off < 1e-5, "{attention}, divided positions: {off}");
        }
    }
}

#[test]
fn a_checkpoint_has_the_pattern_and_continues_with_it_alone() {
    let run = described();
    let common = "--model gpt2.json --accumulate 4 ";
    let with = |out: &str, args: &str| done(&run, out, &format!("{common} {args}"));
    let whole = with("whole", "--attention window:3+sinks:1/full --steps 4");
    with("cut", "--attention window:3+sinks:1/full --steps 2");
    let model = std::fs::read_to_string(run.at("cut/step-00000002/config.json")).unwrap();
    assert!(model.contains("\"attention_pattern\": \"window:3+sinks:1/full\""), "{model}");
    for other in ["", "--attention window:3/full"] {
        let again = train(&run, &format!("{common} {other} --steps 4 --resume auto --out cut"));
        refused(&again, "attention_pattern");
    }
    let resumed = with("cut", "--attention window:3+sinks:1/full --steps 4 --resume auto");
    let last = |steps: &[StepMetrics]| steps.last().unwrap().train_loss.to_bits();
    assert_eq!(last(&resumed), last(&whole));
    // Weights bring their pattern along.
    let from = "--init-from cut/step-00000002 --tokenizer byte --steps 1";
    let [own, same] = [("own", ""), ("same", "--attention window:3+sinks:1/full")]
        .map(|(out, args)| done(&run, out, &format!("{from} {args}")));
    assert_eq!(last(&own), last(&same));
    let full = done(&run, "full", &format!("{from} --attention full"));
    assert_ne!(last(&own), last(&full));
}

#[test]
fn what_cannot_be_trained_is_refused_before() {
    let run = described();
    for (args, texts) in [
        ("--attention window:0", &["--attention", "window:0", "at least 1"][..]),
        ("--attention window:4/", &["--attention", "window:W"]),
        ("--attention fixed:2,2,2", &["--attention", "fixed:L,G"]),
        ("--attention strided:3 --mesh context=2", &["`context-parallel`", "strided:3", "one range"]),
        ("--attention strided:3 --objective prefix-lm", &["`objective`", "strided:3", "prefix"]),
    ] {
        let output = train(&run, &format!("--model gpt2.json {args} --out refused"));
        for text in texts {
            refused(&output, text);
        }
        assert!(!run.at("refused").exists(), "{args}");
    }
    // The same of a model that has the pattern by itself.
    let text = std::fs::read_to_string(run.at("gpt2.json")).unwrap();
    let mut model: serde_json::Value = serde_json::from_str(&text).unwrap();
    model["attention_pattern"] = "strided:3".into();
    std::fs::write(run.at("strided.json"), model.to_string()).unwrap();
    for (args, expected) in [("--mesh context=2", "one range"), ("--objective prefix-lm", "prefix")] {
        let output = train(&run, &format!("--model strided.json {args} --out refused"));
        for text in [expected, "strided:3"] {
            refused(&output, text);
        }
        assert!(!run.at("refused").exists(), "{args}: {}", stderr(&output));
    }
}
