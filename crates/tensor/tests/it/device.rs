//! The wgpu backend against the CPU backend: every op, in shapes that are not multiples of a tile, and errors
//! on wrong use. The tests run on the first adapter; in CI this is a software rasteriser.
#![cfg(feature = "wgpu")]

use std::future::Future;
use std::pin::Pin;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use crate::parity::{cases, distance, same};
use crate::{key_ranges, sparse};
use farflung_tensor::{Device, Fuse, Gelu, Heads, Op, Precision, Rotary, TensorError, TokenPositions};

/// Runs one test at a time: threads that wait for the same device spin, and a software device needs their
/// cores.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

#[test]
fn every_op_gives_what_the_cpu_gives_and_the_same_twice() {
    let _alone = alone();
    let (cpu, gpu) = (Device::cpu(1).unwrap(), Device::wgpu(0).unwrap());
    let mut wrong = Vec::new();
    for case in cases(1).into_iter().chain(cases(2)) {
        let expected = case.run(&cpu).unwrap();
        let found = case.run(&gpu).unwrap();
        let off = distance(&found, &expected);
        let bad = if case.exact { !same(&found, &expected) } else { off.is_nan() || off > 1e-5 };
        if bad {
            wrong.push(format!("{} {}: off by {off:e}", case.op, case.what));
        }
        if !same(&case.run(&gpu).unwrap(), &found) {
            wrong.push(format!("{} {}: not the same twice", case.op, case.what));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn products_in_16_bits_are_what_the_cpu_gives_in_them_and_near_those_in_32() {
    let _alone = alone();
    let (cpu, gpu) = (Device::cpu(1).unwrap(), Device::wgpu(0).unwrap());
    let mut wrong = Vec::new();
    for case in cases(3).into_iter().filter(|case| case.op == "matmul") {
        let exact = case.run(&cpu).unwrap();
        for (precision, most) in [(Precision::Bf16, 2e-2), (Precision::F16, 2e-3)] {
            let found = case.run(&gpu.with_precision(precision)).unwrap();
            let expected = case.run(&cpu.with_precision(precision)).unwrap();
            let (off, lost) = (distance(&found, &expected), distance(&found, &exact));
            if off.is_nan() || off > 1e-5 || lost.is_nan() || lost > most || lost == 0.0 {
                wrong.push(format!("{precision} {}: off by {off:e}, {lost:e} from f32", case.what));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn bytes_go_up_and_come_down_at_any_offset() {
    let _alone = alone();
    let gpu = Device::wgpu(0).unwrap();
    let bytes: Vec<u8> = (0..1000_u32).map(|i| (i * 7 % 251) as u8).collect();
    for (start, len) in [(0, 1000), (1, 1), (3, 2), (255, 258), (256, 4), (511, 489)] {
        let mut t = gpu.tensor(&bytes, 1000).unwrap();
        assert_eq!(t.view().part(start, len).unwrap().to_vec::<u8>().unwrap(), bytes[start..start + len]);
        t.view_mut().part(start, len).unwrap().write(&vec![255_u8; len]).unwrap();
        let mut expected = bytes.clone();
        expected[start..start + len].fill(255);
        assert_eq!(t.to_vec::<u8>().unwrap(), expected, "{start} {len}");
    }
}

#[test]
fn what_is_on_its_way_is_what_was_there_when_it_was_asked_for() {
    let _alone = alone();
    let gpu = Device::wgpu(0).unwrap();
    let mut t = gpu.tensor(&[1.0_f32; 70], 70).unwrap();
    let mut coming = Vec::new();
    for step in 2..10_u8 {
        coming.push(t.view().part(3, 65).unwrap().start_to_vec::<f32>());
        gpu.run(Op::Fill { value: f32::from(step), y: t.view_mut() }).unwrap();
    }
    // The buffer is reused and overwritten before any download was waited for.
    drop(t);
    gpu.tensor(&[-1.0_f32; 70], 70).unwrap();
    for (step, values) in (1..9_u8).zip(coming) {
        assert_eq!(values.wait().unwrap(), [f32::from(step); 65]);
    }
    let t = gpu.tensor(&[5_u8; 9], 9).unwrap();
    let mut coming = t.start_to_vec::<u8>();
    let bytes = loop {
        match Pin::new(&mut coming).poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(bytes) => break bytes,
            Poll::Pending => std::thread::yield_now(),
        }
    };
    assert_eq!(bytes.unwrap(), [5; 9]);
    assert!(t.start_to_vec::<f32>().wait().is_err());
}

#[test]
fn an_id_beyond_its_table_is_named_at_the_fence_and_only_once() {
    let _alone = alone();
    let gpu = Device::wgpu(0).unwrap();
    let (table, positions) = (gpu.zeros([5, 4]).unwrap(), gpu.zeros([3, 4]).unwrap());
    let tokens = gpu.tensor(&[1_u32, 5, 9], [1, 3]).unwrap();
    let mut y = gpu.zeros([1, 3, 4]).unwrap();
    gpu.run(Op::Embed {
        tokens: tokens.view(),
        first: None,
        positions: TokenPositions::From { start: 0, documents: None },
        tokens_table: table.view(),
        positions_table: Some(positions.view()),
        y: y.view_mut(),
    })
    .unwrap();
    assert_eq!(
        gpu.fence().unwrap_err(),
        TensorError::IdOutOfRange { op: "embed", id: 5, position: 1, bound: 5 }
    );
    gpu.fence().unwrap();
}

#[test]
fn blocks_of_keys_are_as_on_the_cpu_where_nothing_is_seen() {
    let _alone = alone();
    let gpu = Device::wgpu(0).unwrap();
    key_ranges::two_parts(&gpu);
    key_ranges::without_partners(&gpu, -1e30);
    key_ranges::unseen_blocks(&gpu, -1e30);
    key_ranges::from_no_keys(&gpu);
}

#[test]
fn sparse_attention_is_that_of_a_dense_mask() {
    let _alone = alone();
    let gpu = Device::wgpu(0).unwrap();
    sparse::patterns(&gpu, &[(2, 150, 4, 2, 12), (1, 70, 3, 1, 5)], &[70]);
    sparse::rows_without_keys(&gpu);
    sparse::skipped_tiles(&gpu);
}

/// A ring of ranks, on the device and on the CPU.
#[test]
fn blocks_of_keys_together_give_the_attention_of_the_whole_sequence() {
    let _alone = alone();
    key_ranges::of_a_ring(&Device::wgpu(0).unwrap());
}

#[test]
fn positions_beyond_their_table_are_its_last() {
    let _alone = alone();
    let gpu = Device::wgpu(0).unwrap();
    let (table, places) = (gpu.zeros([1, 2]).unwrap(), gpu.tensor(&[1.0, 2.0, 3.0, 4.0], [2, 2]).unwrap());
    let (tokens, at) = (gpu.tensor(&[0_u32; 3], [1, 3]).unwrap(), gpu.tensor(&[2, 0, u32::MAX], [1, 3]));
    let (at, mut y) = (at.unwrap(), gpu.zeros([1, 3, 2]).unwrap());
    let (positions, to) = (TokenPositions::At(at.view()), y.view_mut());
    let (tokens, tokens_table, positions_table) = (tokens.view(), table.view(), Some(places.view()));
    gpu.run(Op::Embed { tokens, first: None, positions, tokens_table, positions_table, y: to }).unwrap();
    assert_eq!(y.to_vec::<f32>().unwrap(), [3.0, 4.0, 1.0, 2.0, 3.0, 4.0]);
    let mut d_table = gpu.zeros([1, 2]).unwrap();
    let mut d_places = gpu.zeros([2, 2]).unwrap();
    let (d_tokens_table, d_positions_table) = (d_table.view_mut(), Some(d_places.view_mut()));
    let dy = y.view();
    gpu.run(Op::EmbedGrad { tokens, first: None, positions, dy, d_tokens_table, d_positions_table }).unwrap();
    assert_eq!(d_places.to_vec::<f32>().unwrap(), [1.0, 2.0, 6.0, 8.0]);
    let rotary = Some(Rotary { table: places.view(), positions });
    let q = gpu.tensor(&[1.0, 0.0, 1.0, 0.0, 1.0, 0.0], [1, 3, 2]).unwrap();
    let mut qkv = gpu.zeros([1, 3, 6]).unwrap();
    let (part, to) = (q.view(), qkv.view_mut());
    gpu.run(Op::JoinHeads { heads: Heads::equal(1), rotary, q: part, k: part, v: part, qkv: to }).unwrap();
    let rotated = [[3.0, 4.0, 3.0, 4.0, 1.0, 0.0], [1.0, 2.0, 1.0, 2.0, 1.0, 0.0]];
    assert_eq!(qkv.to_vec::<f32>().unwrap(), [rotated[0], rotated[1], rotated[0]].concat());
}

#[test]
fn devices_that_are_not_there_and_buffers_that_do_not_fit_say_so() {
    let _alone = alone();
    let error = Device::wgpu(1000).unwrap_err().to_string();
    assert!(error.contains("wgpu:1000") && error.contains("adapters"), "{error}");
    let gpu = Device::wgpu(0).unwrap();
    let error = gpu.zeros(1 << 44).unwrap_err();
    assert!(matches!(error, TensorError::OutOfMemory { bytes, .. } if bytes == 4 << 44), "{error}");
    // The device is still usable.
    assert_eq!(gpu.zeros(3).unwrap().to_vec::<f32>().unwrap(), [0.0; 3]);
}

#[test]
fn a_step_that_repeats_allocates_nothing() {
    let _alone = alone();
    let gpu = Device::wgpu(0).unwrap();
    let mut held = Vec::new();
    for _ in 0..3 {
        for case in cases(3) {
            case.run(&gpu).unwrap();
        }
        held.push(gpu.memory().0);
    }
    assert_eq!(held[1], held[2]);
    assert_eq!(gpu.memory().1, held[2]);
}

#[test]
fn gelu_and_its_slope_are_at_their_limits_far_from_zero() {
    let _alone = alone();
    let gpu = Device::wgpu(0).unwrap();
    let far = [1e4_f32, 1e6, 1e10, 1e14, 1.8e19, 1.9e19, 1e38, f32::MAX, f32::INFINITY];
    let x: Vec<f32> = far.iter().flat_map(|&x| [x, -x]).chain([f32::NAN]).collect();
    let len = x.len();
    let (bias, zero) = (gpu.tensor(&x, len).unwrap(), gpu.zeros([1, 1]).unwrap());
    let zeros = gpu.zeros([1, len]).unwrap();
    let (mut c, mut slope) = (gpu.zeros([1, len]).unwrap(), gpu.zeros([1, len]).unwrap());
    gpu.run(Op::MatMul {
        a: zero.view(),
        a_t: false,
        b: zeros.view(),
        b_t: false,
        c: c.view_mut(),
        accumulate: false,
        scales: [1.0, 1.0],
        fuse: Fuse::BiasGelu { gelu: Gelu::Tanh, bias: bias.view(), slope: Some(slope.view_mut()) },
    })
    .unwrap();
    let (c, slope) = (c.to_vec::<f32>().unwrap(), slope.to_vec::<f32>().unwrap());
    for (i, &x) in far.iter().enumerate() {
        assert_eq!((c[2 * i], slope[2 * i]), (x, 1.0), "{x}");
        let (value, slope) = (c[2 * i + 1], slope[2 * i + 1]);
        assert!(value.abs() < 1e-30 && slope.abs() < 1e-15, "-{x}: {value} {slope}");
    }
    assert!(c[len - 1].is_nan() && slope[len - 1].is_nan());
}
