//! Paths through modules that several of them share (`DiPaCo`): which replica trains which path, and who has
//! the same module.

use std::fmt;
use std::ops::Range;

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
    /// Cuts layers into a level for each number of modules, as evenly as they can be cut; `None` if there are
    /// fewer layers than levels.
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
        levels.iter().all(|level| !level.layers.is_empty()).then_some(levels)
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

    /// Returns the replicas that have the same module as a replica at a level, in order.
    #[must_use]
    pub fn replicas_of_module(&self, replica: u32, level: usize) -> Vec<u32> {
        let module = |replica| self.modules(self.path(replica)).get(level).copied();
        (0..self.replicas()).filter(|&other| module(other) == module(replica)).collect()
    }
}
