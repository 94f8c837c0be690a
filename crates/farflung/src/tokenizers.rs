//! The tokenizer that settings name: one that is compiled in, or that of a file, a model or a run.

use std::sync::Arc;

use farflung_zoo::{Tokenizer, tokenizer};

use crate::config::choice::TokenizerKind;
use crate::config::value::Setting as _;
use crate::{Error, ModelSource, Result, tokenizer_files};

/// Opens a tokenizer. The path of one may be a `tokenizer.json`, a folder with it, a GGUF file, a checkpoint or
/// a run's folder.
///
/// Errors: [`Error::Setting`] for a path at which there is nothing; a file that is wrong.
pub fn open(kind: &TokenizerKind) -> Result<Arc<dyn Tokenizer>> {
    let path = match kind {
        TokenizerKind::Byte | TokenizerKind::Gpt2 => return Ok(tokenizer::by_name(&kind.to_string())?),
        TokenizerKind::File(path) => path,
    };
    let refuse = |found: &str| {
        let (field, name) = ("tokenizer", path.display().to_string());
        let expected = TokenizerKind::wanted(&name);
        Err(Error::Setting { field, value: format!("{name}, and {found}"), expected })
    };
    match path.metadata() {
        Ok(found) if found.is_dir() && !path.join("tokenizer.json").is_file() => {
            let Ok(source) = ModelSource::find(path) else {
                return refuse("there is no tokenizer.json and no model in that folder");
            };
            let vocab = source.open_part()?.spec().vocab;
            source.check_tokenizer()?;
            match source.tokenizer(vocab)? {
                TokenizerKind::File(_) => source.own_tokenizer(),
                named => open(&named),
            }
        }
        Ok(_) => tokenizer_files::of_file(path),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            refuse("there is no such file or folder")
        }
        Err(error) => Err(Error::io("read", path)(error)),
    }
}
