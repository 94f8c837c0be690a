//! Locations of the machine's key and, on a host, of the secret from which its tickets are made.

use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};

use farflung_comm::secure::{Identity, JoinSecret, PublicKey, Ticket};

use super::files;
use crate::{Error, Result};

/// The variable with the folder of the key file.
const HOME: &str = "FARFLUNG_HOME";

/// Paths of the key file and of `join-secret` beside it.
#[derive(Debug, Clone)]
pub struct Home {
    key: PathBuf,
    secret: PathBuf,
}

/// A key that belongs to this process alone, until this is dropped.
#[derive(Debug)]
#[must_use = "dropping it lets others have the key"]
pub struct KeyClaim {
    _lock: File,
}

impl Home {
    /// Finds the key file: `key` if given, else `key` in `FARFLUNG_HOME`, `XDG_CONFIG_HOME/farflung` or
    /// `HOME/.config/farflung`.
    ///
    /// Errors: [`Error::Setting`] if no path is given and none of the variables is set.
    pub fn new(key: Option<&Path>, env: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let set = |name| env(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let config = || set("XDG_CONFIG_HOME").or_else(|| set("HOME").map(|home| home.join(".config")));
        let folder = || set(HOME).or_else(|| config().map(|config| config.join("farflung")));
        let key = key.map(Path::to_owned).or_else(|| folder().map(|folder| folder.join("key")));
        let key = key.ok_or_else(|| Error::Setting {
            field: "key_file",
            value: "unknown".to_owned(),
            expected: "a file, because FARFLUNG_HOME, XDG_CONFIG_HOME and HOME are not set".to_owned(),
        })?;
        let secret = key.with_file_name("join-secret");
        Ok(Self { key, secret })
    }

    /// Returns the machine's key, which is made on first use.
    ///
    /// Errors: those of the file, with advice.
    pub fn identity(&self) -> Result<Identity> {
        made_once(&self.key, "key", || Ok(**Identity::generate()?.seed())).map(Identity::from_seed)
    }

    /// Claims the key for this process until the result is dropped. Over QUIC, peers and relays find a process
    /// by its key: of two with one key, each would get messages of the other.
    ///
    /// Errors: [`Error::Setting`] if another process of this machine has claimed the key; [`Error::Io`]. On a
    /// file system without locks, the key counts as claimed.
    pub fn claim(&self) -> Result<KeyClaim> {
        // A file of its own, opened for writing, since locks of network file systems need that.
        let lock = self.key.with_extension("lock");
        let opened = File::options().create(true).truncate(false).write(true).open(&lock);
        let file = opened.map_err(Error::io("open the lock of the key", &lock))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(Error::Setting {
                    field: "key_file",
                    value: format!("{}, which another member on this machine uses", self.key.display()),
                    expected: "another file, such as `--key-file key2`, which is created on first use: over \
                               QUIC, each member needs its own key"
                        .to_owned(),
                });
            }
            Err(TryLockError::Error(error)) => {
                tracing::debug!(%error, path = %self.key.display(), "the key's file cannot be locked");
            }
        }
        Ok(KeyClaim { _lock: file })
    }

    /// Returns the secret from which this host's tickets are made. The secret is created on first use.
    ///
    /// Errors: those of the file, with advice.
    pub fn join_secret(&self) -> Result<JoinSecret> {
        made_once(&self.secret, "join secret", || Ok(**JoinSecret::generate()?.bytes())).map(JoinSecret::new)
    }

    /// Makes a new secret: jobs that start from now on reject all earlier tickets.
    ///
    /// Errors: [`Error::Io`].
    pub fn rotate(&self) -> Result<()> {
        files::replace(&self.secret, &JoinSecret::generate()?.bytes()[..])
    }

    /// Returns the secret from which a ticket of this host was made; `own` is this host's public key.
    ///
    /// Errors: [`Error::Setting`] if the ticket is another host's, or was made before the secret was rotated.
    pub(super) fn secret_behind(&self, ticket: &Ticket, own: PublicKey) -> Result<JoinSecret> {
        let wrong = |value, expected: &str| {
            Err(Error::Setting { field: "ticket_file", value, expected: expected.to_owned() })
        };
        if ticket.host != own {
            let value = format!("a ticket of {}, and this machine's key is {own}", ticket.host);
            return wrong(
                value,
                "a ticket that `farflung ticket` made with this machine's key, because this process is rank \
                 0",
            );
        }
        let secret = self.join_secret()?;
        if secret.until(ticket.expiry).bytes() != ticket.secret.bytes() {
            return wrong(
                "older than the last --rotate".to_owned(),
                "a new ticket, made by `farflung ticket`",
            );
        }
        Ok(secret)
    }
}

/// Returns the 32 bytes of a file, which is created if it does not exist. Processes that do so at the same time
/// all get the same bytes. `what` names them in the log.
fn made_once(path: &Path, what: &str, make: impl Fn() -> Result<[u8; 32]>) -> Result<[u8; 32]> {
    loop {
        if let Some(bytes) = files::read_own(path, 32)? {
            return Ok(bytes.try_into().expect("its length was checked"));
        }
        if files::create(path, &make()?)? {
            tracing::info!(path = %path.display(), "created a new {what}");
        }
    }
}
