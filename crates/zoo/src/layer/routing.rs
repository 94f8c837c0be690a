//! Which experts the tokens of a pass have, and the gradient of a router's logits: pure functions of the
//! logits, on the host. Each device gives the same choices for the same logits.
//!
//! The outputs of experts are rows, by expert and then by token. There is room for all choices, so that sizes
//! do not depend on them.

use std::ops::Range;

use crate::spec::{BalanceOver, ExpertWeights, ExpertsSpec};

/// No row, or no token.
const NONE: u32 = u32::MAX;

/// The shape of a pass: sequences, and tokens of each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PassShape {
    pub(super) sequences: usize,
    pub(super) tokens: usize,
}

impl PassShape {
    pub(super) const fn all(self) -> usize {
        self.sequences * self.tokens
    }
}

/// The experts of the tokens of a pass.
#[derive(Debug)]
pub(super) struct Routing {
    spec: ExpertsSpec,
    shape: PassShape,
    /// Softmax over all experts: `[N, E]`.
    probabilities: Vec<f32>,
    /// Log-sum-exp of each token's logits.
    log_sums: Vec<f32>,
    /// The experts of each token, the likeliest first: `[N, K]`.
    choices: Vec<u32>,
    /// The factors of their outputs: `[N, K]`.
    weights: Vec<f32>,
    /// The rows of their outputs: `[N, K]`.
    pub(super) rows: Vec<u32>,
    /// The token of each row: `[N K]`.
    pub(super) tokens: Vec<u32>,
    /// Where the rows of each expert begin, and the last ones end.
    starts: Vec<usize>,
}

/// What a router chose in a pass, as losses and metrics take it.
#[derive(Debug, Clone, PartialEq)]
pub struct Routed {
    /// Number of the block in the model.
    pub block: usize,
    /// Number of choices of each expert in each sequence, dropped ones included: `[B, E]`.
    pub chosen: Vec<u32>,
    /// Sums over each sequence's tokens of each expert's probability: `[B, E]`.
    pub probabilities: Vec<f64>,
    /// Number of choices that found no place in an expert.
    pub dropped: u64,
    /// Sum over all tokens of the squared log-sum-exp of the logits.
    pub squared_log_sums: f64,
    /// Number of tokens.
    pub tokens: usize,
}

/// What the gradient of a router's losses depends on beyond the layer.
#[derive(Debug, Clone, Copy)]
pub struct RouterPass<'a> {
    /// One over the number of sequences of the step, times what weighs the gradients of a rank.
    pub sequence_weight: f32,
    /// Number of layers with experts, and how often each expert was chosen in all of them, `[B, E]`; `None` if
    /// layers are balanced by themselves.
    pub joined: Option<(usize, &'a [u32])>,
}

impl RouterPass<'_> {
    /// No losses.
    pub const NONE: Self = Self { sequence_weight: 0.0, joined: None };
}

impl Routing {
    /// Chooses experts by the logits `[N, E]`. Logits that are not numbers choose any experts, with weights
    /// that are not numbers.
    pub(super) fn new(spec: &ExpertsSpec, shape: PassShape, logits: &[f32]) -> Self {
        let (experts, each) = (spec.count, spec.per_token);
        let (mut probabilities, mut log_sums) = (Vec::with_capacity(logits.len()), Vec::new());
        let (mut choices, mut weights) = (Vec::new(), Vec::new());
        for logits in logits.chunks_exact(experts) {
            let chosen = best(logits, each);
            let top = f64::from(logits[chosen[0]]);
            let exp = |expert: usize| (f64::from(logits[expert]) - top).exp();
            let sum: f64 = (0..experts).map(exp).sum();
            probabilities.extend((0..experts).map(|expert| (exp(expert) / sum) as f32));
            log_sums.push((top + sum.ln()) as f32);
            let among: f64 = match spec.weights {
                ExpertWeights::Renormalised => chosen.iter().map(|&expert| exp(expert)).sum(),
                ExpertWeights::Probabilities => sum,
            };
            weights.extend(chosen.iter().map(|&expert| (exp(expert) / among) as f32));
            choices.extend(chosen.into_iter().map(|expert| expert as u32));
        }
        Self::placed(*spec, shape, (probabilities, log_sums), (choices, weights))
    }

    /// Spreads the tokens evenly, for a device that has no logits.
    pub(super) fn even(spec: &ExpertsSpec, shape: PassShape) -> Self {
        let (count, choices) = (shape.all(), shape.all() * spec.per_token);
        let choices = (0..choices).map(|choice| (choice % spec.count) as u32).collect::<Vec<_>>();
        let (probabilities, log_sums) = (vec![0.0; count * spec.count], vec![0.0; count]);
        let weights = vec![0.0; choices.len()];
        Self::placed(*spec, shape, (probabilities, log_sums), (choices, weights))
    }

    /// Gives each choice that has a place in its expert a row.
    fn placed(
        spec: ExpertsSpec,
        shape: PassShape,
        (probabilities, log_sums): (Vec<f32>, Vec<f32>),
        (choices, weights): (Vec<u32>, Vec<f32>),
    ) -> Self {
        let each = spec.per_token;
        let most = spec.capacity.of(shape.tokens, &spec);
        let mut kept = vec![true; choices.len()];
        for sequence in 0..shape.sequences {
            let mut taken = vec![0; spec.count];
            let tokens = sequence * shape.tokens..(sequence + 1) * shape.tokens;
            for at in (0..each).flat_map(|j| tokens.clone().map(move |token| token * each + j)) {
                let taken = &mut taken[choices[at] as usize];
                kept[at] = *taken < most;
                *taken += 1;
            }
        }
        let mut starts = vec![0; spec.count + 1];
        for (&expert, _) in choices.iter().zip(&kept).filter(|(_, kept)| **kept) {
            starts[expert as usize + 1] += 1;
        }
        for expert in 0..spec.count {
            starts[expert + 1] += starts[expert];
        }
        let mut next = starts.clone();
        let (mut rows, mut tokens) = (vec![NONE; choices.len()], vec![NONE; choices.len()]);
        for (at, &expert) in choices.iter().enumerate().filter(|(at, _)| kept[*at]) {
            let row = &mut next[expert as usize];
            (rows[at], tokens[*row]) = (*row as u32, (at / each) as u32);
            *row += 1;
        }
        Self { spec, shape, probabilities, log_sums, choices, weights, rows, tokens, starts }
    }

    /// Returns the rows of an expert.
    pub(super) fn rows_of(&self, expert: usize) -> Range<usize> {
        self.starts[expert]..self.starts[expert + 1]
    }

    /// Returns the number of rows that are used.
    pub(super) fn used(&self) -> usize {
        self.starts[self.spec.count]
    }

    /// Returns the factors of experts' outputs by token, `[N, K]`.
    pub(super) fn weights(&self) -> &[f32] {
        &self.weights
    }

    /// Returns the factor of each row; 0 of those that are not used.
    pub(super) fn weights_of_rows(&self) -> Vec<f32> {
        let mut of_rows = vec![0.0; self.rows.len()];
        for (&row, &weight) in self.rows.iter().zip(&self.weights).filter(|(row, _)| **row != NONE) {
            of_rows[row as usize] = weight;
        }
        of_rows
    }

    /// Returns what losses and metrics take.
    pub(super) fn routed(&self) -> Routed {
        let experts = self.spec.count;
        let mut chosen = vec![0; self.shape.sequences * experts];
        let mut probabilities = vec![0.0; chosen.len()];
        for (token, of_token) in self.probabilities.chunks_exact(experts).enumerate() {
            let first = token / self.shape.tokens * experts;
            for (sum, &probability) in probabilities[first..].iter_mut().zip(of_token) {
                *sum += f64::from(probability);
            }
            for &expert in &self.choices[token * self.spec.per_token..][..self.spec.per_token] {
                chosen[first + expert as usize] += 1;
            }
        }
        Routed {
            block: 0,
            chosen,
            probabilities,
            dropped: (self.choices.len() - self.used()) as u64,
            squared_log_sums: self.log_sums.iter().map(|&sum| f64::from(sum).powi(2)).sum(),
            tokens: self.shape.all(),
        }
    }

    /// Returns the gradient of the logits, `[N, E]`. `d_weights` are the products of the gradient of the output
    /// with each row.
    pub(super) fn d_logits(&self, d_rows: &[f32], pass: RouterPass<'_>) -> Vec<f32> {
        let (experts, each) = (self.spec.count, self.spec.per_token);
        let shares = self.shares(pass);
        let losses = self.spec.losses;
        let layers = pass.joined.map_or(1.0, |(layers, _)| layers as f64);
        let of_token = f64::from(pass.sequence_weight) / self.shape.tokens as f64 / layers;
        let mut all = Vec::with_capacity(self.probabilities.len());
        for token in 0..self.shape.all() {
            let p = &self.probabilities[token * experts..][..experts];
            let f = &shares[token / self.shape.tokens * experts..][..experts];
            let chosen = token * each..(token + 1) * each;
            // The gradient of each weight. A choice that was dropped has none.
            let d_weight = |at: usize| match self.rows[at] {
                NONE => 0.0,
                row => f64::from(d_rows[row as usize]),
            };
            let weight = |at: usize| f64::from(self.weights[at]);
            let mean: f64 = chosen.clone().map(|at| weight(at) * d_weight(at)).sum();
            let balanced: f64 = p.iter().zip(f).map(|(&p, f)| f64::from(p) * f).sum();
            let factors = [losses.balance * experts as f64 * of_token, losses.z * 2.0 * of_token];
            let log_sum = f64::from(self.log_sums[token]);
            let start = all.len();
            all.extend((0..experts).map(|expert| {
                let p = f64::from(p[expert]);
                let of_losses = p * (factors[0] * (f[expert] - balanced) + factors[1] * log_sum);
                let of_weights = match self.spec.weights {
                    ExpertWeights::Renormalised => 0.0,
                    ExpertWeights::Probabilities => -p * mean,
                };
                (of_losses + of_weights) as f32
            }));
            for at in chosen {
                let slope = match self.spec.weights {
                    ExpertWeights::Renormalised => weight(at) * (d_weight(at) - mean),
                    ExpertWeights::Probabilities => weight(at) * d_weight(at),
                };
                all[start + self.choices[at] as usize] += slope as f32;
            }
        }
        all
    }

    /// Returns each expert's share of the choices, by sequence.
    fn shares(&self, pass: RouterPass<'_>) -> Vec<f64> {
        let routed = if pass.joined.is_none() { Some(self.routed()) } else { None };
        let own = routed.as_ref().map(|routed| (1, &routed.chosen[..]));
        let (layers, chosen) = pass.joined.or(own).unwrap_or_default();
        shares(&self.spec, self.shape, layers, chosen)
    }
}

/// Returns each expert's share of the choices, by sequence: `[B, E]`.
fn shares(spec: &ExpertsSpec, shape: PassShape, layers: usize, chosen: &[u32]) -> Vec<f64> {
    let choices = (layers * shape.tokens * spec.per_token) as f64;
    let of_sequence = |count: u32| f64::from(count) / choices;
    if spec.losses.over != BalanceOver::Batch {
        return chosen.iter().map(|&count| of_sequence(count)).collect();
    }
    let mut all = vec![0.0; spec.count];
    for of_one in chosen.chunks_exact(spec.count) {
        for (sum, &count) in all.iter_mut().zip(of_one) {
            *sum += of_sequence(count) / shape.sequences as f64;
        }
    }
    all.repeat(shape.sequences)
}

/// Returns the `count` highest logits, the first of equal ones first. At least one.
fn best(logits: &[f32], count: usize) -> Vec<usize> {
    let mut chosen: Vec<usize> = Vec::with_capacity(count);
    for _ in 0..count {
        let free = (0..logits.len()).filter(|expert| !chosen.contains(expert));
        chosen.extend(free.reduce(|best, expert| if logits[expert] > logits[best] { expert } else { best }));
    }
    chosen
}

/// The values of a router's losses, without their factors.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct RouterLossValues {
    /// The balancing loss: 1 if all experts are used alike.
    pub balance: f64,
    /// The z-loss.
    pub z: f64,
}

impl Routed {
    /// Adds up how often each expert was chosen: `[B, E]`.
    #[must_use]
    pub fn join<'a>(routed: impl IntoIterator<Item = &'a Self>) -> Vec<u32> {
        let mut all: Vec<u32> = Vec::new();
        for one in routed {
            all.resize(one.chosen.len().max(all.len()), 0);
            for (sum, count) in all.iter_mut().zip(&one.chosen) {
                *sum = sum.saturating_add(*count);
            }
        }
        all
    }

    fn sequences(&self, spec: &ExpertsSpec) -> usize {
        (self.chosen.len() / spec.count).max(1)
    }

    /// Returns what the layer adds to the losses, as means over sequences. `joined` is as in [`RouterPass`].
    fn part(&self, spec: &ExpertsSpec, joined: Option<(usize, &[u32])>) -> RouterLossValues {
        let sequences = self.sequences(spec);
        let shape = PassShape { sequences, tokens: self.tokens / sequences };
        let (layers, chosen) = joined.unwrap_or((1, &self.chosen));
        let of_token = 1.0 / (layers * self.tokens.max(1)) as f64;
        let shares = shares(spec, shape, layers, chosen);
        let products = shares.iter().zip(&self.probabilities).map(|(share, sum)| share * sum);
        RouterLossValues {
            balance: spec.count as f64 * products.sum::<f64>() * of_token,
            // Layers that are taken together count as one here too.
            z: self.squared_log_sums * of_token,
        }
    }

    /// Returns what the layer adds to the loss, the sum over its sequences. `joined` is as in [`RouterPass`].
    pub(crate) fn loss_of_sequences(&self, spec: &ExpertsSpec, joined: Option<(usize, &[u32])>) -> f64 {
        let RouterLossValues { balance, z } = self.part(spec, joined);
        self.sequences(spec) as f64 * (spec.losses.balance * balance + spec.losses.z * z)
    }

    /// Returns the losses of the layers of one pass, all with this router: sums over the layers, or, if layers
    /// are taken together, those of them all.
    #[must_use]
    pub fn losses(spec: &ExpertsSpec, routed: &[Self]) -> RouterLossValues {
        let chosen = (spec.losses.over != BalanceOver::Layer).then(|| Self::join(routed));
        let joined = chosen.as_ref().map(|chosen| (routed.len(), &chosen[..]));
        routed.iter().fold(RouterLossValues::default(), |sum, one| {
            let part = one.part(spec, joined);
            RouterLossValues { balance: sum.balance + part.balance, z: sum.z + part.z }
        })
    }
}
