//! Checks of a plan. An error about one field names it.

use std::collections::BTreeSet;

use farflung_base::{Algorithm, Axis, ContextCut, Nanos};

use super::{Level, NO_CODEC, Part, PathLevel, Plan, Recompute, ScheduleSource};
use crate::ParallelError;
use crate::pipeline::{ComputeOrder, Pools, PoolsFault, Settings, StageCost, TiedWeights, Updates};

/// Returns the error for a field with an invalid value.
#[expect(
    clippy::needless_pass_by_value,
    reason = "values of many types are printed; most are created for this call"
)]
fn refuse(field: impl Into<String>, value: impl ToString, expected: impl Into<String>) -> ParallelError {
    ParallelError::Plan { field: field.into(), value: value.to_string(), expected: expected.into() }
}

/// Returns the error of [`refuse`] unless `good` is true.
fn ensure(
    good: bool,
    field: impl Into<String>,
    value: impl ToString,
    expected: impl Into<String>,
) -> Result<(), ParallelError> {
    if good { Ok(()) } else { Err(refuse(field, value, expected)) }
}

impl Plan {
    /// Checks that the plan can be executed. Does not check the names of codecs and synchronisation methods;
    /// the crates that have their tables check them.
    ///
    /// Errors: [`ParallelError::Plan`] with the invalid field, [`ParallelError::NotBuilt`] for more than two
    /// levels and for stages 2 and 3 of ZeRO, and the errors of [`Plan::order_with`].
    pub fn check(&self) -> Result<(), ParallelError> {
        self.check_mesh()?;
        self.check_context()?;
        self.check_tensor()?;
        self.check_zero()?;
        self.check_experts()?;
        self.check_paths()?;
        self.check_parts()?;
        self.check_schedule()?;
        let (given, needed) = (self.boundaries.len(), self.parts.len() - 1);
        ensure(
            given == needed,
            "boundary",
            format!("given {given} times"),
            format!("{needed}, one fewer than parts"),
        )?;
        self.check_levels()
    }

    fn check_mesh(&self) -> Result<(), ParallelError> {
        let axes = self.mesh.axes();
        let has_context = axes.iter().any(|&(axis, size)| axis == Axis::Context && size > 1);
        let expected =
            "no context axis: it divides the data axis, and `context_parallel` says how many ranks it has";
        ensure(!has_context, "mesh", &self.mesh, expected)?;
        let order: Vec<Axis> = axes.iter().map(|&(axis, _)| axis).collect();
        let usual: Vec<Axis> = Axis::ALL.into_iter().filter(|axis| order.contains(axis)).collect();
        let expected = "data=REPLICAS,pipeline=STAGES, or data=REPLICAS,pipeline=STAGES,tensor=RANKS, in this \
                        order, so that the ranks of a replica are consecutive";
        let good = order == usual && order.starts_with(&[Axis::Data, Axis::Pipeline]);
        ensure(good, "mesh", &self.mesh, expected)?;

        let (given, ranks) = (self.machines.len(), self.ranks() as usize);
        ensure(given == ranks, "machines", format!("{given} names"), format!("{ranks}, one for each rank"))?;
        let mut seen = BTreeSet::new();
        for name in &self.machines {
            let good = !name.is_empty() && name.chars().all(|c| c.is_alphanumeric() || "-_.".contains(c));
            ensure(good, "machines", format!("{name:?}"), "names of letters, digits, `-`, `_` and `.`")?;
            ensure(seen.insert(name), "machines", format!("{name:?} twice"), "each machine once")?;
        }

        ensure(self.batch > 0, "batch", self.batch, "at least 1")?;
        let (given, replicas) = (self.microbatches.len(), self.replicas() as usize);
        let expected = format!("{replicas}, one for each replica");
        ensure(given == replicas, "microbatches", format!("{given} numbers"), expected)?;
        for (replica, &count) in self.microbatches.iter().enumerate() {
            ensure(count > 0, format!("microbatches[{replica}]"), count, "at least 1")?;
        }
        Ok(())
    }

    fn check_context(&self) -> Result<(), ParallelError> {
        let (ContextCut { ring, ulysses, .. }, replicas) = (self.context, self.replicas());
        let ranks = self.context.readers();
        let expected = format!("at least 1, and a divisor of the {replicas} replicas");
        let good = ring > 0 && ulysses > 0 && replicas.is_multiple_of(ranks);
        ensure(good, "context_parallel", ranks, expected)?;
        if ranks == 1 {
            let usual = self.context == ContextCut::default();
            let expected = "zigzag, because no replicas divide sequences";
            return ensure(usual, "context_order", self.context.order, expected);
        }
        let refused = |why: &str| Err(refuse("context_parallel", ranks, format!("1, because {why}")));
        if self.pools().is_some() || self.updates() != Updates::Flush {
            return refused("the schedule has pools of ranks, or no flush");
        }
        if !self.pipeline.slices.is_empty() || self.sequence_parallel {
            return refused("sequences are divided already (`pipeline.slices`, or `sequence_parallel`)");
        }
        if self.shares() > 1 {
            return refused("replicas hold different experts, or modules of paths");
        }
        for (replica, &count) in (0..).zip(&self.microbatches) {
            let expected = "the same number for all replicas that divide the same sequences";
            let good = count == self.microbatches[self.readers_of(replica).start as usize];
            ensure(good, "microbatches", format!("{:?}", self.microbatches), expected)?;
        }
        let each_step = self.levels.iter().all(|level| level.every == 1 && level.steps.is_empty());
        ensure(each_step, "context_parallel", ranks, "1, because gradients are not averaged in each step")
    }

    fn check_tensor(&self) -> Result<(), ParallelError> {
        let (ranks, weights) = (self.tensor_ranks(), &self.tensor_weights);
        let given = format!("{weights:?}");
        let expected = match ranks {
            1 => "nothing, because the mesh has no tensor axis".to_owned(),
            _ => {
                format!("{ranks} weights of at least 1, one for each rank along the tensor axis, or nothing")
            }
        };
        let fits = ranks > 1 && weights.len() == ranks as usize && !weights.contains(&0);
        ensure(weights.is_empty() || fits, "tensor_weights", given, expected)?;
        let sliced = !self.pipeline.slices.is_empty();
        let expected = "false, because sequences are sliced, or the mesh has no tensor axis";
        let good = !self.sequence_parallel || (ranks > 1 && !sliced);
        ensure(good, "sequence_parallel", self.sequence_parallel, expected)?;
        let unlisted = self.pools().is_some() || self.updates() != Updates::Flush;
        let expected = "no tensor axis, because the schedule has pools of ranks, or no flush";
        ensure(ranks == 1 || !unlisted, "mesh", &self.mesh, expected)
    }

    fn check_zero_groups(&self) -> Result<(), ParallelError> {
        let expected = "none, because replicas do not divide parameters (`zero` is below 3)";
        let is_known = self.divides_weights() || self.zero_codec == NO_CODEC;
        ensure(is_known && !self.zero_codec.is_empty(), "zero_codec", &self.zero_codec, expected)?;
        if self.zero_groups.is_empty() {
            return Ok(());
        }
        let given = format!("{:?}", self.zero_groups);
        let expected = "nothing, because replicas do not divide parameters (`zero` is below 3)";
        ensure(self.divides_weights(), "zero_groups", &given, expected)?;
        let mut all: Vec<u32> = self.zero_groups.concat();
        let ascend = self.zero_groups.iter().all(|group| group.is_sorted());
        all.sort_unstable();
        let fits = all.iter().copied().eq(0..self.replicas())
            && ascend
            && self.zero_groups.len() > 1
            && self.zero_groups.iter().all(|group| group.len() > 1);
        let expected = format!(
            "at least two groups of at least two of the {} replicas, in order, each in one group",
            self.replicas()
        );
        ensure(fits, "zero_groups", given, expected)
    }

    fn check_zero(&self) -> Result<(), ParallelError> {
        let (stage, weights, replicas) = (self.zero, &self.zero_weights, self.replicas());
        ensure(stage <= 3, "zero", stage, "0 to 3")?;
        let expected = if stage == 0 {
            "nothing, because replicas divide nothing (`zero` is 0)".to_owned()
        } else {
            format!("{replicas} weights, one for each replica and at least one above 0, or nothing")
        };
        let fits =
            stage > 0 && weights.len() == replicas as usize && weights.iter().any(|&weight| weight > 0);
        ensure(weights.is_empty() || fits, "zero_weights", format!("{weights:?}"), expected)?;
        self.check_zero_groups()?;
        if stage == 0 {
            let expected = "false, because replicas divide nothing (`zero` is 0)";
            return ensure(!self.zero_tensors, "zero_tensors", self.zero_tensors, expected);
        }
        let refused = |why: &str| Err(refuse("zero", stage, format!("0, because {why}")));
        if replicas == 1 {
            return refused("there is one replica, which divides nothing");
        }
        if self.pools().is_some() || self.updates() != Updates::Flush {
            return refused("the schedule has pools of ranks, or no flush");
        }
        if self.shares() > 1 {
            return refused("replicas hold different experts, or modules of paths");
        }
        if stage > 1 && self.tensor_ranks() > 1 {
            return refused(
                "ranks along the tensor axis add up the gradients of what they do not divide; 1 works",
            );
        }
        if stage > 1 && self.pipeline.slices.len() > 1 {
            return refused("gradients would leave after each slice of a sequence; 1 works");
        }
        let first = self.microbatches.first();
        if stage > 1 && self.microbatches.iter().any(|count| Some(count) != first) {
            return refused(
                "all replicas together add up the gradients of each microbatch, of which they have unequal \
                 numbers; 1 works",
            );
        }
        let level = self.levels.last();
        if self.levels.len() > 1 || level.is_some_and(|level| level.codec != NO_CODEC) {
            return refused("averages have two levels, or a codec");
        }
        Ok(())
    }

    fn check_experts(&self) -> Result<(), ParallelError> {
        ensure(!self.expert_codec.is_empty(), "expert_codec", "empty", "a codec's name, or none")?;
        if self.experts.is_empty() {
            let expected = "none, because replicas do not divide experts";
            return ensure(self.expert_codec == NO_CODEC, "expert_codec", &self.expert_codec, expected);
        }
        let (given, ranks, replicas) = (format!("{:?}", self.experts), self.experts.len(), self.replicas());
        let refused = |expected: &str| Err(refuse("experts", &given, expected));
        if ranks == 1 || self.experts.contains(&0) {
            return refused("a weight of at least 1 for each of several replicas, or nothing");
        }
        if !(replicas as usize).is_multiple_of(ranks) {
            let expected = format!("as many weights as divide the {replicas} replicas");
            return refused(&expected);
        }
        if self.pools().is_some() || self.updates() != Updates::Flush {
            return refused("nothing, because the schedule has pools of ranks, or no flush");
        }
        let group_of = |replica: usize| replica - self.expert_rank(replica as u32) as usize;
        for (replica, &count) in self.microbatches.iter().enumerate() {
            let expected = "the same number for all replicas that divide the experts, because they run each \
                            microbatch together";
            let good = count == self.microbatches[group_of(replica)];
            ensure(good, "microbatches", format!("{:?}", self.microbatches), expected)?;
        }
        Ok(())
    }

    fn check_paths(&self) -> Result<(), ParallelError> {
        let mut next = 0;
        for (i, PathLevel { layers, modules }) in self.paths.iter().enumerate() {
            let (field, text) = (format!("path[{i}].layers"), format!("{}..{}", layers.start, layers.end));
            let expected = format!("at least one layer, from {next} to {} at most", self.model.layers);
            let good = layers.start >= next && layers.end > layers.start && layers.end <= self.model.layers;
            ensure(good, field, text, expected)?;
            let expected = "at least 2: layers in no level are common to all paths";
            ensure(*modules > 1, format!("path[{i}].modules"), modules, expected)?;
            next = layers.end;
        }
        if self.paths.is_empty() {
            return Ok(());
        }
        let (paths, replicas) = (self.paths(), self.replicas());
        let refused = |expected: &str| Err(refuse("path", format!("{paths} paths"), expected));
        if !replicas.is_multiple_of(paths) {
            return refused(&format!("as many as divide the {replicas} replicas, each of which trains one"));
        }
        if self.pools().is_some() || self.updates() != Updates::Flush {
            return refused("none, because the schedule has pools of ranks, or no flush");
        }
        if self.experts.len() > 1 {
            return refused("none, because replicas divide experts");
        }
        if self.levels.len() > 1 {
            return refused("none, because averages have two levels");
        }
        for (i, Level { steps, .. }) in self.levels.iter().enumerate() {
            let equal = steps.windows(2).all(|pair| pair[0] == pair[1]);
            let expected = "the same number for all paths, which share modules";
            ensure(equal, format!("level[{i}].steps"), format!("{steps:?}"), expected)?;
        }
        let equal = self.microbatches.windows(2).all(|pair| pair[0] == pair[1]);
        let expected = "the same number for all paths, which share modules";
        ensure(equal, "microbatches", format!("{:?}", self.microbatches), expected)
    }

    fn check_parts(&self) -> Result<(), ParallelError> {
        let layers = self.model.layers;
        ensure(layers > 0, "model.layers", layers, "at least 1")?;
        ensure(self.model.parameters > 0, "model.parameters", self.model.parameters, "at least 1")?;
        ensure(!self.parts.is_empty(), "part", "given 0 times", "at least one part")?;
        let last = self.parts.len() - 1;
        let mut next = 0;
        for (i, Part { layers: range, recompute, offload }) in self.parts.iter().enumerate() {
            let field = |name: &str| format!("part[{i}].{name}");
            let text = format!("{}..{}", range.start, range.end);
            let begins = format!("a range that begins at {next}, where the part before ends");
            ensure(range.start == next && range.end >= next, field("layers"), &text, begins)?;
            let inner = i > 0 && i < last;
            ensure(
                inner || !range.is_empty(),
                field("layers"),
                &text,
                "at least one layer in the first and last part",
            )?;
            next = range.end;
            let count = range.end - range.start;
            if let Recompute::Layers(again) = *recompute {
                let expected =
                    format!("none, full, each-layer, or 1 to {count}, the number of the part's layers");
                ensure((1..=count).contains(&again), field("recompute"), again, expected)?;
            }
            if let Recompute::Within(_) = recompute {
                let expected =
                    "none, full, each-layer, or a number of layers, because the plan has several parts";
                ensure(last == 0, field("recompute"), recompute, expected)?;
            }
            if *recompute == Recompute::EachLayer {
                let expected = "none, full, or a number of layers, because slices of a sequence use each other's \
                                keys and values";
                ensure(self.pipeline.slices.len() < 2, field("recompute"), recompute, expected)?;
            }
            let room = count - recompute.of(count);
            let expected = format!("at most {room}, the number of the part's layers that are not recomputed");
            ensure(*offload <= room, field("offload"), offload, expected)?;
        }
        let expected = format!("the last part to end at {layers}, the number of the model's layers");
        ensure(next == layers, format!("part[{last}].layers"), format!("up to {next}"), expected)
    }

    fn check_schedule(&self) -> Result<(), ParallelError> {
        let slices = &self.pipeline.slices;
        if let ScheduleSource::Pools(pools) = &self.pipeline.schedule {
            self.check_pools(pools)?;
        }
        if let Some(i) = slices.iter().position(|&len| len == 0) {
            return Err(refuse(format!("pipeline.slices[{i}]"), 0, "at least 1 token"));
        }
        let counts: BTreeSet<u32> = self.microbatches.iter().copied().collect();
        if self.updates() != Updates::Flush {
            let expected = "the same number for each replica, because each update is averaged in a schedule \
                            without a flush";
            ensure(counts.len() == 1, "microbatches", format!("{:?}", self.microbatches), expected)?;
            if let Updates::TwoVersions { every } = self.updates() {
                let good = counts.iter().all(|count| count.is_multiple_of(every));
                let expected = format!(
                    "a multiple of {every}, the number of stages, because that many microbatches make one \
                     update"
                );
                ensure(good, "microbatches", format!("{:?}", self.microbatches), expected)?;
            }
            let level = self.outermost_checked()?;
            ensure(level.every == 1, "level.every", level.every, "1, because the schedule has no flush")?;
        }
        for count in counts {
            let order = self.order_with(count, &[StageCost::UNIT], Nanos::ZERO)?;
            let placement = order.placement();
            let (parts, depth) = (self.parts.len(), placement.depth() as usize);
            let expected = format!("{depth}, the number of stages of the schedule");
            ensure(parts == depth, "part", format!("given {parts} times"), expected)?;
            let (given, has) = (slices.len().max(1), usize::from(order.slices()));
            ensure(
                given == has,
                "pipeline.slices",
                format!("{given} slices"),
                format!("{has}, the number of slices of the schedule"),
            )?;
        }
        Ok(())
    }

    /// Checks that the pools fit the plan. Called before an order is made, so that the error names the field of
    /// the plan that does not fit.
    fn check_pools(&self, pools: &Pools) -> Result<(), ParallelError> {
        if let Some(PoolsFault { field, expected }) = pools.fault() {
            let value = if field == "sizes" { &pools.sizes } else { &pools.rates };
            return Err(refuse(format!("pools.{field}"), format!("{value:?}"), expected));
        }
        let expected = "data=1, because the ranks of a pool are its replicas";
        ensure(self.replicas() == 1, "mesh", &self.mesh, expected)?;
        let (sum, ranks) = (pools.ranks(), self.stages());
        let expected = format!("{ranks} ranks in all, the number of ranks of the mesh");
        ensure(sum == ranks, "pools.sizes", format!("{:?}", pools.sizes), expected)?;
        let expected = format!("{}, one for each pool", pools.stages());
        ensure(
            self.parts.len() == pools.sizes.len(),
            "part",
            format!("given {} times", self.parts.len()),
            expected,
        )?;
        let (count, fewest) = (self.microbatches[0], pools.fewest());
        let expected = format!("at least {fewest}, so that each rank of the largest pool has one");
        ensure(count >= fewest, "microbatches[0]", count, expected)?;
        let none = "no value, because the schedule has pools of ranks";
        ensure(self.pipeline.chunks.is_none(), "pipeline.chunks", "given", none)?;
        ensure(self.pipeline.slices.is_empty(), "pipeline.slices", "given", none)?;
        ensure(self.pipeline.memory != Some(0), "pipeline.memory", 0, "at least 1")
    }

    fn outermost_checked(&self) -> Result<&Level, ParallelError> {
        self.levels.last().ok_or_else(|| refuse("level", "given 0 times", "at least one level"))
    }

    fn check_levels(&self) -> Result<(), ParallelError> {
        self.outermost_checked()?;
        for (i, level) in self.levels.iter().enumerate() {
            let field = |name: &str| format!("level[{i}].{name}");
            ensure(level.every > 0, field("every"), level.every, "at least 1 step")?;
            ensure(
                level.bucket_bytes >= 4,
                field("bucket_bytes"),
                level.bucket_bytes,
                "at least 4, one value",
            )?;
            let replicas = self.replicas() as usize;
            let expected = format!("{replicas} numbers, one for each replica, or none");
            let (steps, every) = (&level.steps, level.every);
            let good = steps.is_empty() || steps.len() == replicas;
            ensure(good, field("steps"), format!("{} numbers", steps.len()), expected)?;
            let given = || format!("{steps:?}");
            ensure(
                steps.iter().all(|&steps| steps > 0),
                field("steps"),
                given(),
                "at least 1 for each replica",
            )?;
            let good = steps.iter().max().is_none_or(|most| most.is_multiple_of(every));
            let expected =
                format!("a multiple of {every}, the steps between two averages, for the fastest replica");
            ensure(good, field("steps"), given(), expected)?;
            ensure(!level.method.is_empty(), field("method"), "empty", "a method's name")?;
            ensure(!level.codec.is_empty(), field("codec"), "empty", "a codec's name, or none")?;
            let mut members: Vec<u32> = level.groups.iter().flatten().copied().collect();
            members.sort_unstable();
            let all: Vec<u32> = (0..self.replicas()).collect();
            let each = level.groups.iter().all(|group| !group.is_empty());
            let good = level.groups.is_empty() || each && members == all;
            ensure(
                good,
                field("groups"),
                format!("{:?}", level.groups),
                "groups that contain each replica exactly once",
            )?;
        }
        let last = self.levels.len() - 1;
        let outermost = &self.levels[last];
        let whole = outermost.groups.len() <= 1;
        let expected = "at most one group at the last level, which averages over all replicas";
        ensure(whole, format!("level[{last}].groups"), format!("{:?}", outermost.groups), expected)?;
        match last {
            0 => Ok(()),
            1 => self.check_two_levels(&self.levels[0], outermost),
            _ => Err(ParallelError::NotBuilt { what: format!("a plan with {} levels", self.levels.len()) }),
        }
    }

    /// Checks two levels. Together they are one hierarchical average, so the inner level must have the settings
    /// that a hierarchical average uses inside its groups.
    fn check_two_levels(&self, inner: &Level, outer: &Level) -> Result<(), ParallelError> {
        let field = |name: &str| format!("level[0].{name}");
        let expected = "at least two groups, the regions of level[1]";
        ensure(inner.groups.len() > 1, field("groups"), format!("{:?}", inner.groups), expected)?;
        let as_outer = |name: &str| format!("the `{name}` of level[1], because both levels form one average");
        ensure(inner.method == outer.method, field("method"), &inner.method, as_outer("method"))?;
        ensure(inner.every == outer.every, field("every"), inner.every, as_outer("every"))?;
        let steps = || format!("{:?}", inner.steps);
        ensure(inner.steps == outer.steps, field("steps"), steps(), as_outer("steps"))?;
        ensure(
            inner.bucket_bytes == outer.bucket_bytes,
            field("bucket_bytes"),
            inner.bucket_bytes,
            as_outer("bucket_bytes"),
        )?;
        ensure(inner.overlap == outer.overlap, field("overlap"), inner.overlap, as_outer("overlap"))?;
        let expected = format!("{NO_CODEC}, because values are sent without a codec inside a region");
        ensure(inner.codec == NO_CODEC, field("codec"), &inner.codec, expected)?;
        let inside = if outer.codec == NO_CODEC { Algorithm::Ring } else { Algorithm::Direct };
        ensure(
            inner.algorithm == inside,
            field("algorithm"),
            inner.algorithm,
            format!("{inside}, the algorithm inside regions"),
        )?;
        let expected = "hierarchical, because level[0] has regions";
        ensure(outer.algorithm == Algorithm::Hierarchical, "level[1].algorithm", outer.algorithm, expected)?;
        let copies =
            self.order_with(self.microbatches[0], &[StageCost::UNIT], Nanos::ZERO)?.placement().copies();
        let expected = "one level, because groups contain whole replicas and the schedule holds the model \
                        twice";
        ensure(copies == 1, "level", "given 2 times", expected)
    }

    /// Returns the order of one replica's work for this number of microbatches. `cost` is the cost of each
    /// stage and `hop` the time of a message between stages. Methods that ignore costs return the same order
    /// for any cost.
    ///
    /// Errors: those of [`Method::order`](crate::pipeline::Method::order), of [`Pools::order`] and of parsing a
    /// hand-written schedule; [`ParallelError::Plan`] for a hand-written schedule that does not fit the plan.
    pub fn order_with(
        &self,
        microbatches: u32,
        cost: &[StageCost],
        hop: Nanos,
    ) -> Result<ComputeOrder, ParallelError> {
        match &self.pipeline.schedule {
            ScheduleSource::Named(method) => {
                let order = method.order(&self.settings(microbatches, cost, hop))?;
                Ok(match self.updates() {
                    Updates::Stashed { .. } => order.with_updates(self.updates()),
                    _ => order,
                })
            }
            ScheduleSource::Text(text) => {
                let order: ComputeOrder = text.parse()?;
                self.check_own(&order, microbatches)?;
                Ok(order)
            }
            ScheduleSource::Pools(pools) => pools.order(microbatches, cost, hop, self.pipeline.memory),
        }
    }

    /// Returns the settings that are passed to a scheduling method.
    #[must_use]
    pub fn settings(&self, microbatches: u32, cost: &[StageCost], hop: Nanos) -> Settings {
        Settings {
            chunks: self.pipeline.chunks,
            slices: self.pipeline.slices.len().max(1) as u16,
            hop,
            cost: cost.to_vec(),
            memory: self.pipeline.memory,
            ..Settings::new(self.stages(), microbatches)
        }
    }

    /// Checks that a hand-written schedule fits the plan.
    fn check_own(&self, order: &ComputeOrder, microbatches: u32) -> Result<(), ParallelError> {
        let placement = order.placement();
        let field = "pipeline.schedule";
        let expected = format!("for {} ranks, the number of stages of the mesh", self.stages());
        ensure(
            placement.ranks() == self.stages(),
            field,
            format!("for {} ranks", placement.ranks()),
            expected,
        )?;
        let given = order.microbatches();
        let expected = format!("of {microbatches} microbatches, the number of each replica");
        ensure(given == microbatches, field, format!("of {given} microbatches"), expected)?;
        ensure(!order.is_forward_only(), field, "without backward passes", "a schedule that trains")?;
        let good = placement.copies() == 1 || placement.tie() != TiedWeights::Across;
        let expected = "copies of the model that begin and end on the same ranks, because they share a token \
                        table";
        ensure(good, field, "with copies of the model that begin or end on different ranks", expected)
    }
}
