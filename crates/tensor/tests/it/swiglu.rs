//! `SwiGLU` and its gradient against f64, with equal bits on 1, 2 and 3 threads.
#![expect(clippy::unwrap_used, reason = "a test fails where it panics")]

use farflung_tensor::{Device, Op, Tensor};

use super::expect::{close, noise, same_bits, wide};

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// Returns `[y]`, and `[d_gate, d_up, y]` of the gradient.
fn run(cpu: &Device, gate: &[f32], up: &[f32], dy: &[f32]) -> [Tensor; 4] {
    let [mut gate, mut up, mut dy] = [gate, up, dy].map(|v| cpu.tensor(v, v.len()).unwrap());
    let mut y = cpu.zeros(dy.shape()).unwrap();
    cpu.run(Op::SwiGlu { gate: gate.view(), up: up.view(), y: y.view_mut() }).unwrap();
    let op = Op::SwiGluGrad { gate: gate.view_mut(), up: up.view_mut(), dy: dy.view_mut() };
    cpu.run(op).unwrap();
    [y, gate, up, dy]
}

#[test]
fn swiglu_and_its_gradient_in_place() {
    for len in [0, 1, 7, 8, 33, 1000, 16 * 1024 + 5, 70_001] {
        let (mut gate, up, dy) = (noise(len, 1), noise(len, 2), noise(len, 3));
        for (i, x) in gate.iter_mut().enumerate() {
            *x *= [0.1, 1.0, 5.0, 30.0][i % 4];
        }
        let [y, d_gate, d_up, again] = same_bits(|cpu| run(cpu, &gate, &up, &dy));
        let (x, up, dy) = (wide(&gate), wide(&up), wide(&dy));
        let of = |f: &dyn Fn(usize) -> f64| (0..len).map(f).collect::<Vec<f64>>();
        close(&y, &of(&|i| x[i] * sigmoid(x[i]) * up[i]), 4e-7);
        // The derivative by a central difference, whose own error is below 1e-9.
        let silu = |x: f64| x * sigmoid(x);
        let slope = |x: f64| (silu(x + 1e-5) - silu(x - 1e-5)) / 2e-5;
        close(&d_gate, &of(&|i| dy[i] * up[i] * slope(x[i])), 6e-7);
        close(&d_up, &of(&|i| dy[i] * x[i] * sigmoid(x[i])), 4e-7);
        assert!(y.iter().zip(&again).all(|(a, b)| a.to_bits() == b.to_bits()), "the same output, to the bit");
    }
}

/// A result does not depend on the position of its element, whether in a whole vector or in the rest.
#[test]
fn a_value_does_not_depend_on_its_place() {
    let cpu = Device::cpu(1).unwrap();
    let (gate, up, dy) = (noise(75, 1), noise(75, 2), noise(75, 3));
    let all = run(&cpu, &gate, &up, &dy).map(|t| t.to_vec::<f32>().unwrap());
    for i in 0..75 {
        let one = run(&cpu, &gate[i..=i], &up[i..=i], &dy[i..=i]).map(|t| t.to_vec::<f32>().unwrap());
        for (one, all) in one.iter().zip(&all) {
            assert_eq!(one[0].to_bits(), all[i].to_bits(), "{i}");
        }
    }
}
