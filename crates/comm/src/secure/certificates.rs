//! X.509 certificates of a site instead of raw keys: both sides show a chain that ends at the site's own
//! authority. A peer is still identified by a key: the ed25519 key of its certificate, or the SHA-256 of a key
//! of another kind.

use std::fmt;
use std::sync::Arc;

use ring::digest::{Context, SHA256, digest};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{verify_server_cert_signed_by_trust_anchor, verify_server_name};
use rustls::crypto::{CryptoProvider, verify_tls13_signature};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{ParsedCertificate, WebPkiClientVerifier};
use rustls::sign::CertifiedKey;
use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, RootCertStore, SignatureScheme,
};

use super::identity::PublicKey;
use super::secret::JoinSecret;

/// The site's authorities, this process's certificate chain and its private key.
pub struct Certificates {
    pub(super) roots: Arc<RootCertStore>,
    pub(super) chain: Vec<CertificateDer<'static>>,
    pub(super) key: PrivateKeyDer<'static>,
    /// Secret that all processes of the site can compute, used if there is no join secret. It is not
    /// confidential.
    common: JoinSecret,
}

/// Does not print the key.
impl fmt::Debug for Certificates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Certificates({} roots, a chain of {})", self.roots.len(), self.chain.len())
    }
}

/// Error of [`Certificates::from_pem`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what}: {problem}")]
pub struct CertificateFault {
    /// Text that is wrong: `authority`, `certificate` or `key`.
    pub what: &'static str,
    /// What is wrong with this text.
    pub problem: String,
}

impl Certificates {
    /// Reads PEM texts: the certificates of the authorities, this process's chain beginning with its own
    /// certificate, and its private key (PKCS #8, SEC 1 or PKCS #1).
    ///
    /// # Errors
    /// [`CertificateFault`] if a text lacks what it should contain, or if the key does not belong to the
    /// certificate.
    pub fn from_pem(authority: &[u8], chain: &[u8], key: &[u8]) -> Result<Self, CertificateFault> {
        let fault = |what| move |problem: String| CertificateFault { what, problem };
        let all = |text| CertificateDer::pem_slice_iter(text).collect::<Result<Vec<_>, _>>();
        let authorities = all(authority).map_err(|e| fault("authority")(e.to_string()))?;
        let mut roots = RootCertStore::empty();
        let mut hash = Context::new(&SHA256);
        hash.update(b"farflung certificates of");
        for authority in authorities {
            hash.update(&authority);
            roots.add(authority).map_err(|e| fault("authority")(e.to_string()))?;
        }
        if roots.is_empty() {
            return Err(fault("authority")("it contains no certificate".to_owned()));
        }
        let chain = all(chain).map_err(|e| fault("certificate")(e.to_string()))?;
        let first =
            chain.first().ok_or_else(|| fault("certificate")("it contains no certificate".to_owned()))?;
        key_of(first)
            .ok_or_else(|| fault("certificate")("it is not a valid X.509 certificate".to_owned()))?;
        let key = PrivateKeyDer::from_pem_slice(key).map_err(|e| fault("key")(e.to_string()))?;
        let common: [u8; 32] = hash.finish().as_ref().try_into().expect("SHA-256 has 32 bytes");
        CertifiedKey::from_der(chain.clone(), key.clone_key(), &rustls::crypto::ring::default_provider())
            .map_err(|e| fault("key")(e.to_string()))?;
        Ok(Self { roots: Arc::new(roots), chain, key, common: JoinSecret::new(common) })
    }

    /// Returns the key by which peers identify this process.
    #[must_use]
    pub fn own_key(&self) -> PublicKey {
        self.chain.first().and_then(key_of).expect("`from_pem` has parsed this certificate")
    }

    /// Returns the secret that all processes of the site can prove. It proves nothing beyond their
    /// certificates.
    pub(super) const fn common(&self) -> &JoinSecret {
        &self.common
    }
}

/// Returns the key that identifies the holder of a certificate; `None` if the certificate cannot be parsed.
pub(super) fn key_of(certificate: &CertificateDer<'_>) -> Option<PublicKey> {
    let key = ParsedCertificate::try_from(certificate).ok()?.subject_public_key_info();
    if let Some(raw) = PublicKey::of_info(&key) {
        return Some(raw);
    }
    digest(&SHA256, &key).as_ref().try_into().ok().map(PublicKey::new)
}

/// Maps a bad signature in a chain to an unknown issuer: the chain then ends at another authority that only has
/// the same name as the site's.
fn of_chain(error: Error) -> Error {
    match error {
        Error::InvalidCertificate(CertificateError::BadSignature) => {
            Error::InvalidCertificate(CertificateError::UnknownIssuer)
        }
        error => error,
    }
}

/// Verifies certificates of servers: the chain, and one of the names by which the server was reached.
#[derive(Debug)]
pub(super) struct SiteServers {
    pub(super) roots: Arc<RootCertStore>,
    pub(super) crypto: Arc<CryptoProvider>,
    /// Names of which the certificate must have at least one. If there are none, names are not checked: the
    /// server's key is known and is checked instead.
    pub(super) names: Vec<ServerName<'static>>,
}

fn signature(
    crypto: &CryptoProvider,
    message: &[u8],
    certificate: &CertificateDer<'_>,
    signed: &DigitallySignedStruct,
) -> Result<HandshakeSignatureValid, Error> {
    verify_tls13_signature(message, certificate, signed, &crypto.signature_verification_algorithms)
}

fn no_tls12() -> Result<HandshakeSignatureValid, Error> {
    Err(Error::PeerIncompatible(rustls::PeerIncompatible::Tls12NotOfferedOrEnabled))
}

impl ServerCertVerifier for SiteServers {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        rest: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let parsed = ParsedCertificate::try_from(certificate)?;
        let algorithms = self.crypto.signature_verification_algorithms.all;
        verify_server_cert_signed_by_trust_anchor(&parsed, &self.roots, rest, now, algorithms)
            .map_err(of_chain)?;
        let mut wrong = None;
        for name in &self.names {
            match verify_server_name(&parsed, name) {
                Ok(()) => return Ok(ServerCertVerified::assertion()),
                Err(error) => wrong = Some(error),
            }
        }
        wrong.map_or_else(|| Ok(ServerCertVerified::assertion()), Err)
    }
    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        no_tls12()
    }
    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        signature(&self.crypto, message, certificate, signed)
    }
    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.crypto.signature_verification_algorithms.supported_schemes()
    }
}

/// Verifies certificates of clients: only the chain, since clients may connect from any address.
#[derive(Debug)]
pub(super) struct SiteClients {
    inner: Arc<dyn ClientCertVerifier>,
    crypto: Arc<CryptoProvider>,
}

impl SiteClients {
    pub(super) fn new(roots: Arc<RootCertStore>, crypto: Arc<CryptoProvider>) -> Result<Self, Error> {
        let builder = WebPkiClientVerifier::builder_with_provider(roots, Arc::clone(&crypto));
        let inner = builder.build().map_err(|e| Error::General(e.to_string()))?;
        Ok(Self { inner, crypto })
    }
}

impl ClientCertVerifier for SiteClients {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }
    fn verify_client_cert(
        &self,
        certificate: &CertificateDer<'_>,
        rest: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.inner.verify_client_cert(certificate, rest, now).map_err(of_chain)
    }
    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        no_tls12()
    }
    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        signature(&self.crypto, message, certificate, signed)
    }
    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.crypto.signature_verification_algorithms.supported_schemes()
    }
}
