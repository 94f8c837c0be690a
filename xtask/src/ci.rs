//! `ci`: runs every check of the project, one step after the other.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::workspace::Workspace;
use crate::{bench, browser, deps, examples, features, packages, setup, shell, test, tidy};

pub(crate) const HELP: &str = "\
Run every check of the project, in order, and stop at the first that fails.

Usage: cargo xtask ci [--from STEP | --only STEP[,STEP...]]
       cargo xtask ci --list

  --from STEP    begin at this step
  --only STEPS   run only these steps
  --list         list the steps, with what each checks

Examples:
  cargo xtask ci
  cargo xtask ci --from doc
  cargo xtask ci --only deps,tidy,fmt
";

struct Step {
    name: &'static str,
    what: &'static str,
    run: fn() -> Result<()>,
}

const STEPS: &[Step] = &[
    Step { name: "fmt", what: "the formatting of the workspace and the examples", run: fmt },
    Step {
        name: "clippy",
        what: "every target with every light feature, wgpu and cuda, warnings as errors",
        run: clippy,
    },
    Step { name: "test", what: "unit and integration tests", run: test::check_units },
    Step { name: "doctest", what: "the examples in the documentation", run: test::check_docs },
    Step { name: "doc", what: "the documentation, warnings as errors", run: doc },
    Step {
        name: "features",
        what: "each crate without features, and with each light feature alone",
        run: features::check,
    },
    Step {
        name: "iroh",
        what: "the transport iroh, a heavy feature: lints, the contract of transports, its own tests",
        run: iroh,
    },
    Step {
        name: "packages",
        what: "each crate built and tested from its own package, with both licences and its metadata",
        run: packages::check,
    },
    Step {
        name: "examples",
        what: "the projects under examples/, built from the packages alone, run and tested",
        run: examples::check,
    },
    Step {
        name: "bench",
        what: "the short form of the benches whose marks do not depend on this machine's clock",
        run: bench::check,
    },
    Step {
        name: "browser",
        what: "the page of `farflung watch` in headless Chromium, which is installed if it is missing",
        run: browser::check,
    },
    Step {
        name: "mpi",
        what: "the feature `mpi`: lints, tests and the bench `transports` under mpirun, which is installed \
               if it is missing",
        run: mpi,
    },
    Step {
        name: "deps",
        what: "the allowed dependencies between crates, and dependency cycles between files",
        run: deps::check,
    },
    Step {
        name: "tidy",
        what: "rules that no compiler checks: headers, sizes, stubs, paths",
        run: tidy::check,
    },
];

pub(crate) fn main(args: &[String]) -> Result<ExitCode> {
    if args == ["--list"] {
        for step in STEPS {
            println!("{:<9} {}", step.name, step.what);
        }
        return Ok(ExitCode::SUCCESS);
    }
    let mut times = Vec::new();
    for step in choose(args)? {
        println!("== {}: {}", step.name, step.what);
        let start = now();
        (step.run)().with_context(|| {
            let name = step.name;
            format!(
                "step {name} failed; to repeat it: cargo xtask ci --only {name}; to continue: cargo \
                     xtask ci --from {name}"
            )
        })?;
        let taken = now() - start;
        println!("== {}: ok in {}\n", step.name, seconds(taken));
        times.push((step.name, taken));
    }
    for (name, taken) in &times {
        println!("{name:<9} {:>8}", seconds(*taken));
    }
    println!("ci: {} steps ok in {}", times.len(), seconds(times.iter().map(|(_, taken)| *taken).sum()));
    Ok(ExitCode::SUCCESS)
}

/// Returns the steps that the command line selects, in the order of [`STEPS`].
fn choose(args: &[String]) -> Result<Vec<&'static Step>> {
    let position = |name: &str| {
        let found = STEPS.iter().position(|step| step.name == name);
        found.ok_or_else(|| {
            let names: Vec<_> = STEPS.iter().map(|step| step.name).collect();
            crate::Usage(format!("no step `{name}`; the steps are {}", names.join(", ")))
        })
    };
    match args {
        [] => Ok(STEPS.iter().collect()),
        [flag, name] if flag == "--from" => Ok(STEPS[position(name)?..].iter().collect()),
        [flag, names] if flag == "--only" => {
            let mut chosen = names.split(',').map(position).collect::<Result<Vec<_>, _>>()?;
            chosen.sort_unstable();
            chosen.dedup();
            Ok(chosen.into_iter().map(|i| &STEPS[i]).collect())
        }
        _ => Err(crate::Usage(format!("invalid arguments `{}`", args.join(" "))).into()),
    }
}

#[expect(clippy::disallowed_methods, reason = "the time of each step is printed")]
fn now() -> Instant {
    Instant::now()
}

fn seconds(time: Duration) -> String {
    format!("{:.1} s", time.as_secs_f64())
}

fn fmt() -> Result<()> {
    shell::run(&mut shell::cargo(&["fmt", "--all", "--check"]))?;
    for manifest in examples::manifests(&shell::root())? {
        let mut command = shell::cargo(&["fmt", "--check", "--manifest-path"]);
        shell::run(command.arg(manifest))?;
    }
    Ok(())
}

fn clippy() -> Result<()> {
    let mut command = shell::cargo(&["clippy", "--workspace", "--all-targets"]);
    command.args(features::all_light_and(&Workspace::load()?, &["wgpu", "cuda"]));
    // Type-checking the kernels for CUDA needs neither the CUDA toolkit nor LLVM. With this variable, the build
    // does not look for LLVM or download it.
    command.env("DOCS_RS", "1");
    shell::run(command.args(["--", "-D", "warnings"]))
}

/// Checks the feature `iroh`, which earlier steps leave out because it adds about a hundred crates.
fn iroh() -> Result<()> {
    let with = ["--workspace", "--features", "farflung-repro/iroh"];
    let mut lints = shell::cargo(&["clippy"]);
    shell::run(lints.args(with).args(["--all-targets", "--", "-D", "warnings"]))?;
    let mut tests = shell::cargo(&["test"]);
    shell::run(tests.args(with).args(["--test", "it", "--", "iroh::", "contract::", "quic::"]))
}

fn mpi() -> Result<()> {
    setup::mpi()?;
    let selection = ["--package", "farflung-comm", "--package", "farflung", "--features", "farflung/mpi"];
    let mut clippy = shell::cargo(&["clippy", "--all-targets"]);
    shell::run(clippy.args(selection).args(["--", "-D", "warnings"]))?;
    let mut test = shell::cargo(&["test", "--lib", "--test", "it", "mpi"]);
    shell::run(test.args(selection))?;
    bench::check_mpi()
}

fn doc() -> Result<()> {
    let mut command = shell::cargo(&["doc", "--workspace", "--no-deps"]);
    shell::run(command.env("RUSTDOCFLAGS", "-D warnings"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(args: &[&str]) -> Vec<&'static str> {
        let args: Vec<String> = args.iter().map(|&a| a.to_owned()).collect();
        choose(&args).unwrap().iter().map(|step| step.name).collect()
    }

    #[test]
    fn steps_are_chosen_in_their_own_order() {
        assert_eq!(names(&[]).len(), STEPS.len());
        assert_eq!(names(&["--only", "iroh,features"]), ["features", "iroh"]);
        assert_eq!(names(&["--from", "examples"]), ["examples", "bench", "browser", "mpi", "deps", "tidy"]);
        assert_eq!(names(&["--only", "tidy,fmt,tidy"]), ["fmt", "tidy"]);
    }

    #[test]
    fn wrong_flags_and_steps_are_usage_errors() {
        for args in [&["--only", "fmt,nothing"][..], &["--from"], &["--from", ""], &["fmt"], &["--list", "x"]]
        {
            let args: Vec<String> = args.iter().map(|&a| a.to_owned()).collect();
            assert!(choose(&args).err().unwrap().is::<crate::Usage>(), "{args:?}");
        }
    }
}
