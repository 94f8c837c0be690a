//! All-reduce round a ring through a codec, encoded anew at each hop. It knows no codec.
//!
//! The first half sums: each hop decodes a partial sum, adds its own values, and encodes. Whoever completes a shard
//! encodes it once more, and those bytes go round unchanged, so that every rank ends with the same bits.

use std::sync::Arc;
use std::task::Poll;

use farflung_base::PeerId;

use crate::CommError;
use crate::coded::{Fold, Phase, Place, Slice, Work};
use crate::communicator::{Body, progress};
use crate::element::ReduceOp;
use crate::message::{Incoming, Outgoing};
use crate::transport::Port;

pub(crate) struct RecodedRing {
    work: Work<Slice>,
    /// Of `2 (n - 1)`.
    step: usize,
    /// On its way to the next rank; none before the step has begun.
    out: Option<Outgoing>,
    incoming: Incoming,
}

impl RecodedRing {
    pub(crate) fn new(place: Place, values: Slice, op: ReduceOp) -> Self {
        Self { work: Work::new(place, values, op), step: 0, out: None, incoming: Incoming::default() }
    }

    fn size(&self) -> usize {
        self.work.place.members.len()
    }

    /// The member so many before this one, and so the shard that it completes.
    fn behind(&self, by: usize) -> usize {
        let n = self.size();
        (self.work.place.me + 2 * n - by) % n
    }

    /// Runs the step that it is in as far as it can; returns whether all are over.
    fn advance(&mut self, port: &mut dyn Port) -> Result<bool, CommError> {
        let n = self.size();
        if n == 1 {
            let own = self.work.shard(0);
            let bytes = self.work.encode_reduced(own.clone())?;
            self.work.decode(own, &bytes, Fold::Replace)?;
            return Ok(true);
        }
        while self.step < 2 * (n - 1) {
            let sums = self.step < n - 1;
            if self.out.is_none() {
                // In the second half what goes out has been put there when it came in.
                let shard = self.work.shard(self.behind(self.step + 1));
                self.out = Some(Outgoing::new(self.work.encode(Phase::Worker, shard)?));
            }
            let (next, last) = (self.behind(n - 1), self.behind(1));
            let Place { name, members, tag, check, .. } = &self.work.place;
            let out = self.out.as_mut().expect("it was just put there");
            let sent = out.poll(port, members[next], *tag, *check)?;
            let received = self.incoming.poll(port, name, members[last], *tag, *check)?;
            if !(sent && received) {
                return Ok(false);
            }
            let bytes = std::mem::take(&mut self.incoming).bytes;
            self.step += 1;
            self.out = None;
            if sums {
                let shard = self.work.shard(self.behind(self.step + 1));
                self.work.decode(shard.clone(), &bytes, Fold::Add)?;
                if self.step == n - 1 {
                    let reduced = self.work.encode_reduced(shard.clone())?;
                    self.work.decode(shard, &reduced, Fold::Replace)?;
                    self.out = Some(Outgoing::new(reduced));
                }
            } else {
                let shard = self.work.shard(self.behind(self.step - (n - 1)));
                self.work.decode(shard, &bytes, Fold::Replace)?;
                self.out = Some(Outgoing::new(Arc::new(bytes)));
            }
        }
        Ok(true)
    }
}

impl Body for RecodedRing {
    type Output = Slice;

    fn poll(&mut self, port: &mut dyn Port) -> Poll<Result<(), CommError>> {
        match self.advance(port) {
            Ok(true) => Poll::Ready(Ok(())),
            Ok(false) => Poll::Pending,
            Err(e) => Poll::Ready(Err(e)),
        }
    }
    fn waits_for(&self) -> PeerId {
        self.work.place.members[self.behind(1)]
    }
    fn progress(&self) -> u32 {
        progress(self.work.place.tag, self.step)
    }
    fn finish(self) -> Slice {
        self.work.values
    }
}
