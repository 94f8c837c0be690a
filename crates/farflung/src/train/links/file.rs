//! `links.json`: the declared links between a run's ranks, for viewers of the run.

use farflung_base::Topology;
use serde::{Deserialize, Serialize};

use crate::train::connection::declared_of;
use crate::train::job::Job;
use crate::{Result, RunDir};

/// The file's name in a run's folder.
pub const LINKS: &str = "links.json";

/// Highest number of ranks whose links are written, since their number is quadratic in the ranks.
const MOST_RANKS: usize = 64;

/// The links between the ranks of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DeclaredLinks {
    /// Whether the links are simulated, so that the run's clock is virtual.
    pub simulated: bool,
    /// The links by rank; `None` if they are not declared, or for more than 64 ranks.
    pub topology: Option<Topology>,
}

/// Writes the links of a job to its run's folder.
///
/// Errors: [`Error::Io`](crate::Error::Io).
pub(in crate::train) fn write(job: &Job, simulated: bool, run: &RunDir) -> Result<()> {
    let topology = declared_of(job, simulated)?.filter(|topology| topology.size() <= MOST_RANKS);
    let text = serde_json::to_vec(&DeclaredLinks { simulated, topology }).expect("numbers are plain data");
    run.replace(LINKS, &text)
}
