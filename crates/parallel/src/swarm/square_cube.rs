//! The square-cube law of pipelines: the computation of a layer grows with the square of its width, its traffic
//! only linearly.

/// A stage, its device and its network connection.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SquareCube {
    /// Width of the model.
    pub hidden: u64,
    /// Number of layers of the stage.
    pub layers: u64,
    /// Number of tokens of a microbatch, which is one sequence.
    pub tokens: u64,
    /// Number of bits of a transmitted value.
    pub bits: u64,
    /// Operations per second that the device sustains.
    pub flops: f64,
    /// Bandwidth in bits per second.
    pub bandwidth: f64,
    /// Round-trip time in seconds.
    pub round_trip: f64,
}

/// Part of the time in which the device computes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Utilisation {
    /// Time of computation, in seconds.
    pub compute: f64,
    /// Time of transmission, in seconds.
    pub line: f64,
    /// `compute / (max(compute, line) + round trip)`.
    pub share: f64,
}

impl SquareCube {
    /// Returns the utilisation in the forward pass of a microbatch. It has `L (24 s h^2 + 4 s^2 h)` operations
    /// and sends `s h` values, for `L` layers, `s` tokens and width `h`. Source: Ryabinin et al. 2023, "SWARM",
    /// section 3.1.
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
