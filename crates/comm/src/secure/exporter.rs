//! The exporter of a TLS 1.3 session (RFC 8446, section 7.5), which derives keys from the session for other
//! uses. rustls offers it only for connections with its own buffers. Unbuffered connections pass the exporter
//! secret to a [`KeyLog`], and the derivation is done here. All offered cipher suites use SHA-256.

use std::fmt;
use std::sync::{Mutex, PoisonError};

use ring::{digest, hmac};
use rustls::KeyLog;
use zeroize::Zeroizing;

/// Stores the exporter secret of one session. Other secrets are not stored.
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
    /// Derives 32 bytes for this label and context. Returns `None` before rustls has passed the secret to
    /// [`KeyLog::log`], and after the first successful call, which removes the secret.
    pub(super) fn export(&self, label: &str, context: &[u8]) -> Option<Zeroizing<[u8; 32]>> {
        let secret = self.0.lock().unwrap_or_else(PoisonError::into_inner).take()?;
        let derived = expand(&secret, label, &hash(b""));
        Some(expand(&derived, "exporter", &hash(context)))
    }
}

fn hash(bytes: &[u8]) -> [u8; 32] {
    digest::digest(&digest::SHA256, bytes).as_ref().try_into().expect("SHA-256 has 32 bytes")
}

/// Computes HKDF-Expand-Label (RFC 8446, section 7.1) for an output of 32 bytes, which takes one HMAC-SHA256.
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
