//! A collective as data: what one rank sends and receives, step by step. Pure; it knows no network and no bytes.

use std::fmt;
use std::ops::Range;

use farflung_base::Rank;

/// What happens to received values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Merge {
    /// They are reduced into what is there.
    Reduce,
    /// They replace what is there.
    Copy,
}

/// One step of one rank: at most one send and one receive, which overlap in time. The next step starts when both are
/// done.
///
/// Ranges count the blocks of a [`Program`]; those of the send and the receive do not overlap.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Step {
    /// To whom, and which blocks.
    pub send: Option<(Rank, Range<usize>)>,
    /// From whom, into which blocks, and how.
    pub recv: Option<(Rank, Range<usize>, Merge)>,
}

/// What one rank does in a collective, over a buffer that is cut into `blocks` nearly equal blocks.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Program {
    /// Block `i` of `len` elements is `len * i / blocks..len * (i + 1) / blocks`.
    pub blocks: usize,
    /// In order.
    pub steps: Vec<Step>,
}

impl Program {
    /// The elements of a range of blocks in a buffer of `len` elements.
    #[must_use]
    pub fn elements(&self, blocks: &Range<usize>, len: usize) -> Range<usize> {
        cut(len, blocks.start, self.blocks)..cut(len, blocks.end, self.blocks)
    }
}

/// Where block `i` of `blocks` starts in `len` elements.
#[must_use]
pub(crate) const fn cut(len: usize, i: usize, blocks: usize) -> usize {
    (len as u128 * i as u128 / blocks as u128) as usize
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some((to, range)) = &self.send {
            write!(f, "{}..{} -> {}", range.start, range.end, to.0)?;
        }
        if let Some((from, range, merge)) = &self.recv {
            if self.send.is_some() {
                f.write_str("  ")?;
            }
            let sign = match merge {
                Merge::Reduce => "+=",
                Merge::Copy => "=",
            };
            write!(f, "{}..{} {sign} {}", range.start, range.end, from.0)?;
        }
        Ok(())
    }
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "blocks {}:", self.blocks)?;
        self.steps.iter().try_for_each(|step| write!(f, " [{step}]"))
    }
}
