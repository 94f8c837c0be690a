//! Describes an event of `events.jsonl` in words. Events of other versions, which are unknown here, are shown
//! unchanged.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use farflung_base::Bytes;
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::train::elastic::called;

/// Limit on the length of an event's text, in characters.
const LONGEST: usize = 400;

/// A line of the file, with an event of any kind.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub(super) struct EventLine {
    pub(super) step: u64,
    pub(super) time_s: f64,
    #[serde(rename = "event")]
    pub(super) kind: String,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

/// Members that joined and left in a change of members.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Change {
    pub(super) joined: Vec<u32>,
    pub(super) left: Vec<u32>,
    /// Names of those that joined or left, as far as they have one.
    pub(super) names: BTreeMap<u32, String>,
    /// Seconds of the run's clock that the change took.
    pub(super) took_s: f64,
}

impl EventLine {
    pub(super) fn parse(line: &[u8]) -> Result<Self, String> {
        let mut event: Self = serde_json::from_slice(line).map_err(|error| error.to_string())?;
        if !event.time_s.is_finite() {
            return Err("its time is not a number".to_owned());
        }
        event.kind = cut(&event.kind);
        Ok(event)
    }

    fn text_of(&self, field: &str) -> Option<&str> {
        self.rest.get(field)?.as_str()
    }

    fn count(&self, field: &str) -> Option<u64> {
        self.rest.get(field)?.as_u64()
    }

    fn numbers(&self, field: &str) -> Vec<u32> {
        let values = self.rest.get(field).and_then(Value::as_array);
        let number = |value: &Value| value.as_u64().and_then(|number| u32::try_from(number).ok());
        values.into_iter().flatten().filter_map(number).collect()
    }

    /// Returns the names of members by their endpoints.
    fn names(&self) -> BTreeMap<u32, String> {
        let names = self.rest.get("names").and_then(Value::as_object);
        let name = |(slot, name): (&String, &Value)| Some((slot.parse().ok()?, cut(name.as_str()?)));
        names.into_iter().flatten().filter_map(name).collect()
    }

    /// Returns the change of members, if the event is one.
    pub(super) fn change(&self) -> Option<Change> {
        (self.kind == "members").then(|| Change {
            joined: self.numbers("joined"),
            left: self.numbers("left"),
            names: self.names(),
            took_s: self.count("took_ms").unwrap_or(0) as f64 / 1e3,
        })
    }

    /// Returns the microbatches of each rank in a step, if the event is a change of shares.
    pub(super) fn shares(&self) -> Option<Vec<u32>> {
        (self.kind == "shares").then(|| self.numbers("microbatches"))
    }

    /// Returns why the run ended, if the event is its end.
    pub(super) fn ends(&self) -> Option<String> {
        ["lost", "named", "stopped", "refused"].contains(&self.kind.as_str()).then(|| self.text())
    }

    /// Returns whether the event should be highlighted.
    pub(super) fn is_alarming(&self) -> bool {
        match self.kind.as_str() {
            "members" => self.text_of("reason").is_some(),
            kind => ["lost", "named", "nonsense", "refused", "unadmitted", "unsaved"].contains(&kind),
        }
    }

    /// Returns the event in words.
    pub(super) fn text(&self) -> String {
        let reason = self.text_of("reason").unwrap_or("for an unknown reason");
        cut(&match self.kind.as_str() {
            "members" => self.members(),
            "saved" => format!("checkpoint saved: {}", self.text_of("path").map_or("somewhere", last_part)),
            "resumed" => {
                let notes = self.rest.get("notes").and_then(Value::as_array);
                let notes: Vec<_> = notes.into_iter().flatten().filter_map(Value::as_str).collect();
                let from = self.text_of("from").map_or("a checkpoint", last_part);
                format!(
                    "continued from {from}{}{}",
                    if notes.is_empty() { "" } else { "; " },
                    notes.join("; ")
                )
            }
            "unsaved" => format!("not saved: {reason}"),
            "skipped" => match self.count("times").unwrap_or(0) {
                1 => "gradients overflowed: computed again".to_owned(),
                times => format!("gradients overflowed: computed again {times} times"),
            },
            "admitting" => self.admitting(),
            "following" => {
                let of = |field: &str| self.count(field).unwrap_or(0);
                let (member, state, record) = (of("member"), Bytes(of("state")), Bytes(of("record")));
                format!(
                    "member {member} fetches {state} while the others train on; {record} for each step since"
                )
            }
            "repeated" => {
                let deadline = self.count("deadline_ms").unwrap_or(0) as f64 / 1e3;
                format!("all members answer: the step is repeated, with a deadline of {deadline} s")
            }
            "shares" => self.shares_text(),
            "layers" => self.layers_text(),
            "pools" => self.pools_text(),
            "unadmitted" => {
                let of = |field: &str| self.count(field).unwrap_or(0);
                let (state, takes) = (Bytes(of("state")), of("takes_ms") as f64 / 1e3);
                format!(
                    "member {} is refused: all would wait {takes:.1} s for {state} of state",
                    of("member")
                )
            }
            "nonsense" => {
                format!("member {} has reported {reason}: not used", self.count("member").unwrap_or(0))
            }
            "lost" => format!("lost: {}", self.text_of("peer").unwrap_or("a peer")),
            "named" => format!("wrong values: {reason}"),
            "stopped" => reason.to_owned(),
            "refused" => format!("refused: {reason}"),
            kind => format!("{kind}: {}", Value::Object(self.rest.clone())),
        })
    }

    fn admitting(&self) -> String {
        let of = |field: &str| self.count(field).unwrap_or(0);
        let about =
            if self.rest.get("at_most").and_then(Value::as_bool) == Some(true) { "at most" } else { "about" };
        let waits = match self.count("predicted_ms") {
            Some(millis) => format!("{about} {:.1} s", millis as f64 / 1e3),
            None => "unknown time".to_owned(),
        };
        let (member, state) = (of("member"), Bytes(of("state")));
        format!("member {member} is ready to join: {state} of state, {waits}")
    }

    fn shares_text(&self) -> String {
        format!("shares are now {}", self.shorter("microbatches"))
    }

    fn layers_text(&self) -> String {
        format!("layers of the stages are now {}", self.shorter("layers"))
    }

    /// Returns numbers that have changed, and how much shorter a step is with them.
    fn shorter(&self, field: &str) -> String {
        let numbers: Vec<String> = self.numbers(field).iter().map(ToString::to_string).collect();
        let seconds = |field: &str| self.count(field).unwrap_or(0) as f64 / 1e6;
        let (before, now) = (seconds("before_us"), seconds("now_us"));
        format!("{}: a step takes {now:.3} s instead of {before:.3} s", numbers.join(" : "))
    }

    fn pools_text(&self) -> String {
        let lists = |field: &str| -> Vec<Vec<u64>> {
            let lists = self.rest.get(field).and_then(Value::as_array).into_iter().flatten();
            let numbers = |list: &Value| {
                list.as_array().into_iter().flatten().filter_map(Value::as_u64).collect::<Vec<_>>()
            };
            lists.take(64).map(numbers).collect()
        };
        let pool = |(members, rates): (Vec<u64>, Vec<u64>)| {
            let all = rates.iter().sum::<u64>().max(1);
            let share = |(member, rate): (&u64, &u64)| format!("{member} ({}%)", 100 * rate / all);
            members.iter().zip(&rates).map(share).collect::<Vec<_>>().join(", ")
        };
        let pools: Vec<String> = lists("members").into_iter().zip(lists("rates")).map(pool).collect();
        let moved = self.count("moved").map_or_else(String::new, |member| format!("member {member} moved; "));
        format!("{moved}members of the stages are {}", pools.join(" : "))
    }

    fn members(&self) -> String {
        let Change { joined: came, left: went, names: known, took_s } = self.change().unwrap_or_default();
        let name = |peer: &u32| called(known.get(peer).map(String::as_str), *peer);
        let names = |peers: &[u32]| {
            let names: Vec<String> = peers.iter().take(8).map(name).collect();
            let more = if peers.len() > 8 { " and more" } else { "" };
            format!("{}{more}", names.join(", "))
        };
        let lost = self.text_of("reason").is_some();
        let mut parts = Vec::new();
        if !went.is_empty() {
            parts.push(format!("{} {}", names(&went), if lost { "lost" } else { "left" }));
        }
        if !came.is_empty() {
            parts.push(format!("{} joined", names(&came)));
        }
        if parts.is_empty() {
            parts.push("the same members continue".to_owned());
        }
        let mut text = format!("{}, {took_s:.1} s", parts.join(", "));
        if lost {
            let _ = write!(text, ", {} samples lost", self.count("lost_sequences").unwrap_or(0));
        }
        if let Some(percent) = self.count("kept_percent").filter(|&percent| percent > 0) {
            let _ = write!(text, ", {percent}% of the step kept");
        }
        if let Some(members) = self.count("members") {
            let _ = write!(text, "; {members} now");
        }
        text
    }
}

/// Returns the last component of a path.
fn last_part(path: &str) -> &str {
    path.rsplit(['/', '\\']).next().unwrap_or(path)
}

/// Returns at most [`LONGEST`] characters of a text, with control characters replaced by spaces. A text that
/// was cut ends with `…`.
pub(super) fn cut(text: &str) -> String {
    let plain = |c: char| if c.is_control() { ' ' } else { c };
    let mut short: String = text.chars().take(LONGEST).map(plain).collect();
    if text.chars().nth(LONGEST).is_some() {
        short.push('…');
    }
    short
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Event, EventKind};

    fn text(what: EventKind) -> String {
        let line = serde_json::to_vec(&Event { step: 812, time_s: 1.5, what }).unwrap();
        EventLine::parse(&line).unwrap().text()
    }

    #[test]
    fn every_event_has_words() {
        let members = |came: &[u32], went: &[u32], reason: Option<&str>| EventKind::Members {
            epoch: 4,
            members: 3,
            joined: came.into(),
            left: went.into(),
            names: came.iter().filter(|&&slot| slot == 9).map(|&slot| (slot, "home-3".to_owned())).collect(),
            lost_sequences: 0,
            lost: Vec::new(),
            lost_steps: 0,
            from_checkpoints: false,
            kept_percent: 0,
            took_ms: 2_140,
            reason: reason.map(str::to_owned),
        };
        let mut keeping = members(&[], &[3], Some("killed"));
        if let EventKind::Members { kept_percent, .. } = &mut keeping {
            *kept_percent = 64;
        }
        let reason = "because".to_owned();
        for (what, expected) in [
            (members(&[], &[3], Some("frozen")), "member 3 lost, 2.1 s, 0 samples lost; 3 now"),
            (keeping, "member 3 lost, 2.1 s, 0 samples lost, 64% of the step kept; 3 now"),
            (members(&[5], &[], None), "member 5 joined, 2.1 s; 3 now"),
            (members(&[5, 9], &[], None), "member 5, home-3 joined, 2.1 s; 3 now"),
            (members(&[5], &[2, 3], None), "member 2, member 3 left, member 5 joined, 2.1 s; 3 now"),
            (EventKind::Saved { path: "runs/a/step-00000812".into() }, "checkpoint saved: step-00000812"),
            (
                EventKind::Resumed { from: "a/step-3".into(), notes: vec!["`lr` differs".into()] },
                "continued from step-3; `lr` differs",
            ),
            (
                EventKind::Admitting {
                    member: 3,
                    state: 60_000_000,
                    predicted_ms: Some(2500),
                    at_most: false,
                },
                "member 3 is ready to join: 60 MB of state, about 2.5 s",
            ),
            (
                EventKind::Following { member: 3, state: 60_000_000, record: 20_000_000 },
                "member 3 fetches 60 MB while the others train on; 20 MB for each step since",
            ),
            (
                EventKind::Unadmitted { member: 3, state: 1_450_000, takes_ms: 174_700, limit_ms: 60_000 },
                "member 3 is refused: all would wait 174.7 s for 1.45 MB of state",
            ),
            (
                EventKind::Nonsense { member: 3, reason: "1ns for a microbatch".into() },
                "member 3 has reported 1ns for a microbatch: not used",
            ),
            (EventKind::Unsaved { reason: "the disk is full".into() }, "not saved: the disk is full"),
            (EventKind::Skipped { times: 2 }, "gradients overflowed: computed again 2 times"),
            (
                EventKind::Shares { microbatches: vec![3, 1], before_us: 2_000_000, now_us: 1_500_000 },
                "shares are now 3 : 1: a step takes 1.500 s instead of 2.000 s",
            ),
            (
                EventKind::Layers { layers: vec![2, 3, 1], before_us: 2_000_000, now_us: 1_500_000 },
                "layers of the stages are now 2 : 3 : 1: a step takes 1.500 s instead of 2.000 s",
            ),
            (
                EventKind::Pools {
                    members: vec![vec![0], vec![3, 4]],
                    rates: vec![vec![1], vec![3, 1]],
                    moved: Some(4),
                },
                "member 4 moved; members of the stages are 0 (100%) : 3 (75%), 4 (25%)",
            ),
            (EventKind::Lost { peer: "rank 1 was lost".into() }, "lost: rank 1 was lost"),
            (EventKind::Named { ranks: vec![1], reason: reason.clone() }, "wrong values: because"),
            (EventKind::Stopped { reason: "stopped by SIGINT".into() }, "stopped by SIGINT"),
            (EventKind::Refused { reason }, "refused: because"),
        ] {
            assert_eq!(text(what), expected);
        }
    }

    #[test]
    fn events_of_another_version_are_shown_and_long_ones_are_cut() {
        let line = br#"{"step":1,"time_s":2,"event":"danced","partner":"rank 3"}"#;
        let event = EventLine::parse(line).unwrap();
        assert_eq!(event.text(), r#"danced: {"partner":"rank 3"}"#);
        assert!(!event.is_alarming() && event.ends().is_none() && event.change().is_none());
        let long = format!(r#"{{"step":1,"time_s":2,"event":"lost","peer":"{}"}}"#, "ä\\n".repeat(5000));
        let text = EventLine::parse(long.as_bytes()).unwrap().text();
        assert_eq!(text.chars().count(), LONGEST + 1);
        assert!(text.ends_with('…') && !text.contains('\n'));
        for bad in [
            "",
            "{}",
            "[1]",
            r#"{"step":-1,"time_s":0,"event":"x"}"#,
            r#"{"step":1,"time_s":"x","event":"x"}"#,
        ] {
            assert!(EventLine::parse(bad.as_bytes()).is_err(), "{bad}");
        }
    }
}
