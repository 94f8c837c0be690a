//! `farflung convert`: writes a model as a folder in Hugging Face's layout.

use std::path::PathBuf;
use std::time::Instant;

use farflung::base::Precision;
use farflung::convert::{Form, convert};
use farflung::progress::{Progress, Show};
use farflung::zoo::weights::Dtype;
use farflung::{Error, ModelSource, Result, Stop, terminal};

/// Write a model as a folder in Hugging Face's layout: config.json, model.safetensors and tokenizer files.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  farflung convert SmolLM2-135M-Instruct.Q4_1.gguf ./smollm2
  farflung convert runs/nano-1 ./nano --dtype bf16
  farflung convert ./gpt-neox-20b ./in-shards --shard-mb 5000")]
pub(crate) struct ConvertCommand {
    /// A run's folder (its newest checkpoint is used), a checkpoint, a folder with config.json and
    /// model.safetensors, the file of weights in such a folder, or a GGUF file.
    #[arg(value_name = "FROM")]
    from: PathBuf,
    /// The new folder.
    #[arg(value_name = "TO")]
    to: PathBuf,
    /// Type of all tensors: f32, bf16 or f16. Default: that of FROM; f32 if its tensors differ or are
    /// quantized.
    #[arg(long, value_name = "TYPE")]
    dtype: Option<Precision>,
    /// Most megabytes of tensors per file; without it, there is one file.
    #[arg(long, value_name = "MB", value_parser = clap::value_parser!(u64).range(1..=1_000_000_000))]
    shard_mb: Option<u64>,
    /// The path to write, of a run that trained paths. Default: that of the folder.
    #[arg(long, value_name = "N")]
    path: Option<usize>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

impl ConvertCommand {
    /// Returns the model that is read: of a run that trained paths, one of them.
    fn source(&self) -> Result<ModelSource> {
        let source = ModelSource::find_path(&self.from, self.path)?;
        if let Some(paths) = source.path_models()?.filter(|_| self.path.is_none()) {
            let all = paths.paths().len();
            let line = format!("one of the {all} paths of the run is written: `--path N` chooses another\n");
            terminal::write_stderr(line);
        }
        Ok(source)
    }

    #[expect(clippy::disallowed_methods, reason = "progress is shown in real time")]
    pub(super) fn run(self) -> Result<()> {
        let source = self.source().map_err(Error::of_input)?;
        let form = Form {
            dtype: self.dtype.map(|dtype| match dtype {
                Precision::F32 => Dtype::F32,
                Precision::Bf16 => Dtype::Bf16,
                Precision::F16 => Dtype::F16,
            }),
            shard_bytes: self.shard_mb.map(|mb| mb * 1_000_000),
        };
        let (begun, stop) = (Instant::now(), Stop::install()?);
        let mut progress = None;
        let written = convert(&source, &self.to, form, |done, all| {
            progress.get_or_insert_with(|| Progress::new(all, 0, Show::Auto)).part(
                "tensors",
                done,
                begun.elapsed().as_secs_f64(),
            );
            stop.requested().map_or(Ok(()), |signal| Err(Error::Stopped(signal)))
        })
        .map_err(Error::of_input)?;
        if let Some(progress) = progress {
            progress.finish();
        }
        if let Some(note) = &written.note {
            terminal::write_stderr(format!("{note}\n"));
        }
        let dtype = written.dtype.name().to_lowercase();
        super::print(&if self.json {
            let object = serde_json::json!({
                "parameters": written.parameters,
                "dtype": dtype,
                "copied": written.copied,
                "folder": self.to.display().to_string(),
            });
            format!("{object}\n")
        } else {
            let beside = match &written.copied[..] {
                [] => ", without tokenizer files: it needs `--tokenizer` then".to_owned(),
                names => format!(", with {}", names.join(", ")),
            };
            format!("{}: {} parameters as {dtype}{beside}\n", self.to.display(), written.parameters)
        })
    }
}
