//! Status of a run that machines join and leave, as seen by one of its members.

use std::collections::BTreeMap;
use std::fmt;

use farflung_base::Bytes;
use serde::{Deserialize, Serialize};

use crate::PeerCounters;

/// Status of a run.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
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
    /// Number of members that are not in `members`, because the answer had no room for them.
    #[serde(default)]
    pub left_out: usize,
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
    /// Seconds of `time_s` that members cost who came, left or were lost, with the steps in which that was
    /// noticed.
    pub changing_s: f64,
    /// Newest changes of members as text, oldest first.
    pub changes: Vec<String>,
    /// Whether the member that answers has no part of the model now. The rest is as it was when it last had
    /// one.
    #[serde(default)]
    pub is_spare: bool,
}

/// Status of one member.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MemberStatus {
    /// Number of its endpoint.
    pub slot: u32,
    /// Its name, if it has one.
    #[serde(default)]
    pub name: Option<String>,
    /// Address at which it listens, if known.
    pub address: Option<String>,
    /// Number of the view with which it became a member.
    pub joined: u64,
    /// Its fraction of a step's microbatches, between 0 and 1. With pools, its fraction of its stage's
    /// microbatches.
    pub share: f64,
    /// Index of its replica, which in pipelines is its pipeline; `None` if stages are pools, and without a part
    /// of the model.
    #[serde(default)]
    pub replica: Option<u32>,
    /// Index of its stage, if the model is divided into stages and it has a part of it.
    #[serde(default)]
    pub stage: Option<u32>,
    /// Whether this is the member that answers.
    pub answers: bool,
    /// Endpoint of the member for which it waits: one that computes longer in each step, or one that does not
    /// answer.
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
    /// Shortens the status to `room` bytes of JSON, if it is longer: traffic is left out first, then members
    /// from the end, except the one that answers, then newcomers and changes.
    pub(super) fn shortened(mut self, room: usize) -> Self {
        let is_too_long = |status: &Self| {
            serde_json::to_vec(status).expect("texts and numbers are plain data").len() > room
        };
        if is_too_long(&self) {
            self.members.iter_mut().for_each(|member| member.counters = None);
        }
        while is_too_long(&self) && self.members.len() > 1 {
            let all = self.members.len();
            let mut number = 0;
            self.members.retain(|member| {
                number += 1;
                number <= all / 2 || member.answers
            });
            self.left_out += all - self.members.len();
        }
        if is_too_long(&self) {
            (self.waiting, self.coming, self.changes) = (Vec::new(), BTreeMap::new(), Vec::new());
        }
        self
    }

    /// Returns all texts in it.
    pub(super) fn texts_mut(&mut self) -> impl Iterator<Item = &mut String> {
        let members =
            self.members.iter_mut().flat_map(|member| member.name.iter_mut().chain(&mut member.address));
        let lines = self.coming.values_mut().chain(&mut self.changes);
        members.chain(lines).chain([&mut self.model])
    }

    /// Writes the members of each stage.
    fn write_stages(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(last) = self.members.iter().filter_map(|member| member.stage).max() else { return Ok(()) };
        let pools = self.members.iter().any(|member| member.stage.is_some() && member.replica.is_none());
        let shares = if pools { "shares of its microbatches" } else { "pipelines" };
        writeln!(f, "\nstage  members, with their {shares}")?;
        for stage in 0..=last {
            let here = self.members.iter().filter(|member| member.stage == Some(stage));
            let mut here: Vec<&MemberStatus> = here.collect();
            here.sort_by_key(|member| member.replica);
            let named = |member: &&MemberStatus| match member.replica {
                Some(replica) => format!("{} ({})", member.slot, replica.saturating_add(1)),
                None => format!("{} ({:.0}%)", member.slot, 100.0 * member.share),
            };
            let here: Vec<String> = here.iter().map(named).collect();
            writeln!(f, "{:>5}  {}", stage.saturating_add(1), here.join(", "))?;
        }
        let without: Vec<String> = self
            .members
            .iter()
            .filter(|member| member.stage.is_none())
            .map(|member| member.slot.to_string())
            .collect();
        if without.is_empty() { Ok(()) } else { writeln!(f, "without a part: {}", without.join(", ")) }
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let loss = |loss: Option<f64>| loss.map_or_else(|| "-".to_owned(), |loss| format!("{loss:.4}"));
        writeln!(f, "{}: step {} of {}", self.model, self.step, self.steps)?;
        if self.is_spare {
            writeln!(
                f,
                "the member that answers has no part of the model now, and does not know of later steps"
            )?;
        }
        writeln!(f, "loss      {} (held out {})", loss(self.train_loss), loss(self.val_loss))?;
        writeln!(
            f,
            "speed     {:.0} tokens/s; {:.1}% of {:.0} s in steps, {} sent",
            self.tokens_per_s,
            100.0 * self.goodput(),
            self.time_s,
            Bytes(self.sent)
        )?;
        let is_named = self.members.iter().any(|member| member.name.is_some());
        let named = if is_named { ", name" } else { "" };
        writeln!(f, "view      {} of incarnation {}", self.epoch, self.incarnation)?;
        writeln!(f, "\nmember  share  since view  waits for  address{named}")?;
        for member in &self.members {
            let waits = member.waits_for.map_or_else(|| "-".to_owned(), |slot| slot.to_string());
            let address = member.address.as_deref().unwrap_or("-");
            let name = member.name.as_deref().map_or_else(String::new, |name| format!(", {name}"));
            writeln!(
                f,
                "{:>6}  {:>4.0}%  {:>10}  {waits:>9}  {address}{name}{}",
                member.slot,
                100.0 * member.share,
                member.joined,
                if member.answers { " (answers)" } else { "" }
            )?;
        }
        if self.left_out > 0 {
            writeln!(f, "and {} more members, for which the answer had no room", self.left_out)?;
        }
        self.write_stages(f)?;
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PathCounters;

    #[test]
    fn a_status_is_a_table() {
        let member = |slot, waits_for| MemberStatus {
            slot,
            name: (slot == 7).then(|| "home-3".to_owned()),
            address: Some(format!("10.0.0.{slot}:29500")),
            joined: 1,
            share: 0.5,
            replica: Some(slot),
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
                    rate: Some(3_000_000),
                    rate_is_least: false,
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
            left_out: 0,
            waiting: vec![9],
            coming: [(9, "has replayed to step 11 of 12".to_owned())].into(),
            train_loss: Some(2.5),
            val_loss: None,
            tokens_per_s: 1234.0,
            sent: 5_000_000,
            time_s: 20.0,
            changing_s: 1.0,
            changes: vec!["after step 3: member 7 joined".to_owned()],
            is_spare: false,
        };
        let text = "gpt-2x32: step 12 of 100\nloss      2.5000 (held out -)\nspeed     1234 tokens/s; 95.0% \
                    of 20 s in steps, 5 MB sent\nview      3 of incarnation 1\n\nmember  share  since view  \
                    waits for  address, name\n\x20    0    50%           1          -  10.0.0.0:29500 \
                    (answers)\n\x20    7    50%           1          0  10.0.0.7:29500, home-3\n\n\
                    connections of the member that answered:\n\x20    7  sent it 2 MB, received 1 MB; \
                    round trip 25ms (minimum 20ms, queueing 5ms), 3 MB/s, 2 of 1500 packets sent \
                    again, queued 0 B now, 500ms in total\nwaiting to join: 9\nmember 9 has replayed to step 11 of 12\n\nafter step 3: \
                    member 7 joined\n";
        assert_eq!(status.to_string(), text);
        let many: Vec<MemberStatus> = (0..3000).map(|slot| member(slot, None)).collect();
        let many = Status { members: many, ..status.clone() };
        let text = |status: &Status| serde_json::to_string(status).unwrap();
        // Without traffic all members have room, then the one that answers with some of the others.
        let room = text(&many).len() - 1;
        let all = many.clone().shortened(room);
        assert!(all.members.len() == 3000 && all.left_out == 0 && text(&all).len() <= room);
        let few = many.clone().shortened(50_000);
        assert!(text(&few).len() <= 50_000 && few.members.len() > 100 && few.members[0].answers);
        assert_eq!(few.members.len() + few.left_out, 3000);
        assert!(few.to_string().contains(&format!("\nand {} more members", few.left_out)));
        assert_eq!(status.clone().shortened(room), status);
        let at = |slot, stage, share| {
            let (replica, stage) = (None, Some(stage));
            MemberStatus { share, replica, stage, ..member(slot, None) }
        };
        let members = vec![at(0, 0, 1.0), at(3, 1, 0.75), at(4, 1, 0.25)];
        let text = Status { members, ..status.clone() }.to_string();
        let pools = "\nstage  members, with their shares of its microbatches\n    1  0 (100%)\n    2  3 \
                     (75%), 4 (25%)\n";
        assert!(text.contains(pools), "{text}");
        let at = |slot, replica, stage| MemberStatus { replica, stage, ..member(slot, None) };
        let (first, second) = (Some(0), Some(1));
        let members = vec![
            at(0, second, first),
            at(3, second, second),
            at(4, first, second),
            at(8, first, first),
            at(9, None, None),
        ];
        let text = Status { members, ..status }.to_string();
        let stages = "\nstage  members, with their pipelines\n    1  8 (1), 0 (2)\n    2  4 (1), 3 (2)\nwithout a \
                      part: 9\n";
        assert!(text.contains(stages), "{text}");
    }
}
