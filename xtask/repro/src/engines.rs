//! Compares the same training under several launchers of clusters: `mpirun`, a Slurm of one node, ssh, and
//! Kubernetes' variables.

mod daemons;

use std::fs;
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use anyhow::{Result, ensure};

use crate::binary::farflung;
use crate::harness::{Bench, Options, Report, Threshold};
use crate::machine::now;
use crate::trained::Trained;
use daemons::{Slurm, Sshd};

pub(crate) const BENCH: Bench = Bench {
    name: "engines",
    claim: "a job that mpirun, Slurm, ssh or Kubernetes starts trains to the same bits as one that `farflung \
            launch` starts over TCP, and so does one that exchanges MPI's own messages",
    source: "the real mpirun, srun and sshd (`cargo xtask setup mpi slurm ssh`); the variables of an indexed \
             Job",
    seed: 0,
    run,
};

fn free_port() -> Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

/// A training job of two ranks.
struct Job {
    folder: PathBuf,
    steps: &'static str,
}

impl Job {
    /// Returns the arguments of each rank.
    fn args(&self, out: &str) -> Vec<String> {
        let out = self.folder.join(out).display().to_string();
        let args = ["train", "--model", "nano", "--steps", self.steps, "--workers", "2", "--threads", "1"];
        let more = ["--sync", "ddp", "--sample-tokens", "0", "--eval-every", self.steps, "--out", &out];
        args.iter().chain(&more).map(|&arg| arg.to_owned()).collect()
    }

    /// Returns the command `farflung` with these arguments and a port for rank 0.
    fn farflung(&self, args: &[String]) -> Result<Command> {
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let mut command = farflung(&args)?;
        command.current_dir(&self.folder).env("MASTER_PORT", free_port()?.to_string());
        Ok(command)
    }

    /// Returns the path of a run's errors.
    fn stderr_path(&self, out: &str) -> PathBuf {
        self.folder.join(format!("{out}.stderr"))
    }

    fn spawn(&self, mut command: Command, out: &str) -> Result<Child> {
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(fs::File::create(self.stderr_path(out))?);
        Ok(command.spawn()?)
    }

    /// Returns the command that starts `farflung` through a launcher.
    fn under(&self, engine: &[&str], out: &str) -> Result<Command> {
        let ours = self.farflung(&self.args(out))?;
        let mut command = Command::new(engine[0]);
        command.args(&engine[1..]).arg(ours.get_program()).args(ours.get_args()).current_dir(&self.folder);
        command.envs(ours.get_envs().filter_map(|(name, value)| Some((name, value?))));
        Ok(command)
    }

    /// Returns the command of [`Self::under`] with MPI as the transport.
    fn over_mpi(&self, engine: &[&str], out: &str) -> Result<Command> {
        let mut command = self.under(engine, out)?;
        command.args(["--transport", "mpi"]);
        Ok(command)
    }

    /// Returns whether `farflung` was built with MPI.
    fn has_mpi(&self) -> Result<bool> {
        let mut command = self.farflung(&self.args("no-mpi"))?;
        command.args(["--transport", "mpi"]).envs([("RANK", "0"), ("WORLD_SIZE", "2")]);
        let said = command.stderr(Stdio::piped()).output()?.stderr;
        Ok(!String::from_utf8_lossy(&said).contains("built without MPI"))
    }

    fn launched(&self, out: &str) -> Result<Command> {
        let (launch, tcp) = (["launch", "-n", "2", "--"], ["--transport", "tcp"]);
        let args = [&launch.map(str::to_owned)[..], &self.args(out), &tcp.map(str::to_owned)[..]].concat();
        self.farflung(&args)
    }

    fn over_ssh(&self, sshd: &Sshd, out: &str) -> Result<Command> {
        let hosts = self.folder.join("hosts");
        fs::write(&hosts, "127.0.0.1\nlocalhost\n")?;
        let (hosts, master) = (hosts.display().to_string(), format!("127.0.0.1:{}", free_port()?));
        let ssh = sshd.ssh();
        let launch = ["launch", "--hosts", &hosts, "--ssh", &ssh, "--master", &master, "--"];
        self.farflung(&[&launch.map(str::to_owned)[..], &self.args(out)].concat())
    }

    /// Starts the ranks of an indexed Job, with the variables that Kubernetes and its manifest set.
    fn kubernetes(&self, out: &str) -> Result<Vec<Child>> {
        let port = free_port()?.to_string();
        let rank = |index: &str| -> Result<Child> {
            let mut command = self.farflung(&self.args(out))?;
            command.env("JOB_COMPLETION_INDEX", index).env("WORLD_SIZE", "2");
            command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", &port);
            self.spawn(command, &format!("{out}-{index}"))
        };
        Ok(vec![rank("0")?, rank("1")?])
    }
}

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let job = Job { folder: folder.path().to_owned(), steps: if options.quick { "3" } else { "20" } };
    let mut ran = |name: &str, start: &dyn Fn(&str) -> Result<Vec<Child>>| -> Result<Trained> {
        let began = now();
        let out = format!("{name}-run");
        for mut rank in start(&out)? {
            let status = rank.wait()?;
            let said = || fs::read_to_string(job.stderr_path(&out)).unwrap_or_default();
            ensure!(status.success(), "under {name}: {status}\n{}", said());
        }
        report.row(&format!("{name}: total time"), began.elapsed().as_secs_f64(), "s", Threshold::None)?;
        Trained::read(&folder.path().join(&out))
    };
    let one =
        |out: &str, command: Result<Command>| -> Result<Vec<Child>> { Ok(vec![job.spawn(command?, out)?]) };
    let wanted = ran("launch", &|out| one(out, job.launched(out)))?;
    let sshd = Sshd::start(&folder.path().join("sshd"))?;
    let slurm = Slurm::start(&folder.path().join("slurm"))?;
    // mpirun needs flags to run as root, and to run more ranks than cores.
    let mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2"];
    let srun = ["srun", "-n", "2", "--overcommit", "--mpi=none"];
    let mut found = vec![
        ("mpirun", ran("mpirun", &|out| one(out, job.under(&mpirun, out)))?),
        (
            "slurm",
            ran("slurm", &|out| {
                one(
                    out,
                    job.under(&srun, out).map(|mut command| {
                        command.env("SLURM_CONF", slurm.config());
                        command
                    }),
                )
            })?,
        ),
        ("ssh", ran("ssh", &|out| one(out, job.over_ssh(&sshd, out)))?),
        ("kubernetes", ran("kubernetes", &|out| job.kubernetes(out))?),
    ];
    let has_mpi = job.has_mpi()?;
    if has_mpi {
        let over_mpi = ran("mpirun over mpi", &|out| one(out, job.over_mpi(&mpirun, out)))?;
        found.push(("mpirun over mpi", over_mpi));
    }
    report.row("losses of each run", wanted.losses.len() as f64, "1", Threshold::None)?;
    for (name, trained) in found {
        let name = format!("{name}: losses or weights with bits other than those of launch");
        report.row(&name, f64::from(u8::from(trained != wanted)), "1", Threshold::AtMost(0.0))?;
    }
    if !has_mpi {
        report.progress(
            "no row for --transport mpi: this needs a `farflung` built with `cargo build --release \
                       --features mpi`",
        )?;
    }
    Ok(())
}
