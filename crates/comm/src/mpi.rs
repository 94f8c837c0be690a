//! Endpoints in processes that `mpirun` has started, over the MPI that the machine has: point-to-point messages, one
//! a frame, under our own collectives. MPI has no file that could be polled, so whoever waits looks again and again,
//! less and less often.
//!
//! MPI ends all processes when one is lost, so members never change here: `shrink` and `admit` are refused.
#![expect(unsafe_code, reason = "MPI is a C library, and requests outlive the call that starts them")]

use std::ffi::{c_int, c_void};
use std::fmt;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use farflung_base::{Nanos, PeerId};
use mpi::Threading;
use mpi::environment::Universe;
use mpi::ffi;
use mpi::topology::Communicator as _;

use crate::credit::{CREDIT, Counts};
use crate::endpoint::{Driver, Endpoint, Role, Wake};
use crate::inbox::{Inbox, WINDOW};
use crate::memory::real_start;
use crate::tcp::HELD;
use crate::transport::{Tag, Transport as _};
use crate::wire::{self, HEADER_BYTES, Kind, NO_TAG};
use crate::{CommError, DownReason, Frame, Pool, WireError};

/// Why members never change.
pub const FIXED: &str = "MPI ends all processes of a job when one is lost, and takes no new ones in; \
                         start the job again with --resume auto, or use --transport tcp";

/// Looks without a pause in between.
const LOOKS: u32 = 64;
/// The longest pause.
const PAUSE: Duration = Duration::from_micros(500);
/// The time that goodbyes may take.
const PARTING: Duration = Duration::from_secs(5);

/// An endpoint of a network of processes of one MPI job.
pub type Mpi = Endpoint<MpiDriver>;

/// Messages to all processes of the job.
pub struct MpiDriver {
    start: Instant,
    me: PeerId,
    inbox: Arc<Inbox>,
    pool: Arc<Pool>,
    state: Mutex<State>,
    /// Whoever waits is to look at something else.
    rung: AtomicBool,
}

/// All calls of MPI are made under its lock.
struct State {
    /// MPI ends with it.
    universe: Option<Universe>,
    sending: Vec<Sending>,
    peers: Vec<Peer>,
    /// What a message is received into.
    arrived: Vec<u8>,
}

#[derive(Default)]
struct Peer {
    /// Frames without a credit.
    in_flight: Counts,
    /// Frames taken since the last credit.
    taken: Counts,
    said_goodbye: bool,
}

/// A message on its way, whose bytes must stay where they are.
struct Sending {
    request: ffi::MPI_Request,
    _message: Vec<u8>,
}

// SAFETY: a request is a handle of MPI's, which all threads may use, one at a time: it was started with
// `Threading::Serialized` at least, and `state` is locked.
unsafe impl Send for Sending {}

impl fmt::Debug for MpiDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MpiDriver").field("me", &self.me).finish_non_exhaustive()
    }
}

/// Who has been here before: MPI begins once a process.
fn missing(reason: impl Into<String>) -> CommError {
    let advice = "start the job as `mpirun -n N farflung train --transport mpi`; `cargo xtask setup mpi` installs \
                  OpenMPI on Debian";
    CommError::Mpi { reason: reason.into(), advice }
}

/// Begins MPI, as the rank of a job that `mpirun` has given this process; it has to be `rank` of `size`.
///
/// # Errors
/// [`CommError::Mpi`] if that is not so, MPI has begun in this process before, or allows one thread alone.
pub fn join(rank: u32, size: u32) -> Result<Arc<Mpi>, CommError> {
    let begun = mpi::initialize_with_threading(Threading::Serialized);
    let (universe, threading) = begun.ok_or_else(|| missing("it has begun in this process before"))?;
    if threading < Threading::Serialized {
        return Err(missing(format!("it allows calls of one thread only ({threading:?})")));
    }
    let world = universe.world();
    let (found, all) = (world.rank() as u32, world.size() as u32);
    if (found, all) != (rank, size) {
        return Err(missing(format!(
            "this process is rank {found} of {all} to it, and not {rank} of {size}"
        )));
    }
    let crowded = std::thread::available_parallelism().is_ok_and(|cores| size as usize > cores.get());
    let inbox = Inbox::new(size as usize);
    let inbox = Arc::new(if crowded { inbox.crowded() } else { inbox });
    let pool = Pool::new();
    let peers = (0..size).map(|_| Peer::default()).collect();
    let state = State { universe: Some(universe), sending: Vec::new(), peers, arrived: Vec::new() };
    let driver = MpiDriver {
        start: real_start(),
        me: PeerId(rank),
        inbox: Arc::clone(&inbox),
        pool: Arc::clone(&pool),
        state: Mutex::new(state),
        rung: AtomicBool::new(false),
    };
    let others = (0..size).map(PeerId).filter(|&peer| peer != PeerId(rank));
    others.for_each(|peer| inbox.peer_up(peer));
    let endpoint = Endpoint::new(PeerId(rank), driver, inbox, pool);
    debug_assert_eq!(endpoint.size(), size as usize);
    Ok(Arc::new(endpoint))
}

impl State {
    /// Starts to send one message.
    fn send(&mut self, to: PeerId, header: &[u8; HEADER_BYTES], payload: &[u8]) {
        let mut message = Vec::with_capacity(HEADER_BYTES + payload.len());
        message.extend_from_slice(header);
        message.extend_from_slice(payload);
        let mut request = MaybeUninit::uninit();
        // SAFETY: the bytes stay where they are until the request is over: the vector is neither changed nor
        // dropped before (`sent`). A frame is far shorter than `c_int` counts. MPI's errors end the job.
        let request = unsafe {
            let (at, len) = (message.as_ptr().cast::<c_void>(), message.len() as c_int);
            ffi::MPI_Isend(
                at,
                len,
                ffi::RSMPI_UINT8_T,
                to.0 as c_int,
                0,
                ffi::RSMPI_COMM_WORLD,
                request.as_mut_ptr(),
            );
            request.assume_init()
        };
        self.sending.push(Sending { request, _message: message });
    }

    /// Forgets what is sent.
    fn sent(&mut self) {
        self.sending.retain_mut(|sending| {
            let mut over = 0;
            // SAFETY: the request was started by `send` and is not over: then it would have been forgotten.
            unsafe { ffi::MPI_Test(&raw mut sending.request, &raw mut over, ffi::RSMPI_STATUS_IGNORE) };
            over == 0
        });
    }

    /// Receives the next message of a peer, if it is there.
    fn receive(&mut self, from: PeerId) -> bool {
        let (mut flag, mut length) = (0, 0);
        let (mut message, mut status) = (MaybeUninit::uninit(), MaybeUninit::uninit());
        // SAFETY: what MPI writes to lives through each call. A matched message is received once, into as many
        // bytes as it has.
        unsafe {
            let (source, any) = (from.0 as c_int, ffi::RSMPI_ANY_TAG);
            let world = ffi::RSMPI_COMM_WORLD;
            ffi::MPI_Improbe(source, any, world, &raw mut flag, message.as_mut_ptr(), status.as_mut_ptr());
            if flag == 0 {
                return false;
            }
            ffi::MPI_Get_count(status.as_ptr(), ffi::RSMPI_UINT8_T, &raw mut length);
            self.arrived.resize(usize::try_from(length).unwrap_or(0), 0);
            let at = self.arrived.as_mut_ptr().cast::<c_void>();
            ffi::MPI_Mrecv(at, length, ffi::RSMPI_UINT8_T, message.as_mut_ptr(), ffi::RSMPI_STATUS_IGNORE);
        }
        true
    }
}

impl MpiDriver {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes what a peer has sent; returns whether that was anything.
    fn take(&self, state: &mut State, from: PeerId) -> bool {
        if state.peers[from.index()].said_goodbye || !state.receive(from) {
            return false;
        }
        if let Err(error) = self.handle(state, from) {
            state.peers[from.index()].said_goodbye = true;
            self.inbox.peer_down(from, DownReason::Protocol(error));
        }
        true
    }

    fn handle(&self, state: &mut State, from: PeerId) -> Result<(), WireError> {
        let (head, payload) =
            state.arrived.split_first_chunk().ok_or(WireError::Malformed("message of MPI"))?;
        let header = wire::decode(head)?;
        if header.length != payload.len() {
            return Err(WireError::Length { max: payload.len(), got: header.length });
        }
        match header.kind {
            Kind::Data => self.inbox.deliver(from, header.tag, self.pool.copy_of(payload, header.check)),
            Kind::Credit => {
                self.inbox.count_control(from, 0, HEADER_BYTES);
                state.peers[from.index()].in_flight.sub(header.tag, header.check);
                self.inbox.signal();
            }
            Kind::Bye => {
                state.peers[from.index()].said_goodbye = true;
                self.inbox.peer_down(from, DownReason::Left);
            }
            Kind::Control => return Err(WireError::Kind(header.kind as u8)),
        }
        Ok(())
    }

    /// Moves what can be moved now; returns whether anything has come.
    fn turn(&self) -> bool {
        let mut state = self.lock();
        state.sent();
        let mut moved = false;
        for peer in (0..state.peers.len() as u32).map(PeerId).filter(|&peer| peer != self.me) {
            moved |= self.inbox.held(peer) < HELD && self.take(&mut state, peer);
        }
        moved
    }

    /// Looks for at most `timeout`, until something has come.
    fn drive(&self, timeout: Nanos) {
        let until = self.now().saturating_add(timeout);
        for look in 0_u32.. {
            if self.turn() || self.rung.swap(false, Ordering::AcqRel) || self.now() >= until {
                return;
            }
            if look < LOOKS {
                std::thread::yield_now();
            } else {
                let left = Duration::from(until.saturating_sub(self.now()));
                std::thread::sleep(Duration::from_micros(u64::from(look - LOOKS)).min(PAUSE).min(left));
            }
        }
    }
}

impl Driver for MpiDriver {
    fn submit(&self, to: PeerId, tag: Tag, _: Nanos, frame: Frame) {
        let mut state = self.lock();
        state.peers[to.index()].in_flight.add(tag);
        state.send(to, &wire::plain(Kind::Data, tag, frame.check, frame.len()), frame.bytes());
    }
    fn submit_bytes(&self, to: PeerId, tag: Tag, _: Nanos, check: u32, bytes: &[u8], _: &Arc<Pool>) {
        let mut state = self.lock();
        state.peers[to.index()].in_flight.add(tag);
        state.send(to, &wire::plain(Kind::Data, tag, check, bytes.len()), bytes);
    }
    fn has_room(&self, to: PeerId, tag: Tag) -> bool {
        self.lock().peers[to.index()].in_flight.of(tag) < WINDOW
    }
    fn taken(&self, from: PeerId, tag: Tag, _: usize) {
        let mut state = self.lock();
        let peer = &mut state.peers[from.index()];
        if *peer.taken.add(tag) >= CREDIT {
            peer.taken.sub(tag, CREDIT);
            if !peer.said_goodbye {
                state.send(from, &wire::plain(Kind::Credit, tag, CREDIT, 0), &[]);
                self.inbox.count_control(from, HEADER_BYTES, 0);
            }
        }
    }
    fn now(&self) -> Nanos {
        self.start.elapsed().into()
    }
    fn block(&self, inbox: &Inbox, seen: u64, until: Nanos, role: Role) -> Wake {
        inbox.park(seen, role, || until.saturating_sub(self.now()), Some(&|left| self.drive(left)));
        Wake::Moved
    }
    fn nudge(&self) {
        if self.inbox.is_driven() {
            self.rung.store(true, Ordering::Release);
        }
    }
    fn has_background(&self) -> bool {
        true
    }
    fn fixed(&self) -> Option<&'static str> {
        Some(FIXED)
    }
    fn close(&self, _: &Inbox) {
        let until = Nanos::from(PARTING).saturating_add(self.now());
        {
            let mut state = self.lock();
            for peer in (0..state.peers.len() as u32).map(PeerId).filter(|&peer| peer != self.me) {
                state.send(peer, &wire::plain(Kind::Bye, NO_TAG, 0, 0), &[]);
            }
        }
        // MPI's own end waits for all processes, so that what they still say is taken first.
        let parted = |state: &State| {
            let others = (0..).zip(&state.peers).filter(|(peer, _)| PeerId(*peer) != self.me);
            state.sending.is_empty() && others.into_iter().all(|(_, peer)| peer.said_goodbye)
        };
        while self.now() < until && !parted(&self.lock()) {
            self.drive(Nanos::from_millis(1));
        }
        let mut state = self.lock();
        if state.sending.is_empty() {
            state.universe = None;
        } else {
            // Bytes that MPI may still read stay where they are, and so does MPI, until the process ends.
            std::mem::forget(std::mem::take(&mut state.sending));
            std::mem::forget(state.universe.take());
        }
    }
}
