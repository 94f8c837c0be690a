#![allow(missing_docs, missing_debug_implementations)]
//! temporary
use std::collections::BTreeSet;
use farflung_base::Nanos;
use serde::{Deserialize, Serialize};
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct MemberId(pub [u8; 32]);
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member { pub id: MemberId, pub slot: u32, pub joined: u64 }
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct View { pub epoch: u64, pub members: Vec<Member> }
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Message { Decided { view: View } }
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Event { Message { from: MemberId, message: Message }, Silent(MemberId), Leave(MemberId), Ready(Member), Admit, Tick }
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kept;
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Reason { #[error("removed")] Removed }
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action { Send { to: MemberId, message: Message }, Keep(Kept), Install(View), Stop(Reason), Wake { at: Nanos } }
#[derive(Debug, Clone)]
pub struct State { me: MemberId, view: View, silent: BTreeSet<MemberId>, leaving: BTreeSet<MemberId>, ready: Vec<Member> }
impl State { pub fn new(me: MemberId, view: View) -> Self { Self { me, view, silent: BTreeSet::new(), leaving: BTreeSet::new(), ready: Vec::new() } } }
pub fn step(mut s: State, event: Event, _now: Nanos) -> (State, Vec<Action>) {
    let mut out = Vec::new();
    let mut admit = false;
    match event {
        Event::Message { message: Message::Decided { view }, .. } => {
            if view.epoch > s.view.epoch {
                let mine = view.members.iter().any(|m| m.id == s.me);
                s.view = view.clone(); s.silent.clear(); s.leaving.clear(); s.ready.clear();
                out.push(if mine { Action::Install(view) } else { Action::Stop(Reason::Removed) });
            }
            return (s, out);
        }
        Event::Silent(m) => { s.silent.insert(m); }
        Event::Leave(m) => { s.leaving.insert(m); }
        Event::Ready(m) => { s.ready.push(m); }
        Event::Admit => admit = true,
        Event::Tick => {}
    }
    let head = s.view.members.iter().find(|m| !s.silent.contains(&m.id)).map(|m| m.id);
    let removal = !s.silent.is_empty() || (admit && !s.leaving.is_empty());
    if head == Some(s.me) && (removal || admit && !s.ready.is_empty()) {
        let mut members: Vec<Member> = s.view.members.iter().filter(|m| !s.silent.contains(&m.id) && !s.leaving.contains(&m.id)).cloned().collect();
        if !removal { members.append(&mut s.ready); }
        let view = View { epoch: s.view.epoch + 1, members };
        for m in s.view.members.iter().filter(|m| m.id != s.me) { out.push(Action::Send { to: m.id, message: Message::Decided { view: view.clone() } }); }
        let mine = view.members.iter().any(|m| m.id == s.me);
        s.view = view.clone(); s.silent.clear(); s.leaving.clear(); s.ready.clear();
        out.push(if mine { Action::Install(view) } else { Action::Stop(Reason::Removed) });
    }
    (s, out)
}
