//! Tests that compare every optimizer with PyTorch, or with its paper's formulas in NumPy where PyTorch has
//! none.

use farflung_optim::local::{Averages, METHODS};
use farflung_tensor::Device;

use crate::trajectories::{MOST, STEPS, chains, errors};

fn check(device: &Device) {
    for (name, chain) in chains() {
        let [first, last] = errors(device, name, chain).expect("it runs");
        let good = first < MOST[0] && last < MOST[1];
        assert!(good, "{name}: off by {first:e} after one step, {last:e} after {STEPS}");
    }
}

#[test]
fn optimizers_do_what_pytorch_and_the_papers_do() {
    check(&Device::cpu(1).unwrap());
    check(&Device::cpu(3).unwrap());
    // Every method is covered; those that average momentum or accumulated values have their own tests.
    for method in METHODS.iter().filter(|method| method.averages == Averages::Gradients) {
        let found = chains().into_iter().any(|(name, _)| name.split('-').next() == Some(method.name));
        assert!(found, "{}", method.name);
    }
}

/// A driver may fuse operations or divide less exactly, within the same limits.
#[cfg(feature = "wgpu")]
#[test]
fn a_device_does_the_same() {
    check(&Device::wgpu(0).unwrap());
}
