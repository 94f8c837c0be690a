//! This process's place in a job that a launcher started: torchrun, mpirun, Slurm, Kubernetes or
//! `farflung launch`.
//!
//! Detection is a pure function of the environment variables, which are checked in the order of a table. It
//! does not depend on sockets.

mod advice;
mod master;
mod slurm;

use std::fmt;

use farflung_base::Rank;
use farflung_comm::secure::Security;
use farflung_parallel::Cluster;

use crate::{Error, Result};

/// The default port of rank 0.
pub const MASTER_PORT: u16 = 29500;

/// Highest number of processes of a job: the limit of a topology. Each process keeps a connection to each other
/// one.
pub const MOST_PROCESSES: u32 = Cluster::MAX_RANKS as u32;

/// A process's place in its job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LaunchEnv {
    /// This process's rank.
    pub rank: Rank,
    /// Number of processes.
    pub world_size: usize,
    /// Position among the processes of this machine.
    pub local_rank: usize,
    /// Number of processes on this machine, if the launcher sets it.
    pub local_world_size: Option<usize>,
    /// Host of rank 0.
    pub master_addr: String,
    /// Port of rank 0.
    pub master_port: u16,
    /// The launcher whose variables were read.
    pub source: &'static str,
    /// Further addresses of rank 0, `host:port`, tried in turn after the first, and relays.
    pub more_addresses: Vec<String>,
    /// Protection of connections, and the processes that may join; [`detect`] sets no protection.
    pub security: Security,
}

impl LaunchEnv {
    /// Returns whether ranks meet at this machine's loopback, which other machines cannot reach.
    #[must_use]
    pub fn is_local(&self) -> bool {
        is_loopback(&self.master_addr)
    }

    /// Returns the address of rank 0: `host:port`, or several addresses separated by commas.
    #[must_use]
    pub fn meeting_place(&self) -> String {
        let Self { master_addr: host, master_port: port, .. } = self;
        let is_relay = host.contains("://");
        let first = if host.contains(':') && !is_relay {
            format!("[{host}]:{port}")
        } else {
            format!("{host}:{port}")
        };
        [&[first], &self.more_addresses[..]].concat().join(",")
    }
}

/// Returns whether a host is this machine's loopback.
#[must_use]
pub fn is_loopback(host: &str) -> bool {
    let address: Result<std::net::IpAddr, _> = host.parse();
    let names = ["localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback"];
    names.iter().any(|name| host.eq_ignore_ascii_case(name))
        || address.is_ok_and(|address| address.is_loopback())
}

/// Returns a note for the user of a process that trains alone, if variables look as if it were meant to be a
/// rank of a job: Slurm's name ranks, but `srun` did not start this process; or the place of rank 0 is set,
/// but no rank. `None` elsewhere.
pub fn note_alone(env: impl Fn(&str) -> Option<String>) -> Option<String> {
    let master = ["MASTER_ADDR", "MASTER_PORT"].into_iter().find(|name| env(name).is_some());
    slurm::note_without_srun(&env).or_else(|| {
        Some(format!("{} is set, but RANK and WORLD_SIZE are not: this process trains alone", master?))
    })
}

impl fmt::Display for LaunchEnv {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, world_size, local_rank, master_addr, master_port, source, .. } = self;
        write!(
            f,
            "{rank} of {world_size} (local {local_rank}), master {master_addr}:{master_port}, from {source}"
        )
    }
}

/// The variables of one launcher.
struct Family {
    source: &'static str,
    rank: &'static str,
    size: &'static str,
    local: &'static str,
    local_size: &'static str,
}

/// The launchers' variables, in the order in which they are checked. `PMIx` has no variable for the number of
/// processes: that of Slurm is read, and without it `PMIX_RANK` is ignored.
const FAMILIES: [Family; 5] = [
    Family {
        source: "RANK",
        rank: "RANK",
        size: "WORLD_SIZE",
        local: "LOCAL_RANK",
        local_size: "LOCAL_WORLD_SIZE",
    },
    Family {
        source: "OpenMPI",
        rank: "OMPI_COMM_WORLD_RANK",
        size: "OMPI_COMM_WORLD_SIZE",
        local: "OMPI_COMM_WORLD_LOCAL_RANK",
        local_size: "OMPI_COMM_WORLD_LOCAL_SIZE",
    },
    Family {
        source: "PMI",
        rank: "PMI_RANK",
        size: "PMI_SIZE",
        local: "MPI_LOCALRANKID",
        local_size: "MPI_LOCALNRANKS",
    },
    Family {
        source: "PMIx",
        rank: "PMIX_RANK",
        size: "SLURM_NTASKS",
        local: "SLURM_LOCALID",
        local_size: "SLURM_NTASKS_PER_NODE",
    },
    Family {
        source: "Slurm",
        rank: "SLURM_PROCID",
        size: "SLURM_NTASKS",
        local: "SLURM_LOCALID",
        local_size: "SLURM_NTASKS_PER_NODE",
    },
];

/// Finds this process's place in its job; `None` if no launcher's variables are set.
///
/// `MASTER_ADDR` and `MASTER_PORT` are read for every launcher. `MASTER_ADDR` may also be `host:port` or
/// `tcp://host:port`. Without it the master is Slurm's first host, else this machine's loopback. Kubernetes'
/// `JOB_COMPLETION_INDEX` also needs `WORLD_SIZE` and `MASTER_ADDR`. Slurm's variables count only in processes
/// that `srun` started.
///
/// Errors: [`Error::HalfSet`] with the missing variable, [`Error::Variable`] with the one that cannot be
/// parsed.
pub fn detect(env: impl Fn(&str) -> Option<String>) -> Result<Option<LaunchEnv>> {
    for family in FAMILIES.iter().filter(|family| family.source != "Slurm" || slurm::is_step(&env)) {
        // `WORLD_SIZE` without `RANK` is an error, unless Kubernetes sets the rank. The size alone of another
        // launcher is ignored: Slurm sets it also in a batch script, which is not a process of a job.
        let size_alone_counts = family.source == "RANK" && env("JOB_COMPLETION_INDEX").is_none();
        match (env(family.rank), env(family.size)) {
            (Some(_), Some(_)) => return member(&env, family).map(Some),
            (Some(_), None) if family.source == "PMIx" => {}
            (Some(_), None) => return Err(Error::HalfSet { present: family.rank, missing: family.size }),
            (None, Some(_)) if size_alone_counts => {
                return Err(Error::HalfSet { present: family.size, missing: family.rank });
            }
            (None, _) => {}
        }
    }
    if env("JOB_COMPLETION_INDEX").is_some() {
        let kubernetes = Family {
            source: "Kubernetes",
            rank: "JOB_COMPLETION_INDEX",
            size: "WORLD_SIZE",
            local: "LOCAL_RANK",
            local_size: "LOCAL_WORLD_SIZE",
        };
        for missing in ["WORLD_SIZE", "MASTER_ADDR"] {
            if env(missing).is_none() {
                return Err(Error::HalfSet { present: kubernetes.rank, missing });
            }
        }
        return member(&env, &kubernetes).map(Some);
    }
    Ok(None)
}

fn member(env: &impl Fn(&str) -> Option<String>, family: &Family) -> Result<LaunchEnv> {
    let number = |name| {
        let wrong = |value| Error::Variable { name, value, expected: "a whole number" };
        env(name).map(|value| value.trim().parse::<u32>().map_err(|_| wrong(value))).transpose()
    };
    let absent = |missing, present| Error::HalfSet { present, missing };
    let rank = number(family.rank)?.ok_or_else(|| absent(family.rank, family.size))?;
    let size = number(family.size)?.ok_or_else(|| absent(family.size, family.rank))?;
    if size > MOST_PROCESSES {
        let (name, value, expected) = (family.size, size.to_string(), "at most 2048 processes");
        return Err(Error::Variable { name, value, expected });
    }
    if rank >= size {
        let value = rank.to_string();
        return Err(Error::Variable {
            name: family.rank,
            value,
            expected: "a rank below the number of processes",
        });
    }
    let master_port = master::port(env)?;
    // A step of `srun` may have only some of the job's machines. Other launchers have steps of their own.
    let lists: &[_] = match family.source {
        "Slurm" => &["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"],
        _ => &["SLURM_JOB_NODELIST"],
    };
    let slurm_host = || slurm::first_host(&lists.iter().find_map(|name| env(name))?);
    // Only OpenMPI and PMI start several machines without naming one of them. In this case the job is assumed
    // to be on this machine.
    let (master_addr, master_port) = match master::address(env)? {
        Some((host, _)) if rank > 0 && master::is_unspecified(&host) => {
            let expected = "the address of rank 0's machine: this one only says that rank 0 listens at all of its \
                            addresses, and no other rank can connect to it";
            return Err(Error::Variable { name: "MASTER_ADDR", value: host, expected });
        }
        Some((host, port)) => (host, port.or(master_port)),
        None => (slurm_host().unwrap_or_else(|| "127.0.0.1".to_owned()), master_port),
    };
    Ok(LaunchEnv {
        rank: Rank(rank),
        world_size: size as usize,
        local_rank: number(family.local)?.unwrap_or(0) as usize,
        // Used only to estimate this machine's memory, so a value that is not a number is ignored.
        local_world_size: env(family.local_size).and_then(|value| value.trim().parse().ok()),
        master_addr,
        master_port: master_port.unwrap_or(MASTER_PORT),
        source: family.source,
        more_addresses: Vec::new(),
        security: Security::unencrypted(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(vars: &'static [(&str, &str)]) -> Result<Option<LaunchEnv>> {
        detect(|name| vars.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned()))
    }

    #[test]
    fn only_the_loopback_is_local() {
        for (address, local) in
            [("127.0.0.1", true), ("::1", true), ("localhost", true), ("10.0.0.1", false), ("a", false)]
        {
            let vars = [("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", address), ("MASTER_PORT", "9")];
            let env = detect(|name| vars.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned()));
            assert_eq!(env.unwrap().unwrap().is_local(), local, "{address}");
        }
    }

    #[test]
    fn every_launcher_is_understood() {
        let cases: [(&'static [(&str, &str)], &str); 7] = [
            (
                &[
                    ("RANK", "3"),
                    ("WORLD_SIZE", "8"),
                    ("LOCAL_RANK", "1"),
                    ("MASTER_ADDR", "a"),
                    ("MASTER_PORT", "9"),
                ],
                "rank 3 of 8 (local 1), master a:9, from RANK",
            ),
            (
                &[("OMPI_COMM_WORLD_RANK", "0"), ("OMPI_COMM_WORLD_SIZE", "2"), ("PMIX_RANK", "0")],
                "rank 0 of 2 (local 0), master 127.0.0.1:29500, from OpenMPI",
            ),
            (
                &[("PMI_RANK", "1"), ("PMI_SIZE", "2")],
                "rank 1 of 2 (local 0), master 127.0.0.1:29500, from PMI",
            ),
            (
                &[
                    ("PMIX_RANK", "2"),
                    ("SLURM_NTASKS", "4"),
                    ("SLURM_PROCID", "2"),
                    ("SLURM_JOB_NODELIST", "x1"),
                ],
                "rank 2 of 4 (local 0), master x1:29500, from PMIx",
            ),
            (
                &[
                    ("SLURM_PROCID", "5"),
                    ("SLURM_NTASKS", "6"),
                    ("SLURM_LOCALID", "1"),
                    ("SLURM_STEP_ID", "0"),
                    ("SLURM_JOB_NODELIST", "n[01-03,05]"),
                ],
                "rank 5 of 6 (local 1), master n01:29500, from Slurm",
            ),
            (
                &[
                    ("SLURM_PROCID", "1"),
                    ("SLURM_NTASKS", "2"),
                    ("SLURM_STEP_ID", "3"),
                    ("SLURM_JOB_NODELIST", "n[1-4]"),
                    ("SLURM_STEP_NODELIST", "n[3-4]"),
                ],
                "rank 1 of 2 (local 0), master n3:29500, from Slurm",
            ),
            (
                &[("JOB_COMPLETION_INDEX", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "job-0.svc")],
                "rank 1 of 2 (local 0), master job-0.svc:29500, from Kubernetes",
            ),
        ];
        for (vars, expected) in cases {
            assert_eq!(with(vars).unwrap().unwrap().to_string(), expected);
        }
        assert_eq!(with(&[("HOME", "/"), ("SLURM_NTASKS", "4")]).unwrap(), None);
    }

    #[test]
    fn a_process_whose_rank_was_forgotten_is_told_that_it_trains_alone() {
        let note = |vars: &[(&str, &str)]| {
            note_alone(|name| vars.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned()))
        };
        let said = note(&[("MASTER_ADDR", "10.0.0.1")]).unwrap();
        assert!(said.starts_with("MASTER_ADDR is set") && said.contains("trains alone"), "{said}");
        assert!(note(&[("SLURM_PROCID", "0")]).unwrap().contains("srun"));
        assert_eq!(note(&[("HOME", "/")]), None);
    }

    #[test]
    fn the_first_launcher_wins() {
        let both = with(&[
            ("RANK", "1"),
            ("WORLD_SIZE", "2"),
            ("SLURM_PROCID", "0"),
            ("SLURM_NTASKS", "1"),
            ("SLURM_JOB_NODELIST", "n[1-2]"),
        ]);
        assert_eq!(both.unwrap().unwrap().source, "RANK");
    }

    #[test]
    fn what_is_missing_or_wrong_is_named() {
        let message = |vars| with(vars).unwrap_err().to_string();
        assert!(message(&[("RANK", "1")]).contains("WORLD_SIZE is not"));
        assert!(message(&[("WORLD_SIZE", "2")]).contains("RANK is not"));
        assert!(message(&[("SLURM_PROCID", "2"), ("SLURM_STEP_ID", "1")]).contains("SLURM_NTASKS is not"));
        assert!(
            message(&[("JOB_COMPLETION_INDEX", "2"), ("WORLD_SIZE", "3")]).contains("MASTER_ADDR is not")
        );
        let everywhere = |rank, master| [("RANK", rank), ("WORLD_SIZE", "2"), ("MASTER_ADDR", master)];
        for master in ["0.0.0.0", "::", "tcp://[::]:9"] {
            let of = |rank| {
                let vars = everywhere(rank, master);
                detect(|name| vars.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned()))
            };
            assert!(of("0").is_ok(), "{master}");
            let error = of("1").unwrap_err();
            assert!(error.exit_code() == 2 && error.to_string().contains("MASTER_ADDR"), "{error}");
        }
        assert!(message(&[("RANK", "2"), ("WORLD_SIZE", "2")]).contains("RANK is `2`"));
        assert!(message(&[("RANK", "-1"), ("WORLD_SIZE", "2")]).contains("whole number"));
        assert!(message(&[("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_PORT", "0")]).contains("MASTER_PORT"));
    }

    #[test]
    fn a_world_that_cannot_be_is_refused_before_anybody_counts_on_it() {
        let refused = with(&[("RANK", "0"), ("WORLD_SIZE", "4000000000")]).unwrap_err();
        assert_eq!(refused.exit_code(), 2);
        let most = format!("at most {MOST_PROCESSES} processes");
        assert!(
            refused.to_string().contains("WORLD_SIZE is `4000000000`") && refused.to_string().contains(&most)
        );
        let largest = with(&[("RANK", "2047"), ("WORLD_SIZE", "2048")]).unwrap().unwrap();
        assert_eq!((largest.world_size, largest.local_world_size), (MOST_PROCESSES as usize, None));
        let local = with(&[("RANK", "1"), ("WORLD_SIZE", "4"), ("LOCAL_WORLD_SIZE", "2")]).unwrap().unwrap();
        assert_eq!(local.local_world_size, Some(2));
    }
}
