//! Where training data comes from: the files of a path, what each of them is, and how its bytes become text or
//! ids of tokens.

mod decode;
mod error;
mod form;
mod listing;
mod options;
mod part;
mod pickle;
mod reading;
mod sidecar;
mod skipped;
mod token_file;
mod unpack;

pub use decode::{NoEncoding, TextEncoding};
pub use error::SourceError;
pub use listing::{DataFile, Listing};
pub use options::ReadOptions;
pub use part::Part;
pub use reading::{PlainSpecialTokens, Reading};
pub use skipped::Skipped;
pub use token_file::{NoTokenType, TokenType};

pub(super) use decode::{no_text, text_of, wrong_at};
pub(super) use form::{Form, LOOK, unpacked_name};
pub(super) use listing::{left_out_by_form, refused};
pub(super) use sidecar::Sidecar;
pub(super) use token_file::Ids;
pub(super) use unpack::unpack;
