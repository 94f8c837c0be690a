//! Changing the replicas of a plan: some have left, others have joined.

use farflung_base::{Axis, Rank};

use super::{Level, Plan};
use crate::ParallelError;

/// A replica of the next plan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Replica {
    /// The replica with this number in the current plan.
    Stays(u32),
    /// A replica that has joined.
    New {
        /// Name of the machine of each of the replica's ranks.
        machines: Vec<String>,
        /// Number of the replica's microbatches in one step.
        microbatches: u32,
    },
}

impl Plan {
    /// Returns this plan for other replicas, in this order. A replica that stays keeps its machines,
    /// microbatches, local steps and region. (If the fastest replica has left, the others take proportionally
    /// more local steps.) A new replica takes as many local steps as the fastest one and belongs to the last
    /// region. The number of sequences in a step grows and shrinks with the replicas.
    ///
    /// ```
    /// # use farflung_parallel::{Plan, plan::Replica};
    /// # let text = "version = 1\nmesh = \"data=3,pipeline=1\"\nmachines = [\"a\", \"b\", \"c\"]\n\
    /// #     precision = \"f32\"\nbatch = 4\nmicrobatches = [3, 1, 2]\n\
    /// #     [model]\nname = \"nano\"\nlayers = 4\nparameters = 834304\n[[part]]\nlayers = \"0..4\"\n\
    /// #     [[level]]\nmethod = \"ddp\"\n";
    /// let plan: Plan = text.parse()?;
    /// let come = Replica::New { machines: vec!["d".to_owned()], microbatches: 5 };
    /// let next = plan.with_replicas(&[Replica::Stays(0), Replica::Stays(2), come])?;
    /// assert_eq!((next.machines.join(" "), next.microbatches), ("a c d".to_owned(), vec![3, 2, 5]));
    /// # Ok::<(), farflung_parallel::ParallelError>(())
    /// ```
    ///
    /// Errors: [`ParallelError::Plan`] for a replica that the plan does not have, and the errors of
    /// [`Plan::mesh_of`] and [`Plan::check`].
    pub fn with_replicas(&self, replicas: &[Replica]) -> Result<Self, ParallelError> {
        let mut next = self.clone();
        next.machines.clear();
        next.microbatches.clear();
        for replica in replicas {
            match replica {
                Replica::Stays(old) => {
                    let count = self.microbatches.get(*old as usize).copied();
                    next.microbatches.push(count.ok_or_else(|| self.no_replica(*old))?);
                    let machine = |rank: Rank| self.machines[rank.index()].clone();
                    next.machines.extend(self.ranks_of(*old).into_iter().map(machine));
                }
                Replica::New { machines, microbatches } => {
                    next.microbatches.push(*microbatches);
                    next.machines.extend_from_slice(machines);
                }
            }
        }
        next.mesh =
            Self::mesh_of(replicas.len() as u32, self.stages())?.and(Axis::Tensor, self.tensor_ranks())?;
        let old = |replica: &Replica| match replica {
            Replica::Stays(old) => Some(*old),
            Replica::New { .. } => None,
        };
        for level in &mut next.levels {
            if let Some(fastest) = level.steps.iter().max().copied() {
                let steps = |replica| old(replica).map_or(fastest, |old| level.steps[old as usize]);
                level.steps = replicas.iter().map(steps).collect();
                // The period equals the fastest replica's local steps. If the fastest replica has left, the
                // others take proportionally more local steps.
                let most = level.steps.iter().max().copied().unwrap_or(fastest);
                let quicker = |own: u32| (u64::from(own) * u64::from(fastest) / u64::from(most)) as u32;
                level.steps.iter_mut().for_each(|own| *own = quicker(*own));
            }
            let Some(last) = level.groups.len().checked_sub(1) else { continue };
            let group_of = |old: u32| level.groups.iter().position(|group| group.contains(&old));
            let mut groups = vec![Vec::new(); level.groups.len()];
            for (number, replica) in (0..).zip(replicas) {
                groups[old(replica).and_then(group_of).unwrap_or(last)].push(number);
            }
            groups.retain(|group| !group.is_empty());
            level.groups = groups;
        }
        if next.levels.len() == 2 && next.levels[0].groups.len() < 2 {
            // With one region left, the inner level has no purpose.
            next.levels.remove(0);
            let outermost = &mut next.levels[0];
            outermost.algorithm = Level::unless_told(&outermost.codec);
        }
        next.check()?;
        Ok(next)
    }

    fn no_replica(&self, number: u32) -> ParallelError {
        let (field, value) = ("replica".to_owned(), number.to_string());
        ParallelError::Plan { field, value, expected: format!("less than {}", self.replicas()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DDP: &str = "[[level]]\nmethod = \"ddp\"\n";

    fn plan(levels: &str) -> Plan {
        let text = format!(
            "version = 1\nmesh = \"data=4,pipeline=1\"\nmachines = [\"a\", \"b\", \"c\", \"d\"]\n\
             precision = \"f32\"\nbatch = 2\nmicrobatches = [4, 3, 2, 1]\n\
             [model]\nname = \"nano\"\nlayers = 4\nparameters = 834304\n[[part]]\nlayers = \"0..4\"\n{levels}"
        );
        text.parse().unwrap()
    }

    #[test]
    fn who_stays_keeps_its_share_and_its_region() {
        let plan = plan(&format!("{DDP}groups = [[0, 1], [2, 3]]\n{DDP}algorithm = \"hierarchical\"\n"));
        let come = Replica::New { machines: vec!["e".to_owned()], microbatches: 7 };
        let next = plan.with_replicas(&[Replica::Stays(3), Replica::Stays(0), come]).unwrap();
        assert_eq!(next.microbatches, [1, 4, 7]);
        assert_eq!(next.machines, ["d", "a", "e"]);
        assert_eq!(next.levels[0].groups, [vec![1], vec![0, 2]]);
        assert_eq!(next.replicas(), 3);
        // A region without replicas is removed, and so is the level of regions.
        let next = plan.with_replicas(&[Replica::Stays(0), Replica::Stays(1)]).unwrap();
        assert_eq!((next.levels.len(), next.levels[0].groups.len()), (1, 0));
    }

    #[test]
    fn the_fastest_of_those_that_are_left_sets_the_pace() {
        let plan = plan("[[level]]\nmethod = \"diloco\"\nevery = 12\nsteps = [12, 6, 4, 3]\n");
        let left: Vec<Replica> = (1..4).map(Replica::Stays).collect();
        assert_eq!(plan.with_replicas(&left).unwrap().levels[0].steps, [12, 8, 6]);
        assert_eq!(plan.with_replicas(&left[2..]).unwrap().levels[0].steps, [12]);
    }

    #[test]
    fn an_unknown_replica_and_no_replica_are_refused() {
        let plan = plan(DDP);
        let error = plan.with_replicas(&[Replica::Stays(4)]).unwrap_err().to_string();
        assert!(error.contains("less than 4"), "{error}");
        assert!(plan.with_replicas(&[]).is_err());
    }
}
