//! What a model learns to predict: the next token of a text, or what was taken out of it.

mod spans;
#[cfg(test)]
mod tests;

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use farflung_base::Philox;
use serde::{Deserialize, Serialize};

use self::spans::Spans;
use crate::ZooError;

/// Number of tokens that stand for a span that was taken out, as in T5.
const SENTINELS: usize = 100;
/// Stream of an objective's random numbers.
const STREAM: u64 = u64::from_le_bytes(*b"denoise\0");

/// What a model learns to predict of the sequences of a text.
///
/// [`Objective::PrefixLm`] and [`Objective::Ul2`] divide a sequence into a prefix, whose tokens attend to each
/// other in both directions and are no targets, and what follows it, whose tokens are predicted one after
/// another.
///
/// Sources: Raffel et al. 2020, "T5"; Tay et al. 2022, "UL2" and "`UL2R`" (arXiv 2210.11399). Which denoisers
/// GPT-JT was trained with is not published; these are UL2R's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum Objective {
    /// Each token is predicted from those before it.
    #[default]
    Causal,
    /// A window of a text is divided at a random place, uniformly from after its first token to before its
    /// last.
    PrefixLm,
    /// UL2's mixture of denoisers, on a decoder. A sequence is `[S]` and a window that is divided as in
    /// [`Objective::PrefixLm`], or `[R]` or `[X]`, a window from which spans were taken out, and the spans.
    /// Half of the sequences are `[S]`. A fourth are `[R]`: spans of 3 or 8 tokens in the mean, 15 % of the
    /// window. A fourth are `[X]`: the same with 50 %, or 15 % or 50 % in spans of 64. There are at most 99
    /// spans, so that they are longer in long sequences: of 50 %, 9 tokens in the mean at a context of 2048.
    Ul2,
}

/// A text is not the name of an objective.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("expected causal, prefix-lm or ul2")]
pub struct NoObjective;

impl Objective {
    /// All objectives.
    pub const ALL: [Self; 3] = [Self::Causal, Self::PrefixLm, Self::Ul2];

    /// Returns the name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Causal => "causal",
            Self::PrefixLm => "prefix-lm",
            Self::Ul2 => "ul2",
        }
    }

    /// Returns the number of ids at the end of a model's vocabulary that the objective uses and that text must
    /// not have.
    #[must_use]
    pub const fn own_ids(self) -> usize {
        match self {
            Self::Causal | Self::PrefixLm => 0,
            Self::Ul2 => SENTINELS + Mode::ALL.len(),
        }
    }

    /// Returns the fewest tokens of a sequence.
    #[must_use]
    pub const fn least_context(self) -> usize {
        match self {
            Self::Causal | Self::PrefixLm => 1,
            Self::Ul2 => 8,
        }
    }

    /// Returns whether sequences have a prefix that is read in both directions.
    #[must_use]
    pub const fn has_prefix(self) -> bool {
        !matches!(self, Self::Causal)
    }

    /// Returns the token that says what is wanted, which comes before a text that a model of `vocab` tokens is
    /// to continue.
    #[must_use]
    pub const fn begins_with(self, vocab: usize) -> Option<u32> {
        match self {
            Self::Causal | Self::PrefixLm => None,
            Self::Ul2 => Some(Mode::Sequential.id(vocab)),
        }
    }
}

impl fmt::Display for Objective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Objective {
    type Err = NoObjective;

    fn from_str(name: &str) -> Result<Self, NoObjective> {
        Self::ALL.into_iter().find(|objective| objective.name() == name).ok_or(NoObjective)
    }
}

impl From<Objective> for String {
    fn from(objective: Objective) -> Self {
        objective.name().to_owned()
    }
}

impl TryFrom<String> for Objective {
    type Error = NoObjective;

    fn try_from(name: String) -> Result<Self, NoObjective> {
        name.parse()
    }
}

/// What a token at a sequence's beginning says of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    Regular,
    Sequential,
    Extreme,
}

impl Mode {
    const ALL: [Self; 3] = [Self::Regular, Self::Sequential, Self::Extreme];

    /// Returns the token of a model with `vocab` tokens: they are before the sentinels.
    const fn id(self, vocab: usize) -> u32 {
        (vocab - 1 - SENTINELS - self as usize) as u32
    }
}

/// Returns the token of the `i`-th span that was taken out, of a model with `vocab` tokens. As in T5, they are
/// counted from the last id down.
const fn sentinel(vocab: usize, i: usize) -> u32 {
    (vocab - 1 - i) as u32
}

/// How one sequence is made of a window.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Denoiser {
    /// The window is divided after `at` tokens.
    Divide { at: usize },
    /// Spans are taken out.
    Corrupt(Mode, Spans),
}

/// Makes sequences of an objective from windows of a text.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Denoising {
    objective: Objective,
    random: Philox,
    /// Tokens of a sequence.
    context: usize,
    vocab: usize,
}

/// A sequence with the token after it, and the number of its first tokens that are no targets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Denoised {
    /// At most one token more than the context.
    pub(super) tokens: Vec<u32>,
    pub(super) prefix: usize,
}

impl Denoising {
    /// Errors: [`ZooError::Sampler`] if the context or the vocabulary is too small.
    pub(super) fn new(
        objective: Objective,
        seed: u64,
        context: usize,
        vocab: usize,
    ) -> Result<Self, ZooError> {
        let wrong = |field, value, least: usize| {
            let expected = format!("at least {least} for the objective {objective}");
            Err(ZooError::Sampler { field, value, expected })
        };
        if context < objective.least_context() {
            return wrong("context", context, objective.least_context());
        }
        if vocab <= objective.own_ids() {
            return wrong("vocab", vocab, objective.own_ids() + 1);
        }
        Ok(Self { objective, random: Philox::new(seed, STREAM), context, vocab })
    }

    /// Returns how the sequence of the window at `offset` is made: always the same way.
    fn denoiser(&self, offset: usize) -> Denoiser {
        let draw = |index: u64, below: usize| self.draw(offset, index, below);
        let divided = Denoiser::Divide { at: 1 + draw(1, self.window()) };
        if self.objective == Objective::PrefixLm {
            return divided;
        }
        let corrupt =
            |mode, mean, percent| Denoiser::Corrupt(mode, Spans::of(mean, percent, self.context, SENTINELS));
        match draw(0, 8) {
            0..4 => divided,
            4 => corrupt(Mode::Regular, 3, 15),
            5 => corrupt(Mode::Regular, 8, 15),
            _ => match draw(2, 4) {
                0 => corrupt(Mode::Extreme, 3, 50),
                1 => corrupt(Mode::Extreme, 8, 50),
                2 => corrupt(Mode::Extreme, 64, 15),
                _ => corrupt(Mode::Extreme, 64, 50),
            },
        }
    }

    /// Returns a number below `below`, which is above 0, for the window at `offset`.
    fn draw(&self, offset: usize, index: u64, below: usize) -> usize {
        // Sequences have fewer than 2^32 tokens, and each takes at most one number a token.
        self.random.below(((offset as u64) << 32).wrapping_add(index), below as u64) as usize
    }

    /// Returns the number of a window's tokens that can be in a prefix, if it is divided.
    const fn window(&self) -> usize {
        match self.objective.begins_with(self.vocab) {
            Some(_) => self.context - 1,
            None => self.context,
        }
    }

    /// Returns which targets of the sequence of the window at `offset` count.
    pub(super) fn targets(&self, offset: usize) -> Range<usize> {
        match self.denoiser(offset) {
            Denoiser::Divide { at } => self.context - self.window() + at - 1..self.context,
            Denoiser::Corrupt(_, spans) => spans.prefix() - 1..spans.prefix() - 1 + spans.targets(),
        }
    }

    /// Returns the sequence of the window at `offset`, whose tokens are `window`: as many as the context, and
    /// one more.
    pub(super) fn sequence(&self, offset: usize, window: &[u32]) -> Denoised {
        let mode = |mode: Mode| mode.id(self.vocab);
        match self.denoiser(offset) {
            Denoiser::Divide { at } => {
                let first = self.objective.begins_with(self.vocab);
                let tokens: Vec<u32> =
                    first.into_iter().chain(window[..=self.window()].iter().copied()).collect();
                let prefix = at + usize::from(first.is_some());
                Denoised { tokens, prefix }
            }
            Denoiser::Corrupt(of, spans) => {
                let cut = spans.places(|index, below| self.draw(offset, 3 + index, below));
                let (mut tokens, mut taken) = (vec![mode(of)], Vec::with_capacity(spans.targets()));
                let mut after = 0;
                for (i, span) in cut.iter().enumerate() {
                    tokens.extend_from_slice(&window[after..span.start]);
                    tokens.push(sentinel(self.vocab, i));
                    taken.push(sentinel(self.vocab, i));
                    taken.extend_from_slice(&window[span.clone()]);
                    after = span.end;
                }
                taken.push(sentinel(self.vocab, cut.len()));
                let prefix = tokens.len();
                tokens.extend(taken);
                Denoised { tokens, prefix }
            }
        }
    }
}
