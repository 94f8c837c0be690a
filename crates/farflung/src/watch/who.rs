//! The members of a run and the links between them: from the run's plan, its declared links, changes of
//! members, and the status that a member reports.

use std::collections::BTreeMap;

use farflung_base::{Bandwidth, Rank, Topology};
use farflung_parallel::Plan;
use farflung_parallel::plan::PlanPosition;

use super::event_text::{Change, cut};
use super::snapshot::{Carries, LinkFacts, MemberFacts, Presence};
use crate::PathCounters;
use crate::train::elastic::{Status, called};

/// Highest number of members that are drawn.
pub const MOST_MEMBERS: usize = 64;
/// Highest number of former members that are drawn.
const MOST_GONE: usize = 8;
/// Highest number of members that are kept in memory.
const MOST_KNOWN: usize = 4 * MOST_MEMBERS;

/// The known facts about the members.
#[derive(Debug, Default)]
pub(super) struct Who {
    pub(super) plan: Option<Plan>,
    pub(super) topology: Option<Topology>,
    pub(super) status: Option<Status>,
    /// The members after changes; `None` before the first change.
    roster: Option<Roster>,
    /// Microbatches of each rank in a step, if they were changed.
    shares: Option<Vec<u32>>,
}

/// Members by the numbers of their endpoints.
#[derive(Debug, Default)]
struct Roster {
    /// Current members by rank, in the order in which they joined.
    here: Vec<u32>,
    /// The last members that left.
    gone: Vec<u32>,
    /// Names of members, as far as they have one.
    names: BTreeMap<u32, String>,
}

impl Who {
    /// Applies a change of members.
    pub(super) fn change(&mut self, change: &Change) {
        let plan = self.plan.as_ref();
        let Roster { here, gone, names } = self.roster.get_or_insert_with(|| Roster::of(plan));
        here.retain(|slot| !change.left.contains(slot) && !change.joined.contains(slot));
        gone.retain(|slot| !change.joined.contains(slot));
        here.extend(&change.joined);
        here.truncate(MOST_KNOWN);
        gone.extend(&change.left);
        gone.drain(..gone.len().saturating_sub(MOST_GONE));
        names.extend(change.names.clone());
        names.retain(|slot, _| here.contains(slot) || gone.contains(slot));
        self.shares = None;
    }

    /// Sets the microbatches of the members in a step, by rank.
    pub(super) fn share(&mut self, microbatches: Vec<u32>) {
        self.shares = Some(microbatches);
    }

    /// Resets the members to those of the plan.
    pub(super) fn forget_changes(&mut self) {
        (self.roster, self.shares) = (None, None);
    }

    /// Returns the number of ranks of the plan; `None` without a plan, after a change of members, and if a
    /// member has reported its status.
    pub(super) fn ranks(&self) -> Option<usize> {
        let fixed = self.roster.is_none() && self.status.is_none();
        self.plan.as_ref().filter(|_| fixed).map(|plan| plan.ranks() as usize)
    }

    /// Returns the members, at most [`MOST_MEMBERS`], and how many more there are.
    pub(super) fn members(&self) -> (Vec<MemberFacts>, usize) {
        let mut members = match (&self.status, &self.roster, &self.plan) {
            (Some(status), ..) => asked(status),
            (None, Some(roster), plan) => roster.members(self.shares.as_deref(), plan.as_ref()),
            (None, None, Some(plan)) => planned(plan),
            (None, None, None) => Vec::new(),
        };
        let more = members.len().saturating_sub(MOST_MEMBERS);
        members.truncate(MOST_MEMBERS);
        (members, more)
    }

    /// Returns the links between neighbours in an average's ring, in a pipeline, in pools of neighbouring
    /// stages, or in the ring of those that divide layers.
    pub(super) fn links(&self, members: &[MemberFacts]) -> Vec<LinkFacts> {
        // By the stage, and the number along the tensor axis.
        let mut same: BTreeMap<(u32, u32), Vec<usize>> = BTreeMap::new();
        let mut dividing: BTreeMap<(u32, Option<u32>), Vec<usize>> = BTreeMap::new();
        for (i, member) in members.iter().enumerate() {
            if let Some(stage) = member.stage.filter(|_| member.presence == Presence::Here) {
                same.entry((stage, member.tensor.unwrap_or(0))).or_default().push(i);
                if member.tensor.is_some() {
                    dividing.entry((stage, member.replica)).or_default().push(i);
                }
            }
        }
        let rings = |of: Vec<&Vec<usize>>, carries| {
            let pairs = of.into_iter().flat_map(|holders| ring(holders));
            pairs.map(|(a, b)| self.link(a, b, carries)).collect::<Vec<_>>()
        };
        let mut links = rings(same.values().collect(), Carries::Averages);
        links.extend(rings(dividing.values().collect(), Carries::Layers));
        for (&(stage, tensor), holders) in &same {
            let next = stage.checked_add(1).and_then(|next| same.get(&(next, tensor))).into_iter().flatten();
            let pairs = next.flat_map(|&b| holders.iter().map(move |&a| (a, b)));
            // In pools, replicas are not told apart: each member sends to all of the next stage.
            let neighbours = pairs.filter(|&(a, b)| members[a].replica == members[b].replica);
            links.extend(neighbours.map(|(a, b)| self.link(a, b, Carries::Activations)));
        }
        links
    }

    /// Returns a link with the rate and latency of its slower direction.
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
        let (bits_per_s, latency_s) = if let Some((rate, latency)) = declared {
            let limited = Some(rate).filter(|rate| *rate != Bandwidth::UNLIMITED);
            (limited.map(|rate| rate.0), Some(latency.as_secs_f64()))
        } else {
            let path = self.measured(from, to).unwrap_or_default();
            let latency = path.least_round_trip_s.map(|least| least / 2.0);
            let rate = path.rate.filter(|_| !path.rate_is_least);
            (rate.map(|bytes| bytes.saturating_mul(8)), latency.filter(|s| s.is_finite()))
        };
        LinkFacts { from, to, carries, bits_per_s, latency_s }
    }

    /// Returns what the member that has reported its status has measured of its path to another one.
    fn measured(&self, from: usize, to: usize) -> Option<PathCounters> {
        let members = &self.status.as_ref()?.members;
        let (from, to) = (members.get(from)?, members.get(to)?);
        let other = if from.answers { to } else { Some(from).filter(|_| to.answers)? };
        other.counters?.path
    }
}

/// Returns the pairs of neighbours on a ring.
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

/// The place of a rank in a plan.
#[derive(Debug, Clone, Copy, Default)]
struct Seat {
    replica: Option<u32>,
    stage: Option<u32>,
    tensor: Option<u32>,
}

impl Seat {
    /// Returns the place of a rank. In pools, replicas are not told apart.
    fn of(plan: &Plan, rank: u32) -> Self {
        let Some(PlanPosition { replica, position }) = plan.position_of(Rank(rank)) else {
            return Self::default();
        };
        let tensor = (plan.tensor_ranks() > 1).then(|| plan.at(Rank(rank)).tensor);
        Self { replica: plan.pools().is_none().then_some(replica), stage: Some(position), tensor }
    }
}

/// Returns the ranks of a plan as members.
fn planned(plan: &Plan) -> Vec<MemberFacts> {
    let member = |(rank, name): (u32, &String)| {
        let Seat { replica, stage, tensor } = Seat::of(plan, rank);
        // Replicas that divide sequences share their work equally.
        let share = plan.weight(replica.unwrap_or(0)) / f64::from(plan.replicas());
        MemberFacts {
            name: cut(name),
            rank: Some(rank),
            replica,
            stage,
            tensor,
            share: Some(share).filter(|share| share.is_finite()),
            ..MemberFacts::default()
        }
    };
    (0..plan.ranks()).zip(&plan.machines).map(member).collect()
}

impl Roster {
    /// Returns the members of a plan.
    fn of(plan: Option<&Plan>) -> Self {
        let here = plan.into_iter().flat_map(slots).map(|(slot, _)| slot);
        Self { here: here.take(MOST_KNOWN).collect(), ..Self::default() }
    }

    /// Returns the current members, followed by former ones. Shares are included if there is one for each
    /// current member, or in pipelines for each pipeline. In pipelines, members that the plan does not name
    /// have no part of the model.
    fn members(&self, shares: Option<&[u32]>, plan: Option<&Plan>) -> Vec<MemberFacts> {
        let stages = plan.filter(|plan| plan.stages() > 1);
        let ranks: BTreeMap<u32, u32> = stages.into_iter().flat_map(slots).collect();
        let seat = |slot: &u32, rank: u32| match stages {
            None => Seat { replica: Some(rank), stage: Some(0), tensor: None },
            Some(plan) => ranks.get(slot).map_or_else(Seat::default, |&rank| Seat::of(plan, rank)),
        };
        let count = stages.map_or(self.here.len(), |plan| plan.replicas() as usize);
        let shares = shares.filter(|shares| shares.len() == count);
        let all: u64 = shares.into_iter().flatten().map(|&share| u64::from(share)).sum();
        let share = |replica: u32| Some(f64::from(*shares?.get(replica as usize)?) / all as f64);
        let name = |slot| called(self.names.get(&slot).map(String::as_str), slot);
        let named = |slot: u32| MemberFacts { name: name(slot), ..MemberFacts::default() };
        let here = (0..).zip(&self.here).map(|(rank, &slot)| {
            let Seat { replica, stage, .. } = seat(&slot, rank);
            let share = replica.filter(|_| all > 0).and_then(share);
            MemberFacts { rank: Some(rank), replica, stage, share, ..named(slot) }
        });
        let gone = self.gone.iter().map(|&slot| MemberFacts { presence: Presence::Gone, ..named(slot) });
        here.chain(gone).collect()
    }
}

/// Returns the number of each member of a plan, with its rank.
fn slots(plan: &Plan) -> impl Iterator<Item = (u32, u32)> + '_ {
    let number = |name: &str| name.strip_prefix("member.").and_then(|slot| slot.parse().ok());
    (0..).zip(&plan.machines).map(move |(rank, name)| (number(name).unwrap_or(rank), rank))
}

/// Returns the members of a status report.
fn asked(status: &Status) -> Vec<MemberFacts> {
    let named = |slot: u32| status.members.iter().find(|member| member.slot == slot)?.name.as_deref();
    let name = |slot: u32| cut(&called(named(slot), slot));
    let whole = status.members.iter().all(|member| member.stage.is_none());
    // A member may report any number.
    let drawn = |number: &u32| (*number as usize) < MOST_MEMBERS;
    let member = |(rank, member): (u32, &crate::train::elastic::MemberStatus)| MemberFacts {
        name: name(member.slot),
        rank: Some(rank),
        replica: if whole { Some(rank) } else { member.replica.filter(drawn) },
        stage: if whole { Some(0) } else { member.stage.filter(drawn) },
        progress: status.coming.get(&member.slot).map(|text| cut(text)),
        share: Some(member.share).filter(|share| share.is_finite()),
        address: member.address.as_deref().map(cut),
        // A member that names itself here waits for no other member.
        waits_for: member.waits_for.filter(|&slot| slot != member.slot).map(name),
        bytes_sent: member.answers.then_some(status.sent),
        ..MemberFacts::default()
    };
    let waiting = status.waiting.iter().map(|&slot| MemberFacts {
        name: name(slot),
        presence: Presence::Waiting,
        progress: status.coming.get(&slot).map(|text| cut(text)),
        ..MemberFacts::default()
    });
    (0..).zip(&status.members).map(member).chain(waiting).collect()
}

#[cfg(test)]
mod tests {
    use farflung_base::Link;

    use super::*;
    use crate::train::elastic::MemberStatus;
    use crate::{PathCounters, PeerCounters};

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
    fn ranks_that_divide_layers_are_drawn_together() {
        let machines = ["a", "b", "c", "d", "e", "f", "g", "h"];
        let plan = plan("data=2,pipeline=2,tensor=2", &machines, "[3, 1]", &["0..2", "2..4"]);
        let who = Who { plan: Some(plan), ..Who::default() };
        let (members, _) = who.members();
        let seats: Vec<_> = members.iter().map(|m| (m.replica, m.stage, m.tensor)).collect();
        let all = (0..8).map(|rank| (Some(rank / 4), Some(rank / 2 % 2), Some(rank % 2)));
        assert_eq!(seats, all.collect::<Vec<_>>());
        let links = who.links(&members);
        assert_eq!(pairs(&links, Carries::Averages), [(0, 4), (1, 5), (2, 6), (3, 7)]);
        assert_eq!(pairs(&links, Carries::Layers), [(0, 1), (4, 5), (2, 3), (6, 7)]);
        assert_eq!(pairs(&links, Carries::Activations), [(0, 2), (4, 6), (1, 3), (5, 7)]);
    }

    fn change(joined: Vec<u32>, left: Vec<u32>) -> Change {
        Change { joined, left, took_s: 1.0, ..Change::default() }
    }

    #[test]
    fn members_are_called_by_the_names_that_they_have() {
        let mut who = Who::default();
        let names = [(3, "home-3".to_owned()), (5, "office".to_owned())].into();
        who.change(&Change { names, ..change(vec![3, 4, 5], vec![]) });
        who.change(&change(vec![], vec![3]));
        let names = |who: &Who| who.members().0.into_iter().map(|member| member.name).collect::<Vec<_>>();
        assert_eq!(names(&who), ["member 4", "office", "home-3"]);
        // In a report, they have the names that it tells.
        let of = |slot, name: Option<&str>, waits_for| MemberStatus {
            slot,
            name: name.map(str::to_owned),
            address: None,
            joined: 1,
            share: 0.5,
            replica: Some(slot),
            stage: None,
            answers: false,
            waits_for,
            counters: None,
        };
        let members = vec![of(4, None, Some(5)), of(5, Some("garage"), None)];
        who.status = Some(Status { members, ..Status::default() });
        assert_eq!(names(&who), ["member 4", "garage"]);
        assert_eq!(who.members().0[0].waits_for.as_deref(), Some("garage"));
    }

    #[test]
    fn members_that_came_and_went_are_told_apart_and_no_rate_is_made_up() {
        let plan = plan("data=1,pipeline=1", &["worker.0"], "[1]", &["0..4"]);
        let topology = Some(Topology::uniform(1, "lan".parse().unwrap()));
        let mut who = Who { plan: Some(plan), topology, ..Who::default() };
        for (came, went) in [(vec![7], vec![]), (vec![2, 9], vec![]), (vec![3], vec![7])] {
            who.change(&change(came, went));
        }
        let seen = |who: &Who| {
            let members = who.members().0.into_iter();
            members.map(|m| (m.name, m.rank, m.presence, m.share)).collect::<Vec<_>>()
        };
        let here = |slot: u32, rank, share| (format!("member {slot}"), Some(rank), Presence::Here, share);
        let gone = ("member 7".to_owned(), None, Presence::Gone, None);
        let all = [(0, 0), (2, 1), (9, 2), (3, 3)].map(|(slot, rank)| here(slot, rank, None));
        assert_eq!(seen(&who), [&all[..], std::slice::from_ref(&gone)].concat());
        let links = who.links(&who.members().0);
        assert_eq!(pairs(&links, Carries::Averages), [(0, 1), (1, 2), (2, 3), (3, 0)]);
        assert!(links.iter().all(|link| link.bits_per_s.is_none() && link.latency_s.is_none()));
        // Shares are by rank; a list of another length belongs to other members and is ignored.
        who.share(vec![3, 1, 2, 2]);
        let shared = [(0, 0, 0.375), (2, 1, 0.125), (9, 2, 0.25), (3, 3, 0.25)];
        let shared = shared.map(|(slot, rank, share)| here(slot, rank, Some(share)));
        assert_eq!(seen(&who), [&shared[..], std::slice::from_ref(&gone)].concat());
        who.share(vec![1]);
        assert_eq!(seen(&who), [&all[..], &[gone]].concat());
        // The memory stays bounded for any number of changes.
        for slot in 10..10_000 {
            who.change(&change(vec![slot], vec![slot - 1]));
        }
        let (members, _) = who.members();
        assert_eq!(members.iter().filter(|m| m.presence == Presence::Gone).count(), MOST_GONE);
        assert_eq!(members[3].name, "member 9999");
        who.change(&change((20_000..30_000).collect(), Vec::new()));
        let (members, more) = who.members();
        assert_eq!((members.len(), more), (MOST_MEMBERS, MOST_KNOWN + MOST_GONE - MOST_MEMBERS));
    }

    #[test]
    fn members_of_pipelines_and_pools_are_drawn_where_they_are() {
        let member = |slot, replica, stage| MemberStatus {
            slot,
            name: None,
            address: None,
            joined: 1,
            share: 0.5,
            replica,
            stage,
            answers: slot == 3,
            waits_for: None,
            counters: (slot == 4).then(|| PeerCounters {
                peer: slot,
                path: Some(PathCounters {
                    least_round_trip_s: Some(0.02),
                    rate: Some(5_000_000),
                    rate_is_least: false,
                    ..PathCounters::default()
                }),
                ..PeerCounters::default()
            }),
        };
        let seen = |members: Vec<MemberStatus>| {
            let status = Some(Status { members, ..Status::default() });
            let who = Who { status, ..Who::default() };
            let (members, _) = who.members();
            (members.iter().map(|m| (m.replica, m.stage)).collect::<Vec<_>>(), who.links(&members))
        };
        let (first, second) = (Some(0), Some(1));
        // Two pipelines, whose members have joined in another order, and a member without a part.
        let pipelines =
            [(3, second, first), (4, first, second), (5, None, None), (6, first, first), (7, second, second)];
        let (places, links) =
            seen(pipelines.map(|(slot, replica, stage)| member(slot, replica, stage)).to_vec());
        assert_eq!(places, pipelines.map(|(_, replica, stage)| (replica, stage)));
        assert_eq!(pairs(&links, Carries::Averages), [(0, 3), (1, 4)]);
        assert_eq!(pairs(&links, Carries::Activations), [(3, 1), (0, 4)]);
        // In pools, each member sends to all of the next stage. The delay is that of the member that answers.
        let pools = [(3, None, first), (4, None, second), (5, None, second)];
        let (places, links) = seen(pools.map(|(slot, replica, stage)| member(slot, replica, stage)).to_vec());
        assert_eq!(places, pools.map(|(_, replica, stage)| (replica, stage)));
        assert_eq!(pairs(&links, Carries::Averages), [(1, 2)]);
        assert_eq!(pairs(&links, Carries::Activations), [(0, 1), (0, 2)]);
        assert_eq!(links.iter().map(|link| link.latency_s).collect::<Vec<_>>(), [None, Some(0.01), None]);
        let rates: Vec<_> = links.iter().map(|link| link.bits_per_s).collect();
        assert_eq!(rates, [None, Some(40_000_000), None]);
        // Numbers that no run has are not drawn.
        let (places, links) = seen(vec![member(3, Some(u32::MAX), Some(u32::MAX)), member(4, first, first)]);
        assert_eq!((places, links), (vec![(None, None), (first, first)], Vec::new()));
        // Without stages, all average.
        let (places, links) = seen((0..3).map(|slot| member(slot, Some(slot), None)).collect());
        assert_eq!(places, [(Some(0), first), (Some(1), first), (Some(2), first)]);
        assert_eq!(pairs(&links, Carries::Averages), [(0, 1), (1, 2), (2, 0)]);
    }

    #[test]
    fn members_of_a_changed_plan_are_where_the_plan_says() {
        let plan = plan(
            "data=2,pipeline=2",
            &["member.5", "member.0", "member.2", "member.7"],
            "[1, 1]",
            &["0..2", "2..4"],
        );
        let mut who = Who { plan: Some(plan), ..Who::default() };
        who.change(&change(vec![9], vec![]));
        let seen: Vec<_> = who.members().0.into_iter().map(|m| (m.name, m.replica, m.stage)).collect();
        let at = |slot: u32, replica, stage| (format!("member {slot}"), replica, stage);
        let (first, second) = (Some(0), Some(1));
        let all = [
            at(5, first, first),
            at(0, first, second),
            at(2, second, first),
            at(7, second, second),
            at(9, None, None),
        ];
        assert_eq!(seen, all);
        // Shares are those of the two pipelines.
        who.share(vec![3, 1]);
        let shares: Vec<Option<f64>> = who.members().0.iter().map(|member| member.share).collect();
        assert_eq!(shares, [Some(0.75), Some(0.75), Some(0.25), Some(0.25), None]);
    }
}
