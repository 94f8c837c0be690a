//! Growing a communicator: ranks that are new or back join it if all agree.

use std::sync::Arc;

use farflung_base::{Nanos, PeerId};

use super::{Communicator, mix};
use crate::CommError;
use crate::control::BoundedVec;
use crate::element::ReduceOp;
use crate::transport::{Port, Source, Tag, Task, Transport};

/// Constant that is mixed into the context ids of communicators made by an admission, so that they differ from
/// other ids.
const ADMITTED: u64 = 4;

/// Tag on which endpoints outside of the communicator wait for an invitation.
const INVITATION: Tag = Tag::user(mix(0, 5), 0);

/// Context of the new communicator, and its members in rank order.
type Invitation = (u64, BoundedVec<u32>);

impl Communicator {
    /// Returns a communicator of the first `size` endpoints of the network; the others are spare until they are
    /// [admitted](Self::admit). Each of the first `size` endpoints must call it, while each spare one
    /// [waits](Self::wait_for_admission).
    ///
    /// # Errors
    /// [`CommError::Argument`] if this endpoint is not among the first `size`, or there are fewer endpoints.
    pub fn of_first(transport: Arc<dyn Transport>, size: usize) -> Result<Self, CommError> {
        const OP: &str = "communicator";
        let whole = Self::new(transport);
        if size > whole.size() {
            let (got, want) = (size, whole.size());
            return Err(CommError::Argument {
                op: OP,
                what: "size (must be at most the number of endpoints)",
                got,
                want,
            });
        }
        if whole.group.me >= size {
            let (got, want) = (whole.group.me, size);
            return Err(CommError::Argument { op: OP, what: "rank (must be below the size)", got, want });
        }
        let ranks: Vec<usize> = (0..size).collect();
        Ok(whole.among(&ranks, mix(0, size as u64)))
    }

    /// Returns a new communicator, the next epoch, of this communicator's ranks followed by the `newcomers`.
    /// All ranks must call it, with the same newcomers, and each newcomer must [wait](Self::wait_for_admission)
    /// for it.
    ///
    /// If a newcomer does not join, the call fails after the deadline; this communicator can still be used. The
    /// new communicator uses the ring and the default topology until all of its ranks declare the same other
    /// ones.
    ///
    /// # Errors
    /// On every rank, the reason why a newcomer did not join, or the failure of this communicator.
    /// [`CommError::Fixed`] over MPI; [`CommError::Argument`] if a newcomer is a member already or not in the
    /// network.
    pub fn admit(&self, newcomers: &[PeerId]) -> Result<Self, CommError> {
        const OP: &str = "admit";
        if let Some(reason) = self.transport.fixed() {
            return Err(CommError::Fixed { op: OP, reason });
        }
        let mut members = self.group.members.to_vec();
        for &peer in newcomers {
            if members.contains(&peer) || peer.index() >= self.transport.size() {
                let (got, want) = (peer.index(), self.transport.size());
                return Err(CommError::Argument {
                    op: OP,
                    what: "newcomer (must not be a member, and be below the number of endpoints)",
                    got,
                    want,
                });
            }
            members.push(peer);
        }
        // The number of the next collective is the same on all ranks, so it serves as the epoch.
        let epoch = u64::from(self.next_tags(1)?.number);
        let names = members.iter().fold(mix(ADMITTED, epoch), |name, peer| mix(name, peer.0.into()));
        let context = mix(self.group.context, names);
        if self.group.me == 0 {
            let invitation: Invitation = (context, BoundedVec(members.iter().map(|peer| peer.0).collect()));
            let bytes = postcard::to_stdvec(&invitation).expect("numbers can always be serialized");
            for &peer in newcomers {
                let mut frame = self.transport.lease(bytes.len());
                frame.bytes_mut().copy_from_slice(&bytes);
                // A newcomer that cannot be reached does not join; `settle` fails then.
                let _ = self.transport.send(peer, INVITATION, frame, self.deadline).wait();
            }
        }
        let new =
            Self::of(Arc::clone(&self.transport), self.group.me, members.into(), context, self.deadline);
        self.settle(Ok(new.with_cancel(&self.cancel)))
    }

    /// Decides together whether to use `new`, a communicator of these ranks and others that each rank has made
    /// or has failed to make. Returns it if all of its ranks have met in it; otherwise every rank gets an
    /// error.
    pub(crate) fn settle(&self, new: Result<Self, CommError>) -> Result<Self, CommError> {
        let met = new.as_ref().map_err(Clone::clone).and_then(Self::barrier);
        // The barrier may have succeeded on this rank and failed on another, so the ranks compare their
        // results.
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

    /// Waits for at most `deadline` until this endpoint is [admitted](Self::admit) to a communicator, and
    /// returns that communicator.
    ///
    /// # Errors
    /// [`CommError::Deadline`] if it was not admitted in time; [`CommError::Fixed`] over MPI.
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
            let Ok((context, BoundedVec(members))) = postcard::from_bytes::<Invitation>(frame.bytes()) else {
                continue;
            };
            let known = |&peer: &u32| (peer as usize) < transport.size();
            let Some(rank) = members.iter().position(|&peer| PeerId(peer) == me) else { continue };
            if !members.iter().all(known) || members.len() > transport.size() {
                continue;
            }
            let members = members.into_iter().map(PeerId).collect();
            let new = Self::of(Arc::clone(transport), rank, members, context, left);
            // If the barrier fails, the sender no longer waits for this old invitation. Another invitation may
            // follow.
            if new.barrier().is_ok() {
                return Ok(new.with_deadline(deadline));
            }
        }
    }

    /// Aborts this communicator on all ranks, from any thread. Collectives that wait in it fail, on all ranks,
    /// with an error that names this rank; it does not count as lost, so all ranks can [shrink](Self::shrink)
    /// and continue. Point-to-point messages are not aborted; a [`Cancel`](crate::Cancel) ends them too.
    pub fn abort(&self) {
        self.transport.run(&mut Abort(self.clone()));
    }
}

/// Task that fails a communicator from outside of its collectives.
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
