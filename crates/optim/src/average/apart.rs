//! The ranks that hold parameters which others do not have.

use farflung_base::Algorithm;
use farflung_comm::Communicator;

/// The ranks that hold the parameters of [`AverageConfig::apart`](super::AverageConfig::apart), if these are
/// not the ranks that hold the others.
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
