//! Errors of the optimizers.

use farflung_tensor::{Shape, TensorError};

/// Error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OptimError {
    /// A tensor op failed.
    #[error(transparent)]
    Tensor(#[from] TensorError),
    /// A setting is outside its domain.
    #[error("{transform}: `{field}` is {value}, expected {expected}")]
    Setting {
        /// Name of the transform, or `schedule`, `average` or `sync`.
        transform: &'static str,
        /// Name of the setting.
        field: &'static str,
        /// Value that was given.
        value: f64,
        /// Allowed values, in words.
        expected: &'static str,
    },
    /// The gradient's norm is not finite. The step was not taken, and nothing changed.
    #[error("the gradient's norm is {norm}; the step was not taken")]
    NotFinite {
        /// Global l2 norm of the gradient.
        norm: f64,
    },
    /// Some values would not be finite after the step. The step was not taken, and nothing changed.
    #[error("the step would produce {name} that are not finite; it was not taken")]
    StepNotFinite {
        /// Name of the values, such as `parameters` or that of a state buffer.
        name: String,
    },
    /// A tensor that is to be orthogonalized does not have two dimensions.
    #[error("orthogonalize: parameter `{name}` is {shape}, expected two dimensions")]
    NotAMatrix {
        /// Name of the parameter.
        name: String,
        /// Shape of the parameter.
        shape: Shape,
    },
    /// A saved state buffer of an optimizer, a method of synchronisation, an average or a codec is missing or
    /// has another length.
    #[error("saved state `{name}`: {found} elements, expected {expected}")]
    State {
        /// Name of the state buffer.
        name: String,
        /// Number of elements given; 0 if the buffer is missing.
        found: usize,
        /// Number of elements expected.
        expected: usize,
    },
    /// A [`StateStore`](crate::StateStore) failed. The step was taken by some parameters only.
    #[error(transparent)]
    Store(Box<dyn std::error::Error + Send + Sync>),
    /// A parameter did not become ready as a whole and exactly once in a round of averaging.
    #[cfg(feature = "sync")]
    #[error("average: parameter `{parameter}` was {problem}")]
    Ready {
        /// Name of the parameter.
        parameter: String,
        /// What was wrong.
        problem: &'static str,
    },
    /// A method was registered under a name that is already taken.
    #[cfg(feature = "sync")]
    #[error("the name `{name}` is already taken by another method")]
    NameTaken {
        /// Name of the method.
        name: &'static str,
    },
    /// A protocol, whose exchanges are sums over all ranks, or a codec that keeps momentum was given where each
    /// message is decoded separately.
    #[cfg(feature = "sync")]
    #[error(
        "sync: `{name}` cannot encode this method's messages, because it needs sums over all ranks or keeps \
         momentum, expected another codec"
    )]
    NotACodec {
        /// Name of the protocol or codec.
        name: String,
    },
    /// A neighbour's parameters differ from this rank's by more than `theta`, so its message cannot be decoded.
    /// No parameter has changed.
    #[cfg(feature = "sync")]
    #[error(
        "moniqua: the message of worker {from} cannot be decoded, because some of its parameters differ from \
         this worker's by more than theta {theta}: raise --theta, or lower --lr"
    )]
    TooFar {
        /// Number of the neighbour.
        from: u32,
        /// Bound on the difference between neighbours' parameters.
        theta: f64,
    },
    /// Communication failed.
    #[cfg(feature = "sync")]
    #[error(transparent)]
    Comm(#[from] farflung_comm::CommError),
    /// A codec rejected its input or a payload.
    #[cfg(feature = "sync")]
    #[error(transparent)]
    Compress(#[from] farflung_compress::CompressError),
}
