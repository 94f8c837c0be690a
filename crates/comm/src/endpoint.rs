//! The part of an endpoint that all transports share: it polls operations, decides when a thread may sleep, and
//! handles deadlines. A transport adds a [`Driver`]; this module is independent of the network.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll, Waker};

use farflung_base::{Nanos, PeerId};

use crate::inbox::{BlockedFor, Idle, Inbox};
use crate::native::NativeCollectives;
use crate::started::{Spawned, Started};
use crate::transport::{PeerEvent, Port, Stats, Tag, Task, Transport};
use crate::{CommError, Frame, PathStats, Pool};

/// Reason why [`Driver::block`] returned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wake {
    /// Something may have changed, or the time was reached.
    Moved,
    /// Deadlock: nothing can happen any more.
    Deadlock,
}

/// The network below an [`Endpoint`]. It puts frames that arrive into the endpoint's [`Inbox`].
pub trait Driver: fmt::Debug + Send + Sync + 'static {
    /// Sends a frame that departs at `at`; real networks ignore `at` and send it now. Never blocks.
    fn submit(&self, to: PeerId, tag: Tag, at: Nanos, frame: Frame);
    /// Sends a frame with these bytes and this check word, like [`Driver::submit`]. Networks that can send from
    /// `bytes` directly override it and lease no buffer.
    fn submit_bytes(&self, to: PeerId, tag: Tag, at: Nanos, check: u32, bytes: &[u8], pool: &Arc<Pool>) {
        self.submit(to, tag, at, pool.copy_of(bytes, check));
    }
    /// Returns whether the network accepts another frame of this tag. If it does not, it signals the inbox as
    /// soon as it accepts one.
    fn has_room(&self, to: PeerId, tag: Tag) -> bool;
    /// Returns whether the network has ever reached this peer.
    fn is_reached(&self, _to: PeerId) -> bool {
        true
    }
    /// Called after an operation has taken a frame of this peer and tag from the inbox, where `left` such
    /// frames remain.
    fn taken(&self, from: PeerId, tag: Tag, left: usize);
    /// Returns the time on the endpoint's clock.
    fn now(&self) -> Nanos;
    /// Returns the clock of an operation that has taken frames that arrived up to `seen`.
    fn clock(&self, seen: Nanos) -> Nanos {
        seen.max(self.now())
    }
    /// Returns the time up to which all arrivals are known. Deadlines are compared with it.
    fn horizon(&self) -> Nanos {
        self.now()
    }
    /// Advances a virtual clock by `_by`. Before the time `_idle`, started operations continue only when frames
    /// arrive, not because of a warning or a deadline.
    fn advance(&self, _by: Nanos, _idle: Nanos) {}
    /// Raises a virtual clock to the time at which the awaited operation ended. `_idle` is the same as in
    /// [`Driver::advance`].
    fn advance_to(&self, _to: Nanos, _idle: Nanos) {}
    /// Blocks until the inbox's counter has moved past `seen`, or until the time `until`.
    fn block(&self, inbox: &Inbox, seen: u64, until: Nanos, role: BlockedFor) -> Wake;
    /// Returns measurements of the path to a peer, if the network has any.
    fn path(&self, _peer: PeerId) -> Option<PathStats> {
        None
    }
    /// Returns why peers may seem silent, if the network shows a reason. Called when a deadline has passed.
    fn cause_of_silence(&self) -> Option<String> {
        None
    }
    /// Wakes a thread that is blocked in the driver, not on the inbox's condition variable.
    fn unblock(&self) {}
    /// Returns whether operations proceed on a background thread while no thread waits.
    fn has_background(&self) -> bool;
    /// See [`Transport::fixed`].
    fn fixed(&self) -> Option<&'static str> {
        None
    }
    /// See [`Transport::native`].
    fn native(&self) -> Option<&dyn NativeCollectives> {
        None
    }
    /// Says goodbye to the peers and closes the network.
    fn close(&self, inbox: &Inbox);
}

pub(crate) struct Shared<D> {
    me: PeerId,
    pub(crate) driver: D,
    pub(crate) inbox: Arc<Inbox>,
    pool: Arc<Pool>,
    jobs: Mutex<Jobs>,
    /// Whether this endpoint has sent itself a frame since `spawn` last checked this.
    sent_itself: AtomicBool,
}

#[derive(Default)]
struct Jobs {
    next: u64,
    /// Operations in the order of their start, thus sorted by number. The time is the first one at which the
    /// operation must be polled even if no frame arrives: that of its warning or its deadline. It is not
    /// updated.
    live: Vec<(u64, Nanos, Arc<Cell>)>,
    thread: Option<std::thread::JoinHandle<()>>,
}

/// A started operation.
struct Cell(Mutex<Running>);

struct Running {
    task: Option<Box<dyn Task>>,
    times: Times,
    waker: Option<Waker>,
}

/// Clock of an operation, and the times at which it must be polled even if no frame arrives.
#[derive(Clone, Copy)]
struct Times {
    clock: Nanos,
    /// Time of the warning; [`Nanos::MAX`] once it was given.
    alarm: Nanos,
    deadline: Nanos,
}

impl Times {
    fn new(start: Nanos, task: &dyn Task) -> Self {
        let after = |limit| start.saturating_add(limit);
        Self { clock: start, alarm: after(task.alarm()), deadline: after(task.limit()) }
    }

    fn next(&self) -> Nanos {
        self.alarm.min(self.deadline)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The [`Port`] of one operation while it is polled.
struct OperationPort<'a, D> {
    shared: &'a Shared<D>,
    op: &'static str,
    clock: Nanos,
}

impl<D: Driver> OperationPort<'_, D> {
    /// Raises the clock to the horizon. Called when the operation is affected by something other than a frame.
    fn raise_clock(&mut self) {
        self.clock = self.clock.max(self.shared.driver.horizon());
    }
}

impl<D: Driver> Port for OperationPort<'_, D> {
    fn me(&self) -> PeerId {
        self.shared.me
    }
    fn now(&self) -> Nanos {
        self.shared.driver.clock(self.clock)
    }
    fn has_room(&mut self, to: PeerId, tag: Tag) -> bool {
        to == self.shared.me || self.shared.inbox.is_down(to) || self.shared.driver.has_room(to, tag)
    }
    fn is_reached(&self, to: PeerId) -> bool {
        to == self.shared.me || self.shared.driver.is_reached(to)
    }
    fn send(&mut self, to: PeerId, tag: Tag, mut frame: Frame) -> Result<(), CommError> {
        if to == self.shared.me {
            frame.arrived = self.clock;
            self.shared.deliver_own(tag, frame);
            return Ok(());
        }
        self.shared.inbox.count_sent(self.op, to, tag, frame.len()).inspect_err(|_| self.raise_clock())?;
        self.shared.driver.submit(to, tag, self.clock, frame);
        Ok(())
    }
    fn send_bytes(&mut self, to: PeerId, tag: Tag, check: u32, bytes: &[u8]) -> Result<(), CommError> {
        let Shared { me, inbox, pool, driver, .. } = self.shared;
        if to == *me {
            let mut frame = pool.copy_of(bytes, check);
            frame.arrived = self.clock;
            self.shared.deliver_own(tag, frame);
            return Ok(());
        }
        inbox.count_sent(self.op, to, tag, bytes.len()).inspect_err(|_| self.raise_clock())?;
        driver.submit_bytes(to, tag, self.clock, check, bytes, pool);
        Ok(())
    }
    fn take(&mut self, from: PeerId, tag: Tag) -> Result<Option<Frame>, CommError> {
        let taken = self.shared.inbox.take(self.op, from, tag).inspect_err(|_| self.raise_clock())?;
        let Some((frame, left)) = taken else { return Ok(None) };
        if from != self.shared.me {
            self.shared.driver.taken(from, tag, left);
        }
        self.clock = self.clock.max(frame.arrived);
        Ok(Some(frame))
    }
    fn suspicion(&self, context: u64, peer: PeerId) -> Option<(PeerId, u32)> {
        self.shared.inbox.suspicion(context, peer)
    }
    fn senders_with_new_frames(&mut self, tag: Tag) -> Option<Vec<PeerId>> {
        self.shared.inbox.senders_with_new_frames(tag)
    }
    fn end_new_frame_tracking(&mut self, tag: Tag) {
        self.shared.inbox.end_new_frame_tracking(tag);
    }
}

impl<D: Driver> Shared<D> {
    /// Puts a frame to this endpoint into its own inbox and wakes its other threads, which may wait for the
    /// frame.
    fn deliver_own(&self, tag: Tag, frame: Frame) {
        self.inbox.deliver_own(self.me, tag, frame);
        self.sent_itself.store(true, Ordering::Release);
        self.driver.unblock();
    }

    /// Polls one operation, and fails it if it is cancelled, its time is over, nothing can happen any more
    /// (deadlock), or the endpoint has ended. Returns whether it is complete.
    fn poll(&self, task: &mut dyn Task, times: &mut Times, wake: Wake) -> bool {
        let mut view = OperationPort { shared: self, op: task.name(), clock: times.clock };
        let cancelled = task.is_cancelled();
        let mut over = !cancelled && task.poll(&mut view).is_ready();
        if !over {
            if self.driver.horizon() >= times.alarm {
                times.alarm = Nanos::MAX;
                view.raise_clock();
                task.warn(&mut view);
            }
            let (op, peer) = (task.name(), task.waits_for());
            let error = if cancelled {
                view.clock = view.clock.max(self.driver.now());
                Some(CommError::Cancelled { op })
            } else if wake == Wake::Deadlock {
                Some(CommError::Deadlock { op, peer })
            } else if self.inbox.has_ended() {
                Some(CommError::Ended { op })
            } else if self.driver.horizon() >= times.deadline {
                view.clock = view.clock.max(times.deadline);
                let cause = self.driver.cause_of_silence();
                Some(CommError::Deadline { op, peer, after: task.limit(), cause })
            } else {
                None
            };
            if let Some(error) = error {
                view.raise_clock();
                task.fail(error, &mut view);
                over = true;
            }
        }
        times.clock = view.clock;
        over
    }

    /// Polls every started operation once. Returns the earliest time at which an unfinished one must be polled
    /// again even if no frame arrives.
    fn poll_jobs(&self, wake: Wake) -> Nanos {
        let mut earliest = Nanos::MAX;
        let mut from = 0;
        loop {
            let (number, cell) = {
                let jobs = lock(&self.jobs);
                let at = jobs.live.partition_point(|(number, ..)| *number < from);
                let Some((number, _, cell)) = jobs.live.get(at) else { return earliest };
                (*number, Arc::clone(cell))
            };
            from = number + 1;
            let mut running = lock(&cell.0);
            let Running { task, times, waker } = &mut *running;
            let over = task.as_mut().is_none_or(|task| self.poll(task.as_mut(), times, wake));
            if over {
                *task = None;
                if let Some(waker) = waker.take() {
                    waker.wake();
                }
                drop(running);
                self.forget(number);
                // Wakes threads that wait for this operation.
                self.inbox.signal();
            } else {
                earliest = earliest.min(times.next());
            }
        }
    }

    fn forget(&self, number: u64) {
        let mut jobs = lock(&self.jobs);
        if let Ok(at) = jobs.live.binary_search_by_key(&number, |(number, ..)| *number) {
            jobs.live.remove(at);
        }
    }

    fn has_jobs(&self) -> bool {
        !lock(&self.jobs).live.is_empty()
    }

    /// Returns the earliest time at which an unfinished operation, as planned when it was started, must be
    /// polled even if no frame arrives. It is in the past if that operation has given its warning since.
    fn first_deadline(&self) -> Nanos {
        let jobs = lock(&self.jobs);
        jobs.live.iter().map(|&(_, acts, _)| acts).min().unwrap_or(Nanos::MAX)
    }

    /// Blocks until `over` returns true; all started operations proceed meanwhile. `over` also returns the
    /// latest time at which it must be called again.
    fn wait_until(&self, mut over: impl FnMut(Wake) -> (bool, Nanos)) {
        let _waiting = Waiting::new(self);
        let mut wake = Wake::Moved;
        loop {
            let seen = self.inbox.change_count();
            // Called before `over`, so that all operations have proceeded as far as they can when this function
            // returns.
            let earliest = self.poll_jobs(wake);
            let (done, deadline) = over(wake);
            if done {
                return;
            }
            wake = self.driver.block(&self.inbox, seen, earliest.min(deadline), BlockedFor::Result);
        }
    }

    /// Body of the background thread: polls operations until the endpoint closes.
    fn background(&self) {
        while self.inbox.idle(|| self.has_jobs()) == Idle::Work {
            let seen = self.inbox.change_count();
            let earliest = self.poll_jobs(Wake::Moved);
            if self.has_jobs() {
                self.driver.block(&self.inbox, seen, earliest, BlockedFor::Background);
            }
        }
    }
}

/// Guard that counts a waiting thread until the guard is dropped. The background thread pauses while any thread
/// waits.
struct Waiting<'a, D: Driver>(&'a Shared<D>);

impl<'a, D: Driver> Waiting<'a, D> {
    fn new(shared: &'a Shared<D>) -> Self {
        if shared.inbox.begin_wait() {
            shared.driver.unblock();
        }
        Self(shared)
    }
}

impl<D: Driver> Drop for Waiting<'_, D> {
    fn drop(&mut self) {
        self.0.inbox.end_wait();
    }
}

/// Owner of the network; closes it when the last endpoint and job are dropped.
struct Handle<D: Driver>(Arc<Shared<D>>);

impl<D: Driver> Drop for Handle<D> {
    fn drop(&mut self) {
        self.0.inbox.end();
        self.0.driver.unblock();
        let thread = lock(&self.0.jobs).thread.take();
        if let Some(thread) = thread
            && thread.thread().id() != std::thread::current().id()
        {
            // The runtime has already reported a panic of the background thread.
            let _ = thread.join();
        }
        self.0.driver.close(&self.0.inbox);
    }
}

/// Waker of the threads of an endpoint; has no effect once the endpoint is dropped.
struct EndpointWaker<D>(Weak<Shared<D>>);

impl<D: Driver> std::task::Wake for EndpointWaker<D> {
    fn wake(self: Arc<Self>) {
        if let Some(shared) = self.0.upgrade() {
            shared.inbox.signal();
            shared.driver.unblock();
        }
    }
}

/// A [`Transport`] over a [`Driver`].
pub struct Endpoint<D: Driver> {
    handle: Arc<Handle<D>>,
    waker: Waker,
}

impl<D: Driver> Endpoint<D> {
    /// Creates an endpoint on a driver, which puts arriving frames into `inbox`.
    pub fn new(me: PeerId, driver: D, inbox: Arc<Inbox>, pool: Arc<Pool>) -> Self {
        let shared = Arc::new(Shared {
            me,
            driver,
            inbox,
            pool,
            jobs: Mutex::default(),
            sent_itself: AtomicBool::default(),
        });
        let waker = Waker::from(Arc::new(EndpointWaker(Arc::downgrade(&shared))));
        Self { handle: Arc::new(Handle(shared)), waker }
    }

    /// Returns the driver.
    #[must_use]
    pub fn driver(&self) -> &D {
        &self.shared().driver
    }

    fn shared(&self) -> &Arc<Shared<D>> {
        &self.handle.0
    }
}

impl<D: Driver> fmt::Debug for Endpoint<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Endpoint")
            .field("me", &self.shared().me)
            .field("driver", &self.shared().driver)
            .finish()
    }
}

impl<D: Driver> Transport for Endpoint<D> {
    fn me(&self) -> PeerId {
        self.shared().me
    }
    fn size(&self) -> usize {
        self.shared().inbox.size()
    }
    fn now(&self) -> Nanos {
        self.shared().driver.now()
    }
    fn advance(&self, by: Nanos) {
        self.shared().driver.advance(by, self.shared().first_deadline());
    }
    fn lease(&self, len: usize) -> Frame {
        self.shared().pool.lease(len)
    }

    fn run(&self, task: &mut dyn Task) {
        let shared = self.shared();
        let mut times = Times::new(shared.driver.now(), task);
        shared.wait_until(|wake| (shared.poll(task, &mut times, wake), times.next()));
        shared.driver.advance_to(times.clock, shared.first_deadline());
    }

    fn spawn(&self, mut task: Box<dyn Task>) -> Started {
        let shared = self.shared();
        let mut times = Times::new(shared.driver.now(), task.as_ref());
        // The first frames are sent at once, not only when a thread waits.
        let over = shared.poll(task.as_mut(), &mut times, Wake::Moved);
        if shared.sent_itself.swap(false, Ordering::AcqRel) {
            // Operations that respond to this one must do so now: once this rank's clock has advanced, no frame
            // can be sent at the present time.
            shared.poll_jobs(Wake::Moved);
        }
        let running = Running { task: (!over).then_some(task), times, waker: None };
        let cell = Arc::new(Cell(Mutex::new(running)));
        let mut jobs = lock(&shared.jobs);
        let number = jobs.next;
        jobs.next += 1;
        if !over {
            jobs.live.push((number, times.next(), Arc::clone(&cell)));
            if jobs.thread.is_none() && shared.driver.has_background() {
                let shared = Arc::clone(shared);
                let thread = std::thread::Builder::new().name("farflung-comm".to_owned());
                // If the thread cannot be started, operations still proceed whenever another thread waits.
                jobs.thread = thread.spawn(move || shared.background()).ok();
            }
            drop(jobs);
            // Covers frames that arrived since the first poll, and wakes the background thread, which may be
            // asleep.
            shared.inbox.signal();
            shared.driver.unblock();
        }
        Started::new(Box::new(Job { number, cell, handle: Arc::clone(&self.handle) }))
    }

    fn traffic(&self, peer: PeerId) -> Stats {
        self.shared().inbox.traffic(peer)
    }
    fn path(&self, peer: PeerId) -> Option<PathStats> {
        self.shared().driver.path(peer)
    }
    fn events(&self) -> Vec<PeerEvent> {
        self.shared().inbox.events()
    }
    fn awaited_by(&self, peer: PeerId) -> Option<PeerId> {
        self.shared().inbox.awaited_by(peer)
    }
    fn retire(&self, context: u64) {
        self.shared().inbox.retire(context);
        // A peer that was not read because of these frames may be read again.
        if self.shared().driver.has_background() {
            self.shared().driver.unblock();
        }
    }
    fn forget(&self, peer: PeerId) {
        self.shared().inbox.forget(peer);
    }
    fn waker(&self) -> &Waker {
        &self.waker
    }
    fn fixed(&self) -> Option<&'static str> {
        self.shared().driver.fixed()
    }
    fn native(&self) -> Option<&dyn NativeCollectives> {
        self.shared().driver.native()
    }
}

/// Handle of a started operation of an endpoint.
struct Job<D: Driver> {
    number: u64,
    cell: Arc<Cell>,
    handle: Arc<Handle<D>>,
}

impl<D: Driver> Spawned for Job<D> {
    fn number(&self) -> u64 {
        self.number
    }

    fn wait(&self) {
        let shared = &self.handle.0;
        shared.wait_until(|_| (lock(&self.cell.0).task.is_none(), Nanos::MAX));
        let clock = lock(&self.cell.0).times.clock;
        shared.driver.advance_to(clock, shared.first_deadline());
    }

    fn is_over(&self) -> bool {
        lock(&self.cell.0).task.is_none()
    }

    fn poll(&self, cx: &mut Context<'_>) -> Poll<()> {
        let mut running = lock(&self.cell.0);
        if running.task.is_none() {
            return Poll::Ready(());
        }
        running.waker = Some(cx.waker().clone());
        Poll::Pending
    }

    fn cancel(&self) {
        let mut running = lock(&self.cell.0);
        if let Some(mut task) = running.task.take() {
            let (op, shared) = (task.name(), &self.handle.0);
            let mut view =
                OperationPort { shared: &**shared, op, clock: running.times.clock.max(shared.driver.now()) };
            task.fail(CommError::Cancelled { op }, &mut view);
            shared.forget(self.number);
        }
    }
}
