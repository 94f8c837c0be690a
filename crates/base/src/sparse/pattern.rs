//! Patterns of sparse attention, and their text form.

use std::fmt;
use std::str::FromStr;

use super::shape::{LISTED, List, Shape};

/// Which keys the queries of a layer attend to, of those up to their own. Every query attends to its own key.
///
/// The text form is a name with numbers, then fields: `name:number,...+field:number,...`.
///
/// - `full`: all keys up to the query's own.
/// - `window:W`: the last `W` keys, the query's own included (Beltagy et al. 2020, "Longformer").
/// - `strided:S`: the last `S` keys, and each `S`-th before the query's own (Child et al. 2019, "Sparse
///   Transformers").
/// - `fixed:L,G[,P]`: the query's window of `L` blocks, and `G` blocks of each earlier window: its last ones,
///   or with `P` patterns head `h` those `h mod P` times `G` before them (Child et al. 2019; `DeepSpeed`'s
///   `FixedSparsityConfig`).
/// - `variable:L,L,...`: the query's window. Windows follow each other with these numbers of blocks; the last
///   number repeats (`DeepSpeed`'s `VariableSparsityConfig`).
/// - `bigbird:W,G,R`: `W/2` blocks before the query's, rounded down, and its own; the first `G` blocks; `R`
///   drawn blocks. Queries of the first `G` blocks attend to all keys (Zaheer et al. 2020, "Big Bird").
///
/// Fields: `sinks:N`, the first `N` keys, too (Xiao et al. 2024, "`StreamingLLM`"; not with `full`); `block:N`,
/// the keys of a block (16 if not given); `global:B,...`, these blocks, too, and `random:N`, drawn blocks, both
/// only of `variable`; `seed:N` of what is drawn (0 if not given). Blocks are drawn for each layer, head and
/// block of queries, of those up to its own. Queries and keys are numbered from the first of their document.
///
/// Differences to `DeepSpeed`: no block after the query's is drawn, fewer are drawn where there are fewer, and
/// a last window that is cut short has no global blocks of its own. So whether a query attends to a key does
/// not depend on the length of the text, and a text that grows token by token has the same pattern.
///
/// ```
/// use farflung_base::AttentionPattern;
///
/// let pattern: AttentionPattern = "window:256+sinks:4".parse().unwrap();
/// assert!(pattern.keeps(0, 0, 1000, 745) && pattern.keeps(0, 0, 1000, 3) && !pattern.keeps(0, 0, 1000, 744));
/// assert_eq!(pattern.to_string(), "window:256+sinks:4");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AttentionPattern {
    pub(super) shape: Shape,
    /// Number of first keys that all queries attend to.
    pub(super) sinks: u32,
    /// Number of keys of a block.
    pub(super) block: u32,
    pub(super) seed: u32,
}

/// Text that is no pattern.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParsePatternError {
    /// The text of the pattern.
    pub text: String,
    /// The part of the text that is wrong.
    pub field: String,
    /// What was expected there.
    pub expected: &'static str,
}

impl fmt::Display for ParsePatternError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { text, field, expected } = self;
        write!(f, "the attention pattern `{text}` has `{field}`; expected {expected}")
    }
}

impl std::error::Error for ParsePatternError {}

/// Keys of a block if the text does not say it.
const BLOCK: u32 = 16;

/// Largest number in the text of a pattern: as many as a context can have tokens.
const MOST: u32 = 1 << 24;

/// Most blocks that are drawn for a block of queries.
const MOST_DRAWN: u32 = 256;

impl Default for AttentionPattern {
    fn default() -> Self {
        Self::FULL
    }
}

impl AttentionPattern {
    /// All keys up to the query's own.
    pub const FULL: Self = Self::of(Shape::Full);

    /// The last `keys` keys, the query's own included; `None` for fewer than 1 or more than 16777216.
    #[must_use]
    pub const fn windowed(keys: usize) -> Option<Self> {
        if keys == 0 || keys > MOST as usize { None } else { Some(Self::of(Shape::Window(keys as u32))) }
    }

    const fn of(shape: Shape) -> Self {
        Self { shape, sinks: 0, block: BLOCK, seed: 0 }
    }

    /// Returns whether a query attends to all keys up to its own.
    #[must_use]
    pub const fn is_full(self) -> bool {
        matches!(self.shape, Shape::Full)
    }

    /// Returns the number of keys of a window, if the pattern is one without sinks.
    #[must_use]
    pub const fn window(self) -> Option<usize> {
        match self.shape {
            Shape::Window(keys) if self.sinks == 0 => Some(keys as usize),
            _ => None,
        }
    }

    /// Returns whether the keys of each query are one range: all of them, or a window.
    #[must_use]
    pub const fn is_one_range(self) -> bool {
        self.is_full() || self.window().is_some()
    }

    /// Returns whether layers have different keys although they have the same pattern.
    #[must_use]
    pub const fn differs_by_layer(self) -> bool {
        self.drawn() > 0
    }

    /// Returns the number of drawn blocks.
    pub(super) const fn drawn(self) -> u32 {
        match self.shape {
            Shape::Variable { random, .. } | Shape::BigBird { random, .. } => random,
            _ => 0,
        }
    }
}

impl fmt::Display for AttentionPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.shape {
            Shape::Full => f.write_str("full")?,
            Shape::Window(keys) => write!(f, "window:{keys}")?,
            Shape::Strided(stride) => write!(f, "strided:{stride}")?,
            Shape::Fixed { local, global, patterns: 1 } => write!(f, "fixed:{local},{global}")?,
            Shape::Fixed { local, global, patterns } => write!(f, "fixed:{local},{global},{patterns}")?,
            Shape::Variable { windows, global, random } => {
                write!(f, "variable:{windows}")?;
                if !global.as_slice().is_empty() {
                    write!(f, "+global:{global}")?;
                }
                if random > 0 {
                    write!(f, "+random:{random}")?;
                }
            }
            Shape::BigBird { window, global, random } => write!(f, "bigbird:{window},{global},{random}")?,
        }
        for (name, value, usual) in
            [("block", self.block, BLOCK), ("sinks", self.sinks, 0), ("seed", self.seed, 0)]
        {
            if value != usual {
                write!(f, "+{name}:{value}")?;
            }
        }
        Ok(())
    }
}

/// Reads the parts of one pattern's text.
struct Reader<'a> {
    text: &'a str,
}

impl Reader<'_> {
    fn fail<T>(&self, field: &str, expected: &'static str) -> Result<T, ParsePatternError> {
        // The start of a wrong text is enough to find it.
        let short = |text: &str| text.chars().take(64).collect();
        Err(ParsePatternError { text: short(self.text), field: short(field), expected })
    }

    /// Reads numbers of a part `name:number,...`, at most [`LISTED`] of `least` or more.
    fn numbers(&self, part: &str, least: u32) -> Result<Vec<u32>, ParsePatternError> {
        let expected = match least {
            0 => "a colon and whole numbers from 0 to 16777216, at most 8, with commas between them",
            _ => "a colon and whole numbers from 1 to 16777216, at most 8, with commas between them",
        };
        let Some((_, list)) = part.split_once(':') else { return self.fail(part, expected) };
        let mut numbers = Vec::new();
        for number in list.split(',') {
            match number.parse() {
                Ok(value)
                    if number.bytes().all(|b| b.is_ascii_digit())
                        && (least..=MOST).contains(&value)
                        && numbers.len() < LISTED =>
                {
                    numbers.push(value);
                }
                _ => return self.fail(part, expected),
            }
        }
        Ok(numbers)
    }

    fn one(&self, part: &str, least: u32) -> Result<u32, ParsePatternError> {
        match self.numbers(part, least)?[..] {
            [one] => Ok(one),
            _ => self.fail(part, "one number"),
        }
    }

    fn drawn(&self, part: &str, number: u32) -> Result<u32, ParsePatternError> {
        if number > MOST_DRAWN { self.fail(part, "at most 256 drawn blocks") } else { Ok(number) }
    }

    fn shape(&self, part: &str) -> Result<Shape, ParsePatternError> {
        let shape = match part.split(':').next().unwrap_or_default() {
            "full" if part == "full" => Shape::Full,
            "full" => return self.fail(part, "`full` without numbers"),
            "window" => Shape::Window(self.one(part, 1)?),
            "strided" => Shape::Strided(self.one(part, 1)?),
            "fixed" => {
                let (local, global, patterns) = match self.numbers(part, 1)?[..] {
                    [local, global] => (local, global, 1),
                    [local, global, patterns] => (local, global, patterns),
                    _ => {
                        return self.fail(
                            part,
                            "the blocks of a window, of them global, and then patterns or nothing",
                        );
                    }
                };
                if u64::from(global) * u64::from(patterns) > u64::from(local) {
                    return self
                        .fail(part, "a window with enough blocks for the global ones of all patterns");
                }
                Shape::Fixed { local, global, patterns }
            }
            "variable" => {
                let windows = List::new(&self.numbers(part, 1)?).expect("as many as are read");
                Shape::Variable { windows, global: List::EMPTY, random: 0 }
            }
            "bigbird" => match self.numbers(part, 0)?[..] {
                [window, global, random] if window > 0 => {
                    Shape::BigBird { window, global, random: self.drawn(part, random)? }
                }
                _ => {
                    return self
                        .fail(part, "the blocks of a window, at least 1, global ones, and drawn ones");
                }
            },
            _ => {
                let expected = "full, window:W, strided:S, fixed:L,G, variable:L,..., or bigbird:W,G,R, and \
                                fields after +";
                return self.fail(part, expected);
            }
        };
        Ok(shape)
    }
}

impl FromStr for AttentionPattern {
    type Err = ParsePatternError;

    fn from_str(text: &str) -> Result<Self, ParsePatternError> {
        let reader = Reader { text };
        let mut parts = text.split('+');
        let mut pattern = Self::of(reader.shape(parts.next().unwrap_or_default())?);
        let mut before: Vec<&str> = Vec::new();
        for part in parts {
            let name = part.split(':').next().unwrap_or_default();
            if before.contains(&name) {
                return reader.fail(part, "each field once");
            }
            let has_blocks =
                matches!(pattern.shape, Shape::Fixed { .. } | Shape::Variable { .. } | Shape::BigBird { .. });
            match (name, &mut pattern.shape) {
                ("sinks", Shape::Full) => return reader.fail(part, "no sinks: `full` has all keys"),
                ("sinks", _) => pattern.sinks = reader.one(part, 1)?,
                ("block", _) if has_blocks => pattern.block = reader.one(part, 1)?,
                ("global", Shape::Variable { global, .. }) => {
                    *global = List::new(&reader.numbers(part, 0)?).expect("as many as are read");
                }
                ("random", Shape::Variable { random, .. }) => {
                    *random = reader.drawn(part, reader.one(part, 1)?)?;
                }
                ("seed", Shape::Variable { .. } | Shape::BigBird { .. }) => {
                    pattern.seed = reader.one(part, 0)?;
                }
                _ => {
                    let expected = "sinks:N (not of full); block:N of fixed, variable and bigbird; seed:N of \
                                    variable and bigbird; global:B,... and random:N of variable";
                    return reader.fail(part, expected);
                }
            }
            before.push(name);
        }
        if before.contains(&"seed") && pattern.drawn() == 0 {
            return reader.fail("seed", "no seed where nothing is drawn");
        }
        Ok(pattern)
    }
}

/// The patterns of a model's layers: the first layer has the first one, the next one the next, and after the
/// last comes the first again. As text with `/` between them: `window:256/full`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerPatterns(Vec<AttentionPattern>);

impl LayerPatterns {
    /// Most patterns that alternate.
    const MOST: usize = 1 << 14;

    /// Returns the patterns of all layers of a model, as the shortest that alternate; `None` without layers, or
    /// with more than 16384.
    #[must_use]
    pub fn of_layers(mut layers: Vec<AttentionPattern>) -> Option<Self> {
        let repeats = |len: &usize| layers.iter().zip(&layers[*len..]).all(|(one, later)| one == later);
        let len = (1..=layers.len()).find(repeats)?;
        layers.truncate(len);
        (len <= Self::MOST).then_some(Self(layers))
    }

    /// Returns a pattern with which the keys of a query are not one range, if there is one.
    #[must_use]
    pub fn of_tiles(&self) -> Option<AttentionPattern> {
        self.0.iter().copied().find(|pattern| !pattern.is_one_range())
    }

    /// Returns the pattern of a layer.
    #[must_use]
    pub fn of(&self, layer: usize) -> AttentionPattern {
        self.0[layer % self.0.len()]
    }
}

impl fmt::Display for LayerPatterns {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, pattern) in self.0.iter().enumerate() {
            write!(f, "{}{pattern}", if at == 0 { "" } else { "/" })?;
        }
        Ok(())
    }
}

impl FromStr for LayerPatterns {
    type Err = ParsePatternError;

    fn from_str(text: &str) -> Result<Self, ParsePatternError> {
        if text.split('/').nth(Self::MOST).is_some() {
            return Reader { text }.fail("/", "at most 16384 patterns");
        }
        Ok(Self(text.split('/').map(str::parse).collect::<Result<_, _>>()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_read_back() {
        for text in [
            "full",
            "window:1",
            "window:256+sinks:4",
            "strided:128",
            "strided:128+sinks:1",
            "fixed:4,1",
            "fixed:4,1,4+block:64+sinks:2",
            "variable:1,2,3",
            "variable:4+global:0,5+random:2+block:1+seed:7",
            "bigbird:3,1,0",
            "bigbird:3,0,2+block:64+sinks:1+seed:9",
        ] {
            let pattern: AttentionPattern = text.parse().unwrap();
            assert_eq!(pattern.to_string(), text);
        }
        for (text, same) in [("fixed:4,1,1+block:16", "fixed:4,1"), ("window:007", "window:7")] {
            assert_eq!(text.parse::<AttentionPattern>().unwrap().to_string(), same);
        }
        let layers: LayerPatterns = "window:256/full".parse().unwrap();
        assert_eq!(layers.to_string(), "window:256/full");
        assert_eq!([0, 1, 2].map(|layer| layers.of(layer).is_full()), [false, true, false]);
        let of = |count| LayerPatterns::of_layers((0..count).map(|layer| layers.of(layer)).collect());
        assert_eq!(of(5).unwrap(), layers);
        assert_eq!(
            [of(1).unwrap().to_string(), of(2).unwrap().to_string()],
            ["window:256", "window:256/full"]
        );
        assert_eq!(of(0), None);
    }

    #[test]
    fn errors_say_which_part() {
        for (text, field, expected) in [
            ("window:0", "window:0", "from 1"),
            ("window", "window", "from 1"),
            ("window:-1", "window:-1", "from 1"),
            ("window:+1", "window:", "from 1"),
            ("window:4,5", "window:4,5", "one number"),
            ("window:16777217", "window:16777217", "16777216"),
            ("window:99999999999999999999", "window:99999999999999999999", "16777216"),
            ("full:3", "full:3", "without numbers"),
            ("", "", "bigbird:W,G,R"),
            ("sinks:3", "sinks:3", "bigbird:W,G,R"),
            ("full+sinks:3", "sinks:3", "no sinks"),
            ("fixed:4", "fixed:4", "blocks of a window"),
            ("fixed:4,2,3", "fixed:4,2,3", "enough blocks"),
            ("bigbird:0,1,1", "bigbird:0,1,1", "at least 1"),
            ("bigbird:3,1,257", "bigbird:3,1,257", "256"),
            ("bigbird:3,1,0+seed:1", "seed", "nothing is drawn"),
            ("window:4+block:2", "block:2", "of fixed"),
            ("window:4+sinks:1+sinks:2", "sinks:2", "once"),
            ("variable:1,2,3,4,5,6,7,8,9", "variable:1,2,3,4,5,6,7,8,9", "at most 8"),
            ("variable:1+global:", "global:", "from 0"),
        ] {
            let error = text.parse::<AttentionPattern>().unwrap_err();
            assert_eq!(error.field, field, "{text}");
            assert!(error.to_string().contains(expected), "{text}: {error}");
        }
        assert!("full/".parse::<LayerPatterns>().is_err());
        assert!(vec!["full"; 16_385].join("/").parse::<LayerPatterns>().is_err());
        let long = "x".repeat(1 << 20).parse::<AttentionPattern>().unwrap_err();
        assert_eq!(long.text.len(), 64);
    }
}
