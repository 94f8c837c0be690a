//! Names of a model's files, and folders that contain them.

use std::fs;
use std::path::{Path, PathBuf};

/// The file with a model's shape.
pub(super) const CONFIG: &str = "config.json";

/// Returns the folder of a file.
pub(crate) fn folder_of(file: &Path) -> PathBuf {
    match file.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder.to_owned(),
        _ => PathBuf::from("."),
    }
}

/// Returns the names in a folder, sorted; none if it cannot be read.
pub(super) fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> =
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// Returns the snapshot of a model's folder in the cache of Hugging Face's programs: the one that `refs/main`
/// names, else the only one.
pub(super) fn cached(model: &Path) -> Option<PathBuf> {
    let snapshots = model.join("snapshots");
    let main = fs::read_to_string(model.join("refs/main")).ok().map(|name| snapshots.join(name.trim()));
    let has_model = |path: &PathBuf| path.join(CONFIG).symlink_metadata().is_ok();
    if let Some(main) = main.filter(has_model) {
        return Some(main);
    }
    let mut all = names(&snapshots).into_iter().map(|name| snapshots.join(name)).filter(has_model);
    all.next().filter(|_| all.next().is_none())
}
