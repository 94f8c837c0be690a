//! Examples to learn answers from: pairs of a prompt and a completion, and conversations, one to a line of a
//! file of JSON objects. Only the tokens of answers are targets.

mod answers;
mod lines;
mod packing;

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::source::ReadOptions;
use crate::Tokenizer;
use lines::Line;

pub use lines::is_file_of_examples;
pub(super) use lines::{are_examples, objects};
pub use packing::{ExampleRows, Packing};

/// Which tokens of an example are targets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LossOn {
    /// Those of the completion, or of what the assistant says, with the token that ends it.
    #[default]
    Answers,
    /// All but the first.
    All,
}

impl LossOn {
    /// Both values.
    pub const ALL: [Self; 2] = [Self::Answers, Self::All];

    /// Returns the name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Answers => "answers",
            Self::All => "all",
        }
    }
}

/// The ids of an example, and whether each is to be predicted.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Example {
    pub(super) ids: Vec<u32>,
    pub(super) counts: Vec<bool>,
}

impl Example {
    fn push(&mut self, ids: &[u32], counts: bool) {
        self.ids.extend_from_slice(ids);
        self.counts.resize(self.ids.len(), counts);
    }
}

/// What a line of a file stands for.
#[derive(Debug)]
pub(super) enum Found {
    /// A text of which all tokens are targets.
    Text(String),
    Example(Example),
}

/// Makes examples of lines.
pub(super) struct Reader<'a> {
    tokenizer: &'a dyn Tokenizer,
    loss_on: LossOn,
    special_tokens: bool,
    /// Whether examples are read as texts: what is said in them.
    as_texts: bool,
    #[cfg(feature = "chat")]
    template: Option<crate::chat::ChatTemplate>,
}

impl<'a> Reader<'a> {
    pub(super) const fn new(tokenizer: &'a dyn Tokenizer, options: &ReadOptions) -> Self {
        Self {
            tokenizer,
            loss_on: options.loss_on,
            special_tokens: options.special_tokens,
            as_texts: options.as_texts,
            #[cfg(feature = "chat")]
            template: None,
        }
    }

    /// Reads a line.
    ///
    /// Errors: a text that says what is wrong with the line, and what was expected.
    pub(super) fn read(&mut self, line: &str) -> Result<Found, String> {
        let mut example = match Line::parse(line)? {
            Line::Text(text) => return Ok(Found::Text(text)),
            Line::Pair { prompt, completion } if self.as_texts => {
                return Ok(Found::Text(prompt + &completion));
            }
            Line::Messages if self.as_texts => return Ok(Found::Text(lines::said(line))),
            Line::Pair { prompt, completion } => self.pair(&prompt, &completion)?,
            Line::Messages => self.conversation(line)?,
        };
        if self.loss_on == LossOn::All {
            example.counts.fill(true);
        }
        Ok(Found::Example(example))
    }

    fn pair(&self, prompt: &str, completion: &str) -> Result<Example, String> {
        let told = |error: crate::ZooError| error.to_string();
        let tokenizer = self.tokenizer;
        let encode = |text: &str| {
            if !self.special_tokens {
                return tokenizer.encode_prompt(text);
            }
            let mut ids = tokenizer.affixes().before;
            ids.extend(tokenizer.encode_marked(text)?);
            Ok(ids)
        };
        // The prompt is encoded as it is when text is generated, so that the model sees the same tokens then.
        let (ids, both) =
            (encode(prompt).map_err(told)?, encode(&format!("{prompt}{completion}")).map_err(told)?);
        let mut example = Example::default();
        example.push(&ids, false);
        match both.strip_prefix(&ids[..]) {
            Some(rest) => example.push(rest, true),
            // A token of both together has a part of each.
            None => example.push(&tokenizer.encode(completion).map_err(told)?, true),
        }
        example.push(tokenizer.end_of_text().as_slice(), true);
        Ok(example)
    }

    #[cfg(feature = "chat")]
    fn conversation(&mut self, line: &str) -> Result<Example, String> {
        let template = if let Some(template) = &self.template {
            template
        } else {
            let text = self.tokenizer.chat_template().ok_or_else(|| {
                format!(
                    "it has `messages`, and the tokenizer {} has no template of conversations, expected `prompt` \
                     and `completion`, or a model that was made for conversations",
                    self.tokenizer.name()
                )
            })?;
            let template = crate::chat::ChatTemplate::new(text).map_err(|error| error.to_string())?;
            self.template.insert(template)
        };
        answers::conversation(self.tokenizer, template, line)
    }

    #[cfg(not(feature = "chat"))]
    fn conversation(&mut self, _: &str) -> Result<Example, String> {
        Err("it has `messages`, and this program was built without templates of conversations, expected `prompt` \
             and `completion`"
            .to_owned())
    }
}

/// Returns whether a path is data of lines of JSON by its name: a file `.jsonl` or `.ndjson`, also compressed,
/// or a folder that has such files and no others but descriptions (`README`, `LICENSE`, `.md`). The lines may
/// be texts ([`Corpus::open_with`](super::Corpus::open_with)). Subfolders are not looked at.
#[must_use]
pub fn has_examples(path: &Path) -> bool {
    let Ok(entries) = std::fs::read_dir(path) else { return is_file_of_examples(path) };
    let files = entries.flatten().map(|entry| entry.path());
    let is_hidden =
        |file: &PathBuf| file.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"."));
    let files: Vec<PathBuf> = files.filter(|file| !is_hidden(file) && file.is_file()).collect();
    are_examples(files.iter().map(PathBuf::as_path))
}
