//! The input from which plans are drafted.

use farflung_parallel::Cluster;
use farflung_zoo::ModelSpec;

use crate::train::chain::PipelineSizes;

/// The input from which plans are drafted.
#[derive(Clone, Copy)]
pub(super) struct PlanRequest<'a> {
    pub(super) name: &'a str,
    pub(super) model: &'a ModelSpec,
    pub(super) cluster: &'a Cluster,
    pub(super) sizes: PipelineSizes,
}
