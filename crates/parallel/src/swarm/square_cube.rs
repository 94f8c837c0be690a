//! The square-cube law of pipelines: a layer's computing grows with the square of its width, its traffic with
//! the width.

/// A stage and the line of its device.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SquareCube {
    /// Width of the model.
    pub hidden: u64,
    /// Layers of the stage.
    pub layers: u64,
    /// Tokens of a microbatch: one sequence.
    pub tokens: u64,
    /// Bits that a value travels in.
    pub bits: u64,
    /// Operations a second that the device sustains.
    pub flops: f64,
    /// Bits a second of its line.
    pub bandwidth: f64,
    /// Seconds of a round trip.
    pub round_trip: f64,
}

/// How much of the time the device computes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Utilisation {
    /// Seconds of computing.
    pub compute: f64,
    /// Seconds on the line.
    pub line: f64,
    /// `compute / (max(compute, line) + round trip)`.
    pub share: f64,
}

impl SquareCube {
    /// Forward of a microbatch: `L (24 s h^2 + 4 s^2 h)` operations, and `s h` values sent, one behind the
    /// other. Source: Ryabinin et al. 2023, "SWARM", section 3.1.
    #[must_use]
    pub fn utilisation(&self) -> Utilisation {
        let (s, h) = (self.tokens as f64, self.hidden as f64);
        let compute = self.layers as f64 * (24.0 * s * h * h + 4.0 * s * s * h) / self.flops;
        let line = s * h * self.bits as f64 / self.bandwidth;
        Utilisation { compute, line, share: compute / (compute.max(line) + self.round_trip) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wide_layers_hide_their_traffic() {
        let of = |hidden, layers| {
            let (bits, flops, bandwidth) = (8, 16.25e12, 500e6);
            SquareCube { hidden, layers, tokens: 512, bits, flops, bandwidth, round_trip: 0.0 }.utilisation()
        };
        for (hidden, layers, compute, line, share) in [
            (768, 1, 0.0005, 0.0063, 0.079),
            (4096, 1, 0.01295, 0.03355, 0.386),
            (4096, 3, 0.0389, 0.0336, 1.0),
        ] {
            let seen = of(hidden, layers);
            assert!((seen.compute - compute).abs() < 5.1e-5, "{seen:?}");
            assert!((seen.line - line).abs() < 5.1e-5 && (seen.share - share).abs() < 5.1e-4, "{seen:?}");
        }
        let seen = of(12_288, 1);
        assert!((seen.compute - 0.115).abs() < 5e-4 && (seen.share - 1.0).abs() < 1e-12, "{seen:?}");
    }
}
