//! The bytes themselves. The snapshots were computed from WIRE.md by an independent program (Python's `struct` and
//! `zlib`); a change of one is a change of the wire format.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

use farflung_compress::{CodecId, CompressError, Payload, PayloadRef, RoundKey, parse};

const X: [f32; 5] = [0.0, 1.0, -2.0, 0.5, std::f32::consts::PI];

const SNAPSHOTS: [(&str, &[f32], &str); 7] = [
    (
        "none",
        &X,
        "6666637a01010000050000000000000014000000000000007319415c000000000000803f000000c00000003fdb0f4940",
    ),
    ("f16", &X, "6666637a0102000005000000000000000a00000000000000a33ca36b0000003c00c000384842"),
    ("bf16", &X, "6666637a0103000005000000000000000a00000000000000283c2d980000803f00c0003f4940"),
    (
        "int8:4",
        &X,
        "6666637a01040000050000000000000011000000000000009628c8a8040000000402813c0040812025a5ca3c7f",
    ),
    ("none", &[], "6666637a0101000000000000000000000000000000000000f92ec401"),
    ("int8", &[], "6666637a010400000000000000000000040000000000000008d583a900010000"),
    (
        "int8:2",
        &[0.0; 3],
        "6666637a0104000003000000000000000f0000000000000006c75bd2020000000000000000000000000000",
    ),
];

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
    for (name, x, bytes) in SNAPSHOTS {
        assert_eq!(hex(&encode(name, x)), bytes, "{name}");
        assert_eq!(
            hex(&encode(&format!("{name}+ef"), x)),
            bytes,
            "feedback adds nothing to the wire: {name}"
        );
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
    // The codec, the count, the checksum and each bit of the body are under the checksum.
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

/// `bytes` with another body byte and a checksum that fits.
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
    for block in [0, (1 << 20) + 1, u32::MAX] {
        let error = decode("int8", &forge(int8.clone(), 28, &block.to_le_bytes()), 5).unwrap_err();
        assert_eq!(error, CompressError::BlockSize { found: block, max: 1 << 20 });
    }
    let error = decode("int8", &forge(int8.clone(), 28, &5_u32.to_le_bytes()), 5).unwrap_err();
    assert_eq!(
        error,
        CompressError::BodyLength { codec: CodecId::INT8_BLOCK, count: 5, wanted: 13, found: 17 }
    );
    for scale in [f32::INFINITY, -1.0, -0.0, f32::MAX, f32::MIN_POSITIVE / 2.0] {
        let error = decode("int8", &forge(int8.clone(), 28 + 12, &scale.to_le_bytes()), 5).unwrap_err();
        assert_eq!(error, CompressError::Scale { block: 1, found: scale });
    }
    let nan = decode("int8", &forge(int8.clone(), 28 + 4, &f32::NAN.to_le_bytes()), 5).unwrap_err();
    assert!(matches!(nan, CompressError::Scale { block: 0, .. }), "{nan}");
    let error = decode("int8", &forge(int8.clone(), 28 + 10, &[0x80]), 5).unwrap_err();
    assert_eq!(error, CompressError::Code { index: 2, code: 0x80 });
    let error = decode("int8", &forge(int8, 28 + 12, &[0; 4]), 5).unwrap_err();
    assert_eq!(error, CompressError::Code { index: 4, code: 0x7f }, "a code under scale 0");
}
