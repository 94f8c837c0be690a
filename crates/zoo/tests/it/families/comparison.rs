//! Compares a model with `transformers`: logits, losses, all gradients, five steps of AdamW and greedy text, of
//! a model in one part or in two. The bench `families` includes this file too, by `#[path]`: the parent module
//! must import the crates under the names `tensor` and `zoo`.

#[path = "folders.rs"]
mod folders;
#[path = "threads.rs"]
pub(crate) mod threads;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::Value;

use super::tensor::{self, Device, Tensor};
use super::zoo::exchange::Exchange;
use super::zoo::layer::{Borders, Grads, Routed};
use super::zoo::naming::Names;
use super::zoo::spec::{BalanceOver, RouterLosses};
use super::zoo::weights::{StoredLayout, TensorFile, Weights, to_stored};
use super::zoo::{
    self, AxisShare, Input, ModelSpec, Output, Sampling, Saved, Stage, Targets, generate, stage,
};
pub(crate) use folders::FAMILIES;
use threads::Threads;

/// The folder of a model with one head of keys and values, which ranks cannot divide.
pub(crate) const UNDIVIDED: &str = "llama-gqa-tied";

/// The folder with expected values of `gptj` whose prompts are read in both directions, as GPT-JT was trained.
pub(crate) const PREFIX: &str = "prefix";

/// Result with an error of any kind: of files, of JSON, of the model.
pub(crate) type Outcome<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// Largest distance of a model's results from the expected ones.
pub(crate) struct Distance {
    /// The results.
    pub(crate) what: &'static str,
    /// The result that is farthest off.
    pub(crate) at: String,
    /// Its distance.
    pub(crate) off: f64,
    /// The largest allowed distance.
    pub(crate) mark: f64,
}

impl Distance {
    fn new(what: &'static str, mark: f64) -> Self {
        Self { what, at: "all of them".to_owned(), off: 0.0, mark }
    }

    /// Adds a result. One that is not a number is the farthest of all.
    fn add(&mut self, off: f64, at: impl FnOnce() -> String) {
        let off = if off.is_nan() { f64::INFINITY } else { off };
        if off > self.off {
            (self.off, self.at) = (off, at());
        }
    }
}

/// Returns the distances of the model in `folder` from the expected values there. The model is cut before the
/// layers `cuts`; the results that need a whole model are left out where there are cuts.
pub(crate) fn distances(folder: &Path, cuts: &[usize]) -> Outcome<Vec<Distance>> {
    let want = expected(folder)?;
    let mut file = TensorFile::open(&folder.join("expected.safetensors"))?;
    let (batch, mut parts) = (Batch::of(&want)?, parts(folder, cuts)?);
    let names = parts[0].0.spec().names;
    // Of another folder's model, a file has some of the gradients.
    let of_other = want["base"].is_string();
    let of = |name: &String| name.strip_prefix("grad.").map(|name| names.in_model(name));
    let known: Option<BTreeSet<String>> = of_other.then(|| file.tensors().keys().filter_map(of).collect());
    let mut read = |name: &str| -> Outcome<(Vec<usize>, Vec<f32>)> {
        let name = &stored_name(&file, names, name);
        let shape = file.tensors().get(name).ok_or_else(|| format!("no tensor {name}"))?.shape.clone();
        let mut values = vec![0.0; shape.iter().product()];
        file.read_f32(name, &shape, &mut values)?;
        Ok((shape, values))
    };
    let mut all = Vec::new();
    if let [(whole, params)] = &parts[..] {
        if !of_other {
            let mut found = Distance::new("number of parameters", 0.0);
            let (own, theirs) = (whole.spec().parameters(), number(&want["parameters"])?);
            found.add((own as f64 - theirs).abs(), || format!("{own} instead of {theirs}"));
            all.push(found);
        }
        all.push(logits(whole, params, &batch, &read("logits")?.1)?);
        if want["greedy"].is_object() {
            all.push(greedy(whole, params, &want["greedy"])?);
        }
    }
    let (loss, mut grads) = step(&parts, &batch)?;
    let mut found = Distance::new("loss", 1e-5);
    found.add((loss - number(&want["loss"])?).abs(), || format!("the value {loss}"));
    all.push(found);
    share_table(&parts, &mut grads)?;
    all.push(gradients(&parts, &grads, known.as_ref(), |name| read(&format!("grad.{name}")))?);
    let losses = want["losses"].as_array().ok_or("no losses")?;
    all.push(five_steps(&mut parts, &batch, losses)?);
    Ok(all)
}

/// Returns the distances of the model in `folder` whose blocks are divided between two ranks: of each result,
/// that of the rank that is farther off.
pub(crate) fn distances_of_pieces(folder: &Path) -> Outcome<Vec<Distance>> {
    let shares: Vec<AxisShare> = AxisShare::new(0, vec![1, 1])?.all().collect();
    let of_rank = |(share, exchange): (AxisShare, Threads)| -> Outcome<Vec<Distance>> {
        let want = expected(folder)?;
        let mut file = TensorFile::open(&folder.join("expected.safetensors"))?;
        let mut weights = Weights::open(&model_folder(folder, &want))?;
        let (spec, cpu) = (described(&weights, &want)?, Device::cpu(1)?);
        let axis: (AxisShare, Arc<dyn Exchange>) = (share.clone(), Arc::new(exchange));
        let piece = Stage::piece(&spec, 0..spec.layers(), &cpu, axis)?;
        let params = piece.load(&mut weights)?;
        let (batch, mut parts) = (Batch::of(&want)?, vec![(piece, params)]);
        let mut logits_file = vec![0.0; batch.ids.len() * spec.vocab];
        let shape = [batch.ids.len() / batch.len, batch.len, spec.vocab];
        file.read_f32("logits", &shape, &mut logits_file)?;
        let mut all = vec![logits(&parts[0].0, &parts[0].1, &batch, &logits_file)?];
        let (loss, grads) = step(&parts, &batch)?;
        let mut found = Distance::new("loss", 1e-5);
        found.add((loss - number(&want["loss"])?).abs(), || format!("the value {loss}"));
        all.push(found);
        let mut found = Distance::new("gradients, relative to their norms", 1e-4);
        let grads = grads[0].to_vec::<f32>()?;
        for (param, tensor) in parts[0].0.layout().params().iter().zip(spec.tensors()) {
            // The whole tensor as the file has it, this rank's piece of which is compared.
            let mut whole = vec![0.0; tensor.count()];
            let (stored_shape, _) = to_stored(spec.names, &tensor, &whole);
            let name = stored_name(&file, spec.names, &format!("grad.{}", tensor.name));
            if want["base"].is_string() && !file.tensors().contains_key(&name) {
                continue;
            }
            file.read_f32(&name, &stored_shape, &mut whole)?;
            let mut shape = stored_shape;
            StoredLayout::of(&spec).from_file(&tensor.name, &mut shape, &mut whole);
            let mut own = vec![0.0; param.shape.len()];
            tensor.cut.take(&tensor.shape, &share, &whole, &mut own);
            let norm = |v: &mut dyn Iterator<Item = f64>| v.map(|x| x * x).sum::<f64>().sqrt();
            let all = norm(&mut whole.iter().map(|&x| f64::from(x)));
            let pairs = grads[param.range()].iter().zip(&own);
            let off = norm(&mut pairs.map(|(a, b)| f64::from(*a) - f64::from(*b)));
            found.add(off / all.max(1e-2), || tensor.name.clone());
        }
        all.push(found);
        all.push(five_steps(&mut parts, &batch, want["losses"].as_array().ok_or("no losses")?)?);
        Ok(all)
    };
    let ranks: Vec<Outcome<Vec<Distance>>> = std::thread::scope(|scope| {
        let pairs = shares.into_iter().zip(Threads::group(2));
        let ranks: Vec<_> = pairs.map(|pair| scope.spawn(|| of_rank(pair))).collect();
        let ended = ranks.into_iter().map(|rank| rank.join().map_err(|_| "a rank panicked".into()));
        ended.map(|ended| ended.and_then(|distances| distances)).collect()
    });
    let mut all = Vec::new();
    for rank in ranks {
        for found in rank? {
            match all.iter_mut().find(|other: &&mut Distance| other.what == found.what) {
                Some(other) if other.off < found.off => *other = found,
                Some(_) => {}
                None => all.push(found),
            }
        }
    }
    Ok(all)
}

/// Returns the name that a file has for a tensor of the model, or for its gradient.
fn stored_name(file: &TensorFile, names: &Names, name: &str) -> String {
    let in_model = |stored: &&String| match stored.strip_prefix("grad.") {
        Some(of) => format!("grad.{}", names.in_model(of)) == name,
        None => *stored == name,
    };
    file.tensors().keys().find(in_model).map_or(name, |found| found).to_owned()
}

/// Returns the folder with the model that expected values are of: another one, if they name it.
fn model_folder(folder: &Path, want: &Value) -> PathBuf {
    want["base"].as_str().map_or_else(|| folder.to_owned(), |base| folder.join(base))
}

/// Returns the expected values of a folder that are no tensors.
pub(crate) fn expected(folder: &Path) -> Outcome<Value> {
    Ok(serde_json::from_slice(&fs::read(folder.join("expected.json"))?)?)
}

/// Returns the parts of a model that is cut before the layers `cuts`.
pub(crate) fn parts(folder: &Path, cuts: &[usize]) -> Outcome<Vec<(Stage, Tensor)>> {
    let want = expected(folder)?;
    let mut weights = Weights::open(&model_folder(folder, &want))?;
    let (spec, cpu) = (described(&weights, &want)?, Device::cpu(2)?);
    let bounds: Vec<usize> = [0].iter().chain(cuts).chain([&spec.layers()]).copied().collect();
    let part = |bounds: &[usize]| {
        let stage = Stage::new(&spec, bounds[0]..bounds[1], &cpu)?;
        let params = stage.load(&mut weights)?;
        Ok((stage, params))
    };
    bounds.windows(2).map(part).collect()
}

/// Returns the description of a model, with the losses of routers that `transformers` added: layers together,
/// and for Mixtral the sequences too. Its balancing loss is larger than ours by the number of experts per
/// token.
pub(crate) fn described(weights: &Weights, want: &Value) -> Outcome<ModelSpec> {
    let spec = weights.spec().clone();
    let Some((_, experts)) = spec.mixtures().next() else { return Ok(spec) };
    let over = if want["z_coefficient"].is_null() { BalanceOver::Batch } else { BalanceOver::Model };
    let balance = number(&want["aux_coefficient"])? * experts.per_token as f64;
    let z = want["z_coefficient"].as_f64().unwrap_or(0.0);
    Ok(spec.with_router_losses(RouterLosses { balance, over, z }))
}

fn number(json: &Value) -> Outcome<f64> {
    json.as_f64().ok_or_else(|| format!("{json} is no number").into())
}

/// A batch with labels as `transformers` has them: not shifted, -100 is no target.
struct Batch {
    ids: Vec<u32>,
    targets: Vec<u32>,
    weights: Vec<f32>,
    len: usize,
    /// For each token, where its row's prefix ends, which is read in both directions.
    prefixes: Option<Vec<u32>>,
}

impl Batch {
    fn of(want: &Value) -> Outcome<Self> {
        let rows = |field: &str| serde_json::from_value::<Vec<Vec<i64>>>(want[field].clone());
        let (ids, labels) = (rows("input_ids")?, rows("labels")?);
        let len = ids.first().ok_or("no ids")?.len();
        let next = labels.iter().flat_map(|row| row[1..].iter().copied().chain([-100]));
        let (targets, weights) = next.map(|id| (id.max(0) as u32, if id < 0 { 0.0 } else { 1.0 })).unzip();
        let prefixes: Option<Vec<u32>> = serde_json::from_value(want["prefixes"].clone())?;
        let of_tokens = |ends: Vec<u32>| ends.iter().flat_map(|&end| std::iter::repeat_n(end, len)).collect();
        let ids = ids.into_iter().flatten().map(|id| id as u32).collect();
        Ok(Self { ids, targets, weights, len, prefixes: prefixes.map(of_tokens) })
    }

    fn borders(&self, stage: &Stage) -> Outcome<Borders> {
        let prefixes = self.prefixes.as_ref().map(|ends| stage.tokens(ends, self.len)).transpose()?;
        Ok(Borders { prefixes, ..Borders::default() })
    }

    fn count(&self) -> f32 {
        self.weights.iter().sum()
    }
}

fn logits(whole: &Stage, params: &Tensor, batch: &Batch, want: &[f32]) -> Outcome<Distance> {
    let mut found = Distance::new("logits", 1e-4);
    let tokens = Input::Tokens(whole.tokens(&batch.ids, batch.len)?);
    let got = whole.logits(params, tokens.with_borders(batch.borders(whole)?))?.to_vec::<f32>()?;
    found.add(got.len().abs_diff(want.len()) as f64, || format!("{} of them", got.len()));
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        found.add(f64::from((got - want).abs()), || format!("logit {i}"));
    }
    Ok(found)
}

/// Counts the tokens of a greedy continuation, made with the cache, that are others than the expected ones.
fn greedy(whole: &Stage, params: &Tensor, want: &Value) -> Outcome<Distance> {
    let ids = |field: &str| serde_json::from_value::<Vec<u32>>(want[field].clone());
    let (prompt, want) = (ids("prompt")?, ids("tokens")?);
    let (sampling, mut got) = (Sampling { temperature: 0.0, ..Sampling::default() }, Vec::new());
    generate(whole, params, &prompt, want.len(), &sampling, |token| {
        got.push(token);
        true
    })?;
    let mut found = Distance::new("greedy tokens that differ", 0.0);
    let same = got.iter().zip(&want).filter(|(got, want)| got == want).count();
    found.add((want.len().max(got.len()) - same) as f64, || format!("{got:?} instead of {want:?}"));
    Ok(found)
}

/// Runs a step of a model in parts. Returns the mean loss, and the gradients of each part.
fn step(parts: &[(Stage, Tensor)], batch: &Batch) -> Outcome<(f64, Vec<Tensor>)> {
    let device = parts[0].0.device();
    let shape = [batch.ids.len() / batch.len, batch.len];
    let targets = device.tensor(&batch.targets, shape)?;
    let weights = device.tensor(&batch.weights, batch.weights.len())?;
    let targets = Targets { ids: &targets, weights: Some(&weights), scale: 1.0 / batch.count() };
    let mut input = Some(Input::Tokens(device.tensor(&batch.ids, shape)?));
    let (mut kept, mut loss) = (Vec::new(), None);
    for (stage, params) in parts {
        let targets = stage.gives_losses().then_some(targets);
        let packed = input.take().ok_or("a part has no input")?.with_borders(batch.borders(stage)?);
        let packed = packed.with_sequence_weight(1.0 / shape[0] as f32);
        let (output, saved) = stage.forward(params, packed, targets)?;
        kept.push(saved);
        match output {
            Output::Hidden(x) => input = Some(Input::Hidden(x)),
            Output::Losses(losses) => loss = Some(stage::total(&losses)? / f64::from(batch.count())),
        }
    }
    let routed: Vec<Routed> = kept.iter().flat_map(Saved::routed).cloned().collect();
    if let Some((_, experts)) = parts[0].0.spec().mixtures().next() {
        let of_routers = Routed::losses(experts, &routed);
        let factors = experts.losses;
        loss = loss.map(|loss| loss + factors.balance * of_routers.balance + factors.z * of_routers.z);
        for saved in &mut kept {
            saved.join_routed(Routed::join(&routed));
        }
    }
    let (mut grads, mut dy) = (Vec::new(), None);
    for ((stage, params), saved) in parts.iter().zip(kept).rev() {
        let mut flat = stage.zeros()?;
        let into = &mut Grads::flat(&mut flat, false);
        dy = stage.backward(params, saved, dy, into, |_, _| {})?;
        grads.insert(0, flat);
    }
    Ok((loss.ok_or("no part gives losses")?, grads))
}

/// Adds up the gradients of a tied table that two parts have.
fn share_table(parts: &[(Stage, Tensor)], grads: &mut [Tensor]) -> Outcome<()> {
    let ranges: Vec<_> = parts.iter().map(|(stage, _)| stage.shared_table()).collect();
    if let ([Some(first), .., Some(last)], [of_first, .., of_last]) = (&ranges[..], grads) {
        let on_host = "gradients are on another device";
        let of_first = of_first.host_mut::<f32>().ok_or(on_host)?;
        let of_last = of_last.host_mut::<f32>().ok_or(on_host)?;
        for (a, b) in of_first[first.clone()].iter_mut().zip(&mut of_last[last.clone()]) {
            *a += *b;
            *b = *a;
        }
    }
    Ok(())
}

/// Compares each gradient relative to its norm, and those with a norm below 0.01 relative to that.
fn gradients(
    parts: &[(Stage, Tensor)],
    grads: &[Tensor],
    known: Option<&BTreeSet<String>>,
    mut read: impl FnMut(&str) -> Outcome<(Vec<usize>, Vec<f32>)>,
) -> Outcome<Distance> {
    let mut found = Distance::new("gradients, relative to their norms", 1e-4);
    for ((stage, _), grads) in parts.iter().zip(grads) {
        let specs = stage.spec().tensors();
        for (index, param) in stage.layout().params().iter().enumerate() {
            if known.is_some_and(|known| !known.contains(&param.name)) {
                continue;
            }
            let (shape, want) = read(&param.name)?;
            let spec = specs.iter().find(|spec| spec.name == param.name).ok_or("a tensor has no spec")?;
            let got = stage.layout().view(grads, index)?.to_vec::<f32>()?;
            let (stored, got) = to_stored(stage.spec().names, spec, &got);
            if stored != shape {
                return Err(format!("{} has the shape {stored:?}, expected {shape:?}", param.name).into());
            }
            let norm = |v: &mut dyn Iterator<Item = f64>| v.map(|x| x * x).sum::<f64>().sqrt();
            let all = norm(&mut want.iter().map(|&x| f64::from(x)));
            let off = norm(&mut got.iter().zip(&want).map(|(a, b)| f64::from(*a) - f64::from(*b)));
            found.add(off / all.max(1e-2), || param.name.clone());
        }
    }
    let compared: usize = parts.iter().map(|(stage, _)| stage.layout().params().len()).sum();
    if compared < parts[0].0.spec().tensors().len() {
        return Err(format!("only {compared} gradients are compared").into());
    }
    Ok(found)
}

/// Compares the losses before each of five steps of AdamW and after the last.
fn five_steps(parts: &mut [(Stage, Tensor)], batch: &Batch, losses: &[Value]) -> Outcome<Distance> {
    let mut found = Distance::new("losses of five steps of AdamW", 1e-3);
    let mut exact = Vec::new();
    for (_, params) in &*parts {
        exact.push(params.to_vec::<f32>()?.into_iter().map(f64::from).collect::<Vec<_>>());
    }
    let mut states: Vec<Vec<[f64; 2]>> = exact.iter().map(|p| vec![[0.0; 2]; p.len()]).collect();
    for (number_of_step, want) in (1..).zip(losses) {
        let (loss, mut grads) = step(parts, batch)?;
        found.add((loss - number(want)?).abs(), || format!("loss {number_of_step}"));
        share_table(parts, &mut grads)?;
        for (((part, exact), state), grads) in parts.iter_mut().zip(&mut exact).zip(&mut states).zip(&grads) {
            adamw(part, exact, state, &grads.to_vec::<f32>()?, number_of_step);
            let rounded: Vec<f32> = exact.iter().map(|&x| x as f32).collect();
            part.1 = part.0.device().tensor(&rounded, rounded.len())?;
        }
    }
    Ok(found)
}

/// AdamW with decoupled decay on tensors of two or more dimensions, in f64. As in torch, a tensor without a
/// gradient stays as it is: that of an expert that no token had.
fn adamw(part: &(Stage, Tensor), params: &mut [f64], state: &mut [[f64; 2]], grads: &[f32], step: i32) {
    let (rate, betas, eps, decay) = (0.01, [0.9, 0.95], 1e-8, 0.1);
    for param in part.0.layout().params() {
        if grads[param.range()].iter().all(|&g| g == 0.0) {
            continue;
        }
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
