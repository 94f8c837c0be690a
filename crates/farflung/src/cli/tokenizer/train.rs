//! `farflung tokenizer train`.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use farflung::new_folder::NewFolder;
use farflung::progress::{Progress, Show};
use farflung::zoo::data::{ReadOptions, TextEncoding};
use farflung::zoo::tokenizer::{Byte, FileTokenizer, TrainOptions};
use farflung::zoo::{Corpus, HoldOut, Tokenizer as _};
use farflung::{Error, Result, Stop, corpus, terminal};

/// Train a byte-level byte-pair encoding on texts, and write it as tokenizer.json.
///
/// Words are split as GPT-2 does. Equal texts give equal tokenizers.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  farflung tokenizer train --vocab 8192 --out my-tokenizer my-texts/
  farflung train --tokenizer my-tokenizer --data my-texts/")]
pub(super) struct Train {
    /// Text files and folders of text files, read as `farflung train --data` does. Default: the source code of
    /// farflung's own dependencies.
    #[arg(value_name = "PATH")]
    texts: Vec<PathBuf>,
    /// The new folder.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Number of tokens: the 256 bytes, the special tokens, and one for each merge. There are fewer if the
    /// texts are too short.
    #[arg(long, value_name = "N", default_value_t = TrainOptions::default().vocab)]
    vocab: usize,
    /// A special token, which gets one of the first ids; may be repeated. The first one ends a document.
    #[arg(long, value_name = "TEXT", default_values_t = TrainOptions::default().special)]
    special: Vec<String>,
    /// Encoding of texts that are not UTF-8 and have no byte-order mark, such as windows-1252 or euc-jp.
    #[arg(long, value_name = "NAME")]
    encoding: Option<TextEncoding>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

impl Train {
    pub(super) fn run(self) -> Result<()> {
        let options =
            TrainOptions { vocab: self.vocab, special: self.special.clone(), ..TrainOptions::default() };
        options.validate()?;
        let documents = self.documents()?;
        // Removed if a signal or an error ends the work.
        let folder = NewFolder::beside(&self.out)?;
        let stop = Stop::install()?;
        let all: u64 = documents.iter().map(|text| text.len() as u64).sum();
        let tokenizer = trained(documents, options, all, &stop)?;
        for (name, bytes) in tokenizer.files() {
            folder.write(name, &bytes)?;
        }
        folder.commit()?;
        let (tokens, wanted, out) = (tokenizer.vocab_size(), self.vocab, self.out.display());
        super::super::print(&if self.json {
            let object =
                serde_json::json!({"folder": out.to_string(), "tokens": tokens, "name": tokenizer.name()});
            format!("{object}\n")
        } else {
            let fewer = if tokens < wanted {
                format!(", not {wanted}: no other pair occurs twice")
            } else {
                String::new()
            };
            format!("{out}: {tokens} tokens from {all} bytes of text{fewer}\n")
        })
    }

    /// Reads the texts. What was read goes to stderr.
    fn documents(&self) -> Result<Vec<String>> {
        let mut documents = Vec::new();
        let options = ReadOptions { encoding: self.encoding, as_texts: true, ..ReadOptions::default() };
        for path in &self.texts {
            let corpus = Corpus::open_with(path, &Byte, options)?;
            terminal::write_stderr(format!("data: {}\n", corpus.reading()));
            let (text, _) = corpus.split(HoldOut::Tokens(0))?;
            documents.extend(text.documents().into_iter().map(|range| {
                let mut ids = Vec::new();
                text.append_to(range.start, range.len(), &mut ids);
                let bytes: Vec<u8> = ids.into_iter().map(|id| id as u8).collect();
                String::from_utf8_lossy(&bytes).into_owned()
            }));
        }
        if self.texts.is_empty() {
            documents.push(String::from_utf8_lossy(&corpus::default_text()?.0).into_owned());
        }
        Ok(documents)
    }
}

/// Trains in another thread, so that a signal ends the work at any point.
#[expect(clippy::disallowed_methods, reason = "progress is shown in real time")]
fn trained(documents: Vec<String>, options: TrainOptions, all: u64, stop: &Stop) -> Result<FileTokenizer> {
    const LOOKS_EVERY: Duration = Duration::from_millis(20);
    let fed = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&fed);
    let work = move || {
        let texts = documents.iter().map(String::as_str);
        FileTokenizer::train(texts, &options, |bytes| {
            counted.fetch_add(bytes, Ordering::Relaxed);
        })
    };
    let thread = thread::Builder::new().name("tokenizer".to_owned()).spawn(work);
    let thread = thread.map_err(|source| Error::Io { action: "start", path: "a thread".into(), source })?;
    let begun = Instant::now();
    let mut progress = Progress::new(all, 0, Show::Auto);
    while !thread.is_finished() {
        if let Some(signal) = stop.requested() {
            return Err(Error::Stopped(signal));
        }
        let done = fed.load(Ordering::Relaxed);
        let what = if done < all { "bytes of text counted" } else { "merging; bytes of text counted" };
        progress.part(what, done, begun.elapsed().as_secs_f64());
        thread::sleep(LOOKS_EVERY);
    }
    progress.finish();
    Ok(thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?)
}
