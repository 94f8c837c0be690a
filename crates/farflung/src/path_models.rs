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
    /// The rank in whose folder its weights are.
    pub rank: u32,
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
        let path = |path| PathModel { modules: plan.modules(path), rank: plan.pipeline_of(path)[0].0 };
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
        Ok(read)
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

    /// Returns the folder of the model of a path, of the same step as the checkpoint at `here`, which has this list.
    ///
    /// Errors: [`Error::Setting`] if there is no such path, or its folder is not on this machine.
    pub(crate) fn folder(&self, here: &Path, path: usize) -> Result<PathBuf> {
        let Some(PathModel { rank, .. }) = self.paths.get(path) else {
            let expected = format!("below {}, the number of paths", self.paths.len());
            return Err(Error::Setting { field: "path", value: path.to_string(), expected });
        };
        if *rank == self.own {
            return Ok(here.to_owned());
        }
        let checkpoint = self.checkpoint_of(here, Rank(*rank));
        if checkpoint.is_dir() {
            return Ok(checkpoint);
        }
        let expected = format!(
            "the folder of path {path} at {}: rank {rank} wrote it on its machine; copy it, or choose another path",
            checkpoint.display()
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
