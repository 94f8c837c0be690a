//! Integration tests of this crate. They are one program, because each test program links all crates again.

mod chat;
mod cuts;
mod data;
mod documents;
mod examples;
mod experts;
mod families;
mod found_weights;
mod gguf;
mod keeping;
mod model;
mod objectives;
mod profiles;
mod published_counts;
mod pytorch;
mod slices;
mod sources;
mod sparse;
mod tokenizer_files;
mod tokenizers;
mod transformers;
mod units;
mod weights;

use farflung_zoo as zoo;
