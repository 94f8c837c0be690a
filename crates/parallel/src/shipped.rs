//! Topology files included in the crate, by name.

use std::str::FromStr;

use crate::{Cluster, ParallelError};

/// An included file.
#[derive(Debug, Clone, Copy)]
pub struct Shipped {
    /// Name on the command line.
    pub name: &'static str,
    /// One-line description.
    pub about: &'static str,
    /// Text of the file. A topology is TOML, as parsed by [`Cluster`].
    pub text: &'static str,
}

/// All included files.
pub const SHIPPED: [Shipped; 13] = [
    Shipped {
        name: "dtfm-1",
        about: "64 V100 in 8 machines of one data centre (DT-FM's case 1)",
        text: include_str!("../topologies/dtfm-1.toml"),
    },
    Shipped {
        name: "dtfm-2",
        about: "8 spot machines of 4 V100 and 32 of one (DT-FM's case 2)",
        text: include_str!("../topologies/dtfm-2.toml"),
    },
    Shipped {
        name: "dtfm-3",
        about: "64 V100 in two regions (DT-FM's case 3)",
        text: include_str!("../topologies/dtfm-3.toml"),
    },
    Shipped {
        name: "dtfm-4",
        about: "64 V100 in four regions of one country (DT-FM's case 4)",
        text: include_str!("../topologies/dtfm-4.toml"),
    },
    Shipped {
        name: "dtfm-5",
        about: "64 V100 in eight regions of the world (DT-FM's case 5)",
        text: include_str!("../topologies/dtfm-5.toml"),
    },
    Shipped {
        name: "one-box",
        about: "one machine with four GPUs",
        text: include_str!("../topologies/one-box.toml"),
    },
    Shipped {
        name: "lan",
        about: "eight machines of three kinds on gigabit Ethernet",
        text: include_str!("../topologies/lan.toml"),
    },
    Shipped {
        name: "home",
        about: "eight homes on asymmetric lines, uplinks of 20 to 100 Mbit/s",
        text: include_str!("../topologies/home.toml"),
    },
    Shipped {
        name: "spot",
        about: "20 spot GPUs of three clouds, whose regions share their lines",
        text: include_str!("../topologies/spot.toml"),
    },
    Shipped {
        name: "straggler",
        about: "eight machines on a fast network, one three times slower",
        text: include_str!("../topologies/straggler.toml"),
    },
    Shipped {
        name: "two-regions",
        about: "eight machines of unequal speed in two regions, 100 Mbit/s and 40 ms apart",
        text: include_str!("../topologies/two-regions.toml"),
    },
    Shipped {
        name: "two-regions-straggler",
        about: "eight machines in two regions, 100 Mbit/s and 1 ms apart, one three times slower",
        text: include_str!("../topologies/two-regions-straggler.toml"),
    },
    Shipped {
        name: "world-4096",
        about: "4,096 GPUs in 20 regions of the world, for plans by region",
        text: include_str!("../topologies/world-4096.toml"),
    },
];

/// Parses the included file of this name.
///
/// Errors: [`ParallelError::UnknownName`].
///
/// ```
/// let cluster = farflung_parallel::shipped::cluster("dtfm-5")?;
/// assert_eq!((cluster.size(), cluster.regions.len()), (64, 8));
/// # Ok::<(), farflung_parallel::ParallelError>(())
/// ```
pub fn cluster(name: &str) -> Result<Cluster, ParallelError> {
    parsed(&SHIPPED, "shipped topology", name)
}

/// Parses the file of this name. `kind` is what the files are, for the error.
///
/// Errors: [`ParallelError::UnknownName`].
pub(crate) fn parsed<T: FromStr<Err = ParallelError>>(
    files: &[Shipped],
    kind: &'static str,
    name: &str,
) -> Result<T, ParallelError> {
    let found = files.iter().find(|shipped| shipped.name == name);
    let known = || files.iter().map(|shipped| shipped.name.to_owned()).collect();
    let unknown = || ParallelError::UnknownName { kind, name: name.to_owned(), known: known() };
    found.ok_or_else(unknown)?.text.parse()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_reads_and_prints_as_itself() {
        for shipped in SHIPPED {
            let read = cluster(shipped.name).unwrap();
            assert_eq!(read.to_string().parse::<Cluster>().unwrap(), read, "{}", shipped.name);
        }
        assert!(cluster("dtfm-6").unwrap_err().to_string().contains("dtfm-5"));
    }
}
