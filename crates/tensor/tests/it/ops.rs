//! Ops against a plain f64 computation, most with equal bits on 1, 2 and 3 threads.

use farflung_tensor::{DType, Device, Fuse, Gelu, Op, Tensor, TokenPositions};
use half::{bf16, f16};

use super::expect::{close, noise, same_bits, wide};

const SIZES: [(usize, usize); 8] =
    [(1, 1), (1, 17), (3, 16), (2, 5), (7, 100), (600, 33), (257, 130), (0, 5)];

fn gelu(x: f64) -> f64 {
    0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x * x * x)).tanh())
}

#[test]
fn fill_writes_its_part_alone() {
    let [y] = same_bits(|cpu| {
        let mut y = cpu.zeros(10).unwrap();
        cpu.run(Op::Fill { value: -2.5, y: y.view_mut().part(3, 4).unwrap() }).unwrap();
        [y]
    });
    assert_eq!(y, [0.0, 0.0, 0.0, -2.5, -2.5, -2.5, -2.5, 0.0, 0.0, 0.0]);
}

#[test]
fn casts_round_to_nearest_even_and_keep_infinities() {
    let cpu = Device::cpu(2).unwrap();
    // (f32, bits as f16, bits as bf16); the third and fourth are ties in f16, the fifth and sixth in bf16.
    let table: [(f32, u16, u16); 12] = [
        (1.0, 0x3c00, 0x3f80),
        (-0.0, 0x8000, 0x8000),
        (1.0 + 1.0 / 2048.0, 0x3c00, 0x3f80),
        (1.0 + 3.0 / 2048.0, 0x3c02, 0x3f80),
        (1.0 + 1.0 / 256.0, 0x3c04, 0x3f80),
        (1.0 + 3.0 / 256.0, 0x3c0c, 0x3f82),
        (f32::INFINITY, 0x7c00, 0x7f80),
        (f32::NEG_INFINITY, 0xfc00, 0xff80),
        (65520.0, 0x7c00, 0x4780),
        (65504.0, 0x7bff, 0x4780),
        (5.960_464_5e-8, 0x0001, 0x3380),
        (f32::MAX, 0x7c00, 0x7f80),
    ];
    // Enough elements to reach the vector path and its tail.
    let n = table.len() * 7 + 1;
    let values: Vec<f32> = (0..n).map(|i| table[i % table.len()].0).collect();
    let x = cpu.tensor(&values, n).unwrap();
    let mut half = cpu.empty(DType::F16, n).unwrap();
    let mut brain = cpu.empty(DType::Bf16, n).unwrap();
    cpu.run(Op::Cast { x: x.view(), y: half.view_mut() }).unwrap();
    cpu.run(Op::Cast { x: x.view(), y: brain.view_mut() }).unwrap();
    let (h, b) = (half.to_vec::<f16>().unwrap(), brain.to_vec::<bf16>().unwrap());
    for i in 0..n {
        let (x, want_h, want_b) = table[i % table.len()];
        assert_eq!((h[i].to_bits(), b[i].to_bits()), (want_h, want_b), "{x} at {i}");
    }
    let (mut from_h, mut from_b) = (cpu.zeros(n).unwrap(), cpu.zeros(n).unwrap());
    cpu.run(Op::Cast { x: half.view(), y: from_h.view_mut() }).unwrap();
    cpu.run(Op::Cast { x: brain.view(), y: from_b.view_mut() }).unwrap();
    let (from_h, from_b) = (from_h.to_vec::<f32>().unwrap(), from_b.to_vec::<f32>().unwrap());
    for i in 0..n {
        assert_eq!(from_h[i].to_bits(), h[i].to_f32().to_bits());
        assert_eq!(from_b[i].to_bits(), u32::from(b[i].to_bits()) << 16);
    }

    let nan = cpu.tensor(&[f32::NAN; 9], 9).unwrap();
    let mut half = cpu.empty(DType::F16, 9).unwrap();
    cpu.run(Op::Cast { x: nan.view(), y: half.view_mut() }).unwrap();
    assert!(half.to_vec::<f16>().unwrap().iter().all(|x| x.is_nan()));
    let mut brain = cpu.empty(DType::Bf16, 9).unwrap();
    cpu.run(Op::Cast { x: nan.view(), y: brain.view_mut() }).unwrap();
    assert!(brain.to_vec::<bf16>().unwrap().iter().all(|x| x.is_nan()));

    let ids = cpu.tensor(&[7_u32, u32::MAX], 2).unwrap();
    let mut copy = cpu.empty(DType::U32, 2).unwrap();
    cpu.run(Op::Cast { x: ids.view(), y: copy.view_mut() }).unwrap();
    assert_eq!(copy.to_vec::<u32>().unwrap(), [7, u32::MAX]);
    let bytes = cpu.tensor(&[7_u8, 255], 2).unwrap();
    let mut copy = cpu.empty(DType::U8, 2).unwrap();
    cpu.run(Op::Cast { x: bytes.view(), y: copy.view_mut() }).unwrap();
    assert_eq!(copy.to_vec::<u8>().unwrap(), [7, 255]);
}

#[test]
fn matmul_in_all_forms() {
    let sizes = [
        (1, 1, 1),
        (3, 5, 7),
        (17, 33, 65),
        (64, 400, 48),
        (130, 70, 200),
        (1, 64, 100),
        (4, 0, 5),
        (0, 3, 4),
        (2, 3, 0),
    ];
    for (m, k, n) in sizes {
        let (a, b, c) = (noise(m * k, 1), noise(k * n, 2), noise(m * n, 3));
        let (bias, other) = (noise(n, 4), noise(m * n, 5));
        for form in 0..48 {
            let (a_t, b_t, accumulate, fuse) = (form & 1 == 1, form & 2 == 2, form & 4 == 4, form / 8);
            let at = |i: usize, l: usize| f64::from(a[if a_t { l * m + i } else { i * k + l }]);
            let bt = |l: usize, j: usize| f64::from(b[if b_t { j * k + l } else { l * n + j }]);
            let mut want = Vec::new();
            let (mut want_slope, mut largest) = (Vec::new(), 1.0_f64);
            for i in 0..m {
                for j in 0..n {
                    let start = if accumulate { f64::from(c[i * n + j]) } else { 0.0 };
                    let sum = start + (0..k).map(|l| at(i, l) * bt(l, j)).sum::<f64>();
                    let (bias, other) = (f64::from(bias[j]), f64::from(other[i * n + j]));
                    largest = largest.max((sum + bias).abs());
                    want_slope.push((gelu(sum + bias + 1e-5) - gelu(sum + bias - 1e-5)) / 2e-5);
                    want.push(match fuse {
                        0 => sum,
                        1 => sum + bias,
                        2 => gelu(sum + bias),
                        3 => sum + bias + other,
                        4 => sum + other,
                        _ => sum * other,
                    });
                }
            }
            let [got, slope] = same_bits(|cpu| {
                let a = cpu.tensor(&a, if a_t { [k, m] } else { [m, k] }).unwrap();
                let b = cpu.tensor(&b, if b_t { [n, k] } else { [k, n] }).unwrap();
                let mut c = cpu.tensor(&c, [m, n]).unwrap();
                let mut slope = cpu.zeros([m, n]).unwrap();
                let (bias, other) = (cpu.tensor(&bias, n).unwrap(), cpu.tensor(&other, [m, n]).unwrap());
                let fuse = match fuse {
                    0 => Fuse::None,
                    1 => Fuse::Bias(bias.view()),
                    2 => {
                        Fuse::BiasGelu { gelu: Gelu::Tanh, bias: bias.view(), slope: Some(slope.view_mut()) }
                    }
                    3 => Fuse::BiasAdd { bias: bias.view(), residual: other.view() },
                    4 => Fuse::Add { residual: other.view() },
                    _ => Fuse::Times { factor: other.view() },
                };
                let (a, b) = (a.view(), b.view());
                cpu.run(Op::MatMul { a, a_t, b, b_t, c: c.view_mut(), accumulate, scales: [1.0; 2], fuse })
                    .unwrap();
                [c, slope]
            });
            close(&got, &want, 2e-6);
            if fuse == 2 {
                // The slope inherits the rounding error of the sum at which it is evaluated; that error grows
                // with the sum.
                let error = slope.iter().zip(&want_slope).map(|(&s, w)| (f64::from(s) - w).abs());
                assert!(error.fold(0.0, f64::max) < 2e-6 * largest);
            }
        }
    }
}

#[test]
fn sums_of_rows_and_of_squares() {
    for (rows, cols) in SIZES {
        let (x, start) = (noise(rows * cols, 1), noise(cols, 2));
        for accumulate in [false, true] {
            let [got] = same_bits(|cpu| {
                let mut y = cpu.tensor(&start, cols).unwrap();
                let x = cpu.tensor(&x, [rows, cols]).unwrap();
                cpu.run(Op::SumRows { x: x.view(), y: y.view_mut(), accumulate }).unwrap();
                [y]
            });
            let want: Vec<f64> = (0..cols)
                .map(|j| {
                    let sum: f64 = (0..rows).map(|i| f64::from(x[i * cols + j])).sum();
                    sum + if accumulate { f64::from(start[j]) } else { 0.0 }
                })
                .collect();
            close(&got, &want, 1e-6);
        }
    }
    for len in [0, 1, 31, 33, 1025, Op::SQUARES_CHUNK, 2 * Op::SQUARES_CHUNK + 77] {
        let x = noise(len, 9);
        let parts = len.div_ceil(Op::SQUARES_CHUNK);
        let [got] = same_bits(|cpu| {
            let mut partials = cpu.zeros(parts).unwrap();
            let x = cpu.tensor(&x, len).unwrap();
            cpu.run(Op::SumSquares { x: x.view(), partials: partials.view_mut() }).unwrap();
            [partials]
        });
        let want: Vec<f64> =
            wide(&x).chunks(Op::SQUARES_CHUNK).map(|c| c.iter().map(|x| x * x).sum()).collect();
        close(&got, &want, 1e-6);
    }
}

/// A packed sequence is embedded as its documents are, each from position 0, whole and in parts.
#[test]
fn positions_begin_again_with_each_document() {
    let (vocab, c, len) = (7, 5, 9);
    let ids: Vec<u32> = (0..2 * len).map(|i| (i * 3 % vocab) as u32).collect();
    let starts = [0, 0, 0, 3, 4, 4, 4, 4, 4, 0, 1, 1, 1, 1, 1, 1, 1, 8];
    let (words, places, dy) = (noise(vocab * c, 1), noise((len + 2) * c, 2), noise(2 * len * c, 3));
    let [y, d_words, d_places, y_parts, d_parts] = same_bits(|cpu| {
        let rows = |x: &[u32]| cpu.tensor(x, [2, len]).unwrap();
        let (tokens, begins) = (rows(&ids), rows(&starts));
        let [words, places] =
            [(&words, vocab), (&places, len + 2)].map(|(x, n)| cpu.tensor(x, [n, c]).unwrap());
        let dy = cpu.tensor(&dy, [2, len, c]).unwrap();
        let [mut y, mut y_parts] = [(); 2].map(|()| cpu.zeros([2, len, c]).unwrap());
        let [mut d_words, mut other] =
            [(); 2].map(|()| cpu.tensor(&words.to_vec::<f32>().unwrap(), [vocab, c]).unwrap());
        let [mut d_places, mut d_parts] =
            [(); 2].map(|()| cpu.tensor(&places.to_vec::<f32>().unwrap(), [len + 2, c]).unwrap());
        let (tokens_table, positions_table) = (words.view(), Some(places.view()));
        let positions = TokenPositions::From { start: 0, documents: Some(begins.view()) };
        let (all, to) = (tokens.view(), y.view_mut());
        cpu.run(Op::Embed { tokens: all, first: None, positions, tokens_table, positions_table, y: to })
            .unwrap();
        let (d_tokens_table, d_positions_table) = (d_words.view_mut(), Some(d_places.view_mut()));
        let from = dy.view();
        cpu.run(Op::EmbedGrad {
            tokens: all,
            first: None,
            positions,
            dy: from,
            d_tokens_table,
            d_positions_table,
        })
        .unwrap();
        for (row, first, new) in [(0, 0, 4), (0, 4, 5), (1, 0, 2), (1, 2, 7)] {
            let at = row * len + first;
            let tokens = tokens.view().part(at, [1, new]).unwrap();
            let documents = Some(begins.view().part(at, [1, new]).unwrap());
            let y = y_parts.view_mut().part(at * c, [1, new, c]).unwrap();
            let positions = TokenPositions::From { start: first, documents };
            cpu.run(Op::Embed { tokens, first: None, positions, tokens_table, positions_table, y }).unwrap();
            let dy = dy.view().part(at * c, [1, new, c]).unwrap();
            let (d_tokens_table, d_positions_table) = (other.view_mut(), Some(d_parts.view_mut()));
            cpu.run(Op::EmbedGrad { tokens, first: None, positions, dy, d_tokens_table, d_positions_table })
                .unwrap();
        }
        [y, d_words, d_places, y_parts, d_parts]
    });
    let (mut want_words, mut want_places) = (wide(&words), wide(&places));
    for (i, &id) in ids.iter().enumerate() {
        let position = i % len - starts[i] as usize;
        for j in 0..c {
            let (at, place) = (id as usize * c + j, position * c + j);
            assert_eq!(y[i * c + j].to_bits(), (words[at] + places[place]).to_bits(), "{i}");
            want_words[at] += f64::from(dy[i * c + j]);
            want_places[place] += f64::from(dy[i * c + j]);
        }
    }
    assert_eq!(y, y_parts);
    close(&d_words, &want_words, 1e-6);
    close(&d_places, &want_places, 1e-6);
    close(&d_parts, &want_places, 1e-6);
}

#[test]
fn embeddings_gather_and_their_gradient_scatters() {
    for (batch, len, c, vocab, start) in
        [(2, 5, 3, 4, 0), (3, 40, 17, 2500, 2), (1, 1, 1, 1, 0), (0, 3, 4, 5, 0), (2, 3, 0, 5, 0)]
    {
        let positions = len + start + 1;
        // Every second token is the same, so that rows of the gradient are summed.
        let ids: Vec<u32> =
            (0..batch * len).map(|i| (if i % 2 == 0 { vocab - 1 } else { i * 7 % vocab }) as u32).collect();
        let (rows_of_tokens, places, dy) =
            (noise(vocab * c, 1), noise(positions * c, 2), noise(batch * len * c, 3));
        let [y, d_table, d_places, alone, d_alone] = same_bits(|cpu| {
            let tokens = cpu.tensor(&ids, [batch, len]).unwrap();
            let mut table = cpu.tensor(&rows_of_tokens, [vocab, c]).unwrap();
            let mut places = cpu.tensor(&places, [positions, c]).unwrap();
            let (mut d_alone, mut alone) =
                (cpu.tensor(&rows_of_tokens, [vocab, c]).unwrap(), cpu.zeros([batch, len, c]).unwrap());
            let dy = cpu.tensor(&dy, [batch, len, c]).unwrap();
            let mut y = cpu.zeros([batch, len, c]).unwrap();
            let (tokens_table, positions_table) = (table.view(), Some(places.view()));
            cpu.run(Op::Embed {
                tokens: tokens.view(),
                first: None,
                positions: TokenPositions::From { start, documents: None },
                tokens_table,
                positions_table,
                y: y.view_mut(),
            })
            .unwrap();
            let (tokens_table, to) = (table.view(), alone.view_mut());
            cpu.run(Op::Embed {
                tokens: tokens.view(),
                first: None,
                positions: TokenPositions::From { start, documents: None },
                tokens_table,
                positions_table: None,
                y: to,
            })
            .unwrap();
            let (d_tokens_table, dy_) = (d_alone.view_mut(), dy.view());
            cpu.run(Op::EmbedGrad {
                tokens: tokens.view(),
                first: None,
                positions: TokenPositions::From { start: 0, documents: None },
                dy: dy_,
                d_tokens_table,
                d_positions_table: None,
            })
            .unwrap();
            let (d_tokens_table, d_positions_table) = (table.view_mut(), Some(places.view_mut()));
            cpu.run(Op::EmbedGrad {
                tokens: tokens.view(),
                first: None,
                positions: TokenPositions::From { start: 0, documents: None },
                dy: dy.view(),
                d_tokens_table,
                d_positions_table,
            })
            .unwrap();
            [y, table, places, alone, d_alone]
        });
        let (mut want_table, mut want_places) = (wide(&rows_of_tokens), wide(&places));
        for (i, &id) in ids.iter().enumerate() {
            for j in 0..c {
                let (at, place) = (id as usize * c + j, i % len * c + j);
                assert_eq!(
                    y[i * c + j].to_bits(),
                    (rows_of_tokens[at] + places[place + start * c]).to_bits()
                );
                assert_eq!(alone[i * c + j].to_bits(), rows_of_tokens[at].to_bits());
                want_table[at] += f64::from(dy[i * c + j]);
                want_places[place] += f64::from(dy[i * c + j]);
            }
        }
        close(&d_table, &want_table, 1e-6);
        assert_eq!(d_alone, d_table, "positions change nothing for the tokens");
        close(&d_places, &want_places, 1e-6);
    }
}

#[test]
fn cross_entropy_and_the_gradient_in_place() {
    for (rows, cols) in [(1, 1), (5, 1), (3, 16), (7, 33), (70, 500), (2, 17000), (0, 4)] {
        for spread in [1.0, 80.0, 1e4] {
            let mut logits = noise(rows * cols, 1);
            for x in &mut logits {
                *x = *x * spread + spread;
            }
            let targets: Vec<u32> = (0..rows).map(|i| (i * 5 % cols) as u32).collect();
            let run = |grad_scale| {
                same_bits(|cpu| {
                    let mut x = cpu.tensor(&logits, [rows, cols]).unwrap();
                    let ids = cpu.tensor(&targets, rows).unwrap();
                    let mut losses = cpu.zeros(rows).unwrap();
                    let (targets, losses_) = (ids.view(), losses.view_mut());
                    cpu.run(Op::CrossEntropy {
                        logits: x.view_mut(),
                        targets,
                        weights: None,
                        losses: losses_,
                        grad_scale,
                    })
                    .unwrap();
                    [x, losses]
                })
            };
            let [same, losses] = run(None);
            assert_eq!(same, logits, "logits stay without a scale");
            let [grad, again] = run(Some(0.25));
            assert_eq!(losses, again);
            let (mut want_losses, mut want_grad) = (Vec::new(), Vec::new());
            for (row, &target) in wide(&logits).chunks_exact(cols).zip(&targets) {
                let top = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let sum: f64 = row.iter().map(|x| (x - top).exp()).sum();
                want_losses.push(sum.ln() + top - row[target as usize]);
                let hot = |j: usize| if j == target as usize { 1.0 } else { 0.0 };
                want_grad
                    .extend(row.iter().enumerate().map(|(j, x)| 0.25 * ((x - top).exp() / sum - hot(j))));
            }
            close(&losses, &want_losses, 1e-6);
            close(&grad, &want_grad, 1e-6);
        }
    }
    // A row with a NaN has a NaN loss, not a wrong number.
    let cpu = Device::cpu(1).unwrap();
    let mut x = cpu.tensor(&[0.0, f32::NAN, 1.0], [1, 3]).unwrap();
    let (ids, mut losses) = (cpu.tensor(&[0_u32], 1).unwrap(), cpu.zeros(1).unwrap());
    let (logits, targets) = (x.view_mut(), ids.view());
    cpu.run(Op::CrossEntropy { logits, targets, weights: None, losses: losses.view_mut(), grad_scale: None })
        .unwrap();
    assert!(losses.to_vec::<f32>().unwrap()[0].is_nan());
}

/// A weight multiplies the loss and the gradient of its row; weight 0 hides the row, whatever is in it.
#[test]
fn weights_multiply_losses_and_gradients() {
    let (rows, cols) = (9, 37);
    let mut logits = noise(rows * cols, 1);
    let targets: Vec<u32> = (0..rows as u32).collect();
    let weights: Vec<f32> = (0..rows).map(|i| [0.0, 1.0, 2.5][i % 3]).collect();
    let run = |logits: &[f32], weights: Option<&[f32]>| {
        same_bits(|cpu| {
            let mut x = cpu.tensor(logits, [rows, cols]).unwrap();
            let ids = cpu.tensor(&targets, rows).unwrap();
            let weights = weights.map(|weights| cpu.tensor(weights, rows).unwrap());
            let mut losses = cpu.zeros(rows).unwrap();
            cpu.run(Op::CrossEntropy {
                logits: x.view_mut(),
                targets: ids.view(),
                weights: weights.as_ref().map(Tensor::view),
                losses: losses.view_mut(),
                grad_scale: Some(0.5),
            })
            .unwrap();
            [x, losses]
        })
    };
    let [plain_grad, plain] = run(&logits, None);
    logits[3 * cols + 5] = f32::NAN;
    let [grad, losses] = run(&logits, Some(&weights));
    for (row, weight) in weights.iter().enumerate() {
        let near = |a: f32, b: f32| (a - b).abs() <= 1e-6 * b.abs().max(1e-3);
        assert!(near(losses[row], weight * plain[row]), "{row}");
        let range = row * cols..(row + 1) * cols;
        assert!(
            grad[range.clone()].iter().zip(&plain_grad[range]).all(|(a, b)| near(*a, weight * b)),
            "{row}"
        );
    }
}
