//! Consistency of stages: microbatches, splits, threads, ranges, memory. Each block is also compared with
//! central differences.
#![expect(clippy::unwrap_used, clippy::panic, reason = "a test fails where it panics")]

use std::ops::Range;

use farflung_base::Philox;
use farflung_tensor::{Device, Heads, Norm, NormKind, ParamLayout, Shape, Tensor};
use farflung_zoo::layer::{Before, Borders, Builder, Grads, Keep, Later, RouterPass, StageContext};
use farflung_zoo::spec::{AttentionBias, Capacity, ExpertsSpec, HeadSpec, Residual};
use farflung_zoo::{Input, ModelSpec, Output, Resize, Stage, Targets, ZooError, gpt2, stage};

const CONTEXT: usize = 10;
const VOCAB: usize = 19;
const DIM: usize = 24;

fn config() -> ModelSpec {
    gpt2(3, 2, DIM, CONTEXT, VOCAB).unwrap()
}

fn noise(len: usize, seed: u64, std: f32) -> Vec<f32> {
    let mut out = vec![0.0; len];
    Philox::new(seed, 77).fill_normal(std, &mut out);
    out
}

fn ids(batch: usize, shift: usize) -> Vec<u32> {
    (0..batch * CONTEXT).map(|i| ((i * i + 3 * i + shift) % VOCAB) as u32).collect()
}

/// Returns parameters larger than the initial ones, so that no part of the model is nearly linear.
fn params(stage: &Stage, seed: u64) -> Tensor {
    let mut p = stage.init(seed).unwrap();
    let layout = stage.layout().clone();
    let values = p.host_mut::<f32>().unwrap();
    for param in layout.params() {
        let name =
            Philox::new(seed, param.name.bytes().fold(7, |h: u64, b| h.wrapping_mul(31) ^ u64::from(b)));
        let mut more = vec![0.0; param.shape.len()];
        name.fill_normal(0.15, &mut more);
        for (v, m) in values[param.range()].iter_mut().zip(more) {
            *v += m;
        }
    }
    p
}

/// Runs several microbatches. Returns losses, gradients, and the ranges that became ready.
fn step(
    stage: &Stage,
    params: &Tensor,
    batches: &[(Vec<u32>, Vec<u32>)],
    scale: f32,
) -> (Vec<f32>, Vec<f32>, Vec<Range<usize>>) {
    // Old gradients must not affect the result without accumulation.
    let mut grads = stage.init(99).unwrap();
    let mut losses = Vec::new();
    let mut ranges = Vec::new();
    let len = CONTEXT;
    for (i, (x, y)) in batches.iter().enumerate() {
        let (x, y) = (stage.tokens(x, len).unwrap(), stage.tokens(y, len).unwrap());
        let (out, saved) = stage.forward(params, Input::Tokens(x), Some(Targets::all(&y, scale))).unwrap();
        let Output::Losses(l) = out else { panic!("a whole model gives losses") };
        losses.extend(l.to_vec::<f32>().unwrap());
        ranges.clear();
        let mut grads = Grads::flat(&mut grads, i > 0);
        assert!(stage.backward(params, saved, None, &mut grads, |r, _| ranges.push(r)).unwrap().is_none());
    }
    (losses, stage.layout().pack(grads.host::<f32>().unwrap()).unwrap(), ranges)
}

fn distance(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let norm = |v: &mut dyn Iterator<Item = f64>| v.map(|x| x * x).sum::<f64>().sqrt();
    let d = norm(&mut a.iter().zip(b).map(|(a, b)| f64::from(*a) - f64::from(*b)));
    d / norm(&mut b.iter().map(|b| f64::from(*b)))
}

#[test]
fn microbatches_add_up_to_the_batch() {
    let cpu = Device::cpu(2).unwrap();
    let stage = Stage::whole(&config(), &cpu).unwrap();
    let p = params(&stage, 1);
    let (x, y) = (ids(4, 0), ids(4, 5));
    let scale = 1.0 / x.len() as f32;
    let one = step(&stage, &p, &[(x.clone(), y.clone())], scale);
    let half = x.len() / 4;
    let parts: Vec<_> =
        (0..4).map(|i| (x[i * half..][..half].to_vec(), y[i * half..][..half].to_vec())).collect();
    let four = step(&stage, &p, &parts, scale);
    assert!(distance(&four.0, &one.0) < 1e-6);
    assert!(distance(&four.1, &one.1) < 2e-6, "{}", distance(&four.1, &one.1));
    // A forward pass without a backward pass gives the same losses.
    let (x, y) = (stage.tokens(&x, 10).unwrap(), stage.tokens(&y, 10).unwrap());
    let losses = stage.losses(&p, x, &y).unwrap();
    assert_eq!(losses.to_vec::<f32>().unwrap(), one.0);
    let total = stage::total(&losses).unwrap();
    assert!((total - one.0.iter().map(|&l| f64::from(l)).sum::<f64>()).abs() < 1e-9);
}

/// A buffer for each unit, which is taken away when it is final, has the bits of one flat buffer.
#[test]
fn gradients_by_unit_are_those_of_a_flat_buffer() {
    let cpu = Device::cpu(1).unwrap();
    let whole = Stage::whole(&config(), &cpu).unwrap();
    let p = params(&whole, 1);
    let (x, y) = (ids(2, 0), ids(2, 5));
    let (_, flat, ranges) = step(&whole, &p, &[(x.clone(), y.clone())], 1.0);
    let flat = whole.layout().unpack(&flat).unwrap();
    let mut units = whole.unit_grads();
    let (x, y) = (whole.tokens(&x, CONTEXT).unwrap(), whole.tokens(&y, CONTEXT).unwrap());
    let (_, saved) = whole.forward(&p, Input::Tokens(x), Some(Targets::all(&y, 1.0))).unwrap();
    let mut taken = Vec::new();
    let take = |range: Range<usize>, grads: &mut Grads<'_>| {
        let unit = grads.take(&range).unwrap().to_vec::<f32>().unwrap();
        assert!(unit == flat[range.clone()], "{range:?}");
        assert!(grads.take(&range).is_none() && grads.as_flat().is_none());
        taken.push(range);
    };
    whole.backward(&p, saved, None, &mut Grads::by_unit(&mut units), take).unwrap();
    assert_eq!(taken, ranges);
}

#[test]
fn the_same_bits_with_any_number_of_threads_and_no_new_memory_after_a_step() {
    let mut first: Option<(Vec<f32>, Vec<f32>)> = None;
    for threads in [1, 2, 3] {
        let cpu = Device::cpu(threads).unwrap();
        let stage = Stage::whole(&config(), &cpu).unwrap();
        let p = params(&stage, 1);
        let mut held = None;
        for _ in 0..3 {
            let (losses, grads, ranges) =
                step(&stage, &p, &[(ids(3, 0), ids(3, 5)), (ids(3, 1), ids(3, 2))], 0.01);
            let known = first.get_or_insert_with(|| (losses.clone(), grads.clone()));
            let bits = |v: &[f32]| v.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert_eq!((bits(&losses), bits(&grads)), (bits(&known.0), bits(&known.1)));
            assert_eq!(*held.get_or_insert(cpu.memory()), cpu.memory());
            covers_once_from_the_end(&ranges, stage.layout());
        }
    }
}

#[track_caller]
fn covers_once_from_the_end(ranges: &[Range<usize>], layout: &ParamLayout) {
    // The tied table is ready last, because the embedding adds the last part of its gradient.
    let mut end = layout.len();
    for r in ranges {
        assert_eq!(r.end, end, "{ranges:?}");
        end = r.start;
    }
    assert_eq!(end, 0, "{ranges:?}");
}

#[test]
fn a_split_model_computes_what_the_whole_does() {
    let cpu = Device::cpu(2).unwrap();
    let whole = Stage::whole(&config(), &cpu).unwrap();
    let (x, y) = (ids(2, 0), ids(2, 5));
    let scale = 1.0 / x.len() as f32;
    let p = params(&whole, 1);
    let (losses, _, _) = step(&whole, &p, &[(x.clone(), y.clone())], scale);
    let mut whole_grads = whole.zeros().unwrap();
    {
        let (x, y) = (whole.tokens(&x, 10).unwrap(), whole.tokens(&y, 10).unwrap());
        let (_, saved) = whole.forward(&p, Input::Tokens(x), Some(Targets::all(&y, scale))).unwrap();
        let mut grads = Grads::flat(&mut whole_grads, false);
        whole.backward(&p, saved, None, &mut grads, |_, _| {}).unwrap();
    }
    for cuts in [vec![0, 1, 3], vec![0, 1, 2, 3]] {
        let stages: Vec<Stage> =
            cuts.windows(2).map(|w| Stage::new(&config(), w[0]..w[1], &cpu).unwrap()).collect();
        let last = stages.len() - 1;
        let parts: Vec<Tensor> = stages.iter().map(|s| params(s, 1)).collect();
        for (stage, part) in stages.iter().zip(&parts) {
            for (name, range) in stage.layout().params().iter().map(|p| (&p.name, p.range())) {
                let there = whole.layout().find(name).unwrap();
                assert_eq!(
                    part.host::<f32>().unwrap()[range.clone()],
                    whole.layout().view(&p, there).unwrap().to_vec::<f32>().unwrap()
                );
                let (a, b) = (stage.init(5).unwrap(), whole.init(5).unwrap());
                let b = whole.layout().view(&b, there).unwrap().to_vec::<f32>().unwrap();
                assert_eq!(a.host::<f32>().unwrap()[range], b, "{name}");
            }
        }
        let targets = whole.tokens(&y, 10).unwrap();
        let mut input = Input::Tokens(whole.tokens(&x, 10).unwrap());
        let mut kept = Vec::new();
        let mut got = Vec::new();
        for (i, (stage, p)) in stages.iter().zip(&parts).enumerate() {
            let (out, saved) =
                stage.forward(p, input, (i == last).then_some(Targets::all(&targets, scale))).unwrap();
            kept.push(saved);
            input = match out {
                Output::Hidden(h) => Input::Hidden(h),
                Output::Losses(l) => {
                    got = l.to_vec::<f32>().unwrap();
                    Input::Hidden(l)
                }
            };
        }
        assert_eq!(got, losses, "{cuts:?}");
        let mut dy = None;
        let mut sum: Vec<Vec<f32>> = vec![Vec::new(); whole.layout().params().len()];
        for ((stage, p), saved) in stages.iter().zip(&parts).zip(kept).rev() {
            let mut flat = stage.init(3).unwrap();
            let mut ranges = Vec::new();
            let mut grads = Grads::flat(&mut flat, false);
            dy = stage.backward(p, saved, dy, &mut grads, |r, _| ranges.push(r)).unwrap();
            covers_once_from_the_end(&ranges, stage.layout());
            assert_eq!(ranges, stage.backward_ranges());
            for param in stage.layout().params() {
                let to = &mut sum[whole.layout().find(&param.name).unwrap()];
                let part = &flat.host::<f32>().unwrap()[param.range()];
                if to.is_empty() {
                    to.extend_from_slice(part);
                } else {
                    assert_eq!(param.name, "wte.weight");
                    to.iter_mut().zip(part).for_each(|(t, p)| *t += p);
                }
            }
        }
        assert!(dy.is_none());
        for (i, (param, sum)) in whole.layout().params().iter().zip(sum).enumerate() {
            let want = whole.layout().view(&whole_grads, i).unwrap().to_vec::<f32>().unwrap();
            if param.name == "wte.weight" {
                // The whole model adds two parts in one buffer; here they are in different stages.
                assert!(distance(&sum, &want) < 1e-6);
            } else {
                assert_eq!(sum, want, "{}", param.name);
            }
        }
    }
}

#[test]
fn what_a_stage_does_not_take_is_refused() {
    let cpu = Device::cpu(1).unwrap();
    let (whole, last) = (Stage::whole(&config(), &cpu).unwrap(), Stage::new(&config(), 1..3, &cpu).unwrap());
    let (p, q) = (whole.init(1).unwrap(), last.init(1).unwrap());
    let tokens = || whole.tokens(&ids(1, 0), 10).unwrap();
    let targets = tokens();
    let wants = |r: Result<(Output, stage::Saved), ZooError>, text: &str| {
        let message = r.unwrap_err().to_string();
        assert!(message.contains(text), "{message}");
    };
    wants(last.forward(&q, Input::Tokens(tokens()), Some(Targets::all(&targets, 1.0))), "hidden states");
    wants(
        whole.forward(&p, Input::Hidden(cpu.zeros([1, 10, 24]).unwrap()), Some(Targets::all(&targets, 1.0))),
        "tokens",
    );
    wants(whole.forward(&p, Input::Tokens(tokens()), None), "targets");
    for shape in [Shape::from([10, 24]), Shape::from([1, 10, 23])] {
        wants(
            last.forward(&q, Input::Hidden(cpu.zeros(shape).unwrap()), Some(Targets::all(&targets, 1.0))),
            "shapes",
        );
    }
    let mut short = targets.view().part(0, 4).unwrap().to_vec::<u32>().unwrap();
    short[3] = 19;
    let few = whole.tokens(&short, 4).unwrap();
    wants(whole.forward(&p, Input::Tokens(tokens()), Some(Targets::all(&few, 1.0))), "cross_entropy");
    wants(whole.forward(&p, Input::Tokens(few), Some(Targets::all(&targets, 1.0))), "19");
    wants(
        whole.forward(&cpu.zeros(64).unwrap(), Input::Tokens(tokens()), Some(Targets::all(&targets, 1.0))),
        "64",
    );
    for (n, len) in [(10, 0), (0, 5), (11, 5), (11, 11)] {
        assert!(whole.tokens(&vec![0; n], len).is_err());
    }
    #[expect(clippy::reversed_empty_ranges, reason = "what is refused")]
    for range in [2..4, 3..1, 0..0, 3..3] {
        assert!(Stage::new(&config(), range, &cpu).is_err());
    }
    assert!(last.logits(&q, tokens()).is_err());
    let (_, saved) = whole.forward(&p, Input::Tokens(tokens()), Some(Targets::all(&targets, 1.0))).unwrap();
    let mut flat = whole.zeros().unwrap();
    let dy = cpu.zeros([1, 10, 24]).unwrap();
    assert!(whole.backward(&p, saved, Some(dy), &mut Grads::flat(&mut flat, false), |_, _| {}).is_err());
    let middle = Stage::new(&config(), 1..2, &cpu).unwrap();
    let m = middle.init(1).unwrap();
    let (_, saved) = middle.forward(&m, Input::Hidden(cpu.zeros([1, 10, 24]).unwrap()), None).unwrap();
    let mut flat = middle.zeros().unwrap();
    let dy = Some(cpu.zeros([10, 24]).unwrap());
    assert!(middle.backward(&m, saved, dy, &mut Grads::flat(&mut flat, false), |_, _| {}).is_err());
}

/// Runs a stage for each part of a cut, some of them without layers. Forward passes are recomputed, and
/// backward passes run in halves, all input halves first.
#[test]
fn halves_recomputation_and_empty_stages_change_no_bit() {
    let cpu = Device::cpu(1).unwrap();
    let (scale, x, y) = (0.05, ids(20, 0), ids(20, 1));
    let whole = Stage::whole(&config(), &cpu).unwrap();
    let targets = whole.tokens(&y, 10).unwrap();
    let run = |cuts: &[usize], halves: bool| {
        let parts: Vec<Stage> =
            cuts.windows(2).map(|w| Stage::new(&config(), w[0]..w[1], &cpu).unwrap()).collect();
        let params: Vec<Tensor> = parts.iter().map(|s| s.init(5).unwrap()).collect();
        let mut input = Some(Input::Tokens(whole.tokens(&x, 10).unwrap()));
        let (mut losses, mut kept) = (Vec::new(), Vec::new());
        for (i, (stage, p)) in parts.iter().zip(&params).enumerate() {
            let taken = input.take().unwrap();
            let again = match &taken {
                Input::Tokens(t) => {
                    Input::Tokens(cpu.tensor(&t.to_vec::<u32>().unwrap(), t.shape()).unwrap())
                }
                Input::Hidden(h) => {
                    Input::Hidden(cpu.tensor(&h.to_vec::<f32>().unwrap(), h.shape()).unwrap())
                }
            };
            let last = i + 1 == parts.len();
            let (out, mut saved) =
                stage.forward(p, taken, last.then_some(Targets::all(&targets, scale))).unwrap();
            if halves {
                saved.drop_activations(i + 1);
                stage.recompute(p, again, &mut saved).unwrap();
            }
            kept.push(saved);
            match out {
                Output::Hidden(h) => input = Some(Input::Hidden(h)),
                Output::Losses(l) => losses = l.to_vec::<f32>().unwrap(),
            }
        }
        let mut grads: Vec<Tensor> = parts.iter().map(|s| s.zeros().unwrap()).collect();
        let mut dy = None;
        if halves {
            for ((stage, p), saved) in parts.iter().zip(&params).zip(&mut kept).rev() {
                dy = stage.backward_input(p, saved, dy).unwrap();
            }
        }
        for (((stage, p), saved), flat) in parts.iter().zip(&params).zip(kept).zip(&mut grads).rev() {
            let mut grads = Grads::flat(flat, false);
            if halves {
                stage.backward_weight(saved, &mut grads, |_, _| {}).unwrap();
            } else {
                dy = stage.backward(p, saved, dy, &mut grads, |_, _| {}).unwrap();
            }
        }
        assert!(dy.is_none());
        let grads: Vec<f32> = grads.iter().flat_map(|g| g.to_vec::<f32>().unwrap()).collect();
        (losses, grads)
    };
    for cuts in [&[0, 3][..], &[0, 1, 3]] {
        assert_eq!(run(cuts, true), run(cuts, false), "{cuts:?}");
    }
    // Stages without layers return their input.
    assert_eq!(run(&[0, 1, 1, 3], true), run(&[0, 1, 3], false));
    assert_eq!(run(&[0, 2, 2, 2, 3], false), run(&[0, 2, 3], true));
    let (_, mut saved) = whole
        .forward(
            &whole.init(5).unwrap(),
            Input::Tokens(whole.tokens(&x, 10).unwrap()),
            Some(Targets::all(&targets, scale)),
        )
        .unwrap();
    saved.drop_activations(1);
    assert!(whole.backward_input(&whole.init(5).unwrap(), &mut saved, None).is_err());
}

/// Compares the slope of `loss` along a direction, by central differences with Richardson extrapolation, with
/// the gradient. The outputs are f32 and their sums f64, so the step is wide enough to keep rounding below the
/// tolerance.
#[track_caller]
fn slopes_agree(what: &str, at: &[f32], grad: &[f32], loss: impl Fn(&[f32]) -> f64) {
    for seed in 0..3 {
        // Half the gradient's own direction and half noise, so that errors in large and in small components are
        // detected.
        let norm = |v: &[f32]| v.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
        let random = noise(at.len(), 40 + seed, 1.0);
        let (g, r) = (norm(grad).max(1e-12), norm(&random));
        let direction: Vec<f64> =
            grad.iter().zip(&random).map(|(a, b)| f64::from(*a) / g + f64::from(*b) / r).collect();
        let moved = |h: f64| {
            let to: Vec<f32> =
                at.iter().zip(&direction).map(|(x, d)| (f64::from(*x) + h * d) as f32).collect();
            loss(&to)
        };
        let central = |h: f64| (moved(h) - moved(-h)) / (2.0 * h);
        let h = 0.02;
        let slope = (4.0 * central(h / 2.0) - central(h)) / 3.0;
        let claimed: f64 = grad.iter().zip(&direction).map(|(g, d)| f64::from(*g) * d).sum();
        let error = (slope - claimed).abs() / claimed.abs().max(0.1 * g);
        assert!(error < 1e-3, "{what}: slope {slope}, gradient says {claimed}: {error}");
    }
}

/// A layer with its own parameters, larger than the initial ones.
struct Alone {
    cpu: Device,
    layout: ParamLayout,
    params: Tensor,
    borders: Borders,
}

impl Alone {
    fn new(cpu: &Device, layout: ParamLayout) -> Self {
        let cpu = cpu.clone();
        let mut values = noise(layout.len(), 3, 0.17);
        for param in layout.params() {
            if param.name.contains("ln_") || param.name.contains("norm") {
                values[param.range()].iter_mut().for_each(|v| *v += 1.0);
            }
        }
        let params = cpu.tensor(&values, layout.len()).unwrap();
        Self { cpu, layout, params, borders: Borders::default() }
    }

    fn cx<'a>(&'a self, params: &'a Tensor) -> StageContext<'a> {
        StageContext {
            device: &self.cpu,
            layout: &self.layout,
            params: params.into(),
            exchange: &farflung_zoo::exchange::Alone,
            gradient_scale: 1.0,
            router: RouterPass::NONE,
            borders: &self.borders,
            sequence: None,
            context: None,
        }
    }

    /// Checks the gradients of all parameters, given `loss(params)`.
    fn weights_agree(&self, grads: &Tensor, loss: impl Fn(&Tensor) -> f64) {
        for param in self.layout.params() {
            let at = &self.params.host::<f32>().unwrap()[param.range()];
            slopes_agree(&param.name, at, &grads.host::<f32>().unwrap()[param.range()], |to| {
                let mut all = self.params.to_vec::<f32>().unwrap();
                all[param.range()].copy_from_slice(to);
                loss(&self.cpu.tensor(&all, all.len()).unwrap())
            });
        }
    }
}

fn dot(y: &Tensor, dy: &[f32]) -> f64 {
    y.to_vec::<f32>().unwrap().iter().zip(dy).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}

/// A model of each kind of layer: GPT-2's; LLaMA's with grouped queries, a head of another width than the
/// model's, part of it rotated, and a head of its own; the same with norms of heads and a window; and
/// GPT-NeoX's with one norm or two; and two experts for each token, of a mixture that drops tokens.
fn kinds() -> Vec<ModelSpec> {
    let mut llama = ModelSpec::preset("llama-nano").unwrap();
    (llama.dim, llama.context, llama.vocab, llama.head) = (DIM, CONTEXT, VOCAB, HeadSpec::Own);
    let block = &mut llama.blocks[0].block;
    block.attention.heads = Heads { query: 4, kv: 2 };
    block.attention.head_dim = 10;
    block.attention.rotary.as_mut().unwrap().width = 6;
    block.mlp.width = 40;
    let mut biased = llama.clone();
    let block = &mut biased.blocks[0].block;
    (block.attention.bias, block.mlp.bias) = (AttentionBias::All, true);
    biased.head = HeadSpec::Tied;
    let mut normed = llama.clone();
    let attention = &mut normed.blocks[0].block.attention;
    (attention.bias, attention.pattern) = (AttentionBias::Inputs, "window:3".parse().unwrap());
    attention.head_norm = Some(Norm { kind: NormKind::Rms, eps: 1e-4 });
    let size = Resize {
        layers: Some(3),
        heads: Some(2),
        dim: Some(DIM),
        context: Some(CONTEXT),
        vocab: Some(VOCAB),
    };
    let of = |preset: &str| ModelSpec::preset(preset).unwrap().resized(size).unwrap();
    let (mut one_norm, mut two_norms) = (of("pythia-70m"), of("pythia-70m"));
    one_norm.blocks[0].block.residual = Residual::ParallelOneNorm;
    one_norm.head = HeadSpec::OwnWithBias;
    two_norms.blocks[0].block.attention.rotary.as_mut().unwrap().width = 8;
    let mut experts = llama.clone();
    let mixture = ModelSpec::preset("mixtral-nano").unwrap().blocks[0].block.experts.unwrap();
    experts.blocks[0].block.experts = Some(ExpertsSpec { capacity: Capacity::Tokens(4), ..mixture });
    vec![config(), llama, biased, normed, one_norm, two_norms, experts]
}

#[test]
fn a_transformer_block_against_central_differences() {
    let cpu = Device::cpu(1).unwrap();
    for spec in kinds() {
        let mut builder = Builder::new(&spec).on(&cpu);
        let block = builder.block(&spec, &spec.blocks[0].block).unwrap();
        let alone = Alone::new(&cpu, builder.layout().unwrap());
        let shape = [2, 7, DIM];
        let (x, dy) = (noise(2 * 7 * 24, 1, 1.0), noise(2 * 7 * 24, 2, 1.0));
        let forward = |p: &Tensor, x: &[f32]| {
            let x = alone.cpu.tensor(x, shape).unwrap();
            block.forward(&alone.cx(p), x, Before::Nothing, Keep::All).unwrap()
        };
        let (_, mut saved) = forward(&alone.params, &x);
        let cx = alone.cx(&alone.params);
        let dy_ = alone.cpu.tensor(&dy, shape).unwrap();
        let dx = block.backward_input(&cx, &mut saved, dy_, Later::Nothing).unwrap();
        let mut flat = alone.cpu.zeros(alone.layout.len()).unwrap();
        block.backward_weight(&cx, &saved, &mut Grads::flat(&mut flat, false)).unwrap();
        let loss = |p: &Tensor, x: &[f32]| dot(&forward(p, x).0, &dy);
        slopes_agree("x", &x, &dx.to_vec::<f32>().unwrap(), |x| loss(&alone.params, x));
        alone.weights_agree(&flat, |p| loss(p, &x));
    }
}

#[test]
fn the_head_and_the_embedding_against_central_differences() {
    let cpu = Device::cpu(1).unwrap();
    for spec in kinds() {
        let shape = [2, 7, DIM];
        let (x, dy) = (noise(2 * 7 * 24, 1, 1.0), noise(2 * 7 * 24, 2, 1.0));
        let mut builder = Builder::new(&spec);
        let head = builder.head(&spec);
        let alone = Alone::new(&cpu, builder.layout().unwrap());
        let cx = alone.cx(&alone.params);
        let tokens = alone.cpu.tensor(&ids(2, 0)[..14], [2, 7]).unwrap();
        let tensor = |x: &[f32]| alone.cpu.tensor(x, shape).unwrap();
        let (_, mut saved) = head.forward(&cx, tensor(&x), Targets::all(&tokens, 0.5)).unwrap();
        let dx = head.backward_input(&cx, &mut saved).unwrap();
        let mut flat = alone.cpu.zeros(alone.layout.len()).unwrap();
        head.backward_weight(&cx, saved, &mut Grads::flat(&mut flat, false)).unwrap();
        let loss = |p: &Tensor, x: &[f32]| {
            0.5 * stage::total(&head.losses(&alone.cx(p), &tensor(x), &tokens).unwrap()).unwrap()
        };
        slopes_agree("x", &x, &dx.to_vec::<f32>().unwrap(), |x| loss(&alone.params, x));
        alone.weights_agree(&flat, |p| loss(p, &x));

        let mut builder = Builder::new(&spec);
        let embedding = builder.embedding(&spec);
        let alone = Alone::new(&cpu, builder.layout().unwrap());
        let cx = alone.cx(&alone.params);
        let mut flat = alone.cpu.tensor(&noise(alone.layout.len(), 8, 1.0), alone.layout.len()).unwrap();
        let mut grads = Grads::flat(&mut flat, false);
        embedding.backward(&cx, &tokens, 0, &tensor(&dy), &mut grads, false).unwrap();
        alone.weights_agree(&flat, |p| dot(&embedding.forward(&alone.cx(p), &tokens, 0).unwrap(), &dy));
    }
}
