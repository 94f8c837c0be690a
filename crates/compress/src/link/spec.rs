//! Codecs of a pipeline boundary by name. A [`LinkSpec`] is plain data: printing and parsing give the same spec
//! again.

use std::fmt;
use std::str::FromStr;

use super::{AqSgd, Direct, LinkCodec, Samples, Store};
use crate::int::IntBlock;
use crate::{CodecSpec, CompressError, Lossless, Memoryless};

/// The shape of one sample on a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SampleShape {
    /// Number of tokens.
    pub positions: usize,
    /// Number of values of a token.
    pub channels: usize,
}

impl SampleShape {
    /// Returns the number of values in a sample.
    #[must_use]
    pub const fn len(self) -> usize {
        self.positions.saturating_mul(self.channels)
    }

    /// Returns true if a sample has no values.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.len() == 0
    }
}

/// A boundary's codec and its parameters, as data.
///
/// A name is `aqsgd:BITS` ([`AqSgd`]), `aqsgd:BITS/int8` or `aqsgd:BITS/int4` for copies stored in fewer bits
/// than f16, `direct:BITS` (AQ-SGD's quantizer without its copies), or the name of a [`CodecSpec`] without
/// feedback, whose vector is a microbatch `[samples, positions, channels]`. BITS is 2, 3, 4 or 8. AQ-SGD's
/// quantizer has a scale for each channel of each sample.
///
/// Error feedback is rejected: a residual belongs to one stream of vectors, but a boundary carries other
/// samples each time.
///
/// ```
/// use farflung_compress::link::{LinkSpec, MemoryStore, SampleShape};
///
/// let spec: LinkSpec = "aqsgd:4".parse()?;
/// assert_eq!(spec.to_string(), "aqsgd:4");
/// let shape = SampleShape { positions: 128, channels: 128 };
/// let link = spec.build(shape, |samples| Ok(Box::new(MemoryStore::new(samples))))?;
/// // Two bytes a value the first time.
/// assert_eq!(link.max_payload(1), 28 + 8 + 4 + 2 * 128 * 128 + 4);
/// # Ok::<(), farflung_compress::CompressError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinkSpec(Kind);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Codec(CodecSpec),
    Direct(&'static Bits),
    AqSgd(&'static Bits, &'static StoreKind),
}

/// A quantizer with a scale for each block.
struct Bits {
    name: &'static str,
    build: fn(u32) -> Result<Box<dyn Memoryless>, CompressError>,
}

const BITS: &[Bits] = &[
    Bits { name: "2", build: |block| Ok(Box::new(IntBlock::<2>::new(block)?)) },
    Bits { name: "3", build: |block| Ok(Box::new(IntBlock::<3>::new(block)?)) },
    Bits { name: "4", build: |block| Ok(Box::new(IntBlock::<4>::new(block)?)) },
    Bits { name: "8", build: |block| Ok(Box::new(IntBlock::<8>::new(block)?)) },
];

/// A format in which AQ-SGD stores samples.
struct StoreKind {
    name: &'static str,
    samples: fn(usize) -> Samples,
}

/// Formats of stored samples. The first is the default.
const HELD: &[StoreKind] = &[
    StoreKind { name: "f16", samples: Samples::f16 },
    StoreKind { name: "int8", samples: Samples::int8 },
    StoreKind { name: "int4", samples: Samples::int4 },
];

macro_rules! same_by_name {
    ($($ty:ty),*) => {$(
        impl PartialEq for $ty {
            fn eq(&self, other: &Self) -> bool {
                self.name == other.name
            }
        }

        impl Eq for $ty {}

        impl fmt::Debug for $ty {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.name)
            }
        }
    )*};
}
same_by_name!(Bits, StoreKind);

/// Returns the names that only boundaries have, for a help text. The names of [`crate::names`] are valid too.
#[must_use]
pub fn names() -> Vec<&'static str> {
    vec!["aqsgd:BITS[/int8|/int4]", "direct:BITS"]
}

impl LinkSpec {
    /// Returns true for the codec `none`, which sends plain f32.
    #[must_use]
    pub fn is_plain(&self) -> bool {
        self.0 == Kind::Codec(CodecSpec::default())
    }

    /// Returns the samples that the store must hold, or `None` for a codec without copies.
    #[must_use]
    pub fn samples(&self, shape: SampleShape) -> Option<Samples> {
        match self.0 {
            Kind::AqSgd(_, held) => Some((held.samples)(shape.len())),
            Kind::Codec(_) | Kind::Direct(_) => None,
        }
    }

    /// Returns the number of bytes in the buffers of f32 that one end keeps between messages of `samples`
    /// samples, without those of the store and of the quantizer.
    #[must_use]
    pub const fn working_bytes(&self, shape: SampleShape, samples: usize) -> usize {
        let values = shape.positions * shape.channels * samples * size_of::<f32>();
        match self.0 {
            Kind::Codec(_) => 0,
            // The values in the order of channels.
            Kind::Direct(_) => values,
            // The values in the order of channels, the decoded samples, and the changes.
            Kind::AqSgd(..) => 3 * values,
        }
    }

    /// Returns true if the codec keeps copies of samples, which [`Self::build`] then opens a store for.
    #[must_use]
    pub const fn remembers(&self) -> bool {
        matches!(self.0, Kind::AqSgd(..))
    }

    /// Builds one end of a link. `store` opens the store for the samples that [`Self::samples`] returns.
    ///
    /// Errors: those of `store`; [`CompressError::BlockSize`] for samples with more positions than the largest
    /// block.
    pub fn build(
        &self,
        shape: SampleShape,
        store: impl FnOnce(Samples) -> Result<Box<dyn Store>, CompressError>,
    ) -> Result<Box<dyn LinkCodec>, CompressError> {
        let block = u32::try_from(shape.positions).unwrap_or(u32::MAX);
        Ok(match self.0 {
            Kind::Codec(spec) => {
                let codec = spec.build_memoryless();
                match spec.packing() {
                    None => Box::new(Direct::new(codec, shape.len())),
                    Some(packing) => Box::new(Direct::new(Lossless::new(packing, codec)?, shape.len())),
                }
            }
            Kind::Direct(bits) => {
                Box::new(Direct::per_channel((bits.build)(block)?, shape.len(), shape.channels)?)
            }
            Kind::AqSgd(bits, held) => {
                let store = store((held.samples)(shape.len()))?;
                Box::new(AqSgd::per_channel((bits.build)(block)?, store, shape.channels)?)
            }
        })
    }
}

/// The codec `none`: plain f32.
impl Default for LinkSpec {
    fn default() -> Self {
        Self(Kind::Codec(CodecSpec::default()))
    }
}

impl FromStr for LinkSpec {
    type Err = CompressError;

    fn from_str(name: &str) -> Result<Self, CompressError> {
        let wrong = |part: &str, why| {
            let (name, part) = (name.to_owned(), part.to_owned());
            Err(CompressError::CodecName { name, part, why })
        };
        let bits = |text: &str| BITS.iter().find(|bits| bits.name == text);
        let no_bits = "needs a number of bits: 2, 3, 4 or 8, as in aqsgd:4";
        Ok(Self(match name.split_once(':').unwrap_or((name, "")) {
            ("direct", text) => match bits(text) {
                Some(bits) => Kind::Direct(bits),
                None => return wrong(name, no_bits),
            },
            ("aqsgd", text) => {
                let (text, held) = text.split_once('/').unwrap_or((text, HELD[0].name));
                match (bits(text), HELD.iter().find(|h| h.name == held)) {
                    (Some(bits), Some(held)) => Kind::AqSgd(bits, held),
                    (None, _) => return wrong(name, no_bits),
                    (_, None) => return wrong(held, "is not a storage format of samples: f16, int8 or int4"),
                }
            }
            _ => {
                let codec: CodecSpec = name.parse()?;
                if codec.feedback() {
                    let why = "cannot be used on a boundary: error feedback adds a residual to the next \
                               vector, but the next vector is another sample";
                    return wrong("+ef", why);
                }
                Kind::Codec(codec)
            }
        }))
    }
}

impl fmt::Display for LinkSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Kind::Codec(codec) => codec.fmt(f),
            Kind::Direct(bits) => write!(f, "direct:{}", bits.name),
            Kind::AqSgd(bits, held) if *held == HELD[0] => write!(f, "aqsgd:{}", bits.name),
            Kind::AqSgd(bits, held) => write!(f, "aqsgd:{}/{}", bits.name, held.name),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::MemoryStore;
    use super::*;
    use crate::{Payload, RoundKey};

    fn build(name: &str, shape: SampleShape) -> Box<dyn LinkCodec> {
        let spec: LinkSpec = name.parse().unwrap();
        spec.build(shape, |samples| Ok(Box::new(MemoryStore::new(samples)))).unwrap()
    }

    #[test]
    fn names_print_as_they_parse() {
        for name in ["none", "int8", "int4:64", "topk:0.1/f16", "aqsgd:4", "aqsgd:2/int8", "direct:3"] {
            assert_eq!(name.parse::<LinkSpec>().unwrap().to_string(), name);
        }
        assert_eq!("aqsgd:4/f16".parse::<LinkSpec>().unwrap().to_string(), "aqsgd:4");
        assert!("none".parse::<LinkSpec>().unwrap().is_plain());
    }

    #[test]
    fn wrong_names_say_which_part() {
        for (name, said) in [
            ("aqsgd", "needs a number of bits"),
            ("aqsgd:5", "needs a number of bits"),
            ("aqsgd:4/int2", "is not a storage format of samples"),
            ("int8+ef", "cannot be used on a boundary"),
            ("nonsense", "nonsense"),
        ] {
            let error = name.parse::<LinkSpec>().unwrap_err().to_string();
            assert!(error.contains(said), "{name}: {error}");
        }
    }

    /// With one scale for each channel, small values are not lost beside a channel of large ones.
    #[test]
    fn each_channel_of_a_sample_has_its_scale() {
        let shape = SampleShape { positions: 32, channels: 2 };
        let x: Vec<f32> = (0..32).flat_map(|i| [1000.0 * i as f32, 0.001 * i as f32]).collect();
        let (mut payload, mut out) = (Payload::new(), vec![0.0; x.len()]);
        let mut link = build("direct:4", shape);
        link.encode(&[0], &x, RoundKey::default(), &mut payload).unwrap();
        assert_eq!(payload.view().body().len(), 4 + 2 * (16 + 2));
        link.decode(&[0], payload.view(), &mut out).unwrap();
        assert!((out[63] - x[63]).abs() < 0.031 / 14.0, "{} {}", out[63], x[63]);
    }

    #[test]
    fn every_codec_of_the_table_carries_a_microbatch() {
        let shape = SampleShape { positions: 8, channels: 4 };
        let x: Vec<f32> = (0..64).map(|i| (i as f32 * 0.37).sin()).collect();
        let names = crate::names();
        let methods = names.iter().filter_map(|name| name.split('[').next()).filter(|n| !n.contains(':'));
        for name in methods.chain(["topk:0.25/int8", "dct:4", "int8+zstd"]) {
            let (mut payload, mut out) = (Payload::new(), vec![0.0; 64]);
            let mut link = build(name, shape);
            link.encode(&[3, 9], &x, RoundKey::default(), &mut payload).unwrap();
            assert!(payload.as_bytes().len() <= link.max_payload(2), "{name}");
            link.decode(&[3, 9], payload.view(), &mut out).unwrap();
            assert!(out.iter().all(|v| v.is_finite()), "{name}");
        }
    }
}
