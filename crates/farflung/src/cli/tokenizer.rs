//! `farflung tokenizer`: trains a tokenizer, and turns texts into ids and back.

#[cfg(feature = "tokenizers")]
mod train;

use std::io::{self, IsTerminal as _, Read as _};

use farflung::config::choice::TokenizerKind;
use farflung::config::value::Setting as _;
use farflung::zoo::Tokenizer;
use farflung::zoo::tokenizer::Affixes;
use farflung::{Error, Result, terminal, tokenizers};

/// Train a tokenizer, and turn texts into ids and back.
#[derive(Debug, clap::Args)]
pub(crate) struct TokenizerCommand {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, clap::Subcommand)]
enum Action {
    #[cfg(feature = "tokenizers")]
    Train(train::Train),
    Encode(Encode),
    Decode(Decode),
}

impl TokenizerCommand {
    pub(super) fn run(self) -> Result<()> {
        match self.action {
            #[cfg(feature = "tokenizers")]
            Action::Train(train) => train.run(),
            Action::Encode(encode) => encode.run(),
            Action::Decode(decode) => decode.run(),
        }
        .map_err(Error::of_input)
    }
}

/// Print the ids of a text.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  farflung tokenizer encode gpt2 'Hello world'
  farflung tokenizer encode ./smollm2 --json '<|im_start|>user'
  farflung tokenizer encode SmolLM2-135M-Instruct.Q4_1.gguf < text.txt")]
struct Encode {
    /// The tokenizer: byte, gpt2, or the path of a tokenizer.json, a model or a run.
    #[arg(value_name = "TOKENIZER", value_parser = TokenizerKind::from_flag)]
    tokenizer: TokenizerKind,
    /// The text; without one, or with -, what stdin gives.
    #[arg(value_name = "TEXT")]
    text: Option<String>,
    /// Read special tokens that are written in the text, such as <|endoftext|>, as plain text.
    #[arg(long)]
    plain: bool,
    /// Whether to add the special tokens that belong around a text, such as LLaMA's begin token.
    #[arg(long, value_name = "BOOL", default_value_t = true, action = clap::ArgAction::Set)]
    add_special_tokens: bool,
    /// Print one JSON object with the ids and the text of each.
    #[arg(long)]
    json: bool,
}

impl Encode {
    fn run(self) -> Result<()> {
        let tokenizer = tokenizers::open(&self.tokenizer)?;
        let bytes = match self.text {
            Some(text) if text != "-" => text.into_bytes(),
            _ => stdin("the text")?,
        };
        let special = if self.add_special_tokens { tokenizer.affixes() } else { Affixes::default() };
        let mut ids = special.before;
        ids.extend(encoded(&*tokenizer, &bytes, self.plain)?);
        ids.extend(special.after);
        let lost = tokenizer.lost_bytes(&bytes);
        if lost > 0 {
            terminal::write_stderr(format!(
                "warning: {lost} bytes were left out: there is no token for them\n"
            ));
        }
        super::print(&if self.json {
            let text = |id: &u32| Ok(String::from_utf8_lossy(&tokenizer.decode(&[*id])?).into_owned());
            let texts: Vec<String> = ids.iter().map(text).collect::<Result<_>>()?;
            format!("{}\n", serde_json::json!({"ids": ids, "texts": texts}))
        } else {
            let ids: Vec<String> = ids.iter().map(ToString::to_string).collect();
            format!("{}\n", ids.join(" "))
        })
    }
}

fn encoded(tokenizer: &dyn Tokenizer, bytes: &[u8], plain: bool) -> Result<Vec<u32>> {
    if let Some(ids) = tokenizer.encode_bytes(bytes) {
        return Ok(ids);
    }
    let text = std::str::from_utf8(bytes).map_err(|error| Error::Setting {
        field: "text",
        value: format!("no UTF-8 at byte {}", error.valid_up_to()),
        expected: format!("a text, for the tokenizer {}", tokenizer.name()),
    })?;
    Ok(if plain { tokenizer.encode(text) } else { tokenizer.encode_marked(text) }?)
}

/// Reads all of stdin.
fn stdin(what: &str) -> Result<Vec<u8>> {
    if io::stdin().is_terminal() {
        terminal::write_stderr(format!("reading {what} from stdin; end it with Ctrl-D\n"));
    }
    let mut bytes = Vec::new();
    io::stdin().read_to_end(&mut bytes).map_err(|source| Error::Io {
        action: "read",
        path: "stdin".into(),
        source,
    })?;
    Ok(bytes)
}

/// Print the text of ids.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  farflung tokenizer decode gpt2 15496 995
  farflung tokenizer encode ./smollm2 'Hello' | farflung tokenizer decode ./smollm2 --skip-special-tokens")]
struct Decode {
    /// The tokenizer: byte, gpt2, or the path of a tokenizer.json, a model or a run.
    #[arg(value_name = "TOKENIZER", value_parser = TokenizerKind::from_flag)]
    tokenizer: TokenizerKind,
    /// The ids, separated by white space or commas; without any, those that stdin gives, also as `encode
    /// --json` writes them.
    #[arg(value_name = "ID")]
    ids: Vec<String>,
    /// Leave out tokens that stand for no text.
    #[arg(long)]
    skip_special_tokens: bool,
    /// Print one JSON object with the text.
    #[arg(long)]
    json: bool,
}

impl Decode {
    fn run(self) -> Result<()> {
        let tokenizer = tokenizers::open(&self.tokenizer)?;
        let mut ids = if self.ids.is_empty() {
            read_ids(&String::from_utf8_lossy(&stdin("ids")?))?
        } else {
            read_ids(&self.ids.join(" "))?
        };
        // All are checked, those that are left out, too.
        let mut text = tokenizer.decode(&ids)?;
        if self.skip_special_tokens {
            let special = tokenizer.special_tokens();
            ids.retain(|id| special.iter().all(|token| token.id != *id));
            text = tokenizer.decode(&ids)?;
        }
        if self.json {
            let text = String::from_utf8_lossy(&text);
            return super::print(&format!("{}\n", serde_json::json!({"text": text})));
        }
        terminal::print_bytes(&text)?;
        // For a pipe or a file, the text alone.
        if terminal::stdout_is_terminal() { terminal::print_bytes(b"\n") } else { Ok(()) }
    }
}

/// What `encode --json` prints.
#[derive(serde::Deserialize)]
struct Encoded {
    ids: Vec<u32>,
}

fn read_ids(text: &str) -> Result<Vec<u32>> {
    if let Ok(Encoded { ids }) = serde_json::from_str(text) {
        return Ok(ids);
    }
    let words = text.split(|c: char| c.is_whitespace() || c == ',').filter(|word| !word.is_empty());
    let id = |word: &str| {
        word.parse().map_err(|_| Error::Setting {
            field: "ids",
            value: format!("{word:?}"),
            expected: "whole numbers below 4294967296".to_owned(),
        })
    };
    words.map(id).collect()
}
