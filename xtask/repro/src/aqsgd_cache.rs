//! Runs both ends of an AQ-SGD link over epochs in random order, with samples on disk. In each epoch but the
//! first, the sender crashes once.

use std::path::Path;

use anyhow::{Context, Result};
use farflung::base::Philox;
use farflung::compress::link::{AqSgd, FileStore, LinkCodec, MappedStore, Samples, Store};
use farflung::compress::{CompressError, Int4, Payload, PayloadRef, RoundKey};

use crate::harness::{Bench, Options, Report, Threshold};

pub(crate) const BENCH: Bench = Bench {
    name: "aqsgd-cache",
    claim: "both ends of an AQ-SGD link store the same bits over ten epochs and after a crash, in files of \
            the stated size, accessed by reads and writes or memory-mapped, with 16, 8 and 4 bits per value",
    source: "Wang et al. 2022, AQ-SGD, Alg. 1",
    seed: 4,
    run,
};

const SAMPLES: u64 = 64;
const POSITIONS: usize = 64;
const CHANNELS: usize = 64;
const LEN: usize = POSITIONS * CHANNELS;

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let epochs = if options.quick { 4 } else { 10 };
    // Bytes that 4096 values take: two bytes each, or their codes and two bytes for each 64 values.
    let (f16, int8, int4) = (2 * LEN, LEN + LEN / 32, LEN / 2 + LEN / 32);
    for (store, open) in [("", at_an_offset as Open), (", mapped", mapped as Open)] {
        for (held, samples, bytes) in [
            ("f16", Samples::f16(LEN), f16),
            ("8 bits", Samples::int8(LEN), int8),
            ("4 bits", Samples::int4(LEN), int4),
        ] {
            one(report, epochs, &format!("{held}{store}"), (samples, bytes), open)?;
        }
    }
    Ok(())
}

/// Opens a file of samples.
type Open = fn(&Path, Samples) -> Result<Box<dyn Store>>;

fn at_an_offset(path: &Path, samples: Samples) -> Result<Box<dyn Store>> {
    Ok(Box::new(FileStore::open(path, samples, SAMPLES)?))
}

#[expect(
    unsafe_code,
    reason = "no other process writes to the mapped file, which is in the bench's own folder"
)]
fn mapped(path: &Path, samples: Samples) -> Result<Box<dyn Store>> {
    // SAFETY: each end has its own file, in a folder made for this run, and closes it before it opens it again.
    Ok(Box::new(unsafe { MappedStore::open(path, samples, SAMPLES) }?))
}

/// Runs all epochs with one storage format of samples.
fn one(
    report: &mut Report<'_>,
    epochs: u64,
    name: &str,
    (samples, bytes): (Samples, usize),
    store: Open,
) -> Result<()> {
    let dir = tempfile::tempdir()?;
    let path = |name: &str| dir.path().join(name);
    let open = |name: &str| -> Result<_> {
        let store = store(&path(name), samples)?;
        Ok(AqSgd::per_channel(Int4::new(POSITIONS as u32)?, store, CHANNELS)?)
    };
    let (mut sender, mut receiver) = (open("sender")?, open("receiver")?);
    let (mut payload, mut out) = (Payload::new(), vec![0.0; 4 * LEN]);
    let (mut differ, mut found, mut recovered, mut errors) = (0_u32, 0_u32, 0_u32, Vec::new());
    for epoch in 0..epochs {
        let mut order: Vec<u64> = (0..SAMPLES).collect();
        let rng = Philox::new(report.seed(), epoch);
        order.sort_by_key(|id| rng.word(*id));
        let (mut lost, mut norm) = (0.0_f64, 0.0_f64);
        for (i, ids) in order.chunks(4).enumerate() {
            let x: Vec<f32> = ids.iter().flat_map(|id| activation(*id, epoch)).collect();
            let key = RoundKey { round: epoch, ..RoundKey::default() };
            sender.encode(ids, &x, key, &mut payload)?;
            if epoch > 0 && i == 5 {
                // The sender stored its copy, and crashed before it sent the payload.
                drop(sender);
                sender = open("sender")?;
                sender.encode(ids, &x, key, &mut payload)?;
                let missed = receiver.decode(ids, PayloadRef::parse(payload.as_bytes())?, &mut out);
                found += u32::from(matches!(missed, Err(CompressError::CacheMiss { .. })));
                sender.forget(ids)?;
                sender.encode(ids, &x, key, &mut payload)?;
                recovered += 1;
            }
            receiver.decode(ids, PayloadRef::parse(payload.as_bytes())?, &mut out)?;
            lost += x.iter().zip(&out).map(|(x, o)| f64::from(x - o).powi(2)).sum::<f64>();
            norm += x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>();
        }
        errors.push((lost / norm).sqrt());
        let file = |name| std::fs::read(path(name));
        differ += u32::from(file("sender")? != file("receiver")?);
    }
    let mut row =
        |metric: &str, value: f64, unit, mark| report.row(&format!("{name}: {metric}"), value, unit, mark);
    row("epochs after which the two ends differ", f64::from(differ), "", Threshold::AtMost(0.0))?;
    let size = std::fs::metadata(path("sender"))?.len();
    let formula = 16 + SAMPLES * (4 + bytes as u64);
    row("size of a file", size as f64, "B", Threshold::None)?;
    row(
        "size of a file: difference from the formula",
        size.abs_diff(formula) as f64,
        "B",
        Threshold::AtMost(0.0),
    )?;
    row("crashes", f64::from(recovered), "", Threshold::AtLeast(1.0))?;
    row(
        "crashes that were not detected and repaired",
        f64::from(recovered - found),
        "",
        Threshold::AtMost(0.0),
    )?;
    let last = *errors.last().context("expected at least one epoch")?;
    row("relative error of the first epoch with changes", errors[1], "", Threshold::None)?;
    row(
        "relative error of the last epoch, relative to the first with changes",
        last / errors[1],
        "",
        Threshold::AtMost(0.5),
    )
}

/// Returns an activation of a sample that changes less in each epoch.
fn activation(id: u64, epoch: u64) -> Vec<f32> {
    let (mut x, mut noise) = (vec![0.0; LEN], vec![0.0; LEN]);
    Philox::new(1, id).fill_normal(1.0, &mut x);
    Philox::new(2 + epoch, id).fill_normal(0.5 * 0.6_f32.powi(epoch as i32), &mut noise);
    x.iter().zip(noise).map(|(x, n)| x + n).collect()
}
