//! Codecs by name, for command lines and configuration files. A [`CodecSpec`] is plain data: printing and
//! parsing give the same spec again.

mod density;

use std::fmt;
use std::hash::{Hash, Hasher};
use std::str::FromStr;

use crate::block::DEFAULT_BLOCK;
use crate::codebook::CODEBOOK_BLOCK;
use crate::dct::{Dct, MAX_SIDE};
use crate::int::IntBlock;
use crate::sign::SIGN_BLOCK;
use crate::uint::UintBlock;
use crate::{
    Amount, Bf16, Codebook, CompressError, Compressor, E3M0, E4M3, E5M2, ErrorFeedback, F16, F32, Int2,
    Lossless, Mask, Masked, Memoryless, MinMaxUint8, MomentumCorrection, Natural, Packing, Pattern, Select,
    Sign, Sparse,
};

type Built = Result<Box<dyn Memoryless>, CompressError>;

/// A named method of coding elements.
struct Method {
    name: &'static str,
    /// Default block size; `None` for a method without blocks.
    block: Option<u32>,
    build: fn(u32) -> Built,
    /// True if the method loses the same part of a value each time, so that error feedback is needed to send
    /// that part. False for stochastic rounding, which is unbiased: error feedback around a coarse stochastic
    /// codec diverges, since its error can exceed the value.
    biased: bool,
}

fn boxed<C: Memoryless + 'static>(codec: Result<C, CompressError>) -> Built {
    Ok(Box::new(codec?))
}

const fn plain(name: &'static str, build: fn(u32) -> Built) -> Method {
    Method { name, block: None, build, biased: true }
}

const fn blocks(name: &'static str, block: u32, build: fn(u32) -> Built) -> Method {
    Method { name, block: Some(block), build, biased: true }
}

impl Method {
    /// Marks a method that is exact or unbiased.
    const fn without_bias(self) -> Self {
        Self { biased: false, ..self }
    }
}

/// All methods, in the order of the help text.
const METHODS: &[Method] = &[
    plain("none", |_| boxed(Ok(F32::new()))).without_bias(),
    plain("f16", |_| boxed(Ok(F16::new()))),
    plain("bf16", |_| boxed(Ok(Bf16::new()))),
    blocks("int8", DEFAULT_BLOCK, |b| boxed(IntBlock::<8>::new(b))),
    blocks("int4", DEFAULT_BLOCK, |b| boxed(IntBlock::<4>::new(b))),
    blocks("int3", DEFAULT_BLOCK, |b| boxed(IntBlock::<3>::new(b))),
    blocks("int2", DEFAULT_BLOCK, |b| boxed(IntBlock::<2>::new(b))),
    blocks("int8-sr", DEFAULT_BLOCK, |b| boxed(IntBlock::<8>::stochastic(b))).without_bias(),
    blocks("int4-sr", DEFAULT_BLOCK, |b| boxed(IntBlock::<4>::stochastic(b))).without_bias(),
    blocks("int3-sr", DEFAULT_BLOCK, |b| boxed(IntBlock::<3>::stochastic(b))).without_bias(),
    blocks("int2-sr", DEFAULT_BLOCK, |b| boxed(IntBlock::<2>::stochastic(b))).without_bias(),
    blocks("uint8", DEFAULT_BLOCK, |b| boxed(UintBlock::<8>::new(b))),
    blocks("uint4", DEFAULT_BLOCK, |b| boxed(UintBlock::<4>::new(b))),
    blocks("uint3", DEFAULT_BLOCK, |b| boxed(UintBlock::<3>::new(b))),
    blocks("uint2", DEFAULT_BLOCK, |b| boxed(UintBlock::<2>::new(b))),
    blocks("uint8-sr", DEFAULT_BLOCK, |b| boxed(UintBlock::<8>::stochastic(b))).without_bias(),
    blocks("uint4-sr", DEFAULT_BLOCK, |b| boxed(UintBlock::<4>::stochastic(b))).without_bias(),
    blocks("uint3-sr", DEFAULT_BLOCK, |b| boxed(UintBlock::<3>::stochastic(b))).without_bias(),
    blocks("uint2-sr", DEFAULT_BLOCK, |b| boxed(UintBlock::<2>::stochastic(b))).without_bias(),
    blocks("qsgd8", 512, |b| boxed(IntBlock::<8>::qsgd(b))).without_bias(),
    blocks("qsgd4", 512, |b| boxed(IntBlock::<4>::qsgd(b))).without_bias(),
    blocks("qsgd2", 512, |b| boxed(IntBlock::<2>::qsgd(b))).without_bias(),
    blocks("terngrad", 4096, |b| boxed(Int2::tern_grad(b))).without_bias(),
    blocks("sign", SIGN_BLOCK, |b| boxed(Sign::l1(b))),
    blocks("e4m3", DEFAULT_BLOCK, |b| boxed(E4M3::new(b))),
    blocks("e5m2", DEFAULT_BLOCK, |b| boxed(E5M2::new(b))),
    blocks("e3m0", DEFAULT_BLOCK, |b| boxed(E3M0::new(b))),
    blocks("minmax8", DEFAULT_BLOCK, |b| boxed(MinMaxUint8::new(b))),
    plain("natural", |_| boxed(Ok(Natural::new()))).without_bias(),
    blocks("meanstd8", CODEBOOK_BLOCK, |b| boxed(Codebook::<8>::mean_std(b))),
    blocks("meanstd2", CODEBOOK_BLOCK, |b| boxed(Codebook::<2>::mean_std(b))),
    blocks("quantile8", CODEBOOK_BLOCK, |b| boxed(Codebook::<8>::quantiles(b))),
    blocks("quantile4", CODEBOOK_BLOCK, |b| boxed(Codebook::<4>::quantiles(b))),
    blocks("sign-l2", SIGN_BLOCK, |b| boxed(Sign::l2(b))),
];

/// A codec and its parameters, as data. Call [`CodecSpec::build`] once for each stream of vectors.
///
/// A name consists of up to two stages (selections or transforms) and a method, joined by `/`, then optional
/// suffixes. `+ef` adds error feedback, `+ef:0.95` error feedback with a decaying residual. `+dgc` adds
/// momentum correction with factor 0.9, `+dgc:0.95` with another factor. Last, `+zstd` or `+lz4` adds a
/// lossless stage that is used where it makes the payload smaller. Stages without a method send f32.
/// `dgc:AMOUNT` is short for `topk:AMOUNT+dgc`.
///
/// A method with blocks may be given a block size, such as `int4:128`. The default is 512 elements (`qsgd8`,
/// `qsgd4`, `qsgd2`), 4096 (`terngrad`, `sign`, `sign-l2`), 65536 (`meanstd8`, `meanstd2`, `quantile8`,
/// `quantile4`) or 256 (all others). [`CodecSpec::method`] returns the block size in use.
///
/// ```
/// use farflung_compress::{CodecSpec, Compressor};
///
/// let spec: CodecSpec = "int8:64+ef".parse()?;
/// assert_eq!(spec.to_string(), "int8:64+ef");
/// assert_eq!(spec.build().max_payload(128), 28 + 4 + 2 * (2 + 64));
///
/// // CocktailSGD: one of ten elements, of these the largest fifth, in four bits.
/// let cocktail: CodecSpec = "rolling:10x128/topk:0.2x128/int4:128+ef".parse()?;
/// assert!(cocktail.build().max_payload(1 << 20) * 170 < 4 << 20);
/// # Ok::<(), farflung_compress::CompressError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CodecSpec {
    /// Selections, the outermost first.
    stages: [Option<Stage>; 2],
    codec: ElementMethod,
    feedback: Option<Feedback>,
    packing: Option<Packing>,
}

/// Returns the error for a wrong part of a name. [`CodecSpec::from_str`] fills in the whole name.
fn wrong_part(part: &str, why: &'static str) -> CompressError {
    CompressError::CodecName { name: String::new(), part: part.to_owned(), why }
}

/// The codec `none`: plain f32.
impl Default for CodecSpec {
    fn default() -> Self {
        Self {
            stages: [None; 2],
            codec: ElementMethod { method: &METHODS[0], block: 0 },
            feedback: None,
            packing: None,
        }
    }
}

/// What a codec keeps from one vector to the next. Factors are in millionths.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Feedback {
    /// Error feedback that keeps this share of the residual.
    Residual(u32),
    /// Momentum correction with this factor: momentum is accumulated before the selection, and the residual is
    /// kept in full.
    Momentum(u32),
}

impl Feedback {
    const WHOLE: Self = Self::Residual(1_000_000);
    /// The default of `+dgc`.
    const DGC: Self = Self::Momentum(900_000);

    /// Splits a codec's name into the part before the feedback suffix and the meaning of the suffix.
    fn split(name: &str) -> (&str, Option<Self>) {
        let of = |mark: &str, unless_told: Self, told: fn(u32) -> Self| {
            let (base, suffix) = name.rsplit_once(mark)?;
            if suffix.is_empty() {
                return Some((base, Some(unless_told)));
            }
            let (whole, part) = suffix.strip_prefix(':')?.split_once('.')?;
            let digits = part.len() <= 6 && part.bytes().all(|b| b.is_ascii_digit());
            let millionths = format!("{part:0<6}").parse().ok()?;
            (whole == "0" && digits && !part.is_empty()).then_some((base, Some(told(millionths))))
        };
        let found = of("+ef", Self::WHOLE, Self::Residual).or_else(|| of("+dgc", Self::DGC, Self::Momentum));
        found.unwrap_or((name, None))
    }
}

impl fmt::Display for Feedback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (mark, unless_told, millionths) = match *self {
            Self::Residual(share) => ("+ef", Self::WHOLE, share),
            Self::Momentum(factor) => ("+dgc", Self::DGC, factor),
        };
        f.write_str(mark)?;
        if *self == unless_told {
            return Ok(());
        }
        write!(f, ":0.{}", format!("{millionths:06}").trim_end_matches('0'))?;
        if millionths == 0 { f.write_str("0") } else { Ok(()) }
    }
}

/// A stage in front of the method: a selection or a transform.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Stage {
    TopK(Amount),
    Sampled(Amount),
    PerChunk {
        kept: u32,
        chunk: u32,
    },
    /// The bits of the threshold, an `f32`.
    Threshold(u32),
    Mask(Mask),
    Unbiased(u32),
    /// A transform rather than a selection, over squares with this side.
    Dct(u32),
}

/// The stages, for a help text. `dgc:AMOUNT` is not listed here, since it is short for a stage with memory.
const STAGES: [&str; 9] = [
    "topk:AMOUNT",
    "topk:KEPTofCHUNK",
    "sampled:AMOUNT",
    "threshold:VALUE",
    "rolling:STRIDE[xMULTIPLE]",
    "permuted:STRIDE[xMULTIPLE]",
    "random:STRIDE[xMULTIPLE]",
    "unbiased:STRIDE",
    "dct:SIDE",
];

impl Stage {
    /// Parses one part of a name. Returns `None` if it is not a stage.
    fn parse(name: &str) -> Result<Option<Self>, CompressError> {
        let Some((kind, argument)) = name.split_once(':') else { return Ok(None) };
        let number = |text: &str| {
            let number = text.parse().ok().filter(|n| *n > 0);
            number.ok_or_else(|| wrong_part(name, "needs whole numbers of at least 1"))
        };
        let amount = || {
            let amount: Amount = argument.parse()?;
            if amount.is_nothing() { Err(wrong_part(name, "selects no elements")) } else { Ok(amount) }
        };
        let mask = |pattern| {
            let (stride, multiple) = argument.split_once('x').unwrap_or((argument, "1"));
            Ok(Self::Mask(Mask { pattern, stride: number(stride)?, multiple: number(multiple)? }))
        };
        Ok(Some(match kind {
            "topk" => match argument.split_once("of") {
                Some((kept, chunk)) => Self::PerChunk { kept: number(kept)?, chunk: number(chunk)? },
                None => Self::TopK(amount()?),
            },
            "sampled" => Self::Sampled(amount()?),
            "threshold" => {
                let value = argument.parse().ok().filter(|value: &f32| *value >= 0.0 && value.is_finite());
                let wrong = || wrong_part(name, "needs a finite number that is not negative");
                Self::Threshold(value.ok_or_else(wrong)?.to_bits())
            }
            "rolling" => mask(Pattern::Rolling)?,
            "permuted" => mask(Pattern::Permuted)?,
            "random" => mask(Pattern::Random)?,
            "unbiased" => Self::Unbiased(number(argument)?),
            "dct" => {
                let side = number(argument)?;
                if side > MAX_SIDE {
                    return Err(CompressError::BlockSize { found: side, max: MAX_SIDE });
                }
                Self::Dct(side)
            }
            _ => return Ok(None),
        }))
    }

    /// Returns the rule, if the stage selects by magnitude.
    fn select(self) -> Option<Select> {
        Some(match self {
            Self::TopK(amount) => Select::Largest(amount),
            Self::Sampled(amount) => Select::Sampled(amount),
            Self::PerChunk { kept, chunk } => Select::PerChunk { chunk, kept },
            Self::Threshold(bits) => Select::Threshold(f32::from_bits(bits)),
            Self::Mask(_) | Self::Unbiased(_) | Self::Dct(_) => return None,
        })
    }

    fn over(self, inner: Box<dyn Memoryless>) -> Box<dyn Memoryless> {
        match self {
            Self::Mask(mask) => Box::new(Masked::new(mask, inner)),
            Self::Unbiased(stride) => Box::new(Masked::unbiased(stride, inner)),
            Self::Dct(side) => Box::new(Dct::new(side, inner).expect("parsing has checked the side")),
            Self::TopK(_) | Self::Sampled(_) | Self::PerChunk { .. } | Self::Threshold(_) => {
                let select = self.select().expect("these stages select by magnitude");
                Box::new(Sparse::new(select, inner).expect("parsing has checked the selection"))
            }
        }
    }
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TopK(amount) => write!(f, "topk:{amount}"),
            Self::Sampled(amount) => write!(f, "sampled:{amount}"),
            Self::PerChunk { kept, chunk } => write!(f, "topk:{kept}of{chunk}"),
            Self::Threshold(bits) => write!(f, "threshold:{:?}", f32::from_bits(*bits)),
            Self::Mask(Mask { pattern, stride, multiple }) => {
                let name = match pattern {
                    Pattern::Rolling => "rolling",
                    Pattern::Permuted => "permuted",
                    Pattern::Random => "random",
                };
                write!(f, "{name}:{stride}")?;
                if *multiple == 1 { Ok(()) } else { write!(f, "x{multiple}") }
            }
            Self::Unbiased(stride) => write!(f, "unbiased:{stride}"),
            Self::Dct(side) => write!(f, "dct:{side}"),
        }
    }
}

/// One of [`METHODS`] with its block size.
#[derive(Clone, Copy)]
struct ElementMethod {
    method: &'static Method,
    block: u32,
}

impl ElementMethod {
    fn key(&self) -> (&'static str, u32) {
        (self.method.name, self.block)
    }

    fn parse(name: &str) -> Result<Self, CompressError> {
        let unknown = || CompressError::UnknownCodec { name: name.to_owned() };
        let (base, block) = name.split_once(':').map_or((name, None), |(base, block)| (base, Some(block)));
        let method = METHODS.iter().find(|m| m.name == base).ok_or_else(unknown)?;
        let block = match (method.block, block) {
            (default, None) => default.unwrap_or(0),
            (Some(_), Some(block)) => block
                .parse()
                .map_err(|_| wrong_part(name, "needs a block size, a whole number of elements"))?,
            (None, Some(_)) => return Err(wrong_part(name, "takes no block size")),
        };
        (method.build)(block)?;
        Ok(Self { method, block })
    }

    fn build(&self) -> Box<dyn Memoryless> {
        (self.method.build)(self.block).expect("parsing has built this codec once")
    }
}

impl PartialEq for ElementMethod {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key()
    }
}

impl Eq for ElementMethod {}

impl Hash for ElementMethod {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.key().hash(state);
    }
}

impl fmt::Debug for ElementMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for ElementMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.method.name)?;
        match self.method.block {
            Some(default) if default != self.block => write!(f, ":{}", self.block),
            _ => Ok(()),
        }
    }
}

/// Returns the names that [`parse`] accepts, for a help text: methods, then stages.
#[must_use]
pub fn names() -> Vec<String> {
    let name = |m: &Method| format!("{}{}", m.name, if m.block.is_some() { "[:BLOCK]" } else { "" });
    METHODS.iter().map(name).chain(STAGES.map(|stage| format!("{stage}[/...]"))).collect()
}

/// Builds the codec of that name, for one stream of vectors.
///
/// Errors: [`CompressError::UnknownCodec`], which lists the names; [`CompressError::CodecName`];
/// [`CompressError::BlockSize`]; [`CompressError::Amount`]; [`CompressError::UnbiasedFeedback`];
/// [`CompressError::NotBuilt`].
pub fn parse(name: &str) -> Result<Box<dyn Compressor>, CompressError> {
    Ok(name.parse::<CodecSpec>()?.build())
}

impl CodecSpec {
    /// Returns the method's name and its block size (0 if it has no blocks), or `None` if there is a stage in
    /// front of it. Devices choose a kernel by it.
    #[must_use]
    pub fn method(&self) -> Option<(&'static str, u32)> {
        matches!(self.stages, [None, None]).then(|| self.codec.key())
    }

    /// Returns the first stage's mask and the codec of the elements it selects. Returns `None` if the first
    /// stage is not a mask, or is an unbiased one.
    #[must_use]
    pub fn mask(&self) -> Option<(Mask, Self)> {
        let [Some(Stage::Mask(mask)), _] = self.stages else { return None };
        Some((mask, self.behind_first()))
    }

    /// Returns the first stage's rule by magnitude and the codec of the elements it selects. Returns `None` if
    /// the first stage is not such a rule.
    #[must_use]
    pub fn select(&self) -> Option<(Select, Self)> {
        Some((self.stages[0]?.select()?, self.behind_first()))
    }

    /// Returns the side of the first stage's cosine transform and the codec of its coefficients. Returns `None`
    /// if the first stage is not a transform.
    #[must_use]
    pub fn dct(&self) -> Option<(u32, Self)> {
        let [Some(Stage::Dct(side)), _] = self.stages else { return None };
        Some((side, self.behind_first()))
    }

    fn behind_first(&self) -> Self {
        Self { stages: [self.stages[1], None], codec: self.codec, feedback: None, packing: None }
    }

    /// Returns true if the codec keeps a residual.
    #[must_use]
    pub fn feedback(&self) -> bool {
        self.feedback.is_some()
    }

    /// Returns the share of the residual that is kept from one vector to the next. Returns `None` for a codec
    /// without error feedback.
    #[must_use]
    pub fn feedback_share(&self) -> Option<f32> {
        match self.feedback {
            Some(Feedback::Residual(share)) => Some((f64::from(share) / 1e6) as f32),
            Some(Feedback::Momentum(_)) | None => None,
        }
    }

    /// Returns the momentum factor of [`MomentumCorrection`], or `None` for a codec without it.
    #[must_use]
    pub fn momentum(&self) -> Option<f32> {
        match self.feedback {
            Some(Feedback::Momentum(factor)) => Some((f64::from(factor) / 1e6) as f32),
            Some(Feedback::Residual(_)) | None => None,
        }
    }

    /// Returns the codec for reduced values, given the codec of each rank's own values. Momentum correction
    /// becomes plain error feedback, because momentum must be accumulated only once.
    #[must_use]
    pub fn of_results(self) -> Self {
        match self.feedback {
            Some(Feedback::Momentum(_)) => Self { feedback: Some(Feedback::WHOLE), ..self },
            _ => self,
        }
    }

    /// Returns the lossless packer of the last stage, if there is one.
    #[must_use]
    pub const fn packing(&self) -> Option<Packing> {
        self.packing
    }

    /// Adds error feedback to a codec that has none. A codec that is exact or unbiased is returned unchanged.
    #[must_use]
    pub fn with_feedback(self) -> Self {
        let loses = !matches!(self.stages, [None, None]) || self.codec.method.biased;
        if self.feedback.is_none() && loses && !self.is_unbiased() {
            return Self { feedback: Some(Feedback::WHOLE), ..self };
        }
        self
    }

    fn is_unbiased(&self) -> bool {
        self.stages.iter().flatten().any(|stage| matches!(stage, Stage::Unbiased(_)))
    }

    /// Builds a codec for one stream of vectors.
    #[must_use]
    pub fn build(&self) -> Box<dyn Compressor> {
        let codec = self.build_unpacked();
        match self.packing {
            None => codec,
            Some(packing) => Box::new(
                Lossless::new(packing, codec).expect("parsing has checked that the packer is compiled in"),
            ),
        }
    }

    fn build_unpacked(&self) -> Box<dyn Compressor> {
        let codec = self.build_memoryless();
        if let Some(factor) = self.momentum() {
            let corrected = MomentumCorrection::new(codec, factor);
            return Box::new(corrected.expect("parsing has checked the factor"));
        }
        match self.feedback_share() {
            None => codec,
            Some(1.0) => Box::new(ErrorFeedback::new(codec)),
            Some(share) => {
                Box::new(ErrorFeedback::decayed(codec, share).expect("parsing has checked the decay"))
            }
        }
    }

    /// Builds the codec without its feedback and its last stage, so that it can be wrapped.
    #[must_use]
    pub fn build_memoryless(&self) -> Box<dyn Memoryless> {
        let over = |inner, stage: &Stage| stage.over(inner);
        self.stages.iter().flatten().rev().fold(self.codec.build(), over)
    }
}

impl FromStr for CodecSpec {
    type Err = CompressError;

    fn from_str(name: &str) -> Result<Self, CompressError> {
        let unknown = || CompressError::UnknownCodec { name: name.to_owned() };
        let packed = |packing: Packing| Some((name.strip_suffix(&format!("+{packing}"))?, packing));
        let (unpacked, packing) = match packed(Packing::Zstd).or_else(|| packed(Packing::Lz4)) {
            Some((_, packing)) if !packing.is_built() => return Err(CompressError::NotBuilt { packing }),
            Some((unpacked, packing)) => (unpacked, Some(packing)),
            None => (name, None),
        };
        let (base, mut feedback) = Feedback::split(unpacked);
        let long;
        let base = match base.strip_prefix("dgc:") {
            Some(_) if feedback.is_some() => {
                let why = "has error feedback with momentum already: for another factor write \
                           topk:AMOUNT+dgc:0.95";
                return Err(CompressError::CodecName { name: name.to_owned(), part: base.to_owned(), why });
            }
            Some(amount) => {
                feedback = Some(Feedback::DGC);
                long = format!("topk:{amount}");
                &long
            }
            None => base,
        };
        let mut spec = Self { feedback, packing, ..Self::default() };
        let whole_name = |error| match error {
            CompressError::UnknownCodec { .. } => unknown(),
            CompressError::CodecName { part, why, .. } => {
                CompressError::CodecName { name: name.to_owned(), part, why }
            }
            error => error,
        };
        // A `+` before a digit is the sign of a number's exponent, not a suffix.
        if let Some(end) =
            base.find('+').filter(|end| !base[end + 1..].starts_with(|c: char| c.is_ascii_digit()))
        {
            let why = "is not a valid ending: a name may end in +ef, +ef:0.95 or +dgc, and after that in \
                       +zstd or +lz4";
            return Err(whole_name(wrong_part(&name[end..], why)));
        }
        let mut parts = base.split('/');
        let mut last = parts.next();
        for slot in &mut spec.stages {
            let Some(part) = last else { break };
            *slot = Stage::parse(part).map_err(whole_name)?;
            if slot.is_none() {
                break;
            }
            last = parts.next();
        }
        if let Some(part) = last {
            if spec.stages.iter().all(Option::is_some) && matches!(Stage::parse(part), Ok(Some(_))) {
                return Err(whole_name(wrong_part(part, "is a third stage, but a name has at most two")));
            }
            spec.codec = ElementMethod::parse(part).map_err(whole_name)?;
        }
        if let Some(part) = parts.next() {
            return Err(whole_name(wrong_part(part, "comes after the method, which must be the last part")));
        }
        if feedback.is_some() && spec.is_unbiased() {
            return Err(CompressError::UnbiasedFeedback);
        }
        Ok(spec)
    }
}

impl fmt::Display for CodecSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for stage in self.stages.iter().flatten() {
            write!(f, "{stage}/")?;
        }
        write!(f, "{}", self.codec)?;
        self.feedback.map_or(Ok(()), |feedback| write!(f, "{feedback}"))?;
        self.packing.map_or(Ok(()), |packing| write!(f, "+{packing}"))
    }
}

#[cfg(test)]
mod tests;
