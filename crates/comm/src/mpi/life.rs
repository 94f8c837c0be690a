//! The beginning and the end of MPI, both on one thread, as MPI wants it.
#![expect(unsafe_code, reason = "it says from when on MPI may be called")]

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

/// What is wrong where MPI was begun before.
pub(super) const TWICE: &str = "it has begun in this process before, and does so once";

/// What MPI says of this process.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) rank: u32,
    pub(super) size: u32,
    /// Processes of the job on this machine, this one included.
    pub(super) near: usize,
    pub(super) world: World,
}

/// The thread that has begun MPI. Dropped here, MPI goes on to the end of the process, which ends the job.
pub(super) struct Beginning {
    thread: JoinHandle<()>,
    job: Sender<Arc<Job>>,
}

/// The thread that ends MPI when the job says that it is over.
pub(super) struct Life(JoinHandle<()>);

/// Begins MPI on a thread of its own.
pub(super) fn begin() -> Result<(Beginning, Found), CommError> {
    let (tell, told) = mpsc::channel();
    let (job, jobs) = mpsc::channel::<Arc<Job>>();
    let live = move || {
        let (universe, found) = match begin_here() {
            Ok(begun) => begun,
            Err(error) => {
                // Whoever has asked waits for it.
                let _ = tell.send(Err(error));
                return;
            }
        };
        // Ended where all have taken leave, never by the way.
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
    let thread = thread.map_err(|e| CommError::io("thread that keeps", &"MPI", &e))?;
    let found = told.recv().map_err(|_| missing("it has failed to begin"))??;
    Ok((Beginning { thread, job }, found))
}

fn begin_here() -> Result<(Universe, Found), CommError> {
    let (universe, threading) =
        mpi::initialize_with_threading(Threading::Serialized).ok_or_else(|| missing(TWICE))?;
    if threading < Threading::Serialized {
        // It is not ended: the others may have more.
        std::mem::forget(universe);
        return Err(missing(format!("it allows calls of one thread only ({threading:?})")));
    }
    let all = universe.world();
    let near = all.split_shared(all.rank()).size();
    let number = |n: i32| u32::try_from(n).unwrap_or(0);
    // SAFETY: MPI has begun with enough threads. It ends when the job is over, which drops its world first;
    // this is the only one, since MPI begins once.
    let world = unsafe { World::begun() };
    let found =
        Found { rank: number(all.rank()), size: number(all.size()), near: number(near) as usize, world };
    Ok((universe, found))
}

impl Beginning {
    /// Keeps MPI for this job.
    pub(super) fn keep(self, job: &Arc<Job>) -> Life {
        // The thread is there: it waits for this.
        let _ = self.job.send(Arc::clone(job));
        Life(self.thread)
    }
}

impl Life {
    /// Returns when MPI has ended.
    pub(super) fn end(self) {
        // A panic of the thread has been reported by the runtime already.
        let _ = self.0.join();
    }
}
