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
            Self::Start { .. } | Self::StartSsh { .. } => 1,
        }
    }
}
