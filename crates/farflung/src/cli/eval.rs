//! `farflung eval`: measures a model's loss on held-out text.

use std::path::PathBuf;

use farflung::data_notes::data_notes;
use farflung::zoo::data::{ReadOptions, TextEncoding, TokenType};
use farflung::zoo::{Corpus, HoldOut, Sampler, Shard, stage};
use farflung::{Error, Result, corpus, terminal};

use super::model::ModelArgs;

/// Measure a model's loss on the last tenth of a text, which training holds out.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  farflung eval runs/nano-1
  farflung eval ./gpt2 --data book.txt --batches 50 --json")]
pub(crate) struct EvalCommand {
    #[command(flatten)]
    model: ModelArgs,
    /// Text file, folder of text files, or .bin file of tokens, as in `farflung train`. Default: the source
    /// code of farflung's own dependencies.
    #[arg(long, value_name = "PATH")]
    data: Option<PathBuf>,
    /// Encoding of texts that are not UTF-8 and have no byte-order mark, such as windows-1252 or euc-jp.
    #[arg(long, value_name = "NAME")]
    encoding: Option<TextEncoding>,
    /// Make special tokens that are written in the text, such as <|endoftext|>, the tokenizer's own tokens.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_value_t = false, default_missing_value = "true")]
    special_tokens: bool,
    /// Type of the ids in .bin files that do not say it themselves: u16 (the default), u32, u8, i32 or i64.
    #[arg(long, value_name = "TYPE")]
    token_type: Option<TokenType>,
    /// Number of batches to measure, spread evenly over the held-out text.
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..))]
    batches: u32,
    /// Sequences per batch.
    #[arg(long, value_name = "N", default_value_t = 12, value_parser = clap::value_parser!(u32).range(1..))]
    batch: u32,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

impl EvalCommand {
    pub(crate) fn run(self) -> Result<()> {
        let loaded = self.model.load()?;
        let tokenizer = &*loaded.tokenizer;
        let (encoding, special_tokens, token_type) = (self.encoding, self.special_tokens, self.token_type);
        let options = ReadOptions { encoding, special_tokens, token_type };
        let corpus = match &self.data {
            Some(path) => {
                Corpus::open_with(path, tokenizer, options).map_err(|error| Error::from(error).of_input())?
            }
            None => Corpus::from_bytes("the default text", &corpus::default_text()?.0, tokenizer)?,
        };
        let (training, held_out) = corpus.split(HoldOut::Standard)?;
        for line in data_notes(corpus.reading(), &training, &held_out) {
            terminal::write_stderr(format!("{line}\n"));
        }
        let context = loaded.stage.spec().context;
        let shard = Shard::whole(self.batch as usize);
        let sampler = Sampler::evaluation(held_out, shard, context, self.batches as usize)?;
        let (mut sum, mut count) = (0.0, 0);
        let (mut inputs, mut targets) = (Vec::new(), Vec::new());
        for batch in 0..u64::from(self.batches) {
            sampler.batch(batch, &mut inputs, &mut targets)?;
            let (x, y) = (loaded.stage.tokens(&inputs, context)?, loaded.stage.tokens(&targets, context)?);
            sum += stage::total(&loaded.stage.losses(&loaded.params, x, &y)?)?;
            count += targets.len();
        }
        let loss = sum / count as f64;
        let perplexity = loss.exp();
        super::print(&if self.json {
            let bits = loss / std::f64::consts::LN_2;
            let object = serde_json::json!({
                "loss": loss, "perplexity": perplexity, "bits_per_token": bits, "tokens": count, "data_hash": corpus.hash(),
            });
            format!("{object}\n")
        } else {
            format!("loss {loss:.4} nats per token, perplexity {perplexity:.3}, over {count} tokens\n")
        })
    }
}
