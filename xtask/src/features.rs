//! Classification of features. A light feature builds on any machine, without a toolkit, a device or a long
//! build.

use anyhow::Result;

use crate::shell;
use crate::workspace::{Package, Workspace};

/// Heavy features: they need a device, a system library or a long build.
const HEAVY: &[&str] = &["wgpu", "cuda", "cube", "cube-cpu", "mpi", "nccl", "iroh", "hub"];

/// Returns the light features of `package`, without `default`. A feature that enables a heavy one is heavy.
pub(crate) fn light<'a>(workspace: &'a Workspace, package: &'a Package) -> Vec<&'a str> {
    let features = package.features.keys().map(String::as_str);
    features.filter(|f| *f != "default" && !is_heavy(workspace, package, f, &mut Vec::new())).collect()
}

/// Returns `--features a/x,b/y` with every light feature of every crate, and the given heavy ones of every
/// crate that has them. Returns no arguments if there are no such features.
pub(crate) fn all_light_and(workspace: &Workspace, heavy: &[&str]) -> Vec<String> {
    let named = workspace.packages.iter().flat_map(|package| {
        let wanted = heavy.iter().copied().filter(|&h| package.features.contains_key(h));
        let features = light(workspace, package).into_iter().chain(wanted);
        features.map(move |feature| format!("{}/{feature}", package.name))
    });
    let named: Vec<String> = named.collect();
    if named.is_empty() { named } else { vec!["--features".to_owned(), named.join(",")] }
}

fn is_heavy<'a>(
    workspace: &'a Workspace,
    package: &'a Package,
    feature: &'a str,
    seen: &mut Vec<(&'a str, &'a str)>,
) -> bool {
    if HEAVY.contains(&feature) {
        return true;
    }
    if seen.contains(&(&package.name, feature)) {
        return false;
    }
    seen.push((&package.name, feature));
    package.features.get(feature).into_iter().flatten().any(|item| {
        let Some((alias, feature)) = item.split_once('/') else {
            return is_heavy(workspace, package, item.strip_prefix("dep:").unwrap_or(item), seen);
        };
        let alias = alias.trim_end_matches('?');
        let ours = package.dependencies.iter().find(|d| d.alias == alias);
        match ours.and_then(|d| workspace.package(&d.name)) {
            Some(other) => is_heavy(workspace, other, feature, seen),
            None => HEAVY.contains(&alias) || HEAVY.contains(&feature),
        }
    })
}

/// Lints every library crate without features, then with each light feature separately. Warnings are errors.
pub(crate) fn check() -> Result<()> {
    let workspace = Workspace::load()?;
    for package in &workspace.packages {
        if package.has_library {
            clippy(package, None)?;
            for feature in light(&workspace, package) {
                clippy(package, Some(feature))?;
            }
        }
    }
    Ok(())
}

fn clippy(package: &Package, feature: Option<&str>) -> Result<()> {
    let mut args = vec!["clippy", "--quiet", "--package", &package.name, "--no-default-features"];
    if let Some(feature) = feature {
        args.extend(["--features", feature]);
    }
    args.extend(["--", "-D", "warnings"]);
    shell::run(&mut shell::cargo(&args))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_turns_a_heavy_feature_on_is_heavy() {
        let json = br#"{"target_directory": "t", "packages": [
            {"name": "farflung", "manifest_path": "farflung/Cargo.toml", "targets": [], "features": {
                "default": ["cli"], "cli": [], "text": ["cli", "farflung-tensor/f16"],
                "gpu": ["farflung-tensor/device"], "weak": ["farflung-tensor?/wgpu"], "mpi": [],
                "ring": ["a"], "a": ["ring"], "net": ["dep:iroh"], "far": ["net"]},
             "dependencies": [{"name": "farflung-tensor", "kind": null, "optional": true}]},
            {"name": "farflung-tensor", "manifest_path": "farflung-tensor/Cargo.toml", "targets": [], "dependencies": [],
             "features": {"device": ["wgpu"], "wgpu": [], "f16": []}}]}"#;
        let workspace = Workspace::parse(json).unwrap();
        let farflung = workspace.package("farflung").unwrap();
        assert_eq!(light(&workspace, farflung), ["a", "cli", "ring", "text"]);
        assert_eq!(
            all_light_and(&workspace, &[]),
            ["--features", "farflung/a,farflung/cli,farflung/ring,farflung/text,farflung-tensor/f16"]
        );
        let [_, all] = &all_light_and(&workspace, &["wgpu", "cuda"])[..] else {
            panic!("a flag and its value")
        };
        assert!(all.ends_with("farflung-tensor/f16,farflung-tensor/wgpu") && !all.contains("cuda"), "{all}");
    }

    #[test]
    fn no_features_no_flag() {
        let json = br#"{"target_directory": "t", "packages": [
            {"name": "a", "manifest_path": "a/Cargo.toml", "targets": [], "features": {"default": []}, "dependencies": []}]}"#;
        assert!(all_light_and(&Workspace::parse(json).unwrap(), &["wgpu"]).is_empty());
    }
}
