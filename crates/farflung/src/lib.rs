#![doc = include_str!("../README.md")]

pub mod config;
pub mod error;
pub mod signals;

pub use config::{TrainArgs, TrainConfig};
pub use error::{Error, Result};
pub use signals::{Signal, Stop};
