//! The page of a run, `farflung watch RUN`: what a run's folder tells, read as it grows and shown in a
//! browser. It changes nothing of the run and does not need it to be alive.
//!
//! [`State`] is fed with lines and gives a [`Snapshot`]; [`Folder`] reads the lines of a run's folder by
//! where it stopped; [`serve`] shows the newest snapshot over HTTP. Numbers and texts of files are not
//! trusted: lines that are not what belongs there are counted, memory is bounded, and the page takes texts as
//! texts.

pub mod curve;
mod event_text;
mod folder;
mod guard;
mod server;
pub mod snapshot;
mod state;
mod tail;
mod timeline;
mod who;

pub use curve::MOST_POINTS;
pub use folder::Folder;
pub use server::{Ask, serve};
pub use snapshot::{Snapshot, Summary};
pub use state::{Document, Lines, MOST_EVENTS, State};
pub use tail::{LONGEST_LINE, News, Tail};
pub use timeline::MOST_STEPS;
pub use who::MOST_MEMBERS;
