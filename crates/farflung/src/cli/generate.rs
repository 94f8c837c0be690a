//! `farflung generate`: continues a text with a trained model.

use std::num::NonZeroUsize;

use farflung::zoo::{Sampling, generate};
use farflung::{Result, terminal};

use super::model::ModelArgs;

/// Continue a text with a trained model.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  farflung generate runs/nano-1 --prompt 'fn main'
  farflung generate ./gpt2 --prompt 'Once upon a time' --tokens 50 --temperature 0.7 --top-k 40
A model of the Hugging Face Hub must be downloaded first:
  hf download openai-community/gpt2 --local-dir gpt2
Weights are read from safetensors files, whatever prefixes the names of their tensors have (transformer., model.,
module., _orig_mod.). Ids of a padded vocabulary, which have no text, are never drawn.")]
pub(crate) struct GenerateCommand {
    #[command(flatten)]
    model: ModelArgs,
    /// The text to continue.
    #[arg(long, value_name = "TEXT", default_value = "")]
    prompt: String,
    /// Number of tokens to generate.
    #[arg(long, value_name = "N", default_value_t = 200)]
    tokens: usize,
    /// Sampling temperature; 0 takes the likeliest token.
    #[arg(long, value_name = "X", default_value_t = 0.8)]
    temperature: f32,
    /// Sample only from the K likeliest tokens; 0 takes all.
    #[arg(long, value_name = "K", default_value_t = 0)]
    top_k: usize,
    /// Sample only from the likeliest tokens that together have this probability; 1 takes all.
    #[arg(long, value_name = "P", default_value_t = 0.95)]
    top_p: f32,
    /// Seed of the sampling; the same seed gives the same text.
    #[arg(long, value_name = "N", default_value_t = 1337)]
    seed: u64,
    /// Print one JSON object with prompt and text.
    #[arg(long)]
    json: bool,
}

impl GenerateCommand {
    pub(crate) fn run(self) -> Result<()> {
        let loaded = self.model.load()?;
        let sampling = Sampling {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            seed: self.seed,
            vocab: NonZeroUsize::new(loaded.tokenizer.vocab_size()),
        };
        let prompt = loaded.tokenizer.encode(&self.prompt);
        let mut all = Vec::new();
        let mut failure = None;
        let mut put = |bytes: &[u8]| {
            failure = terminal::print_bytes(bytes).err();
            failure.is_none()
        };
        if !self.json {
            put(self.prompt.as_bytes());
        }
        generate(&loaded.stage, &loaded.params, &prompt, self.tokens, &sampling, |token| {
            let bytes = loaded.tokenizer.decode(&[token]).expect("only ids of the tokenizer are drawn");
            all.extend_from_slice(&bytes);
            self.json || put(&bytes)
        })?;
        if self.json {
            let text = String::from_utf8_lossy(&all);
            put(serde_json::json!({"prompt": self.prompt, "text": text}).to_string().as_bytes());
        }
        put(b"\n");
        failure.map_or(Ok(()), Err)
    }
}
