//! A checked plan with its names resolved: methods, codecs and codecs of boundaries as values. What executes,
//! measures or predicts a plan takes this type, so that names are parsed here and nowhere else.

use std::fmt;
use std::ops::Deref;

use farflung_base::Algorithm;
use farflung_compress::link::LinkSpec;
use farflung_compress::{AverageSpec, CodecSpec};
use farflung_optim::AverageConfig;
use farflung_optim::sync::{METHODS, SyncMethod};
use farflung_parallel::pipeline::Content;
use farflung_parallel::{BoundaryCodecs, Level, ParallelError, Plan};

use crate::config::nearest::with_nearest;
use crate::config::value::Setting as _;
use crate::config::zero::ZeroCodecs;
use crate::{Error, Result};

/// A plan whose fields and names were checked.
#[derive(Debug, Clone)]
pub struct BoundPlan {
    plan: Plan,
    levels: Vec<BoundLevel>,
    boundaries: Vec<BoundaryLinks>,
    expert_codec: LinkSpec,
    zero_codecs: ZeroCodecs,
}

/// A level of a plan: how replicas synchronise, with the method and the codec as values.
#[derive(Debug, Clone)]
pub struct BoundLevel {
    level: Level,
    /// The method.
    pub method: &'static SyncMethod,
    /// The codec of averaged values.
    pub codec: AverageSpec,
}

/// The codecs of one boundary of a pipeline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BoundaryLinks {
    /// Codec of hidden states, sent to the next part.
    pub forward: LinkSpec,
    /// Codec of gradients, sent back.
    pub backward: LinkSpec,
}

impl BoundPlan {
    /// Checks a plan's fields, resolves its names, and checks that periods and algorithms fit the methods and
    /// codecs.
    ///
    /// Errors: [`ParallelError::Plan`] with the field.
    pub fn new(plan: Plan) -> Result<Self> {
        plan.check()?;
        let levels: Vec<_> = plan
            .levels
            .iter()
            .enumerate()
            .map(|(i, level)| BoundLevel::of(i, level))
            .collect::<Result<_>>()?;
        levels.iter().enumerate().try_for_each(|(i, level)| level.check(i))?;
        check_alone(&plan, &levels)?;
        let boundaries = plan.boundaries.iter().enumerate();
        let bind = |(i, boundary): (usize, &BoundaryCodecs)| {
            let spec = |direction: &str, name: &str| {
                let field = || format!("boundary[{i}].{direction}");
                name.parse::<LinkSpec>().map_err(|_| wrong(field(), name, LinkSpec::wanted(name)))
            };
            let forward = spec("forward", &boundary.forward)?;
            Ok(BoundaryLinks { forward, backward: spec("backward", &boundary.backward)? })
        };
        let boundaries = boundaries.map(bind).collect::<Result<_>>()?;
        let name = &plan.expert_codec;
        let expert_codec = match name.parse::<LinkSpec>() {
            Ok(spec) if !spec.remembers() => spec,
            Ok(_) => {
                let expected = "a codec without memory, because no token comes again".to_owned();
                return Err(wrong("expert_codec".to_owned(), name, expected));
            }
            Err(_) => return Err(wrong("expert_codec".to_owned(), name, LinkSpec::wanted(name))),
        };
        let zero_codecs = plan
            .zero_codec
            .parse()
            .map_err(|_| wrong("zero_codec".to_owned(), &plan.zero_codec, ZeroCodecs::EXPECTED.to_owned()))?;
        Ok(Self { plan, levels, boundaries, expert_codec, zero_codecs })
    }

    /// Returns the plan with the change that `change` makes, checked and resolved again.
    ///
    /// Errors: as [`BoundPlan::new`].
    pub fn changed(&self, change: impl FnOnce(&mut Plan)) -> Result<Self> {
        let mut plan = self.plan.clone();
        change(&mut plan);
        Self::new(plan)
    }

    /// Returns how the replicas of the whole job synchronise, as [`Plan::outermost`] does.
    #[must_use]
    pub fn outermost(&self) -> &BoundLevel {
        self.levels.last().expect("a checked plan has a level")
    }

    /// Returns the levels of the plan, from the innermost groups to the whole job.
    #[must_use]
    pub fn bound_levels(&self) -> &[BoundLevel] {
        &self.levels
    }

    /// Returns the codecs of the boundaries, between each part and the next.
    #[must_use]
    pub fn links(&self) -> &[BoundaryLinks] {
        &self.boundaries
    }

    /// Returns the codecs of what replicas that divide weights send each other.
    #[must_use]
    pub const fn zero_codecs(&self) -> ZeroCodecs {
        self.zero_codecs
    }

    /// Returns the codec of the tokens that replicas send to each other's experts.
    #[must_use]
    pub const fn expert_codec(&self) -> LinkSpec {
        self.expert_codec
    }

    /// Returns whether replicas average gradients at each step, so that they always have the same parameters.
    #[must_use]
    pub fn averages_each_step(&self) -> bool {
        self.outermost().method.each_step
    }

    /// Returns the plan without the resolved names.
    pub fn into_plan(self) -> Plan {
        self.plan
    }
}

impl PartialEq for BoundPlan {
    fn eq(&self, other: &Self) -> bool {
        self.plan == other.plan
    }
}

impl From<&BoundPlan> for Plan {
    fn from(bound: &BoundPlan) -> Self {
        bound.plan.clone()
    }
}

impl fmt::Display for BoundPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.plan.fmt(f)
    }
}

impl Deref for BoundPlan {
    type Target = Plan;

    fn deref(&self) -> &Plan {
        &self.plan
    }
}

impl BoundLevel {
    /// Returns a level whose method and codec are known as values; `level` has their names.
    pub(super) const fn of_values(level: Level, method: &'static SyncMethod, codec: AverageSpec) -> Self {
        Self { level, method, codec }
    }

    /// Returns the codec's name as in the plan.
    #[must_use]
    pub fn codec_name(&self) -> &str {
        &self.level.codec
    }

    /// Returns the level without the resolved names.
    pub(super) fn into_level(self) -> Level {
        self.level
    }

    /// Resolves the names of level `i`.
    pub(super) fn of(i: usize, level: &Level) -> Result<Self> {
        let Some(method) = SyncMethod::by_name(&level.method) else {
            let names: Vec<_> = METHODS.iter().map(|m| m.name).collect();
            let expected = with_nearest(format!("one of {}", names.join(", ")), &level.method, &names);
            return Err(wrong(format!("level[{i}].method"), &level.method, expected));
        };
        let name = &level.codec;
        let codec =
            name.parse().map_err(|_| wrong(format!("level[{i}].codec"), name, AverageSpec::wanted(name)))?;
        Ok(Self { level: level.clone(), method, codec })
    }

    /// Checks that the periods and the algorithm fit the method and the codec.
    fn check(&self, i: usize) -> Result<()> {
        let refuse = |field: &str, value: String, expected: String| {
            Err(ParallelError::Plan { field: format!("level[{i}].{field}"), value, expected }.into())
        };
        let (method, every, steps) = (self.method, self.every, &self.steps);
        if method.each_step && every > 1 {
            return refuse("every", format!("{:?}", every.to_string()), format!("1 with {}", method.name));
        }
        // The replicas of a level reach its averages together.
        if !method.timed && steps.iter().max().is_some_and(|most| *most != every) {
            let name = method.name;
            let expected = format!("{every} for the fastest replica with {name}: all replicas meet then");
            return refuse("steps", format!("{steps:?}"), expected);
        }
        match self.refusal() {
            Some(expected) => refuse("algorithm", self.algorithm.to_string(), expected),
            None => Ok(()),
        }
    }

    /// Returns why the algorithm cannot average with the codec; `None` if it can.
    pub(super) fn refusal(&self) -> Option<String> {
        let (algorithm, codec) = (self.algorithm, self.codec);
        let known = algorithm == Algorithm::Auto || Algorithm::CODED.contains(&algorithm);
        if !self.packs() {
            return None;
        }
        if known && algorithm != Algorithm::Auto && !self.forms().contains(&algorithm) {
            let names: Vec<_> = self.forms().into_iter().map(Algorithm::name).collect();
            let why = "each rank accumulates the momentum of its own values before they are summed";
            return Some(format!("{} or auto with codec {codec}: {why}", names.join(", ")));
        }
        if known {
            return None;
        }
        let names = Algorithm::CODED.map(Algorithm::name).join(", ");
        Some(format!("one of {names}, auto with codec {codec}: no other algorithm sums encoded values"))
    }

    /// Returns whether values are sent as the codec's bytes. The exchanges of a protocol are summed
    /// uncompressed.
    pub(super) fn packs(&self) -> bool {
        self.packed().is_some()
    }

    /// Returns the codec as whose bytes values are sent.
    fn packed(&self) -> Option<CodecSpec> {
        self.codec.codec().filter(|_| !self.codec.is_plain())
    }

    /// Returns the algorithms with which the codec can average.
    pub(super) fn forms(&self) -> Vec<Algorithm> {
        let corrected = self.packed().is_some_and(|codec| codec.momentum().is_some());
        let alone = |form: &Algorithm| {
            matches!(form, Algorithm::Direct | Algorithm::Butterfly | Algorithm::AllGather)
        };
        Algorithm::CODED.into_iter().filter(|form| !corrected || alone(form)).collect()
    }

    /// Returns the algorithm for values that no codec encodes, such as votes: a ring in place of all-gather,
    /// and in place of direct if the level has a codec; else the level's own algorithm.
    pub(super) fn plain_algorithm(&self) -> Algorithm {
        match self.algorithm {
            Algorithm::AllGather => Algorithm::Ring,
            Algorithm::Direct if self.packs() => Algorithm::Ring,
            algorithm => algorithm,
        }
    }

    /// Returns the settings of the level's averages; the seed is left at its default.
    pub(super) fn averages(&self) -> AverageConfig {
        AverageConfig {
            codec: self.codec.into(),
            bucket_bytes: usize::try_from(self.bucket_bytes).unwrap_or(usize::MAX),
            overlap: self.overlap,
            algorithm: self.algorithm,
            ..AverageConfig::default()
        }
    }

    /// Returns the level with another algorithm.
    pub(super) fn with_algorithm(&self, algorithm: Algorithm) -> Self {
        Self { level: Level { algorithm, ..self.level.clone() }, ..self.clone() }
    }
}

impl Deref for BoundLevel {
    type Target = Level;

    fn deref(&self) -> &Level {
        &self.level
    }
}

impl BoundaryLinks {
    /// Returns the codec of a kind of message.
    #[must_use]
    pub const fn of(&self, content: Content) -> LinkSpec {
        match content {
            Content::Activation => self.forward,
            Content::Gradient => self.backward,
        }
    }
}

fn wrong(field: String, value: &str, expected: String) -> Error {
    ParallelError::Plan { field, value: format!("{value:?}"), expected }.into()
}

/// Checks that ranks that divide layers average what each of them has whole: a single replica never reaches the
/// averages of local steps.
fn check_alone(plan: &Plan, levels: &[BoundLevel]) -> Result<()> {
    let local = levels.iter().position(|level| !level.method.each_step);
    match local.filter(|_| plan.tensor_ranks() > 1 && plan.replicas() == 1) {
        Some(i) => {
            let expected = "a method that averages in each step, because a single replica divides layers: what \
                            each of its ranks has whole is averaged over them";
            Err(wrong(format!("level[{i}].method"), levels[i].method.name, expected.to_owned()))
        }
        None => Ok(()),
    }
}
