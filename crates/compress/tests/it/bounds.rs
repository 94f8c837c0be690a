//! The stated error bounds in the hardest cases: near the largest number, and far from zero.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

use farflung_base::Philox;
use farflung_compress::{Compressor, Payload, RoundKey, parse};

const MAX: f64 = f32::MAX as f64;

/// Returns the decoded `x`. The codec must treat the whole vector as one block.
fn decoded(name: &str, x: &[f32], round: u64) -> Vec<f32> {
    let (mut codec, mut payload, mut out) = (parse(name).unwrap(), Payload::new(), vec![0.0; x.len()]);
    codec.compress(x, RoundKey { round, ..RoundKey::default() }, &mut payload).unwrap();
    codec.decompress(payload.view(), &mut out).unwrap();
    out
}

/// Returns the largest ratio of an element's error to the `allowed` error of that element.
fn worst(name: &str, x: &[f32], round: u64, allowed: impl Fn(f64) -> f64) -> f64 {
    let out = decoded(name, x, round);
    let share = |(x, out): (&f32, f32)| (f64::from(*x) - f64::from(out)).abs() / allowed(f64::from(*x));
    x.iter().zip(out).map(share).fold(0.0, f64::max)
}

fn extremes(x: &[f32]) -> (f64, f64) {
    x.iter().fold((f64::MAX, f64::MIN), |(low, high), x| (low.min(f64::from(*x)), high.max(f64::from(*x))))
}

/// Returns elements near the midpoints between codes, up to `top` in magnitude, with `top` among them.
fn middles(rng: Philox, q: f64, top: f64) -> Vec<f32> {
    let element = |i: u64| {
        let code = (f64::from(rng.uniform(2 * i + 9)) * q).floor().min(q - 1.0) + 0.5;
        let near = 1.0 + (f64::from(rng.uniform(2 * i + 10)) - 0.5) * 1e-3;
        let sign = if i.is_multiple_of(2) { 1.0 } else { -1.0 };
        (sign * code / q * top * near) as f32
    };
    let mut x: Vec<f32> = (0..256).map(element).collect();
    x[0] = top as f32;
    x
}

/// Codecs, their largest code, and two bounds on the error near the largest number and elsewhere, as shares of
/// the block's largest magnitude divided by the largest code.
const SYMMETRIC: [(&str, f64, f64, f64); 8] = [
    ("int8", 127.0, 0.512, 0.504),
    ("int4", 7.0, 0.512, 0.504),
    ("int3", 3.0, 0.512, 0.504),
    ("int2", 1.0, 0.512, 0.504),
    ("int8-sr", 127.0, 1.012, 1.008),
    ("int4-sr", 7.0, 1.012, 1.008),
    ("int3-sr", 3.0, 1.012, 1.008),
    ("int2-sr", 1.0, 1.012, 1.008),
];

#[test]
fn integers_near_the_largest_number() {
    let mut beyond = 0;
    for (name, q, edge, usual) in SYMMETRIC {
        for seed in 0..1500 {
            let rng = Philox::new(5, seed);
            let below = [0.0, 0.01, 1e-4][seed as usize % 3] * f64::from(rng.uniform(0));
            let top = f64::from((MAX * (1.0 - below)) as f32);
            let x = middles(rng, q, top);
            let share = worst(name, &x, seed, |_| edge * top / q);
            assert!(share <= 1.0, "{name} of {top:e}: {share}");
            beyond += u32::from(share * edge > usual);
            let top = f64::from((top * 1e-10) as f32);
            let share = worst(name, &middles(rng, q, top), seed, |_| usual * top / q);
            assert!(share <= 1.0, "{name} of {top:e}: {share}");
        }
    }
    // The wider bound is necessary.
    assert!(beyond > 1000, "{beyond}");
}

#[test]
fn norms_near_the_largest_number() {
    for (name, q) in [("qsgd8", 127.0), ("qsgd4", 7.0), ("qsgd2", 1.0)] {
        for seed in 0..500 {
            for size in [1.0, 0.06, 1e-10] {
                let x = middles(Philox::new(6, seed), q, MAX * size);
                let largest = extremes(&x).1;
                let squares = x.iter().map(|x| (f64::from(*x) / largest).powi(2)).sum::<f64>();
                let norm = (squares.sqrt() * largest).min(MAX);
                let share = worst(name, &x, seed, |_| 1.012 * norm / q);
                assert!(share <= 1.0, "{name} of {size}: {share}");
            }
        }
    }
}

#[test]
fn floats_near_the_largest_number() {
    // Name, largest number, smallest number, and the bound as a share of the element.
    let formats =
        [("e4m3", 448.0, 2_f64.powi(-9), 1.0 / 16.0), ("e5m2", 57344.0, 2_f64.powi(-16), 1.0 / 8.0)];
    for (name, largest, smallest, share) in formats.into_iter().chain([("e3m0", 1.0, 1.0 / 64.0, 0.337)]) {
        for seed in 0..500 {
            let rng = Philox::new(7, seed);
            let top = MAX * (1.0 - 0.005 * f64::from(rng.uniform(0)));
            let mut x: Vec<f32> = (1..256).map(|i| (top * f64::from(rng.uniform(i))) as f32).collect();
            x.iter_mut().step_by(3).for_each(|x| *x *= 0.01);
            x.push(top as f32);
            let found =
                worst(name, &x, seed, |x| (share * x.abs()).max(1.008 * top / largest * smallest / 2.0));
            assert!(found <= 1.0, "{name}: {found}");
        }
    }
}

/// Returns a block that is `2^shift` times its range away from zero, on either side, or around zero for a
/// negative shift.
fn away(rng: Philox, q: f64, shift: i32, size: f64) -> Vec<f32> {
    let range = size * 2_f64.powi(-shift.max(0)) * (0.5 + 0.5 * f64::from(rng.uniform(1)));
    let low = if shift < 0 { -range / 2.0 } else { size * (0.9 + 0.1 * f64::from(rng.uniform(0))) };
    let sign = if rng.uniform(2) < 0.5 { -1.0 } else { 1.0 };
    let within = middles(rng, q, 1.0);
    within.iter().map(|within| (sign * (low + range * f64::from(within.abs()))) as f32).collect()
}

const SHIFTS: [i32; 13] = [-1, 0, 4, 8, 10, 12, 14, 15, 18, 20, 22, 24, 26];

#[test]
fn integers_above_a_smallest_far_from_zero() {
    for (name, q) in [("uint8", 255.0), ("uint4", 15.0), ("uint3", 7.0), ("uint2", 3.0)] {
        for (suffix, steps) in [("", 0.504), ("-sr", 1.008)] {
            for (shift, size) in
                SHIFTS.into_iter().flat_map(|shift| [1.0, 1e-20, 1.6e38].map(|size| (shift, size)))
            {
                for seed in 0..100 {
                    let x = away(Philox::new(8, seed), q, shift, size);
                    let (low, high) = extremes(&x);
                    let allowed = steps * (high - low) / q + low.abs().max(high.abs()) * 2_f64.powi(-22);
                    let share = worst(&format!("{name}{suffix}"), &x, seed, |_| allowed);
                    assert!(share <= 1.0, "{name}{suffix} of {low:e} to {high:e}: {share}");
                }
            }
        }
    }
}

#[test]
fn integers_above_a_smallest_that_span_too_much_are_clipped() {
    let mut clipped = 0;
    for (name, q) in [("uint8", 255.0_f32), ("uint4", 15.0), ("uint3", 7.0), ("uint2", 3.0)] {
        let scale = f32::from_bits((f32::MAX / q).to_bits() & 0xffff_0000);
        let most = f64::from(q) * f64::from(scale);
        assert!(most >= 0.996 * MAX, "{name}: {most:e}");
        for (suffix, steps) in [("", 0.504), ("-sr", 1.008)] {
            for seed in 0..1000 {
                let rng = Philox::new(9, seed);
                let span = MAX * (0.99 + [0.011, 1.01][seed as usize % 2] * f64::from(rng.uniform(3)));
                let low = -MAX + (2.0 * MAX - span) * f64::from(rng.uniform(4));
                let within = middles(rng, q.into(), 1.0);
                let value = |within: &f32| (low + span * f64::from(within.abs())) as f32;
                let x: Vec<f32> = within.iter().map(value).collect();
                let (low, high) = extremes(&x);
                let (rounded, step) = (MAX * 2_f64.powi(-22), steps * (high - low).min(most) / f64::from(q));
                let allowed = |x: f64| step.max(x - low - most) + rounded;
                let share = worst(&format!("{name}{suffix}"), &x, seed, allowed);
                assert!(share <= 1.0, "{name}{suffix} of {low:e} to {high:e}: {share}");
                clipped += u32::from(high - low > most + step);
            }
        }
    }
    assert!(clipped > 1000, "{clipped}");
}

#[test]
fn levels_between_the_extremes_far_from_zero() {
    let mut beyond = 0;
    for (shift, size) in
        SHIFTS.into_iter().flat_map(|shift| [1.0, 1e-20, 1e30, 1.6e38].map(|size| (shift, size)))
    {
        for seed in 0..400 {
            let x = away(Philox::new(10, seed), 255.0, shift, size);
            let (min, max) = extremes(&x);
            let largest = min.abs().max(max.abs());
            let d = (max - min + 1e-7).max(largest / 16384.0);
            let share = worst("minmax8", &x, seed, |_| 0.51 * d / 255.0 + largest * 2_f64.powi(-22));
            assert!(share <= 1.0, "{min:e} to {max:e}: {share}");
            beyond += u32::from(worst("minmax8", &x, seed, |_| 0.51 * d / 255.0) > 1.0);
        }
    }
    // The second part of the bound is necessary.
    assert!(beyond > 1000, "{beyond}");
    // Blocks with a span above the largest number.
    for seed in 0..1000 {
        let rng = Philox::new(11, seed);
        let x: Vec<f32> = middles(rng, 255.0, MAX * (0.5 + 0.5 * f64::from(rng.uniform(5))));
        let (min, max) = extremes(&x);
        let span = (max - min).min(MAX);
        let allowed =
            |x: f64| (0.51 * span / 255.0).max(max - span - x) + MAX * 2_f64.powi(-22) + 0.51 * span / 255.0;
        let share = worst("minmax8", &x, seed, allowed);
        assert!(share <= 1.0, "{min:e} to {max:e}: {share}");
    }
}
