//! `farflung generate`: continues a text with a trained model.

use std::num::NonZeroUsize;
use std::panic::resume_unwind;

use farflung::access::AccessArgs;
use farflung::base::{Link, Nanos, Topology};
use farflung::comm::Communicator;
use farflung::config::choice::TransportKind;
use farflung::config::value::Setting as _;
use farflung::model_source::RunReading;
use farflung::train::{StagedModel, check_room, join};
use farflung::zoo::tokenizer::{Byte, TextStream};
use farflung::zoo::{ModelSpec, Objective, Sampling, Tokenizer, generate};
use farflung::{Error, Result, Stop, TrainConfig, terminal};

use super::model::{ModelArgs, PartText};

/// Continue a text with a trained model.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  farflung generate runs/nano-1 --prompt 'fn main'
  farflung generate ./gpt2 --prompt 'Once upon a time' --tokens 50 --temperature 0.7 --top-k 40
  farflung generate SmolLM2-135M-Instruct.Q4_1.gguf --chat --prompt 'What is the capital of France?' \
    --temperature 0
A model that one machine has no room for, on four; each reads only its own layers:
  farflung launch --hosts a,b,c,d -- generate runs/large --stages 4 --prompt 'Once upon a time'
A model of the Hugging Face Hub must be downloaded first:
  hf download openai-community/gpt2 --local-dir gpt2
Weights are read from safetensors files, whatever prefixes the names of their tensors have (transformer., model.,
module., _orig_mod.). Ids of a padded vocabulary, which have no text, are never drawn.")]
pub(crate) struct GenerateCommand {
    #[command(flatten)]
    model: ModelArgs,
    /// The text to continue; with --chat, the message to answer.
    #[arg(long, value_name = "TEXT", default_value = "")]
    prompt: String,
    /// Write the prompt as a message, by the model's own template of conversations, and print the answer alone.
    #[arg(long)]
    chat: bool,
    /// A message before it that says how the answer shall be.
    #[arg(long, value_name = "TEXT", requires = "chat")]
    system: Option<String>,
    /// Go on after tokens that end a text or a message.
    #[arg(long)]
    ignore_eos: bool,
    /// Most tokens to generate.
    #[arg(long, value_name = "N", default_value_t = 200)]
    tokens: usize,
    /// How the prompt is read: causal, or in both directions, as a model that was trained with --objective
    /// prefix-lm or ul2 expects it. Default: as the model's run was trained.
    #[arg(long, value_name = "KIND")]
    objective: Option<Objective>,
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
    #[command(flatten)]
    staged: StagedArgs,
}

impl GenerateCommand {
    pub(crate) fn run(self) -> Result<()> {
        self.sampling(&Byte, RunReading::default())
            .validate()
            .map_err(|error| Error::from(error).of_input())?;
        if self.staged.stages.get() > 1 {
            return self.staged.run(&self);
        }
        let loaded = self.model.load(None, &self.prompt)?;
        let sampling = self.sampling(&*loaded.tokenizer, loaded.reading);
        check_room(&*loaded.tokenizer, loaded.stage.spec(), sampling.objective).map_err(Error::of_input)?;
        let prompt = self.prompt_ids(&*loaded.tokenizer)?;
        self.print(&*loaded.tokenizer, &prompt, |emit| {
            generate(&loaded.stage, &loaded.params, &prompt, self.tokens, &sampling, emit)?;
            Ok(())
        })
    }

    /// Returns how tokens are drawn.
    fn sampling(&self, tokenizer: &dyn Tokenizer, reading: RunReading) -> Sampling {
        Sampling {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            seed: self.seed,
            vocab: NonZeroUsize::new(tokenizer.vocab_size()),
            objective: self.objective.unwrap_or(reading.objective),
        }
    }

    /// Returns the ids of what the model is given.
    fn prompt_ids(&self, tokenizer: &dyn Tokenizer) -> Result<Vec<u32>> {
        if self.chat {
            return self.conversation_ids(tokenizer).map_err(Error::of_input);
        }
        Ok(tokenizer.encode_prompt(&self.prompt)?)
    }

    /// Returns the ids of a conversation that asks for an answer.
    #[cfg(feature = "tokenizers")]
    fn conversation_ids(&self, tokenizer: &dyn Tokenizer) -> Result<Vec<u32>> {
        use farflung::zoo::chat::{ChatTemplate, Conversation, Date, Message};

        let Some(template) = tokenizer.chat_template() else { return Err(no_template()) };
        let system = self.system.iter().map(Message::system);
        let messages: Vec<Message> = system.chain([Message::user(&self.prompt)]).collect();
        let mut conversation = Conversation::of(&messages).asking();
        conversation.marks = tokenizer.marks();
        conversation.date = Some(Date::today());
        Ok(tokenizer.encode_marked(&ChatTemplate::new(template)?.render(&conversation)?)?)
    }

    #[cfg(not(feature = "tokenizers"))]
    fn conversation_ids(&self, _: &dyn Tokenizer) -> Result<Vec<u32>> {
        Err(no_template())
    }

    /// Prints the tokens that `work` generates after the prompt: it is called with what takes each one.
    fn print<T>(
        &self,
        tokenizer: &dyn Tokenizer,
        prompt: &[u32],
        work: impl FnOnce(&mut dyn FnMut(u32) -> bool) -> Result<T>,
    ) -> Result<T> {
        let mut all = Vec::new();
        let mut failure = None;
        let mut put = |bytes: &[u8]| {
            failure = terminal::print_bytes(bytes).err();
            failure.is_none()
        };
        if !self.json && !self.chat {
            put(self.prompt.as_bytes());
        }
        let ends = if self.ignore_eos { Vec::new() } else { tokenizer.ends() };
        let mut stream = TextStream::after(tokenizer, prompt);
        let mut show = |bytes: Vec<u8>| {
            let goes_on = self.json || put(&bytes);
            all.extend(bytes);
            goes_on
        };
        let mut wrong = None;
        let done = work(&mut |token| {
            !ends.contains(&token)
                && match stream.push(token) {
                    Ok(bytes) => show(bytes),
                    Err(error) => {
                        wrong = Some(error);
                        false
                    }
                }
        })?;
        if let Some(error) = wrong {
            return Err(error.into());
        }
        show(stream.finish()?);
        if self.json {
            let text = String::from_utf8_lossy(&all);
            put(serde_json::json!({"prompt": self.prompt, "text": text}).to_string().as_bytes());
        }
        put(b"\n");
        failure.map_or(Ok(done), Err)
    }
}

/// Returns the error of a model that was not made for conversations.
fn no_template() -> Error {
    Error::Setting {
        field: "chat",
        value: "given, and the model's tokenizer has no template of conversations".to_owned(),
        expected: "a model that was made for conversations, or no --chat".to_owned(),
    }
}

/// Flags of a generation by several ranks.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Several machines")]
struct StagedArgs {
    /// Number of stages into which the model is cut. Each is a process of its own under `farflung launch` or
    /// another launcher, else a thread. A rank reads only the tensors of its own layers, from the path that it
    /// is given: a folder with the whole model, or a run's folder with the part that this rank trained.
    #[arg(long, value_name = "N", default_value = "1")]
    stages: NonZeroUsize,
    /// Transport between ranks: as in `farflung train`. Threads have simulated links.
    #[arg(long, value_name = "KIND", default_value = "auto", value_parser = TransportKind::from_flag)]
    transport: TransportKind,
    /// Simulated links between threads: BANDWIDTH,LATENCY, or one of home, office, cloud, lan, datacenter.
    #[arg(long, value_name = "LINK", default_value = "home", value_parser = Link::from_flag)]
    link: Link,
    /// Simulated computing speed of each thread on the virtual clock, in FLOP/s.
    #[arg(long, value_name = "FLOPS", default_value_t = 5e10)]
    compute_rate: f64,
    /// Longest time to wait for another rank.
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = Nanos::from_flag)]
    deadline: Nanos,
    #[command(flatten)]
    access: AccessArgs,
}

impl StagedArgs {
    /// Generates with the ranks of this process, and prints the text on rank 0.
    fn run(&self, command: &GenerateCommand) -> Result<()> {
        let env = self.access.detect(|name| std::env::var(name).ok())?;
        if let Some(env) = env.as_ref().filter(|env| env.world_size != self.stages.get()) {
            let (field, value) = ("stages", self.stages.to_string());
            let expected = format!("{}, the number of processes", env.world_size);
            return Err(Error::Setting { field, value, expected });
        }
        let config = TrainConfig {
            transport: self.transport,
            link: self.link,
            compute_rate: self.compute_rate,
            deadline: self.deadline,
            ..TrainConfig::default()
        };
        let config = config.run_settings();
        let joined = env.as_ref().map(|env| join(&config, env)).transpose()?;
        let stop = Stop::install_loading(super::print_error)?;
        let connections = StagedModel::connect(&config, self.stages.get(), joined)?;
        let ranks = connections.len();
        let results: Vec<Result<()>> = std::thread::scope(|scope| {
            let rank = |connection| {
                let stop = &stop;
                scope.spawn(move || self.rank(command, connection, ranks, stop))
            };
            let all: Vec<_> = connections.into_iter().map(rank).collect();
            all.into_iter().map(|rank| rank.join().unwrap_or_else(|panic| resume_unwind(panic))).collect()
        });
        // The first one is the cause, where others only lost it.
        let lost = |error: &Error| error.is_peer_lost() || matches!(error, Error::Comm(_));
        let mut errors: Vec<Error> = results.into_iter().filter_map(Result::err).collect();
        errors.sort_by_key(lost);
        errors.into_iter().next().map_or(Ok(()), Err)
    }

    fn rank(
        &self,
        command: &GenerateCommand,
        connection: (Communicator, Option<Topology>),
        ranks: usize,
        stop: &Stop,
    ) -> Result<()> {
        let check = |text: &PartText, spec: &ModelSpec| {
            let objective = command.objective.unwrap_or(text.reading.objective);
            check_room(&*text.tokenizer, spec, objective)
        };
        let (opened, text) = match command.model.open_part(connection.0.rank(), ranks, check) {
            Ok((opened, text)) => (Ok(opened), text),
            Err(error) => (Err(error), None),
        };
        let model = StagedModel::load(opened, connection, self.compute_rate)?;
        let Some(PartText { tokenizer, reading }) = text else { return model.follow() };
        let sampling = command.sampling(&*tokenizer, reading);
        let prompt = command.prompt_ids(&*tokenizer)?;
        let generated = command.print(&*tokenizer, &prompt, |emit| {
            model.generate(&prompt, command.tokens, &sampling, |token| {
                emit(token) && stop.requested().is_none()
            })
        })?;
        let each = generated.per_token(generated.time);
        let predicted = generated
            .predicted
            .map(|all| format!(" of simulated time, predicted {}", generated.per_token(all)));
        let more = predicted.unwrap_or_default();
        let stages = self.stages;
        terminal::write_stderr(format!(
            "{} tokens over {stages} stages: {each} per token{more}\n",
            generated.tokens
        ));
        match stop.requested() {
            Some(signal) => Err(Error::Stopped(signal)),
            None => Ok(()),
        }
    }
}
