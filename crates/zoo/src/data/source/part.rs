//! The parts of a data set that has separate files for training, validation and test.

use std::path::Path;

/// The part that a file belongs to, by the words of its name and of the folders above it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// Files to train on: `train.txt`, `train/…`, and every file of a data set without parts.
    Training,
    /// Files that are held out: `valid`, `val`, `validation`, `dev` or `eval`.
    Validation,
    /// Files of the test set, which are held out where there are none for validation.
    Test,
}

const WORDS: [(&str, Part); 9] = [
    ("train", Part::Training),
    ("training", Part::Training),
    ("val", Part::Validation),
    ("valid", Part::Validation),
    ("validation", Part::Validation),
    ("dev", Part::Validation),
    ("eval", Part::Validation),
    ("test", Part::Test),
    ("testing", Part::Test),
];

impl Part {
    /// Returns the part that a path names; `None` if no word of it is that of a part. `interval.bin` has none.
    /// The first word that names one counts.
    #[must_use]
    pub fn of(relative: &Path) -> Option<Self> {
        let text = relative.to_string_lossy();
        let mut words = text.split(|c: char| !c.is_ascii_alphabetic());
        words.find_map(|word| {
            WORDS.iter().find(|(known, _)| word.eq_ignore_ascii_case(known)).map(|(_, part)| *part)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_named_by_whole_words() {
        let of = |path: &str| Part::of(Path::new(path));
        assert_eq!(of("TinyStoriesV2-GPT4-valid.txt"), Some(Part::Validation));
        assert_eq!(of("wiki.train.tokens"), Some(Part::Training));
        assert_eq!(of("train/00000.txt"), Some(Part::Training));
        assert_eq!(of("data/test-00000-of-00001.txt"), Some(Part::Test));
        assert_eq!(of("fineweb_val_000000.bin"), Some(Part::Validation));
        assert_eq!(of("interval.bin"), None);
        assert_eq!(of("contest/latest.txt"), None);
    }
}
