//! Where this user keeps the machine's key and, on a host, the secret from which its tickets are made.

use std::path::{Path, PathBuf};

use farflung_comm::secure::{Identity, JoinSecret, PublicKey, Ticket};

use super::files;
use crate::{Error, Result};

/// The variable with the folder.
const HOME: &str = "FARFLUNG_HOME";

/// The key file, and beside it `join-secret`.
#[derive(Debug, Clone)]
pub struct Home {
    key: PathBuf,
    secret: PathBuf,
}

impl Home {
    /// The key at `key`, else `key` in `FARFLUNG_HOME`, `XDG_CONFIG_HOME/farflung` or `HOME/.config/farflung`.
    ///
    /// Errors: [`Error::Setting`] if none of them is set.
    pub fn new(key: Option<&Path>, env: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let set = |name| env(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let config = || set("XDG_CONFIG_HOME").or_else(|| set("HOME").map(|home| home.join(".config")));
        let folder = || set(HOME).or_else(|| config().map(|config| config.join("farflung")));
        let key = key.map(Path::to_owned).or_else(|| folder().map(|folder| folder.join("key")));
        let key = key.ok_or_else(|| Error::Setting {
            field: "key_file",
            value: "unknown".to_owned(),
            expected: "a file: FARFLUNG_HOME and HOME are not set".to_owned(),
        })?;
        let secret = key.with_file_name("join-secret");
        Ok(Self { key, secret })
    }

    /// The machine's key, which is made on first use.
    ///
    /// Errors: what is wrong with the file, and what to do about it.
    pub fn identity(&self) -> Result<Identity> {
        made_once(&self.key, || Ok(**Identity::generate()?.seed())).map(Identity::from_seed)
    }

    /// The secret behind this host's tickets, which is made on first use.
    ///
    /// Errors: what is wrong with the file, and what to do about it.
    pub fn join_secret(&self) -> Result<JoinSecret> {
        made_once(&self.secret, || Ok(**JoinSecret::generate()?.bytes())).map(JoinSecret::new)
    }

    /// Makes a new secret: all tickets from before are worth nothing from the next start of a job on.
    ///
    /// Errors: [`Error::Io`].
    pub fn rotate(&self) -> Result<()> {
        files::replace(&self.secret, &JoinSecret::generate()?.bytes()[..])
    }

    /// The secret behind a ticket of this host, whose key is `own`.
    ///
    /// Errors: [`Error::Setting`] if the ticket is another host's, or from before the secret was rotated.
    pub(super) fn secret_behind(&self, ticket: &Ticket, own: PublicKey) -> Result<JoinSecret> {
        let wrong = |value, expected: &str| {
            Err(Error::Setting { field: "ticket_file", value, expected: expected.to_owned() })
        };
        if ticket.host != own {
            let value = format!("a ticket of {}, and this machine's key is {own}", ticket.host);
            return wrong(
                value,
                "one that `farflung ticket` made with the key of rank 0, which this process is",
            );
        }
        let secret = self.join_secret()?;
        if secret.until(ticket.expiry).bytes() != ticket.secret.bytes() {
            return wrong("from before --rotate".to_owned(), "a new one, by `farflung ticket`");
        }
        Ok(secret)
    }
}

/// The 32 bytes of a file, which is made where there is none. Processes that come at the same time end with the
/// same.
fn made_once(path: &Path, make: impl Fn() -> Result<[u8; 32]>) -> Result<[u8; 32]> {
    loop {
        if let Some(bytes) = files::read_own(path, 32)? {
            return Ok(bytes.try_into().expect("its length was checked"));
        }
        if files::create(path, &make()?)? {
            tracing::info!(path = %path.display(), "made a new key");
        }
    }
}
