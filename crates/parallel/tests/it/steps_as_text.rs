//! Snapshots of the step lists of 15 plans: each family of schedules, with and without replicas, members,
//! local steps, a tied table and divided experts.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::fmt::Write as _;

use farflung_base::Rank;
use farflung_parallel::ParallelError;
use farflung_parallel::pipeline::{Lowering, Method, Schedule, Settings, TiedWeights};
use farflung_parallel::step::{Moment, NormVote, RankStep, ReplicaSteps, StepOp, StepSettings};

/// One replica, whose first and last part share a table where they can.
const ALONE: StepSettings = StepSettings {
    replicas: ReplicaSteps::Alone,
    overlap: true,
    tied: TiedWeights::Across,
    by_arrivals: false,
    norm: NormVote::Pipeline,
    shards: false,
};

/// Replicas that average the gradients of each step.
const REPLICAS: StepSettings = StepSettings { replicas: ReplicaSteps::Together, ..ALONE };

/// The same where the members of a run may leave.
const MEMBERS: StepSettings = StepSettings { norm: NormVote::All, ..REPLICAS };

/// Replicas that train apart.
const LOCAL: StepSettings = StepSettings { replicas: ReplicaSteps::Apart, ..ALONE };

fn schedule(method: Method, ranks: u32, settings: StepSettings) -> Schedule {
    let order = method.order(&Settings { slices: 2, ..Settings::new(ranks, 2 * ranks) }).unwrap();
    let lowering = Lowering {
        replicas: settings.replicas == ReplicaSteps::Together,
        tied: settings.tied == TiedWeights::Across,
        ..Lowering::default()
    };
    Schedule::new(order, &lowering).unwrap()
}

fn lists(method: Method, ranks: u32, settings: StepSettings) -> Vec<RankStep> {
    let schedule = schedule(method, ranks, settings);
    let tied = match settings.tied {
        TiedWeights::Across => schedule.order().placement().tie(),
        other => other,
    };
    let settings = StepSettings { tied, ..settings };
    (0..ranks).map(|rank| RankStep::new(&schedule, Rank(rank), settings).unwrap()).collect()
}

#[test]
fn steps_of_plans() {
    let untied = StepSettings { tied: TiedWeights::Whole, ..REPLICAS };
    let divided = StepSettings { norm: NormVote::Divided, ..REPLICAS };
    let sharded = StepSettings { shards: true, ..divided };
    for (name, method, ranks, settings) in [
        ("gpipe, alone", Method::GPipe, 2, ALONE),
        ("1f1b, replicas", Method::OneFOneB, 2, REPLICAS),
        ("dualpipe, replicas", Method::DualPipe, 2, REPLICAS),
        ("1f1b, local steps", Method::OneFOneB, 2, LOCAL),
        ("one rank, replicas", Method::OneFOneB, 1, REPLICAS),
        ("one rank, divided", Method::OneFOneB, 1, divided),
        ("1f1b, divided", Method::OneFOneB, 2, divided),
        ("1f1b, shards", Method::OneFOneB, 2, sharded),
        ("interleaved, replicas, untied", Method::Interleaved, 2, untied),
        ("zb-h1, members", Method::ZbH1, 2, MEMBERS),
        ("zb-h1, replicas", Method::ZbH1, 2, REPLICAS),
        ("zb-v, local steps", Method::ZbV, 2, LOCAL),
        ("chimera, alone", Method::Chimera, 2, ALONE),
        ("terapipe, replicas", Method::TeraPipe, 2, REPLICAS),
        ("pipedream-2bw, replicas", Method::PipeDream2Bw, 2, REPLICAS),
        ("pipedream, no overlap", Method::PipeDream, 2, StepSettings { overlap: false, ..REPLICAS }),
    ] {
        let lists = lists(method, ranks, settings);
        let mut text = String::new();
        for (rank, list) in lists.iter().enumerate() {
            assert_eq!(&list.to_string().parse::<RankStep>().unwrap(), list, "{name}: it is read back");
            write!(text, "rank {rank}\n{list}").unwrap();
        }
        insta::with_settings!({ prepend_module_to_snapshot => false, omit_expression => true }, {
            insta::assert_snapshot!(format!("step-{}", name.replace(", ", "-").replace(' ', "-")), text);
        });
    }
}

/// Whatever the schedule, each rank updates all of its parts as often as the schedule says, and only after the
/// average of that update.
#[test]
fn each_update_follows_its_average() {
    for method in Method::ALL.into_iter().filter(|&method| method != Method::Inference) {
        for settings in [ALONE, REPLICAS, LOCAL] {
            for (rank, list) in lists(method, 4, settings).into_iter().enumerate() {
                let ops: Vec<StepOp> = [Moment::Pass, Moment::Reduce, Moment::Commit]
                    .into_iter()
                    .flat_map(|moment| list.at(moment).to_vec())
                    .collect();
                let homes: Vec<_> =
                    schedule(method, 4, settings).order().placement().homes_of(Rank(rank as u32)).collect();
                for home in homes {
                    let averages = ops.iter().filter(|op| **op == StepOp::FinishReduce(home)).count();
                    let is_update = |op: &StepOp| match *op {
                        StepOp::Update { stage, .. } | StepOp::CatchUp(stage) => stage == home,
                        _ => false,
                    };
                    let updates = ops.iter().filter(|op| is_update(op)).count();
                    assert!(averages > 0, "{method}, rank {rank}");
                    assert_eq!(averages, updates, "{method}, rank {rank}, {home:?}:\n{list}");
                    let first = |wanted: &dyn Fn(&StepOp) -> bool| ops.iter().position(wanted);
                    let average = first(&|op| *op == StepOp::FinishReduce(home));
                    assert!(average < first(&is_update), "{method}, rank {rank}:\n{list}");
                }
            }
        }
    }
}

#[test]
fn lists_whose_operations_do_not_pair_are_refused_by_operation() {
    let refused = |text: &str| text.parse::<RankStep>().unwrap_err();
    for (text, op, problem) in [
        ("reduce: WAIT_VOTE", "WAIT_VOTE", "the vote was not started"),
        ("reduce: VOTE", "VOTE", "nothing waits for the vote"),
        ("reduce: VOTE VOTE WAIT_VOTE", "VOTE", "the vote was started already"),
        ("reduce: VOTE_LOSSES WAIT_VOTE_NORM", "WAIT_VOTE_NORM", "the vote was not started"),
        ("pass: 0OPEN_GRAD 0B0\nreduce: 0WAIT_GRAD", "0OPEN_GRAD", "no entry says"),
        ("pass: 0B0 0REDUCE_GRAD", "0REDUCE_GRAD", "nothing waits for the average"),
        ("pass: 0REDUCE_GRAD 0REDUCE_GRAD\nreduce: 0WAIT_GRAD", "0REDUCE_GRAD", "started already"),
        ("pass: 0OPEN_GRAD 0OPEN_GRAD", "0OPEN_GRAD", "opened or started already"),
        ("pass: 0REDUCE_TIED", "0REDUCE_TIED", "nothing waits for the sum"),
        ("pass: 0DEFER0", "0CATCH_UP", "an update that was put off is not applied"),
        ("pass: 0CATCH_UP", "0CATCH_UP", "no update was put off"),
        ("meet: 0PREPARE", "0PREPARE", "the part was not exchanged"),
        ("meet: 0EXCHANGE 0EXCHANGE", "0EXCHANGE", "exchanged already"),
        ("meet: 0EXCHANGE 0APPLY", "0APPLY", "the part was not prepared"),
        ("meet: 0EXCHANGE 0PREPARE", "0EXCHANGE", "the exchange is not applied"),
    ] {
        let error = refused(text);
        match &error {
            ParallelError::StepOp { op: found, problem: said } => {
                assert_eq!(found.to_string(), op, "{text}");
                assert!(said.contains(problem), "{text}: {said}");
            }
            other => panic!("{text}: {other}"),
        }
    }
    assert!(matches!(refused("later: VOTE"), ParallelError::StepMoment { .. }));
    for text in ["pass: 0NOTHING", "pass: WAIT", "pass: 99999999999999STEP0", "pass: 0DEFERx"] {
        assert!(matches!(refused(text), ParallelError::ActionForm { .. }), "{text}");
    }
}
