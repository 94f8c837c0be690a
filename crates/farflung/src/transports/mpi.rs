//! Transport over the machine's MPI library.

use super::{Connects, TransportMethod};

/// `farflung_comm::mpi`, behind the feature `mpi`.
pub const MPI: TransportMethod = TransportMethod {
    name: "mpi",
    summary: "processes that mpirun starts, over its MPI (feature mpi); if one is lost, the job ends",
    simulated: false,
    fixed: Some(farflung_comm::MPI_IS_FIXED),
    ends: Connects::Processes(|meeting| meet(meeting, MPI.name)),
};

/// [`MPI`], but with MPI's own all-reduce, reduce-scatter, all-gather and broadcast.
pub const MPI_NATIVE: TransportMethod = TransportMethod {
    name: "mpi-native",
    summary: "like mpi, with MPI's own all-reduce, reduce-scatter, all-gather and broadcast: bits may differ \
              from those of other transports, and --algorithm does not apply to these",
    ends: Connects::Processes(|meeting| meet(meeting, MPI_NATIVE.name)),
    ..MPI
};

/// Environment variables of MPI launchers; each launcher sets at least one of them: OpenMPI's `mpirun`, PMI
/// (MPICH, Intel MPI, Slurm's `srun --mpi=pmi2`), and `PMIx`.
#[cfg(feature = "mpi")]
const STARTED: [&str; 3] = ["OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMIX_RANK"];

#[cfg(feature = "mpi")]
fn meet(meeting: &super::JoinSettings, name: &str) -> crate::Result<farflung_comm::Communicator> {
    use farflung_comm::mpi::Collectives;

    // Without a launcher, MPI would treat the process as a job of one, or end it with its own message.
    if STARTED.iter().all(|name| std::env::var_os(name).is_none()) {
        let n = meeting.world_size;
        return Err(crate::Error::Setting {
            field: "transport",
            value: name.to_owned(),
            expected: format!(
                "another transport, because mpirun has not started this process: start the job as `mpirun -n \
                 {n} farflung train --transport {name} ...`"
            ),
        });
    }
    if meeting.security.is_encrypted() {
        return Err(crate::Error::Setting {
            field: "transport",
            value: name.to_owned(),
            expected:
                "another transport with a secret, a ticket or a certificate, because MPI's messages are not \
                 encrypted; without these, confirm with --insecure that only you use the network"
                    .to_owned(),
        });
    }
    let collectives = if name == MPI_NATIVE.name { Collectives::Native } else { Collectives::Ours };
    let met = farflung_comm::mpi::join_by(meeting.rank, meeting.world_size, collectives)?;
    Ok(farflung_comm::Communicator::new(met).with_deadline(meeting.deadline))
}

#[cfg(not(feature = "mpi"))]
fn meet(_: &super::JoinSettings, name: &str) -> crate::Result<farflung_comm::Communicator> {
    Err(crate::Error::Setting {
        field: "transport",
        value: name.to_owned(),
        expected: "another transport, because this program was built without MPI: `cargo xtask setup mpi` \
                   installs on Debian what MPI needs, and `cargo build --release --features mpi` builds with \
                   it; under mpirun, auto and tcp work without it"
            .to_owned(),
    })
}

/// Ends MPI, if in use, in a process that is about to exit with `code`: 0 waits for the other processes; any
/// other code ends the job, unless the others have left as well.
pub(super) fn leave(code: u8) {
    #[cfg(feature = "mpi")]
    farflung_comm::mpi::leave(code);
    let _ = code;
}
