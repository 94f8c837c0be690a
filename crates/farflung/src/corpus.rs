//! The default training text: the Rust source of a fixed list of our own dependencies, so that the text is
//! available after any build.
//!
//! The versions are pinned with `=` in this crate's `Cargo.toml`; the hash below ensures that all users train
//! on the same bytes. This module does not depend on how the text is used.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use blake3::Hash;

use crate::{Error, Result};

/// The crates whose source is the text, in the order of the text.
pub const CRATES: [(&str, &str); 7] = [
    ("serde_core", "1.0.229"),
    ("serde", "1.0.229"),
    ("toml", "1.2.1"),
    ("rayon-core", "1.13.0"),
    ("rayon", "1.12.0"),
    ("memmap2", "0.9.12"),
    ("clap_builder", "4.6.7"),
];

/// The BLAKE3 hash of the text, in hex.
pub const EXPECTED: &str = "d931b6eae46e91ebeb028231f24af58fca469996698f04a80df6e27f93e4642f";

/// Returns the default text and its hash.
///
/// The text consists of each file `src/**/*.rs` of [`CRATES`], sorted by path within its crate and preceded by
/// a line `// CRATE/PATH`. Line ends are as published. The sources are found through
/// `cargo metadata --offline`. If that fails (as it does when dependencies of tests were never downloaded),
/// they are looked up in cargo's home.
///
/// Errors: [`Error::NoCorpus`] if the sources are not on this machine, [`Error::CorpusHash`] if their hash is
/// not [`EXPECTED`].
pub fn default_text() -> Result<(Vec<u8>, Hash)> {
    let text = default_documents()?.concat();
    let hash = blake3::hash(&text);
    if hash.to_hex().as_str() != EXPECTED {
        return Err(Error::CorpusHash { found: hash.to_hex().to_string(), expected: EXPECTED });
    }
    Ok((text, hash))
}

/// Returns the files of the default text, each with its heading, in the order of the text.
///
/// Errors: as [`default_text`], except that the hash is not checked.
pub fn default_documents() -> Result<Vec<Vec<u8>>> {
    assemble(&from_metadata().or_else(|_| from_cargo_home())?)
}

/// Reads the sources of the crates; `folders` are in the order of [`CRATES`].
fn assemble(folders: &[PathBuf]) -> Result<Vec<Vec<u8>>> {
    let mut documents = Vec::new();
    for ((name, _), folder) in CRATES.iter().zip(folders) {
        let mut files = Vec::new();
        rust_files(&folder.join("src"), "src", &mut files)?;
        files.sort_unstable();
        for (inner, path) in files {
            let mut text = format!("// {name}/{inner}\n").into_bytes();
            text.extend(fs::read(&path).map_err(Error::io("read", &path))?);
            documents.push(text);
        }
    }
    Ok(documents)
}

/// Collects the `.rs` files below `folder`, each with its path from the crate's root, with `/` as separator.
fn rust_files(folder: &Path, inner: &str, files: &mut Vec<(String, PathBuf)>) -> Result<()> {
    for entry in fs::read_dir(folder).map_err(Error::io("list", folder))? {
        let path = entry.map_err(Error::io("list", folder))?.path();
        let name = path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        let inner = format!("{inner}/{name}");
        if path.is_dir() {
            rust_files(&path, &inner, files)?;
        } else if path.extension().is_some_and(|e| e == "rs") {
            files.push((inner, path));
        }
    }
    Ok(())
}

/// Finds the crates' folders through `cargo metadata`.
fn from_metadata() -> Result<Vec<PathBuf>> {
    let missing = |what: String| Error::NoCorpus { what };
    let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(&cargo)
        .args(["metadata", "--offline", "--format-version", "1", "--manifest-path"])
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"))
        .output()
        .map_err(|e| missing(format!("failed to run `{}`: {e}", cargo.display())))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(missing(format!("cargo metadata failed: {}", said.lines().next().unwrap_or_default())));
    }
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout)
        .map_err(|e| missing(format!("cargo metadata did not print JSON: {e}")))?;
    let packages = metadata["packages"].as_array().map_or(&[][..], Vec::as_slice);
    let find = |&(name, version): &(&str, &str)| {
        let package = packages.iter().find(|p| {
            p["name"] == name && p["version"].as_str().is_some_and(|v| without_build(v) == version)
        });
        let manifest = package.and_then(|p| p["manifest_path"].as_str());
        let folder = manifest.and_then(|m| Path::new(m).parent()).filter(|f| f.join("src").is_dir());
        folder.map(Path::to_owned).ok_or_else(|| missing(format!("cargo has no package {name} {version}")))
    };
    CRATES.iter().map(find).collect()
}

/// Finds the crates' folders below cargo's home, in the unpacked sources of any registry.
fn from_cargo_home() -> Result<Vec<PathBuf>> {
    let home = env::var_os("CARGO_HOME")
        .map(PathBuf::from)
        .or_else(|| env::home_dir().map(|home| home.join(".cargo")))
        .ok_or_else(|| Error::NoCorpus { what: "there is no home folder of cargo".to_owned() })?;
    let registries = home.join("registry/src");
    let mut candidates = Vec::new();
    for registry in fs::read_dir(&registries).into_iter().flatten().flatten() {
        for package in fs::read_dir(registry.path()).into_iter().flatten().flatten() {
            candidates.push(package.path());
        }
    }
    candidates.sort_unstable();
    let find = |(name, version): &(&str, &str)| {
        let wanted = format!("{name}-{version}");
        let is = |path: &&PathBuf| {
            path.file_name().is_some_and(|n| without_build(&n.to_string_lossy()) == wanted)
                && path.join("src").is_dir()
        };
        let missing = || Error::NoCorpus { what: format!("no {wanted} below {}", registries.display()) };
        candidates.iter().find(is).cloned().ok_or_else(missing)
    };
    CRATES.iter().map(find).collect()
}

/// Returns a version without its build metadata: `1.2.1` for `1.2.1+spec-1.1.0`.
fn without_build(version: &str) -> &str {
    version.split('+').next().unwrap_or(version)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_is_the_expected_one_and_both_ways_lead_to_it() {
        let (text, hash) = default_text().unwrap();
        assert_eq!(hash.to_hex().as_str(), EXPECTED);
        assert!((3_000_000..6_000_000).contains(&text.len()), "{}", text.len());
        assert!(text.starts_with(b"// serde_core/src/"));
        let text_at_home = from_cargo_home().map(|folders| assemble(&folders).unwrap().concat());
        assert_eq!(blake3::hash(&text_at_home.unwrap()), hash);
    }

    #[test]
    fn the_pins_stand_in_the_manifest() {
        // In the crate's own package, cargo has rewritten the manifest.
        let manifest: toml::Table = include_str!("../Cargo.toml").parse().unwrap();
        let dependencies = ["dependencies", "dev-dependencies", "build-dependencies"];
        let tables: Vec<&toml::Table> =
            dependencies.iter().filter_map(|name| manifest.get(*name)?.as_table()).collect();
        for (name, version) in CRATES {
            let entry = tables.iter().find_map(|table| table.get(name)).unwrap();
            let found = entry.get("version").unwrap_or(entry).as_str();
            assert_eq!(found, Some(&*format!("={version}")), "{name}");
        }
    }
}
