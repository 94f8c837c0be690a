//! The way of one bucket to its mean: plain, through codecs, or by protocols.

use farflung_base::Pending;
use farflung_comm::{CommError, Communicator, ReduceOp};

use super::bucket::Packed;
use super::coder::{Codecs, Values};
use super::rounds::{Exchanged, Rounds};
use crate::OptimError;

/// A bucket on its way.
pub(super) type Travelling = Pending<Result<Packed, CommError>>;

#[derive(Debug)]
pub(super) enum Way {
    /// Each value as it is, and so many of them.
    Plain(usize),
    Coded(Codecs),
    Rounds(Rounds),
}

/// What came of a bucket's exchange.
pub(super) enum Came {
    Mean(Packed),
    /// There is another one.
    Goes(Travelling),
}

fn plain(comm: &Communicator, values: Vec<f32>) -> Travelling {
    comm.start_all_reduce(values, ReduceOp::Mean).map(|values| values.map(Packed::Plain))
}

impl Way {
    /// A new round.
    pub(super) fn begin(&self, round: u64) {
        if let Self::Coded(codecs) = self {
            codecs.begin(round);
        }
    }

    /// Room for its values, of which there are none yet.
    pub(super) fn empty(&self, len: usize) -> Result<Packed, OptimError> {
        match self {
            Self::Plain(_) | Self::Rounds(_) => Ok(Packed::Plain(vec![0.0; len])),
            Self::Coded(codecs) => codecs.empty(),
        }
    }

    /// Sends the bucket off.
    pub(super) fn start(&mut self, comm: &Communicator, packed: Packed) -> Result<Travelling, OptimError> {
        Ok(match (self, packed) {
            (Self::Coded(codecs), Packed::Coded(shards)) => {
                let values = codecs.values(shards);
                let reduced = comm.start_all_reduce_coded_by(codecs.program(), values, ReduceOp::Mean);
                reduced.map(|values| values.map(Values::into_packed))
            }
            (Self::Rounds(rounds), Packed::Plain(values)) => plain(comm, rounds.begin(values)?),
            (_, Packed::Plain(values)) => plain(comm, values),
            (_, Packed::Coded(_)) => unreachable!("only codecs make shards"),
        })
    }

    /// Takes what came back.
    pub(super) fn came(&mut self, comm: &Communicator, packed: Packed) -> Result<Came, OptimError> {
        match (self, packed) {
            (Self::Rounds(rounds), Packed::Plain(mean)) => Ok(match rounds.incoming(&mean)? {
                Exchanged::Next(values) => Came::Goes(plain(comm, values)),
                Exchanged::Mean(values) => Came::Mean(Packed::Plain(values)),
            }),
            (_, packed) => Ok(Came::Mean(packed)),
        }
    }

    /// Bytes of this rank's own values in a round.
    pub(super) fn sent(&self) -> u64 {
        match self {
            Self::Plain(values) => 4 * *values as u64,
            Self::Coded(codecs) => codecs.sent(),
            Self::Rounds(rounds) => 4 * rounds.sizes().iter().sum::<usize>() as u64,
        }
    }

    pub(super) fn commit(&mut self) {
        match self {
            Self::Plain(_) => {}
            Self::Coded(codecs) => codecs.commit(),
            Self::Rounds(rounds) => rounds.commit(),
        }
    }

    pub(super) fn rollback(&mut self) {
        match self {
            Self::Plain(_) => {}
            Self::Coded(codecs) => codecs.rollback(),
            Self::Rounds(rounds) => rounds.rollback(),
        }
    }

    /// Adds what it remembers, each name behind `prefix`.
    pub(super) fn save(&self, prefix: &str, saved: &mut Vec<(String, Vec<f32>)>) -> Result<(), OptimError> {
        match self {
            Self::Plain(_) => Ok(()),
            Self::Coded(codecs) => codecs.save(prefix, saved),
            Self::Rounds(rounds) => rounds.save(prefix, saved),
        }
    }

    /// Restores what [`Self::save`] gave.
    pub(super) fn restore<'a>(
        &mut self,
        prefix: &str,
        get: &dyn Fn(&str) -> Option<&'a [f32]>,
    ) -> Result<(), OptimError> {
        match self {
            Self::Plain(_) => Ok(()),
            Self::Coded(codecs) => codecs.restore(prefix, get),
            Self::Rounds(rounds) => rounds.restore(prefix, get),
        }
    }
}
