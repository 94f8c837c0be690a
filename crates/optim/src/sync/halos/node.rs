//! What one rank serves on the two levels: a pure state machine that gets messages with their times of arrival.

use std::collections::VecDeque;

use farflung_base::{Nanos, Rank};
use farflung_comm::{Answer, Question, Service};
use farflung_compress::{Compressor, Payload, RoundKey};

use crate::AverageConfig;
use crate::sync::server::{FromServer, ModelService, Server, ServerRule, SyncRequest, ToServer};

/// Message kind: from a worker to its own rank's node, which passes it on to the server of a rank.
const FORWARD: u8 = 0;
/// Message kind: from a worker to the server of its region.
const WORKER: u8 = 1;
/// Message kind: from a region's server to the world's.
const REGION: u8 = 2;
/// Message kind: from the world's server to a region's.
const WORLD: u8 = 3;

/// Returns the bytes in front of a worker's message to the server of a rank.
pub(super) fn forward(server: Rank) -> [u8; 5] {
    let [a, b, c, d] = server.0.to_le_bytes();
    [FORWARD, a, b, c, d]
}

fn tagged(kind: u8, message: &[u8]) -> Vec<u8> {
    [&[kind], message].concat()
}

/// Server of a region's model, or of a shard of it.
#[derive(Debug)]
pub(super) struct Region {
    members: Vec<Rank>,
    server: Server,
    /// Sum of the changes that workers made to the model since the last message to the world, as old minus new
    /// values. Moves towards the world's model are not included.
    pending: Vec<f32>,
    world: Rank,
    /// Number of changes between two messages to the world.
    every: u64,
    /// Weight of a message to the world, where 1 is an equal share.
    weight: f64,
    /// Number of steps between a worker's changes.
    steps: u64,
    /// Share of its own model that stays when it applies the world's.
    mixing: f32,
    packer: Option<Packer>,
    /// Largest step among the changes of its workers.
    step: u64,
    /// What each member asks for in the current synchronisation; `None` until it has asked.
    meets: Vec<Option<SyncRequest>>,
}

/// Compression of messages to the world.
#[derive(Debug)]
struct Packer {
    codec: Box<dyn Compressor>,
    seed: u64,
    /// Last round of a worker's changes in which messages are sent uncompressed.
    warmup: u64,
}

/// Names of a region's states that are not its rule's: `pending`, the number of changes, and the model.
const PENDING: &str = "pending";
const CHANGES: &str = "region-changes";
const MODEL: &str = "region";

/// Names of the rule's states: first the name in a region's checkpoints, then the name that the rule uses.
const STATES: [(&str, &str); 2] = [("region-momentum", "momentum"), ("region-buffer", "buffer")];

impl Region {
    /// Creates the regional server of the workers `members`. Its world server is at rank `world`.
    pub(super) fn new(model: Vec<f32>, rule: Box<dyn ServerRule>, members: Vec<Rank>, world: Rank) -> Self {
        let pending = vec![0.0; model.len()];
        let server = Server::new(model, rule, members.len(), None);
        let meets = vec![None; members.len()];
        let (every, weight, steps, mixing) = (1, 1.0, 1, 1.0);
        let (packer, step) = (None, 0);
        Self { members, server, pending, world, every, weight, steps, mixing, packer, step, meets }
    }

    /// Sets after how many changes a message is sent to the world, its weight, and the number of steps per
    /// change.
    pub(super) fn sends(self, every: u64, weight: f64, steps: u64) -> Self {
        Self { every: every.max(1), weight, steps: steps.max(1), ..self }
    }

    /// Sets the share of its own model that stays when it applies the world's.
    pub(super) fn merges(self, mixing: f64) -> Self {
        Self { mixing: mixing as f32, ..self }
    }

    /// Sets the codec of messages to the world.
    pub(super) fn packs(self, codec: Option<Box<dyn Compressor>>, average: &AverageConfig) -> Self {
        let AverageConfig { seed, warmup, .. } = *average;
        Self { packer: codec.map(|codec| Packer { codec, seed, warmup }), ..self }
    }

    /// Returns the names of its model and states in checkpoints.
    pub(super) fn names(rule: &dyn ServerRule) -> Vec<&'static str> {
        let states = rule.states();
        let of = |name: &str| STATES.iter().find(|(_, of)| *of == name).map(|(own, _)| *own);
        let states = states.iter().filter_map(|state| of(state.name));
        [MODEL].into_iter().chain(states).chain([PENDING, CHANGES]).collect()
    }

    /// Returns its values in the order of [`Region::names`].
    fn values(&self) -> Vec<f32> {
        let states = self.server.rule.states();
        let states = states.iter().filter(|state| STATES.iter().any(|(_, name)| *name == state.name));
        let mut values = self.server.model.clone();
        values.extend(states.flat_map(|state| state.values));
        values.extend(&self.pending);
        // f32 holds integers below 2^24 exactly. The count only determines when the next message and momentum
        // step are due.
        let came = (self.server.pushes % (1 << 24)) as f32;
        values.resize(values.len() + self.pending.len(), came);
        values
    }

    fn restore(&mut self, name: &str, values: &[f32]) {
        match name {
            MODEL => self.server.model.copy_from_slice(values),
            PENDING => self.pending.copy_from_slice(values),
            CHANGES => self.server.resume(values.first().map_or(0, |came| *came as u64)),
            name => {
                if let Some((_, name)) = STATES.iter().find(|(own, _)| *own == name) {
                    self.server.restore(name, values);
                }
            }
        }
    }

    fn refuse(&self) -> Vec<Answer> {
        let refused = FromServer::Refused.to_bytes();
        self.members.iter().map(|to| Answer::new(*to, refused.clone())).collect()
    }

    fn to_world(&self, message: &ToServer) -> Answer {
        Answer::to_service(self.world, tagged(REGION, &message.to_bytes()))
    }

    /// Handles a worker's message.
    fn handle_message(&mut self, from: Rank, at: Nanos, bytes: Vec<u8>) -> Vec<Answer> {
        let place = self.members.iter().position(|member| *member == from);
        let Some((place, message)) = place.zip(self.server.read(&bytes)) else {
            return vec![Answer::new(from, FromServer::Refused.to_bytes())];
        };
        match message {
            ToServer::Synchronise { wants } => {
                self.meets[place] = Some(wants);
                self.request_sync()
            }
            ToServer::Push { step, .. } | ToServer::Packed { step, .. } => {
                self.step = self.step.max(step);
                let before = self.server.model.clone();
                let answers = self.server.receive(Question { from: Rank(place as u32), at, bytes });
                let moved = before.iter().zip(&self.server.model);
                self.pending.iter_mut().zip(moved).for_each(|(sum, (from, to))| *sum += from - to);
                let member = |answer: Answer| Answer { to: self.members[answer.to.index()], ..answer };
                let mut answers: Vec<_> = answers.into_iter().map(member).collect();
                if self.server.pushes.is_multiple_of(self.every) {
                    answers.push(self.send());
                }
                answers
            }
        }
    }

    /// Returns the message to the world with the pending change, and sets what remains pending.
    fn send(&mut self) -> Answer {
        let (step, weight) = (self.step, self.weight);
        let change = std::mem::take(&mut self.pending);
        let message = if let Some((payload, sent)) = self.packed(&change) {
            self.pending = change.iter().zip(&sent).map(|(change, sent)| change - sent).collect();
            ToServer::Packed { step, weight, payload }
        } else {
            self.pending = vec![0.0; change.len()];
            ToServer::Push { step, weight, change }
        };
        self.to_world(&message)
    }

    /// Returns the payload of a change and the values that the world decodes from it; `None` if it is sent
    /// uncompressed.
    fn packed(&mut self, change: &[f32]) -> Option<(Vec<u8>, Vec<f32>)> {
        let Packer { codec, seed, warmup } = self.packer.as_mut()?;
        if self.step / self.steps <= *warmup {
            return None;
        }
        let (round, rank) = (self.server.pushes, self.members[0]);
        let key = RoundKey { seed: *seed, round, shard: self.world.0, rank };
        let (mut payload, mut sent) = (Payload::new(), vec![0.0; change.len()]);
        codec.compress(change, key, &mut payload).ok()?;
        codec.commit();
        codec.decompress(payload.view(), &mut sent).ok()?;
        Some((payload.as_bytes().to_vec(), sent))
    }

    /// Asks the world to synchronise, once all members have asked.
    fn request_sync(&mut self) -> Vec<Answer> {
        if self.meets.iter().any(Option::is_none) {
            return Vec::new();
        }
        let among = |wants| self.meets.contains(&Some(wants));
        let (last, all) = (among(SyncRequest::End), among(SyncRequest::All));
        let mut answers = Vec::new();
        if last && self.pending.iter().any(|value| *value != 0.0) {
            answers.push(self.send());
        }
        let wants = if all { SyncRequest::All } else { SyncRequest::Model };
        answers.push(self.to_world(&ToServer::Synchronise { wants }));
        answers
    }

    /// Handles the world's answer.
    fn handle_answer(&mut self, bytes: &[u8]) -> Vec<Answer> {
        let len = self.server.model.len();
        match FromServer::from_bytes(bytes) {
            Some(FromServer::Moved { model, .. }) if model.len() == len => {
                let stays = self.mixing;
                let merged = self.server.model.iter_mut().zip(&model);
                merged.filter(|_| stays < 1.0).for_each(|(x, world)| *x = stays * *x + (1.0 - stays) * world);
                Vec::new()
            }
            Some(FromServer::Synchronised { pushes, values }) if values.len() >= len => {
                let mut answers = Vec::new();
                for (member, meets) in self.members.iter().zip(std::mem::take(&mut self.meets)) {
                    let Some(wants) = meets else { continue };
                    let values = match wants {
                        SyncRequest::All => [&values[..], &self.values()].concat(),
                        SyncRequest::Model | SyncRequest::End => values[..len].to_vec(),
                    };
                    answers
                        .push(Answer::new(*member, FromServer::Synchronised { pushes, values }.to_bytes()));
                }
                self.meets = vec![None; self.members.len()];
                answers
            }
            _ => self.refuse(),
        }
    }
}

/// World server of a shard, whose workers are the regions' servers.
#[derive(Debug)]
pub(super) struct World {
    regions: Vec<Rank>,
    server: Server,
}

impl World {
    pub(super) fn new(
        model: Vec<f32>,
        rule: Box<dyn ServerRule>,
        regions: Vec<Rank>,
        codec: Option<Box<dyn Compressor>>,
    ) -> Self {
        let server = Server::new(model, rule, regions.len(), None).with_codec(codec);
        Self { regions, server }
    }

    /// Returns the names of its states besides the model.
    pub(super) fn names(rule: &dyn ServerRule) -> Vec<&'static str> {
        rule.states().iter().map(|state| state.name).collect()
    }

    fn handle_message(&mut self, from: Rank, at: Nanos, bytes: Vec<u8>) -> Vec<Answer> {
        let Some(place) = self.regions.iter().position(|region| *region == from) else {
            return refused(from);
        };
        let answers = self.server.receive(Question { from: Rank(place as u32), at, bytes });
        let tell = |answer: Answer| {
            Answer::to_service(self.regions[answer.to.index()], tagged(WORLD, &answer.bytes))
        };
        answers.into_iter().map(tell).collect()
    }
}

/// Returns the answer to an invalid message.
fn refused(to: Rank) -> Vec<Answer> {
    vec![Answer::new(to, FromServer::Refused.to_bytes())]
}

/// All servers of a rank. Messages of the rank's worker to any server go through this node, because the worker
/// and the node must not both send with the same tag.
#[derive(Debug)]
pub(super) struct Node {
    me: Rank,
    ranks: usize,
    region: Option<Region>,
    world: Option<World>,
}

impl Node {
    pub(super) const fn new(me: Rank, ranks: usize, region: Option<Region>, world: Option<World>) -> Self {
        Self { me, ranks, region, world }
    }

    fn one(&mut self, Question { from, at, bytes }: Question) -> Vec<Answer> {
        let Some((&kind, rest)) = bytes.split_first() else { return refused(from) };
        match (kind, &mut self.region, &mut self.world) {
            (FORWARD, _, _) if from == self.me => match rest.split_first_chunk::<4>() {
                Some((to, message)) if (u32::from_le_bytes(*to) as usize) < self.ranks => {
                    vec![Answer::to_service(Rank(u32::from_le_bytes(*to)), tagged(WORKER, message))]
                }
                _ => refused(from),
            },
            (WORKER, Some(region), _) => region.handle_message(from, at, rest.to_vec()),
            (WORLD, Some(region), _) if from == region.world => region.handle_answer(rest),
            (REGION, _, Some(world)) => world.handle_message(from, at, rest.to_vec()),
            _ => refused(from),
        }
    }
}

impl Service for Node {
    fn receive(&mut self, asked: Question) -> Vec<Answer> {
        let at = asked.at;
        let (mut here, mut leaving) = (VecDeque::from([asked]), Vec::new());
        while let Some(asked) = here.pop_front() {
            for answer in self.one(asked) {
                if answer.asks && answer.to == self.me {
                    here.push_back(Question { from: self.me, at, bytes: answer.bytes });
                } else {
                    leaving.push(answer);
                }
            }
        }
        leaving
    }
}

impl ModelService for Node {
    fn set_model(&mut self, model: &[f32]) {
        if let Some(region) = &mut self.region {
            region.server.set_model(model);
            region.pending.fill(0.0);
        }
        if let Some(world) = &mut self.world {
            world.server.set_model(model);
        }
    }
    fn restore(&mut self, name: &str, values: &[f32]) {
        if let Some(world) = &mut self.world {
            world.server.restore(name, values);
        }
        if let Some(region) = &mut self.region {
            region.restore(name, values);
        }
    }
    fn resume(&mut self, pushes: u64) {
        if let Some(world) = &mut self.world {
            world.server.resume(pushes);
        }
        if let Some(region) = &mut self.region {
            region.server.resume(0);
        }
    }
}

#[cfg(test)]
mod tests;
