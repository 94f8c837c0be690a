//! Checks the number of threads against a limit.

use crate::{Error, Result};

/// Number of threads of all workers together that any machine may start. Machines with more than a quarter of
/// this number of cores may start four threads per core. More threads would not run at the same time, and
/// systems limit the threads of a user or container to a few thousand.
const ENOUGH: usize = 1024;

fn most(cores: usize, workers: usize) -> usize {
    (cores.saturating_mul(4).max(ENOUGH) / workers.max(1)).max(1)
}

/// Checks the number of threads for each of `workers` workers of this process, before any thread is started.
///
/// Errors: [`Error::Setting`] with the limit.
pub fn check(threads: usize, workers: usize) -> Result<()> {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let most = most(cores, workers);
    if threads <= most {
        return Ok(());
    }
    let each = if workers > 1 { format!(" for each of {workers} workers") } else { String::new() };
    Err(Error::Setting {
        field: "threads",
        value: threads.to_string(),
        expected: format!("at most {most}{each}: this machine runs {cores} threads at a time"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_is_a_thousand_or_four_for_each_core() {
        assert_eq!((most(2, 1), most(2, 4), most(1024, 1), most(2, 5000)), (1024, 256, 4096, 1));
        check(0, 4).unwrap();
        check(256, 4).unwrap();
        let error = check(100_000, 4).unwrap_err();
        assert_eq!(error.exit_code(), 2);
        assert!(error.to_string().starts_with("`threads` is 100000, expected at most "), "{error}");
    }
}
