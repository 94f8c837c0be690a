//! Where a long text can be cut such that its pieces have the tokens of the whole.

use serde_json::Value;

use crate::ZooError;

/// Least bytes of a piece.
const PIECE: usize = 1 << 16;
/// Longest run of white space that is encoded at once: the regular expressions that split words keep an entry
/// for each character of a run, and give up at about a million.
const LONGEST_RUN: usize = 1 << 17;

/// Texts that are put together in trials.
const TRIALS: [(&str, &str); 9] = [
    ("of", "the"),
    ("I", "am"),
    ("don", "t"),
    ("Zürich", "Ärger"),
    ("tokens", "are"),
    ("字", "字"),
    ("12", "34"),
    ("a1", "b"),
    ("2", "to"),
];

/// Characters between letters or digits at which texts are cut.
const SEPARATORS: [char; 2] = [' ', '\n'];

/// White space as byte-level vocabularies write it.
const BYTE_LEVEL_WHITE: [char; 4] = ['Ġ', 'Ċ', 'č', 'ĉ'];

/// Where a text is cut at a separator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    /// The separator begins the next piece.
    Before,
    /// The separator ends the piece before.
    After,
    /// The separator is left out: the tokenizer itself begins each text with one.
    Instead,
}

/// The separators at which texts can be cut.
#[derive(Debug, Clone, Default)]
pub(super) struct Cuts {
    possible: Vec<char>,
    places: Vec<(char, Side)>,
}

/// A place for a cut: the end of a piece and the start of the next one.
struct Place {
    end: usize,
    start: usize,
}

impl Cuts {
    /// Finds the separators that no token of a description has after a letter or a digit.
    pub(super) fn of(description: &Value, is_byte_level: bool) -> Self {
        // In a byte-level vocabulary, a space is `Ġ` and a line feed `Ċ`; in SentencePiece's, a space is `▁`.
        let written = |separator: char, c: char| match separator {
            ' ' => c == ' ' || c == '▁' || is_byte_level && c == 'Ġ',
            _ => c == '\n' || is_byte_level && c == 'Ċ',
        };
        let is_white =
            |c: char| c.is_whitespace() || c == '▁' || is_byte_level && BYTE_LEVEL_WHITE.contains(&c);
        // A character beyond ASCII may be a byte of a letter.
        let may_be_word = |c: char| (c.is_alphanumeric() || !c.is_ascii()) && !is_white(c);
        let joins = |separator: char, text: &str| {
            let mut before = ' ';
            text.chars().any(|c| {
                let joins = may_be_word(before) && written(separator, c);
                before = c;
                joins
            })
        };
        let model = &description["model"]["vocab"];
        let words = model.as_object().into_iter().flatten().map(|(word, _)| word.as_str());
        let pieces = model.as_array().into_iter().flatten().filter_map(|piece| piece[0].as_str());
        let added = description["added_tokens"].as_array().into_iter().flatten();
        let takes_more = |token: &Value| {
            ["lstrip", "rstrip", "single_word"].iter().any(|key| token[key] == true)
                && token["content"].as_str().is_some_and(|text| {
                    text.starts_with(char::is_alphanumeric) || text.ends_with(char::is_alphanumeric)
                })
        };
        let all = words.chain(pieces).chain(added.clone().filter_map(|token| token["content"].as_str()));
        let mut possible = SEPARATORS.to_vec();
        let counts_characters = description["pre_tokenizer"].to_string().contains("\"FixedLength\"");
        if counts_characters || added.clone().any(takes_more) {
            possible.clear();
        }
        possible.retain(|separator| !all.clone().any(|word| joins(*separator, word)));
        Self { possible, places: Vec::new() }
    }

    /// Cuts before spaces between letters, as byte-level tokenizers allow.
    pub(super) fn at_spaces() -> Self {
        Self { possible: Vec::new(), places: vec![(' ', Side::Before)] }
    }

    /// Returns the separators with the sides at which trials with `encode` show that cuts change nothing.
    pub(super) fn tried(
        &self,
        encode: impl Fn(&str) -> Result<Vec<u32>, ZooError>,
    ) -> Result<Self, ZooError> {
        let mut this = self.clone();
        for &separator in &self.possible {
            for side in [Side::Before, Side::After, Side::Instead] {
                let mut same = true;
                for (left, right) in TRIALS {
                    let whole = encode(&format!("{left}{separator}{right}"))?;
                    let (left, right) = match side {
                        Side::Before => (left.to_owned(), format!("{separator}{right}")),
                        Side::After => (format!("{left}{separator}"), right.to_owned()),
                        Side::Instead => (left.to_owned(), right.to_owned()),
                    };
                    same &= whole == [encode(&left)?, encode(&right)?].concat();
                }
                if same {
                    this.places.push((separator, side));
                    break;
                }
            }
        }
        Ok(this)
    }

    /// Cuts a text into pieces.
    pub(super) fn pieces<'t>(&self, text: &'t str) -> Vec<&'t str> {
        let mut pieces = Vec::new();
        let mut rest = text;
        while let Some(Place { end, start }) = (rest.len() > PIECE).then(|| self.place(rest)).flatten() {
            pieces.push(&rest[..end]);
            rest = &rest[start..];
        }
        pieces.push(rest);
        pieces
    }

    /// Returns the first place after a piece's least length at which a text can be cut.
    fn place(&self, text: &str) -> Option<Place> {
        let from = (0..=PIECE).rev().find(|&at| text.is_char_boundary(at))?;
        let mut chars = text[from..].char_indices().map(|(at, c)| (from + at, c)).peekable();
        let (mut before, mut run) = (' ', 0);
        while let Some((at, c)) = chars.next() {
            run = if c.is_whitespace() { run + 1 } else { 0 };
            if run > LONGEST_RUN {
                return Some(Place { end: at, start: at });
            }
            let found = self.places.iter().find(|(separator, _)| *separator == c);
            if let (Some((_, side)), Some(&(next, after))) = (found, chars.peek())
                && before.is_alphanumeric()
                && after.is_alphanumeric()
            {
                let (end, start) = match side {
                    Side::Before => (at, at),
                    Side::After => (next, next),
                    Side::Instead => (at, next),
                };
                return Some(Place { end, start });
            }
            before = c;
        }
        None
    }
}
