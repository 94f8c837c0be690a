//! The optimizer's state on disk: what a rank commits after each step, and how it continues from that.

use std::path::{Path, PathBuf};

use farflung_base::StageId;
use farflung_store::Generation;

use super::{Trainer, by_number};
use crate::train::checkpoint::{self, Counters, Source, StepRecord, Totals};
use crate::train::disk_state::{DiskSizes, DiskState, RecordedStep};
use crate::train::executor::Executor;
use crate::train::job::Job;
use crate::train::part::Part;
use crate::train::pieces::StateKind;
use crate::{Error, Result, StateError};

impl Trainer {
    fn disks(&self) -> impl Iterator<Item = &DiskState> {
        self.executor.parts.values().filter_map(|part| part.disk.as_ref())
    }

    /// Returns whether the optimizer's state of this rank is on disk.
    pub(in crate::train) fn has_state_on_disk(&self) -> bool {
        self.disks().next().is_some()
    }

    /// Returns the folder of this rank's state on disk; `None` if it has none, or if the run has no folder.
    pub(in crate::train) fn state_folder(&self, job: &Job) -> Option<PathBuf> {
        let base = job.config.state_dir.as_ref().or(job.out.as_ref()).filter(|_| self.has_state_on_disk());
        base.map(|base| checkpoint::folder(base, self.comm().rank()).join("state"))
    }

    /// Returns whether copies of its parameters are on devices that round differently.
    pub(in crate::train) fn has_unlike_copies(&self) -> bool {
        self.resync.is_unlike()
    }

    /// Returns the bytes of the state of all parts on disk; `None` if there is none.
    pub(in crate::train) fn disk_sizes(&self) -> Option<DiskSizes> {
        self.disks().map(DiskState::sizes).reduce(DiskSizes::and)
    }

    /// Returns the bytes read and written by the state on disk so far.
    pub(in crate::train) fn disk_moved(&self) -> [u64; 2] {
        self.disks().map(DiskState::moved).fold([0; 2], |[a, b], [read, written]| [a + read, b + written])
    }

    /// Returns whether the state on disk is read and written past the page cache.
    pub(in crate::train) fn is_disk_direct(&self) -> bool {
        self.disks().all(DiskState::is_direct)
    }

    /// Returns the file of a part's state in a folder.
    fn state_file(&self, folder: &Path, stage: StageId) -> PathBuf {
        folder.join(format!("part-{}.state", self.executor.placement.part(stage)))
    }

    /// Opens the files of the state in a folder. Returns the steps that are whole in all of them, newest first,
    /// with their records.
    ///
    /// Errors: those of the files.
    pub(in crate::train) fn open_states(&self, folder: &Path) -> Result<Vec<Generation>> {
        if !self.has_state_on_disk() {
            return Ok(Vec::new());
        }
        std::fs::create_dir_all(folder).map_err(Error::io("create the folder", folder))?;
        let mut all: Option<Vec<Generation>> = None;
        for (&stage, part) in &self.executor.parts {
            let Some(disk) = &part.disk else { continue };
            let found = disk.open(&self.state_file(folder, stage))?;
            all = Some(match all {
                None => found,
                Some(before) => {
                    let is_there = |one: &Generation| found.iter().any(|other| other.number == one.number);
                    before.into_iter().filter(is_there).collect()
                }
            });
        }
        Ok(all.unwrap_or_default())
    }

    /// Reads what the files have of a step, after all values were compared with their checksums. If holders of
    /// a part divide its state, each then has the parameters of its shard.
    ///
    /// Errors: those of the files.
    pub(in crate::train) fn load_states(&mut self, step: u64) -> Result<()> {
        // Nothing is forgotten before all files are known to be good.
        self.disks().try_for_each(|disk| disk.check(step))?;
        let updates = self.samples.taken(step) * self.updates;
        for part in self.executor.parts.values_mut() {
            let Some(disk) = part.disk.clone() else { continue };
            disk.start(Some(step))?;
            for piece in part.chain.pieces() {
                for held in part.chain.shard().within(piece) {
                    let values = disk.read(disk.names().len(), held.own())?;
                    let start = if part.weights.is_some() { held.at } else { held.flat.start };
                    part.params.view_mut().part(start, held.flat.len())?.write(&values)?;
                }
            }
            part.params_changed();
            part.chain.resume_at(updates);
        }
        Ok(())
    }

    /// Continues from a step whose states all ranks have loaded. A collective.
    ///
    /// Errors: those of the network.
    pub(in crate::train) fn continue_from_states(&mut self, step: u64, record: &StepRecord) -> Result<()> {
        let Executor { parts, placement, .. } = &mut self.executor;
        for (_, part) in by_number(parts, placement) {
            part.gather_parameters()?;
            if let Some(sync) = &mut part.sync {
                sync.on_params_set(&part.params)?;
                sync.restore(record.outer_step(), &|_: &str| None)?;
                sync.average_mut().restore("", record.rounds(), |_| Some(&[]))?;
            }
        }
        self.scale.restore(&record.loss_scale);
        self.step = step;
        self.window.clear();
        self.resync.restart(step);
        Ok(())
    }

    /// Begins to use the files, if the run does not continue from them: all states are zeros. Returns whether
    /// that was so.
    ///
    /// Errors: those of the files.
    pub(in crate::train) fn begin_states_anew(&self) -> Result<bool> {
        let mut is_new = false;
        for disk in self.disks().filter(|disk| !disk.is_started()) {
            disk.start(None)?;
            is_new = true;
        }
        Ok(is_new)
    }

    /// Sets what makes the records of later steps. With `from`, writes the states of a checkpoint to the files.
    ///
    /// Errors: those of the files; a state that is missing.
    pub(in crate::train) fn start_states(&mut self, from: Option<&Source>, record: StepRecord) -> Result<()> {
        let bytes = record.to_bytes();
        for part in self.executor.parts.values() {
            let (Some(disk), Some(from)) = (&part.disk, from) else { continue };
            let layout = part.stage.layout();
            disk.fill((self.step, bytes.clone()), &part.params, |array, range, values| {
                let kind = StateKind::Optimizer(disk.names()[array].clone()).name();
                let found = from
                    .flat(&kind, layout, &range.into())
                    .ok_or_else(|| Error::Message { message: kind, problem: "is not in the checkpoint" })?;
                values.copy_from_slice(&found);
                Ok(())
            })?;
        }
        self.state_record = Some(Box::new(record));
        Ok(())
    }

    /// Keeps the optimizer's state in files of this folder, if the settings want it on disk.
    /// [`run`](crate::train::run) does so itself; a trainer that is used alone needs it before its first step.
    ///
    /// Errors: those of the files; [`StateError::Exists`] if the folder has the state of some step.
    pub fn keep_state_in(&mut self, job: &Job, folder: &Path) -> Result<()> {
        if let Some(found) = self.open_states(folder)?.first() {
            return Err(StateError::Exists { path: folder.to_owned(), step: found.number }.into());
        }
        let record = StepRecord::of(self, job, Totals::default(), String::new());
        self.begin_states_anew()?;
        self.start_states(None, record)
    }

    /// Sets the resources that the run has used, for the record of the next step on disk.
    pub(in crate::train) fn set_state_totals(&mut self, totals: Totals) {
        if let Some(records) = &mut self.state_record {
            records.set_totals(totals);
        }
    }

    /// Begins to read the states for the next step.
    pub(super) fn begin_states(&self) {
        self.disks().for_each(|disk| disk.begin(self.step + 1));
    }

    /// Returns when the states of the last step are on the disk.
    ///
    /// Errors: those of the files.
    pub(in crate::train) fn wait_for_states(&self) -> Result<()> {
        self.disks().try_for_each(|disk| Ok(disk.wait()?))
    }

    /// Commits the states of the step that was taken. They may reach the disk later.
    ///
    /// Errors: those of the files.
    pub(super) fn commit_states(&mut self) -> Result<()> {
        let Counters { step, outer_step, rounds } = self.counters();
        let Some(records) = self.state_record.as_mut().filter(|_| self.executor.parts.values().any(has_disk))
        else {
            return Ok(());
        };
        let bytes = records.of(RecordedStep { step, outer_step, rounds, loss_scale: &self.scale.save() });
        self.executor.parts.values().try_for_each(|part| match &part.disk {
            Some(disk) => Ok(disk.commit(bytes.clone(), &part.params)?),
            None => Ok(()),
        })
    }
}

const fn has_disk(part: &Part) -> bool {
    part.disk.is_some()
}
