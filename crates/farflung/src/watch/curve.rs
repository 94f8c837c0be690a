//! A run's steps as a curve of bounded length: with more steps than points, each point stands for several
//! steps.

use serde::Serialize;

use crate::StepMetrics;

/// Highest number of points of a curve.
pub const MOST_POINTS: usize = 1000;

/// A point of the curve: one or several consecutive steps.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Point {
    /// The last of the point's steps.
    pub step: u64,
    /// Number of the point's steps.
    pub steps: u64,
    /// Seconds by the run's clock that the run had taken after the point's last step.
    pub time_s: f64,
    /// Seconds of real time that the run had taken after the point's last step.
    pub wall_s: f64,
    /// Mean training loss of the point's steps in nats, over the steps that have one.
    pub loss: Option<f64>,
    /// Smallest training loss of its steps.
    pub least: Option<f64>,
    /// Largest training loss of its steps.
    pub greatest: Option<f64>,
    /// Last loss on the held-out text that was computed in its steps.
    pub val_loss: Option<f64>,
    /// Tokens of the run up to the point's last step.
    pub tokens: u64,
    /// Bytes sent since the run's first step, up to the point's last step.
    pub bytes_sent: u64,
    /// Number of the point's steps that have a loss.
    #[serde(skip)]
    losses: u64,
}

impl Point {
    fn of(row: &StepMetrics) -> Self {
        let loss = Some(row.train_loss).filter(|loss| loss.is_finite());
        Self {
            step: row.step,
            steps: 1,
            time_s: row.time_s,
            wall_s: row.wall_s,
            loss,
            least: loss,
            greatest: loss,
            val_loss: row.val_loss.filter(|loss| loss.is_finite()),
            tokens: row.tokens,
            bytes_sent: row.bytes_sent,
            losses: u64::from(loss.is_some()),
        }
    }

    /// Merges this point with a later one.
    fn and(&self, later: &Self) -> Self {
        let losses = self.losses + later.losses;
        let sum = |point: &Self| point.loss.map_or(0.0, |loss| loss * point.losses as f64);
        let either = |a: Option<f64>, b: Option<f64>, pick: fn(f64, f64) -> f64| match (a, b) {
            (Some(a), Some(b)) => Some(pick(a, b)),
            (a, b) => a.or(b),
        };
        Self {
            steps: self.steps + later.steps,
            loss: (losses > 0).then(|| (sum(self) + sum(later)) / losses as f64),
            least: either(self.least, later.least, f64::min),
            greatest: either(self.greatest, later.greatest, f64::max),
            val_loss: later.val_loss.or(self.val_loss),
            losses,
            ..later.clone()
        }
    }
}

/// A growing curve. At most [`MOST_POINTS`] points are kept: at that limit, pairs of neighbours are merged.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Curve {
    /// Changes whenever points other than the last one change.
    pub generation: u64,
    /// The points in the order of their steps.
    pub points: Vec<Point>,
    /// Number of steps per full point.
    #[serde(skip)]
    stride: u64,
}

impl Default for Curve {
    fn default() -> Self {
        Self { generation: 0, points: Vec::new(), stride: 1 }
    }
}

impl Curve {
    /// Adds a step. If it was there already, the points with it or later steps are removed first.
    pub fn push(&mut self, row: &StepMetrics) {
        let before = self.points.len();
        while self.points.last().is_some_and(|last| last.step >= row.step) {
            self.points.pop();
        }
        self.generation += u64::from(self.points.len() < before);
        let point = Point::of(row);
        if let Some(last) = self.points.last_mut().filter(|last| last.steps < self.stride) {
            *last = last.and(&point);
            return;
        }
        if self.points.len() == MOST_POINTS {
            let pairs = self.points.chunks(2);
            self.points =
                pairs.map(|pair| pair.get(1).map_or_else(|| pair[0].clone(), |b| pair[0].and(b))).collect();
            self.stride = self.stride.saturating_mul(2);
            self.generation += 1;
        }
        self.points.push(point);
    }

    /// Removes all steps.
    pub fn clear(&mut self) {
        *self = Self { generation: self.generation + 1, ..Self::default() };
    }

    /// Returns the points to send to a viewer that has `known` points of a generation, and the index from which
    /// on they replace the viewer's points. The last known point may have grown.
    #[must_use]
    pub fn since(&self, generation: u64, known: usize) -> (usize, &[Point]) {
        let from =
            if generation == self.generation { known.min(self.points.len()).saturating_sub(1) } else { 0 };
        (from, &self.points[from..])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(step: u64) -> StepMetrics {
        StepMetrics {
            step,
            train_loss: step as f64,
            time_s: step as f64 * 0.5,
            tokens: 10 * step,
            bytes_sent: 100 * step,
            ..StepMetrics::default()
        }
    }

    #[test]
    fn few_steps_are_points_and_many_are_merged_without_losing_any() {
        let mut curve = Curve::default();
        for step in 1..=MOST_POINTS as u64 {
            curve.push(&row(step));
        }
        assert_eq!((curve.points.len(), curve.generation), (MOST_POINTS, 0));
        for step in MOST_POINTS as u64 + 1..=12_345 {
            curve.push(&row(step));
            assert!(curve.points.len() <= MOST_POINTS);
        }
        assert_eq!(curve.points.iter().map(|point| point.steps).sum::<u64>(), 12_345);
        let mut first = 1;
        for point in &curve.points {
            let steps: Vec<f64> = (first..=point.step).map(|step| step as f64).collect();
            assert_eq!(steps.len() as u64, point.steps);
            let mean = steps.iter().sum::<f64>() / steps.len() as f64;
            assert!((point.loss.unwrap() - mean).abs() < 1e-6 * mean);
            assert_eq!([point.least, point.greatest], [steps.first().copied(), steps.last().copied()]);
            assert_eq!((point.tokens, point.bytes_sent), (10 * point.step, 100 * point.step));
            first = point.step + 1;
        }
        assert!(curve.points.len() > MOST_POINTS / 2);
    }

    #[test]
    fn losses_that_are_no_numbers_leave_a_gap_and_count_for_no_mean() {
        let mut curve = Curve { stride: 2, ..Curve::default() };
        for (step, loss) in [(1, f64::NAN), (2, 4.0), (3, f64::NAN), (4, f64::INFINITY)] {
            curve.push(&StepMetrics { train_loss: loss, val_loss: Some(loss), ..row(step) });
        }
        let seen: Vec<_> = curve.points.iter().map(|p| (p.step, p.loss, p.val_loss)).collect();
        assert_eq!(seen, [(2, Some(4.0), Some(4.0)), (4, None, None)]);
    }

    #[test]
    fn a_step_that_is_told_again_replaces_those_from_it_on() {
        let mut curve = Curve::default();
        (1..=5).for_each(|step| curve.push(&row(step)));
        curve.push(&row(3));
        assert_eq!(curve.points.iter().map(|p| p.step).collect::<Vec<_>>(), [1, 2, 3]);
        assert_eq!(curve.generation, 1);
        curve.clear();
        assert!(curve.points.is_empty() && curve.generation == 2);
    }

    #[test]
    fn what_is_new_is_told_from_the_last_known_point_on() {
        let mut curve = Curve::default();
        (1..=5).for_each(|step| curve.push(&row(step)));
        let steps =
            |(from, points): (usize, &[Point])| (from, points.iter().map(|p| p.step).collect::<Vec<_>>());
        assert_eq!(steps(curve.since(0, 0)), (0, vec![1, 2, 3, 4, 5]));
        assert_eq!(steps(curve.since(0, 3)), (2, vec![3, 4, 5]));
        assert_eq!(steps(curve.since(0, 5)), (4, vec![5]));
        assert_eq!(steps(curve.since(7, 5)).0, 0);
        assert_eq!(steps(curve.since(0, 99)), (4, vec![5]));
    }
}
