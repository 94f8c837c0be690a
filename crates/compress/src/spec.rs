//! Codecs by name, for command lines and configuration files. A name is data: it prints as it parses.

use std::fmt;
use std::str::FromStr;

use crate::int8_block::{DEFAULT_BLOCK, MAX_BLOCK};
use crate::{Bf16, CompressError, Compressor, ErrorFeedback, F16, F32, Int8Block};

/// A codec and its parameters, as data. [`CodecSpec::build`] makes as many codecs of it as there are streams.
///
/// ```
/// use farflung_compress::{CodecSpec, Compressor};
///
/// let spec: CodecSpec = "int8:64+ef".parse()?;
/// assert_eq!(spec.to_string(), "int8:64+ef");
/// assert_eq!(spec.build().max_payload(128), 28 + 4 + 2 * (4 + 64));
/// # Ok::<(), farflung_compress::CompressError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CodecSpec {
    codec: Codec,
    feedback: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Codec {
    F32,
    F16,
    Bf16,
    Int8 { block: u32 },
}

/// The names that [`parse`] takes, for a help text. Each may be followed by `+ef`: with error feedback.
#[must_use]
pub fn names() -> &'static [&'static str] {
    &["none", "f16", "bf16", "int8[:BLOCK]"]
}

/// The codec of that name, for one stream of vectors.
///
/// Errors: [`CompressError::UnknownCodec`], which lists the names; [`CompressError::BlockSize`].
pub fn parse(name: &str) -> Result<Box<dyn Compressor>, CompressError> {
    Ok(name.parse::<CodecSpec>()?.build())
}

impl CodecSpec {
    /// Whether the codec keeps a residual.
    #[must_use]
    pub fn feedback(&self) -> bool {
        self.feedback
    }

    /// A codec for one stream of vectors.
    #[must_use]
    pub fn build(&self) -> Box<dyn Compressor> {
        match self.codec {
            Codec::F32 => self.wrap(F32::new()),
            Codec::F16 => self.wrap(F16::new()),
            Codec::Bf16 => self.wrap(Bf16::new()),
            Codec::Int8 { block } => {
                self.wrap(Int8Block::new(block).expect("parsing checked the block size"))
            }
        }
    }

    fn wrap(self, codec: impl Compressor + 'static) -> Box<dyn Compressor> {
        if self.feedback { Box::new(ErrorFeedback::new(codec)) } else { Box::new(codec) }
    }
}

impl FromStr for CodecSpec {
    type Err = CompressError;

    fn from_str(name: &str) -> Result<Self, CompressError> {
        let unknown = || CompressError::UnknownCodec { name: name.to_owned() };
        let (base, feedback) = match name.strip_suffix("+ef") {
            Some(base) => (base, true),
            None => (name, false),
        };
        let codec = match base {
            "none" => Codec::F32,
            "f16" => Codec::F16,
            "bf16" => Codec::Bf16,
            "int8" => Codec::Int8 { block: DEFAULT_BLOCK },
            _ => {
                let block = base.strip_prefix("int8:").ok_or_else(unknown)?;
                let block: u32 = block.parse().map_err(|_| unknown())?;
                if !(1..=MAX_BLOCK).contains(&block) {
                    return Err(CompressError::BlockSize { found: block, max: MAX_BLOCK });
                }
                Codec::Int8 { block }
            }
        };
        Ok(Self { codec, feedback })
    }
}

impl fmt::Display for CodecSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.codec {
            Codec::F32 => f.write_str("none")?,
            Codec::F16 => f.write_str("f16")?,
            Codec::Bf16 => f.write_str("bf16")?,
            Codec::Int8 { block: DEFAULT_BLOCK } => f.write_str("int8")?,
            Codec::Int8 { block } => write!(f, "int8:{block}")?,
        }
        f.write_str(if self.feedback { "+ef" } else { "" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_print_as_they_parse() {
        for name in ["none", "f16", "bf16", "int8", "int8:1", "int8:4096", "none+ef", "bf16+ef", "int8:64+ef"]
        {
            assert_eq!(name.parse::<CodecSpec>().unwrap().to_string(), name);
        }
        assert_eq!("int8:256".parse::<CodecSpec>().unwrap().to_string(), "int8");
    }

    #[test]
    fn every_listed_name_parses() {
        for name in names() {
            let plain = name.replace("[:BLOCK]", "");
            for name in [plain.clone(), format!("{plain}+ef")] {
                assert_eq!(name.parse::<CodecSpec>().unwrap().feedback(), name.ends_with("+ef"));
            }
        }
    }

    #[test]
    fn an_unknown_name_is_answered_with_the_names() {
        for name in ["", "int9", "int8:", "int8:x", "int8:256+EF", "+ef", "none+ef+ef", "NONE", "int8:-1"] {
            let error = name.parse::<CodecSpec>().unwrap_err();
            assert_eq!(error, CompressError::UnknownCodec { name: name.to_owned() });
        }
        assert_eq!(
            parse("zip").unwrap_err().to_string(),
            "unknown codec \"zip\"; the codecs are none, f16, bf16, int8[:BLOCK], each also with \"+ef\""
        );
        for block in ["0", "1048577"] {
            let error = parse(&format!("int8:{block}")).unwrap_err();
            assert!(matches!(error, CompressError::BlockSize { max: MAX_BLOCK, .. }), "{error}");
        }
    }
}
