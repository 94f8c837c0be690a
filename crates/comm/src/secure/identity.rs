//! Who a peer is: an ed25519 key pair, named by its public half. Where the private half is kept is for others
//! to know.

use std::fmt;
use std::str::FromStr;

use ring::rand::{SecureRandom, SystemRandom};
use ring::signature::{Ed25519KeyPair, KeyPair};
use zeroize::Zeroizing;

use super::word;
use crate::CommError;

/// A peer's name: its ed25519 public key, printed as a word of 52 letters and digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PublicKey([u8; 32]);

impl PublicKey {
    /// The key of these bytes.
    #[must_use]
    pub const fn new(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// Its bytes, as RFC 8032 has them.
    #[must_use]
    pub const fn bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

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

/// A key pair. Its private half is shown nowhere and wiped when this is dropped.
#[derive(Clone)]
pub struct Identity {
    seed: Zeroizing<[u8; 32]>,
    public: PublicKey,
}

impl Identity {
    /// The pair of a private key, as RFC 8032 has it (the seed of 32 bytes).
    #[must_use]
    pub fn from_seed(seed: [u8; 32]) -> Self {
        let pair = Ed25519KeyPair::from_seed_unchecked(&seed).expect("a seed has 32 bytes, and any will do");
        let public = pair.public_key().as_ref().try_into().expect("public keys have 32 bytes");
        Self { seed: Zeroizing::new(seed), public: PublicKey(public) }
    }

    /// A new one, of the system's randomness.
    ///
    /// # Errors
    /// [`CommError::Io`] if the system has none.
    pub fn generate() -> Result<Self, CommError> {
        Ok(Self::from_seed(*random()?))
    }

    /// The peer's name.
    #[must_use]
    pub const fn public(&self) -> PublicKey {
        self.public
    }

    /// The private key, to be written to a file that only its owner reads.
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

/// 32 bytes from the system's random number generator.
pub(super) fn random() -> Result<Zeroizing<[u8; 32]>, CommError> {
    let mut bytes = Zeroizing::new([0; 32]);
    let none = std::io::Error::other("the system gives no random bytes");
    SystemRandom::new()
        .fill(&mut *bytes)
        .map_err(|_| CommError::io("randomness of", &"the system", &none))?;
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
