//! A store: what processes of a job leave for each other before, between and besides their collectives. It
//! knows no rank but in [`Store::gather`], and keeps nothing beyond its host's life.

use std::collections::BTreeMap;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use farflung_base::Rank;

use super::door::{Door, Guest};
use super::rendezvous::{connect, hung_up, resolve};
use super::stream::Stream;
use crate::control::{Control, Listed};
use crate::error::Refusal;
use crate::secure::Security;
use crate::secure::refused;
use crate::sizes::HEADER_BYTES;
use crate::until::Until;
use crate::wire::{self, Message, Parsed};
use crate::{CommError, FRAME_BYTES, WireError};

/// Bytes of all keys and values of a store together.
pub const STORE_BYTES: usize = 64 << 20;

/// The longest value, which travels in one frame with its key.
pub const VALUE_BYTES: usize = FRAME_BYTES - 4096;

/// Clients of a store at a time.
const CLIENTS: usize = 4096;

/// What one more entry costs beside its bytes.
const ENTRY: usize = 64;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[derive(Debug, Default)]
struct Entries {
    by_key: BTreeMap<String, Vec<u8>>,
    bytes: usize,
}

impl Entries {
    /// Whether there was room for it.
    fn put(&mut self, key: &str, value: &[u8]) -> bool {
        let cost = |value: &[u8]| key.len() + value.len() + ENTRY;
        let old = self.by_key.get(key).map_or(0, |value| cost(value));
        let bytes = self.bytes - old + cost(value);
        if bytes > STORE_BYTES {
            return false;
        }
        self.bytes = bytes;
        self.by_key.insert(key.to_owned(), value.to_vec());
        true
    }

    fn add(&mut self, key: &str, by: i64) -> Option<i64> {
        let old = match self.by_key.get(key) {
            Some(value) => i64::from_le_bytes(value.as_slice().try_into().ok()?),
            None => 0,
        };
        let sum = old.wrapping_add(by);
        self.put(key, &sum.to_le_bytes()).then_some(sum)
    }
}

#[derive(Debug)]
struct Shared {
    job: String,
    security: Security,
    entries: Mutex<Entries>,
    moved: Condvar,
    closed: AtomicBool,
    /// By number; each with a handle to end it.
    clients: Mutex<BTreeMap<u64, TcpStream>>,
}

/// Where a store is. It ends when this is dropped, and its clients' calls fail then.
#[derive(Debug)]
pub struct StoreHost {
    address: SocketAddr,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl StoreHost {
    /// A store for the processes of `job` that `security` lets in, at `address`, a `host:port`; port 0 is any
    /// that is free.
    ///
    /// # Errors
    /// [`CommError::Io`] if the address does not work.
    pub fn bind(address: &str, job: &str, security: &Security) -> Result<Self, CommError> {
        let io = |e: std::io::Error| CommError::io("store at", &address, &e);
        let listener = TcpListener::bind(&resolve("store at", address)?[..]).map_err(io)?;
        listener.set_nonblocking(true).map_err(io)?;
        let address = listener.local_addr().map_err(io)?;
        let shared = Arc::new(Shared {
            job: job.to_owned(),
            security: security.clone(),
            entries: Mutex::default(),
            moved: Condvar::new(),
            closed: AtomicBool::new(false),
            clients: Mutex::default(),
        });
        let own = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("farflung-store".to_owned());
        let thread = thread.spawn(move || own.listen(&listener)).map_err(io)?;
        Ok(Self { address, shared, thread: Some(thread) })
    }

    /// Where it listens.
    #[must_use]
    pub const fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for StoreHost {
    fn drop(&mut self) {
        self.shared.closed.store(true, Ordering::Release);
        for client in lock(&self.shared.clients).values() {
            // It may have gone already.
            let _ = client.shutdown(Shutdown::Both);
        }
        {
            let _entries = lock(&self.shared.entries);
            self.shared.moved.notify_all();
        }
        // Wakes the thread that listens.
        let mut own = self.address;
        if own.ip().is_unspecified() {
            own.set_ip(if own.is_ipv4() { [127, 0, 0, 1].into() } else { [0, 0, 0, 0, 0, 0, 0, 1].into() });
        }
        if TcpStream::connect_timeout(&own, Duration::from_secs(1)).is_ok()
            && let Some(thread) = self.thread.take()
        {
            // A panic in it has been reported by the runtime already.
            let _ = thread.join();
        }
    }
}

impl Shared {
    /// Lets clients in until the end. Those that have not proven that they belong here wait at the door, where
    /// nobody waits for them; each of the others has a thread.
    fn listen(self: &Arc<Self>, listener: &TcpListener) {
        let mut door = Door::new(self.security.clone());
        let mut numbers = 0..;
        while !self.closed.load(Ordering::Acquire) {
            door.wait(listener, Duration::from_secs(1));
            for Guest { stream, greeting } in door.listen(listener) {
                if !matches!(control("a client", &greeting), Ok(Control::Open(job)) if job == self.job) {
                    door.refuse(&stream, Refusal::Job);
                } else if let Some(number) = numbers.next() {
                    self.let_in(number, stream);
                }
            }
        }
    }

    fn let_in(self: &Arc<Self>, number: u64, stream: Stream) {
        let socket = &stream.socket;
        let ready = socket.set_nonblocking(false).and_then(|()| socket.set_nodelay(true));
        let Ok(handle) = ready.and_then(|()| socket.try_clone()) else { return };
        {
            let mut clients = lock(&self.clients);
            if clients.len() >= CLIENTS {
                return;
            }
            clients.insert(number, handle);
        }
        let own = Arc::clone(self);
        let thread = std::thread::Builder::new().name("farflung-store-client".to_owned());
        let serve = move || {
            // Whoever breaks off or talks nonsense is left to itself.
            let _ = own.serve(&stream);
            lock(&own.clients).remove(&number);
        };
        if thread.spawn(serve).is_err() {
            lock(&self.clients).remove(&number);
        }
    }

    fn serve(&self, stream: &Stream) -> Result<(), CommError> {
        const CLIENT: &str = "a client of the store";
        let io = |e: std::io::Error| CommError::io("answer to", &CLIENT, &e);
        stream.say(&Control::Done(true)).map_err(io)?;
        loop {
            let request = stream.read_message(CLIENT, Until::never())?;
            let request = control(CLIENT, &request)?;
            self.answer(&request, |reply| stream.say(&reply)).map_err(io)?;
        }
    }

    fn answer(
        &self,
        request: &Control<'_>,
        reply: impl FnOnce(Control<'_>) -> std::io::Result<()>,
    ) -> std::io::Result<()> {
        match *request {
            Control::Put { key, value, only_new } => {
                let mut entries = lock(&self.entries);
                let done = !(only_new && entries.by_key.contains_key(key));
                let denied = done && !entries.put(key, value);
                self.moved.notify_all();
                drop(entries);
                reply(if denied { Control::Denied } else { Control::Done(done) })
            }
            Control::Get(key) => {
                let value = lock(&self.entries).by_key.get(key).cloned();
                reply(Control::Value(value.as_deref()))
            }
            Control::Add { key, by } => {
                let sum = lock(&self.entries).add(key, by);
                self.moved.notify_all();
                reply(sum.map_or(Control::Denied, Control::Sum))
            }
            Control::Wait { ref keys, patience } => {
                let until = Until::after(Duration::from_millis(patience));
                match self.wait(&keys.0, until) {
                    Ok(values) => reply(Control::Values(Listed(values.iter().map(Vec::as_slice).collect()))),
                    Err(absent) => reply(Control::Absent(Listed(absent))),
                }
            }
            _ => reply(Control::Denied),
        }
    }

    /// The values of as many of the keys as one frame takes, when all are there.
    fn wait(&self, keys: &[&str], until: Until) -> Result<Vec<Vec<u8>>, Vec<u32>> {
        let mut entries = lock(&self.entries);
        loop {
            let there = |key: &&str| entries.by_key.contains_key(*key);
            if keys.iter().all(there) {
                let mut room = FRAME_BYTES - HEADER_BYTES;
                let values = keys.iter().map_while(|key| {
                    let value = &entries.by_key[*key];
                    room = room.checked_sub(value.len() + 8)?;
                    Some(value.clone())
                });
                return Ok(values.collect());
            }
            let absent = || (0..).zip(keys).filter(|(_, key)| !there(key)).map(|(i, _)| i).collect();
            let Some(left) = until.left() else { return Err(absent()) };
            if self.closed.load(Ordering::Acquire) {
                return Err(absent());
            }
            entries = self.moved.wait_timeout(entries, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// The message that these bytes are.
fn control<'a>(from: &str, bytes: &'a [u8]) -> Result<Control<'a>, CommError> {
    let wrong = |source| CommError::Handshake { peer: from.to_owned(), source };
    match wire::parse(bytes).map_err(wrong)? {
        Parsed::Whole(Message::Control(message), _) => Ok(message),
        _ => Err(wrong(WireError::Malformed("control message"))),
    }
}

/// A client of a store. Calls of several threads take turns.
#[derive(Debug)]
pub struct Store {
    address: String,
    deadline: Duration,
    stream: Mutex<Stream>,
}

impl Store {
    /// Connects to the store of `job` at `address`, a `host:port`, for which it waits up to `deadline`; so do
    /// later calls for what they want.
    ///
    /// # Errors
    /// If there is no store in time, it is another job's, or one side does not prove to the other that it
    /// belongs there.
    pub fn connect(
        address: &str,
        job: &str,
        security: &Security,
        deadline: Duration,
    ) -> Result<Self, CommError> {
        let until = Until::after(deadline);
        loop {
            // Where strangers crowd the door, a client may have to make room and come again.
            match Self::open(address, job, security, (deadline, until)) {
                Err(e) if hung_up(&e) && until.left().is_some() => {
                    std::thread::sleep(Duration::from_millis(5));
                }
                other => return other,
            }
        }
    }

    fn open(
        address: &str,
        job: &str,
        security: &Security,
        (deadline, until): (Duration, Until),
    ) -> Result<Self, CommError> {
        let late = || CommError::io("store at", &address, &std::io::ErrorKind::TimedOut.into());
        let stream = connect(security, &resolve("store at", address)?, security.host(), until)?;
        let stream = stream.ok_or_else(late)?;
        let io = |e: std::io::Error| CommError::io("store at", &address, &e);
        stream.socket.set_nodelay(true).map_err(io)?;
        stream.say(&Control::Open(job)).map_err(io)?;
        let answer = stream.read_message(address, until)?;
        match control(address, &answer)? {
            Control::Refuse(reason) => Err(refused(address, reason)),
            _ => Ok(Self { address: address.to_owned(), deadline, stream: Mutex::new(stream) }),
        }
    }

    /// The address of this end of the connection: one at which the store's machine reaches this process.
    pub fn local_address(&self) -> Result<SocketAddr, CommError> {
        lock(&self.stream).socket.local_addr().map_err(|e| CommError::io("store at", &self.address, &e))
    }

    /// Asks, and reads the answer with `wanted`.
    fn ask<T>(
        &self,
        op: &'static str,
        key: &str,
        request: &Control<'_>,
        patience: Duration,
        wanted: impl FnOnce(&Control<'_>) -> Option<T>,
    ) -> Result<T, CommError> {
        let stream = lock(&self.stream);
        let io = |e: std::io::Error| CommError::io("store at", &self.address, &e);
        let answer = stream
            .say(request)
            .map_err(io)
            .and_then(|()| stream.read_message(&self.address, Until::after(patience)));
        // An answer that comes too late would be taken for the next one's.
        let answer = answer.inspect_err(|_| drop(stream.socket.shutdown(Shutdown::Both)))?;
        let message = control(&self.address, &answer)?;
        if message == Control::Denied {
            return Err(CommError::Denied { op, key: key.to_owned() });
        }
        let wrong = || CommError::Handshake {
            peer: self.address.clone(),
            source: WireError::Malformed("answer of the store"),
        };
        wanted(&message).ok_or_else(wrong)
    }

    fn put_if(&self, key: &str, value: &[u8], only_new: bool) -> Result<bool, CommError> {
        if key.len() + value.len() > VALUE_BYTES {
            let got = key.len() + value.len();
            return Err(CommError::Argument {
                op: "put",
                what: "length of key and value",
                got,
                want: VALUE_BYTES,
            });
        }
        let put = Control::Put { key, value, only_new };
        self.ask("put", key, &put, self.deadline, |answer| match answer {
            Control::Done(done) => Some(*done),
            _ => None,
        })
    }

    /// Puts a value of at most [`VALUE_BYTES`] at a key, over what was there.
    ///
    /// # Errors
    /// [`CommError::Denied`] if the store is full.
    pub fn put(&self, key: &str, value: &[u8]) -> Result<(), CommError> {
        self.put_if(key, value, false).map(|_| ())
    }

    /// Puts a value at a key that has none; returns whether it was so. The first of several wins.
    pub fn put_new(&self, key: &str, value: &[u8]) -> Result<bool, CommError> {
        self.put_if(key, value, true)
    }

    /// The value at a key, if there is one now.
    pub fn get(&self, key: &str) -> Result<Option<Vec<u8>>, CommError> {
        self.ask("get", key, &Control::Get(key), self.deadline, |answer| match answer {
            Control::Value(value) => Some(value.map(<[u8]>::to_vec)),
            _ => None,
        })
    }

    /// Adds to the number at a key, which begins with 0, and returns the sum. As a value it is 8 bytes,
    /// little-endian.
    ///
    /// # Errors
    /// [`CommError::Denied`] if the value there is no number.
    pub fn add(&self, key: &str, by: i64) -> Result<i64, CommError> {
        self.ask("add", key, &Control::Add { key, by }, self.deadline, |answer| match answer {
            Control::Sum(sum) => Some(*sum),
            _ => None,
        })
    }

    /// The values of all keys, when all are there.
    ///
    /// # Errors
    /// [`CommError::Absent`] with the keys that had no value at the deadline.
    pub fn wait(&self, keys: &[&str]) -> Result<Vec<Vec<u8>>, CommError> {
        let until = Until::after(self.deadline);
        let mut values = Vec::new();
        while values.len() < keys.len() {
            let rest = &keys[values.len()..];
            let left = until.left().unwrap_or_default();
            let request = Control::Wait { keys: Listed(rest.to_vec()), patience: left.as_millis() as u64 };
            let patience = left + Duration::from_secs(1);
            let more = self.ask("wait", rest[0], &request, patience, |answer| match answer {
                Control::Values(Listed(values)) if (1..=rest.len()).contains(&values.len()) => {
                    Some(Ok(values.iter().map(|value| value.to_vec()).collect::<Vec<_>>()))
                }
                Control::Absent(Listed(absent)) => {
                    let name = |i: &u32| rest.get(*i as usize).map(|key| (*key).to_owned());
                    Some(Err(absent.iter().filter_map(name).collect()))
                }
                _ => None,
            })?;
            values.extend(more.map_err(|keys| CommError::Absent {
                store: self.address.clone(),
                keys,
                after: self.deadline.into(),
            })?);
        }
        Ok(values)
    }

    /// Leaves this rank's value under `name`, and returns those of all `size` ranks, in their order.
    ///
    /// # Errors
    /// [`CommError::Missing`] with the ranks that had left none at the deadline.
    pub fn gather(
        &self,
        name: &str,
        rank: Rank,
        size: usize,
        value: &[u8],
    ) -> Result<Vec<Vec<u8>>, CommError> {
        let keys: Vec<String> = (0..size).map(|rank| format!("{name}/{rank}")).collect();
        self.put(&format!("{name}/{}", rank.0), value)?;
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        self.wait(&keys).map_err(|error| match error {
            CommError::Absent { keys: absent, after, .. } => {
                let ranks = (0..).zip(&keys).filter(|(_, key)| absent.iter().any(|a| a == *key));
                let ranks = ranks.map(|(rank, _)| Rank(rank)).collect();
                CommError::Missing { master: self.address.clone(), ranks, after }
            }
            other => other,
        })
    }
}
