//! Collectives as data: what one rank encodes, sends, receives and decodes, step by step. Pure: independent of
//! networks, codecs and bytes.

use std::fmt;
use std::ops::Range;

use farflung_base::Rank;

/// How received values are combined with those of the block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Merge {
    /// The received values are reduced into the block. The block's values are the first operand.
    Reduce,
    /// The received values are reduced into the block as the first operand, because they come from lower ranks
    /// and the order of ranks is kept. Not allowed in coded programs.
    ReduceLeft,
    /// The received values replace those of the block.
    Copy,
}

impl Merge {
    /// Returns the text by which this variant is shown when a step is printed.
    const fn sign(self) -> &'static str {
        match self {
            Self::Reduce => "+=",
            Self::ReduceLeft => "=+",
            Self::Copy => "=",
        }
    }
}

/// The side of a coded reduction that encodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Phase {
    /// The message has a rank's own values, or a sum that is not complete yet.
    Worker,
    /// The message has the reduced values of a block: the complete sum, or a part of it to which no other rank
    /// adds.
    Server,
}

/// How the values of a message are encoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Code {
    /// Not encoded: f32, little-endian.
    Plain,
    /// Encoded by the codec, on this side of the reduction. For a mean, values of [`Phase::Server`] are divided
    /// by the number of ranks first.
    Coded(Phase),
}

/// Content of a message of a coded program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CodedMessage {
    /// Index of the block whose values the message carries.
    pub block: usize,
    /// How the values are encoded.
    pub code: Code,
}

/// Coded messages of one step, by their index in [`Program::messages`].
///
/// Order: encode `encode`; then send and receive at the same time; then decode `decode`. A message can be used
/// in the step that encodes or receives it and in the next step; then it is dropped.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Coding {
    /// Messages to encode, in this order.
    pub encode: Vec<usize>,
    /// Receiver and message of each send. Messages to one rank are sent one after the other.
    pub sends: Vec<(Rank, usize)>,
    /// Sender and message of each receive. Messages from one rank arrive in the order of the list.
    pub recvs: Vec<(Rank, usize)>,
    /// Messages to decode, in this order, and how their values are combined with those of the block.
    pub decode: Vec<(usize, Merge)>,
    /// Blocks that hold a complete sum after this step and are not encoded; for a mean, they are divided.
    pub complete: Vec<usize>,
}

impl Coding {
    /// Returns whether there are no messages.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.encode.is_empty() && self.sends.is_empty() && self.recvs.is_empty() && self.decode.is_empty()
    }
}

/// One step of one rank. Sends go out side by side; receives are taken in the order of the list; sends and
/// receives overlap in time. The next step starts when all are done.
///
/// Ranges are in blocks of the [`Program`]. If a receive overlaps a send, the old values are sent.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Step {
    /// Receiver and blocks of each send.
    pub sends: Vec<(Rank, Range<usize>)>,
    /// Sender and blocks of each receive, and how the values are combined.
    pub recvs: Vec<(Rank, Range<usize>, Merge)>,
    /// Coded messages. A step that has any has no plain sends and receives.
    pub coding: Coding,
}

impl Step {
    /// Creates a step with one send.
    #[must_use]
    pub fn send(to: Rank, blocks: Range<usize>) -> Self {
        Self { sends: vec![(to, blocks)], ..Self::default() }
    }

    /// Creates a step with one receive.
    #[must_use]
    pub fn recv(from: Rank, blocks: Range<usize>, merge: Merge) -> Self {
        Self { recvs: vec![(from, blocks, merge)], ..Self::default() }
    }

    /// Adds a receive to the step.
    #[must_use]
    pub fn and_recv(mut self, from: Rank, blocks: Range<usize>, merge: Merge) -> Self {
        self.recvs.push((from, blocks, merge));
        self
    }

    /// Returns whether the step has no transfers.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.sends.is_empty() && self.recvs.is_empty() && self.coding.is_empty()
    }
}

/// The part of one rank in a collective, over a buffer cut into blocks.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Program {
    /// Number of blocks.
    pub blocks: usize,
    /// First element of each block, then the length of the buffer. If `None`, blocks are nearly equal: block
    /// `i` of `len` elements is `len * i / blocks..len * (i + 1) / blocks`.
    pub bounds: Option<Vec<usize>>,
    /// Lists of steps that run side by side on different blocks, for example chunks of a pipeline, trees, or
    /// directions of a ring.
    pub lanes: Vec<Vec<Step>>,
    /// Maximum number of lanes that run at a time: lane `i` starts when lane `i - window` is done. This keeps a
    /// fast rank from sending far ahead, which would delay data that other ranks need sooner.
    pub window: usize,
    /// Content of each message of a coded program; empty in a plain one.
    pub messages: Vec<CodedMessage>,
}

impl Program {
    /// Creates a program with one lane over nearly equal blocks.
    #[must_use]
    pub fn new(blocks: usize, steps: Vec<Step>) -> Self {
        Self::side_by_side(blocks, vec![steps])
    }

    /// Creates a program of lanes that all start at once, over nearly equal blocks.
    #[must_use]
    pub const fn side_by_side(blocks: usize, lanes: Vec<Vec<Step>>) -> Self {
        Self { blocks, bounds: None, lanes, window: usize::MAX, messages: Vec::new() }
    }

    /// Sets the maximum number of lanes that run at a time.
    #[must_use]
    pub fn with_window(self, window: usize) -> Self {
        Self { window, ..self }
    }

    /// Sets the number of elements of each block.
    #[must_use]
    pub fn with_counts(self, counts: &[usize]) -> Self {
        let mut bounds = vec![0];
        bounds.extend(counts.iter().scan(0, |end, count| {
            *end += count;
            Some(*end)
        }));
        Self { bounds: Some(bounds), ..self }
    }

    /// Appends the steps of another program over the same blocks. Both must have one lane.
    pub(crate) fn then(mut self, next: Self) -> Self {
        debug_assert_eq!((self.blocks, self.lanes.len(), next.lanes.len()), (next.blocks, 1, 1));
        self.lanes[0].extend(next.lanes.into_iter().flatten());
        self
    }

    /// Returns the elements of a range of blocks in a buffer of `len` elements.
    #[must_use]
    pub fn elements(&self, blocks: &Range<usize>, len: usize) -> Range<usize> {
        match &self.bounds {
            Some(bounds) => bounds[blocks.start]..bounds[blocks.end],
            None => cut(len, blocks.start, self.blocks)..cut(len, blocks.end, self.blocks),
        }
    }

    /// Returns the number of bytes of a range of blocks in a buffer of `len` bytes.
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

/// Returns the first element of block `i` of `blocks` in `len` elements.
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
