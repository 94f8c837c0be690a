//! Mutated payloads against every decoder.

use anyhow::{Result, ensure};
use farflung::base::Philox;
use farflung::compress::{Compressor, Payload, PayloadRef, RoundKey, parse};

use crate::harness::{Bench, Mark, Options, Report};
use crate::mutate::mutate;

pub(crate) const BENCH: Bench = Bench {
    name: "hostile-payloads",
    claim: "no mutated payload makes a decoder panic, write outside of its output, or accept an index out of range",
    source: "the crate's own corpus: each codec's payload of 70 values, mutated by a seeded driver",
    seed: 0x05ee_d0f0,
    run,
};

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let names = super::codec_laws::names();
    // Ten million over all in the long run.
    let cases = if options.quick { 20_000 } else { 10_000_000 / names.len() as u64 };
    let rng = Philox::new(report.seed(), 1);
    let x: Vec<f32> = (0..70).map(|i| (rng.uniform(i) - 0.5) * 3.0).collect();
    let (mut total, mut reached, mut accepted, mut bad) = (0_u64, 0_u64, 0_u64, 0_u64);
    for name in &names {
        let mut codec = parse(name)?;
        let mut payload = Payload::new();
        codec.compress(&x, RoundKey::default(), &mut payload)?;
        // Guards on both sides: nothing but the output may change.
        let mut out = vec![1.5; x.len() + 2];
        let mut bytes = Vec::new();
        for case in 0..cases {
            bytes.clear();
            bytes.extend_from_slice(payload.as_bytes());
            if mutate(&mut bytes, &rng, 1000 + case) % 4 != 0 {
                seal(&mut bytes);
            }
            let Ok(p) = PayloadRef::parse(&bytes) else { continue };
            reached += 1;
            let inside = &mut out[1..=x.len()];
            if codec.decompress(p, inside).is_ok() {
                accepted += 1;
                bad += u64::from(name != "none" && inside.iter().any(|v| !v.is_finite()));
            }
        }
        ensure!(out[0].to_bits() == 1.5_f32.to_bits() && out[x.len() + 1].to_bits() == 1.5_f32.to_bits());
        total += cases;
    }
    report.row("payloads", total as f64, "", Mark::None)?;
    report.row("decoders", names.len() as f64, "", Mark::None)?;
    report.row("reached a decoder: share", reached as f64 / total as f64, "", Mark::AtLeast(0.3))?;
    report.row("accepted as another valid payload: share", accepted as f64 / total as f64, "", Mark::None)?;
    report.row("accepted with a value that is not finite", bad as f64, "", Mark::AtMost(0.0))
}

/// A forger can compute checksums, and states a length that fits.
fn seal(bytes: &mut [u8]) {
    if bytes.len() >= 28 {
        let body = bytes.len() as u64 - 28;
        bytes[16..24].copy_from_slice(&body.to_le_bytes());
        let mut crc = crc32fast::Hasher::new();
        crc.update(&bytes[..24]);
        crc.update(&bytes[28..]);
        bytes[24..28].copy_from_slice(&crc.finalize().to_le_bytes());
    }
}
