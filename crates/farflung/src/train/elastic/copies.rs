//! Copies of parts of which there is only one holder, in a run with a single pipeline. After some steps each
//! rank streams its part to the next rank, during training and with a limited share of the link. All ranks copy
//! the values of the same step and also keep their own values of that step. If a rank is lost, all go back to
//! that step.

use farflung_base::{Nanos, Pending, Rank};
use farflung_comm::{CommError, Communicator};

use crate::train::job::Job;
use crate::train::run_state::RunState;
use crate::train::trainer::Trainer;
use crate::{Error, Result};

/// Tag of the messages with copies.
const COPIES: u32 = u32::MAX / 2 - 12;
/// Maximum bytes of one message.
const CHUNK: usize = 4 << 20;
/// Number of steps whose values are kept: the last step that all ranks have copied, and the one being copied.
const KEPT: usize = 2;

/// An outgoing copy, to the next rank.
#[derive(Debug)]
struct OutgoingCopy {
    bytes: Vec<u8>,
    at: usize,
    sending: Option<Pending<Result<(), CommError>>>,
    /// Bytes that may be sent now without exceeding the share of the link.
    credit: f64,
    credited: Nanos,
}

/// An incoming copy, from the previous rank.
#[derive(Debug)]
struct IncomingCopy {
    bytes: Vec<u8>,
    receiving: Pending<Result<Vec<u8>, CommError>>,
}

/// Values of earlier steps that a rank keeps.
#[derive(Debug, Default)]
pub(super) struct Copies {
    /// Its own values, oldest first.
    own: Vec<RunState>,
    /// The previous rank's values, oldest first.
    held: Vec<RunState>,
    outgoing: Option<OutgoingCopy>,
    incoming: Option<IncomingCopy>,
    /// The step of the last copy that was begun since the members changed.
    begun: Option<u64>,
}

impl Copies {
    /// Returns all values that are kept.
    pub(super) fn kept(&self) -> impl Iterator<Item = &RunState> {
        self.own.iter().chain(&self.held)
    }

    /// Returns whether a copy is still being sent or received by this rank.
    pub(super) const fn is_under_way(&self) -> bool {
        self.outgoing.is_some() || self.incoming.is_some()
    }

    /// Drops unfinished copies and the values of steps after `step`. Called after a change of members, which
    /// continue from `step`.
    pub(super) fn begin_anew(&mut self, step: u64) {
        (self.outgoing, self.incoming, self.begun) = (None, None, None);
        self.own.retain(|kept| kept.counted.step <= step);
        self.held.retain(|kept| kept.counted.step <= step);
    }

    /// Continues the copies after a step: sends as much as the link's share allows, receives what has arrived,
    /// and starts the next copy once all ranks have finished the last one.
    ///
    /// Errors: those of the device; [`Error::Message`] if a received copy cannot be decoded. A lost rank is not
    /// an error here: the next step detects it.
    pub(super) fn after_step(&mut self, trainer: &Trainer, job: &Job) -> Result<()> {
        let comm = trainer.comm();
        // A pool of several members already holds several copies of its part.
        let all_twice = job.plan.pools().is_some_and(|pools| pools.sizes.iter().all(|&size| size > 1));
        if job.config.copy_share <= 0.0 || job.plan.replicas() > 1 || comm.size() < 2 || all_twice {
            return Ok(());
        }
        if self.is_under_way() {
            return self.go_on(comm, job);
        }
        // With local steps, what is copied changes with each average.
        let step = trainer.agreed_step();
        if !trainer.all_have_copied() || self.begun == Some(step) {
            return Ok(());
        }
        self.begun = Some(step);
        let state = trainer.state(job)?;
        let bytes = with_length(&state.to_bytes());
        keep(&mut self.own, state);
        let now = comm.now();
        self.outgoing = Some(OutgoingCopy { bytes, at: 0, sending: None, credit: 0.0, credited: now });
        let receiving = receive(comm);
        self.incoming = Some(IncomingCopy { bytes: Vec::new(), receiving });
        Ok(())
    }

    fn go_on(&mut self, comm: &Communicator, job: &Job) -> Result<()> {
        if let Some(leaving) = &mut self.outgoing {
            let next = Rank((comm.rank().0 + 1) % comm.size() as u32);
            let declared = job.topology()?.rate(comm.rank(), next).0.min(job.config.up.0);
            let rate = declared.min(measured(comm, next).unwrap_or(u64::MAX));
            leaving.go_on(comm, next, job.config.copy_share * rate as f64 / 8.0);
            if leaving.is_done() {
                self.outgoing = None;
            }
        }
        if let Some(coming) = &mut self.incoming {
            while coming.receiving.is_ready() {
                let receiving = std::mem::replace(&mut coming.receiving, receive(comm));
                // The next step detects a lost rank.
                let Ok(chunk) = receiving.wait() else { return Ok(()) };
                coming.bytes.extend(chunk);
                let Some(whole) = length(&coming.bytes) else { continue };
                if coming.bytes.len() as u64 >= whole {
                    let wrong = || Error::Message {
                        message: "the copy of another member's part".to_owned(),
                        problem: "cannot be parsed",
                    };
                    let state = RunState::from_bytes(&coming.bytes[8..]).ok_or_else(wrong)?;
                    keep(&mut self.held, state);
                    self.incoming = None;
                    break;
                }
            }
        }
        Ok(())
    }
}

/// Returns the rate of the path to another rank in bits per second, where the network has found it.
fn measured(comm: &Communicator, to: Rank) -> Option<u64> {
    let path = comm.transport().path(*comm.members().get(to.index())?)?;
    path.rate.filter(|_| !path.rate_is_least).map(|rate| rate.saturating_mul(8))
}

fn keep(kept: &mut Vec<RunState>, state: RunState) {
    kept.push(state);
    if kept.len() > KEPT {
        kept.remove(0);
    }
}

fn receive(comm: &Communicator) -> Pending<Result<Vec<u8>, CommError>> {
    let size = comm.size() as u32;
    comm.clone().with_deadline(Nanos::MAX).start_recv(Rank((comm.rank().0 + size - 1) % size), COPIES)
}

/// Puts the number of bytes before them.
fn with_length(bytes: &[u8]) -> Vec<u8> {
    [&(bytes.len() as u64).to_le_bytes()[..], bytes].concat()
}

/// Returns the length of a whole copy, with the eight bytes of the length at its beginning; `None` if these
/// have not all arrived.
fn length(bytes: &[u8]) -> Option<u64> {
    let (len, _) = bytes.split_first_chunk::<8>()?;
    Some(u64::from_le_bytes(*len).saturating_add(8))
}

impl OutgoingCopy {
    /// Sends as many bytes as are allowed by now, at `rate` bytes a second.
    fn go_on(&mut self, comm: &Communicator, to: Rank, rate: f64) {
        let now = comm.now();
        self.credit += rate * now.saturating_sub(self.credited).as_secs_f64();
        self.credited = now;
        if self.sending.as_ref().is_some_and(|sending| !sending.is_ready()) {
            return;
        }
        let chunk = (self.credit as usize).min(CHUNK).min(self.bytes.len() - self.at);
        if chunk == 0 {
            return;
        }
        self.credit -= chunk as f64;
        let bytes = self.bytes[self.at..self.at + chunk].to_vec();
        self.at += chunk;
        self.sending = Some(comm.start_send(to, COPIES, bytes));
    }

    fn is_done(&self) -> bool {
        self.at == self.bytes.len() && self.sending.as_ref().is_none_or(Pending::is_ready)
    }
}
