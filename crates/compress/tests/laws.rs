//! The laws that hold for every codec, over a table of all of them.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

use farflung_base::Philox;
use farflung_compress::{CompressError, Compressor, Payload, PayloadRef, RoundKey, parse};
use proptest::prelude::*;

const CODECS: [&str; 7] = ["none", "f16", "bf16", "int8", "int8:1", "int8:7", "int8:4096"];

/// The stated bound on the error of each element of `x`.
fn bounds(name: &str, x: &[f32]) -> Vec<f64> {
    let relative = |x: &f32, bits: i32| f64::from(x.abs()) * 2_f64.powi(-bits);
    match name {
        "none" => vec![0.0; x.len()],
        "f16" => {
            let excess = |x: &f32| (f64::from(x.abs()) - 65504.0).max(0.0);
            x.iter().map(|x| relative(x, 11).max(2_f64.powi(-25)).max(excess(x))).collect()
        }
        "bf16" => x.iter().map(|x| relative(x, 8).max(2_f64.powi(-134))).collect(),
        _ => {
            let block = name.strip_prefix("int8:").map_or(256, |b| b.parse().unwrap());
            let of_block = |x: &[f32]| {
                let max = x.iter().fold(0.0_f32, |m, x| m.max(x.abs()));
                let bound = (0.50004 * f64::from(max) / 127.0).max(2_f64.powi(-118));
                vec![bound; x.len()]
            };
            x.chunks(block).flat_map(of_block).collect()
        }
    }
}

fn check_round_trip(name: &str, x: &[f32]) {
    let mut codec = parse(name).unwrap();
    let mut payload = Payload::new();
    codec.compress(x, RoundKey::default(), &mut payload).unwrap();
    assert_eq!(payload.as_bytes().len(), codec.max_payload(x.len()), "{name}");
    let received = PayloadRef::parse(payload.as_bytes()).unwrap();
    assert_eq!(received, payload.view());
    let mut decoded = vec![f32::NAN; x.len()];
    codec.decompress(received, &mut decoded).unwrap();
    for (i, bound) in bounds(name, x).into_iter().enumerate() {
        let error = (f64::from(x[i]) - f64::from(decoded[i])).abs();
        assert!(error <= bound, "{name}: {} became {} at {i}, beyond {bound:e}", x[i], decoded[i]);
    }
}

fn normal(n: usize, std: f32, stream: u64) -> Vec<f32> {
    let mut x = vec![0.0; n];
    Philox::new(11, stream).fill_normal(std, &mut x);
    x
}

#[test]
fn errors_are_within_the_stated_bounds() {
    let tiny = f32::from_bits(1);
    let special = [0.0, -0.0, tiny, -tiny, f32::MIN_POSITIVE, 1.0, -65519.0, 65520.0, f32::MAX, f32::MIN];
    for name in CODECS {
        for n in [0, 1, 2, 7, 31, 255, 256, 257, 2047, 2049, 10_001] {
            for std in [1.0, 1e-3, 1e-20, 1e-39, 1e30] {
                check_round_trip(name, &normal(n, std, n as u64));
            }
        }
        check_round_trip(name, &special);
        for x in special {
            check_round_trip(name, &[x]);
        }
        check_round_trip(name, &[0.0; 1000]);
        check_round_trip(name, &[f32::MAX; 1000]);
        check_round_trip(name, &[tiny; 1000]);
    }
}

#[test]
fn zeros_decode_as_zeros_without_a_sign() {
    for name in CODECS {
        let (mut codec, mut payload) = (parse(name).unwrap(), Payload::new());
        codec.compress(&[0.0; 300], RoundKey::default(), &mut payload).unwrap();
        let mut decoded = [1.0_f32; 300];
        codec.decompress(payload.view(), &mut decoded).unwrap();
        assert!(decoded.iter().all(|d| d.to_bits() == 0), "{name}");
    }
}

#[test]
fn what_is_not_finite_is_refused_and_named() {
    for name in CODECS {
        for value in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for index in [0, 6, 2048, 4099] {
                let mut x = vec![1.0; 4100];
                x[index] = value;
                for name in [name.to_owned(), format!("{name}+ef")] {
                    let (mut codec, mut payload) = (parse(&name).unwrap(), Payload::new());
                    let result = codec.compress(&x, RoundKey::default(), &mut payload);
                    if name == "none" {
                        let mut decoded = vec![0.0; x.len()];
                        codec.decompress(payload.view(), &mut decoded).unwrap();
                        assert_eq!(decoded[index].to_bits(), value.to_bits(), "passed bit by bit");
                        continue;
                    }
                    let Err(CompressError::NonFinite { index: at, value: found }) = result else {
                        unreachable!("{name} took {value}: {result:?}");
                    };
                    assert_eq!((at, found.is_nan()), (index, value.is_nan()), "{name}");
                    assert!(payload.as_bytes().is_empty(), "{name}");
                }
            }
        }
    }
}

/// A codec without its fused `compress_residual`.
#[derive(Debug)]
struct Unfused(Box<dyn Compressor>);

impl farflung_compress::State for Unfused {}

impl Compressor for Unfused {
    fn compress(&mut self, x: &[f32], key: RoundKey, out: &mut Payload) -> Result<(), CompressError> {
        self.0.compress(x, key, out)
    }

    fn decompress(&self, p: PayloadRef<'_>, out: &mut [f32]) -> Result<(), CompressError> {
        self.0.decompress(p, out)
    }

    fn max_payload(&self, len: usize) -> usize {
        self.0.max_payload(len)
    }
}

#[test]
fn the_fused_residual_is_the_plain_one() {
    for name in CODECS {
        for n in [0, 1, 300, 5001] {
            let (x, e) = (normal(n, 1.0, 1), normal(n, 0.01, 2));
            let (mut fused, mut plain) = (parse(name).unwrap(), Unfused(parse(name).unwrap()));
            let (mut a, mut b) = (vec![f32::NAN; n], vec![f32::NAN; n]);
            let (mut p, mut q) = (Payload::new(), Payload::new());
            fused.compress_residual(&x, &e, &mut a, RoundKey::default(), &mut p).unwrap();
            plain.compress_residual(&x, &e, &mut b, RoundKey::default(), &mut q).unwrap();
            assert_eq!(p, q, "{name}");
            assert_eq!(a, b, "{name}");
        }
        let error = parse(name).unwrap().compress_residual(
            &[1.0; 3],
            &[0.0; 2],
            &mut [0.0; 3],
            RoundKey::default(),
            &mut Payload::new(),
        );
        let wanted = CompressError::LengthMismatch { what: "the residual", wanted: 3, found: 2 };
        assert_eq!(error, Err(wanted), "{name}");
    }
}

#[test]
fn the_table_of_the_readme() {
    let readme = include_str!("../README.md");
    for name in ["none", "f16", "bf16", "int8:2048", "int8", "int8:64"] {
        let bytes = parse(name).unwrap().max_payload(1 << 20);
        let digits = bytes.to_string();
        let grouped = format!("{},{},{}", &digits[..1], &digits[1..4], &digits[4..]);
        let ratio = format!("{:.2}", f64::from(1 << 22) / bytes as f64);
        let row = readme.lines().find(|line| line.starts_with(&format!("| `{name}` |"))).unwrap();
        assert!(row.contains(&format!("| {grouped} | {ratio} |")), "{row}: {grouped}, {ratio}");
    }
    assert_eq!(parse("none").unwrap().max_payload(usize::MAX), usize::MAX);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_finite_vector_round_trips(
        bits in prop::collection::vec(any::<u32>(), 0..600),
        codec in 0..CODECS.len(),
    ) {
        // The exponents of infinity and NaN become others.
        let x: Vec<f32> = bits.iter().map(|b| f32::from_bits(*b)).map(|x| if x.is_finite() { x } else { 1.0 }).collect();
        check_round_trip(CODECS[codec], &x);
    }

    #[test]
    fn any_bytes_are_parsed_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        prop_assert!(PayloadRef::parse(&bytes).is_err());
    }
}
