//! Draws a [`Timeline`](crate::Timeline) as text for terminals and snapshots, as SVG, or as a trace for
//! Perfetto; and draws the map of a placement. All functions return strings; nothing writes files or queries
//! the terminal.

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
