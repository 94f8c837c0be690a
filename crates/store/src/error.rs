//! Errors of a store.

use std::io;
use std::path::PathBuf;

/// Error of a store.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The file could not be opened, locked, read, written or flushed.
    #[error("failed to {action} {path}{}", place(*.at, *.bytes))]
    Io {
        /// What was done, such as `write`.
        action: &'static str,
        /// The store's file.
        path: PathBuf,
        /// Offset in the file.
        at: u64,
        /// Number of bytes; 0 if the whole file is concerned.
        bytes: u64,
        /// The cause.
        source: io::Error,
    },
    /// The disk has no room for both generations.
    #[error("{path} needs {needed} bytes for two generations, and {free} are free")]
    Room {
        /// The store's file.
        path: PathBuf,
        /// Bytes of the file.
        needed: u64,
        /// Bytes that this user may still write.
        free: u64,
    },
    /// Another process has opened the store.
    #[error("{path} is in use by another process")]
    Locked {
        /// The store's file.
        path: PathBuf,
    },
    /// The file is not a store.
    #[error("{path} is not a store")]
    Foreign {
        /// The file.
        path: PathBuf,
    },
    /// The file is a store of another layout.
    #[error("{path} is a store of other arrays")]
    OtherLayout {
        /// The file.
        path: PathBuf,
    },
    /// A piece of a generation is damaged.
    #[error("{path}: piece {piece} of generation {generation} {what}")]
    Damaged {
        /// The store's file.
        path: PathBuf,
        /// Number of the generation.
        generation: u64,
        /// Number of the piece.
        piece: usize,
        /// What is wrong with it.
        what: &'static str,
    },
    /// The record of a generation is longer than the store has room for.
    #[error("{path}: a record has {found} bytes, expected at most {most}")]
    Record {
        /// The store's file.
        path: PathBuf,
        /// Bytes of the record.
        found: usize,
        /// The most bytes of one.
        most: usize,
    },
    /// An earlier error has ended the work on the store.
    #[error("{path} failed before: the generation in work is dropped")]
    Stopped {
        /// The store's file.
        path: PathBuf,
    },
}

/// Returns where in the file something failed, for messages.
fn place(at: u64, bytes: u64) -> String {
    if bytes == 0 { String::new() } else { format!(": {bytes} bytes at {at}") }
}
