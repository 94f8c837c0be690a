//! A model folder as Hugging Face's transformers writes it (`save_pretrained` of a small `GPT2LMHeadModel` with
//! random weights), with the logits and the greedy continuation that transformers computes. The version is in
//! `fixtures/transformers_gpt2/expected.json`.

use std::path::PathBuf;

use farflung_tensor::Device;
use farflung_zoo::weights::{TensorFile, Weights};
use farflung_zoo::{Sampling, Stage, generate};

#[derive(serde::Deserialize)]
struct Expected {
    input_ids: Vec<Vec<u32>>,
    greedy: Greedy,
}

#[derive(serde::Deserialize)]
struct Greedy {
    prompt: Vec<u32>,
    tokens: Vec<u32>,
}

fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/transformers_gpt2").join(name)
}

#[test]
fn a_folder_of_transformers_gives_what_transformers_gives() {
    let expected: Expected =
        serde_json::from_slice(&std::fs::read(fixture("expected.json")).unwrap()).unwrap();
    let mut weights = Weights::open(&fixture("")).unwrap();
    assert!(!weights.lacks_biases());
    let stage = Stage::whole(weights.spec(), &Device::cpu(1).unwrap()).unwrap();
    let params = stage.load(&mut weights).unwrap();
    let (rows, length) = (expected.input_ids.len(), expected.input_ids[0].len());
    let tokens = stage.tokens(&expected.input_ids.concat(), length).unwrap();
    let logits = stage.logits(&params, tokens).unwrap().to_vec::<f32>().unwrap();
    let shape = [rows, length, stage.spec().vocab];
    let mut theirs = vec![0.0; shape.iter().product()];
    let mut file = TensorFile::open(&fixture("logits.safetensors")).unwrap();
    file.read_f32("logits", &shape, &mut theirs).unwrap();
    let furthest = logits.iter().zip(&theirs).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(logits.len() == theirs.len() && furthest < 1e-4, "{furthest}");
    let greedy = Sampling { temperature: 0.0, ..Sampling::default() };
    let mut drawn = Vec::new();
    generate(&stage, &params, &expected.greedy.prompt, expected.greedy.tokens.len(), &greedy, |token| {
        drawn.push(token);
        true
    })
    .unwrap();
    assert_eq!(drawn, expected.greedy.tokens);
}
