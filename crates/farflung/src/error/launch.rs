//! Errors of processes and machines that a launcher starts.

use std::io;

/// A failure of a process or a machine of a launched job.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// A process of a launched job could not be started.
    #[error("failed to start rank {rank}")]
    Start {
        /// The rank.
        rank: usize,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// A process of a launched job failed.
    #[error("rank {rank} failed: {status}")]
    Child {
        /// The rank whose failure ended the job.
        rank: usize,
        /// The exit status of that rank's process.
        status: std::process::ExitStatus,
        /// The exit code to return.
        code: u8,
    },
    /// The processes of a launched job on another machine failed.
    #[error("the ranks on {host} failed: {status}")]
    OnHost {
        /// The machine.
        host: String,
        /// The exit status of the processes there.
        status: std::process::ExitStatus,
        /// The exit code to return.
        code: u8,
    },
    /// A machine of a launched job could not be reached, or the connection to it was lost.
    #[error("ssh to {host} failed: see its messages, and try `ssh {host} true`")]
    Ssh {
        /// The machine.
        host: String,
        /// The exit code to return.
        code: u8,
    },
    /// The ranks of a job did not find each other in time.
    #[error("{source}; {advice}")]
    Rendezvous {
        /// The ranks that are missing, and how far each came.
        source: farflung_comm::CommError,
        /// What the user can do about it.
        advice: String,
    },
    /// Another program listens where rank 0 of the job should.
    #[error(
        "the program that listens at {at} is no rank of a farflung job ({source}): start rank 0 there, or give \
         all ranks another MASTER_PORT"
    )]
    OtherProgram {
        /// The address.
        at: String,
        /// What is wrong with its answer.
        source: farflung_comm::WireError,
    },
    /// Rank 0 cannot listen, because another process does.
    #[error(
        "{source}: another process listens there: a second process with RANK=0 (ranks must differ), an earlier \
         run that has not ended, or another program; end it, or give all ranks another MASTER_PORT"
    )]
    PortInUse {
        /// The error of the attempt to listen.
        source: farflung_comm::CommError,
    },
    /// ssh could not be started.
    #[error("failed to start `{command}`")]
    StartSsh {
        /// The command.
        command: String,
        /// The system's error.
        #[source]
        source: io::Error,
    },
}

impl LaunchError {
    /// Returns the exit code of the launcher: that of the process or machine that failed.
    #[must_use]
    pub const fn exit_code(&self) -> u8 {
        match self {
            Self::Child { code, .. } | Self::OnHost { code, .. } | Self::Ssh { code, .. } => *code,
            Self::Rendezvous { .. } => 75,
            Self::OtherProgram { .. } => 2,
            Self::Start { .. } | Self::StartSsh { .. } | Self::PortInUse { .. } => 1,
        }
    }
}
