//! Back to the last step that counts: the step in flight is dropped, and the ranks that answer meet anew.

use std::collections::BTreeMap;

use farflung_base::{Nanos, Rank, StageId};

use super::Trainer;
use crate::train::executor::Pass;
use crate::train::hearing::{Word, start_to_tell};
use crate::train::job::Job;
use crate::train::part::Part;
use crate::train::parting::missing;
use crate::{Error, Result};

/// What a rank needs to go back to where all replicas were last the same. Its parameters were then the anchor
/// of its method, which has it still, as it has its own state.
#[derive(Debug)]
pub(super) struct Mark {
    step: u64,
    scale: Vec<f32>,
    chains: BTreeMap<StageId, Chained>,
}

/// The optimizer state of a part.
#[derive(Debug)]
struct Chained {
    updates: u64,
    states: BTreeMap<String, Vec<f32>>,
}

/// The name of the parameters among the states of a method that lets replicas move apart.
const ANCHOR: &str = "anchor";

impl Trainer {
    /// Replicas are the same now. Where they move apart before they next are, this is what a stop in between
    /// goes back to.
    pub(in crate::train) fn mark(&mut self) -> Result<()> {
        let parts = &self.executor.parts;
        if self.each_step || parts.values().all(|part| part.sync.is_none()) {
            return Ok(());
        }
        let chained = |part: &Part| -> Result<Chained> {
            let states = part.chain.states().map(|(name, state)| Ok((name.to_owned(), state.to_vec()?)));
            Ok(Chained { updates: part.chain.step(), states: states.collect::<Result<_>>()? })
        };
        let chains = parts.iter().map(|(&stage, part)| Ok((stage, chained(part)?))).collect::<Result<_>>()?;
        self.mark = Some(Mark { step: self.step, scale: self.scale.save().to_vec(), chains });
        Ok(())
    }

    fn return_to_mark(&mut self) -> Result<()> {
        let Some(mark) = self.mark.take().filter(|mark| mark.step != self.step) else { return Ok(()) };
        for (stage, part) in &mut self.executor.parts {
            let anchor = part.sync.iter().flat_map(|sync| sync.states()).find(|(name, _)| *name == ANCHOR);
            if let Some((_, anchor)) = anchor {
                let values = anchor.to_vec::<f32>()?;
                part.params.write(&values)?;
            }
            let Chained { updates, states } = &mark.chains[stage];
            part.chain.restore(*updates, |name| states.get(name).map(Vec::as_slice))?;
        }
        self.scale.restore(&mark.scale);
        self.step = mark.step;
        self.window.clear();
        Ok(())
    }

    /// Drops the step in flight, and meets those that answer in time: they are all that this trainer knows from
    /// now on, and it can only save what it has. Gives the ranks that do not answer, or are at another step.
    /// For all ranks to call that can.
    ///
    /// Errors: [`Error::HalfDone`].
    pub(in crate::train) fn retreat(&mut self, job: &Job, answer: Nanos) -> Result<Vec<Rank>> {
        let world = self.members.len();
        if world > 1 {
            // Others may still be about to commit a step that this rank has: they need its frames.
            self.stop.wait_until_abandoned();
        }
        if self.half_done {
            return Err(Error::HalfDone);
        }
        self.executor.begin(Pass::Evaluation, 0);
        self.executor.tied.give_up();
        self.executor.boundaries.rollback();
        for part in self.executor.parts.values_mut() {
            if let Some(sync) = &mut part.sync {
                // Ends what is in flight.
                sync.average_mut().open();
            }
            part.rollback();
        }
        self.return_to_mark()?;
        if world == 1 {
            return Ok(Vec::new());
        }
        let comm = self.stop.tie(self.executor.comm.clone()).with_deadline(answer);
        // Ranks of this process know it already.
        let telling = if job.processes > 1 { start_to_tell(&comm, &Word::Stopped) } else { Vec::new() };
        let comm = comm.shrink()?;
        drop(telling);
        let mut told = self.rank().0.to_le_bytes().to_vec();
        told.extend(self.step.to_le_bytes());
        let told = comm.all_gather_bytes(told)?;
        let mut standing = Vec::new();
        for bytes in &told {
            let Some((rank, step)) = bytes.split_first_chunk::<4>() else { continue };
            let Ok(step) = step.try_into().map(u64::from_le_bytes) else { continue };
            standing.push((Rank(u32::from_le_bytes(*rank)), step));
        }
        let newest = standing.iter().map(|(_, step)| *step).max().unwrap_or(self.step);
        // A step that some have committed may never have arrived on others, where the rank that stands still
        // was to pass it on. Each side saves what it has.
        let behind = u32::try_from(newest - self.step.min(newest)).unwrap_or(u32::MAX);
        let comm = comm.split(behind, self.rank().0)?;
        self.members =
            standing.iter().filter(|(_, step)| *step == self.step).map(|(rank, _)| *rank).collect();
        self.executor.comm = comm.with_deadline(job.config.deadline);
        Ok(missing(world, &self.members))
    }
}
