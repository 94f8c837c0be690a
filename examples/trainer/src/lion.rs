//! Lion as a link of one's own for an optimizer's chain: all that an elementwise optimizer needs from outside
//! the crate. (`farflung_optim::transform::scale_by_lion` is the same.)

use farflung_optim::transform::Emit;
use farflung_optim::{OptimError, Transform};
use farflung_tensor::Value;

/// The sign of an interpolated momentum: `sign(b1 m + (1 - b1) g)`, then `m = b2 m + (1 - b2) g`.
///
/// Source: Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", Alg. 2. Weight decay and the
/// learning rate are links of their own.
#[derive(Debug)]
pub struct Lion {
    pub beta1: f64,
    pub beta2: f64,
}

impl Transform for Lion {
    fn name(&self) -> &'static str {
        "lion"
    }

    fn validate(&self) -> Result<(), OptimError> {
        for (field, value) in [("beta1", self.beta1), ("beta2", self.beta2)] {
            if !(0.0..1.0).contains(&value) {
                let expected = "at least 0 and below 1";
                return Err(OptimError::Setting { transform: "lion", field, value, expected });
            }
        }
        Ok(())
    }

    fn states(&self) -> &'static [&'static str] {
        &["m"]
    }

    /// Writes arithmetic as data: the chain fuses it with its neighbours into one pass over the parameters.
    fn emit(&self, e: &mut Emit<'_>, g: Value) -> Value {
        let p = &mut *e.program;
        let m = p.load(e.states);
        let mut blend = |beta: f64| {
            let (keep, take) = (p.constant(beta as f32), p.constant((1.0 - beta) as f32));
            let (old, new) = (p.mul(keep, m), p.mul(take, g));
            p.add(old, new)
        };
        let (direction, momentum) = (blend(self.beta1), blend(self.beta2));
        p.store(e.states, momentum);
        p.sign(direction)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use farflung_optim::Chain;
    use farflung_tensor::{Device, ParamLayout, Shape};

    #[test]
    fn two_steps_by_hand() {
        let cpu = Device::cpu(1).unwrap();
        let layout = ParamLayout::new([("w".to_owned(), Shape::from([2]))]);
        let mut params = cpu.zeros(layout.len()).unwrap();
        let mut chain = Chain::new().then(Lion { beta1: 0.5, beta2: 0.75 }).build(&cpu, &layout).unwrap();
        // w = 0, -1 after the first step; then 0.5 m + 0.5 g is +0.25 and -0.375.
        for grads in [[0.0, 1.0], [0.5, -1.0]] {
            let mut flat = vec![0.0_f32; layout.len()];
            flat[..2].copy_from_slice(&grads);
            let grads = cpu.tensor(&flat, layout.len()).unwrap();
            let prepared = chain.prepare(&grads).unwrap();
            chain.commit(&mut params, &grads, prepared).unwrap();
        }
        assert_eq!(params.to_vec::<f32>().unwrap()[..2], [-1.0, 0.0]);
        let (name, m) = chain.states().next().unwrap();
        assert_eq!((name, &m.to_vec::<f32>().unwrap()[..2]), ("lion.m", &[0.125, -0.0625][..]));
    }

    #[test]
    fn settings_are_checked() {
        let cpu = Device::cpu(1).unwrap();
        let layout = ParamLayout::new([("w".to_owned(), Shape::from([2]))]);
        for (beta1, beta2) in [(1.0, 0.9), (0.9, -0.1), (f64::NAN, 0.9)] {
            assert!(Chain::new().then(Lion { beta1, beta2 }).build(&cpu, &layout).is_err());
        }
    }
}
