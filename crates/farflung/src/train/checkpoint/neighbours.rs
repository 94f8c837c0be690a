//! The folders of a run's members that are on the same disk.

use std::fs;
use std::path::{Path, PathBuf};

/// Name of a folder in the folder of the member that began the run. It contains the folders of other members on
/// the same disk.
const MEMBERS: &str = "members";

/// Returns the folders of a member and of other members on the same disk: the folder of the member that began
/// the run, and the folders in its `members`.
pub(in super::super) fn beside(folder: &Path) -> Vec<PathBuf> {
    let parent = folder.parent().filter(|parent| parent.file_name().is_some_and(|name| name == MEMBERS));
    let first = parent.and_then(Path::parent).unwrap_or(folder);
    let mut folders = vec![first.to_owned()];
    let entries = fs::read_dir(first.join(MEMBERS)).into_iter().flatten().flatten();
    folders.extend(entries.map(|entry| entry.path()));
    folders.sort_unstable();
    folders
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
        // A folder outside of the run has no other folders beside it.
        let alone = root.path().join("alone");
        assert_eq!(beside(&alone), std::slice::from_ref(&alone));
    }
}
