//! The cpu backend: always built, the default, and meant to be the fastest GPT training step on a cpu.
//! It refuses to know GPUs, files and networks.

pub(crate) mod pool;
