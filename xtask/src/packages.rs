//! `packages`: checks each crate as it would be published. `cargo package` makes the packages, which are then
//! unpacked into a workspace of their own. With `--test` they are built and tested there.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::workspace::{self, Workspace};
use crate::{features, setup, shell, test};

pub(crate) const HELP: &str = "\
Make the package of each crate, and unpack them into a workspace of their own.

Usage: cargo xtask packages [--test]

  --test  build and test the crates there: no test may need a file that its package lacks

Each package must carry both licences, a description, keywords, categories, a README and a link to its
documentation. The examples of this project are built from these packages: `cargo xtask ci --only examples`.
";

/// Files that each package must contain.
const FILES: [&str; 4] = ["LICENSE-MIT", "LICENSE-APACHE", "README.md", "Cargo.toml"];

/// Maximum number of keywords, and of categories, of a package.
const MOST: usize = 5;

pub(crate) fn main(args: &[String]) -> Result<ExitCode> {
    match args {
        [] => {
            let unpacked = Unpacked::new()?;
            println!("packages: {} crates in {}", unpacked.crates.len(), unpacked.folder.display());
        }
        [flag] if flag == "--test" => check()?,
        _ => return Err(crate::Usage(format!("cannot make sense of `{}`", args.join(" "))).into()),
    }
    Ok(ExitCode::SUCCESS)
}

/// Makes and unpacks all packages, and runs their tests.
pub(crate) fn check() -> Result<()> {
    setup::vulkan()?;
    let unpacked = Unpacked::new()?;
    let features = features::all_light_and(&unpacked.workspace, &["wgpu"]);
    let target = unpacked.folder.join("target");
    for runner in test::runners() {
        let mut command = shell::cargo(runner);
        command.arg("--workspace").args(&features).arg("--target-dir").arg(&target);
        shell::run(command.current_dir(&unpacked.folder))?;
    }
    println!("packages: {} crates built and tested from their packages", unpacked.crates.len());
    Ok(())
}

/// A crate that is published.
#[derive(Debug)]
struct Crate {
    name: String,
    /// Name and version: the name of the package's archive, and of its folder below [`Unpacked::folder`].
    package: String,
}

impl Crate {
    /// Reads a package of `cargo metadata`.
    fn of(package: &Value) -> Self {
        let (name, version) = (field(package, "name"), field(package, "version"));
        Self { name: name.to_owned(), package: format!("{name}-{version}") }
    }
}

/// The unpacked packages: a workspace that does not contain this project's other files.
#[derive(Debug)]
pub(crate) struct Unpacked {
    pub(crate) folder: PathBuf,
    crates: Vec<Crate>,
    /// The packages that are published.
    workspace: Workspace,
}

impl Unpacked {
    /// Makes the packages from the files as they are now, whether or not they are committed.
    ///
    /// Errors: `cargo package` or `tar` fails, or a package lacks one of [`FILES`] or a field that [`flaws`]
    /// checks.
    pub(crate) fn new() -> Result<Self> {
        let metadata = workspace::metadata()?;
        let json: Value =
            serde_json::from_slice(&metadata).context("failed to parse the output of `cargo metadata`")?;
        let packages: Vec<&Value> =
            json["packages"].as_array().into_iter().flatten().filter(|p| p["publish"].is_null()).collect();
        let flawed: Vec<String> = packages.iter().flat_map(|package| flaws(package)).collect();
        if !flawed.is_empty() {
            bail!("{} flaws in the crates' manifests:\n  {}", flawed.len(), flawed.join("\n  "));
        }
        let mut crates: Vec<Crate> = packages.iter().map(|package| Crate::of(package)).collect();
        crates.sort_by(|a, b| a.name.cmp(&b.name));
        let workspace = Workspace::parse(&metadata)?;
        let target = workspace.target_directory.clone();
        let folder = target.join("packages");
        let published = |name: &str| crates.iter().any(|one| one.name == name);
        let packages = workspace.packages.into_iter().filter(|package| published(&package.name)).collect();
        let workspace = Workspace { packages, target_directory: folder.join("target") };

        let mut command = shell::cargo(&["package", "--no-verify", "--allow-dirty", "--quiet"]);
        shell::run(command.args(crates.iter().flat_map(|one| ["--package", &one.name])))?;
        fs::create_dir_all(&folder).with_context(|| format!("failed to make {}", folder.display()))?;
        for Crate { package, .. } in &crates {
            unpack(&target.join("package").join(format!("{package}.crate")), &folder, package)?;
        }
        let root = shell::root();
        let manifest = fs::read_to_string(root.join("Cargo.toml")).context("failed to read Cargo.toml")?;
        write(&folder.join("Cargo.toml"), &workspace_manifest(&crates, &manifest))?;
        let lock = fs::read_to_string(root.join("Cargo.lock")).context("failed to read Cargo.lock")?;
        write(&folder.join("Cargo.lock"), &lock)?;
        Ok(Self { folder, crates, workspace })
    }

    /// Copies a project that depends on crates of this workspace by path, so that it uses the packages instead.
    /// Returns the copy's manifest.
    pub(crate) fn project(&self, from: &Path) -> Result<PathBuf> {
        let name = from.file_name().context("a project's folder has a name")?;
        let into = self.folder.join("examples").join(name);
        if into.exists() {
            fs::remove_dir_all(&into).with_context(|| format!("failed to remove {}", into.display()))?;
        }
        copy(from, &into)?;
        let manifest = into.join("Cargo.toml");
        let text = fs::read_to_string(&manifest)
            .with_context(|| format!("failed to read {}", manifest.display()))?;
        write(&manifest, &self.by_package(&text)?)?;
        Ok(manifest)
    }

    /// Replaces paths to crates of this workspace by paths to their packages.
    fn by_package(&self, manifest: &str) -> Result<String> {
        let (mut text, mut replaced) = (manifest.to_owned(), 0);
        for Crate { name, package } in &self.crates {
            let short = name.strip_prefix("farflung-").unwrap_or(name);
            let path = format!("\"../../crates/{short}\"");
            replaced += text.matches(&path).count();
            text = text.replace(&path, &format!("\"../../{package}\""));
        }
        if replaced == 0 || text.contains("../crates/") {
            bail!("its manifest must name each crate by its path, such as \"../../crates/comm\"");
        }
        let _ = write!(text, "\n{}", patch(&self.crates, "../../"));
        Ok(text)
    }
}

/// Returns the `[patch]` table that replaces each crate by its unpacked package. `prefix` begins the paths.
fn patch(crates: &[Crate], prefix: &str) -> String {
    let mut text = "[patch.crates-io]\n".to_owned();
    for Crate { name, package } in crates {
        let _ = writeln!(text, "{name} = {{ path = \"{prefix}{package}\" }}");
    }
    text
}

/// Returns the manifest of the workspace of packages: its members, and the profiles of this project's manifest.
fn workspace_manifest(crates: &[Crate], ours: &str) -> String {
    let members: Vec<String> = crates.iter().map(|one| format!("\"{}\"", one.package)).collect();
    let mut text = format!(
        "[workspace]\nresolver = \"3\"\nmembers = [{}]\nexclude = [\"examples\"]\n\n",
        members.join(", ")
    );
    text.push_str(&patch(crates, ""));
    let mut copies = false;
    for line in ours.lines() {
        if line.starts_with('[') {
            copies = line.starts_with("[profile.");
        }
        if copies {
            text.push_str(line);
            text.push('\n');
        }
    }
    text
}

/// Returns what a package's metadata lacks to be published.
fn flaws(package: &Value) -> Vec<String> {
    let name = field(package, "name");
    let mut found = Vec::new();
    for key in ["license", "description", "documentation", "readme"] {
        if field(package, key).is_empty() {
            found.push(format!("{name}: no `{key}`"));
        }
    }
    for key in ["keywords", "categories"] {
        let count = package[key].as_array().map_or(0, Vec::len);
        if !(1..=MOST).contains(&count) {
            found.push(format!("{name}: {count} {key}, expected 1 to {MOST}"));
        }
    }
    found
}

fn field<'a>(package: &'a Value, key: &str) -> &'a str {
    package[key].as_str().unwrap_or_default()
}

fn unpack(archive: &Path, folder: &Path, package: &str) -> Result<()> {
    let into = folder.join(package);
    if into.exists() {
        fs::remove_dir_all(&into).with_context(|| format!("failed to remove {}", into.display()))?;
    }
    let mut command = shell::command::<&str>("tar", &["-xzf"]);
    shell::run(command.arg(archive).arg("-C").arg(folder))?;
    let missing: Vec<&str> = FILES.into_iter().filter(|file| !into.join(file).is_file()).collect();
    if !missing.is_empty() {
        bail!("the package {package} lacks {}", missing.join(", "));
    }
    Ok(())
}

fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("failed to write {}", path.display()))
}

/// Copies a folder without build outputs.
fn copy(from: &Path, into: &Path) -> Result<()> {
    fs::create_dir_all(into).with_context(|| format!("failed to make {}", into.display()))?;
    let unreadable = || format!("failed to read {}", from.display());
    for entry in fs::read_dir(from).with_context(unreadable)? {
        let path = entry.with_context(unreadable)?.path();
        let to = into.join(path.file_name().unwrap_or_default());
        if path.is_dir() {
            if !path.ends_with("target") {
                copy(&path, &to)?;
            }
        } else {
            fs::copy(&path, &to).with_context(|| format!("failed to copy {}", path.display()))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn crates() -> Vec<Crate> {
        let one = |name: &str| Crate { name: name.to_owned(), package: format!("{name}-0.1.0") };
        vec![one("farflung"), one("farflung-comm")]
    }

    #[test]
    fn what_a_manifest_lacks_is_named() {
        let whole = serde_json::json!({
            "name": "a", "license": "MIT", "description": "d", "documentation": "l", "readme": "README.md",
            "keywords": ["k"], "categories": ["c"],
        });
        assert_eq!(flaws(&whole), Vec::<String>::new());
        let mut poor = whole;
        poor["license"] = Value::Null;
        poor["keywords"] = serde_json::json!([]);
        poor["categories"] = serde_json::json!(["1", "2", "3", "4", "5", "6"]);
        let expected =
            ["a: no `license`", "a: 0 keywords, expected 1 to 5", "a: 6 categories, expected 1 to 5"];
        assert_eq!(flaws(&poor), expected);
    }

    #[test]
    fn the_workspace_of_packages_has_our_profiles_alone() {
        let ours = "[workspace]\nmembers = [\"x\"]\n[profile.dev]\ndebug = 1\n\n[lints]\na = 1\n";
        let text = workspace_manifest(&crates(), ours);
        assert!(text.contains("members = [\"farflung-0.1.0\", \"farflung-comm-0.1.0\"]"));
        assert!(
            text.contains("farflung-comm = { path = \"farflung-comm-0.1.0\" }\n[profile.dev]\ndebug = 1\n")
        );
        assert!(!text.contains("lints") && !text.contains("\"x\""));
    }

    #[test]
    fn projects_use_the_packages() {
        let workspace = Workspace { packages: Vec::new(), target_directory: PathBuf::new() };
        let unpacked = Unpacked { folder: PathBuf::new(), crates: crates(), workspace };
        let text = "[dependencies]\nfarflung-comm = { path = \"../../crates/comm\" }\n";
        let text = unpacked.by_package(text).unwrap();
        assert!(
            text.contains("farflung-comm = { path = \"../../farflung-comm-0.1.0\" }\n\n[patch.crates-io]")
        );
        assert!(unpacked.by_package("[dependencies]\nserde = \"1\"\n").is_err());
    }
}
