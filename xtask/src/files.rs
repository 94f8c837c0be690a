//! Finds the dependencies between the files of a crate, and the cycles among them.

mod code;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use code::Code;

/// A module's path within its crate; empty for the crate's root.
type Module = Vec<String>;

/// The files of one crate, by module path.
#[derive(Debug, Default)]
pub(crate) struct Files {
    codes: BTreeMap<Module, Code>,
}

/// A dependency cycle: files that depend on each other, directly or through other files.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Cycle {
    /// Dependencies between the files of the cycle, with the names that they use.
    pub edges: Vec<Edge>,
}

/// A dependency of the file `from` on the file `to`, which defines `names`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Edge {
    pub from: Module,
    pub to: Module,
    pub names: BTreeSet<String>,
}

impl Files {
    /// Reads all files of a library below its `src` folder. Tests and binaries are left out.
    ///
    /// Errors: a folder or file that can't be read.
    pub(crate) fn read(src: &Path) -> Result<Self> {
        let mut files = Self::default();
        files.read_folder(src, &[])?;
        Ok(files)
    }

    fn read_folder(&mut self, folder: &Path, module: &[String]) -> Result<()> {
        let entries = fs::read_dir(folder).with_context(|| format!("failed to read {}", folder.display()))?;
        for entry in entries {
            let path = entry?.path();
            let name = path.file_stem().and_then(|name| name.to_str()).unwrap_or_default().to_owned();
            if name == "tests" || (module.is_empty() && ["main", "bin"].contains(&name.as_str())) {
                continue;
            }
            let mut own = module.to_vec();
            if !(name == "lib" && module.is_empty()) {
                own.push(name);
            }
            if path.is_dir() {
                self.read_folder(&path, &own)?;
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = fs::read_to_string(&path)
                    .with_context(|| format!("failed to read {}", path.display()))?;
                self.codes.insert(own, Code::read(&text));
            }
        }
        Ok(())
    }

    /// Returns the module that defines the item which a path names, as seen from the module `from`.
    ///
    /// Returns `None` if the path leads out of the crate, if it names a module rather than an item, or if it
    /// leads through `steps` imports or more.
    fn definition(&self, from: &[String], path: &[String], steps: usize) -> Option<Module> {
        match self.walk(from, path, steps)? {
            PathTarget::Item(module) => Some(module),
            PathTarget::Module(_) => None,
        }
    }

    fn walk(&self, from: &[String], path: &[String], steps: usize) -> Option<PathTarget> {
        // Imports may refer to each other in a cycle, so the number of steps is bounded.
        let steps = steps.checked_sub(1)?;
        let (first, mut rest) = path.split_first()?;
        let mut module: Module = match first.as_str() {
            "crate" => Module::new(),
            "self" => from.to_vec(),
            "super" => from.split_last()?.1.to_vec(),
            _ => {
                let child = joined(from, first);
                if self.codes.contains_key(&child) {
                    child
                } else {
                    let import = self.codes.get(from)?.imports.iter().find(|import| import.name == *first)?;
                    // This is `use a::a` of an external crate, which would otherwise refer to itself.
                    if import.path.first() == Some(first) {
                        return None;
                    }
                    match self.walk(from, &import.path, steps)? {
                        PathTarget::Module(module) => module,
                        item @ PathTarget::Item(_) => return Some(item),
                    }
                }
            }
        };
        while let Some((name, after)) = rest.split_first() {
            rest = after;
            if name == "super" {
                module.pop()?;
                continue;
            }
            let child = joined(&module, name);
            if self.codes.contains_key(&child) {
                module = child;
                continue;
            }
            let code = self.codes.get(&module)?;
            if code.items.contains(name) {
                return Some(PathTarget::Item(module));
            }
            if let Some(import) = code.imports.iter().find(|import| import.name == *name) {
                match self.walk(&module, &import.path, steps)? {
                    PathTarget::Module(other) => module = other,
                    item @ PathTarget::Item(_) => return Some(item),
                }
                continue;
            }
            let behind_globs = code.imports.iter().filter(|import| import.name == "*").find_map(|import| {
                let path: Module = import.path.iter().chain([name]).cloned().collect();
                self.walk(&module, &path, steps)
            });
            return Some(behind_globs.unwrap_or(PathTarget::Item(module)));
        }
        Some(PathTarget::Module(module))
    }

    /// Returns every dependency of one file on another that may be part of a cycle.
    ///
    /// Three kinds are left out: names that a file only re-exports (`pub use`); the dependencies of a module on
    /// its own submodules, except those of `lib.rs`; and all dependencies of the crate's `error.rs`, which
    /// needs the types of the values in its errors.
    pub(crate) fn edges(&self) -> Vec<Edge> {
        let mut edges: BTreeMap<(Module, Module), BTreeSet<String>> = BTreeMap::new();
        for (module, code) in self.codes.iter().filter(|(module, _)| **module != ["error"]) {
            let imports = code.imports.iter().filter(|import| !import.exported).map(|import| &import.path);
            for path in imports.chain(&code.paths) {
                let Some(to) = self.definition(module, path, 16) else { continue };
                let is_own = to.starts_with(module) && !module.is_empty();
                if to != *module && !is_own {
                    let names = edges.entry((module.clone(), to)).or_default();
                    let item = (1..=path.len()).find(|n| self.definition(module, &path[..*n], 16).is_some());
                    names.extend(item.map(|n| path[n - 1].clone()));
                }
            }
        }
        edges.into_iter().map(|((from, to), names)| Edge { from, to, names }).collect()
    }

    /// Returns the dependency cycles among the files, each with its edges.
    pub(crate) fn cycles(&self) -> Vec<Cycle> {
        let edges = self.edges();
        let reached: BTreeMap<&Module, BTreeSet<&Module>> =
            self.codes.keys().map(|module| (module, reach(&edges, module))).collect();
        let mut seen: BTreeSet<&Module> = BTreeSet::new();
        let mut circles = Vec::new();
        for module in self.codes.keys() {
            if seen.contains(module) || !reached[module].contains(module) {
                continue;
            }
            let members: BTreeSet<&Module> =
                reached[module].iter().copied().filter(|other| reached[other].contains(module)).collect();
            let inside = |edge: &&Edge| members.contains(&edge.from) && members.contains(&edge.to);
            circles.push(Cycle { edges: edges.iter().filter(inside).cloned().collect() });
            seen.extend(members);
        }
        circles
    }
}

enum PathTarget {
    Module(Module),
    Item(Module),
}

fn joined(module: &[String], name: &str) -> Module {
    module.iter().cloned().chain([name.to_owned()]).collect()
}

/// Returns all modules that can be reached from one module along the edges.
fn reach<'a>(edges: &'a [Edge], from: &Module) -> BTreeSet<&'a Module> {
    let mut reached = BTreeSet::new();
    let mut next: Vec<&Module> = vec![from];
    while let Some(module) = next.pop() {
        let from = edges.partition_point(|edge| edge.from < *module);
        for edge in edges[from..].iter().take_while(|edge| edge.from == *module) {
            if reached.insert(&edge.to) {
                next.push(&edge.to);
            }
        }
    }
    reached
}

/// Returns the path of a module's file below `src`, without `.rs`.
fn file(module: &Module) -> String {
    if module.is_empty() { "lib".to_owned() } else { module.join("/") }
}

impl std::fmt::Display for Cycle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (i, edge) in self.edges.iter().enumerate() {
            let names = edge.names.iter().map(String::as_str).collect::<Vec<_>>().join(", ");
            let line = if i == 0 { "" } else { "\n    " };
            write!(f, "{line}{} -> {}: {names}", file(&edge.from), file(&edge.to))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(texts: &[(&str, &str)]) -> Files {
        let module = |path: &str| path.split('/').filter(|name| *name != "lib").map(str::to_owned).collect();
        Files { codes: texts.iter().map(|(path, text)| (module(path), Code::read(text))).collect() }
    }

    #[track_caller]
    fn found(texts: &[(&str, &str)], expected: &[&str]) {
        let circles: Vec<String> = files(texts).cycles().iter().map(Cycle::to_string).collect();
        assert_eq!(circles, expected);
    }

    #[test]
    fn files_that_use_each_other_are_a_circle() {
        let a = ("a", "use crate::b::B;\npub struct A(B);");
        found(&[a, ("b", "pub struct B; fn f() -> crate::a::A {}")], &["a -> b: B\n    b -> a: A"]);
        found(&[a, ("b", "pub struct B;"), ("c", "use crate::{a::A, b};\nfn f() { b::B; }")], &[]);
    }

    #[test]
    fn circles_go_through_several_files_and_exports() {
        let lib = ("lib", "mod a; mod b; mod c; pub use a::A; pub(crate) use b::*;");
        let c = ("c", "use super::A as Other;\npub fn c() -> Other {}");
        let circle = ["a -> b: B\n    b -> c: c\n    c -> a: A"];
        found(
            &[
                lib,
                ("a", "use crate::B;\npub struct A;"),
                ("b", "pub type B = u8; fn f() { crate::c::c() }"),
                c,
            ],
            &circle,
        );
        found(&[lib, ("a", "pub struct A;"), ("b", "pub type B = u8; fn f() { crate::c::c() }"), c], &[]);
    }

    #[test]
    fn a_module_may_use_its_own_folder_and_errors_may_carry_anything() {
        found(&[("a", "mod b; use b::B;\npub struct A(B);"), ("a/b", "use super::A;\npub struct B;")], &[]);
        found(
            &[
                ("error", "use crate::a::A;\npub enum Error { A(A) }"),
                ("a", "use crate::error::Error;\npub struct A;"),
            ],
            &[],
        );
        // Two files of one folder that depend on each other are a cycle too.
        let parent = ("a", "mod b; mod c;");
        let b = ("a/b", "pub struct B; use super::c::C;");
        found(&[parent, b, ("a/c", "pub struct C; use super::b::B;")], &["a/b -> a/c: C\n    a/c -> a/b: B"]);
    }

    #[test]
    fn names_of_other_crates_and_imports_in_circles_lead_nowhere() {
        found(
            &[("a", "use b::c; use c::b;\nfn f() { b::x(); std::mem::swap(); }"), ("c", "use super::a::f;")],
            &[],
        );
    }
}
