//! The web page of a run, `farflung watch RUN`: reads the files in a run's folder as they grow and shows them
//! in a browser. It does not change the run, which need not be running.
//!
//! [`Folder`] reads new lines of a run's folder, [`State`] takes the lines and returns a [`Snapshot`], and
//! [`serve`] shows the newest snapshot over HTTP. The files' content is not trusted: lines of the wrong form
//! are counted, memory is bounded, and the page inserts texts as text, not as HTML.

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
