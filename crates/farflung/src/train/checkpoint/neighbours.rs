//! The folders of a run's members that are on the same disk, and their checkpoints.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use crate::checkpoint::folder as name_of;
use crate::run_dir;
use crate::train::elastic::run_of;

/// Name of a folder in the folder of the member that began the run. It contains the folders of other members on
/// the same disk.
const MEMBERS: &str = "members";

/// Returns the folders of a member and of other members on the same disk: the folder of the member that began
/// the run, the folders in its `members`, and the folders next to it whose members were in the same run.
pub(in super::super) fn beside(folder: &Path) -> Vec<PathBuf> {
    let parent = folder.parent().filter(|parent| parent.file_name().is_some_and(|name| name == MEMBERS));
    let first = parent.and_then(Path::parent).unwrap_or(folder);
    let within = |path: &Path| {
        let entries = fs::read_dir(path).into_iter().flatten().flatten();
        entries.map(|entry| entry.path()).collect::<Vec<_>>()
    };
    let mut folders = vec![first.to_owned()];
    folders.extend(within(&first.join(MEMBERS)));
    if let Some(run) = run_of(folder) {
        // The parent of a bare name is the empty path.
        let next_to = first.parent().map(|parent| parent.join(".")).unwrap_or_default();
        let same = |path: &Path| path.file_name() != first.file_name() && run_of(path) == Some(run);
        let named =
            within(&next_to).into_iter().filter_map(|path| Some(first.with_file_name(path.file_name()?)));
        folders.extend(named.filter(|path| same(path)));
    }
    folders.sort_unstable();
    folders.dedup();
    folders
}

/// Returns the checkpoints in some folders, by step.
pub(in super::super) fn saved_steps(folders: &[PathBuf]) -> BTreeMap<u64, Vec<PathBuf>> {
    let mut found: BTreeMap<u64, Vec<PathBuf>> = BTreeMap::new();
    for folder in folders {
        for step in run_dir::list(folder).unwrap_or_default() {
            found.entry(step).or_default().push(folder.join(name_of(step)));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_of_one_disk_lie_in_that_of_the_first_member() {
        let root = tempfile::tempdir().unwrap();
        let run = root.path().join("run");
        for member in ["1", "2"] {
            fs::create_dir_all(run.join(MEMBERS).join(member)).unwrap();
        }
        let all = [run.clone(), run.join("members/1"), run.join("members/2")];
        for folder in &all {
            assert_eq!(beside(folder), all, "{}", folder.display());
        }
        // A folder outside of the run has no other folders beside it, and no checkpoints.
        let alone = root.path().join("alone");
        assert_eq!(beside(&alone), std::slice::from_ref(&alone));
        assert_eq!(saved_steps(&[alone]), BTreeMap::new());
    }

    #[test]
    fn folders_next_to_each_other_belong_together_if_their_run_is_the_same() {
        let root = tempfile::tempdir().unwrap();
        let member = |name: &str, run: u32| {
            let at = root.path().join(name);
            fs::create_dir_all(at.join("step-00000007")).unwrap();
            let zeros = vec![0; 32];
            let view = serde_json::json!({
                "epoch": 1, "incarnation": 1, "members": [], "parent": zeros, "weights": zeros, "plan": zeros,
                "tie_breaker": zeros,
            });
            let promises = serde_json::json!({
                "run": format!("{run:032x}"), "view": view, "promised": null, "accepted": null,
            });
            fs::write(at.join("promises.json"), promises.to_string()).unwrap();
            at
        };
        let (office, home, other) = (member("office", 5), member("home", 5), member("other", 6));
        fs::create_dir_all(root.path().join("none")).unwrap();
        assert_eq!(beside(&office), [home.clone(), office.clone()]);
        assert_eq!(beside(&home), [home.clone(), office.clone()]);
        assert_eq!(beside(&other), std::slice::from_ref(&other));
        let found = saved_steps(&beside(&home));
        assert_eq!(found[&7], [home.join("step-00000007"), office.join("step-00000007")]);
    }
}
