//! The lossless stage: its payloads are never longer, and decode to the same values.
#![cfg(all(feature = "lz4", feature = "zstd"))]
#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

use farflung_base::Philox;
use farflung_compress::{CodecId, CompressError, Payload, PayloadRef, RoundKey, StateMap, parse};

fn normal(n: usize, stream: u64) -> Vec<f32> {
    let mut x = vec![0.0; n];
    Philox::new(17, stream).fill_normal(1.0, &mut x);
    x
}

fn encode(name: &str, x: &[f32]) -> Payload {
    let (mut codec, mut payload) = (parse(name).unwrap(), Payload::new());
    codec.compress(x, RoundKey::default(), &mut payload).unwrap();
    assert!(payload.as_bytes().len() <= codec.max_payload(x.len()), "{name}");
    payload
}

fn decode(name: &str, payload: &Payload, len: usize) -> Vec<u32> {
    let mut out = vec![f32::NAN; len];
    parse(name).unwrap().decompress(PayloadRef::parse(payload.as_bytes()).unwrap(), &mut out).unwrap();
    out.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn a_packed_payload_is_never_longer_and_says_the_same() {
    let mut smooth = normal(200_000, 1);
    smooth.iter_mut().enumerate().for_each(|(i, x)| *x *= (-(i as f32) / 2e4).exp());
    let vectors = [vec![], vec![1.5], vec![0.0; 5000], normal(3000, 2), smooth];
    for x in &vectors {
        for name in
            ["none", "f16", "int8", "int4:64+ef", "sign", "topk:0.1", "rolling:3/int4:8", "dct:8/int4"]
        {
            let plain = encode(name, x);
            for packing in ["zstd", "lz4"] {
                let packed_name = format!("{name}+{packing}");
                let packed = encode(&packed_name, x);
                assert!(packed.as_bytes().len() <= plain.as_bytes().len(), "{packed_name}");
                let shorter = packed.as_bytes().len() < plain.as_bytes().len();
                assert_eq!(packed.codec() == CodecId::PACKED, shorter, "{packed_name}");
                let wanted = decode(name, &plain, x.len());
                assert_eq!(decode(&packed_name, &packed, x.len()), wanted, "{packed_name}");
                // Payloads that are not packed are decoded too.
                assert_eq!(decode(&packed_name, &plain, x.len()), wanted, "{packed_name}");
            }
        }
    }
}

#[test]
fn packing_helps_where_it_can_and_is_left_out_where_it_cannot() {
    let zeros = encode("int8+zstd", &vec![0.0; 1 << 20]);
    assert!(zeros.as_bytes().len() < 1000, "{}", zeros.as_bytes().len());
    // Signs of noise have full entropy, so they cannot be packed.
    let x = normal(1 << 20, 3);
    for name in ["sign+zstd", "sign+lz4"] {
        assert_eq!(encode(name, &x), encode("sign", &x));
    }
    let (plain, packed) = (encode("int8", &x), encode("int8+zstd", &x));
    assert!(packed.as_bytes().len() * 100 < plain.as_bytes().len() * 97);
}

#[test]
fn a_bomb_is_refused_within_the_bound() {
    let bomb = encode("none+zstd", &vec![0.0; 1 << 20]);
    let mut bytes = bomb.as_bytes().to_vec();
    // The same body in a payload that says it holds a short vector.
    bytes[8..16].copy_from_slice(&64_u64.to_le_bytes());
    let mut crc = crc32fast::Hasher::new();
    crc.update(&bytes[..24]);
    crc.update(&bytes[28..]);
    let crc = crc.finalize();
    bytes[24..28].copy_from_slice(&crc.to_le_bytes());
    let p = PayloadRef::parse(&bytes).unwrap();
    let error = parse("none+zstd").unwrap().decompress(p, &mut [0.0; 64]).unwrap_err();
    assert!(matches!(error, CompressError::Packed { .. }), "{error}");
    assert_eq!(
        error.to_string(),
        "expected a payload packed by zstd, but it is damaged or unpacks to too many bytes"
    );
    let error = parse("none+lz4").unwrap().decompress(p, &mut [0.0; 64]).unwrap_err();
    assert_eq!(error.to_string(), "expected a payload packed by lz4, but it was packed by another packer");
    let error = parse("none").unwrap().decompress(p, &mut [0.0; 64]).unwrap_err();
    assert_eq!(error, CompressError::WrongCodec { wanted: CodecId::F32, found: CodecId::PACKED });
}

#[test]
fn feedback_under_the_last_stage_is_that_of_the_codec() {
    let (mut plain, mut packed) = (parse("int4:64+ef").unwrap(), parse("int4:64+ef+zstd").unwrap());
    let (mut a, mut b) = (Payload::new(), Payload::new());
    for round in 0..3 {
        let x = normal(1000, 10 + round);
        plain.compress(&x, RoundKey::default(), &mut a).unwrap();
        packed.compress(&x, RoundKey::default(), &mut b).unwrap();
        assert_eq!(decode("int4:64+ef+zstd", &b, 1000), decode("int4:64", &a, 1000));
        plain.commit();
        packed.commit();
    }
    let (mut one, mut other) = (StateMap::new(), StateMap::new());
    plain.save("", &mut one).unwrap();
    packed.save("", &mut other).unwrap();
    assert_eq!(one, other);
    assert_eq!(one.len(), 1);
}
