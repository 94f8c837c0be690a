//! A small layout with a chain and values for it.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

use farflung_optim::ChainBuilder;
use farflung_optim::local::{LocalMethod, LocalSettings, Lookahead};
use farflung_tensor::{Device, Param, ParamLayout, Shape, Tensor};

pub(crate) fn layout() -> ParamLayout {
    let shapes = [("wte", vec![37, 16]), ("ln", vec![16]), ("w", vec![16, 48]), ("b", vec![48])];
    ParamLayout::new(shapes.map(|(name, shape)| (name.to_owned(), Shape::new(&shape).unwrap())))
}

pub(crate) fn value(seed: usize, i: usize) -> f32 {
    ((seed * 7919 + i * 104_729) % 1013) as f32 / 997.0 - 0.5
}

pub(crate) fn chain(row: &LocalMethod) -> ChainBuilder {
    let lookahead = Some(Lookahead { every: 2, alpha: 0.5 });
    row.chain(LocalSettings { weight_decay: 0.1, clip: Some(0.5), lookahead, ..LocalSettings::default() })
}

/// Returns a buffer of the layout with values that depend on `seed`, and zeros as padding.
pub(crate) fn flat(device: &Device, seed: usize) -> Tensor {
    let layout = layout();
    let mut values = vec![0.0; layout.len()];
    for i in layout.params().iter().flat_map(Param::range) {
        values[i] = value(seed, i);
    }
    device.tensor(&values, layout.len()).unwrap()
}
