//! `farflung compress`: measures codecs on the tensors of a file.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::time::Instant;

use farflung::compress::{CodecSpec, Payload, RoundKey};
use farflung::{Error, Result};
use half::{bf16, f16};
use plotters::prelude::*;
use safetensors::{Dtype, SafeTensors};

/// Examine codecs.
#[derive(Debug, clap::Args)]
pub(crate) struct CompressCommand {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, clap::Subcommand)]
enum Action {
    Analyze(Analyze),
}

/// Measure codecs on the tensors of a file: bytes, error and speed.
///
/// The error is that of one payload: values that error feedback would send later count as lost.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  farflung compress analyze gradient.safetensors
  farflung compress \
                        analyze model.safetensors --tensor mlp --codec int4:128 --codec topk:0.01/f16 --svg \
                        codecs.svg
  farflung compress analyze model.safetensors --json

Codecs are named as \
                        in the documentation of farflung-compress: METHOD[:BLOCK], \
                        SELECTION:AMOUNT/METHOD,
each may end with +zstd or +lz4 for a lossless last stage.")]
struct Analyze {
    /// File with tensors in f32, f16 or bf16; all of them are measured together as one vector.
    #[arg(value_name = "FILE.safetensors")]
    file: PathBuf,
    /// Only tensors whose name contains this.
    #[arg(long, value_name = "TEXT")]
    tensor: Option<String>,
    /// Codec to measure; may be repeated. Default: a selection of all kinds.
    #[arg(long, value_name = "CODEC")]
    codec: Vec<CodecSpec>,
    /// Highest number of values to measure. Tensors are taken in the order of their names.
    #[arg(long, value_name = "N", default_value_t = 1 << 24, value_parser = clap::value_parser!(u64).range(1..))]
    values: u64,
    /// Write a plot of ratio against error to this file, as SVG.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Print one JSON object per codec.
    #[arg(long)]
    json: bool,
}

/// Codecs that are measured without `--codec`.
const CHOICE: [&str; 29] = [
    "f16",
    "bf16",
    "e4m3",
    "e5m2",
    "int8",
    "uint8",
    "minmax8",
    "meanstd8",
    "quantile8",
    "natural",
    "int4:128",
    "uint4:128",
    "e3m0:128",
    "quantile4",
    "int3:128",
    "uint2:64",
    "int2:64",
    "terngrad",
    "sign",
    "topk:0.1/f16",
    "topk:0.01",
    "topk:64of4096/int4:64",
    "sampled:0.01",
    "rolling:10",
    "rolling:10x128/topk:0.2x128/int4:128",
    "dct:64/topk:32of4096",
    "none+zstd",
    "int8+zstd",
    "int8+lz4",
];

/// Result of measuring one codec on one vector.
struct Row {
    codec: String,
    bytes: usize,
    /// Bytes as f32 divided by bytes of the payload.
    ratio: f64,
    /// `|x - y| / |x|`.
    relative: f64,
    cosine: f64,
    /// The largest absolute error of an element.
    largest: f64,
    /// Speeds in GB/s, counted in bytes of f32 values. `feedback` is the speed of encoding with error feedback;
    /// `None` if this changes nothing for the codec.
    encode: f64,
    feedback: Option<f64>,
    decode: f64,
}

impl CompressCommand {
    pub(crate) fn run(self) -> Result<()> {
        match self.action {
            Action::Analyze(analyze) => analyze.run(),
        }
    }
}

impl Analyze {
    fn run(self) -> Result<()> {
        let x = self.read()?;
        let choice = || CHOICE.iter().map(|name| name.parse()).collect::<Result<Vec<_>, _>>();
        let codecs = if self.codec.is_empty() { choice()? } else { self.codec };
        let rows = codecs.into_iter().map(|codec| measure(codec, &x)).collect::<Result<Vec<_>>>()?;
        super::print(&if self.json { json(&rows) } else { table(&rows, x.len()) })?;
        if let Some(path) = self.svg {
            let mut svg = String::new();
            draw(&mut svg, &rows).map_err(|error| Error::Plot { what: error.to_string() })?;
            std::fs::write(&path, svg).map_err(|source| Error::Io { action: "write", path, source })?;
        }
        Ok(())
    }

    fn read(&self) -> Result<Vec<f32>> {
        let io = |source| Error::Io { action: "read", path: self.file.clone(), source };
        let bytes = std::fs::read(&self.file).map_err(io)?;
        let invalid = |why: String| io(std::io::Error::new(std::io::ErrorKind::InvalidData, why));
        let tensors = SafeTensors::deserialize(&bytes)
            .map_err(|error| invalid(format!("not a safetensors file: {error}")))?;
        let mut names = tensors.names();
        names.sort_unstable();
        let limit = usize::try_from(self.values).unwrap_or(usize::MAX);
        let mut x = Vec::new();
        for name in names.into_iter().filter(|name| self.tensor.as_ref().is_none_or(|t| name.contains(t))) {
            let tensor = tensors.tensor(name).map_err(|error| invalid(error.to_string()))?;
            let before = x.len();
            append(&mut x, tensor.dtype(), tensor.data());
            x.truncate(limit);
            if let Some(index) = x[before..].iter().position(|x| !x.is_finite()) {
                let value = x[before + index];
                return Err(invalid(format!(
                    "value {index} of {name:?} is {value}, but codecs accept only finite values"
                )));
            }
            if x.len() == limit {
                break;
            }
        }
        if x.is_empty() {
            let named =
                self.tensor.as_ref().map_or_else(String::new, |t| format!(" whose name contains {t:?}"));
            return Err(invalid(format!("no tensor{named} has values of f32, f16 or bf16")));
        }
        Ok(x)
    }
}

/// Appends a tensor's values as f32. A tensor that is not in f32, bf16 or f16 is skipped.
fn append(x: &mut Vec<f32>, dtype: Dtype, data: &[u8]) {
    let halves = || data.as_chunks().0.iter().map(|bytes| u16::from_le_bytes(*bytes));
    match dtype {
        Dtype::F32 => x.extend(data.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes))),
        Dtype::BF16 => x.extend(halves().map(|bits| bf16::from_bits(bits).to_f32())),
        Dtype::F16 => x.extend(halves().map(|bits| f16::from_bits(bits).to_f32())),
        _ => {}
    }
}

fn measure(spec: CodecSpec, x: &[f32]) -> Result<Row> {
    let mut codec = spec.build();
    let (mut payload, mut y) = (Payload::new(), vec![0.0; x.len()]);
    let rate = |seconds: f64| 4e-9 * x.len() as f64 / seconds;
    let key = RoundKey::default();
    let encode = fastest(|| {
        codec.rollback();
        timed(|| codec.compress(x, key, &mut payload))
    })?;
    let decode = fastest(|| timed(|| codec.decompress(payload.view(), &mut y)))?;
    let with_feedback = spec.with_feedback();
    let feedback = if with_feedback == spec {
        None
    } else {
        let (mut with, mut other) = (with_feedback.build(), Payload::new());
        Some(fastest(|| {
            let seconds = timed(|| with.compress(x, key, &mut other))?;
            with.commit();
            Ok(seconds)
        })?)
    };
    let (mut lost, mut norm, mut found, mut product, mut largest) =
        (0.0_f64, 0.0_f64, 0.0_f64, 0.0_f64, 0.0_f64);
    for (x, y) in x.iter().map(|x| f64::from(*x)).zip(y.iter().map(|y| f64::from(*y))) {
        lost += (x - y).powi(2);
        norm += x * x;
        found += y * y;
        product += x * y;
        largest = largest.max((x - y).abs());
    }
    let or_zero = |value: f64| if value.is_finite() { value } else { 0.0 };
    let bytes = payload.as_bytes().len();
    Ok(Row {
        codec: spec.to_string(),
        bytes,
        ratio: 4.0 * x.len() as f64 / bytes as f64,
        relative: or_zero((lost / norm).sqrt()),
        // A codec without loss keeps the direction, also for a vector of zeros.
        cosine: if lost == 0.0 { 1.0 } else { or_zero(product / (norm * found).sqrt()) },
        largest,
        encode: rate(encode),
        feedback: feedback.map(rate),
        decode: rate(decode),
    })
}

/// Returns the minimum of several measurements, since other work of the machine only makes them slower; the
/// first one is also slower because it touches new memory. Up to ten are made, fewer if those after the first
/// take more than 0.1 s together.
fn fastest(mut measure: impl FnMut() -> Result<f64>) -> Result<f64> {
    let (mut least, mut total) = (measure()?, 0.0);
    for _ in 0..9 {
        let seconds = measure()?;
        (least, total) = (least.min(seconds), total + seconds);
        if total > 0.1 {
            break;
        }
    }
    Ok(least)
}

#[expect(clippy::disallowed_methods, reason = "it measures speed")]
fn timed(run: impl FnOnce() -> Result<(), farflung::compress::CompressError>) -> Result<f64> {
    let start = Instant::now();
    run()?;
    Ok(start.elapsed().as_secs_f64().max(1e-9))
}

fn table(rows: &[Row], values: usize) -> String {
    let width = rows.iter().map(|row| row.codec.len()).max().unwrap_or(0).max(5);
    let mut text = format!("{values} values, {} bytes as f32\n", 4 * values);
    let _ = writeln!(
        text,
        "{:<width$}  {:>12} {:>8} {:>9} {:>8} {:>10} {:>8} {:>8} {:>8}",
        "codec", "bytes", "ratio", "rel. L2", "cosine", "max error", "encode", "with ef", "decode GB/s"
    );
    for Row { codec, bytes, ratio, relative, cosine, largest, encode, feedback, decode } in rows {
        let feedback = feedback.map_or_else(|| "-".to_owned(), |rate| format!("{rate:.2}"));
        let _ = writeln!(
            text,
            "{codec:<width$}  {bytes:>12} {ratio:>8.2} {relative:>9.2e} {cosine:>8.5} {largest:>10.3e} {encode:>8.2} {feedback:>8} {decode:>8.2}"
        );
    }
    text
}

fn json(rows: &[Row]) -> String {
    let line = |row: &Row| {
        let object = serde_json::json!({
            "codec": row.codec, "bytes": row.bytes, "ratio": row.ratio, "relative_l2": row.relative, "cosine": row.cosine,
            "max_error": row.largest, "encode_gb_s": row.encode, "encode_with_feedback_gb_s": row.feedback,
            "decode_gb_s": row.decode,
        });
        format!("{object}\n")
    };
    rows.iter().map(line).collect()
}

/// Draws one point per codec, with logarithmic axes.
fn draw(svg: &mut String, rows: &[Row]) -> Result<(), Box<dyn std::error::Error>> {
    // The lower edge of the plot. Codecs with smaller errors, such as lossless ones, are drawn there.
    const EXACT: f64 = 1e-5;
    let points = || rows.iter().map(|row| (row.ratio.max(0.1), row.relative.max(EXACT), &row.codec));
    let far = points().map(|(ratio, ..)| ratio).fold(2.0, f64::max) * 4.0;
    let root = SVGBackend::with_string(svg, (1000, 640)).into_drawing_area();
    root.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&root)
        .caption("codecs: bytes saved against error", ("sans-serif", 20))
        .margin(15)
        .x_label_area_size(45)
        .y_label_area_size(70)
        .build_cartesian_2d((0.9..far).log_scale(), (EXACT..3.0).log_scale())?;
    chart
        .configure_mesh()
        .x_desc("ratio (f32 bytes over the payload's)")
        .y_desc("relative error (L2)")
        .y_label_formatter(&|error| format!("{error:.0e}"))
        .label_style(("sans-serif", 14))
        .draw()?;
    let blue = RGBColor(31, 119, 180);
    chart.draw_series(points().map(|(ratio, error, _)| Circle::new((ratio, error), 4, blue.filled())))?;
    chart.draw_series(points().map(|(ratio, error, codec)| {
        Text::new(codec.clone(), (ratio * 1.03, error * 1.02), ("sans-serif", 12).into_font())
    }))?;
    root.present()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_codec_of_the_choice_is_measured_and_drawn() {
        let x: Vec<f32> = (0..20_000).map(|i| (i as f32 * 0.37).sin() * 1e-3).collect();
        let rows: Vec<Row> = CHOICE.iter().map(|name| measure(name.parse().unwrap(), &x).unwrap()).collect();
        assert!(
            rows.iter().all(|row| row.ratio > 1.0 && row.relative < 2.0 && row.cosine > 0.0),
            "{}",
            table(&rows, 1)
        );
        let f16 = &rows[0];
        assert!(f16.relative < 1e-3 && f16.cosine > 0.999);
        assert_eq!(json(&rows).lines().count(), CHOICE.len());
        let mut svg = String::new();
        draw(&mut svg, &rows).unwrap();
        assert!(svg.starts_with("<svg") && svg.contains("int4:128") && !svg.contains("NaN"));
    }

    #[test]
    fn what_cannot_be_measured_is_said_with_its_place() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.safetensors");
        let read = |bytes: &[u8], tensor: Option<&str>| {
            std::fs::write(&path, bytes).unwrap();
            let (file, tensor) = (path.clone(), tensor.map(str::to_owned));
            let error = Analyze { file, tensor, codec: Vec::new(), values: 3, svg: None, json: false }.read();
            error.map_err(|error| {
                std::error::Error::source(&error).map_or_else(String::new, ToString::to_string)
            })
        };
        let of = |values: [f32; 4]| {
            let header = r#"{"w.a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}"#;
            let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
            bytes.extend_from_slice(header.as_bytes());
            bytes.extend(values.iter().flat_map(|value| value.to_le_bytes()));
            bytes
        };
        assert_eq!(read(&of([1.0, 2.0, 3.0, f32::NAN]), Some("w")), Ok(vec![1.0, 2.0, 3.0]));
        let bad = read(&of([1.0, f32::NEG_INFINITY, 3.0, 4.0]), None).unwrap_err();
        assert_eq!(bad, r#"value 1 of "w.a" is -inf, but codecs accept only finite values"#);
        let none = read(&of([0.0; 4]), Some("bias")).unwrap_err();
        assert!(
            none.ends_with(r#"no tensor whose name contains "bias" has values of f32, f16 or bf16"#),
            "{none}"
        );
        for bytes in [&b""[..], b"hello world", &[255; 40]] {
            let error = read(bytes, None).unwrap_err();
            assert!(error.starts_with("not a safetensors file: "), "{error}");
        }
        let zeros = measure("sign".parse().unwrap(), &[0.0; 100]).unwrap();
        let found = [zeros.relative, zeros.cosine, zeros.largest].map(f64::to_bits);
        assert_eq!(found, [0.0_f64, 1.0, 0.0].map(f64::to_bits));
    }

    #[test]
    fn tensors_of_three_types_are_widened() {
        let mut x = Vec::new();
        append(&mut x, Dtype::F32, &1.5_f32.to_le_bytes());
        append(&mut x, Dtype::BF16, &0xc000_u16.to_le_bytes());
        append(&mut x, Dtype::F16, &[0x00, 0x3c, 0x01, 0x00]);
        append(&mut x, Dtype::I64, &[0; 8]);
        assert_eq!(x, [1.5, -2.0, 1.0, 2.0_f32.powi(-24)]);
    }
}
