//! Sizes of a run.

/// Sizes that closed forms of bytes depend on.
#[derive(Debug, Clone)]
pub(crate) struct Sizes {
    /// Parameters of the model.
    pub params: f64,
    /// Number of ranks that average.
    pub ranks: f64,
    /// Steps between averages.
    pub every: f64,
    /// Steps of the run.
    pub steps: f64,
    /// Shapes of the model's tensors.
    pub tensors: Vec<Vec<f64>>,
}
