//! Watches a member's own folder. Files that are open can still be written after their folder was removed, so
//! nothing else would notice it before the next checkpoint.

use std::fs;
use std::path::{Path, PathBuf};

use crate::RunDir;
use crate::train::run::RunObserver;

/// What identifies a folder, also if another one has got its name.
type Identity = (u64, u64);

#[cfg(unix)]
fn identity(folder: &Path) -> Option<Identity> {
    use std::os::unix::fs::MetadataExt as _;
    fs::metadata(folder).ok().filter(fs::Metadata::is_dir).map(|found| (found.dev(), found.ino()))
}

#[cfg(not(unix))]
fn identity(folder: &Path) -> Option<Identity> {
    fs::metadata(folder).ok().filter(fs::Metadata::is_dir).map(|_| (0, 0))
}

/// A member's folder, as it was when the member began to train.
#[derive(Debug)]
pub(super) struct FolderWatch {
    folder: Option<(PathBuf, Identity)>,
}

impl FolderWatch {
    pub(super) fn new(run: Option<&RunDir>) -> Self {
        let folder = run.map(RunDir::path);
        Self { folder: folder.and_then(|folder| Some((folder.to_owned(), identity(folder)?))) }
    }

    /// Returns, once, the reason why nothing can be written to the folder any more.
    fn problem(&mut self) -> Option<String> {
        let (folder, id) = self.folder.as_ref()?;
        let what = match identity(folder) {
            None => "is not there any more",
            Some(now) if now != *id => "is another one now",
            Some(_) if fs::metadata(folder).is_ok_and(|found| found.permissions().readonly()) => {
                "cannot be written"
            }
            Some(_) => return None,
        };
        let text = format!(
            "the folder {} of this member {what}: it trains on, but its records are lost, and it cannot save",
            folder.display()
        );
        self.folder = None;
        Some(text)
    }

    /// Tells the user, once, that nothing can be written to the folder any more.
    pub(super) fn check(&mut self, watch: Option<&mut (dyn RunObserver + '_)>) {
        let Some(text) = self.problem() else { return };
        tracing::warn!("{text}");
        if let Some(watch) = watch {
            watch.note(&text);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Existing;

    #[test]
    fn a_folder_that_is_removed_replaced_or_read_only_is_reported_once() {
        let root = tempfile::tempdir().unwrap();
        let says = |name: &str, changes: &dyn Fn(&Path), word: &str| {
            let path = root.path().join(name);
            let run = RunDir::open(&path, Existing::Refuse).unwrap();
            let mut watch = FolderWatch::new(Some(&run));
            assert_eq!(watch.problem(), None);
            changes(&path);
            let problem = watch.problem().unwrap();
            assert!(problem.contains(word) && problem.contains(name), "{problem}");
            assert_eq!(watch.problem(), None);
        };
        says("removed", &|path| fs::remove_dir_all(path).unwrap(), "not there");
        #[cfg(unix)]
        {
            let replaced = |path: &Path| {
                fs::rename(path, path.with_extension("before")).unwrap();
                fs::create_dir(path).unwrap();
            };
            says("replaced", &replaced, "another one");
        }
        let read_only = |path: &Path| {
            let mut permissions = fs::metadata(path).unwrap().permissions();
            permissions.set_readonly(true);
            fs::set_permissions(path, permissions).unwrap();
        };
        says("read-only", &read_only, "cannot be written");
        assert_eq!(FolderWatch::new(None).problem(), None);
    }
}
