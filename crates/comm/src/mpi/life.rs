//! Initialisation and end of MPI, both on the same thread, as MPI requires.
#![expect(unsafe_code, reason = "declares that MPI is initialised and may be called")]

use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::sync::mpsc::{self, Sender};
use std::thread::JoinHandle;

use mpi::Threading;
use mpi::environment::Universe;
use mpi::topology::Communicator as _;

use super::messages::World;
use super::{Job, missing};
use crate::CommError;

/// The error if MPI was initialised before.
pub(super) const TWICE: &str = "this process initialised it before, which is possible only once";

/// Values that MPI reports about this process.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) rank: u32,
    pub(super) size: u32,
    /// Number of processes of the job on this machine, including this one.
    pub(super) near: usize,
    pub(super) world: World,
}

/// The thread that has initialised MPI. If this is dropped, MPI stays initialised until the process ends, which
/// ends the job.
pub(super) struct InitializedMpi {
    thread: JoinHandle<()>,
    job: Sender<Arc<Job>>,
}

/// The thread that ends MPI when the job is over.
pub(super) struct MpiThread(JoinHandle<()>);

/// Initialises MPI on a new thread.
pub(super) fn begin() -> Result<(InitializedMpi, Found), CommError> {
    let (tell, told) = mpsc::channel();
    let (job, jobs) = mpsc::channel::<Arc<Job>>();
    let live = move || {
        let (universe, found) = match begin_here() {
            Ok(begun) => begun,
            Err(error) => {
                // The caller of `begin` is waiting for this.
                let _ = tell.send(Err(error));
                return;
            }
        };
        // MPI must end only after all processes have left, so it is not ended by a drop if this thread returns
        // early.
        let universe = ManuallyDrop::new(universe);
        if tell.send(Ok(found)).is_err() {
            return;
        }
        if let Ok(job) = jobs.recv() {
            job.keep();
            drop(ManuallyDrop::into_inner(universe));
        }
    };
    let thread = std::thread::Builder::new().name("farflung-mpi".to_owned()).spawn(live);
    let thread = thread.map_err(|e| CommError::io("start the thread of", &"MPI", &e))?;
    let found = told.recv().map_err(|_| missing("its initialisation failed"))??;
    Ok((InitializedMpi { thread, job }, found))
}

fn begin_here() -> Result<(Universe, Found), CommError> {
    let (universe, threading) =
        mpi::initialize_with_threading(Threading::Serialized).ok_or_else(|| missing(TWICE))?;
    if threading < Threading::Serialized {
        // MPI is not ended here, because other ranks may have got enough thread support and continue.
        std::mem::forget(universe);
        return Err(missing(format!("it allows calls from one thread only ({threading:?})")));
    }
    let all = universe.world();
    let near = all.split_shared(all.rank()).size();
    let number = |n: i32| u32::try_from(n).unwrap_or(0);
    // SAFETY: MPI is initialised with enough threads. It ends after the job is over and has dropped this
    // `World`. There is no other, because MPI is initialised only once.
    let world = unsafe { World::begun() };
    let found =
        Found { rank: number(all.rank()), size: number(all.size()), near: number(near) as usize, world };
    Ok((universe, found))
}

impl InitializedMpi {
    /// Hands the job to the MPI thread, which runs until the job is over.
    pub(super) fn keep(self, job: &Arc<Job>) -> MpiThread {
        // The thread is still running: it waits for this message.
        let _ = self.job.send(Arc::clone(job));
        MpiThread(self.thread)
    }
}

impl MpiThread {
    /// Waits until MPI has ended.
    pub(super) fn end(self) {
        // The runtime has already reported a panic of the thread.
        let _ = self.0.join();
    }
}
