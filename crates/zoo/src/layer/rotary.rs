//! Angles of rotary position embeddings.

use std::f64::consts::TAU;

use crate::spec::{RotaryScaling, RotarySpec};

/// Returns the angle per token of each pair of values. All steps are rounded to f32, as in the reference
/// implementations: at position 100,000, the last bit of a frequency is seen in the third digit of a cosine.
fn frequencies(rotary: &RotarySpec) -> Vec<f32> {
    let power = |pair: usize| {
        let exponent = (2 * pair) as f32 / rotary.width as f32;
        rotary.base.powf(f64::from(exponent)) as f32
    };
    let scaled = |pair: usize, frequency: f32| match rotary.scaling {
        // Texts for which the dynamic base changes are refused.
        RotaryScaling::None | RotaryScaling::Dynamic { .. } => frequency,
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
        RotaryScaling::Yarn { factor, fast_turns, slow_turns, original_context, rounds, .. } => {
            // The pair that makes so many turns within the context of the training before.
            let pair_of = |turns: f64| {
                let turn = original_context as f64 / (turns * TAU);
                rotary.width as f64 * turn.ln() / (2.0 * rotary.base.ln())
            };
            let (mut first, mut last) = (pair_of(fast_turns), pair_of(slow_turns));
            if rounds {
                (first, last) = (first.floor(), last.ceil());
            }
            let (first, mut last) = (first.max(0.0), last.min(rotary.width as f64 - 1.0));
            if (first - last).abs() < f64::EPSILON {
                last += 0.001;
            }
            let share = ((pair as f32 - first as f32) / (last - first) as f32).clamp(0.0, 1.0);
            let kept = 1.0 - share;
            1.0 / (factor as f32 * power(pair)) * (1.0 - kept) + frequency * kept
        }
    };
    (0..rotary.width / 2).map(|pair| scaled(pair, 1.0 / power(pair))).collect()
}

/// Returns a row for each position: the cosines of all pairs, then their sines.
///
/// The angle is the product of position and frequency in f32, as the reference implementations compute it; its
/// cosine and sine are exact to the last bit, unless they are multiplied.
#[must_use]
pub fn table(rotary: &RotarySpec, positions: usize) -> Vec<f32> {
    let frequencies = frequencies(rotary);
    let amplitude = match rotary.scaling {
        RotaryScaling::Yarn { amplitude, .. } => amplitude as f32,
        _ => 1.0,
    };
    let mut table = Vec::with_capacity(positions * rotary.width);
    for position in 0..positions {
        let angles = || frequencies.iter().map(move |frequency| f64::from(position as f32 * frequency));
        table.extend(angles().map(|angle| angle.cos() as f32 * amplitude));
        table.extend(angles().map(|angle| angle.sin() as f32 * amplitude));
    }
    table
}
