//! Errors of tensor operations.

use crate::{DType, Shape};

/// An error of this crate. Most messages say which op, device or name it concerns, and those about a mismatch
/// also what was found and expected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TensorError {
    /// The shape has too many dimensions.
    #[error("the shape has {count} dimensions, expected at most {most}")]
    Dimensions {
        /// Number of dimensions given.
        count: usize,
        /// Maximum number of dimensions.
        most: usize,
    },
    /// Two shapes do not match.
    #[error("{op}: shapes {lhs} and {rhs} do not match")]
    ShapeMismatch {
        /// Name of the op.
        op: &'static str,
        /// The shape found, or the first of two operands.
        lhs: Shape,
        /// The shape expected, or the second of two operands.
        rhs: Shape,
    },
    /// The heads of an attention do not fit each other or the width of the queries.
    #[error(
        "{op}: {query} heads of queries that share {kv} heads of keys and values, with a width of {width}: \
         expected numbers above 0, and that the second divides the first and the first divides the width"
    )]
    Heads {
        /// Name of the op.
        op: &'static str,
        /// Number of heads of queries.
        query: usize,
        /// Number of heads of keys, and of values.
        kv: usize,
        /// Number of values of the queries of a token.
        width: usize,
    },
    /// The element type of an operand is wrong.
    #[error("{op}: expected type {expected}, found {found}")]
    DTypeMismatch {
        /// Name of the op.
        op: &'static str,
        /// The type expected.
        expected: DType,
        /// The type given.
        found: DType,
    },
    /// The operand is on another device.
    #[error("{op}: an operand is on {found}, but the op runs on {expected}")]
    DeviceMismatch {
        /// Name of the op.
        op: &'static str,
        /// Name of the device that runs the op.
        expected: String,
        /// Name of the operand's device.
        found: String,
    },
    /// An id in the data is beyond the end of the table that it indexes.
    #[error("{op}: id {id} at position {position} is not below {bound}")]
    IdOutOfRange {
        /// Name of the op.
        op: &'static str,
        /// The id found.
        id: u32,
        /// Index of the id in the data.
        position: usize,
        /// Number of rows of the table.
        bound: usize,
    },
    /// A token is at a position that the table of positions does not have.
    #[error("{op}: token {token} is at position {position}, expected one below {bound}")]
    PositionOutOfRange {
        /// Name of the op.
        op: &'static str,
        /// Index of the token in the data.
        token: usize,
        /// Its position.
        position: u32,
        /// Number of rows of the table.
        bound: usize,
    },
    /// The documents of a sequence are not contiguous.
    #[error(
        "{op}: the document of the token at position {position} begins at {start}, expected its own position or \
         what the token before it has"
    )]
    Documents {
        /// Name of the op.
        op: &'static str,
        /// Position of the token in its sequence.
        position: usize,
        /// The beginning found.
        start: u32,
    },
    /// The prefix of a document ends after the document's tokens, or not at the same token for all of them.
    #[error(
        "{op}: the prefix of the document of the token at position {position} ends before {end}, expected at \
         most {most}, the same for all tokens of the document"
    )]
    Prefix {
        /// Name of the op.
        op: &'static str,
        /// Position of the token in its sequence.
        position: usize,
        /// The position found, of the first token after the prefix.
        end: u32,
        /// The end of the document's tokens.
        most: usize,
    },
    /// The tiles of a sparse attention do not fit the op.
    #[error("{op}: the tiles of the mask: {found} {what}, expected {bound}")]
    Tiles {
        /// Name of the op.
        op: &'static str,
        /// What is counted.
        what: &'static str,
        /// The number found.
        found: usize,
        /// The number expected, or the most that there can be.
        bound: usize,
    },
    /// A range is beyond the end of its tensor, or of the parameters of a layout.
    #[error("{op}: range {start}..{end} is out of bounds, the length is {len}")]
    OutOfBounds {
        /// Name of the op.
        op: &'static str,
        /// Start of the range.
        start: usize,
        /// End of the range (exclusive).
        end: usize,
        /// Number of elements of the tensor, or of parameters of the layout.
        len: usize,
    },
    /// The device cannot allocate a buffer.
    #[error("{device}: cannot allocate {bytes} bytes of memory")]
    OutOfMemory {
        /// Name of the device.
        device: String,
        /// Number of bytes requested.
        bytes: usize,
    },
    /// The device is not available on this machine, or the text is not the name of a device.
    #[error("{name}: {reason}")]
    NoSuchDevice {
        /// Name of the device requested.
        name: String,
        /// Reason: not in this build, no driver, no device of this number, or not a name.
        reason: String,
    },
    /// A device failed.
    #[error("{device}: {op}: {reason}")]
    Device {
        /// Name of the device.
        device: String,
        /// The op that ran, or the operation that was waited for.
        op: &'static str,
        /// Message of the driver, or of the backend.
        reason: String,
    },
    /// An [`Interrupt`](crate::Interrupt) is raised.
    #[error("the computation was interrupted")]
    Interrupted,
    /// The threads of a CPU device could not be started.
    #[error("cpu: {threads} threads could not be started: {reason}")]
    Threads {
        /// Number of threads requested.
        threads: usize,
        /// Message of the operating system.
        reason: String,
    },
    /// The layout has no parameter of this name.
    #[error("no parameter is called `{name}`")]
    UnknownParameter {
        /// The name requested.
        name: String,
    },
    /// A map program is invalid, or it was run with a wrong number of scalars or buffers.
    #[error("map program: {what} is {found}, expected {relation} {bound}")]
    BadProgram {
        /// The number or index that is wrong.
        what: &'static str,
        /// Its value.
        found: usize,
        /// How it must relate to `bound`: "exactly", "at most" or "below".
        relation: &'static str,
        /// The number that it is compared with.
        bound: usize,
    },
}

/// Result with a [`TensorError`].
pub type Result<T, E = TensorError> = std::result::Result<T, E>;
