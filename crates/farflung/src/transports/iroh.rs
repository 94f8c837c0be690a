//! QUIC between processes, including those behind address translation.

use farflung_comm::Communicator;

use super::{Connects, JoinSettings, TransportMethod};
use crate::Result;

/// `farflung_comm::quic`, in a build with the feature `iroh`.
pub const IROH: TransportMethod = TransportMethod {
    name: "iroh",
    summary: "QUIC through routers, over --relay if necessary; needs a ticket (in builds with --features \
              iroh)",
    simulated: false,
    fixed: Some("with iroh all ranks of a job start together: members can join and leave only over sockets"),
    ends: Connects::Processes(meet),
};

#[cfg(feature = "iroh")]
fn meet(meeting: &JoinSettings) -> Result<Communicator> {
    use farflung_comm::quic;

    let JoinSettings { rank, world_size, master, security, job, deadline, pace, relays, .. } = meeting;
    let mut join = quic::Config::new(*rank, *world_size, master.clone(), security.clone());
    join.deadline = (*deadline).into();
    join.pace = *pace;
    join.job.clone_from(job);
    join.relays.clone_from(relays);
    let end = quic::join(&join)?;
    for peer in (0..*world_size).map(farflung_base::PeerId).filter(|peer| peer.0 != *rank) {
        let path = end.path_to(peer).unwrap_or_else(|| "path not known yet".to_owned());
        tracing::info!(peer = peer.0, path, "connected over QUIC");
    }
    Ok(Communicator::new(end).with_deadline(*deadline))
}

#[cfg(not(feature = "iroh"))]
fn meet(_: &JoinSettings) -> Result<Communicator> {
    Err(crate::Error::Setting {
        field: "transport",
        value: IROH.name.to_owned(),
        expected: "a build with the feature `iroh`: cargo build --release --features iroh".to_owned(),
    })
}
