//! Angles of rotary position embeddings.

use std::f64::consts::TAU;

use crate::spec::{RotaryScaling, RotarySpec};

/// Returns the angle per token of each pair of values. All steps are rounded to f32, as in the reference
/// implementations: at position 100,000, the last bit of a frequency is seen in the third digit of a cosine.
fn frequencies(rotary: &RotarySpec) -> Vec<f32> {
    let plain = |pair: usize| {
        let exponent = (2 * pair) as f32 / rotary.width as f32;
        1.0 / rotary.base.powf(f64::from(exponent)) as f32
    };
    let scaled = |frequency: f32| match rotary.scaling {
        RotaryScaling::None => frequency,
        RotaryScaling::Linear { factor } => frequency / factor as f32,
        RotaryScaling::Llama3 { factor, low_turns, high_turns, original_context } => {
            let [factor, low, high] = [factor, low_turns, high_turns].map(|x| x as f32);
            let context = original_context as f32;
            let wavelength = TAU as f32 / frequency;
            if wavelength > context / low {
                return frequency / factor;
            }
            if wavelength < context / high {
                return frequency;
            }
            let share = (context / wavelength - low) / (high - low);
            (1.0 - share) * frequency / factor + share * frequency
        }
    };
    (0..rotary.width / 2).map(|pair| scaled(plain(pair))).collect()
}

/// Returns a row for each position: the cosines of all pairs, then their sines.
///
/// The angle is the product of position and frequency in f32, as the reference implementations compute it; its
/// cosine and sine are exact to the last bit.
#[must_use]
pub fn table(rotary: &RotarySpec, positions: usize) -> Vec<f32> {
    let frequencies = frequencies(rotary);
    let mut table = Vec::with_capacity(positions * rotary.width);
    for position in 0..positions {
        let angles = || frequencies.iter().map(move |frequency| f64::from(position as f32 * frequency));
        table.extend(angles().map(|angle| angle.cos() as f32));
        table.extend(angles().map(|angle| angle.sin() as f32));
    }
    table
}
