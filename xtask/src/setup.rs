//! `setup`: the tools that builds and tests need beside cargo, installed where they are missing.

use std::process::ExitCode;

use anyhow::{Result, bail};

use crate::shell;

pub(crate) const HELP: &str = "\
Install what builds and tests need on a Debian machine, where it is missing.

Usage: cargo xtask setup [wgpu] [--dry-run]

  (nothing)   a C compiler (for zstd) and git (for `cargo xtask tidy`)
  wgpu        also a software Vulkan device, for the tests behind the feature `wgpu`
  --dry-run   say what is missing, install nothing, and fail if anything is

rustfmt and clippy come with the toolchain, cargo-nextest is used where it is there: neither is installed here.

Examples:
  cargo xtask setup
  cargo xtask setup wgpu --dry-run
";

/// A Debian package, and the command that succeeds where it is not needed any more.
struct Need {
    package: &'static str,
    probe: &'static [&'static str],
    what_for: &'static str,
}

const BASE: &[Need] = &[
    Need { package: "gcc", probe: &["cc", "--version"], what_for: "the C code of zstd" },
    Need { package: "libc6-dev", probe: &["test", "-e", "/usr/include/stdio.h"], what_for: "its headers" },
    Need { package: "git", probe: &["git", "--version"], what_for: "the list of files that tidy reads" },
];

const WGPU: &[Need] = &[
    Need { package: "libvulkan1", probe: &["dpkg", "-s", "libvulkan1"], what_for: "the Vulkan loader" },
    Need {
        package: "mesa-vulkan-drivers",
        probe: &["dpkg", "-s", "mesa-vulkan-drivers"],
        what_for: "a Vulkan device on the CPU",
    },
];

pub(crate) fn main(args: &[String]) -> Result<ExitCode> {
    let (mut wgpu, mut dry_run) = (false, false);
    for arg in args {
        match arg.as_str() {
            "wgpu" => wgpu = true,
            "--dry-run" => dry_run = true,
            other => return Err(crate::Usage(format!("unexpected argument `{other}`")).into()),
        }
    }
    let needs = BASE.iter().chain(if wgpu { WGPU } else { &[] });
    let mut missing = Vec::new();
    for need in needs {
        let there = shell::succeeds(&mut shell::command(need.probe[0], &need.probe[1..]));
        println!("{:<20} {:<8} {}", need.package, if there { "there" } else { "missing" }, need.what_for);
        if !there {
            missing.push(need.package);
        }
    }
    if missing.is_empty() {
        println!("setup: nothing to install");
        return Ok(ExitCode::SUCCESS);
    }
    if dry_run {
        bail!("missing: {}; `cargo xtask setup` installs them", missing.join(" "));
    }
    let root = shell::succeeds(&mut shell::command("sh", &["-c", "test $(id -u) -eq 0"]));
    let apt = |args: &[&str]| {
        let words = [if root { &[][..] } else { &["sudo"] }, &["apt-get"], args].concat();
        shell::run(shell::command(words[0], &words[1..]).env("DEBIAN_FRONTEND", "noninteractive"))
    };
    apt(&["update"])?;
    apt(&[&["install", "--yes", "--no-install-recommends"], missing.as_slice()].concat())?;
    println!("setup: installed {}", missing.join(" "));
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_set_is_a_usage_error() {
        assert!(main(&["rocm".to_owned()]).unwrap_err().is::<crate::Usage>());
    }
}
