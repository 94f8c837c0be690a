//! Pipeline schedules: which rank runs which computations in which order. A schedule is data that can be
//! checked, simulated, drawn and executed.
//!
//! [`Method`] generates a [`ComputeOrder`] for given sizes; an order can also be written by hand.
//! [`simulate()`] predicts the times of an order. Nothing here depends on tensors, threads or sockets.

mod action;
mod arrival_rule;
mod arrivals;
mod bound;
mod cell_progress;
mod compare;
mod cost;
mod csv;
mod lower;
mod lowered;
mod memory;
mod method;
mod order;
mod placement;
mod pools;
mod recompute;
mod resumed;
pub(crate) mod routed;
mod run;
mod schedule;
mod simulate;
mod step;
mod updates;

pub use action::{Action, ComputeKind, Op};
pub(crate) use action::{microbatch, split};
pub use arrival_rule::ArrivalRule;
pub use arrivals::{ArrivalExecutor, PollArrivals};
pub use bound::lower_bound;
pub use cell_progress::CellProgress;
pub use compare::{Comparison, ComparisonRow, ComparisonTable, ScheduleStats, json, millis};
pub use cost::{Boundary, PipelineCost, SliceShare, StageCost, StageMemory};
pub use lower::Lowering;
pub use lowered::{Content, Lowered, LoweredKind, Message, TransferDirection};
pub use memory::{peak_bytes, peaks};
pub use method::{BackwardOrder, Method, Settings, Slicing, slice_tokens, slope};
pub use order::ComputeOrder;
pub use placement::{Placement, TiedWeights};
pub use pools::{Pools, PoolsFault};
pub use resumed::{KeptCell, ResumedStep};
pub use run::{Executor, Progress, Worker, run};
pub use schedule::Schedule;
pub use simulate::{Simulation, Slot, simulate};
pub use step::{CollectiveTimes, Reduction, StepSimulation};
pub use updates::{Updates, VersionSync};
