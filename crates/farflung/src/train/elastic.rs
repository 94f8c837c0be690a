//! Runs whose members come and leave: who they are is decided by [`farflung_parallel::membership`], and every
//! change is a resume in memory. The step in flight is dropped, the members of the new view tell each other
//! how far they are, the plan is made for them, and whoever has no state or an older one takes it from those
//! that are furthest.

mod arrivals;
mod balance;
mod change;
mod copies;
mod decide;
mod fetch;
mod fetching;
mod idle;
mod keeper;
mod kept;
mod measure;
mod meet;
mod pieces;
mod pipelines;
mod place;
mod pools;
mod ready;
mod repeats;
mod run;
mod saved;
mod seats;
mod share;
mod shelf;
mod spare;
mod status;
mod team;
mod view;
mod watchman;
mod welcome;

pub use arrivals::{Arrivals, AtGate, Newcomer, Scripted};
pub use change::Changed;
pub use meet::{founder, host, join, status};
pub use place::Place;
pub(super) use run::work;
pub use seats::seats;
pub use status::{MemberStatus, Status};
