//! Text generation, token by token with a cache of keys and values. Tokens are drawn with temperature, top-k
//! and top-p.

use std::num::NonZeroUsize;

use farflung_base::Philox;
use farflung_tensor::Tensor;
use serde::{Deserialize, Serialize};

use crate::{Borders, Input, ModelSpec, Objective, Stage, ZooError};

/// Settings for drawing the next token.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Sampling {
    /// Divisor of the logits; 0 always takes the most likely token.
    pub temperature: f32,
    /// Draw only from the k most likely tokens; 0 for all.
    pub top_k: usize,
    /// Draw only from the most likely tokens that together have this probability (Holtzman et al. 2020); 1 for
    /// all.
    pub top_p: f32,
    /// Seed of the random numbers. Equal seeds give equal text.
    pub seed: u64,
    /// Draw only ids below this number, the tokenizer's
    /// [`vocab_size`](crate::Tokenizer::vocab_size): a model's vocabulary may be padded with ids that have no
    /// text. `None` draws from all ids of the model.
    pub vocab: Option<NonZeroUsize>,
    /// What the model was trained to predict: it says how the text before a token is read.
    #[serde(default)]
    pub objective: Objective,
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            temperature: 0.8,
            top_k: 50,
            top_p: 1.0,
            seed: 1337,
            vocab: None,
            objective: Objective::Causal,
        }
    }
}

impl Sampling {
    /// Checks all settings.
    ///
    /// Errors: [`ZooError::Sampling`] for a setting out of bounds.
    pub fn validate(&self) -> Result<(), ZooError> {
        let bad = |field, value| Err(ZooError::Sampling { field, value });
        if !(self.temperature >= 0.0 && self.temperature.is_finite()) {
            return bad("temperature", self.temperature);
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return bad("top_p", self.top_p);
        }
        Ok(())
    }

    /// Draws a token from `logits` (one row, `[V]`) with the random number at `position`.
    ///
    /// Equal logits are ordered by token id. A NaN logit counts as minus infinity, so it is drawn only if no
    /// logit is above that.
    #[must_use]
    pub fn draw(&self, logits: &[f32], position: u64) -> u32 {
        let vocab = self.vocab.map_or(logits.len(), |vocab| logits.len().min(vocab.get()));
        let mut order: Vec<u32> = (0..vocab as u32).collect();
        let at = |t: u32| {
            let l = logits[t as usize];
            if l.is_nan() { f32::NEG_INFINITY } else { l + 0.0 } // Adding 0 turns -0 into 0, so that they tie.
        };
        let likelier = |a: &u32, b: &u32| at(*b).total_cmp(&at(*a)).then(a.cmp(b));
        if self.temperature == 0.0 {
            return order.into_iter().min_by(|a, b| likelier(a, b)).unwrap_or(0);
        }
        if self.top_k > 0 && self.top_k < order.len() {
            order.select_nth_unstable_by(self.top_k - 1, likelier);
            order.truncate(self.top_k);
        }
        order.sort_unstable_by(likelier);
        let top = order.first().map_or(0.0, |&t| f64::from(at(t)));
        if !top.is_finite() {
            return order.first().copied().unwrap_or(0);
        }
        let weights: Vec<f64> =
            order.iter().map(|&t| ((f64::from(at(t)) - top) / f64::from(self.temperature)).exp()).collect();
        let total: f64 = weights.iter().sum();
        let mut kept = 0;
        let mut sum = 0.0;
        for w in &weights {
            kept += 1;
            sum += w;
            if sum >= f64::from(self.top_p) * total {
                break;
            }
        }
        let mut left = f64::from(Philox::new(self.seed, STREAM).uniform(position)) * sum;
        for (t, w) in order.iter().zip(&weights).take(kept) {
            left -= w;
            if left < 0.0 {
                return *t;
            }
        }
        order.get(kept.saturating_sub(1)).copied().unwrap_or(0)
    }
}

/// Stream of the random numbers for sampling.
const STREAM: u64 = u64::from_le_bytes(*b"generate");

/// Generates `count` tokens that continue `prompt`, and calls `emit` with each one. Stops early if `emit`
/// returns `false`.
///
/// - If the prompt is longer than the context, only its last `context` tokens are used; all are validated. An
///   empty prompt is replaced by token 0.
/// - If the context is full and another token is needed, the cache is cleared, and the last `context / 2`
///   tokens (at least one), generated ones included, are processed again at positions from 0 on.
/// - If the model's objective has a prefix ([`Objective::has_prefix`]), tokens that are processed together, the
///   prompt first of all, are read in both directions. If it begins with a token of its own, this stands before
///   them and takes the place of one.
/// - Token `i` of the `count` uses the random number at position `i` of [`Sampling::seed`]'s stream, so it does
///   not depend on the prompt's length.
///
/// Errors: [`ZooError::TokenOutOfRange`] for a prompt token outside the vocabulary; [`ZooError::Sampling`].
pub fn generate(
    stage: &Stage,
    params: &Tensor,
    prompt: &[u32],
    count: usize,
    sampling: &Sampling,
    mut emit: impl FnMut(u32) -> bool,
) -> Result<(), ZooError> {
    sampling.validate()?;
    let mut text = Continuation::new(stage.spec(), prompt, sampling.objective)?;
    let mut cache = stage.cache(1)?;
    for i in 0..count {
        let new = text.pass(cache.len());
        cache.make_room(new.len());
        let input = Input::Tokens(stage.tokens(&new, new.len())?);
        let input = input.with_borders(sampling.objective.borders(stage, cache.len(), new.len())?);
        let logits = stage.decode_last(params, &mut cache, input)?;
        let token = sampling.draw(&logits.to_vec::<f32>()?, i as u64);
        if !emit(token) {
            break;
        }
        text.push(token);
    }
    Ok(())
}

impl Objective {
    /// Returns the borders of a pass of `new` tokens of one sequence after `past` cached ones: those of a first
    /// pass are a prefix, if the objective has prefixes.
    ///
    /// Errors: as [`Stage::tokens`].
    pub fn borders(self, stage: &Stage, past: usize, new: usize) -> Result<Borders, ZooError> {
        let is_prefix = self.has_prefix() && past == 0 && new > 1;
        let prefixes = is_prefix.then(|| stage.tokens(&vec![new as u32; new], new)).transpose()?;
        Ok(Borders { prefixes, ..Borders::default() })
    }
}

/// A text that is being continued: which tokens the model is fed in each pass.
#[derive(Debug, Clone)]
pub struct Continuation {
    seen: Vec<u32>,
    /// Number of the last tokens of `seen` that the next pass takes.
    new: usize,
    context: usize,
    /// Token before those of a pass that begins at position 0.
    first: Option<u32>,
}

impl Continuation {
    /// Begins with a prompt. If it is longer than the context, only its last tokens are fed. An empty prompt is
    /// replaced by token 0.
    ///
    /// Errors: [`ZooError::TokenOutOfRange`] for a token outside the vocabulary; [`ZooError::Config`] if the
    /// vocabulary or the context has no room for the objective's own tokens.
    pub fn new(spec: &ModelSpec, prompt: &[u32], objective: Objective) -> Result<Self, ZooError> {
        let (context, vocab) = (spec.context, spec.vocab);
        for (field, value, least) in
            [("vocab", vocab, objective.own_ids() + 1), ("context", context, objective.least_context())]
        {
            if value < least {
                let expected = "enough for the tokens of the objective";
                return Err(ZooError::Config { field, value, expected });
            }
        }
        let first = objective.begins_with(vocab);
        if let Some(position) = prompt.iter().position(|&t| t as usize >= vocab) {
            return Err(ZooError::TokenOutOfRange { path: None, position, token: prompt[position], vocab });
        }
        let seen = if prompt.is_empty() { vec![0] } else { prompt.to_vec() };
        let most = context - usize::from(first.is_some());
        Ok(Self { new: seen.len().min(most), seen, context, first })
    }

    /// Returns the tokens of the next pass, if a cache holds `cached` tokens. If there is no room for them,
    /// these are the last `context / 2` tokens (at least one), for a cache that is cleared:
    /// [`Cache::make_room`](crate::Cache::make_room).
    pub fn pass(&mut self, cached: usize) -> Vec<u32> {
        let goes_on = cached > 0 && cached + self.new <= self.context;
        if cached + self.new > self.context {
            self.new = (self.context / 2).max(1);
        }
        let first = self.first.filter(|_| !goes_on);
        first.into_iter().chain(self.seen[self.seen.len() - self.new..].iter().copied()).collect()
    }

    /// Adds the token that was drawn after a pass.
    pub fn push(&mut self, token: u32) {
        self.seen.push(token);
        self.new = 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpt2;
    use farflung_tensor::Device;

    #[test]
    fn draws_follow_the_settings() {
        let logits = [0.0, 3.0, 3.0, f32::NAN, 1.0];
        let greedy = Sampling { temperature: 0.0, ..Sampling::default() };
        assert_eq!(greedy.draw(&logits, 0), 1);
        let two = Sampling { temperature: 1.0, top_k: 2, ..Sampling::default() };
        let drawn: Vec<u32> = (0..200).map(|i| two.draw(&logits, i)).collect();
        assert!(drawn.iter().all(|t| [1, 2].contains(t)));
        let ones = drawn.iter().filter(|t| **t == 1).count();
        assert!((70..130).contains(&ones), "{ones}");
        let nucleus = Sampling { temperature: 1.0, top_k: 0, top_p: 0.4, ..Sampling::default() };
        assert!((0..100).all(|i| nucleus.draw(&logits, i) == 1));
        let all = Sampling { temperature: 1.0, top_k: 0, ..Sampling::default() };
        let p = (0..20_000).filter(|&i| all.draw(&logits, i) == 4).count() as f64 / 20_000.0;
        let exact = 1.0_f64.exp() / (2.0 * 3.0_f64.exp() + 1.0_f64.exp() + 1.0);
        assert!((p - exact).abs() < 0.01, "{p} {exact}");
        // Ids of a padded vocabulary are never drawn, even if they are the most likely ones.
        let padded = [0.0, 3.0, 1.0, 99.0, f32::INFINITY];
        for sampling in [greedy, two, nucleus, all] {
            let sampling = Sampling { vocab: NonZeroUsize::new(3), ..sampling };
            for position in 0..200 {
                assert_eq!(sampling.draw(&padded, position), sampling.draw(&padded[..3], position));
            }
            assert!((0..200).any(|position| sampling.draw(&padded, position) == 1));
        }
        assert!(Sampling { top_p: 0.0, ..all }.validate().is_err());
        assert!(Sampling { temperature: f32::NAN, ..all }.validate().is_err());
    }

    #[test]
    fn the_cache_gives_what_the_whole_pass_gives_and_goes_on_past_the_context() {
        let cpu = Device::cpu(1).unwrap();
        let stage = Stage::whole(&gpt2(2, 2, 16, 12, 11).unwrap(), &cpu).unwrap();
        let params = stage.init(3).unwrap();
        let ids = [1, 5, 9, 2, 0, 10, 3];
        let whole = stage.logits(&params, stage.tokens(&ids, 7).unwrap()).unwrap().to_vec::<f32>().unwrap();
        let mut cache = stage.cache(1).unwrap();
        let mut parts = Vec::new();
        for part in [&ids[..3], &ids[3..4], &ids[4..]] {
            let tokens = stage.tokens(part, part.len()).unwrap();
            parts.extend(stage.decode(&params, &mut cache, tokens).unwrap().to_vec::<f32>().unwrap());
        }
        for (a, b) in whole.iter().zip(&parts) {
            assert!((a - b).abs() < 1e-5, "{a} {b}");
        }
        let mut out = Vec::new();
        let mut again = Vec::new();
        for to in [&mut out, &mut again] {
            generate(&stage, &params, &ids, 30, &Sampling::default(), |t| {
                to.push(t);
                true
            })
            .unwrap();
        }
        assert_eq!(out.len(), 30);
        assert_eq!(out, again);
        assert!(generate(&stage, &params, &[11], 1, &Sampling::default(), |_| true).is_err());
    }

    /// Generates text as [`generate`] does, but runs a whole pass over the context for each token. Used as
    /// reference.
    fn slowly(stage: &Stage, params: &Tensor, prompt: &[u32], count: usize, sampling: &Sampling) -> Vec<u32> {
        let (context, vocab) = (stage.spec().context, stage.spec().vocab);
        let mut all = prompt.to_vec();
        let mut first = prompt.len().saturating_sub(context);
        for i in 0..count {
            if all.len() - first > context {
                first = all.len() - context / 2;
            }
            let read = &all[first..];
            let logits = stage.logits(params, stage.tokens(read, read.len()).unwrap()).unwrap();
            let logits = logits.to_vec::<f32>().unwrap();
            all.push(sampling.draw(&logits[logits.len() - vocab..], i as u64));
        }
        all.split_off(prompt.len())
    }

    #[test]
    fn of_a_long_prompt_the_last_context_is_read_and_a_full_context_halves() {
        let cpu = Device::cpu(1).unwrap();
        let stage = Stage::whole(&gpt2(2, 2, 16, 12, 11).unwrap(), &cpu).unwrap();
        let params = stage.init(3).unwrap();
        let long: Vec<u32> = (0..40).map(|i| i * i % 11).collect();
        let settings = [Sampling { temperature: 1.0, ..Sampling::default() }, Sampling::default()];
        for sampling in settings {
            let made = |prompt: &[u32]| {
                let mut out = Vec::new();
                generate(&stage, &params, prompt, 30, &sampling, |t| {
                    out.push(t);
                    true
                })
                .unwrap();
                out
            };
            for length in [1, 11, 12, 13, 40] {
                let prompt = &long[..length];
                assert_eq!(made(prompt), slowly(&stage, &params, prompt, 30, &sampling), "{length}");
            }
            assert_eq!(made(&long), made(&long[28..]));
            assert_eq!(made(&[]), made(&[0]));
        }
        let unread = [&[11][..], &long].concat();
        assert!(generate(&stage, &params, &unread, 1, &settings[0], |_| true).is_err());
    }
}
