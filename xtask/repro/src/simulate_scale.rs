//! Measures the speed of simulating pipelines.

use anyhow::Result;
use farflung::base::Nanos;
use farflung::parallel::pipeline::{Boundary, Method, PipelineCost, Settings, StageCost, simulate};

use crate::harness::{Bench, Options, Report, Threshold};
use crate::machine::now;

pub(crate) const BENCH: Bench = Bench {
    name: "simulate-scale",
    claim: "1,024 stages and 4,096 microbatches are simulated in under 2 s",
    source: "ours",
    seed: 0,
    run,
};

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let m = 4096;
    let methods: &[Method] = if options.quick {
        &[Method::OneFOneB]
    } else {
        &[Method::OneFOneB, Method::GPipe, Method::OneFOneBSlope, Method::Interleaved, Method::ZbH2]
    };
    for &method in methods {
        let p = if method == Method::Interleaved { 512 } else { 1024 };
        let settings = Settings { hop: Nanos(500_000), ..Settings::new(p, m) };
        let start = now();
        let order = method.order(&settings)?;
        let made = now() - start;
        let cost = PipelineCost::uniform(&order, StageCost::UNIT, Boundary::latency(settings.hop));
        // The best of three, since other work on the machine can only add time.
        let mut taken = f64::INFINITY;
        let mut makespan = Nanos::ZERO;
        for _ in 0..3 {
            let start = now();
            makespan = simulate(&order, &cost)?.makespan();
            taken = taken.min((now() - start).as_secs_f64());
        }
        let events: usize = order.lists().iter().map(Vec::len).sum();
        let chunks = order.placement().stages() / p;
        let name = format!("{method}, {p} ranks of {chunks} chunks, {m} microbatches");
        report.row(&format!("{name}: makespan"), makespan.as_secs_f64() * 1e3, "units", Threshold::None)?;
        report.row(&format!("{name}: ordered and checked"), made.as_secs_f64(), "s", Threshold::None)?;
        report.row(&format!("{name}: simulated"), taken, "s", Threshold::AtMost(2.0))?;
        report.row(&format!("{name}: events"), events as f64 / taken, "1/s", Threshold::None)?;
    }
    Ok(())
}
