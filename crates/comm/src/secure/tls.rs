//! Settings of rustls: TLS 1.3 only; on both sides raw ed25519 public keys (RFC 7250) or a site's certificates;
//! server names are not sent; no session tickets, no early data. rustls checks certificates in the handshake.
//! Whether a key is accepted is decided after the handshake, so that a refusal can be sent with its reason.

use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{AlwaysResolvesClientRawPublicKeys, Resumption};
use rustls::crypto::{CryptoProvider, ring as provider, verify_tls13_signature_with_raw_key};
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer, ServerName, SubjectPublicKeyInfoDer, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{AlwaysResolvesServerRawPublicKeys, NoServerSessionStorage};
use rustls::sign::CertifiedKey;
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, DistinguishedName, Error, RootCertStore,
    ServerConfig, SignatureScheme,
};
use zeroize::Zeroizing;

use super::certificates::{self, Certificates, SiteClients, SiteServers};
use super::identity::{Identity, PublicKey};

/// Bytes before the seed in the PKCS #8 encoding of an ed25519 private key.
const PKCS8: [u8; 16] =
    [0x30, 0x2e, 0x02, 0x01, 0x00, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x04, 0x22, 0x04, 0x20];

/// Settings for connections that this process opens and for those that it accepts.
#[derive(Debug, Clone)]
pub(super) struct Tls {
    pub(super) client: ClientConfig,
    pub(super) server: ServerConfig,
    /// The site's authorities, if certificates are used instead of raw keys.
    site: Option<Arc<RootCertStore>>,
}

impl Tls {
    /// Makes the settings of a peer with this identity.
    pub(super) fn new(identity: &Identity) -> Self {
        Self::build(identity, crypto())
            .expect("the provider has TLS 1.3 and ed25519, and the key is well-formed")
    }

    /// Makes the settings of a peer with this identity and the given cryptography.
    pub(super) fn build(identity: &Identity, crypto: CryptoProvider) -> Result<Self, Error> {
        let crypto = Arc::new(crypto);
        let verifier = Arc::new(AnyKey(Arc::clone(&crypto)));
        let pkcs8 = Zeroizing::new([&PKCS8[..], &identity.seed()[..]].concat());
        let signing = provider::sign::any_eddsa_type(&PrivatePkcs8KeyDer::from(&pkcs8[..]))?;
        let own =
            Arc::new(CertifiedKey::new(vec![CertificateDer::from(identity.public().to_info())], signing));
        let versions = &[&rustls::version::TLS13];
        let mut client = ClientConfig::builder_with_provider(Arc::clone(&crypto))
            .with_protocol_versions(versions)?
            .dangerous()
            .with_custom_certificate_verifier(Arc::clone(&verifier) as Arc<dyn ServerCertVerifier>)
            .with_client_cert_resolver(Arc::new(AlwaysResolvesClientRawPublicKeys::new(Arc::clone(&own))));
        client.enable_sni = false;
        client.resumption = Resumption::disabled();
        let mut server = ServerConfig::builder_with_provider(crypto)
            .with_protocol_versions(versions)?
            .with_client_cert_verifier(verifier)
            .with_cert_resolver(Arc::new(AlwaysResolvesServerRawPublicKeys::new(own)));
        server.session_storage = Arc::new(NoServerSessionStorage {});
        server.send_tls13_tickets = 0;
        Ok(Self { client, server, site: None })
    }

    /// Makes the settings of a process with a site's certificates.
    ///
    /// Errors: a private key that does not belong to the certificate, or of a kind that is not supported.
    pub(super) fn by_certificates(own: &Certificates) -> Result<Self, Error> {
        let crypto = Arc::new(crypto());
        let versions = &[&rustls::version::TLS13];
        let (roots, chain) = (Arc::clone(&own.roots), own.chain.clone());
        let servers =
            SiteServers { roots: Arc::clone(&roots), crypto: Arc::clone(&crypto), names: Vec::new() };
        let mut client = ClientConfig::builder_with_provider(Arc::clone(&crypto))
            .with_protocol_versions(versions)?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(servers))
            .with_client_auth_cert(chain.clone(), own.key.clone_key())?;
        client.enable_sni = false;
        client.resumption = Resumption::disabled();
        let clients = SiteClients::new(Arc::clone(&roots), Arc::clone(&crypto))?;
        let mut server = ServerConfig::builder_with_provider(crypto)
            .with_protocol_versions(versions)?
            .with_client_cert_verifier(Arc::new(clients))
            .with_single_cert(chain, own.key.clone_key())?;
        server.session_storage = Arc::new(NoServerSessionStorage {});
        server.send_tls13_tickets = 0;
        Ok(Self { client, server, site: Some(roots) })
    }

    /// Returns whether peers show certificates, rather than raw keys.
    pub(super) const fn is_by_certificates(&self) -> bool {
        self.site.is_some()
    }

    /// Returns the settings of a client whose server must have one of these names in its certificate. Without
    /// names, and with raw keys, names are not checked.
    pub(super) fn client_of(&self, names: Vec<ServerName<'static>>) -> ClientConfig {
        let mut client = self.client.clone();
        if let Some(roots) = &self.site {
            let (roots, crypto) = (Arc::clone(roots), Arc::clone(client.crypto_provider()));
            client.dangerous().set_certificate_verifier(Arc::new(SiteServers { roots, crypto, names }));
        }
        client
    }
}

/// Returns ring's cryptography with the cipher suites that use SHA-256. AES is preferred if this processor has
/// instructions for it, else `ChaCha20`.
fn crypto() -> CryptoProvider {
    let (aes, chacha) = (
        provider::cipher_suite::TLS13_AES_128_GCM_SHA256,
        provider::cipher_suite::TLS13_CHACHA20_POLY1305_SHA256,
    );
    let suites = if has_aes() { vec![aes, chacha] } else { vec![chacha, aes] };
    CryptoProvider { cipher_suites: suites, ..provider::default_provider() }
}

#[cfg(any(target_arch = "x86", target_arch = "x86_64"))]
fn has_aes() -> bool {
    std::arch::is_x86_feature_detected!("aes") && std::arch::is_x86_feature_detected!("pclmulqdq")
}

#[cfg(target_arch = "aarch64")]
fn has_aes() -> bool {
    std::arch::is_aarch64_feature_detected!("aes") && std::arch::is_aarch64_feature_detected!("pmull")
}

#[cfg(not(any(target_arch = "x86", target_arch = "x86_64", target_arch = "aarch64")))]
const fn has_aes() -> bool {
    false
}

/// Returns a placeholder for the server name that rustls requires. It is not checked: servers are identified by
/// their keys, and certificates are checked against the names in [`SiteServers`].
pub(super) fn nobody() -> ServerName<'static> {
    ServerName::try_from("farflung").expect("`farflung` is a valid server name")
}

/// Returns the key that the other side has proven to hold.
pub(super) fn key_of(certificates: Option<&[CertificateDer<'static>]>) -> Option<PublicKey> {
    let [first, rest @ ..] = certificates? else { return None };
    match PublicKey::of_info(first) {
        Some(key) if rest.is_empty() => Some(key),
        // A certificate or a chain. Sessions use either raw keys or certificates, never both.
        _ => certificates::key_of(first),
    }
}

/// Verifies that the other side holds the private key of the key that it shows, and accepts any key.
#[derive(Debug)]
struct AnyKey(Arc<CryptoProvider>);

impl AnyKey {
    fn is_key(certificate: &CertificateDer<'_>, rest: &[CertificateDer<'_>]) -> Result<(), Error> {
        let is_key = PublicKey::of_info(certificate).is_some() && rest.is_empty();
        is_key.then_some(()).ok_or(Error::InvalidCertificate(CertificateError::BadEncoding))
    }

    fn verify(
        &self,
        message: &[u8],
        key: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let key = SubjectPublicKeyInfoDer::from(key.as_ref());
        verify_tls13_signature_with_raw_key(message, &key, signed, &self.0.signature_verification_algorithms)
    }

    fn no_tls12() -> Result<HandshakeSignatureValid, Error> {
        Err(Error::PeerIncompatible(rustls::PeerIncompatible::Tls12NotOfferedOrEnabled))
    }
}

impl ServerCertVerifier for AnyKey {
    fn verify_server_cert(
        &self,
        key: &CertificateDer<'_>,
        rest: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Self::is_key(key, rest).map(|()| ServerCertVerified::assertion())
    }
    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Self::no_tls12()
    }
    fn verify_tls13_signature(
        &self,
        message: &[u8],
        key: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.verify(message, key, signed)
    }
    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }
    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}

impl ClientCertVerifier for AnyKey {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }
    fn verify_client_cert(
        &self,
        key: &CertificateDer<'_>,
        rest: &[CertificateDer<'_>],
        _: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        Self::is_key(key, rest).map(|()| ClientCertVerified::assertion())
    }
    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Self::no_tls12()
    }
    fn verify_tls13_signature(
        &self,
        message: &[u8],
        key: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.verify(message, key, signed)
    }
    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }
    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}
