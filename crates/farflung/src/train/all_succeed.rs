//! Work that every rank does by itself and that is valid only if it succeeded on all ranks.

use farflung_comm::Communicator;

use crate::events::causes;
use crate::{Error, Result};

/// Longest message about another rank's failure that is shown, in bytes.
const MESSAGE_LIMIT: usize = 2000;

/// Returns this rank's result once all ranks have succeeded. A collective, which ranks that failed must also
/// call.
///
/// Errors: this rank's own error; else [`Error::OnRank`], or [`Error::NoRoomOn`], with the message and exit
/// code of the first rank that failed.
pub(super) fn all_succeed<T>(comm: &Communicator, mine: Result<T>) -> Result<T> {
    let told = match &mine {
        Ok(_) => Vec::new(),
        Err(error) => {
            let text = causes(error);
            [&[error.exit_code(), u8::from(error.is_no_room())], text.as_bytes()].concat()
        }
    };
    let all = match comm.all_gather_bytes(told) {
        Ok(all) => all,
        // The others may have ended already; then this rank's own error is more useful.
        Err(lost) => return mine.and_then(|_| Err(lost.into())),
    };
    let mine = mine?;
    let failed = all.iter().enumerate().find_map(|(rank, told)| Some((rank, told.split_first()?)));
    match failed {
        None => Ok(mine),
        Some((rank, (&code, rest))) => {
            let (&is_no_room, text) = rest.split_first().unwrap_or((&0, &[]));
            let text = &text[..text.len().min(MESSAGE_LIMIT)];
            let message = String::from_utf8_lossy(text).into_owned();
            // A failure must not have exit code 0, even if the peer sent 0.
            let code = code.max(1);
            Err(match is_no_room {
                1 => Error::NoRoomOn { rank, message, code },
                _ => Error::OnRank { rank, message, code },
            })
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
            all_succeed(&comm, if comm.rank().0 == 1 { Err(wrong) } else { Ok(comm.rank().0) })
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
