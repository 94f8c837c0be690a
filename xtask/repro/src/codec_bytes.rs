//! Compares the bytes that methods send for a compressed tensor with their closed forms.

use anyhow::Result;
use farflung::compress::link::{Direct, LinkCodec};
use farflung::compress::{
    Amount, Bf16, Codebook, CompressError, Compressor, F16, F32, IndexCoding, Int4, Int8, MinMaxUint8,
    Payload, PowerSgd, Protocol, RoundKey, Select, Sign, Sparse,
};

use crate::harness::{Bench, Options, Report, Threshold};
use crate::normal::values;

pub(crate) const BENCH: Bench = Bench {
    name: "codec-bytes",
    claim: "payloads of one 1024 x 1024 tensor on 4 ranks have the sizes that the methods' formulas give",
    source: "Tang 2021, Wang 2023, Lin 2018, Peng 2024, Sarfi 2025, Wang 2022, Gan 2022, Wang 2024 (ZeRO++)",
    seed: 1,
    run,
};

const TENSOR: usize = 1 << 20;
const RANKS: usize = 4;
const SHARD: usize = TENSOR / RANKS;

/// Payloads that one rank sends for one exchange.
struct Case {
    name: &'static str,
    codec: Result<Box<dyn Compressor>, CompressError>,
    /// Elements in one payload.
    len: usize,
    /// Number of payloads that a rank sends.
    sent: usize,
    /// Bytes of a body that the formulas do not count: parameters and headers.
    framing: usize,
    golden: usize,
}

fn boxed<C: Compressor + 'static>(
    codec: Result<C, CompressError>,
) -> Result<Box<dyn Compressor>, CompressError> {
    Ok(Box::new(codec?))
}

fn chunks<C: farflung::compress::Memoryless + 'static>(
    kept: u32,
    inner: C,
    coding: IndexCoding,
) -> Result<Box<dyn Compressor>, CompressError> {
    boxed(Sparse::new(Select::PerChunk { chunk: 4096, kept }, inner).map(|codec| codec.indices(coding)))
}

fn cases() -> Vec<Case> {
    // A scatter, a reduction and a gather of shards send 2 (n - 1) payloads of one shard. A gather of whole
    // tensors sends n - 1 payloads of the tensor.
    let (shards, whole) = (2 * (RANKS - 1), RANKS - 1);
    let case = |name, codec, len, sent, framing, golden| Case { name, codec, len, sent, framing, golden };
    let u16s = || IndexCoding::Fixed(16);
    let dgc = || Sparse::new(Select::Largest(Amount::millionths(1000)), F32::new());
    vec![
        case("f32 by a ring, and DiLoCo's exchange", boxed(Ok(F32::new())), SHARD, shards, 0, 6_291_456),
        case("f16 by a ring", boxed(Ok(F16::new())), SHARD, shards, 0, 3_145_728),
        case("bf16 by a ring", boxed(Ok(Bf16::new())), SHARD, shards, 0, 3_145_728),
        case(
            "int8 scattered, 32 B per chunk (ByteGrad)",
            boxed(MinMaxUint8::new(SHARD as u32)),
            SHARD,
            shards,
            4,
            1_573_056,
        ),
        case("1-bit Adam", boxed(Sign::l2(SHARD as u32)), SHARD, shards, 4, 196_632),
        case("CocktailSGD p .1 k .2 b 4", boxed(cocktail()), SHARD, shards, 36 + 20 + 4, 35_424),
        case(
            "DGC 0.1 %, u32 and f32",
            boxed(dgc().map(|c| c.indices(IndexCoding::Fixed(32)))),
            TENSOR,
            whole,
            20,
            25_176,
        ),
        case("DeMo k 32, u16 and f32", chunks(32, F32::new(), u16s()), TENSOR, whole, 20, 147_456),
        case("DeMo k 32, u16 and sign", chunks(32, sign(), u16s()), TENSOR, whole, 24 + 4, 52_224),
        case("DeMo k 4, u16 and sign", chunks(4, sign(), u16s()), TENSOR, whole, 24 + 4, 6528),
        case("SparseLoCo k 64, 12 bits and 2", two_bits(), TENSOR, whole, 24 + 16, 86_016),
        case("pair gossip f32", boxed(Ok(F32::new())), TENSOR, 1, 0, 4_194_304),
        case("ring gossip int8", boxed(MinMaxUint8::new(TENSOR as u32)), TENSOR, 2, 4, 2_097_216),
        case("ZeRO++ weights, int8 block 2048", boxed(Int8::new(2048)), TENSOR, 1, 4, 1_049_600),
    ]
}

fn sign() -> Sign {
    Sign::l1(1 << 20).expect("the largest block")
}

fn two_bits() -> Result<Box<dyn Compressor>, CompressError> {
    chunks(64, Codebook::<2>::mean_std(1 << 20)?, IndexCoding::Fixed(12))
}

fn cocktail() -> Result<impl Compressor, CompressError> {
    crate::cocktail_ratio::codec([10, 200_000, 4].map(|n| n as u32))
}

fn run(report: &mut Report<'_>, _: &Options) -> Result<()> {
    let x = values(TENSOR, report.seed());
    let mut payload = Payload::new();
    for Case { name, codec, len, sent, framing, golden } in cases() {
        codec?.compress(&x[..len], RoundKey::default(), &mut payload)?;
        let counted = payload.view().body().len() - framing;
        rows(report, name, sent * counted, golden)?;
    }
    // The buffers of PowerSGD are averaged by a ring, which sends 2 (n - 1) / n of their bytes.
    let mut method = PowerSgd::new(1024, 1024, 4, report.seed())?;
    method.begin(&x)?;
    let mut handed_out = 0;
    while let Some(buffer) = method.outgoing().map(<[f32]>::to_vec) {
        handed_out += size_of_val(&buffer[..]);
        method.incoming(&buffer)?;
    }
    rows(report, "PowerSGD rank 4", handed_out * 2 * (RANKS - 1) / RANKS, 49_152)?;
    let mut link = Direct::per_channel(Int4::new(128)?, 128 * 128, 128)?;
    link.encode(&[0], &x[..128 * 128], RoundKey::default(), &mut payload)?;
    rows(report, "AQ-SGD boundary 1 x 128 x 128, 4 bits", payload.view().body().len() - 4, 8448)
}

fn rows(report: &mut Report<'_>, name: &str, bytes: usize, golden: usize) -> Result<()> {
    report.row(name, bytes as f64, "B", Threshold::None)?;
    report.row(
        &format!("{name}: difference from the formula"),
        bytes.abs_diff(golden) as f64,
        "B",
        Threshold::AtMost(0.0),
    )
}
