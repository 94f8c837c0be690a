//! Work on several threads, started in the call and gone after it. Knows no work.

use std::thread::ScopedJoinHandle;

/// Elements, at least, that a thread is started for.
const MIN_PER_THREAD: usize = 1 << 17;

/// How many of `threads` so many elements are worth.
pub(crate) fn worth(threads: usize, len: usize) -> usize {
    threads.min(len / MIN_PER_THREAD).max(1)
}

/// Does `work` for each job, each on a thread of its own, the first on the caller's. Of several errors it is
/// the first job's.
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
