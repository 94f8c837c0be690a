//! A member's part in deciding who the members are: it hands what happens to the pure function of
//! [`farflung_parallel::membership`], and carries out what that says. Messages are taken up as they arrive, whatever
//! the rank computes.

use std::path::PathBuf;

use farflung_base::{Nanos, Rank};
use farflung_comm::{Answer, Asked, Service};
use farflung_parallel::membership::{Action, Event, MemberId, Message, Reason, State, View, step};
use serde::{Deserialize, Serialize};

/// What a keeper is told.
#[derive(Debug, Clone, Serialize, Deserialize)]
enum Word {
    /// By its own rank.
    Event(Event),
    /// By another member.
    Message(Message),
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
    /// None of a newcomer, until a view has it.
    state: Option<State>,
    me: MemberId,
    /// Who has which number in the communicator of keepers.
    ranks: Vec<MemberId>,
    outcome: Option<Outcome>,
    /// When it wants to be woken.
    pub(super) wake: Option<Nanos>,
    /// The file of its promises.
    promises: Option<PathBuf>,
}

/// Whom bytes are from is known by the connection they came over; what they say is not trusted to make sense.
fn decode(bytes: &[u8]) -> Option<Word> {
    postcard::from_bytes(bytes).ok()
}

/// What a rank tells its own keeper.
pub(super) fn event(event: &Event) -> Vec<u8> {
    postcard::to_stdvec(&Word::Event(event.clone())).expect("events are plain data")
}

impl Keeper {
    pub(super) fn new(me: MemberId, state: Option<State>, promises: Option<PathBuf>) -> Self {
        Self { state, me, ranks: Vec::new(), outcome: None, wake: None, promises }
    }

    /// Who is reached under which number from now on.
    pub(super) fn reaches(&mut self, ranks: Vec<MemberId>) {
        self.ranks = ranks;
    }

    /// What has come of it since this was last asked.
    pub(super) fn outcome(&mut self) -> Option<Outcome> {
        self.outcome.take()
    }

    fn rank(&self, id: &MemberId) -> Option<Rank> {
        self.ranks.iter().position(|rank| rank == id).map(|rank| Rank(rank as u32))
    }

    fn message(&self, to: &MemberId, message: Message) -> Option<Answer> {
        let bytes = postcard::to_stdvec(&Word::Message(message)).expect("messages are plain data");
        // Whoever cannot be reached is as good as silent.
        Some(Answer::to_service(self.rank(to)?, bytes))
    }

    /// Carries out what the function says.
    fn act(&mut self, actions: Vec<Action>) -> Vec<Answer> {
        let mut leaving = Vec::new();
        for action in actions {
            match action {
                Action::Send { to, message } => leaving.extend(self.message(&to, message)),
                Action::Keep(kept) => self.keep(&kept),
                Action::Install(view) => {
                    // Newcomers have no view yet, and hear of theirs from all.
                    for member in view.members.iter().filter(|member| member.joined == view.epoch) {
                        leaving.extend(self.message(&member.id, Message::Decided { view: view.clone() }));
                    }
                    self.outcome = Some(Outcome::Installed(view));
                }
                Action::Stop(reason) => self.outcome = Some(Outcome::Stopped(reason)),
                Action::Wake { at } => self.wake = Some(at),
            }
        }
        leaving
    }
}

impl Keeper {
    fn keep(&self, kept: &farflung_parallel::membership::Kept) {
        let Some(path) = &self.promises else { return };
        let text = serde_json::to_vec_pretty(kept).expect("promises are plain data");
        if let Err(error) = crate::run_dir::replace(path, &text) {
            // A member that forgets a promise could let a run fork: it makes none.
            tracing::error!(path = %path.display(), %error, "a promise could not be written");
        }
    }

    fn receive_word(&mut self, word: Word, from: Rank, now: Nanos) -> Vec<Answer> {
        let own = self.rank(&self.me) == Some(from);
        let event = match word {
            Word::Event(event) if own => event,
            Word::Message(message) => {
                let Some(&from) = self.ranks.get(from.index()) else { return Vec::new() };
                if let (None, Message::Decided { view }) = (&self.state, &message) {
                    return self.enter(view);
                }
                Event::Message { from, message }
            }
            Word::Event(_) => return Vec::new(),
        };
        let Some(state) = self.state.take() else { return Vec::new() };
        self.wake = None;
        let (state, actions) = step(state, event, now);
        self.state = Some(state);
        self.act(actions)
    }

    /// A newcomer's first view.
    fn enter(&mut self, view: &View) -> Vec<Answer> {
        if view.members.iter().any(|member| member.id == self.me) {
            self.state = Some(State::new(self.me, view.clone()));
            self.outcome = Some(Outcome::Installed(view.clone()));
        }
        Vec::new()
    }
}

impl Service for Keeper {
    fn receive(&mut self, Asked { from, at, bytes }: Asked) -> Vec<Answer> {
        let Some(word) = decode(&bytes) else {
            tracing::warn!(from = from.0, "a message about members does not read as one");
            return Vec::new();
        };
        let mut leaving = self.receive_word(word, from, at);
        if self.outcome.is_some() || self.wake.is_some() {
            // Whoever waits here looks.
            leaving.extend(self.rank(&self.me).map(|me| Answer::new(me, Vec::new())));
        }
        leaving
    }
}
