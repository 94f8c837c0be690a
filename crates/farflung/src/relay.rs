//! A link in the middle: what comes in at one address goes out to another, as slowly and unreliably as asked
//! for. In user space, over TCP or UDP, so that anybody can try a real run over a bad link on one machine.
//!
//! It refuses to know what it carries.

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

/// Bytes that are passed on at a time over TCP.
const CHUNK: usize = 8 * 1024;
/// Chunks and datagrams of one connection on their way at a time.
const ON_THE_WAY: usize = 8192;
/// How far ahead of time the link may be sold: its queue.
const QUEUE: Duration = Duration::from_millis(50);
/// Between two looks at a link that is cut, or at whether all is over.
const LOOK: Duration = Duration::from_millis(5);
/// Clients over UDP at a time, and how long a silent one is remembered.
const CLIENTS: usize = 1024;
const SILENCE: Duration = Duration::from_mins(2);

/// What travels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Carries {
    /// Streams, which keep their order: a loss is a stall until it is sent again.
    #[default]
    Tcp,
    /// Datagrams, in their order: those that are lost or find the queue full are gone.
    Udp,
}

/// What a link is like, each way.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Relay {
    /// The address, `host:port`, at which it listens; port 0 is any that is free.
    pub listen: String,
    /// The address to which it passes on.
    pub to: String,
    /// What travels.
    pub carries: Carries,
    /// Of all connections together, each way.
    pub rate: Bandwidth,
    /// One way.
    pub delay: Nanos,
    /// A delay of up to so much comes on top, by chance.
    pub jitter: Nanos,
    /// Losses in a million chunks or datagrams.
    pub loss: u32,
    /// The time after which what was lost of a stream is sent again.
    pub retransmit: Nanos,
    /// Of the chances.
    pub seed: u64,
}

impl Relay {
    /// A link that changes nothing.
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

    /// Carries from now on, in threads of its own, until what is returned is dropped.
    ///
    /// # Errors
    /// [`CommError::Io`] if one of the two addresses does not work.
    pub fn start(&self) -> Result<Relaying> {
        let failed = |what, address: &str| {
            let address = address.to_owned();
            move |e: std::io::Error| CommError::Io { what, address, kind: e.kind(), message: e.to_string() }
        };
        let to = self.to.to_socket_addrs().map_err(failed("address", &self.to))?.next();
        let to = to.ok_or_else(|| failed("address", &self.to)(std::io::ErrorKind::NotFound.into()))?;
        let listening = || failed("listen at", &self.listen);
        let at: Vec<SocketAddr> = self.listen.to_socket_addrs().map_err(listening())?.collect();
        let way = || Way {
            link: self.clone(),
            free: Mutex::new((now(), 0)),
            spoil: AtomicBool::new(false),
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
                socket.set_read_timeout(Some(4 * LOOK)).map_err(listening())?;
                (socket.local_addr(), Box::new(move || own.datagrams(&Arc::new(socket))))
            }
        };
        let address = address.map_err(listening())?;
        let thread =
            thread::Builder::new().name("farflung-relay".to_owned()).spawn(serve).map_err(listening())?;
        Ok(Relaying { address, shared, thread: Some(thread) })
    }
}

/// A [`Relay`] at work.
#[derive(Debug)]
#[must_use = "dropping it ends it"]
pub struct Relaying {
    address: SocketAddr,
    shared: Arc<Shared>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Relaying {
    /// Where it listens.
    #[must_use]
    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    /// Cuts the link, or joins it again: over a cut link nothing comes through, and nobody is told.
    pub fn cut(&self, cut: bool) {
        self.shared.cut.store(cut, Ordering::Relaxed);
    }

    /// Turns one bit of what goes next from the side that listens to the other, behind the back of TCP's
    /// checksums.
    pub fn corrupt(&self) {
        self.shared.ways[0].spoil.store(true, Ordering::Relaxed);
    }

    /// What was carried there and back.
    #[must_use]
    pub fn carried(&self) -> [Bytes; 2] {
        [0, 1].map(|way: usize| Bytes(self.shared.ways[way].carried.load(Ordering::Relaxed)))
    }
}

impl Drop for Relaying {
    fn drop(&mut self) {
        self.shared.over.store(true, Ordering::Relaxed);
        for stream in lock(&self.shared.streams).values() {
            // It may be closed already.
            let _ = stream.shutdown(Shutdown::Both);
        }
        if let Some(thread) = self.thread.take() {
            // A panic in it has been reported by the runtime already.
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

/// One direction of the link, which all connections share.
#[derive(Debug)]
struct Way {
    link: Relay,
    /// When the link has sent all that it took, and the number of the next.
    free: Mutex<(Instant, u64)>,
    spoil: AtomicBool,
    carried: AtomicU64,
}

impl Way {
    /// How long until the queue takes more.
    fn full_for(&self) -> Duration {
        lock(&self.free).0.saturating_duration_since(now()).saturating_sub(QUEUE)
    }

    /// Takes so many bytes: when they are at the other end, and how often they were lost on the way.
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

    /// Takes what a stream gives, until it ends.
    fn read(&self, mut from: &TcpStream, sender: &SyncSender<Load>) {
        let mut last = now();
        let mut buffer = vec![0; CHUNK];
        loop {
            thread::sleep(self.full_for());
            match from.read(&mut buffer) {
                Ok(0) => return,
                Ok(n) => {
                    let (at, losses) = self.take(n);
                    // Nothing overtakes in a stream.
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

    fn spoil(&self, bytes: &mut [u8]) {
        if self.spoil.swap(false, Ordering::Relaxed) {
            let middle = bytes.len() / 2;
            bytes.iter_mut().skip(middle).take(1).for_each(|b| *b ^= 0x10);
        }
    }
}

/// Bytes, and when they are due.
type Load = (Instant, Vec<u8>);

#[derive(Debug)]
struct Shared {
    to: SocketAddr,
    /// To the other side, and back.
    ways: [Way; 2],
    cut: AtomicBool,
    over: AtomicBool,
    /// By number; to be ended with the relay.
    streams: Mutex<BTreeMap<u64, TcpStream>>,
}

impl Shared {
    fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }

    /// Waits until it is time, and as long as the link is cut.
    fn wait(&self, due: Instant) {
        thread::sleep(due.saturating_duration_since(now()));
        while self.cut.load(Ordering::Relaxed) && !self.is_over() {
            thread::sleep(LOOK);
        }
    }

    fn accept(self: &Arc<Self>, listener: &TcpListener) {
        let mut number = 0;
        while !self.is_over() {
            let Ok((near, _)) = listener.accept() else {
                thread::sleep(LOOK);
                continue;
            };
            number += 2;
            let own = Arc::clone(self);
            // Whoever cannot be served is hung up on.
            let _ = thread::Builder::new().spawn(move || own.connect(&near, number));
        }
    }

    /// One connection: a reader and a writer each way.
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
                // It may have ended before the two were known.
                let _ = (near.shutdown(Shutdown::Both), far.shutdown(Shutdown::Both));
            }
        });
        let mut streams = lock(&self.streams);
        streams.remove(&number);
        streams.remove(&(number + 1));
    }

    fn write(&self, way: &Way, mut to: &TcpStream, from: &TcpStream, receiver: &Receiver<Load>) {
        while let Ok((due, mut bytes)) = receiver.recv() {
            self.wait(due);
            way.spoil(&mut bytes);
            if to.write_all(&bytes).is_err() {
                // The reader has nobody to read for.
                let _ = from.shutdown(Shutdown::Both);
                return;
            }
        }
        // The end comes a delay after the last byte, too; it may be closed already.
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

    /// Takes a datagram, unless it is lost or the queue is full.
    fn pass(&self, way: &Way, sender: &SyncSender<Load>, datagram: &[u8]) {
        if self.cut.load(Ordering::Relaxed) || way.full_for() > Duration::ZERO {
            return;
        }
        let (due, losses) = way.take(datagram.len());
        if losses == 0 {
            // A connection that has so much on its way loses more.
            let _: Result<_, TrySendError<_>> = sender.try_send((due, datagram.to_vec()));
        }
    }

    /// A socket for one client, and the threads that go with it.
    fn client(self: &Arc<Self>, near: &Arc<UdpSocket>, client: SocketAddr) -> Option<SyncSender<Load>> {
        let any = if self.to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
        let far = UdpSocket::bind(any).ok()?;
        far.connect(self.to).ok()?;
        far.set_read_timeout(Some(4 * LOOK)).ok()?;
        let far = Arc::new(far);
        let (there, out) = sync_channel::<Load>(ON_THE_WAY);
        let (back, home) = sync_channel::<Load>(ON_THE_WAY);
        let (own, to) = (Arc::clone(self), Arc::clone(&far));
        let gone = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&gone);
        let send_there = move || {
            while let Ok((due, mut datagram)) = out.recv() {
                own.wait(due);
                own.ways[0].spoil(&mut datagram);
                // Nobody listens there yet, perhaps.
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
