//! How a process protects its connections, and which peers it accepts. Either connections are not encrypted and
//! every peer is accepted, or they use TLS with the process's own key or certificate, and a secret that both
//! sides prove. Opens no sockets, but resolves host names.

use std::collections::BTreeSet;
use std::net::{SocketAddr, ToSocketAddrs as _};
use std::sync::Arc;

use rustls::pki_types::ServerName;

use super::certificates::Certificates;
use super::clock::unix_seconds;
use super::identity::{Identity, PublicKey};
use super::refused::Refused;
use super::secret::JoinSecret;
use super::session::Session;
use super::session_error::SessionError;
use super::ticket::Ticket;
use super::tls::Tls;
use crate::CommError;
use crate::control::Control;
use crate::error::Refusal;

/// The two ends of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// The side that opens the connection.
    Client,
    /// The side that accepts the connection.
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

/// Protection of a process's connections, and the peers that it accepts. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct Security {
    encryption: Option<Arc<Encryption>>,
    trusts_network: bool,
    refused: Refused,
}

/// Identity that this process shows to peers.
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
struct Encryption {
    tls: Tls,
    own: Own,
    secret: JoinSecret,
    /// Kind of `secret`. 0: the job's own secret, from which the secrets of tickets are derived, or the secret
    /// that members prove to each other. Otherwise: the secret of a ticket that expires at this time (seconds
    /// since 1970).
    expiry: u64,
    /// The host's key, from the ticket. `None` without a ticket, and if any member may be the other side.
    host: Option<PublicKey>,
    /// Keys that may join; `None` if every peer with the secret may.
    allow: Option<Arc<BTreeSet<PublicKey>>>,
    /// Keys of the members by rank, once a host has sent them.
    members: Arc<Vec<PublicKey>>,
    /// Secret that new members must prove, and its expiry. Set in a member of a growing network, where `secret`
    /// is the one that members prove to each other.
    newcomers: Option<(JoinSecret, u64)>,
    /// Addresses (`host:port`) of other processes, whose host names may be in their certificates.
    places: Vec<String>,
}

/// Keys of the members and their common secret, as the host sends them to each member.
pub(crate) struct Admission {
    pub(crate) members: Vec<PublicKey>,
    pub(crate) secret: JoinSecret,
}

impl Security {
    /// Makes a setting without encryption that accepts every peer: for the loopback interface, and for networks
    /// that only the processes of the job can reach.
    #[must_use]
    pub fn unencrypted() -> Self {
        Self::default()
    }

    /// States that every process that reaches this one may be trusted. Then this process may listen at all
    /// addresses of its machine without encryption, if others do not reach the address that it was given.
    #[must_use]
    pub const fn trusting_network(mut self) -> Self {
        self.trusts_network = true;
        self
    }

    /// Returns whether this process may listen at addresses of its machine that it was not given.
    pub(crate) const fn allows_all_addresses(&self) -> bool {
        self.encryption.is_some() || self.trusts_network
    }

    /// Makes a setting with TLS in which peers must prove a secret that all members already have. It also
    /// accepts holders of [tickets](Ticket) made from this secret.
    #[must_use]
    pub fn by_secret(identity: &Identity, secret: &JoinSecret) -> Self {
        Self::encrypted(identity, secret.clone(), 0, None)
    }

    /// Makes a setting with TLS in which peers must prove the secret of a ticket. The ticket contains the key
    /// by which the host is identified.
    #[must_use]
    pub fn by_ticket(identity: &Identity, ticket: &Ticket) -> Self {
        Self::encrypted(identity, ticket.secret.clone(), ticket.expiry, Some(ticket.host))
    }

    /// Makes a setting with TLS and a site's certificates on both sides. Peers must have a certificate of the
    /// site's authority, and must prove the secret as well if there is one.
    ///
    /// A server's certificate must be valid for a name by which it was reached: its IP address, or the host of
    /// any of `places` (`host:port`) that resolves to this address. This is not checked for a server whose key
    /// is already known.
    #[must_use]
    pub fn by_certificates(own: &Certificates, secret: Option<&JoinSecret>, places: Vec<String>) -> Self {
        let tls =
            Tls::by_certificates(own).expect("`from_pem` has checked that the certificates can be used");
        let secret = secret.unwrap_or(own.common()).clone();
        let own = Own::Certificate(own.own_key());
        Self::encrypted_by(tls, own, secret, 0, None, places)
    }

    /// Makes the setting of a process without a ticket that joins a growing network: with certificates of a
    /// site, or with the job's own secret. It proves a secret derived from its own, as the holder of a ticket
    /// does, with the expiry `u64::MAX`, which is never reached. With a ticket nothing changes.
    #[must_use]
    pub fn joining(mut self) -> Self {
        if let Some(sealed) = self.encryption.as_mut().filter(|sealed| sealed.expiry == 0) {
            let sealed = Arc::make_mut(sealed);
            (sealed.secret, sealed.expiry) = (sealed.secret.until(u64::MAX), u64::MAX);
        }
        self
    }

    /// Accepts any member of the run as the other side, not only the host of the ticket, which may have left.
    #[must_use]
    pub fn by_any_member(mut self) -> Self {
        if let Some(sealed) = &mut self.encryption {
            Arc::make_mut(sealed).host = None;
        }
        self
    }

    /// Accepts only peers with these keys, with this process's own key, with the key of the ticket's host, or
    /// with the key of a member that the host has sent. They must still prove the secret.
    #[must_use]
    pub fn allowing(mut self, keys: impl IntoIterator<Item = PublicKey>) -> Self {
        if let Some(sealed) = &mut self.encryption {
            let sealed = Arc::make_mut(sealed);
            let own = sealed.own.public();
            sealed.allow = Some(Arc::new(keys.into_iter().chain([own]).collect()));
        }
        self
    }

    fn encrypted(identity: &Identity, secret: JoinSecret, expiry: u64, host: Option<PublicKey>) -> Self {
        let own = Own::Key(identity.clone());
        Self::encrypted_by(Tls::new(identity), own, secret, expiry, host, Vec::new())
    }

    fn encrypted_by(
        tls: Tls,
        own: Own,
        secret: JoinSecret,
        expiry: u64,
        host: Option<PublicKey>,
        places: Vec<String>,
    ) -> Self {
        let (allow, members) = (None, Arc::default());
        let sealed = Encryption { tls, own, secret, expiry, host, allow, members, newcomers: None, places };
        Self { encryption: Some(Arc::new(sealed)), ..Self::default() }
    }

    /// Returns whether connections are encrypted.
    #[must_use]
    pub const fn is_encrypted(&self) -> bool {
        self.encryption.is_some()
    }

    /// Returns the counts of connections that were refused here, by reason. All clones share them.
    #[must_use]
    pub const fn refused(&self) -> &Refused {
        &self.refused
    }

    /// Returns this process's own key, if connections are encrypted.
    #[must_use]
    pub fn own_key(&self) -> Option<PublicKey> {
        self.encryption.as_ref().map(|sealed| sealed.own.public())
    }

    /// Returns this process's key pair. `None` if the process is identified by a certificate.
    #[cfg(feature = "iroh")]
    pub(crate) fn identity(&self) -> Option<&Identity> {
        match &self.encryption.as_ref()?.own {
            Own::Key(identity) => Some(identity),
            Own::Certificate(_) => None,
        }
    }

    /// Returns the names that a server at this address may have. If it shows a certificate, that must be valid
    /// for one of them.
    pub(crate) fn names_at(&self, address: SocketAddr) -> Vec<ServerName<'static>> {
        let places = self.encryption.iter().flat_map(|sealed| &sealed.places);
        let is_there = |place: &&String| {
            place.to_socket_addrs().is_ok_and(|mut found| found.any(|found| found == address))
        };
        let hosts = places.filter(is_there).filter_map(|place| place.rsplit_once(':'));
        let names = hosts.filter_map(|(host, _)| ServerName::try_from(host.to_owned()).ok());
        names.chain([ServerName::IpAddress(address.ip().into())]).collect()
    }

    /// Makes a session for a new connection; `None` if connections are not encrypted. If `names` is not empty
    /// and the server shows a certificate, the client requires it to be valid for one of them.
    pub(crate) fn session(
        &self,
        role: Role,
        names: Vec<ServerName<'static>>,
    ) -> Result<Option<Session>, SessionError> {
        let make = |sealed: &Arc<Encryption>| match role {
            Role::Client => Session::client(&sealed.tls, names),
            Role::Server => Session::server(&sealed.tls),
        };
        self.encryption.as_ref().map(make).transpose()
    }

    /// Returns the host's key, from the ticket. `None` without a ticket, and if any member may be the other
    /// side.
    pub(crate) fn host(&self) -> Option<PublicKey> {
        self.encryption.as_ref().and_then(|sealed| sealed.host)
    }

    /// Returns the key of a member, if a host has sent it.
    pub(crate) fn member(&self, rank: usize) -> Option<PublicKey> {
        self.encryption.as_ref().and_then(|sealed| sealed.members.get(rank).copied())
    }

    /// Returns this side's proof for a session whose handshake is done, as an encoded message. A server passes
    /// the `expiry` of the client's proof; a client passes `None`.
    pub(crate) fn prove(&self, role: Role, session: &Session, expiry: Option<u64>) -> Option<Vec<u8>> {
        self.prove_by(role, session.exporter()?, expiry)
    }

    /// Computes the result of [`Security::prove`] for a session with this exporter value.
    pub(crate) fn prove_by(&self, role: Role, exporter: &[u8; 32], expiry: Option<u64>) -> Option<Vec<u8>> {
        let sealed = self.encryption.as_ref()?;
        let expiry = expiry.unwrap_or(sealed.expiry);
        let mac = sealed.secret_of(expiry)?.proof(role.label(), expiry, exporter);
        Some(Control::Prove { expiry, clock: unix_seconds(), mac: &mac }.encode())
    }

    /// Checks the other side of a session whose handshake is done: its key, which must be `expected` if that is
    /// given, and its proof. `role` is the role of this side. Returns the expiry of the other side's right to
    /// join.
    pub(crate) fn verify(
        &self,
        role: Role,
        session: &Session,
        expected: Option<PublicKey>,
        proof: &Control<'_>,
    ) -> Result<u64, Refusal> {
        let (Some(key), Some(exporter)) = (session.peer(), session.exporter()) else {
            return Err(if self.is_encrypted() { Refusal::Key } else { Refusal::EncryptionMismatch });
        };
        self.verify_by(role, key, exporter, expected, proof)
    }

    /// Computes the result of [`Security::verify`] for a session with this exporter value, whose other side has
    /// proven that it holds the private key of `key`.
    pub(crate) fn verify_by(
        &self,
        role: Role,
        key: PublicKey,
        exporter: &[u8; 32],
        expected: Option<PublicKey>,
        proof: &Control<'_>,
    ) -> Result<u64, Refusal> {
        let Some(sealed) = &self.encryption else { return Err(Refusal::EncryptionMismatch) };
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

    /// Checks whether a peer with this key may connect.
    ///
    /// Errors: [`Refusal::Key`] if the key is not the expected one, or is not allowed.
    pub(crate) fn check_key(&self, key: PublicKey, expected: Option<PublicKey>) -> Result<(), Refusal> {
        let Some(sealed) = &self.encryption else { return Ok(()) };
        let is_allowed = sealed.allow.as_ref().is_none_or(|allow| allow.contains(&key));
        // Members accept each other by the keys that the host sent, and need no list of their own.
        let is_member = sealed.members.contains(&key);
        let is_expected = expected.is_none_or(|expected| expected == key);
        if is_expected && (is_allowed || is_member || sealed.host == Some(key)) {
            Ok(())
        } else {
            Err(Refusal::Key)
        }
    }

    /// Makes the data that the host sends to `members`: their keys, and a new secret for connections between
    /// them. Returns `None` if connections are not encrypted.
    pub(crate) fn admission(&self, members: Vec<PublicKey>) -> Result<Option<Admission>, CommError> {
        if self.encryption.is_none() {
            return Ok(None);
        }
        Ok(Some(Admission { members, secret: JoinSecret::generate()? }))
    }

    /// Returns the setting of a member of a run that others join later. Connections between members prove
    /// `secret`; new members prove the secret that was valid here before.
    pub(crate) fn growing(&self, secret: JoinSecret) -> Self {
        let mut own = self.clone();
        if let Some(sealed) = &mut own.encryption {
            let sealed = Arc::make_mut(sealed);
            let before = std::mem::replace(&mut sealed.secret, secret);
            sealed.newcomers = Some((before, std::mem::take(&mut sealed.expiry)));
            // Any peer with the secret is a member. The host's key is no longer required: the host may have
            // left.
            sealed.host = None;
        }
        own
    }

    /// Returns the setting for connections between the members that a host has accepted.
    pub(crate) fn among(&self, admission: Admission) -> Self {
        let mut own = self.clone();
        if let Some(sealed) = &mut own.encryption {
            let sealed = Arc::make_mut(sealed);
            sealed.secret = admission.secret;
            sealed.expiry = 0;
            sealed.members = Arc::new(admission.members);
        }
        own
    }
}

/// Compares by identity: equal if both share one setting, or if neither is encrypted and both trust the network
/// alike.
impl PartialEq for Security {
    fn eq(&self, other: &Self) -> bool {
        match (&self.encryption, &other.encryption) {
            (None, None) => self.trusts_network == other.trusts_network,
            (Some(own), Some(other)) => Arc::ptr_eq(own, other),
            _ => false,
        }
    }
}

impl Eq for Security {}

impl Encryption {
    /// Returns the secret of tickets that expire at `expiry`, if this side can compute it. For 0 it returns the
    /// job's own secret, or the one that members prove to each other.
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
