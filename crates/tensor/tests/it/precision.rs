//! Products in 16 bits equal products of operands that were cast to 16 bits and back, and nothing else is
//! rounded.
#![expect(clippy::unwrap_used, clippy::float_cmp, reason = "helpers of tests, and values that are exact")]

use farflung_tensor::{DType, Device, Fuse, Op, Precision, Tensor};

fn product(device: &Device, a: &Tensor, b: &Tensor, c: &[f32], accumulate: bool) -> Vec<f32> {
    let bias = device.tensor(&[0.1_f32, 1e-4, -3.0], 3).unwrap();
    let mut c = device.tensor(c, [2, 3]).unwrap();
    device
        .run(Op::MatMul {
            a: a.view(),
            a_t: true,
            b: b.view(),
            b_t: false,
            c: c.view_mut(),
            accumulate,
            scales: [1.0; 2],
            fuse: Fuse::Bias(bias.view()),
        })
        .unwrap();
    c.to_vec().unwrap()
}

/// Casts to a 16-bit type and back.
fn rounded(device: &Device, x: &Tensor, to: DType) -> Tensor {
    let mut narrow = device.empty(to, x.shape()).unwrap();
    device.run(Op::Cast { x: x.view(), y: narrow.view_mut() }).unwrap();
    let mut back = device.empty(DType::F32, x.shape()).unwrap();
    device.run(Op::Cast { x: narrow.view(), y: back.view_mut() }).unwrap();
    back
}

#[test]
fn a_product_in_16_bits_is_the_product_of_rounded_operands() {
    let device = Device::cpu(2).unwrap();
    // Enough values for several rounding tasks.
    let values = |n: usize, scale: f32| -> Vec<f32> {
        (0..n).map(|i| (i as f32 * 0.37).sin() * scale + 1e-3 * i as f32 / n as f32).collect()
    };
    let k = 20_000;
    let a = device.tensor(&values(k * 2, 1.0), [k, 2]).unwrap();
    let b = device.tensor(&values(k * 3, 0.02), [k, 3]).unwrap();
    let c = [1.0 + 1e-7, 2.0, 3.0, 4.0, 5.0, 6.0 + 1e-6];
    let exact = product(&device, &a, &b, &c, true);
    for (precision, dtype, most) in [(Precision::Bf16, DType::Bf16, 2e-2), (Precision::F16, DType::F16, 2e-3)]
    {
        let half = device.with_precision(precision);
        assert_eq!(half.precision(), precision);
        assert!(half.same(&device));
        let found = product(&half, &a, &b, &c, true);
        let (a, b) = (rounded(&device, &a, dtype), rounded(&device, &b, dtype));
        assert_eq!(found, product(&device, &a, &b, &c, true), "{precision}");
        assert_ne!(found, exact, "{precision}");
        let square = |x: f32| f64::from(x).powi(2);
        let off: f64 = found.iter().zip(&exact).map(|(f, e)| square(f - e)).sum();
        let off = (off / exact.iter().map(|e| square(*e)).sum::<f64>()).sqrt();
        assert!(off < most, "{precision}: {off}");
    }
}

#[test]
fn what_f16_cannot_hold_is_infinite_and_bf16_holds_it() {
    let device = Device::cpu(1).unwrap();
    let a = device.tensor(&[1e5_f32; 4], [2, 2]).unwrap();
    let b = device.tensor(&[1.0_f32; 6], [2, 3]).unwrap();
    let run = |precision| product(&device.with_precision(precision), &a, &b, &[0.0; 6], false)[0];
    assert!(run(Precision::F16).is_infinite());
    assert!((run(Precision::Bf16) / 2e5 - 1.0).abs() < 0.01);
}

#[test]
fn a_scale_keeps_what_f16_would_lose_and_changes_nothing_else() {
    let device = Device::cpu(1).unwrap();
    let half = device.with_precision(Precision::F16);
    let (a, b) =
        (device.tensor(&[1.0_f32, 2.0], [1, 2]).unwrap(), device.tensor(&[1e-9_f32, 3e-9], [2, 1]).unwrap());
    let run = |device: &Device, scales| {
        let mut c = device.zeros([1, 1]).unwrap();
        let (a, b, fuse) = (a.view(), b.view(), Fuse::None);
        let op =
            Op::MatMul { a, a_t: false, b, b_t: false, c: c.view_mut(), accumulate: false, scales, fuse };
        device.run(op).unwrap();
        c.to_vec::<f32>().unwrap()[0]
    };
    assert_eq!(run(&half, [1.0, 1.0]), 0.0);
    assert!((run(&half, [1.0, 65_536.0]) / 7e-9 - 1.0).abs() < 1e-3);
    assert!((run(&half, [65_536.0, 65_536.0]).is_infinite()));
    assert_eq!(run(&device, [1.0, 65_536.0]), run(&device, [1.0, 1.0]));
}
