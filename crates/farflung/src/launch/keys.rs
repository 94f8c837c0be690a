//! Keys for the processes of a job on this machine, and a ticket for all of them, as needed to meet over QUIC.
//! The keys are in a folder that is removed at the end of the job.

use std::fs::{self, DirBuilder};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

use farflung_comm::secure::{Ticket, unix_seconds};

use crate::access::{Home, TICKET};
use crate::{Error, Result};

/// Numbers the folders of this process.
static MADE: AtomicU32 = AtomicU32::new(0);

/// Validity of the ticket in seconds; processes meet in the first minutes of a job.
const HOLDS: u64 = 24 * 3600;

/// The variable with the folder of a process's key.
const HOME: &str = "FARFLUNG_HOME";

/// The folder with the keys, and the ticket of rank 0. Dropping it removes the folder.
#[derive(Debug)]
pub(super) struct Keys {
    folder: PathBuf,
    word: String,
}

impl Keys {
    /// Makes the key of rank 0, and a ticket for the address at which it listens. The other processes make
    /// their own keys.
    ///
    /// Errors: [`Error::Io`] if the folder cannot be created; [`Error::Setting`] for an address that cannot be
    /// in a ticket.
    pub(super) fn make((host, port): (&str, u16)) -> Result<Self> {
        let number = MADE.fetch_add(1, Ordering::Relaxed);
        let folder = std::env::temp_dir().join(format!("farflung-launch-{}-{number}", std::process::id()));
        DirBuilder::new().mode(0o700).create(&folder).map_err(Error::io("make", &folder))?;
        let mut keys = Self { folder, word: String::new() };
        let home = Home::new(Some(&keys.home(0).join("key")), |_| None)?;
        let expiry = unix_seconds().saturating_add(HOLDS);
        let address = if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") };
        let ticket = Ticket {
            addresses: vec![address.clone()],
            host: home.identity()?.public(),
            secret: home.join_secret()?.until(expiry),
            expiry,
        };
        keys.word = ticket.word().map_err(|_| Error::Setting {
            field: "master",
            value: address,
            expected: "`host:port`, with a port of 1 to 65535".to_owned(),
        })?;
        Ok(keys)
    }

    fn home(&self, rank: usize) -> PathBuf {
        self.folder.join(rank.to_string())
    }

    /// Returns the variables with the key and the ticket of a process. The variables of its rank are set
    /// elsewhere.
    pub(super) fn variables(&self, rank: usize) -> [(&'static str, String); 2] {
        [(HOME, self.home(rank).display().to_string()), (TICKET, self.word.clone())]
    }
}

impl Drop for Keys {
    fn drop(&mut self) {
        // If this fails, only keys of a job that has ended remain.
        let _ = fs::remove_dir_all(&self.folder);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::AccessArgs;

    #[test]
    fn each_process_has_a_key_of_its_own_and_the_folder_ends_with_the_job() {
        let keys = Keys::make(("127.0.0.1", 29_500)).unwrap();
        let found = [0, 1, 2].map(|rank: usize| {
            let variables = keys.variables(rank);
            let env = |name: &str| match name {
                "RANK" => Some(rank.to_string()),
                "WORLD_SIZE" => Some("3".to_owned()),
                "MASTER_ADDR" => Some("127.0.0.1".to_owned()),
                "MASTER_PORT" => Some("29500".to_owned()),
                name => variables.iter().find(|known| known.0 == name).map(|known| known.1.clone()),
            };
            AccessArgs::default().detect(env).unwrap().unwrap().security.own_key().unwrap()
        });
        assert!(found[0] != found[1] && found[1] != found[2] && found[0] != found[2]);
        let folder = keys.folder.clone();
        assert!(folder.join("2").join("key").exists());
        drop(keys);
        assert!(!folder.exists());
        assert!(Keys::make(("127.0.0.1", 0)).is_err());
    }
}
