//! Compares all schedules for one pipeline: time, bubble, memory, use of links, and distance from the lower
//! bound.

use std::fmt;

use farflung_base::{Bytes, Nanos, Rank};

use super::{
    Boundary, ComputeOrder, Method, PipelineCost, Settings, StageCost, lower_bound, peaks, simulate,
};
use crate::ParallelError;

/// The pipeline for which schedules are compared.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Comparison {
    /// Number of ranks.
    pub ranks: u32,
    /// Number of microbatches in a step.
    pub microbatches: u32,
    /// Number of slices of each microbatch's tokens, for [`Method::TeraPipe`]. With one slice, that method
    /// equals [`Method::GPipe`].
    pub slices: u16,
    /// Cost of each rank's whole part of the model: one entry for all ranks, or one per rank. A rank with
    /// several stages (chunks) divides its part equally.
    pub cost: Vec<StageCost>,
    /// Links between ranks: one entry for all, or one per rank for the boundary after it. The last rank's entry
    /// joins it to the first.
    pub boundaries: Vec<Boundary>,
    /// Maximum number of activations that a rank may hold, in units of its whole part's activations of one
    /// microbatch.
    pub memory: Option<u32>,
    /// Percentage of the shorter half of an overlapped pair that takes no time.
    pub overlap_percent: u8,
}

/// Results of one schedule.
#[derive(Debug, Clone, PartialEq)]
pub struct ScheduleStats {
    /// Number of stages (chunks) of each copy of the model on each rank.
    pub chunks: u32,
    /// Number of copies of the model.
    pub copies: u32,
    /// Time at which the last rank is done.
    pub makespan: Nanos,
    /// Longest time from a rank's first op to its last.
    pub span: Nanos,
    /// Fraction of the total time of all ranks in which they are idle, from 0 to 1.
    pub bubble: f64,
    /// Peak activations of any rank, in units of its whole part's activations of one microbatch.
    pub peak: f64,
    /// Fraction of the makespan in which the busiest wire is busy, from 0 to 1.
    pub link_use: f64,
    /// Lower bound on the makespan of any order with this placement.
    pub bound: Nanos,
}

/// A schedule and its results, or the reason why it is not possible.
pub type ComparisonRow = (Method, Result<ScheduleStats, ParallelError>);

/// The result of a [`Comparison`].
#[derive(Debug, Clone, PartialEq)]
pub struct ComparisonTable {
    /// One row for each method, in the order of [`Method::ALL`].
    pub rows: Vec<ComparisonRow>,
    /// Copy of [`Comparison::memory`].
    pub memory: Option<u32>,
}

impl Comparison {
    /// Simulates every method.
    ///
    /// Errors: [`ParallelError::Zero`] for no ranks or microbatches; [`ParallelError::PerStage`] for a list of
    /// the wrong length. If a method does not support the sizes, its row contains the error.
    pub fn run(&self) -> Result<ComparisonTable, ParallelError> {
        for (field, value) in [("stages", self.ranks), ("microbatches", self.microbatches)] {
            if value == 0 {
                return Err(ParallelError::Zero { of: "the comparison".to_owned(), field });
            }
        }
        let stages = self.ranks as usize;
        for (what, given) in [("cost", self.cost.len()), ("boundaries", self.boundaries.len())] {
            if given != 1 && given != stages {
                return Err(ParallelError::PerStage { what, given, stages });
            }
        }
        let rows = Method::ALL.into_iter().map(|method| (method, self.figures(method)));
        Ok(ComparisonTable { rows: rows.collect(), memory: self.memory })
    }

    /// Returns the order of a method and the cost of its stages.
    ///
    /// Errors: as [`Method::order`].
    pub fn order(&self, method: Method) -> Result<(ComputeOrder, PipelineCost), ParallelError> {
        let settings = Settings {
            cost: self.cost.clone(),
            hop: self.boundaries.iter().map(|b| b.link.time(b.forward)).max().unwrap_or_default(),
            memory: self.memory,
            slices: self.slices,
            ..Settings::new(self.ranks, self.microbatches)
        };
        let order = method.order(&settings)?;
        let placement = order.placement();
        let chunks = u64::from(placement.chunks());
        let row = &placement.rank_of()[..placement.depth() as usize];
        let stages = row.iter().map(|rank| {
            let whole = self.cost[if self.cost.len() == 1 { 0 } else { rank.index() }];
            part(whole, chunks)
        });
        let cost = PipelineCost {
            stages: stages.collect(),
            boundaries: row.windows(2).map(|pair| self.between(pair[0], pair[1])).collect(),
            slices: Vec::new(),
            overlap_percent: self.overlap_percent,
        };
        Ok((order, cost))
    }

    /// Returns the boundary between two ranks with consecutive stages.
    fn between(&self, a: Rank, b: Rank) -> Boundary {
        let (low, high) = (a.min(b).index(), a.max(b).index());
        let behind = if high - low <= 1 { low } else { high };
        self.boundaries[if self.boundaries.len() == 1 { 0 } else { behind }]
    }

    fn figures(&self, method: Method) -> Result<ScheduleStats, ParallelError> {
        let (order, cost) = self.order(method)?;
        let simulation = simulate(&order, &cost)?;
        let placement = order.placement();
        let chunks = placement.chunks();
        let most = peaks(&order).into_iter().max().unwrap_or_default();
        Ok(ScheduleStats {
            chunks,
            copies: placement.copies(),
            makespan: simulation.makespan(),
            span: simulation.span(),
            bubble: simulation.bubble_fraction(),
            peak: f64::from(most) / f64::from(chunks * u32::from(order.slices())),
            link_use: simulation.link_use(),
            bound: lower_bound(&order, &cost),
        })
    }
}

/// Returns the cost of one of `chunks` equal parts of a stage.
fn part(whole: StageCost, chunks: u64) -> StageCost {
    let time = |t: Nanos| Nanos(t.0 / chunks);
    let mut memory = whole.memory;
    memory.activations = Bytes(memory.activations.0.div_ceil(chunks));
    memory.for_weight = Bytes(memory.for_weight.0.div_ceil(chunks));
    StageCost {
        forward: time(whole.forward),
        input: time(whole.input),
        weight: time(whole.weight),
        recompute: time(whole.recompute),
        step: time(whole.step),
        memory,
    }
}

impl ComparisonTable {
    /// Returns the fastest schedule among the synchronous ones that train, with one copy of the model and
    /// within the memory. Among equally fast ones, returns the one with the lowest peak.
    #[must_use]
    pub fn best(&self) -> Option<(Method, &ScheduleStats)> {
        let rows = self.rows.iter().filter_map(|(method, row)| Some((*method, row.as_ref().ok()?)));
        let trains = |m: Method| m.is_synchronous() && m.trains();
        rows.filter(|&(method, f)| trains(method) && f.copies == 1 && self.fits(f))
            .min_by(|(_, a), (_, b)| (a.makespan.cmp(&b.makespan)).then(a.peak.total_cmp(&b.peak)))
    }

    fn fits(&self, figures: &ScheduleStats) -> bool {
        self.memory.is_none_or(|memory| figures.peak <= f64::from(memory))
    }
}

impl fmt::Display for ComparisonTable {
    /// Prints a table with one line per method. Times are in milliseconds.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:<13} {:>10} {:>7} {:>10} {:>6} {:>6} {:>7} {:>6}",
            "schedule", "makespan", "bubble", "span", "peak", "copies", "link", "gap"
        )?;
        let best = self.best().map(|(method, _)| method);
        for (method, row) in &self.rows {
            let figures = match row {
                Ok(figures) => figures,
                Err(ParallelError::NotAdmitted { field, given, needs, .. }) => {
                    writeln!(f, "{method:<13} does not support {given} {field}: it needs {needs}")?;
                    continue;
                }
                Err(error) => {
                    writeln!(f, "{method:<13} {error}")?;
                    continue;
                }
            };
            let gap = figures.makespan.0 as f64 / figures.bound.0.max(1) as f64 - 1.0;
            writeln!(
                f,
                "{method:<13} {:>10} {:>6.1}% {:>10} {:>6} {:>6} {:>6.1}% {:>5.1}%{}",
                millis(figures.makespan),
                figures.bubble * 100.0,
                millis(figures.span),
                figures.peak,
                figures.copies,
                figures.link_use * 100.0,
                gap * 100.0,
                match best {
                    _ if !self.fits(figures) => "  exceeds the memory",
                    Some(best) if best == *method => "  <- fastest",
                    _ => "",
                }
            )?;
        }
        Ok(())
    }
}

/// Formats a time in milliseconds without rounding.
#[must_use]
pub fn millis(time: Nanos) -> String {
    let text = format!("{}.{:06}", time.0 / 1_000_000, time.0 % 1_000_000);
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// Formats a simulated order as one JSON object: `makespan` and `bound`, and for each of `ranks` its `bubble`,
/// `span_bubble`, `peak` (counted as in [`peaks`]) and `ops`. Times are milliseconds, not rounded.
///
/// `step` is added if given: the makespan from [`Schedule::simulate`](super::Schedule::simulate), which
/// includes collectives. `held` is added for each rank if given: the bytes from
/// [`Schedule::peak_bytes`](super::Schedule::peak_bytes), for schedules that offload activations.
///
/// Errors: as [`simulate`].
pub fn json(
    name: &str,
    order: &ComputeOrder,
    cost: &PipelineCost,
    step: Option<Nanos>,
    held: Option<&[Bytes]>,
) -> Result<String, ParallelError> {
    let simulation = simulate(order, cost)?;
    let placement = order.placement();
    let step = step.map_or_else(String::new, |step| format!("\"step\":{},", millis(step)));
    let ranks = (0..).map(Rank).zip(order.lists()).zip(peaks(order)).map(|((rank, list), peak)| {
        let ops: Vec<String> = list.iter().map(|op| format!("\"{op}\"")).collect();
        let held = held.map_or_else(String::new, |held| format!("\"held\":{},", held[rank.index()].0));
        format!(
            "{{\"rank\":{},\"bubble\":{},\"span_bubble\":{},\"peak\":{peak},{held}\"ops\":[{}]}}",
            rank.0,
            millis(simulation.bubble(rank)),
            millis(simulation.span_bubble(rank)),
            ops.join(",")
        )
    });
    Ok(format!(
        "{{\"schedule\":\"{name}\",\"stages\":{},\"microbatches\":{},\"chunks\":{},\"copies\":{},\
         \"makespan\":{},{step}\"bound\":{},\"bubble_fraction\":{:.6},\"ranks\":[{}]}}\n",
        placement.ranks(),
        order.microbatches(),
        placement.chunks(),
        placement.copies(),
        millis(simulation.makespan()),
        millis(lower_bound(order, cost)),
        simulation.bubble_fraction(),
        ranks.collect::<Vec<_>>().join(",")
    ))
}
