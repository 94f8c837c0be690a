//! Training of runs that machines join and leave while they train. The members are decided by
//! [`farflung_parallel::membership`]. Each change of members is a resume in memory: the step in flight is
//! dropped, the members of the new view send each other the number of steps that they have done, a plan is made
//! for them, and a member without the state, or with an older one, fetches it from the members that have done
//! the most steps.

mod held_tensors;
mod pool_speeds;
mod stoppable;
mod status_publisher;
mod arrivals;
mod balance;
mod broken_round;
mod carry_out;
mod change;
mod changed;
mod copies;
mod decide;
mod fetch;
mod fetching;
mod follow;
mod followed;
mod followed_parts;
mod form_team;
mod former_members;
mod former_runs;
mod idle;
mod membership_service;
mod addresses;
mod layers;
mod leaving;
mod step_records;
mod local_rounds;
mod logging;
mod lost_sequences;
mod measure;
mod meet;
mod member_names;
mod offers;
mod pieces;
mod pipelines;
mod place;
mod pools;
mod rank_speeds;
mod ready;
mod repeats;
mod round_trips;
mod promises;
mod run;
mod run_id;
mod saved;
mod shares;
mod connections;
mod state_transfer;
mod blobs;
mod spare;
mod status;
mod step_log;
mod team;
mod all_gather;
mod view;
mod waiting;
mod waits;
mod watchdog;
mod newcomer_info;
mod nonsense;
mod notice_time;

pub use arrivals::{Arrivals, AtGate, Newcomer, Scripted};
pub use changed::Changed;
pub use connections::connections;
pub use former_runs::{FormerRun, former_folders};
pub use meet::{founder, host, join, status};
pub use member_names::{MemberNames, called};
pub use place::Place;
pub(super) use promises::run_of;
pub(super) use run::work;
pub use status::{MemberStatus, Status};
