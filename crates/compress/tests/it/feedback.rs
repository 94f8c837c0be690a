//! Error feedback: no part of a vector is lost, whichever call fails.
#![expect(clippy::unwrap_used, clippy::float_cmp, reason = "helpers of tests fail by panicking")]

use std::borrow::Cow;

use farflung_base::Philox;
use farflung_compress::{
    Amount, CodecSpec, CompressError, Compressor, ErrorFeedback, F16, F32, Int8, Memoryless,
    MomentumCorrection, Payload, RoundKey, Select, Sparse, State, StateMap, StateValue, parse,
};

fn normal(n: usize, std: f32, stream: u64) -> Vec<f32> {
    let mut x = vec![0.0; n];
    Philox::new(5, stream).fill_normal(std, &mut x);
    x
}

fn memoryless(name: &str) -> Box<dyn Memoryless> {
    name.parse::<CodecSpec>().unwrap().build_memoryless()
}

fn send<C: Compressor>(codec: &mut C, x: &[f32]) -> Vec<f32> {
    let (mut payload, mut decoded) = (Payload::new(), vec![0.0; x.len()]);
    codec.compress(x, RoundKey::default(), &mut payload).unwrap();
    codec.decompress(payload.view(), &mut decoded).unwrap();
    decoded
}

#[test]
fn the_decoded_sum_up_to_the_inputs_less_the_residual() {
    for name in ["none", "f16", "bf16", "int8", "int8:7"] {
        let mut codec = ErrorFeedback::new(memoryless(name));
        let n = 1000;
        let (mut given, mut decoded, mut largest) = (vec![0.0_f64; n], vec![0.0_f64; n], 0.0_f64);
        for round in 0..50 {
            let x = normal(n, 1.0, round);
            for ((given, decoded), (x, d)) in
                given.iter_mut().zip(&mut decoded).zip(x.iter().zip(send(&mut codec, &x)))
            {
                *given += f64::from(*x);
                *decoded += f64::from(d);
                largest = largest.max(f64::from(x.abs()));
            }
            codec.commit();
        }
        for i in 0..n {
            let gap = given[i] - decoded[i] - f64::from(codec.residual()[i]);
            // Each round rounds x + e and v - D(C(v)) to f32 once.
            assert!(gap.abs() <= 50.0 * 2.0 * largest * 2_f64.powi(-24), "{name}: {gap:e} at {i}");
        }
        // Without the residual the same sum is off by far more, so the test can fail.
        if name == "int8" {
            let lost: f64 = given.iter().zip(&decoded).map(|(g, d)| (g - d).abs()).sum::<f64>() / n as f64;
            assert!(lost > 1e-3 && lost < 0.02, "{lost}");
        }
    }
}

#[test]
fn rollback_goes_to_the_last_commit_over_any_number_of_rounds() {
    for uncommitted in 0..4 {
        let mut codec = ErrorFeedback::new(Int8::default());
        send(&mut codec, &normal(600, 1.0, 1));
        codec.commit();
        let before = codec.residual().to_vec();
        let mut twin = codec.clone();
        for round in 0..uncommitted {
            send(&mut codec, &normal(600, 1.0, 10 + round));
            assert_ne!(codec.residual(), before);
        }
        codec.rollback();
        assert_eq!(codec.residual(), before);
        let x = normal(600, 1.0, 99);
        assert_eq!(send(&mut codec, &x), send(&mut twin, &x));
    }
    // Before the first commit there is neither a residual nor a fixed length.
    let mut codec = ErrorFeedback::new(F16::new());
    send(&mut codec, &[1.000_01; 3]);
    codec.rollback();
    assert!(codec.residual().is_empty());
    send(&mut codec, &[1.0; 4]);
    assert_eq!(codec.residual(), [0.0; 4]);
}

#[test]
fn commits_change_no_bit() {
    let (mut every, mut never) = (ErrorFeedback::new(Int8::default()), ErrorFeedback::new(Int8::default()));
    for round in 0..6 {
        let x = normal(700, 1.0, round);
        assert_eq!(send(&mut every, &x), send(&mut never, &x));
        every.commit();
        assert_eq!(every.residual(), never.residual());
    }
}

#[test]
fn a_failed_compress_leaves_the_residual() {
    for pending in [false, true] {
        let mut codec = ErrorFeedback::new(Int8::default());
        let mut payload = Payload::new();
        for failures in 0..2 {
            send(&mut codec, &normal(5000, 1.0, failures));
            codec.commit();
        }
        if pending {
            send(&mut codec, &normal(5000, 1.0, 7));
        }
        let before = codec.residual().to_vec();
        let mut x = normal(5000, 1.0, 3);
        x[4500] = f32::NAN;
        let error = codec.compress(&x, RoundKey::default(), &mut payload).unwrap_err();
        assert!(matches!(error, CompressError::NonFinite { index: 4500, .. }), "{error}");
        assert_eq!(codec.residual(), before);
        let error = codec.compress(&x[..10], RoundKey::default(), &mut payload).unwrap_err();
        assert_eq!(error, CompressError::LengthChanged { held: 5000, found: 10 });
        assert_eq!(codec.residual(), before);
        assert!(payload.as_bytes().is_empty());
    }
}

#[test]
fn saved_and_loaded_it_goes_on_with_the_same_bits() {
    let mut codec = ErrorFeedback::new(memoryless("int8:32"));
    send(&mut codec, &normal(100, 1.0, 1));
    assert_eq!(codec.save("a.", &mut StateMap::new()), Err(CompressError::Uncommitted));
    codec.commit();
    let mut map = StateMap::new();
    codec.save("a.", &mut map).unwrap();
    assert_eq!(map.keys().collect::<Vec<_>>(), ["a.residual"]);

    let mut twin = parse("int8:32+ef").unwrap();
    assert_eq!(twin.load("b.", &mut map), Err(CompressError::MissingState { name: "b.residual".to_owned() }));
    twin.load("a.", &mut map).unwrap();
    assert!(map.is_empty());
    let x = normal(100, 1.0, 2);
    assert_eq!(send(&mut twin, &x), send(&mut codec, &x));

    let mut bad = StateMap::new();
    bad.insert("residual".to_owned(), StateValue::F32(Cow::Owned(vec![0.0, f32::NAN])));
    let error = codec.load("", &mut bad).unwrap_err();
    assert!(matches!(error, CompressError::NonFinite { index: 1, .. }), "{error}");
}

#[test]
fn resharding_keeps_the_overlap() {
    let mut codec = ErrorFeedback::new(F16::new());
    send(&mut codec, &[1.0001, 2.0002, 3.0003, 4.0004]);
    assert_eq!(codec.reshard(10..14, 0..1), Err(CompressError::Uncommitted));
    codec.commit();
    let [_, b, c, d] = *codec.residual() else { unreachable!("four elements") };
    assert!(b != 0.0 && c != 0.0 && d != 0.0);
    assert_eq!(codec.reshard(10..13, 0..1), Err(CompressError::LengthChanged { held: 4, found: 3 }));
    codec.reshard(10..14, 11..16).unwrap();
    assert_eq!(codec.residual(), [b, c, d, 0.0, 0.0]);
    codec.reshard(11..16, 8..12).unwrap();
    assert_eq!(codec.residual(), [0.0, 0.0, 0.0, b]);
    codec.reshard(8..12, 100..102).unwrap();
    assert_eq!(codec.residual(), [0.0, 0.0]);
    codec.reset();
    send(&mut codec, &[1.0; 9]);
    assert_eq!(codec.residual().len(), 9);
}

#[test]
fn a_decayed_residual_is_that_share_of_a_whole_one() {
    let (x, mut payload) = (normal(500, 1.0, 1), Payload::new());
    let mut whole = ErrorFeedback::new(Int8::default());
    let mut decayed = ErrorFeedback::decayed(Int8::default(), 0.5).unwrap();
    send(&mut whole, &x);
    send(&mut decayed, &x);
    assert!(whole.residual().iter().zip(decayed.residual()).all(|(w, d)| w * 0.5 == *d));
    assert_eq!(ErrorFeedback::decayed(F16::new(), 1.5).unwrap_err(), CompressError::Decay { found: 1.5 });
    parse("int8+ef:0.5").unwrap().compress(&x, RoundKey::default(), &mut payload).unwrap();
}

#[test]
fn ef21_moves_its_estimate_to_what_it_is_given() {
    let x = normal(400, 1.0, 2);
    let mut codec = ErrorFeedback::ef21(memoryless("topk:0.2/int4:16"));
    let mut estimate = vec![0.0_f32; x.len()];
    for _ in 0..40 {
        for (h, d) in estimate.iter_mut().zip(send(&mut codec, &x)) {
            *h += d;
        }
        codec.commit();
    }
    // Both ends hold the same estimate up to rounding, and it has converged to the input.
    assert!(estimate.iter().zip(codec.residual()).all(|(h, e)| (h + e).abs() < 1e-5));
    assert!(estimate.iter().zip(&x).all(|(h, x)| (h - x).abs() < 1e-3));
}

#[test]
fn momentum_correction_is_the_recurrence_of_its_source() {
    let (n, k, factor) = (300, 9, 0.9_f32);
    let top = || Sparse::new(Select::Largest(Amount::count(k as u32)), F32::new()).unwrap();
    let mut codec = MomentumCorrection::new(top(), factor).unwrap();
    let (mut u, mut v) = (vec![0.0_f32; n], vec![0.0_f32; n]);
    for round in 0..20 {
        let x = normal(n, 1.0, round);
        for i in 0..n {
            u[i] = factor * u[i] + x[i];
            v[i] += u[i];
        }
        let mut order: Vec<usize> = (0..n).collect();
        order.sort_by(|a, b| v[*b].abs().total_cmp(&v[*a].abs()).then(a.cmp(b)));
        let mut sent = vec![0.0; n];
        for i in &order[..k] {
            sent[*i] = std::mem::take(&mut v[*i]);
            u[*i] = 0.0;
        }
        if round % 3 == 2 {
            let before = codec.memory().1.to_vec();
            codec.commit();
            send(&mut codec, &normal(n, 5.0, 99));
            codec.rollback();
            assert_eq!(codec.memory().1, before);
        }
        assert_eq!(send(&mut codec, &x), sent);
        assert_eq!(codec.memory(), (&u[..], &v[..]));
    }
    codec.commit();
    let mut map = StateMap::new();
    codec.save("", &mut map).unwrap();
    let mut twin = MomentumCorrection::new(top(), factor).unwrap();
    twin.load("", &mut map).unwrap();
    assert_eq!(twin.memory(), codec.memory());
    twin.reshard(0..n, 100..200).unwrap();
    assert_eq!(twin.memory().0, &u[100..200]);
}

#[test]
fn momentum_correction_is_saved_loaded_resharded_and_rolled_back() {
    let make = || {
        let top = Sparse::new(Select::Largest(Amount::count(4)), F32::new()).unwrap();
        MomentumCorrection::new(top, 0.9).unwrap()
    };
    let mut codec = make();
    for round in 0..3 {
        send(&mut codec, &normal(40, 1.0, round));
        codec.commit();
    }
    let held = codec.memory();
    let (u, v) = (held.0.to_vec(), held.1.to_vec());
    send(&mut codec, &normal(40, 1.0, 7));
    assert_eq!(codec.save("", &mut StateMap::new()), Err(CompressError::Uncommitted));
    codec.rollback();
    assert_eq!(codec.memory(), (&u[..], &v[..]));

    let mut map = StateMap::new();
    codec.save("m.", &mut map).unwrap();
    assert_eq!(map.keys().collect::<Vec<_>>(), ["m.momentum", "m.velocity"]);
    let mut twin = make();
    twin.load("m.", &mut map).unwrap();
    let x = normal(40, 1.0, 8);
    assert_eq!(send(&mut twin, &x), send(&mut codec, &x));

    // The vector held 100..140; after resharding this rank holds 90..120.
    codec.rollback();
    codec.reshard(100..140, 90..120).unwrap();
    let (moved_u, moved_v) = codec.memory();
    assert_eq!((&moved_u[..10], &moved_u[10..]), (&[0.0; 10][..], &u[..20]));
    assert_eq!((&moved_v[..10], &moved_v[10..]), (&[0.0; 10][..], &v[..20]));
    assert_eq!(codec.reshard(0..40, 0..10), Err(CompressError::LengthChanged { held: 30, found: 40 }));
    codec.reset();
    assert_eq!(codec.memory(), (&[][..], &[][..]));
}
