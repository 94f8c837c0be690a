//! The settings of synchronisation between replicas: defaults that depend on the method or the optimizer.

use farflung_compress::AverageSpec;
use farflung_optim::local::Averages;
use farflung_optim::sync::{
    AsynchronousSettings, BufferSettings, MomentPeriods, Quorum, SyncMethod, Timeline, WorldSettings,
};
use farflung_optim::{LrSchedule, OptimError};
use farflung_parallel::plan::NO_CODEC;

use super::choice::{StatePlace, SyncKind};
use super::value::Setting as _;
use super::{RunSettings, TrainConfig, check};
use crate::{Error, Result};

impl TrainConfig {
    /// Sets the codec to the default of the optimizer or of the method of synchronisation, if one of them has
    /// its own, and to none where gradients reach only the ranks that update them, or where the state is on
    /// disk.
    pub(super) fn take_codec_of_rows(&mut self) {
        let unpacked = (self.zero > 0 || self.state == StatePlace::Disk).then_some(NO_CODEC);
        if let Some(name) = self.codec_of_rows().or(unpacked) {
            self.codec = name.parse().expect("a row's codec is in the list of codecs");
        }
    }

    fn codec_of_rows(&self) -> Option<&'static str> {
        self.optimizer.averages.codec().or(self.sync.codec)
    }

    /// Returns whether the codec of averages follows from where the optimizer's state is. Ranks that differ in
    /// their `state` then also differ in the codec.
    pub(crate) fn codec_follows_state(&self) -> bool {
        !self.was_given("codec") && self.zero == 0 && self.codec_of_rows().is_none()
    }

    /// Sets the method of synchronisation to the optimizer's own, if it has one.
    pub(super) fn take_sync_of_row(&mut self) {
        if let Some(name) = self.optimizer.averages.sync() {
            self.sync = SyncKind::parse(name).expect("a row's method is in the table of methods");
        }
    }

    /// Sets the outer momentum to the default of the method of synchronisation, if the method has one.
    pub(super) fn take_outer_momentum_of_row(&mut self) {
        self.outer_momentum = self.sync.outer_momentum.unwrap_or(self.outer_momentum);
    }

    /// Returns the number of steps between two averages: the setting, or what the method itself decides.
    #[must_use]
    pub fn period(&self) -> u64 {
        let is_wish = self.sync.reads.contains(&"sync-every") && self.was_given("sync-every");
        self.sync.every.filter(|_| !is_wish).unwrap_or(self.sync_every)
    }

    /// Returns the codec of averages, with error feedback if that applies.
    pub(crate) fn averaged_codec(&self) -> AverageSpec {
        if self.error_feedback && !self.sync.compensates { self.codec.with_feedback() } else { self.codec }
    }

    pub(super) fn validate_sync(&self) -> Result<()> {
        let rate = self.consensus_rate;
        check("consensus-rate", &rate, rate > 0.0 && rate <= 1.0, "above 0 and at most 1")?;
        let bounded = self.theta > 0.0 && self.theta.is_finite();
        check("theta", &self.theta, bounded, "above 0")?;
        let bits = self.moniqua_bits;
        check("moniqua-bits", &bits, (1..=24).contains(&bits), "between 1 and 24")?;
        check("variance-doubling", &self.variance_doubling, self.variance_doubling > 0, "at least 1")?;
        let (run, every) = (self.run_settings(), self.sync_every);
        let doubling = run.local_doubling();
        check("local-doubling", &doubling, doubling > 0 || self.steps == 0, "at least 1")?;
        let share = self.copy_share;
        check("copy-share", &share, (0.0..=1.0).contains(&share), "between 0 and 1")?;
        check("min-members", &self.min_members, self.min_members > 0, "at least 1")?;
        check("mixing", &self.mixing, (0.0..=1.0).contains(&self.mixing), "between 0 and 1")?;
        let stays = self.world_mixing;
        check("world-mixing", &stays, (0.0..=1.0).contains(&stays), "between 0 and 1")?;
        let (lr, momentum) = (self.world_lr, self.world_momentum);
        check("world-lr", &lr, lr > 0.0 && lr.is_finite(), "above 0")?;
        check("world-momentum", &momentum, (0.0..1.0).contains(&momentum), "at least 0 and below 1")?;
        check("trigger", &self.trigger, self.trigger >= 0.0, "at least 0")?;
        check("meet-every", &self.meet_every, self.meet_every > 0, "at least 1")?;
        let quorum = self.quorum.unwrap_or(1);
        check("quorum", &quorum, quorum > 0, "at least 1")?;
        if self.sync.timed && self.sync.reads.contains(&"sync-delay") {
            let (delay, every) = (self.sync_delay, self.sync_every);
            check("sync-delay", &delay, delay == 0 || delay < every, "below sync-every")?;
        }
        if self.sync.reads.contains(&"first-moment-every") {
            let MomentPeriods { first, second } = run.moments(every);
            for (field, steps) in [("first-moment-every", first), ("second-moment-every", second)] {
                let fits = steps > 0 && steps.is_multiple_of(self.sync_every);
                check(field, &steps, fits, "a multiple of sync-every")?;
            }
        }
        if !self.sync.reads.contains(&"fragments") {
            return Ok(());
        }
        match Timeline::new(every, run.fragments(every) as u64, self.sync_delay) {
            Ok(_) => Ok(()),
            Err(OptimError::Setting { field, value, expected, .. }) => {
                let field = if field == "delay" { "sync-delay" } else { field };
                Err(Error::Setting { field, value: value.to_string(), expected: expected.to_owned() })
            }
            Err(other) => Err(other.into()),
        }
    }
}

impl RunSettings {
    /// Returns the number of fragments of the parameters, which are averaged at different times, `every` steps
    /// apart.
    pub(crate) fn fragments(&self, every: u64) -> usize {
        const DEFAULT_FRAGMENTS: u64 = 4;
        self.fragments.unwrap_or(DEFAULT_FRAGMENTS.min(every) as usize)
    }

    /// Returns the numbers of steps between averages of the optimizer's moments; parameters are averaged
    /// every `every` steps.
    pub(crate) fn moments(&self, every: u64) -> MomentPeriods {
        let MomentPeriods { first, second } = MomentPeriods::of(every);
        MomentPeriods {
            first: self.first_moment_every.unwrap_or(first),
            second: self.second_moment_every.unwrap_or(second),
        }
    }

    /// Returns the settings that determine the number of buffers of a method of synchronisation that averages
    /// every `every` steps with a codec.
    pub(crate) fn buffer_settings(
        &self,
        method: &SyncMethod,
        codec: AverageSpec,
        every: u64,
    ) -> BufferSettings {
        let local = self.optimizer.memory(&self.local(LrSchedule::constant(self.lr), 1, every));
        let coded = method.codes_server_changes && !codec.is_plain();
        let feedback = coded && codec.codec().is_some_and(|codec| codec.feedback());
        let (momentum, world_momentum) = (self.outer_momentum, self.world_momentum);
        BufferSettings { momentum, world_momentum, states: local.states, coded, feedback }
    }

    /// Returns the settings of asynchronous methods for one of `replicas` replicas. `tokens_per_step` is the
    /// replica's number of tokens in a step, relative to an equal share.
    pub(crate) fn asynchronous(&self, replicas: u32, tokens_per_step: f64) -> AsynchronousSettings {
        let least = self.quorum.unwrap_or(replicas as usize / 2 + 1);
        AsynchronousSettings {
            servers: self.servers.into(),
            meet_every: self.meet_every,
            buffer: self.outer_buffer,
            staleness: self.staleness,
            quorum: Quorum { least, grace: self.grace },
            interval: self.average_interval,
            warmup: self.sync_warmup,
            tokens_per_step,
            world: WorldSettings {
                lr: self.world_lr,
                momentum: self.world_momentum,
                every: self.world_every,
                mixing: self.world_mixing,
            },
        }
    }

    /// Returns the number of local steps after which the interval between two averages doubles.
    pub(crate) fn local_doubling(&self) -> u64 {
        self.local_doubling.unwrap_or_else(|| self.steps.div_ceil(5))
    }

    /// Returns the number of steps before `codec` applies.
    pub(crate) fn warm_steps(&self) -> u64 {
        const PERCENT: u64 = 15;
        self.codec_warmup.unwrap_or(match self.optimizer.averages {
            Averages::Gradients => 0,
            Averages::Momentum { .. } | Averages::Accumulated { .. } => (self.steps * PERCENT).div_ceil(100),
        })
    }
}
