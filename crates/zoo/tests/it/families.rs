//! Families against `transformers`: logits, losses, all gradients, five steps of AdamW and greedy text, of
//! models in one part and in two. The expected values, and how they were made, are in `fixtures/families/`.
#![expect(clippy::unwrap_used, reason = "a test fails where it panics")]

use std::fs;
use std::path::PathBuf;

use farflung_tensor::{Device, Tensor};
use farflung_zoo::layer::{Grads, rotary_table};
use farflung_zoo::spec::{RotaryScaling, RotarySpec};
use farflung_zoo::weights::{Dtype, TensorFile, Weights, WriteOptions};
use farflung_zoo::{Input, ModelSpec, Output, Sampling, Stage, Targets, generate, stage};
use serde_json::Value;

/// The families with fixtures.
const FAMILIES: [&str; 3] = ["llama-mha", "llama-gqa-tied", "llama3-rope-bf16"];

fn folder(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/families").join(name)
}

fn expected(name: &str) -> Value {
    serde_json::from_slice(&fs::read(folder(name).join("expected.json")).unwrap()).unwrap()
}

fn rows(json: &Value) -> Vec<Vec<i64>> {
    serde_json::from_value(json.clone()).unwrap()
}

/// A batch with labels as `transformers` has them: not shifted, -100 is no target.
struct Batch {
    ids: Vec<u32>,
    targets: Vec<u32>,
    weights: Vec<f32>,
    len: usize,
}

impl Batch {
    fn of(expected: &Value) -> Self {
        let (ids, labels) = (rows(&expected["input_ids"]), rows(&expected["labels"]));
        let len = ids[0].len();
        let next = labels.iter().flat_map(|row| row[1..].iter().copied().chain([-100]));
        let (targets, weights) = next.map(|id| (id.max(0) as u32, if id < 0 { 0.0 } else { 1.0 })).unzip();
        Self { ids: ids.into_iter().flatten().map(|id| id as u32).collect(), targets, weights, len }
    }

    fn count(&self) -> f32 {
        self.weights.iter().sum()
    }
}

/// Runs a step of a model in parts. Returns the mean loss, and the gradients of each part.
fn step(parts: &[(Stage, Tensor)], batch: &Batch) -> (f64, Vec<Tensor>) {
    let device = parts[0].0.device();
    let shape = [batch.ids.len() / batch.len, batch.len];
    let targets = device.tensor(&batch.targets, shape).unwrap();
    let weights = device.tensor(&batch.weights, batch.weights.len()).unwrap();
    let targets = Targets { ids: &targets, weights: Some(&weights), scale: 1.0 / batch.count() };
    let mut input = Some(Input::Tokens(device.tensor(&batch.ids, shape).unwrap()));
    let (mut kept, mut loss) = (Vec::new(), None);
    for (stage, params) in parts {
        let targets = stage.gives_losses().then_some(targets);
        let (output, saved) = stage.forward(params, input.take().unwrap(), targets).unwrap();
        kept.push(saved);
        match output {
            Output::Hidden(x) => input = Some(Input::Hidden(x)),
            Output::Losses(losses) => loss = Some(stage::total(&losses).unwrap() / f64::from(batch.count())),
        }
    }
    let (mut grads, mut dy) = (Vec::new(), None);
    for ((stage, params), saved) in parts.iter().zip(kept).rev() {
        let mut flat = stage.zeros().unwrap();
        let into = &mut Grads { flat: &mut flat, accumulate: false };
        dy = stage.backward(params, saved, dy, into, |_, _| {}).unwrap();
        grads.insert(0, flat);
    }
    (loss.unwrap(), grads)
}

/// Returns the parts of a model that is cut before layer `cut`; 0 for the whole.
fn parts(name: &str, cut: usize) -> Vec<(Stage, Tensor)> {
    let mut weights = Weights::open(&folder(name)).unwrap();
    let (spec, cpu) = (weights.spec().clone(), Device::cpu(2).unwrap());
    let bounds = if cut == 0 { vec![0, spec.layers()] } else { vec![0, cut, spec.layers()] };
    let part = |bounds: &[usize]| {
        let stage = Stage::new(&spec, bounds[0]..bounds[1], &cpu).unwrap();
        let params = stage.load(&mut weights).unwrap();
        (stage, params)
    };
    bounds.windows(2).map(part).collect()
}

/// Adds up the gradients of a tied table that two parts have.
fn share_table(parts: &[(Stage, Tensor)], grads: &mut [Tensor]) {
    let ranges: Vec<_> = parts.iter().map(|(stage, _)| stage.shared_table()).collect();
    let [Some(first), Some(last)] = &ranges[..] else { return };
    let sum: Vec<f32> = grads[0].host::<f32>().unwrap()[first.clone()]
        .iter()
        .zip(&grads[1].host::<f32>().unwrap()[last.clone()])
        .map(|(a, b)| a + b)
        .collect();
    for (grads, range) in grads.iter_mut().zip([first, last]) {
        grads.host_mut::<f32>().unwrap()[range.clone()].copy_from_slice(&sum);
    }
}

#[test]
fn logits_losses_and_gradients_are_those_of_transformers() {
    for name in FAMILIES {
        let (want, mut file) =
            (expected(name), TensorFile::open(&folder(name).join("expected.safetensors")).unwrap());
        let batch = Batch::of(&want);
        let mut read = |tensor: &str| {
            let shape = file.tensors()[tensor].shape.clone();
            let mut values = vec![0.0; shape.iter().product()];
            file.read_f32(tensor, &shape, &mut values).unwrap();
            (shape, values)
        };
        for cut in [0, 1] {
            let parts = parts(name, cut);
            if let [(whole, params)] = &parts[..] {
                let tokens = whole.tokens(&batch.ids, batch.len).unwrap();
                let logits = whole.logits(params, tokens).unwrap().to_vec::<f32>().unwrap();
                for (got, want) in logits.iter().zip(read("logits").1) {
                    assert!((got - want).abs() <= 1e-4, "{name}: logit {got}, expected {want}");
                }
                assert_eq!(whole.spec().parameters(), want["parameters"].as_u64().unwrap());
            }
            let (loss, mut grads) = step(&parts, &batch);
            assert!((loss - want["loss"].as_f64().unwrap()).abs() <= 1e-5, "{name} {cut}: {loss}");
            share_table(&parts, &mut grads);
            let mut seen = 0;
            for ((stage, _), grads) in parts.iter().zip(&grads) {
                let specs = stage.spec().tensors();
                for (index, param) in stage.layout().params().iter().enumerate() {
                    let (shape, want) = read(&format!("grad.{}", param.name));
                    let spec = specs.iter().find(|spec| spec.name == param.name).unwrap();
                    let got = stage.layout().view(grads, index).unwrap().to_vec::<f32>().unwrap();
                    let (stored, got) = farflung_zoo::weights::to_stored(stage.spec().names, spec, &got);
                    assert_eq!(stored, shape, "{name}: {}", param.name);
                    let norm = |v: &mut dyn Iterator<Item = f64>| v.map(|x| x * x).sum::<f64>().sqrt();
                    let all = norm(&mut want.iter().map(|&x| f64::from(x)));
                    let off = norm(&mut got.iter().zip(&want).map(|(a, b)| f64::from(*a) - f64::from(*b)));
                    assert!(
                        off <= 1e-4 * all.max(1e-2),
                        "{name} {cut}: {} is off by {off} of {all}",
                        param.name
                    );
                    seen += 1;
                }
            }
            assert!(seen >= parts[0].0.spec().tensors().len(), "{name}: every tensor is compared");
        }
    }
}

/// AdamW with decoupled decay on tensors of two or more dimensions, in f64.
fn adamw(part: &(Stage, Tensor), params: &mut [f64], state: &mut [[f64; 2]], grads: &[f32], step: i32) {
    let (rate, betas, eps, decay) = (0.01, [0.9, 0.95], 1e-8, 0.1);
    for param in part.0.layout().params() {
        let decay = if param.shape.dims().len() > 1 { decay } else { 0.0 };
        for i in param.range() {
            let g = f64::from(grads[i]);
            let [m, v] = &mut state[i];
            *m = betas[0] * *m + (1.0 - betas[0]) * g;
            *v = betas[1] * *v + (1.0 - betas[1]) * g * g;
            let (m, v) = (*m / (1.0 - f64::powi(betas[0], step)), *v / (1.0 - f64::powi(betas[1], step)));
            params[i] -= rate * (m / (v.sqrt() + eps) + decay * params[i]);
        }
    }
}

#[test]
fn five_steps_of_adamw_give_the_losses_of_transformers() {
    for name in FAMILIES {
        let want = expected(name);
        let (batch, losses) = (Batch::of(&want), want["losses"].as_array().unwrap());
        for cut in [0, 1] {
            let mut parts = parts(name, cut);
            let widen = |(_, p): &(Stage, Tensor)| -> Vec<f64> {
                p.host::<f32>().unwrap().iter().map(|&x| f64::from(x)).collect()
            };
            let mut exact: Vec<Vec<f64>> = parts.iter().map(widen).collect();
            let mut states: Vec<Vec<[f64; 2]>> = exact.iter().map(|p| vec![[0.0; 2]; p.len()]).collect();
            for (number, want) in (1..).zip(losses) {
                let (loss, mut grads) = step(&parts, &batch);
                assert!((loss - want.as_f64().unwrap()).abs() <= 1e-3, "{name} {cut}, step {number}: {loss}");
                share_table(&parts, &mut grads);
                for (((part, exact), state), grads) in
                    parts.iter_mut().zip(&mut exact).zip(&mut states).zip(&grads)
                {
                    adamw(part, exact, state, grads.host::<f32>().unwrap(), number);
                    for (to, from) in part.1.host_mut::<f32>().unwrap().iter_mut().zip(exact.iter()) {
                        *to = *from as f32;
                    }
                }
            }
        }
    }
}

#[test]
fn greedy_text_with_a_cache_is_that_of_transformers() {
    for name in FAMILIES {
        let want = &expected(name)["greedy"];
        let ids = |field: &str| -> Vec<u32> { serde_json::from_value(want[field].clone()).unwrap() };
        let [(stage, params)] = &parts(name, 0)[..] else { panic!("one part") };
        let (sampling, mut got) = (Sampling { temperature: 0.0, ..Sampling::default() }, Vec::new());
        let tokens = ids("tokens");
        generate(stage, params, &ids("prompt"), tokens.len(), &sampling, |token| {
            got.push(token);
            true
        })
        .unwrap();
        assert_eq!(got, tokens, "{name}");
    }
}

#[test]
fn what_is_written_is_what_was_read() {
    for name in FAMILIES {
        let [(stage, params)] = &parts(name, 0)[..] else { panic!("one part") };
        let to = tempfile::tempdir().unwrap();
        let dtype = if name.ends_with("bf16") { Dtype::Bf16 } else { Dtype::F32 };
        stage.store(params, to.path(), WriteOptions { dtype, ..WriteOptions::default() }).unwrap();
        let mut again = Weights::open(to.path()).unwrap();
        assert_eq!(again.spec(), stage.spec());
        assert!(stage.load(&mut again).unwrap().host::<f32>() == params.host::<f32>(), "{name}");
        // The files have the names and shapes of those that were read.
        let written = TensorFile::open(&to.path().join("model.safetensors")).unwrap();
        for shard in fs::read_dir(folder(name)).unwrap().map(|entry| entry.unwrap().path()) {
            if shard.file_name().unwrap().to_str().unwrap().starts_with("model")
                && shard.extension().unwrap() != "json"
            {
                for (tensor, info) in TensorFile::open(&shard).unwrap().tensors() {
                    let same = &written.tensors()[tensor];
                    assert_eq!((&same.shape, &same.dtype), (&info.shape, &info.dtype), "{name}: {tensor}");
                }
            }
        }
    }
}

#[test]
fn angles_of_rotary_embeddings_are_those_of_transformers() {
    let cases = expected("rope")["cases"].as_array().unwrap().clone();
    let mut compared = 0;
    for case in &cases {
        let rope = &case["rope_parameters"];
        let real = |field: &str| rope[field].as_f64().unwrap();
        let scaling = match rope["rope_type"].as_str().unwrap() {
            "default" => RotaryScaling::None,
            "linear" => RotaryScaling::Linear { factor: real("factor") },
            "llama3" => RotaryScaling::Llama3 {
                factor: real("factor"),
                low_turns: real("low_freq_factor"),
                high_turns: real("high_freq_factor"),
                original_context: real("original_max_position_embeddings") as usize,
            },
            _ => continue,
        };
        let numbers = |json: &Value| -> Vec<f64> { serde_json::from_value(json.clone()).unwrap() };
        let width = 2 * numbers(&case["inv_freq"]).len();
        let last = numbers(&case["positions"]).into_iter().fold(0.0, f64::max) as usize;
        let table = rotary_table(&RotarySpec { width, base: real("rope_theta"), scaling }, last + 1);
        for (i, position) in numbers(&case["positions"]).into_iter().enumerate() {
            let row = &table[position as usize * width..][..width];
            let half = width / 2;
            for (at, of) in [(0, "cos"), (half, "sin")] {
                for (got, want) in row[at..at + half].iter().zip(numbers(&case[of][i])) {
                    assert!((f64::from(*got) - want).abs() < 2e-6, "{}: {of} {got} {want}", case["title"]);
                }
            }
        }
        compared += 1;
    }
    assert!(compared >= 4, "{compared} of {} cases", cases.len());
}

#[test]
fn what_changes_the_result_and_is_not_known_is_refused_by_name() {
    let json: Value =
        serde_json::from_slice(&fs::read(folder("llama3-rope-bf16").join("config.json")).unwrap()).unwrap();
    let with = |pointer: &[&str], value: Value| {
        let dir = tempfile::tempdir().unwrap();
        let mut json = json.clone();
        let mut at = &mut json;
        for key in pointer {
            at = &mut at[*key];
        }
        *at = value;
        fs::write(dir.path().join("config.json"), json.to_string()).unwrap();
        Weights::open(dir.path()).unwrap_err().to_string()
    };
    for (pointer, value, said) in [
        (&["rope_scaling", "rope_type"][..], "yarn".into(), "`rope_scaling.rope_type` is \"yarn\""),
        (&["rope_scaling", "factor"], Value::Null, "`rope_scaling.factor` is missing"),
        (&["rope_scaling"], "yes".into(), "`rope_scaling` is \"yes\""),
        (&["hidden_act"], "gelu".into(), "`hidden_act` is \"gelu\""),
        (&["quantization_config"], serde_json::json!({"bits": 4}), "`quantization_config` is {\"bits\":4}"),
        (&["partial_rotary_factor"], 0.5.into(), "`partial_rotary_factor` is 0.5"),
        (
            &["num_key_value_heads"],
            3.into(),
            "`num_key_value_heads` is 3, expected a divisor of `num_attention_heads`",
        ),
        (&["head_dim"], 15.into(), "`head_dim` is 15"),
        (&["num_hidden_layers"], 1_u64.checked_shl(40).into(), "`num_hidden_layers` is 1099511627776"),
        (&["rope_theta"], 0.into(), "`rope_theta` is 0"),
        (&["rms_norm_eps"], (-1).into(), "`rms_norm_eps` is -1"),
        (&["model_type"], "mamba".into(), "`model_type` is \"mamba\", expected \"gpt2\" or \"llama\""),
    ] {
        let message = with(pointer, value);
        assert!(message.contains(said), "{message}");
    }
}

#[test]
fn a_preset_in_another_size_keeps_its_kind() {
    let sizes =
        farflung_zoo::Resize { layers: Some(3), heads: Some(8), dim: Some(256), ..Default::default() };
    let small = ModelSpec::preset("tinyllama-1.1b").unwrap().resized(sizes).unwrap();
    let block = small.blocks[0].block;
    assert_eq!((small.layers(), block.attention.heads.query, block.attention.heads.kv), (3, 8, 1));
    assert_eq!((block.attention.head_dim, block.mlp.width), (32, 704));
    assert_eq!(block.attention.rotary.unwrap().width, 32);
    let wrong = farflung_zoo::Resize { heads: Some(7), ..Default::default() };
    assert!(ModelSpec::preset("tinyllama-1.1b").unwrap().resized(wrong).is_err());
}
