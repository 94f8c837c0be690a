//! Networks of namespaces, in a user namespace of their own, which needs no privileges and touches no other
//! network. They end with the process that made them.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};

/// The beginning of each script: named namespaces without a trace outside.
const BEGIN: &str = r"
set -e
PATH=$PATH:/usr/sbin:/sbin
mount -t tmpfs tmpfs /run
mkdir /run/netns
ip link set lo up
";

/// The end of each script.
const END: &str = "
echo ready
exec cat
";

/// Namespaces with networks between them. Dropping this removes them.
#[derive(Debug)]
pub(crate) struct Namespaces(Child);

impl Namespaces {
    /// Makes the networks with a shell script, which gets `argument` as `$1`.
    ///
    /// Errors: one of `tools` is missing, or this user may not make namespaces; `setup` says what installs the
    /// tools.
    pub(crate) fn make(script: &str, argument: &str, tools: &[&str], setup: &str) -> Result<Self> {
        for tool in tools.iter().chain(&["ip", "unshare", "nsenter"]) {
            let look = format!("PATH=$PATH:/usr/sbin:/sbin command -v {tool}");
            let found = Command::new("sh").args(["-c", &look]).stdout(Stdio::null()).status();
            ensure!(found.is_ok_and(|status| status.success()), "`{tool}` is missing: {setup}");
        }
        let unshare = ["--user", "--map-root-user", "--net", "--mount", "--propagation", "private"];
        let mut made = Command::new("unshare")
            .args(unshare)
            .args(["sh", "-c", &[BEGIN, script, END].concat(), "namespaces", argument])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .context("failed to start unshare")?;
        let mut line = String::new();
        let said = made.stdout.take().context("stdout is not piped")?;
        let read = BufReader::new(said).read_line(&mut line);
        let namespaces = Self(made);
        if read.is_ok() && line.trim() == "ready" {
            return Ok(namespaces);
        }
        let said = namespaces.end()?;
        anyhow::bail!("failed to make network namespaces: {said}")
    }

    /// Returns the errors that the script printed.
    fn end(mut self) -> Result<String> {
        drop(self.0.stdin.take());
        let mut said = String::new();
        if let Some(mut errors) = self.0.stderr.take() {
            std::io::Read::read_to_string(&mut errors, &mut said)?;
        }
        Ok(said)
    }

    /// Returns the command that runs in the namespace of this name; without a name, in the one of the script.
    pub(crate) fn within(&self, name: Option<&str>, command: &Command) -> Command {
        let Some(name) = name else { return self.inside(command, &["--net"]) };
        let mut outer = self.inside(&Command::new("nsenter"), &[]);
        outer.arg(format!("--net=/run/netns/{name}")).arg(command.get_program());
        outer.args(command.get_args());
        outer
    }

    fn inside(&self, command: &Command, more: &[&str]) -> Command {
        let mut entered = Command::new("nsenter");
        entered.args(["--target", &self.0.id().to_string(), "--user", "--mount", "--preserve-credentials"]);
        entered.args(more).arg(command.get_program()).args(command.get_args());
        entered
    }
}

impl Drop for Namespaces {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        // The script ends when its input is closed.
        let _ = self.0.wait();
    }
}
