//! What the processes of a job compare when they meet, so that ranks with other decisions are told at once.

use farflung_comm::Communicator;
use farflung_parallel::Plan;

use crate::{Error, Result};

/// Compares the ranks' plans: their digests, and only where these differ their texts. A collective.
///
/// Errors: [`Error::Setting`] on every rank, with the first field that differs, both values, and a rank that has the other.
pub fn same_plan(plan: &Plan, comm: &Communicator) -> Result<()> {
    let digests = comm.all_gather_bytes(plan.digest().bytes().to_vec())?;
    if digests.iter().all(|digest| *digest == digests[0]) {
        return Ok(());
    }
    let texts = comm.all_gather_bytes(plan.to_string().into_bytes())?;
    let others = digests.iter().zip(&texts).enumerate();
    let (rank, text) = others
        .filter(|(_, (digest, _))| digest.as_slice() != plan.digest().bytes())
        .map(|(rank, (_, text))| (rank, String::from_utf8_lossy(text)))
        .next()
        .expect("a digest differs from this rank's, or this rank's from another");
    let found = text.parse::<Plan>().ok().and_then(|other| plan.differences(&other).into_iter().next());
    let missing = || "missing".to_owned();
    let (value, expected) = match found {
        Some(found) => (
            format!("one with `{}` {}", found.field, found.left.unwrap_or_else(missing)),
            format!("{} as on rank {rank}", found.right.unwrap_or_else(missing)),
        ),
        None => {
            ("one that differs".to_owned(), format!("the plan of rank {rank}, which this build cannot read"))
        }
    };
    Err(Error::Setting { field: "plan", value, expected })
}
