//! Chooses the folder of a run that was given none: the first of `runs/MODEL-1`, `runs/MODEL-2`, ... that is
//! free on every machine of the job. It is created at once, so that runs that start at the same time get
//! different folders.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use farflung_base::Rank;
use farflung_comm::Communicator;

use super::checkpoint::{all_gather_u64, folder};
use crate::{Error, Result, RunDir};

/// The folder in which the folders of such runs are created.
const RUNS: &str = "runs";

/// A run's folder, and the folders that were created for it. Created folders that are still empty are removed
/// on drop.
#[derive(Debug, Default)]
pub(super) struct Claim {
    path: PathBuf,
    /// The created folders, outermost first.
    created: Vec<PathBuf>,
}

impl Claim {
    /// Returns the given folder, or a new one. `comm` joins the processes of a job, all of which must call this
    /// function; `None` for a job of one process.
    ///
    /// Errors: [`Error::Io`]; the loss of a process.
    pub(super) fn new(given: Option<&Path>, model: &str, comm: Option<&Communicator>) -> Result<Self> {
        let rank = comm.map_or(Rank(0), Communicator::rank);
        let mut from = 1;
        loop {
            let mut claim = Self::default();
            let first = match given {
                None if rank.0 == 0 => claim.create_from(model, from)?,
                _ => GIVEN,
            };
            let Some(comm) = comm else {
                return Ok(claim.or(given));
            };
            // Rank 0 decides. The others check whether that folder is free on their machine; ranks that share a
            // disk create their own folders in it.
            let number = all_gather_u64(comm, first)?[0];
            let free = match given {
                Some(_) => true,
                None if rank.0 == 0 => true,
                None if number == GIVEN => claim.create_from(model, from).map(|_| true)?,
                None => claim.create_in(&numbered(model, number), rank)?,
            };
            if all_gather_u64(comm, u64::from(free))?.iter().all(|&free| free == 1) {
                return Ok(claim.or(given));
            }
            from = number + 1;
        }
    }

    fn or(mut self, given: Option<&Path>) -> Self {
        if let Some(given) = given {
            given.clone_into(&mut self.path);
        }
        self
    }

    /// Returns the folder's path.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Creates a folder; returns false if it exists already.
    fn create(&mut self, path: &Path) -> io::Result<bool> {
        match fs::create_dir(path) {
            Ok(()) => {
                self.created.push(path.to_owned());
                Ok(true)
            }
            Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Creates a run's folder, and its parent if necessary; returns false if the folder exists already.
    fn create_run(&mut self, path: &Path) -> Result<bool> {
        loop {
            let runs = Path::new(RUNS);
            self.create(runs).map_err(Error::io("create the folder", runs))?;
            match self.create(path) {
                // Another run, which failed, has just removed the parent folder.
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                created => return created.map_err(Error::io("create the folder", path)),
            }
        }
    }

    /// Creates the first folder with a number from `from` on that does not exist, and returns its number.
    fn create_from(&mut self, model: &str, from: u64) -> Result<u64> {
        let mut number = from;
        while !self.create_run(&numbered(model, number))? {
            number += 1;
        }
        self.path = numbered(model, number);
        Ok(number)
    }

    /// Creates a rank's folder in a run's; returns false if it exists already, or if the run's folder holds a
    /// run.
    fn create_in(&mut self, run: &Path, rank: Rank) -> Result<bool> {
        self.create_run(run)?;
        run.clone_into(&mut self.path);
        if RunDir::holds_run(run)? {
            return Ok(false);
        }
        let own = folder(run, rank);
        let ranks = own.parent().unwrap_or(run);
        self.create(ranks).map_err(Error::io("create the folder", ranks))?;
        self.create(&own).map_err(Error::io("create the folder", &own))
    }
}

impl Drop for Claim {
    /// Removes the created folders that are still empty.
    fn drop(&mut self) {
        for folder in self.created.iter().rev() {
            // Folders that are not empty are kept.
            let _ = fs::remove_dir(folder);
        }
    }
}

/// Number that rank 0 sends if it was given a folder, and that all other ranks send. Numbers of folders begin
/// at 1.
const GIVEN: u64 = 0;

fn numbered(model: &str, number: u64) -> PathBuf {
    Path::new(RUNS).join(format!("{model}-{number}"))
}
