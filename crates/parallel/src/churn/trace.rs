//! Traces of failures: the times at which machines fail and come back.

use std::fmt;
use std::str::FromStr;

use farflung_base::Nanos;

use crate::ParallelError;
use crate::seeded_rng::SeededRng;

/// The machines that fail or come back at one time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// Time since the start.
    pub at: Nanos,
    /// Machines that fail, ascending.
    pub lost: Vec<u32>,
    /// Machines that come back, ascending.
    pub back: Vec<u32>,
}

/// A trace of failures. All machines are present at the start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trace {
    /// Number of machines; they are numbered from 0.
    pub machines: u32,
    /// Length of the trace.
    pub time: Nanos,
    /// Changes, strictly ascending by time. A machine fails only while it is present, and comes back only while
    /// it is absent.
    pub changes: Vec<Change>,
}

impl Trace {
    /// Draws a trace in which each machine fails after `lifetime` seconds on average and comes back after
    /// `absence` seconds on average. Machines are independent, and both times are exponentially distributed.
    #[must_use]
    pub fn drawn(machines: u32, lifetime: f64, absence: f64, time: Nanos, seed: u64) -> Self {
        let mut events = Vec::new();
        for machine in 0..machines {
            let mut draw = SeededRng::new(seed, (u64::from(machine) << 8) + 22);
            let (mut at, mut there) = (0.0, true);
            loop {
                at += draw.exponential(if there { lifetime } else { absence });
                let nanos = at * 1e9;
                if nanos.is_nan() || nanos >= time.0 as f64 {
                    break;
                }
                there = !there;
                events.push(Event { at: Nanos(nanos as u64), machine, is_back: there });
            }
        }
        events.sort_by_key(|event| (event.at, event.machine));
        Self { machines, time, changes: gathered(&events) }
    }

    /// Returns the mean number of machines present.
    #[must_use]
    pub fn mean(&self) -> f64 {
        let (mut there, mut at, mut sum) = (f64::from(self.machines), Nanos::ZERO, 0.0);
        for change in &self.changes {
            sum += there * (change.at - at).as_secs_f64();
            at = change.at;
            there += change.back.len() as f64 - change.lost.len() as f64;
        }
        sum += there * (self.time.saturating_sub(at)).as_secs_f64();
        sum / self.time.as_secs_f64().max(1e-9)
    }

    /// Returns the total number of failures of machines.
    #[must_use]
    pub fn losses(&self) -> usize {
        self.changes.iter().map(|change| change.lost.len()).sum()
    }

    /// Returns the mean time for which a machine is present before it fails: the sum of these times over all
    /// machines, divided by the number of failures. `None` if no machine fails.
    #[must_use]
    pub fn lifetime(&self) -> Option<Nanos> {
        let losses = self.losses();
        let present = self.mean() * self.time.as_secs_f64();
        (losses > 0).then(|| Nanos::from_secs_f64(present / losses as f64))
    }

    /// Returns the part of the trace before `time`.
    #[must_use]
    pub fn until(&self, time: Nanos) -> Self {
        let changes = self.changes.iter().take_while(|change| change.at < time).cloned().collect();
        Self { machines: self.machines, time: self.time.min(time), changes }
    }
}

/// The failure or return of one machine.
#[derive(Debug, Clone, Copy)]
struct Event {
    at: Nanos,
    machine: u32,
    is_back: bool,
}

/// Merges events of the same time into one change. Events must be sorted by time.
fn gathered(events: &[Event]) -> Vec<Change> {
    let mut changes: Vec<Change> = Vec::new();
    for event in events {
        if changes.last().is_none_or(|last| last.at != event.at) {
            changes.push(Change { at: event.at, lost: Vec::new(), back: Vec::new() });
        }
        let Some(last) = changes.last_mut() else { continue };
        if event.is_back { &mut last.back } else { &mut last.lost }.push(event.machine);
    }
    changes
}

impl fmt::Display for Trace {
    /// Prints text that parses back to this value.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "machines {} time {}ns", self.machines, self.time.0)?;
        for Change { at, lost, back } in &self.changes {
            for (machines, word) in [(lost, "lost"), (back, "back")] {
                for machine in machines {
                    writeln!(f, "{}ns {word} {machine}", at.0)?;
                }
            }
        }
        Ok(())
    }
}

impl FromStr for Trace {
    type Err = ParallelError;

    /// Reads lines: first `machines N time DURATION`, then `TIME lost M` and `TIME back M`, ordered by time.
    /// Text after `#` is ignored.
    ///
    /// Errors: [`ParallelError::TraceLine`] with the line that is wrong.
    fn from_str(text: &str) -> Result<Self, ParallelError> {
        let mut lines = (1..)
            .zip(text.lines())
            .map(|(number, line)| (number, line.split('#').next().unwrap_or_default().trim()))
            .filter(|(_, line)| !line.is_empty());
        let wrong = |line: usize, text: &str, expected: &'static str| ParallelError::TraceLine {
            line,
            text: text.to_owned(),
            expected,
        };
        let head = "`machines N time DURATION` with 1 to 65536 machines";
        let (number, first) = lines.next().ok_or_else(|| wrong(1, "", head))?;
        let [a, machines, b, time] = first.split_whitespace().collect::<Vec<_>>()[..] else {
            return Err(wrong(number, first, head));
        };
        let machines: Option<u32> = machines.parse().ok().filter(|n| (1..=65_536).contains(n));
        let time: Option<Nanos> = time.parse().ok().filter(|time: &Nanos| time.0 > 0);
        let (Some(machines), Some(time), "machines", "time") = (machines, time, a, b) else {
            return Err(wrong(number, first, head));
        };
        let mut there = vec![true; machines as usize];
        let mut events: Vec<Event> = Vec::new();
        for (number, line) in lines {
            let form = "`TIME lost MACHINE` or `TIME back MACHINE`";
            let [at, word, machine] = line.split_whitespace().collect::<Vec<_>>()[..] else {
                return Err(wrong(number, line, form));
            };
            let (Ok(at), Ok(machine)) = (at.parse::<Nanos>(), machine.parse::<u32>()) else {
                return Err(wrong(number, line, form));
            };
            let is_back = match word {
                "lost" => false,
                "back" => true,
                _ => return Err(wrong(number, line, form)),
            };
            if at >= time || events.last().is_some_and(|last| at < last.at) {
                return Err(wrong(
                    number,
                    line,
                    "a time that is not before that of the previous line, and is before the end",
                ));
            }
            let Some(state) = there.get_mut(machine as usize) else {
                return Err(wrong(number, line, "a machine number below the number of machines"));
            };
            let last = events.iter().rev().take_while(|last| last.at == at);
            if *state == is_back || last.clone().any(|last| last.machine == machine) {
                let expected = "`lost` for a machine that is there, or `back` for one that was lost, and one \
                                event of a machine at a time";
                return Err(wrong(number, line, expected));
            }
            *state = is_back;
            events.push(Event { at, machine, is_back });
        }
        Ok(Self { machines, time, changes: gathered(&events) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: Nanos = Nanos(3_600_000_000_000);

    #[test]
    fn a_trace_prints_and_reads_back_and_depends_on_the_seed_alone() {
        let trace = Trace::drawn(12, 3600.0, 600.0, HOUR * 6, 1);
        assert_eq!(trace, Trace::drawn(12, 3600.0, 600.0, HOUR * 6, 1));
        assert_ne!(trace, Trace::drawn(12, 3600.0, 600.0, HOUR * 6, 2));
        assert_eq!(trace.to_string().parse::<Trace>().unwrap(), trace);
        assert!(trace.losses() > 20 && trace.changes.windows(2).all(|pair| pair[0].at < pair[1].at));
    }

    #[test]
    fn the_mean_is_that_of_the_process() {
        let trace = Trace::drawn(64, 3600.0, 1200.0, HOUR * 400, 7);
        assert!((trace.mean() / 64.0 - 0.75).abs() < 0.01, "{}", trace.mean());
        let lifetime = trace.lifetime().unwrap().as_secs_f64();
        assert!((lifetime / 3600.0 - 1.0).abs() < 0.02, "{lifetime}");
        let calm = Trace { machines: 3, time: HOUR, changes: Vec::new() };
        assert!((calm.mean() - 3.0).abs() < 1e-12);
        assert_eq!(calm.lifetime(), None);
    }

    #[test]
    fn a_part_of_a_trace_has_the_changes_before_its_end() {
        let text = "machines 2 time 1h\n1min lost 1\n2min back 1\n2min lost 0\n";
        let trace: Trace = text.parse().unwrap();
        let minute = Nanos(60_000_000_000);
        assert_eq!(trace.until(minute * 2), "machines 2 time 2min\n1min lost 1\n".parse().unwrap());
        assert_eq!(trace.until(minute * 90), trace);
    }

    #[test]
    fn what_is_wrong_is_named_with_its_line() {
        let refused = |text: &str| text.parse::<Trace>().unwrap_err().to_string();
        assert!(refused("").contains("line 1"));
        assert!(refused("machines 0 time 1h").contains("1 to 65536"));
        assert!(refused("machines 2 time 1h\n1min lost 2").contains("line 2"));
        assert!(refused("machines 2 time 1h\n1min lost 1\n30s lost 0").contains("line 3"));
        assert!(refused("machines 2 time 1h\n1min back 1").contains("for one that was lost"));
        assert!(refused("machines 2 time 1h\n2h lost 1").contains("before the end"));
        assert!(refused("machines 2 time 1h\n# nothing\n1min gone 1").contains("line 3"));
    }
}
