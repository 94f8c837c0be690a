//! Methods by which copies of the same parameters stay one model: one file a method or a family of them, one
//! row each in [`METHODS`].
//!
//! A trainer calls a [`Synchroniser`] at the moments of a step and does not depend on which method it is.

mod asynchronous;
mod cocktail;
mod ddp;
mod delayed;
mod des_loc;
mod diloco;
mod eager;
mod event;
mod exchange;
mod gossip;
mod halos;
mod mean;
mod model_average;
mod modulo;
mod moniqua;
mod neighbours;
mod noloco;
mod replicas;
mod saved;
mod server;
mod sgp;
mod streaming;
mod timeline;
mod zero_one;

use std::sync::{PoisonError, RwLock};

use farflung_comm::Communicator;
use farflung_tensor::{Device, ParamLayout, Tensor};

use crate::transform::Rounds;
use crate::{Average, AverageConfig, Chain, Coding, OptimError};

pub use asynchronous::{
    ASYNC, Asynchronous, AsynchronousSettings, BOUNDED_STALE, DECOUPLED, PARAMETER_SERVER, Servers,
    WorldSettings,
};
pub use cocktail::COCKTAIL;
pub use ddp::{DDP, Ddp};
pub use delayed::{Delayed, DelayedSettings, Merge};
pub use des_loc::{DES_LOC, DesLoc, MomentPeriods};
pub use diloco::{DILOCO, DiLoCo};
pub use eager::{EAGER, Eager};
pub use event::{EVENT, EventTriggered};
pub use gossip::{D_PSGD, EXPONENTIAL, Gossip, RANDOM_PAIRS, SHIFT_ONE};
pub use halos::HALOS;
pub use model_average::{ASYNC_AVERAGE, ModelAverage};
pub use moniqua::MONIQUA;
pub use neighbours::{Graph, Meeting, Neighbour};
pub use noloco::{NOLOCO, NoLoCo};
pub use replicas::{CHOCO, LOW_PRECISION, Replicas, Rule};
pub use server::{DelayedNesterov, Push, Quorum, QuorumMean, RuleState, ServerRule};
pub use sgp::{PushSum, SGP};
pub use streaming::STREAMING;
pub use timeline::Timeline;
pub use zero_one::{ZERO_ONE, ZeroOne};

/// A moment of a run: after which step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct After {
    /// The step, counted from 1.
    pub step: u64,
    /// Whether it is the run's last.
    pub last: bool,
}

/// Keeps a rank's copy of some parameters equal to the copies of others.
///
/// Order of the calls in a step: where [`Synchroniser::gradients`] gives an average, the step's gradients go
/// through it and the optimizer's update follows. Then, where [`Synchroniser::is_due`],
/// [`Synchroniser::exchange`], [`Synchroniser::prepare`] and, once all ranks agreed, [`Synchroniser::commit`]:
/// once more where [`Synchroniser::goes_on`]. [`Synchroniser::rollback`] instead of a commit leaves no trace.
/// After each step, [`Synchroniser::depart`].
pub trait Synchroniser: std::fmt::Debug + Send {
    /// The average that the gradients of each step go through; `None` for a method whose steps are local.
    fn gradients(&mut self) -> Option<&mut Average>;

    /// Whether [`Synchroniser::gradients`] gives an average in the next step, in a method that also has local
    /// steps.
    fn averages_gradients(&self) -> bool {
        false
    }

    /// After each local step: takes up what neighbours or servers sent. Only they wait for each other. `weight`
    /// is as in [`Synchroniser::exchange`].
    ///
    /// Errors: a neighbour or server that was lost.
    fn mix(&mut self, _params: &mut Tensor, _after: After, _weight: f64) -> Result<(), OptimError> {
        Ok(())
    }

    /// Whether all copies meet now; they always do after the last step.
    fn is_due(&self, after: After) -> bool;

    /// Averages over all copies. No parameter has changed when it returns. `weight` is this copy's part of the
    /// mean, where 1 is an equal part.
    ///
    /// Errors: a peer that was lost; a codec that refuses values which are not finite.
    fn exchange(&mut self, params: &Tensor, after: After, weight: f64) -> Result<(), OptimError>;

    /// As [`Synchroniser::exchange`], for a method that averages what the optimizer gathered over local steps.
    ///
    /// Errors: as [`Synchroniser::exchange`].
    fn exchange_gathered(
        &mut self,
        params: &Tensor,
        _chain: &Chain,
        after: After,
        weight: f64,
    ) -> Result<(), OptimError> {
        self.exchange(params, after, weight)
    }

    /// What [`Synchroniser::exchange`] averaged, before it is committed; `None` where it averages nothing.
    fn exchanged(&mut self) -> Option<&mut Tensor>;

    /// What else it averaged, in the same order on all copies.
    fn exchanged_beside(&mut self) -> Vec<&mut Tensor> {
        Vec::new()
    }

    /// Computes the parameters' next values. No parameter has changed when it returns.
    ///
    /// Errors: [`OptimError::NotFinite`] and [`OptimError::StepNotFinite`] where what was averaged or what
    /// follows from it is not finite: on all copies alike, since all have the same average.
    fn prepare(&mut self) -> Result<(), OptimError>;

    /// Takes the step that was exchanged, or makes the average of gradients final.
    fn commit(&mut self, params: &mut Tensor) -> Result<(), OptimError>;

    /// As [`Synchroniser::commit`], for a method that averages what the optimizer gathered.
    ///
    /// Errors: as [`Synchroniser::commit`].
    fn commit_gathered(&mut self, params: &mut Tensor, _chain: &mut Chain) -> Result<(), OptimError> {
        self.commit(params)
    }

    /// After each local step, and after the commit where copies met: sends what leaves now and comes back at a
    /// later meeting, and tells whether that is something. Nobody waits for it.
    ///
    /// Errors: those of the copies' device, and of codecs.
    fn depart(&mut self, _params: &Tensor, _after: After, _weight: f64) -> Result<bool, OptimError> {
        Ok(false)
    }

    /// Whether copies meet once more after the step that was just committed.
    fn goes_on(&self) -> bool {
        false
    }

    /// The parameters as all copies last had them, where the method holds them until they meet again.
    fn agreed(&self) -> Option<&Tensor> {
        None
    }

    /// Whether each copy has parameters of its own also after they met; the model that the run trains is then
    /// [`Synchroniser::common`].
    fn is_apart(&self) -> bool {
        self.common().is_some()
    }

    /// Computes what copies have in common, where they do not have it already. For all copies to call.
    ///
    /// Errors: a peer that was lost.
    fn gather_common(&mut self, _params: &Tensor) -> Result<(), OptimError> {
        Ok(())
    }

    /// The parameters that all copies have in common where they are apart, after
    /// [`Synchroniser::gather_common`].
    fn common(&self) -> Option<&Tensor> {
        None
    }

    /// The same, to be set to what all copies have.
    fn common_mut(&mut self) -> Option<&mut Tensor> {
        None
    }

    /// Waits for what is in flight, so that [`Synchroniser::states`] has it. For all copies to call.
    ///
    /// Errors: a peer that was lost.
    fn settle(&mut self) -> Result<(), OptimError> {
        Ok(())
    }

    /// Gives up what is in flight. Nothing but saving follows.
    fn abandon(&mut self) {
        self.average_mut().open();
    }

    /// Gives up what was not committed.
    fn rollback(&mut self);

    /// The parameters were set from elsewhere, to what all copies have.
    fn moved(&mut self, params: &Tensor) -> Result<(), OptimError>;

    /// Averages of its own that were committed.
    fn steps(&self) -> u64;

    /// Its state by name, each of the layout's length, so that it can be cut in another way: the same on all
    /// copies.
    fn states(&self) -> Vec<(&str, &Tensor)>;

    /// State of this copy alone, by name.
    fn own_states(&self) -> Vec<(&str, &Tensor)> {
        Vec::new()
    }

    /// Restores what [`Synchroniser::states`] and [`Synchroniser::own_states`] gave; without the latter, and
    /// without what is in flight, it goes on as if that had never left.
    ///
    /// Errors: [`OptimError::State`] for a buffer that is missing or of another length; nothing has changed
    /// then.
    fn restore(&mut self, steps: u64, get: &dyn Fn(&str) -> Option<Vec<f32>>) -> Result<(), OptimError>;

    /// The average whose codecs' residuals are this rank's own.
    fn average(&self) -> &Average;

    /// The same, to restore it.
    fn average_mut(&mut self) -> &mut Average;
}

/// What a method is made of.
#[derive(Debug)]
pub struct SyncSettings<'a> {
    /// All that hold a copy.
    pub comm: Communicator,
    /// Where the copies lie.
    pub device: &'a Device,
    /// Their layout.
    pub layout: &'a ParamLayout,
    /// How values are averaged.
    pub average: AverageConfig,
    /// Steps between averages.
    pub every: u64,
    /// Steps between averages of what optimizers remember.
    pub moments: MomentPeriods,
    /// Learning rate of an outer optimizer.
    pub outer_lr: f64,
    /// Nesterov momentum of an outer optimizer.
    pub outer_momentum: f64,
    /// Parts of the parameters that travel at different times.
    pub fragments: usize,
    /// Steps that an average may take.
    pub delay: u64,
    /// What stays of a copy's own parameters where it takes up an average.
    pub mixing: f64,
    /// How far a copy goes towards its neighbours in a step.
    pub consensus_rate: f64,
    /// By how much of its norm a tensor has to change before it is sent, where that is asked.
    pub trigger: f64,
    /// What only asynchronous methods read.
    pub asynchronous: AsynchronousSettings,
    /// How far neighbours' copies are apart in any element, at most.
    pub theta: f64,
    /// Bits of an element that is sent modulo a bound.
    pub bits: u32,
    /// The parts of all copies in a mean, where 1 is an equal part.
    pub weights: Vec<f64>,
    /// In which steps the optimizer has gradients averaged, and which are local, where it decides that.
    pub rounds: Option<Rounds>,
    /// The parameters as all copies have them.
    pub params: &'a Tensor,
}

/// A row of the table of methods.
#[expect(clippy::struct_excessive_bools, reason = "a row of a table: each is a column")]
#[derive(Debug, Clone, Copy)]
pub struct SyncMethod {
    /// The name on command lines and in plans.
    pub name: &'static str,
    /// One line on what it does.
    pub summary: &'static str,
    /// Whether the gradients of each step are averaged: replicas are then the same after each step.
    pub each_step: bool,
    /// The settings that only some methods read, by their names on command lines.
    pub reads: &'static [&'static str],
    /// Whether what replicas send travels while they compute the next steps, so that they need not wait for it.
    pub overlaps: bool,
    /// Whether the result depends on when messages arrive: bits are then the same on the virtual clock alone.
    pub timed: bool,
    /// Steps between averages, where the method itself decides that.
    pub every: Option<u64>,
    /// The codec that its averages go through, unless another is asked for; `none` where there is no other.
    pub codec: Option<&'static str>,
    /// Whether a codec is for what it sends itself, rather than for averages.
    pub codes_changes: bool,
    /// Whether it makes up itself for what a codec loses, so that the codec needs no feedback.
    pub compensates: bool,
    /// The outer momentum, unless another is asked for, where it is not that of `diloco`.
    pub outer_momentum: Option<f64>,
    /// What it does with a round that a member is missing from.
    pub missing: Missing,
    /// What it keeps beside optimizers.
    pub buffers: fn(&Kept) -> Buffers,
    /// Makes one.
    pub build: fn(SyncSettings<'_>) -> Result<Box<dyn Synchroniser>, OptimError>,
}

/// What a method does with a round that a member is missing from, whose values and weight are then both absent.
///
/// Only runs whose members come and leave go on without a member. All others end, and say which rank was lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Missing {
    /// The round is the mean of the members that are left, by their tokens. Residuals of codecs are dropped.
    MeanOfOthers,
    /// Runs whose members come and leave do not take the method, for this reason.
    Refused(&'static str),
}

/// Why copies that mix with their neighbours do not go on without a member.
const OWN_COPIES: Missing =
    Missing::Refused("each member has parameters of its own, and nobody else has those of a lost one");

/// Why averages that travel beside steps do not go on without a member.
const IN_FLIGHT: Missing =
    Missing::Refused("averages are on their way when a member is lost, and were weighted for all members");

/// What decides how many buffers a method keeps.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Kept {
    /// Momentum of an outer optimizer.
    pub momentum: f64,
    /// Momentum of the world server.
    pub world_momentum: f64,
    /// Buffers of a copy's own optimizer.
    pub states: usize,
    /// Whether the codec keeps what it loses.
    pub feedback: bool,
}

/// Buffers of a method, each as long as the parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Buffers {
    /// All of them.
    pub held: usize,
    /// Those that a checkpoint has.
    pub saved: usize,
}

/// All methods; the first is the default.
pub const METHODS: &[SyncMethod] = &[
    DDP,
    DILOCO,
    DES_LOC,
    STREAMING,
    EAGER,
    COCKTAIL,
    NOLOCO,
    D_PSGD,
    SHIFT_ONE,
    EXPONENTIAL,
    SGP,
    RANDOM_PAIRS,
    EVENT,
    LOW_PRECISION,
    CHOCO,
    ASYNC,
    PARAMETER_SERVER,
    BOUNDED_STALE,
    DECOUPLED,
    HALOS,
    ASYNC_AVERAGE,
    MONIQUA,
    ZERO_ONE,
];

/// Methods that are not in the table.
static REGISTERED: RwLock<Vec<&'static SyncMethod>> = RwLock::new(Vec::new());

impl SyncMethod {
    /// The method of a name: of the table, or registered.
    #[must_use]
    pub fn by_name(name: &str) -> Option<&'static Self> {
        let registered = REGISTERED.read().unwrap_or_else(PoisonError::into_inner);
        METHODS.iter().chain(registered.iter().copied()).find(|method| method.name == name)
    }

    /// Makes a method of your own known by its name to this process: to its settings, plans and checkpoints.
    ///
    /// Errors: [`OptimError::NameTaken`] for the name of another method.
    pub fn register(method: &'static Self) -> Result<(), OptimError> {
        let mut registered = REGISTERED.write().unwrap_or_else(PoisonError::into_inner);
        let known = METHODS.iter().chain(registered.iter().copied()).any(|other| other.name == method.name);
        if known {
            return Err(OptimError::NameTaken { name: method.name });
        }
        registered.push(method);
        Ok(())
    }
}
