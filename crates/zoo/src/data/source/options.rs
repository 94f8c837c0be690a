//! How the files of a data set are read.

use super::{TextEncoding, TokenType};
use crate::data::examples::LossOn;

/// How the files of a data set are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ReadOptions {
    /// Encoding of texts without a byte-order mark. `None` reads UTF-8, and with the byte tokenizer any bytes.
    pub encoding: Option<TextEncoding>,
    /// Whether special tokens that are written in a text, such as `<|endoftext|>`, become tokens.
    pub special_tokens: bool,
    /// Type of the ids in `.bin` files that do not say it themselves. `None` is two bytes.
    pub token_type: Option<TokenType>,
    /// Which tokens of examples are targets.
    pub loss_on: LossOn,
    /// Whether examples are read as texts, as which a tokenizer is trained on them: what is said in them.
    pub as_texts: bool,
}
