//! Training: one [`Plan`](farflung_parallel::Plan) decides how ranks train, and one [`Trainer`] a rank carries
//! it out. The only place where all the crates meet.
//!
//! A run over real links and a run over simulated ones are the same code: the transport is the only difference.

mod activations;
pub mod auto;
mod averages;
mod bind;
mod blame;
mod boundary;
mod chain;
mod checkpoint;
mod claim;
pub mod combination;
mod costs;
mod deadline;
pub mod elastic;
mod executor;
mod fault;
mod fingerprint;
mod finished;
mod fit;
mod fleet;
mod hearing;
mod job;
mod links;
mod meet;
mod memory;
mod part;
mod parting;
mod planned;
mod prediction;
mod prices;
mod repeat;
mod report;
mod resync;
mod run;
mod sizes;
mod spent;
mod steps;
mod tied;
mod together;
mod trainer;
pub mod tune;

pub use bind::ReplicaSchedule;
pub use chain::{PipelineSizes, chain, pipeline_plan};
pub use costs::Machines;
pub use fault::{Departure, Failure, Fault, FaultyValue, Moment};
pub use fit::{Fit, fit};
pub use fleet::fleet;
pub use job::{Job, plan_of};
pub use links::file::{DeclaredLinks, LINKS};
pub use links::{Seat, join, read_topology, seats};
pub(crate) use meet::Ranks;
pub use meet::{RankValue, same_plan};
pub use memory::{StepMemory, planned_memory, step_memory};
pub use parting::Leftover;
pub use planned::{planned_model, read as read_plan, read_schedule, refusal};
pub use prediction::Prediction;
pub use prices::{AveragePrices, planned_codec};
pub use report::{DataSource, PlainAllReduce, Report, SampleText};
pub use resync::Drift;
pub use run::{Quiet, Watch, run, run_job, run_seats, world};
pub use sizes::{TooLarge, machine_memory, needed_memory};
pub use spent::Spent;
pub use trainer::{StepDone, Synced, Thoroughness, Trainer};
