//! The models of a run that trains paths through shared modules: which there are, where their weights lie, and
//! which one a text takes.

use std::path::{Path, PathBuf};

use farflung_base::Rank;
use farflung_parallel::Plan;
use farflung_zoo::data::TextRouter;
use serde::{Deserialize, Serialize};

use crate::run_dir::rank_folder;
use crate::{Error, Result};

/// The file of a checkpoint.
pub(crate) const PATHS: &str = "paths.json";

/// One of the models.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PathModel {
    /// Its module at each level.
    pub modules: Vec<u32>,
    /// The ranks in whose folders its weights are.
    pub ranks: Vec<u32>,
}

/// `paths.json` of a checkpoint: the models of all paths, and what decides which of them a text takes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PathModels {
    /// The rank that wrote the checkpoint.
    own: u32,
    paths: Vec<PathModel>,
    router: TextRouter,
}

impl PathModels {
    /// Returns those of a plan, for the checkpoint of a rank.
    pub(crate) fn of(plan: &Plan, own: Rank, router: &TextRouter) -> Self {
        // If ranks divide the model, only the first rank of the first replica has the weights of the others.
        let replicas = if plan.ranks() > plan.replicas() { 1 } else { usize::MAX };
        let ranks = |path| plan.first_ranks_of_path(path).iter().take(replicas).map(|rank| rank.0).collect();
        let path = |path| PathModel { modules: plan.modules(path), ranks: ranks(path) };
        Self { own: own.0, paths: (0..plan.paths()).map(path).collect(), router: router.clone() }
    }

    /// Returns the text of the file.
    pub(crate) fn to_json(&self) -> String {
        serde_json::to_string(self).expect("numbers can be written as JSON")
    }

    /// Reads the file's text.
    ///
    /// Errors: [`Error::Setting`] with what is wrong.
    pub(crate) fn read(text: &[u8], path: &Path) -> Result<Self> {
        let wrong = |problem: String| {
            let expected = format!("a list of the models of paths: {problem}");
            Error::Setting { field: "model", value: path.display().to_string(), expected }
        };
        let read: Self = serde_json::from_slice(text).map_err(|error| wrong(error.to_string()))?;
        let (listed, routed) = (read.paths.len(), read.router.paths());
        if listed != routed {
            return Err(wrong(format!("it has {listed} models, and a text takes one of {routed} paths")));
        }
        let mut ranks = std::collections::BTreeSet::new();
        let mut each = read.paths.iter().flat_map(|path| &path.ranks);
        if !each.all(|rank| ranks.insert(rank)) || read.paths.iter().any(|path| path.ranks.is_empty()) {
            return Err(wrong("`ranks` are not different ranks for each model".to_owned()));
        }
        Ok(read)
    }

    /// Returns whether these are the same models, as another rank lists them.
    pub(crate) fn is_of_same_run(&self, other: &Self) -> bool {
        (&self.paths, &self.router) == (&other.paths, &other.router)
    }

    /// Returns the models, by the number of the path.
    #[must_use]
    pub fn paths(&self) -> &[PathModel] {
        &self.paths
    }

    /// Returns what decides which path a text takes.
    #[must_use]
    pub const fn router(&self) -> &TextRouter {
        &self.router
    }

    /// Returns the folder of the model of a path, of the same step as the checkpoint at `here` with this list.
    ///
    /// Errors: [`Error::Setting`] if there is no such path, or its folder is not on this machine.
    pub(crate) fn folder(&self, here: &Path, path: usize) -> Result<PathBuf> {
        let Some(PathModel { ranks, .. }) = self.paths.get(path) else {
            let expected = format!("below {}, the number of paths", self.paths.len());
            return Err(Error::Setting { field: "path", value: path.to_string(), expected });
        };
        if ranks.contains(&self.own) {
            return Ok(here.to_owned());
        }
        let mut folders = ranks.iter().map(|&rank| self.checkpoint_of(here, Rank(rank)));
        if let Some(found) = folders.find(|folder| folder.is_dir()) {
            return Ok(found);
        }
        let rank = ranks.first().copied().unwrap_or_default();
        let expected = format!(
            "the folder of path {path} at {}: rank {rank} wrote it on its machine; copy it, or choose another path",
            self.checkpoint_of(here, Rank(rank)).display()
        );
        Err(Error::Setting { field: "model", value: here.display().to_string(), expected })
    }

    /// Returns the path of the checkpoint of a rank beside this one.
    fn checkpoint_of(&self, here: &Path, rank: Rank) -> PathBuf {
        let folder = here.parent().unwrap_or(here);
        let run = if self.own == 0 { Some(folder) } else { folder.parent().and_then(Path::parent) };
        let of_rank = rank_folder(run.unwrap_or(folder), rank);
        here.file_name().map_or_else(|| of_rank.clone(), |step| of_rank.join(step))
    }
}
