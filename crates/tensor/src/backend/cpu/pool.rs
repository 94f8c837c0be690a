//! Thread pool of a CPU device. Work is divided into tasks by shape, never by the number of threads, so results
//! are bit-identical for any number of threads.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Runs tasks on the calling thread and on `threads - 1` helper threads.
pub(crate) struct Pool {
    threads: usize,
    helpers: Option<rayon::ThreadPool>,
}

impl Pool {
    /// Creates a pool of `threads` threads in total, the calling thread included.
    pub(crate) fn new(threads: usize) -> Result<Self, rayon::ThreadPoolBuildError> {
        let threads = threads.max(1);
        let helpers = (threads > 1)
            .then(|| {
                rayon::ThreadPoolBuilder::new()
                    .num_threads(threads - 1)
                    .thread_name(|i| format!("cpu-{}", i + 1))
                    .build()
            })
            .transpose()?;
        Ok(Self { threads, helpers })
    }

    /// Returns the total number of threads.
    pub(crate) const fn threads(&self) -> usize {
        self.threads
    }

    /// Calls `task` once for each index below `tasks`, in any order, and returns when all are done. A thread
    /// that finishes takes the next index, so tasks may differ in length.
    pub(crate) fn run(&self, tasks: usize, task: impl Fn(usize) + Sync) {
        let Some(helpers) = self.helpers.as_ref().filter(|_| tasks > 1) else {
            return (0..tasks).for_each(task);
        };
        let next = AtomicUsize::new(0);
        let work = || {
            loop {
                let i = next.fetch_add(1, Ordering::Relaxed);
                if i >= tasks {
                    break;
                }
                task(i);
            }
        };
        helpers.in_place_scope(|scope| {
            for _ in 1..self.threads.min(tasks) {
                scope.spawn(|_| work());
            }
            work();
        });
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool").field("threads", &self.threads).finish_non_exhaustive()
    }
}
