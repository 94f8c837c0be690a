//! Who belongs to a run, decided without a machine that may not die.
//!
//! A [`View`] is the list of members from one epoch to the next. The next epoch's view is decided by
//! single-decree Paxos among the members of the old one, so that an epoch has one view wherever the network
//! is cut. Everything is one pure function, [`step`]: state, event and time in, state and actions out. The
//! trainer, the simulator and a replayed recording run the same code.
//!
//! Source: Lamport 2001, "Paxos made simple". Differs: a view names a tie-breaker that counts one and a half,
//! so that of two even halves one goes on; removals and admissions are never in one view.
//!
//! It does not know: sockets, clocks, files, randomness, and what a member computes.

mod acceptor;
pub mod check;
mod event;
mod member;
mod message;
mod patience;
mod proposal;
mod retry;
mod state;
mod step;
mod suspicion;
mod view;

#[cfg(test)]
mod tests;

pub use acceptor::{Accepted, Ballot, Kept};
pub use event::{Action, Event, Reason};
pub use member::{Member, MemberId};
pub use message::Message;
pub use patience::Patience;
pub use state::{Settings, State};
pub use step::step;
pub use view::{Place, Start, View, ViewFault};
