//! Randomised tests of the membership rules: machines on a simulated network that loses, duplicates and delays
//! messages.
//!
//! [`faults`] injects random faults, then repairs the network and checks that the run continues. [`churn`]
//! simulates a day in which machines join and leave. Both call only [`step`](super::step), in virtual time, and
//! their results depend only on their settings, which contain the seed.

mod churn;
mod draw;
mod faults;
mod flaw;
mod history;
mod incarnations;
mod world;

pub use churn::{Churn, ChurnOutcome, Stay, churn};
pub use faults::{Faults, FaultsOutcome, faults};
pub use flaw::Flaw;
pub use history::Breach;
