//! The machine's MPI.

use super::{Ends, TransportMethod};

/// `farflung_comm::mpi`, behind the feature `mpi`.
pub const MPI: TransportMethod = TransportMethod {
    name: "mpi",
    summary: "processes that mpirun starts, over its MPI (feature mpi); a lost one ends the job",
    simulated: false,
    ends: Ends::Processes(meet),
};

#[cfg(feature = "mpi")]
fn meet(meeting: &super::Meeting) -> crate::Result<farflung_comm::Communicator> {
    let met = farflung_comm::mpi::join(meeting.rank, meeting.world_size)?;
    Ok(farflung_comm::Communicator::new(met).with_deadline(meeting.deadline))
}

#[cfg(not(feature = "mpi"))]
fn meet(_: &super::Meeting) -> crate::Result<farflung_comm::Communicator> {
    Err(crate::Error::Setting {
        field: "transport",
        value: "mpi".to_owned(),
        expected: "another, since this program was built without MPI: `cargo xtask setup mpi` installs what that \
                   needs on Debian, and `cargo build --release --features mpi` builds it in; under mpirun, auto and \
                   tcp work as it is"
            .to_owned(),
    })
}
