//! Whether a member that was asked to leave can wait for the next moment at which members leave: with local
//! steps, the next average. Its machine may be taken away before.

use farflung_base::Nanos;

/// The times of a member's steps, and the time at which it was asked to leave.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct NoticeTime {
    /// Time of the last step without an average of all replicas.
    local: Option<Nanos>,
    /// Time of the last step with one.
    averaged: Option<Nanos>,
    asked: Option<Nanos>,
}

impl NoticeTime {
    /// Notes the time of a step that was done. `averaged` says whether all replicas agreed after it.
    pub(super) const fn step(&mut self, took: Nanos, averaged: bool) {
        let last = if averaged { &mut self.averaged } else { &mut self.local };
        *last = Some(took);
    }

    /// Notes the time at which this member was asked to leave. Returns whether it was not known.
    pub(super) fn ask(&mut self, at: Nanos) -> bool {
        let is_new = self.asked.is_none();
        self.asked.get_or_insert(at);
        is_new
    }

    /// Returns the time of `steps` more steps, of which the last one has an average. `None` before a step was
    /// measured.
    pub(super) fn until(&self, steps: u64) -> Option<Nanos> {
        let [local, averaged] = [self.local.or(self.averaged), self.averaged.or(self.local)];
        let local = local.map_or(0, |local| local.0.saturating_mul(steps.saturating_sub(1)));
        averaged.map(|averaged| averaged.saturating_add(Nanos(local)))
    }

    /// Returns whether `steps` more steps, of which the last one has an average, take longer than what is left
    /// of a notice of this time. Without a notice, or before a step was measured, they do not.
    pub(super) fn is_too_short(&self, notice: Option<Nanos>, steps: u64, now: Nanos) -> bool {
        let Some((notice, asked)) = notice.zip(self.asked) else { return false };
        let left = notice.saturating_sub(now.saturating_sub(asked));
        self.until(steps).is_some_and(|until| until > left)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: fn(u64) -> Nanos = Nanos::from_millis;

    #[test]
    fn the_rest_of_the_round_must_fit_into_what_is_left_of_the_notice() {
        let mut time = NoticeTime::default();
        assert!(time.ask(MS(50)));
        assert_eq!(time.until(3), None);
        assert!(!time.is_too_short(Some(MS(1)), 1_000, MS(70)));
        time.step(MS(100), false);
        time.step(MS(400), true);
        // It is known since 50 ms: nine local steps and the average take 1.3 s.
        assert!(!time.ask(MS(60)));
        assert_eq!(time.until(10), Some(MS(1_300)));
        assert!(!time.is_too_short(None, 10, MS(50)));
        assert!(!time.is_too_short(Some(MS(1_300)), 10, MS(50)));
        assert!(time.is_too_short(Some(MS(1_299)), 10, MS(50)));
        assert!(time.is_too_short(Some(MS(1_300)), 10, MS(51)));
        assert!(!time.is_too_short(Some(MS(500)), 2, MS(50)));
        assert!(time.is_too_short(Some(MS(399)), 1, MS(50)));
    }
}
