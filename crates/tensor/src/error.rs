//! What can go wrong with a tensor. Each error names the op and what it was given.

use crate::{DType, Shape};

/// An error of this crate; completes "failed to ...".
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TensorError {
    /// A shape with more dimensions than tensors have.
    #[error("a shape of {count} dimensions, and {most} are the most")]
    Dimensions {
        /// Dimensions given.
        count: usize,
        /// Most dimensions of a shape.
        most: usize,
    },
    /// Two operands do not fit each other.
    #[error("{op}: shapes {lhs} and {rhs} do not fit")]
    ShapeMismatch {
        /// The op and operand.
        op: &'static str,
        /// The shape that was given.
        lhs: Shape,
        /// The shape that it must fit.
        rhs: Shape,
    },
    /// An operand has another element type than the op takes.
    #[error("{op}: takes {expected}, not {found}")]
    DTypeMismatch {
        /// The op and operand.
        op: &'static str,
        /// What the op takes.
        expected: DType,
        /// What was given.
        found: DType,
    },
    /// An operand lives on another device.
    #[error("{op}: an operand lives on {found}, the op runs on {expected}")]
    DeviceMismatch {
        /// The op.
        op: &'static str,
        /// Name of the device that runs it.
        expected: String,
        /// Name of the operand's device.
        found: String,
    },
    /// An id in the data points outside the table that it indexes.
    #[error("{op}: id {id} at position {position} is not below {bound}")]
    IdOutOfRange {
        /// The op.
        op: &'static str,
        /// The id.
        id: u32,
        /// Where it stands.
        position: usize,
        /// Number of rows in the table.
        bound: usize,
    },
    /// A range reaches beyond its tensor.
    #[error("{op}: elements {start}..{end} of a tensor of {len}")]
    OutOfBounds {
        /// The op.
        op: &'static str,
        /// First element.
        start: usize,
        /// One past the last.
        end: usize,
        /// Elements there are.
        len: usize,
    },
    /// The device has no room for a buffer.
    #[error("{device}: no memory for {bytes} bytes")]
    OutOfMemory {
        /// The device.
        device: String,
        /// Bytes asked for.
        bytes: usize,
    },
    /// There is no device of this name here.
    #[error("{name}: {reason}")]
    NoSuchDevice {
        /// The device asked for.
        name: String,
        /// Why it is not there: the build, the driver, or the number.
        reason: String,
    },
    /// A device failed.
    #[error("{device}: {op}: {reason}")]
    Device {
        /// The device.
        device: String,
        /// What was run, or waited for.
        op: &'static str,
        /// What the driver said.
        reason: String,
    },
    /// An [`Interrupt`](crate::Interrupt) was raised.
    #[error("the computation was interrupted")]
    Interrupted,
    /// The threads of a cpu device could not be started.
    #[error("cpu: {threads} threads could not be started: {reason}")]
    Threads {
        /// Threads asked for.
        threads: usize,
        /// What the system said.
        reason: String,
    },
    /// A parameter name that the layout does not have.
    #[error("no parameter is called `{name}`")]
    UnknownParameter {
        /// The name asked for.
        name: String,
    },
    /// A map program refers to a register, input or output that does not exist.
    #[error("map program: {what} {index} of {count}")]
    BadProgram {
        /// Kind of reference.
        what: &'static str,
        /// The index used.
        index: usize,
        /// How many there are.
        count: usize,
    },
}

/// Result of this crate.
pub type Result<T, E = TensorError> = std::result::Result<T, E>;
