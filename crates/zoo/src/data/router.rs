//! Router of texts to paths: a text goes to the path whose training text is most like the text's first tokens.

use std::fmt;
use std::ops::Range;

use serde::de::{Deserializer, Error, SeqAccess, Visitor};
use serde::{Deserialize, Serialize, Serializer};

use super::kmeans::{BUCKETS, Point, features, features_at, mean, nearest};
use super::shards::Shards;
use super::tokens::Split;
use crate::{Tokenizer, ZooError};

/// Maximum number of paths.
const MOST_PATHS: usize = 1 << 16;
/// Maximum number of pieces of a path's text whose mean is the path's centre.
const MOST_PIECES: usize = 4096;

/// Chooses one of several paths for a text by its first tokens. A path is a model that is trained on its own
/// part of a text, and that may share modules with other paths.
///
/// A text's features are the square roots of the frequencies of its first tokens, by token id modulo 256, as
/// in the clusters of [`Sharding::KMeans`](super::Sharding::KMeans). Each path has a centre, and the nearest
/// one is chosen.
///
/// The serialized form is a map: `prefix`, and `centres` with 256 numbers from 0 to 1 for each path. It is
/// checked when it is read, so it may come from an untrusted file.
///
/// Source: Douillard et al. 2024, "Distributed Path Composition", arXiv 2403.10616.
///
/// ```
/// use farflung_zoo::data::{Corpus, HoldOut, Sharding, Shards, TextRouter};
/// use farflung_zoo::tokenizer::Byte;
///
/// let texts = [b"abababababababababab", b"xyxyxyxyxyxyxyxyxyxy"];
/// let corpus = Corpus::from_texts("two alphabets", texts.iter().map(|text| &text[..]), &Byte)?;
/// let (training, _) = corpus.split(HoldOut::Tokens(0))?;
/// let shards = Shards::new(Sharding::Files, &training, 8, 2, 1)?.expect("shards of files");
/// let router = TextRouter::of(&shards, &training, 4)?;
/// assert_eq!(router.path(&b"yyxx".map(u32::from)), 1);
/// # Ok::<(), farflung_zoo::ZooError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TextRouter {
    #[serde(deserialize_with = "read_prefix")]
    prefix: usize,
    /// Centre of each path.
    #[serde(serialize_with = "write_centres", deserialize_with = "read_centres")]
    centres: Vec<[f32; BUCKETS]>,
}

impl TextRouter {
    /// Creates a router for paths that each train on one replica's ranges of a split. `prefix` is the number of
    /// tokens that decide.
    ///
    /// The centre of a path is the mean of the features of pieces of `prefix` tokens, which follow each other
    /// in each of its ranges. What is left at the end of a range is not used, and a range that is shorter than
    /// `prefix` is one piece. If there are more than 4096 pieces, 4096 of them are taken, spread evenly. The
    /// router is a pure function of the arguments.
    ///
    /// Errors: [`ZooError::Sampler`] if `prefix` is 0, or if there are no paths or more than 65536.
    ///
    /// # Panics
    /// If a range ends after the split's end.
    pub fn of(shards: &Shards, split: &Split, prefix: usize) -> Result<Self, ZooError> {
        let wrong = |field, value, expected: String| Err(ZooError::Sampler { field, value, expected });
        if prefix == 0 {
            return wrong("prefix", prefix, "at least 1".to_owned());
        }
        let paths = shards.replicas();
        if !(1..=MOST_PATHS).contains(&paths) {
            return wrong("paths", paths, format!("1 to {MOST_PATHS}"));
        }
        let centre = |path| {
            let points = pieces(shards.of(path), prefix);
            let points = points.map(|piece| features_at(split, piece.start, piece.len()));
            mean(points).unwrap_or([0.0; BUCKETS]).map(|x| x as f32)
        };
        Ok(Self { prefix, centres: (0..paths).map(centre).collect() })
    }

    /// Returns the number of the path for a text: the one whose centre is nearest to the features of the first
    /// [`TextRouter::prefix`] tokens, or of all if there are fewer. In a tie it is the lower one. A text
    /// without tokens has path 0.
    #[must_use]
    pub fn path(&self, tokens: &[u32]) -> usize {
        let first = &tokens[..self.prefix.min(tokens.len())];
        if first.is_empty() {
            return 0;
        }
        let point: Point = features(first);
        nearest(&self.centres, &point).0
    }

    /// Returns the number of the path that a text takes: that of its tokens, without those that a prompt begins
    /// with for every text.
    ///
    /// Errors: those of the tokenizer.
    pub fn path_of(&self, tokenizer: &dyn Tokenizer, text: &str) -> Result<usize, ZooError> {
        Ok(self.path(&tokenizer.encode(text)?))
    }

    /// Returns the number of paths, from 1 to 65536.
    #[must_use]
    pub const fn paths(&self) -> usize {
        self.centres.len()
    }

    /// Returns the number of tokens that decide, at least 1.
    #[must_use]
    pub const fn prefix(&self) -> usize {
        self.prefix
    }
}

/// Returns at most [`MOST_PIECES`] pieces of `prefix` tokens of some ranges that are not empty.
fn pieces(ranges: &[Range<usize>], prefix: usize) -> impl Iterator<Item = Range<usize>> {
    let mut all = 0;
    // For each range, number of pieces in it and in all ranges before.
    let ends = ranges.iter().map(|range| {
        all += (range.len() / prefix).max(1);
        all
    });
    let ends: Vec<usize> = ends.collect();
    let taken = all.min(MOST_PIECES);
    (0..taken).map(move |i| {
        let number = (i as u128 * all as u128 / taken as u128) as usize;
        let at = ends.partition_point(|&end| end <= number);
        let before = if at == 0 { 0 } else { ends[at - 1] };
        let start = ranges[at].start + (number - before) * prefix;
        start..ranges[at].end.min(start.saturating_add(prefix))
    })
}

/// Returns a function for `map_err` that names the field.
fn of_field<E: Error>(field: &'static str, expected: String) -> impl FnOnce(E) -> E {
    move |error| E::custom(format!("`{field}`: expected {expected}: {error}"))
}

fn read_prefix<'de, D: Deserializer<'de>>(from: D) -> Result<usize, D::Error> {
    let prefix = usize::deserialize(from).and_then(|prefix| match prefix {
        0 => Err(D::Error::custom("it is 0")),
        _ => Ok(prefix),
    });
    prefix.map_err(of_field("prefix", "a number of tokens of at least 1".to_owned()))
}

fn write_centres<S: Serializer>(centres: &[[f32; BUCKETS]], to: S) -> Result<S::Ok, S::Error> {
    to.collect_seq(centres.iter().map(<[f32; BUCKETS]>::as_slice))
}

fn read_centres<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<[f32; BUCKETS]>, D::Error> {
    let expected = format!("1 to {MOST_PATHS} lists of {BUCKETS} numbers from 0 to 1");
    from.deserialize_seq(CentresVisitor).map_err(of_field("centres", expected))
}

/// Reads a list of centres, no further than to the first one too many.
struct CentresVisitor;

impl<'de> Visitor<'de> for CentresVisitor {
    type Value = Vec<[f32; BUCKETS]>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of lists")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
        let mut centres = Vec::new();
        while let Some(Centre(centre)) = list.next_element()? {
            if centres.len() == MOST_PATHS {
                return Err(A::Error::custom("there are more"));
            }
            centres.push(centre);
        }
        if centres.is_empty() { Err(A::Error::custom("there are none")) } else { Ok(centres) }
    }
}

/// A centre as it is read, no further than to the first value too many.
struct Centre([f32; BUCKETS]);

impl<'de> Deserialize<'de> for Centre {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_seq(CentreVisitor)
    }
}

struct CentreVisitor;

impl<'de> Visitor<'de> for CentreVisitor {
    type Value = Centre;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of numbers")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Centre, A::Error> {
        let (mut centre, mut count) = ([0.0; BUCKETS], 0);
        while let Some(value) = list.next_element::<f32>()? {
            let Some(place) = centre.get_mut(count) else {
                return Err(A::Error::custom("a list has more values"));
            };
            if !(0.0..=1.0).contains(&value) {
                return Err(A::Error::custom(format!("a value is {value}")));
            }
            *place = value;
            count += 1;
        }
        if count < BUCKETS {
            return Err(A::Error::custom(format!("a list has {count} values")));
        }
        Ok(Centre(centre))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::{Corpus, HoldOut, Sharding};
    use crate::tokenizer::Byte;

    /// Creates the text of documents and their router, with a path for each document.
    fn router(texts: &[&[u8]], prefix: usize) -> (Split, TextRouter) {
        let corpus = Corpus::from_texts("texts", texts.iter().copied(), &Byte).unwrap();
        let (split, _) = corpus.split(HoldOut::Tokens(0)).unwrap();
        let shards = Shards::new(Sharding::Files, &split, 4, texts.len(), 1).unwrap().unwrap();
        let router = TextRouter::of(&shards, &split, prefix).unwrap();
        (split, router)
    }

    fn tokens(text: &[u8]) -> Vec<u32> {
        text.iter().copied().map(u32::from).collect()
    }

    /// Returns a text of letters from `first` on, which looks random.
    fn text(first: u8, letters: u32, len: u32) -> Vec<u8> {
        (0..len).map(|i| first + (i.wrapping_mul(2_654_435_761) >> 7).rem_euclid(letters) as u8).collect()
    }

    #[test]
    fn pieces_go_to_the_path_that_trained_on_their_alphabet() {
        // Alphabets overlap: 10 letters each, 5 of them shared with the next one.
        let texts: Vec<Vec<u8>> = (0..4_u8).map(|i| text(b'a' + 5 * i, 10, 4000 - u32::from(i))).collect();
        let texts: Vec<&[u8]> = texts.iter().map(Vec::as_slice).collect();
        let (split, router) = router(&texts, 32);
        assert_eq!((router.paths(), router.prefix()), (4, 32));
        for (path, range) in split.documents().into_iter().enumerate() {
            for start in range.clone().step_by(7).filter(|start| start + 40 <= range.end) {
                let mut piece = Vec::new();
                split.append_to(start, 40, &mut piece);
                assert_eq!(router.path(&piece), path, "{start}");
                // Tokens after the prefix decide nothing.
                piece[32..].fill(b'z'.into());
                assert_eq!(router.path(&piece), path, "{start}");
            }
        }
    }

    #[test]
    fn clusters_of_a_mixed_text_get_their_texts() {
        let parts: Vec<Vec<u8>> = (0..12).map(|i| text([b'a', b'p'][i % 2], 8, 2000)).collect();
        let corpus = Corpus::from_bytes("mixed", &parts.concat(), &Byte).unwrap();
        let (split, _) = corpus.split(HoldOut::Tokens(0)).unwrap();
        let shards = Shards::new(Sharding::KMeans(4), &split, 8, 2, 3).unwrap().unwrap();
        let router = TextRouter::of(&shards, &split, 16).unwrap();
        let (mut right, mut all) = (0, 0);
        for path in 0..2 {
            for range in shards.of(path).iter() {
                for piece in pieces(std::slice::from_ref(range), 16) {
                    let mut tokens = Vec::new();
                    split.append_to(piece.start, piece.len(), &mut tokens);
                    right += usize::from(router.path(&tokens) == path);
                    all += 1;
                }
            }
        }
        assert!(all > 1000 && right * 10 > all * 9, "{right} of {all}");
    }

    #[test]
    fn short_and_empty_texts_and_ties_have_a_path() {
        let (_, router) = router(&[b"aaaaaaaaaa", b"bbbbbbbbb", b"bbbbbbbb"], 4);
        assert_eq!(router.path(&[]), 0);
        assert_eq!(router.path(&tokens(b"a")), 0);
        // The second and the third path are the same.
        assert_eq!(router.path(&tokens(b"b")), 1);
        // Neither is nearer.
        assert_eq!(router.path(&tokens(b"ab")), 0);
        assert_eq!(router.path(&[u32::MAX, u32::MAX - 255]), 0);
    }

    #[test]
    fn pieces_are_spread_over_the_ranges() {
        let all = |ranges: &[Range<usize>], prefix| pieces(ranges, prefix).collect::<Vec<_>>();
        assert_eq!(all(&[3..12, 20..22, 30..34], 4), [3..7, 7..11, 20..22, 30..34]);
        assert_eq!(all(&[3..12, 20..22], usize::MAX), [3..12, 20..22]);
        // Every fourth piece is taken.
        let many = all(&[0..3 * MOST_PIECES, 100_000..100_000 + 5 * MOST_PIECES], 2);
        let (first, second) = many.split_at(3 * MOST_PIECES / 8);
        assert_eq!((many.len(), first[0].clone(), first[1].clone()), (MOST_PIECES, 0..2, 8..10));
        assert_eq!((second[0].clone(), second[1].clone()), (100_000..100_002, 100_008..100_010));
        let last = 100_000 + 5 * MOST_PIECES - 8;
        assert_eq!(many.last().cloned(), Some(last..last + 2));
    }

    #[test]
    fn the_centre_is_the_mean_of_the_pieces() {
        let (_, router) = router(&[b"aabbabaaxx"], 4);
        // The first piece has as many a as b, the second has three a of four. The rest at the end is not used.
        let a = f64::midpoint(0.5_f64.sqrt(), 0.75_f64.sqrt()) as f32;
        let b = f64::midpoint(0.5_f64.sqrt(), 0.25_f64.sqrt()) as f32;
        let centre = router.centres[0];
        let found = [b'a', b'b', b'x'].map(|letter| centre[usize::from(letter)]);
        assert_eq!(found.map(f32::to_bits), [a, b, 0.0].map(f32::to_bits));
    }

    #[test]
    fn a_router_without_a_prefix_is_refused() {
        let corpus = Corpus::from_bytes("one", b"a text of some letters", &Byte).unwrap();
        let (split, _) = corpus.split(HoldOut::Tokens(0)).unwrap();
        let shards = Shards::new(Sharding::Files, &split, 4, 1, 1).unwrap().unwrap();
        let message = TextRouter::of(&shards, &split, 0).unwrap_err().to_string();
        assert!(message.contains("`prefix` is 0, expected at least 1"), "{message}");
    }

    #[test]
    fn what_is_saved_is_read_again() {
        let texts = [text(b'a', 10, 999), text(b'c', 3, 500), text(b'0', 40, 77)];
        let (_, router) = router(&[&texts[0], &texts[1], &texts[2]], 7);
        let json = serde_json::to_string(&router).unwrap();
        assert_eq!(serde_json::from_str::<TextRouter>(&json).unwrap(), router);
        let value = serde_json::to_value(&router).unwrap();
        assert_eq!(value["centres"].as_array().unwrap().len(), 3);
        assert_eq!(serde_json::from_value::<TextRouter>(value).unwrap(), router);
    }

    /// Returns the JSON text of a centre of `count` zeros whose last value is `last`.
    fn centre(count: usize, last: &str) -> String {
        format!("[{}{last}]", "0,".repeat(count - 1))
    }

    #[test]
    fn a_file_of_too_many_paths_is_refused() {
        let of = |paths: usize| {
            let all = (centre(256, "0") + ",").repeat(paths);
            format!(r#"{{"prefix": 1, "centres": [{}]}}"#, all.trim_end_matches(','))
        };
        assert_eq!(serde_json::from_str::<TextRouter>(&of(MOST_PATHS)).unwrap().paths(), MOST_PATHS);
        let message = serde_json::from_str::<TextRouter>(&of(MOST_PATHS + 1)).unwrap_err().to_string();
        assert!(
            message.contains("`centres`: expected 1 to 65536 lists") && message.contains("more"),
            "{message}"
        );
    }

    #[test]
    fn files_that_are_no_router_are_refused_by_field() {
        let of = |prefix: &str, centres: &str| format!(r#"{{"prefix": {prefix}, "centres": {centres}}}"#);
        let one = |last: &str| of("3", &format!("[{}]", centre(256, last)));
        let good = one("1");
        assert_eq!(serde_json::from_str::<TextRouter>(&good).unwrap().path(&[255]), 0);
        let (prefix, centres) =
            ("`prefix`: expected a number of tokens of at least 1: ", "`centres`: expected 1 ");
        for (json, field, said) in [
            (of("3", "[]"), centres, "none"),
            (of("3", &format!("[{}]", centre(255, "0"))), centres, "a list has 255 values"),
            (of("3", &format!("[{}, {}]", centre(256, "0"), centre(257, "0"))), centres, "more values"),
            (of("3", "[[]]"), centres, "a list has 0 values"),
            (of("3", "[3]"), centres, "integer `3`"),
            (of("3", "{}"), centres, "map"),
            (of("3", "null"), centres, "null"),
            (one("-0.001"), centres, "a value is -0.001"),
            (one("1.001"), centres, "a value is 1.001"),
            (one("1e39"), centres, ""),
            (one("1e999"), centres, ""),
            (one("null"), centres, "null"),
            (one("\"0\""), centres, "string"),
            (one("[0]"), centres, "sequence"),
            (good.replace('3', "0"), prefix, "it is 0"),
            (good.replace('3', "-1"), prefix, "-1"),
            (good.replace('3', "3.5"), prefix, "3.5"),
            (good.replace('3', "18446744073709551616"), prefix, ""),
            (good.replace('3', "null"), prefix, "null"),
            (r#"{"prefix": 3}"#.to_owned(), "missing field `centres`", ""),
            (good.replace("\"prefix\": 3, ", ""), "missing field `prefix`", ""),
            (good.replace("prefix", "centres"), "centres", ""),
            (good.replace("\"prefix\"", "\"prefix\": 3, \"prefix\""), "duplicate field `prefix`", ""),
            (good.replace("\"prefix\"", "\"x\": 3, \"prefix\""), "unknown field `x`", "expected `prefix` or"),
            (good[..good.len() - 3].to_owned(), centres, "EOF"),
        ] {
            let message = serde_json::from_str::<TextRouter>(&json).unwrap_err().to_string();
            let start = &json[..json.len().min(60)];
            assert!(message.contains(field) && message.contains(said), "{start}: {message}");
            // What is wrong is also found in a value that was parsed before.
            if let Ok(value) = serde_json::from_str::<serde_json::Value>(&json) {
                let twice = field.contains("duplicate");
                assert!(twice || serde_json::from_value::<TextRouter>(value).is_err(), "{start}");
            }
        }
    }
}
