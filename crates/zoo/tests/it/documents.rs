//! Sequences that hold several documents: against `transformers`, and against the documents alone.
#![expect(clippy::unwrap_used, clippy::panic, reason = "a test fails where it panics")]

use std::path::{Path, PathBuf};

use farflung_tensor::{Device, Tensor};
use farflung_zoo::layer::Grads;
use farflung_zoo::weights::{TensorFile, Weights, to_stored};
use farflung_zoo::{
    ActivationPolicy, Batch, Input, Output, Packed, Saved, Slices, Stage, Targets, TokenRows,
};

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

const GPT2: &str = "transformers_gpt2";
const LLAMA: &str = "families/llama-gqa-tied";

/// A model in parts, cut before the layers `cuts`.
struct Model {
    parts: Vec<(Stage, Tensor)>,
}

/// How a pass runs.
#[derive(Debug, Clone, Copy)]
enum Way<'a> {
    /// Whole sequences.
    Whole,
    /// Whole sequences, whose backward pass recomputes and has two halves.
    Halves,
    /// Slices of these lengths.
    Slices(&'a [usize]),
}

/// Losses in order of positions, and the gradients of each part.
struct Found {
    losses: Vec<f32>,
    grads: Vec<Vec<f32>>,
}

impl Model {
    fn new(name: &str, cuts: &[usize]) -> Self {
        let mut weights = Weights::open(&folder(name)).unwrap();
        let (spec, cpu) = (weights.spec().clone(), Device::cpu(2).unwrap());
        let bounds: Vec<usize> = [0].iter().chain(cuts).chain([&spec.layers()]).copied().collect();
        let part = |bounds: &[usize]| {
            let stage = Stage::new(&spec, bounds[0]..bounds[1], &cpu).unwrap();
            let params = stage.load(&mut weights).unwrap();
            (stage, params)
        };
        Self { parts: bounds.windows(2).map(part).collect() }
    }

    fn whole(&self) -> (&Stage, &Tensor) {
        let [(stage, params)] = &self.parts[..] else { panic!("one part") };
        (stage, params)
    }

    /// Runs a batch forward and backward. The gradient is that of the counted losses' sum times `scale`.
    fn run(&self, batch: &Batch, scale: f32, way: Way<'_>) -> Found {
        let (length, rows) = (batch.length, batch.inputs.len() / batch.length);
        let lengths = if let Way::Slices(lengths) = way { lengths } else { &[length] };
        let mut carried: Vec<Slices> = self.parts.iter().map(|(s, _)| s.slices(rows).unwrap()).collect();
        let mut losses = vec![f32::NAN; batch.inputs.len()];
        let (mut kept, mut start) = (Vec::new(), 0);
        for &len in lengths {
            let slice = batch.clone().positions(&(start..start + len));
            let tokens = |ids: &[u32]| self.parts[0].0.tokens(ids, len).unwrap();
            let ids = tokens(&slice.targets);
            let weights = slice.weights.as_ref().unwrap();
            let weights = ids.device().tensor(weights, weights.len()).unwrap();
            let mut input = Input::Tokens(tokens(&slice.inputs));
            for (i, (stage, params)) in self.parts.iter().enumerate() {
                let targets = Targets { ids: &ids, weights: Some(&weights), scale };
                let targets = stage.gives_losses().then_some(targets);
                let input_again = match &input {
                    Input::Tokens(_) => Input::Tokens(tokens(&slice.inputs)),
                    Input::Hidden(x) => {
                        Input::Hidden(x.device().tensor(&x.to_vec::<f32>().unwrap(), x.shape()).unwrap())
                    }
                };
                let packed = input.with_borders(stage.borders(&slice).unwrap());
                let (output, mut saved) = match way {
                    Way::Slices(_) => {
                        stage.forward_slice(params, packed, start, targets, &mut carried[i]).unwrap()
                    }
                    _ => stage.forward(params, packed, targets).unwrap(),
                };
                if !matches!(way, Way::Whole) {
                    saved.drop_activations(1);
                }
                kept.push((i, saved, input_again));
                match output {
                    Output::Hidden(x) => input = Input::Hidden(x),
                    Output::Losses(l) => {
                        for (row, l) in l.to_vec::<f32>().unwrap().chunks(len).enumerate() {
                            losses[row * length + start..][..len].copy_from_slice(l);
                        }
                        break;
                    }
                }
            }
            start += len;
        }
        let mut flat: Vec<Tensor> = self.parts.iter().map(|(s, _)| s.zeros().unwrap()).collect();
        let mut dy = None;
        for (i, saved, input) in kept.into_iter().rev() {
            let grads = &mut Grads::flat(&mut flat[i], true);
            dy = self.backward(i, saved, input, dy, way, &mut carried[i], grads);
        }
        let of = |((stage, _), flat): (&(Stage, Tensor), &Tensor)| {
            stage.layout().pack(flat.host::<f32>().unwrap()).unwrap()
        };
        Found { losses, grads: self.parts.iter().zip(&flat).map(of).collect() }
    }

    #[expect(clippy::too_many_arguments, reason = "the state of one pass")]
    fn backward(
        &self,
        part: usize,
        mut saved: Saved,
        input: Input,
        dy: Option<Tensor>,
        way: Way<'_>,
        slices: &mut Slices,
        grads: &mut Grads<'_>,
    ) -> Option<Tensor> {
        let (stage, params) = &self.parts[part];
        let dx = match way {
            Way::Whole => return stage.backward(params, saved, dy, grads, |_, _| {}).unwrap(),
            Way::Halves => {
                stage.recompute(params, input, &mut saved).unwrap();
                stage.backward_input(params, &mut saved, dy).unwrap()
            }
            Way::Slices(_) => {
                stage.recompute_slice(params, input, &mut saved, slices).unwrap();
                stage.backward_input_slice(params, &mut saved, dy, slices).unwrap()
            }
        };
        stage.backward_weight(saved, grads, |_, _| {}).unwrap();
        dx
    }
}

/// Returns a batch of rows that hold documents of these lengths, with tokens below `vocab`.
fn batch(rows: &[&[usize]], vocab: usize) -> Batch {
    let length = rows[0].iter().sum();
    let mut batch =
        Batch { length, weights: Some(Vec::new()), documents: Some(Vec::new()), ..Batch::default() };
    for lengths in rows {
        let mut begins = 0;
        for &len in *lengths {
            for at in 0..len {
                let token = |at: usize| ((at * at * 7 + 5 * at + 11 * begins + 3) % vocab) as u32;
                let last = at + 1 == len;
                batch.inputs.push(token(at));
                batch.targets.push(if last { 0 } else { token(at + 1) });
                batch.weights.as_mut().unwrap().push(if last { 0.0 } else { 1.0 });
                batch.documents.as_mut().unwrap().push(begins as u32);
            }
            begins += len;
        }
        assert_eq!(begins, length);
    }
    batch
}

/// Returns each document of a batch as a batch of its own, with the index of its first token.
fn alone(batch: &Batch) -> Vec<(usize, Batch)> {
    let documents = batch.documents.as_ref().unwrap();
    let mut all = Vec::new();
    for row in 0..batch.inputs.len() / batch.length {
        let mut start = 0;
        while start < batch.length {
            let of = &documents[row * batch.length..][..batch.length];
            let len = of[start..].iter().take_while(|&&begins| begins as usize == start).count();
            let at = row * batch.length + start;
            let weights = batch.weights.as_ref().map(|weights| weights[at..at + len].to_vec());
            let (inputs, targets) = (&batch.inputs[at..at + len], &batch.targets[at..at + len]);
            all.push((
                at,
                Batch {
                    length: len,
                    inputs: inputs.to_vec(),
                    targets: targets.to_vec(),
                    weights,
                    documents: None,
                    prefixes: None,
                },
            ));
            start += len;
        }
    }
    all
}

fn distance(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let size = b.iter().fold(1e-30, |size: f64, x| size.max(f64::from(x.abs())));
    a.iter().zip(b).map(|(a, b)| f64::from((a - b).abs())).fold(0.0, f64::max) / size
}

const ROWS: [&[usize]; 2] = [&[7, 1, 9, 2, 5], &[1, 16, 3, 4]];

#[test]
fn a_packed_row_has_the_losses_and_gradients_of_its_documents() {
    for (name, vocab) in [(GPT2, 50), (LLAMA, 96)] {
        for cuts in [&[][..], &[1]] {
            let model = Model::new(name, cuts);
            let packed = batch(&ROWS, vocab);
            let scale = 1.0 / packed.counted() as f32;
            let mut losses = vec![f32::NAN; packed.inputs.len()];
            let mut grads: Vec<Vec<f32>> = Vec::new();
            for (at, document) in alone(&packed) {
                let found = model.run(&document, scale, Way::Whole);
                losses[at..at + document.length].copy_from_slice(&found.losses);
                if grads.is_empty() {
                    grads = found.grads;
                    continue;
                }
                for (sum, more) in grads.iter_mut().flatten().zip(found.grads.iter().flatten()) {
                    *sum += more;
                }
            }
            for way in [Way::Whole, Way::Halves, Way::Slices(&[8, 1, 15]), Way::Slices(&[3, 18, 3])] {
                let found = model.run(&packed, scale, way);
                let off = distance(&found.losses, &losses);
                assert!(off < 1e-6, "{name} {cuts:?} {way:?}: losses are off by {off}");
                for (got, want) in found.grads.iter().zip(&grads) {
                    let off = distance(got, want);
                    assert!(off < 1e-5, "{name} {cuts:?} {way:?}: gradients are off by {off}");
                }
            }
            // Without the borders, attention reads other documents, and positions go on.
            let leaky = model.run(&Batch { documents: None, ..packed }, scale, Way::Whole);
            assert!(distance(&leaky.losses, &losses) > 1e-2, "{name}");
            assert!(distance(&leaky.grads[0], &grads[0]) > 1e-2, "{name}");
        }
    }
}

#[test]
fn gradients_do_not_depend_on_what_is_kept() {
    let mut model = Model::new(GPT2, &[]);
    let packed = batch(&ROWS, 50);
    let want = model.run(&packed, 0.1, Way::Whole).grads;
    for (recompute, offload) in [(1, 0), (0, 1), (2, 0)] {
        model.parts[0].0.set_activation_policy(ActivationPolicy { recompute, offload, steps: None });
        assert_eq!(model.run(&packed, 0.1, Way::Whole).grads, want, "{recompute} {offload}");
    }
}

#[test]
fn cached_tokens_of_other_documents_are_not_read() {
    for (name, vocab) in [(GPT2, 50), (LLAMA, 96)] {
        let model = Model::new(name, &[]);
        let (stage, params) = model.whole();
        let all = batch(&ROWS[..1], vocab);
        let packed = |batch: &Batch| -> Packed {
            let tokens = stage.tokens(&batch.inputs, batch.length).unwrap();
            Input::Tokens(tokens).with_borders(stage.borders(batch).unwrap())
        };
        let mut cache = stage.cache(1).unwrap();
        let mut logits: Vec<f32> = Vec::new();
        for range in [0..5, 5..6, 6..7, 7..8, 8..15, 15..19, 19..20, 20..24] {
            let new = packed(&all.clone().positions(&range));
            logits.extend(stage.decode(params, &mut cache, new).unwrap().to_vec::<f32>().unwrap());
        }
        let mut want: Vec<f32> = Vec::new();
        for (_, document) in alone(&all) {
            want.extend(stage.logits(params, packed(&document)).unwrap().to_vec::<f32>().unwrap());
        }
        let off = distance(&logits, &want);
        assert!(off < 1e-6, "{name}: logits are off by {off}");
    }
}

/// Logits, loss and gradients of `transformers`, for four documents in one row.
#[test]
fn a_packed_row_is_that_of_transformers() {
    let file = folder("families/packing/expected.json");
    let rows = TokenRows::read_packed(&file).unwrap();
    let (row, count) = (rows.rows(), rows.targets());
    assert_eq!((count, row.length), (20, 24));
    let want: serde_json::Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    let mut tensors = TensorFile::open(&folder("families/packing/expected.safetensors")).unwrap();
    let named: Vec<String> = tensors.tensors().keys().cloned().collect();
    let mut read = |name: &str| {
        let shape = tensors.tensors()[name].shape.clone();
        let mut values = vec![0.0; shape.iter().product()];
        tensors.read_f32(name, &shape, &mut values).unwrap();
        values
    };
    let whole = Model::new(LLAMA, &[]);
    let (stage, params) = whole.whole();
    let tokens = || Input::Tokens(stage.tokens(&row.inputs, row.length).unwrap());
    let logits = |packed: Packed| stage.logits(params, packed).unwrap().to_vec::<f32>().unwrap();
    let off = |got: &[f32], want: &[f32]| {
        got.iter().zip(want).map(|(got, want)| (got - want).abs()).fold(0.0, f32::max)
    };
    let expected = read("logits");
    let found = off(&logits(tokens().with_borders(stage.borders(row).unwrap())), &expected);
    assert!(found < 1e-4, "logits are off by {found}");
    let leaky = off(&logits(tokens().into()), &expected);
    assert!((leaky - 8.718_661).abs() < 1e-3, "without the borders logits are off by {leaky}");

    for cuts in [&[][..], &[1]] {
        for way in [Way::Whole, Way::Halves, Way::Slices(&[10, 14])] {
            let model = Model::new(LLAMA, cuts);
            let found = model.run(row, 1.0 / count as f32, way);
            let loss = found.losses.iter().map(|&loss| f64::from(loss)).sum::<f64>() / count as f64;
            assert!((loss - want["loss"].as_f64().unwrap()).abs() < 1e-5, "{way:?}: loss {loss}");
            let mut compared = 0;
            for ((stage, _), grads) in model.parts.iter().zip(&found.grads) {
                let (specs, mut at) = (stage.spec().tensors(), 0);
                for param in stage.layout().params() {
                    let got = &grads[at..at + param.shape.len()];
                    at += param.shape.len();
                    let name = format!("grad.{}", param.name);
                    if !named.contains(&name) {
                        continue;
                    }
                    let spec = specs.iter().find(|spec| spec.name == param.name).unwrap();
                    let (_, got) = to_stored(stage.spec().names, spec, got);
                    let want = read(&name);
                    let norm = want.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
                    let apart = got.iter().zip(&want).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>();
                    assert!(apart.sqrt() <= 1e-4 * norm.max(1e-2), "{way:?} {name}: off by {}", apart.sqrt());
                    compared += 1;
                }
            }
            assert_eq!(compared, 9, "{cuts:?}");
        }
    }
}
