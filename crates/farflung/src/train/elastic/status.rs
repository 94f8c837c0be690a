//! Status of a run that machines join and leave, as seen by one of its members.

use std::collections::BTreeMap;
use std::fmt;

use farflung_base::{Bytes, Nanos, PeerId};
use farflung_parallel::pipeline::Pools;
use serde::{Deserialize, Serialize};

use super::place::Place;
use super::team::Team;
use crate::PeerCounters;
use crate::train::job::Job;
use crate::train::steps::Steps;
use crate::train::trainer::Trainer;

/// Number of changes of members that a status contains.
const CHANGES: usize = 5;
/// Minimum time between two updates of the published status.
const EVERY: Nanos = Nanos::from_millis(500);

/// Status of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// The model's name.
    pub model: String,
    /// Steps done.
    pub step: u64,
    /// Steps of the whole run.
    pub steps: u64,
    /// Number of the view in force.
    pub epoch: u64,
    /// Number of the host's start that began this part of the run: 1 for the first start, and one more for each
    /// restart.
    pub incarnation: u64,
    /// The members, by rank.
    pub members: Vec<MemberStatus>,
    /// Endpoints that are connected and wait to become members.
    pub waiting: Vec<u32>,
    /// How far the newcomers are that have announced themselves, as text, by endpoint.
    #[serde(default)]
    pub coming: BTreeMap<u32, String>,
    /// Mean loss of the last step, in nats.
    pub train_loss: Option<f64>,
    /// Newest loss of the held-out text, in nats.
    pub val_loss: Option<f64>,
    /// Tokens per second of all members together, in the last step.
    pub tokens_per_s: f64,
    /// Bytes sent by the member that answers.
    pub sent: u64,
    /// Seconds of training on the member that answers.
    pub time_s: f64,
    /// Seconds of `time_s` in which members changed and no step was done.
    pub changing_s: f64,
    /// Newest changes of members as text, oldest first.
    pub changes: Vec<String>,
}

/// Status of one member.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MemberStatus {
    /// Number of its endpoint.
    pub slot: u32,
    /// Address at which it listens, if known.
    pub address: Option<String>,
    /// Number of the view with which it became a member.
    pub joined: u64,
    /// Its fraction of a step's microbatches, between 0 and 1. With pools, its fraction of its stage's
    /// microbatches.
    pub share: f64,
    /// Index of its stage, if stages are pools of members.
    #[serde(default)]
    pub stage: Option<u32>,
    /// Whether this is the member that answers.
    pub answers: bool,
    /// Endpoint of the member for which it has reported that it is waiting.
    pub waits_for: Option<u32>,
    /// Traffic between it and the member that answers; `None` for the member that answers.
    #[serde(default)]
    pub counters: Option<PeerCounters>,
}

impl Status {
    /// Returns the fraction of the time that was spent in steps, between 0 and 1.
    #[must_use]
    pub fn goodput(&self) -> f64 {
        if self.time_s > 0.0 { (1.0 - self.changing_s / self.time_s).clamp(0.0, 1.0) } else { 1.0 }
    }
}

impl Status {
    /// Writes the members of each stage, if stages are pools.
    fn write_pools(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(last) = self.members.iter().filter_map(|member| member.stage).max() else { return Ok(()) };
        writeln!(f, "\nstage  members, with their shares of its microbatches")?;
        for stage in 0..=last {
            let pool = self.members.iter().filter(|member| member.stage == Some(stage));
            let pool: Vec<String> =
                pool.map(|member| format!("{} ({:.0}%)", member.slot, 100.0 * member.share)).collect();
            writeln!(f, "{:>5}  {}", stage + 1, pool.join(", "))?;
        }
        Ok(())
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let loss = |loss: Option<f64>| loss.map_or_else(|| "-".to_owned(), |loss| format!("{loss:.4}"));
        writeln!(f, "{}: step {} of {}", self.model, self.step, self.steps)?;
        writeln!(f, "loss      {} (held out {})", loss(self.train_loss), loss(self.val_loss))?;
        writeln!(
            f,
            "speed     {:.0} tokens/s; {:.1}% of {:.0} s in steps, {} sent",
            self.tokens_per_s,
            100.0 * self.goodput(),
            self.time_s,
            Bytes(self.sent)
        )?;
        writeln!(f, "view      {} of incarnation {}", self.epoch, self.incarnation)?;
        writeln!(f, "\nmember  share  since view  waits for  address")?;
        for member in &self.members {
            let waits = member.waits_for.map_or_else(|| "-".to_owned(), |slot| slot.to_string());
            let address = member.address.as_deref().unwrap_or("-");
            writeln!(
                f,
                "{:>6}  {:>4.0}%  {:>10}  {waits:>9}  {address}{}",
                member.slot,
                100.0 * member.share,
                member.joined,
                if member.answers { " (answers)" } else { "" }
            )?;
        }
        self.write_pools(f)?;
        let counters = |member: &MemberStatus| member.counters.filter(|counters| counters.path.is_some());
        if self.members.iter().any(|member| counters(member).is_some()) {
            writeln!(f, "\nconnections of the member that answered:")?;
        }
        for PeerCounters { peer, bytes_sent, bytes_received, path } in
            self.members.iter().filter_map(counters)
        {
            let (to, of) = (Bytes(bytes_sent), Bytes(bytes_received));
            write!(f, "{peer:>6}  sent it {to}, received {of}")?;
            writeln!(f, "{}", path.map_or_else(String::new, |path| format!("; {path}")))?;
        }
        if !self.waiting.is_empty() {
            let waiting: Vec<String> = self.waiting.iter().map(ToString::to_string).collect();
            writeln!(f, "waiting to join: {}", waiting.join(", "))?;
        }
        self.coming.iter().try_for_each(|(slot, line)| writeln!(f, "member {slot} {line}"))?;
        if !self.changes.is_empty() {
            writeln!(f)?;
            self.changes.iter().try_for_each(|change| writeln!(f, "{change}"))?;
        }
        Ok(())
    }
}

/// Data that a member keeps for the status of the run.
#[derive(Debug, Default)]
pub(super) struct Teller {
    changes: Vec<String>,
    changing: Nanos,
    told: Option<Nanos>,
}

impl Teller {
    /// Records a change of members, and the time that it took.
    pub(super) fn changed(&mut self, text: String, took: Nanos) {
        self.changing = self.changing.saturating_add(took);
        self.announce(text);
    }

    /// Records a message about members, which the next status contains at once.
    pub(super) fn announce(&mut self, text: String) {
        self.changes.push(text);
        let excess = self.changes.len().saturating_sub(CHANGES);
        self.changes.drain(..excess);
        self.told = None;
    }

    /// Publishes the status, unless it was published less than `EVERY` ago.
    pub(super) fn tell(
        &mut self,
        (place, team): (&mut Place, Option<&Team>),
        trainer: &Trainer,
        steps: &Steps<'_, '_>,
    ) {
        let now = place.transport().now();
        if self.told.is_some_and(|at| now < at.saturating_add(EVERY)) {
            return;
        }
        self.told = Some(now);
        let status = self.status((place, team), trainer, steps);
        place.arrivals.tell(status);
    }

    fn status(
        &self,
        (place, team): (&mut Place, Option<&Team>),
        trainer: &Trainer,
        steps: &Steps<'_, '_>,
    ) -> Status {
        let waiting = place.newcomers().iter().map(|peer| peer.peer.0).collect();
        let row = steps.record.rows.last();
        let totals = steps.clock.totals(trainer.comm());
        let view = place.view();
        Status {
            model: crate::model_name(&steps.job.model),
            step: trainer.steps_done(),
            steps: steps.job.config.steps,
            epoch: view.map_or(0, |view| view.epoch),
            incarnation: view.map_or(0, |view| view.incarnation),
            members: members(place, team, &steps.job),
            waiting,
            coming: place.coming(),
            train_loss: row.map(|row| row.train_loss),
            val_loss: steps.last_loss,
            tokens_per_s: row.map_or(0.0, |row| row.tokens_per_s),
            sent: totals.bytes_sent,
            time_s: totals.time_s,
            changing_s: self.changing.as_secs_f64(),
            changes: self.changes.clone(),
        }
    }
}

/// Returns the status of the members of the view in force.
fn members(place: &Place, team: Option<&Team>, job: &Job) -> Vec<MemberStatus> {
    let (transport, me) = (place.transport(), place.transport().me());
    let addresses = place.arrivals.addresses();
    let all: u32 = job.plan.microbatches.iter().sum();
    let members = place.view().into_iter().flat_map(|view| &view.members);
    // The replica of a member's pipeline; `None` for a spare.
    let replica = |member| match team {
        Some(team) => team.lineup.stands(member).map(|stands| stands.replica as usize),
        None => Some(member),
    };
    let microbatches =
        |member| replica(member).and_then(|replica| job.plan.microbatches.get(replica).copied());
    let pooled = |member| in_pool(job.plan.pools()?, team?.lineup.rank_of(member)?);
    let share = |member| f64::from(microbatches(member).unwrap_or(0)) / f64::from(all.max(1));
    members
        .enumerate()
        .map(|(number, member)| (member, share(number), pooled(number)))
        .map(|(member, share, pooled)| MemberStatus {
            slot: member.slot,
            address: addresses.get(&PeerId(member.slot)).cloned(),
            joined: member.joined,
            share: pooled.map_or(share, |(_, share)| share),
            stage: pooled.map(|(stage, _)| stage),
            answers: PeerId(member.slot) == me,
            waits_for: transport
                .waits_of(PeerId(member.slot))
                .map(|peer| peer.0)
                .filter(|&peer| peer != member.slot),
            counters: (PeerId(member.slot) != me)
                .then(|| PeerCounters::of(transport.as_ref(), PeerId(member.slot))),
        })
        .collect()
}

/// Returns the stage of a rank of pools, and its fraction of that stage's microbatches.
fn in_pool(pools: &Pools, rank: u32) -> Option<(u32, f64)> {
    let stage = pools.stage_of(rank)?;
    let first = *pools.firsts().get(stage as usize)? as usize;
    let rates = pools.rates.get(first..first + *pools.sizes.get(stage as usize)? as usize)?;
    let all: f64 = rates.iter().map(|&rate| f64::from(rate)).sum();
    Some((stage, f64::from(*pools.rates.get(rank as usize)?) / all))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PathCounters;

    #[test]
    fn a_status_is_a_table() {
        let member = |slot, waits_for| MemberStatus {
            slot,
            address: Some(format!("10.0.0.{slot}:29500")),
            joined: 1,
            share: 0.5,
            stage: None,
            answers: slot == 0,
            waits_for,
            counters: (slot != 0).then_some(PeerCounters {
                peer: slot,
                bytes_sent: 2_000_000,
                bytes_received: 1_000_000,
                path: Some(PathCounters {
                    round_trip_s: Some(0.025),
                    least_round_trip_s: Some(0.02),
                    packets: 1500,
                    retransmissions: 2,
                    queued_bytes: 0,
                    queued_s: 0.5,
                }),
            }),
        };
        let status = Status {
            model: "gpt-2x32".to_owned(),
            step: 12,
            steps: 100,
            epoch: 3,
            incarnation: 1,
            members: vec![member(0, None), member(7, Some(0))],
            waiting: vec![9],
            coming: [(9, "has replayed to step 11 of 12".to_owned())].into(),
            train_loss: Some(2.5),
            val_loss: None,
            tokens_per_s: 1234.0,
            sent: 5_000_000,
            time_s: 20.0,
            changing_s: 1.0,
            changes: vec!["after step 3: member 7 joined".to_owned()],
        };
        let text = "gpt-2x32: step 12 of 100\nloss      2.5000 (held out -)\nspeed     1234 tokens/s; 95.0% \
                    of 20 s in steps, 5 MB sent\nview      3 of incarnation 1\n\nmember  share  since view  \
                    waits for  address\n\x20    0    50%           1          -  10.0.0.0:29500 \
                    (answers)\n\x20    7    50%           1          0  10.0.0.7:29500\n\nconnections of the \
                    member that answered:\n\x20    7  sent it 2 MB, received 1 MB; round trip 25ms (minimum \
                    20ms, queueing 5ms), 2 of 1500 packets sent again, queued 0 B now, 500ms in \
                    total\nwaiting to join: 9\nmember 9 has replayed to step 11 of 12\n\nafter step 3: member 7 joined\n";
        assert_eq!(status.to_string(), text);
        let at = |slot, stage, share| MemberStatus { stage: Some(stage), share, ..member(slot, None) };
        let members = vec![at(0, 0, 1.0), at(3, 1, 0.75), at(4, 1, 0.25)];
        let text = Status { members, ..status }.to_string();
        let pools = "\nstage  members, with their shares of its microbatches\n    1  0 (100%)\n    2  3 \
                     (75%), 4 (25%)\n";
        assert!(text.contains(pools), "{text}");
    }

    #[test]
    fn a_rank_has_its_part_of_its_pool() {
        let pools = Pools { sizes: vec![1, 2], rates: vec![7, 3, 1] };
        assert_eq!(in_pool(&pools, 0), Some((0, 1.0)));
        assert_eq!(in_pool(&pools, 2), Some((1, 0.25)));
        assert_eq!(in_pool(&pools, 3), None);
    }
}
