//! Checks the projects in `examples/`. They are outside the workspace and are built as a user would build them.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::packages::Unpacked;
use crate::shell;

/// Returns the manifests of all examples, sorted. Empty if there is no folder `examples/`.
pub(crate) fn manifests(root: &Path) -> Result<Vec<PathBuf>> {
    let folder = root.join("examples");
    if !folder.is_dir() {
        return Ok(Vec::new());
    }
    let mut found = Vec::new();
    for entry in fs::read_dir(&folder).context("failed to list examples/")? {
        let manifest = entry.context("failed to list examples/")?.path().join("Cargo.toml");
        if manifest.is_file() {
            found.push(manifest);
        }
    }
    found.sort();
    Ok(found)
}

/// Copies every example, so that it uses the crates' packages and no other file of this project. Runs it in
/// release mode, fails if it prints nothing, and runs its tests, if any.
pub(crate) fn check() -> Result<()> {
    let manifests = manifests(&shell::root())?;
    if manifests.is_empty() {
        println!("examples: there are none");
    }
    let packages = Unpacked::new()?;
    let target = packages.folder.join("target-of-examples");
    let target = target.to_str().context("the target folder's path is not UTF-8")?;
    for manifest in &manifests {
        let original = manifest.parent().expect("a manifest is in a folder");
        let manifest = packages.project(original).with_context(|| original.display().to_string())?;
        let folder = manifest.parent().expect("a manifest is in a folder");
        let path = manifest.to_str().context("an example's path is not UTF-8")?;
        let cargo =
            |verb| shell::cargo(&[verb, "--release", "--manifest-path", path, "--target-dir", target]);
        let ran = shell::tee(cargo("run").current_dir(folder))?;
        ran.result?;
        if ran.stdout.trim().is_empty() {
            bail!("{path}: the example printed nothing");
        }
        if has_tests(folder)? {
            shell::run(cargo("test").current_dir(folder))?;
        }
    }
    Ok(())
}

/// Returns whether `tests/` exists or a source file contains `#[test]`.
fn has_tests(folder: &Path) -> Result<bool> {
    if folder.join("tests").is_dir() {
        return Ok(true);
    }
    let mut folders = vec![folder.join("src")];
    while let Some(folder) = folders.pop() {
        let unreadable = || format!("failed to read {}", folder.display());
        for entry in fs::read_dir(&folder).with_context(unreadable)? {
            let path = entry.with_context(unreadable)?.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|e| e == "rs")
                && fs::read_to_string(&path).with_context(unreadable)?.contains("#[test]")
            {
                return Ok(true);
            }
        }
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A new temporary folder, removed on drop.
    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("xtask-{name}-{}", std::process::id()));
            fs::create_dir_all(&path).unwrap();
            Self(path)
        }

        fn write(&self, path: &str, text: &str) {
            let path = self.0.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            fs::remove_dir_all(&self.0).unwrap();
        }
    }

    #[test]
    fn only_folders_with_a_manifest_are_examples() {
        let root = Folder::new("manifests");
        assert!(manifests(&root.0).unwrap().is_empty());
        root.write("examples/b/Cargo.toml", "");
        root.write("examples/a/Cargo.toml", "");
        root.write("examples/data/x.txt", "");
        root.write("examples/README.md", "");
        let expected = ["examples/a/Cargo.toml", "examples/b/Cargo.toml"].map(|p| root.0.join(p));
        assert_eq!(manifests(&root.0).unwrap(), expected);
    }

    #[test]
    fn tests_are_found_in_sources_and_in_their_folder() {
        let root = Folder::new("has-tests");
        root.write("plain/src/main.rs", "fn main() {}");
        root.write("unit/src/deep/er.rs", "#[test]\nfn works() {}");
        root.write("folder/tests/a.rs", "");
        let tests = |name| has_tests(&root.0.join(name)).unwrap();
        assert_eq!((tests("plain"), tests("unit"), tests("folder")), (false, true, true));
    }
}
