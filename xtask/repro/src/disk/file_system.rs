//! A tmpfs in a private mount namespace, so that nothing of it is left on the machine.

use std::fs::File;
use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};

/// Where the file system is mounted in its namespace.
const AT: &str = "/mnt";

/// A file system, which exists while this does.
pub(crate) struct FileSystem {
    /// The process whose namespace it is in.
    holder: Child,
}

impl FileSystem {
    /// Mounts a tmpfs with these options.
    ///
    /// Errors: the bench does not run as root, or the kernel does not know an option.
    pub(crate) fn new(options: &str) -> Result<Self> {
        let script = format!("mount -t tmpfs -o {options} tmpfs {AT} && echo ready && exec sleep 600");
        let mut command = Command::new("unshare");
        command.args(["-m", "--propagation", "private", "sh", "-c", &script]);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut system = Self { holder: command.spawn().context("failed to start `unshare`")? };
        let mut line = String::new();
        let said = system.holder.stdout.as_mut().context("stdout is not piped")?;
        BufReader::new(said).read_line(&mut line)?;
        if line.trim() != "ready" {
            let mut said = String::new();
            let stderr = system.holder.stderr.take().context("stderr is not piped")?;
            BufReader::new(stderr).read_line(&mut said)?;
            anyhow::bail!("failed to mount a tmpfs with {options} (the bench needs root): {}", said.trim());
        }
        Ok(system)
    }

    /// Returns the same command, run in the namespace.
    pub(crate) fn inside(&self, command: &Command) -> Command {
        let mut inside = Command::new("nsenter");
        inside.args(["-t", &self.holder.id().to_string(), "-m", "--"]);
        inside.arg(command.get_program()).args(command.get_args());
        inside
    }

    /// Returns the path by which this program reaches a file of the namespace.
    pub(crate) fn outside(&self, path: &Path) -> PathBuf {
        let root = format!("/proc/{}/root", self.holder.id());
        Path::new(&root).join(path.strip_prefix("/").unwrap_or(path))
    }

    /// Returns the path of a file of this file system in the namespace.
    pub(crate) fn path(name: &str) -> PathBuf {
        Path::new(AT).join(name)
    }

    /// Fills the file system with a file, and returns its path.
    pub(crate) fn fill(&self) -> Result<PathBuf> {
        let path = self.outside(&Self::path("filler"));
        let mut file = File::create(&path)?;
        for block in [1 << 16, 1 << 12, 1] {
            loop {
                match file.write(&vec![1; block]) {
                    Ok(_) => {}
                    Err(error) if error.kind() == ErrorKind::StorageFull => break,
                    Err(error) => return Err(error.into()),
                }
            }
        }
        Ok(path)
    }

    /// Makes the file system large.
    pub(crate) fn make_room(&self) -> Result<()> {
        let mut command = Command::new("mount");
        command.args(["-o", "remount,size=64m", AT]);
        let status = self.inside(&command).status()?;
        ensure!(status.success(), "failed to make the file system larger: {status}");
        Ok(())
    }
}

impl Drop for FileSystem {
    fn drop(&mut self) {
        // The process may have ended already.
        let _ = self.holder.kill();
        let _ = self.holder.wait();
    }
}
