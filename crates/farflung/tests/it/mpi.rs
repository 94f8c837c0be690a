//! `--transport mpi`: a run under the real `mpirun`, or, in a build without MPI, the advice of the error.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use crate::tiny::{Run, farflung};

/// Returns the stderr of a run that must end with exit code 2.
fn refused(args: Vec<String>, launched: bool) -> String {
    let mut train = farflung();
    train.args(args);
    if launched {
        train.envs([("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1")]);
    }
    let done = train.output().unwrap();
    let said = String::from_utf8_lossy(&done.stderr).into_owned();
    assert_eq!(done.status.code(), Some(2), "{said}");
    said
}

#[test]
fn members_cannot_come_and_leave_over_mpi() {
    let run = Run::new();
    let flags = run.flags("--steps 1 --transport mpi");
    let said = refused([&["host".to_owned()], &flags[..]].concat(), false);
    assert!(said.contains("MPI ends all processes of a job when one of them is lost"), "{said}");
    assert!(said.contains("use --transport tcp"), "{said}");
}

#[test]
#[cfg(not(feature = "mpi"))]
fn a_program_without_mpi_says_what_to_do() {
    let run = Run::new();
    for transport in ["mpi", "mpi-native"] {
        let said = refused(run.args(&format!("--steps 1 --sync ddp --transport {transport}")), true);
        assert!(said.contains("built without MPI") && said.contains("cargo xtask setup mpi"), "{said}");
    }
}

#[cfg(feature = "mpi")]
mod with_mpi {
    use std::path::PathBuf;
    use std::process::{Child, Command, Stdio};
    use std::time::Duration;

    use crate::tiny::{Run, farflung};

    /// A job of ranks under `mpirun`.
    struct Job<'a> {
        run: &'a Run,
        out: PathBuf,
        mpirun: Command,
    }

    impl<'a> Job<'a> {
        fn new(run: &'a Run, name: &str) -> Self {
            let mut mpirun = Command::new("mpirun");
            mpirun.args(["--allow-run-as-root", "--oversubscribe"]).stdin(Stdio::null());
            Self { run, out: run.at(name), mpirun }
        }

        /// Adds ranks with these arguments. Each writes its process id to a file.
        fn ranks(mut self, ranks: u32, args: &str) -> Self {
            let pid = self.out.with_extension("pid").display().to_string();
            let script = format!("echo $$ > {pid}-$OMPI_COMM_WORLD_RANK; exec \"$0\" \"$@\"");
            self.mpirun.args(["-n", &ranks.to_string(), "sh", "-c", &script]).arg(farflung().get_program());
            self.mpirun.args(self.run.args(&format!("{args} --out {}", self.out.display())));
            self
        }

        /// Separates groups of ranks with different arguments.
        fn and(mut self) -> Self {
            self.mpirun.arg(":");
            self
        }

        /// Waits for the end; returns the exit code and the stderr of all ranks.
        fn end(mut self) -> (Option<i32>, String) {
            let done = self.mpirun.output().unwrap();
            (done.status.code(), String::from_utf8_lossy(&done.stderr).into_owned())
        }

        /// Sends a signal to a rank after some steps; returns the exit code and the stderr of all ranks.
        fn signalled(mut self, signal: &str, rank: u32) -> (Option<i32>, String) {
            let mpirun = self.mpirun.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
            self.wait_for_steps();
            let pid = format!("{}-{rank}", self.out.with_extension("pid").display());
            let pid = std::fs::read_to_string(pid).unwrap();
            assert!(Command::new("kill").args([signal, pid.trim()]).status().unwrap().success());
            ended(mpirun)
        }

        fn wait_for_steps(&self) {
            let rows = || std::fs::read_to_string(self.out.join("metrics.jsonl")).unwrap_or_default();
            let came = (0..600).any(|_| {
                std::thread::sleep(Duration::from_millis(50));
                rows().lines().count() >= 3
            });
            assert!(came, "no steps in 30 s");
        }
    }

    fn ended(mpirun: Child) -> (Option<i32>, String) {
        let done = mpirun.wait_with_output().unwrap();
        (done.status.code(), String::from_utf8_lossy(&done.stderr).into_owned())
    }

    const ENDLESS: &str = "--steps 1000000 --sync ddp --workers 3 --transport mpi";

    /// Returns the training losses of three ranks, and the bytes of their weights.
    fn trained(run: &Run, transport: &str, more: &str) -> (Vec<String>, Vec<u8>) {
        let args = format!("--steps 5 --sync ddp --workers 3 --transport {transport} {more}");
        let mut job = Job::new(run, transport).ranks(3, &args);
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        job.mpirun.env("MASTER_PORT", port.to_string());
        let out = job.out.clone();
        let (code, said) = job.end();
        assert_eq!(code, Some(0), "{transport}: {said}");
        let rows = std::fs::read_to_string(out.join("metrics.jsonl")).unwrap();
        let loss =
            |line: &str| line.split_once("\"train_loss\":").unwrap().1.split(',').next().unwrap().to_owned();
        let weights = std::fs::read(out.join("step-00000005/model.safetensors")).unwrap();
        (rows.lines().map(loss).collect(), weights)
    }

    #[test]
    fn a_run_over_mpi_has_the_bits_of_one_over_sockets() {
        // Buckets of one frame each, and a model of many frames.
        for more in ["", "--dim 128"] {
            let run = Run::new();
            let sockets = trained(&run, "tcp", more);
            assert_eq!(sockets.0.len(), 5);
            assert!(trained(&run, "mpi", more) == sockets, "{more}");
        }
    }

    #[test]
    fn a_run_with_mpi_s_own_collectives_has_the_losses_of_ours_up_to_rounding() {
        let run = Run::new();
        let ours = trained(&run, "mpi", "").0;
        let native = trained(&run, "mpi-native", "").0;
        assert_eq!((ours.len(), native.len()), (5, 5));
        for (ours, native) in ours.iter().zip(&native) {
            let [ours, native]: [f64; 2] = [ours, native].map(|loss| loss.parse().unwrap());
            assert!((ours - native).abs() <= 1e-4 * ours, "{ours} and {native}");
        }
    }

    #[test]
    fn the_line_of_the_page_on_clusters_trains() {
        let page = include_str!("../../docs/clusters.md");
        let line = page
            .lines()
            .find(|line| line.starts_with("mpirun -n 4 farflung train --transport mpi "))
            .unwrap();
        let run = Run::new();
        // The page's flags are kept; the test adds a small model and its own text.
        std::fs::create_dir(run.at("bin")).unwrap();
        let more: Vec<String> = run.flags("").into_iter().map(|arg| format!("'{arg}'")).collect();
        let ours =
            format!("#!/bin/sh\nexec '{}' \"$@\" {}\n", farflung().get_program().display(), more.join(" "));
        std::fs::write(run.at("bin/farflung"), ours).unwrap();
        let script = format!(
            "cd '{}' && chmod +x bin/farflung && PATH=$PWD/bin:$PATH && {line}",
            run.at("").display()
        );
        let mut shell = Command::new("bash");
        shell.args(["-c", &script]).stdin(Stdio::null());
        let allowed =
            ["OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "OMPI_MCA_rmaps_base_oversubscribe"];
        let done = shell.envs(allowed.map(|name| (name, "1"))).output().unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        let metrics = std::fs::read_to_string(run.at("run/metrics.jsonl")).unwrap();
        assert_eq!(metrics.lines().count(), 200);
    }

    #[test]
    fn a_secret_that_would_protect_nothing_is_refused() {
        let run = Run::new();
        let mut job = Job::new(&run, "secret").ranks(2, "--steps 1 --sync ddp --transport mpi");
        job.mpirun
            .envs([("FARFLUNG_SECRET", "abcdefghijklmnopqrstuvwxyz")])
            .env("FARFLUNG_HOME", run.at("home"));
        let (code, said) = job.end();
        assert_eq!(code, Some(2), "{said}");
        assert!(said.contains("MPI's messages are not encrypted"), "{said}");
    }

    #[test]
    fn ranks_that_mpirun_has_not_started_are_told_so() {
        let run = Run::new();
        let said = super::refused(run.args("--steps 1 --sync ddp --transport mpi"), true);
        assert!(said.contains("mpirun has not started this process"), "{said}");
        assert!(said.contains("mpirun -n 2 farflung train --transport mpi"), "{said}");
        let alone = super::refused(run.args("--steps 1 --sync ddp --workers 1 --transport mpi"), false);
        assert!(alone.contains("mpirun -n 1 farflung train"), "{alone}");
    }

    #[test]
    fn a_rank_that_is_another_to_mpi_is_told_so() {
        let run = Run::new();
        let mut job = Job::new(&run, "other").ranks(2, "--steps 1 --sync ddp --transport mpi");
        job.mpirun.envs([("RANK", "0"), ("WORLD_SIZE", "2")]);
        let (code, said) = job.end();
        assert_eq!(code, Some(1), "{said}");
        assert!(said.contains("it gave this process rank 1 of 2, expected rank 0 of 2"), "{said}");
    }

    #[test]
    fn settings_that_differ_end_the_job_with_the_reason() {
        let run = Run::new();
        let job = Job::new(&run, "differs").ranks(1, ENDLESS).and().ranks(2, &format!("{ENDLESS} --seed 9"));
        let (code, said) = job.end();
        assert_eq!(code, Some(2), "{said}");
        assert!(said.contains("the setting `seed` is 1337 on rank 0 and 9 on ranks 1, 2"), "{said}");
    }

    #[test]
    fn a_killed_rank_ends_the_job() {
        let run = Run::new();
        let (code, said) = Job::new(&run, "killed").ranks(3, ENDLESS).signalled("-KILL", 1);
        assert_eq!(code, Some(137), "{said}");
        assert!(said.contains("rank 1") && said.contains("signal 9"), "{said}");
    }

    #[test]
    fn a_rank_that_is_silent_beyond_the_deadline_is_named_and_the_job_ends() {
        let run = Run::new();
        let job = Job::new(&run, "silent").ranks(3, &format!("{ENDLESS} --deadline 1s"));
        let (code, said) = job.signalled("-STOP", 1);
        assert_eq!(code, Some(75), "{said}");
        assert!(said.contains("peer 1 was lost") && said.contains("MPI_ABORT was invoked"), "{said}");
    }

    #[test]
    fn a_run_that_is_stopped_is_saved_on_all_ranks() {
        let run = Run::new();
        let (code, said) = Job::new(&run, "stopped").ranks(3, ENDLESS).signalled("-TERM", 1);
        assert!(code.is_some_and(|code| [75, 143].contains(&code)), "{code:?}: {said}");
        assert!(said.contains("is saved in"), "{said}");
    }
}
