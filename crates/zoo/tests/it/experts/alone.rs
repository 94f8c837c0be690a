//! A mixture of experts by itself, and the layer of Switch Transformers as `transformers` computes it. The
//! bench `moe` includes this file too, by `#[path]`: the parent module must import the crates under the names
//! `tensor` and `zoo`.

use std::path::Path;

use serde_json::Value;

use super::tensor::{Device, ParamLayout, Tensor};
use super::zoo::ModelSpec;
use super::zoo::exchange::Alone;
use super::zoo::layer::{
    Activations, Borders, Builder, Experts, Grads, Keep, Routed, RouterPass, StageContext, Then,
};
use super::zoo::spec::{
    Activation, BalanceOver, Capacity, ExpertWeights, ExpertsSpec, MlpSpec, RouterLosses,
};
use super::zoo::weights::TensorFile;

/// Result with an error of any kind.
pub(crate) type Outcome<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// A mixture by itself.
pub(crate) struct Mixture {
    pub(crate) cpu: Device,
    pub(crate) layer: Experts,
    pub(crate) layout: ParamLayout,
    pub(crate) params: Tensor,
    borders: Borders,
}

impl Mixture {
    /// Makes a mixture whose tensors `fill` fills. The names are those of Switch Transformers.
    pub(crate) fn new(
        dim: usize,
        mlp: &MlpSpec,
        spec: &ExpertsSpec,
        fill: impl Fn(&str, &mut [f32]) -> Outcome<()>,
    ) -> Outcome<Self> {
        let cpu = Device::cpu(2)?;
        let mut builder = Builder::new(&ModelSpec::preset("switch-nano")?).on(&cpu);
        let layer = builder.experts(dim, mlp, spec);
        let layout = builder.layout()?;
        let mut values = vec![0.0; layout.len()];
        for param in layout.params() {
            fill(&param.name, &mut values[param.range()])?;
        }
        let params = cpu.tensor(&values, values.len())?;
        Ok(Self { cpu, layer, layout, params, borders: Borders::default() })
    }

    pub(crate) fn cx<'a>(&'a self, router: RouterPass<'a>) -> StageContext<'a> {
        let (device, layout, params) = (&self.cpu, &self.layout, &self.params);
        StageContext {
            device,
            layout,
            params: params.into(),
            exchange: &Alone,
            gradient_scale: 1.0,
            router,
            borders: &self.borders,
            sequence: None,
            context: None,
        }
    }

    /// Returns the output for `x`, and what the router chose.
    pub(crate) fn run(&self, x: &[f32], shape: [usize; 3]) -> Outcome<(Vec<f32>, Routed)> {
        let (x, mut saved) = (self.cpu.tensor(x, shape)?, Activations::new(Keep::All));
        let y = self.layer.forward(&self.cx(RouterPass::NONE), &x, &Then::Nothing, &mut saved)?;
        Ok((y.to_vec::<f32>()?, saved.routed().ok_or("no router")?.clone()))
    }
}

/// Feed-forward networks of Switch Transformers.
pub(crate) const SWITCH: MlpSpec =
    MlpSpec { width: 48, activation: Activation::Relu, gated: false, bias: false };

/// Experts of Switch Transformers.
pub(crate) fn switch(capacity: Capacity) -> ExpertsSpec {
    let losses = RouterLosses { balance: 0.01, over: BalanceOver::Layer, z: 0.01 };
    ExpertsSpec { count: 4, per_token: 1, weights: ExpertWeights::Probabilities, capacity, losses }
}

/// Transposes a matrix of `rows` rows.
fn transposed(values: &[f32], rows: usize) -> Vec<f32> {
    let cols = values.len() / rows;
    (0..values.len()).map(|i| values[i % rows * cols + i / rows]).collect()
}

/// Returns the distances of the layer in a folder from the expected values there: relative to the norms of
/// tensors, or absolute, or the number of choices that differ.
pub(crate) fn switch_layer(folder: &Path) -> Outcome<Vec<(String, f64)>> {
    let want: Value = serde_json::from_slice(&std::fs::read(folder.join("expected.json"))?)?;
    let read = |file: &str, name: &str| -> Outcome<(Vec<usize>, Vec<f32>)> {
        let mut file = TensorFile::open(&folder.join(file))?;
        let shape = file.tensors().get(name).ok_or_else(|| format!("no tensor {name}"))?.shape.clone();
        let mut values = vec![0.0; shape.iter().product()];
        file.read_f32(name, &shape, &mut values)?;
        Ok((shape, values))
    };
    let expected = |name: &str| read("expected.safetensors", name);
    let in_layer = |name: &str| name.trim_start_matches("h.0.mlp.").to_owned();
    let capacity = Capacity::Tokens(want["expert_capacity"].as_u64().ok_or("no capacity")? as usize);
    let mixture = Mixture::new(32, &SWITCH, &switch(capacity), |name, to| {
        let (shape, values) = read("layer.safetensors", &in_layer(name))?;
        to.copy_from_slice(&transposed(&values, shape[0]));
        Ok(())
    })?;
    let ((shape, x), (_, dy)) = (expected("x")?, expected("cotangent")?);
    let shape: [usize; 3] = shape.try_into().map_err(|_| "x has three dimensions")?;
    let mut all = Vec::new();
    let off = |got: &[f32], want: &[f32]| {
        let norm = |v: &mut dyn Iterator<Item = f64>| v.map(|x| x * x).sum::<f64>().sqrt();
        let off = norm(&mut got.iter().zip(want).map(|(a, b)| f64::from(*a) - f64::from(*b)));
        let all = norm(&mut want.iter().map(|&x| f64::from(x)));
        if got.len() == want.len() { off / all.max(1e-2) } else { f64::INFINITY }
    };
    let (y, routed) = mixture.run(&x, shape)?;
    all.push(("y".to_owned(), off(&y, &expected("y")?.1)));
    let chosen: Vec<Vec<u32>> = serde_json::from_value(want["chosen"].clone())?;
    let dropped: Vec<Vec<u32>> = serde_json::from_value(want["dropped"].clone())?;
    let times = |row: &[u32], expert: u32| row.iter().filter(|&&chosen| chosen == expert).count() as u32;
    let counts = chosen.iter().flat_map(|row| (0..4).map(|expert| times(row, expert)));
    let others: u32 = counts.zip(&routed.chosen).map(|(a, b)| a.abs_diff(*b)).sum();
    let lost = routed.dropped.abs_diff(dropped.concat().len() as u64);
    all.push(("choices that differ".to_owned(), f64::from(others)));
    all.push(("dropped choices that differ".to_owned(), lost as f64));
    let losses = Routed::losses(&switch(Capacity::None), &[routed]);
    for (field, found) in [("aux_loss", losses.balance), ("z_loss", losses.z)] {
        let wanted = want[field].as_f64().ok_or("no loss")?;
        all.push((field.to_owned(), (found - wanted).abs()));
    }
    let cx = mixture.cx(RouterPass { sequence_weight: 0.5, joined: None });
    let tensor = |v: &[f32]| mixture.cpu.tensor(v, shape);
    let mut saved = Activations::new(Keep::All);
    mixture.layer.forward(&cx, &tensor(&x)?, &Then::Nothing, &mut saved)?;
    let dx = mixture.layer.backward_input(&cx, &mut saved, &tensor(&dy)?)?;
    all.push(("gradient of x".to_owned(), off(&dx.to_vec::<f32>()?, &expected("grad.x")?.1)));
    let mut flat = mixture.cpu.tensor(&vec![f32::NAN; mixture.layout.len()], mixture.layout.len())?;
    let mut grads = Grads::flat(&mut flat, false);
    mixture.layer.backward_weight(&cx, &saved, &tensor(&x)?, &mut grads)?;
    let flat = flat.to_vec::<f32>()?;
    for param in mixture.layout.params() {
        let name = in_layer(&param.name);
        let (shape, values) = expected(&format!("grad.{name}"))?;
        all.push((format!("gradient of {name}"), off(&flat[param.range()], &transposed(&values, shape[0]))));
    }
    Ok(all)
}
