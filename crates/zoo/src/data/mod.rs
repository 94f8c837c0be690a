//! From files to batches: a corpus of tokens, its training and held-out splits, and a sampler whose batch is a
//! pure function of (seed, step, rank).
//!
//! Nothing is shuffled on disk. Windows are drawn at random offsets, as in nanoGPT, or in shuffled epochs of
//! numbered windows.

mod batch;
mod corpus;
mod encode;
mod epochs;
mod examples;
mod kmeans;
mod objective;
mod router;
mod sampler;
mod shards;
mod source;
mod token_rows;
mod tokens;

pub use batch::Batch;
pub use corpus::{Corpus, HoldOut};
pub use examples::{ExampleRows, LossOn, Packing, has_examples, is_file_of_examples};
pub use objective::{NoObjective, Objective};
pub use router::TextRouter;
pub use sampler::{Offsets, Sampler, Shard};
pub use shards::{NoSharding, Sharding, Shards};
pub use source::{
    DataFile, Listing, NoEncoding, NoTokenType, Part, PlainSpecialTokens, ReadOptions, Reading, Skipped,
    SourceError, TextEncoding, TokenType,
};
pub use token_rows::TokenRows;
pub use tokens::{Split, Tokens};
