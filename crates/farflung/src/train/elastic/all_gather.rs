//! A value of each member, sent to all members.

use farflung_comm::Communicator;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::{Error, Result};

/// Sends a value to all members, and returns the values of all, by rank.
pub(super) fn all_gather<T: Serialize + DeserializeOwned>(all: &Communicator, mine: &T) -> Result<Vec<T>> {
    let bytes = postcard::to_stdvec(mine).expect("numbers and texts are plain data");
    let told = all.all_gather_bytes(bytes)?;
    told.iter().map(|bytes| postcard::from_bytes(bytes).map_err(|_| unreadable())).collect()
}

fn unreadable() -> Error {
    Error::Message { message: "the state of a member".to_owned(), problem: "cannot be parsed" }
}
