//! TLS certificates of a user's own relay. Peers identify each other by their keys and encrypt what they send
//! through a relay, so the relay's identity does not need to be proven. But QUIC requires a certificate.

use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer, ServerName, UnixTime};
use rustls::{DigitallySignedStruct, Error, ServerConfig, SignatureScheme};

use crate::CommError;

/// Accepts any certificate whose private key the relay holds: for relays without a certificate of a public
/// authority.
#[derive(Debug)]
pub(crate) struct AnyCertificate(Arc<CryptoProvider>);

impl AnyCertificate {
    pub(crate) const fn new(provider: Arc<CryptoProvider>) -> Self {
        Self(provider)
    }
}

impl ServerCertVerifier for AnyCertificate {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, certificate, signed, &self.0.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, certificate, signed, &self.0.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

/// Makes the TLS settings of a server with a new key and a self-signed certificate.
///
/// # Errors
/// [`CommError::Io`] if the certificate cannot be made.
pub(crate) fn self_signed() -> Result<ServerConfig, CommError> {
    let wrong = |e: &dyn std::fmt::Display| {
        CommError::io("make a certificate for", &"a relay", &std::io::Error::other(e.to_string()))
    };
    let made = rcgen::generate_simple_self_signed(["farflung-relay".to_owned()]).map_err(|e| wrong(&e))?;
    let key = PrivatePkcs8KeyDer::from(made.signing_key.serialize_der());
    ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(|e| wrong(&e))?
        .with_no_client_auth()
        .with_single_cert(vec![made.cert.der().clone()], key.into())
        .map_err(|e| wrong(&e))
}
