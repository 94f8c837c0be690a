//! Certificates of a site in place of keys: which files a process shows and checks.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use farflung_comm::secure::{Certificates, Security};

use super::{ACCESS, LONGEST, SECRET, SECRET_FILE, files, secret_of, wrong};
use crate::{Error, Result};

const ALL_THREE: &str = "a file: --tls-ca, --tls-cert and --tls-key must be given together";

/// The files with a site's certificates.
#[derive(Debug, Clone, Default, PartialEq, Eq, clap::Args)]
pub struct SiteArgs {
    /// PEM file with the certificates of a site's certificate authority: processes show certificates signed by
    /// it instead of keys. Needs --tls-cert and --tls-key. May be combined with a secret, not with a ticket.
    #[arg(long, value_name = "FILE", help_heading = ACCESS, global = true)]
    pub tls_ca: Option<PathBuf>,
    /// PEM file with this process's certificate and any intermediate certificates. If others connect to this
    /// process, the certificate must contain the name or address that they use.
    #[arg(long, value_name = "FILE", help_heading = ACCESS, global = true)]
    pub tls_cert: Option<PathBuf>,
    /// PEM file with the certificate's private key; other users must not be able to read it.
    #[arg(long, value_name = "FILE", help_heading = ACCESS, global = true)]
    pub tls_key: Option<PathBuf>,
}

impl SiteArgs {
    /// Returns the site's certificates, if they are given.
    ///
    /// Errors: [`Error::Setting`] if only some of the three files are given, or if a file lacks a certificate
    /// or key; [`Error::Exposed`] for a key that other users can read; [`Error::Io`].
    pub fn certificates(&self) -> Result<Option<Certificates>> {
        let (ca, cert, key) = match (&self.tls_ca, &self.tls_cert, &self.tls_key) {
            (None, None, None) => return Ok(None),
            (Some(ca), Some(cert), Some(key)) => (ca, cert, key),
            (None, ..) => return Err(wrong("tls_ca", None, ALL_THREE)),
            (_, None, _) => return Err(wrong("tls_cert", None, ALL_THREE)),
            (.., None) => return Err(wrong("tls_key", None, ALL_THREE)),
        };
        let read = |path: &Path| std::fs::read(path).map_err(Error::io("read", path));
        let private = files::read_shared(key, LONGEST)?;
        let made = Certificates::from_pem(&read(ca)?, &read(cert)?, &private);
        made.map(Some).map_err(|fault| {
            let (field, path) = match fault.what {
                "authority" => ("tls_ca", ca),
                "certificate" => ("tls_cert", cert),
                _ => ("tls_key", key),
            };
            wrong(field, Some(path), &format!("a PEM file with the {}: {}", fault.what, fault.problem))
        })
    }
}

/// How a process with a site's certificates takes part in a run that machines join and leave.
#[derive(Debug, Clone, Default, PartialEq, Eq, clap::Args)]
pub struct SiteMemberArgs {
    /// The certificates.
    #[command(flatten)]
    pub site: SiteArgs,
    /// File with a secret of at least 16 bytes that all members share, besides their certificates. It can also
    /// be given by FARFLUNG_SECRET (the secret itself) or FARFLUNG_SECRET_FILE.
    #[arg(long, value_name = "FILE", help_heading = ACCESS, requires = "tls_ca")]
    pub secret_file: Option<PathBuf>,
}

impl SiteMemberArgs {
    /// Returns the security of the first member of a run that others join, if certificates are given.
    ///
    /// Errors: as [`SiteArgs::certificates`]; those of the secret's file.
    pub fn hosting(&self, env: impl Fn(&str) -> Option<String>) -> Result<Option<Security>> {
        self.security(Vec::new(), env)
    }

    /// Returns the security of a process that joins the members at `addresses`. The certificate of a member
    /// must be valid for one of these names. `None` if no certificates are given.
    ///
    /// Errors: as [`SiteMemberArgs::hosting`].
    pub fn joining(
        &self,
        addresses: &[String],
        env: impl Fn(&str) -> Option<String>,
    ) -> Result<Option<Security>> {
        Ok(self.security(addresses.to_vec(), env)?.map(Security::joining))
    }

    /// Returns the flags that give another command the same certificates and secret.
    #[must_use]
    pub fn flags(&self) -> Vec<OsString> {
        let SiteArgs { tls_ca, tls_cert, tls_key } = &self.site;
        let flags = [
            ("--tls-ca", tls_ca),
            ("--tls-cert", tls_cert),
            ("--tls-key", tls_key),
            ("--secret-file", &self.secret_file),
        ];
        let given = flags.into_iter().filter_map(|(flag, path)| Some((flag, path.as_ref()?)));
        given.flat_map(|(flag, path)| [flag.into(), path.clone().into_os_string()]).collect()
    }

    /// Returns whether members also prove a secret.
    pub fn has_secret(&self, env: impl Fn(&str) -> Option<String>) -> bool {
        let is_set = |name: &&str| env(name).is_some_and(|value| !value.is_empty());
        self.secret_file.is_some() || [SECRET, SECRET_FILE].iter().any(is_set)
    }

    fn security(
        &self,
        places: Vec<String>,
        env: impl Fn(&str) -> Option<String>,
    ) -> Result<Option<Security>> {
        let Some(own) = self.site.certificates()? else { return Ok(None) };
        let secret = secret_of(self.secret_file.as_deref(), &env)?;
        Ok(Some(Security::by_certificates(&own, secret.as_ref(), places)))
    }
}
