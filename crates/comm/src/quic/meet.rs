//! Rendezvous over QUIC: all ranks connect to rank 0 by its key, and get a table of addresses and keys; then
//! they connect pairwise. All steps have deadlines. A connection that does not belong to the job is refused
//! with the reason. The messages are the same as over TCP.

use std::net::SocketAddr;
use std::time::Duration;

use ::iroh::endpoint::Connection;
use ::iroh::{Endpoint, EndpointAddr};
use farflung_base::Rank;

use super::Config;
use super::acceptor::{Acceptor, AuthenticatedConnection};
use super::address::{PeerAddresses, relay};
use super::greet::greet;
use super::handshake_stream::{HandshakeStream, control};
use super::socket::{SocketOptions, own_addresses};
use crate::CommError;
use crate::control::{BoundedVec, Control};
use crate::deadline::Deadline;
use crate::error::Refusal;
use crate::second_network::unspecified;
use crate::secure::{Admission, JoinSecret, PublicKey, Role, Security, refused};

/// Pause between two attempts to reach a peer.
const PAUSE: Duration = Duration::from_millis(50);

/// Connections to all peers by rank; `None` for this process itself.
type Connections = Vec<Option<Connection>>;

/// Checks settings; returns an error if they are wrong, or if ranks could not meet with them.
///
/// # Errors
/// The same as for [`join`](super::join).
pub(super) fn check(config: &Config) -> Result<(), CommError> {
    config.pace.check()?;
    let argument = |what, got, want| Err(CommError::Argument { op: "rendezvous", what, got, want });
    if config.rank >= config.world_size {
        return argument(
            "rank (must be below the world size)",
            config.rank as usize,
            config.world_size as usize,
        );
    }
    if config.job.len() > 64 {
        return argument("length of the job id in bytes (maximum)", config.job.len(), 64);
    }
    let patience = config.patience.as_secs() as usize;
    if !(1..=30).contains(&patience) {
        return argument("patience in seconds (from 1 to the maximum)", patience, 30);
    }
    let unsealed = |reason: &str| {
        Err(CommError::NoEncryptedConnection { peer: "rank 0".to_owned(), reason: reason.to_owned() })
    };
    if config.world_size > 1 && config.security.identity().is_none() {
        return unsealed("QUIC identifies peers by their keys, so all ranks need a ticket of rank 0");
    }
    if config.rank > 0 && config.security.host() == config.security.own_key() && config.world_size > 1 {
        return Err(CommError::Refused { peer: "rank 0".to_owned(), reason: Refusal::SameKey });
    }
    if config.rank > 0 && config.security.host().is_none() {
        return unsealed("it is reached by its key, which a ticket contains and a secret alone does not");
    }
    Ok(())
}

/// Returns the places at which rank 0 is reached, with the relays of this process added.
fn places(config: &Config) -> Result<PeerAddresses, CommError> {
    let mut places = PeerAddresses::resolve(&config.host)?;
    for one in &config.relays {
        let url = relay(one)?;
        if !places.relays.contains(&url) {
            places.relays.push(url);
        }
    }
    Ok(places)
}

/// Returns the address at which this process listens; `None` for any port on all addresses.
fn listening(config: &Config, places: &PeerAddresses) -> Option<SocketAddr> {
    if config.listen.is_some() {
        return config.listen;
    }
    let first = places.sockets.first()?;
    let port = if config.rank == 0 { first.port() } else { 0 };
    let ip = first.ip();
    Some(SocketAddr::new(if ip.is_loopback() { ip } else { unspecified(ip) }, port))
}

/// Returns how this process's socket is opened.
///
/// # Errors
/// If the URL of a relay is wrong, or no address can be resolved.
pub(super) fn opening(config: &Config) -> Result<SocketOptions, CommError> {
    let places = places(config)?;
    Ok(SocketOptions {
        security: config.security.clone(),
        listen: listening(config, &places),
        advertise: Vec::new(),
        relays: places.relays,
        direct: config.direct,
        patience: config.patience,
        deadline: config.deadline,
    })
}

/// Connects to all peers.
pub(super) async fn meet(config: &Config, endpoint: &Endpoint) -> Result<Connections, CommError> {
    let until = Deadline::after(config.deadline);
    match config.rank {
        _ if config.world_size == 1 => Ok(vec![None]),
        0 => host(config, endpoint, until).await,
        _ => visit(config, endpoint, until).await,
    }
}

fn missing(config: &Config, ranks: Vec<Rank>) -> CommError {
    CommError::Missing { master: config.host.clone(), ranks, after: config.deadline.into() }
}

/// A rank that has connected, and the addresses at which it listens.
struct JoinedRank {
    line: HandshakeStream,
    listen: String,
}

/// Accepts all ranks above this one. After this side's proof, each is sent `answer`, if there is one. Returns
/// the ranks that have connected, and those that are missing at the deadline.
async fn admit(
    config: &Config,
    security: &Security,
    door: &mut Acceptor,
    until: Deadline,
    answer: Option<Control<'_>>,
) -> (Vec<Option<JoinedRank>>, Vec<Rank>) {
    let (me, size) = (config.rank as usize, config.world_size as usize);
    let mut come: Vec<Option<JoinedRank>> = (0..size).map(|_| None).collect();
    loop {
        let absent: Vec<Rank> =
            (me + 1..size).filter(|&r| come[r].is_none()).map(|r| Rank(r as u32)).collect();
        let left = until.remaining().filter(|_| !absent.is_empty());
        let Some(left) = left else { return (come, absent) };
        let Ok(Some(mut guest)) = tokio::time::timeout(left, door.next()).await else {
            return (come, absent);
        };
        match greeted(config, security, &guest, &come) {
            Err(refusal) => guest.refuse(security, refusal),
            Ok((rank, listen)) => {
                let proven = guest.line.prove(security, Role::Server, Some(guest.expiry)).await;
                let said = match (&proven, &answer) {
                    (Ok(()), Some(answer)) => guest.line.send_message(answer).await,
                    _ => Ok(()),
                };
                // If the connection is lost, the rank may connect again.
                if proven.is_ok() && said.is_ok() {
                    come[rank] = Some(JoinedRank { line: guest.line, listen });
                }
            }
        }
    }
}

/// Returns the rank of a guest and the addresses at which it listens, or the reason to refuse it.
fn greeted(
    config: &Config,
    security: &Security,
    guest: &AuthenticatedConnection,
    come: &[Option<JoinedRank>],
) -> Result<(usize, String), Refusal> {
    let proven = guest.line.key();
    let Ok(Control::Hello { rank, world_size, job, listen, key, .. }) = control(&guest.greeting, "a guest")
    else {
        return Err(Refusal::Job);
    };
    if job != config.job {
        return Err(Refusal::Job);
    }
    if world_size != config.world_size {
        return Err(Refusal::WorldSize { want: config.world_size, got: world_size });
    }
    if key != proven.bytes() || security.member(rank as usize).is_some_and(|known| known != proven) {
        return Err(Refusal::Key);
    }
    let same = |other: &(usize, &Option<JoinedRank>)| {
        other.0 != rank as usize && other.1.as_ref().is_some_and(|come| come.line.key() == proven)
    };
    if security.own_key() == Some(proven) || come.iter().enumerate().any(|other| same(&other)) {
        return Err(Refusal::SameKey);
    }
    let is_gone = |come: &JoinedRank| come.line.connection.close_reason().is_some();
    match come.get(rank as usize) {
        None => Err(Refusal::Rank(rank)),
        // A rank that connects again replaces its lost connection.
        Some(before) if rank > config.rank && before.as_ref().is_none_or(is_gone) => {
            Ok((rank as usize, listen.to_owned()))
        }
        Some(_) => Err(Refusal::Taken(rank)),
    }
}

/// Runs rank 0's side: accepts all other ranks, then sends them all addresses and keys, and a secret for their
/// connections.
async fn host(config: &Config, endpoint: &Endpoint, until: Deadline) -> Result<Connections, CommError> {
    let mut door = Acceptor::open(endpoint, &config.security);
    let (mut come, absent) = admit(config, &config.security, &mut door, until, None).await;
    if !absent.is_empty() {
        let message = Control::Missing(BoundedVec(absent.iter().map(|rank| rank.0).collect()));
        for come in come.iter_mut().flatten() {
            // It may fail, but the other ranks have deadlines of their own.
            come.line.send_last(&message).await;
        }
        return Err(missing(config, absent));
    }
    let own = config.security.own_key().into_iter();
    let members: Vec<PublicKey> = own.chain(come.iter().flatten().map(|come| come.line.key())).collect();
    let admission = config.security.admission(members)?;
    let admission = admission.expect("`check` requires encrypted connections");
    let listen: Vec<String> =
        come.iter().map(|come| come.as_ref().map_or_else(String::new, |come| come.listen.clone())).collect();
    let table = Control::Table {
        addresses: BoundedVec(listen.iter().map(String::as_str).collect()),
        keys: BoundedVec(admission.members.iter().map(|key| &key.bytes()[..]).collect()),
        secret: &admission.secret.bytes()[..],
    };
    for (rank, come) in come.iter_mut().enumerate() {
        if let Some(JoinedRank { line, .. }) = come {
            line.send_message(&table)
                .await
                .map_err(|e| CommError::io("send the table of addresses to", &Rank(rank as u32), &e))?;
        }
    }
    Ok(come.into_iter().map(|come| Some(come?.line.connection)).collect())
}

/// Receives the peer's answer, which follows its proof.
async fn answer<T>(
    config: &Config,
    line: &mut HandshakeStream,
    until: Deadline,
    wanted: impl FnOnce(&Control<'_>) -> Option<T>,
) -> Result<T, CommError> {
    let from = line.key().to_string();
    let bytes = line.receive(HandshakeStream::LONGEST, until).await?;
    match control(&bytes, &from)? {
        Control::Refuse(reason) => Err(refused(&from, reason)),
        Control::Missing(BoundedVec(ranks)) => Err(missing(config, ranks.into_iter().map(Rank).collect())),
        other => wanted(&other).ok_or_else(|| CommError::Handshake {
            peer: from.clone(),
            source: crate::WireError::Malformed("answer"),
        }),
    }
}

/// Returns this rank's greeting, as an encoded frame.
fn hello(config: &Config, security: &Security, endpoint: &Endpoint) -> Result<Vec<u8>, CommError> {
    let own = own_addresses(endpoint).text();
    let own_key = security.own_key();
    let hello = Control::Hello {
        rank: config.rank,
        world_size: config.world_size,
        job: &config.job,
        listen: &own,
        epoch: 0,
        key: own_key.as_ref().map_or(&[][..], |key| key.bytes()),
        digest: &[],
    };
    let wrong = |source| CommError::Handshake { peer: "this rank".to_owned(), source };
    crate::wire::framed(&hello).map_err(wrong)
}

/// Repeats [`greet`] until it succeeds, and receives the peer's answer.
async fn reach<T>(
    config: &Config,
    security: &Security,
    endpoint: &Endpoint,
    (rank, to): (u32, (EndpointAddr, PublicKey)),
    (until, patient): (Deadline, Deadline),
    mut wanted: impl FnMut(&Control<'_>) -> Option<T>,
) -> Result<(HandshakeStream, T), CommError> {
    loop {
        let reached = async {
            let hello = hello(config, security, endpoint)?;
            let mut line = greet(security, endpoint, to.clone(), &hello, patient).await?;
            let answer = answer(config, &mut line, patient, &mut wanted).await?;
            Ok((line, answer))
        };
        match reached.await {
            Err(CommError::Io { what, kind, message, .. }) => {
                tracing::debug!(rank, what, ?kind, message, "a peer cannot be reached yet");
                if until.remaining().is_none() {
                    return Err(missing(config, vec![Rank(rank)]));
                }
                tokio::time::sleep(PAUSE).await;
            }
            reached => return reached,
        }
    }
}

/// Reads the table: returns the ranks that this one connects to, and the keys of all. `None` if the table is
/// invalid.
fn read_table(config: &Config, message: &Control<'_>) -> Option<(Vec<(u32, PeerAddresses)>, Admission)> {
    let Control::Table { addresses: BoundedVec(addresses), keys: BoundedVec(keys), secret } = message else {
        return None;
    };
    if addresses.len() != config.world_size as usize || keys.len() != addresses.len() {
        return None;
    }
    let between = (1..config.rank).map(|rank| Some((rank, PeerAddresses::read(addresses[rank as usize])?)));
    let members = keys.iter().map(|key| PublicKey::from_slice(key));
    let secret = JoinSecret::new((*secret).try_into().ok()?);
    Some((between.collect::<Option<_>>()?, Admission { members: members.collect::<Option<_>>()?, secret }))
}

/// Runs the side of every other rank: gets the table from rank 0, then connects to the ranks below its own and
/// accepts those above.
async fn visit(config: &Config, endpoint: &Endpoint, until: Deadline) -> Result<Connections, CommError> {
    let host = config.security.host().expect("`check` requires the key of rank 0");
    let to = (places(config)?.of(host, config.direct)?, host);
    // At its deadline, rank 0 sends the list of missing ranks. This side waits a second longer to receive it.
    let patient = until.extended_by(Duration::from_secs(1));
    let (asked, (between, admission)) = {
        let table = |message: &Control<'_>| read_table(config, message);
        reach(config, &config.security, endpoint, (0, to), (until, patient), table).await?
    };
    let members = admission.members.clone();
    let security = config.security.among(admission);
    let mut door = Acceptor::open(endpoint, &security);
    let reaching: Vec<_> = between
        .into_iter()
        .map(|(rank, places)| {
            let (config, security, endpoint) = (config.clone(), security.clone(), endpoint.clone());
            let key = members[rank as usize];
            tokio::spawn(async move {
                let to = (places.of(key, config.direct)?, key);
                let welcome = |message: &Control<'_>| (*message == Control::Welcome(rank)).then_some(());
                let met = reach(&config, &security, &endpoint, (rank, to), (until, patient), welcome).await?;
                Ok::<_, CommError>((rank, met.0))
            })
        })
        .collect();
    let welcome = Some(Control::Welcome(config.rank));
    let (come, mut absent) = admit(config, &security, &mut door, until, welcome).await;
    let mut connections: Connections = (0..config.world_size).map(|_| None).collect();
    connections[0] = Some(asked.connection);
    for (place, come) in connections.iter_mut().zip(come) {
        if let Some(come) = come {
            *place = Some(come.line.connection);
        }
    }
    for reached in reaching {
        match reached.await {
            Ok(Ok((rank, line))) => connections[rank as usize] = Some(line.connection),
            Ok(Err(CommError::Missing { ranks, .. })) => absent.extend(ranks),
            Ok(Err(other)) => return Err(other),
            Err(panic) => std::panic::resume_unwind(panic.into_panic()),
        }
    }
    if absent.is_empty() { Ok(connections) } else { Err(missing(config, absent)) }
}
