//! Trials of the rules: machines on a simulated network that loses, doubles and delays messages.
//!
//! [`faults`] lets everything go wrong at random, heals the network, and looks whether the run goes on;
//! [`churn`] lets machines come and go for a day. Both call nothing but [`step`](super::step), in virtual
//! time, and are a pure function of a seed.

mod churn;
mod draw;
mod faults;
mod flaw;
mod history;
mod world;

pub use churn::{Churn, ChurnOutcome, Stay, churn};
pub use faults::{Faults, FaultsOutcome, faults};
pub use flaw::Flaw;
pub use history::Breach;
