//! The workspace's packages, as described by `cargo metadata` without dependency resolution.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::Value;

use crate::shell;

/// The workspace's packages, sorted by name.
#[derive(Debug, Clone)]
pub(crate) struct Workspace {
    pub(crate) packages: Vec<Package>,
    pub(crate) target_directory: PathBuf,
}

/// A package of the workspace.
#[derive(Debug, Clone)]
pub(crate) struct Package {
    pub(crate) name: String,
    pub(crate) dependencies: Vec<Dependency>,
    /// For each feature, what it enables, in Cargo's notation: `other`, `dep:name`, `name/feature`,
    /// `name?/feature`.
    pub(crate) features: BTreeMap<String, Vec<String>>,
    pub(crate) has_library: bool,
    /// Folder of the package's manifest.
    pub(crate) folder: PathBuf,
}

/// An entry of a package's dependency tables.
#[derive(Debug, Clone)]
pub(crate) struct Dependency {
    /// Name of the package, even if the entry renames it.
    pub(crate) name: String,
    /// Name that features use for it.
    pub(crate) alias: String,
    pub(crate) kind: Kind,
    pub(crate) optional: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Normal,
    Build,
    Dev,
}

impl Workspace {
    /// Reads the manifests through cargo, without network access.
    pub(crate) fn load() -> Result<Self> {
        Self::parse(&metadata()?).context("failed to parse the output of `cargo metadata`")
    }

    pub(crate) fn parse(json: &[u8]) -> Result<Self> {
        let json: Value = serde_json::from_slice(json)?;
        let packages = json["packages"].as_array().context("no `packages`")?;
        let mut packages = packages.iter().map(package).collect::<Result<Vec<_>>>()?;
        packages.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(Self { packages, target_directory: PathBuf::from(text(&json, "target_directory")?) })
    }

    pub(crate) fn package(&self, name: &str) -> Option<&Package> {
        self.packages.iter().find(|p| p.name == name)
    }
}

/// Returns the JSON of `cargo metadata` on the workspace's packages, without network access.
pub(crate) fn metadata() -> Result<Vec<u8>> {
    let args = ["metadata", "--offline", "--no-deps", "--format-version", "1"];
    shell::output(&mut shell::cargo(&args))
}

fn package(json: &Value) -> Result<Package> {
    let name = text(json, "name")?;
    let mut features = BTreeMap::new();
    for (feature, enables) in json["features"].as_object().into_iter().flatten() {
        let enables = enables.as_array().into_iter().flatten().filter_map(Value::as_str).map(str::to_owned);
        features.insert(feature.clone(), enables.collect());
    }
    let dependencies = json["dependencies"].as_array().into_iter().flatten();
    let dependencies = dependencies.map(dependency).collect::<Result<Vec<_>>>();
    let dependencies = dependencies.with_context(|| format!("package {name}"))?;
    let mut targets = json["targets"].as_array().into_iter().flatten();
    let has_library = targets.any(|t| t["doctest"] == Value::Bool(true));
    let folder = Path::new(&text(json, "manifest_path")?).parent().unwrap_or(Path::new("")).to_owned();
    Ok(Package { name, dependencies, features, has_library, folder })
}

fn dependency(json: &Value) -> Result<Dependency> {
    let name = text(json, "name")?;
    let kind = match json["kind"].as_str() {
        None => Kind::Normal,
        Some("build") => Kind::Build,
        Some("dev") => Kind::Dev,
        Some(other) => anyhow::bail!("dependency {name}: unknown kind `{other}`"),
    };
    let alias = json["rename"].as_str().unwrap_or(&name).to_owned();
    Ok(Dependency { name, alias, kind, optional: json["optional"] == Value::Bool(true) })
}

fn text(json: &Value, key: &str) -> Result<String> {
    Ok(json[key].as_str().with_context(|| format!("no `{key}`"))?.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metadata_is_read() {
        let json = br#"{"target_directory": "t", "packages": [
            {"name": "b", "manifest_path": "b/Cargo.toml", "features": {"x": ["dep:serde"]}, "targets": [{"doctest": false}],
             "dependencies": [{"name": "serde", "kind": null, "optional": true, "rename": null},
                              {"name": "cc", "kind": "build", "optional": false, "rename": "compiler"}]},
            {"name": "a", "manifest_path": "a/Cargo.toml", "features": {}, "targets": [{"doctest": true}], "dependencies": []}]}"#;
        let workspace = Workspace::parse(json).unwrap();
        assert_eq!(workspace.target_directory, PathBuf::from("t"));
        assert_eq!(workspace.packages[0].name, "a");
        assert!(workspace.packages[0].has_library);
        let b = workspace.package("b").unwrap();
        assert!(!b.has_library);
        assert_eq!(b.folder, PathBuf::from("b"));
        assert_eq!(b.features["x"], ["dep:serde"]);
        assert_eq!((b.dependencies[0].kind, b.dependencies[0].optional), (Kind::Normal, true));
        assert_eq!((b.dependencies[1].kind, b.dependencies[1].alias.as_str()), (Kind::Build, "compiler"));
    }

    #[test]
    fn a_broken_answer_says_what_is_missing() {
        let error = Workspace::parse(br#"{"packages": [{"features": {}}]}"#).unwrap_err();
        assert_eq!(error.to_string(), "no `name`");
    }

    #[test]
    fn this_workspace_loads() {
        let workspace = Workspace::load().unwrap();
        assert!(workspace.package("xtask").is_some());
    }
}
