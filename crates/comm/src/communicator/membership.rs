//! Who belongs to it: going on without those that are lost, and with those that come. The others agree in
//! either case.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Poll;

use farflung_base::{Nanos, PeerId};

use super::{Communicator, mix};
use crate::message::{Incoming, Outgoing};
use crate::transport::{Port, Tag, Task};
use crate::{Cancel, CommError};

/// Marks contexts of ballots and of their outcome apart from those of splits.
const BALLOT: u64 = 2;
const SURVIVORS: u64 = 3;

/// The number of the tag on which a decision travels; rounds count from 0.
const DECIDED: u32 = u32::MAX;

impl Communicator {
    /// The ranks that are left, as a new communicator with numbers of its own; frames of this one are dropped
    /// from now on. To be called by every survivor after a collective has failed.
    ///
    /// Everyone says whom it takes for lost, begins with the one that its failure named, and adds whoever does
    /// not answer within the deadline, until all say the same. Whoever sees that tells the decision to all, and
    /// whoever is told it takes it over and tells it on, so that survivors decide alike also where a rank is
    /// lost in the very round in which some have seen all agree. (It is then a member of the new communicator,
    /// which fails with its first collective, and shrinks.) A rank that is taken for lost while it lives finds
    /// itself alone.
    ///
    /// After a cancellation nobody is lost: all go on, with the same numbers, under a new epoch.
    ///
    /// # Errors
    /// [`CommError::Ended`] if this endpoint is the one that was lost; [`CommError::Cancelled`] if this call
    /// was cancelled; [`CommError::Fixed`] over MPI, unless no rank is lost.
    pub fn shrink(&self) -> Result<Self, CommError> {
        let fixed = self.transport.fixed().map(|reason| CommError::Fixed { op: "shrink", reason });
        let members = &self.group.members;
        let number = |peer: PeerId| members.iter().position(|&member| member == peer);
        // Whoever cancelled is well.
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

/// Ranks as bytes.
fn write(ranks: &BTreeSet<usize>) -> Arc<Vec<u8>> {
    Arc::new(ranks.iter().flat_map(|&rank| (rank as u32).to_le_bytes()).collect())
}

/// The ranks below `size` in untrusted bytes; what makes no sense is none.
fn read(bytes: &[u8], size: usize) -> Option<BTreeSet<usize>> {
    let (words, []) = bytes.as_chunks::<4>() else { return None };
    let ranks = words.iter().map(|word| u32::from_le_bytes(*word) as usize);
    ranks.map(|rank| (rank < size).then_some(rank)).collect()
}

/// A message of ranks on its way in.
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
        // Lost, or longer than any answer.
        _ => Answer::Here(None),
    }
}

/// One round: what this rank holds goes to all that it takes for alive, and theirs comes back, or a decision
/// from any.
struct Ballot {
    me: PeerId,
    tag: Tag,
    peers: Vec<PeerId>,
    outgoing: Vec<Option<Outgoing>>,
    incoming: Vec<Option<Incoming>>,
    /// By peer; none of one that is lost.
    answers: Vec<Option<BTreeSet<usize>>>,
    members: Arc<[PeerId]>,
    /// By member, those that are lost among them: what they decided before is still good.
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

    /// Whether there is a decision of somebody.
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
                // Whoever cannot be reached does not answer either.
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
    fn is_cancelled(&self) -> bool {
        self.cancel.is_cancelled()
    }
}

/// Tells a decision to all others; to those that it counts as lost only where that costs no time.
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
        // Whoever cannot be told is about to be lost.
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
