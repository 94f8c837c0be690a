//! Restarts a job that has failed.

use super::job::USAGE;
use crate::events::causes;
use crate::{Error, Result, Stop, terminal};

/// Runs a job, and runs it again after each failure, at most `restarts` times: all ranks at once, as with
/// torchrun's `--max-restarts`. Ranks that should continue where they were need `train --resume auto`.
///
/// A job that was started wrongly (exit code 2) or that was stopped is not started again, nor is one on a
/// machine that is taken away, once `is_taken` says so.
///
/// Errors: that of the last run.
pub fn restarting(
    restarts: u32,
    stop: &Stop,
    is_taken: impl Fn() -> bool,
    mut run: impl FnMut() -> Result<()>,
) -> Result<()> {
    for restart in 1..=restarts {
        match run() {
            Err(error)
                if error.exit_code() == USAGE
                    || matches!(error, Error::Stopped(_))
                    || stop.requested().is_some()
                    || is_taken() =>
            {
                return Err(error);
            }
            Err(error) => {
                terminal::write_stderr(format!("{}: restart {restart} of {restarts}\n", causes(&error)));
            }
            Ok(()) => return Ok(()),
        }
    }
    run()
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    fn failing(codes: &[u8], restarts: u32) -> (usize, Result<()>) {
        let mut runs = 0;
        let result = restarting(
            restarts,
            &Stop::manual(),
            || false,
            || {
                let code = codes.get(runs).copied().unwrap_or(0);
                runs += 1;
                if code == 0 {
                    Ok(())
                } else {
                    Err(Error::OnRank { rank: 0, message: "lost".to_owned(), code })
                }
            },
        );
        (runs, result)
    }

    #[test]
    fn a_job_is_started_again_as_often_as_it_may() {
        assert!(matches!(failing(&[75, 1], 2), (3, Ok(()))));
        assert!(matches!(failing(&[75, 75], 1), (2, Err(_))));
        assert!(matches!(failing(&[75], 0), (1, Err(_))));
        assert!(matches!(failing(&[], 3), (1, Ok(()))));
    }

    #[test]
    fn a_job_on_a_machine_that_is_taken_away_is_not_started_again() {
        let (runs, taken) = (Cell::new(0), Cell::new(false));
        let result = restarting(
            5,
            &Stop::manual(),
            || taken.get(),
            || {
                runs.set(runs.get() + 1);
                taken.set(runs.get() == 2);
                Err(Error::OnRank { rank: 0, message: "lost".to_owned(), code: 75 })
            },
        );
        assert_eq!((runs.get(), result.unwrap_err().exit_code()), (2, 75));
    }

    #[test]
    fn what_was_started_wrongly_or_stopped_is_not_started_again() {
        assert!(matches!(failing(&[2], 5), (1, Err(_))));
        let mut runs = 0;
        let stopped = restarting(
            5,
            &Stop::manual(),
            || false,
            || {
                runs += 1;
                Err(Error::Stopped(crate::Signal::Interrupt))
            },
        );
        assert!(stopped.is_err());
        assert_eq!(runs, 1);
    }
}
