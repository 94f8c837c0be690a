//! Opens tokenizers of files, in builds with the feature `tokenizers`.

use std::path::Path;
use std::sync::Arc;

#[cfg(feature = "tokenizers")]
use farflung_zoo::tokenizer::FileTokenizer;
use farflung_zoo::{Tokenizer, ZooError};

use crate::{Error, Result};

/// Opens the tokenizer of a file or a folder.
#[cfg(feature = "tokenizers")]
pub(crate) fn of_file(path: &Path) -> Result<Arc<dyn Tokenizer>> {
    Ok(Arc::new(FileTokenizer::open(path)?))
}

#[cfg(not(feature = "tokenizers"))]
pub(crate) fn of_file(path: &Path) -> Result<Arc<dyn Tokenizer>> {
    Err(without_feature(path))
}

/// Makes the tokenizer of files that are not in a folder.
#[cfg(feature = "tokenizers")]
pub(crate) fn of_files(
    path: &Path,
    read: impl Fn(&'static str) -> Result<Option<Vec<u8>>>,
) -> Result<Arc<dyn Tokenizer>> {
    Ok(Arc::new(FileTokenizer::from_files(&path.display().to_string(), read)?))
}

#[cfg(not(feature = "tokenizers"))]
pub(crate) fn of_files(
    path: &Path,
    _: impl Fn(&'static str) -> Result<Option<Vec<u8>>>,
) -> Result<Arc<dyn Tokenizer>> {
    Err(without_feature(path))
}

#[cfg(not(feature = "tokenizers"))]
fn without_feature(path: &Path) -> Error {
    let problem = "this build has no feature `tokenizers`".to_owned();
    ZooError::Tokenizer { name: path.display().to_string(), problem }.into()
}

/// Returns what is wrong with a tokenizer; `None` for another error.
pub(crate) fn problem(error: &Error) -> Option<String> {
    match error {
        Error::Zoo(ZooError::Tokenizer { problem, .. }) => Some(problem.clone()),
        _ => None,
    }
}
