//! The exporter of a TLS 1.3 session (RFC 8446, section 7.5). rustls has it for connections that buffer; those
//! that do not give the exporter's secret to a [`KeyLog`], and the rest is computed here. The cipher suites
//! that are offered all have SHA-256.

use std::fmt;
use std::sync::{Mutex, PoisonError};

use ring::{digest, hmac};
use rustls::KeyLog;
use zeroize::Zeroizing;

/// Takes the exporter's secret of one session, and no other.
#[derive(Default)]
pub(super) struct ExporterSecret(Mutex<Option<Zeroizing<[u8; 32]>>>);

impl fmt::Debug for ExporterSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ExporterSecret")
    }
}

impl KeyLog for ExporterSecret {
    fn log(&self, label: &str, _: &[u8], secret: &[u8]) {
        if let (true, Ok(secret)) = (self.will_log(label), secret.try_into()) {
            *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(Zeroizing::new(secret));
        }
    }
    fn will_log(&self, label: &str) -> bool {
        label == "EXPORTER_SECRET"
    }
}

impl ExporterSecret {
    /// The exporter's 32 bytes for this label and context, once the handshake is done; the secret is forgotten
    /// with it.
    pub(super) fn export(&self, label: &str, context: &[u8]) -> Option<Zeroizing<[u8; 32]>> {
        let secret = self.0.lock().unwrap_or_else(PoisonError::into_inner).take()?;
        let derived = expand(&secret, label, &hash(b""));
        Some(expand(&derived, "exporter", &hash(context)))
    }
}

fn hash(bytes: &[u8]) -> [u8; 32] {
    digest::digest(&digest::SHA256, bytes).as_ref().try_into().expect("SHA-256 has 32 bytes")
}

/// HKDF-Expand-Label for 32 bytes, which are one block.
fn expand(secret: &[u8; 32], label: &str, context: &[u8; 32]) -> Zeroizing<[u8; 32]> {
    let mut info = vec![0, 32, (6 + label.len()) as u8];
    info.extend(b"tls13 ");
    info.extend(label.as_bytes());
    info.push(32);
    info.extend(context);
    info.push(1);
    let block = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, secret), &info);
    Zeroizing::new(block.as_ref().try_into().expect("SHA-256 has 32 bytes"))
}
