//! Tests that lines turn into the right snapshot, also when they are invalid.

use std::collections::BTreeMap;

use farflung_base::Bytes;

use super::*;
use crate::metrics::MixtureMetrics;
use crate::watch::curve::MOST_POINTS;
use crate::watch::snapshot::Presence;
use crate::{CountedMemory, Event, EventKind};

fn row(step: u64) -> StepMetrics {
    StepMetrics {
        step,
        time_s: step as f64 * 2.0,
        wall_s: step as f64 * 0.5,
        tokens: step * 100,
        train_loss: 5.0 - step as f64 * 0.01,
        val_loss: step.is_multiple_of(10).then_some(4.0),
        bytes_sent: step * 1_000,
        bytes_received: step * 900,
        ..StepMetrics::default()
    }
}

fn metrics(state: &mut State, steps: impl IntoIterator<Item = u64>) {
    for step in steps {
        state.line(Lines::Metrics, &serde_json::to_vec(&row(step)).unwrap());
    }
}

fn event(state: &mut State, rank: u32, step: u64, what: EventKind) {
    let event = Event { step, time_s: step as f64 * 2.0, what };
    state.line(Lines::Events(rank), &serde_json::to_vec(&event).unwrap());
}

fn close(got: Option<f64>, expected: f64) -> bool {
    got.is_some_and(|got| (got - expected).abs() <= 1e-9 * expected)
}

#[test]
fn a_run_from_its_first_step_to_its_report() {
    let mut state = State::new("nano-1");
    assert_eq!(state.snapshot().summary.phase, Phase::Waiting);
    state.document(Document::Config, Some("steps = 80\nlr = 0.1\n"));
    metrics(&mut state, 1..=80);
    let Snapshot { summary, curve } = state.snapshot();
    assert_eq!(
        (summary.phase, summary.run.steps, summary.run.name.as_str()),
        (Phase::Running, Some(80), "nano-1")
    );
    let latest = summary.latest;
    assert_eq!(
        (latest.step, latest.tokens, latest.bytes_sent, latest.val_loss),
        (80, 8_000, 80_000, Some(4.0))
    );
    assert!(close(latest.bytes_per_step, 1_000.0) && close(latest.step_s, 2.0), "{latest:?}");
    let goodput = summary.goodput;
    assert!(close(goodput.tokens_per_s, 200.0) && close(goodput.recent_tokens_per_s, 200.0), "{goodput:?}");
    assert!(close(goodput.clock_tokens_per_s, 50.0) && goodput.unchanged.is_none(), "{goodput:?}");
    assert_eq!((curve.points.len(), curve.points[79].step, curve.generation), (80, 80, 0));
    state.document(Document::Report, Some(r#"{"steps":80}"#));
    assert_eq!(state.snapshot().summary.phase, Phase::Finished);
    // The run continues with more steps.
    metrics(&mut state, [81]);
    assert_eq!(state.snapshot().summary.phase, Phase::Running);
}

#[test]
fn a_member_that_came_later_counts_from_its_first_step() {
    let mut state = State::new("b");
    for (step, wall_s, tokens) in [(501, 3.0, 50_100), (502, 4.0, 50_300)] {
        let row = StepMetrics { wall_s, time_s: wall_s, tokens, ..row(step) };
        state.line(Lines::Metrics, &serde_json::to_vec(&row).unwrap());
    }
    assert!(close(state.snapshot().summary.goodput.tokens_per_s, 200.0));
}

#[test]
fn how_a_run_ended_is_its_last_event_unless_it_went_on() {
    let mut state = State::new("a");
    let phase = |state: &State| state.snapshot().summary.phase;
    metrics(&mut state, 1..=4);
    event(&mut state, 0, 4, EventKind::Stopped { reason: "stopped by SIGINT".to_owned() });
    assert_eq!(phase(&state), Phase::Ended { reason: "stopped by SIGINT".to_owned() });
    event(&mut state, 0, 3, EventKind::Resumed { from: "step-3".to_owned(), notes: Vec::new() });
    metrics(&mut state, 4..=5);
    assert_eq!(phase(&state), Phase::Running);
    // Another rank's failure does not end this run.
    event(&mut state, 1, 5, EventKind::Refused { reason: "x".to_owned() });
    assert_eq!(phase(&state), Phase::Running);
    // Files are read in turns, so rows may be read after the end.
    event(&mut state, 0, 9, EventKind::Lost { peer: "rank 1".to_owned() });
    metrics(&mut state, 6..=9);
    assert_eq!(phase(&state), Phase::Ended { reason: "lost: rank 1".to_owned() });
}

#[test]
fn ranks_that_tell_of_the_same_event_are_told_once() {
    let mut state = State::new("a");
    let saved = |rank: u32| EventKind::Saved { path: format!("run/ranks/{rank}/step-2") };
    event(&mut state, 0, 2, saved(0));
    event(&mut state, 0, 8, EventKind::Stopped { reason: "s".to_owned() });
    event(&mut state, 2, 2, saved(2));
    event(&mut state, 1, 2, saved(1));
    event(&mut state, 1, 4, EventKind::Skipped { times: 1 });
    event(&mut state, 1, 8, EventKind::Stopped { reason: "s".to_owned() });
    let events = state.snapshot().summary.events;
    let seen: Vec<_> = events.iter().map(|e| (e.kind.as_str(), &e.ranks[..])).collect();
    assert_eq!(seen, [("saved", &[0, 1, 2][..]), ("skipped", &[1]), ("stopped", &[0, 1])]);
    assert!(!events[0].alarming && events[0].text == "checkpoint saved: step-2");
    state.restart(Lines::Events(1));
    let events = state.snapshot().summary.events;
    assert_eq!(events.iter().map(|e| e.ranks.len()).collect::<Vec<_>>(), [2, 1]);
}

#[test]
fn members_that_come_and_go_are_followed_and_their_time_is_counted() {
    let mut state = State::new("a");
    let plan = "version = 1\nmesh = \"data=1,pipeline=1\"\nmachines = [\"worker.0\"]\nprecision = \"f32\"\n\
                batch = 1\nmicrobatches = [1]\n[model]\nname = \"m\"\nlayers = 1\nparameters = 7\n\
                [[part]]\nlayers = \"0..1\"\n[[level]]\nmethod = \"diloco\"\ncodec = \"int8\"\n";
    state.document(Document::Plan, Some(plan));
    metrics(&mut state, 1..=10);
    let change = |came: &[u32], went: &[u32], took_ms| EventKind::Members {
        epoch: 1,
        members: 2,
        joined: came.into(),
        left: went.into(),
        names: BTreeMap::new(),
        lost_sequences: 0,
        lost: Vec::new(),
        lost_steps: 0,
        from_checkpoints: false,
        kept_percent: 0,
        took_ms,
        reason: (!went.is_empty()).then(|| "silent".to_owned()),
    };
    event(&mut state, 0, 3, change(&[1, 2], &[], 1_000));
    event(&mut state, 0, 8, change(&[], &[1], 4_000));
    let summary = state.snapshot().summary;
    let seen: Vec<_> = summary.members.iter().map(|m| (m.name.as_str(), m.presence)).collect();
    let (here, gone) = (Presence::Here, Presence::Gone);
    assert_eq!(seen, [("member 0", here), ("member 2", here), ("member 1", gone)]);
    assert!(close(summary.goodput.unchanged, 0.75), "{:?}", summary.goodput);
    assert!(summary.events[1].alarming);
    assert_eq!(summary.events[1].text, "member 1 lost, 4.0 s, 0 samples lost; 2 now");
    assert_eq!((summary.run.method.as_deref(), summary.run.codec.as_deref()), (Some("diloco"), Some("int8")));
}

#[test]
fn garbage_is_counted_by_file_and_changes_nothing_else() {
    let mut state = State::new("a\u{202e}\n");
    metrics(&mut state, 1..=3);
    let before = state.snapshot();
    let all = [Lines::Metrics, Lines::Events(0), Lines::Events(3), Lines::Times(0), Lines::Times(7)];
    let deep = vec![b'['; 60_000];
    let garbage: [&[u8]; 9] = [
        b"",
        b"{",
        b"null",
        b"\xff\xfe\0",
        b"[[[[[[[[",
        b"{\"step\":18446744073709551616}",
        b"{\"step\":\"<script>alert(1)</script>\"}",
        b"{\"step\":9,\"time_s\":-1,\"wall_s\":0,\"tokens\":1,\"train_loss\":1,\"val_loss\":null,\
            \"bytes_sent\":0,\"bytes_received\":0,\"tokens_per_s\":0}",
        &deep,
    ];
    for file in all {
        for line in garbage {
            state.line(file, line);
        }
        state.long_line(file);
    }
    for document in Document::ALL {
        state.document(document, Some("\u{0}[{<script>"));
    }
    let after = state.snapshot();
    assert_eq!(
        Snapshot { summary: Summary { problems: Vec::new(), ..after.summary.clone() }, ..after.clone() },
        before
    );
    let problems = after.summary.problems;
    assert_eq!(problems.len(), all.len() + Document::ALL.len());
    for file in all {
        let problem = problems.iter().find(|problem| problem.file == file.path()).unwrap();
        assert_eq!((problem.bad_lines, problem.long_lines), (9, 1), "{file:?}");
    }
    assert!(problems.iter().all(|problem| !problem.what.contains('\n') && !problem.what.contains('\u{0}')));
    // A replaced file, or a document that is valid again, has no problems any more.
    for file in all {
        state.restart(file);
    }
    for document in Document::ALL {
        state.document(document, None);
    }
    assert!(state.snapshot().summary.problems.is_empty());
}

#[test]
fn members_that_do_not_answer_are_a_problem_until_one_does() {
    let mut state = State::new("run");
    state.asked(Err("no member answered".to_owned()));
    let problems = state.snapshot().summary.problems;
    assert_eq!((problems.len(), &problems[0].file[..]), (1, "members"));
    assert_eq!(problems[0].what, "no member answered");
    state.asked(Ok(None));
    assert!(state.snapshot().summary.problems.is_empty());
}

#[test]
fn plans_that_cannot_be_are_problems() {
    let mut state = State::new("a");
    for bad in [
        "version = 1",
        "version = 1\nmesh = \"data=4000000000,pipeline=1\"\nmachines = []\nprecision = \"f32\"\nbatch = 0\n\
         microbatches = []\n[model]\nname = \"m\"\nlayers = 1\nparameters = 7\n[[part]]\nlayers = \"0..1\"\n\
         [[level]]\nmethod = \"ddp\"\ncodec = \"int8\"\n",
    ] {
        state.document(Document::Plan, Some(bad));
        let summary = state.snapshot().summary;
        assert_eq!((summary.problems.len(), summary.members.len()), (1, 0), "{bad}");
    }
    for (links, problems) in [
        (r#"{"simulated":true,"topology":null}"#, 1),
        (r#"{"simulated":true,"topology":{"size":3,"links":[],"ports":[],"regions":[],"lines":[]}}"#, 2),
    ] {
        state.document(Document::Links, Some(links));
        assert_eq!(state.snapshot().summary.problems.len(), problems, "{links}");
    }
}

#[test]
fn memory_is_bounded_whatever_is_told() {
    let mut state = State::new("a");
    metrics(&mut state, 1..=20_000);
    for step in 0..5_000 {
        event(&mut state, (step % 90) as u32, step, EventKind::Skipped { times: step as u32 });
        let (came, went) = (vec![step as u32], vec![]);
        let change = EventKind::Members {
            epoch: step,
            members: 1,
            joined: came,
            left: went,
            names: BTreeMap::new(),
            lost_sequences: 0,
            lost: Vec::new(),
            lost_steps: 0,
            from_checkpoints: false,
            kept_percent: 0,
            took_ms: 1,
            reason: None,
        };
        event(&mut state, 0, step, change);
        let times = StepTimes { step, rank: 0, took_s: 1.0, ..StepTimes::default() };
        state.line(Lines::Times((step % 90) as u32), &serde_json::to_vec(&times).unwrap());
        state.line(Lines::Events(step as u32), b"x");
    }
    let Snapshot { summary, curve } = state.snapshot();
    assert!(curve.points.len() <= MOST_POINTS && summary.events.len() == MOST_EVENTS);
    assert_eq!(summary.more_events, 10_000 - MOST_EVENTS as u64);
    assert!(summary.timeline.len() <= crate::watch::MOST_STEPS && state.recent.len() <= RECENT + 1);
    assert!(summary.members.len() <= crate::watch::MOST_MEMBERS && summary.problems.len() <= MOST_PROBLEMS);
    assert!(serde_json::to_vec(&state.snapshot()).unwrap().len() < 1 << 20);
}

#[test]
fn the_choices_of_the_newest_step_are_shown_up_to_a_bound() {
    let mut state = State::new("run");
    metrics(&mut state, 1..=2);
    assert!(state.snapshot().summary.experts.is_empty());
    let mixture = |experts: usize| MixtureMetrics { counts: vec![7; experts], ..MixtureMetrics::default() };
    for (layers, experts) in [(MOST_LAYERS + 5, MOST_EXPERTS + 5), (2, 4)] {
        let row = StepMetrics { experts: vec![mixture(experts); layers], ..row(3) };
        state.line(Lines::Metrics, &serde_json::to_vec(&row).unwrap());
        let shown = state.snapshot().summary.experts;
        let bounded = (shown.len(), shown[0].counts.len());
        assert_eq!(bounded, (layers.min(MOST_LAYERS), experts.min(MOST_EXPERTS)));
    }
}

#[test]
fn the_memory_of_the_newest_step_is_shown_if_it_was_counted() {
    let mut state = State::new("run");
    metrics(&mut state, 1..=2);
    assert!(state.snapshot().summary.memory.is_none());
    let mut memory = CountedMemory::default();
    (memory.step.device.weights, memory.step.disk.optimizer) = (Bytes(40), Bytes(u64::MAX));
    let row = StepMetrics { memory: Some(memory), ..row(3) };
    state.line(Lines::Metrics, &serde_json::to_vec(&row).unwrap());
    assert_eq!(state.snapshot().summary.memory, Some(memory));
}
