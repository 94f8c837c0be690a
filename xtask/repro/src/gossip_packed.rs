//! Compares decentralised training in few bits, in which workers mix parameters with their neighbours only,
//! with averaging at each step.

use anyhow::Result;

use crate::gossip::{FAR, MEASURED, MOST};
use crate::harness::{Bench, Options, Report, Threshold};
use crate::lab::{Lab, Published, arms};

pub(crate) const BENCH: Bench = Bench {
    name: "gossip-packed",
    claim: "decentralised training in 8 bits and in 1 bit ends as near the loss of averaging at each step as \
            in f32, and takes less time where latency dominates",
    source: "Gan et al. 2021, BAGUA; Koloskova et al. 2019, CHOCO-SGD; Lu and De Sa 2020, Moniqua",
    seed: 1337,
    run,
};

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let lab = Lab::new(report, options);
    let f32 = lab.outcome(report, &arms::F32)?;
    let judged = if options.quick { Threshold::None } else { Threshold::AtMost(MEASURED) };
    lab.compare(report, &arms::F32, &f32, Threshold::None)?;
    let mut said = Vec::new();
    let synchronous = lab.step_time(report, &arms::F32, FAR.parse()?)?;
    for arm in [&arms::LOW_PRECISION, &arms::CHOCO] {
        let outcome = lab.compare(report, arm, &f32, judged)?;
        let faster = synchronous / lab.step_time(report, arm, FAR.parse()?)?;
        report.row(
            &format!("{}: speed-up over f32 at {FAR}", arm.name),
            faster,
            "x",
            Threshold::AtLeast(1.0),
        )?;
        said.push((outcome.gap(&f32).mean, format!("{} {:+.2} %", arm.name, outcome.gap(&f32).mean)));
    }
    let moniqua = lab.compare(report, &arms::MONIQUA_8, &f32, judged)?;
    let one_bit = lab.compare(report, &arms::MONIQUA_1, &f32, Threshold::None)?;
    Published {
        what: "loss of Moniqua compared with averaging at each step",
        paper: "the rate of D-PSGD without extra memory, down to one bit (ResNet-20 and -110 on CIFAR-10)",
        ours: format!(
            "{:+.2} % in 8 bits at {:.1} times fewer bytes than f32, {:+.2} % in one bit at {:.1} times fewer",
            moniqua.gap(&f32).mean,
            f32.payload() / moniqua.payload(),
            one_bit.gap(&f32).mean,
            f32.payload() / one_bit.payload()
        ),
        setting: lab.setting().command(&arms::MONIQUA_8),
        holds: moniqua.gap(&f32).mean <= MOST,
        note: "with one bit the error of each message is about theta, so --consensus-rate must be small and \
               copies mix very slowly",
    }
    .record(report);
    Published {
        what: "loss of the mean model of decentralised training in few bits compared with averaging at each \
               step",
        paper: "the same convergence as centralised training (BAGUA's low-precision ring; CHOCO-SGD)",
        ours: said.iter().map(|(_, text)| text.as_str()).collect::<Vec<_>>().join(", "),
        setting: lab.setting().command(&arms::LOW_PRECISION),
        holds: said.iter().all(|(gap, _)| *gap <= MOST),
        note: "as far above as in f32 (bench gossip): sending fewer bits costs almost nothing",
    }
    .record(report);
    Ok(())
}
