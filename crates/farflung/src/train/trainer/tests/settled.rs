//! Test of a stop in a step that one rank has committed, while another has voted and lacks the result.

use farflung_comm::Stats;
use farflung_tensor::TensorError;

use super::*;
use crate::events::EventLog;
use crate::train::checkpoint::{Totals, folder};
use crate::train::record::Clock;
use crate::train::stop_in_step::{self, RunProgress};
use crate::{Existing, RunDir, Signal, metrics};

/// Trains two steps and a third one, which the ranks `lacking` do not commit: they throw the result of the vote
/// away. Those without `true` have not even voted. Then all ranks handle a stop.
fn stopped_in_the_third_step(
    job: &Job,
    out: &std::path::Path,
    lacking: &[(u32, bool)],
) -> Vec<(Error, Values)> {
    on_all(job, |mut rank| {
        let mut done = None;
        for _ in 0..2 {
            done = Some(rank.step(false).unwrap());
        }
        rank.set_rollback_point().unwrap();
        let run = RunDir::open(&folder(out, rank.rank()), Existing::Continue).unwrap();
        if rank.rank() == Rank(0) {
            run.metrics(0).unwrap();
        }
        let clock = Clock::new(rank.comm(), Totals::default(), Stats::default());
        if let Some((_, voted)) = lacking.iter().find(|(lacking, _)| rank.rank() == Rank(*lacking)) {
            rank.undecided.begin();
            rank.pass(false).unwrap();
            if *voted {
                rank.undecided.voted();
            }
        } else {
            let third = rank.step(false).unwrap();
            assert_ne!(third.loss.to_bits(), done.unwrap().loss.to_bits());
            rank.set_rollback_point().unwrap();
        }
        job.stop.request(Signal::Terminate);
        let kept = RunProgress::at(2, Some(&run), Totals::default(), clock);
        let mut events = EventLog::new(Some(run.path()));
        let error = Error::Tensor(TensorError::Interrupted);
        let error = stop_in_step::handle_stop(job, &mut rank, Some(&run), &mut events, kept, None, error);
        (error, values(&rank))
    })
}

#[test]
fn a_step_that_another_rank_has_committed_is_committed_saved_and_recorded() {
    for (schedule, lacking) in [(Method::OneFOneB, 1), (Method::OneFOneB, 0), (Method::PipeDream, 0)] {
        let job = job(schedule, 2, 2);
        let whole = on_all(&job, |mut rank| {
            let losses: Vec<_> = (0..3).map(|_| rank.step(false).unwrap().loss).collect();
            (losses[2], values(&rank))
        });
        let out = tempfile::tempdir().unwrap();
        let job = Job { out: Some(out.path().to_owned()), ..job };
        let stopped = stopped_in_the_third_step(&job, out.path(), &[(lacking, true)]);
        for ((error, values), (_, expected)) in stopped.into_iter().zip(&whole) {
            let Error::StoppedAt { left, .. } = error else { panic!("{error}") };
            assert_eq!((left.step, left.dropped, left.problem), (3, 0, None), "{schedule} {lacking}");
            assert_eq!(left.saved.unwrap().0, 3);
            assert_eq!(&values, expected, "{schedule} {lacking}");
        }
        let rows = metrics::read(&out.path().join("metrics.jsonl")).unwrap();
        let rows: Vec<_> = rows.iter().map(|row| (row.step, row.train_loss)).collect();
        // A rank that has the result records the step after `Trainer::step`, which this test leaves out.
        let expected = if lacking == 0 { vec![(3, whole[0].0)] } else { Vec::new() };
        assert_eq!(rows, expected, "{schedule} {lacking}");
    }
}

#[test]
fn a_pipeline_that_cannot_commit_what_another_has_committed_saves_the_step_before() {
    let job = job(Method::OneFOneB, 2, 4);
    let whole = on_all(&job, |mut rank| {
        (0..2).for_each(|_| drop(rank.step(false).unwrap()));
        values(&rank)
    });
    let out = tempfile::tempdir().unwrap();
    let job = Job { out: Some(out.path().to_owned()), ..job };
    // Rank 0 has voted, and rank 1 lacks an average; the other pipeline has committed the step.
    let stopped = stopped_in_the_third_step(&job, out.path(), &[(0, true), (1, false)]);
    for (rank, ((error, values), expected)) in stopped.into_iter().zip(&whole).enumerate() {
        let Error::StoppedAt { left, .. } = error else { panic!("{error}") };
        if rank < 2 {
            assert_eq!((left.step, left.problem), (2, None), "{rank}");
            assert_eq!(left.saved.unwrap().0, 2);
            assert_eq!(&values, expected, "{rank}");
        } else {
            assert_eq!(left.step, 3);
            assert!(left.problem.unwrap().contains("is at another step"));
        }
    }
}

/// Trains two steps and a third one, after which `ready` decides what a rank has done of its end: it has voted,
/// or it has also updated its shard, but not gathered those of others. Then all handle a stop.
fn stopped_before_the_gather(job: &Job, out: &std::path::Path, updated: &[bool]) -> Vec<(Error, Values)> {
    on_all(job, |mut rank| {
        (0..2).for_each(|_| drop(rank.step(false).unwrap()));
        let run = RunDir::open(&folder(out, rank.rank()), Existing::Continue).unwrap();
        if rank.rank() == Rank(0) {
            run.metrics(0).unwrap();
        }
        let clock = Clock::new(rank.comm(), Totals::default(), Stats::default());
        rank.undecided.begin();
        let vote = rank.pass(false).unwrap();
        if updated[rank.rank().index()] {
            let prepared = rank.prepare(&vote).unwrap();
            rank.executor.update_all(&rank.list, prepared).unwrap();
            rank.step += 1;
            rank.undecided.committed(vote.loss, vote.squares, vote.requests);
            rank.undecided.unrecorded();
        } else {
            rank.undecided.voted();
        }
        job.stop.request(Signal::Terminate);
        let kept = RunProgress::at(2, Some(&run), Totals::default(), clock);
        let mut events = EventLog::new(Some(run.path()));
        let error = Error::Tensor(TensorError::Interrupted);
        let error = stop_in_step::handle_stop(job, &mut rank, Some(&run), &mut events, kept, None, error);
        (error, values(&rank))
    })
}

#[test]
fn shards_that_a_stop_found_on_their_way_are_gathered_before_they_are_saved() {
    for (stages, workers) in [(1, 3), (2, 4)] {
        let job = job_of(TrainConfig { zero: 1, stages, workers, ..TrainConfig::default() });
        let whole = on_all(&job, |mut rank| {
            (0..3).for_each(|_| drop(rank.step(false).unwrap()));
            values(&rank)
        });
        for updated in [vec![true; workers], (0..workers).map(|rank| rank % 2 == 0).collect()] {
            let out = tempfile::tempdir().unwrap();
            let job = Job { out: Some(out.path().to_owned()), stop: Stop::manual(), ..job.clone() };
            for ((error, values), expected) in
                stopped_before_the_gather(&job, out.path(), &updated).into_iter().zip(&whole)
            {
                let Error::StoppedAt { left, .. } = error else { panic!("{error}") };
                assert_eq!((left.step, left.dropped, left.problem), (3, 0, None), "{stages} {updated:?}");
                assert_eq!(&values, expected, "{stages} {updated:?}");
            }
            let rows = metrics::read(&out.path().join("metrics.jsonl")).unwrap();
            assert_eq!(rows.iter().map(|row| row.step).collect::<Vec<_>>(), [3], "{stages} {updated:?}");
        }
    }
}

#[test]
fn a_pipeline_that_repeats_a_step_alone_is_noticed_by_all() {
    let job = job(Method::OneFOneB, 2, 4);
    let ended = on_all(&job, |mut rank| {
        rank.step(false).unwrap();
        rank.tries = u32::from(rank.replica == 0);
        rank.pass(false).map(drop).unwrap_err().to_string()
    });
    assert_eq!(ended.len(), 4);
    for error in ended {
        assert!(error.contains("the vote on step 2 has pipelines that repeat"), "{error}");
    }
}
