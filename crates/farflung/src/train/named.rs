//! A named tensor on its way to or from a file.

/// A named tensor to be saved.
pub(super) struct Named {
    pub(super) name: String,
    pub(super) shape: Vec<usize>,
    pub(super) values: Vec<f32>,
}
