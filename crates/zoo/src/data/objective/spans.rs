//! Spans that are taken out of a window.

use std::ops::Range;

/// How many tokens are taken out of a window, in how many spans. As in T5, a window begins with tokens that
/// stay and ends with a span.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Spans {
    /// Tokens that stay.
    kept: usize,
    /// Tokens that are taken out.
    taken: usize,
    /// Number of spans.
    count: usize,
}

impl Spans {
    /// Returns the spans of the longest window whose sequence has at most `context + 1` tokens: one that says
    /// what is wanted, the window, two for each span, and the last one. `percent` percent of the window are
    /// taken out, rounded, in spans of `mean` tokens, fewer than `sentinels` of them.
    pub(super) fn of(mean: usize, percent: usize, context: usize, sentinels: usize) -> Self {
        let of = |window: usize| {
            let taken = ((window * percent + 50) / 100).clamp(1, window - 1);
            let kept = window - taken;
            let count = ((taken + mean / 2) / mean).clamp(1, taken.min(kept).min(sentinels - 1));
            Self { kept, taken, count }
        };
        // A window's sequence is longer than that of a shorter window.
        let (mut least, mut above) = (2, context);
        while least + 1 < above {
            let middle = least.midpoint(above);
            if of(middle).tokens() <= context + 1 { least = middle } else { above = middle }
        }
        of(least)
    }

    /// Returns the number of tokens of the sequence.
    const fn tokens(self) -> usize {
        self.prefix() + self.targets()
    }

    /// Returns the number of tokens before the first target: what says what is wanted, what stays, and a token
    /// for each span.
    pub(super) const fn prefix(self) -> usize {
        1 + self.kept + self.count
    }

    /// Returns the number of targets: the spans, a token before each, and the last token.
    pub(super) const fn targets(self) -> usize {
        self.taken + self.count + 1
    }

    /// Draws where the spans are: all divisions of what is taken and of what stays into `count` parts are
    /// equally likely. `draw` takes an index and a number, and returns a number below that.
    pub(super) fn places(self, mut draw: impl FnMut(u64, usize) -> usize) -> Vec<Range<usize>> {
        let mut index = 0;
        let mut parts = |of: usize| {
            // Chooses `count - 1` of the `of - 1` places between two tokens, one after another.
            let (mut sizes, mut size, mut wanted) = (Vec::with_capacity(self.count), 1, self.count - 1);
            for left in (1..of).rev() {
                let ends = draw(index, left) < wanted;
                index += 1;
                if ends {
                    sizes.push(size);
                    size = 0;
                    wanted -= 1;
                }
                size += 1;
            }
            sizes.push(size);
            sizes
        };
        let (kept, taken) = (parts(self.kept), parts(self.taken));
        let mut at = 0;
        let span = |(kept, taken): (usize, usize)| {
            at += kept + taken;
            at - taken..at
        };
        kept.into_iter().zip(taken).map(span).collect()
    }
}

#[cfg(test)]
mod tests {
    use farflung_base::Philox;

    use super::*;

    /// Against a count by hand of all windows, and that sequences never are too long.
    #[test]
    fn the_longest_window_is_taken() {
        for context in 8..400 {
            for (mean, percent) in [(3, 15), (8, 15), (3, 50), (8, 50), (64, 15), (64, 50)] {
                let found = Spans::of(mean, percent, context, 100);
                let length = |window: usize| {
                    let taken =
                        ((window as f64 * percent as f64 / 100.0 + 0.5) as usize).clamp(1, window - 1);
                    let count = ((taken + mean / 2) / mean).clamp(1, taken.min(window - taken).min(99));
                    (taken, count, window + 2 * count + 2)
                };
                let best = (2..=context).filter(|&window| length(window).2 <= context + 1).max().unwrap();
                let (taken, count, tokens) = length(best);
                assert_eq!(found, Spans { kept: best - taken, taken, count }, "{context} {mean} {percent}");
                assert!(tokens + 3 > context, "{context} {mean} {percent}: {tokens}");
            }
        }
    }

    #[test]
    fn spans_do_not_touch_and_all_places_are_as_likely() {
        let spans = Spans { kept: 5, taken: 4, count: 2 };
        let random = Philox::new(7, 1);
        let mut found = std::collections::HashMap::<Vec<Range<usize>>, usize>::new();
        let draws = 12_000;
        for i in 0..draws {
            let places = spans.places(|index, below| random.below(i << 8 | index, below as u64) as usize);
            assert_eq!((places.len(), places[1].end), (2, 9));
            assert!(places[0].start >= 1 && places[0].end < places[1].start, "{places:?}");
            assert_eq!(places.iter().map(Range::len).sum::<usize>(), 4);
            *found.entry(places).or_default() += 1;
        }
        // 4 places for the border of what stays, and 3 for that of what is taken.
        assert_eq!(found.len(), 12);
        let rare = found.iter().find(|(_, count)| !(850..1150).contains(*count));
        assert_eq!(rare, None, "of {draws}");
    }
}
