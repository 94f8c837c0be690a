//! The settings of the axes along which ranks divide the model: `mesh`, and those of the tensor axis.

use farflung_base::{Axis, ContextCut, ContextOrder};
use farflung_parallel::{Mesh, whole_groups, whole_replicas};
use toml::Value;

use super::TrainConfig;
use super::pools::Numbers;
use super::validate::check;
use super::value::Setting;
use crate::Result;

impl Setting for Mesh {
    fn expected() -> String {
        "axes with their sizes, such as data=2,pipeline=2,tensor=2".to_owned()
    }

    fn parse(text: &str) -> Option<Self> {
        text.parse().ok()
    }

    fn value(&self) -> Value {
        Value::String(self.to_string())
    }
}

impl Setting for ContextOrder {
    fn names() -> Vec<String> {
        Self::ALL.map(|order| order.name().to_owned()).into()
    }

    fn parse(text: &str) -> Option<Self> {
        text.parse().ok()
    }

    fn value(&self) -> Value {
        Value::String(self.name().to_owned())
    }
}

impl TrainConfig {
    /// Sets the numbers of workers, stages, and ranks along the other axes to those of `mesh`, unless others
    /// were given.
    pub(super) fn take_mesh(&mut self) {
        let Some(mesh) = self.mesh.clone() else { return };
        let along = |axis| mesh.along(axis) as usize;
        for (name, size) in [
            ("workers", mesh.size() as usize),
            ("stages", along(Axis::Pipeline)),
            ("context-parallel", along(Axis::Context)),
            ("tensor", along(Axis::Tensor)),
        ] {
            if !self.was_given(name) {
                match name {
                    "workers" => self.workers = size,
                    "stages" => self.stages = size,
                    "context-parallel" => self.context_parallel = size,
                    _ => self.tensor = size,
                }
            }
        }
    }

    pub(super) fn validate_mesh(&self) -> Result<()> {
        let most = Mesh::MAX_RANKS;
        let good = (1..=most as usize).contains(&self.tensor);
        check("tensor", &self.tensor, good, &format!("1 to {most}"))?;
        if let Some(weights) = &self.tensor_weights {
            let expected = format!("{} numbers, one for each rank of `tensor`", self.tensor);
            check("tensor-weights", &weights.value(), weights.0.len() == self.tensor, &expected)?;
        }
        let (ranks, ulysses) = (self.context_parallel, self.ulysses);
        check("context-parallel", &ranks, (1..=most as usize).contains(&ranks), &format!("1 to {most}"))?;
        // Without ranks that divide sequences it changes nothing, and a note says so.
        let good = ulysses > 0 && (ranks == 1 || ranks.is_multiple_of(ulysses));
        check("ulysses", &ulysses, good, &format!("a divisor of `context-parallel`, which is {ranks}"))?;
        let Some(mesh) = &self.mesh else { return Ok(()) };
        let along = |axis| mesh.along(axis) as usize;
        for (field, value, axis) in [
            ("stages", self.stages, Axis::Pipeline),
            ("context-parallel", self.context_parallel, Axis::Context),
            ("tensor", self.tensor, Axis::Tensor),
        ] {
            check(field, &value, value == along(axis), &format!("{}, as `mesh` says", along(axis)))?;
        }
        Ok(())
    }

    /// Returns how neighbouring replicas divide the positions of sequences, as a plan has it.
    pub(crate) fn context_cut(&self) -> ContextCut {
        let small = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let (ranks, ulysses) = (small(self.context_parallel), small(self.ulysses));
        let cut = ContextCut::of_readers(ranks, ulysses, self.context_order).unwrap_or_default();
        if cut.divides() { cut } else { ContextCut::default() }
    }

    /// Returns the weights of the ranks along the tensor axis, as a plan has them.
    pub(crate) fn tensor_weights(&self) -> Vec<u32> {
        match &self.tensor_weights {
            Some(Numbers(weights)) if self.tensor > 1 => weights.clone(),
            _ => Vec::new(),
        }
    }

    /// Returns the number of replicas of `world` ranks that read different sequences.
    pub(crate) fn readers_of(&self, world: usize) -> usize {
        whole_groups(self.replicas_of(world), self.context_parallel.max(1))
    }

    /// Returns the number of replicas that `world` ranks make. Those that divide sequences are several.
    pub(crate) fn replicas_of(&self, world: usize) -> usize {
        whole_replicas(world, self.stages.max(1), self.tensor.max(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::TrainArgs;

    fn resolved(mesh: &str, more: TrainArgs) -> Result<TrainConfig> {
        let given = TrainArgs { mesh: Some(mesh.parse().unwrap()), ..more };
        TrainConfig::merge(given, TrainArgs::default())
    }

    #[test]
    fn a_mesh_says_how_many_ranks_there_are_along_each_axis() {
        let context = resolved("data=2,context=4", TrainArgs::default()).unwrap();
        assert_eq!((context.workers, context.context_parallel, context.replicas_of(8)), (8, 4, 8));
        assert_eq!((context.context_cut().ring, context.context_cut().ulysses), (4, 1));
        for mesh in ["data=3,pipeline=2,tensor=4", "tensor=4,data=3,pipeline=2"] {
            let config = resolved(mesh, TrainArgs::default()).unwrap();
            assert_eq!((config.workers, config.stages, config.tensor), (24, 2, 4), "{mesh}");
            assert_eq!(config.replicas_of(24), 3);
        }
        let other = TrainArgs { workers: Some(8), tensor: Some(4), ..TrainArgs::default() };
        assert_eq!(resolved("data=3,tensor=4", other).unwrap().workers, 8);
    }

    #[test]
    fn what_does_not_fit_is_refused_by_its_name() {
        let refused = |mesh, more| resolved(mesh, more).unwrap_err().to_string();
        let other = TrainArgs { stages: Some(3), ..TrainArgs::default() };
        assert!(refused("pipeline=2", other).contains("`stages` is 3, expected 2, as `mesh` says"));
        let other = TrainArgs { tensor: Some(3), ..TrainArgs::default() };
        assert!(refused("data=2", other).contains("`tensor` is 3, expected 1, as `mesh` says"));
        let other = TrainArgs { context_parallel: Some(4), ..TrainArgs::default() };
        assert!(refused("context=2", other).contains("`context-parallel` is 4, expected 2, as `mesh` says"));
        let uneven = TrainArgs { ulysses: Some(2), ..TrainArgs::default() };
        assert!(refused("context=3", uneven).contains("`ulysses` is 2, expected a divisor of"));
        let weights = TrainArgs { tensor_weights: Numbers::parse("1,2"), ..TrainArgs::default() };
        assert!(refused("tensor=3", weights).contains("`tensor-weights` is"));
        for wrong in ["", "data", "data=0", "row=2", "data=2,data=2"] {
            assert_eq!(<Mesh as Setting>::parse(wrong), None, "{wrong}");
        }
    }
}
