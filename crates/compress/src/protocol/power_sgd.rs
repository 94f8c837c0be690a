//! `PowerSGD`: low-rank averages of matrices, a protocol of two exchanges.

use std::borrow::Cow;
use std::ops::Range;

use farflung_base::Philox;

use super::{Protocol, Row};
use crate::compressor::first_non_finite;
use crate::low_rank::{Expand, Product, Project, ProjectBack, dot};
use crate::magnitude::{INFINITE, magnitude};
use crate::simd::Level;
use crate::two_phase_buffer::TwoPhaseBuffer;
use crate::{CompressError, HeldBytes, State, StateMap, StateValue};

pub(super) const ROW: Row = Row {
    name: "powersgd",
    argument: "RANK",
    build: |rank, shape, seed| {
        // The factors must have fewer values than the matrix, and the rank must be possible for its shape.
        let values = (rank as usize).saturating_mul(shape.rows + shape.columns);
        let gains = values < shape.rows * shape.columns && rank as usize <= shape.rows.min(shape.columns);
        let method = gains.then(|| PowerSgd::new(shape.rows, shape.columns, rank as usize, seed))?;
        Some(Box::new(method.expect("the rank was compared with both sides")))
    },
};

/// The bits of `2^126`. All inputs and results of a round must be smaller, so that their difference stays
/// finite. All ranks decode the same mean, so all of them reject it or none.
const TOO_LARGE: i32 = (127 + 126) << 23;

/// `PowerSGD`: approximates a matrix by the product of two factors with `rank` columns, found by one step of
/// power iteration that starts from the last round's `Q`, with error feedback.
///
/// `M = x + e; P = M Q`, averaged and orthonormalized; `Q = M^T P`, averaged; the mean is `P Q^T`, and
/// `e = M - P Q^T` with this rank's own `M`. Each rank gives `4 rank (rows + columns)` bytes to the two
/// averages of a round. All ranks need the same seed. Every sum has a fixed order, and all ranks decode the
/// same means.
///
/// The residual is computed by the next round while it reads `x`; the end of a round only writes the mean.
/// Magnitudes from `2^126` on are rejected, in `x` plus the residual and in the mean.
///
/// State: `residual` (`[rows, columns]`) and `q` (`[rank, columns]`), f32. Memory: two matrices; three if
/// rounds are not committed one by one.
///
/// Source: Vogels et al. 2019, "`PowerSGD`", Alg. 1.
#[derive(Debug, Clone)]
pub struct PowerSgd {
    rows: usize,
    columns: usize,
    rank: usize,
    seed: u64,
    committed: Round,
    /// The latest round, while it is not committed.
    latest: Round,
    pending: bool,
    /// The round in progress.
    next: Round,
    sums: Vec<[f32; 16]>,
    stage: Stage,
    level: Level,
}

/// Data that the next round needs: the residual is `m - p q^T`, and the iteration starts from `q`. Before the
/// first round, and after a state was loaded, `p` is empty. `m` is empty if there is no residual.
#[derive(Debug, Clone, Default)]
struct Round {
    m: Vec<f32>,
    p: Vec<f32>,
    q: Vec<f32>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Idle,
    /// `P` must be averaged next.
    First,
    /// `Q` must be averaged next.
    Second,
    /// `Q` was averaged.
    Done,
}

impl Round {
    fn product(&self, rows: usize, columns: usize) -> Product<'_> {
        Product { p: &self.p, q: &self.q, rows, columns }
    }
}

impl PowerSgd {
    /// Creates the protocol for row-major matrices `[rows, columns]`. The rank may be at most the smaller of
    /// `rows` and `columns`.
    ///
    /// Errors: [`CompressError::BlockSize`] for a rank of 0 or above that limit.
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
            committed: Round::default(),
            latest: Round::default(),
            pending: false,
            next: Round::default(),
            sums: Vec::new(),
            stage: Stage::Idle,
            level: Level::detect(),
        };
        method.reset();
        Ok(method)
    }

    /// Returns the number of bytes of f32 that a rank contributes to averages in one round.
    #[must_use]
    pub fn bytes(&self) -> usize {
        4 * self.rank * (self.rows + self.columns)
    }

    /// Returns the residual after the last round, committed or not. It is empty before the first.
    #[must_use]
    pub fn residual(&self) -> Vec<f32> {
        self.left_by(self.now())
    }

    fn set(&mut self, committed: Round) {
        self.rollback();
        self.committed = committed;
    }

    fn drop_latest(&mut self) {
        self.pending = false;
        // The next round reuses the dropped round's buffers.
        if self.stage == Stage::Idle {
            std::mem::swap(&mut self.latest, &mut self.next);
        }
    }

    fn now(&self) -> &Round {
        if self.pending { &self.latest } else { &self.committed }
    }

    fn left_by(&self, round: &Round) -> Vec<f32> {
        let mut left = vec![0.0; round.m.len()];
        let product = round.product(self.rows, self.columns);
        self.level.run(Expand { product, out: &mut left, level: self.level });
        left.iter_mut().zip(&round.m).for_each(|(left, m)| *left = m - *left);
        left
    }
}

fn check(what: &'static str, found: usize, wanted: usize) -> Result<(), CompressError> {
    if found == wanted { Ok(()) } else { Err(CompressError::LengthMismatch { what, wanted, found }) }
}

impl State for PowerSgd {
    fn save<'a>(&'a self, prefix: &str, into: &mut StateMap<'a>) -> Result<(), CompressError> {
        if self.pending {
            return Err(CompressError::Uncommitted);
        }
        into.insert(format!("{prefix}residual"), StateValue::F32(Cow::Owned(self.residual())));
        into.insert(format!("{prefix}q"), StateValue::F32(Cow::Borrowed(&self.committed.q)));
        Ok(())
    }

    fn load(&mut self, prefix: &str, from: &mut StateMap<'_>) -> Result<(), CompressError> {
        let residual = TwoPhaseBuffer::load(format!("{prefix}residual"), from)?;
        let q = TwoPhaseBuffer::load(format!("{prefix}q"), from)?;
        check("the saved q", q.len(), self.rank * self.columns)?;
        if !residual.is_empty() {
            check("the saved residual", residual.len(), self.rows * self.columns)?;
        }
        self.set(Round { m: residual, p: Vec::new(), q });
        Ok(())
    }

    /// A matrix cannot be split, so only its own range is accepted.
    fn reshard(&mut self, held: Range<usize>, wanted: Range<usize>) -> Result<(), CompressError> {
        if held == wanted {
            return Ok(());
        }
        Err(CompressError::LengthChanged { held: held.len(), found: wanted.len() })
    }

    /// Drops the residual, and restarts from the `Q` drawn from the seed.
    fn reset(&mut self) {
        let mut q = vec![0.0; self.rank * self.columns];
        Philox::new(self.seed, 0).fill_normal(1.0, &mut q);
        self.set(Round { q, ..Round::default() });
    }

    fn commit(&mut self) {
        if self.pending {
            std::mem::swap(&mut self.committed, &mut self.latest);
            self.drop_latest();
        }
    }

    fn rollback(&mut self) {
        if self.pending {
            self.drop_latest();
        }
        self.stage = Stage::Idle;
    }

    fn held(&self) -> HeldBytes {
        let of = |round: &Round| HeldBytes::of_values([&round.m, &round.p, &round.q]);
        [&self.committed, &self.latest, &self.next].into_iter().map(of).sum()
    }
}

impl Protocol for PowerSgd {
    fn exchanges(&self) -> Vec<usize> {
        vec![self.rank * self.rows, self.rank * self.columns]
    }

    fn begin(&mut self, x: &[f32]) -> Result<(), CompressError> {
        check("the matrix", x.len(), self.rows * self.columns)?;
        self.stage = Stage::Idle;
        let now = if self.pending { &self.latest } else { &self.committed };
        self.next.m.resize(x.len(), 0.0);
        self.next.p.resize(self.rank * self.rows, 0.0);
        self.next.q.resize(self.rank * self.columns, 0.0);
        let max = self.level.run(Project {
            x,
            m: &now.m,
            sent: now.product(self.rows, self.columns),
            next_m: &mut self.next.m,
            next_p: &mut self.next.p,
            sums: &mut self.sums,
            level: self.level,
        });
        check_range(max, &self.next.m, "its possible compression error")?;
        self.stage = Stage::First;
        Ok(())
    }

    fn outgoing(&self) -> Option<&[f32]> {
        match self.stage {
            Stage::First => Some(&self.next.p),
            Stage::Second => Some(&self.next.q),
            Stage::Idle | Stage::Done => None,
        }
    }

    fn incoming(&mut self, mean: &[f32]) -> Result<(), CompressError> {
        let Round { m, p, q } = &mut self.next;
        match self.stage {
            Stage::First => {
                check("the mean of P", mean.len(), p.len())?;
                p.copy_from_slice(mean);
                orthonormalise(p, self.rows);
                self.level.run(ProjectBack { m, p, q, columns: self.columns });
                self.stage = Stage::Second;
            }
            Stage::Second => {
                check("the mean of Q", mean.len(), q.len())?;
                q.copy_from_slice(mean);
                self.stage = Stage::Done;
            }
            Stage::Idle | Stage::Done => return Err(CompressError::Exchange),
        }
        Ok(())
    }

    fn end(&mut self, out: &mut [f32]) -> Result<(), CompressError> {
        check("the output", out.len(), self.rows * self.columns)?;
        if self.stage != Stage::Done {
            return Err(CompressError::Exchange);
        }
        self.stage = Stage::Idle;
        let product = self.next.product(self.rows, self.columns);
        let max = self.level.run(Expand { product, out: &mut *out, level: self.level });
        check_range(max, out, "its difference from the input")?;
        std::mem::swap(&mut self.latest, &mut self.next);
        self.pending = true;
        Ok(())
    }
}

/// Checks that all values are below [`TOO_LARGE`]. `largest` holds the bits of their largest magnitude.
fn check_range(largest: i32, x: &[f32], what: &'static str) -> Result<(), CompressError> {
    if largest >= INFINITE {
        return Err(first_non_finite(x));
    }
    if largest < TOO_LARGE {
        return Ok(());
    }
    let index =
        x.iter().position(|x| magnitude(*x) >= TOO_LARGE).expect("the kernel found a value this large");
    Err(CompressError::Overflow { index, value: x[index], what })
}

/// Orthonormalizes the rows of `p`, each of `len`, by Gram-Schmidt in order. A row that depends on the rows
/// before it becomes zeros.
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
        // The rest of a dependent row is only rounding error.
        let factor = if norm > whole * 1e-10 && norm > f32::MIN_POSITIVE { 1.0 / norm.sqrt() } else { 0.0 };
        for x in row {
            *x *= factor;
        }
    }
}

#[cfg(test)]
mod tests;
