//! Generation of text by the stages of one pipeline, wherever they are: no rank needs the whole model.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use farflung_base::{Bytes, Nanos, Rank, StageId, Topology};
use farflung_comm::Communicator;
use farflung_parallel::pipeline::Placement;
use farflung_tensor::Tensor;
use farflung_zoo::{Cache, Continuation, Input, Objective, Sampling, Stage};
use serde::{Deserialize, Serialize};

use crate::floats::{floats, le_bytes};
use crate::{Error, Result};

/// Tag of drawn tokens, which the last stage sends to the first. Hidden states that a stage receives have the
/// tags below it. Far from the tags of a step's messages, and from those of gathered parts.
const DRAWN: u32 = u32::MAX - (1 << 16);

/// Tag of what the first stage's rank tells the others before the first token.
const REQUEST: u32 = DRAWN + 1;

/// How many tokens are generated at most, and how they are drawn.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
struct Request {
    count: u64,
    sampling: Sampling,
}

/// One operation of a pass, in which each stage computes once and a token is drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PassOp {
    Compute(StageId),
    /// Hidden states go to the rank of the next stage.
    HandOn {
        to: StageId,
    },
    /// The last stage's rank sends the token that it drew to the first one's.
    SendToken,
}

/// Returns the operations of a pass in their order.
pub(super) fn pass(placement: &Placement) -> Vec<PassOp> {
    let mut ops = Vec::new();
    let mut at = placement.rank(StageId(0));
    for stage in (0..placement.depth()).map(StageId) {
        if placement.rank(stage) != at {
            ops.push(PassOp::HandOn { to: stage });
            at = placement.rank(stage);
        }
        ops.push(PassOp::Compute(stage));
    }
    if at != placement.rank(StageId(0)) {
        ops.push(PassOp::SendToken);
    }
    ops
}

/// Returns the time of a pass for one token: its operations follow each other. `compute` gives the time of a
/// stage, and `hidden` the bytes of its hidden states.
pub(super) fn pass_time(
    placement: &Placement,
    topology: &Topology,
    hidden: Bytes,
    compute: impl Fn(StageId) -> Nanos,
) -> Nanos {
    let (first, last) = (StageId(0), StageId(placement.depth() - 1));
    let sent = |from, to, bytes| topology.link(placement.rank(from), placement.rank(to)).time(bytes);
    let time = |op: &PassOp| match *op {
        PassOp::Compute(stage) => compute(stage),
        PassOp::HandOn { to } => sent(StageId(to.0 - 1), to, hidden),
        PassOp::SendToken => sent(last, first, Bytes(size_of::<u32>() as u64)),
    };
    pass(placement).iter().map(time).sum()
}

/// Predicted time of a stage for positions of one sequence, by which a virtual clock advances.
pub(super) type StageTimes<'a> = &'a dyn Fn(StageId, Range<usize>) -> Nanos;

/// A stage on this rank, with the keys and values of the tokens so far.
#[derive(Debug)]
struct CachedStage<'a> {
    stage: &'a Stage,
    params: &'a Tensor,
    /// `None` until a generation begins.
    cache: Option<Cache>,
}

/// One rank of a pipeline that generates text. Each pass goes through the stages in their order; the last one
/// draws a token and sends it to the first.
pub(super) struct Decoder<'a> {
    comm: &'a Communicator,
    placement: &'a Placement,
    /// This rank in the placement.
    me: Rank,
    ops: Vec<PassOp>,
    stages: BTreeMap<StageId, CachedStage<'a>>,
    times: StageTimes<'a>,
}

/// What a rank has at hand during a pass: the output of the last operation.
#[derive(Debug)]
enum Handed {
    Nothing,
    Hidden(Tensor),
    Token(u32),
    /// No more tokens are wanted.
    Over,
}

impl<'a> Decoder<'a> {
    /// Creates the decoder of rank `me` of the placement, which holds `stages`, each with its parameters. Other
    /// ranks of the placement, if any, are those of `comm`.
    pub(super) fn new(
        (comm, placement, me): (&'a Communicator, &'a Placement, Rank),
        stages: impl IntoIterator<Item = (StageId, &'a Stage, &'a Tensor)>,
        times: StageTimes<'a>,
    ) -> Self {
        let here =
            |&(id, ..): &(StageId, &Stage, &Tensor)| id.0 < placement.depth() && placement.rank(id) == me;
        let cached = |(id, stage, params)| (id, CachedStage { stage, params, cache: None });
        let stages = stages.into_iter().filter(here).map(cached).collect();
        Self { comm, placement, me, ops: pass(placement), stages, times }
    }

    /// Makes empty caches for a generation of `count` tokens.
    fn begin(&mut self, count: u64) -> Result<()> {
        for held in self.stages.values_mut() {
            held.cache = if count == 0 { None } else { Some(held.stage.cache(1)?) };
        }
        Ok(())
    }

    /// Returns whether this rank has the first stage: it leads, and the others follow.
    pub(super) fn leads(&self) -> bool {
        self.stages.contains_key(&StageId(0))
    }

    /// Generates `count` tokens that continue `prompt`, as [`farflung_zoo::generate()`] does, and calls `emit`
    /// with each one; ends early if it returns `false`. Only the rank of the first stage calls it. All other
    /// ranks of the pipeline must call [`Decoder::follow`].
    ///
    /// Errors: [`farflung_zoo::ZooError::Sampling`] and [`farflung_zoo::ZooError::TokenOutOfRange`], before
    /// anything is sent; those of links.
    pub(super) fn lead(
        &mut self,
        prompt: &[u32],
        count: usize,
        sampling: &Sampling,
        mut emit: impl FnMut(u32) -> bool,
    ) -> Result<()> {
        sampling.validate()?;
        let first = self.stages.get(&StageId(0)).expect("the first stage is on the rank that leads");
        let mut text = Continuation::new(first.stage.spec(), prompt, sampling.objective)?;
        let request = Request { count: count as u64, sampling: *sampling };
        self.begin(request.count)?;
        let bytes = postcard::to_stdvec(&request).expect("numbers can be encoded");
        for to in self.other_ranks() {
            self.comm.start_send(to, REQUEST, bytes.clone()).wait()?;
        }
        let mut goes_on = true;
        for i in 0..request.count {
            let Handed::Token(token) = self.pass(goes_on.then_some(&mut text), sampling, i)? else { break };
            goes_on = emit(token);
            text.push(token);
        }
        Ok(())
    }

    /// Takes part in the generation that the first stage's rank leads.
    ///
    /// Errors: those of links; [`Error::Message`] for a request that cannot be parsed.
    pub(super) fn follow(&mut self) -> Result<()> {
        let from = self.placement.rank(StageId(0));
        if !self.other_ranks().contains(&self.me) {
            return Ok(());
        }
        let request: Option<Request> = postcard::from_bytes(&self.comm.recv(from, REQUEST)?).ok();
        let valid = request.filter(|request| request.sampling.validate().is_ok());
        let Request { count, sampling } = valid.ok_or_else(|| wrong(from, "are not a valid request"))?;
        self.begin(count)?;
        for i in 0..count {
            if let Handed::Over = self.pass(None, &sampling, i)? {
                break;
            }
        }
        Ok(())
    }

    /// Returns the ranks of the other stages.
    fn other_ranks(&self) -> BTreeSet<Rank> {
        let first = self.placement.rank(StageId(0));
        let all = (0..self.placement.depth()).map(|stage| self.placement.rank(StageId(stage)));
        all.filter(|&rank| rank != first).collect()
    }

    /// Runs one pass and draws a token with the random number at `position`. The first stage continues `text`;
    /// without one, the generation is over. Returns what this rank has at the end.
    fn pass(
        &mut self,
        mut text: Option<&mut Continuation>,
        sampling: &Sampling,
        position: u64,
    ) -> Result<Handed> {
        let (first, last) = (StageId(0), StageId(self.placement.depth() - 1));
        let mut handed = Handed::Nothing;
        for index in 0..self.ops.len() {
            handed = match self.ops[index] {
                PassOp::Compute(stage) if self.stages.contains_key(&stage) => {
                    let input = match text.as_deref_mut() {
                        Some(text) if stage == first => Handed::Hidden(self.next_tokens(text)?),
                        None if stage == first => Handed::Over,
                        _ => handed,
                    };
                    match input {
                        Handed::Hidden(x) if stage == last => {
                            let logits = self.compute(stage, x, sampling.objective)?.to_vec::<f32>()?;
                            Handed::Token(sampling.draw(&logits, position))
                        }
                        Handed::Hidden(x) => Handed::Hidden(self.compute(stage, x, sampling.objective)?),
                        other => other,
                    }
                }
                PassOp::HandOn { to } if self.me == self.placement.rank(StageId(to.0 - 1)) => {
                    self.send(to, handed)?
                }
                PassOp::HandOn { to } if self.me == self.placement.rank(to) => self.receive(to)?,
                PassOp::SendToken if self.me == self.placement.rank(first) => match handed {
                    Handed::Over => Handed::Over,
                    _ => Handed::Token(self.receive_token(self.placement.rank(last))?),
                },
                PassOp::SendToken => {
                    if let Handed::Token(token) = handed {
                        let to = self.placement.rank(first);
                        self.comm.start_send(to, DRAWN, token.to_le_bytes().to_vec()).wait()?;
                    }
                    handed
                }
                PassOp::Compute(_) | PassOp::HandOn { .. } => handed,
            };
        }
        Ok(handed)
    }

    /// Returns the tokens that the first stage takes next.
    fn next_tokens(&self, text: &mut Continuation) -> Result<Tensor> {
        let CachedStage { stage, cache, .. } = &self.stages[&StageId(0)];
        let new = text.pass(cache.as_ref().map_or(0, Cache::len));
        Ok(stage.tokens(&new, new.len())?)
    }

    /// Returns the hidden states that a stage computes from its input; the last stage, logits.
    fn compute(&mut self, id: StageId, input: Tensor, objective: Objective) -> Result<Tensor> {
        let held = self.stages.get_mut(&id).expect("a stage that this rank holds");
        let new = input.shape().dims()[1];
        let cache = held.cache.as_mut().expect("a generation has begun");
        cache.make_room(new);
        let past = cache.len();
        let input = if id.0 == 0 { Input::Tokens(input) } else { Input::Hidden(input) };
        let input = input.with_borders(objective.borders(held.stage, past, new)?);
        let output = held.stage.decode_last(held.params, cache, input)?;
        self.comm.advance((self.times)(id, past..past + new));
        Ok(output)
    }

    /// Sends a stage's input. Returns what remains on this rank: whether the generation is over.
    fn send(&self, to: StageId, handed: Handed) -> Result<Handed> {
        let (bytes, left) = match handed {
            Handed::Hidden(x) => {
                let bytes = le_bytes(&x.to_vec::<f32>()?);
                (bytes, Handed::Nothing)
            }
            other => (Vec::new(), other),
        };
        self.comm.start_send(self.placement.rank(to), DRAWN - to.0, bytes).wait()?;
        Ok(left)
    }

    /// Receives the input of a stage, as many positions as the message has.
    fn receive(&self, id: StageId) -> Result<Handed> {
        let from = self.placement.rank(StageId(id.0 - 1));
        let bytes = self.comm.recv(from, DRAWN - id.0)?;
        let stage = self.stages[&id].stage;
        let spec = stage.spec();
        if bytes.is_empty() {
            return Ok(Handed::Over);
        }
        let positions = bytes.len() / (size_of::<f32>() * spec.dim);
        let values = floats(&bytes, positions * spec.dim).filter(|_| positions <= spec.context);
        let values =
            values.ok_or_else(|| wrong(from, "are not hidden states of up to a context's tokens"))?;
        Ok(Handed::Hidden(stage.device().tensor(&values, [1, positions, spec.dim])?))
    }

    fn receive_token(&self, from: Rank) -> Result<u32> {
        let bytes = self.comm.recv(from, DRAWN)?;
        let token = bytes.as_slice().try_into().map(u32::from_le_bytes);
        let vocab = self.stages[&StageId(0)].stage.spec().vocab;
        let known = token.ok().filter(|&token| (token as usize) < vocab);
        known.ok_or_else(|| wrong(from, "are not a token of the vocabulary"))
    }
}

fn wrong(from: Rank, problem: &'static str) -> Error {
    Error::Message { message: format!("the bytes that {from} sent while generating"), problem }
}
