//! Checks whether a device computes the same bits twice. Our kernels are not chosen by timing and always add in
//! the same order, so that runs repeat on the same devices. A driver or faulty hardware can still change bits,
//! which this check detects.

use farflung_base::Philox;
use farflung_tensor::{Device, Tensor};
use farflung_zoo::layer::Grads;
use farflung_zoo::{Input, Output, Stage, Targets};

use super::fingerprint::digest;
use crate::{Error, Result};

/// Runs a forward and a backward pass of `batch` sequences twice, and compares the results.
///
/// Errors: [`Error::NotRepeatable`] if any bit of the outputs or gradients differs.
pub(super) fn check(stage: &Stage, params: &Tensor, batch: usize) -> Result<()> {
    same_twice(stage.device(), || pass(stage, params, batch))
}

fn same_twice(device: &Device, mut run: impl FnMut() -> Result<blake3::Hash>) -> Result<()> {
    let first = run()?;
    if run()? == first { Ok(()) } else { Err(Error::NotRepeatable { device: device.name().to_owned() }) }
}

/// Returns the hash of a stage's outputs and gradients for fixed inputs.
fn pass(stage: &Stage, params: &Tensor, batch: usize) -> Result<blake3::Hash> {
    let config = stage.spec();
    let shape = [batch, stage.own_positions(config.context), config.dim];
    let hidden = |stream| {
        let mut values = vec![0.0; shape.iter().product()];
        Philox::new(1, stream).fill_normal(1.0, &mut values);
        stage.device().tensor(&values, shape)
    };
    let tokens = |stream| {
        let draw = Philox::new(2, stream);
        let id = |i| (draw.uniform(i) * config.vocab as f32) as u32;
        let ids: Vec<u32> = (0..(batch * config.context) as u64).map(id).collect();
        stage.tokens(&stage.own(&ids), config.context / stage.readers())
    };
    let input = if stage.takes_tokens() { Input::Tokens(tokens(0)?) } else { Input::Hidden(hidden(0)?) };
    let targets = if stage.gives_losses() { Some(tokens(1)?) } else { None };
    let scale = 1.0 / (batch * config.context) as f32;
    let (output, mut saved) =
        stage.forward(params, input, targets.as_ref().map(|t| Targets::all(t, scale)))?;
    saved.join_alone();
    let mut grads = stage.zeros()?;
    let dy = if stage.gives_losses() { None } else { Some(hidden(1)?) };
    let dx = stage.backward(params, saved, dy, &mut Grads::flat(&mut grads, false), |_, _| {})?;
    let (Output::Hidden(output) | Output::Losses(output)) = output;
    let mut made = output.to_vec::<f32>()?;
    made.extend(grads.to_vec::<f32>()?);
    made.extend(dx.map_or(Ok(Vec::new()), |dx| dx.to_vec::<f32>())?);
    Ok(digest(&made))
}

#[cfg(test)]
mod tests {
    use super::*;
    use farflung_zoo::gpt2;

    #[test]
    fn every_part_of_a_model_gives_the_same_twice() {
        let cpu = Device::cpu(2).unwrap();
        let config = gpt2(3, 2, 16, 8, 20).unwrap();
        for layers in [0..3, 0..1, 1..2, 2..3] {
            let stage = Stage::new(&config, layers, &cpu).unwrap();
            let params = stage.init(1).unwrap();
            check(&stage, &params, 2).unwrap();
            // Other parameters give another hash.
            assert_ne!(pass(&stage, &params, 2).unwrap(), pass(&stage, &stage.init(2).unwrap(), 2).unwrap());
        }
    }

    #[test]
    fn a_device_that_changes_its_mind_is_named() {
        let mut calls = 0_u32;
        let changing = || {
            calls += 1;
            Ok(digest(&[calls as f32]))
        };
        let error = same_twice(&Device::cpu(1).unwrap(), changing).unwrap_err();
        assert!(error.to_string().starts_with("device `cpu` computed different results"), "{error}");
    }
}
