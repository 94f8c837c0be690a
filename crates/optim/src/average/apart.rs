//! The ranks that hold parameters which are averaged over other ranks than the rest.

use farflung_base::Algorithm;
use farflung_comm::Communicator;

/// The ranks that hold the parameters of an entry of [`AverageConfig::apart`](super::AverageConfig::apart),
/// which are not the ranks that hold the others.
#[derive(Debug, Clone)]
pub struct ApartHolders {
    /// These ranks. The values of one rank alone stay as they are.
    pub comm: Communicator,
    /// Factor of the mean over them.
    pub factor: f64,
}

impl ApartHolders {
    /// Returns the algorithm that averages among them, where the holders of the others have this one: they have
    /// no regions.
    #[must_use]
    pub const fn algorithm(of_others: Algorithm) -> Algorithm {
        match of_others {
            Algorithm::Hierarchical => Algorithm::Direct,
            algorithm => algorithm,
        }
    }
}

/// Returns the ranks that average a bucket, which are those of an entry of `apart`, or `all`.
pub(super) fn holders<'a>(
    all: &'a Communicator,
    apart: &'a [ApartHolders],
    bucket: &super::bucket::Bucket,
) -> &'a Communicator {
    bucket.apart.and_then(|group| apart.get(group)).map_or(all, |apart| &apart.comm)
}
