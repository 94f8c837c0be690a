//! `farflung schedule`: prints, draws or simulates a pipeline's schedule, or compares all schedules.

use std::fmt::Write as _;
use std::path::PathBuf;

use farflung::parallel::pipeline::{
    BackwardOrder, Boundary, CollectiveTimes, Comparison, ComputeOrder, Lowering, Method, PipelineCost,
    Pools, Schedule, Settings, StageCost, json, millis, simulate,
};
use farflung::parallel::plan::POOLS;
use farflung::parallel::step::{NormVote, RankStep, ReplicaSteps, StepSettings};
use farflung::parallel::{ParallelError, Timeline, render};
use farflung::train::read_schedule;
use farflung::{Error, Result};
use farflung_base::{Bandwidth, Bytes, Link, Nanos, Rank};

/// Print, draw or simulate a pipeline's schedule, or compare all schedules.
///
/// NAME is a schedule of the list below, or `compare` for a table of all of them. Times are in the units of
/// --cost.
#[derive(Debug, clap::Args)]
#[command(after_help = help())]
pub(crate) struct ScheduleCommand {
    /// The schedule, or `compare`.
    #[arg(value_name = "NAME", required_unless_present = "file", conflicts_with = "file")]
    name: Option<String>,
    /// File with your own schedule: lines such as `r0: 0F0 0F1 0B0 0B1`, or PyTorch's CSV form in a .csv file.
    #[arg(long, value_name = "PATH")]
    file: Option<PathBuf>,
    /// Number of ranks.
    #[arg(long, short = 'p', value_name = "P", default_value_t = 4)]
    stages: u32,
    /// Number of ranks of each stage, such as 1,2, for the schedule `pools`.
    #[arg(long, value_name = "N,N", value_delimiter = ',', conflicts_with = "stages", requires = "name")]
    pools: Vec<u32>,
    /// Relative speed of each rank within its pool. Default: all equal.
    #[arg(long, value_name = "N,N", value_delimiter = ',', requires = "pools")]
    pool_rates: Vec<u32>,
    /// Microbatches per step.
    #[arg(long, short = 'm', value_name = "M", default_value_t = 8)]
    microbatches: u32,
    /// Stages on each rank. Default: 2 for schedules that have several, else 1.
    #[arg(long, value_name = "V")]
    chunks: Option<u32>,
    /// Number of slices of each microbatch's tokens, for terapipe.
    #[arg(long, value_name = "N", default_value_t = 1)]
    slices: u16,
    /// Times for one chunk: forward (F), input gradient (I), weight gradient (W), and latency of the link to
    /// the next chunk (C). Several entries, separated by `:`, are for the stages in order. For `compare`, the
    /// times are for a rank's whole share of the model, and the last link is the one back to the first rank.
    #[arg(long, value_name = "F,I,W,C", default_value = "1,1,1,0", value_parser = costs)]
    cost: Costs,
    /// Time for which a message occupies its link.
    #[arg(long, value_name = "TIME", default_value = "0", value_parser = time)]
    wire: Nanos,
    /// Time to average a stage's gradients with its replicas, starting at the end of its last backward.
    #[arg(long, value_name = "TIME", value_parser = time)]
    reduce: Option<Nanos>,
    /// Time to gather a stage's sharded weights, before each group of computations that needs them.
    #[arg(long, value_name = "TIME", value_parser = time)]
    gather: Option<Nanos>,
    /// Move a microbatch's activations to slower memory if its backward is at least N computations away, and
    /// print how many each rank then holds.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..))]
    offload: Option<u32>,
    /// Fraction of the shorter half of an overlapped pair that takes no extra time, in percent.
    #[arg(long, value_name = "PERCENT", default_value_t = 0, value_parser = clap::value_parser!(u8).range(..=100))]
    overlap: u8,
    /// Warm-up slope of 1f1b-mu. Default: the smallest slope that hides the link.
    #[arg(long, value_name = "N")]
    mu: Option<u32>,
    /// Number of microbatches that a rank may hold, for 1f1b-mu, zb-auto, varuna, pools and compare. Default: P
    /// for zb-auto and varuna, as many as keep ranks busy for pools, no limit for the others.
    #[arg(long, value_name = "N")]
    memory: Option<u32>,
    /// Run gpipe's backwards from the first microbatch to the last.
    #[arg(long)]
    ascending: bool,
    /// Recompute the forward of each microbatch before its backward, at the cost of a forward.
    #[arg(long)]
    recompute: bool,
    /// Output format.
    #[arg(long, value_name = "FORMAT", default_value = "grid")]
    format: Format,
    /// Same as --format json.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Format {
    /// A table of ranks over time, as text.
    Grid,
    /// The ops of each rank.
    Ops,
    /// The ops with the sends and receives between ranks.
    Lowered,
    /// All that each rank does in a training step: the pass, averages, votes and updates. With --reduce,
    /// replicas average the gradients.
    Steps,
    /// An SVG drawing.
    Svg,
    /// A trace for Perfetto or Chrome.
    Trace,
    /// Makespan, bubbles, peaks and ops, as JSON.
    Json,
    /// PyTorch's CSV form.
    Csv,
}

/// Value of `--cost`: a stage and the link after it, once for all stages or once per stage.
#[derive(Debug, Clone)]
struct Costs(Vec<(StageCost, Nanos)>);

/// Nanoseconds per unit of `--cost`. A unit counts as a millisecond, so that a value may have six decimals.
const UNIT: u64 = 1_000_000;

/// Largest width in characters of a grid with the names of all ops. A wider grid shows letters for the kinds of
/// ops.
const WIDTH: usize = 240;

fn help() -> String {
    let mut text = "Examples:
  farflung schedule 1f1b --stages 4 --microbatches 8
  farflung schedule zbv -p 4 -m 8 --cost 1,1.2,0.8,0.5 --format json
  farflung schedule 1f1b -p 3 -m 6 --cost 1,1,1,2:2,2,2,0.5:1,1,1,0 --format svg > out.svg
  farflung schedule compare -p 8 -m 32 --cost 1,1,1,0.5 --memory 8
  farflung schedule pools --pools 1,2 --pool-rates 1,2,1 -m 6
  farflung schedule --file mine.txt --format lowered

Schedules:\n"
        .to_owned();
    for method in Method::ALL {
        let _ = writeln!(text, "  {method:<14} {}", method.summary());
    }
    let pools = "Stages are pools of ranks (--pools): a list schedule along the path of each microbatch. \
                 After Ryabinin et al. 2023.";
    let _ = writeln!(text, "  {POOLS:<14} {pools}");
    text
}

/// Returns the lists of all ranks' steps.
fn steps(schedule: &Schedule, replicas: ReplicaSteps) -> std::result::Result<String, ParallelError> {
    let placement = schedule.order().placement();
    let settings = StepSettings {
        replicas,
        overlap: true,
        tied: placement.tie(),
        by_arrivals: false,
        norm: NormVote::Pipeline,
        shards: false,
    };
    let mut text = String::new();
    for rank in (0..placement.ranks()).map(Rank) {
        let _ = write!(text, "{rank}\n{}", RankStep::new(schedule, rank, settings)?);
    }
    Ok(text)
}

/// Parses a decimal number of units.
fn time(text: &str) -> std::result::Result<Nanos, String> {
    let parse = || {
        let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
        let digits = |t: &str| t.bytes().all(|b| b.is_ascii_digit());
        if !digits(whole) || !digits(fraction) || fraction.len() > 6 || (whole.len() + fraction.len()) == 0 {
            return None;
        }
        let whole: u64 = if whole.is_empty() { 0 } else { whole.parse().ok()? };
        let fraction: u64 = format!("{fraction:0<6}").parse().ok()?;
        // Limited to below a million, so that sums over any schedule fit into 64 bits.
        (whole < 1_000_000).then(|| Nanos(whole * UNIT + fraction))
    };
    parse().ok_or_else(|| {
        format!("`{text}` is not a number such as 2 or 0.5, below a million, with up to 6 decimals")
    })
}

/// Parses `F,I,W,C`, given once or once per stage.
fn costs(text: &str) -> std::result::Result<Costs, String> {
    let entry = |text: &str| {
        let values = text.split(',').map(|t| time(t.trim())).collect::<std::result::Result<Vec<_>, _>>()?;
        let [forward, input, weight, hop] = values[..] else {
            return Err(format!("`{text}` is not four numbers F,I,W,C"));
        };
        Ok((StageCost { forward, input, weight, recompute: forward, ..StageCost::UNIT }, hop))
    };
    text.split(':').map(entry).collect::<std::result::Result<_, _>>().map(Costs)
}

impl ScheduleCommand {
    pub(super) fn run(self) -> Result<()> {
        if self.name.as_deref() == Some("compare") {
            return self.compare();
        }
        let order = self.order()?;
        let order = if self.recompute { order.with_recompute() } else { order };
        super::print(&self.show(order).map_err(Error::schedule)?)
    }

    fn show(&self, order: ComputeOrder) -> std::result::Result<String, ParallelError> {
        let cost = self.cost_of(&order);
        let name = self.name.as_deref().unwrap_or("file");
        let format = if self.json { Format::Json } else { self.format };
        let lowering = Lowering {
            replicas: self.reduce.is_some(),
            sharded: self.gather.is_some(),
            offload: self.offload,
            ..Lowering::default()
        };
        let computes = lowering == Lowering::default();
        match format {
            Format::Ops => return Ok(order.to_string()),
            Format::Csv => return Ok(order.to_csv()),
            Format::Lowered => return Ok(Schedule::new(order, &lowering)?.to_string()),
            Format::Steps => {
                let replicas = if lowering.replicas { ReplicaSteps::Together } else { ReplicaSteps::Alone };
                return steps(&Schedule::new(order, &Lowering { tied: true, ..lowering })?, replicas);
            }
            Format::Json if computes => return json(name, &order, &cost, None, None),
            _ => {}
        }
        if computes {
            let simulation = simulate(&order, &cost)?;
            let timeline = simulation.timeline();
            let bubble = simulation.bubble_fraction() * 100.0;
            return Ok(drawn(format, &timeline, || {
                let grid =
                    render::cells(&timeline, WIDTH).unwrap_or_else(|| render::grid(&timeline, WIDTH / 2));
                format!("{grid}makespan {}, bubble {bubble:.1}%\n", millis(simulation.makespan()))
            }));
        }
        let schedule = Schedule::new(order, &lowering)?;
        let depth = schedule.order().placement().depth() as usize;
        let of_parts = |price: Option<Nanos>| price.map_or_else(Vec::new, |price| vec![price; depth]);
        let (reduce, gather) = (of_parts(self.reduce), of_parts(self.gather));
        let step =
            schedule.simulate(&cost, &CollectiveTimes { reduce, gather, ..CollectiveTimes::default() })?;
        // At these costs, a microbatch's activations on a stage count as one byte.
        let held = self.offload.map(|_| schedule.peak_bytes(&cost)).transpose()?;
        if format == Format::Json {
            return json(name, schedule.order(), &cost, Some(step.makespan()), held.as_deref());
        }
        let held = held.map_or_else(String::new, |held| format!(", held at once by rank {}", list(&held)));
        let timeline = step.timeline();
        Ok(drawn(format, &timeline, || {
            let (makespan, bubble) = (step.compute().makespan(), step.compute().bubble_fraction() * 100.0);
            let averaged = match self.reduce {
                Some(_) => format!(", averaged {} later", millis(step.exposed())),
                None => String::new(),
            };
            format!(
                "{}makespan {}, bubble {bubble:.1}%{averaged}{held}\n",
                render::grid(&timeline, WIDTH / 2),
                millis(makespan),
            )
        }))
    }

    /// Returns the settings for a method; one entry of costs may stand for all stages.
    fn settings(&self) -> Settings {
        let hop = self.cost.0.iter().map(|(_, hop)| *hop).max().unwrap_or_default();
        Settings {
            chunks: self.chunks,
            slices: self.slices,
            backward: if self.ascending { BackwardOrder::Ascending } else { BackwardOrder::Descending },
            cost: self.cost.0.iter().map(|(stage, _)| *stage).collect(),
            hop: hop.saturating_add(self.wire),
            slope: self.mu,
            memory: self.memory,
            ..Settings::new(self.stages, self.microbatches)
        }
    }

    fn order(&self) -> Result<ComputeOrder> {
        if let Some(path) = &self.file {
            return read_schedule(path);
        }
        let refuse = |value: &str, expected: String| {
            Err(Error::Setting { field: "pools", value: value.to_owned(), expected })
        };
        match (self.name.as_deref() == Some(POOLS), self.pools()) {
            (true, Some(pools)) => {
                let Settings { cost, hop, memory, .. } = self.settings();
                return pools.order(self.microbatches, &cost, hop, memory).map_err(Error::schedule);
            }
            (true, None) => {
                return refuse(
                    "missing",
                    "the number of ranks of each stage, such as --pools 1,2".to_owned(),
                );
            }
            (false, Some(_)) => {
                return refuse("given", format!("no value with a schedule other than {POOLS}"));
            }
            (false, None) => {}
        }
        let method: Method = self.name.as_deref().unwrap_or_default().parse().map_err(Error::schedule)?;
        method.order(&self.settings()).map_err(Error::schedule)
    }

    /// Returns the pools of ranks that were given, or `None`.
    fn pools(&self) -> Option<Pools> {
        (!self.pools.is_empty()).then(|| match &self.pool_rates[..] {
            [] => Pools::equal(self.pools.clone()),
            rates => Pools { sizes: self.pools.clone(), rates: rates.to_vec() },
        })
    }

    /// Returns the boundary between a stage and the next: a message of `wire` bytes at one byte per nanosecond,
    /// so that bytes are time.
    fn boundary(&self, hop: Nanos) -> Boundary {
        let link = Link { bandwidth: Bandwidth(8_000_000_000), latency: hop };
        Boundary { link, forward: Bytes(self.wire.0), backward: Bytes(self.wire.0) }
    }

    fn cost_of(&self, order: &ComputeOrder) -> PipelineCost {
        let (stage, hop) = self.cost.0[0];
        let mut cost = PipelineCost::uniform(order, stage, self.boundary(hop));
        if self.cost.0.len() > 1 {
            cost.stages = self.cost.0.iter().map(|(stage, _)| *stage).collect();
            let between = &self.cost.0[..self.cost.0.len() - 1];
            cost.boundaries = between.iter().map(|(_, hop)| self.boundary(*hop)).collect();
        }
        if let Some(pools) = self.pools().filter(|_| self.name.as_deref() == Some(POOLS)) {
            cost.stages = pools.own_costs(order.placement(), &cost.stages);
        }
        cost.overlap_percent = self.overlap;
        cost
    }

    /// Returns the comparison.
    ///
    /// Errors: [`Error::Setting`] for a format or for one of the flags below, which `compare` does not use.
    fn comparison(&self) -> Result<Comparison> {
        let refuse = |field, value: &dyn ToString, expected: &str| {
            let (value, expected) = (value.to_string(), format!("{expected} with `compare`"));
            Err(Error::Setting { field, value, expected })
        };
        match self {
            Self { format: Format::Grid | Format::Json, .. } => {}
            _ => return refuse("format", &"a drawing or a list", "grid or json"),
        }
        if !self.pools.is_empty() {
            let pools = self.pools.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
            return refuse("pools", &pools, "no value (each stage has one rank)");
        }
        match *self {
            Self { chunks: Some(chunks), .. } => refuse("chunks", &chunks, "each schedule's default"),
            Self { mu: Some(mu), .. } => refuse("mu", &mu, "the slope that is computed from the costs"),
            Self { reduce: Some(reduce), .. } => {
                refuse("reduce", &millis(reduce), "no value (only computations are compared)")
            }
            Self { gather: Some(gather), .. } => {
                refuse("gather", &millis(gather), "no value (only computations are compared)")
            }
            Self { offload: Some(distance), .. } => {
                refuse("offload", &distance, "no value (nothing is moved to slower memory)")
            }
            Self { ascending: true, .. } => refuse("ascending", &true, "the order of each schedule"),
            Self { recompute: true, .. } => refuse("recompute", &true, "no recomputation"),
            _ => Ok(Comparison {
                ranks: self.stages,
                microbatches: self.microbatches,
                slices: self.slices,
                cost: self.settings().cost,
                boundaries: self.cost.0.iter().map(|(_, hop)| self.boundary(*hop)).collect(),
                memory: self.memory,
                overlap_percent: self.overlap,
            }),
        }
    }

    fn compare(&self) -> Result<()> {
        let compared = self.comparison()?.run().map_err(Error::schedule)?;
        if !self.json && self.format != Format::Json {
            return super::print(&compared.to_string());
        }
        let best = compared.best().map(|(method, _)| method.name());
        let rows: Vec<_> = compared
            .rows
            .iter()
            .map(|(method, row)| match row {
                Ok(f) => serde_json::json!({
                    "schedule": method.name(), "makespan": units(f.makespan), "span": units(f.span),
                    "bubble_fraction": f.bubble, "peak": f.peak,
                    "copies": f.copies, "link_use": f.link_use, "bound": units(f.bound),
                }),
                Err(error) => serde_json::json!({ "schedule": method.name(), "refused": error.to_string() }),
            })
            .collect();
        super::print(&format!("{}\n", serde_json::json!({ "fastest": best, "rows": rows })))
    }
}

/// Returns a timeline as a drawing or a trace, or else the text for a terminal.
fn drawn(format: Format, timeline: &Timeline, text: impl FnOnce() -> String) -> String {
    match format {
        Format::Svg => render::svg(timeline),
        Format::Trace => render::trace(timeline),
        _ => text(),
    }
}

/// Returns the numbers separated by spaces.
fn list(bytes: &[Bytes]) -> String {
    bytes.iter().map(|bytes| bytes.0.to_string()).collect::<Vec<_>>().join(" ")
}

fn units(time: Nanos) -> f64 {
    time.0 as f64 / UNIT as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_exact_decimals() {
        assert_eq!(time("1"), Ok(Nanos(UNIT)));
        assert_eq!(time("0.5"), Ok(Nanos(UNIT / 2)));
        assert_eq!(time(".000001"), Ok(Nanos(1)));
        assert_eq!(time("12.").map(millis), Ok("12".to_owned()));
        for bad in ["", ".", "-1", "1e3", "1.0000001", "1000000", "99999999999999999999", "1 ", "+1", "1_0"] {
            assert!(time(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn costs_are_four_numbers_once_or_for_each_stage() {
        let Costs(one) = costs("1,2,3,.5").unwrap();
        assert_eq!(
            (one[0].0.forward, one[0].0.backward(), one[0].1),
            (Nanos(UNIT), Nanos(5 * UNIT), Nanos(UNIT / 2))
        );
        assert_eq!(costs("1,1,1,0:2,2,2,0").unwrap().0.len(), 2);
        for bad in ["", "1,1,1", "1,1,1,0,0", "1,1,1,0:", "a,b,c,d"] {
            assert!(costs(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn what_a_schedule_does_not_admit_is_a_usage_error() {
        let error = Method::Interleaved.order(&Settings::new(4, 6)).map_err(Error::schedule).unwrap_err();
        assert_eq!(error.exit_code(), 2);
        assert!(error.to_string().contains("`microbatches` is 6"), "{error}");
        let error = "gpip".parse::<Method>().map_err(Error::schedule).unwrap_err();
        assert!(error.exit_code() == 2 && error.to_string().contains("gpipe"), "{error}");
    }
}
