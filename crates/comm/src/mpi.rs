//! Endpoints in processes started by `mpirun`, over the machine's own MPI library. By default, only
//! point-to-point messages of MPI are used; the collectives are ours, so results are the same bit for bit as
//! on other transports.
//!
//! A lock lets one thread at a time call MPI (`MPI_THREAD_SERIALIZED`). `MPI_Init` and `MPI_Finalize` block,
//! so a separate thread calls them. It also progresses unfinished messages while no other thread waits. Apart
//! from these two, only the creation of communicators for MPI's own collectives blocks. MPI has no file
//! descriptor to poll, so a waiting thread tests in a loop, with growing pauses. Frames have our own header
//! and use two MPI tags: one for headers with short payloads, one for long payloads.
//!
//! MPI ends all processes when one is lost, so the members of a communicator cannot change: `admit` returns an
//! error, and so does `shrink`, except after a cancellation.
//!
//! By choice ([`Collectives::Native`]), all-reduce, reduce-scatter, all-gather and broadcast are MPI's own.
//! Their sums may differ in rounding from those of other transports, and calls that differ between ranks are
//! not noticed.

mod life;
mod messages;
mod native;
mod peer;

use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use farflung_base::{Nanos, PeerId};

use crate::endpoint::{Driver, Endpoint, Wake};
use crate::inbox::{BlockedFor, Inbox, WINDOW};
use crate::memory::real_start;
use crate::native::{NativeCall, NativeCollectives};
use crate::tcp::MAX_UNREAD_BYTES;
use crate::transport::{MPI_IS_FIXED, Tag};
use crate::wire::{self, Kind, NO_TAG};
use crate::{CommError, DownReason, Frame, Pool, WireError};
use life::MpiThread;
use messages::World;
use native::Natives;
use peer::Peer;

/// Number of tests in `drive` before the first pause.
const POLLS_BEFORE_PAUSE: u32 = 64;
/// Longest pause between two tests.
const PAUSE: Duration = Duration::from_micros(500);
/// Maximum number of frames taken from one peer before the next peer is checked.
const FRAMES_PER_TURN: usize = 4;
/// Time for which a closing endpoint waits until the other endpoints close too. If they take longer, [`leave`]
/// ends MPI.
const GOODBYE_TIMEOUT: Nanos = Nanos::from_millis(2000);

/// An endpoint in a network of the processes of one MPI job.
pub type Mpi = Endpoint<MpiDriver>;

/// The job of this process. There is only one, because MPI can be initialised only once in a process.
static JOB: OnceLock<Arc<Job>> = OnceLock::new();

/// Which collectives a job runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Collectives {
    /// Ours, with the same bits as on all transports.
    #[default]
    Ours,
    /// MPI's for all-reduce, reduce-scatter, all-gather and broadcast, of sums, means and products of floats of
    /// 32 and 64 bits and of integers; ours for the rest. Of communicators, those of [`Communicator::new`] and
    /// [`Communicator::split`] use them.
    ///
    /// [`Communicator::new`]: crate::Communicator::new
    /// [`Communicator::split`]: crate::Communicator::split
    Native,
}

/// Driver of an endpoint over MPI messages to all processes of the job.
pub struct MpiDriver(Arc<Job>);

/// State shared by the endpoint and the MPI thread.
struct Job {
    start: Instant,
    me: PeerId,
    collectives: Collectives,
    inbox: Arc<Inbox>,
    pool: Arc<Pool>,
    /// Lock under which all calls of MPI are made.
    state: Mutex<State>,
    /// Signals work to the MPI thread.
    work: Condvar,
    /// Set to wake the thread that waits in `drive`.
    rung: Mutex<bool>,
    bell: Condvar,
    life: Mutex<Option<MpiThread>>,
}

struct State {
    /// Present as long as MPI may be called.
    world: Option<World>,
    peers: Vec<Peer>,
    natives: Natives,
    /// Set once goodbyes have been sent; frames that arrive later are dropped.
    closed: bool,
    /// Set when the MPI thread must end.
    over: bool,
    /// Set while the MPI thread sleeps until there is work.
    idle: bool,
}

impl fmt::Debug for MpiDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MpiDriver").field("me", &self.0.me).finish_non_exhaustive()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn missing(reason: impl Into<String>) -> CommError {
    let advice = "start the job as `mpirun -n N farflung train --transport mpi`; `cargo xtask setup mpi` installs \
                  OpenMPI on Debian";
    CommError::Mpi { reason: reason.into(), advice }
}

/// Initialises MPI; `mpirun` must have given this process the rank `rank` of `size`. When the endpoint is
/// dropped, MPI ends if all other processes close theirs within 2 s. A process calls [`leave`] at its end,
/// which ends MPI otherwise.
///
/// # Errors
/// [`CommError::Mpi`] if the rank or the size differs, if MPI was initialised in this process before, or if it
/// allows calls from one thread only.
pub fn join(rank: u32, size: u32) -> Result<Arc<Mpi>, CommError> {
    join_by(rank, size, Collectives::Ours)
}

/// Does the same as [`join`], with a choice of collectives, which must be the same in all processes.
///
/// # Errors
/// Those of [`join`].
pub fn join_by(rank: u32, size: u32, collectives: Collectives) -> Result<Arc<Mpi>, CommError> {
    let (beginning, found) = life::begin()?;
    if (found.rank, found.size) != (rank, size) {
        return Err(missing(format!(
            "it gave this process rank {} of {}, expected rank {rank} of {size}",
            found.rank, found.size
        )));
    }
    let crowded = std::thread::available_parallelism().is_ok_and(|cores| found.near > cores.get());
    let inbox = Inbox::new(size as usize);
    let inbox = Arc::new(if crowded { inbox.without_polling() } else { inbox });
    let pool = Pool::new();
    let peers = (0..size).map(|_| Peer::default()).collect();
    let mut natives = Natives::default();
    if collectives == Collectives::Native {
        let all: Vec<PeerId> = (0..size).map(PeerId).collect();
        natives.add_group(&found.world, 0, &all);
    }
    let state = State { world: Some(found.world), peers, natives, closed: false, over: false, idle: false };
    let job = Arc::new(Job {
        start: real_start(),
        me: PeerId(rank),
        collectives,
        inbox: Arc::clone(&inbox),
        pool: Arc::clone(&pool),
        state: Mutex::new(state),
        work: Condvar::new(),
        rung: Mutex::new(false),
        bell: Condvar::new(),
        life: Mutex::new(None),
    });
    *lock(&job.life) = Some(beginning.keep(&job));
    if JOB.set(Arc::clone(&job)).is_err() {
        return Err(missing(life::TWICE));
    }
    job.others().for_each(|peer| inbox.peer_up(peer));
    Ok(Arc::new(Endpoint::new(PeerId(rank), MpiDriver(job), inbox, pool)))
}

/// Ends MPI in a process that is about to exit with `code`, if [`join`] has initialised it and it has not
/// ended yet. With code 0, waits until all other processes have closed their endpoints. Aborts the job
/// (`MPI_Abort`) if they have not and `code` is not 0, or if one has violated the protocol or a collective of
/// MPI has failed, so that they never will.
pub fn leave(code: u8) {
    let Some(job) = JOB.get() else { return };
    job.say_goodbye();
    loop {
        match job.parting() {
            Parting::All => return job.finish(),
            Parting::Waits if code == 0 => job.drive(Nanos::from_millis(20)),
            // A peer that has violated the protocol sends no goodbye.
            Parting::Waits | Parting::Never => return job.abort(code.max(1)),
        }
    }
}

/// State of the closing of the job's endpoints.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Parting {
    /// All others have said goodbye and have received all that this process sent.
    All,
    Waits,
    /// At least one peer has violated the protocol and will not say goodbye, or a collective of MPI has
    /// failed.
    Never,
}

impl State {
    /// Returns whether messages or collectives of MPI are in progress.
    fn has_work(&self) -> bool {
        self.natives.is_running() || self.peers.iter().any(Peer::is_sending)
    }
}

impl NativeCollectives for Job {
    fn add_group(&self, context: u64, members: &[PeerId]) {
        if let State { world: Some(world), natives, .. } = &mut *lock(&self.state) {
            natives.add_group(world, context, members);
        }
    }
    fn has(&self, call: &NativeCall) -> bool {
        let state = lock(&self.state);
        state.world.is_some() && state.natives.has(call)
    }
    fn start(&self, call: &NativeCall, data: &[u8]) -> Option<u64> {
        let State { world: Some(world), natives, idle, .. } = &mut *lock(&self.state) else { return None };
        let number = natives.start(world, call, data);
        if *idle {
            self.work.notify_one();
        }
        Some(number)
    }
    fn finish(&self, number: u64, data: &mut [u8]) -> bool {
        lock(&self.state).natives.finish(number, data)
    }
}

impl Job {
    fn now(&self) -> Nanos {
        self.start.elapsed().into()
    }

    fn others(&self) -> impl Iterator<Item = PeerId> + use<> {
        let (me, size) = (self.me, self.inbox.size() as u32);
        (0..size).map(PeerId).filter(move |&peer| peer != me)
    }

    /// Sends a frame. If it does not leave at once, wakes the MPI thread, which completes it.
    fn send(&self, to: PeerId, kind: Kind, tag: Tag, check: u32, frame: Option<Frame>) {
        let mut state = lock(&self.state);
        let State { world: Some(world), peers, idle, .. } = &mut *state else { return };
        let peer = &mut peers[to.index()];
        if kind == Kind::Data {
            peer.in_flight.count(tag);
        }
        let length = frame.as_ref().map_or(0, Frame::len);
        peer.send(world, to, &wire::plain(kind, tag, check, length), frame);
        if *idle && peer.is_sending() {
            self.work.notify_one();
        }
    }

    /// Takes the next frame of a peer; returns whether there was one.
    fn take(&self, state: &mut State, from: PeerId) -> bool {
        let State { world: Some(world), peers, closed, .. } = state else { return false };
        let peer = &mut peers[from.index()];
        let may_begin = *closed || self.inbox.unread_bytes(from) < MAX_UNREAD_BYTES;
        let handled = match peer.receive(world, from, &self.pool, may_begin) {
            Ok(None) => return false,
            Ok(Some((header, frame))) => match header.kind {
                Kind::Data if *closed => Ok(()),
                Kind::Data => {
                    self.inbox.deliver(from, header.tag, frame);
                    Ok(())
                }
                Kind::Credit => {
                    self.inbox.count_control(from, 0, crate::HEADER_BYTES);
                    peer.in_flight.sub(header.tag, header.check);
                    self.inbox.signal();
                    Ok(())
                }
                Kind::Bye => {
                    peer.said_goodbye = true;
                    self.inbox.peer_down(from, DownReason::Left);
                    Ok(())
                }
                Kind::Control => Err(WireError::Kind(header.kind as u8)),
            },
            Err(error) => Err(error),
        };
        if let Err(error) = handled {
            peer.is_broken = true;
            self.inbox.peer_down(from, DownReason::Protocol(error));
        }
        true
    }

    /// Takes the frames that have arrived; returns whether there were any.
    fn turn(&self) -> bool {
        let mut state = lock(&self.state);
        let mut moved = false;
        if let State { world: Some(world), natives, .. } = &mut *state
            && natives.progress(world)
        {
            self.inbox.signal();
            moved = true;
        }
        for peer in self.others() {
            let State { world: Some(world), peers, .. } = &mut *state else { return moved };
            peers[peer.index()].forget_sent(world);
            moved |= (0..FRAMES_PER_TURN).take_while(|_| self.take(&mut state, peer)).count() > 0;
        }
        moved
    }

    /// Tests for messages for at most `timeout`, until one has arrived.
    fn drive(&self, timeout: Nanos) {
        let until = self.now().saturating_add(timeout);
        for look in 0_u32.. {
            if self.turn() || std::mem::take(&mut *lock(&self.rung)) || self.now() >= until {
                return;
            }
            if look < POLLS_BEFORE_PAUSE {
                std::thread::yield_now();
                continue;
            }
            let left = Duration::from(until.saturating_sub(self.now()));
            let pause = Duration::from_micros(u64::from(look - POLLS_BEFORE_PAUSE)).min(PAUSE).min(left);
            let rung = lock(&self.rung);
            if !*rung {
                // Whether the wait timed out does not matter: the next test checks for messages.
                let _ = self.bell.wait_timeout(rung, pause).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    /// Runs the MPI thread until MPI must end. It progresses unfinished messages while no other thread does.
    fn keep(&self) {
        loop {
            {
                let mut state = lock(&self.state);
                while !state.over && !state.has_work() {
                    state.idle = true;
                    state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
                    state.idle = false;
                }
                if state.over {
                    return;
                }
            }
            std::thread::sleep(PAUSE);
            if !self.inbox.is_driven() {
                self.turn();
            }
        }
    }

    /// Sends a goodbye to all others, once.
    fn say_goodbye(&self) {
        let again = std::mem::replace(&mut lock(&self.state).closed, true);
        if !again {
            self.others().for_each(|peer| self.send(peer, Kind::Bye, NO_TAG, 0, None));
        }
    }

    fn parting(&self) -> Parting {
        let state = lock(&self.state);
        let others = || self.others().map(|peer| &state.peers[peer.index()]);
        // MPI cannot end while a collective that has failed here is not complete.
        if others().any(|peer| peer.is_broken) || state.natives.is_running() {
            Parting::Never
        } else if others().all(|peer| peer.said_goodbye && !peer.is_sending()) {
            Parting::All
        } else {
            Parting::Waits
        }
    }

    /// Ends MPI after all endpoints have closed.
    fn finish(&self) {
        let life = lock(&self.life).take();
        {
            let mut state = lock(&self.state);
            state.over = true;
            state.world = None;
            self.work.notify_one();
        }
        if let Some(life) = life {
            life.end();
        }
    }

    /// Aborts the job.
    fn abort(&self, code: u8) {
        if let Some(world) = &lock(&self.state).world {
            messages::abort(world, code);
        }
    }
}

impl Driver for MpiDriver {
    fn submit(&self, to: PeerId, tag: Tag, _: Nanos, frame: Frame) {
        self.0.send(to, Kind::Data, tag, frame.check, Some(frame));
    }
    fn has_room(&self, to: PeerId, tag: Tag) -> bool {
        lock(&self.0.state).peers[to.index()].in_flight.of(tag) < WINDOW
    }
    fn taken(&self, from: PeerId, tag: Tag, _: usize) {
        let credits = {
            let peer = &mut lock(&self.0.state).peers[from.index()];
            let credits = peer.taken.taken(tag);
            if peer.said_goodbye {
                return;
            }
            credits
        };
        for credit in credits {
            self.0.inbox.count_control(from, crate::HEADER_BYTES, 0);
            self.0.send(from, Kind::Credit, credit.tag, credit.frames, None);
        }
    }
    fn now(&self) -> Nanos {
        self.0.now()
    }
    fn block(&self, inbox: &Inbox, seen: u64, until: Nanos, role: BlockedFor) -> Wake {
        inbox.park(seen, role, || until.saturating_sub(self.now()), Some(&|left| self.0.drive(left)));
        Wake::Moved
    }
    fn unblock(&self) {
        if self.0.inbox.is_driven() {
            *lock(&self.0.rung) = true;
            self.0.bell.notify_all();
        }
    }
    fn has_background(&self) -> bool {
        true
    }
    fn fixed(&self) -> Option<&'static str> {
        Some(MPI_IS_FIXED)
    }
    fn native(&self) -> Option<&dyn NativeCollectives> {
        (self.0.collectives == Collectives::Native).then_some(&*self.0 as _)
    }
    fn close(&self, _: &Inbox) {
        let job = &self.0;
        let until = job.now().saturating_add(GOODBYE_TIMEOUT);
        job.say_goodbye();
        while job.parting() == Parting::Waits && job.now() < until {
            job.drive(Nanos::from_millis(20));
        }
        if job.parting() == Parting::All {
            job.finish();
        }
    }
}
