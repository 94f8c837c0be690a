//! Runs the short form of every bench that is not in [`LEFT_OUT`]. The tests fail if a condition on a result is
//! not met.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::process::Command;

use farflung_repro::BENCHES;

/// Benches that these tests do not run, with the reason.
const LEFT_OUT: &[(&str, &str)] = &[
    ("all-reduce", "its marks depend on the clock"),
    ("all-reduce-limit", "its marks depend on the clock"),
    ("bagua", "trains for half a minute"),
    ("churn-anywhere", "deadlines of real processes, which would be missed beside other tests"),
    ("blame", "half a minute of deadlines"),
    ("boundary", "half a minute"),
    ("cocktail", "trains for half a minute"),
    ("come-and-go", "real processes for minutes; needs the `farflung` binary"),
    ("codec-speed", "its marks depend on the clock"),
    ("default-run", "its marks depend on the clock"),
    ("device-parity", "needs a device"),
    ("device-train", "needs a device"),
    ("combo", "trains for half a minute"),
    ("demo", "trains for half a minute"),
    ("demo-parts", "trains for half a minute"),
    ("des-loc", "trains for half a minute"),
    ("dgc", "trains for half a minute"),
    ("diloco", "trains for half a minute"),
    ("diloco-500", "trains for half a minute"),
    ("dipaco", "trains for minutes, and predicts 256 replicas"),
    ("gpt-jt", "trains four arms"),
    ("disk", "needs root, strace and the `farflung` binary"),
    ("divergence", "one mark depends on the clock"),
    ("infinity", "needs root, strace and the `farflung` binary"),
    ("larger-than-one", "needs 40 GB of disk, and 12 minutes"),
    ("elastic-launch", "real processes; needs the `farflung` binary"),
    ("engines", "needs mpirun, Slurm, sshd and the `farflung` binary"),
    ("failure", "deadlines of real processes, which would be missed beside other tests"),
    ("gemm", "its marks depend on the clock"),
    ("host-join", "real processes for minutes; needs the `farflung` binary"),
    ("halos", "trains for minutes"),
    ("gossip", "trains for half a minute"),
    ("gossip-packed", "trains for half a minute"),
    ("async", "trains for half a minute"),
    ("local-vs-sync", "trains for half a minute"),
    ("gpt-step", "its marks depend on the clock"),
    ("llama-step", "its marks depend on the clock"),
    ("pacing", "its marks depend on the clock"),
    ("plan-scale", "its marks depend on the clock"),
    ("gpu", "needs a device"),
    ("instructions", "counts instructions of a release build, with a tool that may be missing"),
    ("learn-nano", "half a minute"),
    ("machine-names", "needs network namespaces and the `farflung` binary"),
    ("onebit", "trains for half a minute"),
    ("onebit-lamb", "trains for half a minute"),
    ("overlap-comm", "half a minute"),
    ("overlap-ddp", "half a minute"),
    ("powersgd", "trains for half a minute"),
    ("precision", "trains for half a minute"),
    ("relay", "its marks depend on the clock"),
    ("secure-tcp", "its marks depend on the clock"),
    ("shared-memory", "its marks depend on the clock"),
    ("rendezvous", "half a minute of deadlines"),
    ("transports", "a minute of deadlines, which would be missed beside other tests"),
    ("signals", "its marks depend on the clock"),
    ("stop-together", "real processes for minutes; needs the `farflung` binary"),
    ("strangers", "ten thousand connections use the processor, and some marks are times"),
    ("streaming", "trains for half a minute"),
    ("sim-scale", "its marks depend on the clock"),
    ("simulate-scale", "its marks depend on the clock"),
    ("wan-step", "its marks depend on the clock"),
    ("smollm2", "needs a file that `cargo xtask setup smollm2` fetches, and the `farflung` binary"),
];

/// Runs a bench. All conditions on its results must be met.
fn short(name: &str) {
    let output = Command::new(env!("CARGO_BIN_EXE_farflung-repro")).args([name, "--quick"]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}\n{errors}");
}

/// Defines a test for each bench, and the list of their names.
macro_rules! short {
    ($($test:ident: $name:literal,)*) => {
        const RUN: &[&str] = &[$($name),*];
        $(
            #[test]
            fn $test() {
                short($name);
            }
        )*
    };
}

short! {
    alpa_exact: "alpa-exact",
    arithmetic: "arithmetic",
    aqsgd_cache: "aqsgd-cache",
    churn_soak: "churn-soak",
    cocktail_ratio: "cocktail-ratio",
    codec_bytes: "codec-bytes",
    codec_laws: "codec-laws",
    collective_cost: "collective-cost",
    collective_laws: "collective-laws",
    compositions: "compositions",
    counts: "counts",
    ddp_exact: "ddp-exact",
    diloco_exact: "diloco-exact",
    dtfm_cost: "dtfm-cost",
    dtfm_search: "dtfm-search",
    dtfm_world: "dtfm-world",
    eval_same: "eval-same",
    families: "families",
    hostile_frames: "hostile-frames",
    hostile_payloads: "hostile-payloads",
    join_anywhere: "join-anywhere",
    local_optimizers: "local-optimizers",
    methods: "methods",
    memory_predicted: "memory-predicted",
    memory_table: "memory-table",
    mismatch: "mismatch",
    moe: "moe",
    morphing: "morphing",
    pipeline_exact: "pipeline-exact",
    overlap_stages: "overlap-stages",
    whole_model_nowhere: "whole-model-nowhere",
    recut: "recut",
    plan_exact: "plan-exact",
    plan_run: "plan-run",
    plan_text: "plan-text",
    profile: "profile",
    predict_vs_run: "predict-vs-run",
    regions: "regions",
    replan: "replan",
    recovery_time: "recovery-time",
    resume: "resume",
    schedule_laws: "schedule-laws",
    schedule_vectors: "schedule-vectors",
    slow_link: "slow-link",
    soak: "soak",
    split_brain: "split-brain",
    theory: "theory",
    swarm: "swarm",
    swarm_rebalance: "swarm-rebalance",
    uneven: "uneven",
    uneven_plan: "uneven-plan",
    trainer_cost: "trainer-cost",
    tensor_parallel: "tensor-parallel",
    context_parallel: "context-parallel",
    sparse: "sparse",
    tune: "tune",
    utilisation: "utilisation",
    zero: "zero",
    zeropp: "zeropp",
    zero_bubble: "zero-bubble",
}

/// Every bench must either run here or be listed with a reason.
#[test]
fn every_bench_is_run_here_or_left_out_for_a_reason() {
    for bench in BENCHES {
        let left_out = LEFT_OUT.iter().any(|(name, _)| *name == bench.name);
        assert!(RUN.contains(&bench.name) != left_out, "{}", bench.name);
    }
    assert!(RUN.iter().all(|name| BENCHES.iter().any(|bench| bench.name == *name)));
}
