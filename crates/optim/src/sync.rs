//! Methods that synchronise replicas of the same parameters, so that they remain one model. Each method or
//! family of methods has one file, and each method one row in [`METHODS`].
//!
//! A trainer calls a [`Synchroniser`] at fixed points of a step, and does not depend on which method it is.

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

use farflung_base::Bytes;
use farflung_comm::Communicator;
use farflung_tensor::{Device, ParamLayout, Tensor};

use crate::transform::SyncSchedule;
use crate::{ApartHolders, Average, AverageConfig, Chain, Coding, OptimError};

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
pub use neighbours::{Graph, Neighbour, Neighbours};
pub use noloco::{NOLOCO, NoLoCo};
pub use replicas::{CHOCO, LOW_PRECISION, Replicas, Rule};
pub use server::{DelayedNesterov, Push, Quorum, QuorumMean, RuleState, ServerRule};
pub use sgp::{PushSum, SGP};
pub use streaming::STREAMING;
pub use timeline::Timeline;
pub use zero_one::{ZERO_ONE, ZeroOne};

/// Point of a run: the end of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepEnd {
    /// Number of the step, counted from 1.
    pub step: u64,
    /// Whether it is the last step of the run.
    pub last: bool,
}

/// Keeps a rank's replica of some parameters synchronised with the other replicas.
///
/// Order of the calls in a step:
///
/// 1. If [`Synchroniser::gradients`] returns an average, the step's gradients go through it. Then the optimizer
///    updates the parameters.
/// 2. [`Synchroniser::mix`], in methods with local steps.
/// 3. If [`Synchroniser::is_due`]: [`Synchroniser::exchange`], [`Synchroniser::prepare`] and, once all ranks
///    have agreed, [`Synchroniser::commit`]. They are repeated while [`Synchroniser::needs_another_exchange`].
///    [`Synchroniser::rollback`] instead of a commit leaves everything as it was before.
/// 4. [`Synchroniser::start_exchanges`].
pub trait Synchroniser: std::fmt::Debug + Send {
    /// Returns the average that the gradients of the next step go through; `None` if that step is local.
    fn gradients(&mut self) -> Option<&mut Average>;

    /// Returns whether a method that also has local steps averages gradients in the next step. A method without
    /// local steps ([`Ddp`]) returns `false`.
    fn averages_gradients(&self) -> bool {
        false
    }

    /// Applies what neighbours or servers sent. Called after each step if the method has local steps. It may
    /// wait for neighbours or servers, but not for all replicas. `weight` is as in [`Synchroniser::exchange`].
    ///
    /// Errors: a neighbour or server that was lost.
    fn mix(&mut self, _params: &mut Tensor, _after: StepEnd, _weight: f64) -> Result<(), OptimError> {
        Ok(())
    }

    /// Returns whether all replicas synchronise after this step. Methods with local steps always do so after
    /// the last one.
    fn is_due(&self, after: StepEnd) -> bool;

    /// Averages over replicas, without changing the parameters. Decentralised methods ([`Gossip`] and similar)
    /// average over all of them only after the last step. `weight` is this replica's weight in the mean, where
    /// 1 is an equal share.
    ///
    /// Errors: a peer that was lost; a codec that rejects values that are not finite.
    fn exchange(&mut self, params: &Tensor, after: StepEnd, weight: f64) -> Result<(), OptimError>;

    /// Does the work of [`Synchroniser::exchange`] in a method that averages what the optimizer accumulated
    /// over local steps.
    ///
    /// Errors: those of [`Synchroniser::exchange`].
    fn exchange_accumulated(
        &mut self,
        params: &Tensor,
        _chain: &Chain,
        after: StepEnd,
        weight: f64,
    ) -> Result<(), OptimError> {
        self.exchange(params, after, weight)
    }

    /// Returns what [`Synchroniser::exchange`] averaged and is not committed yet; `None` if it averaged
    /// nothing.
    fn exchanged(&mut self) -> Option<&mut Tensor>;

    /// Returns what the last committed exchange averaged, by name: the same on all replicas. With these values
    /// a replica that took no part in the exchange can repeat its commit; see [`Synchroniser::set_averaged`].
    /// Valid until the next exchange begins. Empty if the method does not keep them.
    fn averaged(&self) -> Vec<(String, &Tensor)> {
        Vec::new()
    }

    /// Sets what other replicas have averaged, from their [`Synchroniser::averaged`], in place of an exchange.
    /// [`Synchroniser::prepare`] and [`Synchroniser::commit_accumulated`] then take the same step as on those
    /// replicas, with the same bits on the same kind of device.
    ///
    /// Errors: [`OptimError::State`] if a buffer is missing or has another length.
    fn set_averaged(
        &mut self,
        _chain: &Chain,
        _get: &dyn Fn(&str) -> Option<Vec<f32>>,
    ) -> Result<(), OptimError> {
        Ok(())
    }

    /// Returns the numbers, in the order of [`Chain::states`], of the optimizer's states that were averaged
    /// together with the parameters in the last committed exchange.
    fn averaged_states(&self) -> &[usize] {
        &[]
    }

    /// Returns the other values that [`Synchroniser::exchange`] averaged, in the same order on all replicas.
    fn exchanged_beside(&mut self) -> Vec<&mut Tensor> {
        Vec::new()
    }

    /// Computes the parameters' next values, without changing the parameters.
    ///
    /// Errors: [`OptimError::NotFinite`] and [`OptimError::StepNotFinite`] if the average, or what follows from
    /// it, is not finite. This fails on all replicas alike, since all have the same average.
    fn prepare(&mut self) -> Result<(), OptimError>;

    /// Applies the exchanged step to the parameters, or makes the average of gradients final.
    fn commit(&mut self, params: &mut Tensor) -> Result<(), OptimError>;

    /// Does the work of [`Synchroniser::commit`] in a method that averages what the optimizer accumulated.
    ///
    /// Errors: those of [`Synchroniser::commit`].
    fn commit_accumulated(&mut self, params: &mut Tensor, _chain: &mut Chain) -> Result<(), OptimError> {
        self.commit(params)
    }

    /// Starts exchanges whose results are applied in later steps, and does not wait for them. Called after each
    /// step if the method has local steps; if replicas synchronise after the step, after the commit. Returns
    /// `true` if the trainer is to send its vote on the steps so far at the same time.
    ///
    /// Errors: those of the device and of codecs.
    fn start_exchanges(
        &mut self,
        _params: &Tensor,
        _after: StepEnd,
        _weight: f64,
    ) -> Result<bool, OptimError> {
        Ok(false)
    }

    /// Returns whether replicas synchronise once more after the step that was just committed.
    fn needs_another_exchange(&self) -> bool {
        false
    }

    /// Returns the parameters on which all replicas last agreed, if the method keeps them until the next
    /// synchronisation.
    fn agreed(&self) -> Option<&Tensor> {
        None
    }

    /// Returns whether replicas differ even after a synchronisation. The model that the run trains is then
    /// [`Synchroniser::common`].
    fn replicas_differ(&self) -> bool {
        self.common().is_some()
    }

    /// Computes the common parameters, if they are not known already. All replicas must call it.
    ///
    /// Errors: a peer that was lost.
    fn gather_common(&mut self, _params: &Tensor) -> Result<(), OptimError> {
        Ok(())
    }

    /// Returns the common parameters of replicas that differ. Call [`Synchroniser::gather_common`] first.
    fn common(&self) -> Option<&Tensor> {
        None
    }

    /// Returns the common parameters for writing. The caller sets them to the same values on all replicas.
    fn common_mut(&mut self) -> Option<&mut Tensor> {
        None
    }

    /// Waits for what is in flight, so that [`Synchroniser::states`] includes it. All replicas must call it.
    ///
    /// Errors: a peer that was lost.
    fn wait_in_flight(&mut self) -> Result<(), OptimError> {
        Ok(())
    }

    /// Drops all exchanges in flight. Afterwards only the state may be saved.
    fn drop_in_flight(&mut self) {
        self.average_mut().open();
    }

    /// Drops an exchange that was not committed.
    fn rollback(&mut self);

    /// Records that the caller has set the parameters, to the same values on all replicas.
    fn on_params_set(&mut self, params: &Tensor) -> Result<(), OptimError>;

    /// Returns the counter that [`Synchroniser::restore`] takes. Depending on the method, it counts committed
    /// averages, rounds of messages, steps, or changes that servers received.
    fn steps(&self) -> u64;

    /// Returns the state by name, the same on all replicas. Each buffer has the layout's length, so that the
    /// state can be re-cut for another plan.
    fn states(&self) -> Vec<(&str, &Tensor)>;

    /// Returns the state of this replica alone, by name.
    fn own_states(&self) -> Vec<(&str, &Tensor)> {
        Vec::new()
    }

    /// Restores what [`Synchroniser::states`] and [`Synchroniser::own_states`] returned. If the latter, or what
    /// was in flight, is missing, continues as if nothing had been sent.
    ///
    /// Errors: [`OptimError::State`] if a buffer is missing or has another length; nothing has changed then.
    fn restore(&mut self, steps: u64, get: &dyn Fn(&str) -> Option<Vec<f32>>) -> Result<(), OptimError>;

    /// Returns the average whose codecs hold this rank's residuals.
    fn average(&self) -> &Average;

    /// Returns the bytes of the host's memory that its averages hold: see [`Average::held`]. Messages of
    /// methods that exchange without an average are not counted.
    fn held(&self) -> Bytes {
        self.average().held()
    }

    /// Returns the average of [`Synchroniser::average`] for writing, to restore it.
    fn average_mut(&mut self) -> &mut Average;
}

/// Settings from which a method is built.
#[derive(Debug)]
pub struct SyncSettings<'a> {
    /// Communicator of all ranks that hold a replica.
    pub comm: Communicator,
    /// The ranks that hold the parameters of each entry of [`AverageConfig::apart`]. Only
    /// [`DDP`] and [`DILOCO`] take such parameters.
    pub apart: Vec<ApartHolders>,
    /// Device that holds the parameters.
    pub device: &'a Device,
    /// Layout of the parameters.
    pub layout: &'a ParamLayout,
    /// Configuration of averages.
    pub average: AverageConfig,
    /// Number of steps between averages.
    pub every: u64,
    /// Numbers of steps between averages of the optimizer's moments.
    pub moments: MomentPeriods,
    /// Learning rate of an outer optimizer.
    pub outer_lr: f64,
    /// Nesterov momentum of an outer optimizer.
    pub outer_momentum: f64,
    /// Number of parts of the parameters that are sent at different times.
    pub fragments: usize,
    /// Number of steps that an average may take to arrive.
    pub delay: u64,
    /// Share of a replica's own parameters that stays when it applies an average.
    pub mixing: f64,
    /// Part of the distance to its neighbours that a replica moves in a step.
    pub consensus_rate: f64,
    /// Smallest change of a tensor, relative to its norm, at which it is sent; used by [`EVENT`].
    pub trigger: f64,
    /// Settings that only asynchronous methods read.
    pub asynchronous: AsynchronousSettings,
    /// Upper bound of the difference between neighbours' parameters in any element.
    pub theta: f64,
    /// Number of bits of an element that is sent modulo a bound.
    pub bits: u32,
    /// Weights of all replicas in a mean, where 1 is an equal share.
    pub weights: Vec<f64>,
    /// In which steps the optimizer takes averaged gradients and which steps are local, if it decides this.
    pub rounds: Option<SyncSchedule>,
    /// Initial parameters, the same on all replicas.
    pub params: &'a Tensor,
}

/// A row of the table of methods.
#[expect(clippy::struct_excessive_bools, reason = "a row of a table; each bool is a column")]
#[derive(Debug, Clone, Copy)]
pub struct SyncMethod {
    /// Name on command lines and in plans.
    pub name: &'static str,
    /// One-line summary.
    pub summary: &'static str,
    /// Whether the gradients of each step are averaged, so that replicas are the same after each step.
    pub each_step: bool,
    /// Settings that this method reads and some others do not, by their names on command lines.
    pub reads: &'static [&'static str],
    /// Whether messages may travel while replicas compute the next steps.
    pub overlaps: bool,
    /// Whether replicas differ even after a synchronisation: [`Synchroniser::replicas_differ`].
    pub replicas_differ: bool,
    /// Whether the result depends on when messages arrive. Two runs then give the same bits only on a simulated
    /// network, which has a virtual clock.
    pub timed: bool,
    /// Number of steps between averages, if the method itself decides this; if it reads `sync-every`, unless
    /// the user does.
    pub every: Option<u64>,
    /// Default codec of the method's averages or messages; `None` means that it has no default of its own.
    pub codec: Option<&'static str>,
    /// Whether the codec encodes the changes that a worker sends to a server. The server decodes each change
    /// separately.
    pub codes_server_changes: bool,
    /// Whether the method itself compensates for what a codec loses, so that the codec needs no error feedback.
    pub compensates: bool,
    /// Whether the weights of replicas may change from round to round, as they do if replicas have different
    /// numbers of targets in each step.
    pub changing_weights: bool,
    /// Default outer momentum, if it differs from that of `diloco`.
    pub outer_momentum: Option<f64>,
    /// What the method does in a round without one of the members.
    pub on_member_loss: OnMemberLoss,
    /// Returns the number of buffers that the method keeps besides those of optimizers.
    pub buffers: fn(&BufferSettings) -> Buffers,
    /// Builds the method.
    pub build: fn(SyncSettings<'_>) -> Result<Box<dyn Synchroniser>, OptimError>,
}

/// What a method does in a round without one of the members. The values and the weight of that member are then
/// both absent.
///
/// Only runs whose members join and leave continue without a member. All other runs end, and report which rank
/// was lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnMemberLoss {
    /// The round is the mean of the remaining members, weighted by their tokens. The codecs' residuals are
    /// dropped.
    MeanOfOthers,
    /// The method cannot be used in runs whose members join and leave, for this reason.
    Unsupported(&'static str),
}

/// Reason why replicas that mix with their neighbours cannot continue without a member.
const OWN_COPIES: OnMemberLoss = OnMemberLoss::Unsupported(
    "each member has its own parameters, and no other member has a copy of those of a lost member",
);

/// Reason why averages that are in flight during steps cannot continue without a member.
const IN_FLIGHT: OnMemberLoss = OnMemberLoss::Unsupported(
    "averages may be in flight when a member is lost, and their weights count all members",
);

/// Settings on which the number of a method's buffers depends.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BufferSettings {
    /// Momentum of an outer optimizer.
    pub momentum: f64,
    /// Momentum of the world server.
    pub world_momentum: f64,
    /// Number of state buffers of a replica's own optimizer.
    pub states: usize,
    /// Whether changes to servers go through a codec.
    pub coded: bool,
    /// Whether that codec has error feedback.
    pub feedback: bool,
}

/// Number of buffers of a method, each as long as the parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Buffers {
    /// All buffers.
    pub held: usize,
    /// Buffers that are saved in a checkpoint.
    pub saved: usize,
}

/// All methods. The first is the default.
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

/// Methods that were registered at run time.
static REGISTERED: RwLock<Vec<&'static SyncMethod>> = RwLock::new(Vec::new());

impl SyncMethod {
    /// Returns the method with this name, from the table or registered.
    #[must_use]
    pub fn by_name(name: &str) -> Option<&'static Self> {
        let registered = REGISTERED.read().unwrap_or_else(PoisonError::into_inner);
        METHODS.iter().chain(registered.iter().copied()).find(|method| method.name == name)
    }

    /// Registers a method of your own under its name in this process: for settings, plans and checkpoints.
    ///
    /// Errors: [`OptimError::NameTaken`] if the name is already taken.
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
