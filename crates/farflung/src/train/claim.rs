//! The folder of a run for which none was given: the first of `runs/MODEL-1`, `runs/MODEL-2`, ... that is free
//! on every machine of the job. It is created at once, so that runs which start together take different ones.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use farflung_base::Rank;
use farflung_comm::Communicator;

use super::checkpoint::{folder, tell};
use crate::{Error, Result, RunDir};

/// Where such folders are.
const RUNS: &str = "runs";

/// A run's folder, and what of it was created for it: empty folders go when this is dropped.
#[derive(Debug, Default)]
pub(super) struct Claim {
    path: PathBuf,
    /// Outermost first.
    created: Vec<PathBuf>,
}

impl Claim {
    /// The folder that was given, or a new one. `comm` joins the processes of a job, all of which must call it;
    /// `None` for a job of one process.
    ///
    /// Errors: [`Error::Io`]; that a process is lost.
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
            // Rank 0 decides. The others look whether that folder is free where they are; ranks that share a
            // disk have their own folders in it.
            let number = tell(comm, first)?[0];
            let free = match given {
                Some(_) => true,
                None if rank.0 == 0 => true,
                None if number == GIVEN => claim.create_from(model, from).map(|_| true)?,
                None => claim.create_in(&numbered(model, number), rank)?,
            };
            if tell(comm, u64::from(free))?.iter().all(|&free| free == 1) {
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

    /// The folder.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Creates a folder; false if it exists.
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

    /// Creates a run's folder, and that of all runs; false if there is one of that number.
    fn create_run(&mut self, path: &Path) -> Result<bool> {
        loop {
            let runs = Path::new(RUNS);
            self.create(runs).map_err(Error::io("create the folder", runs))?;
            match self.create(path) {
                // Another run, which failed, has just removed the folder of all runs.
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                created => return created.map_err(Error::io("create the folder", path)),
            }
        }
    }

    /// Creates the first run's folder from this number on that does not exist, and gives its number.
    fn create_from(&mut self, model: &str, from: u64) -> Result<u64> {
        let mut number = from;
        while !self.create_run(&numbered(model, number))? {
            number += 1;
        }
        self.path = numbered(model, number);
        Ok(number)
    }

    /// Creates a rank's folder within a run's; false if there is one, or a run of its own.
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
    /// Removes what it created, if the run has written nothing into it.
    fn drop(&mut self) {
        for folder in self.created.iter().rev() {
            // One that is not empty stays.
            let _ = fs::remove_dir(folder);
        }
    }
}

/// Said instead of a number by who was given a folder; numbers begin at 1.
const GIVEN: u64 = 0;

fn numbered(model: &str, number: u64) -> PathBuf {
    Path::new(RUNS).join(format!("{model}-{number}"))
}
