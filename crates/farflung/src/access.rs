//! How this process proves that it belongs to a job: a ticket, a join secret or a site's certificates, its own
//! key, and an allow list, from flags, files and variables. It does not depend on sockets. Secrets are never
//! arguments of a command line, where other users could see them.

#![expect(clippy::doc_markdown, reason = "doc comments are the help that the terminal shows")]

mod files;
mod home;
mod site;

use std::collections::BTreeSet;
use std::io::Read;
use std::path::{Path, PathBuf};

use farflung_base::text_encoding::utf8;
use farflung_comm::secure::{JoinSecret, PublicKey, Security, Ticket};

pub use home::{Home, KeyClaim};
pub use site::{SiteArgs, SiteMemberArgs};

use crate::{Error, LaunchEnv, Result};

/// The variable that holds a ticket.
pub const TICKET: &str = "FARFLUNG_TICKET";
/// The variable that holds the path of a ticket file.
pub const TICKET_FILE: &str = "FARFLUNG_TICKET_FILE";
/// Name of the file in a run's folder with the ticket of `farflung host` and `farflung join`.
pub const RUN_TICKET: &str = "run.ticket";
/// Name of the file in a run's folder with the addresses of this member, one per line, if members show
/// certificates and there is no ticket.
pub const RUN_ADDRESSES: &str = "run.addresses";
/// The variable that holds the join secret.
pub const SECRET: &str = "FARFLUNG_SECRET";
/// The variable that holds the path of a file with the join secret.
pub const SECRET_FILE: &str = "FARFLUNG_SECRET_FILE";

/// Size limit of a ticket or secret, in bytes.
const LONGEST: u64 = 64 * 1024;

/// How this process proves its identity to others, and which processes it accepts.
#[derive(Debug, Clone, Default, PartialEq, Eq, clap::Args)]
pub struct AccessArgs {
    /// File with the ticket that `farflung ticket` made on rank 0's machine; - reads standard input. A ticket
    /// can also be given by FARFLUNG_TICKET (the ticket itself) or FARFLUNG_TICKET_FILE.
    #[arg(long, value_name = "FILE", help_heading = ACCESS, global = true)]
    pub ticket_file: Option<PathBuf>,
    /// File with a secret of at least 16 bytes that all ranks share, used in place of a ticket. A secret can
    /// also be given by FARFLUNG_SECRET (the secret itself) or FARFLUNG_SECRET_FILE.
    #[arg(long, value_name = "FILE", help_heading = ACCESS, global = true, conflicts_with = "ticket_file")]
    pub secret_file: Option<PathBuf>,
    /// File with this machine's key, created on first use. Default: `key` in FARFLUNG_HOME or
    /// ~/.config/farflung.
    #[arg(long, value_name = "FILE", help_heading = ACCESS, global = true)]
    pub key_file: Option<PathBuf>,
    /// File with the public keys that may join, one per line; `farflung ticket --key` prints a machine's key.
    /// Comments begin with #. Default: any key, with the ticket or secret.
    #[arg(long, value_name = "FILE", help_heading = ACCESS, global = true)]
    pub allow: Option<PathBuf>,
    /// Connect without encryption and accept any process that reaches the port. Only for networks that are not
    /// shared with others.
    #[arg(long, help_heading = ACCESS, global = true,
          conflicts_with_all = ["ticket_file", "secret_file", "allow", "tls_ca"])]
    pub insecure: bool,
    /// The site's certificates.
    #[command(flatten)]
    pub site: SiteArgs,
}

const ACCESS: &str = "Who may join";
const NO_TICKET: &str =
    "a secret or nothing together with certificates: a ticket identifies its host by a key";

/// Returns the error of a flag whose file is wrong or missing.
fn wrong(field: &'static str, path: Option<&PathBuf>, expected: &str) -> Error {
    let value = path.map_or_else(|| "missing".to_owned(), |path| path.display().to_string());
    Error::Setting { field, value, expected: expected.to_owned() }
}

/// Proof that a process belongs to a job.
enum Proof {
    Ticket(Box<Ticket>),
    Secret(JoinSecret),
}

impl AccessArgs {
    /// Finds this process's place in its job, as [`launch_env::detect`](crate::launch_env::detect) does, and
    /// how its connections are protected. Without a variable for it, the address of rank 0 is taken from the
    /// ticket.
    ///
    /// Errors: those of `detect`; [`Error::Unprotected`] if ranks meet outside the loopback without a ticket, a
    /// secret, certificates or `--insecure`; errors of the files, with advice.
    pub fn detect(&self, env: impl Fn(&str) -> Option<String>) -> Result<Option<LaunchEnv>> {
        self.place(env).map_err(Error::of_input)
    }

    fn place(&self, env: impl Fn(&str) -> Option<String>) -> Result<Option<LaunchEnv>> {
        let proof = self.proof(&env)?;
        let addresses = match &proof {
            Some(Proof::Ticket(ticket)) => ticket.addresses.clone(),
            _ => Vec::new(),
        };
        let given = env("MASTER_ADDR").is_some_and(|address| !address.trim().is_empty());
        let first = addresses.first().filter(|_| !given).and_then(|first| first.rsplit_once(':'));
        let of_ticket = |name: &str| match (name, first) {
            ("MASTER_ADDR", Some((host, _))) => Some(of_address(host).to_owned()),
            ("MASTER_PORT", Some((_, port))) => Some(port.to_owned()),
            _ => None,
        };
        let found = crate::launch_env::detect(|name| of_ticket(name).or_else(|| env(name)))?;
        let Some(mut found) = found else {
            // A flag that says how to join is a mistake in a run of one process.
            let given = [(&self.ticket_file, "--ticket-file"), (&self.secret_file, "--secret-file")];
            return match given.iter().find(|(path, _)| path.is_some()) {
                Some(&(_, present)) => Err(Error::HalfSet { present, missing: "RANK" }),
                None => Ok(None),
            };
        };
        if found.world_size > 1 {
            let at = format!("{}:{}", found.master_addr, found.master_port);
            let places = vec![at.clone()];
            found.security = self.security(proof, &env, found.rank.0 == 0, found.is_local(), &at, places)?;
            if first.is_some() {
                found.more_addresses = addresses[1..].to_vec();
            }
        }
        Ok(Some(found))
    }

    /// Returns the protection for ranks that meet by a list of their addresses, where all have the same secret.
    ///
    /// Errors: as [`AccessArgs::detect`].
    pub fn among_peers(&self, peers: &[String], env: impl Fn(&str) -> Option<String>) -> Result<Security> {
        let local = |peer: &String| {
            let host = peer.rsplit_once(':').map_or(peer.as_str(), |(host, _)| host).trim_matches(['[', ']']);
            crate::launch_env::is_loopback(host)
        };
        let remote = peers.iter().find(|peer| !local(peer));
        let at = remote.or(peers.first()).cloned().unwrap_or_default();
        self.security(self.proof(&env)?, &env, false, remote.is_none(), &at, peers.to_vec())
    }

    fn security(
        &self,
        proof: Option<Proof>,
        env: &impl Fn(&str) -> Option<String>,
        is_host: bool,
        is_local: bool,
        at: &str,
        places: Vec<String>,
    ) -> Result<Security> {
        if let Some(own) = self.site.certificates()? {
            let secret = match proof {
                Some(Proof::Ticket(_)) => return Err(wrong("tls_ca", self.site.tls_ca.as_ref(), NO_TICKET)),
                Some(Proof::Secret(secret)) => Some(secret),
                None => None,
            };
            return self.restricted(Security::by_certificates(&own, secret.as_ref(), places));
        }
        let Some(proof) = proof else {
            return match (self.insecure, is_local) {
                (true, _) => Ok(Security::unencrypted().trusting_network()),
                (false, true) => Ok(Security::unencrypted()),
                (false, false) => Err(Error::Unprotected { at: at.to_owned() }),
            };
        };
        let home = Home::new(self.key_file.as_deref(), env)?;
        let identity = home.identity()?;
        let security = match proof {
            Proof::Secret(secret) => Security::by_secret(&identity, &secret),
            Proof::Ticket(ticket) if is_host => {
                Security::by_secret(&identity, &home.secret_behind(&ticket, identity.public())?)
            }
            Proof::Ticket(ticket) => Security::by_ticket(&identity, &ticket),
        };
        self.restricted(security)
    }

    /// Adds the allow list, if there is one.
    fn restricted(&self, security: Security) -> Result<Security> {
        match &self.allow {
            Some(path) => Ok(security.allowing(allowed(path)?)),
            None => Ok(security),
        }
    }

    /// Returns the ticket or secret: from a flag, else from a variable.
    fn proof(&self, env: &impl Fn(&str) -> Option<String>) -> Result<Option<Proof>> {
        if self.insecure {
            return Ok(None);
        }
        if let Some(path) = &self.ticket_file {
            return read_ticket(path).map(Some);
        }
        if let Some(path) = &self.secret_file {
            return read_secret(path).map(|secret| Some(Proof::Secret(secret)));
        }
        if let Some(word) = env(TICKET).filter(|word| !word.is_empty()) {
            return ticket(&word, TICKET).map(Some);
        }
        if let Some(path) = env(TICKET_FILE).filter(|path| !path.is_empty()) {
            return read_ticket(Path::new(&path)).map(Some);
        }
        Ok(secret_of(None, env)?.map(Proof::Secret))
    }
}

/// Returns the secret of a file, else that of the variables, if there is one.
fn secret_of(path: Option<&Path>, env: &impl Fn(&str) -> Option<String>) -> Result<Option<JoinSecret>> {
    if let Some(path) = path {
        return read_secret(path).map(Some);
    }
    if let Some(text) = env(SECRET).filter(|text| !text.is_empty()) {
        return Ok(Some(JoinSecret::from_text(text.as_bytes())?));
    }
    match env(SECRET_FILE).filter(|path| !path.is_empty()) {
        Some(path) => read_secret(Path::new(&path)).map(Some),
        None => Ok(None),
    }
}

/// Returns a host without the brackets of IPv6; the URL of a relay is returned as it is.
fn of_address(host: &str) -> &str {
    if host.contains("://") { host } else { host.trim_matches(['[', ']']) }
}

/// Reads the ticket of a file; `-` is standard input.
///
/// Errors: [`Error::Io`]; [`Error::Exposed`] if others can read the file; [`Error::Ticket`].
pub fn ticket_of(path: &Path) -> Result<Ticket> {
    let (bytes, from) = match path.to_str() {
        Some("-") => {
            let mut bytes = Vec::new();
            let read = std::io::stdin().take(LONGEST).read_to_end(&mut bytes);
            read.map_err(Error::io("read a ticket from", Path::new("standard input")))?;
            (bytes, "standard input".to_owned())
        }
        _ => (files::read_shared(path, LONGEST)?, path.display().to_string()),
    };
    parse_ticket(&String::from_utf8_lossy(&utf8(&bytes)), &from)
}

/// Returns the ticket that a process joins with: from the file, else from the variables.
///
/// Errors: as [`ticket_of`]; [`Error::Setting`] if there is none.
pub fn ticket_for(path: Option<&Path>, env: impl Fn(&str) -> Option<String>) -> Result<Ticket> {
    if let Some(path) = path {
        return ticket_of(path);
    }
    if let Some(word) = env(TICKET).filter(|word| !word.is_empty()) {
        return parse_ticket(&word, TICKET);
    }
    match env(TICKET_FILE).filter(|path| !path.is_empty()) {
        Some(path) => ticket_of(Path::new(&path)),
        None => Err(Error::Setting {
            field: "ticket_file",
            value: "missing".to_owned(),
            expected: format!("the file that `farflung host` wrote, - for standard input, or {TICKET}"),
        }),
    }
}

/// Writes the addresses of a member to its folder, for others of this machine that join with certificates.
///
/// Errors: [`Error::Io`].
pub fn write_addresses(folder: &Path, addresses: &[String]) -> Result<()> {
    std::fs::create_dir_all(folder).map_err(Error::io("create", folder))?;
    files::replace(&folder.join(RUN_ADDRESSES), (addresses.join("\n") + "\n").as_bytes())
}

/// Writes a ticket to a file that only this user can read.
///
/// Errors: [`Error::Io`].
pub fn write_private(path: &Path, word: &str) -> Result<()> {
    files::replace(path, format!("{word}\n").as_bytes())
}

fn parse_ticket(word: &str, from: &str) -> Result<Ticket> {
    word.parse().map_err(|source| Error::Ticket { from: from.to_owned(), source })
}

fn ticket(word: &str, from: &str) -> Result<Proof> {
    parse_ticket(word, from).map(|ticket| Proof::Ticket(Box::new(ticket)))
}

fn read_ticket(path: &Path) -> Result<Proof> {
    ticket_of(path).map(|ticket| Proof::Ticket(Box::new(ticket)))
}

fn read_secret(path: &Path) -> Result<JoinSecret> {
    let text = files::read_shared(path, LONGEST)?;
    Ok(JoinSecret::from_text(&text)?)
}

/// Reads the public keys of an allow list.
///
/// Errors: [`Error::Io`]; [`Error::ConfigValue`] with the line.
pub fn allowed(path: &Path) -> Result<BTreeSet<PublicKey>> {
    let bytes = std::fs::read(path).map_err(Error::io("read", path))?;
    let bytes = utf8(&bytes);
    let text = String::from_utf8_lossy(&bytes);
    let mut keys = BTreeSet::new();
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.split('#').next().unwrap_or_default().trim();
        if line.is_empty() {
            continue;
        }
        let key = line.parse().map_err(|expected| Error::ConfigValue {
            path: path.to_owned(),
            line: number,
            key: "allow".to_owned(),
            value: format!("`{line}`"),
            expected,
        })?;
        keys.insert(key);
    }
    Ok(keys)
}

#[cfg(test)]
mod tests;
