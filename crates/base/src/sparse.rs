//! Sparse attention: which keys a query attends to, as text, as a rule, and as lists of tiles.

mod pattern;
mod rows;
mod shape;
mod tiles;

pub use pattern::{AttentionPattern, LayerPatterns, ParsePatternError};
pub use rows::PatternHead;
pub use tiles::{HeadTiles, Tile, TileBits, TileLists};
