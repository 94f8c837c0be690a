//! A member's part in deciding who the members are: it hands what happens to the pure function of
//! [`farflung_parallel::membership`], and carries out what that says. Messages are taken up as they arrive,
//! whatever the rank computes.

use std::collections::BTreeMap;
use std::path::PathBuf;

use farflung_base::{Nanos, Rank};
use farflung_comm::{Answer, Asked, Cancel, Service};
use farflung_parallel::membership::{Action, Event, Kept, MemberId, Message, Reason, State, View};
use serde::{Deserialize, Serialize};

use super::ready::{Cost, Ready};
use crate::Result;

/// What a keeper is told.
#[derive(Debug, Clone, Serialize, Deserialize)]
enum Word {
    /// By its own rank.
    Event(Event),
    /// By another member.
    Message(Message),
    /// By another member, which wants to know whether this one is there. With it comes where that one stands.
    Ping(Option<Message>),
    /// The answer.
    Pong(Option<Message>),
    /// By another member of pipelines: its step in the view of this epoch cannot be done, since somebody is
    /// lost.
    GivenUp { epoch: u64 },
    /// By a member that takes steps in the view of this epoch, to one that takes none: what those that take
    /// steps have agreed on.
    Agreed { epoch: u64, events: Vec<Event> },
    /// By a newcomer, to all members.
    Ready(Ready),
    /// By a member, to a newcomer that is about to be taken in.
    Costs(Cost),
}

/// What came of it.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Outcome {
    /// There is a new view, and this rank is a member.
    Installed(View),
    /// This rank may not go on.
    Stopped(Reason),
}

/// A member's view and promises.
#[derive(Debug)]
pub(super) struct Keeper {
    state: State,
    /// Who has which number in the communicator of keepers.
    ranks: Vec<MemberId>,
    outcome: Option<Outcome>,
    /// When it wants to be woken.
    wake: Option<Nanos>,
    /// Whether its rank waits for what comes.
    pub(super) awaited: bool,
    /// When each of the others last said something.
    heard: BTreeMap<MemberId, Nanos>,
    /// The file of its promises.
    promises: Option<PathBuf>,
    /// Ends what this rank waits for in the view of an epoch.
    steps: Option<(u64, Cancel)>,
    /// The newest epoch whose steps cannot be done, as others say.
    given_up: u64,
    /// Newcomers that have said that they are ready.
    ready: BTreeMap<MemberId, Ready>,
    /// What this newcomer costs the others, as they have told it.
    costs: Option<Cost>,
}

/// Whom bytes are from is known by the connection they came over; what they say is not trusted to make sense.
fn decode(bytes: &[u8]) -> Option<Word> {
    postcard::from_bytes(bytes).ok()
}

fn encode(word: &Word) -> Vec<u8> {
    postcard::to_stdvec(word).expect("words are plain data")
}

/// What a rank tells its own keeper.
pub(super) fn event(event: Event) -> Vec<u8> {
    encode(&Word::Event(event))
}

impl Keeper {
    /// Writes down what the state must not forget, and keeps it.
    ///
    /// Errors: [`Error::Io`](crate::Error::Io).
    pub(super) fn new(state: State, promises: Option<PathBuf>) -> Result<Self> {
        let (ranks, heard) = (Vec::new(), BTreeMap::new());
        let (steps, given_up) = (None, 0);
        let keeper = Self {
            state,
            ranks,
            outcome: None,
            wake: None,
            awaited: false,
            heard,
            promises,
            steps,
            given_up,
            ready: BTreeMap::new(),
            costs: None,
        };
        if let Some(kept) = keeper.state.kept() {
            keeper.write(kept)?;
        }
        Ok(keeper)
    }

    /// Who is reached under which number from now on.
    pub(super) fn reaches(&mut self, ranks: Vec<MemberId>) {
        self.ready.retain(|id, _| ranks.contains(id));
        self.ranks = ranks;
    }

    /// What has come of it since this was last asked.
    pub(super) fn outcome(&mut self) -> Option<Outcome> {
        self.outcome.take()
    }

    /// Whether something has.
    pub(super) const fn has_outcome(&self) -> bool {
        self.outcome.is_some()
    }

    /// When it wants to be woken.
    pub(super) const fn wake(&self) -> Option<Nanos> {
        self.wake
    }

    /// Whether a peer has said anything since.
    pub(super) fn has_heard(&self, id: &MemberId, since: Nanos) -> bool {
        self.heard.get(id).is_some_and(|&at| at >= since)
    }

    /// The question whether a peer is there.
    pub(super) fn ping(&self) -> Vec<u8> {
        encode(&Word::Ping(self.here()))
    }

    /// What the others are told when a step in the view of an epoch cannot be done.
    pub(super) fn gives_up(epoch: u64) -> Vec<u8> {
        encode(&Word::GivenUp { epoch })
    }

    /// What members that take no steps are told of those that do.
    pub(super) fn agreed(epoch: u64, events: &[Event]) -> Vec<u8> {
        encode(&Word::Agreed { epoch, events: events.to_vec() })
    }

    /// What a newcomer tells the members.
    pub(super) fn is_ready(ready: &Ready) -> Vec<u8> {
        encode(&Word::Ready(ready.clone()))
    }

    /// What a member tells a newcomer that it costs.
    pub(super) fn costing(cost: Cost) -> Vec<u8> {
        encode(&Word::Costs(cost))
    }

    /// What a newcomer has told, if it is ready.
    pub(super) fn ready(&self, id: &MemberId) -> Option<&Ready> {
        self.ready.get(id)
    }

    /// What this newcomer costs the others, once, when they have told it.
    pub(super) const fn costs(&mut self) -> Option<Cost> {
        self.costs.take()
    }

    /// From now on `cancel` ends what this rank waits for in the view of an epoch, once another gives it up.
    pub(super) fn ends(&mut self, epoch: u64, cancel: Cancel) {
        self.steps = Some((epoch, cancel));
        self.end_steps();
    }

    fn end_steps(&self) {
        if let Some((epoch, cancel)) = &self.steps
            && *epoch <= self.given_up
        {
            cancel.cancel();
        }
    }

    /// Where this member stands.
    fn here(&self) -> Option<Message> {
        self.state.view().map(|view| Message::Here { at: view.place() })
    }

    fn rank(&self, id: &MemberId) -> Option<Rank> {
        self.ranks.iter().position(|rank| rank == id).map(|rank| Rank(rank as u32))
    }

    /// Carries out what the function says, in its order.
    fn act(&mut self, actions: Vec<Action>) -> Vec<Answer> {
        let mut leaving = Vec::new();
        for action in actions {
            match action {
                Action::Send { to, message } => {
                    // Whoever cannot be reached is as good as silent.
                    let to = self.rank(&to);
                    leaving.extend(to.map(|to| Answer::to_service(to, encode(&Word::Message(message)))));
                }
                // A member that may forget a promise makes none: what it would say is as if it were lost.
                Action::Keep(kept) => match self.write(&kept) {
                    Ok(()) => {}
                    Err(error) => {
                        tracing::error!(%error, "a promise could not be written");
                        break;
                    }
                },
                Action::Install(view) => self.outcome = Some(Outcome::Installed(view)),
                Action::Stop(reason) => self.outcome = Some(Outcome::Stopped(reason)),
                Action::Wake { at } => self.wake = Some(at),
                Action::Fault { peer, fault } => tracing::warn!(%peer, %fault, "a view was not taken up"),
                _ => {}
            }
        }
        leaving
    }

    /// Writes down what was promised.
    fn write(&self, kept: &Kept) -> Result<()> {
        let Some(path) = &self.promises else { return Ok(()) };
        let text = serde_json::to_vec_pretty(kept).expect("promises are plain data");
        crate::run_dir::replace(path, &text)
    }

    fn step(&mut self, event: Event, now: Nanos) -> Vec<Answer> {
        self.wake = None;
        let actions = self.state.step(event, now);
        self.act(actions)
    }

    fn receive_word(&mut self, word: Word, from: Rank, now: Nanos) -> Vec<Answer> {
        let Some(&sender) = self.ranks.get(from.index()) else { return Vec::new() };
        let own = sender == self.state.me().id;
        self.heard.insert(sender, now);
        let (message, answers) = match word {
            Word::Event(event) if own => return self.step(event, now),
            Word::Event(_) => return Vec::new(),
            Word::Message(message) | Word::Pong(Some(message)) => (Some(message), false),
            Word::Pong(None) => (None, false),
            Word::Ping(message) => (message, true),
            Word::GivenUp { epoch } => {
                self.given_up = self.given_up.max(epoch);
                self.end_steps();
                (None, false)
            }
            Word::Ready(ready) => {
                if ready.is_sound() {
                    self.ready.insert(sender, ready);
                }
                (None, false)
            }
            Word::Costs(cost) => {
                self.costs = Some(cost);
                (None, false)
            }
            Word::Agreed { epoch, events } => {
                let view = self.state.view();
                let members = || view.iter().flat_map(|view| &view.members).any(|member| member.id == sender);
                if view.is_none_or(|view| view.epoch != epoch) || !members() {
                    return Vec::new();
                }
                return events.into_iter().flat_map(|event| self.step(event, now)).collect();
            }
        };
        let mut leaving = Vec::new();
        if answers {
            leaving.push(Answer::to_service(from, encode(&Word::Pong(self.here()))));
        }
        if let Some(message) = message {
            leaving.extend(self.step(Event::Message { from: sender, message }, now));
        }
        leaving
    }
}

impl Service for Keeper {
    fn receive(&mut self, Asked { from, at, bytes }: Asked) -> Vec<Answer> {
        let Some(word) = decode(&bytes) else {
            tracing::warn!(from = from.0, "a message about members does not read as one");
            return Vec::new();
        };
        let mut leaving = self.receive_word(word, from, at);
        // Whoever waits here looks.
        let own = self.rank(&self.state.me().id).filter(|_| self.awaited);
        leaving.extend(own.map(|me| Answer::new(me, Vec::new())));
        leaving
    }
}
