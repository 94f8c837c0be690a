//! The join secret of a job, and proofs that a process has it: a MAC over the exporter value of the TLS
//! session. A proof is valid in one session only and does not reveal the secret. TLS sessions are in
//! `session.rs`.

use std::fmt;

use ring::hmac;
use zeroize::Zeroizing;

use super::identity::random;
use crate::CommError;

/// Minimum length in bytes of a secret that a user chooses.
pub const SECRET_BYTES: usize = 16;

/// Secret by which a process proves that it may join a job or connect to its members: the job's own secret, a
/// ticket's, or the one that members share. `Debug` does not print it, and its memory is wiped on drop.
#[derive(Clone)]
pub struct JoinSecret(Zeroizing<[u8; 32]>);

impl JoinSecret {
    /// Derives the secret from a text or the content of a file, of at least [`SECRET_BYTES`] bytes. Line ends
    /// at the end are ignored.
    ///
    /// # Errors
    /// [`CommError::Argument`] if the text is shorter.
    pub fn from_text(text: &[u8]) -> Result<Self, CommError> {
        let end = text.iter().rposition(|b| !matches!(b, b'\r' | b'\n')).map_or(0, |at| at + 1);
        if end < SECRET_BYTES {
            let what = "length of the join secret in bytes (minimum)";
            return Err(CommError::Argument { op: "join", what, got: end, want: SECRET_BYTES });
        }
        Ok(Self::derived(b"farflung/secret/1", &[&text[..end]]))
    }

    /// Generates a secret with the system's random number generator.
    ///
    /// # Errors
    /// [`CommError::Io`] if the system's generator fails.
    pub fn generate() -> Result<Self, CommError> {
        random().map(Self)
    }

    /// Creates the secret from the bytes that [`JoinSecret::bytes`] returned.
    #[must_use]
    pub fn new(bytes: [u8; 32]) -> Self {
        Self(Zeroizing::new(bytes))
    }

    /// Returns the bytes of the secret, to be written to a file that only its owner can read, or into a ticket.
    #[must_use]
    pub const fn bytes(&self) -> &Zeroizing<[u8; 32]> {
        &self.0
    }

    /// Derives the secret of a ticket that is valid until `expiry` (seconds since 1970). The holder of a ticket
    /// cannot change the expiry: another expiry has another secret, and the job's secret cannot be computed
    /// from the ticket's.
    #[must_use]
    pub fn until(&self, expiry: u64) -> Self {
        Self::derived(&self.0[..], &[b"farflung/ticket/1", &expiry.to_le_bytes()])
    }

    /// Computes the proof that the side with `role` has the secret, for the session with this exporter value.
    pub(super) fn proof(&self, role: &[u8], expiry: u64, exporter: &[u8; 32]) -> [u8; 32] {
        *Self::derived(&self.0[..], &[b"farflung/join/1", role, &expiry.to_le_bytes(), exporter]).0
    }

    /// Returns whether `mac` equals the [proof](Self::proof) for the same arguments. Compares in constant time.
    pub(super) fn is_proof(&self, role: &[u8], expiry: u64, exporter: &[u8; 32], mac: &[u8]) -> bool {
        let key = hmac::Key::new(hmac::HMAC_SHA256, &self.0[..]);
        let said = [b"farflung/join/1", role, &expiry.to_le_bytes(), exporter].concat();
        hmac::verify(&key, &said, mac).is_ok()
    }

    /// Computes HMAC-SHA256 of the concatenated parts. For one key and label, all parts but the last have a
    /// fixed length, so different parts never give the same bytes.
    fn derived(key: &[u8], parts: &[&[u8]]) -> Self {
        let mut context = hmac::Context::with_key(&hmac::Key::new(hmac::HMAC_SHA256, key));
        for part in parts {
            context.update(part);
        }
        Self::new(context.sign().as_ref().try_into().expect("SHA-256 has 32 bytes"))
    }
}

impl fmt::Debug for JoinSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JoinSecret")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proof_holds_for_one_role_expiry_and_session() {
        let secret = JoinSecret::new([7; 32]);
        let proof = secret.proof(b"client", 5, &[1; 32]);
        assert!(secret.is_proof(b"client", 5, &[1; 32], &proof));
        assert!(!secret.is_proof(b"server", 5, &[1; 32], &proof));
        assert!(!secret.is_proof(b"client", 6, &[1; 32], &proof));
        assert!(!secret.is_proof(b"client", 5, &[2; 32], &proof));
        assert!(!secret.is_proof(b"client", 5, &[1; 32], &proof[..31]));
        assert!(!secret.until(5).is_proof(b"client", 5, &[1; 32], &proof));
        assert_ne!(secret.until(5).bytes(), secret.until(6).bytes());
        assert_eq!(format!("{secret:?}"), "JoinSecret");
    }

    #[test]
    fn derivation_is_hmac_sha_256() {
        // RFC 4231, test case 2.
        let mac = JoinSecret::derived(b"Jefe", &[b"what do ya want ", b"for nothing?"]);
        assert_eq!(mac.bytes()[..8], [0x5b, 0xdc, 0xc1, 0x46, 0xbf, 0x60, 0x75, 0x4e]);
        assert_eq!(mac.bytes()[24..], [0x9d, 0xec, 0x58, 0xb9, 0x64, 0xec, 0x38, 0x43]);
    }

    #[test]
    fn a_secret_of_ones_own_has_sixteen_bytes_and_no_line_end() {
        let one = JoinSecret::from_text(b"correct horse battery\r\n").unwrap();
        assert_eq!(one.bytes(), JoinSecret::from_text(b"correct horse battery").unwrap().bytes());
        let short = JoinSecret::from_text(b"hunter2\n").unwrap_err().to_string();
        assert_eq!(short, "join: length of the join secret in bytes (minimum) is 7, expected 16");
    }
}
