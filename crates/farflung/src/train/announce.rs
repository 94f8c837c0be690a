//! What a run tells its user before the first step.

use std::path::Path;

use farflung_base::{Bytes, ContextCut};

use super::callbacks::RunObserver;
use super::checkpoint::Resumed;
use super::disk_state::DiskSizes;
use super::job::Job;
use super::planned;
use super::prediction::Prediction;
use super::trainer::Trainer;
use crate::config::notes::NoteContext;
use crate::config::zero::ZeroCodecs;
use crate::data_notes::{data_notes, one_document};
use crate::{Result, TrainConfig};

/// Returns a line with the predicted time of a pipeline, or of ranks that divide layers, shown before its first
/// step.
fn note(trainer: &Trainer, job: &Job) -> Result<Option<String>> {
    let plan = &job.plan;
    let (stages, tensor, context) = (plan.stages(), plan.tensor_ranks(), plan.context);
    if stages == 1 && tensor == 1 && !context.divides() {
        return Ok(None);
    }
    let schedule = trainer.schedule();
    let prediction = Prediction::of(job)?;
    let replicas = match plan.replicas() {
        1 => "1 replica".to_owned(),
        n => format!("{n} replicas"),
    };
    let each: Vec<String> = plan.microbatches.iter().map(ToString::to_string).collect();
    let alike = plan.microbatches.iter().all(|&m| m == plan.microbatches[0]);
    let pipeline = (stages > 1).then(|| format!("{} over {stages} stages", schedule.name));
    let divided = (tensor > 1).then(|| format!("each layer on {tensor} ranks"));
    let sequences = context.divides().then(|| sequences_on(context));
    let plan_text: Vec<String> = pipeline.into_iter().chain(divided).chain(sequences).collect();
    Ok(Some(format!(
        "{}, {} microbatches, {replicas}: a step takes {} sequences, {} tokens; predicted {} \
         per step, with {:.0}% {} in its pass",
        plan_text.join(", "),
        if alike { each[0].clone() } else { each.join(" + ") },
        plan.sequences(),
        job.tokens_per_step(),
        prediction.step(),
        prediction.bubble * 100.0,
        if tensor > 1 || context.divides() { "waiting" } else { "bubble" }
    )))
}

fn sequences_on(context: ContextCut) -> String {
    let ContextCut { ring, ulysses, order } = context;
    let by_heads = format!("positions for heads among {ulysses}");
    let how = match (ring, ulysses) {
        (1, _) => by_heads,
        (_, 1) => format!("a ring, {order}"),
        _ => format!("a ring of {ring}, {order}; {by_heads}"),
    };
    format!("each sequence on {} ranks ({how})", context.readers())
}

/// Returns a line with what replicas divide, and what a step sends for it.
fn zero_note(job: &Job, trainer: &Trainer) -> String {
    let plan = &job.plan;
    let replicas = u64::from(plan.replicas());
    let shares: Vec<String> = plan.shares_of_state().iter().map(ToString::to_string).collect();
    let by = if plan.zero_weights.is_empty() { String::new() } else { format!(" as {}", shares.join(":")) };
    // The last stage has a tied token table, too.
    let table = if plan.stages() > 1 { job.model.shared_table_bytes() } else { 0 };
    let sent = Bytes((replicas - 1) * (4 * job.model.parameters() + table));
    if plan.divides_gradients() {
        let times = plan.microbatches.first().copied().unwrap_or(1);
        let often = if times == 1 { "once a step".to_owned() } else { format!("{times} times a step") };
        if plan.divides_weights() {
            let gathered = Bytes(trainer.gathered_elements() * size_of::<f32>() as u64);
            let coded = match plan.zero_codecs() {
                codecs if codecs == ZeroCodecs::default() => String::new(),
                codecs => format!(", before their codecs {codecs}"),
            };
            let groups = match plan.zero_groups.len() {
                0 => String::new(),
                groups => format!(
                    "; between the {groups} groups of replicas, weights pass once an update, and gradients \
                     after they were added up in each"
                ),
            };
            return format!(
                "{replicas} replicas divide the optimizer's state, the gradients and the weights{by}: {often}, \
                 all ranks together send {sent} of gradients to those that update them, and this rank has \
                 {gathered} of weights in its layers, of which it keeps its share and gets the rest{coded}{groups}; at the end no text \
                 is generated"
            );
        }
        return format!(
            "{replicas} replicas divide the optimizer's state and the gradients{by}: {often}, after each \
             microbatch, all ranks together send {sent} of gradients to those that update them, and once as \
             much of weights back"
        );
    }
    format!(
        "{replicas} replicas divide the optimizer's state{by}: once a step, all ranks together send {sent} of \
         gradients to those that update them, and as much of weights back"
    )
}

/// Returns a line with what this rank's optimizer keeps on disk, and what a step reads and writes there; `None`
/// if that is nothing.
fn disk_note(trainer: &Trainer, folder: &Path) -> Option<String> {
    let DiskSizes { file, read, written } = trainer.disk_sizes()?;
    let how = if trainer.is_disk_direct() {
        ""
    } else {
        " through the page cache, since the file system refuses direct reads and writes"
    };
    let (path, steps) = (folder.display(), 100_000_000_000_000_u64.checked_div(written)?);
    Some(format!(
        "the optimizer's state is on disk: {} in {path}; each step reads {} and writes {} there{how}, so that \
         100 TB of the disk's endurance last {steps} steps",
        Bytes(file),
        Bytes(read),
        Bytes(written),
    ))
}

/// Shows the facts that are known before the first step.
pub(super) fn announce(
    job: &Job,
    trainer: &Trainer,
    simulated: bool,
    resumed: Option<&Resumed>,
    watch: &mut dyn RunObserver,
) -> Result<()> {
    let follows = job.elastic || job.given.plan.is_some();
    let mut config =
        if follows { planned::as_planned(&job.given, &job.plan) } else { TrainConfig::clone(&job.given) };
    if job.elastic {
        // The notes assume at least two workers, since other members may join.
        config.workers = job.world.max(2);
    }
    for line in data_notes(&job.reading, &job.training, &job.held_out) {
        watch.note(&line);
    }
    job.examples.iter().for_each(|examples| watch.note(&examples.counts().note()));
    if let Some(line) = one_document([&job.training, &job.held_out]).filter(|_| job.config.document_mask) {
        watch.note(&line);
    }
    let world = if job.elastic { config.workers } else { job.world };
    let elastic = job.elastic;
    for line in config.notes(&NoteContext { model: &job.model, world, simulated, elastic }) {
        watch.note(&line);
    }
    if resumed.is_none() {
        job.initial.iter().flat_map(|initial| &initial.notes).for_each(|note| watch.note(note));
    }
    if let Some(note) = note(trainer, job)? {
        watch.note(&note);
    }
    if job.plan.divides_state() {
        watch.note(&zero_note(job, trainer));
    }
    if let Some(folder) = trainer.state_folder(job)
        && let Some(line) = disk_note(trainer, &folder)
    {
        watch.note(&line);
    }
    watch.begin(trainer.steps_done(), job.config.steps);
    if trainer.steps_done() > 0 && resumed.is_some() {
        watch.note(&format!("resumed at step {}", trainer.steps_done()));
    }
    resumed.iter().flat_map(|resumed| &resumed.notes).for_each(|note| watch.note(note));
    Ok(())
}
