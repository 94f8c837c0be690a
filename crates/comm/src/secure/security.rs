//! How a process protects its connections and whom it lets in: nothing at all, or TLS with its own key and a
//! secret that both sides prove to each other. It knows no socket.

use std::collections::BTreeSet;
use std::net::{SocketAddr, ToSocketAddrs as _};
use std::sync::Arc;

use rustls::pki_types::ServerName;

use super::certificates::Certificates;
use super::clock::unix_seconds;
use super::identity::{Identity, PublicKey};
use super::refused::Refused;
use super::secret::JoinSecret;
use super::session::{Session, SessionError};
use super::ticket::Ticket;
use super::tls::Tls;
use crate::CommError;
use crate::control::Control;
use crate::error::Refusal;

/// Which end of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// The one that connects.
    Client,
    /// The one that is connected to.
    Server,
}

impl Role {
    const fn label(self) -> &'static [u8] {
        match self {
            Self::Client => b"client",
            Self::Server => b"server",
        }
    }

    const fn other(self) -> Self {
        match self {
            Self::Client => Self::Server,
            Self::Server => Self::Client,
        }
    }
}

/// How the connections of a process are protected, and who may be at their other ends. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct Security {
    sealed: Option<Arc<Sealed>>,
    refused: Refused,
}

/// By what this process is known.
#[derive(Debug, Clone)]
enum Own {
    /// A key pair.
    Key(Identity),
    /// A certificate with this key.
    Certificate(PublicKey),
}

impl Own {
    const fn public(&self) -> PublicKey {
        match self {
            Self::Key(identity) => identity.public(),
            Self::Certificate(key) => *key,
        }
    }
}

#[derive(Debug, Clone)]
struct Sealed {
    tls: Tls,
    own: Own,
    secret: JoinSecret,
    /// What `secret` is: 0 is the job's own, from which tickets' are derived; else that of a ticket until then.
    expiry: u64,
    /// The key of the host, where a ticket names it.
    host: Option<PublicKey>,
    /// Who may join; everybody with the secret where there is no list.
    allow: Option<Arc<BTreeSet<PublicKey>>>,
    /// Keys of the members, by rank, once a host has told them.
    members: Arc<Vec<PublicKey>>,
    /// What newcomers prove where `secret` is the members' own: `secret` and `expiry` as they were before.
    newcomers: Option<(JoinSecret, u64)>,
    /// Where others are reached, by names that may stand in their certificates.
    places: Vec<String>,
}

/// What a host tells its members of each other.
pub(crate) struct Admission {
    pub(crate) members: Vec<PublicKey>,
    pub(crate) secret: JoinSecret,
}

impl Security {
    /// No encryption, and everybody is let in: for the loopback, and for networks that nobody else reaches.
    #[must_use]
    pub fn clear() -> Self {
        Self::default()
    }

    /// TLS, and the right to join is a secret that all members have from elsewhere. Such a member also lets in
    /// holders of [tickets](Ticket) that were made from the secret.
    #[must_use]
    pub fn by_secret(identity: &Identity, secret: &JoinSecret) -> Self {
        Self::sealed(identity, secret.clone(), 0, None)
    }

    /// TLS, and the right to join is a ticket, whose host is known by its key.
    #[must_use]
    pub fn by_ticket(identity: &Identity, ticket: &Ticket) -> Self {
        Self::sealed(identity, ticket.secret.clone(), ticket.expiry, Some(ticket.host))
    }

    /// TLS with a site's certificates on both sides. The right to join is a certificate of the site's
    /// authority, and the secret as well, where there is one. A server's certificate has to have the name by
    /// which it was reached: its address, or the host of any of `places` (`host:port`) that is at this address;
    /// but not where a member has told its key.
    #[must_use]
    pub fn by_certificates(own: &Certificates, secret: Option<&JoinSecret>, places: Vec<String>) -> Self {
        let tls = Tls::by_certificates(own).expect("certificates were tried when they were read");
        let secret = secret.unwrap_or(own.common()).clone();
        let own = Own::Certificate(own.own_key());
        Self::sealed_by(tls, own, secret, 0, None, places)
    }

    /// Any member of the run may answer, not only the host that the ticket names: it may have left.
    #[must_use]
    pub fn by_any_member(mut self) -> Self {
        if let Some(sealed) = &mut self.sealed {
            Arc::make_mut(sealed).host = None;
        }
        self
    }

    /// Of those that prove the secret only these keys, and the own one, are let in.
    #[must_use]
    pub fn allowing(mut self, keys: impl IntoIterator<Item = PublicKey>) -> Self {
        if let Some(sealed) = &mut self.sealed {
            let sealed = Arc::make_mut(sealed);
            let own = sealed.own.public();
            sealed.allow = Some(Arc::new(keys.into_iter().chain([own]).collect()));
        }
        self
    }

    fn sealed(identity: &Identity, secret: JoinSecret, expiry: u64, host: Option<PublicKey>) -> Self {
        let own = Own::Key(identity.clone());
        Self::sealed_by(Tls::new(identity), own, secret, expiry, host, Vec::new())
    }

    fn sealed_by(
        tls: Tls,
        own: Own,
        secret: JoinSecret,
        expiry: u64,
        host: Option<PublicKey>,
        places: Vec<String>,
    ) -> Self {
        let (allow, members) = (None, Arc::default());
        let sealed = Sealed { tls, own, secret, expiry, host, allow, members, newcomers: None, places };
        Self { sealed: Some(Arc::new(sealed)), refused: Refused::default() }
    }

    /// Whether connections are encrypted.
    #[must_use]
    pub const fn is_sealed(&self) -> bool {
        self.sealed.is_some()
    }

    /// Connections that were refused here, counted by reason; shared by all clones.
    #[must_use]
    pub const fn refused(&self) -> &Refused {
        &self.refused
    }

    /// The own key, where connections are encrypted.
    #[must_use]
    pub fn own_key(&self) -> Option<PublicKey> {
        self.sealed.as_ref().map(|sealed| sealed.own.public())
    }

    /// The own key pair, where this process is known by one.
    #[cfg(feature = "iroh")]
    pub(crate) fn identity(&self) -> Option<&Identity> {
        match &self.sealed.as_ref()?.own {
            Own::Key(identity) => Some(identity),
            Own::Certificate(_) => None,
        }
    }

    /// The names that a server at an address may have in its certificate.
    pub(crate) fn names_at(&self, address: SocketAddr) -> Vec<ServerName<'static>> {
        let places = self.sealed.iter().flat_map(|sealed| &sealed.places);
        let is_there = |place: &&String| {
            place.to_socket_addrs().is_ok_and(|mut found| found.any(|found| found == address))
        };
        let hosts = places.filter(is_there).filter_map(|place| place.rsplit_once(':'));
        let names = hosts.filter_map(|(host, _)| ServerName::try_from(host.to_owned()).ok());
        names.chain([ServerName::IpAddress(address.ip().into())]).collect()
    }

    /// A session for a new connection; none where connections are not encrypted. A client's server has to have
    /// one of the `names` in its certificate, if it has one, unless there are none.
    pub(crate) fn session(
        &self,
        role: Role,
        names: Vec<ServerName<'static>>,
    ) -> Result<Option<Session>, SessionError> {
        let make = |sealed: &Arc<Sealed>| match role {
            Role::Client => Session::client(&sealed.tls, names),
            Role::Server => Session::server(&sealed.tls),
        };
        self.sealed.as_ref().map(make).transpose()
    }

    /// The host's key, where a ticket names it.
    pub(crate) fn host(&self) -> Option<PublicKey> {
        self.sealed.as_ref().and_then(|sealed| sealed.host)
    }

    /// The key of a member, where a host has told.
    pub(crate) fn member(&self, rank: usize) -> Option<PublicKey> {
        self.sealed.as_ref().and_then(|sealed| sealed.members.get(rank).copied())
    }

    /// This side's proof for a session whose handshake is done. A server answers with the `expiry` of the
    /// client's.
    pub(crate) fn prove(&self, role: Role, session: &Session, expiry: Option<u64>) -> Option<Vec<u8>> {
        self.prove_by(role, session.exporter()?, expiry)
    }

    /// [`Security::prove`] for a session with this exporter.
    pub(crate) fn prove_by(&self, role: Role, exporter: &[u8; 32], expiry: Option<u64>) -> Option<Vec<u8>> {
        let sealed = self.sealed.as_ref()?;
        let expiry = expiry.unwrap_or(sealed.expiry);
        let mac = sealed.secret_of(expiry)?.proof(role.label(), expiry, exporter);
        Some(Control::Prove { expiry, clock: unix_seconds(), mac: &mac }.encode())
    }

    /// Checks the other side of a session whose handshake is done, where this side has `role`: its key, which
    /// must be `expected` where that is known, and its proof. Returns the expiry of its right to join.
    pub(crate) fn verify(
        &self,
        role: Role,
        session: &Session,
        expected: Option<PublicKey>,
        proof: &Control<'_>,
    ) -> Result<u64, Refusal> {
        let (Some(key), Some(exporter)) = (session.peer(), session.exporter()) else {
            return Err(if self.is_sealed() { Refusal::Key } else { Refusal::Clear });
        };
        self.verify_by(role, key, exporter, expected, proof)
    }

    /// [`Security::verify`] for a session with this exporter, whose other side has proven that it holds `key`.
    pub(crate) fn verify_by(
        &self,
        role: Role,
        key: PublicKey,
        exporter: &[u8; 32],
        expected: Option<PublicKey>,
        proof: &Control<'_>,
    ) -> Result<u64, Refusal> {
        let Some(sealed) = &self.sealed else { return Err(Refusal::Clear) };
        self.check_key(key, expected)?;
        let &Control::Prove { expiry, mac, .. } = proof else { return Err(Refusal::Secret) };
        let secret = sealed.secret_of(expiry).ok_or(Refusal::Secret)?;
        if !secret.is_proof(role.other().label(), expiry, exporter, mac) {
            return Err(Refusal::Secret);
        }
        let clock = unix_seconds();
        if role == Role::Server && expiry > 0 && clock > expiry {
            return Err(Refusal::Expired { expiry, clock });
        }
        Ok(expiry)
    }

    /// Whether a peer with this key is welcome.
    pub(crate) fn check_key(&self, key: PublicKey, expected: Option<PublicKey>) -> Result<(), Refusal> {
        let Some(sealed) = &self.sealed else { return Ok(()) };
        let is_allowed = sealed.allow.as_ref().is_none_or(|allow| allow.contains(&key));
        // Whom a host has let in is no stranger to its members, which need no list of their own.
        let is_member = sealed.members.contains(&key);
        let is_expected = expected.is_none_or(|expected| expected == key);
        if is_expected && (is_allowed || is_member || sealed.host == Some(key)) {
            Ok(())
        } else {
            Err(Refusal::Key)
        }
    }

    /// A secret for the connections of members among each other.
    pub(crate) fn admission(&self, members: Vec<PublicKey>) -> Result<Option<Admission>, CommError> {
        if self.sealed.is_none() {
            return Ok(None);
        }
        Ok(Some(Admission { members, secret: JoinSecret::generate()? }))
    }

    /// The same for a member of a run that others join later: connections among members prove `secret`, and
    /// newcomers what they proved here before.
    pub(crate) fn growing(&self, secret: JoinSecret) -> Self {
        let mut own = self.clone();
        if let Some(sealed) = &mut own.sealed {
            let sealed = Arc::make_mut(sealed);
            let before = std::mem::replace(&mut sealed.secret, secret);
            sealed.newcomers = Some((before, std::mem::take(&mut sealed.expiry)));
            // Whoever has the secret is a member: the host may have left.
            sealed.host = None;
        }
        own
    }

    /// The same among the members that a host has let in.
    pub(crate) fn among(&self, admission: Admission) -> Self {
        let mut own = self.clone();
        if let Some(sealed) = &mut own.sealed {
            let sealed = Arc::make_mut(sealed);
            sealed.secret = admission.secret;
            sealed.expiry = 0;
            sealed.members = Arc::new(admission.members);
        }
        own
    }
}

/// The same sessions, or none on both sides.
impl PartialEq for Security {
    fn eq(&self, other: &Self) -> bool {
        match (&self.sealed, &other.sealed) {
            (None, None) => true,
            (Some(own), Some(other)) => Arc::ptr_eq(own, other),
            _ => false,
        }
    }
}

impl Eq for Security {}

impl Sealed {
    /// The secret of tickets until `expiry`, where this side can know it.
    fn secret_of(&self, expiry: u64) -> Option<JoinSecret> {
        let (secret, own) = match &self.newcomers {
            Some((secret, own)) if expiry > 0 => (secret, *own),
            _ => (&self.secret, self.expiry),
        };
        match own {
            own if own == expiry => Some(secret.clone()),
            0 => Some(secret.until(expiry)),
            _ => None,
        }
    }
}
