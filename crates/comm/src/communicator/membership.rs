//! Shrinking a communicator: the surviving ranks agree on the ranks that are lost, and continue without them.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Poll;

use farflung_base::{Nanos, PeerId};

use super::{Communicator, mix};
use crate::message::{Incoming, Outgoing};
use crate::transport::{Port, Tag, Task};
use crate::{Cancel, CommError};

/// This and [`SURVIVORS`] are mixed into the context ids of votes and of the communicators that result, so that
/// they differ from those of splits.
const BALLOT: u64 = 2;
const SURVIVORS: u64 = 3;

/// Tag number of the message with the decision. The tag numbers of the rounds are 0, 1, 2 and so on.
const DECIDED: u32 = u32::MAX;

impl Communicator {
    /// Returns a new communicator of the surviving ranks, with new rank numbers. Frames of this communicator
    /// are dropped from now on. Every survivor must call it after a collective has failed.
    ///
    /// The ranks vote in rounds. Each sends the set of ranks that it considers lost, which begins with the one
    /// named by its failure. It adds the ranks in the sets of others, and those that do not answer within the
    /// deadline, until all sets are equal. A rank that sees equal sets sends the decision to all; a rank that
    /// receives a decision adopts it and sends it on. So all survivors decide alike, even if a rank is lost in
    /// the round in which only some have seen equal sets. (The new communicator then includes that rank; its
    /// first collective fails, and it can shrink again.) A live rank that the others consider lost ends up as
    /// the only rank of its communicator.
    ///
    /// After a cancellation no rank is lost: the new communicator has the same ranks and numbers, with a new
    /// context id.
    ///
    /// # Errors
    /// [`CommError::Ended`] if this endpoint is the one that was lost; [`CommError::Cancelled`] if this call
    /// was cancelled; [`CommError::Fixed`] over MPI, after a failure that is not a cancellation.
    pub fn shrink(&self) -> Result<Self, CommError> {
        let fixed = self.transport.fixed().map(|reason| CommError::Fixed { op: "shrink", reason });
        let members = &self.group.members;
        let number = |peer: PeerId| members.iter().position(|&member| member == peer);
        // A rank that cancelled is not lost.
        let failed = self.check().err().filter(|error| !error.is_cancelled());
        let mut lost: BTreeSet<usize> =
            failed.as_ref().and_then(CommError::peer).and_then(number).into_iter().collect();
        lost.remove(&self.group.me);
        if let Some(fixed) = fixed.clone().filter(|_| failed.is_some()) {
            return Err(fixed);
        }
        let attempt = u64::from(self.group.shrinks.fetch_add(1, Ordering::Relaxed));
        let context = mix(mix(self.group.context, BALLOT), attempt);
        for round in 0.. {
            let alive: Vec<usize> = (0..members.len()).filter(|rank| !lost.contains(rank)).collect();
            let mut ballot = Ballot::new(self, &alive, &lost, Tag::user(context, round));
            self.transport.run(&mut ballot);
            if let Some(ended) = ballot.ended {
                return Err(ended);
            }
            if let Some(decided) = ballot.decided {
                lost = decided;
                break;
            }
            let before = lost.clone();
            let mut same = true;
            for (&rank, answer) in alive.iter().zip(&ballot.answers) {
                match answer {
                    Some(theirs) => {
                        same &= *theirs == before;
                        lost.extend(theirs.iter().filter(|&&rank| rank != self.group.me));
                    }
                    None => {
                        lost.insert(rank);
                    }
                }
            }
            if same && lost == before {
                break;
            }
        }
        if let Some(fixed) = fixed.filter(|_| !lost.is_empty()) {
            return Err(fixed);
        }
        let mut announce = Announce::new(self, &lost, Tag::user(context, DECIDED));
        self.transport.run(&mut announce);
        if let Some(ended) = announce.ended {
            return Err(ended);
        }
        self.transport.retire(context);
        self.transport.retire(self.group.context);
        let mut alive: Vec<usize> = (0..members.len()).filter(|rank| !lost.contains(rank)).collect();
        if lost.contains(&self.group.me) {
            alive = vec![self.group.me];
        }
        let names = alive.iter().fold(mix(SURVIVORS, attempt), |name, &rank| mix(name, rank as u64));
        Ok(self.among(&alive, mix(self.group.context, names)))
    }
}

/// Encodes ranks as bytes.
fn write(ranks: &BTreeSet<usize>) -> Arc<Vec<u8>> {
    Arc::new(ranks.iter().flat_map(|&rank| (rank as u32).to_le_bytes()).collect())
}

/// Decodes ranks below `size` from untrusted bytes; `None` if they are invalid.
fn read(bytes: &[u8], size: usize) -> Option<BTreeSet<usize>> {
    let (words, []) = bytes.as_chunks::<4>() else { return None };
    let ranks = words.iter().map(|word| u32::from_le_bytes(*word) as usize);
    ranks.map(|rank| (rank < size).then_some(rank)).collect()
}

/// State of a message of another rank that contains a set of ranks.
enum Answer {
    Waits,
    Here(Option<BTreeSet<usize>>),
    Ended(CommError),
}

fn poll_ranks(port: &mut dyn Port, incoming: &mut Incoming, from: PeerId, tag: Tag, size: usize) -> Answer {
    match incoming.poll(port, "shrink", from, tag, 0) {
        Ok(false) if incoming.bytes.len() <= 4 * size => Answer::Waits,
        Ok(true) => Answer::Here(read(&std::mem::take(&mut incoming.bytes), size)),
        Err(ended @ CommError::Ended { .. }) => Answer::Ended(ended),
        // The peer is lost, or its message is longer than any valid message.
        _ => Answer::Here(None),
    }
}

/// One round of the vote: sends this rank's set to all ranks that it considers alive, and receives theirs, or a
/// decision of any rank.
struct Ballot {
    me: PeerId,
    tag: Tag,
    peers: Vec<PeerId>,
    outgoing: Vec<Option<Outgoing>>,
    incoming: Vec<Option<Incoming>>,
    /// Answers by peer; `None` for a peer that is lost or has sent nothing valid.
    answers: Vec<Option<BTreeSet<usize>>>,
    members: Arc<[PeerId]>,
    /// Incoming decisions by member. Members that are considered lost are included, because a decision that
    /// they sent earlier is still valid.
    decisions: Vec<Option<Incoming>>,
    decided: Option<BTreeSet<usize>>,
    limit: Nanos,
    cancel: Cancel,
    ended: Option<CommError>,
}

impl Ballot {
    fn new(comm: &Communicator, alive: &[usize], lost: &BTreeSet<usize>, tag: Tag) -> Self {
        let members = &comm.group.members;
        let ballot = write(lost);
        let me = members[comm.group.me];
        let peers: Vec<PeerId> = alive.iter().map(|&rank| members[rank]).collect();
        let other = |peer: &PeerId| *peer != me;
        Self {
            me,
            tag,
            outgoing: peers.iter().map(|p| other(p).then(|| Outgoing::new(Arc::clone(&ballot)))).collect(),
            incoming: peers.iter().map(|p| other(p).then(Incoming::default)).collect(),
            answers: peers.iter().map(|p| (!other(p)).then(|| lost.clone())).collect(),
            decisions: members.iter().map(|p| other(p).then(Incoming::default)).collect(),
            decided: None,
            members: Arc::clone(members),
            peers,
            limit: comm.deadline,
            cancel: comm.cancel.clone(),
            ended: None,
        }
    }

    /// Returns whether a decision has arrived.
    fn poll_decisions(&mut self, port: &mut dyn Port) -> bool {
        let tag = Tag { number: DECIDED, ..self.tag };
        for (decision, &peer) in self.decisions.iter_mut().zip(&*self.members) {
            let Some(incoming) = decision else { continue };
            match poll_ranks(port, incoming, peer, tag, self.members.len()) {
                Answer::Waits => continue,
                Answer::Here(decided) => self.decided = decided,
                Answer::Ended(ended) => self.ended = Some(ended),
            }
            *decision = None;
            if self.decided.is_some() || self.ended.is_some() {
                return true;
            }
        }
        false
    }
}

impl Task for Ballot {
    fn name(&self) -> &'static str {
        "shrink"
    }
    fn poll(&mut self, port: &mut dyn Port) -> Poll<()> {
        for i in 0..self.peers.len() {
            let peer = self.peers[i];
            if let Some(out) = &mut self.outgoing[i] {
                // A peer that cannot be reached does not answer, so its answer stays `None`.
                if out.poll(port, peer, self.tag, 0).unwrap_or(true) {
                    self.outgoing[i] = None;
                }
            }
            if let Some(incoming) = &mut self.incoming[i] {
                match poll_ranks(port, incoming, peer, self.tag, self.members.len()) {
                    Answer::Waits => continue,
                    Answer::Here(answer) => self.answers[i] = answer,
                    Answer::Ended(ended) => {
                        self.ended = Some(ended);
                        return Poll::Ready(());
                    }
                }
                self.incoming[i] = None;
            }
        }
        if self.poll_decisions(port) {
            return Poll::Ready(());
        }
        let waits = self.incoming.iter().any(Option::is_some) || self.outgoing.iter().any(Option::is_some);
        if waits { Poll::Pending } else { Poll::Ready(()) }
    }
    fn fail(&mut self, error: CommError, _: &mut dyn Port) {
        // At the deadline, peers without an answer count as lost, so other errors are ignored.
        if matches!(error, CommError::Ended { .. } | CommError::Cancelled { .. }) {
            self.ended = Some(error);
        }
    }
    fn waits_for(&self) -> PeerId {
        let silent = self.incoming.iter().position(Option::is_some);
        silent.map_or(self.me, |i| self.peers[i])
    }
    fn limit(&self) -> Nanos {
        self.limit
    }
    fn is_cancelled(&self) -> bool {
        self.cancel.is_cancelled()
    }
}

/// Sends the decision to all other ranks. To ranks that the decision counts as lost, it sends only what the
/// network accepts without blocking.
struct Announce {
    tag: Tag,
    left: Vec<(PeerId, bool, Outgoing)>,
    limit: Nanos,
    cancel: Cancel,
    ended: Option<CommError>,
}

impl Announce {
    fn new(comm: &Communicator, lost: &BTreeSet<usize>, tag: Tag) -> Self {
        let decision = write(lost);
        let others = comm.group.members.iter().enumerate().filter(|&(rank, _)| rank != comm.group.me);
        let left =
            others.map(|(rank, &peer)| (peer, lost.contains(&rank), Outgoing::new(Arc::clone(&decision))));
        Self { tag, left: left.collect(), limit: comm.deadline, cancel: comm.cancel.clone(), ended: None }
    }
}

impl Task for Announce {
    fn name(&self) -> &'static str {
        "shrink"
    }
    fn poll(&mut self, port: &mut dyn Port) -> Poll<()> {
        let tag = self.tag;
        self.left.retain_mut(|(peer, lost, out)| !out.poll(port, *peer, tag, 0).unwrap_or(true) && !*lost);
        if self.left.is_empty() { Poll::Ready(()) } else { Poll::Pending }
    }
    fn fail(&mut self, error: CommError, _: &mut dyn Port) {
        // A peer that cannot be reached is about to be lost, so other errors are ignored.
        if matches!(error, CommError::Ended { .. } | CommError::Cancelled { .. }) {
            self.ended = Some(error);
        }
    }
    fn waits_for(&self) -> PeerId {
        self.left.first().map_or(PeerId(0), |(peer, ..)| *peer)
    }
    fn limit(&self) -> Nanos {
        self.limit
    }
    fn is_cancelled(&self) -> bool {
        self.cancel.is_cancelled()
    }
}
