//! Admitting the ranks that connect to this one, and refusing other connections.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use farflung_base::Rank;

use super::Config;
use super::progress::{Absence, of_absent};
use crate::control::Control;
use crate::deadline::Deadline;
use crate::error::Refusal;
use crate::tcp::acceptor::{Acceptor, AuthenticatedConnection};
use crate::tcp::listeners::Listeners;
use crate::tcp::stream::Stream;
use crate::wire::{self, Message, Parsed};

/// Time between two checks for new connections.
const PAUSE: Duration = Duration::from_millis(2);

/// Admits all ranks above this one and refuses other connections. Sends each a welcome, unless the caller
/// answers with a table. If the deadline passes or `given_up` is set, the error lists the ranks that have not
/// connected.
pub(super) fn admit(
    config: &Config,
    listeners: &Listeners,
    until: Deadline,
    (given_up, welcomes): (&AtomicBool, bool),
    streams: &mut [Option<Stream>],
    mut note: impl FnMut(usize, String),
) -> Result<(), Absence> {
    let me = config.rank as usize;
    let mut door = Acceptor::new(config.security.clone());
    let mut refused_ranks: BTreeMap<Rank, String> = BTreeMap::new();
    loop {
        let absent: Vec<Rank> =
            (me + 1..streams.len()).filter(|&r| streams[r].is_none()).map(|r| Rank(r as u32)).collect();
        if absent.is_empty() {
            return Ok(());
        }
        if until.remaining().is_none() || given_up.load(Ordering::Relaxed) {
            let refused = config.security.refused();
            return Err(of_absent(absent, streams, &refused_ranks, refused, &door.waiting()));
        }
        let mut moved = false;
        for AuthenticatedConnection { stream, greeting } in door.listen(listeners) {
            let Ok(Parsed::Whole(Message::Control(greeting), _)) = wire::parse(&greeting) else { continue };
            match check(config, &greeting, &stream, streams) {
                Err(refusal) => {
                    if let Control::Hello { rank, .. } = greeting
                        && (rank as usize) < streams.len()
                    {
                        let from = stream.address().map_or_else(String::new, |at| format!(" from {at}"));
                        let reason = format!("connected{from} and was refused: {refusal}");
                        refused_ranks.insert(Rank(rank), reason);
                    }
                    door.refuse(&stream, refusal);
                }
                Ok((rank, listen)) => {
                    let ready = stream.socket.set_nonblocking(false).is_ok()
                        && (!welcomes || stream.send_message(&Control::Welcome(config.rank)).is_ok());
                    if ready {
                        moved = true;
                        streams[rank] = Some(stream);
                        note(rank, listen);
                    }
                }
            }
        }
        if !moved {
            std::thread::sleep(PAUSE);
        }
    }
}

/// Checks a hello. Returns the rank that sent it and the address at which that rank listens.
fn check(
    config: &Config,
    hello: &Control<'_>,
    stream: &Stream,
    streams: &[Option<Stream>],
) -> Result<(usize, String), Refusal> {
    let &Control::Hello { rank, world_size, job, listen, key, .. } = hello else {
        return Err(Refusal::Job);
    };
    if job != config.job {
        return Err(Refusal::Job);
    }
    if world_size != config.world_size {
        return Err(Refusal::WorldSize { want: config.world_size, got: world_size });
    }
    // The key in the hello must be the one that the peer has proven, and the one that the host has listed for
    // the peer's rank.
    let proven = stream.peer_key();
    let known = config.security.member(rank as usize);
    if proven.is_some_and(|proven| key != proven.bytes() || known.is_some_and(|known| known != proven)) {
        return Err(Refusal::Key);
    }
    match streams.get(rank as usize) {
        None => Err(Refusal::Rank(rank)),
        // A rank that connects again replaces its earlier connection, if that is closed.
        Some(before) if rank > config.rank && before.as_ref().is_none_or(is_gone) => {
            Ok((rank as usize, listen.to_owned()))
        }
        Some(_) => Err(Refusal::Taken(rank)),
    }
}

/// Returns whether the other side has closed the connection. Nothing else may read from it at this time.
fn is_gone(stream: &Stream) -> bool {
    let stream = &stream.socket;
    if stream.set_nonblocking(true).is_err() {
        return true;
    }
    let gone = match stream.peek(&mut [0]) {
        Ok(read) => read == 0,
        Err(error) => error.kind() != ErrorKind::WouldBlock,
    };
    gone || stream.set_nonblocking(false).is_err()
}
