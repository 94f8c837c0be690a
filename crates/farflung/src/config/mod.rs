//! A training run's settings: one list for the command line, for `--config FILE.toml`, and for the copy in the
//! run's folder.
//!
//! A flag overrides the file, and the file overrides the default. The list is declared once, below. The types
//! of single settings are in [`choice`], reading a file in [`mod@file`], the flags of a command in [`flags`],
//! notes on settings that have no effect in [`notes`], and the settings that all ranks of a job share in
//! [`shared`]. This module does not depend on what the settings do.

#[macro_use]
mod declare;
mod evaluation;

pub(crate) mod attention;
pub mod choice;
mod experts;
pub mod file;
pub mod flags;
pub mod given;
pub mod local_steps;
pub mod member_name;
mod mesh;
pub(crate) mod nearest;
pub mod notes;
mod optimizer;
pub mod plan;
mod paths;
pub mod pools;
pub mod recipe;
mod resolve;
pub mod shared;
mod sync;
mod transport;
mod validate;
pub mod value;

#[cfg(test)]
mod tests;
pub mod zero;

use std::collections::BTreeSet;
use std::path::PathBuf;

use farflung_base::{Bandwidth, ContextOrder, LayerPatterns, Link, Nanos};
use farflung_comm::Algorithm;
use farflung_compress::AverageSpec;
use farflung_compress::link::LinkSpec;
use farflung_optim::Groups;
use farflung_parallel::pipeline::{Method, VersionSync};
use farflung_parallel::{Mesh, Recompute};

use farflung_tensor::Precision;
use farflung_zoo::data::LossOn;
use farflung_zoo::data::{TextEncoding, TokenType};
use farflung_zoo::spec::BalanceOver;
use farflung_zoo::{Objective, Sharding};

use crate::Result;
use choice::{
    BalanceKind, Devices, LossScaling, LrScheduleKind, MuonScaleKind, OptimizerKind, RecipeKind, Resume,
    SamplingKind, ServersKind, StatePlace, StoreKind, SyncKind, TokenizerKind, TransportKind,
};
use given::Given;
use local_steps::LocalStepsKind;
use member_name::MemberName;
use pools::Numbers;
use shared::PerRankSetting;
use validate::check;
use value::Setting;
use zero::{Weights, ZeroCodecs, ZeroWithin};

/// The default link, `home`: the uplink of a fibre or cable connection at home.
const HOME: Link = Link { bandwidth: Bandwidth(20_000_000), latency: Nanos::from_micros(25_000) };

/// Returns the default codec: eight bits per value, with a scale per 256 values.
fn default_codec() -> AverageSpec {
    "int8".parse().expect("the default codec is in the list of codecs")
}

/// Ratio of the highest learning rate to the default of the final one.
const LR_OVER_MIN_LR: f64 = 10.0;

settings! {
    "Model" {
        /// Model: a preset (nano, baby, llama-nano, llama-baby, the published sizes of GPT-2, GPT-3, GPT-J,
        /// GPT-NeoX, Pythia, LLaMA, SmolLM2, Mistral, Mixtral and Qwen; mixtral-nano and switch-nano have
        /// experts), or the path of a config.json of one of these families.
        model: String, "NAME", "nano";
        /// Number of transformer blocks; overrides the preset.
        layers: usize, "N";
        /// Number of attention heads per block; overrides the preset.
        heads: usize, "N";
        /// Width of the hidden states; overrides the preset.
        dim: usize, "N";
        /// Longest sequence in tokens; overrides the preset.
        context: usize, "N";
        /// Rows of the token table, if more than the tokenizer has tokens: the others are never drawn.
        vocab: usize, "N";
        /// Which tokens up to its own a token attends to: full, window:W, strided:S, fixed:L,G, variable:L,...
        /// or bigbird:W,G,R, with fields such as window:256+sinks:4; overrides the model's. Layers take several
        /// in turn: window:256/full. docs/sparse-attention.md.
        attention: LayerPatterns, "PATTERN";
        /// Factor of the loss that balances the experts of a model that has some; overrides the model's.
        balance_loss: f64, "FACTOR";
        /// What the balancing loss takes together: layer (nothing: each layer and each sequence is balanced by
        /// itself, so that no plan changes it), model (all layers) or batch (all layers and the sequences of a
        /// microbatch, as transformers does for Mixtral); overrides the model's.
        balance_over: BalanceOver, "KIND";
        /// Factor of the loss on the squared log-sum-exp of routers' logits; overrides the model's.
        z_loss: f64, "FACTOR";
        /// Number of replicas that divide the experts of a model that has some, and send each other tokens for
        /// them. With fast links between these: they are neighbours, such as the workers of one machine. Each
        /// has all other weights. Of R replicas, R / N have each expert.
        @expert: usize, "N", 1_usize;
        /// Share of the experts of each of the replicas that divide them, such as 3,1, for example by their
        /// memory. Default: by the machines' speeds in --topology, else equal shares.
        @expert_weights: Numbers, "N,N";
        /// How tokens are encoded on their way to the experts of other replicas, and what comes back: any
        /// --codec without feedback.
        @expert_codec: LinkSpec, "CODEC", LinkSpec::default();
        /// Train paths through modules that several of them share, instead of one model (DiPaCo): the number of
        /// modules at each level of layers, such as 2,2 for four paths through two levels. Each replica trains
        /// a path on its own part of the text (--shards; by default as many clusters as paths), and each module
        /// is averaged over the paths that have it. With --sync diloco; docs/paths.md.
        @paths: Numbers, "N,N";
        /// Number of tokens at the beginning of a text that decide which of the paths it takes.
        route_tokens: usize, "N", 32_usize;
        /// Most tokens that an expert takes of a sequence, as a factor of an equal share; overrides the model's
        /// capacity.
        capacity_factor: f64, "FACTOR";
        /// How text is split into tokens: byte, gpt2, or the path of a tokenizer.json, a model or a run. With
        /// --init-from, the default is the model's own.
        tokenizer: TokenizerKind, "KIND", TokenizerKind::Byte
            => "the path of its file may differ; the tokenizers are compared";
        /// Weights to start from: a folder with config.json and model.safetensors (Hugging Face's layout; which
        /// families: docs/models.md), a GGUF file, a checkpoint, or a run's folder (its newest checkpoint).
        /// Shape and vocabulary are theirs.
        init_from: PathBuf, "PATH" => "the path may differ; the weights are compared";
    }
    "Data and output" {
        /// Text file, folder of text files, or .bin file of tokens; or .jsonl files of examples, each line with
        /// `messages`, or with `prompt` and `completion` (or with `text`). All may be compressed by gzip, zstd,
        /// xz or bzip2. A folder may have files for train, valid and test. Default: the source code of
        /// farflung's own dependencies.
        data: PathBuf, "PATH" => "the path may differ; the tokens are compared";
        /// JSON file with rows of token ids to train on instead of a text: `input_ids`, and `labels` if not
        /// every token after a row's first is a target (-100 is none). Each step has all rows.
        tokens: PathBuf, "FILE" => "the path may differ; the tokens are compared";
        /// Each process of a job trains on its own text: --data may then differ between processes.
        own_data: bool, "BOOL", false;
        /// How the sequences of a step are chosen: random (windows at random places) or epochs (windows that do
        /// not overlap, each once per epoch, in a new random order each time).
        sampling: SamplingKind, "KIND", SamplingKind::Random;
        /// Which data each replica trains on: random (all replicas draw from all data), files (each replica
        /// gets some of the files of a folder, or some of the documents between end-of-text tokens) or kmeans:K
        /// (chunks of the text are grouped into K clusters of similar chunks, and each replica gets some of the
        /// clusters).
        shards: Sharding, "KIND", Sharding::Random;
        /// Keep documents apart: attention, positions and targets stop at the borders of documents, which are
        /// the files of a folder and what stands between end-of-text tokens. With --tokens, where the file's
        /// `position_ids` begin again at 0.
        document_mask: bool, "BOOL", false;
        /// Which tokens of examples are predicted: answers (the completion, or what the assistant says, with
        /// the token that ends it) or all.
        loss_on: LossOn, "TOKENS", LossOn::Answers;
        /// Put several examples into a sequence, as many as fit; attention, positions and targets stop at their
        /// borders. With false, each has a sequence of its own.
        packing: bool, "BOOL", true;
        /// What the model learns to predict: causal (each token from those before it), prefix-lm (a sequence is
        /// divided at a random place; the tokens before it are read in both directions, the tokens after it are
        /// predicted) or ul2 (half of the sequences as prefix-lm; from the others, spans are taken out and
        /// predicted). ul2 needs 103 ids at the end of the vocabulary, which a new model gets. With --tokens,
        /// prefix-lm reads the file's `prefixes`; in examples, the tokens before the answer are the prefix.
        /// docs/data.md.
        objective: Objective, "KIND", Objective::Causal;
        /// Encoding of texts that are not UTF-8 and have no byte-order mark, such as windows-1252 or euc-jp.
        encoding: TextEncoding, "NAME" => "it may differ with the files; the tokens are compared";
        /// Make special tokens that are written in a text, such as <|endoftext|>, the tokenizer's own tokens.
        special_tokens: bool, "BOOL", false;
        /// Type of the ids in .bin files that do not say it themselves: u16 (the default), u32, u8, i32 or i64.
        token_type: TokenType, "TYPE" => "it may differ with the files; the tokens are compared";
        /// The run's folder. Default: the next free runs/MODEL-N.
        out: PathBuf, "DIR" => "each machine has its own folders";
        /// Print results as JSON on stdout.
        json: bool, "BOOL", false => "it changes only what a process prints";
        /// Show no progress on stderr.
        quiet: bool, "BOOL", false => "it changes only what a process prints";
    }
    "Training" {
        /// Optimizer steps.
        steps: u64, "N", 500u64;
        /// Sequences per microbatch of each worker.
        @batch: usize, "N", 12usize;
        /// Number of microbatches whose gradients are summed in a step.
        @accumulate: usize, "N", 1usize;
        /// Optimizer; `farflung train --help` lists them.
        optimizer: OptimizerKind, "KIND", OptimizerKind::default();
        /// Highest learning rate.
        lr: f64, "RATE", 1e-3;
        /// Learning rate at the end of the schedule. If only --lr is given, a tenth of --lr.
        min_lr: f64, "RATE", 1e-4;
        /// Number of steps over which the learning rate rises from zero.
        warmup: u64, "N", 50u64;
        /// How the learning rate changes after the warm-up: cosine, linear, constant, wsd (constant, then
        /// linear at the end) or inverse-sqrt.
        lr_schedule: LrScheduleKind, "KIND", LrScheduleKind::Cosine;
        /// Fraction of the steps, at the end, in which the learning rate of wsd falls.
        decay_fraction: f64, "X", 0.2;
        /// Weight decay of matrices.
        weight_decay: f64, "X", 0.1;
        /// Rules for parameters by patterns of their names, separated by `;`, such as
        /// `*.bias:lr=0.1,decay=0;h.0.*:lr=2`. lr is a factor of --lr; decay replaces --weight-decay. The last
        /// rule that matches applies.
        group: Groups, "RULES";
        /// Decay of the first moment in Adam and its variants; in Lion, the weight of the momentum in the
        /// update.
        beta1: f64, "X", 0.9;
        /// Decay of the second moment in Adam and its variants; in Lion, decay of the momentum. Other default:
        /// 0.99 for lion.
        beta2: f64, "X", 0.95;
        /// Small constant that optimizers add to the denominator. Other defaults: 1e-6 for lamb and its
        /// 1-bit form, 1e-10 for adagrad, 1e-16 for adabelief.
        eps: f64, "X", 1e-8;
        /// Momentum of sgd, signum, rmsprop and muon. Other defaults: 0 for rmsprop, 0.95 for muon.
        momentum: f64, "X", 0.9;
        /// Use Nesterov momentum in sgd and muon. Other default: true for muon.
        nesterov: bool, "BOOL", false;
        /// Dampening of sgd: fraction of each gradient after the first that is not added to the momentum.
        dampening: f64, "X", 0.0;
        /// Decay of rmsprop's running average of squared gradients.
        rho: f64, "X", 0.99;
        /// In rmsprop, subtract the square of the average gradient from the average of squares.
        centered: bool, "BOOL", false;
        /// Learning-rate decay of adagrad: the rate of step t is divided by 1 + t times this.
        lr_decay: f64, "X", 0.0;
        /// Step size to which adabound's bounds converge, at the highest learning rate.
        final_lr: f64, "RATE", 0.1;
        /// Speed at which adabound's bounds converge.
        gamma: f64, "X", 1e-3;
        /// Number of updates of zero-one-adam's variance after which the interval between two updates doubles.
        variance_doubling: u64, "N", 16u64;
        /// Number of local steps of zero-one-adam after which the interval between two averages doubles, up to
        /// --sync-every. Default: a fifth of --steps.
        local_doubling: u64, "STEPS";
        /// Scale of muon's updates of hidden matrices: match-adamw (0.2 times the square root of the longer
        /// side, so that one rate suits both) or original (the square root of outputs over inputs, if above 1).
        muon_scale: MuonScaleKind, "KIND", MuonScaleKind::MatchAdamW;
        /// Steps between updates of Lookahead's slow weights, around any optimizer; 0 disables Lookahead.
        lookahead: u64, "STEPS", 0u64;
        /// Fraction of the distance to the fast weights that the slow weights move in an update.
        lookahead_alpha: f64, "X", 0.5;
        /// Largest global norm of the gradients; longer gradients are clipped. 0 disables clipping.
        clip: f64, "NORM", 1.0;
        /// Seed of all randomness.
        seed: u64, "N", 1337u64;
    }
    "Workers and links" {
        /// TOML file with the plan, as written by `farflung plan --out` and --print-plan. It replaces the other
        /// settings of workers, pipeline, batch and precision.
        plan: PathBuf, "FILE" => "the path may differ; the file's contents are compared";
        /// Workers in this process. In a launched job each process has one worker.
        @workers: usize, "N", 4usize => "in a job of several processes, each has one worker";
        /// A published method that consists of several settings, such as demo or sparseloco; `farflung train
        /// --help` lists them. Settings given beside it override it.
        @recipe: RecipeKind, "NAME";
        /// What workers average, and when; `farflung train --help` lists the methods.
        @sync: SyncKind, "KIND", SyncKind::default();
        /// Steps between two averages over all workers, for methods with local steps; for async, decoupled and
        /// halos, local steps between two changes that a worker sends; for zero-one-adam the largest interval.
        /// Other default: 1 for cocktail.
        @sync_every: u64, "STEPS", 20u64;
        /// Steps between des-loc's averages of first moments, a multiple of --sync-every. Default: 3 times
        /// --sync-every.
        first_moment_every: u64, "STEPS";
        /// Steps between des-loc's averages of second moments, a multiple of --sync-every. Default: 6 times
        /// --sync-every.
        second_moment_every: u64, "STEPS";
        /// Local steps that each replica does between two averages: equal (all do --sync-every), by-speed (the
        /// fastest machine of --topology does --sync-every and slower ones fewer, so that no replica waits), or
        /// one number per replica, such as 30,30,10.
        @local_steps: LocalStepsKind, "STEPS", LocalStepsKind::Equal;
        /// How the microbatches of a step are distributed among members that may join and leave (farflung
        /// host): by-speed or equal. With by-speed, a slower machine gets fewer of --microbatches if that makes
        /// steps at least a tenth shorter; a machine that is too slow for even one leaves.
        balance: BalanceKind, "KIND", BalanceKind::BySpeed;
        /// Name of this machine among members that join and leave (farflung host, farflung join), in messages
        /// and in farflung status: up to 32 letters, digits, -, _ and dots. Without one, a member has a number
        /// only.
        name: MemberName, "NAME" => "each member has its own";
        /// Number of members with which a run begins (farflung host): those that are here earlier wait for the
        /// others. 1 begins at once.
        min_members: usize, "N", 1_usize;
        /// Fraction of a rank's link to the next rank that is used for copies of its part of the model, in a
        /// run of members with a single pipeline (farflung host --stages). After a loss, the members go back to
        /// the newest step of which all parts were copied. 0 sends no copies.
        copy_share: f64, "X", 0.1;
        /// Longest time for which all members wait for the state of a newcomer (farflung host). A newcomer that
        /// would take longer is refused.
        join_wait: Nanos, "TIME", Nanos::from_millis(60_000);
        /// Outer learning rate of diloco, streaming, noloco, eager, async, decoupled and halos.
        outer_lr: f64, "RATE", 0.7;
        /// Outer momentum of the methods that have one. Other defaults: 0.5 for noloco and async, 0.3 for
        /// decoupled, 0 for eager.
        outer_momentum: f64, "X", 0.9;
        /// Number of fragments of the parameters, which streaming averages at different times. Default: 4, but
        /// at most one per step.
        fragments: usize, "N";
        /// Steps for which workers train on while an average of streaming, or an answer of async, is under way;
        /// 0 waits for it.
        sync_delay: u64, "STEPS", 1u64;
        /// Fraction of a worker's own parameters that remains when streaming applies an average: 0 takes the
        /// average alone, as torchft does; the paper uses 0.5.
        mixing: f64, "X", 0.0;
        /// Where the servers of asynchronous methods run: sharded (each worker serves its part of the model) or
        /// central (the first worker serves all of it).
        servers: ServersKind, "KIND", ServersKind::Sharded;
        /// Steps between meetings of asynchronous workers. Losses are reported at meetings, and a run can be
        /// evaluated and saved only there.
        meet_every: u64, "STEPS", 100u64;
        /// Time from the end of a round of async-average to the beginning of the next.
        average_interval: Nanos, "TIME", Nanos::from_millis(500);
        /// Number of steps at the beginning in which async-average averages gradients instead.
        sync_warmup: u64, "STEPS", 0u64;
        /// Number of changes that async collects for a step of its outer momentum; 0 means one per worker.
        outer_buffer: u64, "N", 0u64;
        /// Number of changes from a region's workers after which the region's server in halos sends them to the
        /// world's server; 0 means two per worker.
        world_every: u64, "N", 0u64;
        /// Learning rate of the world server of halos.
        world_lr: f64, "RATE", 1.0;
        /// Momentum of the world server of halos.
        world_momentum: f64, "X", 0.0;
        /// Fraction of a region's own model that remains when halos applies the world's model.
        world_mixing: f64, "X", 0.75;
        /// Number of steps that bounded-stale lets a worker be ahead of the slowest.
        staleness: u64, "STEPS", 4u64;
        /// Number of workers whose changes suffice for an outer step of decoupled. Default: more than half.
        quorum: usize, "N";
        /// Time for which decoupled waits for further changes after it has its quorum.
        grace: Nanos, "TIME", Nanos::ZERO;
        /// Norm of the change of a tensor, relative to the tensor's norm, above which event sends the tensor
        /// again.
        trigger: f64, "X", 0.02;
        /// Fraction of the distance to its neighbours that choco moves a worker in a step; codecs that lose
        /// more need smaller values.
        consensus_rate: f64, "X", 0.5;
        /// Moniqua's bound on the difference between neighbours' parameters. A run fails if a larger difference
        /// would make a message ambiguous.
        theta: f64, "X", 0.25;
        /// Bits per parameter that moniqua sends, 1 to 24. With 1 bit, --consensus-rate must be small.
        moniqua_bits: u32, "N", 8u32;
        /// How values are encoded for the link: none, f16, bf16, int8, int4:128, sign, topk:0.01/f16, dgc:0.01
        /// (momentum is accumulated before the selection), powersgd:4 (matrices as products of rank 4), and
        /// many more; an invalid name lists them.
        @codec: AverageSpec, "CODEC", default_codec();
        /// Add what the codec dropped to the next average (error feedback), unless the codec itself says how
        /// (+ef:0.95) or is unbiased.
        @error_feedback: bool, "BOOL", true;
        /// Number of steps at the beginning in which averages are sent uncompressed, before --codec applies.
        /// Default: 0. For optimizers that average momentum, these steps are their warm-up: by default 15% of
        /// --steps. For zero-one-adam, its variance is frozen after these steps, also 15%.
        codec_warmup: u64, "STEPS";
        /// Number of steps, after those of --codec-warmup, over which the density of a codec that keeps a
        /// fraction, such as dgc:0.001, falls from a quarter to its own: 0.25, 0.0625, 0.0156, 0.0039, 0.001.
        density_warmup: u64, "STEPS", 0u64;
        /// Size of the buckets in which gradients are averaged, in megabytes.
        @bucket_mb: f64, "MB", 4.0;
        /// Average a bucket while the backward pass computes the next one.
        @overlap: bool, "BOOL", true;
        /// Number of steps to try, before the first one, with each of several bucket sizes and algorithms. The
        /// fastest are written to plan.toml in the run's folder, with which --plan repeats the run. 0 tries
        /// none.
        tune: u64, "STEPS", 0u64;
        /// Link of each worker: BANDWIDTH,LATENCY or home, office, cloud, lan, datacenter.
        link: Link, "LINK", HOME;
        /// TOML file with devices, links and regions, instead of --link; or the name of a shipped topology,
        /// such as home.
        topology: PathBuf, "FILE" => "the path may differ; the machines and links are compared";
        /// Limit on what this process sends to all others together, such as 20mbit, so that training does not
        /// use all of a home connection. It counts the bytes given to sockets; TCP's headers add 3 to 4%.
        up: Bandwidth, "BANDWIDTH", Bandwidth::UNLIMITED => "each process has its own connection";
        /// Limit on what this process sends to each other process.
        up_each: Bandwidth, "BANDWIDTH", Bandwidth::UNLIMITED => "each process has its own connection";
        /// Name of the job, if several jobs use one port: ranks of another job are rejected.
        job: String, "NAME", "farflung" => "ranks with different names do not connect";
        /// Transport between workers; `farflung train --help` lists them. auto is simulated in one process and
        /// tcp in several, with shared memory between processes of one machine unless --up or --up-each is
        /// given. With relays (--relay, or in the ticket) auto uses QUIC between processes that TCP does not
        /// connect. iroh is QUIC alone, and needs a ticket; a run may have ranks with auto and others with
        /// iroh.
        transport: TransportKind, "KIND", TransportKind::Auto => "processes of a job only meet over sockets";
        /// Your own relays for --transport auto and iroh, as http://HOST:PORT (`farflung relay` is one) or as
        /// https:// with a publicly trusted certificate, separated by commas; for processes that TCP does not
        /// connect. A ticket may also contain relays. Give them to all ranks. They need a build with the
        /// feature iroh, and a ticket or a secret.
        relay: String, "URL" => "each process uses the relays that it can reach";
        /// How values are summed: ring, double-tree, hierarchical and others, or auto, which takes the cheapest
        /// on the links of --topology; an invalid name lists them. With a codec: direct (equal shards, the
        /// default), butterfly (shards by access links), hierarchical (uncompressed inside a region, encoded
        /// between regions), ring (encoded again at each hop, which loses precision each time), all-gather
        /// (each worker's values go to all others, encoded once; for few workers), or auto.
        @algorithm: Algorithm, "NAME", Algorithm::Ring;
        /// Simulated computing speed of each worker on the virtual clock, in FLOP/s, unless --topology contains
        /// its machine's speed.
        compute_rate: f64, "FLOPS", 5e10;
        /// Longest time to wait for a peer.
        deadline: Nanos, "TIME", Nanos::from_millis(60_000) => "the waiting time changes no results";
    }
    "Pipeline" {
        /// Number of ranks P that share one copy of the model in a pipeline. The workers make workers / (P T)
        /// such replicas, with T ranks along the tensor axis, so the default four make two with --stages 2. A
        /// step takes batch x microbatches x replicas sequences: with the default of 2 P microbatches, twice as
        /// many as the same workers take without stages.
        @stages: usize, "P", 1usize;
        /// Number of ranks that divide the width of each layer (tensor parallelism): heads, inner columns, and
        /// the rows of the token table. They wait for each other several times in each layer, so the links
        /// between them should be fast. They are neighbours, such as the workers of one machine.
        /// docs/tensor-parallel.md.
        @tensor: usize, "T", 1usize;
        /// Share of each layer of the ranks along the tensor axis, such as 2,1, for example by their speed.
        /// Default: equal shares.
        @tensor_weights: Numbers, "N,N";
        /// Divide the positions of sequences among the ranks along the tensor axis, too, where each has whole
        /// layers (sequence parallelism): norms, residuals and what stages send each other are then divided as
        /// well, for a quarter more bytes within layers.
        @sequence_parallel: bool, "BOOL", false;
        /// Number of neighbouring replicas that divide the positions of their sequences in all layers (context
        /// parallelism): each has a part of the activations, and keys and values pass along a ring of them. For
        /// contexts that do not fit on one rank. docs/context-parallel.md.
        @context_parallel: usize, "C", 1usize;
        /// How many neighbours of these exchange positions for heads in attention instead (Ulysses): a
        /// divisor of --context-parallel and of the key-value heads. With as many as --context-parallel there
        /// is no ring.
        @ulysses: usize, "U", 1usize;
        /// Positions of each rank of the ring: zigzag (two ranges, the same work for all), striped, or
        /// contiguous.
        @context_order: ContextOrder, "ORDER", ContextOrder::Zigzag;
        /// What replicas divide of what each would hold otherwise (ZeRO): 0 nothing; 1 the optimizer's state,
        /// of which each then keeps and updates a shard; 2 the gradients, too, which leave after each
        /// microbatch; 3 the weights as well, which are gathered layer by layer. Equal shards send as much as
        /// gradients alone; with 2 and m microbatches (m + 1) / 2 times as much, with 3 about 3 m / 2 times.
        /// The codec of averages is then none. docs/zero.md.
        @zero: usize, "0|1|2|3", 0usize;
        /// Share of each replica of what they divide, such as 3,1, for example by their memory; 0 for one
        /// that keeps none. Default: equal shares.
        @zero_weights: Weights, "N,N";
        /// Codecs of the weights and of the gradients that replicas send each other with --zero 3, such as
        /// int8,int4 (ZeRO++): blocks of rounded values, without memory.
        @zero_codec: ZeroCodecs, "W,G|none", ZeroCodecs::default();
        /// Inside which replicas divide the weights once more with --zero 3 (ZeRO++): region (those with fast
        /// links between them) or a number of neighbours. Weights then come from other regions once an
        /// update, for another copy of them in each region, and gradients are added up there before they
        /// leave.
        @zero_within: ZeroWithin, "no|region|N", ZeroWithin::No;
        /// Where the optimizer's state is between updates: device (in memory) or disk, from which each update
        /// reads it, and to which it writes it back with the weights, so that a run that is killed continues
        /// without a checkpoint. The codec of averages is then none. docs/state-on-disk.md.
        state: StatePlace, "WHERE", StatePlace::Device => "each rank keeps its own state";
        /// Folder of the state on disk; each rank has its own in it. Default: the run's folder.
        state_dir: PathBuf, "PATH" => "each machine has its own disks";
        /// Number of ranks along each axis, such as data=2,pipeline=2,context=2,tensor=2: another way to give
        /// --workers, --stages, --context-parallel and --tensor.
        @mesh: Mesh, "AXIS=N,AXIS=N";
        /// Number of ranks of each stage, such as 1,2. Stages are then pools of ranks; each microbatch passes
        /// one rank of each pool, chosen in turn by speed. The run has one copy of the model on all its
        /// workers; the ranks of a pool average their part.
        @pools: Numbers, "N,N";
        /// Relative speed of each rank within its pool, such as 1,4,2. Default: from the machines' speeds in
        /// --topology.
        @pool_rates: Numbers, "N,N";
        /// Whether stages are pools of the members that come and leave (farflung host --stages). A newcomer
        /// joins the slowest stage, microbatches are routed by the members' measured speeds, and a member
        /// changes its stage if that makes steps a tenth shorter. A step takes the same sequences for any
        /// number of members.
        pooled: bool, "BOOL", false;
        /// Whether the other members keep what they have computed of a step in which a member is lost (with
        /// --pooled). They then do only the lost member's work again. Gradients are summed in another order, so
        /// results differ by rounding from those after a member that leaves by itself; with false, the whole
        /// step is done again, with the same bits.
        keep_work: bool, "BOOL", true;
        /// Schedule of the pipeline; `farflung train --help` lists them.
        @schedule: Method, "NAME", Method::OneFOneB;
        /// File with your own schedule, instead of --schedule, in the format that `farflung schedule --file`
        /// reads.
        @schedule_file: PathBuf, "PATH" => "the path may differ; the plan has the schedule";
        /// Microbatches per step, instead of --accumulate. Default in a pipeline: twice the number of stages.
        @microbatches: usize, "M";
        /// Parts of the model on each rank. Default: 2 for schedules that have several, else 1.
        @chunks: usize, "V";
        /// What is recomputed for backward passes, to save memory: none, full, each-layer, or a number of
        /// layers (in a pipeline, of each stage). With full and a number, a pipeline recomputes from the inputs
        /// of its stages, a whole stage at once; each-layer recomputes each layer from its own input, as all do
        /// without a pipeline. Without a pipeline, also an amount of memory such as 2GB: the fastest choice
        /// with which the activations of a microbatch fit into it.
        @recompute: Recompute, "WHAT", Recompute::None;
        /// Number of layers (in a pipeline, of each stage), after those that are recomputed, whose activations
        /// are kept in the host's memory until their backward passes, to save GPU memory. No effect on a CPU.
        @offload: usize, "LAYERS", 0_usize;
        /// Number of activations that a rank may hold, for schedules that support a limit: 1f1b-mu, zb-auto,
        /// varuna, pools.
        @memory: usize, "N";
        /// Slices of terapipe are whole multiples of this many tokens, which must divide the context; their
        /// lengths are chosen so that the pipeline takes the least time. Default: an eighth of the context.
        @slice_grain: usize, "N";
        /// How hidden states are encoded between stages: any --codec without feedback, aqsgd:4 (the change
        /// since the sample's last pass, in 4 bits; needs --sampling epochs) or direct:4 (the quantiser of
        /// aqsgd alone).
        @boundary: LinkSpec, "CODEC", LinkSpec::default();
        /// How gradients of hidden states are encoded on the way back.
        @boundary_backward: LinkSpec, "CODEC", LinkSpec::default();
        /// Where aqsgd stores samples: memory (checkpoints contain them), file or mapped (files in the run's
        /// folder, at both ends of each boundary; a resumed run continues with the files' content). With
        /// mapped, room for all samples is reserved on the disk.
        boundary_store: StoreKind, "KIND", StoreKind::Memory => "each rank stores its own samples";
        /// Which version of the weights a microbatch uses under pipedream: vertical (the first stage's version
        /// on all stages) or newest (each stage's own newest; the last stage then waits for the first at each
        /// update of their shared token table).
        @version_sync: VersionSync, "KIND", VersionSync::Vertical;
    }
    "Machine" {
        /// Devices: auto (the best one available), cpu, `wgpu[:n]` or `cuda[:n]`, as `farflung devices` lists
        /// them. Several, separated by commas, are used by the ranks in turn.
        device: Devices, "NAMES", Devices::cpu() => "each machine has its own devices";
        /// Type to which matrix products round their operands: f32, bf16 or f16. Sums are in f32, and
        /// parameters, gradients and optimizer states are f32. Devices without tensor cores for the type
        /// compute the same values, but not faster.
        @precision: Precision, "KIND", Precision::F32;
        /// Loss scale, the factor of gradients when products round them: auto (found by trial in f16, 1
        /// otherwise) or a power of two.
        loss_scale: LossScaling, "SCALE", LossScaling::Auto;
        /// Stop with an error on a device that does not give the same bits twice in a trial before the first
        /// step. Kernels are never chosen by timing, so runs are repeatable on all other devices.
        deterministic: bool, "BOOL", false => "it tests only the device of this process";
        /// If copies of parameters (of replicas, or of the token table in a pipeline) are on devices that round
        /// differently: steps between comparisons, after which all copies are set to the first rank's. 0
        /// disables them.
        resync_every: u64, "STEPS", 50u64;
        /// Threads per worker; 0 divides the cores among the workers.
        threads: usize, "N", 0usize => "no result depends on the number of threads";
    }
    "Evaluation and checkpoints" {
        /// Steps between evaluations; 0 evaluates only at the end.
        eval_every: u64, "STEPS", 100u64;
        /// Number of batches of 12 sequences per evaluation: the same sequences whatever --batch and --workers
        /// are.
        eval_batches: u64, "N", 20u64;
        /// Steps between digests of the parameters in metrics.jsonl, which `farflung diff` compares; 0 writes
        /// none.
        digest_every: u64, "STEPS", 0u64;
        /// Steps between checks that all parameters and optimizer states are finite and that copies of them are
        /// equal to the bit. 0 checks only before each checkpoint.
        check_every: u64, "STEPS", 50u64;
        /// Steps between checkpoints; 0 saves only at the end and on a signal. One for which the disk has no
        /// room is left out, with a warning.
        checkpoint_every: u64, "STEPS", 0u64;
        /// Whether the end of the run is saved. With false, the last state on disk (--state disk) is what is
        /// left of the run.
        save_end: bool, "BOOL", true;
        /// Number of checkpoints to keep; 0 keeps all. With 1, two are kept, because a rank may fail while it
        /// writes the newest. The oldest is deleted after the newest is written.
        keep_last: usize, "N", 2usize => "each rank has its own checkpoints";
        /// Compress checkpoints with zstd.
        compress_checkpoints: bool, "BOOL", false => "each rank has its own checkpoints";
        /// Where the run starts: auto (at the newest valid checkpoint of --out), no (a new run), or the path of
        /// a checkpoint or of another run's folder (its newest valid one). For weights alone: --init-from.
        resume: Resume, "WHERE", Resume::No => "the path may differ; the step is compared";
    }
    "Sample" {
        /// Text that the sample at the end continues.
        prompt: String, "TEXT", "fn " => "only rank 0 writes the sample";
        /// Length of the sample in tokens; 0 writes no sample.
        sample_tokens: usize, "N", 200usize => "only rank 0 writes the sample";
        /// Sampling temperature; 0 takes the likeliest token.
        temperature: f64, "X", 0.8 => "only rank 0 writes the sample";
        /// Sample only from the K likeliest tokens; 0 takes all.
        top_k: usize, "K", 0usize => "only rank 0 writes the sample";
        /// Sample only from the likeliest tokens that together have this probability; 1 takes all.
        top_p: f64, "P", 0.95 => "only rank 0 writes the sample";
    }
}

/// Returns a field's name as in a file and on the command line: `eval-every` for `eval_every`.
pub(crate) fn dashed(name: &str) -> String {
    name.replace('_', "-")
}
