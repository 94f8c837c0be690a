//! Models whose layers have patterns of attention: their `config.json`, token by token with a cache, in slices,
//! their costs, and what is refused.
#![expect(clippy::unwrap_used, reason = "a test fails where it panics")]

use std::path::Path;

use farflung_base::{ContextCut, ContextOrder, LayerPatterns};
use farflung_tensor::Device;
use farflung_zoo::profile::{DividedSequences, ModelProfile};
use farflung_zoo::weights::{Dtype, TokenIds, config_from_text, config_text};
use farflung_zoo::{AxisShare, Borders, Input, ModelSpec, Stage, gpt2};

const VOCAB: usize = 50;
const CONTEXT: usize = 200;

const TEXTS: [&str; 6] = [
    "window:9/full",
    "window:9+sinks:2",
    "strided:7",
    "fixed:4,1,2+block:4/window:5",
    "variable:2,3+global:1+random:1+block:8",
    "bigbird:3,1,2+block:4/full/window:30",
];

fn spec(patterns: &str) -> ModelSpec {
    gpt2(4, 2, 16, CONTEXT, VOCAB).unwrap().with_patterns(&patterns.parse().unwrap())
}

fn tokens(len: usize) -> Vec<u32> {
    (0..len).map(|at| (at * at * 7 + 5 * at + 3) as u32 % VOCAB as u32).collect()
}

#[test]
fn descriptions_read_back() {
    let text = |spec: &ModelSpec| config_text(spec, Dtype::F32, &TokenIds::default());
    for preset in ["nano", "llama-nano", "mistral-7b", "qwen3-0.6b", "mixtral-nano"] {
        let plain = ModelSpec::preset(preset).unwrap();
        assert!(!text(&plain).contains("attention_pattern"), "{preset}");
        for patterns in TEXTS.into_iter().chain(["full", "window:9", "window:9/full/full"]) {
            let spec = plain.clone().with_patterns(&patterns.parse().unwrap());
            let read = config_from_text(Path::new("config.json"), &text(&spec)).unwrap();
            assert_eq!(read.patterns(), spec.patterns(), "{preset} {patterns}");
            assert!(read.each_block().eq(spec.each_block()), "{preset} {patterns}");
        }
    }
    let windowed = text(&spec("window:9/full"));
    assert!(windowed.contains("\"attention_pattern\": \"window:9/full\""), "{windowed}");
    let wrong = windowed.replace("window:9/full", "window:0");
    let said = config_from_text(Path::new("config.json"), &wrong).unwrap_err().to_string();
    assert!(said.contains("attention_pattern") && said.contains("from 1"), "{said}");
    let long = windowed.replace("window:9/full", "strided:9").replace("200", "1000000");
    let said = config_from_text(Path::new("config.json"), &long).unwrap_err().to_string();
    assert!(said.contains("262144"), "{said}");
    // What such a text could make the lists take is known before they are made.
    let large = windowed.replace("window:9/full", "variable:1+random:256+block:1").replace("200", "65536");
    let said = config_from_text(Path::new("config.json"), &large).unwrap_err().to_string();
    assert!(said.contains("512 MB"), "{said}");
}

/// Each token sees the same keys whether it comes with the others or alone, after those in a cache.
#[test]
fn tokens_that_come_one_by_one_have_the_logits_of_the_whole() {
    let cpu = Device::cpu(2).unwrap();
    for patterns in TEXTS {
        let stage = Stage::whole(&spec(patterns), &cpu).unwrap();
        let params: Vec<f32> =
            stage.init(3).unwrap().to_vec::<f32>().unwrap().iter().map(|x| 10.0 * x).collect();
        let params = cpu.tensor(&params, params.len()).unwrap();
        let text = tokens(150);
        let of = |text: &[u32]| Input::Tokens(stage.tokens(text, text.len()).unwrap());
        let whole = stage.logits(&params, of(&text)).unwrap().to_vec::<f32>().unwrap();
        let mut cache = stage.cache(1).unwrap();
        for part in [&text[..70], &text[70..71], &text[71..148], &text[148..149], &text[149..]] {
            let at = cache.len();
            let logits = stage.decode(&params, &mut cache, of(part)).unwrap().to_vec::<f32>().unwrap();
            assert!(logits == whole[at * VOCAB..][..logits.len()], "{patterns}: {at}");
        }
        // Documents of a sequence have the logits that they have alone.
        let starts: Vec<u32> = (0..150).map(|at| if at < 61 { 0 } else { 61 }).collect();
        let documents = Some(stage.tokens(&starts, 150).unwrap());
        let both = of(&text).with_borders(Borders { documents, ..Borders::default() });
        let both = stage.logits(&params, both).unwrap().to_vec::<f32>().unwrap();
        let alone = [&text[..61], &text[61..]]
            .map(|text| stage.logits(&params, of(text)).unwrap().to_vec::<f32>().unwrap());
        assert!(both == alone.concat(), "{patterns}");
    }
}

#[test]
fn costs_are_those_of_windows_and_tiles() {
    let of = |patterns: &str| {
        let profile = ModelProfile::of(&spec(patterns)).unwrap();
        profile.each_block().map(|block| block.forward.attention).collect::<Vec<_>>()
    };
    // Two products of two operations over 16 values.
    let (full, window) = (CONTEXT * (CONTEXT + 1) / 2, 45 + (CONTEXT - 9) * 9);
    assert_eq!(of("full"), [64 * full as u64; 4]);
    assert_eq!(of("window:9/full"), [window, full, window, full].map(|pairs| 64 * pairs as u64));
    // A tile of 64 queries and keys that has a pair is computed, up to the queries' own: the last eight queries
    // have the first tile, the one before theirs, and theirs.
    let (tile, own) = (64 * 64, 64 * 65 / 2);
    let sinks = own + (tile + own) + (2 * tile + own) + (8 * 128 + 36);
    assert_eq!(of("window:9+sinks:1"), [64 * sinks as u64; 4]);
    assert_eq!(of("strided:1"), of("full"));
}

#[test]
fn positions_of_patterns_that_are_not_one_range_are_not_divided() {
    let cut = ContextCut { ring: 2, ulysses: 1, order: ContextOrder::Zigzag };
    let whole = AxisShare::whole();
    let of = |patterns: &str| {
        let divided = DividedSequences::ByContext(cut, 0);
        ModelProfile::of_pieces(&spec(patterns), [&whole, &whole], divided).map(drop)
    };
    of("window:9/full").unwrap();
    let said = of("full/strided:9").unwrap_err().to_string();
    assert!(said.contains("one range"), "{said}");
}

#[test]
fn layers_alternate() {
    let patterns: LayerPatterns = "window:9/full".parse().unwrap();
    let spec = gpt2(5, 2, 16, CONTEXT, VOCAB).unwrap().with_patterns(&patterns);
    assert_eq!((spec.blocks.len(), spec.layers()), (5, 5));
    assert_eq!(spec.patterns().unwrap(), patterns);
    let full = spec.with_patterns(&"full".parse().unwrap());
    assert_eq!(full, gpt2(5, 2, 16, CONTEXT, VOCAB).unwrap());
}
