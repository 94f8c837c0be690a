//! Pieces of a token table and of logits: together they give what a whole one gives.

#![expect(clippy::unwrap_used, reason = "a test fails where it panics")]

use farflung_tensor::{Device, Op, Tensor, TensorError, TokenPositions};

use crate::expect::noise;

/// Bounds of pieces of eleven rows.
const BOUNDS: [usize; 4] = [0, 4, 5, 11];

#[test]
fn pieces_of_a_table_give_the_rows_of_their_tokens() {
    let (rows, cols) = (11, 7);
    let cpu = Device::cpu(2).unwrap();
    let ids: Vec<u32> = (0..12).map(|i| i * 5 % 11).collect();
    let tokens = cpu.tensor(&ids, [3, 4]).unwrap();
    let (values, dy) = (noise(rows * cols, 1), noise(12 * cols, 2));
    let (positions, dy) =
        (cpu.tensor(&noise(4 * cols, 3), [4, cols]), cpu.tensor(&dy, [3, 4, cols]).unwrap());
    let positions = positions.unwrap();
    let run = |first: Option<u32>, values: &[f32], adds: bool| {
        let table = cpu.tensor(values, [values.len() / cols, cols]).unwrap();
        let mut y = cpu.zeros([3, 4, cols]).unwrap();
        cpu.run(Op::Embed {
            tokens: tokens.view(),
            first,
            positions: TokenPositions::From { start: 0, documents: None },
            tokens_table: table.view(),
            positions_table: adds.then(|| positions.view()),
            y: y.view_mut(),
        })
        .unwrap();
        let (mut d_table, mut d_positions) =
            (cpu.zeros([values.len() / cols, cols]).unwrap(), cpu.zeros([4, cols]).unwrap());
        cpu.run(Op::EmbedGrad {
            tokens: tokens.view(),
            first,
            positions: TokenPositions::From { start: 0, documents: None },
            dy: dy.view(),
            d_tokens_table: d_table.view_mut(),
            d_positions_table: Some(d_positions.view_mut()),
        })
        .unwrap();
        [y, d_table, d_positions].map(|tensor| tensor.to_vec::<f32>().unwrap())
    };
    let [y, d_table, d_positions] = run(None, &values, true);
    let (mut sum, mut joined) = (vec![0.0; y.len()], Vec::new());
    for (piece, bounds) in BOUNDS.windows(2).enumerate() {
        let own = &values[bounds[0] * cols..bounds[1] * cols];
        let [part, d_part, d_same] = run(Some(bounds[0] as u32), own, piece == 1);
        sum.iter_mut().zip(part).for_each(|(sum, part)| *sum += part);
        joined.extend(d_part);
        assert_eq!(d_same, d_positions);
    }
    assert_eq!((sum, joined), (y, d_table));
}

/// The loss and the gradient of pieces of logits, combined as ranks do.
fn of_pieces(
    cpu: &Device,
    logits: &[f32],
    cols: usize,
    bounds: &[usize],
    targets: &[u32],
    weights: &[f32],
) -> [Vec<f32>; 2] {
    let rows = targets.len();
    let (ids, weight) = (cpu.tensor(targets, rows).unwrap(), cpu.tensor(weights, rows).unwrap());
    let mut pieces: Vec<(u32, Tensor)> = Vec::new();
    let mut all = Vec::new();
    for bounds in bounds.windows(2) {
        let own = logits.chunks_exact(cols).flat_map(|row| row[bounds[0]..bounds[1]].to_vec());
        let piece = cpu.tensor(&own.collect::<Vec<f32>>(), [rows, bounds[1] - bounds[0]]).unwrap();
        let (first, mut stats) = (bounds[0] as u32, cpu.zeros([rows, 3]).unwrap());
        cpu.run(Op::LogitStats { logits: piece.view(), first, targets: ids.view(), stats: stats.view_mut() })
            .unwrap();
        all.push(stats.to_vec::<f32>().unwrap());
        pieces.push((first, piece));
    }
    let log_sum = |row: usize| {
        let at = |stats: &Vec<f32>, i: usize| f64::from(stats[3 * row + i]);
        let top = all.iter().map(|stats| at(stats, 0)).fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = all.iter().map(|stats| at(stats, 1) * (at(stats, 0) - top).exp()).sum();
        let picked: f64 = all.iter().map(|stats| at(stats, 2)).sum();
        (sum.ln() + top, sum.ln() + top - picked)
    };
    let sums: Vec<f32> = (0..rows).map(|row| log_sum(row).0 as f32).collect();
    let log_sums = cpu.tensor(&sums, rows).unwrap();
    let mut gradient = vec![0.0; logits.len()];
    for ((first, mut piece), bounds) in pieces.into_iter().zip(bounds.windows(2)) {
        cpu.run(Op::LogitGrad {
            logits: piece.view_mut(),
            first,
            targets: ids.view(),
            weights: Some(weight.view()),
            log_sums: log_sums.view(),
            scale: 0.25,
        })
        .unwrap();
        let values = piece.to_vec::<f32>().unwrap();
        for (row, own) in values.chunks_exact(bounds[1] - bounds[0]).enumerate() {
            gradient[row * cols..][bounds[0]..bounds[1]].copy_from_slice(own);
        }
    }
    [(0..rows).map(|row| log_sum(row).1 as f32).collect(), gradient]
}

#[test]
fn pieces_of_logits_give_the_loss_and_its_gradient() {
    let cpu = Device::cpu(2).unwrap();
    for (rows, cols, bounds) in
        [(7, 11, &BOUNDS[..]), (5, 300, &[0, 299, 300]), (3, 40, &[0, 40]), (0, 11, &BOUNDS)]
    {
        for spread in [1.0, 80.0] {
            let logits: Vec<f32> = noise(rows * cols, 1).iter().map(|x| x * spread + spread).collect();
            let targets: Vec<u32> = (0..rows).map(|row| (row * 5 % cols) as u32).collect();
            let weights: Vec<f32> = (0..rows).map(|row| (row % 3) as f32 * 0.75).collect();
            let [losses, gradient] = of_pieces(&cpu, &logits, cols, bounds, &targets, &weights);
            for (row, x) in logits.chunks_exact(cols).enumerate() {
                let x: Vec<f64> = x.iter().map(|&x| f64::from(x)).collect();
                let (top, weight) =
                    (x.iter().copied().fold(f64::NEG_INFINITY, f64::max), f64::from(weights[row]));
                let sum: f64 = x.iter().map(|x| (x - top).exp()).sum();
                let loss = sum.ln() + top - x[targets[row] as usize];
                let off = (f64::from(losses[row]) - loss).abs();
                assert!(off <= 1e-6 * (1.0 + top.abs()), "{rows} x {cols}: {off}");
                for (col, x) in x.iter().enumerate() {
                    let hot = if col == targets[row] as usize { 1.0 } else { 0.0 };
                    let want = 0.25 * weight * ((x - top).exp() / sum - hot);
                    let off = (f64::from(gradient[row * cols + col]) - want).abs();
                    // The logarithm of the sum is rounded to f32.
                    assert!(off <= 1e-6 * (1.0 + top.abs()), "{rows} x {cols} at {row}, {col}: {off}");
                }
            }
        }
    }
}

/// The example of `larger-than-a-machine.md`, 1.3: logits 1, 2 | 3, 4 and target 2.
#[test]
fn two_pieces_of_four_logits() {
    let cpu = Device::cpu(1).unwrap();
    let [losses, gradient] = of_pieces(&cpu, &[1.0, 2.0, 3.0, 4.0], 4, &[0, 2, 4], &[2], &[4.0]);
    assert!((losses[0] - 1.440_19).abs() < 1e-6, "{losses:?}");
    for (found, want) in gradient.iter().zip([0.032_059, 0.087_144, -0.763_117, 0.643_914]) {
        assert!((found - want).abs() < 1e-6, "{gradient:?}");
    }
}

#[test]
fn a_piece_without_columns_is_refused() {
    let cpu = Device::cpu(1).unwrap();
    let (logits, targets) = (cpu.zeros([2, 0]).unwrap(), cpu.tensor(&[0_u32, 0], 2).unwrap());
    let mut stats = cpu.zeros([2, 3]).unwrap();
    let refused = cpu.run(Op::LogitStats {
        logits: logits.view(),
        first: 0,
        targets: targets.view(),
        stats: stats.view_mut(),
    });
    assert!(matches!(refused, Err(TensorError::IdOutOfRange { bound: 0, .. })), "{refused:?}");
}
