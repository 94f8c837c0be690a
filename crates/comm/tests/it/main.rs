//! Tests of this crate's public interface. They are one program, because each test program links all crates
//! again.

mod cancellation;
mod certificates;
mod coded;
mod common;
mod contract;
mod gate;
mod gate_quic;
mod iroh;
mod laws;
mod membership;
mod mixed;
mod mpi;
mod mpi_native;
mod order;
mod owners;
mod pace;
mod path;
mod recording;
mod rest_of_mpi;
mod secure;
mod service;
mod shared_memory;
mod steps;
mod store;
mod tcp;
mod trace;
mod virtual_time;

use farflung_base as base;
use farflung_comm as comm;
