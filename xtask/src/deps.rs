//! `deps`: checks, from the manifests, that crates have only allowed dependencies, on each other and on
//! external crates, and that the files of each library have no dependency cycle.

use std::fmt::Write as _;
use std::process::ExitCode;

use anyhow::{Result, bail};

use crate::files::Files;
use crate::workspace::{Dependency, Kind, Package, Workspace};

pub(crate) const HELP: &str = "\
Check the dependencies between crates, and that files have no dependency cycle; print the graph.

Usage: cargo xtask deps

Checked for normal and build dependencies, including optional ones:
  - every dependency between crates of the workspace is in the table ALLOWED_DEPENDENCIES;
  - optim depends on comm only with its feature `sync`;
  - base depends only on serde, with a feature;
  - only tensor depends on cubecl, cubek and wgpu; only comm and farflung on sockets and async runtimes.
The files of a library may not have a dependency cycle: what both need goes into a file below them. A module
may use the files of its own folder, and error.rs the values that errors carry.
A dev-dependency may be any crate of a lower layer:
  base, store; base < tensor, comm, parallel, compress < optim, zoo < farflung < farflung-repro

Examples:
  cargo xtask deps
";

/// Allowed dependencies of a crate of the workspace, and its layer.
struct AllowedDependencies {
    from: &'static str,
    layer: u8,
    to: &'static [&'static str],
}

const ALLOWED_DEPENDENCIES: &[AllowedDependencies] = &[
    AllowedDependencies { from: "farflung-base", layer: 0, to: &[] },
    AllowedDependencies { from: "farflung-tensor", layer: 1, to: &["farflung-base"] },
    AllowedDependencies { from: "farflung-comm", layer: 1, to: &["farflung-base"] },
    AllowedDependencies { from: "farflung-parallel", layer: 1, to: &["farflung-base"] },
    AllowedDependencies { from: "farflung-compress", layer: 1, to: &["farflung-base"] },
    AllowedDependencies { from: "farflung-store", layer: 0, to: &[] },
    // Depending on `base` is harmless: the other dependencies use its ids and units in their APIs already.
    AllowedDependencies {
        from: "farflung-optim",
        layer: 2,
        to: &["farflung-base", "farflung-tensor", "farflung-compress", "farflung-comm"],
    },
    AllowedDependencies {
        from: "farflung-zoo",
        layer: 2,
        to: &["farflung-base", "farflung-tensor", "farflung-parallel"],
    },
    AllowedDependencies {
        from: "farflung",
        layer: 3,
        to: &[
            "farflung-base",
            "farflung-tensor",
            "farflung-comm",
            "farflung-parallel",
            "farflung-compress",
            "farflung-optim",
            "farflung-store",
            "farflung-zoo",
        ],
    },
    AllowedDependencies { from: "farflung-repro", layer: 4, to: &["farflung"] },
    AllowedDependencies { from: "xtask", layer: 0, to: &[] },
];

/// Dependencies that are allowed only behind a feature: (from, to, feature).
const GATED: &[(&str, &str, &str)] = &[("farflung-optim", "farflung-comm", "sync")];

/// External crates, by name prefix, and the only crates that may depend on them.
const CONFINED: &[(&str, &[&str])] = &[
    ("cubecl", &["farflung-tensor"]),
    ("cubek", &["farflung-tensor"]),
    ("wgpu", &["farflung-tensor"]),
    ("tokio", &["farflung-comm", "farflung"]),
    ("axum", &["farflung"]),
    ("mio", &["farflung-comm", "farflung"]),
    ("socket2", &["farflung-comm", "farflung"]),
    ("quinn", &["farflung-comm", "farflung"]),
    ("iroh", &["farflung-comm", "farflung"]),
];

pub(crate) fn main(args: &[String]) -> Result<ExitCode> {
    crate::no_arguments(args)?;
    check()?;
    Ok(ExitCode::SUCCESS)
}

/// Prints the graph. Fails if there are violations, and lists them all.
pub(crate) fn check() -> Result<()> {
    let packages = Workspace::load()?.packages;
    print!("{}", graph(&packages));
    let violations = violations(&packages);
    if !violations.is_empty() {
        bail!("{} dependencies are not allowed:\n  {}", violations.len(), violations.join("\n  "));
    }
    println!("deps: {} packages, all dependencies allowed", packages.len());
    check_files(&packages)
}

/// Fails with every dependency cycle between the files of a library.
fn check_files(packages: &[Package]) -> Result<()> {
    let mut found = Vec::new();
    for package in packages.iter().filter(|package| package.has_library) {
        let cycles = Files::read(&package.folder.join("src"))?.cycles();
        found.extend(cycles.into_iter().map(|cycle| format!("{}:\n    {cycle}", package.name)));
    }
    if !found.is_empty() {
        bail!("{} dependency cycles between files:\n  {}", found.len(), found.join("\n  "));
    }
    println!("deps: no dependency cycle between files");
    Ok(())
}

fn allowed_dependencies(name: &str) -> Option<&'static AllowedDependencies> {
    ALLOWED_DEPENDENCIES.iter().find(|a| a.from == name)
}

/// Formats one line per package: its dependencies within the workspace, then the external ones.
fn graph(packages: &[Package]) -> String {
    let ours = |d: &Dependency| packages.iter().any(|p| p.name == d.name);
    let list = |package: &Package, kinds: &[Kind], inside: bool| {
        let chosen = package.dependencies.iter().filter(|d| kinds.contains(&d.kind) && ours(d) == inside);
        let mut names: Vec<_> =
            chosen.map(|d| format!("{}{}", d.name, if d.optional { "?" } else { "" })).collect();
        names.sort();
        names.dedup();
        names.join(" ")
    };
    let mut text = String::new();
    for package in packages {
        let _ = write!(text, "{:<18}", package.name);
        for (label, kinds, inside) in [
            (" -> ", &[Kind::Normal, Kind::Build][..], true),
            (" | dev: ", &[Kind::Dev], true),
            (" | external: ", &[Kind::Normal, Kind::Build], false),
        ] {
            let names = list(package, kinds, inside);
            if !names.is_empty() {
                let _ = write!(text, "{label}{names}");
            }
        }
        text.push('\n');
    }
    text
}

/// Returns a message for each violation.
fn violations(packages: &[Package]) -> Vec<String> {
    let mut found = Vec::new();
    for package in packages {
        let Some(arrow) = allowed_dependencies(&package.name) else {
            found.push(format!("{} has no line in ALLOWED_DEPENDENCIES (xtask/src/deps.rs)", package.name));
            continue;
        };
        for dependency in &package.dependencies {
            let inside = packages.iter().any(|p| p.name == dependency.name);
            if inside {
                found.extend(edge(package, arrow, dependency));
            } else if dependency.kind != Kind::Dev {
                found.extend(foreign(package, dependency));
            }
        }
    }
    found
}

/// Checks a dependency between two crates of the workspace. Returns a message if it is not allowed.
fn edge(package: &Package, from: &AllowedDependencies, dependency: &Dependency) -> Option<String> {
    let (name, to) = (&package.name, &dependency.name);
    if dependency.kind == Kind::Dev {
        let lower = allowed_dependencies(to).is_some_and(|a| a.layer < from.layer);
        return (!lower).then(|| format!("{name} -> {to} (dev): {to} is not in a lower layer"));
    }
    if !from.to.contains(&to.as_str()) {
        let optional = if dependency.optional { " (optional)" } else { "" };
        return Some(format!("{name} -> {to}{optional}: not among the allowed dependencies"));
    }
    let (.., gate) = GATED.iter().find(|(a, b, _)| a == name && b == to)?;
    if !dependency.optional {
        return Some(format!("{name} -> {to}: must be optional, behind feature `{gate}`"));
    }
    let other = package.features.iter().find(|(feature, enables)| {
        feature != gate && enables.iter().any(|item| turns_on(item, &dependency.alias))
    });
    other.map(|(feature, _)| {
        format!("{name} -> {to}: enabled by feature `{feature}`, only `{gate}` may enable it")
    })
}

/// Returns whether an entry of a feature enables the optional dependency (`name?/feature` does not).
fn turns_on(item: &str, alias: &str) -> bool {
    let item = item.strip_prefix("dep:").unwrap_or(item);
    item.split('/').next() == Some(alias)
}

/// Checks a dependency on an external crate. Returns a message if it is not allowed.
fn foreign(package: &Package, dependency: &Dependency) -> Option<String> {
    let (name, to) = (&package.name, &dependency.name);
    if name == "farflung-base" && !(to == "serde" && dependency.optional) {
        return Some(format!("{name} -> {to}: base may depend only on an optional serde"));
    }
    let (prefix, allowed) = CONFINED.iter().find(|(prefix, _)| to.starts_with(prefix))?;
    let confined = !allowed.contains(&name.as_str());
    confined.then(|| format!("{name} -> {to}: `{prefix}` may be used only by {}", allowed.join(" and ")))
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    /// Creates a package. Each word of `deps` is a dependency: `name` is normal, `name?` optional,
    /// `build:name`, `dev:name`.
    fn package(name: &str, deps: &[&str], features: &[(&str, &[&str])]) -> Package {
        let dependency = |word: &&str| {
            let (kind, rest) = match word.split_once(':') {
                Some(("build", rest)) => (Kind::Build, rest),
                Some(("dev", rest)) => (Kind::Dev, rest),
                _ => (Kind::Normal, *word),
            };
            let name = rest.trim_end_matches('?').to_owned();
            Dependency { alias: name.clone(), name, kind, optional: rest.ends_with('?') }
        };
        let features =
            features.iter().map(|(f, e)| ((*f).to_owned(), e.iter().map(|s| (*s).to_owned()).collect()));
        Package {
            name: name.to_owned(),
            dependencies: deps.iter().map(dependency).collect(),
            features: features.collect(),
            has_library: true,
            folder: PathBuf::new(),
        }
    }

    /// Returns a valid workspace with `changed` in place of the package of the same name. A new name is added.
    fn with(changed: Package) -> Vec<Package> {
        let mut packages = vec![
            package("farflung-base", &["serde?", "dev:proptest"], &[("serde", &["dep:serde"])]),
            package("farflung-tensor", &["farflung-base", "cubecl?", "rayon"], &[]),
            package("farflung-comm", &["farflung-base", "tokio"], &[]),
            package("farflung-parallel", &["farflung-base"], &[]),
            package("farflung-compress", &["farflung-base"], &[]),
            package(
                "farflung-optim",
                &["farflung-base", "farflung-tensor", "farflung-compress", "farflung-comm?"],
                &[("sync", &["dep:farflung-comm", "farflung-comm/tcp"])],
            ),
            package("farflung-zoo", &["farflung-tensor", "farflung-parallel", "dev:farflung-comm"], &[]),
            package("farflung", &["farflung-optim", "farflung-zoo", "farflung-comm"], &[]),
            package("farflung-repro", &["farflung", "anyhow"], &[]),
            package("xtask", &["anyhow", "serde_json"], &[]),
        ];
        match packages.iter_mut().find(|p| p.name == changed.name) {
            Some(place) => *place = changed,
            None => packages.push(changed),
        }
        packages
    }

    #[track_caller]
    fn refused(changed: Package, expected: &str) {
        assert_eq!(violations(&with(changed)), [expected]);
    }

    #[test]
    fn the_house_as_designed_passes() {
        let base = package("farflung-base", &["serde?"], &[]);
        assert_eq!(violations(&with(base)), Vec::<String>::new());
    }

    #[test]
    fn an_edge_that_is_no_arrow_is_refused() {
        refused(
            package("farflung-compress", &["farflung-tensor"], &[]),
            "farflung-compress -> farflung-tensor: not among the allowed dependencies",
        );
        refused(
            package("farflung-comm", &["farflung-compress?"], &[]),
            "farflung-comm -> farflung-compress (optional): not among the allowed dependencies",
        );
        refused(
            package("farflung-zoo", &["build:farflung-optim"], &[]),
            "farflung-zoo -> farflung-optim: not among the allowed dependencies",
        );
        refused(
            package("farflung-repro", &["farflung", "farflung-comm"], &[]),
            "farflung-repro -> farflung-comm: not among the allowed dependencies",
        );
        refused(
            package("xtask", &["farflung-base"], &[]),
            "xtask -> farflung-base: not among the allowed dependencies",
        );
    }

    #[test]
    fn dev_dependencies_point_downward() {
        let fine = package("farflung-optim", &["dev:farflung-comm", "dev:farflung-parallel"], &[]);
        assert_eq!(violations(&with(fine)), Vec::<String>::new());
        refused(
            package("farflung-zoo", &["dev:farflung-optim"], &[]),
            "farflung-zoo -> farflung-optim (dev): farflung-optim is not in a lower layer",
        );
        refused(
            package("farflung-tensor", &["dev:farflung"], &[]),
            "farflung-tensor -> farflung (dev): farflung is not in a lower layer",
        );
    }

    #[test]
    fn optim_names_comm_only_behind_sync() {
        refused(
            package("farflung-optim", &["farflung-comm"], &[]),
            "farflung-optim -> farflung-comm: must be optional, behind feature `sync`",
        );
        for item in ["dep:farflung-comm", "farflung-comm", "farflung-comm/tcp"] {
            refused(
                package("farflung-optim", &["farflung-comm?"], &[("zero", &[item])]),
                "farflung-optim -> farflung-comm: enabled by feature `zero`, only `sync` may enable it",
            );
        }
        let weak = package("farflung-optim", &["farflung-comm?"], &[("tcp", &["farflung-comm?/tcp"])]);
        assert_eq!(violations(&with(weak)), Vec::<String>::new());
    }

    #[test]
    fn base_stands_on_std_alone() {
        let expected = |to| format!("farflung-base -> {to}: base may depend only on an optional serde");
        refused(package("farflung-base", &["thiserror"], &[]), &expected("thiserror"));
        refused(package("farflung-base", &["serde"], &[]), &expected("serde"));
        refused(package("farflung-base", &["build:cc"], &[]), &expected("cc"));
    }

    #[test]
    fn devices_and_sockets_stay_where_they_belong() {
        refused(
            package("farflung-zoo", &["cubecl-core?"], &[]),
            "farflung-zoo -> cubecl-core: `cubecl` may be used only by farflung-tensor",
        );
        refused(
            package("farflung-tensor", &["tokio"], &[]),
            "farflung-tensor -> tokio: `tokio` may be used only by farflung-comm and farflung",
        );
    }

    #[test]
    fn a_new_crate_needs_a_line() {
        refused(
            package("farflung-extra", &[], &[]),
            "farflung-extra has no line in ALLOWED_DEPENDENCIES (xtask/src/deps.rs)",
        );
    }

    #[test]
    fn the_graph_is_text() {
        let packages = [
            package("farflung-base", &["serde?"], &[]),
            package("farflung-comm", &["farflung-base", "rustix", "dev:farflung-base"], &[]),
        ];
        assert_eq!(
            graph(&packages),
            "farflung-base      | external: serde?\n\
             farflung-comm      -> farflung-base | dev: farflung-base | external: rustix\n"
        );
    }
}
