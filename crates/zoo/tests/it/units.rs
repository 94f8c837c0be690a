//! Parameters that passes get unit by unit: bits do not change, and no pass asks for another unit than those
//! that it has announced.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

use std::cell::{Cell, RefCell};
use std::sync::Arc;

use farflung_tensor::{Device, Tensor};
use farflung_zoo::layer::{Grads, LayerUnits, Params, UnitParams, UnitValues};
use farflung_zoo::{
    ActivationPolicy, Input, ModelSpec, Output, Resize, Stage, Targets, ZooError, gpt2, stage,
};

/// Copies units of a flat buffer, each when it is asked for.
#[derive(Debug)]
struct Copied<'a> {
    flat: &'a [f32],
    device: Device,
    announced: RefCell<Vec<LayerUnits>>,
    asked: Cell<usize>,
}

impl UnitParams for Copied<'_> {
    fn begin(&self, layers: Vec<LayerUnits>) {
        self.announced.replace(layers);
        self.asked.set(0);
    }

    fn get(&self, units: &LayerUnits) -> Result<Vec<UnitValues>, ZooError> {
        let announced = self.announced.borrow();
        let from = self.asked.get();
        let next = (from..announced.len()).find(|&at| announced[at] == *units);
        // A recomputation can ask for a layer again.
        self.asked.set(next.expect("units of a layer that is to come"));
        let unit = |range: &std::ops::Range<usize>| {
            let values = self.device.tensor(&self.flat[range.clone()], range.len())?;
            Ok(UnitValues { range: range.clone(), values: Arc::new(values) })
        };
        units.iter().map(unit).collect()
    }
}

/// Returns the loss and the gradients of a step.
fn step<'a>(stage: &Stage, params: impl Into<Params<'a>>, halves: bool) -> (f64, Vec<f32>) {
    let params = params.into();
    let ids = |from: u32| -> Vec<u32> { (0..16).map(|i| (from + 7 * i) % 31).collect() };
    let (tokens, targets) = (stage.tokens(&ids(3), 8).unwrap(), stage.tokens(&ids(5), 8).unwrap());
    let targets = Targets { ids: &targets, weights: None, scale: 1.0 / 16.0 };
    let (output, mut saved) = stage.forward(params, Input::Tokens(tokens), Some(targets)).unwrap();
    let Output::Losses(losses) = output else { unreachable!("a whole model gives losses") };
    let mut flat = stage.zeros().unwrap();
    let mut grads = Grads::flat(&mut flat, false);
    if halves {
        stage.backward_input(params, &mut saved, None).unwrap();
        stage.backward_weight(saved, &mut grads, |_, _| ()).unwrap();
    } else {
        stage.backward(params, saved, None, &mut grads, |_, _| ()).unwrap();
    }
    (stage::total(&losses).unwrap(), flat.to_vec::<f32>().unwrap())
}

#[test]
fn parameters_that_come_unit_by_unit_change_no_bit() {
    let resize = Resize { layers: Some(3), heads: Some(4), dim: Some(16), context: Some(8), vocab: Some(31) };
    let untied = ModelSpec::preset("llama-7b").unwrap().resized(resize).unwrap();
    let device = Device::cpu(1).unwrap();
    for spec in [gpt2(3, 4, 16, 8, 31).unwrap(), untied] {
        for recompute in [0, 2, 3] {
            let mut stage = Stage::whole(&spec, &device).unwrap();
            stage.set_activation_policy(ActivationPolicy { recompute, ..ActivationPolicy::default() });
            let params: Tensor = stage.init(1337).unwrap();
            let flat = params.to_vec::<f32>().unwrap();
            let copied = Copied {
                flat: &flat,
                device: device.clone(),
                announced: RefCell::default(),
                asked: Cell::default(),
            };
            for halves in [false, true] {
                let (loss, grads) = step(&stage, &params, halves);
                let (by_unit, of_units) = step(&stage, Params::Units(&copied), halves);
                assert_eq!(loss.to_bits(), by_unit.to_bits());
                assert!(grads.iter().zip(&of_units).all(|(a, b)| a.to_bits() == b.to_bits()));
            }
            // Each layer of a forward pass is read once, and all parameters by one of them.
            let read: usize = stage.forward_units().iter().map(|layer| layer[0].len()).sum();
            assert_eq!(read, stage.layout().len());
        }
    }
}

/// Initial values of some ranges are those of the whole.
#[test]
fn initial_values_of_ranges_are_those_of_the_whole() {
    let stage = Stage::whole(&gpt2(2, 2, 16, 8, 31).unwrap(), &Device::cpu(1).unwrap()).unwrap();
    let whole = stage.init(7).unwrap().to_vec::<f32>().unwrap();
    let ranges = [3..700, 700..701, 1500..whole.len()];
    let found = stage.init_within(7, &ranges).unwrap().to_vec::<f32>().unwrap();
    let want: Vec<f32> = ranges.into_iter().flat_map(|range| whole[range].to_vec()).collect();
    assert_eq!(found, want);
}
