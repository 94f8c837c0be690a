//! A run's folder: `config.toml`, `metrics.jsonl`, `step-N/` checkpoints and `latest`, locked by one process at
//! a time.
//!
//! It does not depend on what a checkpoint contains: files are names and bytes.

use std::fs::{self, File, TryLockError};
use std::io::Write;
use std::path::{Path, PathBuf};

use farflung_base::Rank;

use crate::checkpoint::{self, Checkpoint, CheckpointWriter, LATEST, Packing, folder};
use crate::events::EVENTS;
use crate::metrics::MetricsWriter;
use crate::peer_counters::PEERS;
use crate::step_times::TIMES;
use crate::{Error, Result, line_file};

const LOCK: &str = "run.lock";
pub(crate) const CONFIG: &str = "config.toml";
pub(crate) const METRICS: &str = "metrics.jsonl";
/// The folder with the folders of ranks other than 0. It may exist before rank 0 has written anything.
pub(crate) const RANKS: &str = "ranks";

/// Returns the folder of a rank within a run's folder.
pub(crate) fn rank_folder(run: &Path, rank: Rank) -> PathBuf {
    if rank.0 == 0 { run.to_owned() } else { run.join(RANKS).join(format!("rank-{:05}", rank.0)) }
}

/// Treatment of a folder that holds a run already.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Existing {
    /// Return an error: the run is a new one.
    Refuse,
    /// Continue that run.
    Continue,
}

/// A run's folder, locked until this is dropped or the process ends, however it ends.
#[derive(Debug)]
pub struct RunDir {
    path: PathBuf,
    /// The lock file, held by the system's file lock. Only the lock counts, not whether the file exists, so a
    /// crash leaves no stale lock.
    _lock: File,
}

impl RunDir {
    /// Creates or opens a run's folder, locks it, and removes files that a crash left half-written. If a crash
    /// interrupted the replacement of a checkpoint by a new one of the same step, it is finished.
    ///
    /// Errors: [`Error::NotARun`] for a folder that has files but none of a run, [`Error::RunExists`] under
    /// [`Existing::Refuse`], [`Error::Locked`] while another process holds it, [`Error::NotAFile`] if a folder
    /// or a pipe has the name of a record, [`Error::Io`].
    pub fn open(path: &Path, existing: Existing) -> Result<Self> {
        if path.is_file() {
            let (value, expected) = (path.display().to_string(), "a folder, and this is a file".to_owned());
            return Err(Error::Setting { field: "out", value, expected });
        }
        fs::create_dir_all(path).map_err(Error::io("create the folder", path))?;
        let names = names(path)?;
        if !names.is_empty() && !names.iter().any(|name| name == RANKS || is_of_run(name)) {
            return Err(Error::NotARun { path: path.to_owned() });
        }
        [METRICS, EVENTS, TIMES, PEERS]
            .iter()
            .try_for_each(|name| line_file::check_kind(&path.join(name)))?;
        let lock = lock(path)?;
        // Checked after the lock, since "in use" says more than "exists" if the other run is still running. A
        // folder with a lock file alone has no run: its process died before it wrote anything.
        if existing == Existing::Refuse && names.iter().any(|n| n != LOCK && n != RANKS) {
            return Err(Error::RunExists { path: path.to_owned() });
        }
        checkpoint::finish_replacements(path, &self::names(path)?)?;
        for name in self::names(path)?
            .iter()
            .filter(|n| n.starts_with('.') && Path::new(n).extension().is_some_and(|e| e == "tmp"))
        {
            let partial = path.join(name);
            let removed =
                if partial.is_dir() { fs::remove_dir_all(&partial) } else { fs::remove_file(&partial) };
            removed.map_err(Error::io("remove the incomplete files of an earlier run in", &partial))?;
            tracing::info!(path = %partial.display(), "removed incomplete files of an earlier run");
        }
        Ok(Self { path: path.to_owned(), _lock: lock })
    }

    /// Returns whether a folder has files of a run.
    pub fn holds_run(path: &Path) -> Result<bool> {
        Ok(names(path)?.iter().any(|name| is_of_run(name)))
    }

    /// Returns the folder's path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns whether a run has begun in the folder: whether its settings are there.
    #[must_use]
    pub fn has_begun(&self) -> bool {
        self.path.join(CONFIG).exists()
    }

    /// Writes a copy of the run's settings to `config.toml`.
    pub fn write_config(&self, toml: &str) -> Result<()> {
        self.replace(CONFIG, toml.as_bytes())
    }

    /// Writes a copy of the run's settings, and its plan.
    pub(crate) fn write_settings(&self, toml: &str, plan: &str) -> Result<()> {
        self.write_config(toml)?;
        self.replace("plan.toml", plan.as_bytes())
    }

    /// Writes a file of the run atomically: readers see the old file or the new one.
    pub fn replace(&self, name: &str, bytes: &[u8]) -> Result<()> {
        replace(&self.path.join(name), bytes)
    }

    /// Like [`RunDir::replace`], for a file without which the run can go on: on a full disk it stays as it was,
    /// with a warning.
    pub(crate) fn replace_if_room(&self, name: &str, bytes: &[u8]) -> Result<()> {
        unless_full(self.replace(name, bytes))
    }

    /// Opens `metrics.jsonl` for the steps after `step`. Lines of later steps are removed; a resumed run
    /// repeats those steps.
    pub fn metrics(&self, step: u64) -> Result<MetricsWriter> {
        MetricsWriter::open(&self.path.join(METRICS), step)
    }

    /// Begins to write `step-N`, which exists once the writer has committed.
    pub fn begin_checkpoint(&self, step: u64, packing: Packing) -> Result<CheckpointWriter> {
        CheckpointWriter::begin(&self.path, step, packing)
    }

    /// Commits a checkpoint and sets `latest` to it. A full disk leaves the folder as it was.
    pub fn commit(&self, writer: CheckpointWriter) -> Result<PathBuf> {
        writer.commit()
    }

    /// Returns the steps of all complete checkpoints, oldest first.
    pub fn checkpoints(&self) -> Result<Vec<u64>> {
        list(&self.path)
    }

    /// Returns the newest valid checkpoint; damaged ones are skipped with a warning.
    ///
    /// Errors: that of the newest checkpoint, if there are checkpoints and none is valid.
    pub fn latest(&self) -> Result<Option<Checkpoint>> {
        latest(&self.path)
    }

    /// Removes all but the newest `keep` checkpoints; 0 keeps all.
    pub fn prune(&self, keep: usize) -> Result<()> {
        let steps = self.checkpoints()?;
        let excess = if keep == 0 { 0 } else { steps.len().saturating_sub(keep) };
        for step in &steps[..excess] {
            let path = self.path.join(folder(*step));
            // The folder is renamed first, so that a crash in between leaves a partial checkpoint rather than a
            // damaged one.
            let partial = self.path.join(checkpoint::partial(*step));
            fs::rename(&path, &partial)
                .and_then(|()| fs::remove_dir_all(&partial))
                .map_err(Error::io("remove the checkpoint", &path))?;
        }
        Ok(())
    }
}

/// Returns the newest valid checkpoint of a run's folder; for readers that do not hold the folder's lock.
///
/// Errors: that of the newest checkpoint, if there are checkpoints and none is valid.
pub fn latest(run: &Path) -> Result<Option<Checkpoint>> {
    let mut first_error = None;
    for step in list(run)?.into_iter().rev() {
        match Checkpoint::open(&run.join(folder(step))) {
            Ok(checkpoint) => return Ok(Some(checkpoint)),
            Err(error) => {
                tracing::warn!(step, %error, "skipping a damaged checkpoint");
                first_error.get_or_insert(error);
            }
        }
    }
    first_error.map_or(Ok(None), Err)
}

/// Moves the checkpoints of steps after `after`, or all, to another folder on the same disk, where `mark` is
/// added to their names. Returns how many there are. For a process that holds the folder's lock.
///
/// Errors: [`Error::Io`].
pub(crate) fn move_checkpoints(run: &Path, after: Option<u64>, (to, mark): (&Path, &str)) -> Result<usize> {
    let is_later = |step: &u64| after.is_none_or(|after| *step > after);
    let (moved, stay): (Vec<u64>, Vec<u64>) = list(run)?.into_iter().partition(is_later);
    if moved.is_empty() {
        return Ok(0);
    }
    fs::create_dir_all(to).map_err(Error::io("create", to))?;
    for &step in &moved {
        let name = folder(step);
        let from = run.join(&name);
        fs::rename(&from, to.join(format!("{name}.{mark}")))
            .map_err(Error::io("move the checkpoint", &from))?;
    }
    let latest = run.join(LATEST);
    match stay.last() {
        Some(&step) => replace(&latest, format!("{}\n", folder(step)).as_bytes())?,
        None if latest.exists() => fs::remove_file(&latest).map_err(Error::io("remove", &latest))?,
        None => {}
    }
    Ok(moved.len())
}

/// Returns the steps of all complete checkpoints in a run's folder, oldest first.
pub(crate) fn list(run: &Path) -> Result<Vec<u64>> {
    let mut steps: Vec<u64> = names(run)?.iter().filter_map(|n| checkpoint::step_of(n)).collect();
    steps.sort_unstable();
    Ok(steps)
}

/// Returns whether a file of this name shows that its folder is a run's.
fn is_of_run(name: &str) -> bool {
    [CONFIG, METRICS, LOCK].contains(&name)
}

/// Writes a file atomically: readers see the old file or the new one.
pub(crate) fn replace(path: &Path, bytes: &[u8]) -> Result<()> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let folder = folder_of(path);
    let beside = folder.join(format!(".{name}.tmp"));
    let write = || {
        let mut file = File::create(&beside)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(&beside, path)?;
        File::open(folder)?.sync_all()
    };
    write().map_err(|source| {
        // An error means that there is nothing to remove.
        let _ = fs::remove_file(&beside);
        Error::Io { action: "write", path: path.to_owned(), source }
    })
}

/// Turns the error of a full disk into a warning, for a file without which the run can go on.
pub(crate) fn unless_full(written: Result<()>) -> Result<()> {
    match written {
        Err(error) if error.is_disk_full() => {
            tracing::warn!("{}: the run goes on", crate::error::causes(&error));
            Ok(())
        }
        written => written,
    }
}

/// Returns the folder of a file. `Path::parent` of a bare name is the empty path, which cannot be opened.
fn folder_of(file: &Path) -> &Path {
    file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or_else(|| Path::new("."))
}

/// Returns the names in a folder, sorted.
fn names(path: &Path) -> Result<Vec<String>> {
    let read = || {
        let entries = fs::read_dir(path)?;
        entries
            .map(|e| Ok(e?.file_name().to_string_lossy().into_owned()))
            .collect::<std::io::Result<Vec<_>>>()
    };
    let mut names = read().map_err(Error::io("list", path))?;
    names.sort_unstable();
    Ok(names)
}

/// Takes the folder's lock, or returns an error with the process that holds it.
fn lock(run: &Path) -> Result<File> {
    let path = run.join(LOCK);
    let mut file = File::options()
        .create(true)
        .truncate(false)
        .read(true)
        .write(true)
        .open(&path)
        .map_err(Error::io("open the lock", &path))?;
    match file.try_lock() {
        Ok(()) => {
            // Only the lock counts. The number of the process is for messages, and a full disk has no room for
            // it.
            if let Err(error) = file.set_len(0).and_then(|()| writeln!(file, "{}", std::process::id())) {
                tracing::debug!(%error, path = %path.display(), "failed to write the process's number");
            }
            Ok(file)
        }
        Err(TryLockError::WouldBlock) => {
            let pid = fs::read_to_string(&path).ok().and_then(|text| text.trim().parse().ok());
            Err(Error::Locked { path: run.to_owned(), pid })
        }
        Err(TryLockError::Error(source)) => Err(Error::Io { action: "lock", path, source }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn save(run: &RunDir, step: u64, packing: Packing) -> PathBuf {
        let mut writer = run.begin_checkpoint(step, packing).unwrap();
        writer.write("weights", &[step as u8; 1000]).unwrap();
        writer.write("state.json", b"{}").unwrap();
        run.commit(writer).unwrap()
    }

    #[test]
    fn a_bare_name_is_in_the_current_folder() {
        for (file, folder) in [("a", "."), ("./a", "."), ("b/a", "b"), ("/a", "/")] {
            assert_eq!(folder_of(Path::new(file)), Path::new(folder), "{file}");
        }
    }

    #[test]
    fn a_folder_of_other_things_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("thesis.tex"), "x").unwrap();
        assert!(matches!(RunDir::open(dir.path(), Existing::Continue), Err(Error::NotARun { .. })));
        let run = dir.path().join("run");
        RunDir::open(&run, Existing::Refuse).unwrap().write_config("").unwrap();
        assert!(matches!(RunDir::open(&run, Existing::Refuse), Err(Error::RunExists { .. })));
        RunDir::open(&run, Existing::Continue).unwrap();
        assert_eq!([dir.path(), &run].map(|path| RunDir::holds_run(path).unwrap()), [false, true]);
    }

    #[test]
    fn two_runs_cannot_share_a_folder() {
        let dir = tempfile::tempdir().unwrap();
        let first = RunDir::open(dir.path(), Existing::Refuse).unwrap();
        let message = RunDir::open(dir.path(), Existing::Continue).unwrap_err().to_string();
        assert!(message.contains(&format!("process {}", std::process::id())), "{message}");
        drop(first);
        RunDir::open(dir.path(), Existing::Continue).unwrap();
    }

    #[test]
    fn checkpoints_are_listed_pruned_and_read_back() {
        let dir = tempfile::tempdir().unwrap();
        let run = RunDir::open(dir.path(), Existing::Refuse).unwrap();
        assert!(run.latest().unwrap().is_none());
        for step in [9, 10, 100] {
            save(&run, step, if step == 10 { Packing::Zstd } else { Packing::Plain });
        }
        assert_eq!(run.checkpoints().unwrap(), [9, 10, 100]);
        assert_eq!(fs::read_to_string(dir.path().join("latest")).unwrap(), "step-00000100\n");
        run.prune(2).unwrap();
        assert_eq!(run.checkpoints().unwrap(), [10, 100]);
        let packed = Checkpoint::open(&dir.path().join("step-00000010")).unwrap();
        assert_eq!((packed.step(), packed.names()), (10, vec!["state.json", "weights"]));
        assert_eq!(packed.read("weights").unwrap(), [10; 1000]);
        assert!(fs::metadata(packed.path().join("weights.zst")).unwrap().len() < 100);
        assert!(packed.read("other").is_err());
    }

    #[test]
    fn a_damaged_checkpoint_is_named_and_the_one_before_it_is_used() {
        let dir = tempfile::tempdir().unwrap();
        let run = RunDir::open(dir.path(), Existing::Refuse).unwrap();
        save(&run, 1, Packing::Plain);
        let newest = save(&run, 2, Packing::Plain);
        let mut bytes = fs::read(newest.join("weights")).unwrap();
        bytes[500] ^= 1;
        fs::write(newest.join("weights"), bytes).unwrap();
        let message = Checkpoint::open(&newest).unwrap_err().to_string();
        assert!(message.contains("step-00000002/weights") && message.contains("hash"), "{message}");
        assert_eq!(run.latest().unwrap().unwrap().step(), 1);
        fs::remove_file(dir.path().join("step-00000001/weights")).unwrap();
        assert!(run.latest().unwrap_err().to_string().contains("step-00000002"));
    }

    #[test]
    fn what_a_crash_left_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let run = RunDir::open(dir.path(), Existing::Refuse).unwrap();
        save(&run, 1, Packing::Plain);
        let mut writer = run.begin_checkpoint(2, Packing::Plain).unwrap();
        writer.write("weights", b"half").unwrap();
        std::mem::forget(writer);
        drop(run);
        assert!(dir.path().join(".step-00000002.tmp").exists());
        let run = RunDir::open(dir.path(), Existing::Continue).unwrap();
        assert!(!dir.path().join(".step-00000002.tmp").exists());
        assert_eq!(run.latest().unwrap().unwrap().step(), 1);
    }

    #[test]
    fn a_crash_while_a_checkpoint_is_replaced_loses_none() {
        const STEP: &str = "step-00000001";
        // Whether the new checkpoint is in place already, the file that it lacks, and the one that is kept.
        for (renamed, lacks, kept) in [
            (false, None, b"new"),
            (false, Some("weights"), b"old"),
            (false, Some("manifest.json"), b"old"),
            (true, None, b"new"),
        ] {
            let dir = tempfile::tempdir().unwrap();
            let at = |name: &str| dir.path().join(name);
            let saved = |content: &[u8], name: &str| {
                let run = RunDir::open(dir.path(), Existing::Continue).unwrap();
                let mut writer = run.begin_checkpoint(1, Packing::Plain).unwrap();
                writer.write("weights", content).unwrap();
                fs::rename(run.commit(writer).unwrap(), at(name)).unwrap();
            };
            // Renamed to names that do not end with `.tmp`, which opening the folder would remove.
            saved(b"old", "old");
            saved(b"new", "new");
            fs::rename(at("old"), at(".step-00000001-old.tmp")).unwrap();
            fs::rename(at("new"), at(if renamed { STEP } else { ".step-00000001.tmp" })).unwrap();
            if let Some(lacks) = lacks {
                fs::remove_file(at(".step-00000001.tmp").join(lacks)).unwrap();
            }
            let run = RunDir::open(dir.path(), Existing::Continue).unwrap();
            let checkpoint = run.latest().unwrap().expect("one of both is kept");
            assert_eq!(checkpoint.read("weights").unwrap(), kept, "{renamed} {lacks:?}");
            assert!(names(dir.path()).unwrap().iter().all(|name| !name.starts_with('.')));
        }
    }
}
