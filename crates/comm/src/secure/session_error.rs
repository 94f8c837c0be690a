//! Reasons why a TLS session ended.

use rustls::CertificateError;

/// Reason why a session ended.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum SessionError {
    /// The other side uses this protocol without encryption.
    #[error("the other side is not encrypted: give it the ticket or the secret too, or --insecure to both")]
    NotEncrypted,
    /// The other side uses another protocol.
    #[error("the other side does not use TLS")]
    NotTls,
    /// The other side offers only protocol versions or keys that are less secure than required.
    #[error("the other side offers no TLS 1.3 with keys or certificates of the kind that this side uses")]
    Downgrade,
    /// A received record does not belong to this session.
    #[error("a record does not belong to this session: it was replayed or changed in transit")]
    Foreign,
    /// The other side ended the session with an alert that names an error.
    #[error("the other side ended the session: {0}")]
    Alert(String),
    /// The other side's certificate is not accepted.
    #[error("{kind}: {detail}")]
    Certificate {
        /// Name of the reason in a few words, by which refusals are counted.
        kind: &'static str,
        /// What is wrong with the certificate.
        detail: String,
    },
    /// The other side sent more bytes than allowed before it had proven the join secret.
    #[error("the other side sent more than {0} bytes before its proof")]
    TooMuch(usize),
    /// Any other violation of the protocol.
    #[error("violation of the TLS protocol: {0}")]
    Malformed(String),
}

impl SessionError {
    /// Returns the name of the reason in a few words, by which refusals are counted.
    pub(crate) const fn kind(&self) -> &'static str {
        match self {
            Self::NotEncrypted => "not encrypted",
            Self::NotTls => "no TLS",
            Self::Downgrade => "downgrade",
            Self::Foreign => "replayed or changed",
            Self::Alert(_) => "gave up",
            Self::Certificate { kind, .. } => kind,
            Self::TooMuch(_) => "too many bytes",
            Self::Malformed(_) => "malformed handshake",
        }
    }
}

impl From<rustls::Error> for SessionError {
    fn from(error: rustls::Error) -> Self {
        use rustls::Error as E;
        if let E::InvalidCertificate(fault) = &error
            && let Some(kind) = certificate_fault(fault)
        {
            return Self::Certificate { kind, detail: fault.to_string() };
        }
        match error {
            E::DecryptError | E::InvalidCertificate(CertificateError::BadSignature) => Self::Foreign,
            E::PeerIncompatible(_) | E::NoCertificatesPresented => Self::Downgrade,
            E::AlertReceived(alert) => Self::Alert(format!("{alert:?}")),
            other => Self::Malformed(other.to_string()),
        }
    }
}

/// Returns the name of a fault of the certificate itself; `None` for other errors.
const fn certificate_fault(fault: &CertificateError) -> Option<&'static str> {
    use CertificateError as E;
    match fault {
        E::UnknownIssuer => Some("certificate of another authority"),
        E::Expired | E::ExpiredContext { .. } => Some("expired certificate"),
        E::NotValidYet | E::NotValidYetContext { .. } => Some("certificate not valid yet"),
        E::NotValidForName | E::NotValidForNameContext { .. } => Some("certificate of another name"),
        E::InvalidPurpose | E::InvalidPurposeContext { .. } => Some("certificate for another purpose"),
        _ => None,
    }
}
