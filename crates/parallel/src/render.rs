//! Draws a [`Timeline`](crate::Timeline): text grids for terminals and snapshots, an SVG, and a trace for
//! Perfetto; and the map of a placement. Strings out; it writes no file and asks no terminal for its width.

mod cells;
mod map;
mod svg;
mod text;
mod trace;

pub use cells::cells;
pub use map::map;
pub use svg::svg;
pub use text::grid;
pub use trace::trace;

#[cfg(test)]
mod tests;
