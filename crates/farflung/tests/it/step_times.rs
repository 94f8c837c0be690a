//! `times.jsonl`: how each step's time is spent on a rank, on a virtual clock whose times are known.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::path::Path;

use crate::tiny::{Run, farflung};
use farflung::{StepTimes, metrics};

fn times(path: &Path) -> Vec<StepTimes> {
    let text = std::fs::read_to_string(path).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Trains on simulated links without evaluation or checks between steps; returns each rank's times.
fn trained(run: &Run, ranks: usize, args: &str) -> Vec<Vec<StepTimes>> {
    let out = run.at("run").display().to_string();
    let quiet = "--eval-every 1000 --check-every 0 --transport simulated --codec none --resume auto";
    let args = format!("--out {out} --workers {ranks} {quiet} {args}");
    let output = farflung().args(run.args(&args)).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let path = |rank: usize| match rank {
        0 => run.at("run/times.jsonl"),
        rank => run.at(&format!("run/ranks/rank-{rank:05}/times.jsonl")),
    };
    (0..ranks).map(|rank| times(&path(rank))).collect()
}

/// Writes a topology file of these machines, by name and speed.
fn machines(run: &Run, machines: &[(&str, &str)]) -> String {
    let path = run.at("machines.toml");
    let device = |(name, flops): &(&str, &str)| {
        format!("[[device]]\nname = \"{name}\"\nflops = \"{flops}\"\nmemory = \"8GB\"\n")
    };
    let devices: String = machines.iter().map(device).collect();
    std::fs::write(&path, format!("default = \"20mbit,25ms\"\n{devices}")).unwrap();
    path.display().to_string()
}

fn close(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-8 * b.abs()
}

#[test]
fn steps_take_what_the_clock_says_and_a_machine_half_as_fast_computes_twice_as_long() {
    let run = Run::new();
    let topology = machines(&run, &[("fast", "2 MFLOPS"), ("slow", "1 MFLOPS")]);
    let all = trained(&run, 2, &format!("--steps 6 --sync ddp --topology {topology}"));
    let rows = metrics::read(&run.at("run/metrics.jsonl")).unwrap();
    let [fast, slow] = &all[..] else { unreachable!() };
    for (i, pair) in rows.windows(2).enumerate().take(4) {
        // The clock of the rows contains only the times of steps: nothing else happens between steps.
        assert!(close(fast[i + 1].took_s, pair[1].time_s - pair[0].time_s), "{:?} {pair:?}", fast[i + 1]);
        assert!(fast[i + 1].bytes_sent == pair[1].bytes_sent && fast[i + 1].met);
    }
    for (fast, slow) in fast.iter().zip(slow).skip(1) {
        assert_eq!((fast.step, fast.rank, slow.rank), (slow.step, 0, 1));
        assert!(
            close(slow.compute_s(), 2.0 * fast.compute_s()) && fast.compute_s() > 0.0,
            "{fast:?} {slow:?}"
        );
        // No rank waits in a pass of one stage; the faster machine's average takes longer by the difference.
        assert_eq!((fast.wait_s, slow.wait_s), (0.0, 0.0));
        let late = slow.compute_s() - fast.compute_s();
        assert!(
            (fast.communicate_s - slow.communicate_s - late).abs() < 0.03 * late + 0.06,
            "{fast:?} {slow:?}"
        );
        assert!(slow.communicate_s > 2.0 * 0.025, "an average takes two messages at least: {slow:?}");
    }
}

#[test]
fn the_second_stage_of_a_pipeline_waits_for_a_slower_first() {
    let run = Run::new();
    let topology = machines(&run, &[("slow", "1 MFLOPS"), ("fast", "8 MFLOPS")]);
    let all = trained(&run, 2, &format!("--steps 3 --stages 2 --microbatches 4 --topology {topology}"));
    for (slow, fast) in all[0].iter().zip(&all[1]) {
        let ahead = slow.compute_s() - fast.compute_s();
        assert!(ahead > 0.0 && fast.wait_s > 0.5 * ahead && slow.wait_s < fast.wait_s, "{slow:?} {fast:?}");
        // While the first stage works after its last message, the second stage waits in the vote.
        assert!(fast.wait_s + fast.communicate_s > ahead, "{slow:?} {fast:?}");
        assert!(slow.met && fast.met && fast.wait_s + fast.communicate_s < fast.took_s);
    }
}

#[test]
fn local_steps_communicate_where_replicas_meet() {
    let run = Run::new();
    let all = trained(&run, 2, "--steps 6 --sync diloco --sync-every 3 --link 20mbit,25ms");
    let met: Vec<bool> = all[0].iter().map(|times| times.met).collect();
    assert_eq!(met, [false, false, true, false, false, true]);
    for times in all.iter().flatten() {
        assert_eq!(times.communicate_s > 0.025, times.met, "{times:?}");
    }
    // A resumed run appends its steps to the existing ones.
    let again = trained(&run, 2, "--steps 8 --sync diloco --sync-every 3 --link 20mbit,25ms");
    assert_eq!(again[0].iter().map(|times| times.step).collect::<Vec<_>>(), [1, 2, 3, 4, 5, 6, 7, 8]);
    assert!(again[1][5].bytes_sent < again[1][7].bytes_sent && again[1][..6] == all[1][..]);
}
