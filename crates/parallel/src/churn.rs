//! Training while machines are lost and come back: how often to save, how many copies to hold, and what each
//! published way of going on gets done under one trace of preemptions.
//!
//! Pure functions: traces are data, or drawn from a seed. Machines are all alike here ([`Fleet`]); a plan for
//! unlike machines takes the slowest of each.

mod copies;
mod fleet;
mod interval;
mod oobleck;
mod parcae;
mod policy;
mod recycle;
mod replay;
mod restart;
mod trace;
mod varuna;

pub use copies::{alive, copies_for};
pub use fleet::{Fleet, Prices, Shape};
pub use interval::{Checkpoints, Lost, daly, young};
pub use oobleck::{Mix, Pace, best_mix, mixes, shares, templates};
pub use parcae::{liveput, survivors};
pub use policy::{POLICIES, Recovery, Row, Saves};
pub use recycle::{Rerouted, Seat, reroute};
pub use replay::{Replay, replay};
pub use trace::{Change, Trace};
pub use varuna::best_shape;
