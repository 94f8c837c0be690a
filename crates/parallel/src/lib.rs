#![doc = include_str!("../README.md")]

pub mod average;
pub mod churn;
pub mod cluster;
mod seeded_rng;
pub mod error;
pub mod membership;
pub mod memory;
pub mod mesh;
pub mod model;
pub mod pipeline;
pub mod plan;
pub mod planner;
pub mod recompute;
pub mod render;
pub mod replicas;
pub mod script;
pub mod share;
pub mod shipped;
pub mod simulate;
pub mod step;
pub mod swarm;
pub mod timeline;
pub mod what_if;

// For all users: machines, a model, and the plan for them.
pub use cluster::{Between, Cluster, Machine, Power, Price, Region, Speed, TensorEfficiency};
pub use error::ParallelError;
pub use farflung_base::{Algorithm, Axis, Precision};
pub use model::{Limits, ModelShape};
pub use plan::{
    BoundaryCodecs, Level, LocalSteps, Part, PathLevel, Pipeline, Plan, PlannedModel, Recompute,
    ScheduleSource,
};
pub use planner::{Candidate, Planned, StepTime, plan};
pub use what_if::{Answer, ComparisonRow, WhatIf};

// For simulations and cost predictions: averages, replicas, meshes, timelines. Schedules are in `pipeline`.
pub use average::{AllReduceTime, all_reduce_bytes};
pub use mesh::{Coordinates, Mesh, whole_groups, whole_pipelines, whole_replicas};
pub use replicas::{Codec, Overlap, Replicas, Sync};
pub use simulate::{Cost, RankCost, simulate_replicas};
pub use timeline::{Kind, Lane, Span, Timeline};
