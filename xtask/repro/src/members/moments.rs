//! The moments of a run at which something reaches a rank. Between two of them, each rank only computes, sends
//! or waits.

use std::sync::Arc;

use anyhow::Result;
use farflung::base::{Nanos, PeerId, Topology};
use farflung::comm::Transport;
use farflung::comm::simulated::{Faults, record};
use farflung::train::{Job, Quiet, elastic, run_workers};

use super::report as report_of;

/// Moments of a part of a run.
#[derive(Debug)]
pub(super) struct Moments {
    /// The number of all of them.
    pub(super) all: usize,
    /// Those that a bench uses, in order: all, or evenly chosen ones.
    pub(super) chosen: Vec<Nanos>,
}

/// Returns the moments between two times of a run without faults, in a network of `ends` endpoints. If there
/// are more than `most`, chooses that many of them.
pub(super) fn events(job: &Job, ends: usize, span: (Nanos, Nanos), most: usize) -> Result<Moments> {
    events_with(job, ends, (&[], &Faults::new()), span, most)
}

/// Does the same as [`events`], in a run with newcomers and faults. The run needs to succeed on one rank only.
pub(super) fn events_with(
    job: &Job,
    ends: usize,
    (come, faults): (&[(PeerId, Nanos)], &Faults),
    (from, to): (Nanos, Nanos),
    most: usize,
) -> Result<Moments> {
    let (ranks, recorder) = record(&Topology::uniform(ends, job.config.link), faults);
    let ranks = ranks.into_iter().map(|end| end as Arc<dyn Transport>).collect();
    let ended = run_workers(job, elastic::connections(job, ranks, come, true)?, &mut Quiet);
    anyhow::ensure!(ended.iter().any(|ended| report_of(ended).is_some()), "the recorded run fails");
    let is_calm = come.is_empty() && *faults == Faults::new();
    anyhow::ensure!(!is_calm || ended.iter().all(Result::is_ok), "a run without faults fails");
    let recording = recorder.finish();
    let times = recording.events().iter().map(|event| Nanos(event.time));
    let mut times: Vec<Nanos> = times.filter(|at| (from..to).contains(at)).collect();
    times.sort_unstable();
    times.dedup();
    anyhow::ensure!(!times.is_empty(), "nothing reaches a rank between {from} and {to}");
    Ok(Moments { all: times.len(), chosen: thinned(&times, most) })
}

fn thinned(times: &[Nanos], most: usize) -> Vec<Nanos> {
    let count = times.len().min(most);
    (0..count).map(|n| times[n * times.len() / count]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_are_chosen_evenly_if_there_are_too_many() {
        let times: Vec<Nanos> = (0..10).map(Nanos).collect();
        assert_eq!(thinned(&times, 100), times);
        assert_eq!(thinned(&times, 4), [0, 2, 5, 7].map(Nanos));
    }
}
