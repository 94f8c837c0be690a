//! An exchange of the gradients of the two parts that share the token table.

use farflung_base::Pending;
use farflung_comm::CommError;

use crate::{Error, Result};

/// An exchange of both parts' gradients that has been started.
#[derive(Debug)]
pub(super) struct Exchange {
    pub(super) mine: Vec<f32>,
    pub(super) theirs: Pending<Result<Vec<u8>, CommError>>,
    pub(super) sent: Vec<Pending<Result<(), CommError>>>,
}

impl Exchange {
    /// Returns the sum, which has the same bits on both sides.
    pub(super) fn wait(self) -> Result<Vec<f32>> {
        let Self { mine: mut sum, theirs, sent } = self;
        let bytes = theirs.wait()?;
        let (theirs, rest) = bytes.as_chunks::<{ size_of::<f32>() }>();
        if theirs.len() != sum.len() || !rest.is_empty() {
            let message = "the token table's gradient".to_owned();
            return Err(Error::Message { message, problem: "does not have the length of the table" });
        }
        sum.iter_mut().zip(theirs).for_each(|(sum, &theirs)| *sum += f32::from_le_bytes(theirs));
        sent.into_iter().try_for_each(Pending::wait)?;
        Ok(sum)
    }
}
