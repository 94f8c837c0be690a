//! A change of members that was carried out, for the user and for `events.jsonl`.

use std::fmt;

use farflung_base::{Bytes, Nanos, PeerId};

use super::member_names::MemberNames;
use crate::events::{EventKind, LostSequences};

/// Result of a change of members.
#[derive(Debug, Clone, PartialEq)]
pub struct Changed {
    /// Number of the new view.
    pub epoch: u64,
    /// Endpoints that have joined.
    pub joined: Vec<PeerId>,
    /// Endpoints that have left or were lost.
    pub left: Vec<PeerId>,
    /// Names of the members.
    pub names: MemberNames,
    /// Number of members now.
    pub members: usize,
    /// Number of steps done, the same on all members.
    pub step: u64,
    /// The failure that this rank saw and that caused the change; `None` if members only joined or left on
    /// request.
    pub reason: Option<String>,
    /// Bytes of state that this member received, or else those of the member that received most; without the
    /// optimizer of local steps. In pipelines: all tensors that moved, and the records of steps for the
    /// newcomer that lacked most. 0 if no state was sent.
    pub state: u64,
    /// Number of members that sent state.
    pub donors: usize,
    /// Whether this rank received state from others.
    pub caught_up: bool,
    /// Sequences of the lost members in the local steps of a round whose average lacks them, whether or not
    /// they have trained on them.
    pub lost: Vec<LostSequences>,
    /// Number of times that the step in flight has failed although all members answered.
    pub repeated: u32,
    /// Number of steps that were done and must be done again, because the remaining members together do not
    /// have all parts of the model as it was after those steps.
    pub lost_steps: u64,
    /// Whether the members continue from their checkpoints, because they do not have the whole model in memory.
    pub from_checkpoints: bool,
    /// In pipelines: number of pipelines now, stages of each, and number of members without a part.
    pub pipelines: Option<(u32, u32, usize)>,
    /// Number of members without a part that fetch the parts of a further pipeline while the others train on.
    pub fetching: usize,
    /// Number of members of each stage if stages are pools; otherwise empty.
    pub pools: Vec<u32>,
    /// Whether the stages are pools only because a pipeline has lost a rank.
    pub rerouted: bool,
    /// Percentage of the step in flight that was computed before the change and is not computed again.
    pub kept_percent: u32,
    /// The member that moved to another stage and the index of that stage, if this was the purpose of the
    /// change.
    pub moved: Option<(PeerId, u32)>,
    /// Time from the beginning of the change, or of the step in which a loss was noticed, to its end, by the
    /// transport's clock.
    pub took: Nanos,
}

impl fmt::Display for Changed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { joined: came, left: went, members, step, reason, state, donors, took, .. } = self;
        let names = |peers: &[PeerId]| {
            let names: Vec<String> = peers.iter().map(|peer| self.names.called(peer.0)).collect();
            names.join(", ")
        };
        let mut parts = Vec::new();
        if self.is_repeat() {
            parts.push(format!(
                "all members answer, and the step is repeated (attempt {})",
                self.repeated + 1
            ));
        }
        if !went.is_empty() {
            parts.push(format!("{} {}", names(went), if reason.is_some() { "lost" } else { "left" }));
        }
        if !came.is_empty() {
            parts.push(format!("{} joined", names(came)));
        }
        if let Some((peer, stage)) = self.moved {
            parts.push(format!("{} moves to stage {}", self.names.called(peer.0), stage + 1));
        }
        if parts.is_empty() {
            parts.push("all members".to_owned());
        }
        let verb = if *members == 1 { "member continues" } else { "members continue" };
        write!(f, "after step {step}: {}; {members} {verb} after {took}", parts.join(", "))?;
        match donors {
            0 => Ok(()),
            1 => write!(f, ", {} of state from 1 of them", Bytes(*state)),
            n => write!(f, ", {} of state from {n} of them", Bytes(*state)),
        }?;
        match self.pipelines {
            None => Ok(()),
            Some((count, stages, spares)) => {
                let plural = if count == 1 { "" } else { "s" };
                let sizes: Vec<String> = self.pools.iter().map(u32::to_string).collect();
                match &sizes[..] {
                    [] => write!(f, "; {count} pipeline{plural} of {stages}"),
                    _ if self.rerouted => write!(f, "; stages of {} members, re-routed", sizes.join(", ")),
                    _ => write!(f, "; pools of {} members", sizes.join(", ")),
                }?;
                if spares > 0 {
                    write!(f, ", and {spares} without a part")?;
                }
                match self.fetching {
                    0 => Ok(()),
                    n => write!(f, ", {n} of which fetch the parts of a further pipeline meanwhile"),
                }
            }
        }?;
        if self.kept_percent > 0 {
            write!(f, "; {}% of the step in flight is kept", self.kept_percent)?;
        }
        if self.from_checkpoints {
            write!(f, "; from the checkpoints of step {step}")?;
        }
        match self.lost_steps {
            0 => Ok(()),
            n => write!(f, "; {n} steps are lost"),
        }?;
        match self.lost_sequences() {
            0 => Ok(()),
            n => write!(f, "; {n} sequences are lost"),
        }
    }
}

impl Changed {
    fn lost_sequences(&self) -> u64 {
        self.lost.iter().map(LostSequences::count).sum()
    }

    /// Returns whether the members are the same as before and only repeat a step.
    fn is_repeat(&self) -> bool {
        self.repeated > 0 && self.joined.is_empty() && self.left.is_empty()
    }

    /// Returns the entry for `events.jsonl`. `deadline` is the time for which ranks now wait for each other.
    pub(super) fn event(&self, deadline: Nanos) -> EventKind {
        let millis = |time: Nanos| time.0 / 1_000_000;
        let took_ms = millis(self.took);
        if self.is_repeat() {
            let (epoch, times, reason) = (self.epoch, self.repeated, self.reason.clone());
            return EventKind::Repeated { epoch, times, deadline_ms: millis(deadline), took_ms, reason };
        }
        let changed = self.joined.iter().chain(&self.left);
        let name = |peer: &PeerId| Some((peer.0, self.names.of(peer.0)?.to_string()));
        let names = changed.filter_map(name).collect();
        let numbers = |peers: &[PeerId]| peers.iter().map(|peer| peer.0).collect();
        EventKind::Members {
            epoch: self.epoch,
            members: self.members,
            names,
            joined: numbers(&self.joined),
            left: numbers(&self.left),
            lost_sequences: self.lost_sequences(),
            lost: self.lost.clone(),
            lost_steps: self.lost_steps,
            from_checkpoints: self.from_checkpoints,
            kept_percent: self.kept_percent,
            took_ms,
            reason: self.reason.clone(),
        }
    }
}
