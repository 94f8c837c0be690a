//! Compares `PowerSgd` with a plain implementation of the paper's algorithm, and tests which values are
//! rejected.

use super::*;
use crate::{MatrixShape, ProtocolSpec};

fn normal(n: usize, stream: u64) -> Vec<f32> {
    let mut x = vec![0.0; n];
    Philox::new(5, stream).fill_normal(1.0, &mut x);
    x
}

/// Runs one round of all ranks with exact averages. Returns the mean.
fn round(ranks: &mut [PowerSgd], x: &[Vec<f32>]) -> Vec<f32> {
    ranks.iter_mut().zip(x).for_each(|(rank, x)| rank.begin(x).unwrap());
    for len in ranks[0].exchanges() {
        let buffers: Vec<&[f32]> = ranks.iter().filter_map(Protocol::outgoing).collect();
        assert_eq!((buffers.len(), buffers[0].len()), (ranks.len(), len));
        let mean = |i: usize| buffers.iter().map(|b| b[i]).sum::<f32>() / buffers.len() as f32;
        let mean: Vec<f32> = (0..len).map(mean).collect();
        for rank in ranks.iter_mut() {
            rank.incoming(&mean).unwrap();
        }
    }
    assert!(ranks.iter().all(|rank| rank.outgoing().is_none()));
    let mut out = vec![0.0; x[0].len()];
    for rank in ranks.iter_mut() {
        rank.end(&mut out).unwrap();
    }
    out
}

/// Runs the rest of a round of one rank, whose own values are taken as the means.
fn pass(method: &mut PowerSgd) {
    while let Some(values) = method.outgoing().map(<[f32]>::to_vec) {
        method.incoming(&values).unwrap();
    }
}

/// Algorithm 1 of the paper, which computes the residual at the end of each round.
#[derive(Clone)]
struct Eager {
    e: Vec<f32>,
    q: Vec<f32>,
}

impl Eager {
    fn round(&mut self, x: &[f32], rows: usize, columns: usize) -> Vec<f32> {
        let e = std::mem::take(&mut self.e);
        let m = if e.is_empty() { x.to_vec() } else { x.iter().zip(&e).map(|(x, e)| x + e).collect() };
        let row = |i: usize| &m[i * columns..][..columns];
        let mut p: Vec<f32> =
            self.q.chunks(columns).flat_map(|q| (0..rows).map(|i| dot(row(i), q))).collect();
        orthonormalise(&mut p, rows);
        for (q, p) in self.q.chunks_mut(columns).zip(p.chunks(rows)) {
            for (j, q) in q.iter_mut().enumerate() {
                *q = (0..rows).fold(0.0, |sum, i| sum + p[i] * m[i * columns + j]);
            }
        }
        let value = |at: usize| {
            let factors = p.chunks(rows).zip(self.q.chunks(columns));
            factors.fold(0.0, |v, (p, q)| v + p[at / columns] * q[at % columns])
        };
        let out: Vec<f32> = (0..x.len()).map(value).collect();
        self.e = m.iter().zip(&out).map(|(m, out)| m - out).collect();
        out
    }
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn a_late_residual_is_the_early_one_to_the_bit() {
    for (rows, columns, rank) in [(1, 1, 1), (5, 9, 3), (33, 600, 4), (40, 17, 7)] {
        let mut method = PowerSgd::new(rows, columns, rank, 3).unwrap();
        let mut eager = Eager { e: Vec::new(), q: method.now().q.clone() };
        let step = |method: &mut PowerSgd, eager: &mut Eager, stream| {
            let x = normal(rows * columns, stream);
            let out = round(std::slice::from_mut(method), std::slice::from_ref(&x));
            assert_eq!(bits(&out), bits(&eager.round(&x, rows, columns)));
            assert_eq!(bits(&method.residual()), bits(&eager.e));
        };
        for stream in 10..16 {
            let before = eager.clone();
            // Rolls back two rounds that ended, and one in the middle.
            step(&mut method, &mut eager, stream + 100);
            step(&mut method, &mut eager, stream + 200);
            assert_eq!(method.save("", &mut StateMap::new()), Err(CompressError::Uncommitted));
            method.begin(&normal(rows * columns, 1)).unwrap();
            method.incoming(&vec![1.0; rank * rows]).unwrap();
            method.rollback();
            assert!(method.outgoing().is_none());
            eager = before;
            assert_eq!(bits(&method.residual()), bits(&eager.e));
            // A commit in the middle of a round must not change that round.
            step(&mut method, &mut eager, stream);
            let x = normal(rows * columns, stream + 300);
            method.begin(&x).unwrap();
            method.commit();
            pass(&mut method);
            let mut out = vec![0.0; x.len()];
            method.end(&mut out).unwrap();
            assert_eq!(bits(&out), bits(&eager.round(&x, rows, columns)));
            method.commit();
            // The saved state has the residual, and a protocol that loads it continues with the same bits.
            let mut map = StateMap::new();
            method.save("a.", &mut map).unwrap();
            assert_eq!(map["a.residual"], StateValue::F32(Cow::Borrowed(&eager.e)));
            assert_eq!(map["a.q"], StateValue::F32(Cow::Borrowed(&eager.q)));
            let mut other = PowerSgd::new(rows, columns + 1, 1, 3).unwrap();
            let fresh = bits(&other.now().q);
            let error = other.load("a.", &mut map.clone());
            assert!(matches!(error, Err(CompressError::LengthMismatch { .. })));
            assert_eq!((bits(&other.now().q), other.residual()), (fresh, Vec::new()));
            let mut twin = PowerSgd::new(rows, columns, rank, 4).unwrap();
            twin.load("a.", &mut map).unwrap();
            drop(map);
            step(&mut twin, &mut eager.clone(), 7);
            method = twin;
            method.rollback();
        }
        method.reset();
        assert!(method.residual().is_empty());
        let error = method.begin(&vec![0.0; rows * columns + 1]);
        assert!(matches!(error, Err(CompressError::LengthMismatch { .. })));
    }
}

/// If one rank rejects a mean, all ranks must.
#[test]
fn what_could_overflow_is_refused_by_all_ranks_alike() {
    let edge = f32::from_bits(TOO_LARGE.cast_unsigned());
    let below = f32::from_bits(TOO_LARGE.cast_unsigned() - 1);
    let mut method = PowerSgd::new(2, 2, 1, 1).unwrap();
    let error = method.begin(&[1.0, -edge, 0.0, 1.0]);
    assert!(matches!(error, Err(CompressError::Overflow { index: 1, .. })));
    assert!(method.outgoing().is_none());
    let x = [below, 0.0, 0.0, 1.0];
    let mut round = |mean: f32| {
        method.begin(&x).unwrap();
        method.incoming(&[1.0, 0.0]).unwrap();
        // The mean may have the other sign.
        method.incoming(&[mean, 0.0]).unwrap();
        let mut out = [0.0; 4];
        (method.end(&mut out), out, method.residual())
    };
    let (error, _, residual) = round(-edge);
    assert!(matches!(error, Err(CompressError::Overflow { index: 0, .. })));
    assert!(residual.is_empty());
    let (done, out, residual) = round(-below);
    assert_eq!((done, out), (Ok(()), [-below, 0.0, 0.0, 0.0]));
    assert_eq!(residual, [2.0 * below, 0.0, 0.0, 1.0]);
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
        let before = ranks[0].residual();
        round(&mut ranks, &x);
        ranks.iter_mut().for_each(PowerSgd::rollback);
        assert_eq!(ranks[0].residual(), before);
        sum.iter_mut().zip(round(&mut ranks, &x)).for_each(|(s, o)| *s += f64::from(o));
        ranks.iter_mut().for_each(PowerSgd::commit);
    }
    // The sum of all outputs is the sum of the mean inputs minus the mean of the last residuals.
    let residuals = [ranks[0].residual(), ranks[1].residual()];
    for i in 0..sum.len() {
        let given = 60.0 * f64::from(x[0][i] + x[1][i]) / 2.0;
        let left = f64::from(residuals[0][i] + residuals[1][i]) / 2.0;
        assert!((given - sum[i] - left).abs() < 1e-2, "{given} {} {left}", sum[i]);
        assert!((given - sum[i]).abs() < 0.5 * 60.0);
    }
    let mut map = StateMap::new();
    ranks[0].save("", &mut map).unwrap();
    let mut twin = PowerSgd::new(16, 12, 2, 9).unwrap();
    twin.load("", &mut map).unwrap();
    assert_eq!(round(std::slice::from_mut(&mut twin), &x[..1]), round(&mut ranks[..1], &x[..1]));
    assert_eq!(twin.end(&mut [0.0; 192]), Err(CompressError::Exchange));
    assert_eq!(twin.incoming(&[0.0; 24]), Err(CompressError::Exchange));
    assert!(PowerSgd::new(16, 12, 13, 1).is_err());
    // A mean that is not finite is rejected, and does not change the state.
    let mut huge = PowerSgd::new(4, 4, 2, 1).unwrap();
    huge.begin(&[8e37; 16]).unwrap();
    huge.incoming(&[f32::INFINITY; 8]).unwrap();
    pass(&mut huge);
    assert!(matches!(huge.end(&mut [0.0; 16]), Err(CompressError::NonFinite { .. })));
    assert!(huge.residual().is_empty());
    let error = huge.begin(&[&[1.0; 9][..], &[f32::NAN; 7]].concat());
    assert!(matches!(error, Err(CompressError::NonFinite { index: 9, .. })));
    assert!(huge.outgoing().is_none());
    // A matrix of zeros has no direction; its mean is zero.
    assert_eq!(round(&mut [PowerSgd::new(4, 4, 2, 1).unwrap()], &[vec![0.0; 16]]), [0.0; 16]);
}

#[test]
fn names_build_what_gains() {
    let spec: ProtocolSpec = "powersgd:4".parse().unwrap();
    assert_eq!(
        (spec.to_string(), ProtocolSpec::names()),
        ("powersgd:4".to_owned(), vec!["powersgd:RANK".to_owned()])
    );
    let sizes = |rows, columns| Some(spec.build(MatrixShape { rows, columns }, 1)?.exchanges());
    assert_eq!(sizes(100, 10), Some(vec![400, 40]));
    // No protocol is built if the factors have as many values as the matrix, or the rank exceeds the matrix's.
    assert_eq!((sizes(8, 8), sizes(3, 1000)), (None, None));
    for (name, wanted) in
        [("powersgd:0", "whole number"), ("powersgd", "whole number"), ("power:1", "unknown")]
    {
        let error = name.parse::<ProtocolSpec>().unwrap_err().to_string();
        assert!(error.contains(wanted), "{error}");
    }
}
