//! How one bucket is averaged: as plain f32, for all ranks or for those that update it alone; through codecs;
//! or by protocols.

use farflung_base::Pending;
use farflung_comm::{CommError, Communicator, ReduceOp};

use super::bucket::Packed;
use super::bucket_protocols::{BucketProtocols, Exchanged};
use super::coder::{Codecs, Values};
use super::shards::OwnedBucket;
use crate::OptimError;

/// Exchange of a bucket in progress.
pub(super) type PendingBucket = Pending<Result<Packed, CommError>>;

#[derive(Debug)]
pub(super) enum BucketReduction {
    /// As plain f32, with the number of values.
    Plain(usize),
    /// As plain f32, which reach only the ranks that update them.
    Owned(OwnedBucket),
    Coded(Codecs),
    Rounds(BucketProtocols),
}

/// Result of an exchange of a bucket.
pub(super) enum ReductionStep {
    Mean(Packed),
    /// The next exchange of the bucket, which has been started.
    Goes(PendingBucket),
}

fn plain(comm: &Communicator, values: Vec<f32>) -> PendingBucket {
    comm.start_all_reduce(values, ReduceOp::Mean).map(|values| values.map(Packed::Plain))
}

impl BucketReduction {
    /// Begins a round.
    pub(super) fn begin(&self, round: u64) {
        if let Self::Coded(codecs) = self {
            codecs.begin(round);
        }
    }

    /// Returns buffers for the bucket's values, not filled yet.
    pub(super) fn empty(&self, len: usize) -> Result<Packed, OptimError> {
        match self {
            Self::Plain(_) | Self::Owned(_) | Self::Rounds(_) => Ok(Packed::Plain(vec![0.0; len])),
            Self::Coded(codecs) => codecs.empty(),
        }
    }

    /// Starts the first exchange of the bucket.
    pub(super) fn start(&mut self, comm: &Communicator, packed: Packed) -> Result<PendingBucket, OptimError> {
        Ok(match (self, packed) {
            (Self::Coded(codecs), Packed::Coded(shards)) => {
                let values = codecs.values(shards);
                let reduced = comm.start_all_reduce_coded_by(codecs.program(), values, ReduceOp::Mean);
                reduced.map(|values| values.map(Values::into_packed))
            }
            (Self::Rounds(rounds), Packed::Plain(values)) => plain(comm, rounds.begin(values)?),
            (Self::Owned(owned), Packed::Plain(values)) => {
                owned.start(comm, values).map(|values| values.map(Packed::Plain))
            }
            (_, Packed::Plain(values)) => plain(comm, values),
            (_, Packed::Coded(_)) => unreachable!("only codecs produce shards"),
        })
    }

    /// Takes the result of an exchange, and starts the next one if there is one.
    pub(super) fn advance(
        &mut self,
        comm: &Communicator,
        packed: Packed,
    ) -> Result<ReductionStep, OptimError> {
        match (self, packed) {
            (Self::Rounds(rounds), Packed::Plain(mean)) => Ok(match rounds.incoming(&mean)? {
                Exchanged::Next(values) => ReductionStep::Goes(plain(comm, values)),
                Exchanged::Mean(values) => ReductionStep::Mean(Packed::Plain(values)),
            }),
            (_, packed) => Ok(ReductionStep::Mean(packed)),
        }
    }

    /// Returns the bytes of this rank's own values in a round.
    pub(super) fn sent(&self) -> u64 {
        match self {
            Self::Plain(values) => 4 * *values as u64,
            Self::Owned(owned) => 4 * owned.len() as u64,
            Self::Coded(codecs) => codecs.sent(),
            Self::Rounds(rounds) => 4 * rounds.sizes().iter().sum::<usize>() as u64,
        }
    }

    pub(super) fn commit(&mut self) {
        match self {
            Self::Plain(_) | Self::Owned(_) => {}
            Self::Coded(codecs) => codecs.commit(),
            Self::Rounds(rounds) => rounds.commit(),
        }
    }

    pub(super) fn rollback(&mut self) {
        match self {
            Self::Plain(_) | Self::Owned(_) => {}
            Self::Coded(codecs) => codecs.rollback(),
            Self::Rounds(rounds) => rounds.rollback(),
        }
    }

    /// Returns the bytes of the codecs' state in the host's memory.
    pub(super) fn held(&self) -> usize {
        match self {
            Self::Plain(_) | Self::Owned(_) => 0,
            Self::Coded(codecs) => codecs.held(),
            Self::Rounds(rounds) => rounds.held(),
        }
    }

    /// Appends the state that is kept between rounds; each name begins with `prefix`.
    pub(super) fn save(&self, prefix: &str, saved: &mut Vec<(String, Vec<f32>)>) -> Result<(), OptimError> {
        match self {
            Self::Plain(_) | Self::Owned(_) => Ok(()),
            Self::Coded(codecs) => codecs.save(prefix, saved),
            Self::Rounds(rounds) => rounds.save(prefix, saved),
        }
    }

    /// Restores what [`Self::save`] appended.
    pub(super) fn restore<'a>(
        &mut self,
        prefix: &str,
        get: &dyn Fn(&str) -> Option<&'a [f32]>,
    ) -> Result<(), OptimError> {
        match self {
            Self::Plain(_) | Self::Owned(_) => Ok(()),
            Self::Coded(codecs) => codecs.restore(prefix, get),
            Self::Rounds(rounds) => rounds.restore(prefix, get),
        }
    }
}
