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

/// Endings of files of programs and documentation, whose names say nothing about parts: `test.py` is a program.
const NO_DATA: [&str; 24] = [
    "py", "pyi", "ipynb", "rs", "c", "h", "cc", "cpp", "hpp", "java", "go", "js", "ts", "vue", "rb", "php",
    "sh", "md", "rst", "toml", "yaml", "yml", "cfg", "ini",
];

impl Part {
    /// Returns the part that a path below a data set's folder names; `None` if no word of it is that of a part.
    /// `interval.bin` has none.
    ///
    /// A first folder with the name of a part decides. Else the last word that names one does, except in the
    /// paths of programs.
    #[must_use]
    pub fn of(relative: &Path) -> Option<Self> {
        let parts: Vec<_> = relative.iter().map(|part| part.to_string_lossy()).collect();
        if let [first, _, ..] = &parts[..]
            && let Some(part) = of_word(first)
        {
            return Some(part);
        }
        let ending = relative.extension().unwrap_or_default();
        if NO_DATA.iter().any(|known| ending.eq_ignore_ascii_case(known)) {
            return None;
        }
        let words = parts.iter().flat_map(|part| part.split(|c: char| !c.is_ascii_alphabetic()));
        words.filter_map(of_word).next_back()
    }
}

fn of_word(word: &str) -> Option<Part> {
    WORDS.iter().find(|(known, _)| word.eq_ignore_ascii_case(known)).map(|(_, part)| *part)
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
        // The last word counts, and programs have none.
        assert_eq!(of("training_data/valid/b.txt"), Some(Part::Validation));
        assert_eq!(of("dev/train.txt"), Some(Part::Validation), "a folder with the name of a part decides");
        assert_eq!((of("src/train_util.py"), of("tests/test.rs"), of("README-dev.md")), (None, None, None));
        assert_eq!(of("valid/program.py"), Some(Part::Validation));
    }
}
