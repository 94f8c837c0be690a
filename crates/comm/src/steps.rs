//! A collective as data: what one rank encodes, sends, receives and decodes, step by step. Pure: it depends on
//! no network, no codec and no bytes.

use std::fmt;
use std::ops::Range;

use farflung_base::Rank;

/// What happens to received values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Merge {
    /// They are reduced into what is there, which is the first operand.
    Reduce,
    /// They are reduced into what is there, themselves the first operand: they come of lower ranks, and the
    /// order of ranks is kept. Not in coded programs.
    ReduceBefore,
    /// They replace what is there.
    Copy,
}

impl Merge {
    /// As it is printed.
    const fn sign(self) -> &'static str {
        match self {
            Self::Reduce => "+=",
            Self::ReduceBefore => "=+",
            Self::Copy => "=",
        }
    }
}

/// Which side of a coded reduction encodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Phase {
    /// A rank's own values, or a sum that is not complete yet.
    Worker,
    /// The reduced values of a block: the complete sum, or a part of it that no other rank adds to.
    Server,
}

/// How the values of a message are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Code {
    /// As they are: f32, little-endian.
    Plain,
    /// Through the codec, on this side of the reduction. For a mean, the values of [`Phase::Server`] are
    /// divided first.
    Coded(Phase),
}

/// What a message of a coded program carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CodedMessage {
    /// The values.
    pub block: usize,
    /// How they are written.
    pub code: Code,
}

/// The messages of one step of a coded program, by their numbers in [`Program::messages`].
///
/// First `encode` in order, then sends and receives side by side, then `decode` in order. A message can be used
/// in the step that encodes or receives it and in the next one; then it is dropped.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Coding {
    /// What is encoded.
    pub encode: Vec<usize>,
    /// To whom, and which message. Messages to one rank go one after the other.
    pub sends: Vec<(Rank, usize)>,
    /// From whom, and which message. Messages of one rank come in the order of the list.
    pub recvs: Vec<(Rank, usize)>,
    /// What is decoded, and how its values meet those of the block.
    pub decode: Vec<(usize, Merge)>,
    /// Blocks that then hold complete sums which nobody encodes; for a mean they are divided.
    pub complete: Vec<usize>,
}

impl Coding {
    /// Whether there is nothing in it.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.encode.is_empty() && self.sends.is_empty() && self.recvs.is_empty() && self.decode.is_empty()
    }
}

/// One step of one rank: what it sends goes out side by side, what it receives is taken in the order of the
/// list, and the two overlap in time. The next step starts when all is done.
///
/// Ranges count the blocks of a [`Program`]. Where a receive falls into what is sent, the values from before
/// are sent.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Step {
    /// To whom, and which blocks.
    pub sends: Vec<(Rank, Range<usize>)>,
    /// From whom, into which blocks, and how.
    pub recvs: Vec<(Rank, Range<usize>, Merge)>,
    /// Messages, in a coded program. One that has any has no plain transfers.
    pub coding: Coding,
}

impl Step {
    /// Sends to one rank.
    #[must_use]
    pub fn send(to: Rank, blocks: Range<usize>) -> Self {
        Self { sends: vec![(to, blocks)], ..Self::default() }
    }

    /// Receives from one rank.
    #[must_use]
    pub fn recv(from: Rank, blocks: Range<usize>, merge: Merge) -> Self {
        Self { recvs: vec![(from, blocks, merge)], ..Self::default() }
    }

    /// This step, and a receive beside it.
    #[must_use]
    pub fn and_recv(mut self, from: Rank, blocks: Range<usize>, merge: Merge) -> Self {
        self.recvs.push((from, blocks, merge));
        self
    }

    /// Whether there is nothing in it.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.sends.is_empty() && self.recvs.is_empty() && self.coding.is_empty()
    }
}

/// What one rank does in a collective, over a buffer that is cut into blocks.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Program {
    /// How many.
    pub blocks: usize,
    /// The element at which each block begins, and the length of the buffer. `None`: blocks are nearly equal,
    /// block `i` of `len` elements is `len * i / blocks..len * (i + 1) / blocks`.
    pub bounds: Option<Vec<usize>>,
    /// Lists of steps that run side by side, on blocks of their own: chunks that are pipelined, trees,
    /// directions.
    pub lanes: Vec<Vec<Step>>,
    /// Lanes under way at a time: lane `i` starts when lane `i - window` is done, so that whoever is fast does
    /// not send so far ahead that others wait for what they need sooner.
    pub window: usize,
    /// What each message of a coded program carries; none in a plain one.
    pub messages: Vec<CodedMessage>,
}

impl Program {
    /// One list of steps over nearly equal blocks.
    #[must_use]
    pub fn new(blocks: usize, steps: Vec<Step>) -> Self {
        Self::side_by_side(blocks, vec![steps])
    }

    /// Lists of steps that all start at once.
    #[must_use]
    pub const fn side_by_side(blocks: usize, lanes: Vec<Vec<Step>>) -> Self {
        Self { blocks, bounds: None, lanes, window: usize::MAX, messages: Vec::new() }
    }

    /// The same with so many lanes under way at a time.
    #[must_use]
    pub fn with_window(self, window: usize) -> Self {
        Self { window, ..self }
    }

    /// The same over blocks of so many elements each.
    #[must_use]
    pub fn with_counts(self, counts: &[usize]) -> Self {
        let mut bounds = vec![0];
        bounds.extend(counts.iter().scan(0, |end, count| {
            *end += count;
            Some(*end)
        }));
        Self { bounds: Some(bounds), ..self }
    }

    /// This program's one list of steps, and then another's over the same blocks.
    pub(crate) fn then(mut self, next: Self) -> Self {
        debug_assert_eq!((self.blocks, self.lanes.len(), next.lanes.len()), (next.blocks, 1, 1));
        self.lanes[0].extend(next.lanes.into_iter().flatten());
        self
    }

    /// The elements of a range of blocks in a buffer of `len` elements.
    #[must_use]
    pub fn elements(&self, blocks: &Range<usize>, len: usize) -> Range<usize> {
        match &self.bounds {
            Some(bounds) => bounds[blocks.start]..bounds[blocks.end],
            None => cut(len, blocks.start, self.blocks)..cut(len, blocks.end, self.blocks),
        }
    }

    /// The bytes of a range of blocks in a buffer of `len` bytes.
    pub(crate) fn bytes(&self, blocks: &Range<usize>, len: u64) -> u64 {
        let elements = self.bounds.as_ref().and_then(|bounds| bounds.last().copied());
        let range = self.elements(blocks, elements.unwrap_or(len as usize));
        match elements {
            Some(0) => 0,
            Some(all) => (u128::from(len) * range.len() as u128 / all as u128) as u64,
            None => range.len() as u64,
        }
    }
}

/// Where block `i` of `blocks` starts in `len` elements.
#[must_use]
pub(crate) const fn cut(len: usize, i: usize, blocks: usize) -> usize {
    (len as u128 * i as u128 / blocks as u128) as usize
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut gap = "";
        for (to, range) in &self.sends {
            write!(f, "{gap}{}..{} -> {}", range.start, range.end, to.0)?;
            gap = "  ";
        }
        for (from, range, merge) in &self.recvs {
            write!(f, "{gap}{}..{} {} {}", range.start, range.end, merge.sign(), from.0)?;
            gap = "  ";
        }
        let Coding { encode, sends, recvs, decode, complete } = &self.coding;
        for message in encode {
            write!(f, "{gap}enc {message}")?;
            gap = "  ";
        }
        for (to, message) in sends {
            write!(f, "{gap}#{message} -> {}", to.0)?;
            gap = "  ";
        }
        for (from, message) in recvs {
            write!(f, "{gap}#{message} <- {}", from.0)?;
            gap = "  ";
        }
        for (message, merge) in decode {
            write!(f, "{gap}dec {} {message}", merge.sign())?;
            gap = "  ";
        }
        for block in complete {
            write!(f, "{gap}done {block}")?;
            gap = "  ";
        }
        Ok(())
    }
}

impl fmt::Display for CodedMessage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let code = match self.code {
            Code::Plain => "plain",
            Code::Coded(Phase::Worker) => "worker",
            Code::Coded(Phase::Server) => "server",
        };
        write!(f, "{code} {}", self.block)
    }
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "blocks {}", self.blocks)?;
        if let Some(bounds) = &self.bounds {
            write!(f, " at {bounds:?}")?;
        }
        if self.window < self.lanes.len() {
            write!(f, " window {}", self.window)?;
        }
        if !self.messages.is_empty() {
            let messages: Vec<String> = self.messages.iter().map(ToString::to_string).collect();
            write!(f, " messages {}", messages.join(", "))?;
        }
        f.write_str(":")?;
        for (i, lane) in self.lanes.iter().enumerate() {
            f.write_str(if i > 0 { " |" } else { "" })?;
            lane.iter().try_for_each(|step| write!(f, " [{step}]"))?;
        }
        Ok(())
    }
}
