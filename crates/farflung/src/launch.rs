//! Starts the processes of a job, here or over ssh on several machines, and waits until the last one has ended.
//!
//! One thread per child reads its stderr; the caller's thread polls for exits and signals. It does not depend
//! on what the children do.

mod elastic;
mod hosts;
mod job;
mod keys;
mod remote;
mod restarts;
mod share;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::net::{TcpListener, UdpSocket};
use std::ops::Range;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use farflung_comm::secure::JoinSecret;

pub use elastic::{Elastic, Start};
pub use hosts::{Host, Hosts};
use job::{Job, Whose};
use keys::Keys;
pub use remote::Remote;
pub use restarts::restarting;
pub use share::serve;

use crate::{Error, LaunchError, Result, Stop};

/// Number of ports that are tried; the error of the last one is returned.
const PORTS: usize = 16;

/// The processes of a job on this machine.
#[derive(Debug, Clone)]
pub struct Launch {
    /// The ranks that are started here: all of the job's, unless other machines start some.
    pub ranks: Range<usize>,
    /// Number of processes of the job.
    pub world_size: usize,
    /// Host and port of rank 0; port 0 takes any free port.
    pub master: (String, u16),
    /// Time for which the other processes may continue after one has failed, and time within which they must
    /// end when asked to.
    pub grace: Duration,
    /// A join secret for the processes, passed in `FARFLUNG_SECRET`; `None` if they get one in another way.
    pub secret: Option<JoinSecret>,
    /// Whether the processes meet over QUIC. Each process then gets its own key, and all get a ticket.
    pub over_quic: bool,
}

impl Launch {
    /// Returns a job of `processes` processes on this machine, which meet at any free port of its loopback.
    #[must_use]
    pub fn here(processes: usize) -> Self {
        Self {
            ranks: 0..processes,
            world_size: processes,
            master: ("127.0.0.1".to_owned(), 0),
            grace: Duration::from_secs(5),
            secret: None,
            over_quic: false,
        }
    }

    /// Starts `program` with `args` once per rank and waits for all of them.
    ///
    /// Each process gets RANK, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT`.
    /// Lines of its stderr are shown with the prefix `[rank]`; its stdout passes through. Each signal of `stop`
    /// is passed on, the third one that is not a warning as SIGKILL, also to suspended processes. After the
    /// first failure the others have `grace` to end by themselves, then get SIGTERM and again `grace`, then
    /// SIGKILL. On Linux they also get SIGTERM if the thread that runs this function ends first, however it
    /// ends.
    ///
    /// Errors: [`LaunchError::Child`] with the rank whose failure ended the job, [`Error::Stopped`] if a
    /// signal ended the job, [`LaunchError::Start`], [`Error::Io`] if no port is free.
    pub fn run(&self, program: &Path, args: &[OsString], stop: &Stop) -> Result<()> {
        self.run_with(program, args, &BTreeMap::new(), stop)
    }

    /// Like [`Launch::run`], with further environment variables.
    fn run_with(
        &self,
        program: &Path,
        args: &[OsString],
        variables: &BTreeMap<String, String>,
        stop: &Stop,
    ) -> Result<()> {
        let port = match self.master.1 {
            0 => self.free_port()?,
            port => port,
        };
        let keys = self.over_quic.then(|| Keys::make((&self.master.0, port))).transpose()?;
        let mut job = Job::default();
        for (local, rank) in self.ranks.clone().enumerate() {
            let mut command = Command::new(program);
            command
                .args(args)
                .envs(variables)
                .env("RANK", rank.to_string())
                .env("LOCAL_RANK", local.to_string())
                .env("WORLD_SIZE", self.world_size.to_string())
                .env("LOCAL_WORLD_SIZE", self.ranks.len().to_string())
                .env("MASTER_ADDR", &self.master.0)
                .env("MASTER_PORT", port.to_string())
                .envs(self.secret.iter().map(|secret| (crate::access::SECRET, as_text(secret))))
                .envs(keys.iter().flat_map(|keys| keys.variables(rank)))
                .stdin(Stdio::null());
            job.start(command, Whose::Rank(rank)).map_err(|source| LaunchError::Start { rank, source })?;
        }
        job.run(self.grace, stop)
    }

    /// Returns a port on which rank 0 can listen.
    fn free_port(&self) -> Result<u16> {
        let host = self.master.0.as_str();
        let free = || -> std::io::Result<u16> {
            let listener = TcpListener::bind((host, 0))?;
            let port = listener.local_addr()?.port();
            // Over QUIC it listens at the same port of UDP.
            let _udp = self.over_quic.then(|| UdpSocket::bind((host, port))).transpose()?;
            Ok(port)
        };
        // A port that is free for TCP but not for UDP is rare, so few tries suffice.
        let found = (1..PORTS).map(|_| free()).find(Result::is_ok).unwrap_or_else(free);
        found.map_err(Error::io("find a free port at", host.as_ref()))
    }
}

/// Returns a secret as hexadecimal text for a variable.
fn as_text(secret: &JoinSecret) -> String {
    secret.bytes().iter().fold(String::new(), |text, byte| text + &format!("{byte:02x}"))
}
