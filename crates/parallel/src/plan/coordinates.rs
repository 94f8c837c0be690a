//! Where a plan's ranks stand: coordinates on its mesh, groups along an axis, the ranks of a replica.

use std::ops::Range;

use farflung_base::{Axis, Rank};

use super::{Plan, PlanPosition};
use crate::mesh::Coordinates;

impl Plan {
    /// Returns the coordinates of a rank on the mesh.
    ///
    /// Pools are one pipeline of all their ranks: the data coordinate is 0, and the pipeline coordinate is the
    /// rank's number. [`Plan::place`] has the stage that it holds, [`Plan::position_of`] also its index in the
    /// pool.
    ///
    /// ```
    /// # use farflung_parallel::{Axis, Coordinates, Plan};
    /// # let text = "version = 1\nmesh = \"data=2,pipeline=3\"\n\
    /// #     machines = [\"a\", \"b\", \"c\", \"d\", \"e\", \"f\"]\nprecision = \"f32\"\nbatch = 4\n\
    /// #     microbatches = [3, 3]\n[model]\nname = \"nano\"\nlayers = 4\nparameters = 834304\n\
    /// #     [[part]]\nlayers = \"0..2\"\n[[part]]\nlayers = \"2..3\"\n[[part]]\nlayers = \"3..4\"\n\
    /// #     [[boundary]]\n[[boundary]]\n[[level]]\nmethod = \"ddp\"\n";
    /// use farflung_base::Rank;
    ///
    /// // Two pipelines of three stages.
    /// let plan: Plan = text.parse()?;
    /// let at = plan.at(Rank(4));
    /// assert_eq!(at, Coordinates { data: 1, pipeline: 1, ..Coordinates::default() });
    /// assert_eq!(plan.rank(at), Rank(4));
    /// assert_eq!(plan.group(Rank(4), Axis::Data), [Rank(1), Rank(4)]);
    /// assert_eq!(plan.group(Rank(4), Axis::Pipeline), plan.pipeline_of(1));
    /// # Ok::<(), farflung_parallel::ParallelError>(())
    /// ```
    ///
    /// # Panics
    /// If the plan has no such rank. For a rank that another process or a file says, ask
    /// [`Plan::position_of`] or [`Mesh::at`](crate::Mesh::at).
    #[must_use]
    pub fn at(&self, rank: Rank) -> Coordinates {
        self.mesh.at(rank).expect("a rank of the plan")
    }

    /// Returns the rank at coordinates: the inverse of [`Plan::at`].
    ///
    /// # Panics
    /// If a coordinate is not below the size of its axis; see [`Mesh::rank`](crate::Mesh::rank).
    #[must_use]
    pub fn rank(&self, coordinates: Coordinates) -> Rank {
        self.mesh.rank(coordinates).expect("coordinates on the plan's mesh")
    }

    /// Returns the ranks that differ from `rank` only along `axis`, including `rank`, in order along the
    /// axis. With pools, the group along the data axis is the rank alone: the other holders of its part are
    /// its pool. Along [`Axis::Expert`], [`Axis::Context`] and [`Axis::Ulysses`], views of the data axis,
    /// they are the ranks that divide its experts or its sequences.
    ///
    /// # Panics
    /// As [`Plan::at`].
    #[must_use]
    pub fn group(&self, rank: Rank, axis: Axis) -> Vec<Rank> {
        match axis {
            Axis::Expert => self.along_experts(rank),
            Axis::Context => self.along_context(rank),
            Axis::Ulysses => self.along_ulysses(rank),
            axis => self.mesh.group(rank, axis).expect("a rank of the plan"),
        }
    }

    /// Returns the ranks of a replica's pipeline, by position: with a tensor axis, of its first one. All of
    /// them are [`Plan::ranks_of`].
    ///
    /// # Panics
    /// If the plan has no such replica.
    #[must_use]
    pub fn pipeline_of(&self, replica: u32) -> Vec<Rank> {
        self.group(self.rank(Coordinates { data: replica, ..Coordinates::default() }), Axis::Pipeline)
    }

    /// Returns the place of a rank: its replica and position, or, with pools, its index in its pool and the
    /// pool's stage. `None` if the plan has no such rank.
    #[must_use]
    pub fn position_of(&self, rank: Rank) -> Option<PlanPosition> {
        match self.pools() {
            Some(pools) => PlanPosition::in_pools(&pools.sizes, rank.0),
            None => self.mesh.at(rank).ok().map(PlanPosition::from),
        }
    }

    /// Returns the number of different shares of the model that replicas hold: those that divide its experts,
    /// or those of different paths. 1 if all replicas hold the same.
    #[must_use]
    pub fn shares(&self) -> u32 {
        self.expert_ranks().max(self.paths()).max(1)
    }

    /// Returns the number of the share that a replica holds. Those with the same number hold the same.
    #[must_use]
    pub fn share(&self, replica: u32) -> u32 {
        replica % self.shares()
    }

    /// Returns the first replicas that together hold the model which a replica trains: those that divide its
    /// experts or its parameters, or the first one of its path.
    #[must_use]
    pub fn holders_of_model(&self, replica: u32) -> Range<u32> {
        if self.paths() > 1 {
            let path = self.path(replica);
            return path..path + 1;
        }
        0..if self.divides_weights() { self.replicas() } else { self.expert_ranks() }
    }

    /// Returns a number for what a rank holds of the model and of the optimizer's state: its position in its
    /// pipeline, or its pool, the replica's [share](Plan::share), or its shard of the state, and its number
    /// along the tensor axis.
    ///
    /// # Panics
    /// As [`Plan::at`].
    #[must_use]
    pub fn place(&self, rank: Rank) -> u32 {
        let at = self.at(rank);
        let position = self.pools().and_then(|pools| pools.stage_of(at.pipeline)).unwrap_or(at.pipeline);
        let (shares, share) = if self.divides_state() {
            (self.replicas(), at.data)
        } else {
            (self.shares(), self.share(at.data))
        };
        (position * shares + share) * self.tensor_ranks() + at.tensor
    }
}

impl From<Coordinates> for PlanPosition {
    fn from(Coordinates { data, pipeline, .. }: Coordinates) -> Self {
        Self { replica: data, position: pipeline }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pipeline::Pools;
    use crate::plan::tests::{plan, pooled};

    /// A plan whose mesh is `mesh`. Its other fields need not fit.
    fn on(mesh: &str) -> Plan {
        Plan { mesh: mesh.parse().unwrap(), ..plan() }
    }

    #[test]
    fn ranks_are_numbered_from_the_fastest_links_to_the_slowest() {
        let plan = on("data=2,pipeline=3,context=2,tensor=2");
        let at = |rank| {
            let Coordinates { data, pipeline, context, tensor } = plan.at(Rank(rank));
            [data, pipeline, context, tensor]
        };
        assert_eq!(
            [0, 1, 2, 4, 12].map(at),
            [[0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 1, 0], [0, 1, 0, 0], [1, 0, 0, 0]]
        );
        assert_eq!(plan.pipeline_of(1), [12, 16, 20].map(Rank));
        assert_eq!(plan.group(Rank(13), Axis::Data), [1, 13].map(Rank));
    }

    #[test]
    fn coordinates_and_ranks_are_one_to_one_and_groups_cut_the_plan_into_parts() {
        for mesh in ["data=1,pipeline=1", "data=3,pipeline=2", "data=2,pipeline=3,context=2,tensor=2"] {
            let plan = on(mesh);
            for rank in (0..plan.ranks()).map(Rank) {
                assert_eq!(plan.rank(plan.at(rank)), rank);
                for axis in Axis::ALL {
                    let group = plan.group(rank, axis);
                    assert!(group.is_sorted() && group.contains(&rank));
                    assert!(group.iter().all(|&other| plan.group(other, axis) == group), "{mesh}, {axis}");
                }
            }
        }
    }

    #[test]
    fn a_place_is_none_for_a_rank_that_the_plan_does_not_have() {
        let plan = on("data=2,pipeline=3");
        assert_eq!(plan.position_of(Rank(4)), Some(PlanPosition { replica: 1, position: 1 }));
        assert_eq!((plan.place(Rank(4)), plan.position_of(Rank(6))), (1, None));
    }

    #[test]
    fn pools_are_one_pipeline_whose_ranks_share_stages() {
        let plan = pooled();
        assert_eq!(plan.pools().map(Pools::stages), Some(2));
        assert_eq!(plan.at(Rank(2)), Coordinates { pipeline: 2, ..Coordinates::default() });
        assert_eq!(plan.pipeline_of(0), [0, 1, 2, 3].map(Rank));
        assert_eq!(plan.group(Rank(2), Axis::Data), [Rank(2)]);
        assert_eq!([0, 1, 2, 3].map(|rank| plan.place(Rank(rank))), [0, 1, 1, 1]);
        assert_eq!(plan.position_of(Rank(2)), Some(PlanPosition { replica: 1, position: 1 }));
        assert_eq!(plan.position_of(Rank(4)), None);
    }
}
