//! Handles a run that is resumed after its last step. It does not depend on the model.

use std::fs;
use std::path::Path;

use farflung_comm::Communicator;

use super::callbacks::RunObserver;
use super::job::Job;
use super::report::{REPORT, Report};
use crate::events::causes;
use crate::{Error, Result, RunDir, StepMetrics, metrics};

/// The work that a resumed run still has to do.
pub(super) enum RemainingWork {
    /// There are steps left, or the run was interrupted between its last step and its report.
    Work,
    /// There is no work left. On rank 0, this contains the existing report.
    Nothing(Option<Box<Report>>),
}

/// Returns the work that is left for a run that was resumed after `begun` steps, from the checkpoint `from`. A
/// collective if `begun` is the number of all steps.
///
/// Errors: [`Error::Setting`] for a checkpoint beyond the last step of the settings.
pub(super) fn remaining_work(
    job: &Job,
    run: Option<&RunDir>,
    comm: &Communicator,
    from: Option<&Path>,
    begun: u64,
    watch: Option<&mut (dyn RunObserver + '_)>,
) -> Result<RemainingWork> {
    let steps = job.config.steps;
    if begun > steps {
        let path = from.map_or_else(String::new, |path| format!(", {}", path.display()));
        let expected = format!("at least {begun}: the checkpoint to resume from is of step {begun}{path}");
        return Err(Error::Setting { field: "steps", value: steps.to_string(), expected });
    }
    let Some(run) = run.filter(|_| begun == steps) else { return Ok(RemainingWork::Work) };
    let found = if comm.rank().0 == 0 { read(run, steps) } else { None };
    // Only rank 0 reads the report; the other ranks follow its decision.
    let told = comm.all_gather_bytes(vec![u8::from(found.is_some())])?;
    if told.first().is_none_or(|word| word.as_slice() != [1]) {
        return Ok(RemainingWork::Work);
    }
    if let Some(watch) = watch {
        let folder = run.path().display();
        watch.note(&format!(
            "the run in {folder} has already finished at step {begun}: there is nothing to do"
        ));
    }
    Ok(RemainingWork::Nothing(found.map(Box::new)))
}

/// Returns the report in a run's folder, if there is one for this number of steps.
fn read(run: &RunDir, steps: u64) -> Option<Report> {
    let path = run.path().join(REPORT);
    let text = fs::read(&path).ok()?;
    let report = serde_json::from_slice::<Report>(&text);
    if let Err(error) = &report {
        tracing::warn!(path = %path.display(), %error, "not a valid report: it is written again");
    }
    report.ok().filter(|report| report.steps == steps)
}

/// Reads the metrics of a run's steps. Used when all steps of a run are done and only its report is missing.
/// Without rows that can be read, the report has no training loss.
pub(super) fn rows(run: Option<&RunDir>) -> Vec<StepMetrics> {
    let read = run.map(|run| metrics::read(&run.path().join(crate::run_dir::METRICS)));
    read.transpose()
        .unwrap_or_else(|error| {
            tracing::warn!("{}: the report has no training loss", causes(&error));
            None
        })
        .unwrap_or_default()
}
