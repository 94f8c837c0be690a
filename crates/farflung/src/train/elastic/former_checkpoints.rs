//! Checkpoints that a folder's machine can no longer use, since it has joined another run, or others after an
//! earlier step. They are put aside in the folder `former`, as `step-N.run-K` or `step-N.later-K` of the `K`th
//! time, and the oldest ones of their kind there are removed. Those of earlier versions, `step-N.K`, stay.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::former_runs::FORMER;
use crate::{Result, run_dir};

/// Number of times of putting aside whose checkpoints are kept.
const KEPT_TIMES: usize = 4;

/// Puts aside the checkpoints of steps after `after` in a folder, or all: they do not belong to what its
/// machine has joined, and a later start would take the newest. Those of the last [`KEPT_TIMES`] times of the
/// same kind are kept. Returns a text about what was moved and removed, if there were any.
///
/// Errors: [`Error::Io`](crate::Error::Io) if they cannot be moved.
pub(super) fn put_checkpoints_aside(folder: &Path, after: Option<u64>) -> Result<Option<String>> {
    let within = folder.join(FORMER);
    let kind = if after.is_none() { "run" } else { "later" };
    let before = put_aside_before(&within, kind);
    let time = before.keys().max().map_or(1, |last| last.saturating_add(1));
    let count = run_dir::move_checkpoints(folder, after, (&within, &format!("{kind}-{time}")))?;
    if count == 0 {
        return Ok(None);
    }
    let what = match after {
        None => "are of another run than that of this machine now".to_owned(),
        Some(step) => {
            format!("are of later steps than {step}, after which this machine has joined the others")
        }
    };
    let excess = (before.len() + 1).saturating_sub(KEPT_TIMES);
    let old: Vec<&PathBuf> = before.values().take(excess).flatten().collect();
    let (folder, within) = (folder.display(), within.display());
    Ok(Some(format!("{count} checkpoints in {folder} {what}: they are now in {within}{}", removed(&old))))
}

/// Removes checkpoints, and returns a text about it.
fn removed(old: &[&PathBuf]) -> String {
    let (mut names, mut parts) = (Vec::new(), Vec::new());
    for path in old {
        match std::fs::remove_dir_all(path) {
            Ok(()) => names.push(path.file_name().unwrap_or_default().to_string_lossy().into_owned()),
            Err(error) => parts.push(format!("; {} could not be removed: {error}", path.display())),
        }
    }
    if !names.is_empty() {
        let names = names.join(", ");
        parts.push(format!(
            "; the oldest there were removed, since those of the last {KEPT_TIMES} times are kept: {names}"
        ));
    }
    parts.concat()
}

/// Returns the checkpoints of a kind that were put aside, by the time of doing so. A folder that cannot be read
/// has none.
fn put_aside_before(within: &Path, kind: &str) -> BTreeMap<u64, Vec<PathBuf>> {
    let mut times: BTreeMap<u64, Vec<PathBuf>> = BTreeMap::new();
    for entry in std::fs::read_dir(within).into_iter().flatten().filter_map(std::io::Result::ok) {
        let name = entry.file_name();
        let (_, number) = name.to_str().and_then(|name| name.strip_prefix("step-")?.split_once('.')).unzip();
        let time = number.and_then(|number| number.strip_prefix(kind)?.strip_prefix('-')?.parse().ok());
        if let Some(time) = time {
            times.entry(time).or_default().push(entry.path());
        }
    }
    for paths in times.values_mut() {
        paths.sort_unstable();
    }
    times
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::Packing;
    use crate::run_dir::{Existing, RunDir};

    #[test]
    fn checkpoints_of_the_last_times_are_kept_and_what_is_removed_is_said() {
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path();
        let former = |name: &str| at.join(FORMER).join(name);
        assert_eq!(put_checkpoints_aside(at, None).unwrap(), None);
        let save = |steps: &[u64]| {
            let run = RunDir::open(at, Existing::Continue).unwrap();
            for &step in steps {
                let mut writer = run.begin_checkpoint(step, Packing::Plain).unwrap();
                writer.write("weights", b"x").unwrap();
                run.commit(writer).unwrap();
            }
        };
        // As many as the user keeps; those of one time stay together.
        save(&[1, 2, 3, 4, 5, 6]);
        let text = put_checkpoints_aside(at, Some(1)).unwrap().unwrap();
        assert!(text.starts_with("5 checkpoints in ") && !text.contains("removed"), "{text}");
        assert!(at.join("step-00000001").exists() && former("step-00000006.later-1").exists());
        for time in 2..=4 {
            save(&[7]);
            let text = put_checkpoints_aside(at, Some(1)).unwrap().unwrap();
            let name = format!("step-00000007.later-{time}");
            assert!(former(&name).exists() && !text.contains("removed"), "{text}");
        }
        // Another run's count by themselves, and names of earlier versions and of others stay.
        for name in ["1", "step-00000009.1", "step-00000009.later-x"] {
            std::fs::create_dir(former(name)).unwrap();
        }
        save(&[7]);
        let text = put_checkpoints_aside(at, None).unwrap().unwrap();
        assert!(text.starts_with("2 checkpoints in ") && !text.contains("removed"), "{text}");
        assert!(former("step-00000001.run-1").exists() && former("step-00000007.run-1").exists());
        save(&[7]);
        let text = put_checkpoints_aside(at, Some(1)).unwrap().unwrap();
        let names: Vec<String> = (2..=6).map(|step| format!("step-{step:08}.later-1")).collect();
        assert!(text.ends_with(&names.join(", ")), "{text}");
        assert!(names.iter().all(|name| !former(name).exists()));
        let stay =
            ["step-00000007.run-1", "step-00000007.later-5", "step-00000007.later-2", "step-00000009.1", "1"];
        assert!(stay.iter().all(|name| former(name).exists()));
    }
}
