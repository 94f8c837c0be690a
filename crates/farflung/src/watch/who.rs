//! Who trains, and over which links: from a run's plan, its declared links, changes of members, and what a
//! member says that was asked.

use std::collections::BTreeMap;

use farflung_base::{Bandwidth, Rank, Topology};
use farflung_parallel::Plan;

use super::event_text::{Change, cut};
use super::snapshot::{Carries, LinkFacts, MemberFacts, Presence};
use crate::train::elastic::Status;

/// The most members that are drawn.
pub const MOST_MEMBERS: usize = 64;
/// The most former members that are drawn.
const MOST_GONE: usize = 8;

/// What is known of the members.
#[derive(Debug, Default)]
pub(super) struct Who {
    pub(super) plan: Option<Plan>,
    pub(super) topology: Option<Topology>,
    pub(super) status: Option<Status>,
    /// Changes of members since the run's first, by slot: whether each is here.
    changes: BTreeMap<u32, bool>,
}

impl Who {
    /// Members have changed.
    pub(super) fn change(&mut self, change: &Change) {
        let here = change.came.iter().map(|&slot| (slot, true));
        self.changes.extend(here.chain(change.went.iter().map(|&slot| (slot, false))));
        while self.changes.len() > 4 * MOST_MEMBERS {
            // Those whom the plan may name are kept: without a change they would count as members.
            let mut gone = self.changes.iter().filter(|&(&slot, here)| slot >= MOST_MEMBERS as u32 && !here);
            let slot = gone.next().or(self.changes.last_key_value()).map(|(&slot, _)| slot);
            self.changes.remove(&slot.unwrap_or_default());
        }
    }

    /// Forgets all changes.
    pub(super) fn forget_changes(&mut self) {
        self.changes.clear();
    }

    /// Ranks of the plan, where members do not change.
    pub(super) fn ranks(&self) -> Option<usize> {
        let fixed = self.changes.is_empty() && self.status.is_none();
        self.plan.as_ref().filter(|_| fixed).map(|plan| plan.ranks() as usize)
    }

    /// The members, at most [`MOST_MEMBERS`], and how many more there are.
    pub(super) fn members(&self) -> (Vec<MemberFacts>, usize) {
        let mut members = match (&self.status, &self.plan) {
            (Some(status), _) => asked(status),
            (None, Some(plan)) if self.changes.is_empty() => planned(plan),
            (None, Some(plan)) => changed(plan, &self.changes),
            (None, None) => Vec::new(),
        };
        let more = members.len().saturating_sub(MOST_MEMBERS);
        members.truncate(MOST_MEMBERS);
        (members, more)
    }

    /// The links between members that follow each other in an average's ring or in a pipeline.
    pub(super) fn links(&self, members: &[MemberFacts]) -> Vec<LinkFacts> {
        let here: Vec<usize> =
            (0..members.len()).filter(|&i| members[i].presence == Presence::Here).collect();
        let Some(plan) = self.plan.as_ref().filter(|_| self.ranks().is_some()) else {
            return ring(&here)
                .into_iter()
                .map(|(from, to)| self.link(from, to, Carries::Averages))
                .collect();
        };
        let stages = plan.stages() as usize;
        let mut links = Vec::new();
        for stage in 0..stages {
            let holders: Vec<usize> = here.iter().copied().filter(|rank| rank % stages == stage).collect();
            links.extend(ring(&holders).into_iter().map(|(a, b)| self.link(a, b, Carries::Averages)));
        }
        let next =
            |&rank: &usize| (rank % stages + 1 < stages && rank + 1 < members.len()).then_some(rank + 1);
        let pairs = here.iter().filter_map(|rank| next(rank).map(|next| (*rank, next)));
        links.extend(pairs.map(|(a, b)| self.link(a, b, Carries::Activations)));
        links
    }

    /// A link with its slower direction's rate.
    fn link(&self, from: usize, to: usize, carries: Carries) -> LinkFacts {
        let fits =
            |topology: &&Topology| self.ranks() == Some(topology.size()) && from.max(to) < topology.size();
        let declared = self.topology.as_ref().filter(fits).map(|topology| {
            let way = |from: usize, to: usize| {
                let (from, to) = (Rank(from as u32), Rank(to as u32));
                (topology.rate(from, to), topology.link(from, to).latency)
            };
            way(from, to).min(way(to, from))
        });
        LinkFacts {
            from,
            to,
            carries,
            bits_per_s: declared
                .map(|(rate, _)| rate)
                .filter(|rate| *rate != Bandwidth::UNLIMITED)
                .map(|rate| rate.0),
            latency_s: declared.map(|(_, latency)| latency.as_secs_f64()),
        }
    }
}

/// Pairs of neighbours on a ring.
fn ring(of: &[usize]) -> Vec<(usize, usize)> {
    match of {
        [] | [_] => Vec::new(),
        [a, b] => vec![(*a, *b)],
        [first, .., last] => {
            let mut pairs: Vec<_> = of.windows(2).map(|pair| (pair[0], pair[1])).collect();
            pairs.push((*last, *first));
            pairs
        }
    }
}

/// The ranks of a plan.
fn planned(plan: &Plan) -> Vec<MemberFacts> {
    let (stages, all) = (plan.stages().max(1), plan.microbatches.iter().map(|&m| u64::from(m)).sum::<u64>());
    let member = |(rank, name): (u32, &String)| {
        let replica = rank / stages;
        let microbatches = plan.microbatches.get(replica as usize);
        MemberFacts {
            name: cut(name),
            rank: Some(rank),
            replica: Some(replica),
            stage: Some(rank % stages),
            share: microbatches.filter(|_| all > 0).map(|&m| f64::from(m) / all as f64),
            ..MemberFacts::default()
        }
    };
    (0..plan.ranks()).zip(&plan.machines).map(member).collect()
}

/// Those that a plan began with, as changes have left them. Shares are not known then, and ranks neither.
fn changed(plan: &Plan, changes: &BTreeMap<u32, bool>) -> Vec<MemberFacts> {
    let slot = |(rank, name): (u32, &String)| {
        let number = name.strip_prefix("member.").and_then(|slot| slot.parse().ok());
        (number.unwrap_or(rank), true)
    };
    let mut here: BTreeMap<u32, bool> = (0..).zip(&plan.machines).map(slot).collect();
    here.extend(changes);
    let mut gone = here.values().filter(|here| !**here).count();
    let mut members = Vec::new();
    for (slot, here) in here {
        gone -= usize::from(!here);
        // Of those that are gone, the last to come.
        if here || gone < MOST_GONE {
            let presence = if here { Presence::Here } else { Presence::Gone };
            members.push(MemberFacts { name: format!("member {slot}"), presence, ..MemberFacts::default() });
        }
    }
    members
}

/// The members that one of them has told of.
fn asked(status: &Status) -> Vec<MemberFacts> {
    let name = |slot: u32| format!("member {slot}");
    let member = |(rank, member): (u32, &crate::train::elastic::MemberStatus)| MemberFacts {
        name: name(member.slot),
        rank: Some(rank),
        replica: Some(rank),
        stage: Some(0),
        share: Some(member.share).filter(|share| share.is_finite()),
        address: member.address.as_deref().map(cut),
        // That it waits for itself would say nothing.
        waits_for: member.waits_for.filter(|&slot| slot != member.slot).map(name),
        bytes_sent: member.answers.then_some(status.sent),
        ..MemberFacts::default()
    };
    let waiting = status.waiting.iter().map(|&slot| MemberFacts {
        name: name(slot),
        presence: Presence::Waiting,
        ..MemberFacts::default()
    });
    (0..).zip(&status.members).map(member).chain(waiting).collect()
}

#[cfg(test)]
mod tests {
    use farflung_base::Link;

    use super::*;

    fn plan(mesh: &str, machines: &[&str], microbatches: &str, parts: &[&str]) -> Plan {
        let parts: Vec<String> =
            parts.iter().map(|layers| format!("[[part]]\nlayers = \"{layers}\"\n")).collect();
        let parts = parts.concat();
        let text = format!(
            "version = 1\nmesh = \"{mesh}\"\nmachines = {machines:?}\nprecision = \"f32\"\nbatch = 1\n\
             microbatches = {microbatches}\n[model]\nname = \"m\"\nlayers = 4\nparameters = 7\n{parts}\
             [[level]]\nmethod = \"ddp\"\ncodec = \"none\"\n"
        );
        text.parse().unwrap()
    }

    fn pairs(links: &[LinkFacts], carries: Carries) -> Vec<(usize, usize)> {
        links.iter().filter(|link| link.carries == carries).map(|link| (link.from, link.to)).collect()
    }

    #[test]
    fn ranks_shares_and_links_are_the_plans() {
        let plan = plan("data=2,pipeline=2", &["a.0", "a.1", "b.0", "b.1"], "[3, 1]", &["0..2", "2..4"]);
        let link: Link = "20mbit,25ms".parse().unwrap();
        let mut topology = Topology::uniform(4, link);
        topology.set_link(Rank(3), Rank(1), Link { bandwidth: Bandwidth(5_000), ..link });
        let who = Who { plan: Some(plan), topology: Some(topology), ..Who::default() };
        let (members, more) = who.members();
        let seen: Vec<_> = members.iter().map(|m| (m.name.as_str(), m.replica, m.stage, m.share)).collect();
        let of = |name, replica, stage, share| (name, Some(replica), Some(stage), Some(share));
        assert_eq!(
            seen,
            [of("a.0", 0, 0, 0.75), of("a.1", 0, 1, 0.75), of("b.0", 1, 0, 0.25), of("b.1", 1, 1, 0.25)]
        );
        assert_eq!((more, who.ranks()), (0, Some(4)));
        let links = who.links(&members);
        assert_eq!(pairs(&links, Carries::Averages), [(0, 2), (1, 3)]);
        assert_eq!(pairs(&links, Carries::Activations), [(0, 1), (2, 3)]);
        assert_eq!(links[0].bits_per_s, Some(20_000_000));
        assert_eq!((links[1].bits_per_s, links[1].latency_s), (Some(5_000), Some(0.025)));
    }

    #[test]
    fn members_that_came_and_went_are_told_apart_and_no_rate_is_made_up() {
        let plan = plan("data=1,pipeline=1", &["worker.0"], "[1]", &["0..4"]);
        let topology = Some(Topology::uniform(1, "lan".parse().unwrap()));
        let mut who = Who { plan: Some(plan), topology, ..Who::default() };
        for (came, went) in [(vec![1], vec![]), (vec![2], vec![]), (vec![3], vec![1])] {
            who.change(&Change { came, went, took_s: 1.0 });
        }
        let (members, _) = who.members();
        let seen: Vec<_> = members.iter().map(|m| (m.name.as_str(), m.presence, m.share)).collect();
        let (here, gone) = (Presence::Here, Presence::Gone);
        assert_eq!(
            seen,
            [
                ("member 0", here, None),
                ("member 1", gone, None),
                ("member 2", here, None),
                ("member 3", here, None)
            ]
        );
        let links = who.links(&members);
        assert_eq!(pairs(&links, Carries::Averages), [(0, 2), (2, 3), (3, 0)]);
        assert!(links.iter().all(|link| link.bits_per_s.is_none() && link.latency_s.is_none()));
        // However many come and go.
        for slot in 10..10_000 {
            who.change(&Change { came: vec![slot], went: vec![slot - 1], took_s: 0.0 });
        }
        assert!(who.changes.len() <= 4 * MOST_MEMBERS);
        let (members, _) = who.members();
        assert!(members.iter().filter(|m| m.presence == Presence::Gone).count() <= MOST_GONE);
        assert_eq!(members.last().unwrap().name, "member 9999");
    }
}
