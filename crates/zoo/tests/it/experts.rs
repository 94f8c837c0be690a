//! Mixtures of experts: the layer of Switch Transformers as `transformers` computes it, choices against their
//! rules, losses against closed forms, and what goes wrong.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

mod alone;

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use alone::{Mixture, SWITCH, switch, switch_layer};
use farflung_base::Philox;
use farflung_tensor::{self as tensor, Device, Tensor};
use farflung_zoo as zoo;
use serde_json::{Value, json};
use zoo::exchange::Axis;
use zoo::layer::{Activations, Borders, Grads, Keep, Routed, RouterPass, Then};
use zoo::profile::ModelProfile;
use zoo::spec::{Activation, BalanceOver, Capacity, ExpertWeights, ExpertsSpec, MlpSpec, RouterLosses};
use zoo::weights::{TokenIds, config_from_text, config_text};
use zoo::{AxisShare, Input, ModelSpec, Output, Stage, Targets, stage};

use crate::families::comparison::threads::Threads;

fn noise(len: usize, seed: u64) -> Vec<f32> {
    let mut out = vec![0.0; len];
    Philox::new(seed, len as u64).fill_normal(1.0, &mut out);
    out
}

#[test]
fn the_layer_of_switch_transformers_is_that_of_transformers() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/experts/switch-layer");
    for (what, off) in switch_layer(&folder).unwrap() {
        assert!(off <= 1e-5, "{what}: {off}");
    }
}

/// The sum over a token's experts of weight times output, with the rules written out.
#[test]
fn choices_capacities_and_weights_follow_their_rules() {
    const DIM: usize = 8;
    let mlp = MlpSpec { width: 6, activation: Activation::Silu, gated: true, bias: false };
    for weights in [ExpertWeights::Renormalised, ExpertWeights::Probabilities] {
        for (per_token, capacity) in
            [(1, Capacity::None), (2, Capacity::None), (2, Capacity::Tokens(3)), (3, Capacity::Factor(0.75))]
        {
            let spec = ExpertsSpec { count: 5, per_token, weights, capacity, losses: RouterLosses::NONE };
            let alone = Mixture::new(DIM, &mlp, &spec, |name, to| {
                to.copy_from_slice(&noise(
                    to.len(),
                    name.len() as u64 + u64::from(name.as_bytes()[name.len() - 8]),
                ));
                Ok(())
            })
            .unwrap();
            let shape = [3, 7, DIM];
            let x = noise(3 * 7 * DIM, 9);
            let (y, routed) = alone.run(&x, shape).unwrap();
            let matrix = |name: String, input: &[f64]| -> Vec<f64> {
                let param = alone.layout.params().iter().find(|param| param.name.ends_with(&name)).unwrap();
                let values = &alone.params.host::<f32>().unwrap()[param.range()];
                let outputs = values.len() / input.len();
                let of =
                    |o: usize| (0..input.len()).map(|i| input[i] * f64::from(values[i * outputs + o])).sum();
                (0..outputs).map(of).collect()
            };
            let expert = |e: usize, x: &[f64]| {
                let name = |part: &str| format!("expert_{e}.{part}.weight");
                let (gate, up) = (matrix(name("wi_0"), x), matrix(name("wi"), x));
                let inner: Vec<f64> = gate.iter().zip(&up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
                matrix(name("wo"), &inner)
            };
            let most = match capacity {
                Capacity::None => usize::MAX,
                Capacity::Tokens(most) => most,
                // Of 21 choices in a sequence, 4.2 are an equal share.
                Capacity::Factor(_) => 4,
            };
            let mut dropped = 0;
            for row in 0..3 {
                let token = |t: usize| -> Vec<f64> {
                    x[(row * 7 + t) * DIM..][..DIM].iter().map(|&x| f64::from(x)).collect()
                };
                let logits: Vec<Vec<f64>> =
                    (0..7).map(|t| matrix("classifier.weight".into(), &token(t))).collect();
                let ranked = |t: usize| {
                    let mut all: Vec<usize> = (0..5).collect();
                    all.sort_by(|a, b| logits[t][*b].total_cmp(&logits[t][*a]));
                    all
                };
                let (mut taken, mut want) = ([0; 5], vec![vec![0.0; DIM]; 7]);
                for j in 0..per_token {
                    for t in 0..7 {
                        let chosen = ranked(t)[j];
                        taken[chosen] += 1;
                        if taken[chosen] > most {
                            dropped += 1;
                            continue;
                        }
                        let among = match weights {
                            ExpertWeights::Renormalised => ranked(t)[..per_token].to_vec(),
                            ExpertWeights::Probabilities => ranked(t),
                        };
                        let sum: f64 = among.iter().map(|&e| logits[t][e].exp()).sum();
                        let weight = logits[t][chosen].exp() / sum;
                        let outputs = expert(chosen, &token(t));
                        want[t].iter_mut().zip(outputs).for_each(|(to, y)| *to += weight * y);
                    }
                }
                for (got, want) in y[row * 7 * DIM..].iter().zip(want.concat()) {
                    assert!((f64::from(*got) - want).abs() < 2e-4, "{spec:?}: {got} {want}");
                }
                assert_eq!(routed.chosen[row * 5..][..5], taken.map(|n| n as u32), "{spec:?}");
            }
            assert_eq!(routed.dropped, dropped, "{spec:?}");
        }
    }
}

fn tiny(over: BalanceOver) -> ModelSpec {
    let losses = RouterLosses { balance: 0.7, over, z: 0.2 };
    let small =
        zoo::Resize { layers: Some(2), dim: Some(16), heads: Some(2), context: Some(8), vocab: Some(13) };
    ModelSpec::preset("mixtral-nano").unwrap().resized(small).unwrap().with_router_losses(losses)
}

/// Returns the loss with those of the routers, and the gradients.
fn step(whole: &Stage, params: &Tensor, rows: usize) -> (f64, Vec<f32>) {
    step_of(whole, params, 0..rows, rows)
}

/// As [`step`], the part of some of the `rows` sequences.
fn step_of(whole: &Stage, params: &Tensor, own: Range<usize>, rows: usize) -> (f64, Vec<f32>) {
    let ids: Vec<u32> = (8 * own.start as u32..8 * own.end as u32).map(|i| (i * i + 3 * i) % 13).collect();
    let tokens = Input::Tokens(whole.tokens(&ids, 8).unwrap()).with_borders(Borders::default());
    let targets = whole.tokens(&ids, 8).unwrap();
    let (scale, weight) = (1.0 / (8 * rows) as f32, 1.0 / rows as f32);
    let (output, saved) = whole
        .forward(params, tokens.with_sequence_weight(weight), Some(Targets::all(&targets, scale)))
        .unwrap();
    let Output::Losses(losses) = output else { unreachable!("a whole model gives losses") };
    let (_, experts) = whole.spec().mixtures().next().unwrap();
    let routers = Routed::losses(experts, saved.routed());
    let of_routers = experts.losses.balance * routers.balance + experts.losses.z * routers.z;
    let loss =
        stage::total(&losses).unwrap() * f64::from(scale) + of_routers * own.len() as f64 / rows as f64;
    let mut flat = whole.zeros().unwrap();
    let grads = &mut Grads::flat(&mut flat, false);
    whole.backward(params, saved, None, grads, |_, _| {}).unwrap();
    (loss, flat.to_vec::<f32>().unwrap())
}

/// Shares of choices are constants of the gradient, so losses with the same choices differ by the gradient.
#[test]
fn gradients_of_the_losses_of_routers_against_differences() {
    let cpu = Device::cpu(1).unwrap();
    for (over, balance) in BalanceOver::ALL.into_iter().flat_map(|over| [(over, 0.7), (over, 0.0)]) {
        let spec = tiny(over).with_router_losses(RouterLosses { balance, over, z: 0.2 });
        let whole = Stage::whole(&spec, &cpu).unwrap();
        let values = noise(whole.layout().len(), 5).iter().map(|x| 0.3 * x).collect::<Vec<_>>();
        let params = cpu.tensor(&values, values.len()).unwrap();
        let (_, grads) = step(&whole, &params, 3);
        let along = |direction: &[f32], by: f32| {
            let moved: Vec<f32> = values.iter().zip(direction).map(|(x, d)| x + by * d).collect();
            step(&whole, &cpu.tensor(&moved, moved.len()).unwrap(), 3).0
        };
        for param in whole.layout().params() {
            let mut direction = vec![0.0; values.len()];
            let part = &grads[param.range()];
            let norm = part.iter().map(|g| g * g).sum::<f32>().sqrt();
            if norm == 0.0 {
                continue;
            }
            direction[param.range()].iter_mut().zip(part).for_each(|(d, g)| *d = g / norm);
            let slope = (along(&direction, 2e-3) - along(&direction, -2e-3)) / 4e-3;
            let off = (slope - f64::from(norm)).abs() / f64::from(norm).max(0.02);
            assert!(off < 0.02, "{over:?} {}: {slope} {norm}", param.name);
        }
    }
}

#[test]
fn losses_by_layer_do_not_depend_on_microbatches() {
    let cpu = Device::cpu(1).unwrap();
    let whole = Stage::whole(&tiny(BalanceOver::Layer), &cpu).unwrap();
    let params = whole.init(4).unwrap();
    let (loss, grads) = step(&whole, &params, 4);
    // The same four sequences, two at a time.
    let ids: Vec<u32> = (0..32_u32).map(|i| (i * i + 3 * i) % 13).collect();
    let mut flat = whole.zeros().unwrap();
    let (_, experts) = whole.spec().mixtures().next().unwrap();
    let mut sum = 0.0;
    for (i, ids) in ids.chunks(16).enumerate() {
        let tokens = Input::Tokens(whole.tokens(ids, 8).unwrap()).with_borders(Borders::default());
        let targets = whole.tokens(ids, 8).unwrap();
        let targets = Some(Targets::all(&targets, 1.0 / 32.0));
        let (output, saved) = whole.forward(&params, tokens.with_sequence_weight(0.25), targets).unwrap();
        let Output::Losses(losses) = output else { unreachable!("a whole model gives losses") };
        let routers = Routed::losses(experts, saved.routed());
        let of_routers = experts.losses.balance * routers.balance + experts.losses.z * routers.z;
        sum += stage::total(&losses).unwrap() / 32.0 + of_routers / 2.0;
        let grads = &mut Grads::flat(&mut flat, i > 0);
        whole.backward(&params, saved, None, grads, |_, _| {}).unwrap();
    }
    assert!((sum - loss).abs() < 1e-6, "{sum} {loss}");
    for (a, b) in grads.iter().zip(flat.to_vec::<f32>().unwrap()) {
        assert!((a - b).abs() < 1e-6, "{a} {b}");
    }
}

#[test]
fn a_stage_needs_the_choices_of_the_others_if_layers_are_taken_together() {
    let cpu = Device::cpu(1).unwrap();
    let spec = tiny(BalanceOver::Model);
    let first = Stage::new(&spec, 0..1, &cpu).unwrap();
    let params = first.init(1).unwrap();
    let tokens = Input::Tokens(first.tokens(&[1; 8], 8).unwrap());
    let (output, mut saved) = first.forward(&params, tokens, None).unwrap();
    let Output::Hidden(dy) = output else { unreachable!("the first of two stages") };
    let error = first.backward_input(&params, &mut saved, Some(dy)).unwrap_err().to_string();
    assert!(error.contains("join_routed"), "{error}");
    saved.join_routed(vec![1; 3]);
    let dy = cpu.zeros([1, 8, 16]).unwrap();
    let error = first.backward_input(&params, &mut saved, Some(dy)).unwrap_err().to_string();
    assert!(error.contains("as many choices"), "{error}");
}

/// All tokens to one expert, and a router that gives no numbers.
#[test]
fn extreme_routers_run() {
    let mlp = MlpSpec { width: 6, ..SWITCH };
    for (router, choices) in [(0.0, [14, 0, 0, 0]), (f32::NAN, [14, 0, 0, 0]), (f32::INFINITY, [14, 0, 0, 0])]
    {
        let spec = switch(Capacity::None);
        let alone = Mixture::new(8, &mlp, &spec, |name, to| {
            to.copy_from_slice(&noise(to.len(), 1));
            if name.contains("router") {
                to.fill(router);
            }
            Ok(())
        })
        .unwrap();
        let (x, shape) = (noise(14 * 8, 2), [2, 7, 8]);
        let (y, routed) = alone.run(&x, shape).unwrap();
        let sums: Vec<u32> = (0..4).map(|e| routed.chosen.iter().skip(e).step_by(4).sum()).collect();
        assert_eq!(sums, choices);
        assert_eq!(y.iter().all(|y| y.is_finite()), router == 0.0);
        let cx = alone.cx(RouterPass { sequence_weight: 1.0, joined: None });
        let mut saved = Activations::new(Keep::All);
        let x = alone.cpu.tensor(&x, shape).unwrap();
        alone.layer.forward(&cx, &x, &Then::Nothing, &mut saved).unwrap();
        let dy = alone.cpu.tensor(&noise(14 * 8, 3), shape).unwrap();
        alone.layer.backward_input(&cx, &mut saved, &dy).unwrap();
        let mut flat = alone.cpu.tensor(&vec![f32::NAN; alone.layout.len()], alone.layout.len()).unwrap();
        let mut grads = Grads::flat(&mut flat, false);
        alone.layer.backward_weight(&cx, &saved, &x, &mut grads).unwrap();
        // Experts without tokens have gradients of zero, not none.
        let idle = alone.layout.params().iter().filter(|param| param.name.contains("expert_3"));
        let flat = flat.to_vec::<f32>().unwrap();
        assert!(idle.flat_map(|param| &flat[param.range()]).all(|&g| g == 0.0));
    }
}

/// Each token costs its own experts only.
#[test]
fn the_cost_of_a_mixture_is_that_of_the_experts_of_a_token() {
    let spec = ModelSpec::preset("mixtral-nano").unwrap();
    let block = spec.blocks[0].block;
    let profile = ModelProfile::of(&spec).unwrap();
    let (_, measured) = profile.blocks[0];
    let (t, c, f) = (spec.context as u64, spec.dim as u64, block.mlp.width as u64);
    let attention = c * (block.attention.heads.width() * block.attention.head_dim) as u64 + c * c;
    let products = 2 * t * (attention + 2 * 3 * c * f + 4 * c);
    assert_eq!([measured.forward, measured.input, measured.weight].map(|work| work.products), [products; 3]);
    assert_eq!(spec.active_parameters(), spec.parameters() - 4 * 2 * 3 * c * f);
}

#[test]
fn losses_that_are_0_stay_so_in_files() {
    for preset in ["mixtral-nano", "switch-nano"] {
        let spec = ModelSpec::preset(preset).unwrap().with_router_losses(RouterLosses::NONE);
        let text = config_text(&spec, zoo::weights::Dtype::F32, &TokenIds::default());
        assert_eq!(config_from_text("config.json".as_ref(), &text).unwrap(), spec);
    }
}

#[test]
fn files_that_describe_no_mixture_are_refused_by_field() {
    let spec = ModelSpec::preset("mixtral-nano").unwrap();
    let text = config_text(&spec, zoo::weights::Dtype::F32, &TokenIds::default());
    let with = |field: &str, value: Value| {
        let mut json: Value = serde_json::from_str(&text).unwrap();
        json[field] = value;
        config_from_text("config.json".as_ref(), &json.to_string())
    };
    for over in BalanceOver::ALL {
        let read = with("router_aux_loss_over", over.name().into()).unwrap();
        assert_eq!(read.blocks[0].block.experts.unwrap().losses.over, over);
    }
    for (field, value) in [
        ("num_local_experts", json!(0)),
        ("num_local_experts", json!(1_000_000)),
        ("num_experts_per_tok", json!(5)),
        ("num_experts_per_tok", json!(0)),
        ("router_aux_loss_coef", json!(-1.0)),
        ("router_aux_loss_over", json!("world")),
        ("router_z_loss_coef", json!(-0.5)),
        ("router_jitter_noise", json!(0.1)),
        ("mlp_bias", json!(true)),
    ] {
        let error = with(field, value).unwrap_err().to_string();
        assert!(error.contains("config.json") && !error.contains('\n'), "{field}: {error}");
    }
}

/// Each rank has two of six sequences, and some of the experts.
#[test]
fn ranks_that_divide_the_experts_have_the_losses_and_gradients_of_one_process() {
    const ROWS: usize = 6;
    let mut dropping = tiny(BalanceOver::Layer);
    dropping.blocks[0].block.experts.as_mut().unwrap().capacity = Capacity::Factor(1.0);
    let switch = ModelSpec::preset("switch-nano").unwrap();
    let small =
        zoo::Resize { dim: Some(16), heads: Some(2), context: Some(8), vocab: Some(13), layers: Some(4) };
    for spec in [tiny(BalanceOver::Layer), dropping, switch.resized(small).unwrap()] {
        let cpu = Device::cpu(1).unwrap();
        let whole = Stage::whole(&spec, &cpu).unwrap();
        let (loss, grads) = step(&whole, &whole.init(4).unwrap(), ROWS);
        for weights in [vec![1, 1], vec![2, 1], vec![1, 1, 1], vec![1, 2, 1]] {
            let shares: Vec<_> = AxisShare::new(0, weights).unwrap().all().collect();
            let each = ROWS / shares.len();
            let results: Vec<(Stage, f64, Vec<f32>)> = std::thread::scope(|scope| {
                let ranks = shares.iter().zip(Threads::along(Axis::Expert, shares.len())).enumerate();
                let ranks: Vec<_> = ranks
                    .map(|(rank, (share, exchange))| {
                        let (spec, shares) = (&spec, [AxisShare::whole(), share.clone()]);
                        scope.spawn(move || {
                            let (cpu, exchange) = (Device::cpu(1).unwrap(), Arc::new(exchange));
                            let part = Stage::shared(spec, 0..spec.layers(), &cpu, shares, exchange).unwrap();
                            let params = part.init(4).unwrap();
                            let own = rank * each..(rank + 1) * each;
                            let (loss, grads) = step_of(&part, &params, own, ROWS);
                            (part, loss, grads)
                        })
                    })
                    .collect();
                ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
            });
            let sum: f64 = results.iter().map(|(_, loss, _)| loss).sum();
            assert!((sum - loss).abs() < 1e-5, "{sum} {loss}");
            for param in whole.layout().params() {
                let of = |(part, _, grads): &(Stage, f64, Vec<f32>)| {
                    let found = part.layout().params().iter().find(|own| own.name == param.name)?;
                    Some(grads[found.range()].to_vec())
                };
                let parts: Vec<Vec<f32>> = results.iter().filter_map(of).collect();
                // An expert is on one rank, with the gradients of all sequences; other tensors are on all.
                let is_expert = param.name.contains("experts.");
                assert_eq!(parts.len(), if is_expert { 1 } else { shares.len() }, "{}", param.name);
                for (i, &want) in grads[param.range()].iter().enumerate() {
                    let found: f32 = parts.iter().map(|part| part[i]).sum();
                    assert!((found - want).abs() < 1e-5, "{} {i}: {found} {want}", param.name);
                }
            }
        }
    }
    let share = AxisShare::new(0, vec![1; 5]).unwrap();
    let exchange = Arc::new(Threads::along(Axis::Expert, 5).remove(0));
    let cpu = Device::cpu(1).unwrap();
    let refused = Stage::shared(&tiny(BalanceOver::Layer), 0..2, &cpu, [AxisShare::whole(), share], exchange);
    let error = refused.unwrap_err().to_string();
    assert!(error.contains("`experts` is 4") && error.contains("one for each rank"), "{error}");
}
