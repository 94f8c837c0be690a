//! Identity of a peer: an ed25519 key pair. Its public key is the peer's name. Storing the private key is up to
//! the caller.

use std::fmt;
use std::str::FromStr;

use ring::rand::{SecureRandom, SystemRandom};
use ring::signature::{Ed25519KeyPair, KeyPair};
use zeroize::Zeroizing;

use super::word;
use crate::CommError;

/// Name of a peer: its ed25519 public key, or the SHA-256 of a certificate's key of another kind. Printed as 52
/// letters and digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PublicKey([u8; 32]);

impl PublicKey {
    /// Creates a public key from 32 bytes in the encoding of RFC 8032.
    #[must_use]
    pub const fn new(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// Reads a key; `None` if it does not have 32 bytes.
    pub(crate) fn from_slice(bytes: &[u8]) -> Option<Self> {
        bytes.try_into().ok().map(Self::new)
    }

    /// Returns the bytes of the key, in the encoding of RFC 8032.
    #[must_use]
    pub const fn bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// Returns the key in a `SubjectPublicKeyInfo` of ed25519; `None` for other data.
    pub(super) fn of_info(info: &[u8]) -> Option<Self> {
        info.strip_prefix(&INFO)?.try_into().ok().map(Self::new)
    }

    /// Returns the key's `SubjectPublicKeyInfo` (DER).
    pub(super) fn to_info(self) -> Vec<u8> {
        [&INFO[..], &self.0].concat()
    }
}

/// Bytes before the 32 bytes of an ed25519 key in its `SubjectPublicKeyInfo`.
const INFO: [u8; 12] = [0x30, 0x2a, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x03, 0x21, 0x00];

impl fmt::Display for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&word::encode(&self.0))
    }
}

impl fmt::Debug for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PublicKey({self})")
    }
}

impl FromStr for PublicKey {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bytes = word::decode(text.trim()).and_then(|bytes| bytes.try_into().ok());
        bytes.map(Self).ok_or_else(|| "a public key: 52 characters of a-z and 2-7".to_owned())
    }
}

/// An ed25519 key pair. The private key is never printed, and its memory is wiped on drop.
#[derive(Clone)]
pub struct Identity {
    seed: Zeroizing<[u8; 32]>,
    public: PublicKey,
}

impl Identity {
    /// Makes the key pair of a private key in the encoding of RFC 8032 (the seed of 32 bytes).
    #[must_use]
    pub fn from_seed(seed: [u8; 32]) -> Self {
        let pair = Ed25519KeyPair::from_seed_unchecked(&seed).expect("a seed is any 32 bytes");
        let public = pair.public_key().as_ref().try_into().expect("public keys have 32 bytes");
        Self { seed: Zeroizing::new(seed), public: PublicKey(public) }
    }

    /// Generates a key pair with the system's random number generator.
    ///
    /// # Errors
    /// [`CommError::Io`] if the system's generator fails.
    pub fn generate() -> Result<Self, CommError> {
        Ok(Self::from_seed(*random()?))
    }

    /// Returns the public key, which is the peer's name.
    #[must_use]
    pub const fn public(&self) -> PublicKey {
        self.public
    }

    /// Returns the private key. Write it only to a file that other users cannot read.
    #[must_use]
    pub const fn seed(&self) -> &Zeroizing<[u8; 32]> {
        &self.seed
    }
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Identity({})", self.public)
    }
}

/// Returns 32 bytes from the system's random number generator.
///
/// # Errors
/// [`CommError::Io`] if the system's generator fails.
pub fn random() -> Result<Zeroizing<[u8; 32]>, CommError> {
    let mut bytes = Zeroizing::new([0; 32]);
    let none = std::io::Error::other("the random number generator failed");
    SystemRandom::new()
        .fill(&mut *bytes)
        .map_err(|_| CommError::io("read random bytes from", &"the system", &none))?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(hex: &str) -> [u8; 32] {
        let digit = |at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap();
        std::array::from_fn(|i| digit(2 * i))
    }

    #[test]
    fn the_public_key_is_that_of_rfc_8032() {
        let seed = bytes("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60");
        let public = bytes("d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a");
        let identity = Identity::from_seed(seed);
        assert_eq!(identity.public().bytes(), &public);
        let name = identity.public().to_string();
        assert_eq!((name.len(), name.parse()), (52, Ok(identity.public())));
        assert!(!format!("{identity:?}").contains("9d61") && format!("{identity:?}").contains(&name));
        assert_ne!(Identity::generate().unwrap().public(), Identity::generate().unwrap().public());
    }

    #[test]
    fn what_is_no_key_says_what_one_is() {
        for wrong in ["", "abc", "mzxw6ytboi", &"a".repeat(53), &"1".repeat(52)] {
            assert!(wrong.parse::<PublicKey>().unwrap_err().contains("52 characters"));
        }
    }
}
