//! A key-value store through which the processes of a job exchange data before, between and beside their
//! collectives. Only [`Store::gather`] depends on ranks. Nothing is kept after the host has ended.

use std::collections::BTreeMap;
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use farflung_base::Rank;

use super::acceptor::{Acceptor, AuthenticatedConnection};
use super::listeners::Listeners;
use super::stream::Stream;
use super::target::{Target, hung_up, resolve};
use crate::control::{BoundedVec, Control};
use crate::deadline::Deadline;
use crate::error::Refusal;
use crate::secure::Security;
use crate::secure::refused;
use crate::sizes::HEADER_BYTES;
use crate::wire::{self, Message, Parsed};
use crate::{CommError, FRAME_BYTES, WireError};

/// Greatest number of bytes of all entries together: keys, values, and 64 per entry.
pub const STORE_BYTES: usize = 64 << 20;

/// Greatest number of bytes of a key and its value, which are sent in one frame.
pub const VALUE_BYTES: usize = FRAME_BYTES - 4096;

/// Greatest number of clients at a time.
const CLIENTS: usize = 4096;

/// Bytes counted per entry besides its key and value.
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
    /// Puts a value at a key; returns false if there is no room for it.
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
    /// Sockets of the clients by their numbers, used to close them.
    clients: Mutex<BTreeMap<u64, TcpStream>>,
}

/// The host of a store. Dropping it ends the store; its clients' calls then fail.
#[derive(Debug)]
pub struct StoreHost {
    address: SocketAddr,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl StoreHost {
    /// Starts a store at `address` (`host:port`, port 0 picks a free one) for the processes of `job` that
    /// `security` accepts.
    ///
    /// # Errors
    /// [`CommError::Io`] if it cannot listen at the address.
    pub fn bind(address: &str, job: &str, security: &Security) -> Result<Self, CommError> {
        let io = |e: std::io::Error| CommError::io("store at", &address, &e);
        let listeners = Listeners::first_of(&resolve("store at", address)?).map_err(io)?;
        let address = listeners.address().map_err(io)?;
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
        let thread = thread.spawn(move || own.listen(&listeners)).map_err(io)?;
        Ok(Self { address, shared, thread: Some(thread) })
    }

    /// Returns the address that it listens at.
    #[must_use]
    pub const fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for StoreHost {
    fn drop(&mut self) {
        self.shared.closed.store(true, Ordering::Release);
        for client in lock(&self.shared.clients).values() {
            // The connection may be closed already.
            let _ = client.shutdown(Shutdown::Both);
        }
        {
            let _entries = lock(&self.shared.entries);
            self.shared.moved.notify_all();
        }
        // Wakes the listening thread.
        let mut own = self.address;
        if own.ip().is_unspecified() {
            own.set_ip(if own.is_ipv4() { [127, 0, 0, 1].into() } else { [0, 0, 0, 0, 0, 0, 0, 1].into() });
        }
        if TcpStream::connect_timeout(&own, Duration::from_secs(1)).is_ok()
            && let Some(thread) = self.thread.take()
        {
            // The runtime has already reported a panic in it.
            let _ = thread.join();
        }
    }
}

impl Shared {
    /// Accepts clients until the store ends. Those without proof wait in the acceptor, where they delay no
    /// others; each other client has a thread.
    fn listen(self: &Arc<Self>, listeners: &Listeners) {
        let mut door = Acceptor::new(self.security.clone());
        let mut numbers = 0..;
        while !self.closed.load(Ordering::Acquire) {
            door.wait(listeners, Duration::from_secs(1));
            for AuthenticatedConnection { stream, greeting } in door.listen(listeners) {
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
            // A client that disconnects or sends a malformed message is dropped; the others go on.
            let _ = own.serve(&stream);
            lock(&own.clients).remove(&number);
        };
        if thread.spawn(serve).is_err() {
            lock(&self.clients).remove(&number);
        }
    }

    fn serve(&self, stream: &Stream) -> Result<(), CommError> {
        const CLIENT: &str = "a client of the store";
        let io = |e: std::io::Error| CommError::io("send the answer to", &CLIENT, &e);
        stream.send_message(&Control::Done(true)).map_err(io)?;
        loop {
            let request = stream.read_message(CLIENT, Deadline::never())?;
            let request = control(CLIENT, &request)?;
            self.answer(&request, |reply| stream.send_message(&reply)).map_err(io)?;
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
                let until = Deadline::after(Duration::from_millis(patience));
                match self.wait(&keys.0, until) {
                    Ok(values) => {
                        reply(Control::Values(BoundedVec(values.iter().map(Vec::as_slice).collect())))
                    }
                    Err(absent) => reply(Control::Absent(BoundedVec(absent))),
                }
            }
            _ => reply(Control::Denied),
        }
    }

    /// Waits until all keys have values. Returns the values of the first keys, as many as fit in one frame, or
    /// the indices of the keys without a value at the deadline.
    fn wait(&self, keys: &[&str], until: Deadline) -> Result<Vec<Vec<u8>>, Vec<u32>> {
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
            let Some(left) = until.remaining() else { return Err(absent()) };
            if self.closed.load(Ordering::Acquire) {
                return Err(absent());
            }
            entries = self.moved.wait_timeout(entries, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// Parses one control message.
fn control<'a>(from: &str, bytes: &'a [u8]) -> Result<Control<'a>, CommError> {
    let wrong = |source| CommError::Handshake { peer: from.to_owned(), source };
    match wire::parse(bytes).map_err(wrong)? {
        Parsed::Whole(Message::Control(message), _) => Ok(message),
        _ => Err(wrong(WireError::Malformed("control message"))),
    }
}

/// A client of a store. Threads may share it; their calls run one at a time.
#[derive(Debug)]
pub struct Store {
    address: String,
    deadline: Duration,
    stream: Mutex<Stream>,
}

impl Store {
    /// Connects to the store of `job` at `address` (`host:port`). Waits up to `deadline` for the store; later
    /// calls wait up to `deadline` each.
    ///
    /// # Errors
    /// If there is no store in time, if it is of another job, or if one side cannot prove that it belongs to
    /// the job.
    pub fn connect(
        address: &str,
        job: &str,
        security: &Security,
        deadline: Duration,
    ) -> Result<Self, CommError> {
        let until = Deadline::after(deadline);
        loop {
            // The store closes waiting connections if there are too many; then this client tries again.
            match Self::open(address, job, security, (deadline, until)) {
                Err(e) if hung_up(&e) && until.remaining().is_some() => {
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
        (deadline, until): (Duration, Deadline),
    ) -> Result<Self, CommError> {
        let mut target = Target::new("store at", address)?;
        let stream = target.connect(security, security.host(), until)?;
        let stream = stream.ok_or_else(|| CommError::Io {
            what: "store at",
            address: address.to_owned(),
            kind: std::io::ErrorKind::TimedOut,
            message: format!("not reached within {deadline:?}: {}", target.outcome()),
        })?;
        let io = |e: std::io::Error| CommError::io("store at", &address, &e);
        stream.socket.set_nodelay(true).map_err(io)?;
        stream.send_message(&Control::Open(job)).map_err(io)?;
        let answer = stream.read_message(address, until)?;
        match control(address, &answer)? {
            Control::Refuse(reason) => Err(refused(address, reason)),
            _ => Ok(Self { address: address.to_owned(), deadline, stream: Mutex::new(stream) }),
        }
    }

    /// Returns the local address of the connection, at which the store's machine can reach this process.
    pub fn local_address(&self) -> Result<SocketAddr, CommError> {
        lock(&self.stream).socket.local_addr().map_err(|e| CommError::io("store at", &self.address, &e))
    }

    /// Sends a request, and reads the answer with `wanted`.
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
            .send_message(request)
            .map_err(io)
            .and_then(|()| stream.read_message(&self.address, Deadline::after(patience)));
        // A late answer would be taken for the answer to the next request, so the connection is closed.
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
                what: "length of key and value in bytes (maximum)",
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

    /// Puts a value at a key, replacing an older one. Key and value have at most [`VALUE_BYTES`] together.
    ///
    /// # Errors
    /// [`CommError::Denied`] if the store is full.
    pub fn put(&self, key: &str, value: &[u8]) -> Result<(), CommError> {
        self.put_if(key, value, false).map(|_| ())
    }

    /// Puts a value at a key that has none, and returns true; returns false if it has one. If several clients
    /// call it, the first one succeeds.
    pub fn put_new(&self, key: &str, value: &[u8]) -> Result<bool, CommError> {
        self.put_if(key, value, true)
    }

    /// Returns the value at a key; `None` if there is none now.
    pub fn get(&self, key: &str) -> Result<Option<Vec<u8>>, CommError> {
        self.ask("get", key, &Control::Get(key), self.deadline, |answer| match answer {
            Control::Value(value) => Some(value.map(<[u8]>::to_vec)),
            _ => None,
        })
    }

    /// Adds to the number at a key, 0 if there is none, and returns the sum. The number is stored as 8 bytes,
    /// little-endian.
    ///
    /// # Errors
    /// [`CommError::Denied`] if the value there does not have 8 bytes, or if the store is full.
    pub fn add(&self, key: &str, by: i64) -> Result<i64, CommError> {
        self.ask("add", key, &Control::Add { key, by }, self.deadline, |answer| match answer {
            Control::Sum(sum) => Some(*sum),
            _ => None,
        })
    }

    /// Waits until all keys have values, and returns them in the order of the keys.
    ///
    /// # Errors
    /// [`CommError::Absent`] with the keys that have no value at the deadline.
    pub fn wait(&self, keys: &[&str]) -> Result<Vec<Vec<u8>>, CommError> {
        let until = Deadline::after(self.deadline);
        let mut values = Vec::new();
        while values.len() < keys.len() {
            let rest = &keys[values.len()..];
            let left = until.remaining().unwrap_or_default();
            let request =
                Control::Wait { keys: BoundedVec(rest.to_vec()), patience: left.as_millis() as u64 };
            let patience = left + Duration::from_secs(1);
            let more = self.ask("wait", rest[0], &request, patience, |answer| match answer {
                Control::Values(BoundedVec(values)) if (1..=rest.len()).contains(&values.len()) => {
                    Some(Ok(values.iter().map(|value| value.to_vec()).collect::<Vec<_>>()))
                }
                Control::Absent(BoundedVec(absent)) => {
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

    /// Puts this rank's value under `name`, waits for the values of all `size` ranks, and returns them in rank
    /// order.
    ///
    /// # Errors
    /// [`CommError::Missing`] with the ranks that have put no value at the deadline.
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
                let progress = vec!["the ranks with a value have reached the store".to_owned()];
                CommError::Missing { master: self.address.clone(), ranks, progress, after }
            }
            other => other,
        })
    }
}
