//! Going on with more: ranks that were not there from the start, or are back, come in where all agree on it.

use std::sync::Arc;

use farflung_base::{Nanos, PeerId};

use super::{Communicator, mix};
use crate::CommError;
use crate::control::Listed;
use crate::element::ReduceOp;
use crate::transport::{Port, Source, Tag, Task, Transport};

/// Marks the contexts of admissions.
const ADMITTED: u64 = 4;

/// Where whoever is outside listens for an invitation.
const INVITATION: Tag = Tag::user(mix(0, 5), 0);

/// A communicator's context, and its members in the order of their ranks.
type Invitation = (u64, Listed<u32>);

impl Communicator {
    /// The first `size` endpoints of the network: the others are spare, until they are [admitted](Self::admit).
    /// To be called by each of the first, while each spare one [waits](Self::wait_for_admission).
    ///
    /// # Errors
    /// [`CommError::Argument`] if this endpoint is none of the first, or there are not so many.
    pub fn of_first(transport: Arc<dyn Transport>, size: usize) -> Result<Self, CommError> {
        const OP: &str = "communicator";
        let whole = Self::new(transport);
        if size > whole.size() {
            let (got, want) = (size, whole.size());
            return Err(CommError::Argument { op: OP, what: "size", got, want });
        }
        if whole.group.me >= size {
            let (got, want) = (whole.group.me, size);
            return Err(CommError::Argument { op: OP, what: "rank", got, want });
        }
        let ranks: Vec<usize> = (0..size).collect();
        Ok(whole.among(&ranks, mix(0, size as u64)))
    }

    /// The ranks of this communicator and behind them the `newcomers`, as a new one: the next epoch. A
    /// collective of this communicator, in which all name the same newcomers, each of which
    /// [waits](Self::wait_for_admission).
    ///
    /// A newcomer that does not come costs its deadline and nothing else: this communicator stays good. The new
    /// one has the ring and the default topology until all ranks, old and new, declare others alike.
    ///
    /// # Errors
    /// What kept a newcomer away, on every rank; and what this communicator itself failed with.
    pub fn admit(&self, newcomers: &[PeerId]) -> Result<Self, CommError> {
        const OP: &str = "admit";
        if let Some(reason) = self.transport.fixed() {
            return Err(CommError::Fixed { op: OP, reason });
        }
        let mut members = self.group.members.to_vec();
        for &peer in newcomers {
            if members.contains(&peer) || peer.index() >= self.transport.size() {
                let (got, want) = (peer.index(), self.transport.size());
                return Err(CommError::Argument { op: OP, what: "newcomer", got, want });
            }
            members.push(peer);
        }
        // The number of the next collective is one that all have in common.
        let epoch = u64::from(self.next_tags(1)?.number);
        let names = members.iter().fold(mix(ADMITTED, epoch), |name, peer| mix(name, peer.0.into()));
        let context = mix(self.group.context, names);
        if self.group.me == 0 {
            let invitation: Invitation = (context, Listed(members.iter().map(|peer| peer.0).collect()));
            let bytes = postcard::to_stdvec(&invitation).expect("numbers are plain data");
            for &peer in newcomers {
                let mut frame = self.transport.lease(bytes.len());
                frame.bytes_mut().copy_from_slice(&bytes);
                // Whoever cannot be reached does not come.
                let _ = self.transport.send(peer, INVITATION, frame, self.deadline).wait();
            }
        }
        let new =
            Self::of(Arc::clone(&self.transport), self.group.me, members.into(), context, self.deadline);
        self.settle(Ok(new.with_cancel(&self.cancel)))
    }

    /// What all make of a communicator that each has made, or tried to make, of this one and others: it, where
    /// all of its ranks meet in it.
    pub(crate) fn settle(&self, new: Result<Self, CommError>) -> Result<Self, CommError> {
        let met = new.as_ref().map_err(Clone::clone).and_then(Self::barrier);
        // A rank may have left the barrier before another was lost in it.
        let mut all = [u8::from(met.is_ok())];
        self.clone()
            .with_deadline(self.deadline.saturating_add(self.deadline))
            .all_reduce(&mut all, ReduceOp::Min)?;
        match (new, met) {
            (Ok(new), Ok(())) if all[0] == 1 => Ok(new),
            (new, met) => {
                let seen = new.ok().and_then(|new| {
                    new.abort();
                    new.check().err()
                });
                Err(met.err().or(seen).unwrap_or(CommError::Cancelled { op: "admit" }))
            }
        }
    }

    /// Waits to be [admitted](Self::admit) for at most `deadline`, and is a rank of the communicator then.
    ///
    /// # Errors
    /// [`CommError::Deadline`] if nobody did.
    pub fn wait_for_admission(transport: &Arc<dyn Transport>, deadline: Nanos) -> Result<Self, CommError> {
        if let Some(reason) = transport.fixed() {
            return Err(CommError::Fixed { op: "wait_for_admission", reason });
        }
        let me = transport.me();
        let others: Vec<PeerId> =
            (0..transport.size() as u32).map(PeerId).filter(|&peer| peer != me).collect();
        let until = transport.now().saturating_add(deadline);
        loop {
            let left = until.saturating_sub(transport.now());
            let (_, frame) = transport.recv(Source::Any(others.clone()), INVITATION, left).wait()?;
            let Ok((context, Listed(members))) = postcard::from_bytes::<Invitation>(frame.bytes()) else {
                continue;
            };
            let known = |&peer: &u32| (peer as usize) < transport.size();
            let Some(rank) = members.iter().position(|&peer| PeerId(peer) == me) else { continue };
            if !members.iter().all(known) || members.len() > transport.size() {
                continue;
            }
            let members = members.into_iter().map(PeerId).collect();
            let new = Self::of(Arc::clone(transport), rank, members, context, left);
            // One that came too late for its senders is followed by another, perhaps.
            if new.barrier().is_ok() {
                return Ok(new.with_deadline(deadline));
            }
        }
    }

    /// Ends this communicator on all ranks, from any thread: the collectives that wait in it fail, here and
    /// there, and name this rank, which is not taken for lost: all can [shrink](Self::shrink) and go on.
    /// Messages go on; a [`Cancel`](crate::Cancel) ends them too.
    pub fn abort(&self) {
        self.transport.run(&mut Abort(self.clone()));
    }
}

/// Fails a communicator from outside of its collectives.
struct Abort(Communicator);

impl Task for Abort {
    fn name(&self) -> &'static str {
        "abort"
    }
    fn poll(&mut self, port: &mut dyn Port) -> std::task::Poll<()> {
        self.0.group.fail(&CommError::Cancelled { op: "communicator" }, port);
        std::task::Poll::Ready(())
    }
    fn fail(&mut self, _: CommError, _: &mut dyn Port) {}
    fn waits_for(&self) -> PeerId {
        self.0.transport.me()
    }
    fn limit(&self) -> Nanos {
        self.0.deadline
    }
}
