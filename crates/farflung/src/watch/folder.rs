//! Reads the files in a run's folder as they grow, and passes them to a [`State`].

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use super::state::{Document, Lines, State};
use super::tail::{News, Tail};
use super::who::MOST_MEMBERS;
use crate::{Error, Result, RunDir, run_dir};

/// Maximum number of bytes read of a file in one call of [`Folder::look`].
const BUDGET: usize = 4 << 20;
/// Largest document that is read, in bytes.
const LARGEST: u64 = 1 << 20;

/// Metadata that shows whether a document has changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stamp {
    len: u64,
    modified: Option<SystemTime>,
}

/// A run's folder, with the position reached in each of its files.
#[derive(Debug)]
pub struct Folder {
    path: PathBuf,
    state: State,
    files: BTreeMap<Lines, Tail>,
    stamps: [Option<Stamp>; Document::ALL.len()],
}

impl Folder {
    /// Opens a run's folder. Nothing is read before the first [`Folder::look`].
    ///
    /// Errors: [`Error::Io`] if it cannot be listed; [`Error::Setting`] if it is not a run's.
    pub fn open(path: &Path) -> Result<Self> {
        if !RunDir::holds_run(path)? && !path.join(run_dir::RANKS).is_dir() {
            let (field, value) = ("RUN", path.display().to_string());
            let expected = "the folder of a run, such as the `--out` of train".to_owned();
            return Err(Error::Setting { field, value, expected });
        }
        let whole = fs::canonicalize(path).map_err(Error::io("open", path))?;
        let name = whole.file_name().unwrap_or(whole.as_os_str()).to_string_lossy().into_owned();
        let mut folder = Self {
            path: path.to_owned(),
            state: State::new(&name),
            files: BTreeMap::new(),
            stamps: [None; Document::ALL.len()],
        };
        folder.follow(Lines::Metrics);
        folder.follow_rank(0);
        Ok(folder)
    }

    /// Returns the state of the run, as read so far.
    #[must_use]
    pub const fn state(&self) -> &State {
        &self.state
    }

    /// Returns the state, so that a caller can add data that is not in files.
    pub const fn state_mut(&mut self) -> &mut State {
        &mut self.state
    }

    /// Returns the time since a step was last written.
    #[must_use]
    pub fn age(&self) -> Option<Duration> {
        let modified = fs::metadata(self.path.join(run_dir::METRICS)).and_then(|file| file.modified());
        // A modification time in the future, after a clock was set back, counts as now.
        modified.ok().map(|at| at.elapsed().unwrap_or_default())
    }

    fn follow(&mut self, lines: Lines) {
        self.files.entry(lines).or_insert_with(|| Tail::new(self.path.join(lines.path())));
    }

    fn follow_rank(&mut self, rank: u32) {
        self.follow(Lines::Events(rank));
        self.follow(Lines::Times(rank));
    }

    /// Reads new lines and documents. Returns whether there is more to read already.
    pub fn look(&mut self) -> bool {
        for (document, at) in Document::ALL.into_iter().zip(0..) {
            self.look_at(document, at);
        }
        for rank in self.ranks() {
            self.follow_rank(rank);
        }
        let Self { state, files, .. } = self;
        let mut more = false;
        for (&lines, tail) in files {
            more |= tail.read(BUDGET, |news| match news {
                News::Restarted => state.restart(lines),
                News::Line(line) => state.line(lines, line),
                News::TooLong => state.long_line(lines),
            });
        }
        more
    }

    /// Returns the ranks other than 0 that have a folder here, at most as many as are drawn.
    fn ranks(&self) -> Vec<u32> {
        let entries = fs::read_dir(self.path.join(run_dir::RANKS)).into_iter().flatten().flatten();
        let rank = |name: &str| name.strip_prefix("rank-")?.parse().ok().filter(|&rank| rank > 0);
        let mut ranks: Vec<u32> =
            entries.filter_map(|entry| rank(&entry.file_name().to_string_lossy())).collect();
        ranks.sort_unstable();
        ranks.truncate(MOST_MEMBERS - 1);
        ranks
    }

    fn look_at(&mut self, document: Document, at: usize) {
        let path = self.path.join(document.name());
        let file = fs::metadata(&path).ok().filter(fs::Metadata::is_file);
        let stamp = file.map(|file| Stamp { len: file.len(), modified: file.modified().ok() });
        if stamp == self.stamps[at] {
            return;
        }
        self.stamps[at] = stamp;
        match stamp.map(|_| text(&path)) {
            None => self.state.document(document, None),
            Some(Ok(text)) => self.state.document(document, Some(&text)),
            Some(Err(what)) => self.state.unreadable(document.name(), &what),
        }
    }
}

/// Returns a document's text.
fn text(path: &Path) -> Result<String, String> {
    let mut text = String::new();
    let read = File::open(path).and_then(|file| file.take(LARGEST + 1).read_to_string(&mut text));
    match read {
        Ok(_) if text.len() as u64 > LARGEST => Err(format!("it has more than {LARGEST} bytes")),
        Ok(_) => Ok(text),
        Err(error) => Err(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::StepMetrics;

    fn begun() -> (tempfile::TempDir, Folder) {
        let run = tempfile::tempdir().unwrap();
        fs::write(run.path().join("config.toml"), "steps = 7\n").unwrap();
        let folder = Folder::open(run.path()).unwrap();
        (run, folder)
    }

    fn problems(folder: &Folder) -> Vec<String> {
        let problems = folder.state().snapshot().summary.problems.into_iter();
        problems.map(|problem| format!("{}: {}", problem.file, problem.what)).collect()
    }

    #[test]
    fn documents_are_read_when_they_change_and_large_or_odd_ones_are_problems() {
        let (run, mut folder) = begun();
        let steps = |folder: &mut Folder| {
            folder.look();
            folder.state().snapshot().summary.run.steps
        };
        assert_eq!(steps(&mut folder), Some(7));
        let seen = folder.state().version();
        folder.look();
        assert_eq!(folder.state().version(), seen, "nothing is new");
        let config = run.path().join("config.toml");
        fs::write(&config, "steps = 1234\n").unwrap();
        assert_eq!(steps(&mut folder), Some(1234));
        fs::write(&config, format!("steps = 9\n#{}", "x".repeat(LARGEST as usize))).unwrap();
        assert_eq!(steps(&mut folder), Some(1234), "what was known stays");
        assert_eq!(problems(&folder), ["config.toml: it has more than 1048576 bytes"]);
        fs::write(&config, b"\xff\xfe").unwrap();
        folder.look();
        assert_eq!(problems(&folder).len(), 1);
        fs::remove_file(&config).unwrap();
        fs::create_dir(&config).unwrap();
        assert_eq!((steps(&mut folder), problems(&folder).len()), (None, 0));
    }

    #[test]
    fn ranks_are_found_as_they_come() {
        let (run, mut folder) = begun();
        let line = |step| format!("{{\"step\":{step},\"time_s\":1,\"event\":\"skipped\",\"times\":1}}\n");
        for (step, rank) in
            [(1, "rank-00002"), (2, "rank-00001"), (3, "rank-00000"), (4, "other"), (5, "rank-x")]
        {
            let path = run.path().join("ranks").join(rank);
            fs::create_dir_all(&path).unwrap();
            fs::write(path.join("events.jsonl"), line(step)).unwrap();
            folder.look();
        }
        let events = folder.state().snapshot().summary.events;
        let mut seen: Vec<_> = events.iter().map(|event| (event.step, event.ranks[0])).collect();
        seen.sort_unstable();
        assert_eq!(seen, [(1, 2), (2, 1)]);
    }

    /// The lines that are good are drawn, before and after a resume puts the file aside.
    #[test]
    fn a_damaged_file_is_a_problem_until_it_is_put_aside() {
        let (run, mut folder) = begun();
        let path = run.path().join(run_dir::METRICS);
        let row =
            |step| serde_json::to_string(&StepMetrics { step, ..StepMetrics::default() }).unwrap() + "\n";
        let noise = [0xff, 0, 7, b'\n'];
        fs::write(&path, [row(1).as_bytes(), &noise, row(2).as_bytes(), b"{}\n"].concat()).unwrap();
        let step = |folder: &mut Folder| {
            while folder.look() {}
            folder.state().snapshot().summary.latest.step
        };
        assert_eq!((step(&mut folder), problems(&folder).len()), (2, 1));
        crate::MetricsWriter::open(&path, 2)
            .unwrap()
            .write(&StepMetrics { step: 3, ..StepMetrics::default() });
        assert_eq!((step(&mut folder), problems(&folder).len()), (3, 0));
        fs::rename(&path, path.with_extension("1")).unwrap();
        assert_eq!((step(&mut folder), problems(&folder).len()), (3, 0));
    }

    #[test]
    fn a_large_file_is_read_in_several_looks() {
        let (run, mut folder) = begun();
        let row =
            |step| serde_json::to_string(&StepMetrics { step, ..StepMetrics::default() }).unwrap() + "\n";
        let steps = 2 * BUDGET as u64 / row(1).len() as u64;
        fs::write(run.path().join("metrics.jsonl"), (1..=steps).map(row).collect::<Vec<_>>().concat())
            .unwrap();
        let mut looks = 1;
        while folder.look() {
            looks += 1;
        }
        let latest = folder.state().snapshot().summary.latest.step;
        assert_eq!((latest, problems(&folder).len()), (steps, 0));
        assert!(looks > 1 && folder.age().is_some());
    }
}
