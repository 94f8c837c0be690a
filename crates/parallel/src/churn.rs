//! Training while machines fail and come back: how often to save a checkpoint, how many copies of each stage to
//! keep, and how many steps each published recovery policy completes under the same trace of preemptions.
//!
//! Everything here is a pure function. Traces are data, or drawn from a seed. All machines are assumed equal
//! ([`Fleet`]); for unequal machines, describe the slowest.

mod best_shape;
mod copies;
mod fleet;
mod interval;
mod oobleck;
mod parcae;
mod policies;
mod policy;
mod recorded;
mod recycle;
mod replay;
mod restart;
mod trace;
mod varuna;

pub use best_shape::best_shape;
pub use copies::{alive, copies_for};
pub use fleet::{Fleet, Shape, StepTimes};
pub use interval::{CheckpointedJob, TimeFractions, daly, young};
pub use oobleck::{Mix, PipelineTimes, best_mix, mixes, shares, templates};
pub use parcae::{liveput, survivors};
pub use policies::POLICIES;
pub use policy::{CheckpointInterval, PolicyRow, Recovery};
pub use recorded::{RECORDED, recorded};
pub use recycle::{Position, Rerouted, reroute};
pub use replay::{Replay, replay};
pub use trace::{Change, Trace};
