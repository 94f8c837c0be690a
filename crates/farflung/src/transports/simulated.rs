//! Transport between the threads of a process, over simulated links in virtual time.

use farflung_comm::{Transport, simulated};
use std::sync::Arc;

use super::{Connects, TransportMethod};

/// [`farflung_comm::simulated`].
pub const SIMULATED: TransportMethod = TransportMethod {
    name: "simulated",
    summary: "between threads of one process, over the links of --link or --topology in virtual time",
    simulated: true,
    fixed: None,
    ends: Connects::Threads(|_, topology| {
        let topology = topology.expect("a simulated transport has a topology");
        simulated::cluster(topology).into_iter().map(|end| end as Arc<dyn Transport>).collect()
    }),
};
