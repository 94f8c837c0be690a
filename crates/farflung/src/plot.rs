//! Draws a run's loss curve as a self-contained SVG: losses above, bytes sent below, over the steps.

use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;

use crate::metrics::StepMetrics;
use crate::{Error, Result};

const SIZE: (u32, u32) = (900, 620);
const UPPER: u32 = 410;
const TRAIN: RGBColor = RGBColor(31, 119, 180);
const VAL: RGBColor = RGBColor(214, 79, 39);
const BYTES: RGBColor = RGBColor(77, 128, 77);

type Panel<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;

/// Draws a run's steps. Values that are not finite are left out; without steps the axes are empty.
///
/// Errors: [`Error::Plot`].
pub fn loss_curve_svg(title: &str, rows: &[StepMetrics]) -> Result<String> {
    let mut svg = String::new();
    draw(&mut svg, title, rows).map_err(|e| Error::Plot { what: e.to_string() })?;
    Ok(svg)
}

fn draw(svg: &mut String, title: &str, rows: &[StepMetrics]) -> Result<(), Box<dyn std::error::Error>> {
    let finite =
        |points: Vec<(f64, f64)>| -> Vec<_> { points.into_iter().filter(|p| p.1.is_finite()).collect() };
    let train = finite(rows.iter().map(|r| (r.step as f64, r.train_loss)).collect());
    let val = finite(rows.iter().filter_map(|r| Some((r.step as f64, r.val_loss?))).collect());
    let sent: Vec<_> = rows.iter().map(|r| (r.step as f64, r.bytes_sent as f64 / 1e6)).collect();
    let steps = range(rows.iter().map(|r| r.step as f64), 0.0);

    let root = SVGBackend::with_string(svg, SIZE).into_drawing_area();
    root.fill(&WHITE)?;
    let (upper, lower) = root.split_vertically(UPPER);

    let losses = range(train.iter().chain(&val).map(|p| p.1), 0.05);
    let mut chart = panel(&upper, Some(title), steps.clone(), losses, "loss (nats per token)")?;
    // A line through one point is not visible, so draw a dot.
    let dots = if train.len() == 1 { 3 } else { 0 };
    chart.draw_series(train.iter().map(|&p| Circle::new(p, dots, TRAIN.filled())))?;
    chart
        .draw_series(LineSeries::new(train, TRAIN.stroke_width(2)))?
        .label("train")
        .legend(|(x, y)| PathElement::new([(x, y), (x + 18, y)], TRAIN.stroke_width(2)));
    chart.draw_series(LineSeries::new(val.clone(), VAL.stroke_width(1)))?;
    chart
        .draw_series(val.into_iter().map(|p| Circle::new(p, 4, VAL.filled())))?
        .label("validation")
        .legend(|(x, y)| Circle::new((x + 9, y), 4, VAL.filled()));
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK.mix(0.2))
        .label_font(("sans-serif", 15))
        .draw()?;

    let volume = range(sent.iter().map(|p| p.1).chain([0.0]), 0.0);
    let mut chart = panel(&lower, None, steps, volume, "MB sent")?;
    chart.draw_series(LineSeries::new(sent, BYTES.stroke_width(2)))?;
    root.present()?;
    Ok(())
}

/// Returns axes with a grid; the x axis is in steps.
fn panel<'a, 'b>(
    area: &'b Panel<'a>,
    title: Option<&str>,
    x: std::ops::Range<f64>,
    y: std::ops::Range<f64>,
    y_name: &str,
) -> Result<
    ChartContext<'b, SVGBackend<'a>, Cartesian2d<RangedCoordf64, RangedCoordf64>>,
    Box<dyn std::error::Error>,
>
where
    'a: 'b,
{
    let mut builder = ChartBuilder::on(area);
    if let Some(title) = title {
        builder.caption(title, ("sans-serif", 20));
    }
    let mut chart =
        builder.margin(12).x_label_area_size(38).y_label_area_size(66).build_cartesian_2d(x, y)?;
    chart
        .configure_mesh()
        .x_desc("step")
        .y_desc(y_name)
        .x_label_formatter(&|v| format!("{v:.0}"))
        .label_style(("sans-serif", 13))
        .axis_desc_style(("sans-serif", 15))
        .light_line_style(TRANSPARENT)
        .bold_line_style(BLACK.mix(0.1))
        .draw()?;
    Ok(chart)
}

/// Returns the range from the least to the greatest value, with a margin (a fraction of its length) on both
/// sides; never empty.
fn range(values: impl Iterator<Item = f64>, margin: f64) -> std::ops::Range<f64> {
    let (low, high) =
        values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), v| (low.min(v), high.max(v)));
    if low > high {
        return 0.0..1.0;
    }
    let pad = (high - low) * margin;
    if high - low > f64::EPSILON * high.abs().max(1.0) {
        low - pad..high + pad
    } else {
        low - 0.5..high + 0.5
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(step: u64, train_loss: f64, val_loss: Option<f64>) -> StepMetrics {
        StepMetrics { step, train_loss, val_loss, bytes_sent: step * 1_000_000, ..StepMetrics::default() }
    }

    #[test]
    fn a_curve_has_a_title_axes_and_both_losses() {
        let rows: Vec<_> =
            (1..=50).map(|s| row(s, 5.0 / s as f64, s.is_multiple_of(25).then_some(3.0))).collect();
        let svg = loss_curve_svg("nano & 4 <workers>", &rows).unwrap();
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
        for part in ["nano &amp; 4 &lt;workers&gt;", "train", "validation", "step", "MB sent", "loss (nats"] {
            assert!(svg.contains(part), "{part}");
        }
        // The curve has two validation points, and the legend has one.
        assert_eq!(svg.matches("r=\"4\"").count(), 3);
        assert!(svg.matches("<polyline").count() >= 3);
        assert!(!svg.contains("href"));
    }

    #[test]
    fn few_or_broken_points_draw_too() {
        let nan = f64::NAN;
        let cases = [
            vec![],
            vec![row(1, 2.0, None)],
            vec![row(1, nan, Some(nan)), row(2, f64::INFINITY, None)],
            vec![row(1, 2.0, Some(2.0)), row(2, nan, None), row(3, 2.0, None)],
        ];
        for rows in cases {
            let svg = loss_curve_svg("t", &rows).unwrap();
            assert!(!svg.contains("NaN") && !svg.contains("inf"), "{rows:?}");
        }
        let one = loss_curve_svg("t", &[row(1, 2.0, None)]).unwrap();
        assert!(one.contains("r=\"3\""));
    }
}
