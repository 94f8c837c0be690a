//! Notes at the start of a run: the given settings that have no effect in this run and why, and the settings
//! whose effect may surprise. Each note is a condition on the settings.

use std::collections::{BTreeMap, BTreeSet};

use farflung_comm::Algorithm;
use farflung_compress::{AverageSpec, CodecSpec};
use farflung_optim::local::Averages;
use farflung_parallel::Recompute;
use farflung_tensor::Precision;
use farflung_zoo::ModelSpec;

use super::TrainConfig;
use super::choice::{
    LrScheduleKind, OptimizerKind, Resume, StatePlace, SyncKind, TokenizerKind, TransportKind,
};
use super::local_steps::LocalStepsKind;
use crate::transports::{IROH, MEMORY, MPI, MPI_NATIVE, SHARED_MEMORY};

/// Facts about a run that its settings do not contain.
#[derive(Debug, Clone, Copy)]
pub struct NoteContext<'a> {
    /// The model's shape.
    pub model: &'a ModelSpec,
    /// Number of workers in all processes.
    pub world: usize,
    /// Whether links are simulated.
    pub simulated: bool,
    /// Whether members may join and leave.
    pub elastic: bool,
}

/// The notes so far, and the settings that they name.
struct Notes<'a> {
    config: &'a TrainConfig,
    lines: Vec<String>,
    named: BTreeSet<&'static str>,
}

impl Notes<'_> {
    /// Adds a note for those of `names` that were given and have no effect, if `case` holds. Each setting is
    /// noted once, with the first reason.
    fn note_without_effect(&mut self, case: bool, names: &[&'static str], why: &str) {
        let given = |name: &&&'static str| self.config.was_given(name) && !self.named.contains(**name);
        let given: Vec<_> = names.iter().filter(|_| case).filter(given).copied().collect();
        if given.is_empty() {
            return;
        }
        let verb = if given.len() == 1 { "changes" } else { "change" };
        let quoted: Vec<_> = given.iter().map(|name| format!("`{name}`")).collect();
        self.lines.push(format!("{} {verb} nothing: {why}", quoted.join(", ")));
        self.named.extend(given);
    }

    /// Adds a note for given settings that the chosen row of a table does not use, although other rows do.
    fn note_unused(&mut self, choice: &str, chosen: &str, rows: &[SettingsUsed]) {
        let mut by_readers: BTreeMap<String, Vec<&'static str>> = BTreeMap::new();
        for &setting in rows.iter().flat_map(|row| row.settings) {
            let readers: Vec<_> =
                rows.iter().filter(|row| row.settings.contains(&setting)).map(|row| row.name).collect();
            let settings = by_readers.entry(readers.join(" or ")).or_default();
            if !readers.contains(&chosen) && !settings.contains(&setting) {
                settings.push(setting);
            }
        }
        for (readers, settings) in by_readers {
            self.note_without_effect(true, &settings, &format!("`{choice}` is {chosen}, not {readers}"));
        }
    }

    /// Adds another note if `case` holds.
    fn note_if(&mut self, case: bool, text: impl FnOnce() -> String) {
        if case {
            self.lines.push(text());
        }
    }
}

/// A row of a table, and the settings that this row uses. Other rows may ignore these settings.
struct SettingsUsed {
    name: &'static str,
    settings: &'static [&'static str],
}

impl TrainConfig {
    /// Returns one line for each reason why given settings have no effect in a run, and one for each setting
    /// whose effect may surprise.
    #[must_use]
    pub fn notes(&self, run: &NoteContext<'_>) -> Vec<String> {
        let mut notes = Notes { config: self, lines: Vec::new(), named: BTreeSet::new() };
        self.note_data(&mut notes);
        self.note_model_and_training(run, &mut notes);
        self.note_workers_and_averages(run, &mut notes);
        self.note_codec(&mut notes);
        self.note_links(run, &mut notes);
        self.note_pipeline(run, &mut notes);
        self.note_machine(run, &mut notes);
        self.note_ends(&mut notes);
        notes.lines
    }

    fn note_data(&self, notes: &mut Notes<'_>) {
        let default = self.data.is_none();
        notes.note_without_effect(default, &["encoding", "token-type"], "without `data` there are no files");
        let byte = self.tokenizer == TokenizerKind::Byte;
        notes.note_without_effect(byte, &["special-tokens"], "the tokenizer byte has no special tokens");
    }

    fn note_model_and_training(&self, _: &NoteContext<'_>, notes: &mut Notes<'_>) {
        notes.note_without_effect(
            self.init_from.is_some(),
            &["model"],
            "the weights of `init-from` have their own shape",
        );
        let readers: Vec<_> =
            OptimizerKind::all().map(|row| SettingsUsed { name: row.name, settings: row.reads }).collect();
        notes.note_unused("optimizer", self.optimizer.name, &readers);
        notes.note_without_effect(
            self.lookahead == 0,
            &["lookahead-alpha"],
            "`lookahead` is 0, so there are no slow weights",
        );
        let wsd = self.lr_schedule == LrScheduleKind::Wsd;
        notes.note_without_effect(
            !wsd,
            &["decay-fraction"],
            &format!("`lr-schedule` is {}, not wsd", self.lr_schedule),
        );
        let still = self.momentum == 0.0;
        notes.note_without_effect(still, &["dampening", "nesterov"], "`momentum` is 0");
        let constant = self.lr_schedule == LrScheduleKind::Constant;
        notes.note_without_effect(
            constant,
            &["min-lr"],
            "the learning rate of `lr-schedule` constant does not decay",
        );
        let (warmup, steps) = (self.warmup, self.steps);
        let ends = "the run ends before its warm-up ends";
        notes.note_without_effect(warmup >= steps, &["min-lr", "lr-schedule", "decay-fraction"], ends);
        notes.note_if(warmup > steps, || {
            format!(
                "`warmup` is {warmup} and the run has {steps} steps: the learning rate does not reach `lr`"
            )
        });
    }

    /// Returns whether processes may connect over QUIC.
    fn uses_relays(&self, run: &NoteContext<'_>) -> bool {
        let between_processes = run.elastic || !run.simulated;
        let auto = between_processes && self.transport == TransportKind::Auto;
        auto || self.transport == TransportKind::of(&IROH)
    }

    fn note_workers_and_averages(&self, run: &NoteContext<'_>, notes: &mut Notes<'_>) {
        let alone = run.world == 1;
        let launched = format!("the launcher started {} processes with one worker each", run.world);
        notes.note_without_effect(run.world != self.workers, &["workers"], &launched);
        let exchanged = [
            "codec",
            "codec-warmup",
            "density-warmup",
            "tune",
            "error-feedback",
            "bucket-mb",
            "overlap",
            "algorithm",
            "link",
            "deadline",
            "resync-every",
        ];
        notes.note_without_effect(alone, &exchanged, "the run has one worker, which sends nothing");
        notes.note_without_effect(
            self.replicas_of(run.world) <= 1,
            &["shards"],
            "there is one replica, which has all data",
        );
        notes.note_if(self.signs_into_adam(run.world), || {
            format!(
                "`codec` {} sends gradients in one bit, without their magnitudes, but `optimizer` {} divides \
                 by averages of these magnitudes: the final loss will be higher. 1-bit Adam sends its \
                 momentum instead: `--optimizer onebit-adam`",
                self.codec, self.optimizer.name
            )
        });
        self.note_nothing_averaged(run.world, notes);
        notes.note_without_effect(
            self.outweighs_recipe(),
            &["recipe"],
            "all settings that it consists of are overridden with other values",
        );
        notes.note_without_effect(
            matches!(self.resume, Resume::Path(_)),
            &["init-from"],
            "`resume` names a checkpoint, which has all of the model",
        );
        notes.note_without_effect(
            !self.run_settings().reads_examples(),
            &["loss-on", "packing"],
            "the data is no file of examples (.jsonl)",
        );
        let each_step = self.sync.each_step;
        notes.note_without_effect(
            !run.elastic,
            &["balance", "min-members", "copy-share", "join-wait", "pooled", "name"],
            "the run's members do not change: it is for `farflung host`",
        );
        notes.note_without_effect(
            !run.elastic || !self.is_pooled(),
            &["keep-work"],
            "stages are not pools of members that come and leave",
        );
        let local = format!(
            "`sync` {} takes local steps between averages, so bucket sizes and algorithms make little \
             difference",
            self.sync
        );
        notes.note_without_effect(!each_step && self.tune > 0, &["tune"], &local);
        let compared = if run.simulated && !alone && self.stages == 1 && self.topology.is_none() {
            "; only the comparison in the report uses it"
        } else {
            ""
        };
        let sync = self.sync;
        let steps_each = format!("`sync` {sync} averages at each step, so all replicas take all steps");
        notes.note_without_effect(each_step, &["local-steps"], &steps_each);
        let equal = self.local_steps == LocalStepsKind::BySpeed && self.topology.is_none();
        notes.note_without_effect(
            equal,
            &["local-steps"],
            "without `topology` all machines have the same speed",
        );
        notes.note_without_effect(
            each_step,
            &["sync-every"],
            &format!("`sync` {sync} averages at each step{compared}"),
        );
        let readers: Vec<_> =
            SyncKind::all().map(|row| SettingsUsed { name: row.name, settings: row.reads }).collect();
        notes.note_unused("sync", sync.name, &readers);
        let packs = !self.codec.is_plain() && self.codec.codec().is_some();
        let unpacked = self.algorithm == Algorithm::AllGather && !packs;
        notes.note_without_effect(
            unpacked,
            &["algorithm"],
            "all-gather is only for values that a codec packs; a ring is used instead",
        );
        self.note_context(notes);
        self.note_zero(notes);
        self.note_state(notes);
        let after = format!("`sync` {sync} averages after a step, when no backward pass runs");
        notes.note_without_effect(!each_step, &["overlap"], &after);
    }

    fn note_context(&self, notes: &mut Notes<'_>) {
        let cut = self.context_cut();
        notes.note_without_effect(
            !cut.divides(),
            &["ulysses", "context-order"],
            "`context-parallel` is 1, and each replica has whole sequences",
        );
        notes.note_without_effect(
            cut.divides() && cut.ring == 1,
            &["context-order"],
            "`ulysses` is as many as `context-parallel`, so that there is no ring",
        );
    }

    fn note_zero(&self, notes: &mut Notes<'_>) {
        notes.note_without_effect(
            self.zero == 0,
            &["zero-weights"],
            "`zero` is 0, and each replica has all of the optimizer's state",
        );
        notes.note_without_effect(
            !self.divides_weights(),
            &["zero-codec", "zero-within"],
            "`zero` is not 3, and each replica has all weights",
        );
        notes.note_without_effect(
            self.zero > 0,
            &["algorithm"],
            "with `zero`, each gradient goes to the rank that updates it, which adds all up in rank order",
        );
    }

    fn note_state(&self, notes: &mut Notes<'_>) {
        notes.note_without_effect(
            self.state == StatePlace::Device,
            &["state-dir"],
            "`state` is device, and the optimizer's state is in memory",
        );
        notes.note_if(!self.save_end && self.state == StatePlace::Device, || {
            "`save-end` is false and `state` is device: the end of the run is not saved".to_owned()
        });
    }

    fn note_nothing_averaged(&self, world: usize, notes: &mut Notes<'_>) {
        let nothing = self.averages_nothing(world);
        notes.note_without_effect(
            nothing && self.tensor == 1,
            &["codec", "error-feedback", "bucket-mb", "overlap", "algorithm"],
            "no two ranks hold the same part of the model, so nothing is averaged",
        );
        notes.note_without_effect(
            nothing && self.tensor > 1,
            &["codec", "error-feedback"],
            "no two ranks hold the same piece of the model, and what all ranks along the tensor axis have is \
             averaged as plain f32",
        );
    }

    fn note_codec(&self, notes: &mut Notes<'_>) {
        let (codec, sync) = (self.codec, self.sync);
        let plain = codec.is_plain() && self.optimizer.averages == Averages::Gradients;
        notes.note_without_effect(plain, &["codec-warmup"], "all averages are sent uncompressed");
        notes.note_without_effect(
            sync.codes_server_changes,
            &["density-warmup"],
            &format!(
                "`sync` {sync} sends changes of parameters, and its codec always keeps the same fraction of \
                 them"
            ),
        );
        let keeps = codec.codec().and_then(|codec| codec.density()).is_some();
        notes.note_without_effect(
            !keeps || self.sync.compensates,
            &["density-warmup"],
            &format!("`codec` {codec} does not select a fraction of the elements"),
        );
        let why = match codec {
            _ if sync.compensates => "the method of synchronisation itself corrects what the codec loses",
            AverageSpec::Codec(codec) if codec.feedback() => "the codec's name sets its error feedback",
            AverageSpec::Protocol(_) => "the codec is a protocol with its own error feedback",
            AverageSpec::Codec(codec) if codec.method() == CodecSpec::default().method() => {
                "the codec is lossless"
            }
            AverageSpec::Codec(_) => "the codec is unbiased",
        };
        notes.note_without_effect(
            sync.compensates || codec.with_feedback() == codec,
            &["error-feedback"],
            why,
        );
    }

    fn note_links(&self, run: &NoteContext<'_>, notes: &mut Notes<'_>) {
        let alone = run.world == 1;
        notes.note_without_effect(self.topology.is_some(), &["link"], "`topology` sets the links");
        notes.note_without_effect(
            !run.simulated,
            &["link"],
            "it is for simulated links, and this run's are real",
        );
        let one_process = run.simulated || alone || self.transport == TransportKind::of(&MEMORY);
        notes.note_without_effect(
            one_process,
            &["job"],
            "the run is one process, which no other process joins",
        );
        let no_sockets = "the run is one process, which sends nothing over sockets";
        notes.note_without_effect(one_process, &["up", "up-each"], no_sockets);
        let shares = self.transport == TransportKind::of(&SHARED_MEMORY);
        notes.note_without_effect(
            shares,
            &["up", "up-each"],
            "processes that share memory send nothing over sockets",
        );
        notes.note_without_effect(
            !self.uses_relays(run),
            &["relay"],
            "only processes with `transport` auto or iroh use relays",
        );
        let mpi = [MPI, MPI_NATIVE].iter().any(|row| self.transport == TransportKind::of(row));
        notes.note_without_effect(mpi, &["up", "up-each"], "the traffic of MPI cannot be limited");
        notes.note_without_effect(one_process, &["own-data"], "the run is one process, which has one text");
        let speeds = "`topology` sets the speeds";
        notes.note_without_effect(self.topology.is_some(), &["compute-rate"], speeds);
        let clock = "it is for the clock of simulated links, and this run's links are real";
        notes.note_without_effect(!run.simulated && self.stages == 1, &["compute-rate"], clock);
    }

    fn note_pipeline(&self, run: &NoteContext<'_>, notes: &mut Notes<'_>) {
        let whole = "`expert` is 1, so each replica has all experts";
        notes.note_without_effect(self.expert < 2, &["expert-codec"], whole);
        let one = "there are no `paths`, so all replicas train one model";
        notes.note_without_effect(self.path_count() < 2, &["route-tokens"], one);
        let (none, file) = (self.stages == 1, self.schedule_file.is_some());
        let all = ["schedule", "schedule-file", "chunks", "memory", "slice-grain", "version-sync"];
        notes.note_without_effect(none, &all, "`stages` is 1, so there is no pipeline");
        let boundary = ["boundary", "boundary-backward", "boundary-store"];
        notes.note_without_effect(none, &boundary, "`stages` is 1, so there is no pipeline");
        let remembers = self.boundary.remembers() || self.boundary_backward.remembers();
        notes.note_without_effect(!remembers, &["boundary-store"], "no boundary codec stores samples");
        let order = "`schedule-file` sets the order";
        notes.note_without_effect(file, &["schedule", "chunks", "memory", "slice-grain"], order);
        let pooled = self.pools.is_some();
        notes.note_without_effect(!pooled, &["pool-rates"], "there are no `pools`");
        let order = "`pools` sets the order";
        notes.note_without_effect(pooled, &["schedule", "chunks", "slice-grain"], order);
        let comes = run.elastic && self.is_pooled();
        notes.note_without_effect(comes, &["schedule", "chunks", "slice-grain"], "`pooled` sets the order");
        let method = self.schedule;
        let limited = pooled || comes || method.is_limited();
        notes.note_without_effect(
            !limited,
            &["memory"],
            &format!("`schedule` {method} has no limit on memory"),
        );
        let sliced = method.slices();
        notes.note_without_effect(
            !sliced && !pooled,
            &["slice-grain"],
            &format!("`schedule` {method} does not slice sequences"),
        );
        let versions = file || method.stashes();
        notes.note_without_effect(
            !versions,
            &["version-sync"],
            &format!("`schedule` {method} does not keep several versions of the weights"),
        );

        let layers = self.layers_of_a_part(run.model.layers());
        let again = match self.recompute {
            Recompute::None | Recompute::Within(_) => 0,
            Recompute::Full | Recompute::EachLayer => layers,
            Recompute::Layers(layers) => layers as usize,
        };
        let of = if none { "the model has" } else { "a stage has at most" };
        notes.note_if(again > layers, || {
            format!("`recompute` is {again} and {of} {layers} layers: all of them are recomputed")
        });
        let processors = "all devices are CPUs, whose memory is the host's";
        notes.note_without_effect(self.device.are_processors(), &["offload"], processors);
        let decides = matches!(self.recompute, Recompute::Within(_));
        notes.note_without_effect(
            decides,
            &["offload"],
            "`recompute` is an amount of memory, and determines what is kept",
        );
        let kept = if decides { 1 } else { layers.saturating_sub(again) };
        notes.note_without_effect(kept == 0, &["offload"], "all layers are recomputed, so none is offloaded");
        notes.note_if(!decides && kept > 0 && self.offload > kept && !self.device.are_processors(), || {
            format!("`offload` is {} and {kept} layers are not recomputed: these are offloaded", self.offload)
        });
    }

    fn note_machine(&self, run: &NoteContext<'_>, notes: &mut Notes<'_>) {
        let rounds = self.precision != Precision::F32;
        notes.note_without_effect(!rounds, &["loss-scale"], "it is for `precision` f16 and bf16");
        // Another process of the job may use another `--device`.
        let one_process = run.simulated || self.transport == TransportKind::of(&MEMORY);
        let same = "all devices are CPUs, whose copies of parameters stay equal";
        notes.note_without_effect(one_process && self.device.are_processors(), &["resync-every"], same);
    }

    fn note_ends(&self, notes: &mut Notes<'_>) {
        let steps = self.steps;
        let end = format!("the run ends at step {steps} and saves then anyway");
        notes.note_without_effect(
            self.save_end && self.checkpoint_every >= steps,
            &["checkpoint-every"],
            &end,
        );
        let checked = format!("the run ends at step {steps} and is checked then anyway");
        notes.note_without_effect(self.check_every >= steps, &["check-every"], &checked);
        notes.note_if(self.keep_last == 1, || {
            "`keep-last` is 1, but two checkpoints are kept: a rank may fail while it writes the newest"
                .to_owned()
        });
        let new = self.resume == Resume::Auto && self.out.is_none();
        notes.note_without_effect(new, &["resume"], "without `out` the run's folder is a new one");
        let sample = ["prompt", "temperature", "top-k", "top-p"];
        notes.note_without_effect(
            self.sample_tokens == 0,
            &sample,
            "`sample-tokens` is 0, so no sample is written",
        );
        let likeliest = "`temperature` 0 takes the likeliest token";
        notes.note_without_effect(self.temperature == 0.0, &["top-k", "top-p"], likeliest);
    }

    /// Returns whether a one-bit codec removes the magnitudes of gradients before an optimizer that adapts to
    /// magnitudes.
    fn signs_into_adam(&self, world: usize) -> bool {
        let method = self.codec.codec().and_then(|codec| codec.method());
        let one_bit = method.is_some_and(|(name, _)| name.starts_with("sign"));
        let reads = |setting| self.optimizer.reads.contains(&setting);
        let adapts = reads("beta2") && reads("eps") && self.optimizer.averages == Averages::Gradients;
        one_bit && adapts && self.sync.each_step && world > 1 && !self.averages_nothing(world)
    }

    /// Returns whether no two ranks hold the same part of the model; false if a schedule file decides that.
    fn averages_nothing(&self, world: usize) -> bool {
        let copies = match self.pools() {
            Some(pools) => pools.fewest() > 1,
            None => self.schedule.copies() > 1,
        };
        let divides = self.stages > 1 || self.tensor > 1;
        divides && self.replicas_of(world) <= 1 && !copies && self.schedule_file.is_none()
    }

    /// Returns the largest number of layers in a part of the model.
    fn layers_of_a_part(&self, layers: usize) -> usize {
        let chunks = match (self.chunks, self.schedule) {
            _ if self.stages == 1 => 1,
            _ if self.pools.is_some() => {
                return layers.div_ceil(self.pools().map_or(1, |pools| pools.sizes.len()));
            }
            (_, method) if method.copies() > 1 => 1,
            (chunks, method) => chunks.unwrap_or(method.default_chunks() as usize),
        };
        layers.div_ceil(self.stages.saturating_mul(chunks).max(1))
    }
}

#[cfg(test)]
mod tests;
