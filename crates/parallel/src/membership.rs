//! Membership: decides which machines belong to a run. No single machine is required to survive.
//!
//! A [`View`] is the list of members during one epoch. The members of a view decide the next view by
//! single-decree Paxos, so that no epoch has two views even if the network is partitioned. All of it is one
//! pure function, [`step`]: it takes state, event and time, and returns the new state and actions. The trainer
//! and the simulations in [`check`] run this function.
//!
//! Source: Lamport 2001, "Paxos made simple". Differs: each view names a tie-breaker, a member whose vote
//! counts one and a half, so that one of two equal halves can continue. One view never both removes and admits
//! members.
//!
//! In the trainer, a member that restarts joins as a newcomer, and a host that restarts asks the former members
//! at their gates before it has a view ([`State::again`] is for programs whose former members can be reached as
//! peers).
//!
//! The module does not depend on sockets, clocks, files, random numbers, or on what a member computes.

mod acceptor;
pub mod check;
mod event;
mod member;
mod message;
mod adaptive_timeout;
mod proposal;
mod retry;
mod settings;
mod state;
mod step;
mod suspicion;
mod view;

#[cfg(test)]
mod tests;

pub use acceptor::{Accepted, Ballot, DurableState};
pub use adaptive_timeout::AdaptiveTimeout;
pub use event::{Action, Event, Reason};
pub use member::{Member, MemberId};
pub use message::Message;
pub use settings::Settings;
pub use state::State;
pub use step::step;
pub use view::{Start, View, ViewFault, ViewId};
