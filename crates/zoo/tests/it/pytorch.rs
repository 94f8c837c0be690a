//! Compares logits, losses and all gradients of a tiny GPT-2 with those of `PyTorch` in float64. The expected
//! values, and the script that computed them, are in `fixtures/`.

use std::collections::BTreeMap;

use farflung_tensor::Device;
use farflung_zoo::layer::Grads;
use farflung_zoo::{Input, Output, Stage, Targets, gpt2};

#[derive(serde::Deserialize)]
struct Fixture {
    logits: Vec<f64>,
    losses: Vec<f64>,
    grads: BTreeMap<String, Vec<f64>>,
}

/// Returns element `i` of tensor `place`, by the formula of `fixtures/make_pytorch_fixture.py`.
fn weight(place: usize, i: usize, is_gain: bool) -> f32 {
    let n = (i * 7919 + place * 104_729 + (i * i) % 1013 * 31) % 821;
    (n as f32 - 410.0) / 1024.0 + if is_gain { 1.0 } else { 0.0 }
}

/// Asserts a small relative L2 distance; absolute if the expected values are zero up to rounding.
#[track_caller]
fn close(what: &str, got: &[f32], want: &[f64]) {
    assert_eq!(got.len(), want.len(), "{what}");
    let distance = got.iter().zip(want).map(|(g, w)| (f64::from(*g) - w).powi(2)).sum::<f64>().sqrt();
    let norm = want.iter().map(|w| w * w).sum::<f64>().sqrt();
    assert!(distance <= 1e-5 * norm.max(1e-2), "{what}: {distance} of {norm}");
}

#[test]
fn a_tiny_gpt2_gives_what_pytorch_gives() {
    let fixture: Fixture = serde_json::from_str(include_str!("../fixtures/tiny_gpt2.json")).unwrap();
    let config = gpt2(2, 2, 16, 8, 13).unwrap();
    let (batch, len) = (2, config.context);
    let cpu = Device::cpu(2).unwrap();
    let stage = Stage::whole(&config, &cpu).unwrap();
    let mut params = stage.zeros().unwrap();
    for (place, p) in stage.layout().params().iter().enumerate() {
        let is_gain = p.name.contains("ln_") && p.name.ends_with("weight");
        let values = params.host_mut::<f32>().unwrap();
        for (i, v) in values[p.range()].iter_mut().enumerate() {
            *v = weight(place, i, is_gain);
        }
    }
    let token = |b: usize, t: usize| ((5 * b + 3 * t + t * t) % config.vocab) as u32;
    let rows =
        |shift: usize| -> Vec<u32> { (0..batch * len).map(|i| token(i / len, i % len + shift)).collect() };
    let tokens = || stage.tokens(&rows(0), len).unwrap();
    let targets = stage.tokens(&rows(1), len).unwrap();

    close("logits", &stage.logits(&params, tokens()).unwrap().to_vec::<f32>().unwrap(), &fixture.logits);
    let scale = 1.0 / (batch * len) as f32;
    let (out, saved) =
        stage.forward(&params, Input::Tokens(tokens()), Some(Targets::all(&targets, scale))).unwrap();
    let Output::Losses(losses) = out else { panic!("a whole model gives losses") };
    close("losses", &losses.to_vec::<f32>().unwrap(), &fixture.losses);
    let mut flat = stage.zeros().unwrap();
    stage.backward(&params, saved, None, &mut Grads::flat(&mut flat, false), |_, _| {}).unwrap();
    assert_eq!(fixture.grads.len(), stage.layout().params().len());
    for (i, p) in stage.layout().params().iter().enumerate() {
        let got = stage.layout().view(&flat, i).unwrap().to_vec::<f32>().unwrap();
        close(&p.name, &got, &fixture.grads[&p.name]);
        if p.name.ends_with("c_attn.bias") {
            // A common bias of all keys shifts all scores of a query equally, so its gradient is zero.
            assert!(got[16..32].iter().all(|g| g.abs() < 1e-6), "{:?}", &got[16..32]);
        }
    }
}
