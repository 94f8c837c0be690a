//! Work that every rank does for itself and that counts only if it succeeded on all of them.

use farflung_comm::Communicator;

use crate::events::causes;
use crate::{Error, Result};

/// The longest message about another rank's failure that is shown, in bytes.
const MESSAGE_LIMIT: usize = 2000;

/// Gives this rank's result once all ranks have succeeded. A collective, also for those that failed.
///
/// Errors: this rank's own; else [`Error::OnRank`] with what the first rank that failed says, and its exit
/// code.
pub(super) fn together<T>(comm: &Communicator, mine: Result<T>) -> Result<T> {
    let told = match &mine {
        Ok(_) => Vec::new(),
        Err(error) => {
            let text = causes(error);
            [&[error.exit_code()], text.as_bytes()].concat()
        }
    };
    let all = match comm.all_gather_bytes(told) {
        Ok(all) => all,
        // The others may have ended already; this rank's own failure says more.
        Err(lost) => return mine.and_then(|_| Err(lost.into())),
    };
    let mine = mine?;
    let failed = all.iter().enumerate().find_map(|(rank, told)| Some((rank, told.split_first()?)));
    match failed {
        None => Ok(mine),
        Some((rank, (&code, text))) => {
            let text = &text[..text.len().min(MESSAGE_LIMIT)];
            let message = String::from_utf8_lossy(text).into_owned();
            // A failure is no success, whatever the peer says.
            Err(Error::OnRank { rank, message, code: code.max(1) })
        }
    }
}

#[cfg(test)]
mod tests {
    use farflung_comm::memory;

    use super::*;

    #[test]
    fn all_ranks_hear_why_one_failed() {
        let work = |endpoint| {
            let comm = Communicator::new(endpoint);
            let wrong = Error::Setting { field: "stages", value: "2".to_owned(), expected: "3".to_owned() };
            together(&comm, if comm.rank().0 == 1 { Err(wrong) } else { Ok(comm.rank().0) })
        };
        let said: Vec<_> = std::thread::scope(|scope| {
            let ranks: Vec<_> =
                memory::cluster(3).into_iter().map(|endpoint| scope.spawn(move || work(endpoint))).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        for (rank, said) in said.into_iter().enumerate() {
            let error = said.unwrap_err();
            assert_eq!(error.exit_code(), 2);
            let message = error.to_string();
            let own = "`stages` is 2, expected 3";
            assert_eq!(message, if rank == 1 { own.to_owned() } else { format!("rank 1 failed: {own}") });
        }
    }
}
