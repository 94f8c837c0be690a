//! A training run's settings: one list for the command line, for `--config FILE.toml`, and for the copy in the
//! run's folder.
//!
//! A flag wins over the file, the file over the default. The list is declared once, below; the types of single
//! settings are in [`choice`], how a file is read in [`mod@file`], the flags as a command has them in
//! [`flags`], which of them change nothing in [`notes`], which of them all ranks of a job share in [`shared`].
//! It refuses to know what the settings do.

pub mod choice;
pub mod file;
pub mod flags;
pub mod given;
pub mod local_steps;
pub(crate) mod nearest;
pub mod notes;
mod optimizer;
pub mod plan;
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

use std::collections::BTreeSet;
use std::path::PathBuf;

use farflung_base::{Bandwidth, Link, Nanos};
use farflung_comm::Algorithm;
use farflung_compress::AverageSpec;
use farflung_compress::link::LinkSpec;
use farflung_optim::Groups;
use farflung_parallel::Recompute;
use farflung_parallel::pipeline::{Method, VersionSync};

use farflung_tensor::Precision;
use farflung_zoo::Sharding;

use crate::Result;
use choice::{
    BalanceKind, Devices, LossScaling, LrScheduleKind, MuonScaleKind, OptimizerKind, RecipeKind, Resume,
    SamplingKind, ServersKind, StoreKind, SyncKind, TokenizerKind, TransportKind,
};
use given::Given;
use local_steps::LocalStepsKind;
use pools::Numbers;
use shared::Own;
use validate::check;
use value::Setting;

/// The default link, `home`: a fibre or cable line's uplink.
const HOME: Link = Link { bandwidth: Bandwidth(20_000_000), latency: Nanos::from_micros(25_000) };

/// Eight bits a value, with a scale for each 256.
fn default_codec() -> AverageSpec {
    "int8".parse().expect("it is in the list of codecs")
}

/// The highest learning rate over the one at the end of the schedule, unless that is given.
const LR_OVER_MIN_LR: f64 = 10.0;

/// The type of a resolved setting: itself with a default, `Option` without.
macro_rules! resolved {
    ($ty:ty) => { Option<$ty> };
    ($ty:ty, $default:expr) => { $ty };
}

/// The value of a resolved setting.
macro_rules! resolve {
    ($given:expr) => {
        $given
    };
    ($given:expr, $default:expr) => {
        $given.unwrap_or_else(|| $default.into())
    };
}

/// A resolved setting as TOML, if it has a value.
macro_rules! printed {
    ($field:expr) => {
        $field.as_ref().map(Setting::value)
    };
    ($field:expr, $default:expr) => {
        Some(Setting::value(&$field))
    };
}

/// Declares `TrainArgs` (what was given) and `TrainConfig` (what holds) from one list of settings. Ranks of a
/// job compare a setting when they meet, unless its row ends with `=>` and the reason why it may differ between
/// them.
macro_rules! settings {
    ($($heading:literal {
        $($(#[doc = $doc:literal])+ $name:ident: $ty:ty, $metavar:literal $(, $default:expr)? $(=> $own:literal)?;)+
    })+) => {
        /// The settings of a run as they were given: `None` where they were not.
        #[derive(Debug, Clone, Default, PartialEq, clap::Args)]
        pub struct TrainArgs {
            $($(
                $(#[doc = $doc])+
                #[arg(long, value_name = $metavar, help_heading = $heading,
                      value_parser = <$ty as Setting>::from_flag)]
                pub $name: Option<$ty>,
            )+)+
            /// Settings that a file marks as defaults ([`BY_DEFAULT`](given::BY_DEFAULT)): they have a value
            /// but do not count as given.
            #[arg(skip)]
            pub by_default: BTreeSet<&'static str>,
        }

        /// The settings of a run, each with a value; `None` only where leaving it out means something.
        #[derive(Debug, Clone, PartialEq)]
        pub struct TrainConfig {
            $($($(#[doc = $doc])+ pub $name: resolved!($ty $(, $default)?),)+)+
            /// Which of them were given, by flag or file.
            pub given: Given,
        }

        impl TrainArgs {
            /// The names of all settings as they stand in a file, in the order of `--help`.
            pub const KEYS: &'static [&'static str] = &[$($(stringify!($name),)+)+];

            /// The settings that may differ between the ranks of a job.
            pub const OWN: &'static [Own] =
                &[$($($(Own { name: stringify!($name), why: $own },)?)+)+];

            /// These, and `other`'s where these give nothing.
            #[must_use]
            pub fn or(self, other: Self) -> Self {
                let mut by_default = self.by_default.clone();
                by_default.extend(other.by_default.difference(&self.given()));
                Self { $($($name: self.$name.or(other.$name),)+)+ by_default }
            }

            /// The names of those that are given.
            #[must_use]
            pub fn given(&self) -> BTreeSet<&'static str> {
                let all = [$($(self.$name.is_some().then_some(stringify!($name)),)+)+];
                all.into_iter().flatten().filter(|name| !self.by_default.contains(name)).collect()
            }

            /// Those that are given, with their values.
            #[must_use]
            pub fn given_values(&self) -> Vec<(&'static str, String)> {
                let all = [$($((stringify!($name), self.$name.as_ref().map(|v| Setting::value(v).to_string())),)+)+];
                let given = all.into_iter().filter_map(|(name, value)| Some((name, value?)));
                given.filter(|(name, _)| !self.by_default.contains(name)).collect()
            }

            /// Takes back one setting.
            fn forget(&mut self, key: &str) {
                match key {
                    $($(stringify!($name) => self.$name = None,)+)+
                    _ => {}
                }
            }

            /// Sets one setting from a TOML value. Errors: what was expected, if the value is not that.
            fn set(&mut self, key: &str, value: &toml::Value) -> Result<(), String> {
                match key {
                    $($(stringify!($name) => {
                        let expected = || <$ty>::wanted(value.as_str().unwrap_or_default());
                        self.$name = Some(<$ty>::from_toml(value).ok_or_else(expected)?);
                    })+)+
                    _ => return Err(format!("one of {}", Self::KEYS.join(" "))),
                }
                Ok(())
            }
        }

        impl TrainConfig {
            /// Fills in the defaults; nothing is checked.
            fn fill(args: TrainArgs) -> Self {
                let given = Given::Only(args.given());
                let (min_lr, codec, outer_momentum) = (args.min_lr, args.codec, args.outer_momentum);
                let sync = args.sync;
                let own = args.optimizer_defaults();
                let mut config = Self { $($($name: resolve!(args.$name $(, $default)?),)+)+ given };
                config.min_lr = min_lr.unwrap_or(config.lr / LR_OVER_MIN_LR);
                own.fill(&mut config);
                config.take_pools();
                if sync.is_none() {
                    config.take_sync_of_row();
                }
                if codec.is_none() {
                    config.take_codec_of_rows();
                }
                if outer_momentum.is_none() {
                    config.take_outer_momentum_of_row();
                }
                config
            }

            /// Headings with the settings below them; `None` for a setting without a value.
            fn entries(&self) -> Vec<(&'static str, Vec<(&'static str, Option<toml::Value>)>)> {
                vec![$(($heading, vec![$((stringify!($name), printed!(self.$name $(, $default)?)),)+]),)+]
            }
        }
    };
}

settings! {
    "Model" {
        /// Model preset: nano, baby, gpt2, and the larger ones of GPT-2 and GPT-3.
        model: String, "NAME", "nano";
        /// Number of blocks, instead of the preset's.
        layers: usize, "N";
        /// Attention heads in a block, instead of the preset's.
        heads: usize, "N";
        /// Width of the hidden states, instead of the preset's.
        dim: usize, "N";
        /// Longest sequence, instead of the preset's.
        context: usize, "N";
        /// How text becomes tokens: byte or gpt2.
        tokenizer: TokenizerKind, "KIND", TokenizerKind::Byte;
        /// Folder with Hugging Face GPT-2 weights to start from.
        init_from: PathBuf, "DIR" => "its path is; the weights are compared";
    }
    "Data and output" {
        /// Text file, folder of text, or .bin token file; without it, the source of our own dependencies.
        data: PathBuf, "PATH" => "its path is; the tokens are compared";
        /// Each process of a job trains on a text of its own: --data may then differ between them.
        own_data: bool, "BOOL", false;
        /// Which sequences a step trains on: random (windows at random places) or epochs (windows that do not
        /// overlap, each once an epoch, in another order each time).
        sampling: SamplingKind, "KIND", SamplingKind::Random;
        /// Which data each replica trains on: random (all of them), files (some files of a folder, or what
        /// end-of-text tokens separate) or kmeans:K (chunks of the text are put into K clusters of similar
        /// ones, and each replica has some of the clusters).
        shards: Sharding, "KIND", Sharding::Random;
        /// The run's folder; without it, the next free runs/MODEL-N.
        out: PathBuf, "DIR" => "each machine has its own folders";
        /// Print results as JSON on stdout.
        json: bool, "BOOL", false => "only what a process prints";
        /// No progress on stderr.
        quiet: bool, "BOOL", false => "only what a process prints";
    }
    "Training" {
        /// Optimizer steps.
        steps: u64, "N", 500u64;
        /// Sequences in a microbatch, for each worker.
        batch: usize, "N", 12usize;
        /// Microbatches whose gradients are summed for a step.
        accumulate: usize, "N", 1usize;
        /// Optimizer; the list is below.
        optimizer: OptimizerKind, "KIND", OptimizerKind::default();
        /// Highest learning rate.
        lr: f64, "RATE", 1e-3;
        /// Learning rate at the end of the schedule; unless told a tenth of --lr.
        min_lr: f64, "RATE", 1e-4;
        /// Steps over which the learning rate rises from zero.
        warmup: u64, "N", 50u64;
        /// The learning rate's way after the warm-up: cosine, linear, constant, wsd (constant, and a line at
        /// the end) or inverse-sqrt.
        lr_schedule: LrScheduleKind, "KIND", LrScheduleKind::Cosine;
        /// Share of the steps in which wsd's learning rate falls.
        decay_fraction: f64, "X", 0.2;
        /// Weight decay of matrices.
        weight_decay: f64, "X", 0.1;
        /// Rules for parameters by patterns of their names, `;` between them:
        /// `*.bias:lr=0.1,decay=0;h.0.*:lr=2`. lr is a factor of --lr, decay is instead of --weight-decay; the
        /// last rule that matches decides.
        group: Groups, "RULES";
        /// Decay of the first moment of Adam and its kin, and Lion's share of momentum.
        beta1: f64, "X", 0.9;
        /// Decay of the second moment of Adam and its kin, and of Lion's momentum (0.99 there unless told).
        beta2: f64, "X", 0.95;
        /// What optimizers add to what they divide by; unless told 1e-6 for lamb and its 1-bit
        /// form, 1e-10 for adagrad, 1e-16 for
        /// adabelief.
        eps: f64, "X", 1e-8;
        /// Momentum of sgd, signum, rmsprop (0 unless told) and muon (0.95 unless told).
        momentum: f64, "X", 0.9;
        /// Nesterov's look-ahead for sgd and muon (which has it unless told).
        nesterov: bool, "BOOL", false;
        /// What sgd leaves out of each gradient after the first as it joins the momentum.
        dampening: f64, "X", 0.0;
        /// Decay of rmsprop's average of squares.
        rho: f64, "X", 0.99;
        /// Subtract the square of the average gradient from rmsprop's average of squares.
        centered: bool, "BOOL", false;
        /// The learning rate of adagrad's step t is divided by 1 + t times this.
        lr_decay: f64, "X", 0.0;
        /// What adabound's rates go to at the highest learning rate.
        final_lr: f64, "RATE", 0.1;
        /// How fast adabound's rates go there.
        gamma: f64, "X", 1e-3;
        /// Changes of zero-one-adam's variance after which the steps between two of them double.
        variance_doubling: u64, "N", 16u64;
        /// Local steps of zero-one-adam after which those between two averages double, up to --sync-every;
        /// unless told a fifth of --steps.
        local_doubling: u64, "STEPS";
        /// How far muon moves hidden matrices: match-adamw (0.2 times the root of the longer side, so that one
        /// rate suits both) or original (the root of outputs over inputs, if above 1).
        muon_scale: MuonScaleKind, "KIND", MuonScaleKind::MatchAdamW;
        /// Steps between moves of Lookahead's slow weights, around any optimizer; 0 is none.
        lookahead: u64, "STEPS", 0u64;
        /// How far the slow weights go towards the fast ones.
        lookahead_alpha: f64, "X", 0.5;
        /// Longest global gradient norm; 0 is no clipping.
        clip: f64, "NORM", 1.0;
        /// Seed of all randomness.
        seed: u64, "N", 1337u64;
    }
    "Workers and links" {
        /// TOML file with the plan, as `farflung plan --out` and --print-plan write it; it decides what the
        /// other settings of workers, pipeline, batch and precision would.
        plan: PathBuf, "FILE" => "its path is; what the file says is compared";
        /// Workers in this process; a launched job has one in each process.
        workers: usize, "N", 4usize => "a job of several processes has a worker in each";
        /// A published method that is several settings, such as demo or sparseloco; the list is below. What is
        /// given beside it wins.
        recipe: RecipeKind, "NAME";
        /// What workers average, and when; the list is below.
        sync: SyncKind, "KIND", SyncKind::default();
        /// Steps between DiLoCo's averages; under zero-one-adam the most.
        sync_every: u64, "STEPS", 20u64;
        /// Steps between des-loc's averages of first moments, a multiple of --sync-every; unless told 3 times
        /// that.
        first_moment_every: u64, "STEPS";
        /// Steps between des-loc's averages of second moments, a multiple of --sync-every; unless told 6
        /// times that.
        second_moment_every: u64, "STEPS";
        /// Local steps of each replica in --sync-every steps: equal, by-speed (slower machines of --topology
        /// take fewer, so that nobody waits), or a number for each such as 30,30,10.
        local_steps: LocalStepsKind, "STEPS", LocalStepsKind::Equal;
        /// Shares of a step among members that come and leave (farflung host): by-speed (a slower machine has
        /// fewer of --microbatches once that makes steps a tenth shorter, and one that is too slow for a
        /// single one leaves) or equal.
        balance: BalanceKind, "KIND", BalanceKind::BySpeed;
        /// Share of a rank's link to the next for copies of its part, where one pipeline alone has members that
        /// may be lost (farflung host --stages): they go back to the newest step that all have copied. 0 copies
        /// nothing.
        copy_share: f64, "X", 0.1;
        /// DiLoCo's outer learning rate.
        outer_lr: f64, "RATE", 0.7;
        /// Outer momentum of the methods that have one; unless told 0.5 for noloco and async,
        /// 0.3 for decoupled, 0 for eager.
        outer_momentum: f64, "X", 0.9;
        /// Parts of the parameters that streaming averages at different times; unless told 4, or one a step.
        fragments: usize, "N";
        /// Steps that streaming lets an average take, and async an answer, while workers train on; 0 waits.
        sync_delay: u64, "STEPS", 1u64;
        /// What stays of a worker's own parameters where streaming takes up an average: 0 takes the average, as
        /// torchft does; the paper has 0.5.
        mixing: f64, "X", 0.0;
        /// Where the servers of asynchronous methods are: sharded (each worker serves its part of the model) or
        /// central (the first worker serves all of it).
        servers: ServersKind, "KIND", ServersKind::Sharded;
        /// Steps between meetings of asynchronous workers, at which losses are told and a run may be evaluated
        /// and saved.
        meet_every: u64, "STEPS", 100u64;
        /// Time from the end of a round of async-average to the next.
        average_interval: Nanos, "TIME", Nanos::from_millis(500);
        /// Steps at the beginning in which async-average averages gradients instead.
        sync_warmup: u64, "STEPS", 0u64;
        /// Changes that async gathers for a step of its outer momentum; 0 is one of each worker.
        outer_buffer: u64, "N", 0u64;
        /// Changes that a region's workers make in halos before its server sends them to the world's; 0 is two
        /// of each worker.
        world_every: u64, "N", 0u64;
        /// Learning rate of halos's world server.
        world_lr: f64, "RATE", 1.0;
        /// Its momentum.
        world_momentum: f64, "X", 0.0;
        /// What stays of a region's model in halos where it takes up the world's.
        world_mixing: f64, "X", 0.75;
        /// Steps that bounded-stale lets a worker be ahead of the slowest.
        staleness: u64, "STEPS", 4u64;
        /// Workers whose changes are enough for an outer step of decoupled; unless told more than half.
        quorum: usize, "N";
        /// How long decoupled lets later changes join an outer step once it has its quorum.
        grace: Nanos, "TIME", Nanos::ZERO;
        /// By how much of its norm a tensor has to change before event sends it again.
        trigger: f64, "X", 0.02;
        /// How far choco lets a worker go towards its neighbours in a step: less for codecs that lose more.
        consensus_rate: f64, "X", 0.5;
        /// Moniqua's bound: how far neighbours' parameters may be apart. A run fails where a message would be
        /// understood wrongly.
        theta: f64, "X", 0.25;
        /// Bits that moniqua sends of each parameter, 1 to 24; with one, --consensus-rate is to be small.
        moniqua_bits: u32, "N", 8u32;
        /// How values are packed for the link: none, f16, bf16, int8, int4:128, sign, topk:0.01/f16, dgc:0.01
        /// (momentum is gathered before the selection), powersgd:4 (matrices as products of rank 4), and many
        /// more; a wrong name lists them.
        codec: AverageSpec, "CODEC", default_codec();
        /// Carry what the codec dropped over to the next average, unless the codec says how itself (+ef:0.95)
        /// or is unbiased.
        error_feedback: bool, "BOOL", true;
        /// Steps at the beginning in which averages travel as they are, before --codec holds; unless told 0,
        /// and 15% of --steps under the optimizers that average momentum, which it is the warm-up of. Under
        /// zero-one-adam the steps after which its variance stands still, and 15% too.
        codec_warmup: u64, "STEPS";
        /// Steps after these over which the density of a codec that keeps a share, such as dgc:0.001, falls
        /// from a quarter to its own: 0.25, 0.0625, 0.0156, 0.0039, 0.001.
        density_warmup: u64, "STEPS", 0u64;
        /// Megabytes of gradients that are averaged together.
        bucket_mb: f64, "MB", 4.0;
        /// Average a bucket while the backward pass still computes the next.
        overlap: bool, "BOOL", true;
        /// Steps that are tried, before the first one, with each of several bucket sizes and algorithms: the
        /// fastest go into plan.toml in the run's folder, by which --plan repeats the run. 0 tries none.
        tune: u64, "STEPS", 0u64;
        /// Link of each worker: BANDWIDTH,LATENCY or home, office, cloud, lan, datacenter.
        link: Link, "LINK", HOME;
        /// TOML file with devices, links and regions, instead of --link; or the name of a shipped one, such as
        /// home.
        topology: PathBuf, "FILE" => "its path is; the machines and links are compared";
        /// The fastest that this process sends to all others together, such as 20mbit, so that training does
        /// not take all of a home's line: what sockets are given, to which TCP's headers add 3 to 4%.
        up: Bandwidth, "BANDWIDTH", Bandwidth::UNLIMITED => "each process has a line of its own";
        /// The fastest that it sends to each of them.
        up_each: Bandwidth, "BANDWIDTH", Bandwidth::UNLIMITED => "each process has a line of its own";
        /// The job's name where several use one port: ranks of another job are turned away.
        job: String, "NAME", "farflung" => "ranks with another do not meet";
        /// What carries bytes; the list is below. auto is simulated in one process, and tcp in several, with
        /// shared memory between those of one machine unless --up or --up-each is given. iroh reaches
        /// processes behind routers, and needs a ticket.
        transport: TransportKind, "KIND", TransportKind::Auto => "processes of a job only meet over sockets";
        /// Relays of your own for --transport iroh, as http://HOST:PORT (`farflung relay` is one) or https://
        /// with a certificate that the web trusts; several with commas between. A ticket may have them too.
        relay: String, "URL" => "each process has relays that it reaches";
        /// How values are summed: ring, double-tree, hierarchical and others, or auto, whichever is the
        /// cheapest on the links of --topology; a wrong name lists them. With a codec direct (equal shards,
        /// unless told), butterfly (shards by access links), hierarchical (plain inside a region, packed
        /// between regions), ring (packed anew at each hop, and loses at each), all-gather (each worker's to
        /// all others: packed once, for few workers), or auto.
        algorithm: Algorithm, "NAME", Algorithm::Ring;
        /// Modelled compute of each worker on the virtual clock, in FLOP/s, where no --topology has its
        /// machine's speed.
        compute_rate: f64, "FLOPS", 5e10;
        /// Longest wait for a peer.
        deadline: Nanos, "TIME", Nanos::from_millis(60_000) => "how long a process waits changes no value";
    }
    "Pipeline" {
        /// Ranks that share one copy of the model in a pipeline. The workers make workers / P such replicas, so
        /// the default four make two with --stages 2. A step takes batch x microbatches x replicas sequences:
        /// with the default 2 P microbatches, twice as many as the same workers take without stages.
        stages: usize, "P", 1usize;
        /// Ranks of each stage, such as 1,2: stages are pools of ranks, and each microbatch passes one rank of
        /// each pool, by their speeds in turn. One copy of the model on as many workers; a pool's ranks average
        /// its part.
        pools: Numbers, "N,N";
        /// How fast each rank of the pools is beside the others of its pool, such as 1,4,2; unless told by the
        /// machines' speeds of --topology.
        pool_rates: Numbers, "N,N";
        /// Stages are pools of the members that come and leave (farflung host --stages): a newcomer joins the
        /// stage that holds the others up, microbatches take their ways by the members' measured speeds, and a
        /// member changes its stage where that makes steps a tenth shorter. A step takes the same sequences
        /// however many members there are.
        pooled: bool, "BOOL", false;
        /// The pipeline's schedule; the list is below.
        schedule: Method, "NAME", Method::OneFOneB;
        /// A schedule of your own instead of --schedule, as `farflung schedule --file` reads it.
        schedule_file: PathBuf, "PATH" => "its path is; the plan has the schedule";
        /// Microbatches of a step, instead of --accumulate; a pipeline has twice as many as stages unless told.
        microbatches: usize, "M";
        /// Parts of the model on each rank; 2 for the schedules that have several, else 1.
        chunks: usize, "V";
        /// What is computed again for backward passes, to hold less: none, full, or a number of layers, in a
        /// pipeline of each stage. A pipeline begins at its stages' inputs, and where there is none each layer
        /// at its own. Where there is none, an amount of memory such as 2GB too: the fastest way whose
        /// activations of a microbatch fit into it.
        recompute: Recompute, "WHAT", Recompute::None;
        /// Layers (in a pipeline of each stage), behind those that are computed again, whose activations wait
        /// in the host's memory for their backward passes, so that a GPU holds less. Nothing changes where a
        /// processor computes.
        offload: usize, "LAYERS", 0_usize;
        /// Activations that a rank may hold, for the schedules that can be limited: 1f1b-mu, zb-auto, varuna,
        /// pools.
        memory: usize, "N";
        /// Tokens of which terapipe's slices are whole multiples, a divisor of the context: their lengths are
        /// chosen so that the pipeline takes least; unless told an eighth of the context.
        slice_grain: usize, "N";
        /// How hidden states are packed from a stage to the next: any --codec without feedback, aqsgd:4 (the
        /// change since the sample came last, in 4 bits; needs --sampling epochs) or direct:4 (its quantiser
        /// alone).
        boundary: LinkSpec, "CODEC", LinkSpec::default();
        /// How their gradients are packed on the way back.
        boundary_backward: LinkSpec, "CODEC", LinkSpec::default();
        /// Where aqsgd holds samples: memory (checkpoints hold them too), file or mapped (in the run's folder,
        /// at both ends of each boundary; a resumed run goes on with what the files hold).
        boundary_store: StoreKind, "KIND", StoreKind::Memory => "each rank holds its own";
        /// Which version of the weights a microbatch sees under pipedream: vertical (on all stages the one that
        /// the first had) or newest (each stage's own; the last then waits for the first at each update of
        /// their token table).
        version_sync: VersionSync, "KIND", VersionSync::Vertical;
    }
    "Machine" {
        /// Where tensors live: auto (the best there is), cpu, `wgpu[:n]` or `cuda[:n]`, as `farflung devices`
        /// lists them; several with commas are taken in turn by the ranks.
        device: Devices, "NAMES", Devices::cpu() => "each machine has its own devices";
        /// What matrix products round their operands to: f32, bf16 or f16. They add up in f32, and parameters,
        /// gradients and optimizer states are f32; devices without tensor cores for it compute the same, no
        /// faster.
        precision: Precision, "KIND", Precision::F32;
        /// What gradients are multiplied with where products round them: auto (found by trial in f16, 1 in
        /// others) or a power of two.
        loss_scale: LossScaling, "SCALE", LossScaling::Auto;
        /// Refuse to train on a device that does not give the same bits twice, by a trial before the first
        /// step. Kernels are never chosen by timing, so that runs repeat themselves on all others.
        deterministic: bool, "BOOL", false => "a trial of this device alone";
        /// Where copies of parameters (of replicas, of the token table in a pipeline) are on devices that round
        /// differently: steps between comparisons, after which all have those of the first rank again; 0 is
        /// never.
        resync_every: u64, "STEPS", 50u64;
        /// Threads of each worker; 0 shares the cores among the workers.
        threads: usize, "N", 0usize => "no result depends on the number of threads";
    }
    "Evaluation and checkpoints" {
        /// Steps between evaluations; 0 evaluates only at the end.
        eval_every: u64, "STEPS", 100u64;
        /// Microbatches of an evaluation.
        eval_batches: u64, "N", 20u64;
        /// Steps between digests of the parameters in metrics.jsonl, by which `farflung diff` compares runs; 0
        /// is none.
        digest_every: u64, "STEPS", 0u64;
        /// Steps between checks that all parameters and optimizer states are finite and copies of them equal to
        /// the bit, as also before each checkpoint; 0 is only then.
        check_every: u64, "STEPS", 50u64;
        /// Steps between checkpoints; 0 saves only at the end and on a signal.
        checkpoint_every: u64, "STEPS", 0u64;
        /// Checkpoints that are kept; 0 keeps all.
        keep_last: usize, "N", 2usize => "each rank has its own checkpoints";
        /// Pack checkpoints with zstd.
        compress_checkpoints: bool, "BOOL", false => "each rank has its own checkpoints";
        /// Where the run begins: auto (the newest good checkpoint of --out), no, or a checkpoint's path.
        resume: Resume, "WHERE", Resume::No => "its path is; whether and at which step a run goes on is compared";
    }
    "Sample" {
        /// Text that the sample at the end continues.
        prompt: String, "TEXT", "fn " => "only rank 0 writes the sample";
        /// Tokens of the sample; 0 is no sample.
        sample_tokens: usize, "N", 200usize => "only rank 0 writes the sample";
        /// Sampling temperature; 0 takes the likeliest token.
        temperature: f64, "X", 0.8 => "only rank 0 writes the sample";
        /// Only the K likeliest tokens; 0 is all.
        top_k: usize, "K", 0usize => "only rank 0 writes the sample";
        /// Only the likeliest tokens that make up this probability; 1 is all.
        top_p: f64, "P", 0.95 => "only rank 0 writes the sample";
    }
}

impl Default for TrainConfig {
    /// The default run: nano, four workers behind home uplinks, gradients in eight bits.
    fn default() -> Self {
        Self { given: Given::Differs, ..Self::fill(TrainArgs::default()) }
    }
}

/// `eval_every` as it stands in a file and on the command line.
pub(crate) fn dashed(name: &str) -> String {
    name.replace('_', "-")
}
