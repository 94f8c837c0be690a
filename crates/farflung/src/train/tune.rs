//! The tuner: tries steps of a run with different bucket sizes and algorithms, and writes the fastest into the
//! plan.
//!
//! The trial steps are dropped: the run begins at its first step with the chosen plan, so that another run with
//! this plan repeats it to the bit. All ranks choose the same, by the slowest rank's time of each candidate on
//! the transport's clock, which is deterministic on simulated links.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use farflung_base::{Algorithm, Bytes, Nanos};
use farflung_comm::{Communicator, ReduceOp};
use farflung_parallel::{Level, Plan};

use super::bound_plan::BoundPlan;
use super::job::Job;
use super::trainer::Trainer;
use super::{averages, planned};
use crate::config::choice::Resume;
use crate::{Result, TrainConfig, run_dir};

/// A bucket size and an algorithm for a plan's outermost level.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Candidate {
    /// Algorithm of the averages.
    pub algorithm: Algorithm,
    /// Largest size of a bucket, in bytes of f32 values.
    pub bucket_bytes: u64,
}

impl fmt::Display for Candidate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, buckets of {}", self.algorithm, Bytes(self.bucket_bytes))
    }
}

/// A candidate and its measured step time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tried {
    /// The candidate.
    pub candidate: Candidate,
    /// Mean time of a step on the slowest rank.
    pub step: Nanos,
}

/// Result of tuning.
#[derive(Debug)]
pub struct Tuned {
    /// The job with the chosen plan.
    pub job: Job,
    /// The communicator of the job's ranks, with the plan's algorithm.
    pub comm: Communicator,
    /// All candidates, in the order of the trials; empty if the plan of the run's folder was used.
    pub tried: Vec<Tried>,
}

impl Tuned {
    /// Returns the chosen candidate.
    #[must_use]
    pub fn chosen(&self) -> Candidate {
        Candidate::of(self.job.plan.outermost())
    }

    /// Returns lines for a terminal: the choice, and the time of each candidate, the fastest first.
    #[must_use]
    pub fn lines(&self) -> Vec<String> {
        if self.tried.is_empty() {
            return vec![format!("tune: {}, from the plan in the run's folder", self.chosen())];
        }
        let mut tried = self.tried.clone();
        tried.sort_by_key(|tried| tried.step);
        let mut lines = vec![format!("tune: {} of {} candidates is fastest", self.chosen(), tried.len())];
        lines.extend(
            tried.iter().map(|Tried { candidate, step }| format!("tune: {candidate}: {step} per step")),
        );
        lines
    }
}

impl Candidate {
    fn of(level: &Level) -> Self {
        Self { algorithm: level.algorithm, bucket_bytes: level.bucket_bytes }
    }
}

/// Divisors of the size of the gradients. The quotients are tried as bucket sizes, besides the plan's own size.
const SHARES: [u64; 5] = [1, 2, 4, 8, 16];

impl TrainConfig {
    /// Sets the chosen values as if they had been given.
    fn take(&mut self, candidate: Candidate) {
        self.algorithm = candidate.algorithm;
        self.bucket_mb = candidate.bucket_bytes as f64 / 1e6;
        self.mark_given(&["algorithm", "bucket_mb"]);
    }
}

impl Job {
    /// Returns the job with another bucket size and algorithm; `None` if these do not support its codec.
    fn with_candidate(&self, candidate: Candidate) -> Option<Self> {
        let set = |plan: &mut Plan| {
            if let Some(level) = plan.levels.last_mut() {
                (level.algorithm, level.bucket_bytes) = (candidate.algorithm, candidate.bucket_bytes);
            }
        };
        let plan = self.plan.changed(set).ok()?;
        let mut job = Self { plan, ..self.clone() };
        Arc::make_mut(&mut job.given).take(candidate);
        Some(job)
    }

    /// Returns the algorithms to try: all for encoded values if there is a codec, else all for uncompressed
    /// values; hierarchical only if there may be regions. Of averages without one, the plan's own.
    fn algorithms(&self) -> Vec<Algorithm> {
        if self.plan.divides_state() {
            // Gradients go to their owners, whatever the algorithm.
            return vec![self.plan.outermost().algorithm];
        }
        let packed = self.plan.outermost().packs();
        let all = if packed { &Algorithm::CODED[..] } else { &Algorithm::ALL[..] };
        all.iter().copied().filter(|a| *a != Algorithm::Hierarchical || self.has_regions()).collect()
    }

    /// Returns whether some links may be slower than others, so that there are regions.
    fn has_regions(&self) -> bool {
        averages::regions(&self.plan).is_some() || self.cluster.is_some()
    }

    /// Returns the bucket sizes to try, the plan's own first.
    fn buckets(&self) -> Vec<u64> {
        let all = 4 * self.model.parameters();
        let mut sizes = vec![self.plan.outermost().bucket_bytes.min(all)];
        for share in SHARES {
            let size = all.div_ceil(share).max(4);
            if !sizes.contains(&size) {
                sizes.push(size);
            }
        }
        sizes
    }

    /// Returns every candidate: the grid of which [`tune`] searches a part.
    #[must_use]
    pub fn grid(&self) -> Vec<Candidate> {
        let buckets = self.buckets();
        let of = |algorithm| buckets.iter().map(move |&bucket_bytes| Candidate { algorithm, bucket_bytes });
        self.algorithms().into_iter().flat_map(of).collect()
    }
}

/// Measures steps of a candidate; all ranks must call it. `None` if the candidate does not support the job's
/// codec.
///
/// Errors: those of a step.
pub fn measure(
    job: &Job,
    comm: &Communicator,
    candidate: Candidate,
    (steps, threads): (u64, usize),
) -> Result<Option<Tried>> {
    let Some(mut trial) = job.with_candidate(candidate) else { return Ok(None) };
    // Warm-ups are switched off, since most steps of a run come after them.
    trial.config.codec_warmup = Some(0);
    trial.config.density_warmup = 0;
    (trial.fault, trial.failure) = (None, None);
    let comm = comm.clone().with_algorithm(trial.plain_algorithm());
    let mut trainer = Trainer::new(&trial, comm.clone(), threads)?;
    trainer.step(false)?;
    comm.barrier()?;
    let begun = comm.now();
    for _ in 0..steps {
        trainer.step(false)?;
    }
    let mut took = [comm.now().saturating_sub(begun).0 / steps.max(1)];
    comm.all_reduce(&mut took, ReduceOp::Max)?;
    Ok(Some(Tried { candidate, step: Nanos(took[0]) }))
}

/// Chooses a bucket size and an algorithm if `--tune` asks for it: first the algorithm with the plan's buckets,
/// then the buckets with that algorithm, then the algorithm again if the buckets changed. A resumed run uses
/// the plan of its folder instead. All ranks must call it.
///
/// Errors: those of a step; a plan in the run's folder that cannot be read.
pub fn tune(job: &Job, comm: &Communicator, threads: usize) -> Result<Option<Tuned>> {
    let steps = job.config.tune;
    if steps == 0 || comm.size() == 1 || !job.averages_each_step() {
        return Ok(None);
    }
    let mut search = Search { job, comm, steps, threads, tried: Vec::new() };
    let chosen = match kept_plan(job, comm)? {
        Some(plan) => Candidate::of(plan.outermost()),
        None => search.run()?,
    };
    let tuned = job.with_candidate(chosen).expect("the candidate was tried here or in an earlier run");
    let comm = comm.clone().with_algorithm(tuned.plain_algorithm());
    Ok(Some(Tuned { job: tuned, comm, tried: search.tried }))
}

/// Returns the plan with which a resumed run began, if all ranks have it and it belongs to this job.
fn kept_plan(job: &Job, comm: &Communicator) -> Result<Option<BoundPlan>> {
    let own = |out: &Path| super::checkpoint::folder(out, comm.rank());
    let folder = match &job.config.resume {
        Resume::No => None,
        Resume::Auto => job.out.as_deref().map(own),
        Resume::Path(run) if run_dir::list(run).is_ok_and(|steps| !steps.is_empty()) => Some(own(run)),
        Resume::Path(checkpoint) => checkpoint.parent().map(Path::to_path_buf),
    };
    let file = folder.map(|folder| folder.join("plan.toml")).filter(|file| file.is_file());
    let plan = file.map(|file| planned::read(&file)).transpose()?;
    let same = |plan: &BoundPlan| {
        let mut plan = Plan::from(plan);
        if let (Some(level), ours) = (plan.levels.last_mut(), job.plan.outermost()) {
            (level.algorithm, level.bucket_bytes) = (ours.algorithm, ours.bucket_bytes);
        }
        plan.digest() == job.plan.digest()
    };
    let plan = plan.filter(same);
    let told = comm.all_gather_bytes(plan.as_ref().map_or_else(Vec::new, |p| p.to_string().into_bytes()))?;
    let alike = told.windows(2).all(|pair| pair[0] == pair[1]);
    Ok(plan.filter(|_| alike))
}

/// State of the search.
struct Search<'a> {
    job: &'a Job,
    comm: &'a Communicator,
    steps: u64,
    threads: usize,
    tried: Vec<Tried>,
}

impl Search<'_> {
    fn run(&mut self) -> Result<Candidate> {
        let level = self.job.plan.outermost();
        let own = self.job.buckets()[0];
        let start = Candidate { algorithm: level.algorithm, bucket_bytes: own };
        self.best([start])?;
        let algorithms = self.job.algorithms();
        let of = |bucket_bytes| {
            algorithms.iter().map(move |&algorithm| Candidate { algorithm, bucket_bytes }).collect::<Vec<_>>()
        };
        let found = self.best(of(own))?;
        let buckets = self.job.buckets().into_iter();
        let found = self.best(buckets.map(|bucket_bytes| Candidate { bucket_bytes, ..found }))?;
        if found.bucket_bytes == own { Ok(found) } else { self.best(of(found.bucket_bytes)) }
    }

    /// Tries the candidates that were not tried yet, and returns the fastest of all so far. If several are
    /// equally fast, the first one is returned.
    fn best(&mut self, candidates: impl IntoIterator<Item = Candidate>) -> Result<Candidate> {
        for candidate in candidates {
            if self.tried.iter().all(|tried| tried.candidate != candidate) {
                self.tried.extend(measure(self.job, self.comm, candidate, (self.steps, self.threads))?);
            }
        }
        let fastest = self.tried.iter().min_by_key(|tried| tried.step);
        Ok(fastest.map_or_else(|| Candidate::of(self.job.plan.outermost()), |tried| tried.candidate))
    }
}
