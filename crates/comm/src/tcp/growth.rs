//! Processes that come later: they ask at a store, and the job lets them in when it is ready. All meet anew
//! then, so that there are sockets between everyone. It knows no collective but the vote on what came of it.

use std::net::TcpListener;
use std::time::Duration;

use super::{Config, Store, join};
use crate::secure::Security;
use crate::{CommError, Communicator};

/// Numbers in the store: processes that have asked, that were answered, and the epoch.
const ASKED: &str = "farflung/asked";
const ANSWERED: &str = "farflung/answered";
const EPOCH: &str = "farflung/epoch";

/// Epoch, world size, the master's address, and for whoever asked its rank.
type Place = (i64, u32, String, u32);

fn answer_to(ticket: i64) -> String {
    format!("farflung/answer/{ticket}")
}

fn place(place: Place, job: &str, security: &Security, deadline: Duration) -> Config {
    let (epoch, world_size, master, rank) = place;
    let mut config = Config::new(rank, world_size, master);
    config.security = security.clone();
    config.job = format!("{job}#{epoch}");
    config.deadline = deadline;
    config
}

/// A process that is no member asks at the store of `job` to become one, and is one of the next epoch then.
///
/// # Errors
/// [`CommError::Absent`] if it was not let in within the store's deadline; what kept the members of the new
/// epoch from meeting within `deadline`.
pub fn ask_in(
    store: &Store,
    job: &str,
    security: &Security,
    deadline: Duration,
) -> Result<Communicator, CommError> {
    let ticket = store.add(ASKED, 1)?;
    let answers = store.wait(&[&answer_to(ticket)])?;
    let found: Place = postcard::from_bytes(&answers[0])
        .map_err(|_| CommError::Denied { op: "ask_in", key: answer_to(ticket) })?;
    let comm =
        Communicator::new(join(&place(found, job, security, deadline))?).with_deadline(deadline.into());
    comm.barrier()?;
    Ok(comm)
}

/// Lets in whoever has asked since the last time: the ranks of `comm`, and behind them the newcomers, over
/// sockets of their own; none where nobody has asked. A collective of `comm`, which stays good if it fails
/// because a newcomer is lost on the way. Only rank 0 looks into its `store`.
///
/// # Errors
/// What kept the members of the new epoch from meeting within `deadline`, on every rank.
pub fn let_in(
    comm: &Communicator,
    store: Option<&Store>,
    job: &str,
    security: &Security,
    deadline: Duration,
) -> Result<Option<Communicator>, CommError> {
    let news = match (comm.rank().0, store) {
        (0, Some(store)) => invite(comm.size() as u32, store),
        (0, None) => Err(CommError::Argument { op: "let_in", what: "stores of rank 0", got: 0, want: 1 }),
        _ => Ok(None),
    };
    // The others are told also of what went wrong.
    let told = postcard::to_stdvec(&news.as_ref().ok()).expect("numbers and texts are plain data");
    let told = comm.all_gather_bytes(told)?;
    news?;
    let malformed = CommError::Denied { op: "let_in", key: EPOCH.to_owned() };
    let told: Option<Option<Place>> = postcard::from_bytes(&told[0]).map_err(|_| malformed.clone())?;
    let Some((epoch, size, master, _)) = told.ok_or(malformed)? else { return Ok(None) };
    let config = place((epoch, size, master, comm.rank().0), job, security, deadline);
    comm.settle(join(&config).map(|tcp| Communicator::new(tcp).with_deadline(deadline.into()))).map(Some)
}

/// Answers all that have asked.
fn invite(size: u32, store: &Store) -> Result<Option<Place>, CommError> {
    let (asked, answered) = (store.add(ASKED, 0)?, store.add(ANSWERED, 0)?);
    // Not more at a time than there are already.
    let new = u32::try_from(asked - answered).unwrap_or(0).min(size);
    if new == 0 {
        return Ok(None);
    }
    let epoch = store.add(EPOCH, 1)?;
    let at = store.local_address()?.ip();
    let free = TcpListener::bind((at, 0)).and_then(|listener| listener.local_addr());
    let master = free.map_err(|e| CommError::io("listen at", &at, &e))?.to_string();
    let world_size = size + new;
    for i in 0..new {
        let found: Place = (epoch, world_size, master.clone(), size + i);
        let bytes = postcard::to_stdvec(&found).expect("numbers and texts are plain data");
        store.put(&answer_to(answered + 1 + i64::from(i)), &bytes)?;
    }
    store.add(ANSWERED, new.into())?;
    Ok(Some((epoch, world_size, master, 0)))
}
