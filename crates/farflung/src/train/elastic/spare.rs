//! Waiting of a spare: a member without a part of the model, until a view gives it a place or the run is over.
//! Spares that can form a further pipeline fetch their parts meanwhile, as newcomers do.

use farflung_base::{Nanos, Pending};
use farflung_comm::CommError;
use farflung_parallel::membership::{Event, MemberId, Start, View};

use super::decide::{Loss, stopped};
use super::fetch::Sending;
use super::follow::Follower;
use super::membership_service::Outcome;
use super::place::Place;
use super::ready::{FollowProgress, Ready};
use super::team::Team;
use super::waiting::{ANNOUNCE_INTERVAL, Links};
use crate::train::job::Job;
use crate::{Error, Result};

/// Tag of the message to spares that the run is over.
const OVER: u32 = u32::MAX / 2 - 11;
/// Time for which a spare that leaves waits for a view without it. After that it ends at once if the others are
/// a majority without it.
const LEAVE_PATIENCE: Nanos = Nanos::from_millis(1_000);

/// The event that ended a spare's waiting.
pub(super) enum SpareEvent {
    /// There is a new view.
    View(View),
    /// The run is over.
    Over,
}

/// How a spare has waited.
pub(super) struct SpareWait {
    pub(super) event: SpareEvent,
    /// Whether it has told the members that it is ready to be in a further pipeline.
    pub(super) is_ready: bool,
    /// Whether it has announced that it leaves.
    pub(super) leaves: bool,
}

/// State of a spare that waits.
struct Waiting<'a> {
    team: &'a Team,
    job: &'a Job,
    /// The message that the run is over.
    over: Option<Pending<std::result::Result<Vec<u8>, CommError>>>,
    /// Members that were reported as lost.
    told: Vec<MemberId>,
    /// What was announced last, and when.
    said: Option<(FollowProgress, Nanos)>,
    telling: Vec<Sending>,
    is_ready: bool,
    /// Whether it leaves without having been asked to stop.
    departs: bool,
    /// Time at which it has announced that it leaves.
    left_at: Option<Nanos>,
}

impl Team {
    /// Notifies the spares that the run is over. Called by the member at rank 0.
    pub(super) fn tell_over(&self) {
        let telling: Vec<_> =
            self.spares().map(|spare| self.all.start_send(spare, OVER, Vec::new())).collect();
        for told in telling {
            if let Err(error) = told.wait() {
                tracing::debug!(%error, "failed to tell a spare that the run has ended");
            }
        }
    }
}

impl Place {
    /// Waits as a spare of a team for a new view or the end of the run. With `grows`, the spare can be in a
    /// further pipeline; its `follower` fetches its part meanwhile. Without one, it receives the part while all
    /// wait. A spare that `departs`, or that is asked to stop, leaves.
    ///
    /// Errors: [`Error::Removed`], also once it has left; [`Error::NoMajority`]; those of the follower's
    /// device.
    pub(super) fn wait_as_spare(
        &mut self,
        (team, job): (&Team, &Job),
        (grows, departs): (bool, bool),
        follower: Option<&mut Follower<'_>>,
    ) -> Result<SpareWait> {
        let over = Some(team.all.clone().with_deadline(Nanos::MAX).start_recv(team.lead(), OVER));
        let (told, said, telling) = (Vec::new(), None, Vec::new());
        let (is_ready, left_at) = (false, None);
        let mut waiting = Waiting { team, job, over, told, said, telling, is_ready, departs, left_at };
        self.renew();
        if let Some(view) = self.view() {
            // If this member proposes the next view, that view contains the hashes of the current one.
            let start = Start { weights: view.weights, plan: view.plan };
            self.tell(Event::Starts(start))?;
        }
        let spare_in = grows.then_some(team.epoch);
        let ready =
            Ready { spare_in, follows: FollowProgress::Barrier, ..self.measured.clone().unwrap_or_default() };
        let mut links = Links { ready, state: 0, again: 0 };
        let mut look = |place: &mut Self, ready: &Ready| place.look_as_spare(&mut waiting, ready);
        let event = self.follow_until(follower, &mut links, &mut look);
        Ok(SpareWait { event: event?, is_ready: waiting.is_ready, leaves: waiting.left_at.is_some() })
    }

    /// Returns the event that ends a spare's waiting, if there is one. Reports lost members to the rules, and
    /// announces how far the spare is if it can be in a further pipeline.
    fn look_as_spare(&mut self, waiting: &mut Waiting<'_>, ready: &Ready) -> Result<Option<SpareEvent>> {
        self.renew();
        self.membership().awaited = true;
        let outcome = self.membership().outcome();
        match outcome {
            Some(Outcome::Installed(view)) => return Ok(Some(SpareEvent::View(view))),
            Some(Outcome::Stopped(reason)) => return Err(stopped(reason)),
            None => {}
        }
        if waiting.departs || waiting.job.stop.requested().is_some() {
            self.leave_as_spare(waiting)?;
        }
        for id in self.lost() {
            if !waiting.told.contains(&id) {
                self.tell(Event::Silent(id))?;
                waiting.told.push(id);
            }
        }
        if let Some(over) = waiting.over.take_if(|over| over.is_ready()) {
            // The member at rank 0 may be lost. Then a new view follows.
            return match over.wait() {
                Ok(_) => Ok(Some(SpareEvent::Over)),
                Err(error) => {
                    tracing::debug!(%error, "the leading member will not report the end of the run");
                    // Or the others' step has failed: they decide whether to repeat it.
                    let loss = Loss { suspect: None, silent: Vec::new(), again: true };
                    self.after_loss(loss, None).map(SpareEvent::View).map(Some)
                }
            };
        }
        let now = self.transport().now();
        if self.membership().wake().is_some_and(|at| at <= now) {
            self.tell(Event::Tick)?;
        }
        let is_due = |(before, at): (FollowProgress, Nanos)| {
            std::mem::discriminant(&before) != std::mem::discriminant(&ready.follows)
                || now >= at.saturating_add(ANNOUNCE_INTERVAL)
        };
        if ready.spare_in == Some(waiting.team.epoch) && waiting.said.is_none_or(is_due) {
            waiting.said = Some((ready.follows, now));
            // One that was ready stays so while it replays further steps.
            let replays = matches!(ready.follows, FollowProgress::Replays { .. });
            waiting.is_ready = ready.follows.is_ready() || waiting.is_ready && replays;
            // An announcement that could not be sent yet is replaced.
            waiting.telling = self.tell_ready(ready);
        }
        Ok(None)
    }

    /// Announces to the others that this spare leaves, so that they continue in a view without it.
    ///
    /// Errors: [`Error::Removed`] once it need not wait for that view.
    fn leave_as_spare(&mut self, waiting: &mut Waiting<'_>) -> Result<()> {
        let now = self.transport().now();
        let Some(at) = waiting.left_at else {
            waiting.left_at = Some(now);
            let me = self.own_id();
            return self.tell(Event::Leave(me));
        };
        if now >= at.saturating_add(LEAVE_PATIENCE) && self.are_majority_without_leavers() {
            return Err(Error::Removed { reason: "it has left the run".to_owned() });
        }
        Ok(())
    }
}
