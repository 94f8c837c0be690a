//! A model whose stages are on several ranks, for generation of text: each rank reads only the tensors of its
//! own stage, so that no machine needs room for the whole model.

use std::ops::Range;

use farflung_base::{Nanos, Rank, StageId, Topology};
use farflung_comm::Communicator;
use farflung_parallel::pipeline::Placement;
use farflung_tensor::{Device, Tensor};
use farflung_zoo::weights::{Dtype, TokenIds, Weights, config_text};
use farflung_zoo::{Continuation, ModelSpec, Objective, Sampling, Stage};

use super::all_succeed::all_succeed;
use super::connection::ends;
use super::costs::{Work, modelled};
use super::decoder::{Decoder, pass_time};
use super::links::{cluster, declared};
use super::meet::same_facts;
use super::pieces::with_values;
use super::planned::cut;
use crate::config::shared::NamedValue;
use crate::{Result, RunSettings, finite};

/// One rank's stage of a model.
#[derive(Debug)]
pub struct StagedModel {
    comm: Communicator,
    placement: Placement,
    layers: Vec<Range<u32>>,
    stage: Stage,
    params: Tensor,
    work: Work,
    /// Speed of each rank's machine in FLOP/s, on a virtual clock.
    rate: f64,
    /// The links, if they are declared.
    topology: Option<Topology>,
}

/// What a rank reads its stage from, and computes it with.
#[derive(Debug)]
pub struct OpenedPart {
    /// A model's weights, of which some may be missing.
    pub weights: Weights,
    /// The step after which they were saved, if a run has saved them.
    pub step: Option<u64>,
    /// The device of the rank.
    pub device: Device,
}

/// What a generation took.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Generated {
    /// Number of tokens that were drawn.
    pub tokens: usize,
    /// Time from the prompt to the last token, on the clock of the links.
    pub time: Nanos,
    /// The predicted time, if the links are declared.
    pub predicted: Option<Nanos>,
}

impl Generated {
    /// Returns a time of all tokens as the mean time of one.
    #[must_use]
    pub const fn per_token(&self, time: Nanos) -> Nanos {
        Nanos(match time.0.checked_div(self.tokens as u64) {
            Some(mean) => mean,
            None => 0,
        })
    }
}

impl StagedModel {
    /// Returns the communicators of this process's ranks for a model of `stages` stages: of all, over links
    /// within the process, or `joined`, that of one rank under a launcher.
    ///
    /// Errors: a transport or a topology that does not fit; those of its sockets.
    pub fn connect(
        config: &RunSettings,
        stages: usize,
        joined: Option<Communicator>,
    ) -> Result<Vec<(Communicator, Option<Topology>)>> {
        let processes = joined.as_ref().map_or(1, Communicator::size);
        let simulates = config.transport_for(processes, stages)?.simulated;
        let cluster = cluster(config)?;
        let links = (simulates || cluster.is_some()).then(|| declared(config, stages, cluster.as_ref()));
        let links = links.transpose()?;
        let all = ends(config, stages, links.as_ref(), joined)?;
        Ok(all.into_iter().map(|comm| (comm.with_deadline(config.deadline), links.clone())).collect())
    }

    /// Reads the stage of `comm`'s rank. The layers are cut into parts that are as equal as possible, one for
    /// each rank. `rate` is the speed of each machine in FLOP/s, for the virtual clock. A collective.
    ///
    /// Errors: the same on all ranks: `opened`, different models or steps, a model that cannot be cut, and
    /// tensors that are missing, invalid or not finite, with the rank.
    pub fn load(
        opened: Result<OpenedPart>,
        (comm, topology): (Communicator, Option<Topology>),
        rate: f64,
    ) -> Result<Self> {
        let OpenedPart { mut weights, step, device } = all_succeed(&comm, opened)?;
        let spec = weights.spec().clone();
        let step = step.map_or_else(|| "none".to_owned(), |step| step.to_string());
        let facts = [
            NamedValue::new("config.json", config_text(&spec, Dtype::F32, &TokenIds::default())),
            NamedValue::new("step of the checkpoint", step),
        ];
        same_facts("model", &facts, &comm, |_| false)?;
        let ranks = comm.size() as u32;
        let layers = cut(spec.layers() as u32, ranks)?;
        let own = layers[comm.rank().index()].clone();
        let mut read = || {
            let stage = Stage::new(&spec, own.start as usize..own.end as usize, &device)?;
            let params = stage.load(&mut weights)?;
            let len = params.shape().len();
            with_values(&params, 0, len, |values| finite::check_flat("", stage.layout(), values))??;
            Ok((stage, params))
        };
        let (stage, params) = all_succeed(&comm, read())?;
        let placement = Placement::looped(ranks, 1);
        Ok(Self { work: Work::new(&spec, 1), comm, placement, layers, stage, params, rate, topology })
    }

    /// Returns the model.
    #[must_use]
    pub const fn spec(&self) -> &ModelSpec {
        self.stage.spec()
    }

    /// Returns whether this rank has the first stage. It has the prompt and gets the tokens.
    #[must_use]
    pub fn leads(&self) -> bool {
        self.comm.rank() == Rank(0)
    }

    /// Continues a prompt as [`farflung_zoo::generate()`] does, with the same tokens, and calls `emit` with
    /// each one. Only the rank that leads calls it; the others must call [`StagedModel::follow`].
    ///
    /// Errors: settings and tokens out of bounds; those of links.
    pub fn generate(
        &self,
        prompt: &[u32],
        count: usize,
        sampling: &Sampling,
        mut emit: impl FnMut(u32) -> bool,
    ) -> Result<Generated> {
        let begun = self.comm.now();
        let mut tokens = 0;
        self.with_decoder(|decoder| {
            decoder.lead(prompt, count, sampling, |token| {
                tokens += 1;
                emit(token)
            })
        })?;
        let time = self.comm.now().saturating_sub(begun);
        let predicted =
            self.topology.as_ref().map(|links| self.predicted(links, prompt, sampling.objective, tokens));
        Ok(Generated { tokens, time, predicted: predicted.transpose()? })
    }

    /// Takes part in a generation.
    ///
    /// Errors: those of links.
    pub fn follow(&self) -> Result<()> {
        #[expect(clippy::redundant_closure_for_method_calls, reason = "the method is for one lifetime")]
        self.with_decoder(|decoder| decoder.follow())
    }

    fn with_decoder(&self, work: impl FnOnce(&mut Decoder<'_>) -> Result<()>) -> Result<()> {
        let me = self.comm.rank();
        let stage = [(StageId(me.0), &self.stage, &self.params)];
        let time = |id, positions| self.stage_time(id, &positions);
        work(&mut Decoder::new((&self.comm, &self.placement, me), stage, &time))
    }

    fn stage_time(&self, id: StageId, positions: &Range<usize>) -> Nanos {
        modelled(self.work.decoding_flops(&self.layers[id.index()], positions), self.rate)
    }

    /// Returns the predicted time of `tokens` passes after a prompt.
    fn predicted(
        &self,
        links: &Topology,
        prompt: &[u32],
        objective: Objective,
        tokens: usize,
    ) -> Result<Nanos> {
        let context = self.spec().context;
        let mut text = Continuation::new(self.spec(), prompt, objective)?;
        let (mut past, mut all) = (0, Nanos::ZERO);
        for _ in 0..tokens {
            let new = text.pass(past).len();
            if past + new > context {
                past = 0;
            }
            let hidden = self.work.hidden_bytes_per_token() * new as u64;
            all += pass_time(&self.placement, links, hidden, |id| self.stage_time(id, &(past..past + new)));
            past += new;
            text.push(0);
        }
        Ok(all)
    }
}
