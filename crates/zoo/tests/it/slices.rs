//! Compares stages that process sequences slice by slice with stages that process them whole.
#![expect(clippy::unwrap_used, reason = "a test fails where it panics")]

use farflung_tensor::{Device, Tensor};
use farflung_zoo::layer::Grads;
use farflung_zoo::{Input, ModelSpec, Output, Slices, Stage, Targets, gpt2};

const CONTEXT: usize = 40;
const VOCAB: usize = 19;
const DIM: usize = 24;

fn config() -> ModelSpec {
    gpt2(3, 2, DIM, CONTEXT, VOCAB).unwrap()
}
const BATCH: usize = 3;
const SCALE: f32 = 0.05;

fn ids(shift: usize) -> Vec<u32> {
    (0..BATCH * CONTEXT).map(|i| ((i * i + 3 * i + shift) % VOCAB) as u32).collect()
}

/// Returns the rows of some positions, with `width` numbers each.
fn slice<T: Copy>(all: &[T], width: usize, start: usize, len: usize) -> Vec<T> {
    all.chunks(CONTEXT * width).flat_map(|row| &row[start * width..][..len * width]).copied().collect()
}

/// Result: losses in order of positions, and gradients of each part.
#[derive(Debug, PartialEq)]
struct Outcome {
    losses: Vec<f32>,
    grads: Vec<Vec<f32>>,
}

fn parts(threads: usize, cuts: &[usize]) -> (Vec<Stage>, Vec<Tensor>) {
    let cpu = Device::cpu(threads).unwrap();
    let parts: Vec<Stage> =
        cuts.windows(2).map(|w| Stage::new(&config(), w[0]..w[1], &cpu).unwrap()).collect();
    let params = parts.iter().map(|s| s.init(5).unwrap()).collect();
    (parts, params)
}

fn whole(cuts: &[usize]) -> Outcome {
    let (parts, params) = parts(1, cuts);
    let targets = parts[0].tokens(&ids(1), CONTEXT).unwrap();
    let mut input = Some(Input::Tokens(parts[0].tokens(&ids(0), CONTEXT).unwrap()));
    let (mut losses, mut kept) = (Vec::new(), Vec::new());
    for (i, (stage, p)) in parts.iter().zip(&params).enumerate() {
        let last = i + 1 == parts.len();
        let (output, saved) =
            stage.forward(p, input.take().unwrap(), last.then_some(Targets::all(&targets, SCALE))).unwrap();
        kept.push(saved);
        match output {
            Output::Hidden(x) => input = Some(Input::Hidden(x)),
            Output::Losses(l) => losses = l.to_vec().unwrap(),
        }
    }
    let (mut dy, mut grads) = (None, Vec::new());
    for ((stage, p), saved) in parts.iter().zip(&params).zip(kept).rev() {
        let mut flat = stage.zeros().unwrap();
        dy = stage.backward(p, saved, dy, &mut Grads::flat(&mut flat, false), |_, _| {}).unwrap();
        grads.insert(0, stage.layout().pack(flat.host::<f32>().unwrap()).unwrap());
    }
    Outcome { losses, grads }
}

/// Runs the slices one after the other through all stages, and back. If `again`, saved values of each slice are
/// dropped and recomputed in between.
fn sliced(threads: usize, cuts: &[usize], lengths: &[usize], again: bool) -> Outcome {
    let (parts, params) = parts(threads, cuts);
    let mut carried: Vec<Slices> = parts.iter().map(|s| s.slices(BATCH).unwrap()).collect();
    let mut losses = vec![f32::NAN; BATCH * CONTEXT];
    let (mut kept, mut start) = (Vec::new(), 0);
    for &len in lengths {
        let targets = parts[0].tokens(&slice(&ids(1), 1, start, len), len).unwrap();
        let tokens = || parts[0].tokens(&slice(&ids(0), 1, start, len), len).unwrap();
        let mut input = Input::Tokens(tokens());
        for (i, (stage, p)) in parts.iter().zip(&params).enumerate() {
            let copy = match &input {
                Input::Hidden(x) => {
                    Input::Hidden(stage.device().tensor(&x.to_vec::<f32>().unwrap(), x.shape()).unwrap())
                }
                Input::Tokens(_) => Input::Tokens(tokens()),
            };
            let targets = (i + 1 == parts.len()).then_some(Targets::all(&targets, SCALE));
            let (output, mut saved) = stage.forward_slice(p, input, start, targets, &mut carried[i]).unwrap();
            if again {
                saved.drop_activations(i + 1);
            }
            kept.push((i, start, saved, copy));
            match output {
                Output::Hidden(x) => input = Input::Hidden(x),
                Output::Losses(l) => {
                    for (row, l) in l.to_vec::<f32>().unwrap().chunks(len).enumerate() {
                        losses[row * CONTEXT + start..][..len].copy_from_slice(l);
                    }
                    break;
                }
            }
        }
        start += len;
    }
    let mut flat: Vec<Tensor> = parts.iter().map(|s| s.init(99).unwrap()).collect();
    let (mut dy, mut begun) = (None, vec![false; parts.len()]);
    for (i, _, mut saved, copy) in kept.into_iter().rev() {
        let (stage, p) = (&parts[i], &params[i]);
        if again {
            stage.recompute_slice(p, copy, &mut saved, &mut carried[i]).unwrap();
        }
        dy = stage.backward_input_slice(p, &mut saved, dy, &mut carried[i]).unwrap();
        let accumulate = std::mem::replace(&mut begun[i], true);
        stage.backward_weight(saved, &mut Grads::flat(&mut flat[i], accumulate), |_, _| {}).unwrap();
    }
    assert!(dy.is_none());
    let params = |(stage, flat): (&Stage, &Tensor)| stage.layout().pack(flat.host::<f32>().unwrap()).unwrap();
    Outcome { losses, grads: parts.iter().zip(&flat).map(params).collect() }
}

fn distance(a: &[f32], b: &[f32]) -> f64 {
    let square = |x: f32| f64::from(x).powi(2);
    let off: f64 = a.iter().zip(b).map(|(a, b)| square(a - b)).sum();
    (off / b.iter().map(|b| square(*b)).sum::<f64>()).sqrt()
}

#[test]
fn slices_give_the_losses_of_the_whole_to_the_bit_and_its_gradients() {
    for cuts in [&[0, 3][..], &[0, 1, 3], &[0, 1, 1, 2, 3]] {
        let want = whole(cuts);
        for lengths in [&[40][..], &[13, 27], &[1, 1, 30, 8], &[8; 5]] {
            let got = sliced(1, cuts, lengths, false);
            assert_eq!(got.losses, want.losses, "{cuts:?} {lengths:?}");
            for (a, b) in got.grads.iter().zip(&want.grads).filter(|(_, b)| !b.is_empty()) {
                assert!(distance(a, b) < 1e-6, "{cuts:?} {lengths:?}: {}", distance(a, b));
            }
            assert_eq!(sliced(2, cuts, lengths, true), got, "threads and recomputation change no bit");
        }
    }
}

#[test]
fn slices_out_of_order_are_refused() {
    let (parts, params) = parts(1, &[0, 3]);
    let (stage, p) = (&parts[0], &params[0]);
    let tokens = |len| stage.tokens(&slice(&ids(0), 1, 0, len), len).unwrap();
    let mut slices = stage.slices(BATCH).unwrap();
    let forward = |start, len, slices: &mut Slices| {
        stage.forward_slice(
            p,
            Input::Tokens(tokens(len)),
            start,
            Some(Targets::all(&tokens(len), SCALE)),
            slices,
        )
    };
    let message = forward(10, 10, &mut slices).unwrap_err().to_string();
    assert!(message.contains("from the first to the last"), "{message}");
    let (_, mut first) = forward(0, 10, &mut slices).unwrap();
    let (_, mut second) = forward(10, 10, &mut slices).unwrap();
    let Err(error) = stage.backward_input_slice(p, &mut first, None, &mut slices) else {
        panic!("the slice behind it is not back yet")
    };
    assert!(error.to_string().contains("in reverse order, from the last to the first"), "{error}");
    stage.backward_input_slice(p, &mut second, None, &mut slices).unwrap();
    assert!(stage.backward_input_slice(p, &mut second, None, &mut slices).is_err());
    stage.backward_input_slice(p, &mut first, None, &mut slices).unwrap();
    assert!(forward(20, 21, &mut slices).is_err(), "beyond the context");
}
