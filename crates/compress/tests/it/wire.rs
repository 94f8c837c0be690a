//! Snapshots of the bytes, computed from WIRE.md by an independent program (Python's `struct` and `zlib`). If a
//! snapshot changes, the wire format has changed.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

use farflung_compress::link::{AqSgd, LinkCodec, MemoryStore};
use farflung_compress::{
    Amount, CodecId, CompressError, Compressor, F32, IndexCoding, Int8, Payload, PayloadRef, RoundKey,
    Select, Sparse, parse,
};

const X: [f32; 5] = [0.0, 1.0, -2.0, 0.5, std::f32::consts::PI];

const Y: [f32; 20] = [0., 0., 0., -2., 0., 0., 0., 0., 0., 0., 0., 1.5, 0.25, 0., 0., 0., 0., 0., 0., -0.5];

const Z: [f32; 20] = [-1., 0., 0., -2., 0., 0., 0., 0., 0., 0., 0., 1.5, 0.25, 0., 0., 0., 0., 0., 0., 0.];

/// The numbers 1 to 20, so that each value identifies its element.
const W: [f32; 20] =
    [1., 2., 3., 4., 5., 6., 7., 8., 9., 10., 11., 12., 13., 14., 15., 16., 17., 18., 19., 20.];

/// Values whose differences exceed the largest number.
const SPREAD: [f32; 8] = [f32::MAX, -f32::MAX / 3., 1., f32::MAX / 2., -1e38, 0., 3e38, 2e38];

/// Codec, input and payload in hex. The specification fixes the layout of a codebook, but each encoder chooses
/// its values.
const SNAPSHOTS: &[(&str, &[f32], &str)] = &[
    (
        "none",
        &X,
        "6666637a01010000050000000000000014000000000000007319415c000000000000803f000000c00000003fdb0f4940",
    ),
    ("f16", &X, "6666637a0102000005000000000000000a00000000000000a33ca36b0000003c00c000384842"),
    ("bf16", &X, "6666637a0103000005000000000000000a00000000000000283c2d980000803f00c0003f4940"),
    ("int8:4", &X, "6666637a0105000005000000000000000d0000000000000081d7db8904000008823c003f8220cb3c7f"),
    ("none", &[], "6666637a0101000000000000000000000000000000000000f92ec401"),
    ("int8", &[], "6666637a0105000000000000000000000400000000000000eeb72b3c00010008"),
    ("int8:2", &[0.0; 3], "6666637a0105000003000000000000000b00000000000000071175820200000800000000000000"),
    ("int4:4", &X, "6666637a0105000005000000000000000b000000000000004ee3b36f04000004933e3029e63e07"),
    ("int3", &X, "6666637a0105000005000000000000000900000000000000c95c4d0800010003873f240304"),
    ("int2:2", &X, "6666637a0105000005000000000000000d000000000000008686946a02000002803f040040034a4001"),
    (
        "uint4:3",
        &X,
        "6666637a01060000050000000000000013000000000000004b3b841d03000004000000c04d3efa000000003f353ef0",
    ),
    ("sign:4", &X, "6666637a0107000005000000000000000e0000000000000011cfb258040000000000603f04db0f494000"),
    ("sign-l2", &X, "6666637a01070000050000000000000009000000000000007551e4d000100000ab95de3f04"),
    ("e4m3:4", &X, "6666637a0108000005000000000000000d00000000000000af55d65a04000043933b0076fe6ee63b7e"),
    ("e5m2", &X, "6666637a0108000005000000000000000b00000000000000e638dc0f0001005266380074f8707b"),
    ("e3m0", &X, "6666637a010800000500000000000000090000000000000095f4912d000100304a40504e07"),
    (
        "minmax8:5",
        &X,
        "6666637a010a000005000000000000002900000000000000a244187b05000000000000c0db0f49400000000000000000000000000000000000000000000000006395007cff",
    ),
    (
        "topk:4",
        &Y,
        "6666637a0110000014000000000000002600000000000000190bdacf0400000002000000140000000400000003010100c621000000c00000c03f0000803e000000bf",
    ),
    (
        "topk:2of10/f16",
        &Z,
        "6666637a0110000014000000000000001e000000000000003bd2791704000000020000000a0000000200000000040200302100bc00c0003e0034",
    ),
    ("natural", &X, "6666637a0109000005000000000000000a00000000000000144f2a2d00100000007f807e8104"),
    (
        "meanstd2",
        &X,
        "6666637a010b0000050000000000000016000000000000007130e1b80000010200000000000000c00000003fdb0f49409a03",
    ),
    (
        "quantile4",
        &X,
        "6666637a010b000005000000000000004700000000000000e8c7584500000104000000000000000000000000000000c000000000000000000000000000000000000000000000003f00000000000000000000803f0000000000000000db0f4940c6930f",
    ),
    (
        "rolling:3",
        &W,
        "6666637a01110000140000000000000040000000000000001c548a5c00010000030000000700000000000000000000000000000000000000f4ce97ccddfc3bfa0000803f000080400000e04000002041000050410000804100009841",
    ),
    (
        "permuted:3/f16",
        &W,
        "6666637a011100001400000000000000320000000000000087a3481001020000030000000700000000000000000000000000000000000000f4ce97ccddfc3bfa0040004600480049804b004cc04c",
    ),
    (
        "random:3/f16",
        &W,
        "6666637a0111000014000000000000003200000000000000d58f6a4702020000030000000700000000000000000000000000000000000000f4ce97ccddfc3bfa0040004600480049804b004cc04c",
    ),
    ("dct:2/f16", &X, "6666637a0112000005000000000000000e000000000000003b2670db0202000000b400bf003d003a4842"),
    (
        "dct:2",
        &X,
        "6666637a01120000050000000000000018000000000000003f994a3e02010000000080beffffdfbfffff9f3fffff3f3fdb0f4940",
    ),
    // The scale would overflow and is reduced; the factor follows from the reduced scale.
    (
        "uint8:4",
        &SPREAD,
        "6666637a01060000080000000000000018000000000000003f976adf04000008aaaaaafe807bff0055d5997696fe807b004bffe2",
    ),
    (
        "uint4:8",
        &SPREAD,
        "6666637a0106000008000000000000000e0000000000000036b2754e08000004aaaaaafe887d0fd551ef",
    ),
    (
        "uint2:3",
        &SPREAD,
        "6666637a010600000800000000000000190000000000000088dc185903000002aaaaaafeaa7e13997696fe887e139976167fc97d03",
    ),
    (
        "dct:3",
        &W,
        "6666637a01120000140000000000000054000000000000001ce5cfbe03010000feff6f4170c41cc000000000a826ebc0000000b5000080b43acd13b438dc2c99ec055134000028427cc41cc000000000a826ebc000000000000000003acd1335f304b5b4ec0551b4000098410000a041",
    ),
    (
        "dct:4",
        &W,
        "6666637a0112000014000000000000005400000000000000b589d527040100000000084292bf8ec0000000001051a2be92bf8ec1000000b50000000000000000000000000000000000000000000000002251a2bf000020b4000080340000a0340000884100009041000098410000a041",
    ),
];

/// Payloads of 300 elements: their length and their checksum.
const LONG: &[(&str, usize, [u8; 4])] = &[
    ("int8", 336, [0x02, 0x8e, 0x7f, 0x54]),
    ("int4:300", 184, [0x8a, 0xcc, 0xdb, 0x6f]),
    ("int3:300", 147, [0xb8, 0xb1, 0xe8, 0x29]),
    ("int2:300", 109, [0x96, 0x82, 0x1c, 0x83]),
    ("uint4:300", 188, [0x46, 0x3e, 0x17, 0xa2]),
    ("uint3:300", 151, [0x97, 0xa7, 0x40, 0x66]),
    ("sign", 74, [0xa6, 0xce, 0xd4, 0xaa]),
    ("e4m3:100", 338, [0xbd, 0x29, 0x89, 0xa6]),
    ("e3m0:300", 184, [0xf8, 0x1b, 0x83, 0x7a]),
    ("minmax8:77", 460, [0x71, 0x10, 0xf3, 0xb9]),
    ("sign-l2", 74, [0x51, 0x06, 0x08, 0xf7]),
];

#[test]
fn long_snapshots() {
    let x: Vec<f32> = (0..300).map(|i| (i * 37 % 101 - 50) as f32 / 8.0).collect();
    for (name, len, checksum) in LONG {
        let bytes = encode(name, &x);
        assert_eq!((bytes.len(), &bytes[24..28]), (*len, &checksum[..]), "{name}");
    }
}

fn encode(name: &str, x: &[f32]) -> Vec<u8> {
    let mut payload = Payload::new();
    parse(name).unwrap().compress(x, RoundKey::default(), &mut payload).unwrap();
    payload.into_bytes()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |hex, b| hex + &format!("{b:02x}"))
}

#[test]
fn snapshots() {
    for (name, x, bytes) in SNAPSHOTS.iter().copied() {
        assert_eq!(hex(&encode(name, x)), bytes, "{name}");
        assert_eq!(
            hex(&encode(&format!("{name}+ef"), x)),
            bytes,
            "feedback adds nothing to the wire: {name}"
        );
    }
}

#[test]
fn snapshots_of_every_coding_of_indices() {
    let snapshots = [
        (
            IndexCoding::Fixed(7),
            "6666637a0110000014000000000000002800000000000000b0022a47040000000400000014000000040000000007010083056302000000c00000c03f0000803e000000bf",
        ),
        (
            IndexCoding::Bitmask,
            "6666637a0110000014000000000000002700000000000000c57d62240400000003000000140000000400000001000100081808000000c00000c03f0000803e000000bf",
        ),
        (
            IndexCoding::Varint,
            "6666637a01100000140000000000000028000000000000003122a889040000000400000014000000040000000200010003070006000000c00000c03f0000803e000000bf",
        ),
        (
            IndexCoding::Rice,
            "6666637a0110000014000000000000002600000000000000190bdacf0400000002000000140000000400000003010100c621000000c00000c03f0000803e000000bf",
        ),
    ];
    for (coding, bytes) in snapshots {
        let mut payload = Payload::new();
        let top = Sparse::new(Select::Largest(Amount::count(4)), F32::new()).unwrap();
        top.indices(coding).compress(&Y, RoundKey::default(), &mut payload).unwrap();
        assert_eq!(hex(payload.as_bytes()), bytes, "{coding:?}");
    }
}

/// Apart from the other snapshots, which are also checked with feedback: an unbiased mask rejects it.
#[test]
fn snapshot_of_an_unbiased_mask() {
    let bytes = "6666637a0111000014000000000000004000000000000000736e783202010000030000000700000000000000000000000000000000000000f4ce97ccddfc3bfa0000c040000090410000c0410000f041000034420000404200006442";
    assert_eq!(hex(&encode("unbiased:3", &W)), bytes);
}

#[test]
fn snapshots_of_a_link() {
    let mut link = AqSgd::new(Int8::new(16).unwrap(), MemoryStore::new(5));
    let mut payload = Payload::new();
    link.encode(&[7], &X, RoundKey::default(), &mut payload).unwrap();
    let in_full = "6666637a0118000005000000000000001a0000000000000017f4daaf0100000005000000000000000000003c00c00038484210000008";
    assert_eq!(hex(payload.as_bytes()), in_full);
    // The sample with a copy grows by a quarter; the other one is sent in full.
    let both: Vec<f32> = X.iter().map(|x| x * 1.25).chain(X).collect();
    link.encode(&[7, 9], &both, RoundKey::default(), &mut payload).unwrap();
    let change = "6666637a011800000a000000000000002500000000000000c00c16270200000005000000121e56ef000000000000003c00c00038484210000008cb3b0028af147f";
    assert_eq!(hex(payload.as_bytes()), change);
}

/// Packed by hand, using only literals, since the output of a packer's library may change.
#[test]
#[cfg(all(feature = "lz4", feature = "zstd"))]
fn packed_bodies_are_read() {
    let lz4 = "6666637a0120000005000000000000001a0000000000000046adb7c702010000f005000000000000803f000000c00000003fdb0f4940";
    let zstd = "6666637a0120000005000000000000002100000000000000ad8e30680101000028b52ffd2014a10000000000000000803f000000c00000003fdb0f4940";
    for (name, bytes) in [("none+lz4", lz4), ("none+zstd", zstd)] {
        let bytes: Vec<u8> =
            (0..bytes.len()).step_by(2).map(|i| u8::from_str_radix(&bytes[i..i + 2], 16).unwrap()).collect();
        let mut out = [0.0; 5];
        parse(name).unwrap().decompress(PayloadRef::parse(&bytes).unwrap(), &mut out).unwrap();
        assert_eq!(out.map(f32::to_bits), X.map(f32::to_bits), "{name}");
    }
}

#[test]
fn every_field_of_the_header_is_checked() {
    let good = encode("f16", &X);
    let refused = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = good.clone();
        change(&mut bytes);
        PayloadRef::parse(&bytes).unwrap_err()
    };
    assert_eq!(refused(&|b| b.clear()), CompressError::FrameLength { wanted: 28, found: 0 });
    assert_eq!(refused(&|b| b.truncate(27)), CompressError::FrameLength { wanted: 28, found: 27 });
    assert_eq!(refused(&|b| b[0] = b'g'), CompressError::Magic { found: *b"gfcz", wanted: *b"ffcz" });
    assert_eq!(refused(&|b| b[4] = 2), CompressError::Version { found: 2, wanted: 1 });
    assert_eq!(refused(&|b| b[4] = 0), CompressError::Version { found: 0, wanted: 1 });
    assert_eq!(refused(&|b| b[7] = 1), CompressError::Flags { found: 256 });
    assert_eq!(refused(&|b| b.push(0)), CompressError::FrameLength { wanted: 38, found: 39 });
    assert_eq!(refused(&|b| b.truncate(37)), CompressError::FrameLength { wanted: 38, found: 37 });
    let endless = refused(&|b| b[16..24].fill(0xff));
    assert_eq!(endless, CompressError::FrameLength { wanted: u64::MAX, found: 38 });
    // A change of the codec, the count, the checksum or the body does not match the checksum.
    for at in [5, 8, 15].into_iter().chain(24..good.len()) {
        let error = refused(&|b| b[at] ^= 0x10);
        assert!(matches!(error, CompressError::Checksum { .. }), "{at}: {error}");
    }
}

#[test]
fn a_decoder_refuses_what_is_not_its_own_and_names_both() {
    let bytes = encode("f16", &X);
    let p = PayloadRef::parse(&bytes).unwrap();
    assert_eq!((p.codec(), p.count(), p.body().len()), (CodecId::F16, 5, 10));
    let error = parse("bf16").unwrap().decompress(p, &mut [0.0; 5]).unwrap_err();
    assert_eq!(error, CompressError::WrongCodec { wanted: CodecId::BF16, found: CodecId::F16 });
    assert_eq!(error.to_string(), "the payload is of codec 2 (f16), not 3 (bf16)");
    let error = parse("f16").unwrap().decompress(p, &mut [0.0; 6]).unwrap_err();
    assert_eq!(error, CompressError::CountMismatch { wanted: 6, found: 5 });
    let empty = Payload::new();
    let error = parse("f16").unwrap().decompress(empty.view(), &mut []).unwrap_err();
    assert_eq!(error, CompressError::WrongCodec { wanted: CodecId::F16, found: CodecId(0) });
}

/// Overwrites bytes of a payload and makes its checksum fit.
fn forge(mut bytes: Vec<u8>, at: usize, with: &[u8]) -> Vec<u8> {
    bytes[at..at + with.len()].copy_from_slice(with);
    let mut crc = crc32fast::Hasher::new();
    crc.update(&bytes[..24]);
    crc.update(&bytes[28..]);
    let crc = crc.finalize();
    bytes[24..28].copy_from_slice(&crc.to_le_bytes());
    bytes
}

#[test]
fn values_that_no_encoder_writes_are_refused() {
    let decode = |name: &str, bytes: &[u8], n: usize| {
        parse(name).unwrap().decompress(PayloadRef::parse(bytes).unwrap(), &mut vec![0.0; n])
    };
    let f16 = encode("f16", &X);
    for code in [0x7c00_u16, 0xfc00, 0x7e01] {
        let error = decode("f16", &forge(f16.clone(), 28 + 6, &code.to_le_bytes()), 5).unwrap_err();
        assert_eq!(error, CompressError::Code { index: 3, code: u32::from(code) });
    }
    let error = decode("bf16", &forge(encode("bf16", &X), 28 + 8, &[0x80, 0x7f]), 5).unwrap_err();
    assert_eq!(error, CompressError::Code { index: 4, code: 0x7f80 });

    let int8 = encode("int8:4", &X);
    for block in [0_u32, (1 << 20) + 1] {
        let error =
            decode("int8", &forge(int8.clone(), 28, &(block | 8 << 24).to_le_bytes()), 5).unwrap_err();
        assert_eq!(error, CompressError::BlockSize { found: block, max: 1 << 20 });
    }
    let error = decode("int4", &int8, 5).unwrap_err();
    assert_eq!(error, CompressError::Parameter { codec: CodecId::INT, wanted: 4, found: 8 });
    let error = decode("int8", &forge(int8.clone(), 28, &[5]), 5).unwrap_err();
    assert_eq!(error, CompressError::BodyLength { codec: CodecId::INT, count: 5, wanted: 11, found: 13 });
    // The second block has a scale of two bytes and one code.
    for scale in [0x7f80_u16, 0xbf80, 0x8000, 0x7f7f, 0x0080] {
        let error = decode("int8", &forge(int8.clone(), 28 + 10, &scale.to_le_bytes()), 5).unwrap_err();
        let found = f32::from_bits(u32::from(scale) << 16);
        assert_eq!(error, CompressError::Scale { block: 1, found });
    }
    let nan = decode("int8", &forge(int8.clone(), 28 + 4, &[0xc0, 0x7f]), 5).unwrap_err();
    assert!(matches!(nan, CompressError::Scale { block: 0, .. }), "{nan}");
    let error = decode("int8", &forge(int8.clone(), 28 + 8, &[0x80]), 5).unwrap_err();
    assert_eq!(error, CompressError::Code { index: 2, code: 0x80 });
    let error = decode("int8", &forge(int8, 28 + 10, &[0; 2]), 5).unwrap_err();
    assert_eq!(error, CompressError::Code { index: 4, code: 0x7f }, "a code under scale 0");
    // Blocks of four codes and of one code of four bits: half a byte is padding.
    let error = decode("int4", &forge(encode("int4:4", &X), 28 + 10, &[0x17]), 5).unwrap_err();
    assert_eq!(error, CompressError::Padding { block: 1 });
    let error = decode("uint4", &forge(encode("uint4:3", &X), 28 + 4, &[0, 0, 0x80, 0x7f]), 5).unwrap_err();
    assert_eq!(error, CompressError::Scale { block: 0, found: f32::INFINITY });
    let error = decode("sign", &forge(encode("sign:4", &X), 28 + 4, &[1, 0, 0, 0]), 5).unwrap_err();
    assert_eq!(error, CompressError::Scale { block: 0, found: f32::from_bits(1) });
    let error = decode("minmax8", &forge(encode("minmax8", &X), 28 + 8, &[0, 0, 0xc0, 0x7f]), 5).unwrap_err();
    assert!(matches!(error, CompressError::Scale { block: 0, .. }), "{error}");
    assert_eq!(error.to_string(), "the header of block 0 is invalid: it holds NaN");
}
