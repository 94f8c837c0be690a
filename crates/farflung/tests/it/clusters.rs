//! Runs the commands and scripts of `docs/clusters.md`, with shell functions in place of the engines, which set
//! the same variables as the real ones; `cargo xtask bench engines` runs the real ones. The page's manifest is
//! parsed.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::net::TcpListener;
use std::process::{Command, Output};

use crate::tiny::{Run, farflung};
use farflung::launch_env;

/// Returns the code blocks of a language, in the page's order.
fn blocks(language: &str) -> Vec<String> {
    let page = include_str!("../../docs/clusters.md");
    let begin = format!("```{language}\n");
    let after = page.split(begin.as_str()).skip(1);
    after.map(|rest| rest.split("```").next().unwrap().to_owned()).collect()
}

/// Runs a script of the page in a shell in which `farflung` trains a tiny model, after defining `functions`.
fn shell(run: &Run, script: &str, functions: &str) -> Output {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    // The page's flags are kept; the test adds a small model and its own text.
    let more: Vec<String> =
        run.args("--deadline 30s").into_iter().skip(1).map(|arg| format!("'{arg}'")).collect();
    let ours =
        format!("farflung() {{ '{}' \"$@\" {}; }}", farflung().get_program().display(), more.join(" "));
    let text = format!("set -e\ncd '{}'\n{ours}\n{functions}\n{script}", run.at("").display());
    let mut shell = Command::new("bash");
    shell.args(["-c", &text]).env("HOME", run.at("")).env("MASTER_PORT", port.to_string());
    shell.env("FARFLUNG_HOME", run.at("home")).output().unwrap()
}

/// Returns a shell function that skips its first arguments, starts the rest as two ranks with an engine's
/// variables, and fails if one of them fails.
fn engine(name: &str, skipped: usize, variables: &str) -> String {
    format!(
        "{name}() {{ shift {skipped}; (rank=0; {variables} \"$@\") & first=$!; (rank=1; {variables} \"$@\") & \
         wait $first; wait $!; }}"
    )
}

fn trained(run: &Run, output: &Output, source: &str) {
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    let metrics = std::fs::read_to_string(run.at("run").join("metrics.jsonl")).unwrap();
    assert_eq!(metrics.lines().count(), 200, "{source}");
}

#[test]
fn the_line_for_mpirun_trains() {
    let run = Run::new();
    // The line with `--transport mpi` is run by the tests of MPI.
    let [_, line, _] = &blocks("sh")[..] else { panic!("the page has another number of lines for a shell") };
    assert!(line.starts_with("mpirun -n 2 "), "{line}");
    let mpirun = engine(
        "mpirun",
        2,
        "OMPI_COMM_WORLD_RANK=$rank OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=$rank PMIX_RANK=$rank",
    );
    trained(&run, &shell(&run, line, &mpirun), "mpirun");
}

#[test]
fn the_script_for_slurm_trains_with_a_secret_that_it_takes_away_again() {
    let run = Run::new();
    let [script] = &blocks("bash")[..] else { panic!("the page has another number of scripts") };
    assert!(script.contains("#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n"), "{script}");
    let srun = engine(
        "srun",
        0,
        "SLURM_PROCID=$rank SLURM_NTASKS=2 SLURM_STEP_ID=0 SLURM_LOCALID=0 SLURM_JOB_NODELIST=localhost",
    );
    let seen = "head() { command head \"$@\"; }; trap() { test \"$(stat -c %a \"$FARFLUNG_SECRET_FILE\")\" = 600; \
                builtin trap \"$@\"; }";
    let output = shell(&run, script, &format!("export SLURM_JOB_ID=7\n{srun}\n{seen}"));
    trained(&run, &output, "slurm");
    assert!(!run.at(".farflung-7").exists());
}

#[test]
fn the_line_for_ssh_starts_what_the_file_says() {
    let run = Run::new();
    let (lines, texts) = (blocks("sh"), blocks("text"));
    std::fs::write(run.at("hosts.txt"), &texts[0]).unwrap();
    // ssh is called by its path, so a shell function cannot replace it.
    std::fs::create_dir(run.at("bin")).unwrap();
    let ssh = run.at("bin/ssh");
    std::fs::write(&ssh, "#!/bin/sh\necho \"$@\" >> calls\nhead -n 1 > /dev/null\n").unwrap();
    std::fs::set_permissions(&ssh, std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
    let output = shell(&run, &lines[0], "PATH=$PWD/bin:$PATH");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let calls = std::fs::read_to_string(run.at("calls")).unwrap();
    assert!(calls.contains("-- node1 ") && calls.contains("-- me@node2 "), "{calls}");
}

/// Returns all values after `key:` in the manifest.
fn values<'a>(manifest: &'a str, key: &str) -> Vec<&'a str> {
    let key = format!("{key}:");
    let value = |line: &'a str| {
        Some(line.trim().trim_start_matches("- ").strip_prefix(&key)?.trim().trim_matches('"'))
    };
    manifest.lines().filter_map(value).collect()
}

#[test]
fn the_manifest_for_kubernetes_gives_each_rank_its_place_and_its_command_trains() {
    let run = Run::new();
    let [manifest] = &blocks("yaml")[..] else { panic!("the page has another number of manifests") };
    let one = |key| match values(manifest, key)[..] {
        [value] => value,
        ref other => panic!("{key}: {other:?}"),
    };
    let names = values(manifest, "name");
    let (service, job) = (names[0], names[1]);
    assert_eq!((one("subdomain"), one("job-name"), one("completionMode")), (service, job, "Indexed"));
    let [size, master] = values(manifest, "value")[..] else { panic!("two variables have values") };
    assert_eq!((one("completions"), one("parallelism")), (size, size));
    assert_eq!(master, format!("{job}-0.{service}"));
    assert!(
        names.contains(&"WORLD_SIZE") && names.contains(&"MASTER_ADDR") && names.contains(&"FARFLUNG_SECRET")
    );
    let variable = |index: &str, name: &str| match name {
        "JOB_COMPLETION_INDEX" => Some(index.to_owned()),
        "WORLD_SIZE" => Some(size.to_owned()),
        "MASTER_ADDR" => Some(master.to_owned()),
        _ => None,
    };
    let place = launch_env::detect(|name| variable("1", name)).unwrap().unwrap().to_string();
    assert_eq!(place, "rank 1 of 2 (local 0), master farflung-0.farflung:29500, from Kubernetes");

    let command: Vec<String> = serde_json::from_str(one("command")).unwrap();
    let command = command.join(" ").replace("/runs/one", "run");
    let pods = engine(
        "pods",
        0,
        "FARFLUNG_SECRET=abcdefghijklmnopqrstuvwxyz JOB_COMPLETION_INDEX=$rank WORLD_SIZE=2 MASTER_ADDR=127.0.0.1",
    );
    trained(&run, &shell(&run, &format!("pods {command}"), &pods), "kubernetes");
}
