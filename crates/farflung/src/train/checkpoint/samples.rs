//! The samples that boundary codecs store: saved if they are in memory, and made equal at both ends when a run
//! is resumed.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io::Write;

use farflung_compress::{StateMap, StateValue};
use farflung_zoo::weights::{TensorData, TensorView, write_tensors_to};
use safetensors::SafeTensors;

use super::SAMPLES;
use super::source::{Residuals, Source};
use crate::train::trainer::Trainer;
use crate::{Error, Result};

/// Returns the samples that the rank's ends store in memory; empty if there are none.
pub(super) fn held(trainer: &Trainer) -> Result<Vec<(String, Cow<'_, [u8]>)>> {
    let held = trainer.boundaries().save()?;
    let bytes = |(name, value)| match value {
        StateValue::Bytes(bytes) => Some((name, bytes)),
        _ => None,
    };
    Ok(held.into_iter().filter_map(bytes).collect())
}

/// Writes the file of samples.
pub(super) fn write(held: &[(String, Cow<'_, [u8]>)], out: &mut dyn Write) -> std::io::Result<()> {
    let shapes: Vec<[usize; 1]> = held.iter().map(|(_, bytes)| [bytes.len()]).collect();
    let views: Vec<_> = held
        .iter()
        .zip(&shapes)
        .map(|((name, bytes), shape)| TensorView { name, shape, data: TensorData::U8(bytes) })
        .collect();
    write_tensors_to(out, &views, &BTreeMap::new())
}

/// Restores samples if this rank wrote them with its current parts; else clears them.
pub(super) fn restore(trainer: &mut Trainer, source: &Source) -> Result<()> {
    if source.residuals != Residuals::Own {
        trainer.boundaries_mut().forget_all();
        return Ok(());
    }
    let mut held = if source.samples.is_empty() { StateMap::new() } else { parse(source)? };
    trainer.boundaries_mut().load(&mut held)
}

/// Clears samples that differ at the other end of a boundary. All ranks must call it.
pub(super) fn agree(trainer: &mut Trainer) -> Result<()> {
    let forgotten = trainer.agree_on_samples()?;
    if forgotten > 0 {
        let rank = trainer.comm().rank().0;
        tracing::info!(
            rank,
            forgotten,
            "boundary samples that differ between the two ends are sent in full again"
        );
    }
    Ok(())
}

fn parse(source: &Source) -> Result<StateMap<'_>> {
    let file = SafeTensors::deserialize(&source.samples).map_err(|_| Error::Damaged {
        path: source.path().join(SAMPLES),
        what: "it is not a valid safetensors file",
    })?;
    let entry = |(name, tensor): (&str, safetensors::tensor::TensorView<'_>)| {
        (name.to_owned(), StateValue::Bytes(Cow::Owned(tensor.data().to_vec())))
    };
    Ok(file.iter().map(entry).collect())
}
