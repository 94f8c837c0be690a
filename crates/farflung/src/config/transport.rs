//! Chooses the transport by the number of processes of a job.

use super::RunSettings;
use super::choice::{TransportKind, TransportName};
use crate::{Error, Result};

impl RunSettings {
    /// Returns the URLs of the relays of the settings.
    #[must_use]
    pub fn relays(&self) -> Vec<String> {
        let all = self.relay.iter().flat_map(|relays| relays.split(','));
        all.filter(|one| !one.is_empty()).map(str::to_owned).collect()
    }

    /// Returns the transport of a job with this number of processes, and of workers if there is one process;
    /// resolves [`TransportKind::Auto`].
    ///
    /// Errors: [`Error::Setting`] for a transport between threads in a job of several processes, and for one
    /// between processes if several workers are in one process.
    pub fn transport_for(&self, processes: usize, workers: usize) -> Result<TransportName> {
        let several = processes > 1;
        let fitting = || TransportName::all().filter(|row| row.joins_processes() == several);
        let TransportKind::Named(row) = self.transport else {
            return Ok(fitting().next().expect("the table has both kinds of transports"));
        };
        // A job of one worker may use a transport between processes.
        if row.joins_processes() == several || (row.joins_processes() && workers == 1) {
            return Ok(row);
        }
        let names: Vec<_> = fitting().map(|row| row.name).collect();
        let names = names.join(" or ");
        let expected = if several {
            format!("{names}, since the job has {processes} processes")
        } else {
            let n = workers;
            format!(
                "{names} for {n} workers in one process: with {row} each worker must be a separate process, \
                 as `farflung launch -n {n} -- train` starts them"
            )
        };
        Err(Error::Setting { field: "transport", value: row.to_string(), expected })
    }
}
