//! Low rank by rounds: a method whose payloads are averaged on the way, not gathered. Knows no network: it says what is to be
//! averaged, and waits.

use farflung_base::Philox;

use crate::compressor::first_non_finite;
use crate::low_rank::{Expand, Project, ProjectBack, dot};
use crate::memory::Memory;
use crate::simd::{Level, Stream};
use crate::{CompressError, StateMap};

/// A method of several exchanges. Between two of them the caller averages a buffer over all ranks, which must hold equal means
/// afterwards.
///
/// ```
/// use farflung_compress::{PowerSgd, Protocol};
///
/// let mut method = PowerSgd::new(3, 2, 1, 7)?;
/// let (gradient, mut mean) = ([2.0, 4.0, 1.0, 2.0, -1.0, -2.0], [0.0; 6]);
/// method.begin(&gradient)?;
/// while let Some(buffer) = method.exchange() {
///     // comm.all_reduce_mean(buffer)
/// }
/// method.end(&mut mean)?;
/// method.commit();
/// // A matrix of rank one comes back whole.
/// assert!(mean.iter().zip(gradient).all(|(m, g)| (m - g).abs() < 1e-5));
/// # Ok::<(), farflung_compress::CompressError>(())
/// ```
pub trait Protocol {
    /// Begins with this rank's vector.
    ///
    /// Errors: [`CompressError::LengthMismatch`]; [`CompressError::NonFinite`]. Then nothing has begun.
    fn begin(&mut self, x: &[f32]) -> Result<(), CompressError>;

    /// The next buffer to be averaged in place; `None` when there is no more.
    fn exchange(&mut self) -> Option<&mut [f32]>;

    /// Writes the mean of all ranks' vectors, as far as the method carried it. Prepared, until it is committed.
    ///
    /// Errors: [`CompressError::LengthMismatch`]; [`CompressError::Exchange`] if buffers are still to be averaged;
    /// [`CompressError::NonFinite`] if a mean was not finite.
    fn end(&mut self, out: &mut [f32]) -> Result<(), CompressError>;
}

/// `PowerSGD`: a matrix as the product of two of `rank` columns, by one step of a power iteration from where the last round
/// ended, with feedback.
///
/// `M = x + e; P = M Q`, averaged and made orthonormal; `Q = M^T P`, averaged; the mean is `P Q^T`, and `e = M - P Q^T` with this
/// rank's own `M`. Each rank sends `4 rank (rows + columns)` bytes in an exchange of values. All ranks need the same seed. Sums
/// have one order on the host; devices agree to rounding, and all decode the same means.
///
/// State: `residual` (`[rows, columns]`) and `q` (`[rank, columns]`), f32.
///
/// Source: Vogels et al. 2019, "`PowerSGD`", Alg. 1.
#[derive(Debug, Clone)]
pub struct PowerSgd {
    rows: usize,
    columns: usize,
    rank: usize,
    seed: u64,
    residual: Memory,
    q: Memory,
    /// `M`, `P` (`[rank, rows]`) and the new `Q` of a round.
    m: Vec<f32>,
    p: Vec<f32>,
    next_q: Vec<f32>,
    stage: Stage,
    level: Level,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Idle,
    /// `P` is to be handed out.
    First,
    /// `P` was averaged.
    Second,
    /// `Q` was averaged.
    Done,
}

impl PowerSgd {
    /// For matrices `[rows, columns]`, row by row. The rank is at most the smaller of both.
    ///
    /// Errors: [`CompressError::BlockSize`] for a rank of 0 or above that.
    pub fn new(rows: usize, columns: usize, rank: usize, seed: u64) -> Result<Self, CompressError> {
        let most = rows.min(columns);
        if rank == 0 || rank > most {
            return Err(CompressError::BlockSize { found: rank as u32, max: most as u32 });
        }
        let mut method = Self {
            rows,
            columns,
            rank,
            seed,
            residual: Memory::default(),
            q: Memory::default(),
            m: Vec::new(),
            p: vec![0.0; rank * rows],
            next_q: vec![0.0; rank * columns],
            stage: Stage::Idle,
            level: Level::detect(),
        };
        method.reset();
        Ok(method)
    }

    /// Bytes of f32 that a rank gives to averages in one round.
    #[must_use]
    pub fn bytes(&self) -> usize {
        4 * self.rank * (self.rows + self.columns)
    }

    /// What was not sent so far.
    #[must_use]
    pub fn residual(&self) -> &[f32] {
        self.residual.get()
    }

    /// Forgets the residual, and begins from the seed's `Q`.
    pub fn reset(&mut self) {
        let mut q = vec![0.0; self.rank * self.columns];
        Philox::new(self.seed, 0).fill_normal(1.0, &mut q);
        self.q.set(q);
        self.residual.reset();
        self.stage = Stage::Idle;
    }

    /// Makes the last round final.
    pub fn commit(&mut self) {
        self.residual.commit();
        self.q.commit();
    }

    /// Takes back every round since the last commit.
    pub fn rollback(&mut self) {
        self.residual.rollback();
        self.q.rollback();
        self.stage = Stage::Idle;
    }

    /// Adds the state to `into`.
    ///
    /// Errors: [`CompressError::Uncommitted`].
    pub fn save<'a>(&'a self, prefix: &str, into: &mut StateMap<'a>) -> Result<(), CompressError> {
        self.residual.save(format!("{prefix}residual"), into)?;
        self.q.save(format!("{prefix}q"), into)
    }

    /// Takes the state out of `from`.
    ///
    /// Errors: [`CompressError::MissingState`]; [`CompressError::NonFinite`]; [`CompressError::LengthMismatch`].
    pub fn load(&mut self, prefix: &str, from: &mut StateMap<'_>) -> Result<(), CompressError> {
        let residual = Memory::load(format!("{prefix}residual"), from)?;
        let q = Memory::load(format!("{prefix}q"), from)?;
        check("the saved q", q.len(), self.rank * self.columns)?;
        if !residual.is_empty() {
            check("the saved residual", residual.len(), self.rows * self.columns)?;
        }
        self.residual.set(residual);
        self.q.set(q);
        self.stage = Stage::Idle;
        Ok(())
    }
}

fn check(what: &'static str, found: usize, wanted: usize) -> Result<(), CompressError> {
    if found == wanted { Ok(()) } else { Err(CompressError::LengthMismatch { what, wanted, found }) }
}

impl Protocol for PowerSgd {
    fn begin(&mut self, x: &[f32]) -> Result<(), CompressError> {
        check("the matrix", x.len(), self.rows * self.columns)?;
        self.stage = Stage::Idle;
        self.m.resize(x.len(), 0.0);
        let (columns, q, e) = (self.columns, self.q.get(), self.residual.get());
        if self.level.run(Project { x, e, m: &mut self.m, q, p: &mut self.p, columns }) {
            return Err(first_non_finite(&self.m));
        }
        self.stage = Stage::First;
        Ok(())
    }

    fn exchange(&mut self) -> Option<&mut [f32]> {
        match self.stage {
            Stage::First => {
                self.stage = Stage::Second;
                Some(&mut self.p)
            }
            Stage::Second => {
                orthonormalise(&mut self.p, self.rows);
                let (m, p, q) = (&self.m, &self.p, &mut self.next_q);
                self.level.run(ProjectBack { m, p, q, columns: self.columns });
                self.stage = Stage::Done;
                Some(&mut self.next_q)
            }
            Stage::Idle | Stage::Done => None,
        }
    }

    fn end(&mut self, out: &mut [f32]) -> Result<(), CompressError> {
        check("the output", out.len(), self.rows * self.columns)?;
        if self.stage != Stage::Done {
            return Err(CompressError::Exchange);
        }
        self.stage = Stage::Idle;
        let mut next = self.residual.begin(out.len())?;
        let refused = self.level.run(Expand {
            p: &self.p,
            q: &self.next_q,
            m: &self.m,
            out: &mut *out,
            next: &mut next,
            columns: self.columns,
            stream: Stream::for_len(self.level, self.m.len()),
        });
        let bad = || if out.iter().all(|x| x.is_finite()) { &*next } else { &*out };
        let error = refused.then(|| first_non_finite(bad()));
        self.residual.end(next, error.is_none());
        if let Some(error) = error {
            return Err(error);
        }
        let mut q = self.q.begin(self.next_q.len())?;
        q.copy_from_slice(&self.next_q);
        self.q.end(q, true);
        Ok(())
    }
}

/// Gram-Schmidt over the rows of `p`, each of `len`, in order; a row without anything new becomes zeros.
fn orthonormalise(p: &mut [f32], len: usize) {
    for i in 0..p.len() / len {
        let (before, rest) = p.split_at_mut(i * len);
        let row = &mut rest[..len];
        let whole = dot(row, row);
        for other in before.chunks(len) {
            let along = dot(row, other);
            row.iter_mut().zip(other).for_each(|(x, o)| *x -= along * o);
        }
        let norm = dot(row, row);
        // What is left of a dependent row is only rounding.
        let factor = if norm > whole * 1e-10 && norm > f32::MIN_POSITIVE { 1.0 / norm.sqrt() } else { 0.0 };
        for x in row {
            *x *= factor;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn normal(n: usize, stream: u64) -> Vec<f32> {
        let mut x = vec![0.0; n];
        Philox::new(5, stream).fill_normal(1.0, &mut x);
        x
    }

    /// One round of ranks that average exactly.
    fn round(ranks: &mut [PowerSgd], x: &[Vec<f32>]) -> Vec<f32> {
        ranks.iter_mut().zip(x).for_each(|(rank, x)| rank.begin(x).unwrap());
        loop {
            let mut buffers: Vec<&mut [f32]> = ranks.iter_mut().filter_map(Protocol::exchange).collect();
            let Some(len) = buffers.first().map(|b| b.len()) else { break };
            for i in 0..len {
                let mean = buffers.iter().map(|b| b[i]).sum::<f32>() / buffers.len() as f32;
                for buffer in &mut buffers {
                    buffer[i] = mean;
                }
            }
        }
        let mut out = vec![0.0; x[0].len()];
        for rank in ranks.iter_mut() {
            rank.end(&mut out).unwrap();
        }
        out
    }

    #[test]
    fn a_matrix_of_low_rank_is_carried_whole() {
        let (rows, columns) = (20, 13);
        let (a, b) = (normal(rows * 3, 1), normal(columns * 3, 2));
        let of = |scale: f32| -> Vec<f32> {
            let at = |i: usize| (0..3).map(|r| a[i / columns * 3 + r] * b[i % columns * 3 + r]).sum::<f32>();
            (0..rows * columns).map(|i| at(i) * scale).collect()
        };
        let mut ranks = vec![PowerSgd::new(rows, columns, 3, 1).unwrap(); 2];
        let out = round(&mut ranks, &[of(1.0), of(3.0)]);
        assert!(out.iter().zip(of(2.0)).all(|(o, x)| (o - x).abs() < 1e-3));
        assert_eq!(ranks[0].bytes(), 4 * 3 * 33);
    }

    #[test]
    fn feedback_brings_the_rest_and_a_rollback_nothing() {
        let x = vec![normal(16 * 12, 3), normal(16 * 12, 4)];
        let mut ranks = vec![PowerSgd::new(16, 12, 2, 1).unwrap(); 2];
        let mut sum = vec![0.0_f64; 16 * 12];
        for _ in 0..60 {
            let before = ranks[0].residual().to_vec();
            round(&mut ranks, &x);
            ranks.iter_mut().for_each(PowerSgd::rollback);
            assert_eq!(ranks[0].residual(), before);
            sum.iter_mut().zip(round(&mut ranks, &x)).for_each(|(s, o)| *s += f64::from(o));
            ranks.iter_mut().for_each(PowerSgd::commit);
        }
        // The mean of what came out is the mean of what went in, but for the last residuals.
        for i in 0..sum.len() {
            let given = 60.0 * f64::from(x[0][i] + x[1][i]) / 2.0;
            let left = f64::from(ranks[0].residual()[i] + ranks[1].residual()[i]) / 2.0;
            assert!((given - sum[i] - left).abs() < 1e-2, "{given} {} {left}", sum[i]);
            assert!((given - sum[i]).abs() < 0.5 * 60.0);
        }
        let mut map = StateMap::new();
        ranks[0].save("", &mut map).unwrap();
        let mut twin = PowerSgd::new(16, 12, 2, 9).unwrap();
        twin.load("", &mut map).unwrap();
        assert_eq!(round(std::slice::from_mut(&mut twin), &x[..1]), round(&mut ranks[..1], &x[..1]));
        assert_eq!(twin.end(&mut [0.0; 192]), Err(CompressError::Exchange));
        assert!(PowerSgd::new(16, 12, 13, 1).is_err());
        // What overflows on the way is refused, and nothing is remembered of it.
        let mut huge = PowerSgd::new(4, 4, 2, 1).unwrap();
        huge.begin(&[f32::MAX; 16]).unwrap();
        while huge.exchange().is_some() {}
        assert!(matches!(huge.end(&mut [0.0; 16]), Err(CompressError::NonFinite { .. })));
        assert!(huge.residual().is_empty());
        let error = huge.begin(&[&[1.0; 9][..], &[f32::NAN; 7]].concat());
        assert!(matches!(error, Err(CompressError::NonFinite { index: 9, .. })));
        assert!(huge.exchange().is_none());
        // Nothing at all has no direction.
        assert_eq!(round(&mut [PowerSgd::new(4, 4, 2, 1).unwrap()], &[vec![0.0; 16]]), [0.0; 16]);
    }
}
