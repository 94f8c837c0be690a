//! Finite vectors near the limits of f32: each is either encoded and can be decoded, or rejected with the index
//! of an element, and then the codec's memory is unchanged.
#![expect(clippy::unwrap_used, clippy::float_cmp, reason = "helpers of tests fail by panicking")]

use crate::table::CODECS;
use farflung_base::Philox;
use farflung_compress::link::{AqSgd, Direct, LinkCodec, MemoryStore};
use farflung_compress::{
    Amount, CodecSpec, CompressError, Compressor, Dct, ErrorFeedback, F32, Int4, Int8, Mask, Masked,
    Memoryless, MomentumCorrection, Pattern, Payload, RoundKey, Select, Sparse, State, Uint8, names, parse,
};

/// Names in addition to the table of the laws: codecs that can overflow, alone, around each other and around
/// others, and more block sizes.
const COMPOSED: [&str; 25] = [
    "unbiased:10",
    "unbiased:3/int8",
    "unbiased:2/qsgd2",
    "unbiased:4000000000/f16",
    "dct:8",
    "dct:8/int4",
    "dct:64/int8",
    "dct:3/uint8-sr",
    "dct:2/e3m0",
    "dct:5/minmax8",
    "dct:8/qsgd4:64",
    "dct:8/natural",
    "dct:8/dct:4/int4",
    "dct:8/unbiased:4/int4",
    "dct:8/unbiased:4000000000/none",
    "rolling:2/dct:8/int4",
    "rolling:2/minmax8",
    "topk:0.5/dct:4/int8",
    "topk:0.3/uint8:7",
    "topk:0.5/meanstd2:20",
    "meanstd2:16",
    "meanstd8:5",
    "quantile4:64",
    "quantile8:9",
    "qsgd4:1",
];

/// Returns the codecs of the laws, each name of the help text with an argument, and the compositions.
fn codecs() -> Vec<String> {
    let values = [
        ("AMOUNT", "0.1"),
        ("KEPTofCHUNK", "5of40"),
        ("VALUE", "0.5"),
        ("STRIDE", "4"),
        ("SIDE", "8"),
        ("[:BLOCK]", ""),
        ("[xMULTIPLE]", "x2"),
        ("[/...]", "/int4:32"),
    ];
    let example = |name: &String| {
        values.iter().fold(name.clone(), |name, (argument, value)| name.replace(argument, value))
    };
    let named = names().iter().map(example).collect::<Vec<_>>();
    let mut codecs: Vec<String> =
        CODECS.into_iter().chain(COMPOSED).map(str::to_owned).chain(named).collect();
    codecs.sort_unstable();
    codecs.dedup();
    codecs
}

/// Returns a vector of a few kinds of elements, most of them near the largest number.
fn vector(seed: u64, len: usize) -> Vec<f32> {
    let rng = Philox::new(77, seed);
    let [kinds, first, signs, near] = rng.block(u64::MAX);
    let element = |i: usize| {
        let [kind, bits, sign, _] = rng.block(i as u64);
        let magnitude = match (first + kind % (1 + kinds % 12)) % 12 {
            0 | 1 => f32::MAX,
            2 | 3 => f32::from_bits(f32::MAX.to_bits() - (bits >> [9, 12, 16, 31][near as usize % 4])),
            4 => 1e38,
            5 => 2e38,
            6 => 8.5e37,
            7 => f32::from_bits(bits & 0x007f_ffff),
            8 => f32::from_bits(1),
            9 => 0.0,
            10 => 1.0,
            _ => f32::from_bits(bits % f32::INFINITY.to_bits()),
        };
        let negative = match signs % 3 {
            0 => false,
            1 => i % 2 == 1,
            _ => sign % 2 == 1,
        };
        if negative { -magnitude } else { magnitude }
    };
    (0..len).map(element).collect()
}

fn vectors() -> impl Iterator<Item = (u64, Vec<f32>)> {
    const LENGTHS: [usize; 12] = [1, 2, 3, 7, 31, 64, 65, 127, 256, 300, 1000, 4100];
    (0..240).map(|seed| (seed, vector(seed, LENGTHS[seed as usize % LENGTHS.len()])))
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// Decodes `p` by a new codec and checks that the values are finite.
fn decoded(name: &str, p: &Payload, len: usize) -> Vec<f32> {
    let mut out = vec![f32::NAN; len];
    assert_eq!(parse(name).unwrap().decompress(p.view(), &mut out), Ok(()), "{name}");
    assert!(out.iter().all(|value| value.is_finite()), "{name}");
    out
}

/// Returns true if the codec can reject a finite vector. Only transforms and unbiased masks can overflow.
fn may_refuse(name: &str) -> bool {
    name.contains("dct") || name.contains("unbiased")
}

#[test]
fn every_finite_vector_is_decoded_or_refused_by_index() {
    let (mut refused, mut taken) = (0, 0);
    for name in codecs() {
        let mut codec = parse(&name).unwrap();
        for (seed, x) in vectors() {
            let (key, mut p) = (RoundKey { seed, ..RoundKey::default() }, Payload::new());
            match codec.compress(&x, key, &mut p) {
                Ok(()) => {
                    decoded(&name, &p, x.len());
                    taken += u32::from(may_refuse(&name));
                }
                Err(CompressError::Overflow { index, value, .. }) => {
                    assert_eq!(value.to_bits(), x[index].to_bits(), "{name}, seed {seed}");
                    assert!(value.abs() > 1e26, "{name}: {value:e} is not large");
                    assert!(p.as_bytes().is_empty() && may_refuse(&name), "{name}, seed {seed}");
                    refused += 1;
                }
                Err(error) => panic!("{name}, seed {seed}: {error}"),
            }
        }
    }
    assert!(refused > 500 && taken > 500, "{refused} {taken}");
}

#[test]
fn what_is_lost_of_a_finite_vector_is_finite_or_refused_by_index() {
    let mut refused = 0;
    for name in codecs().iter().filter(|name| !name.starts_with("unbiased")) {
        let mut codec = name.parse::<CodecSpec>().unwrap().build_memoryless();
        for (seed, x) in vectors() {
            let key = RoundKey { seed, ..RoundKey::default() };
            for e in [vec![0.0; x.len()], vector(seed + 1000, x.len())] {
                let sums: Vec<f32> = x.iter().zip(&e).map(|(x, e)| x + e).collect();
                let (mut next, mut p) = (vec![f32::NAN; x.len()], Payload::new());
                match codec.compress_residual(&x, &e, &mut next, key, &mut p) {
                    Ok(()) => {
                        let sent = decoded(name, &p, x.len());
                        let lost: Vec<f32> = sums.iter().zip(sent).map(|(sum, sent)| sum - sent).collect();
                        assert!(next.iter().all(|lost| lost.is_finite()), "{name}, seed {seed}");
                        assert!(next.iter().zip(lost).all(|(a, b)| *a == b), "{name}, seed {seed}");
                    }
                    Err(CompressError::NonFinite { index, value }) => {
                        assert_eq!(Some(index), sums.iter().position(|sum| !sum.is_finite()), "{name}");
                        assert_eq!(value.to_bits(), sums[index].to_bits(), "{name}");
                    }
                    Err(CompressError::Overflow { index, value, .. }) => {
                        assert_eq!(value.to_bits(), sums[index].to_bits(), "{name}, seed {seed}");
                        assert!(p.as_bytes().is_empty());
                        refused += 1;
                    }
                    Err(error) => panic!("{name}, seed {seed}: {error}"),
                }
            }
        }
    }
    assert!(refused > 500, "{refused}");
}

/// A rejected vector leaves the residual unchanged, whether it was committed or not.
#[test]
fn a_refused_vector_leaves_the_residual() {
    let x = vec![1.5_f32; 300];
    for name in [
        "dct:8/int4+ef",
        "dct:8+ef",
        "uint8+ef",
        "uint3:7+ef",
        "topk:0.3/uint8:7+ef",
        "rolling:2/dct:8/int4+ef",
    ] {
        let tiny: Vec<f32> = (0..300).map(|i| (i as f32).sin()).collect();
        let too_large: Vec<f32> = (0..300).map(|i| if i % 3 == 0 { f32::MAX } else { f32::MIN }).collect();
        let (mut codec, mut p) = (ErrorFeedback::new(spec(name).build_memoryless()), Payload::new());
        codec.compress(&tiny, RoundKey::default(), &mut p).unwrap();
        codec.commit();
        let committed = bits(codec.residual());
        let error = codec.compress(&too_large, RoundKey::default(), &mut p).unwrap_err();
        assert!(error.is_value_error() && p.as_bytes().is_empty(), "{name}: {error}");
        assert_eq!(bits(codec.residual()), committed, "{name}");
        codec.commit();
        assert_eq!(bits(codec.residual()), committed, "{name}");
        codec.compress(&x, RoundKey::default(), &mut p).unwrap();
        let latest = bits(codec.residual());
        codec.compress(&too_large, RoundKey::default(), &mut p).unwrap_err();
        assert_eq!(bits(codec.residual()), latest, "{name}");
        codec.rollback();
        assert_eq!(bits(codec.residual()), committed, "{name}");
    }
}

fn spec(name: &str) -> CodecSpec {
    name.parse().unwrap()
}

#[test]
fn a_refusal_says_what_is_too_large() {
    let refusal = |codec: &mut dyn Compressor, x: &[f32]| {
        codec.compress(x, RoundKey::default(), &mut Payload::new()).unwrap_err().to_string()
    };
    let element = "100000000000000000000000000000000000000";
    assert_eq!(
        refusal(&mut *parse("dct:8").unwrap(), &[1e38; 64]),
        format!("element 0 is {element}, and the transform of its square is beyond the range of f32")
    );
    let found = refusal(&mut *parse("unbiased:10").unwrap(), &[1e38; 10]);
    let wanted = format!("is {element}, and its product with the mask's stride is beyond the range of f32");
    assert!(found.ends_with(&wanted), "{found}");
    let mut one = [0.0; 64];
    one[9] = f32::MAX;
    let found = refusal(&mut *parse("dct:8/int4").unwrap(), &one);
    assert!(found.ends_with("and the decoded value of its square is beyond the range of f32"), "{found}");
    assert!(found.starts_with("element 9 is 34028"), "{found}");
    let found = refusal(&mut *parse("uint8+ef").unwrap(), &[1.0, f32::MIN, f32::MAX]);
    assert!(found.starts_with("element 2 is 34028") && found.contains("its compression error"), "{found}");
}

/// An error of a nested codec names the index in the outer vector.
#[test]
fn a_refusal_within_a_composition_names_the_outer_element() {
    let refusal = |codec: &mut dyn Compressor, x: &[f32]| match codec.compress(
        x,
        RoundKey { round: 1, ..RoundKey::default() },
        &mut Payload::new(),
    ) {
        Err(CompressError::Overflow { index, value, .. }) => (index, value),
        other => panic!("{other:?}"),
    };
    let mut x = vec![0.5_f32; 400];
    x[101..].iter_mut().step_by(2).for_each(|x| *x = 1e38);
    x[301] = -2e38;
    // A mask takes the odd elements, and 64 of them make a square.
    let mask = Mask::one_in(Pattern::Rolling, 2);
    assert_eq!(refusal(&mut Masked::new(mask, Dct::new(8, F32::new()).unwrap()), &x), (129, 1e38));
    let top = Select::Largest(Amount::count(64));
    assert_eq!(refusal(&mut Sparse::new(top, Dct::new(8, F32::new()).unwrap()).unwrap(), &x), (301, -2e38));
    let (index, value) = refusal(&mut Masked::unbiased(4, Masked::unbiased(3, F32::new())), &x);
    assert_eq!((index > 100, value), (true, x[index]));
    let (index, value) = refusal(&mut Dct::new(8, Masked::unbiased(1 << 20, F32::new())).unwrap(), &x);
    assert_eq!((index > 100, value), (true, x[index]));
}

#[test]
fn a_link_refuses_by_the_index_of_its_input() {
    // Positions have three channels; the element is at position 40, channel 1.
    let (positions, channels, at) = (64, 3, 40 * 3 + 1);
    let mut x = vec![0.25_f32; positions * channels];
    let mut payload = Payload::new();
    let mut direct = Direct::per_channel(Int8::new(64).unwrap(), x.len(), channels).unwrap();
    x[at] = f32::NAN;
    let error = direct.encode(&[1], &x, RoundKey::default(), &mut payload).unwrap_err();
    assert!(matches!(error, CompressError::NonFinite { index, .. } if index == at), "{error}");
    x[at] = f32::MAX;
    let mut direct =
        Direct::per_channel(Dct::new(8, Int4::new(64).unwrap()).unwrap(), x.len(), channels).unwrap();
    let error = direct.encode(&[1], &x, RoundKey::default(), &mut payload).unwrap_err();
    assert!(
        matches!(error, CompressError::Overflow { index, value: f32::MAX, .. } if index == at),
        "{error}"
    );

    let codec = Dct::new(8, Int4::new(64).unwrap()).unwrap();
    let mut link = AqSgd::per_channel(codec, MemoryStore::new(x.len()), channels).unwrap();
    let small = vec![1.0; x.len()];
    link.encode(&[5], &small, RoundKey::default(), &mut payload).unwrap();
    // Of three samples, only the middle one has a copy and is sent as a change.
    let all: Vec<f32> = [&small[..], &x, &small].concat();
    let error = link.encode(&[4, 5, 6], &all, RoundKey::default(), &mut payload).unwrap_err();
    let wanted = small.len() + at;
    assert!(matches!(error, CompressError::Overflow { index, .. } if index == wanted), "{error}");
    assert!(payload.as_bytes().is_empty());
}

#[test]
fn what_methods_remember_stays_finite() {
    let n = 300;
    let sizes = [1.0, 1e38, f32::MAX, -f32::MAX, 2e38, f32::MAX, 1e-3];
    let steps: Vec<Vec<f32>> = sizes.iter().map(|size| vec![*size; n]).collect();
    let mut payload = Payload::new();
    let top = || Sparse::new(Select::Largest(Amount::count(3)), F32::new()).unwrap();
    let mut refused = 0;
    let mut momentum = MomentumCorrection::new(top(), 0.9).unwrap();
    let mut plain = MomentumCorrection::new(F32::new(), 1.0).unwrap();
    let mut ef21 = ErrorFeedback::ef21(Uint8::new(64).unwrap());
    for (round, x) in steps.iter().chain([&vector(31, n), &vector(50, n), &vector(77, n)]).enumerate() {
        let key = RoundKey { round: round as u64, ..RoundKey::default() };
        for codec in [&mut momentum as &mut dyn Compressor, &mut plain, &mut ef21] {
            match codec.compress(x, key, &mut payload) {
                Ok(()) => {}
                Err(error) => {
                    assert!(error.is_value_error() && payload.as_bytes().is_empty(), "{error}");
                    refused += 1;
                }
            }
            codec.commit();
        }
        for memory in [momentum.memory().0, momentum.memory().1, plain.memory().0, plain.memory().1] {
            assert!(memory.iter().all(|value| value.is_finite()), "round {round}");
        }
        assert!(ef21.residual().iter().all(|value| value.is_finite()), "round {round}");
    }
    assert!(refused > 3, "{refused}");
}
