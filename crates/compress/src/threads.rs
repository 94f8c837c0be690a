//! Runs work on several threads that start in the call and end before it returns.

use std::thread::ScopedJoinHandle;

/// Smallest number of elements for each thread.
const MIN_PER_THREAD: usize = 1 << 17;

/// Returns how many of `threads` to use for `len` elements.
pub(crate) fn threads_for(threads: usize, len: usize) -> usize {
    threads.min(len / MIN_PER_THREAD).max(1)
}

/// Runs `work` for each job on a thread of its own; the first job runs on the caller's thread. If several jobs
/// fail, the error of the first of them in order is returned.
pub(crate) fn try_each<J: Send, E: Send>(
    jobs: impl IntoIterator<Item = J>,
    work: impl Fn(J) -> Result<(), E> + Sync,
) -> Result<(), E> {
    let mut jobs = jobs.into_iter();
    let Some(first) = jobs.next() else { return Ok(()) };
    let mut jobs = jobs.peekable();
    if jobs.peek().is_none() {
        return work(first);
    }
    let work = &work;
    std::thread::scope(|scope| {
        let others: Vec<_> = jobs.map(|job| scope.spawn(move || work(job))).collect();
        let join = |thread: ScopedJoinHandle<'_, Result<(), E>>| {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        let first = work(first);
        others.into_iter().map(join).fold(first, Result::and)
    })
}
