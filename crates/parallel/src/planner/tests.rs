//! Tests of plans: the choice, the errors and the report.

use super::*;
use crate::Speed;
use crate::average::closed_forms;
use farflung_base::Link;

/// Plans with the closed forms for equal links, using the link of the first pair.
fn plan(shape: &ModelShape, cluster: &Cluster, limits: &Limits) -> Result<Planned, ParallelError> {
    let topology = cluster.topology()?;
    let link = Link { bandwidth: topology.rate(Rank(0), Rank(1)), ..topology.link(Rank(0), Rank(1)) };
    super::plan(shape, cluster, limits, &closed_forms::price(topology.size() as u32, link))
}

fn homes(n: u32, link: &str) -> Cluster {
    Cluster::uniform(n, Speed::TokensPerSecond(4_000), link.parse::<Link>().unwrap())
}

fn shape() -> ModelShape {
    ModelShape::dense(10_000_000, 256, 64 * 256)
}

#[test]
fn a_fast_link_is_synchronous_and_a_slow_one_is_not() {
    let limits = Limits::default();
    let fast = plan(&shape(), &homes(4, "10gbit,1ms"), &limits).unwrap();
    assert!(matches!(fast.replicas.sync, Sync::Ddp { overlap: Overlap::WithBackward, .. }), "{fast}");
    assert!(fast.within);

    let slow = plan(&shape(), &homes(4, "20mbit,25ms"), &limits).unwrap();
    let Sync::DiLoCo { every } = slow.replicas.sync else { panic!("{slow}") };
    // 1.5 * 40 MB at 20 Mbit/s take 24 s, plus 0.1 to 0.15 s of latency. A step computes for 16 * 256 / 4000 =
    // 1.024 s.
    assert_eq!(u64::from(every), (24_100_u64 * 100).div_ceil(1_024 * 20));
    // With one local step fewer, the simulated overhead would exceed the limit.
    let chosen = slow.candidates.iter().find(|c| c.sync == slow.replicas.sync).unwrap();
    assert!(chosen.overhead <= 2_000, "{slow}");
    let tight = plan(&shape(), &homes(4, "20mbit,25ms"), &Limits { max_every: every - 1, ..limits }).unwrap();
    assert!(!tight.within, "{tight}");
    assert!(tight.to_string().contains("no allowed method"), "{tight}");
}

/// Predicted times replace the times of the search. Here, each average takes half of the time that the search
/// assumed.
#[test]
fn predictions_set_the_number_of_local_steps_and_decide() {
    let planned = plan(&shape(), &homes(4, "20mbit,25ms"), &Limits::default()).unwrap();
    let (every, compute) = (planned.replicas.sync.period(), planned.compute);
    let model = PlannedModel { name: "dense".to_owned(), layers: 1, parameters: 10_000_000 };
    let average = compute.0 * u64::from(every) / 10;
    let step = |plan: &Plan| {
        let every = u64::from(plan.outermost().every);
        let step = Nanos(compute.0 + average.div_ceil(every));
        Ok::<_, ParallelError>(Some(StepTime { step, compute }))
    };
    let predicted = planned.clone().predicted(&model, step).unwrap();
    let Sync::DiLoCo { every: fewer } = predicted.replicas.sync else { panic!("{predicted}") };
    assert_eq!(fewer, every.div_ceil(2));
    let chosen = predicted.candidates.iter().find(|c| c.sync == predicted.replicas.sync).unwrap();
    assert!(chosen.overhead <= 2_000 && predicted.within, "{predicted}");
    // If averages take no time, synchronous training is chosen.
    let known = |step| move |_: &Plan| Ok::<_, ParallelError>(step);
    let free = planned.clone().predicted(&model, known(Some(StepTime { step: compute, compute }))).unwrap();
    assert!(matches!(free.replicas.sync, Sync::Ddp { overlap: Overlap::WithBackward, .. }), "{free}");
    assert!(planned.predicted(&model, known(None)).unwrap_err().to_string().contains("not supported yet"));
}

#[test]
fn a_smaller_codec_needs_fewer_local_steps() {
    let every = |codec: Codec| {
        let limits = Limits { codec, ..Limits::default() };
        plan(&shape(), &homes(4, "20mbit,25ms"), &limits).unwrap().replicas.sync.period()
    };
    assert!(every(Codec::INT8) * 3 < every(Codec::F32));
}

#[test]
fn unequal_devices_share_by_speed() {
    let mut cluster = homes(2, "10gbit,1ms");
    let fast = Machine {
        name: "fast".to_owned(),
        count: 1,
        speed: Speed::TokensPerSecond(8_000),
        ..cluster.devices[0].clone()
    };
    cluster.devices.push(fast);
    let planned = plan(&shape(), &cluster, &Limits::default()).unwrap();
    assert_eq!(planned.replicas.shares, [16, 16, 32]);
    assert_eq!(planned.ranks[2].0, "fast");
}

#[test]
fn memory_is_refused_or_forbids_the_anchor() {
    let mut cluster = homes(4, "20mbit,25ms");
    cluster.devices[0].memory = Some(Bytes(200_000_000));
    let planned = plan(&shape(), &cluster, &Limits::default()).unwrap();
    assert!(matches!(planned.replicas.sync, Sync::Ddp { .. }), "16 bytes a parameter fit, 24 do not");
    cluster.devices[0].memory = Some(Bytes(100_000_000));
    let error = plan(&shape(), &cluster, &Limits::default()).unwrap_err();
    assert!(error.to_string().contains("`worker` has 100 MB"), "{error}");
}

#[test]
fn what_cannot_be_is_refused() {
    let odd = ModelShape::dense(1000, 100, 150);
    assert!(matches!(plan(&odd, &homes(2, "home"), &Limits::default()), Err(ParallelError::NotWhole { .. })));
}

#[test]
fn the_report() {
    let planned = plan(&shape(), &homes(4, "20mbit,25ms"), &Limits::default()).unwrap();
    insta::assert_snapshot!(planned.to_string());
}
