//! Members of the run that a restarted host continues. If none of them answered when it began, they may be out
//! of its reach and still train. So they are asked again from time to time, and the new run ends once one of
//! them is seen to train: a run must not go on twice.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::Duration;

use farflung_comm::tcp::{Connected, GrowingNetwork};

use super::addresses::Answered;
use super::former_runs::{FormerMember, ask_all};
use crate::{Error, Signal, Stop};

/// Time between two rounds of questions.
const INTERVAL: Duration = Duration::from_secs(10);

/// Number of rounds in a row in which a member must answer to count as training, if it is not seen to take
/// steps meanwhile. One that was frozen, and whose run went on without it or ended, ends within 30 s.
const ROUNDS: u32 = 4;

/// What a former member has answered.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Seen {
    /// Number of rounds in a row.
    rounds: u32,
    /// Number of steps done, as it told first.
    step: Option<u64>,
}

impl Seen {
    /// Notes an answer of a member that has done `step` steps, if it tells. Returns whether it trains.
    fn note(&mut self, step: Option<u64>) -> bool {
        self.rounds += 1;
        let before = *self.step.get_or_insert(step.unwrap_or(u64::MAX));
        self.rounds >= ROUNDS || step.is_some_and(|step| step > before)
    }
}

/// Asks former members from a thread, until it is dropped.
#[derive(Debug, Default)]
pub(super) struct FormerMembers(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    bell: Condvar,
}

#[derive(Debug, Default)]
struct State {
    answered: Option<Answered>,
    is_over: bool,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the next round. Returns false if there is none.
    fn pause(&self) -> bool {
        let state = self.state();
        let waits = |state: &mut State| !state.is_over;
        let waited = self.bell.wait_timeout_while(state, INTERVAL, waits);
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        !state.is_over
    }
}

impl FormerMembers {
    /// Starts to ask these members. Once one answers that is not in the run that continues, of this
    /// incarnation, the whole run of `stop` is stopped. `opened` is the gate of the run that continues.
    pub(super) fn ask(
        members: Vec<FormerMember>,
        opened: Weak<GrowingNetwork>,
        incarnation: u64,
        stop: Stop,
    ) -> Self {
        let own = Self::default();
        if members.is_empty() {
            return own;
        }
        let shared = Arc::clone(&own.0);
        let ask = move || {
            let mut seen: BTreeMap<String, Seen> = BTreeMap::new();
            while shared.pause() {
                // A machine of the former run may have joined this one at the address that it had.
                let joined: Vec<String> = opened.upgrade().map_or_else(Vec::new, |opened| {
                    opened.connected().iter().map(Connected::to_reach).collect()
                });
                let others = members.iter().filter(|member| !joined.contains(&member.address));
                let answers = ask_all(others, incarnation);
                seen.retain(|address, _| answers.iter().any(|answered| answered.address == *address));
                let mut trains = |answered: &Answered| {
                    seen.entry(answered.address.clone()).or_default().note(answered.step)
                };
                let Some(answered) = answers.into_iter().find(&mut trains) else { continue };
                let mut state = shared.state();
                if !state.is_over {
                    tracing::error!(
                        address = answered.address,
                        "a member of the run that this one continues still trains: this run ends"
                    );
                    state.answered = Some(answered);
                    stop.request_for_all(Signal::Terminate);
                }
                return;
            }
        };
        let started = thread::Builder::new().name("former-members".to_owned()).spawn(ask);
        if let Err(error) = started {
            tracing::warn!(%error, "the members of the former run are not asked again");
        }
        own
    }

    /// Returns the error of a run that ended because a former member has answered.
    pub(super) fn answered(&self) -> Option<Error> {
        self.0.state().answered.take().map(Answered::into_error)
    }
}

impl Drop for FormerMembers {
    fn drop(&mut self) {
        self.0.state().is_over = true;
        self.0.bell.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_that_takes_no_steps_and_does_not_end_counts_after_a_while() {
        let counts = |steps: &[Option<u64>]| {
            let mut seen = Seen::default();
            steps.iter().map(|&step| seen.note(step)).collect::<Vec<bool>>()
        };
        assert_eq!(counts(&[Some(7), Some(7), Some(8)]), [false, false, true]);
        assert_eq!(counts(&[Some(7); 4]), [false, false, false, true]);
        // A member that finds the ticket too old does not tell its step.
        assert_eq!(counts(&[None, None, Some(3), None]), [false, false, false, true]);
    }
}
