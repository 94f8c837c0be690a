//! Ranks on a grid with named axes: which replica, pipeline stage and tensor shard each rank is. The module
//! does not depend on what runs along an axis.

use std::fmt;
use std::ops::Div;
use std::str::FromStr;

use farflung_base::{Axis, Rank};

use crate::ParallelError;

/// The place of a rank on a [`Mesh`]: one number for each axis, 0 for an axis that the mesh lacks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Coordinates {
    /// Which replica.
    pub data: u32,
    /// Which position in the pipeline.
    pub pipeline: u32,
    /// Which range of a sequence's positions.
    pub context: u32,
    /// Which shard of each layer's width.
    pub tensor: u32,
}

impl Coordinates {
    /// Returns the coordinate along an axis; `None` for a view, which has no coordinate.
    const fn along(&self, axis: Axis) -> Option<u32> {
        match axis {
            Axis::Data => Some(self.data),
            Axis::Pipeline => Some(self.pipeline),
            Axis::Context => Some(self.context),
            Axis::Tensor => Some(self.tensor),
            _ => None,
        }
    }
}

impl fmt::Display for Coordinates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { data, pipeline, context, tensor } = self;
        write!(f, "data {data}, pipeline {pipeline}, context {context}, tensor {tensor}")
    }
}

/// Returns how many whole pipelines of `stages` ranks a number of ranks or machines is enough for.
///
/// # Panics
/// If `stages` is 0.
#[must_use]
pub fn whole_pipelines<N: Div<Output = N>>(ranks: N, stages: N) -> N {
    ranks / stages
}

/// Returns how many whole groups of `readers` replicas a number of replicas is enough for: each group reads
/// sequences of its own.
///
/// # Panics
/// If `readers` is 0.
#[must_use]
pub fn whole_groups<N: Div<Output = N>>(replicas: N, readers: N) -> N {
    replicas / readers
}

/// Returns how many whole replicas of `stages` stages, each of `tensor` ranks, a number of ranks or machines is
/// enough for.
///
/// # Panics
/// If `stages` or `tensor` is 0.
#[must_use]
pub fn whole_replicas<N: Div<Output = N>>(ranks: N, stages: N, tensor: N) -> N {
    ranks / stages / tensor
}

/// A grid of ranks in row-major order: the last axis varies fastest, so neighbours along it have adjacent rank
/// numbers.
///
/// The axis with the most communication comes last: its ranks are adjacent and therefore usually on the same
/// machine. Meshes of plans have the order of [`Axis::ALL`], so that the ranks of a replica are adjacent.
/// Others may differ: `pipeline=4,data=2,tensor=2` is Megatron's order.
///
/// ```
/// use farflung_base::Rank;
/// use farflung_parallel::{Axis, Coordinates, Mesh};
///
/// let mesh: Mesh = "data=2,pipeline=3".parse()?;
/// assert_eq!(mesh.at(Rank(4))?, Coordinates { data: 1, pipeline: 1, ..Coordinates::default() });
/// assert_eq!(mesh.group(Rank(4), Axis::Pipeline)?, [Rank(3), Rank(4), Rank(5)]);
/// assert_eq!(mesh.group(Rank(4), Axis::Data)?, [Rank(1), Rank(4)]);
/// # Ok::<(), farflung_parallel::ParallelError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Mesh {
    axes: Vec<(Axis, u32)>,
}

impl Mesh {
    /// Maximum number of ranks of a mesh.
    pub const MAX_RANKS: u32 = 1 << 20;

    /// Creates a mesh of `axes` with their sizes. The slowest-varying axis is first.
    ///
    /// Errors: an axis given twice or of size 0; a view, such as [`Axis::Expert`]; more than
    /// [`Mesh::MAX_RANKS`] ranks.
    pub fn new(axes: &[(Axis, u32)]) -> Result<Self, ParallelError> {
        let mut ranks = 1_u64;
        for (i, &(axis, size)) in axes.iter().enumerate() {
            if axes[..i].iter().any(|&(other, _)| other == axis) {
                return Err(ParallelError::DuplicateAxis { axis });
            }
            if !Axis::ALL.contains(&axis) {
                return Err(ParallelError::ViewAxis { axis });
            }
            if size == 0 {
                return Err(ParallelError::EmptyAxis { axis });
            }
            ranks = ranks.saturating_mul(u64::from(size));
        }
        if ranks > u64::from(Self::MAX_RANKS) {
            return Err(ParallelError::TooManyRanks { ranks, limit: u64::from(Self::MAX_RANKS) });
        }
        Ok(Self { axes: axes.to_vec() })
    }

    /// Creates a mesh of `ranks` replicas.
    ///
    /// Errors: as [`Mesh::new`].
    pub fn data(ranks: u32) -> Result<Self, ParallelError> {
        Self::new(&[(Axis::Data, ranks)])
    }

    /// Returns the mesh with another axis of this size behind its axes; unchanged if the size is 1.
    ///
    /// Errors: as [`Mesh::new`].
    pub fn and(mut self, axis: Axis, size: u32) -> Result<Self, ParallelError> {
        if size == 1 {
            return Ok(self);
        }
        self.axes.push((axis, size));
        Self::new(&self.axes)
    }

    /// Returns the axes and their sizes, slowest-varying first.
    #[must_use]
    pub fn axes(&self) -> &[(Axis, u32)] {
        &self.axes
    }

    /// Returns the number of ranks; 1 for a mesh without axes.
    #[must_use]
    pub fn size(&self) -> u32 {
        self.axes.iter().map(|&(_, size)| size).product()
    }

    /// Returns the number of ranks along `axis`; 1 if the mesh does not have it.
    #[must_use]
    pub fn along(&self, axis: Axis) -> u32 {
        self.axes.iter().find(|&&(a, _)| a == axis).map_or(1, |&(_, size)| size)
    }

    /// Returns the difference in rank between neighbours along `axis`.
    fn stride(&self, axis: Axis) -> u32 {
        let after = self.axes.iter().rev().take_while(|&&(a, _)| a != axis);
        after.map(|&(_, size)| size).product()
    }

    fn check(&self, rank: Rank) -> Result<(), ParallelError> {
        let size = self.size();
        if rank.0 < size { Ok(()) } else { Err(ParallelError::OffMesh { rank, size }) }
    }

    /// Returns the coordinates of a rank.
    ///
    /// Errors: [`ParallelError::OffMesh`].
    pub fn at(&self, rank: Rank) -> Result<Coordinates, ParallelError> {
        self.check(rank)?;
        let [data, pipeline, context, tensor] = Axis::ALL.map(|axis| self.coordinate(rank, axis));
        Ok(Coordinates { data, pipeline, context, tensor })
    }

    /// Returns the coordinate along one axis of a rank that is on the mesh; 0 if the mesh does not have the
    /// axis.
    fn coordinate(&self, rank: Rank, axis: Axis) -> u32 {
        let size = self.along(axis);
        if size == 1 { 0 } else { rank.0 / self.stride(axis) % size }
    }

    /// Returns the rank at `coordinates`: the inverse of [`Mesh::at`].
    ///
    /// Errors: [`ParallelError::OffAxis`] for a coordinate that is not below the size of its axis.
    pub fn rank(&self, coordinates: Coordinates) -> Result<Rank, ParallelError> {
        let along = |axis| coordinates.along(axis).unwrap_or(0);
        if Axis::ALL.into_iter().any(|axis| along(axis) >= self.along(axis)) {
            return Err(ParallelError::OffAxis { given: coordinates.to_string(), mesh: self.to_string() });
        }
        Ok(Rank(self.axes.iter().fold(0, |rank, &(axis, size)| rank * size + along(axis))))
    }

    /// Returns the ranks that differ from `rank` only along `axis`, including `rank`, in order along the axis.
    /// `rank` alone, if the mesh does not have the axis.
    ///
    /// Errors: [`ParallelError::OffMesh`].
    pub fn group(&self, rank: Rank, axis: Axis) -> Result<Vec<Rank>, ParallelError> {
        self.check(rank)?;
        let own = self.coordinate(rank, axis);
        let size = self.along(axis);
        if size == 1 {
            return Ok(vec![rank]);
        }
        let stride = self.stride(axis);
        let first = rank.0 - own * stride;
        Ok((0..size).map(|i| Rank(first + i * stride)).collect())
    }

    /// Returns all groups along `axis`, ordered by their first rank. Every rank is in exactly one group.
    #[must_use]
    pub fn groups(&self, axis: Axis) -> Vec<Vec<Rank>> {
        let ranks = (0..self.size()).map(Rank);
        ranks
            .filter(|&rank| self.coordinate(rank, axis) == 0)
            .map(|rank| self.group(rank, axis).expect("the rank is below the size"))
            .collect()
    }
}

impl fmt::Display for Mesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, (axis, size)) in self.axes.iter().enumerate() {
            write!(f, "{}{axis}={size}", if i == 0 { "" } else { "," })?;
        }
        if self.axes.is_empty() { f.write_str("single") } else { Ok(()) }
    }
}

impl FromStr for Mesh {
    type Err = ParallelError;

    /// Parses `data=4,pipeline=2`, slowest-varying axis first, or `single` for one rank without axes.
    fn from_str(text: &str) -> Result<Self, ParallelError> {
        if text.trim() == "single" {
            return Self::new(&[]);
        }
        let axis = |part: &str| {
            let form = || ParallelError::MeshForm { text: part.trim().to_owned() };
            let (name, size) = part.split_once('=').ok_or_else(form)?;
            let axis = name.trim().parse().map_err(ParallelError::UnknownAxis)?;
            Ok((axis, size.trim().parse().map_err(|_| form())?))
        };
        Self::new(&text.split(',').map(axis).collect::<Result<Vec<_>, _>>()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn ranks(list: &[u32]) -> Vec<Rank> {
        list.iter().copied().map(Rank).collect()
    }

    /// The groups for 16 GPUs listed in the docstring of Megatron's `initialize_model_parallel`.
    #[test]
    fn megatrons_groups() {
        let mesh: Mesh = "pipeline=4,data=2,tensor=2".parse().unwrap();
        assert_eq!(mesh.groups(Axis::Tensor)[..2], [ranks(&[0, 1]), ranks(&[2, 3])]);
        assert_eq!(
            mesh.groups(Axis::Data)[..4],
            [ranks(&[0, 2]), ranks(&[1, 3]), ranks(&[4, 6]), ranks(&[5, 7])]
        );
        assert_eq!(
            mesh.groups(Axis::Pipeline),
            [ranks(&[0, 4, 8, 12]), ranks(&[1, 5, 9, 13]), ranks(&[2, 6, 10, 14]), ranks(&[3, 7, 11, 15])]
        );
        assert_eq!(mesh.groups(Axis::Context).len(), 16);
    }

    #[test]
    fn bad_meshes_say_what_is_wrong() {
        let refused = |text: &str| text.parse::<Mesh>().unwrap_err().to_string();
        assert!(refused("data=2,row=3").contains("`row`"));
        assert!(refused("data").contains("`data`"));
        assert!(refused("data=x").contains("`data=x`"));
        assert!(refused("data=2,data=2").contains("data is given twice"));
        assert!(refused("tensor=0").contains("tensor has size 0"));
        assert!(
            refused("data=4294967295,tensor=4294967295,context=4294967295").contains("ranks are too many")
        );
        assert!(refused("data=2,expert=2").contains("a view of data x tensor"));
        assert!(refused("").contains("not a mesh"));
        let mesh = Mesh::data(3).unwrap();
        let off = |given| mesh.rank(given).unwrap_err().to_string();
        assert!(mesh.at(Rank(3)).is_err() && mesh.group(Rank(3), Axis::Data).is_err());
        assert_eq!(
            off(Coordinates { data: 3, ..Coordinates::default() }),
            "coordinates data 3, pipeline 0, context 0, tensor 0 are not on the mesh data=3"
        );
        assert!(off(Coordinates { tensor: 1, ..Coordinates::default() }).contains("tensor 1"));
    }

    fn any_mesh() -> impl Strategy<Value = Mesh> {
        (Just(Axis::ALL.to_vec()).prop_shuffle(), prop::collection::vec(1_u32..5, 0..=4))
            .prop_map(|(axes, sizes)| Mesh::new(&axes.into_iter().zip(sizes).collect::<Vec<_>>()).unwrap())
    }

    proptest! {
        #[test]
        fn ranks_and_coordinates_are_one_to_one(mesh in any_mesh()) {
            for rank in (0..mesh.size()).map(Rank) {
                let at = mesh.at(rank).unwrap();
                prop_assert_eq!(mesh.rank(at), Ok(rank));
                for axis in Axis::ALL {
                    prop_assert!(at.along(axis).unwrap() < mesh.along(axis));
                }
            }
        }

        #[test]
        fn groups_cut_the_mesh_into_parts(mesh in any_mesh(), i in 0..4_usize) {
            let axis = Axis::ALL[i];
            let groups = mesh.groups(axis);
            let mut all = groups.concat();
            all.sort();
            prop_assert_eq!(all, (0..mesh.size()).map(Rank).collect::<Vec<_>>());
            for group in groups {
                prop_assert_eq!(group.len(), mesh.along(axis) as usize);
                for (c, &rank) in group.iter().enumerate() {
                    prop_assert_eq!(mesh.at(rank).unwrap().along(axis), Some(c as u32));
                    prop_assert_eq!(&mesh.group(rank, axis).unwrap(), &group);
                }
            }
        }

        #[test]
        fn prints_and_parses_back(mesh in any_mesh()) {
            prop_assert_eq!(mesh.to_string().parse(), Ok(mesh));
        }
    }
}
