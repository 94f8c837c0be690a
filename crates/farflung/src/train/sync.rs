//! How workers agree: gradients averaged at each step (ddp), or parameters every H steps (DiLoCo).

use farflung_base::Pending;
use farflung_comm::{CommError, Communicator, ReduceOp};
use farflung_compress::CodecSpec;
use farflung_optim::{Average, AverageConfig, Averaging, OuterOptimizer, diloco_outer};
use farflung_tensor::Tensor;
use farflung_zoo::Stage;

use super::job::Job;
use crate::Result;
use crate::config::choice::SyncKind;

/// Whether all replicas are the same after a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Synced {
    /// They are.
    Yes,
    /// They have moved apart since they last were.
    No,
}

/// A method with its state.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "there is one of it in a worker")]
pub(super) enum Sync {
    Ddp(Average),
    DiLoCo { average: Average, outer: OuterOptimizer, every: u64, steps: u64, loss: (f64, u64) },
}

/// What is known after a step.
pub(super) struct After {
    pub(super) loss: f64,
    pub(super) synced: Synced,
    pub(super) stop: bool,
}

/// A small vote that travels beside the values: the mean loss, and whether anybody wants to stop.
pub(super) fn vote(comm: &Communicator, loss: f64, stop: bool) -> Pending<Result<Vec<f64>, CommError>> {
    comm.start_all_reduce(vec![loss, f64::from(u8::from(stop))], ReduceOp::Mean)
}

/// How a job's values are averaged.
pub(super) fn average_config(job: &Job) -> AverageConfig {
    let config = &job.config;
    // One worker has nobody to send to, and nothing to lose bits for.
    let codec: CodecSpec = match config.codec {
        _ if job.world == 1 => CodecSpec::default(),
        codec if config.error_feedback => codec.with_feedback(),
        codec => codec,
    };
    AverageConfig {
        codec,
        bucket_bytes: (config.bucket_mb * 1e6) as usize,
        overlap: config.overlap,
        seed: config.seed,
    }
}

impl Sync {
    pub(super) fn new(job: &Job, comm: &Communicator, stage: &Stage, params: &Tensor) -> Result<Self> {
        let config = &job.config;
        let average = Average::new(comm.clone(), stage.device(), stage.layout(), average_config(job))?;
        Ok(match config.sync {
            SyncKind::Ddp => Self::Ddp(average),
            SyncKind::Diloco => {
                let outer = diloco_outer(config.outer_lr, config.outer_momentum);
                let outer = outer.build(stage.device(), stage.layout())?;
                let outer = OuterOptimizer::new(outer, params)?;
                Self::DiLoCo { average, outer, every: config.sync_every, steps: config.steps, loss: (0.0, 0) }
            }
        })
    }

    /// A step begins: where gradients are averaged, the round that they go into.
    pub(super) fn begin(&mut self) -> Option<Averaging<'_>> {
        match self {
            Self::Ddp(average) => Some(average.begin()),
            Self::DiLoCo { .. } => None,
        }
    }

    /// A step was taken: every H-th, and the last, DiLoCo agrees on new parameters.
    pub(super) fn after_step(
        &mut self,
        comm: &Communicator,
        step: u64,
        params: &mut Tensor,
        loss: f64,
        stop: bool,
    ) -> Result<After> {
        let (average, outer, every, steps, window) = match self {
            Self::Ddp(average) => {
                average.commit();
                return Ok(After { loss, synced: Synced::Yes, stop });
            }
            Self::DiLoCo { average, outer, every, steps, loss } => (average, outer, *every, *steps, loss),
        };
        *window = (window.0 + loss, window.1 + 1);
        if !step.is_multiple_of(every) && step != steps {
            return Ok(After { loss, synced: Synced::No, stop: false });
        }
        let vote = vote(comm, window.0 / window.1 as f64, stop);
        average.all(outer.delta(params)?)?;
        let vote = match vote.wait() {
            Ok(vote) => vote,
            Err(error) => {
                average.rollback();
                return Err(error.into());
            }
        };
        let prepared = outer.prepare()?;
        outer.commit(params, prepared)?;
        average.commit();
        *window = (0.0, 0);
        Ok(After { loss: vote[0], synced: Synced::Yes, stop: vote[1] > 0.0 })
    }

    /// The averager, whose residuals are state.
    pub(super) const fn average(&self) -> &Average {
        match self {
            Self::Ddp(average) | Self::DiLoCo { average, .. } => average,
        }
    }

    /// The averager, to restore.
    pub(super) const fn average_mut(&mut self) -> &mut Average {
        match self {
            Self::Ddp(average) | Self::DiLoCo { average, .. } => average,
        }
    }

    /// The outer optimizer, where there is one.
    pub(super) const fn outer(&self) -> Option<&OuterOptimizer> {
        match self {
            Self::Ddp(_) => None,
            Self::DiLoCo { outer, .. } => Some(outer),
        }
    }

    /// The outer optimizer, to restore.
    pub(super) const fn outer_mut(&mut self) -> Option<&mut OuterOptimizer> {
        match self {
            Self::Ddp(_) => None,
            Self::DiLoCo { outer, .. } => Some(outer),
        }
    }
}
