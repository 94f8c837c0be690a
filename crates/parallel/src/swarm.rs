//! Stages served by pools of peers that join and leave, as in SWARM and Petals: which peer gets the next task,
//! and which peer moves to another stage. The functions do not read a clock: time and seed are arguments.

mod petals;
mod rebalance;
mod simulate;
mod square_cube;
mod wiring;

pub use petals::{ServerRate, best_start, should_rebalance};
pub use rebalance::{Migration, QueuedPeer, bound, optimum, rebalance};
pub use simulate::{Churn, Goodput, SwarmRun, simulate_swarm};
pub use square_cube::{SquareCube, Utilisation};
pub use wiring::{PeerRate, Wiring};
