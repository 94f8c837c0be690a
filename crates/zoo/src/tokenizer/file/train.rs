//! Training a byte-level byte-pair encoding on texts.

use std::collections::BTreeSet;
use std::path::Path;

use tokenizers::AddedToken;
use tokenizers::models::TrainerWrapper;
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;

use super::check::MOST_IDS;
use super::cut::Cuts;
use super::{Beside, FileTokenizer};
use crate::ZooError;

/// How a tokenizer is trained.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TrainOptions {
    /// Number of tokens: the 256 bytes, the special tokens, and a token for each merge.
    pub vocab: usize,
    /// Texts of the special tokens, which get the first ids. The first one ends a document.
    pub special: Vec<String>,
    /// Pairs that occur less often are not merged.
    pub least: u64,
}

impl Default for TrainOptions {
    fn default() -> Self {
        Self { vocab: 8192, special: vec!["<|endoftext|>".to_owned()], least: 2 }
    }
}

impl TrainOptions {
    /// Checks the options.
    ///
    /// Errors: [`ZooError::TokenizerOption`].
    pub fn validate(&self) -> Result<(), ZooError> {
        let wrong = |field, value: String, expected: String| {
            Err(ZooError::TokenizerOption { field, value, expected })
        };
        let sizes = 256 + self.special.len()..=MOST_IDS as usize;
        if !sizes.contains(&self.vocab) {
            let expected = format!("from {} to {}", sizes.start(), sizes.end());
            return wrong("vocab", self.vocab.to_string(), expected);
        }
        let mut seen = BTreeSet::new();
        match self.special.iter().find(|text| text.is_empty() || !seen.insert(*text)) {
            Some(text) => wrong("special", format!("{text:?}"), "texts, each once".to_owned()),
            None => Ok(()),
        }
    }
}

impl FileTokenizer {
    /// Trains a byte-level byte-pair encoding that splits words as GPT-2 does. Equal texts give equal
    /// tokenizers. `fed` is called with the number of bytes of each piece of text that was taken up.
    ///
    /// Source: Sennrich et al. 2016; Radford et al. 2019, section 2.2.
    ///
    /// Errors: as [`TrainOptions::validate`].
    pub fn train<'t>(
        texts: impl Iterator<Item = &'t str> + Send,
        options: &TrainOptions,
        fed: impl Fn(u64) + Send + Sync,
    ) -> Result<Self, ZooError> {
        const NAME: &str = "trained";
        let wrong = |problem: String| ZooError::Tokenizer { name: NAME.to_owned(), problem };
        options.validate()?;
        let trainer = BpeTrainer::builder()
            .vocab_size(options.vocab)
            .min_frequency(options.least)
            .show_progress(false)
            .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
            .special_tokens(options.special.iter().map(|text| AddedToken::from(text.clone(), true)).collect())
            .build();
        let bytes = ByteLevel::new(false, true, true);
        let mut new = tokenizers::Tokenizer::new(BPE::default());
        new.with_pre_tokenizer(Some(bytes)).with_decoder(Some(bytes));
        let cuts = Cuts::at_spaces();
        let pieces = texts.flat_map(|text| cuts.pieces(text)).inspect(|piece| fed(piece.len() as u64));
        let mut trainer = TrainerWrapper::from(trainer);
        new.train(&mut trainer, pieces).map_err(|error| wrong(error.to_string()))?;
        let json = new.to_string(true).map_err(|error| wrong(error.to_string()))?;
        let description = crate::json_file::from_bytes(Path::new(NAME), json.as_bytes())?;
        let beside = Beside::said(None, options.special.first().cloned(), Vec::new(), None);
        Self::new(NAME, description, Some(json.into_bytes()), beside)
    }
}
