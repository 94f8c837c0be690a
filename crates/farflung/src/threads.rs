//! How many threads there can be. It refuses to know what they compute.

use crate::{Error, Result};

/// The most threads of all workers of a process together, unless there are so many cores: four for each core keep all of
/// them busy, and beyond a thousand a system's own limits come near.
const ENOUGH: usize = 1024;

fn most(cores: usize, workers: usize) -> usize {
    (cores.saturating_mul(4).max(ENOUGH) / workers.max(1)).max(1)
}

/// Refuses more threads of each of so many workers than a machine can use, before one of them is started.
///
/// Errors: [`Error::Setting`] with the most that there can be.
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
        expected: format!("at most {most}{each}: this machine runs {cores} at a time"),
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
