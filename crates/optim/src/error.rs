//! What can go wrong in an optimizer.

use farflung_tensor::{Shape, TensorError};

/// An error of this crate; completes "failed to ...".
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OptimError {
    /// A tensor op failed.
    #[error(transparent)]
    Tensor(#[from] TensorError),
    /// A setting outside its domain.
    #[error("{transform}: `{field}` is {value}, expected {expected}")]
    Setting {
        /// The transform or schedule.
        transform: &'static str,
        /// The setting.
        field: &'static str,
        /// Its value.
        value: f64,
        /// What it may be.
        expected: &'static str,
    },
    /// A gradient that is not finite: the step was not taken, and nothing changed.
    #[error("the gradient's norm is {norm}; the step was not taken")]
    NotFinite {
        /// The norm.
        norm: f64,
    },
    /// A step after which some values would not be finite: it was not taken, and nothing changed.
    #[error("the step would leave {name} that are not finite; it was not taken")]
    StepNotFinite {
        /// Which values.
        name: String,
    },
    /// A tensor whose update would be orthogonalized, and which is not a matrix.
    #[error("orthogonalize: parameter `{name}` is {shape}, expected two dimensions")]
    NotAMatrix {
        /// The parameter.
        name: String,
        /// Its shape.
        shape: Shape,
    },
    /// Saved state that does not fit.
    #[error("optimizer state `{name}`: {found} elements, expected {expected}")]
    State {
        /// Name of the buffer.
        name: String,
        /// Elements in what was given; 0 if it is missing.
        found: usize,
        /// Elements it must have.
        expected: usize,
    },
    /// A parameter that did not become ready once in a round of averaging, whole.
    #[cfg(feature = "sync")]
    #[error("average: parameter `{parameter}` was {problem}")]
    Ready {
        /// The parameter.
        parameter: String,
        /// What was wrong.
        problem: &'static str,
    },
    /// A method that would be registered by a name which another has.
    #[cfg(feature = "sync")]
    #[error("there is a method `{name}` already")]
    NameTaken {
        /// The name.
        name: &'static str,
    },
    /// A protocol where a codec is needed: its exchanges are sums over all ranks.
    #[cfg(feature = "sync")]
    #[error("sync: `{name}` needs sums over all ranks, expected a codec")]
    NotACodec {
        /// The protocol.
        name: String,
    },
    /// A neighbour whose parameters are too far away to be told from what it sent: no parameter has changed.
    #[cfg(feature = "sync")]
    #[error(
        "moniqua: parameters of worker {from} are farther away than messages can tell, since some differ by \
         more than theta {theta}: raise --theta, or lower --lr"
    )]
    TooFar {
        /// The neighbour.
        from: u32,
        /// The bound.
        theta: f64,
    },
    /// A collective failed.
    #[cfg(feature = "sync")]
    #[error(transparent)]
    Comm(#[from] farflung_comm::CommError),
    /// A codec refused its input or a payload.
    #[cfg(feature = "sync")]
    #[error(transparent)]
    Compress(#[from] farflung_compress::CompressError),
}
