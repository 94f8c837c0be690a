//! A simulated bad link: forwards data from one address to another, with a given rate, delay, jitter and loss.
//! It runs in user space over TCP or UDP, so that a real run over a bad link can be tried on one machine.
//!
//! It does not depend on the content of the data.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream, ToSocketAddrs, UdpSocket};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use farflung_base::{Bandwidth, Bytes, Nanos, Philox};
use farflung_comm::CommError;

use crate::Result;

/// Bytes forwarded at a time over TCP.
const CHUNK: usize = 8 * 1024;
/// Highest number of chunks or datagrams of one connection in flight, in each direction.
const ON_THE_WAY: usize = 8192;
/// Length of the link's queue, as the time that the link needs to send all queued bytes.
const QUEUE: Duration = Duration::from_millis(50);
/// Time between two checks of whether the link is cut or the relay has ended.
const POLL_INTERVAL: Duration = Duration::from_millis(5);
/// Highest number of UDP clients at a time, and the time after which a silent one is forgotten.
const CLIENTS: usize = 1024;
const SILENCE: Duration = Duration::from_mins(2);

/// Protocol that the relay forwards.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Carries {
    /// TCP streams, which keep their order: a loss stalls the stream until the retransmission.
    #[default]
    Tcp,
    /// UDP datagrams, forwarded in order. A datagram that is lost, or that arrives while the queue is full or
    /// the link is cut, is dropped.
    Udp,
}

/// Properties of the link, the same in both directions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinkEmulator {
    /// The address at which the emulator listens, `host:port`; port 0 takes any free port.
    pub listen: String,
    /// The address to which the emulator forwards.
    pub to: String,
    /// The protocol.
    pub carries: Carries,
    /// Rate of all connections together, in each direction.
    pub rate: Bandwidth,
    /// Delay in one direction.
    pub delay: Nanos,
    /// Largest additional random delay.
    pub jitter: Nanos,
    /// Losses per million chunks or datagrams.
    pub loss: u32,
    /// Time after which lost data of a stream is sent again.
    pub retransmit: Nanos,
    /// Seed of jitter and losses.
    pub seed: u64,
}

impl LinkEmulator {
    /// Returns a link without limit of rate, delay, jitter or loss.
    #[must_use]
    pub fn new(listen: impl Into<String>, to: impl Into<String>) -> Self {
        Self {
            listen: listen.into(),
            to: to.into(),
            carries: Carries::Tcp,
            rate: Bandwidth::UNLIMITED,
            delay: Nanos::ZERO,
            jitter: Nanos::ZERO,
            loss: 0,
            retransmit: Nanos::from_millis(200),
            seed: 0,
        }
    }

    /// Starts to forward, in separate threads, until the returned handle is dropped.
    ///
    /// # Errors
    /// [`CommError::Io`] if one of the two addresses cannot be used.
    pub fn start(&self) -> Result<Relaying> {
        let failed = |what, address: &str| {
            let address = address.to_owned();
            move |e: std::io::Error| CommError::Io { what, address, kind: e.kind(), message: e.to_string() }
        };
        let to = self.to.to_socket_addrs().map_err(failed("address", &self.to))?.next();
        let to = to.ok_or_else(|| failed("address", &self.to)(std::io::ErrorKind::NotFound.into()))?;
        let listening = || failed("listen at", &self.listen);
        let at: Vec<SocketAddr> = self.listen.to_socket_addrs().map_err(listening())?.collect();
        let way = || Direction {
            link: self.clone(),
            free: Mutex::new((now(), 0)),
            corrupt_next: AtomicBool::new(false),
            carried: AtomicU64::new(0),
        };
        let shared = Arc::new(Shared {
            to,
            ways: [way(), way()],
            cut: AtomicBool::new(false),
            over: AtomicBool::new(false),
            streams: Mutex::default(),
        });
        let own = Arc::clone(&shared);
        let (address, serve): (_, Box<dyn FnOnce() + Send>) = match self.carries {
            Carries::Tcp => {
                let listener = TcpListener::bind(&at[..]).map_err(listening())?;
                listener.set_nonblocking(true).map_err(listening())?;
                (listener.local_addr(), Box::new(move || own.accept(&listener)))
            }
            Carries::Udp => {
                let socket = UdpSocket::bind(&at[..]).map_err(listening())?;
                socket.set_read_timeout(Some(4 * POLL_INTERVAL)).map_err(listening())?;
                (socket.local_addr(), Box::new(move || own.datagrams(&Arc::new(socket))))
            }
        };
        let address = address.map_err(listening())?;
        let thread =
            thread::Builder::new().name("farflung-relay".to_owned()).spawn(serve).map_err(listening())?;
        Ok(Relaying { address, shared, thread: Some(thread) })
    }
}

/// A running [`LinkEmulator`]; dropping it stops the relay.
#[derive(Debug)]
#[must_use = "dropping it ends it"]
pub struct Relaying {
    address: SocketAddr,
    shared: Arc<Shared>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Relaying {
    /// Returns the address at which the emulator listens.
    #[must_use]
    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    /// Cuts the link (`true`) or restores it (`false`). A cut link forwards nothing, and neither side gets an
    /// error.
    pub fn cut(&self, cut: bool) {
        self.shared.cut.store(cut, Ordering::Relaxed);
    }

    /// Flips one bit of the next data from the listening side to the other; TCP's checksums do not detect it.
    pub fn corrupt(&self) {
        self.shared.ways[0].corrupt_next.store(true, Ordering::Relaxed);
    }

    /// Returns the bytes carried forward and back.
    #[must_use]
    pub fn carried(&self) -> [Bytes; 2] {
        [0, 1].map(|way: usize| Bytes(self.shared.ways[way].carried.load(Ordering::Relaxed)))
    }
}

impl Drop for Relaying {
    fn drop(&mut self) {
        self.shared.over.store(true, Ordering::Relaxed);
        for stream in lock(&self.shared.streams).values() {
            // The stream may be closed already.
            let _ = stream.shutdown(Shutdown::Both);
        }
        if let Some(thread) = self.thread.take() {
            // A panic in the thread has been reported by the runtime already.
            let _ = thread.join();
        }
    }
}

#[expect(clippy::disallowed_methods, reason = "a relay is as late as its link says, in real time")]
fn now() -> Instant {
    Instant::now()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One direction of the link, shared by all connections.
#[derive(Debug)]
struct Direction {
    link: LinkEmulator,
    /// The time at which the link has sent all accepted data, and the number of the last packet.
    free: Mutex<(Instant, u64)>,
    corrupt_next: AtomicBool,
    carried: AtomicU64,
}

impl Direction {
    /// Returns the time until the queue accepts more.
    fn full_for(&self) -> Duration {
        lock(&self.free).0.saturating_duration_since(now()).saturating_sub(QUEUE)
    }

    /// Accepts this number of bytes. Returns when they arrive at the other end if nothing is lost, and how
    /// often they are lost on the way.
    fn take(&self, bytes: usize) -> (Instant, u32) {
        let (out, number) = {
            let mut free = lock(&self.free);
            free.0 = free.0.max(now()) + Duration::from(self.link.rate.transfer(Bytes(bytes as u64)));
            free.1 += 1;
            (free.0, free.1)
        };
        self.carried.fetch_add(bytes as u64, Ordering::Relaxed);
        let chance = Philox::new(self.link.seed, 16);
        let jitter = if self.link.jitter.0 > 0 { chance.below(16 * number, self.link.jitter.0) } else { 0 };
        let lost = |i: &u64| chance.below(16 * number + i, 1_000_000) < u64::from(self.link.loss);
        let losses = (1..16).take_while(lost).count() as u32;
        (out + Duration::from(self.link.delay) + Duration::from_nanos(jitter), losses)
    }

    /// Reads from a stream until it ends, and passes the data on with its time of arrival.
    fn read(&self, mut from: &TcpStream, sender: &SyncSender<Load>) {
        let mut last = now();
        let mut buffer = vec![0; CHUNK];
        loop {
            thread::sleep(self.full_for());
            match from.read(&mut buffer) {
                Ok(0) => return,
                Ok(n) => {
                    let (at, losses) = self.take(n);
                    // Data of a stream stays in order.
                    last = last.max(at + Duration::from(self.link.retransmit) * losses);
                    if sender.send((last, buffer[..n].to_vec())).is_err() {
                        return;
                    }
                }
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                Err(_) => return,
            }
        }
    }

    fn corrupt_bytes(&self, bytes: &mut [u8]) {
        if self.corrupt_next.swap(false, Ordering::Relaxed) {
            let middle = bytes.len() / 2;
            bytes.iter_mut().skip(middle).take(1).for_each(|b| *b ^= 0x10);
        }
    }
}

/// The time at which data arrives at the other end, and the data.
type Load = (Instant, Vec<u8>);

#[derive(Debug)]
struct Shared {
    to: SocketAddr,
    /// The direction towards the target, and the direction back.
    ways: [Direction; 2],
    cut: AtomicBool,
    over: AtomicBool,
    /// Streams by number, to be shut down when the relay ends.
    streams: Mutex<BTreeMap<u64, TcpStream>>,
}

impl Shared {
    fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }

    /// Waits until `due`, and while the link is cut.
    fn wait(&self, due: Instant) {
        thread::sleep(due.saturating_duration_since(now()));
        while self.cut.load(Ordering::Relaxed) && !self.is_over() {
            thread::sleep(POLL_INTERVAL);
        }
    }

    fn accept(self: &Arc<Self>, listener: &TcpListener) {
        let mut number = 0;
        while !self.is_over() {
            let Ok((near, _)) = listener.accept() else {
                thread::sleep(POLL_INTERVAL);
                continue;
            };
            number += 2;
            let own = Arc::clone(self);
            // A connection for which no thread can be started is closed.
            let _ = thread::Builder::new().spawn(move || own.connect(&near, number));
        }
    }

    /// Serves one connection, with a reader and a writer in each direction.
    fn connect(self: &Arc<Self>, near: &TcpStream, number: u64) {
        self.wait(now() + Duration::from(self.ways[0].link.delay));
        let Ok(far) = TcpStream::connect_timeout(&self.to, Duration::from_secs(10)) else { return };
        let ready = [near, &far]
            .map(|stream| stream.set_nodelay(true).is_ok() && stream.set_nonblocking(false).is_ok());
        let (Ok(near_end), Ok(far_end)) = (near.try_clone(), far.try_clone()) else { return };
        if ready != [true; 2] {
            return;
        }
        lock(&self.streams).extend([(number, near_end), (number + 1, far_end)]);
        thread::scope(|scope| {
            for (way, from, to) in [(&self.ways[0], near, &far), (&self.ways[1], &far, near)] {
                let (sender, receiver) = sync_channel(ON_THE_WAY);
                scope.spawn(move || way.read(from, &sender));
                scope.spawn(move || self.write(way, to, from, &receiver));
            }
            if self.is_over() {
                // The relay may have ended before the two streams were registered.
                let _ = (near.shutdown(Shutdown::Both), far.shutdown(Shutdown::Both));
            }
        });
        let mut streams = lock(&self.streams);
        streams.remove(&number);
        streams.remove(&(number + 1));
    }

    fn write(&self, way: &Direction, mut to: &TcpStream, from: &TcpStream, receiver: &Receiver<Load>) {
        while let Ok((due, mut bytes)) = receiver.recv() {
            self.wait(due);
            way.corrupt_bytes(&mut bytes);
            if to.write_all(&bytes).is_err() {
                // The other side is closed, so data that is still read from `from` cannot be delivered.
                let _ = from.shutdown(Shutdown::Both);
                return;
            }
        }
        // The end of the stream also arrives one delay later. The stream may be closed already.
        self.wait(now() + Duration::from(way.link.delay));
        let _ = to.shutdown(Shutdown::Write);
    }

    fn datagrams(self: &Arc<Self>, near: &Arc<UdpSocket>) {
        let mut clients: BTreeMap<SocketAddr, (SyncSender<Load>, Instant)> = BTreeMap::new();
        let mut buffer = vec![0; 1 << 16];
        while !self.is_over() {
            let Ok((n, client)) = near.recv_from(&mut buffer) else { continue };
            clients.retain(|_, (_, last)| last.elapsed() < SILENCE);
            let known = clients.contains_key(&client);
            if !known
                && clients.len() < CLIENTS
                && let Some(sender) = self.client(near, client)
            {
                clients.insert(client, (sender, now()));
            }
            let Some((sender, last)) = clients.get_mut(&client) else { continue };
            *last = now();
            self.pass(&self.ways[0], sender, &buffer[..n]);
        }
    }

    /// Accepts a datagram, unless it is lost, the queue is full or the link is cut.
    fn pass(&self, way: &Direction, sender: &SyncSender<Load>, datagram: &[u8]) {
        if self.cut.load(Ordering::Relaxed) || way.full_for() > Duration::ZERO {
            return;
        }
        let (due, losses) = way.take(datagram.len());
        if losses == 0 {
            // A datagram is also dropped if the connection has too many datagrams in flight.
            let _: Result<_, TrySendError<_>> = sender.try_send((due, datagram.to_vec()));
        }
    }

    /// Opens a socket for one client and starts its threads.
    fn client(self: &Arc<Self>, near: &Arc<UdpSocket>, client: SocketAddr) -> Option<SyncSender<Load>> {
        let any = if self.to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
        let far = UdpSocket::bind(any).ok()?;
        far.connect(self.to).ok()?;
        far.set_read_timeout(Some(4 * POLL_INTERVAL)).ok()?;
        let far = Arc::new(far);
        let (there, out) = sync_channel::<Load>(ON_THE_WAY);
        let (back, home) = sync_channel::<Load>(ON_THE_WAY);
        let (own, to) = (Arc::clone(self), Arc::clone(&far));
        let gone = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&gone);
        let send_there = move || {
            while let Ok((due, mut datagram)) = out.recv() {
                own.wait(due);
                own.ways[0].corrupt_bytes(&mut datagram);
                // The target may not listen yet.
                let _ = to.send(&datagram);
            }
            told.store(true, Ordering::Relaxed);
        };
        let own = Arc::clone(self);
        let take_back = move || {
            let mut buffer = vec![0; 1 << 16];
            while !own.is_over() && !gone.load(Ordering::Relaxed) {
                if let Ok(n) = far.recv(&mut buffer) {
                    own.pass(&own.ways[1], &back, &buffer[..n]);
                }
            }
        };
        let (own, near) = (Arc::clone(self), Arc::clone(near));
        let send_home = move || {
            while let Ok((due, datagram)) = home.recv() {
                own.wait(due);
                let _ = near.send_to(&datagram, client);
            }
        };
        for work in
            [Box::new(send_there) as Box<dyn FnOnce() + Send>, Box::new(take_back), Box::new(send_home)]
        {
            thread::Builder::new().spawn(work).ok()?;
        }
        Some(there)
    }
}
