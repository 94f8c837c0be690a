//! Room for checkpoints on the disk: checked before a run begins and before each save, and told when a write
//! finds that the disk is full.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use farflung_base::Bytes;
use farflung_comm::Communicator;

use super::super::all_succeed::all_succeed;
use super::super::callbacks::RunObserver;
use super::super::job::Job;
use super::super::trainer::Trainer;
use super::contents::{Contents, Size};
use super::{Totals, packing};
use crate::{Error, Packing, Result, RunDir, disk};

/// Why there is no room for a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Shortage {
    /// So many bytes are free for this user.
    Free(u64),
    /// The largest file of the checkpoint has more bytes than this process may write to a file.
    FileLimit {
        /// Bytes of the file.
        file: u64,
        /// The limit in bytes.
        limit: u64,
    },
    /// A write failed.
    Failed {
        /// The error, with the file.
        problem: String,
        /// Bytes that were free after the incomplete checkpoint was removed; `None` if unknown.
        free: Option<u64>,
    },
}

/// The error of a checkpoint for which the disk has no room.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NoRoom {
    /// The run's folder, or the rank's.
    pub folder: PathBuf,
    /// The step to be saved; `None` before the first step.
    pub step: Option<u64>,
    /// Bytes that the checkpoint needs; of all ranks that save on this disk, if the run has not begun.
    pub needed: u64,
    /// Number of ranks in `needed`.
    pub ranks: usize,
    /// What is there.
    pub shortage: Shortage,
}

impl fmt::Display for NoRoom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { folder, step, needed, ranks, shortage } = self;
        let (folder, needed) = (folder.display(), Bytes(*needed));
        match (step, ranks) {
            (Some(step), _) => write!(
                f,
                "there is no room for the checkpoint of step {step} in {folder}: it needs {needed}"
            )?,
            (None, 1) => write!(f, "there is no room for a checkpoint in {folder}: it needs {needed}")?,
            (None, ranks) => write!(
                f,
                "there is no room for a checkpoint in {folder}: those of {ranks} ranks on this disk need {needed}"
            )?,
        }
        match shortage {
            Shortage::Free(free) => write!(f, ", and {} are free", Bytes(*free))?,
            Shortage::FileLimit { file, limit } => {
                let (file, limit) = (Bytes(*file), Bytes(*limit));
                write!(
                    f,
                    ", {file} of it in one file, and this process may write {limit} to a file (`ulimit -f`)"
                )?;
            }
            Shortage::Failed { problem, free } => {
                write!(f, ", and {problem}")?;
                if let Some(free) = free {
                    write!(f, "; {} are free without it", Bytes(*free))?;
                }
            }
        }
        if step.is_none() {
            let what = match shortage {
                Shortage::FileLimit { .. } => "raise the limit",
                _ => "free some space",
            };
            write!(f, "; {what}, or give a folder on another disk with `--out`")?;
        }
        Ok(())
    }
}

impl NoRoom {
    fn error(self) -> Error {
        Error::NoRoom(Box::new(self))
    }
}

/// Checks that this rank's checkpoint certainly does not exceed the room in its folder. Nothing is certain of
/// compressed files before they are written.
///
/// Errors: [`Error::NoRoom`].
pub(super) fn check(size: Size, packing: Packing, folder: &Path, step: u64) -> Result<()> {
    let lack = lack(size, packing, disk::free(folder), size.on_disk);
    lack.map_or(Ok(()), |shortage| {
        let (folder, needed) = (folder.to_owned(), size.on_disk);
        Err(NoRoom { folder, step: Some(step), needed, ranks: 1, shortage }.error())
    })
}

/// Returns what is lacking for a checkpoint, of which `needed` bytes must be free.
fn lack(size: Size, packing: Packing, free: Option<u64>, needed: u64) -> Option<Shortage> {
    if packing == Packing::Zstd {
        return None;
    }
    let limit = disk::largest_file().filter(|&limit| size.largest > limit);
    let limited = limit.map(|limit| Shortage::FileLimit { file: size.largest, limit });
    limited.or_else(|| free.filter(|&free| needed > free).map(Shortage::Free))
}

/// Turns the error of a write that found a full disk into that of a checkpoint without room. Other errors are
/// returned unchanged.
pub(super) fn failed(error: Error, folder: &Path, size: Size, step: u64) -> Error {
    if !error.is_disk_full() {
        return error;
    }
    let (problem, free) = (crate::error::causes(&error), disk::free(folder));
    let (folder, needed) = (folder.to_owned(), size.on_disk);
    let shortage = Shortage::Failed { problem, free };
    NoRoom { folder, step: Some(step), needed, ranks: 1, shortage }.error()
}

/// A rank's disk, and the bytes that the rank needs on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct RankDisk {
    /// The same for ranks on one disk of one machine.
    disk: Option<[u8; 16]>,
    needed: u64,
    /// Bytes that a later checkpoint probably needs.
    expected: u64,
}

impl RankDisk {
    fn to_bytes(self) -> Vec<u8> {
        let disk = self.disk.iter().flatten().copied();
        let numbers = [self.needed, self.expected].into_iter().flat_map(u64::to_le_bytes);
        numbers.chain(disk).collect()
    }

    fn of(bytes: &[u8]) -> Option<Self> {
        let (needed, rest) = bytes.split_first_chunk::<8>()?;
        let (expected, disk) = rest.split_first_chunk::<8>()?;
        let [needed, expected] = [needed, expected].map(|number| u64::from_le_bytes(*number));
        Some(Self { needed, expected, disk: disk.try_into().ok() })
    }
}

/// Returns a name of a folder's disk that no other machine has.
fn disk_name(folder: &Path) -> Option<[u8; 16]> {
    let machine = fs::read("/proc/sys/kernel/random/boot_id").ok()?;
    let mut hasher = blake3::Hasher::new();
    hasher.update(&machine).update(&disk::number(folder)?.to_le_bytes());
    hasher.finalize().as_bytes().first_chunk::<16>().copied()
}

/// Checks, before a run's first step, that a checkpoint of each rank fits on its disk together with those of
/// the other ranks there, and tells the user if later checkpoints may not fit. A collective.
///
/// The residuals of codecs that come with the first averages count only in what the user is told. Samples of
/// boundaries that a run collects in memory are not known yet.
///
/// Errors: [`Error::NoRoom`] on a rank whose disk is certainly too small, [`Error::NoRoomOn`] on the others.
pub(in super::super) fn admit(
    trainer: &mut Trainer,
    job: &Job,
    run: &RunDir,
    watch: Option<&mut (dyn RunObserver + '_)>,
) -> Result<()> {
    let size = trainer.with_common(|trainer| size(trainer, job))?;
    let expected = size.on_disk.saturating_add(trainer.residuals_to_come(job)?);
    let (disk, comm) = (disk_name(run.path()), trainer.comm());
    let mine = RankDisk { disk, needed: size.on_disk, expected };
    let told = comm.all_gather_bytes(mine.to_bytes())?;
    let told: Vec<RankDisk> = told.iter().filter_map(|bytes| RankDisk::of(bytes)).collect();
    let here: Vec<&RankDisk> = told.iter().filter(|other| disk.is_some() && other.disk == disk).collect();
    let sum = |of: fn(&RankDisk) -> u64| here.iter().map(|other| of(other)).fold(0, u64::saturating_add);
    let room = Room {
        needed: sum(|other| other.needed).max(mine.needed),
        expected: sum(|other| other.expected).max(mine.expected),
        ranks: here.len().max(1),
        size,
    };
    let admitted = room.admit(job, run, trainer.steps_done());
    let note = all_succeed(comm, admitted)?;
    let first = told.first().and_then(|first| first.disk);
    let is_first_there = first_of_disk(comm, &told);
    match (note, watch) {
        (Some(note), Some(watch)) if comm.rank().0 == 0 => watch.note(&note),
        (Some(note), _) if first != disk && is_first_there => tracing::warn!("{note}"),
        _ => {}
    }
    Ok(())
}

/// Returns whether this rank is the first on its disk.
fn first_of_disk(comm: &Communicator, told: &[RankDisk]) -> bool {
    let rank = comm.rank().index();
    told.get(rank).is_some_and(|own| !told[..rank].iter().any(|other| other.disk == own.disk))
}

/// Like [`admit`], for a member of a run that machines join and leave, without the others.
///
/// Errors: [`Error::NoRoom`].
pub(in super::super) fn admit_member(
    trainer: &Trainer,
    job: &Job,
    run: Option<&RunDir>,
    watch: Option<&mut (dyn RunObserver + '_)>,
) -> Result<()> {
    let Some(run) = run else { return Ok(()) };
    let size = size(trainer, job)?;
    let expected = size.on_disk.saturating_add(trainer.residuals_to_come(job)?);
    let room = Room { needed: size.on_disk, expected, ranks: 1, size };
    if let (Some(note), Some(watch)) = (room.admit(job, run, trainer.steps_done())?, watch) {
        watch.note(&note);
    }
    Ok(())
}

/// Checks that the weights alone fit, before a machine joins a run and takes their state. In a pipeline, it is
/// not known which part it will have. Returns its folder.
///
/// Errors: [`Error::NoRoom`].
pub(in super::super) fn admit_newcomer(job: &Job, run: Option<RunDir>) -> Result<Option<RunDir>> {
    if let Some(run) = run.as_ref().filter(|_| job.pipelines.is_none()) {
        let size = Size::default().with_more_weights(job.model.parameters().saturating_mul(4));
        let Size { on_disk: needed, .. } = size;
        Room { needed, expected: needed, ranks: 1, size }.admit(job, run, 0)?;
    }
    Ok(run)
}

/// Returns the size of a checkpoint of this rank, as far as it is known.
fn size(trainer: &Trainer, job: &Job) -> Result<Size> {
    Ok(Contents::of(trainer, job, Totals::default(), &[], !job.elastic)?.size())
}

/// Returns how many more checkpoints a run has on the disk at the same time: one that does `left` more steps,
/// saves after every `every` steps, keeps `keep`, and has some there already.
fn at_once(left: u64, every: u64, keep: u64, there: u64) -> u64 {
    let saved = if every == 0 { 1 } else { left.div_ceil(every) };
    // A new checkpoint is written before the oldest one is deleted, and at least two are kept.
    let most = if keep == 0 { saved } else { saved.min((keep.max(2) + 1).saturating_sub(there)) };
    most.max(1)
}

/// The need of the ranks on one disk.
struct Room {
    /// Bytes of a checkpoint of all of them.
    needed: u64,
    /// The same for later checkpoints.
    expected: u64,
    ranks: usize,
    /// Sizes of this rank's checkpoint.
    size: Size,
}

impl Room {
    /// Returns a note for the user if the checkpoints that a run keeps at the same time may not fit.
    ///
    /// Errors: [`Error::NoRoom`] if not even one checkpoint fits.
    fn admit(&self, job: &Job, run: &RunDir, begun: u64) -> Result<Option<String>> {
        let Self { needed, expected, ranks, size } = *self;
        let config = &job.config;
        let left = config.steps.saturating_sub(begun);
        if left == 0 {
            // Only the report of the run is missing.
            return Ok(None);
        }
        let free = disk::free(run.path());
        if let Some(shortage) = lack(size, packing(job), free, needed) {
            let folder = run.path().to_owned();
            return Err(NoRoom { folder, step: None, needed, ranks, shortage }.error());
        }
        let there = run.checkpoints()?.len() as u64;
        let at_once = at_once(left, config.checkpoint_every, config.keep_last as u64, there);
        let together = expected.saturating_mul(at_once);
        Ok(free.filter(|&free| together > free).map(|free| {
            let compressed = if packing(job) == Packing::Zstd { " before compression" } else { "" };
            format!(
                "{}: {} are free, and up to {at_once} more checkpoints at the same time need {}{compressed} \
                 (--checkpoint-every, --keep-last): steps for which there is no room are not saved",
                run.path().display(),
                Bytes(free),
                Bytes(together)
            )
        }))
    }
}

#[cfg(test)]
mod tests;
