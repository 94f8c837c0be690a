//! Draws the held-out losses of all arms in one chart, as a self-contained SVG.

use anyhow::{Result, anyhow};
use plotters::prelude::*;

use super::ArmRecord;

const SIZE: (u32, u32) = (1000, 620);

/// Quantity on the horizontal axis, which is logarithmic.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum XAxis {
    /// Megabytes that a worker has sent.
    Bytes,
    /// Hours on the virtual clock.
    Time,
}

impl XAxis {
    const fn name(self) -> &'static str {
        match self {
            Self::Bytes => "MB sent by a worker",
            Self::Time => "simulated hours over 100 Mbit/s",
        }
    }

    /// Returns a point's position on the axis. A point has a step, bytes, seconds and a loss.
    const fn of(self, [_, bytes, seconds, _]: [f64; 4]) -> f64 {
        match self {
            Self::Bytes => bytes / 1e6,
            Self::Time => seconds / 3600.0,
        }
    }
}

/// Draws the arms. An arm that sends nothing is not drawn against bytes. Without arms the axes are empty.
///
/// Errors: those of the drawing library.
pub(super) fn svg(arms: &[ArmRecord], against: XAxis) -> Result<String> {
    let mut svg = String::new();
    draw(&mut svg, arms, against).map_err(|error| anyhow!("failed to draw: {error}"))?;
    Ok(svg)
}

fn draw(svg: &mut String, arms: &[ArmRecord], against: XAxis) -> Result<(), Box<dyn std::error::Error>> {
    let points = |arm: &ArmRecord| -> Vec<(f64, f64)> {
        let all = arm.curve.iter().map(|&point| (against.of(point), point[3]));
        all.filter(|(x, y)| *x > 0.0 && x.is_finite() && y.is_finite()).collect()
    };
    let drawn: Vec<_> =
        arms.iter().map(|arm| (arm, points(arm))).filter(|(_, points)| !points.is_empty()).collect();
    let all = || drawn.iter().flat_map(|(_, points)| points.iter().copied());
    let range = |values: &mut dyn Iterator<Item = f64>| {
        values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), v| (low.min(v), high.max(v)))
    };
    let (left, right) = range(&mut all().map(|p| p.0));
    let (low, high) = range(&mut all().map(|p| p.1));
    let (x, y) =
        if left > right { (0.1..1.0, 0.0..1.0) } else { (left * 0.8..right * 1.25, low - 0.02..high + 0.02) };

    let root = SVGBackend::with_string(svg, SIZE).into_drawing_area();
    root.fill(&WHITE)?;
    let (plot, legend) = root.split_horizontally(SIZE.0 - 230);
    let mut chart = ChartBuilder::on(&plot)
        .caption(format!("Held-out loss against {}", against.name()), ("sans-serif", 20))
        .margin(12)
        .x_label_area_size(38)
        .y_label_area_size(60)
        .build_cartesian_2d(x.log_scale(), y)?;
    chart
        .configure_mesh()
        .x_desc(against.name())
        .y_desc("loss (nats per token)")
        .label_style(("sans-serif", 13))
        .axis_desc_style(("sans-serif", 15))
        .light_line_style(TRANSPARENT)
        .bold_line_style(BLACK.mix(0.1))
        .draw()?;
    for (number, (arm, points)) in (0_i32..).zip(&drawn) {
        let colour = HSLColor((f64::from(number) * 0.381_966) % 1.0, 0.7, 0.42);
        chart.draw_series(LineSeries::new(points.iter().copied(), colour.stroke_width(2)))?;
        chart.draw_series(points.last().map(|&end| Circle::new(end, 4, colour.filled())))?;
        let at = 40 + 22 * number;
        legend.draw(&PathElement::new([(4, at), (26, at)], colour.stroke_width(3)))?;
        legend.draw(&Text::new(arm.name.clone(), (32, at - 8), ("sans-serif", 14)))?;
    }
    drop(chart);
    root.present()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arms_are_drawn_and_named_and_those_without_bytes_left_out() {
        let arm = |name: &str, bytes: f64| ArmRecord {
            name: name.to_owned(),
            what: String::new(),
            command: String::new(),
            seeds: 1,
            gap: [0.0, 0.0],
            payload: bytes,
            sent: bytes,
            step_times: Vec::new(),
            curve: (1..4)
                .map(|i| [f64::from(i), bytes * f64::from(i), f64::from(i), 3.0 / f64::from(i)])
                .collect(),
        };
        let arms = [arm("one & two", 1e6), arm("silent", 0.0)];
        let by_bytes = svg(&arms, XAxis::Bytes).unwrap();
        assert!(by_bytes.contains("one &amp; two") && !by_bytes.contains("silent"));
        let by_time = svg(&arms, XAxis::Time).unwrap();
        assert!(by_time.contains("silent") && by_time.contains("simulated hours"));
        for empty in [XAxis::Bytes, XAxis::Time] {
            let svg = svg(&[], empty).unwrap();
            assert!(svg.starts_with("<svg") && !svg.contains("NaN"));
        }
    }
}
