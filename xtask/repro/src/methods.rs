//! Checks every method and recipe: its special cases, each transport, resuming from a checkpoint, and the loss
//! of a member.

mod missing;
mod weighted;

use std::path::Path;

use anyhow::{Context, Result, ensure};
use farflung::TrainConfig;
use farflung::base::Link;
use farflung::config::recipe::{RECIPES, Recipe};
use farflung::optim::local::METHODS as OPTIMIZERS;
use farflung::optim::sync::{METHODS, SyncMethod};
use farflung::train::{Job, Trainer};

use crate::binary::farflung;
use crate::harness::{Bench, Options, Report, Threshold};
use crate::lab::resolved;
use crate::workers::{JobTransport, again, job, on_all, relative_l2};

pub(crate) const BENCH: Bench = Bench {
    name: "methods",
    claim: "each method of synchronisation and each recipe equals another one in a special case, weights \
            replicas by their tokens, gives the same bits over every transport and after it is resumed from \
            a checkpoint, and after the loss of a member equals the same method on the remaining members, or \
            is rejected where members join and leave",
    source: "ours",
    seed: 1337,
    run,
};

/// Flags shared by all runs, before a method's own.
const BASE: &str = "--layers 1 --heads 2 --dim 32 --context 32 --batch 2 --threads 1 --lr-schedule constant \
                    --min-lr 0 --warmup 0 --sample-tokens 0 --codec none";
const STEPS: u64 = 8;
/// Step of the checkpoint. Some methods have averages in flight then. Methods that synchronise every 3 steps
/// save at their next synchronisation.
const CHECKPOINT: u64 = 5;
/// Allowed relative distance between parameters that were computed in another order.
const ROUNDED: f64 = 1e-6;

/// Allowed relative distance between parameters over real links, where the order of arrival matters. A run has
/// only a few steps.
const NEAR: f64 = 0.05;

/// Flags of a method that equals another method in a special case.
struct Degenerate {
    flags: &'static str,
    other: &'static str,
    /// Largest allowed relative distance between the parameters of the two.
    within: f64,
}

const fn same(flags: &'static str, other: &'static str) -> Degenerate {
    Degenerate { flags, other, within: 0.0 }
}

const fn near(flags: &'static str, other: &'static str) -> Degenerate {
    Degenerate { flags, other, within: ROUNDED }
}

const DEGENERATE: &[Degenerate] = &[
    near(
        "--sync diloco --sync-every 1 --outer-lr 1 --outer-momentum 0 --optimizer sgd --momentum 0 --clip 0",
        "--sync ddp --optimizer sgd --momentum 0 --clip 0",
    ),
    same(
        "--sync streaming --fragments 1 --sync-delay 0 --mixing 0 --sync-every 3",
        "--sync diloco --sync-every 3",
    ),
    same("--sync diloco --sync-every 3 --local-steps 3,3,3,3", "--sync diloco --sync-every 3"),
    near(
        "--sync des-loc --sync-every 1 --first-moment-every 1 --optimizer sgd --clip 0 --lr 0.1",
        "--sync ddp --optimizer sgd --clip 0 --lr 0.1",
    ),
    // The run is too short for an average of the optimizer's moments.
    same(
        "--sync des-loc --sync-every 3 --first-moment-every 9 --second-moment-every 9",
        "--sync diloco --sync-every 3 --outer-lr 1 --outer-momentum 0",
    ),
    near("--sync parameter-server --workers 1", "--sync ddp --workers 1"),
    near("--sync bounded-stale --workers 1", "--sync ddp --workers 1"),
    near("--sync parameter-server --codec topk:1.0", "--sync parameter-server"),
    near(
        "--sync async --workers 1 --sync-every 3 --sync-delay 0 --outer-lr 1 --outer-momentum 0",
        "--sync ddp --workers 1",
    ),
    near(
        "--sync decoupled --quorum 1 --workers 1 --sync-every 3 --outer-lr 1 --outer-momentum 0",
        "--sync ddp --workers 1",
    ),
    near(
        "--sync halos --workers 1 --sync-every 3 --sync-delay 0 --outer-lr 1 --outer-momentum 0",
        "--sync ddp --workers 1",
    ),
    // With one region whose model ignores the world's model (`--world-mixing 1`), `halos` equals `async`.
    near(
        "--sync halos --sync-every 3 --world-every 1 --world-mixing 1 --topology unequal.toml",
        "--sync async --sync-every 3 --topology unequal.toml",
    ),
    near("--sync cocktail --workers 1", "--sync ddp --workers 1"),
    near("--sync async-average --sync-warmup 8", "--sync ddp"),
    near("--sync async-average --average-interval 0s", "--sync cocktail --codec none"),
    near(
        "--sync noloco --workers 2 --outer-lr 1 --outer-momentum 0 --sync-every 3",
        "--sync diloco --workers 2 --outer-lr 1 --outer-momentum 0 --sync-every 3",
    ),
    same("--sync shift-one --workers 2", "--sync d-psgd --workers 2"),
    same("--sync exponential --workers 2", "--sync d-psgd --workers 2"),
    near("--sync sgp", "--sync exponential"),
    near("--sync sgp --workers 1", "--sync ddp --workers 1"),
    same("--sync random-pairs --workers 2", "--sync d-psgd --workers 2"),
    near("--sync d-psgd --workers 1", "--sync ddp --workers 1"),
    near("--sync moniqua --moniqua-bits 24 --consensus-rate 1", "--sync d-psgd"),
    near("--sync low-precision --workers 1", "--sync ddp --workers 1"),
    near("--sync choco --consensus-rate 1", "--sync d-psgd"),
    near(
        "--optimizer qadam --codec minmax8 --codec-warmup 8 --weight-decay 0",
        "--optimizer adam --weight-decay 0",
    ),
    same("--recipe onebit-adam --codec-warmup 8", "--optimizer onebit-adam --codec none --codec-warmup 8"),
    same(
        "--optimizer zero-one-adam --codec sign --codec-warmup 8",
        "--optimizer onebit-adam --codec none --codec-warmup 8",
    ),
    near(
        "--optimizer zero-one-adam --codec none --codec-warmup 3 --sync-every 1 --weight-decay 0 --clip 0",
        "--optimizer onebit-adam --codec none --codec-warmup 3 --weight-decay 0 --clip 0",
    ),
    same(
        "--recipe sparseloco --codec none --sync-every 4",
        "--sync diloco --outer-lr 1 --outer-momentum 0 --sync-every 4",
    ),
    same("--recipe intellect-1 --codec none --sync-every 4", "--sync diloco --sync-every 4"),
    same("--recipe muloco --codec none --sync-every 4", "--optimizer muon --sync diloco --sync-every 4"),
    same("--recipe dgc --codec none", "--optimizer adamw --beta1 0"),
    same("--codec dgc:0.25 --density-warmup 4", "--codec dgc:0.25 --density-warmup 0"),
    same("--recipe demo --codec none", "--optimizer signum --momentum 0"),
    same("--recipe distro --codec none", "--optimizer signum --momentum 0"),
    same("--recipe bytegrad --codec none", "--sync ddp"),
    same("--codec none+ef --algorithm all-gather", "--codec none+ef --algorithm direct"),
    near("--codec topk:1.0", "--codec none"),
    near("--lookahead 2 --lookahead-alpha 1", "--lookahead 0"),
];

/// Returns whether the result of a method depends on when messages arrive.
fn timed(flags: &str) -> bool {
    METHODS.iter().any(|row| row.timed && flags.starts_with(&format!("--sync {} ", row.name)))
}

/// Microbatches of each replica in an uneven plan.
const UNEVEN: [u32; 4] = [1, 3, 2, 2];

/// Returns the flags of all runs: every method with its own codec, methods with servers once more in 8 bits,
/// every recipe, every optimizer that averages its own values, and two more.
fn all() -> Vec<String> {
    // A method that works with one optimizer only is listed with that optimizer below.
    let alone = |row: &&SyncMethod| OPTIMIZERS.iter().all(|own| own.averages.sync() != Some(row.name));
    let methods = METHODS.iter().filter(alone).map(|row| {
        let codec = row.codec.map_or(String::new(), |codec| format!(" --codec {codec}"));
        let every = if row.reads.contains(&"sync-every") { " --sync-every 3" } else { "" };
        let moments = " --first-moment-every 3 --second-moment-every 6";
        let moments = if row.reads.contains(&"first-moment-every") { moments } else { "" };
        // With these flags workers synchronise at the step of the checkpoint, and never finish a step at the
        // same time.
        let machines = if row.reads.contains(&"world-every") { REGIONS } else { UNEQUAL };
        let timed = format!(" --meet-every {CHECKPOINT} --topology {machines}");
        let timed = if row.timed { &timed } else { "" };
        let interval = if row.reads.contains(&"average-interval") { " --average-interval 300us" } else { "" };
        format!("--sync {}{every}{moments}{interval}{codec}{timed}", row.name)
    });
    // Methods with servers once more, with changes sent to the servers in 8 bits with feedback.
    let coded = METHODS.iter().filter(|row| row.codes_server_changes).map(|row| {
        let every = if row.reads.contains(&"sync-every") { " --sync-every 3" } else { "" };
        let machines = if row.reads.contains(&"world-every") { REGIONS } else { UNEQUAL };
        format!("--sync {}{every} --codec int8 --meet-every {CHECKPOINT} --topology {machines}", row.name)
    });
    // Replicas that train paths are not equal: the bench `dipaco` has them.
    let several = |row: &&Recipe| row.settings.iter().any(|(name, _)| *name == "paths");
    let recipes = RECIPES.iter().filter(|row| !several(row)).map(|row| {
        let local = row.settings.iter().any(|(name, _)| *name == "sync-every");
        format!("--recipe {}{}", row.name, if local { " --sync-every 3" } else { "" })
    });
    let optimizers = OPTIMIZERS.iter().filter_map(|row| {
        let codec = row.averages.codec()?;
        // 0/1 Adam: with these flags, some steps change the variance and others do not, and replicas
        // synchronise after some of the local steps only.
        let turns =
            row.averages.sync().map_or("", |_| " --variance-doubling 1 --local-doubling 1 --sync-every 2");
        Some(format!("--optimizer {} --codec {codec} --codec-warmup 3{turns}", row.name))
    });
    let paced = "--sync diloco --sync-every 3 --local-steps 3,3,2,1".to_owned();
    let falling = "--codec dgc:0.01 --density-warmup 6".to_owned();
    methods.chain(coded).chain(recipes).chain(optimizers).chain([paced, falling]).collect()
}

/// Values that all runs share, besides flags.
struct Shared<'a> {
    seed: u64,
    /// Folder for temporary files.
    folder: &'a Path,
}

impl Shared<'_> {
    /// Returns a run's settings: the flags, those of a recipe, and the base's flags that neither of them sets.
    fn config(&self, flags: &str) -> Result<TrainConfig> {
        let recipe = flags.contains("--recipe");
        let base = if recipe { BASE.replace(" --codec none", "") } else { BASE.to_owned() };
        let mut config =
            resolved(flags, &format!("--workers 4 --steps {STEPS} --seed {} {base}", self.seed))?;
        let own = |name: &&&str| config.topology.as_deref() == Some(Path::new(name));
        if let Some(name) = [UNEQUAL, REGIONS].iter().find(own) {
            config.topology = Some(self.folder.join(name));
        }
        Ok(config)
    }

    /// Writes the topology files [`UNEQUAL`] and [`REGIONS`].
    fn write_machines(&self) -> Result<()> {
        let machines = |region: &dyn Fn(usize) -> &'static str| -> String {
            let machine = |(i, speed): (usize, u64)| {
                let region = region(i);
                format!("[[device]]\nname = \"m{i}\"\nflops = \"{speed} GFLOPS\"\nmemory = \"8GB\"\n{region}")
            };
            [50, 37, 23, 11].into_iter().enumerate().map(machine).collect()
        };
        let unequal = format!("default = \"10gbit,1us\"\n{}", machines(&|_| ""));
        let near = |name| format!("[[region]]\nname = \"{name}\"\ninside = \"10gbit,1us\"\n");
        let region = |i| if i % 2 == 0 { "region = \"east\"\n" } else { "region = \"west\"\n" };
        let regions =
            format!("default = \"100mbit,20us\"\n{}{}{}", near("east"), near("west"), machines(&region));
        for (name, text) in [(UNEQUAL, unequal), (REGIONS, regions)] {
            std::fs::write(self.folder.join(name), text).context("failed to write a topology")?;
        }
        Ok(())
    }
}

/// A topology whose machines never finish a step at the same time.
const UNEQUAL: &str = "unequal.toml";

/// The same machines in two distant regions.
const REGIONS: &str = "regions.toml";

/// Returns the parameters of each rank after the last step.
fn ends(job: &Job) -> Result<Vec<Vec<f32>>> {
    on_all(job, |rank: &mut Trainer| {
        for _ in 0..job.config.steps {
            rank.step(false)?;
        }
        let params = rank.params().to_vec::<f32>()?;
        rank.comm().barrier()?;
        Ok(params)
    })
}

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let folder = tempfile::tempdir().context("failed to make a temporary folder")?;
    let shared = Shared { seed: report.seed(), folder: folder.path() };
    shared.write_machines()?;
    let base = job(shared.config("")?, JobTransport::Memory)?;
    let trained = |flags: &str, over| -> Result<Vec<Vec<f32>>> {
        let ends = ends(&again(&base, shared.config(flags)?, over))?;
        ensure!(
            ends.windows(2).all(|pair| pair[0] == pair[1]),
            "{flags}: replicas differ after the last step"
        );
        Ok(ends)
    };
    for Degenerate { flags, other, within } in DEGENERATE {
        // Arrival times are reproducible only on the virtual clock.
        let over = if timed(flags) { JobTransport::Simulated(Link::FREE) } else { JobTransport::Memory };
        let off = relative_l2(&trained(flags, over)?[0], &trained(other, over)?[0]);
        let metric = format!("{flags}: parameters after {STEPS} steps compared with {other}");
        report.row(&metric, off, "", Threshold::AtMost(*within))?;
    }
    weighted::rows(report, &base, &shared)?;
    missing::rows(report, &base, &shared)?;
    let transports = [("simulated", JobTransport::Simulated(Link::FREE)), ("tcp", JobTransport::Tcp)];
    for (i, flags) in all().iter().enumerate() {
        if timed(flags) {
            // Bits are reproducible only on the virtual clock.
            let over = JobTransport::Simulated(Link::FREE);
            let (first, again) = (trained(flags, over)?, trained(flags, over)?);
            let bits = first[0].iter().zip(&again[0]).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
            let metric =
                format!("{flags}: parameters whose bits differ in a second run on the virtual clock");
            report.row(&metric, bits as f64, "", Threshold::AtMost(0.0))?;
            let far = relative_l2(&trained(flags, JobTransport::Tcp)?[0], &first[0]);
            report.row(
                &format!("{flags}: distance of parameters over tcp"),
                far,
                "",
                Threshold::AtMost(NEAR),
            )?;
            continue;
        }
        let memory = trained(flags, JobTransport::Memory)?;
        ensure!(memory[0].iter().all(|value| value.is_finite()), "{flags}: a parameter is not finite");
        // Quick runs test each method on one of the transports in turn.
        let over = if options.quick { &transports[i % transports.len()..][..1] } else { &transports[..] };
        for (name, over) in over {
            let there = trained(flags, *over)?;
            let bits = memory[0].iter().zip(&there[0]).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
            let metric = format!("{flags}: parameters whose bits differ over {name}");
            report.row(&metric, bits as f64, "", Threshold::AtMost(0.0))?;
        }
    }
    let flags = all();
    let flags = flags.iter().enumerate().filter(|(i, _)| !options.quick || i % 4 == 1);
    for (i, flags) in flags {
        let differing = goes_on(flags, &shared, &folder.path().join(i.to_string()))?;
        let metric = format!("{flags}: files that differ in a run that is resumed from a checkpoint");
        report.row(&metric, differing as f64, "files", Threshold::AtMost(0.0))?;
    }
    Ok(())
}

/// Trains to the end, and once more from an earlier checkpoint. Returns how many files of the last checkpoints
/// differ.
fn goes_on(flags: &str, shared: &Shared<'_>, folder: &Path) -> Result<usize> {
    std::fs::create_dir_all(folder).context("failed to make a folder")?;
    let config = TrainConfig {
        checkpoint_every: CHECKPOINT,
        keep_last: 0,
        eval_batches: 1,
        quiet: true,
        ..shared.config(flags)?
    };
    let settings = folder.join("run.toml");
    std::fs::write(&settings, config.to_toml()).context("failed to write settings")?;
    let path = |path: &Path| path.to_str().map(str::to_owned).context("the folder's path is not UTF-8");
    let (whole, rest) = (folder.join("whole"), folder.join("rest"));
    let train = |out: &Path, more: &[&str]| -> Result<()> {
        let (settings, out) = (path(&settings)?, path(out)?);
        let args = [&["train", "--config", &settings, "--out", &out][..], more].concat();
        let output = farflung(&args)?.stderr(std::process::Stdio::piped()).output();
        let output = output.context("failed to start `farflung`")?;
        ensure!(output.status.success(), "{flags}: {}", String::from_utf8_lossy(&output.stderr));
        Ok(())
    };
    train(&whole, &[])?;
    let saved =
        (CHECKPOINT..STEPS).map(|step| whole.join(format!("step-{step:08}"))).find(|path| path.is_dir());
    let checkpoint = path(&saved.with_context(|| format!("{flags}: no checkpoint before the last"))?)?;
    train(&rest, &["--resume", &checkpoint])?;
    let mut differing = 0;
    for rank in 0..config.workers {
        let of =
            |run: &Path| if rank == 0 { run.to_owned() } else { run.join(format!("ranks/rank-{rank:05}")) };
        for name in ["model.safetensors", "optimizer.safetensors"] {
            let read = |run: &Path| {
                let file = of(run).join(format!("step-{STEPS:08}")).join(name);
                std::fs::read(&file).with_context(|| format!("failed to read {}", file.display()))
            };
            differing += usize::from(read(&whole)? != read(&rest)?);
        }
    }
    Ok(differing)
}
