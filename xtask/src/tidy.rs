//! `tidy`: checks the project's rules that no compiler checks.

mod rank_arithmetic;

use std::fs;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};

use crate::shell;

pub(crate) const HELP: &str = "\
Check rules that no compiler checks, and print each finding as file:line.

Usage: cargo xtask tidy

  - a Rust file under crates/ or xtask/ begins with `//!` and has at most 600 lines;
  - no stub, no skipped test, no debugging macro, no tab, no whitespace at the end of a line;
  - no comment line is longer than 112 columns (rustfmt does not check comments);
  - where a rank stands is asked of the plan or its mesh, never divided out of the number of stages or ranks;
  - no file has a name that says nothing (utils, helpers, misc);
  - every crate has a README.md with a code block; the licences are there;
  - only the workspace's manifest states a rust-version;
  - no text file except Cargo.lock has an absolute path of somebody's machine or the host of a package registry.

It reads all files that git tracks, and new files that git does not ignore.

Examples:
  cargo xtask tidy
";

const MAX_LINES: usize = 600;

/// Maximum width of a comment line in characters. Longer than rustfmt's `max_width`, which applies to code.
const MAX_COLUMNS: usize = 112;

/// Words that are not allowed in Rust source. They are split here, so that this file passes.
const STUBS: &[&str] = &[
    concat!("todo", "!("),
    concat!("unimplemented", "!("),
    concat!("#[ign", "ore"),
    concat!("FIX", "ME"),
    concat!("dbg", "!("),
];

const NAMELESS: &[&str] = &["util.rs", "utils.rs", "helper.rs", "helpers.rs", "misc.rs"];

/// Prefixes of absolute paths of checkouts and home folders.
const HOMES: &[&str] =
    &[concat!("/wo", "rk/"), concat!("/ro", "ot/"), concat!("/ho", "me/"), concat!("/Use", "rs/")];

const REGISTRIES: &[&str] = &[
    concat!("crates", ".io"),
    concat!("pypi", ".org"),
    concat!("pythonhosted", ".org"),
    concat!("npmjs", ".org"),
    concat!("npmjs", ".com"),
    concat!("deb.debian", ".org"),
    concat!("proxy.golang", ".org"),
];

/// A violation. `line` is 0 if it concerns the whole file.
#[derive(Debug, PartialEq, Eq)]
struct Finding {
    path: String,
    line: usize,
    what: String,
}

pub(crate) fn main(args: &[String]) -> Result<ExitCode> {
    crate::no_arguments(args)?;
    check()?;
    Ok(ExitCode::SUCCESS)
}

/// Prints every violation. Fails if there are any.
pub(crate) fn check() -> Result<()> {
    let root = shell::root();
    let listed = ["ls-files", "-z", "--cached", "--others", "--exclude-standard"];
    let listed = shell::output(&mut shell::command("git", &listed))?;
    let listed = String::from_utf8(listed).context("a file's name is not UTF-8")?;
    let mut paths: Vec<&str> = listed.split_terminator('\0').collect();
    paths.sort_unstable();
    paths.dedup();
    let (mut findings, mut present, mut read) = (Vec::new(), Vec::new(), 0);
    for path in paths {
        // A file may be deleted but still in git's index.
        let Ok(bytes) = fs::read(root.join(path)) else { continue };
        present.push(path);
        // A file that is not UTF-8 is data and not checked.
        let Ok(text) = String::from_utf8(bytes) else { continue };
        read += 1;
        findings.extend(file(path, &text));
    }
    findings.extend(presence(&present));
    for Finding { path, line, what } in &findings {
        println!("{path}:{line}: {what}");
    }
    if !findings.is_empty() {
        bail!("{} findings", findings.len());
    }
    println!("tidy: {read} files, no finding");
    Ok(())
}

/// Checks that required files exist.
fn presence(paths: &[&str]) -> Vec<Finding> {
    let mut needed = vec!["LICENSE-MIT".to_owned(), "LICENSE-APACHE".to_owned()];
    for path in paths {
        if let Some(name) = path.strip_prefix("crates/").and_then(|p| p.strip_suffix("/Cargo.toml")) {
            needed.push(format!("crates/{name}/README.md"));
        }
    }
    needed.retain(|path| !paths.contains(&path.as_str()));
    needed.into_iter().map(|path| Finding { path, line: 0, what: "missing".to_owned() }).collect()
}

/// Checks one text file. `path` is relative to the root and uses `/`.
fn file(path: &str, text: &str) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut add = |line, what: String| findings.push(Finding { path: path.to_owned(), line, what });
    let name = path.rsplit('/').next().unwrap_or(path);
    let is_rust = Path::new(path).extension().is_some_and(|e| e == "rs");
    let is_ours = path.starts_with("crates/") || path.starts_with("xtask/");
    if is_rust && is_ours {
        let docs_from_readme = name == "lib.rs" && text.starts_with("#![doc");
        if !text.starts_with("//!") && !docs_from_readme {
            add(1, "does not begin with `//!`".to_owned());
        }
        let lines = text.lines().count();
        if lines > MAX_LINES {
            add(lines, format!("{lines} lines, at most {MAX_LINES}: split the file by concept"));
        }
    }
    if is_rust && NAMELESS.contains(&name) {
        add(0, "the name says nothing: name the file after its content".to_owned());
    }
    if name == "README.md" && path.starts_with("crates/") && text.matches("```").count() < 2 {
        add(0, "has no code block".to_owned());
    }
    for (line, content) in text.lines().enumerate() {
        for what in in_line(path, name, is_rust, content) {
            add(line + 1, what);
        }
    }
    findings
}

fn in_line(path: &str, name: &str, is_rust: bool, content: &str) -> Vec<String> {
    let mut found = Vec::new();
    if is_rust {
        found.extend(STUBS.iter().filter(|s| content.contains(**s)).map(|s| format!("`{s}`")));
        if content.contains('\t') {
            found.push("a tab".to_owned());
        }
        if content.ends_with(char::is_whitespace) {
            found.push("whitespace at the end of the line".to_owned());
        }
        found.extend(rank_arithmetic::in_line(path, content));
        let columns = content.chars().count();
        if content.trim_start().starts_with("//") && columns > MAX_COLUMNS {
            found.push(format!("a comment of {columns} columns, at most {MAX_COLUMNS}"));
        }
    }
    if name == "Cargo.toml" && path != "Cargo.toml" && content.replace(' ', "").starts_with("rust-version=") {
        found.push("rust-version may only be set in the workspace's manifest".to_owned());
    }
    if name != "Cargo.lock" {
        let hosts = REGISTRIES.iter().filter(|host| content.contains(**host));
        found.extend(hosts.map(|host| format!("the host of a package registry: {host}")));
        let homes = HOMES.iter().filter(|home| has_absolute(content, home));
        found.extend(homes.map(|home| format!("an absolute path of somebody's machine: {home}")));
    }
    found
}

/// Returns whether `start` occurs as the beginning of a path, not within a longer path or a URL.
fn has_absolute(line: &str, start: &str) -> bool {
    line.match_indices(start).any(|(at, _)| {
        let before = line[..at].chars().next_back();
        !before.is_some_and(|c| c.is_alphanumeric() || "._-~}".contains(c))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(path: &str, text: &str) -> Vec<String> {
        file(path, text).into_iter().map(|f| format!("{}:{}: {}", f.path, f.line, f.what)).collect()
    }

    const FINE: &str = "//! Docs.\nfn main() {}\n";

    #[test]
    fn a_clean_file_passes() {
        assert!(found("crates/base/src/id.rs", FINE).is_empty());
        assert!(found("crates/base/src/lib.rs", "#![doc = include_str!(\"../README.md\")]\n").is_empty());
    }

    #[test]
    fn modules_open_with_their_docs() {
        let expected = ["crates/base/src/id.rs:1: does not begin with `//!`"];
        assert_eq!(found("crates/base/src/id.rs", "use std::fmt;\n"), expected);
        assert_eq!(found("crates/base/src/id.rs", "#![doc = \"x\"]\n"), expected);
        assert!(found("examples/a/src/main.rs", "fn main() {}\n").is_empty());
    }

    #[test]
    fn long_comments_are_found() {
        let comment = |width: usize| format!("//! Docs.\n    // {}\n", "x".repeat(width - 7));
        assert!(found("crates/base/src/id.rs", &comment(112)).is_empty());
        let expected = ["crates/base/src/id.rs:2: a comment of 113 columns, at most 112"];
        assert_eq!(found("crates/base/src/id.rs", &comment(113)), expected);
    }

    #[test]
    fn long_files_are_found() {
        let lines = |n: usize| format!("//! Docs.\n{}", "\n".repeat(n - 1));
        assert!(found("xtask/src/a.rs", &lines(600)).is_empty());
        assert_eq!(
            found("xtask/src/a.rs", &lines(601)),
            ["xtask/src/a.rs:601: 601 lines, at most 600: split the file by concept"]
        );
    }

    #[test]
    fn stubs_are_found_everywhere() {
        for stub in STUBS {
            let text = format!("{FINE}    {stub}\n");
            assert_eq!(found("examples/a/src/b.rs", &text), [format!("examples/a/src/b.rs:3: `{stub}`")]);
        }
        assert!(found("README.md", STUBS[3]).is_empty());
    }

    #[test]
    fn tabs_and_blanks_at_the_end_are_found() {
        assert_eq!(
            found("xtask/src/a.rs", "//! Docs. \n\tx\n"),
            ["xtask/src/a.rs:1: whitespace at the end of the line", "xtask/src/a.rs:2: a tab"]
        );
        assert!(found("README.md", "a line break  \nand on\n").is_empty());
    }

    #[test]
    fn files_named_after_nothing_are_found() {
        for name in NAMELESS {
            assert_eq!(found(&format!("crates/comm/src/{name}"), FINE).len(), 1);
        }
    }

    #[test]
    fn crates_need_a_readme_with_code_and_the_project_its_licences() {
        assert_eq!(
            found("crates/comm/README.md", "# comm\n"),
            ["crates/comm/README.md:0: has no code block"]
        );
        assert!(found("crates/comm/README.md", "```rust\n```\n").is_empty());
        let missing = |paths: &[&str]| presence(paths).into_iter().map(|f| f.path).collect::<Vec<_>>();
        assert_eq!(
            missing(&["LICENSE-MIT", "crates/comm/Cargo.toml"]),
            ["LICENSE-APACHE", "crates/comm/README.md"]
        );
        let all = ["LICENSE-APACHE", "LICENSE-MIT", "crates/comm/Cargo.toml", "crates/comm/README.md"];
        assert!(missing(&all).is_empty());
    }

    #[test]
    fn one_rust_version() {
        assert!(found("Cargo.toml", "rust-version = \"1.95\"\n").is_empty());
        assert!(found("crates/comm/Cargo.toml", "rust-version.workspace = true\n").is_empty());
        assert_eq!(found("crates/comm/Cargo.toml", "rust-version = \"1.95\"\n").len(), 1);
    }

    #[test]
    fn paths_of_a_machine_are_found() {
        for home in HOMES {
            for line in [format!("see {home}x"), format!("{home}x"), format!("\"{home}x\"")] {
                assert_eq!(found("README.md", &line).len(), 1, "{line}");
            }
            for line in [format!("src{home}x"), format!("example.org{home}x"), format!("~{home}x")] {
                assert!(found("README.md", &line).is_empty(), "{line}");
            }
        }
    }

    #[test]
    fn hosts_of_registries_are_found_outside_the_lock() {
        for host in REGISTRIES {
            assert_eq!(found("deny.toml", &format!("https://{host}/x")).len(), 1);
            assert!(found("examples/a/Cargo.lock", host).is_empty());
        }
    }
}
