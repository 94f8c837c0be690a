//! What a user can do if the ranks of a job do not find each other.

use farflung_base::Rank;

use super::LaunchEnv;

impl LaunchEnv {
    /// Returns the advice for a rendezvous in which these ranks were missing. `refused` is whether this
    /// process has refused connections: those reached it.
    #[must_use]
    pub fn advice(&self, missing: &[Rank], refused: bool) -> String {
        let Self { master_addr: host, master_port: port, source, .. } = self;
        let by_slurm = matches!(*source, "Slurm" | "PMIx");
        let variable = if by_slurm { "MASTER_ADDR or SLURM_JOB_NODELIST" } else { "MASTER_ADDR" };
        let place = if refused {
            "what was refused did reach this rank: all ranks need the same WORLD_SIZE, the same --job, and the \
             same ticket or secret"
                .to_owned()
        } else if self.is_local() {
            format!(
                "`{host}` (MASTER_ADDR) is each machine's own loopback: if ranks run on several machines, give \
                 all of them a name or an address of rank 0's machine in MASTER_ADDR"
            )
        } else if !missing.contains(&Rank(0)) {
            format!(
                "all ranks must run and reach rank 0's machine by their {variable}, and its firewall must let them \
                 connect to port {port} (MASTER_PORT)"
            )
        } else {
            format!(
                "rank 0 must run on the machine that this one reaches as `{host}` ({variable}), with the same \
                 MASTER_PORT, and its firewall must let others connect to port {port}"
            )
        };
        // Slurm's variables stay set in a shell that `srun --pty` starts.
        let shell = if *source == "Slurm" {
            "; in a shell that `srun` started, unset SLURM_PROCID to train alone"
        } else {
            ""
        };
        format!("{place}{shell}")
    }
}

#[cfg(test)]
mod tests {
    use farflung_base::Rank;

    use super::super::detect;

    fn advice(vars: &[(&str, &str)]) -> String {
        let env = |name: &str| vars.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned());
        let env = detect(env).unwrap().unwrap();
        // Rank 0 is missing for all others.
        env.advice(&[Rank(1 - env.rank.0)], false)
    }

    #[test]
    fn where_a_rank_was_refused_the_place_is_not_the_problem() {
        let vars = [("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost")];
        let env = |name: &str| vars.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned());
        let said = detect(env).unwrap().unwrap().advice(&[Rank(1)], true);
        assert!(
            said.contains("WORLD_SIZE") && said.contains("secret") && !said.contains("loopback"),
            "{said}"
        );
    }

    #[test]
    fn the_variables_are_named() {
        let of = |rank, master| advice(&[("RANK", rank), ("WORLD_SIZE", "2"), ("MASTER_ADDR", master)]);
        assert!(of("0", "localhost").contains("`localhost` (MASTER_ADDR) is each machine's own loopback"));
        assert!(of("0", "node1").contains("port 29500 (MASTER_PORT)"));
        assert!(of("1", "node1").contains("reaches as `node1` (MASTER_ADDR)"));
        let slurm = [
            ("SLURM_PROCID", "0"),
            ("SLURM_NTASKS", "2"),
            ("SLURM_STEP_ID", "0"),
            ("SLURM_JOB_NODELIST", "n[1-2]"),
        ];
        let said = advice(&slurm);
        assert!(said.contains("SLURM_JOB_NODELIST") && said.contains("unset SLURM_PROCID"), "{said}");
    }
}
