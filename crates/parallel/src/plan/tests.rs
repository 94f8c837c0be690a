//! Tests of parsing, checks, and differences of plans.

use farflung_base::{Bytes, ContextCut, ContextOrder, Rank};
use proptest::prelude::*;

use super::*;
use crate::pipeline::{BackwardOrder, Settings};

/// A plan of two replicas of two stages over four layers.
pub(super) fn plan() -> Plan {
    let part = |layers| Part { layers, recompute: Recompute::None, offload: 0 };
    Plan {
        model: PlannedModel { name: "nano".to_owned(), layers: 4, parameters: 834_304 },
        mesh: Plan::mesh_of(2, 2).unwrap(),
        tensor_weights: Vec::new(),
        context: ContextCut::default(),
        sequence_parallel: false,
        zero: 0,
        zero_weights: Vec::new(),
        zero_tensors: false,
        zero_codec: NO_CODEC.to_owned(),
        zero_groups: Vec::new(),
        machines: ["a.0", "a.1", "b", "c"].map(str::to_owned).to_vec(),
        precision: Precision::F32,
        batch: 3,
        microbatches: vec![4, 2],
        experts: Vec::new(),
        expert_codec: NO_CODEC.to_owned(),
        paths: Vec::new(),
        parts: vec![part(0..1), part(1..4)],
        pipeline: Pipeline::default(),
        boundaries: vec![BoundaryCodecs { forward: "int8".to_owned(), ..BoundaryCodecs::default() }],
        levels: vec![Level::default()],
    }
}

fn refusal(change: impl FnOnce(&mut Plan)) -> String {
    let mut plan = plan();
    change(&mut plan);
    plan.check().unwrap_err().to_string()
}

#[test]
fn the_canonical_text() {
    insta::assert_snapshot!(plan().to_string());
}

/// A plan of pools: one rank for the first stage, three for the second.
pub(super) fn pooled() -> Plan {
    let pools = Pools { sizes: vec![1, 3], rates: vec![1, 4, 2, 1] };
    Plan {
        mesh: Plan::mesh_of(1, 4).unwrap(),
        microbatches: vec![7],
        pipeline: Pipeline { schedule: ScheduleSource::Pools(pools), ..Pipeline::default() },
        ..plan()
    }
}

#[test]
fn experts_are_divided_among_neighbouring_replicas() {
    let divided = |mesh: &str, experts: &[u32]| {
        let mesh: Mesh = mesh.parse().unwrap();
        let machines = (0..mesh.size()).map(|rank| format!("m{rank}")).collect();
        let microbatches = vec![2; mesh.along(Axis::Data) as usize];
        Plan { mesh, machines, microbatches, experts: experts.to_vec(), ..plan() }
    };
    let plan = divided("data=4,pipeline=2", &[3, 1]);
    plan.check().unwrap();
    assert!(plan.to_string().contains("\nexperts = [3, 1]\n"));
    assert_eq!(plan.to_string().parse::<Plan>().unwrap(), plan);
    let whole = Plan { experts: Vec::new(), ..plan.clone() };
    assert_eq!(whole.differences(&plan)[0].to_string(), "`experts` is missing and [3, 1]");
    assert!(!whole.to_string().contains("experts") && whole.digest() != plan.digest());
    // Rank 7 is the second stage of replica 3.
    assert_eq!(plan.group(Rank(7), Axis::Expert), [Rank(5), Rank(7)]);
    // Ranks 3 and 7 hold the same.
    assert_eq!([2, 3, 6, 7].map(|rank| plan.place(Rank(rank))), [1, 3, 1, 3]);
    assert_eq!((plan.expert_rank(3), plan.expert_group(3), plan.expert_ranks()), (1, 2..4, 2));
    assert_eq!(whole.group(Rank(7), Axis::Expert), [Rank(7)]);
    for (mesh, experts, reason) in [
        ("data=4,pipeline=2", &[1, 0][..], "at least 1 for each of several replicas"),
        ("data=4,pipeline=2", &[1], "at least 1 for each of several replicas"),
        ("data=3,pipeline=2", &[1, 1], "as many weights as divide the 3 replicas"),
        ("data=2,pipeline=2", &[1, 1, 1, 1], "as many weights as divide the 2 replicas"),
    ] {
        let error = divided(mesh, experts).check().unwrap_err().to_string();
        assert!(error.contains("`experts`") && error.contains(reason), "{error}");
    }
    let unequal = Plan { microbatches: vec![2, 2, 2, 1], ..plan };
    assert!(
        unequal.check().unwrap_err().to_string().contains("the same number for all replicas that divide")
    );
    let pools = Plan { experts: vec![1, 1], ..pooled() };
    assert!(pools.check().unwrap_err().to_string().contains("`experts`"));
}

#[test]
fn neighbouring_replicas_divide_the_positions_of_the_same_sequences() {
    let on = |mesh: &str, (ring, ulysses): (u32, u32), microbatches: &[u32]| {
        let mesh: Mesh = mesh.parse().unwrap();
        let machines = (0..mesh.size()).map(|rank| format!("m{rank}")).collect();
        let context = ContextCut { ring, ulysses, order: ContextOrder::Striped };
        Plan { mesh, machines, context, microbatches: microbatches.to_vec(), ..plan() }
    };
    let plan = on("data=8,pipeline=2", (2, 2), &[2, 2, 2, 2, 1, 1, 1, 1]);
    plan.check().unwrap();
    let text = plan.to_string();
    assert!(text.contains("\ncontext_parallel = 4\nulysses = 2\ncontext_order = \"striped\"\n"), "{text}");
    assert_eq!(text.parse::<Plan>().unwrap(), plan);
    // Rank 11 is the second stage of replica 5, the second of four that read the same sequences.
    assert_eq!(plan.group(Rank(11), Axis::Ulysses), [9, 11].map(Rank));
    assert_eq!(plan.group(Rank(11), Axis::Context), [11, 15].map(Rank));
    assert_eq!((plan.all_microbatches(), plan.sequences()), (3, 3 * u64::from(plan.batch)));
    assert_eq!([0, 3, 4, 7].map(|replica| plan.first_microbatch(replica)), [0, 0, 2, 2]);
    let weights = [0, 3, 4, 7].map(|replica| plan.weight(replica) * 3.0);
    assert!(weights.iter().zip([4.0, 4.0, 2.0, 2.0]).all(|(got, want)| (got - want).abs() < 1e-12));
    assert_eq!(plan.local_steps().all_microbatches(5), 15);
    let refused = |plan: &Plan| plan.check().unwrap_err().to_string();
    assert!(refused(&on("data=6,pipeline=2", (2, 2), &[1; 6])).contains("a divisor of the 6 replicas"));
    let uneven = on("data=2,pipeline=2", (2, 1), &[1, 2]);
    assert!(refused(&uneven).contains("replicas that divide the same sequences"));
    let local = |plan: &mut Plan| plan.levels[0].every = 2;
    let mut local_steps = on("data=2,pipeline=2", (2, 1), &[1, 1]);
    local(&mut local_steps);
    assert!(refused(&local_steps).contains("gradients are not averaged in each step"));
    let text = text.replace("ulysses = 2", "ulysses = 3");
    assert!(
        text.parse::<Plan>().unwrap_err().to_string().contains("a divisor of the 4 of `context_parallel`")
    );
}

#[test]
fn the_ranks_of_a_replica_divide_layers_and_their_width() {
    let on = |mesh: &str, weights: &[u32]| {
        let mesh: Mesh = mesh.parse().unwrap();
        let machines = (0..mesh.size()).map(|rank| format!("m{rank}")).collect();
        let microbatches = vec![2; mesh.along(Axis::Data) as usize];
        Plan { mesh, machines, microbatches, tensor_weights: weights.to_vec(), ..plan() }
    };
    let plan = on("data=2,pipeline=2,tensor=3", &[2, 1, 1]);
    plan.check().unwrap();
    assert!(plan.to_string().contains("\ntensor_weights = [2, 1, 1]\n"), "{plan}");
    assert_eq!(plan.to_string().parse::<Plan>().unwrap(), plan);
    assert_eq!((plan.tensor_ranks(), plan.shares_of_width()), (3, vec![2, 1, 1]));
    assert_eq!(on("data=2,pipeline=2,tensor=2", &[]).shares_of_width(), [1, 1]);
    // Rank 10 is the second piece of the second stage of replica 1.
    assert_eq!(plan.group(Rank(10), Axis::Tensor), [9, 10, 11].map(Rank));
    assert_eq!(plan.group(Rank(10), Axis::Data), [4, 10].map(Rank));
    assert_eq!(plan.group(Rank(10), Axis::Pipeline), [7, 10].map(Rank));
    assert_eq!((plan.pipeline_of(1), plan.ranks_of(1).len()), (vec![Rank(6), Rank(9)], 6));
    assert_eq!([0, 1, 2, 4, 6, 10].map(|rank| plan.place(Rank(rank))), [0, 1, 2, 4, 0, 4]);
    // What replicas leave and join keeps the axis.
    let left = plan.with_replicas(&[Replica::Stays(1)]).unwrap();
    assert_eq!(left.mesh.to_string(), "data=1,pipeline=2,tensor=3");
    assert_eq!(left.machines, plan.machines[6..]);
    for (mesh, weights, reason) in [
        ("data=2,pipeline=2", &[1, 1][..], "nothing, because the mesh has no tensor axis"),
        ("data=2,pipeline=2,tensor=3", &[1, 1], "3 weights of at least 1"),
        ("data=2,pipeline=2,tensor=2", &[1, 0], "2 weights of at least 1"),
    ] {
        let error = on(mesh, weights).check().unwrap_err().to_string();
        assert!(error.contains("`tensor_weights`") && error.contains(reason), "{error}");
    }
    let divided = Plan { sequence_parallel: true, ..plan };
    assert_eq!(divided.to_string().parse::<Plan>().unwrap(), divided);
    assert!(divided.check().is_ok() && divided.to_string().contains("\nsequence_parallel = true\n"));
    let error = Plan { sequence_parallel: true, ..on("data=2,pipeline=2", &[]) }.check().unwrap_err();
    assert!(error.to_string().contains("`sequence_parallel` is true"), "{error}");
    let error = on("tensor=2,data=2,pipeline=2", &[]).check().unwrap_err().to_string();
    assert!(error.contains("`mesh`") && error.contains("in this order"), "{error}");
    let stashed = Pipeline { schedule: ScheduleSource::Named(Method::PipeDream), ..Pipeline::default() };
    let error = Plan { pipeline: stashed, ..on("data=2,pipeline=2,tensor=2", &[]) }.check().unwrap_err();
    assert!(error.to_string().contains("no tensor axis"), "{error}");
}

#[test]
fn paths_share_modules_by_their_digits() {
    let level = |layers, modules| PathLevel { layers, modules };
    let on = |mesh: &str, paths: &[PathLevel]| {
        let mesh: Mesh = mesh.parse().unwrap();
        let machines = (0..mesh.size()).map(|rank| format!("m{rank}")).collect();
        let microbatches = vec![2; mesh.along(Axis::Data) as usize];
        Plan { mesh, machines, microbatches, paths: paths.to_vec(), ..plan() }
    };
    let levels = [level(0..1, 2), level(2..4, 3)];
    let plan = on("data=12,pipeline=2", &levels);
    plan.check().unwrap();
    assert!(plan.to_string().contains("\n[[path]]\nlayers = \"2..4\"\nmodules = 3\n"), "{plan}");
    assert_eq!(plan.to_string().parse::<Plan>().unwrap(), plan);
    let one = Plan { paths: Vec::new(), ..plan.clone() };
    assert!(!one.to_string().contains("path") && one.digest() != plan.digest());
    assert_eq!((plan.paths(), plan.path(7), one.paths(), one.path(7)), (6, 1, 1, 0));
    assert_eq!([0, 1, 2, 3, 5].map(|path| plan.modules(path)), [[0, 0], [0, 1], [0, 2], [1, 0], [1, 2]]);
    assert_eq!(one.modules(0), [0; 0]);
    assert_eq!(plan.replicas_of_module(7, 0), [0, 1, 2, 6, 7, 8]);
    assert_eq!(plan.replicas_of_module(7, 1), [1, 4, 7, 10]);
    // Rank 14 is the first stage of replica 7, which trains the same path as replica 1.
    assert_eq!([2, 3, 14, 15].map(|rank| plan.place(Rank(rank))), [1, 7, 1, 7]);
    for (mesh, paths, reason) in [
        ("data=4,pipeline=2", &levels[..], "as many as divide the 4 replicas"),
        ("data=2,pipeline=2", &[level(0..0, 2)], "`path[0].layers`"),
        ("data=2,pipeline=2", &[level(1..9, 2)], "`path[0].layers`"),
        ("data=4,pipeline=2", &[level(1..3, 2), level(2..4, 2)], "`path[1].layers`"),
        ("data=2,pipeline=2", &[level(0..1, 0)], "`path[0].modules`"),
        ("data=2,pipeline=2", &[level(0..1, u32::MAX), level(1..2, u32::MAX)], "as many as divide"),
    ] {
        let error = on(mesh, paths).check().unwrap_err().to_string();
        assert!(error.contains(reason), "{error}");
    }
    let divided = Plan { experts: vec![1, 1], ..plan.clone() };
    let uneven = Plan { microbatches: [vec![1], vec![2; 11]].concat(), ..plan };
    for (plan, reason) in [(divided, "replicas divide experts"), (uneven, "the same number for all paths")] {
        assert!(plan.check().unwrap_err().to_string().contains(reason));
    }
    assert_eq!(PathLevel::even(1, &[2, 2]), None);
    assert_eq!(PathLevel::even(4, &[2]), Some(vec![level(0..4, 2)]));
}

#[test]
fn pools_are_in_the_text_and_in_the_digest() {
    let plan = pooled();
    plan.check().unwrap();
    let text = plan.to_string();
    assert!(
        text.contains("schedule = \"pools\"")
            && text.contains("[pools]\nsizes = [1, 3]\nrates = [1, 4, 2, 1]")
    );
    assert_eq!(text.parse::<Plan>().unwrap(), plan);
    let equal: Plan = text.replace("rates = [1, 4, 2, 1]\n", "").parse().unwrap();
    assert_eq!(equal.pools(), Some(&Pools::equal(vec![1, 3])));
    assert_ne!(equal.digest(), plan.digest());
    assert_eq!(plan.differences(&equal)[0].to_string(), "`pools.rates` is [1, 4, 2, 1] and [1, 1, 1, 1]");
    // Plans with the section `[pools]` but another schedule, or the reverse, are rejected.
    for wrong in [
        text.replace("\"pools\"", "\"gpipe\""),
        text.replace("[pools]\nsizes = [1, 3]\nrates = [1, 4, 2, 1]", ""),
    ] {
        let error = wrong.parse::<Plan>().unwrap_err().to_string();
        assert!(error.contains("pipeline.schedule") && error.contains("[pools]"), "{error}");
    }
}

fn pools(plan: &mut Plan, sizes: &[u32], rates: &[u32]) {
    plan.pipeline.schedule = ScheduleSource::Pools(Pools { sizes: sizes.to_vec(), rates: rates.to_vec() });
}

#[test]
fn pools_that_do_not_fit_the_plan_are_refused() {
    let refused = |change: fn(&mut Plan)| {
        let mut plan = pooled();
        change(&mut plan);
        plan.check().unwrap_err().to_string()
    };
    let found = [
        refused(|p| pools(p, &[1, 2], &[1; 3])),
        refused(|p| pools(p, &[1, 2, 1], &[1; 4])),
        refused(|p| pools(p, &[4, 0], &[1; 4])),
        refused(|p| pools(p, &[u32::MAX, u32::MAX], &[1; 4])),
        refused(|p| pools(p, &[1, 3], &[1, 1, 1, 0])),
        refused(|p| p.microbatches = vec![2]),
        refused(|p| p.pipeline.chunks = Some(1)),
        refused(|p| p.pipeline.slices = vec![1, 1]),
    ];
    let fields = ["pools.sizes", "part", "pools.sizes", "pools.sizes", "pools.rates", "microbatches[0]"];
    let fields = fields.iter().chain(&["pipeline.chunks", "pipeline.slices"]);
    for (error, field) in found.iter().zip(fields) {
        assert!(error.starts_with(&format!("plan: `{field}` is")), "{field}: {error}");
    }
    let many = refused(|p| p.microbatches = vec![u32::MAX]);
    assert!(many.contains("8589934590 actions of a schedule are too many"), "{many}");
}

#[test]
fn sequences_are_numbered_replica_by_replica() {
    let plan = plan();
    plan.check().unwrap();
    assert_eq!((plan.replicas(), plan.stages(), plan.ranks(), plan.sequences()), (2, 2, 4, 18));
    assert_eq!((plan.first_microbatch(0), plan.first_microbatch(1)), (0, 4));
    assert!(
        (plan.weight(0) - 4.0 / 3.0).abs() < 1e-15 && (plan.weight(0) + plan.weight(1) - 2.0).abs() < 1e-15
    );
}

#[test]
fn each_field_is_refused_by_its_name() {
    plan().check().unwrap();
    let refused = [
        (refusal(|p| p.mesh = "pipeline=2,data=2".parse().unwrap()), "`mesh` is pipeline=2,data=2"),
        (refusal(|p| p.mesh = "data=4".parse().unwrap()), "`mesh` is data=4"),
        (refusal(|p| p.mesh = "tensor=1,data=2,pipeline=2".parse().unwrap()), "`mesh` is tensor=1,data=2"),
        (
            refusal(|p| p.mesh = "data=2,pipeline=2,context=2".parse().unwrap()),
            "no context axis: it divides the data axis",
        ),
        (refusal(|p| drop(p.machines.pop())), "`machines` is 3 names, expected 4"),
        (refusal(|p| p.machines[1] = "b".to_owned()), "`machines` is \"b\" twice"),
        (refusal(|p| p.machines[1] = "b c".to_owned()), "`machines` is \"b c\""),
        (
            refusal(|p| p.parts[0].recompute = Recompute::Within(Bytes(3_000_000))),
            "`part[0].recompute` is 3MB, expected none, full, each-layer",
        ),
        (refusal(|p| p.batch = 0), "`batch` is 0"),
        (refusal(|p| p.microbatches[1] = 0), "`microbatches[1]` is 0, expected at least 1"),
        (refusal(|p| p.microbatches.push(1)), "`microbatches` is 3 numbers, expected 2"),
        (
            refusal(|p| p.parts[1].layers = 2..4),
            "`part[1].layers` is 2..4, expected a range that begins at 1",
        ),
        (
            refusal(|p| p.parts[1].layers = 0..4),
            "`part[1].layers` is 0..4, expected a range that begins at 1",
        ),
        (
            refusal(|p| p.parts[1].layers = 1..3),
            "`part[1].layers` is up to 3, expected the last part to end at 4",
        ),
        (refusal(|p| p.model.layers = 5), "`part[1].layers` is up to 4"),
        (
            refusal(|p| p.parts[0].recompute = Recompute::Layers(2)),
            "`part[0].recompute` is 2, expected none, full, each-layer, or 1 to 1",
        ),
        (refusal(|p| p.parts[1].offload = 4), "`part[1].offload` is 4, expected at most 3"),
        (
            refusal(|p| p.pipeline.schedule = ScheduleSource::Named(Method::ZbV)),
            "`part` is given 2 times, expected 4",
        ),
        (
            refusal(|p| p.pipeline.schedule = ScheduleSource::Named(Method::PipeDream)),
            "`microbatches` is [4, 2]",
        ),
        (
            refusal(|p| {
                p.pipeline.schedule = ScheduleSource::Named(Method::PipeDream2Bw);
                p.microbatches = vec![3, 3];
            }),
            "`microbatches` is [3, 3], expected a multiple of 2, the number of stages",
        ),
        (refusal(|p| p.pipeline.slices = vec![8, 8]), "`pipeline.slices` is 2 slices, expected 1"),
        (refusal(|p| p.boundaries.clear()), "`boundary` is given 0 times, expected 1"),
        (refusal(|p| p.levels.clear()), "`level` is given 0 times"),
        (refusal(|p| p.levels[0].every = 0), "`level[0].every` is 0"),
        (refusal(|p| p.levels[0].steps = vec![1; 9]), "`level[0].steps` is 9 numbers"),
        (refusal(|p| p.levels[0].steps = vec![0; p.replicas() as usize]), "at least 1 for each replica"),
        (
            refusal(|p| {
                p.levels[0].every = 3;
                p.levels[0].steps = vec![2; p.replicas() as usize];
            }),
            "a multiple of 3, the steps between two averages, for the fastest replica",
        ),
        (refusal(|p| p.levels[0].bucket_bytes = 3), "`level[0].bucket_bytes` is 3"),
        (refusal(|p| p.levels[0].groups = vec![vec![0], vec![1]]), "`level[0].groups` is [[0], [1]]"),
        (refusal(|p| p.levels[0].groups = vec![vec![0, 0]]), "`level[0].groups` is [[0, 0]]"),
        (
            refusal(|p| p.levels.push(Level::default())),
            "`level[0].groups` is [], expected at least two groups",
        ),
        (refusal(|p| p.levels = vec![Level::default(); 3]), "a plan with 3 levels is not supported"),
        (refusal(|p| p.microbatches = vec![3, 3].into_iter().map(|m| m * 300_000_000).collect()), "actions"),
    ];
    for (message, expected) in refused {
        assert!(message.contains(expected), "{message:?} should say {expected:?}");
    }
}

/// Two levels: regions, and the average between regions.
fn two_levels() -> Vec<Level> {
    let inner = Level { groups: vec![vec![0], vec![1]], algorithm: Algorithm::Direct, ..Level::default() };
    let outer = Level { codec: "int8+ef".to_owned(), algorithm: Algorithm::Hierarchical, ..Level::default() };
    vec![inner, outer]
}

#[test]
fn two_levels_are_one_average_in_regions_and_other_pairs_are_refused() {
    let two = Plan { levels: two_levels(), ..plan() };
    two.check().unwrap();
    assert_eq!(two.to_string().parse::<Plan>().unwrap(), two);
    assert_eq!((two.regions(), plan().regions()), (Some(&[vec![0], vec![1]][..]), None));
    let refused = |change: fn(&mut Vec<Level>)| {
        refusal(|p| {
            p.levels = two_levels();
            change(&mut p.levels);
        })
    };
    for (message, expected) in [
        (refused(|l| l[0].groups = vec![vec![0, 1]]), "`level[0].groups` is [[0, 1]]"),
        (refused(|l| l[0].method = "diloco".to_owned()), "`level[0].method` is diloco"),
        (refused(|l| l[0].every = 2), "`level[0].every` is 2"),
        (refused(|l| l[0].codec = "f16".to_owned()), "`level[0].codec` is f16, expected none"),
        (refused(|l| l[0].algorithm = Algorithm::Ring), "`level[0].algorithm` is ring, expected direct"),
        (refused(|l| l[0].bucket_bytes = 8), "`level[0].bucket_bytes` is 8"),
        (refused(|l| l[0].overlap = false), "`level[0].overlap` is false"),
        (refused(|l| l[1].algorithm = Algorithm::Direct), "`level[1].algorithm` is direct"),
        (refused(|l| l[1].groups = vec![vec![0], vec![1]]), "`level[1].groups`"),
    ] {
        assert!(message.contains(expected), "{message:?} should say {expected:?}");
    }
}

#[test]
fn a_codec_without_an_algorithm_means_equal_shards() {
    let text = plan().to_string().replace("codec = \"none\"\nalgorithm = \"ring\"", "codec = \"int8\"");
    assert_eq!(text.parse::<Plan>().unwrap().levels[0].algorithm, Algorithm::Direct);
}

#[test]
fn an_authors_lists_must_fit_the_plan() {
    let order =
        Method::GPipe.order(&Settings { backward: BackwardOrder::Ascending, ..Settings::new(2, 4) }).unwrap();
    let own = |p: &mut Plan| p.pipeline.schedule = ScheduleSource::Text(order.to_string());
    let mut equal = Plan { microbatches: vec![4, 4], ..plan() };
    own(&mut equal);
    equal.check().unwrap();
    let read: Plan = equal.to_string().parse().unwrap();
    assert_eq!(read, equal);
    assert!(
        refusal(own).contains("`pipeline.schedule` is of 4 microbatches, expected of 2"),
        "{}",
        refusal(own)
    );
    equal.mesh = Plan::mesh_of(1, 4).unwrap();
    equal.microbatches = vec![4];
    assert!(equal.check().unwrap_err().to_string().contains("for 2 ranks, expected for 4 ranks"));
}

#[test]
fn a_difference_names_its_field() {
    let (a, mut b) = (plan(), plan());
    assert!(a.differences(&b).is_empty() && a.digest() == b.digest());
    b.levels[0].codec = "int8+ef".to_owned();
    b.pipeline.memory = Some(7);
    let found: Vec<String> = a.differences(&b).iter().map(ToString::to_string).collect();
    assert_eq!(found, ["`level[0].codec` is \"none\" and \"int8+ef\"", "`pipeline.memory` is missing and 7"]);
    assert_ne!(a.digest(), b.digest());
}

#[test]
fn texts_that_are_no_plan_say_where_they_are_wrong() {
    let text = plan().to_string();
    let read = |from: &str, to: &str| text.replacen(from, to, 1).parse::<Plan>().unwrap_err().to_string();
    assert_eq!(read("version = 1", "version = 9"), "the plan has version 9, but this build reads version 1");
    assert!(
        read("batch = 3", "batches = 3").starts_with("plan, line 5, `batches = 3`: unknown field `batches`")
    );
    assert!(read("\"0..1\"", "\"0-1\"").contains("such as `0..4`"));
    assert!(read("\"f32\"", "\"fp8\"").contains("there is no precision `fp8`"));
    assert!(read("\"1f1b\"", "\"2f2b\"").contains("no schedule `2f2b`"));
    assert!(read("\"ring\"", "\"string\"").contains("no all-reduce algorithm `string`"));
    assert!(read("parameters = 834304", "parameters = -1").contains("line 11"));
    assert!("".parse::<Plan>().is_err() && "version = 1".parse::<Plan>().is_err());
}

prop_compose! {
    fn any_level()(
        every in 1_u32..100, bucket_bytes in 4_u64..1 << 40, overlap: bool, codec in "[a-z0-9:./+ \"\\\\]{1,12}",
        algorithm in proptest::sample::select(Algorithm::ALL.to_vec()),
    ) -> Level {
        let (groups, method) = (Vec::new(), "ddp".to_owned());
        Level { groups, method, every, steps: Vec::new(), codec, algorithm, bucket_bytes, overlap }
    }
}

proptest! {
    /// The text of any plan parses back to the same plan with the same digest.
    #[test]
    fn plans_read_back(
        microbatches in proptest::collection::vec(1_u32..9, 1..5), cuts in proptest::collection::vec(1_u32..4, 1..5),
        batch in 1_u32..99, mut level in any_level(), paced: bool, memory in proptest::option::of(1_u32..9),
        name in "[a-z\"\\\\\n-]{0,9}", budget in proptest::option::of(1_u64..1 << 40),
    ) {
        let stages = cuts.len() as u32;
        let mut end = 0;
        let parts = cuts.iter().map(|&len| {
            end += len;
            let budget = budget.filter(|_| stages == 1).map(|bytes| Recompute::Within(Bytes(bytes)));
            Part { layers: end - len..end, recompute: budget.unwrap_or(Recompute::Layers(len)), offload: 0 }
        });
        let parts: Vec<Part> = parts.collect();
        let ranks = microbatches.len() as u32 * stages;
        if paced {
            level.steps = microbatches.iter().map(|&m| m.min(level.every)).collect();
            level.steps[0] = 3 * level.every;
        }
        let plan = Plan {
            model: PlannedModel { name, layers: end, parameters: 1 },
            mesh: Plan::mesh_of(microbatches.len() as u32, stages).unwrap(),
            tensor_weights: Vec::new(),
            context: ContextCut::default(),
        sequence_parallel: false,
            zero: 0,
            zero_weights: Vec::new(),
            zero_tensors: false,
            zero_codec: NO_CODEC.to_owned(),
            zero_groups: Vec::new(),
            machines: (0..ranks).map(|r| format!("m{r}")).collect(),
            precision: Precision::Bf16,
            batch,
            // Groups of two divide experts where replicas pair and have as much to do.
            experts: match microbatches[..] {
                [a, b] if a == b => vec![1, 2],
                _ => Vec::new(),
            },
            expert_codec: NO_CODEC.to_owned(),
        paths: Vec::new(),
            microbatches,
            boundaries: vec![BoundaryCodecs::default(); parts.len() - 1],
            parts,
            pipeline: Pipeline { memory, ..Pipeline::default() },
            levels: vec![level],
        };
        prop_assert_eq!(plan.check(), Ok(()));
        let read: Plan = plan.to_string().parse().unwrap();
        prop_assert_eq!(read.digest(), plan.digest());
        prop_assert_eq!(read, plan);
    }

    /// Any text is parsed or rejected without a panic.
    #[test]
    fn any_text_is_read_or_refused(text in "\\PC*") {
        let _: Result<Plan, ParallelError> = text.parse();
    }
}

#[test]
fn replicas_divide_the_optimizers_state_by_weights() {
    let on = |zero, weights: &[u32]| Plan { zero, zero_weights: weights.to_vec(), ..plan() };
    assert_eq!(plan().replicas(), 2, "of the plan that tests change");
    let divided = on(1, &[3, 0]);
    divided.check().unwrap();
    assert!(divided.to_string().contains("\nzero = 1\nzero_weights = [3, 0]\n"), "{divided}");
    assert_eq!(divided.to_string().parse::<Plan>().unwrap(), divided);
    assert_eq!((divided.shares_of_state(), on(1, &[]).shares_of_state()), (vec![3, 0], vec![1, 1]));
    assert_eq!((divided.recorded_state(), plan().recorded_state()), (vec![3, 0], Vec::new()));
    let tensors = Plan { zero_tensors: true, ..divided.clone() };
    tensors.check().unwrap();
    assert_eq!(tensors.to_string().parse::<Plan>().unwrap(), tensors);
    let coded = Plan { zero_codec: "int8,int4".to_owned(), microbatches: vec![4, 4], ..on(3, &[]) };
    coded.check().unwrap();
    assert_eq!(coded.to_string().parse::<Plan>().unwrap(), coded);
    let pairs = vec![vec![0, 1], vec![2, 3]];
    let four = Plan { zero_groups: pairs.clone(), ..coded };
    assert!(
        four.to_string().contains("zero_codec = \"int8,int4\"\nzero_groups = [[0, 1], [2, 3]]\n"),
        "{four}"
    );
    // No two ranks hold the same: each place of a pipeline is in both replicas.
    let places = |plan: &Plan| {
        let mut places: Vec<u32> = (0..plan.ranks()).map(|rank| plan.place(Rank(rank))).collect();
        places.sort_unstable();
        places.dedup();
        places.len() as u32
    };
    assert_eq!((places(&divided), places(&plan())), (plan().ranks(), plan().ranks() / 2));
    for (wrong, reason) in [
        (on(0, &[1, 1]), "`zero_weights` is [1, 1], expected nothing"),
        (on(1, &[1, 1, 1]), "expected 2 weights"),
        (on(1, &[0, 0]), "at least one above 0"),
        (on(4, &[]), "`zero` is 4, expected 0 to 3"),
        (
            Plan { zero_codec: "int8,int4".to_owned(), ..on(2, &[]) },
            "`zero_codec` is int8,int4, expected none",
        ),
        (Plan { zero_groups: pairs.clone(), ..on(2, &[]) }, "expected nothing, because replicas do not"),
        (Plan { zero_groups: pairs, ..on(3, &[]) }, "at least two groups of at least two of the 2 replicas"),
        (Plan { microbatches: vec![2, 1], ..on(2, &[]) }, "of which they have unequal numbers"),
        (Plan { zero_tensors: true, ..plan() }, "`zero_tensors` is true, expected false"),
        (Plan { levels: two_levels(), ..on(1, &[]) }, "two levels"),
    ] {
        let error = wrong.check().unwrap_err().to_string();
        assert!(error.contains(reason), "{error}");
    }
}
