//! Weighted sums of rows and products of rows against f64, with equal bits on 1, 2 and 3 threads.

use farflung_base::Philox;
use farflung_tensor::{Device, Op, Tensor};

use super::expect::{close, dot, noise, same_bits, wide};

/// Numbers below `bound`, and some that are not below `rows`.
fn numbers(count: usize, bound: usize) -> Vec<u32> {
    let draws = Philox::new(3, count as u64);
    let number = |i| draws.below(i, bound as u64) as u32;
    (0..count as u64).map(|i| if i % 11 == 10 { u32::MAX } else { number(i) }).collect()
}

#[test]
fn rows_are_combined_and_multiplied() {
    for (rows, taken, each, cols) in
        [(1, 1, 1, 1), (7, 300, 2, 37), (40, 9, 3, 64), (5, 0, 2, 8), (600, 400, 1, 100)]
    {
        let (x, add, factors) = (noise(rows * cols, 1), noise(taken * cols, 2), noise(taken * each, 3));
        let (of_x, of_add) = (numbers(taken * each, rows + 2), numbers(rows, taken + 2));
        let [plain, all, dots] = same_bits(|cpu| {
            let tensor = |v: &[f32], shape: [usize; 2]| cpu.tensor(v, shape).unwrap();
            let (x, add) = (tensor(&x, [rows, cols]), tensor(&add, [taken, cols]));
            let (factors, of_x) =
                (tensor(&factors, [taken, each]), cpu.tensor(&of_x, [taken, each]).unwrap());
            let of_add = cpu.tensor(&of_add, rows).unwrap();
            let (mut plain, mut all) = (cpu.zeros([taken, cols]).unwrap(), cpu.zeros([taken, cols]).unwrap());
            let mut dots = cpu.zeros(rows).unwrap();
            let (numbers, y) = (of_x.view(), plain.view_mut());
            cpu.run(Op::CombineRows { x: x.view(), rows: numbers, factors: None, add: None, y }).unwrap();
            cpu.run(Op::CombineRows {
                x: x.view(),
                rows: of_x.view(),
                factors: Some(factors.view()),
                add: Some(add.view()),
                y: all.view_mut(),
            })
            .unwrap();
            let y = dots.view_mut();
            cpu.run(Op::RowDots { a: x.view(), b: add.view(), rows: of_add.view(), y }).unwrap();
            [plain, all, dots]
        });
        let (x, add, factors) = (wide(&x), wide(&add), wide(&factors));
        let row = |of: &[f64], i: u32| of.chunks_exact(cols).nth(i as usize).map(<[f64]>::to_vec);
        let sum = |factors: &[f64], n: usize, c: usize| -> f64 {
            let of_row = |i: usize| row(&x, of_x[i]).map_or(0.0, |x| factors[i] * x[c]);
            (n * each..(n + 1) * each).map(of_row).sum()
        };
        let each_element = |of: &dyn Fn(usize, usize) -> f64| -> Vec<f64> {
            (0..taken * cols).map(|at| of(at / cols, at % cols)).collect()
        };
        close(&plain, &each_element(&|n, c| sum(&vec![1.0; taken * each], n, c)), 1e-6);
        close(&all, &each_element(&|n, c| add[n * cols + c] + sum(&factors, n, c)), 1e-6);
        let product = |i: usize| row(&add, of_add[i]).map_or(0.0, |b| dot(&x[i * cols..][..cols], &b));
        close(&dots, &(0..rows).map(product).collect::<Vec<_>>(), 1e-6);
    }
}

fn combine<'a>([x, rows]: [&'a Tensor; 2], more: [Option<&'a Tensor>; 2], y: &'a mut Tensor) -> Op<'a> {
    let [factors, add] = more.map(|v| v.map(Tensor::view));
    Op::CombineRows { x: x.view(), rows: rows.view(), factors, add, y: y.view_mut() }
}

#[test]
fn operands_that_do_not_fit_are_refused() {
    let cpu = Device::cpu(1).unwrap();
    let (x, rows) = (cpu.zeros([3, 4]).unwrap(), cpu.tensor(&[0_u32; 4], [2, 2]).unwrap());
    let (mut y, mut narrow, short) =
        (cpu.zeros([2, 4]).unwrap(), cpu.zeros([2, 3]).unwrap(), cpu.zeros(3).unwrap());
    let mut dots = cpu.zeros(3).unwrap();
    let refused = |op: Op<'_>, words: [&str; 2]| {
        let error = cpu.run(op).unwrap_err().to_string();
        assert!(words.iter().all(|word| error.contains(word)), "{error}");
    };
    let inputs = [&x, &rows];
    refused(combine(inputs, [None; 2], &mut narrow), ["combine_rows", "[2, 3]"]);
    refused(combine(inputs, [Some(&short), None], &mut y), ["combine_rows", "[3]"]);
    refused(combine(inputs, [None, Some(&short)], &mut y), ["combine_rows", "[3]"]);
    let op = Op::CombineRows { x: x.view(), rows: x.view(), factors: None, add: None, y: y.view_mut() };
    refused(op, ["combine_rows", "u32"]);
    let op = Op::RowDots { a: x.view(), b: narrow.view(), rows: rows.view(), y: dots.view_mut() };
    refused(op, ["row_dots", "[2, 3]"]);
    let op = Op::RowDots { a: x.view(), b: x.view(), rows: rows.view(), y: dots.view_mut() };
    refused(op, ["row_dots", "[2, 2]"]);
}
