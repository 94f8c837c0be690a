//! Compares local steps with averaging at each step: bytes, time and loss.

use anyhow::Result;
use farflung::base::{Bandwidth, Link, Nanos};

use crate::harness::{Bench, Options, Report, Threshold};
use crate::lab::{Arm, Lab, Published, arms};

pub(crate) const BENCH: Bench = Bench {
    name: "local-vs-sync",
    claim: "H local steps divide by H the bytes that are sent and the time that averages add to a step; \
            outer steps, eager or not, end near the loss of averaging at each step",
    source: "Lin et al. 2020, local SGD; Together 2022, GPT-JT; Kale et al. 2025, eager updates; Ghosh et \
             al. 2021, EventGraD",
    seed: 1337,
    run,
};

/// Ratio of averaging time to computing time in the published setting of GPT-JT: 145 s and 10 s.
const SYNC_OVER_COMPUTE: f64 = 14.5;
/// Published overhead of averages every 50 steps, in percent.
const OVERHEAD: f64 = 30.0;

/// Measures the seconds of an arm's step on a link.
struct Clock<'a, 'r, 'o> {
    lab: &'a Lab,
    report: &'r mut Report<'o>,
}

impl Clock<'_, '_, '_> {
    fn step(&mut self, arm: &Arm, link: Link) -> Result<f64> {
        self.lab.step_time(self.report, arm, link)
    }
}

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let lab = Lab::new(report, options);
    let f32 = lab.outcome(report, &arms::F32)?;
    lab.compare(report, &arms::F32, &f32, Threshold::None)?;
    let judged = |most| if options.quick { Threshold::None } else { Threshold::AtMost(most) };
    let mut said = Vec::new();
    for (arm, most) in [
        (&arms::LOCAL_5, Threshold::None),
        (&arms::LOCAL_10, Threshold::None),
        (&arms::LOCAL_50, Threshold::None),
        (&arms::EAGER_10, Threshold::None),
        (&arms::EAGER_50, judged(EAGER_MOST)),
        (&arms::EVENT, judged(EVENT_MOST)),
    ] {
        let outcome = lab.compare(report, arm, &f32, most)?;
        let ratio = f32.payload() / outcome.payload().max(1.0);
        said.push((arm.name, outcome.gap(&f32).mean, ratio));
    }
    let link = |bits: f64| Link { bandwidth: Bandwidth(bits as u64), latency: Nanos::from_micros(1) };
    let mut clock = Clock { lab: &lab, report };
    // The computing time and the averaging time are derived from two periods. They then predict a third one.
    let slow = link(100e6);
    let [five, ten, fifty] =
        [&arms::LOCAL_5, &arms::LOCAL_10, &arms::LOCAL_50].map(|arm| clock.step(arm, slow));
    let (five, ten, fifty) = (five?, ten?, fifty?);
    let average = (five - fifty) / (1.0 / 5.0 - 1.0 / 50.0);
    let compute = fifty - average / 50.0;
    let off = (ten / (compute + average / 10.0) - 1.0).abs() * 100.0;
    clock.report.row(
        "step time with H=10: difference from compute + average / H",
        off,
        "%",
        Threshold::AtMost(2.0),
    )?;
    // A link on which averaging takes as long, relative to computing, as in the published run.
    let bits = 100e6 * average / (SYNC_OVER_COMPUTE * compute);
    let (often, seldom) = (clock.step(&arms::F32, link(bits))?, clock.step(&arms::LOCAL_50, link(bits))?);
    let (without, with) = ((often / compute - 1.0) * 100.0, (seldom / compute - 1.0) * 100.0);
    report.row(
        "time added to computing by averages at each step, where an average takes 14.5 times as long",
        without,
        "%",
        Threshold::None,
    )?;
    report.row(
        "time added to computing by averages every 50 steps, on the same link",
        with,
        "%",
        Threshold::AtMost(OVERHEAD),
    )?;
    let volume =
        said.iter().find(|(name, ..)| *name == arms::LOCAL_50.name).map_or(0.0, |(.., ratio)| *ratio);
    report.row(
        "payload of averages at each step relative to every 50 steps: difference from 50",
        (volume / 50.0 - 1.0).abs() * 100.0,
        "%",
        Threshold::AtMost(5.0),
    )?;
    let gap =
        |arm: &Arm| said.iter().find(|(name, ..)| *name == arm.name).map_or(f64::NAN, |(_, gap, _)| *gap);
    Published {
        what: "volume and overhead of averages every 50 steps, at 1 Gbit/s",
        paper: "633 TB become 12.7 TB per machine (49.8x), about 30 % overhead (GPT-JT, 6B, four machines)",
        ours: format!(
            "{volume:.1}x, {with:.0} % where averages at each step add {without:.0} %; loss {:+.2} %",
            gap(&arms::LOCAL_50)
        ),
        setting: lab.setting().command(&arms::LOCAL_50),
        holds: with <= OVERHEAD && (volume / 50.0 - 1.0).abs() <= 0.05 && gap(&arms::LOCAL_50) <= 3.0,
        note: "a link on which an average takes 14.5 times as long as a step's computing, as in the \
               published run",
    }
    .record(report);
    Published {
        what: "loss of eager updates, whose averages may take a whole round to arrive, compared with \
               averaging at each step",
        paper: "close to DiLoCo at equal tokens (up to 1B parameters)",
        ours: format!("H=10 {:+.2} %, H=50 {:+.2} %", gap(&arms::EAGER_10), gap(&arms::EAGER_50)),
        setting: lab.setting().command(&arms::EAGER_50),
        holds: gap(&arms::EAGER_50) <= 3.0,
        note: "eight workers, 40 outer steps with H=50; for DiLoCo see bench diloco",
    }
    .record(report);
    Ok(())
}

/// Largest allowed increase of losses over that of the f32 arm, in percent: the value measured over three seeds
/// (7.81) plus two standard deviations of 0.44. The target of 3 is not reached, and the record says so.
const EAGER_MOST: f64 = 8.7;
/// The value measured (7.43) plus two standard deviations of 0.32.
const EVENT_MOST: f64 = 8.1;
