//! Certificates of a site in place of keys: which files a process shows and checks.

use std::path::{Path, PathBuf};

use farflung_comm::secure::{Certificates, Security};

use super::{ACCESS, LONGEST, files, wrong};
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

    /// Returns the security of the first member of a run that others join, if the files are given.
    ///
    /// Errors: as [`SiteArgs::certificates`].
    pub fn hosting(&self) -> Result<Option<Security>> {
        let own = self.certificates()?;
        Ok(own.map(|own| Security::by_certificates(&own, None, Vec::new())))
    }

    /// Returns the security of a process that joins the members at `addresses`. The certificate of a member
    /// must be valid for one of these names. `None` if the files are not given.
    ///
    /// Errors: as [`SiteArgs::certificates`].
    pub fn joining(&self, addresses: &[String]) -> Result<Option<Security>> {
        let own = self.certificates()?;
        Ok(own.map(|own| Security::by_certificates(&own, None, addresses.to_vec()).joining()))
    }
}
