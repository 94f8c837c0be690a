//! Trains the weights from which all arms of a setting start.

use std::path::Path;

use anyhow::{Context, Result};
use farflung::tensor::Device;
use farflung::train::Job;
use farflung::zoo::weights::WriteOptions;
use farflung::zoo::{Stage, ZooError, weights};

use crate::workers::on_all;

/// Trains a job, writes its model into a folder, and returns the held-out loss.
///
/// Errors: a rank fails; the folder cannot be written.
pub(crate) fn train(job: &Job, folder: &Path) -> Result<f64> {
    let ranks = on_all(job, |rank| {
        for _ in 0..job.config.steps {
            rank.step(false)?;
        }
        Ok((rank.evaluate()?, rank.params().to_vec::<f32>()?))
    })?;
    let (loss, params) = ranks.into_iter().next().context("the job has no ranks")?;
    let layout = Stage::whole(&job.model, &Device::cpu(1)?)?.layout().clone();
    weights::write(folder, &job.model, WriteOptions::default(), |_, spec, values| {
        values.copy_from_slice(&params[layout.params()[layout.find(&spec.name)?].range()]);
        Ok::<_, ZooError>(())
    })?;
    Ok(loss)
}
