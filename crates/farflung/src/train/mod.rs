//! Training: binds a config to models, communicators, codecs and optimizer chains, one [`Worker`] a rank, or one
//! [`Pipelined`] where ranks share a model. The only place where all the crates meet.
//!
//! A run over real links and a run over simulated ones are the same code: the transport is the only difference.

mod checkpoint;
mod job;
mod links;
mod repeat;
mod report;
mod resync;
mod run;
mod sizes;
mod stages;
mod sync;
mod worker;

pub use job::Job;
pub use links::{Seat, seats};
pub use report::{Report, SampleText, planned_codec};
pub use resync::Drift;
pub use run::{Quiet, Watch, run, run_job};
pub use sizes::{TooLarge, needed_memory};
pub use stages::{PipelinePlan, Pipelined, read_schedule, refusal};
pub use sync::Synced;
pub use worker::{StepDone, Worker};
