//! `farflung eval`: measures a model's loss on held-out text.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use farflung::config::choice::packing_of;
use farflung::config::value::Setting as _;
use farflung::data_notes::{ExampleCounts, data_notes, one_document};
use farflung::train::{check_tokens, no_targets, rows_of, rows_of_examples};
use farflung::zoo::data::{ExampleRows, LossOn, Packing, ReadOptions, TextEncoding, TextRouter, TokenType};
use farflung::zoo::{Batch, Corpus, HoldOut, Input, Objective, Sampler, Shard, Split, Tokenizer};
use farflung::{Error, Result, corpus, terminal};

use super::model::{Loaded, LoadedModel, ModelArgs, Models};

/// Longest sequences that are measured without `--context`.
const USUAL_CONTEXT: usize = 1024;

/// Measure a model's loss on the last tenth of a text, which training holds out.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  farflung eval runs/nano-1
  farflung eval ./gpt2 --data book.txt --batches 50 --json
  farflung eval ./llama --tokens rows.json --json")]
pub(crate) struct EvalCommand {
    #[command(flatten)]
    model: ModelArgs,
    /// Text file, folder of text files, or .bin file of tokens, as in `farflung train`. Default: the source
    /// code of farflung's own dependencies.
    #[arg(long, value_name = "PATH")]
    data: Option<PathBuf>,
    /// Encoding of texts that are not UTF-8 and have no byte-order mark, such as windows-1252 or euc-jp.
    /// Default: that of the model's run.
    #[arg(long, value_name = "NAME")]
    encoding: Option<TextEncoding>,
    /// Make special tokens that are written in the text, such as <|endoftext|>, the tokenizer's own tokens.
    /// Default: as in the model's run.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    special_tokens: Option<bool>,
    /// Type of the ids in .bin files that do not say it themselves: u16, u32, u8, i32 or i64. Default: that of
    /// the model's run, else u16.
    #[arg(long, value_name = "TYPE")]
    token_type: Option<TokenType>,
    /// JSON file with rows of token ids to measure instead of a text: `input_ids`, and `labels` if not every
    /// token after a row's first is a target (-100 is none).
    #[arg(long, value_name = "FILE", conflicts_with_all = ["data", "encoding", "special_tokens", "token_type", "batches"])]
    tokens: Option<PathBuf>,
    /// Keep documents apart, as `farflung train --document-mask true` does: attention, positions and targets
    /// stop at the borders of documents. With --tokens, these are where the file's `position_ids` begin again
    /// at 0; a text is read as in the model's run by default.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    document_mask: Option<bool>,
    /// Which tokens of examples are measured: answers or all. Default: as in the model's run, else answers.
    #[arg(long, value_name = "TOKENS", value_parser = LossOn::from_flag)]
    loss_on: Option<LossOn>,
    /// What is measured: causal (each token from those before it), prefix-lm or ul2, as in `farflung train`.
    /// Default: of a text, what the model's run was trained for. With --tokens it is causal, and prefix-lm
    /// reads the file's `prefixes`.
    #[arg(long, value_name = "KIND")]
    objective: Option<Objective>,
    /// Number of batches to measure, spread evenly over the held-out text.
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..))]
    batches: u32,
    /// Tokens of each sequence. Default: the model's context, at most 1024.
    #[arg(long, value_name = "N", conflicts_with = "tokens", value_parser = clap::value_parser!(u32).range(1..))]
    context: Option<u32>,
    /// Number of targets at the beginning of each sequence that are not measured. Default: of a run that
    /// trained paths, those that decide which path a text takes; else 0.
    #[arg(long, value_name = "N", conflicts_with = "tokens")]
    skip: Option<u32>,
    /// Sequences per batch.
    #[arg(long, value_name = "N", default_value_t = 12, value_parser = clap::value_parser!(u32).range(1..))]
    batch: u32,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

impl EvalCommand {
    pub(crate) fn run(self) -> Result<()> {
        match &self.tokens {
            Some(path) => self.on_rows(path),
            None => self.on_text(),
        }
    }

    /// Measures the targets of rows.
    fn on_rows(&self, path: &Path) -> Result<()> {
        let apart = self.document_mask.unwrap_or(false);
        let rows = rows_of(path, apart, self.objective.unwrap_or_default()).map_err(Error::of_input)?;
        let model = self.model.load_for_ids(rows.length())?;
        rows.check(model.stage.spec().vocab, model.stage.spec().context)
            .map_err(|error| Error::from(error).of_input())?;
        let length = rows.length();
        let (mut logprobs, mut sum) = (Vec::with_capacity(rows.count()), 0.0);
        let at_once = self.batch as usize;
        for first in (0..rows.count()).step_by(at_once) {
            let batch = rows.batch(first..rows.count().min(first + at_once));
            let (losses, weights) = (losses(&model, &batch)?, batch.weights.unwrap_or_default());
            for (losses, weights) in losses.chunks(length).zip(weights.chunks(length)) {
                let counted = losses.iter().zip(weights).filter(|(_, weight)| **weight > 0.0);
                let row: Vec<f64> = counted.map(|(loss, _)| -f64::from(*loss)).collect();
                sum -= row.iter().sum::<f64>();
                logprobs.push(row);
            }
        }
        let targets = rows.targets();
        let loss = sum / targets as f64;
        super::print(&if self.json {
            let object = serde_json::json!({ "loss": loss, "targets": targets, "logprobs": logprobs });
            format!("{object}\n")
        } else {
            let perplexity = loss.exp();
            format!("loss {loss:.4} nats per token, perplexity {perplexity:.3}, over {targets} targets\n")
        })
    }

    /// Opens the data. By default it is our own text, if documents are kept apart with each file as one.
    fn corpus(&self, tokenizer: &dyn Tokenizer, options: ReadOptions, document_mask: bool) -> Result<Corpus> {
        let name = "the default text";
        Ok(match &self.data {
            Some(path) => {
                Corpus::open_with(path, tokenizer, options).map_err(|error| Error::from(error).of_input())?
            }
            None if document_mask => {
                let documents = corpus::default_documents()?;
                Corpus::from_texts(name, documents.iter().map(Vec::as_slice), tokenizer)?
            }
            None => Corpus::from_bytes(name, &corpus::default_text()?.0, tokenizer)?,
        })
    }

    /// Measures held-out text.
    fn on_text(&self) -> Result<()> {
        let longest = self.context.map_or(USUAL_CONTEXT, |context| context as usize);
        let Models { sources, router, deciding } = self.model.load_all()?;
        let Loaded { stage, params, tokenizer, reading } =
            self.model.open_whole(&sources[0], Some(longest))?;
        let context = longest.min(stage.spec().context);
        if self.context.is_some_and(|given| given as usize > context) {
            let (value, expected) = (longest.to_string(), format!("at most {context}, the model's context"));
            return Err(Error::Setting { field: "context", value, expected });
        }
        let (tokenizer, first) = (&*tokenizer, LoadedModel { stage, params });
        let skipped = self.skip.map_or(deciding, |n| n as usize);
        if skipped >= context {
            let (field, value) = if self.skip.is_some() { ("skip", skipped) } else { ("context", context) };
            let expected = format!("a context of more than the {skipped} targets that are not measured");
            return Err(Error::Setting { field, value: value.to_string(), expected });
        }
        let options = ReadOptions {
            encoding: self.encoding.or(reading.options.encoding),
            special_tokens: self.special_tokens.unwrap_or(reading.options.special_tokens),
            token_type: self.token_type.or(reading.options.token_type),
            loss_on: self.loss_on.unwrap_or(reading.options.loss_on),
            as_texts: false,
        };
        let document_mask = self.document_mask.unwrap_or(reading.document_mask);
        let objective = self.objective.unwrap_or(reading.objective);
        let corpus = self.corpus(tokenizer, options, document_mask)?;
        let (training, held_out) = corpus.split(HoldOut::Standard)?;
        check_tokens(&[&held_out], tokenizer, first.stage.spec(), objective).map_err(Error::of_input)?;
        let one = one_document([&training, &held_out]).filter(|_| document_mask);
        for line in data_notes(corpus.reading(), &training, &held_out).into_iter().chain(one) {
            terminal::write_stderr(format!("{line}\n"));
        }
        let learnt = (objective, options.loss_on);
        let examples =
            held_out_examples(&held_out, (context, packing_of(reading.packing)), learnt, router.as_ref())
                .map_err(Error::of_input)?;
        let (windows, shard) =
            (self.batches as usize * self.batch as usize, Shard::whole(self.batch as usize));
        let (mut sum, mut count, mut paths) = (0.0, 0_u64, Vec::new());
        let mut first = Some(first);
        for (path, source) in sources.iter().enumerate() {
            let model = first
                .take()
                .map_or_else(|| self.model.open_whole(source, Some(longest)).map(Into::into), Ok)?;
            let all = held_out.clone();
            let sampler = match (&examples, &router) {
                (Some(rows), _) => Sampler::evaluation_of_examples(Arc::clone(rows), shard, windows)?,
                (_, Some(router)) => Sampler::evaluation_routed(all, shard, context, windows, router, path)?,
                (None, None) => Sampler::evaluation(all, shard, context, windows)?,
            };
            let is_text = examples.is_none();
            let sampler = if document_mask && is_text { sampler.by_documents() } else { sampler };
            let (seed, vocab) = (reading.seed, model.stage.spec().vocab);
            let sampler = sampler
                .with_objective(objective, seed, vocab)
                .map_err(|error| Error::from(error).of_input())?;
            let (losses, targets) = measured(&model, &sampler.without_first_targets(skipped))?;
            sum += losses;
            count += targets;
            let loss = (targets > 0).then(|| losses / targets as f64);
            paths.push(serde_json::json!({ "path": path, "loss": loss, "tokens": targets }));
        }
        if count == 0 {
            return Err(no_targets("the held-out text").of_input());
        }
        let loss = sum / count as f64;
        let perplexity = loss.exp();
        super::print(&if self.json {
            let bits = loss / std::f64::consts::LN_2;
            let mut object = serde_json::json!({
                "loss": loss, "perplexity": perplexity, "bits_per_token": bits, "tokens": count, "data_hash": corpus.hash(),
            });
            if router.is_some() {
                object["paths"] = paths.into();
            }
            format!("{object}\n")
        } else {
            let apart = if document_mask { ", documents kept apart" } else { "" };
            let of = match objective {
                Objective::Causal => String::new(),
                other => format!(", objective {other}"),
            };
            let by = if router.is_some() {
                format!(", each text on one of {} paths", sources.len())
            } else {
                String::new()
            };
            format!(
                "loss {loss:.4} nats per token, perplexity {perplexity:.3}, over {count} \
                 tokens{apart}{of}{by}\n"
            )
        })
    }
}

/// Returns the rows of held-out examples, and tells about them; `None` if they are a text.
fn held_out_examples(
    held_out: &Split,
    (context, packing): (usize, Packing),
    learnt: (Objective, LossOn),
    router: Option<&TextRouter>,
) -> Result<Option<Arc<ExampleRows>>> {
    if !held_out.has_examples() {
        return Ok(None);
    }
    if let Some(router) = router {
        let value = format!("examples, and the run has {} paths", router.paths());
        let expected = "a text, which takes a path by its beginning, or `--path N`".to_owned();
        return Err(Error::Setting { field: "data", value, expected });
    }
    let rows = rows_of_examples(held_out, context, packing, learnt)?;
    terminal::write_stderr(format!("{}\n", ExampleCounts::of(&rows).note()));
    Ok(Some(rows))
}

/// Returns the sum of the losses of a sampler's targets, and their number.
fn measured(model: &LoadedModel, sampler: &Sampler) -> Result<(f64, u64)> {
    let (mut sum, mut count) = (0.0, 0_u64);
    for step in 0..sampler.steps().unwrap_or(0) as u64 {
        let batch = sampler.batch(step)?;
        let losses = losses(model, &batch)?;
        let counts = |at: usize| batch.weights.as_ref().is_none_or(|weights| weights[at] > 0.0);
        let counted = losses.iter().enumerate().filter(|(at, _)| counts(*at));
        sum += counted.map(|(_, &loss)| f64::from(loss)).sum::<f64>();
        count += batch.counted() as u64;
    }
    Ok((sum, count))
}

/// Returns the loss of each target.
fn losses(model: &LoadedModel, batch: &Batch) -> Result<Vec<f32>> {
    let (LoadedModel { stage, params }, length) = (model, batch.length);
    let (x, y) = (stage.tokens(&batch.inputs, length)?, stage.tokens(&batch.targets, length)?);
    let x = Input::Tokens(x).with_borders(stage.borders(batch)?);
    Ok(stage.losses(params, x, &y)?.to_vec::<f32>()?)
}
