//! Paths through modules that several of them share (`DiPaCo`): which replica trains which path, and who has
//! the same module.

use std::fmt;
use std::ops::Range;

use farflung_base::Rank;

use super::{Plan, even_parts};

/// A level of modules: copies of some layers, of which each path has one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PathLevel {
    /// The layers of each module.
    pub layers: Range<u32>,
    /// Number of modules.
    pub modules: u32,
}

impl fmt::Display for PathLevel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { layers, modules } = self;
        write!(f, "{modules} of layers {}..{}", layers.start, layers.end)
    }
}

impl PathLevel {
    /// Cuts layers into a level for each number of modules, as evenly as they can be cut, and returns those
    /// with several modules; `None` if there are fewer layers than numbers.
    ///
    /// ```
    /// use farflung_parallel::PathLevel;
    ///
    /// let levels = PathLevel::even(4, &[2, 3]).expect("4 layers are enough for 2 levels");
    /// assert_eq!(levels, [PathLevel { layers: 0..2, modules: 2 }, PathLevel { layers: 2..4, modules: 3 }]);
    /// ```
    #[must_use]
    pub fn even(layers: u32, modules: &[u32]) -> Option<Vec<Self>> {
        if modules.is_empty() {
            return Some(Vec::new());
        }
        let ranges = even_parts(layers, u32::try_from(modules.len()).ok()?)?;
        let levels = ranges.into_iter().zip(modules).map(|(layers, &modules)| Self { layers, modules });
        let levels: Vec<Self> = levels.collect();
        let good = levels.iter().all(|level| !level.layers.is_empty());
        // What has one module is common to all paths.
        good.then(|| levels.into_iter().filter(|level| level.modules > 1).collect())
    }
}

impl Plan {
    /// Returns the number of paths: the product of the numbers of modules. 1 if all replicas train one model.
    #[must_use]
    pub fn paths(&self) -> u32 {
        self.paths.iter().map(|level| level.modules).fold(1, u32::saturating_mul)
    }

    /// Returns the path that a replica trains. Neighbouring replicas train different paths.
    #[must_use]
    pub fn path(&self, replica: u32) -> u32 {
        replica % self.paths().max(1)
    }

    /// Returns the module of a path at each level. The last level changes with each path, as the last digit of
    /// a number does.
    #[must_use]
    pub fn modules(&self, path: u32) -> Vec<u32> {
        let mut rest = path;
        let digits = self.paths.iter().rev().map(|level| {
            let modules = level.modules.max(1);
            let digit = rest % modules;
            rest /= modules;
            digit
        });
        let mut modules: Vec<u32> = digits.collect();
        modules.reverse();
        modules
    }

    /// Returns the levels as texts, as checkpoints record them.
    #[must_use]
    pub fn recorded_paths(&self) -> Vec<String> {
        self.paths.iter().map(ToString::to_string).collect()
    }

    /// Returns the ranks that have the beginning of the model of a path, one for each of its replicas: the
    /// first one has the whole model of its pipeline in checkpoints.
    #[must_use]
    pub fn first_ranks_of_path(&self, path: u32) -> Vec<Rank> {
        let replicas = (0..self.replicas()).filter(|&replica| self.path(replica) == path);
        replicas.map(|replica| self.pipeline_of(replica)[0]).collect()
    }

    /// Returns the replicas that have the same module as a replica at a level, in order.
    #[must_use]
    pub fn replicas_of_module(&self, replica: u32, level: usize) -> Vec<u32> {
        let module = |replica| self.modules(self.path(replica)).get(level).copied();
        (0..self.replicas()).filter(|&other| module(other) == module(replica)).collect()
    }
}
