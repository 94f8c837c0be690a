//! QUIC between processes, including those behind address translation.

use farflung_comm::tcp::GateConfig;

#[cfg(not(feature = "iroh"))]
use super::mixed::missing;
use super::mixed::{is_second_network_address, meet};
use super::{Connects, TransportMethod};
use crate::config::choice::TransportKind;
use crate::{Error, Result};

/// `farflung_comm::quic`, in a build with the feature `iroh`.
pub const IROH: TransportMethod = TransportMethod {
    name: "iroh",
    summary: "QUIC through routers, over --relay if necessary; needs a ticket (in builds with --features \
              iroh)",
    simulated: false,
    fixed: None,
    ends: Connects::Processes(|meeting| meet(meeting, false)),
};

/// How a member of a run that machines join and leave is reached over QUIC.
#[derive(Debug, Clone)]
pub struct Reach {
    /// The transport: QUIC alone with [`IROH`]; TCP, and QUIC where TCP does not reach, with `auto`.
    pub transport: TransportKind,
    /// URLs of the relays that this process may use.
    pub relays: Vec<String>,
    /// Addresses at which others reach this process, besides those that it finds itself.
    pub advertise: Vec<String>,
}

impl Reach {
    /// Returns whether a member that knows members at these addresses connects over QUIC, in builds that can.
    #[must_use]
    pub fn over_quic(&self, known: &[String]) -> bool {
        match self.transport {
            TransportKind::Auto => {
                !self.relays.is_empty() || known.iter().any(|address| is_second_network_address(address))
            }
            TransportKind::Named(_) => self.transport == TransportKind::of(&IROH),
        }
    }

    /// Opens the networks over which a member connects. `known` are the addresses of members; relays among them
    /// are used, too. With `auto`, QUIC is used if this process has relays, or if relays or addresses of QUIC
    /// are among `known`.
    ///
    /// Errors: a port in use or a wrong address; transport tcp if `known` has no address of TCP; without the
    /// feature `iroh`, transport iroh, relays of this process, or if `known` has only addresses of QUIC.
    pub fn open(&self, gate: GateConfig, known: &[String]) -> Result<GateConfig> {
        if !self.over_quic(known) {
            if self.transport != TransportKind::Auto
                && !known.is_empty()
                && known.iter().all(|one| is_second_network_address(one))
            {
                return Err(Error::Setting {
                    field: "transport",
                    value: "tcp".to_owned(),
                    expected: "iroh: the ticket has no address that is reached over TCP".to_owned(),
                });
            }
            return Ok(gate);
        }
        self.open_quic(gate, known)
    }

    #[cfg(feature = "iroh")]
    fn open_quic(&self, gate: GateConfig, known: &[String]) -> Result<GateConfig> {
        use farflung_comm::quic::{Socket, SocketConfig};

        let mut socket = SocketConfig::new(gate.security.clone());
        socket.relays.clone_from(&self.relays);
        let is_new = |url: &&String| url.contains("://") && !self.relays.contains(url);
        socket.relays.extend(known.iter().filter(is_new).cloned());
        socket.advertise.clone_from(&self.advertise);
        // A member that only asks does not listen.
        socket.listen = Some(gate.listen.clone()).filter(|listen| !listen.is_empty());
        let sockets = self.transport == TransportKind::Auto;
        Ok(gate.over_quic(&Socket::open(&socket)?, sockets))
    }

    #[cfg(not(feature = "iroh"))]
    fn open_quic(&self, gate: GateConfig, known: &[String]) -> Result<GateConfig> {
        let by_tcp = known.iter().any(|address| !is_second_network_address(address));
        if self.transport == TransportKind::Auto && (by_tcp || known.is_empty()) && self.relays.is_empty() {
            return Ok(gate);
        }
        Err(missing(if self.transport == TransportKind::Auto { "auto with relays" } else { IROH.name }))
    }
}
