//! Training of runs that machines join and leave while they train. The members are decided by
//! [`farflung_parallel::membership`]. Each change of members is a resume in memory: the step in flight is
//! dropped, the members of the new view send each other the number of steps that they have done, a plan is made
//! for them, and a member without the state, or with an older one, fetches it from the members that have done
//! the most steps.

mod held;
mod pool_speeds;
mod stoppable;
mod teller;
mod arrivals;
mod balance;
mod change;
mod copies;
mod decide;
mod fetch;
mod fetching;
mod follow;
mod idle;
mod keeper;
mod kept;
mod lent;
mod logging;
mod measure;
mod meet;
mod offers;
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
mod step_log;
mod team;
mod tell_all;
mod view;
mod waiting;
mod watchman;
mod welcome;

pub use arrivals::{Arrivals, AtGate, Newcomer, Scripted};
pub use change::Changed;
pub use meet::{founder, host, join, status};
pub use place::Place;
pub(super) use run::work;
pub use seats::seats;
pub use status::{MemberStatus, Status};
