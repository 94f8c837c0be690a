//! A ticket: the data that a process needs to join a job on another machine, as one printable word. Tickets are
//! passed on by people and are parsed as untrusted bytes. Does not read the clock: the expiry is checked
//! elsewhere.

use std::fmt;
use std::str::FromStr;

use ring::digest;

use super::identity::PublicKey;
use super::secret::JoinSecret;
use super::word;

/// Maximum number of addresses in a ticket.
pub const ADDRESSES: usize = 16;

/// First characters of a ticket of this version.
const PREFIX: &str = "fft1";

/// Upper bound of a ticket's length in characters: the largest number of addresses, each of the largest length
/// (one byte of length and 255 of text), rounded up to a multiple of 8 characters after the prefix.
const WORD: usize = PREFIX.len() + (FIXED + ADDRESSES * 256 + CHECKSUM).div_ceil(5) * 8;

/// Length in bytes of the fields of fixed length: host key, secret, expiry, number of addresses.
const FIXED: usize = 32 + 32 + 8 + 1;

const CHECKSUM: usize = 4;

/// Error in a word that should be a ticket.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TicketError {
    /// The word does not begin with a ticket's prefix.
    #[error("it is not a ticket: tickets begin with `fft` and a digit, without a space")]
    Prefix,
    /// A ticket of another version.
    #[error(
        "it is a ticket of version {0}, expected version 1: use the same version of farflung on both machines"
    )]
    Version(char),
    /// The word is longer than any ticket.
    #[error("it is {got} characters long, expected at most {max}")]
    Long {
        /// Upper bound of a ticket's length, in characters.
        max: usize,
        /// Length of the word, in bytes.
        got: usize,
    },
    /// The word has a character that tickets do not have, or an incomplete end.
    #[error("it is damaged: tickets consist of a-z and 2-7; copy all of it")]
    Characters,
    /// The checksum does not match.
    #[error("it is damaged or cut short (its checksum does not match): copy all of it")]
    Checksum,
    /// A field is invalid.
    #[error("its {0} is invalid")]
    Malformed(&'static str),
}

/// A ticket. Anyone who has it can join until it expires, so it must be kept secret.
#[derive(Clone)]
pub struct Ticket {
    /// Addresses of the host as `host:port`, 1 to [`ADDRESSES`] of them.
    pub addresses: Vec<String>,
    /// The host's key. A peer with another key is not the host.
    pub host: PublicKey,
    /// Secret that proves the right to join.
    pub secret: JoinSecret,
    /// Time of expiry in seconds since 1970.
    pub expiry: u64,
}

impl fmt::Debug for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { addresses, host, expiry, .. } = self;
        f.debug_struct("Ticket")
            .field("addresses", addresses)
            .field("host", host)
            .field("expiry", expiry)
            .finish_non_exhaustive()
    }
}

impl Ticket {
    /// Encodes the ticket as one word. It contains the secret, so there is no `Display`.
    ///
    /// # Errors
    /// [`TicketError::Malformed`] if there is no address or there are too many, or if one is empty, longer than
    /// 255 bytes or not `host:port`.
    pub fn word(&self) -> Result<String, TicketError> {
        if !(1..=ADDRESSES).contains(&self.addresses.len()) {
            return Err(TicketError::Malformed("number of addresses"));
        }
        let mut bytes = self.host.bytes().to_vec();
        bytes.extend(&self.secret.bytes()[..]);
        bytes.extend(self.expiry.to_le_bytes());
        bytes.push(self.addresses.len() as u8);
        for address in &self.addresses {
            check_address(address)?;
            bytes.push(address.len() as u8);
            bytes.extend(address.as_bytes());
        }
        bytes.extend(checksum(&bytes));
        Ok(PREFIX.to_owned() + &word::encode(&bytes))
    }
}

impl FromStr for Ticket {
    type Err = TicketError;

    fn from_str(text: &str) -> Result<Self, TicketError> {
        let text = text.trim();
        if text.len() > WORD {
            return Err(TicketError::Long { max: WORD, got: text.len() });
        }
        let Some(rest) = text.strip_prefix(PREFIX) else {
            let version = text.strip_prefix("fft").and_then(|rest| rest.chars().next());
            return Err(version
                .filter(char::is_ascii_digit)
                .map_or(TicketError::Prefix, TicketError::Version));
        };
        let bytes = word::decode(rest).ok_or(TicketError::Characters)?;
        let (body, sum) = bytes.split_last_chunk::<CHECKSUM>().ok_or(TicketError::Checksum)?;
        if checksum(body) != *sum {
            return Err(TicketError::Checksum);
        }
        let short = TicketError::Malformed("length");
        let (host, rest) = body.split_first_chunk::<32>().ok_or(short.clone())?;
        let (secret, rest) = rest.split_first_chunk::<32>().ok_or(short.clone())?;
        let (expiry, rest) = rest.split_first_chunk::<8>().ok_or(short.clone())?;
        let (&count, mut rest) = rest.split_first().ok_or(short.clone())?;
        if !(1..=ADDRESSES).contains(&usize::from(count)) {
            return Err(TicketError::Malformed("number of addresses"));
        }
        let mut addresses = Vec::new();
        for _ in 0..count {
            let (&length, more) = rest.split_first().ok_or(short.clone())?;
            let (address, more) = more.split_at_checked(length.into()).ok_or(short.clone())?;
            let address = std::str::from_utf8(address).map_err(|_| TicketError::Malformed("address"))?;
            check_address(address)?;
            addresses.push(address.to_owned());
            rest = more;
        }
        if !rest.is_empty() {
            return Err(short);
        }
        Ok(Self {
            addresses,
            host: PublicKey::new(*host),
            secret: JoinSecret::new(*secret),
            expiry: u64::from_le_bytes(*expiry),
        })
    }
}

/// Computes a checksum that detects accidental damage. It is no protection against forgery.
fn checksum(bytes: &[u8]) -> [u8; CHECKSUM] {
    let mut context = digest::Context::new(&digest::SHA256);
    context.update(b"farflung ticket 1");
    context.update(bytes);
    let sum = context.finish();
    std::array::from_fn(|i| sum.as_ref()[i])
}

fn check_address(address: &str) -> Result<(), TicketError> {
    let port = |port: &str| port.parse::<u16>().is_ok_and(|port| port > 0);
    let is_address = address.len() <= 255
        && address.bytes().all(|b| b.is_ascii_graphic())
        && address.rsplit_once(':').is_some_and(|(host, number)| !host.is_empty() && port(number));
    is_address.then_some(()).ok_or(TicketError::Malformed("address"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ticket() -> Ticket {
        Ticket {
            addresses: vec![
                "10.0.0.1:29500".to_owned(),
                "[fe80::1]:29500".to_owned(),
                "home.example:1".to_owned(),
            ],
            host: PublicKey::new(std::array::from_fn(|i| i as u8)),
            secret: JoinSecret::new([0xA5; 32]),
            expiry: 1_800_000_000,
        }
    }

    fn with(bytes: &[u8]) -> Result<Ticket, TicketError> {
        let whole = [bytes, &checksum(bytes)].concat();
        (PREFIX.to_owned() + &word::encode(&whole)).parse()
    }

    fn body() -> Vec<u8> {
        let word = ticket().word().unwrap();
        let mut bytes = word::decode(&word[PREFIX.len()..]).unwrap();
        bytes.truncate(bytes.len() - CHECKSUM);
        bytes
    }

    #[test]
    fn a_ticket_is_one_word_and_comes_back() {
        let word = ticket().word().unwrap();
        assert!(
            word.starts_with("fft1aaaqeayeaudaocajbifqydiob4")
                && word.chars().all(|c| c.is_ascii_alphanumeric())
        );
        let back: Ticket = format!(" {word}\n").parse().unwrap();
        assert_eq!(
            (&back.addresses, back.host, back.expiry),
            (&ticket().addresses, ticket().host, 1_800_000_000)
        );
        assert_eq!(back.secret.bytes(), ticket().secret.bytes());
        assert!(
            !format!("{back:?}").contains("JoinSecret") && format!("{back:?}").contains("10.0.0.1:29500")
        );
    }

    #[test]
    fn every_cut_and_every_flip_is_noticed() {
        let word = ticket().word().unwrap();
        for end in 0..word.len() {
            assert!(word[..end].parse::<Ticket>().is_err(), "cut at {end}");
        }
        for at in 0..word.len() {
            for other in ['a', '7', '1', 'é', ' '] {
                if word[at..].starts_with(other) {
                    continue;
                }
                let flipped = format!("{}{other}{}", &word[..at], &word[at + 1..]);
                assert!(flipped.parse::<Ticket>().is_err(), "{other} at {at}");
            }
        }
    }

    #[test]
    fn lengths_that_lie_and_versions_to_come_are_errors() {
        let good = body();
        assert!(with(&good).is_ok());
        for at in 0..good.len() {
            for value in [0, 1, 16, 17, 0x7F, 0xFF] {
                let mut bytes = good.clone();
                bytes[at] = value;
                // The key, the secret and the expiry may be any bytes; addresses and lengths must be valid.
                // Nothing panics.
                if let Ok(read) = with(&bytes) {
                    assert_eq!(with(&bytes[..bytes.len() - 1]).err(), Some(TicketError::Malformed("length")));
                    assert!(read.word().is_ok());
                }
            }
            assert!(with(&good[..at]).is_err());
        }
        assert_eq!(with(&[&good[..], &[0]].concat()).err(), Some(TicketError::Malformed("length")));
        let error = |text: &str| text.parse::<Ticket>().unwrap_err();
        assert_eq!(error("fft2abc"), TicketError::Version('2'));
        assert_eq!(error(""), TicketError::Prefix);
        assert_eq!(error("fft1"), TicketError::Checksum);
        assert!(matches!(error(&("fft1".to_owned() + &"a".repeat(1 << 20))), TicketError::Long { .. }));
    }

    #[test]
    fn random_words_never_panic() {
        let rng = farflung_base::Philox::new(19, 1);
        for i in 0..20_000 {
            let length = rng.word(64 * i) % 200;
            let bytes: Vec<u8> =
                (0..length).map(|j| rng.word(64 * i + 1 + u64::from(j) % 60) as u8).collect();
            let _ = with(&bytes);
        }
    }

    #[test]
    fn addresses_are_checked_before_they_are_printed() {
        for wrong in ["", "host", ":1", "host:0", "host:70000", "a b:1", &format!("{}:1", "h".repeat(255))] {
            let ticket = Ticket { addresses: vec![wrong.to_owned()], ..ticket() };
            assert_eq!(ticket.word(), Err(TicketError::Malformed("address")), "{wrong}");
        }
        let none = Ticket { addresses: Vec::new(), ..ticket() };
        assert_eq!(none.word(), Err(TicketError::Malformed("number of addresses")));
    }
}
