//! Slurm's variables: its lists of hosts, and whether `srun` started this process.
//!
//! `sbatch` and `salloc` set `SLURM_PROCID=0` and `SLURM_NTASKS` in a script or shell, too, although only one
//! process runs there. Only a step of `srun` has one process per task.

/// Step ids from here on are those of scripts, of shells and of Slurm's own processes; the numbers of Slurm's
/// source are 2^32 minus a small number.
const FIRST_SPECIAL_STEP: i64 = 0xFFFF_FF00;

/// The variables of a step.
const OF_STEP: [&str; 4] =
    ["SLURM_STEP_NODELIST", "SLURM_SRUN_COMM_HOST", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES"];

/// Returns whether `srun` started this process as a task of a step.
pub(super) fn is_step(env: &impl Fn(&str) -> Option<String>) -> bool {
    let id = env("SLURM_STEP_ID").or_else(|| env("SLURM_STEPID"));
    match id.map(|id| id.trim().parse::<i64>()) {
        Some(Ok(id)) => (0..FIRST_SPECIAL_STEP).contains(&id),
        _ => OF_STEP.iter().any(|name| env(name).is_some()),
    }
}

/// Returns a note for the user if Slurm's variables name ranks, but `srun` did not start this process: it is
/// then no rank of a job.
pub(super) fn note_without_srun(env: &impl Fn(&str) -> Option<String>) -> Option<String> {
    env("SLURM_PROCID").filter(|_| !is_step(env))?;
    let tasks = env("SLURM_NTASKS").map_or_else(String::new, |tasks| format!(" (SLURM_NTASKS is {tasks})"));
    Some(format!(
        "SLURM_PROCID is set, but `srun` did not start this process, so that it trains alone; to start a rank \
         per task{tasks}, put `srun` before the command"
    ))
}

/// Returns the first host of a Slurm node list: `n01` for `n[01-03,05],m7`, `a1b3` for `a[1,2]b[3-4]`.
pub(super) fn first_host(list: &str) -> Option<String> {
    let mut host = String::new();
    let mut rest = list.trim();
    loop {
        let stop = rest.find(['[', ',']).unwrap_or(rest.len());
        host += &rest[..stop];
        if !rest[stop..].starts_with('[') {
            break;
        }
        let end = stop + rest[stop..].find(']')?;
        host += rest[stop + 1..end].split([',', '-']).next()?;
        rest = &rest[end + 1..];
    }
    (!host.is_empty()).then_some(host)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(vars: &[(&str, &str)]) -> (bool, bool) {
        let env = |name: &str| vars.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned());
        (is_step(&env), note_without_srun(&env).is_some())
    }

    #[test]
    fn only_what_srun_started_is_a_task() {
        let batch = [("SLURM_PROCID", "0"), ("SLURM_NTASKS", "4"), ("SLURM_JOB_ID", "7")];
        assert_eq!(step(&batch), (false, true));
        // Without --ntasks, sbatch sets no number of tasks.
        assert_eq!(step(&batch[..1]), (false, true));
        for special in ["4294967291", "4294967290", "-5", "-6"] {
            let shell = [&batch[..], &[("SLURM_STEP_ID", special), ("SLURM_STEP_NUM_TASKS", "1")]].concat();
            assert_eq!(step(&shell), (false, true), "{special}");
        }
        for task in [("SLURM_STEP_ID", "0"), ("SLURM_STEPID", "12"), ("SLURM_SRUN_COMM_HOST", "10.0.0.1")] {
            assert_eq!(step(&[&batch[..], &[task]].concat()), (true, false), "{task:?}");
        }
        assert_eq!(step(&[("HOME", "/")]), (false, false));
    }

    #[test]
    fn slurm_lists_give_their_first_host() {
        for (list, host) in [
            ("n1", "n1"),
            ("n1,n2", "n1"),
            ("n[01-03,05]", "n01"),
            ("a[1,2]b[3-4],c", "a1b3"),
            ("gpu-7-x", "gpu-7-x"),
        ] {
            assert_eq!(first_host(list).as_deref(), Some(host));
        }
        assert_eq!(first_host(""), None);
        assert_eq!(first_host("n[01"), None);
    }
}
