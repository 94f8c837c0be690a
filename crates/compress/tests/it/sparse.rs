//! Selections: exactly the elements that the rule selects arrive.
#![expect(
    clippy::unwrap_used,
    clippy::float_cmp,
    reason = "helpers of tests fail by panicking; kept values are equal"
)]

use farflung_base::Philox;
use farflung_compress::{
    Amount, CodecSpec, CompressError, Compressor, F32, IndexCoding, Int4, Mask, Masked, Memoryless, Pattern,
    Payload, RoundKey, Select, Sparse, parse,
};

fn normal(n: usize, stream: u64) -> Vec<f32> {
    let mut x = vec![0.0; n];
    Philox::new(9, stream).fill_normal(1.0, &mut x);
    x
}

fn send(codec: &mut dyn Compressor, x: &[f32], round: u64) -> Vec<f32> {
    let (mut payload, mut out) = (Payload::new(), vec![f32::NAN; x.len()]);
    let key = RoundKey { round, ..RoundKey::default() };
    codec.compress(x, key, &mut payload).unwrap();
    assert!(payload.as_bytes().len() <= codec.max_payload(x.len()));
    codec.decompress(payload.view(), &mut out).unwrap();
    out
}

/// Keeps the `k` largest elements by a full sort: an independent implementation of the rule.
fn largest(x: &[f32], k: usize) -> Vec<f32> {
    let mut order: Vec<usize> = (0..x.len()).collect();
    order.sort_by(|a, b| x[*b].abs().total_cmp(&x[*a].abs()).then(a.cmp(b)));
    let mut out = vec![0.0; x.len()];
    order[..k].iter().for_each(|i| out[*i] = x[*i]);
    out
}

#[test]
fn the_largest_are_kept_and_ties_keep_the_lower_index() {
    let sorted: Vec<f32> = (0..20_000).map(|i| i as f32).collect();
    let falling: Vec<f32> = sorted.iter().rev().copied().collect();
    let ties: Vec<f32> = (0..20_000).map(|i| ((i * 7919) % 5) as f32 - 2.0).collect();
    let spiky: Vec<f32> = (0..20_000).map(|i| if i % 5 == 4 { 1e9 } else { 1e-9 }).collect();
    let vectors =
        [normal(1, 1), normal(50, 2), normal(40_001, 3), sorted, falling, ties, spiky, vec![0.0; 9000]];
    for x in vectors {
        for k in [0, 1, 3, 31, 400, 19_999, 1 << 20] {
            let kept = k.min(x.len());
            let select = Select::Largest(Amount::count(k as u32));
            let found = send(&mut Sparse::new(select, F32::new()).unwrap(), &x, 0);
            assert_eq!(found, largest(&x, kept), "{k} of {}", x.len());
        }
    }
}

#[test]
fn each_chunk_keeps_its_largest() {
    let x = normal(1050, 4);
    let mut codec = Sparse::new(Select::PerChunk { chunk: 100, kept: 7 }, F32::new()).unwrap();
    let wanted: Vec<f32> = x.chunks(100).flat_map(|chunk| largest(chunk, 7.min(chunk.len()))).collect();
    assert_eq!(send(&mut codec, &x, 0), wanted);
    let all = Sparse::new(Select::PerChunk { chunk: 4096, kept: 64 }, Int4::new(64).unwrap()).unwrap();
    assert_eq!(all.max_payload(1 << 20), 28 + 20 + 256 * 64 * 12 / 8 + 4 + 256 * (2 + 32));
}

#[test]
fn a_threshold_keeps_what_reaches_it_and_a_sample_about_the_amount() {
    let x = normal(300_000, 5);
    let found = send(&mut *parse("threshold:1.5").unwrap(), &x, 0);
    assert!(x.iter().zip(&found).all(|(x, f)| *f == if x.abs() >= 1.5 { *x } else { 0.0 }));
    let found = send(&mut *parse("sampled:0.01").unwrap(), &x, 0);
    let kept = found.iter().filter(|f| **f != 0.0).count();
    assert!((1500..=3900).contains(&kept), "{kept}");
    // At most 1.3 times the amount is kept, even if all large elements are outside the sample.
    let mut hidden = vec![0.0; 10_100];
    hidden.iter_mut().enumerate().filter(|(i, _)| i % 101 == 50).for_each(|(_, x)| *x = 1.0);
    let found = send(&mut *parse("sampled:10").unwrap(), &hidden, 0);
    assert_eq!(found.iter().filter(|f| **f != 0.0).count(), 13);
}

#[test]
fn an_unbiased_mask_has_the_value_as_its_mean() {
    let x = normal(40, 6);
    let (mut codec, rounds) = (parse("unbiased:4").unwrap(), 100_000);
    let mut sum = vec![0.0_f64; x.len()];
    for round in 0..rounds {
        for (sum, value) in sum.iter_mut().zip(send(&mut *codec, &x, round)) {
            *sum += f64::from(value);
        }
    }
    for (sum, x) in sum.iter().zip(&x) {
        let error = f64::from(x.abs()) * (3.0 / rounds as f64).sqrt();
        assert!((sum / rounds as f64 - f64::from(*x)).abs() < 4.0 * error, "{x}");
    }
    let mut codec = "unbiased:4".parse::<CodecSpec>().unwrap().build_memoryless();
    let residual = codec.compress_residual(&x, &x, &mut [0.0; 40], RoundKey::default(), &mut Payload::new());
    assert_eq!(residual, Err(CompressError::UnbiasedFeedback));
}

#[test]
fn masks_are_the_same_on_all_ranks_and_values_can_be_summed() {
    let mask = Mask::one_in(Pattern::Permuted, 5);
    let body = |rank: u32, x: &[f32]| {
        let key = RoundKey { seed: 4, round: 17, rank: farflung_base::Rank(rank), ..RoundKey::default() };
        let mut payload = Payload::new();
        Masked::new(mask, F32::new()).compress(x, key, &mut payload).unwrap();
        payload.view().body().to_vec()
    };
    let (a, b) = (body(0, &normal(1000, 7)), body(1, &normal(1000, 8)));
    assert_eq!(a[..36], b[..36]);
    assert_eq!(a.len(), b.len());
}

#[test]
fn a_selection_over_a_selection_sends_few_bytes() {
    // CocktailSGD's setting on a shard: 26112 elements in the mask, 5120 of them kept, in four bits with two
    // bytes for each 128.
    let top =
        Sparse::new(Select::Largest(Amount::millionths(200_000).multiple_of(128)), Int4::new(128).unwrap());
    let mask = Mask { pattern: Pattern::Rolling, stride: 10, multiple: 128 };
    let x = normal(1 << 18, 10);
    let bytes = |coding| {
        let mut payload = Payload::new();
        let mut codec = Masked::new(mask, top.clone().unwrap().indices(coding));
        codec.compress(&x, RoundKey::default(), &mut payload).unwrap();
        payload.as_bytes().len()
    };
    let frame = 28 + 36 + 20 + 4;
    assert_eq!(bytes(IndexCoding::Bitmask), frame + 5904);
    assert!(bytes(IndexCoding::Smallest) < frame + 5904 - 800, "{}", bytes(IndexCoding::Smallest));
}

#[test]
fn boxed_codecs_compose_too() {
    let inner: Box<dyn Memoryless> = Box::new(Int4::new(8).unwrap());
    let mut codec = Sparse::new(Select::Largest(Amount::count(16)), inner).unwrap();
    let x = normal(100, 11);
    let found = send(&mut codec, &x, 0);
    let close = largest(&x, 16).iter().zip(&found).all(|(a, b)| (a - b).abs() < 0.3);
    assert!(close && found.iter().filter(|f| **f != 0.0).count() <= 16);
}
