//! The benches: one file per claim, each with a [`harness::Bench`] in [`BENCHES`].
//!
//! A new bench is a module here with one `pub(crate) const BENCH: Bench`, and a line in the list:
//!
//! ```
//! use farflung_repro::harness::{Bench, Options, Report, Threshold};
//!
//! const BENCH: Bench = Bench {
//!     name: "adds-up",
//!     claim: "one and one is two",
//!     source: "Peano 1889",
//!     seed: 0,
//!     run,
//! };
//!
//! fn run(report: &mut Report<'_>, options: &Options) -> anyhow::Result<()> {
//!     let terms = if options.quick { 2 } else { 4 };
//!     report.row("sum of ones", f64::from(terms), "1", Threshold::AtLeast(2.0))?;
//!     // Present only with `--against FILE`, where the file has the figure.
//!     let theirs = options.peers.best("adds", &[("terms", "2")], "per_s");
//!     report.ratio("sums/s over theirs", 100.0, theirs, Threshold::AtLeast(1.0))
//! }
//! # assert_eq!((BENCH.name, BENCH.seed), ("adds-up", 0));
//! ```

pub mod harness;
pub mod peers;

mod allocations;
mod binary;
mod blame;
mod boundary;
mod docs;
mod lab;
mod machine;
mod machine_names;
mod mutate;
mod ranks;
mod step_peaks;
mod trained;
mod training_step;
mod wan_step;
mod workers;

mod collective_cost;
mod collective_laws;
mod compositions;
mod all_reduce;
mod alpa_exact;
mod arithmetic;
mod asynchronous;
mod all_reduce_limit;
mod aqsgd_cache;
mod bagua;
mod churn_soak;
mod cocktail;
mod cocktail_ratio;
mod codec_bytes;
mod codec_laws;
mod codec_speed;
mod context_parallel;
mod counts;
mod ddp_exact;
mod default_run;
#[cfg(feature = "wgpu")]
mod device_parity;
#[cfg(feature = "wgpu")]
mod device_train;
mod combo;
mod demo;
mod demo_parts;
mod des_loc;
mod dgc;
mod diloco;
mod diloco_500;
mod diloco_exact;
mod disk;
mod divided;
mod divergence;
mod dtfm_cost;
mod dtfm_search;
mod dtfm_world;
mod engines;
mod failure;
mod families;
mod gemm;
mod gossip;
mod gossip_packed;
mod gpt_jt;
mod gpt_step;
#[cfg(feature = "wgpu")]
mod gpu;
mod halos;
mod hostile_frames;
mod hostile_payloads;
mod infinity;
mod instructions;
mod larger_than_one;
mod learn_nano;
mod llama_step;
mod local_optimizers;
mod local_vs_sync;
mod methods;
mod members;
mod memory_predicted;
mod memory_table;
mod mismatch;
mod dipaco;
mod moe;
mod morphing;
mod namespaces;
#[cfg(feature = "iroh")]
mod nat;
mod normal;
mod onebit;
mod onebit_lamb;
mod overlap_comm;
mod overlap_ddp;
mod overlap_stages;
mod pacing;
mod pipeline_exact;
mod plan_exact;
mod plan_run;
mod plan_scale;
mod plan_text;
mod powersgd;
mod precision;
mod predict_vs_run;
mod profile;
mod recut;
mod regions;
mod relay;
mod rendezvous;
mod replan;
mod resume;
mod schedule_laws;
mod schedule_vectors;
mod secure_tcp;
mod shared_memory;
mod signals;
mod sim_scale;
mod theory;
mod trainer_cost;
mod transports;
mod tune;
mod simulate_scale;
mod slow_link;
mod smollm2;
mod soak;
mod sparse;
mod split_brain;
mod strangers;
mod streaming;
mod swarm;
mod swarm_rebalance;
mod tensor_parallel;
mod uneven;
mod uneven_plan;
mod utilisation;
mod whole_model_nowhere;
mod zero;
mod zero_bubble;
mod zeropp;

use std::io::Write;

use harness::Bench;

/// Every bench, in the order in which they run.
pub const BENCHES: &[Bench] = &[
    gpt_jt::BENCH,
    gpt_step::BENCH,
    llama_step::BENCH,
    families::BENCH,
    profile::BENCH,
    gemm::BENCH,
    counts::BENCH,
    ddp_exact::BENCH,
    diloco_exact::BENCH,
    diloco::BENCH,
    diloco_500::BENCH,
    bagua::BENCH,
    powersgd::BENCH,
    onebit::BENCH,
    onebit_lamb::BENCH,
    streaming::BENCH,
    theory::BENCH,
    wan_step::BENCH,
    cocktail::BENCH,
    gossip::BENCH,
    gossip_packed::BENCH,
    asynchronous::BENCH,
    halos::BENCH,
    local_vs_sync::BENCH,
    des_loc::BENCH,
    demo::BENCH,
    demo_parts::BENCH,
    combo::BENCH,
    dgc::BENCH,
    precision::BENCH,
    #[cfg(feature = "wgpu")]
    device_parity::BENCH,
    #[cfg(feature = "wgpu")]
    device_train::BENCH,
    #[cfg(feature = "wgpu")]
    gpu::BENCH,
    overlap_ddp::BENCH,
    overlap_stages::BENCH,
    whole_model_nowhere::BENCH,
    recut::BENCH,
    resume::BENCH,
    signals::BENCH,
    disk::BENCH,
    mismatch::BENCH,
    dipaco::BENCH,
    moe::BENCH,
    tensor_parallel::BENCH,
    context_parallel::BENCH,
    sparse::BENCH,
    zero::BENCH,
    zeropp::BENCH,
    infinity::BENCH,
    larger_than_one::BENCH,
    morphing::BENCH,
    methods::BENCH,
    divergence::BENCH,
    collective_laws::BENCH,
    collective_cost::BENCH,
    uneven::BENCH,
    overlap_comm::BENCH,
    members::churn::BENCH,
    engines::BENCH,
    machine_names::BENCH,
    #[cfg(feature = "iroh")]
    nat::BENCH,
    failure::BENCH,
    members::join::BENCH,
    members::hosted::BENCH,
    members::launched::BENCH,
    members::come_and_go::BENCH,
    members::eval_same::BENCH,
    members::recovery::BENCH,
    members::stop_together::BENCH,
    relay::BENCH,
    soak::BENCH,
    split_brain::BENCH,
    churn_soak::BENCH,
    all_reduce::BENCH,
    all_reduce_limit::BENCH,
    secure_tcp::BENCH,
    shared_memory::BENCH,
    transports::BENCH,
    strangers::BENCH,
    codec_bytes::BENCH,
    codec_laws::BENCH,
    codec_speed::BENCH,
    cocktail_ratio::BENCH,
    aqsgd_cache::BENCH,
    hostile_frames::BENCH,
    hostile_payloads::BENCH,
    instructions::BENCH,
    learn_nano::BENCH,
    local_optimizers::BENCH,
    default_run::BENCH,
    schedule_vectors::BENCH,
    schedule_laws::BENCH,
    slow_link::BENCH,
    smollm2::BENCH,
    pacing::BENCH,
    pipeline_exact::BENCH,
    predict_vs_run::BENCH,
    regions::BENCH,
    plan_exact::BENCH,
    plan_text::BENCH,
    rendezvous::BENCH,
    replan::BENCH,
    uneven_plan::BENCH,
    alpa_exact::BENCH,
    memory_predicted::BENCH,
    memory_table::BENCH,
    plan_run::BENCH,
    plan_scale::BENCH,
    swarm::BENCH,
    swarm_rebalance::BENCH,
    arithmetic::BENCH,
    dtfm_cost::BENCH,
    dtfm_search::BENCH,
    dtfm_world::BENCH,
    blame::BENCH,
    boundary::BENCH,
    compositions::BENCH,
    simulate_scale::BENCH,
    sim_scale::BENCH,
    trainer_cost::BENCH,
    tune::BENCH,
    utilisation::BENCH,
    zero_bubble::BENCH,
];

/// Runs what the arguments ask for: benches, or the part of a bench that needs its own process.
///
/// Returns the exit code.
pub fn main(args: &[String], out: &mut dyn Write, err: &mut dyn Write) -> u8 {
    match args.split_first() {
        Some((first, rest)) if first == training_step::CHILD => {
            print_error(training_step::child(rest, out), err)
        }
        Some((first, rest)) if first == instructions::CHILD => {
            print_error(instructions::child(rest, out), err)
        }
        Some((first, rest)) if first == shared_memory::CHILD => {
            print_error(shared_memory::child(rest, out), err)
        }
        Some((first, rest)) if first == whole_model_nowhere::CHILD => {
            print_error(whole_model_nowhere::child(rest, out), err)
        }
        Some((first, rest)) if first == transports::CHILD => print_error(transports::child(rest, out), err),
        Some((first, rest)) if first == secure_tcp::CHILD => print_error(secure_tcp::child(rest, out), err),
        Some((first, rest)) if first == strangers::CHILD => print_error(strangers::child(rest, out), err),
        Some((first, rest)) if first == all_reduce::CHILD => print_error(all_reduce::child(rest, out), err),
        Some((first, rest)) if first == failure::processes::CHILD => {
            print_error(failure::processes::child(rest, out), err)
        }
        _ => {
            let code = harness::main(BENCHES, args, out, err);
            lab::kept::clean();
            code
        }
    }
}

/// Prints the error of a part that runs in its own process, and returns the exit code.
fn print_error(outcome: anyhow::Result<()>, err: &mut dyn Write) -> u8 {
    match outcome {
        Ok(()) => 0,
        // If stderr itself fails, the error cannot be printed.
        Err(error) => writeln!(err, "error: {error:#}").map_or(1, |()| 1),
    }
}
