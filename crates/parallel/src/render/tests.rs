//! Tests of the drawings, with snapshots.

use farflung_base::Nanos;

use super::*;
use crate::{
    Algorithm, Codec, Cost, ModelShape, Overlap, RankCost, Replicas, Sync, Timeline, simulate_replicas,
};

/// Two ranks; the second takes 2.5 times as long for a microbatch. An average of all values takes 100 ms, so
/// each of four buckets takes 25 ms.
fn timeline(sync: Sync, steps: u32) -> Timeline {
    let plan = Replicas { sync, algorithm: Algorithm::Ring, codec: Codec::F32, shares: vec![2, 1] };
    let rank = |ms| RankCost {
        forward: Nanos::from_millis(ms),
        backward: Nanos::from_millis(2 * ms),
        optimizer: Nanos::from_millis(8),
        outer: Nanos::from_millis(8),
    };
    let cost = Cost { ranks: vec![rank(40), rank(100)] };
    let price = |values: u64| Nanos(4 * values * 25_000);
    simulate_replicas(&plan, &ModelShape::dense(1000, 8, 24), &cost, steps, &price).unwrap()
}

fn ddp() -> Timeline {
    timeline(Sync::Ddp { overlap: Overlap::WithBackward, buckets: 4 }, 2)
}

#[test]
fn grids() {
    insta::assert_snapshot!("ddp", grid(&ddp(), 100));
    insta::assert_snapshot!("diloco", grid(&timeline(Sync::DiLoCo { every: 3 }, 6), 80));
    insta::assert_snapshot!("table", ddp().to_string());
    for width in [0, 24, 79, 200] {
        let drawn = grid(&ddp(), width);
        let wide = drawn.lines().filter(|l| l.ends_with('|')).map(str::len).max();
        assert_eq!(wide, Some(width.max(24)));
    }
    let empty = Timeline { ranks: 1, steps: 0, spans: Vec::new() };
    assert!(grid(&empty, 40).starts_with("r0 |......"));
}

/// Checks that every tag is closed in order, and that no attribute or text contains a bare `<` or `&`.
fn well_formed(text: &str) {
    let mut open = Vec::new();
    let mut rest = text;
    while let Some(start) = rest.find('<') {
        assert!(!rest[..start].contains(['>', '&']), "{}", &rest[..start]);
        let end = start + rest[start..].find('>').expect("a tag ends");
        let tag = &rest[start + 1..end];
        assert!(!tag.contains(['<', '&']) && tag.matches('"').count().is_multiple_of(2), "{tag}");
        if let Some(name) = tag.strip_prefix('/') {
            assert_eq!(open.pop(), Some(name));
        } else if !tag.ends_with('/') {
            open.push(tag.split_whitespace().next().expect("a tag has a name"));
        }
        rest = &rest[end + 1..];
    }
    assert!(open.is_empty() && rest.trim().is_empty(), "{open:?} {rest}");
}

#[test]
fn svgs() {
    for timeline in
        [ddp(), timeline(Sync::DiLoCo { every: 3 }, 6), Timeline { ranks: 0, steps: 0, spans: vec![] }]
    {
        well_formed(&svg(&timeline));
    }
    let drawn = svg(&ddp());
    assert_eq!(drawn.matches("<title>").count(), ddp().spans.len());
    insta::assert_snapshot!(
        "svg",
        svg(&timeline(Sync::Ddp { overlap: Overlap::WithBackward, buckets: 2 }, 1))
    );
}

#[test]
fn traces_are_json_and_exact() {
    let timeline = ddp();
    let parsed: serde_json::Value = serde_json::from_str(&trace(&timeline)).unwrap();
    let events = parsed["traceEvents"].as_array().unwrap();
    let complete: Vec<_> = events.iter().filter(|e| e["ph"] == "X").collect();
    assert_eq!(complete.len(), timeline.spans.len());
    for (event, span) in complete.iter().zip(&timeline.spans) {
        assert_eq!(event["pid"], span.rank.0);
        let end = event["ts"].as_f64().unwrap() + event["dur"].as_f64().unwrap();
        assert!((end * 1000.0 - span.end.0 as f64).abs() < 1e-3 * 1000.0);
    }
    assert_eq!(events.iter().filter(|e| e["ph"] == "M").count(), 6);
}
