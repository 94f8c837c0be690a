//! A file from which a model's tensors are read, of either format.

use std::collections::BTreeMap;
use std::path::Path;

use super::dtype::Dtype;
use super::gguf::GgufFile;
use super::quantized::Encoding;
use super::tensors::TensorFile;
use crate::ZooError;

/// An open file of weights.
#[derive(Debug)]
pub(super) enum SourceFile {
    Safetensors(TensorFile),
    Gguf(GgufFile),
}

impl SourceFile {
    pub(super) fn path(&self) -> &Path {
        match self {
            Self::Safetensors(file) => file.path(),
            Self::Gguf(file) => file.path(),
        }
    }

    /// Returns the names of the tensors.
    pub(super) fn names(&self) -> Box<dyn Iterator<Item = &String> + '_> {
        match self {
            Self::Safetensors(file) => Box::new(file.tensors().keys()),
            Self::Gguf(file) => Box::new(file.names()),
        }
    }

    /// Returns the shape of a tensor.
    pub(super) fn shape(&self, name: &str) -> Option<&[usize]> {
        match self {
            Self::Safetensors(file) => Some(&file.tensors().get(name)?.shape),
            Self::Gguf(file) => file.shape(name),
        }
    }

    /// Returns the other names of tensors, each with the name under which it is stored.
    pub(super) fn other_names(&self) -> impl Iterator<Item = (&String, &String)> {
        const NONE: &BTreeMap<String, String> = &BTreeMap::new();
        match self {
            Self::Safetensors(file) => file.metadata().iter(),
            Self::Gguf(_) => NONE.iter(),
        }
    }

    /// Checks that a tensor has this shape and a type that is read. Returns the type that has all its values.
    ///
    /// Errors: [`ZooError::NoTensor`], [`ZooError::TensorShape`], [`ZooError::TensorDtype`].
    pub(super) fn expect_f32(&self, name: &str, shape: &[usize]) -> Result<Dtype, ZooError> {
        match self {
            Self::Safetensors(file) => file.expect_f32(name, shape),
            Self::Gguf(file) => file.expect(name, shape).map(Encoding::exact),
        }
    }

    /// Reads a tensor as `f32`.
    ///
    /// Errors: as [`SourceFile::expect_f32`], also if the length of `out` does not match; [`ZooError::Io`].
    pub(super) fn read_f32(&mut self, name: &str, shape: &[usize], out: &mut [f32]) -> Result<(), ZooError> {
        match self {
            Self::Safetensors(file) => file.read_f32(name, shape, out),
            Self::Gguf(file) => file.read(name, shape, out),
        }
    }
}
