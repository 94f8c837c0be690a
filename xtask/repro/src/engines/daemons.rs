//! Starts an sshd and a Slurm of one node, used only by this bench, in a separate folder. They end with the
//! bench.

use std::fs;
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use super::free_port;

/// A program that is killed when this is dropped.
struct Daemon(Child);

impl Daemon {
    fn start(program: &str, args: &[&str], set: (&str, &Path)) -> Result<Self> {
        let mut command = Command::new(program);
        command.args(args).env(set.0, set.1).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let started = command.spawn();
        started.map(Self).with_context(|| {
            format!("failed to start {program}: `cargo xtask setup mpi slurm ssh` installs it")
        })
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // The program may have ended already.
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

/// Waits until `is` returns true, at most ten seconds.
fn until(what: &str, is: impl Fn() -> bool) -> Result<()> {
    for _ in 0..500 {
        if is() {
            return Ok(());
        }
        thread::sleep(Duration::from_millis(20));
    }
    bail!("{what}")
}

fn show(path: &Path) -> String {
    path.display().to_string()
}

/// An sshd on the loopback that accepts one key, which is made for it.
pub(super) struct Sshd {
    _daemon: Daemon,
    config: PathBuf,
}

impl Sshd {
    pub(super) fn start(folder: &Path) -> Result<Self> {
        fs::create_dir(folder)?;
        let at = |name: &str| folder.join(name);
        for key in ["host", "user"] {
            let made = Command::new("ssh-keygen")
                .args(["-q", "-t", "ed25519", "-N", "", "-f"])
                .arg(at(key))
                .status()?;
            ensure!(made.success(), "ssh-keygen failed");
        }
        let port = free_port()?;
        let server = format!(
            "Port {port}\nListenAddress 127.0.0.1\nHostKey {}\nAuthorizedKeysFile {}\nStrictModes no\nUsePAM no\n\
             PidFile none\nPasswordAuthentication no\nKbdInteractiveAuthentication no\n",
            show(&at("host")),
            show(&at("user.pub"))
        );
        fs::write(at("server"), server)?;
        let client = format!(
            "Host *\nPort {port}\nHostName 127.0.0.1\nIdentityFile {}\nIdentitiesOnly yes\nBatchMode yes\n\
             UserKnownHostsFile {}\nStrictHostKeyChecking accept-new\nLogLevel ERROR\n",
            show(&at("user")),
            show(&at("known"))
        );
        fs::write(at("client"), client)?;
        // The folder that root's sshd uses for privilege separation. An sshd of another user does not need it.
        drop(fs::create_dir_all("/run/sshd"));
        let config = show(&at("server"));
        let daemon = Daemon::start("/usr/sbin/sshd", &["-D", "-f", &config], ("LANG", Path::new("C")))?;
        until("sshd does not listen", || TcpStream::connect(("127.0.0.1", port)).is_ok())?;
        Ok(Self { _daemon: daemon, config: at("client") })
    }

    /// Returns the ssh command that reaches this sshd.
    pub(super) fn ssh(&self) -> String {
        format!("ssh -F {}", show(&self.config))
    }
}

/// A Slurm whose only node is this machine.
pub(super) struct Slurm {
    _daemons: [Daemon; 3],
    config: PathBuf,
}

impl Slurm {
    pub(super) fn start(folder: &Path) -> Result<Self> {
        for part in ["", "state", "spool", "munge"] {
            fs::create_dir(folder.join(part))?;
        }
        let at = |name: &str| folder.join(name);
        let (socket, key) = (at("munge/socket"), at("munge/key"));
        // The key is random, so that no other user can make credentials for this Slurm.
        let mut bytes = [0_u8; 128];
        std::io::Read::read_exact(&mut fs::File::open("/dev/urandom")?, &mut bytes)?;
        fs::write(&key, bytes)?;
        fs::set_permissions(&key, fs::Permissions::from_mode(0o400))?;
        // munged requires that all users can reach its socket, so its folders must be readable by all.
        for open in ["", "munge"] {
            fs::set_permissions(folder.join(open), fs::Permissions::from_mode(0o755))?;
        }
        let (control, node) = (free_port()?, free_port()?);
        let config = at("slurm.conf");
        let text = format!(
            "ClusterName=one\nSlurmctldHost=localhost(127.0.0.1)\nSlurmUser=root\nAuthType=auth/munge\n\
             AuthInfo=socket={}\nCryptoType=crypto/munge\nProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\n\
             SelectType=select/linear\nSchedulerType=sched/builtin\nJobAcctGatherType=jobacct_gather/none\n\
             MpiDefault=none\nReturnToService=2\nStateSaveLocation={}\nSlurmdSpoolDir={}\nSlurmctldPidFile={}\n\
             SlurmdPidFile={}\nSlurmctldPort={control}\nSlurmdPort={node}\n\
             NodeName=localhost NodeAddr=127.0.0.1 CPUs=1 State=UNKNOWN\n\
             PartitionName=all Nodes=localhost Default=YES MaxTime=INFINITE State=UP\n",
            show(&socket),
            show(&at("state")),
            show(&at("spool")),
            show(&at("control.pid")),
            show(&at("node.pid")),
        );
        fs::write(&config, text)?;
        let set = ("SLURM_CONF", config.as_path());
        let file = |flag: &str, name: &str| format!("--{flag}={}", show(&at(name)));
        let munge = [
            format!("--socket={}", show(&socket)),
            format!("--key-file={}", show(&key)),
            file("pid-file", "munge/pid"),
            file("log-file", "munge/log"),
            file("seed-file", "munge/seed"),
        ];
        let munge: Vec<&str> =
            ["-F", "--force"].into_iter().chain(munge.iter().map(String::as_str)).collect();
        let munged = Daemon::start("/usr/sbin/munged", &munge, set)?;
        until("munged does not listen", || socket.exists())?;
        let controller = Daemon::start("/usr/sbin/slurmctld", &["-D"], set)?;
        until("slurmctld does not listen", || TcpStream::connect(("127.0.0.1", control)).is_ok())?;
        let node = Daemon::start("/usr/sbin/slurmd", &["-D", "-N", "localhost"], set)?;
        until("the node of Slurm is not idle", || {
            let listed = Command::new("sinfo").args(["-h", "-o", "%t"]).env(set.0, set.1).output();
            listed.is_ok_and(|listed| listed.stdout.starts_with(b"idle"))
        })?;
        Ok(Self { _daemons: [node, controller, munged], config })
    }

    /// Returns the path for `SLURM_CONF`.
    pub(super) fn config(&self) -> &Path {
        &self.config
    }
}
