//! Going on without those that are lost: the survivors agree on who they are.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::task::Poll;

use farflung_base::{Nanos, PeerId};

use super::{Communicator, mix};
use crate::CommError;
use crate::message::{Incoming, Outgoing};
use crate::transport::{Channel, Port, Tag, Task};

/// Marks contexts of ballots and of their outcome apart from those of splits.
const BALLOT: u64 = 2;
const SURVIVORS: u64 = 3;

impl Communicator {
    /// The ranks that are left, as a new communicator with numbers of its own; frames of this one are dropped from now
    /// on. To be called by every survivor after a collective has failed.
    ///
    /// Everyone says whom it takes for lost, begins with the one that its failure named, and adds whoever does not
    /// answer within the deadline, until all say the same. A rank that is taken for lost while it lives finds itself
    /// alone. Where a rank is lost in the very round in which all agree, the new communicator fails with its first
    /// collective, and shrinks again.
    ///
    /// # Errors
    /// [`CommError::Ended`] if this endpoint itself is what is lost.
    pub fn shrink(&self) -> Result<Self, CommError> {
        let members = &self.group.members;
        let number = |peer: PeerId| members.iter().position(|&member| member == peer);
        let failed = self.check().err();
        let mut lost: BTreeSet<usize> =
            failed.as_ref().and_then(CommError::peer).and_then(number).into_iter().collect();
        lost.remove(&self.group.me);
        for round in 0.. {
            let alive: Vec<usize> = (0..members.len()).filter(|rank| !lost.contains(rank)).collect();
            let mut ballot = Ballot::new(self, &alive, &lost, round);
            self.transport.run(&mut ballot);
            if let Some(ended) = ballot.ended {
                return Err(ended);
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
        self.transport.retire(self.group.context);
        let alive: Vec<usize> = (0..members.len()).filter(|rank| !lost.contains(rank)).collect();
        let names = alive.iter().fold(SURVIVORS, |name, &rank| mix(name, rank as u64));
        Ok(self.among(&alive, mix(self.group.context, names)))
    }
}

/// One round: what this rank holds goes to all that it takes for alive, and theirs comes back.
struct Ballot {
    me: PeerId,
    tag: Tag,
    peers: Vec<PeerId>,
    outgoing: Vec<Option<Outgoing>>,
    incoming: Vec<Option<Incoming>>,
    /// By peer; none of one that is lost.
    answers: Vec<Option<BTreeSet<usize>>>,
    size: usize,
    limit: Nanos,
    ended: Option<CommError>,
}

impl Ballot {
    fn new(comm: &Communicator, alive: &[usize], lost: &BTreeSet<usize>, round: u32) -> Self {
        let members = &comm.group.members;
        let ballot: Vec<u8> = lost.iter().flat_map(|&rank| (rank as u32).to_le_bytes()).collect();
        let ballot = Arc::new(ballot);
        let me = members[comm.group.me];
        let peers: Vec<PeerId> = alive.iter().map(|&rank| members[rank]).collect();
        let other = |peer: &PeerId| *peer != me;
        Self {
            me,
            tag: Tag { context: mix(comm.group.context, BALLOT), channel: Channel::User, number: round },
            outgoing: peers.iter().map(|p| other(p).then(|| Outgoing::new(Arc::clone(&ballot)))).collect(),
            incoming: peers.iter().map(|p| other(p).then(Incoming::default)).collect(),
            answers: peers.iter().map(|p| (!other(p)).then(|| lost.clone())).collect(),
            peers,
            size: members.len(),
            limit: comm.deadline,
            ended: None,
        }
    }

    /// The ranks in an answer; one that makes no sense is none.
    fn read(&self, bytes: &[u8]) -> Option<BTreeSet<usize>> {
        let (words, []) = bytes.as_chunks::<4>() else { return None };
        let ranks = words.iter().map(|word| u32::from_le_bytes(*word) as usize);
        ranks.map(|rank| (rank < self.size).then_some(rank)).collect()
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
                // Whoever cannot be reached does not answer either.
                if out.poll(port, peer, self.tag, 0).unwrap_or(true) {
                    self.outgoing[i] = None;
                }
            }
            if let Some(incoming) = &mut self.incoming[i] {
                match incoming.poll(port, "shrink", peer, self.tag, 0) {
                    Ok(false) if incoming.bytes.len() <= 4 * self.size => continue,
                    Ok(true) => {
                        let bytes = std::mem::take(&mut incoming.bytes);
                        self.answers[i] = self.read(&bytes);
                    }
                    Err(ended @ CommError::Ended { .. }) => {
                        self.ended = Some(ended);
                        return Poll::Ready(());
                    }
                    // Lost, or longer than any answer.
                    _ => {}
                }
                self.incoming[i] = None;
            }
        }
        let waits = self.incoming.iter().any(Option::is_some) || self.outgoing.iter().any(Option::is_some);
        if waits { Poll::Pending } else { Poll::Ready(()) }
    }
    fn fail(&mut self, error: CommError, _: &mut dyn Port) {
        // At the deadline, whoever has not answered is lost.
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
}
