//! The folders of the members of one run that lie on one disk.

use std::fs;
use std::path::{Path, PathBuf};

/// The folder of the folders of members that share a disk, in that of the member that began the run.
const MEMBERS: &str = "members";

/// A member's folder, and those of others on the same disk: that of the one that began the run, and those in
/// `members` of it.
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
        // A folder elsewhere has nothing beside it.
        let alone = root.path().join("alone");
        assert_eq!(beside(&alone), std::slice::from_ref(&alone));
    }
}
