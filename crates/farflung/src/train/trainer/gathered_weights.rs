//! A model's weights on their way into one rank's file: each rank of the first replica that trains it, and of
//! those that divide its experts, sends its own tensors in chunks, so that no rank has the whole model in
//! memory. The rank is rank 0, or the first rank of each path.

use std::collections::BTreeMap;
use std::io::{self, Write};

use farflung_base::{Nanos, Rank, StageId};
use farflung_comm::Communicator;
use farflung_optim::ShardPiece;
use farflung_parallel::Coordinates;
use farflung_tensor::Param;
use farflung_zoo::weights::StoredLayout;
use farflung_zoo::{Cut, Stage, TensorSpec};

use super::Trainer;
use super::gather::gives;
use crate::floats::{floats, le_bytes};
use crate::train::executor::Executor;
use crate::train::fingerprint::digest;
use crate::train::pieces::{
    CHUNK_LEN, CHUNK_WINDOW, DividedTensor, HeldPiece, Piece, PieceHolder, PieceValues, StateKind,
    with_values,
};
use crate::train::zero;
use crate::{Error, Result};

/// Tag of the chunks, and of the answers to them. Far from the tags of a step's messages.
const CHUNK: u32 = u32::MAX - (2 << 16);
const ANSWER: u32 = CHUNK - 1;
/// Answers are sent to all ranks this many times within the deadline, because the tensors of one rank are taken
/// rank after those of another: none waits in vain, however long the whole takes.
const SIGNS_PER_DEADLINE: u64 = 4;

/// What the rank that writes the file tells another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Answer {
    /// One of its chunks was taken.
    Taken,
    /// Rank 0 is busy with another rank's.
    Busy,
    /// All tensors were taken.
    Over,
}

impl Answer {
    fn to_bytes(self) -> Vec<u8> {
        vec![self as u8]
    }

    fn of_bytes(bytes: &[u8]) -> Option<Self> {
        let all = [Self::Taken, Self::Busy, Self::Over];
        all.into_iter().find(|answer| bytes == [*answer as u8])
    }
}

/// A tensor of the model, and the ranks that have it: of the first replica, or of the one with the expert.
struct OwnedTensor {
    /// One rank whose copy counts, or several of which each has a piece.
    holders: Vec<TensorHolder>,
    stage: StageId,
    spec: TensorSpec,
}

/// A rank that has a tensor, or a piece of it.
struct TensorHolder {
    at: Coordinates,
    piece: HeldPiece,
    /// The first element of what it has in its flat buffer.
    start: usize,
}

impl Trainer {
    /// Returns the weights that this rank saves: on rank 0 of several stages those of the whole model if it is
    /// `gathered`, else those of its own parts. A tensor that two parts share is listed once.
    pub(in crate::train) fn weights(&self, gathered: bool) -> Result<Vec<Piece<'_>>> {
        if gathered && self.gathers() {
            return self.owned()?.iter().map(|tensor| self.piece(tensor)).collect();
        }
        let pieces = self.pieces_of(|kind| *kind == StateKind::Parameters);
        if !self.is_divided() {
            return Ok(pieces.collect());
        }
        let by_name: BTreeMap<_, _> = pieces.map(|piece| (piece.name.clone(), piece)).collect();
        Ok(by_name.into_values().collect())
    }

    /// Returns whether this rank's checkpoints have the weights of other ranks' parts.
    pub(in crate::train) fn gathers(&self) -> bool {
        self.is_divided() && self.comm().rank() == self.givers.to
    }

    /// Returns whether no rank has the whole model.
    pub(super) fn is_divided(&self) -> bool {
        self.executor.placement.depth() > 1 || self.division.divides() || self.givers.shards.is_some()
    }

    /// Returns the tensors of the model in the order of its layers, each once.
    fn owned(&self) -> Result<Vec<OwnedTensor>> {
        let Executor { placement, device, .. } = &self.executor;
        let spec = self.stage().spec();
        let (mut places, mut owned) = (BTreeMap::new(), Vec::<OwnedTensor>::new());
        let replicas = &self.givers.replicas;
        for stage in (0..placement.depth()).map(StageId) {
            let layers = self.schedule.layers[stage.index()].clone();
            for holder in self.division.holders(replicas.clone(), placement.rank(stage)) {
                let there = self.division.counted_stage((spec, layers.clone()), holder, device)?;
                for (holder, spec) in self.holds(&there, holder)? {
                    let place = *places.entry(spec.name.clone()).or_insert(owned.len());
                    match owned.get_mut(place) {
                        None => owned.push(OwnedTensor { holders: vec![holder], stage, spec: spec.clone() }),
                        // The token table of the last stage counts with the first one.
                        Some(tensor) if tensor.stage == stage => tensor.holders.push(holder),
                        Some(_) => {}
                    }
                }
            }
        }
        let whole = self.stage().spec().tensors();
        let order: BTreeMap<&str, usize> =
            whole.iter().enumerate().map(|(at, spec)| (spec.name.as_str(), at)).collect();
        owned.sort_by_key(|tensor| order.get(tensor.spec.name.as_str()).copied());
        Ok(owned)
    }

    /// Returns the tensors of a stage that the rank at some coordinates gives, and what it has of each.
    fn holds<'s>(&self, there: &'s Stage, at: Coordinates) -> Result<Vec<(TensorHolder, &'s TensorSpec)>> {
        let width = HeldPiece::Width(self.division.width_of(at)?);
        let Some(plan) = &self.givers.shards else {
            let given = there.tensors().filter(|(_, spec)| gives(spec, at, &self.givers.replicas));
            return Ok(given
                .map(|(p, spec)| (TensorHolder { at, piece: width.clone(), start: p.start }, spec))
                .collect());
        };
        let own = zero::own_shard(zero::shards(plan, there)?.as_ref(), there, at);
        let pieces =
            there.tensors().flat_map(|(p, spec)| own.within(&p.range()).map(move |held| (p, held, spec)));
        let piece = |(p, held, spec): (&Param, ShardPiece, &'s TensorSpec)| {
            let is_whole = held.flat == p.range();
            let elements = held.flat.start - p.start..held.flat.end - p.start;
            let piece = if is_whole { width.clone() } else { HeldPiece::Elements(elements) };
            (TensorHolder { at, piece, start: held.at }, spec)
        };
        Ok(pieces.map(piece).collect())
    }

    fn piece(&self, tensor: &OwnedTensor) -> Result<Piece<'_>> {
        let OwnedTensor { holders, stage, spec } = tensor;
        let holder = |TensorHolder { at, piece, start }: &TensorHolder| {
            let rank = self.division.rank(*at)?;
            let part = self.executor.parts.get(stage).filter(|_| rank == self.comm().rank());
            let own = part.map(|part| ((&part.params).into(), *start));
            Ok(PieceHolder { rank, piece: piece.clone(), own })
        };
        let mut holders = holders.iter().map(holder).collect::<Result<Vec<_>>>()?;
        let values = match (holders.len(), holders.pop()) {
            (1, Some(PieceHolder { rank, own, .. })) => match own {
                // A rank that lacks experts has the others at other places than a whole stage.
                Some((flat, start)) => PieceValues::Flat(flat, start),
                None => PieceValues::Elsewhere(rank),
            },
            (_, last) => {
                holders.extend(last);
                PieceValues::Divided(DividedTensor { spec: spec.clone(), holders })
            }
        };
        Ok(Piece { name: spec.name.clone(), shape: spec.shape.clone(), cut: false, values })
    }

    /// Sends the tensors that rank 0 writes for this rank, while it writes them. Returns when rank 0 has those
    /// of all ranks; on rank 0, and without stages, at once.
    pub(in crate::train) fn send_weights(&self, stored: &StoredLayout) -> Result<()> {
        if !self.is_divided() || self.gathers() {
            return Ok(());
        }
        self.send_tensors(Some(stored), |_| true)
    }

    /// Returns whether several ranks have pieces of a tensor.
    pub(super) fn is_divided_tensor(&self, spec: &TensorSpec) -> bool {
        self.givers.shards.is_some() || self.division.divides_width() && spec.cut != Cut::Whole
    }

    /// Returns the hashes of the tensors of which several ranks have pieces, on the rank that has the model
    /// then. A collective, if there are any.
    pub(super) fn divided_digests(&self) -> Result<Vec<(String, blake3::Hash)>> {
        if !self.division.divides_width() && self.givers.shards.is_none() {
            return Ok(Vec::new());
        }
        if !self.gathers() {
            self.send_tensors(None, |spec| self.is_divided_tensor(spec))?;
            return Ok(Vec::new());
        }
        let (mut incoming, mut digests) = (self.receive_weights(true), Vec::new());
        for tensor in self.owned()? {
            if !self.is_divided_tensor(&tensor.spec) {
                continue;
            }
            let whole = match self.piece(&tensor)?.values {
                PieceValues::Divided(divided) => incoming.join(&divided),
                PieceValues::Elsewhere(rank) => incoming.values(rank, tensor.spec.count()),
                PieceValues::Flat(flat, start) => {
                    with_values(flat, start, tensor.spec.count(), <[f32]>::to_vec).map_err(io::Error::other)
                }
                PieceValues::Host(values) => Ok(values),
            };
            let Ok(whole) = whole else { break };
            digests.push((tensor.spec.name, digest(&whole)));
        }
        incoming.finish(std::iter::empty())?;
        Ok(digests)
    }

    /// Sends this rank's tensors, or its pieces of them, to the rank that has the model then: whole tensors as
    /// files have them, or as memory has them. Returns when that rank has those of all ranks.
    fn send_tensors(
        &self,
        as_stored: Option<&StoredLayout>,
        wanted: impl Fn(&TensorSpec) -> bool,
    ) -> Result<()> {
        let of_files = StoredLayout::of(self.stage().spec());
        let stored = as_stored.unwrap_or(&of_files);
        let comm = self.comm();
        let mut unanswered = 0;
        let (gives, to) = (self.givers.replicas.contains(&self.replica), self.givers.to);
        for tensor in self.owned()?.iter().filter(|tensor| gives && wanted(&tensor.spec)) {
            for mut piece in self.piece(tensor)?.here() {
                piece.cut |= as_stored.is_none();
                let sent = piece.stored_values(stored, |values| {
                    for chunk in values.chunks(CHUNK_LEN) {
                        while unanswered == CHUNK_WINDOW {
                            unanswered -= usize::from(answer(comm, to)? == Answer::Taken);
                        }
                        comm.start_send(to, CHUNK, le_bytes(chunk)).wait()?;
                        unanswered += 1;
                    }
                    Ok::<_, Error>(())
                });
                sent??;
            }
        }
        while answer(comm, to)? != Answer::Over {}
        Ok(())
    }

    /// Returns what receives the tensors of other ranks, if they are `gathered`.
    pub(in crate::train) fn receive_weights(&self, gathered: bool) -> IncomingWeights<'_> {
        let (comm, receives) = (self.comm(), gathered && self.gathers());
        // Ranks that do not answer any more are left out. They come after all whose parts are gathered, so that
        // these keep their numbers.
        let present =
            (0..).map(Rank).zip(&self.members).filter(|(_, rank)| self.givers.others.contains(rank));
        let others = if receives { present.map(|(rank, _)| rank).collect() } else { Vec::new() };
        IncomingWeights { comm, others, told: comm.now(), failed: None }
    }
}

/// Waits for what the rank that writes the file says next.
fn answer(comm: &Communicator, from: Rank) -> Result<Answer> {
    Answer::of_bytes(&comm.recv(from, ANSWER)?).ok_or_else(|| Error::Message {
        message: format!("the answer of {from} to weights for its checkpoint"),
        problem: "is not one of those known",
    })
}

/// Weights that other ranks send to the one that writes them.
#[derive(Debug)]
pub(in crate::train) struct IncomingWeights<'a> {
    comm: &'a Communicator,
    /// The ranks that wait until all weights were received.
    others: Vec<Rank>,
    /// When they were last told that it goes on.
    told: Nanos,
    failed: Option<Error>,
}

impl IncomingWeights<'_> {
    /// Writes the next tensor of `from`, of `len` values.
    ///
    /// Errors: those of the writer. Of the link: [`IncomingWeights::finish`] returns them.
    pub(in crate::train) fn write(&mut self, from: Rank, len: usize, out: &mut dyn Write) -> io::Result<()> {
        let mut written = Ok(());
        for begin in (0..len).step_by(CHUNK_LEN) {
            let bytes = self.chunk(from, (len - begin).min(CHUNK_LEN))?;
            // A tensor is received to its end even if the disk is full: its sender waits for the answers.
            written = written.and_then(|()| out.write_all(&bytes));
        }
        written
    }

    /// Returns the next tensor, of which other ranks send their pieces.
    ///
    /// Errors: of the link: [`IncomingWeights::finish`] returns them.
    pub(in crate::train) fn join(&mut self, divided: &DividedTensor<'_>) -> io::Result<Vec<f32>> {
        let mut whole = vec![0.0; divided.spec.count()];
        for holder in &divided.holders {
            let len = divided.shape_of(holder).iter().product();
            let piece = match holder.own {
                Some((flat, start)) => {
                    with_values(flat, start, len, <[f32]>::to_vec).map_err(io::Error::other)?
                }
                None => self.values(holder.rank, len)?,
            };
            divided.put(holder, &piece, &mut whole);
        }
        Ok(whole)
    }

    /// Returns the next `len` values of `from`.
    ///
    /// Errors: of the link: [`IncomingWeights::finish`] returns them.
    fn values(&mut self, from: Rank, len: usize) -> io::Result<Vec<f32>> {
        let mut bytes = Vec::new();
        self.write(from, len, &mut bytes)?;
        Ok(floats(&bytes, len).unwrap_or_default())
    }

    fn chunk(&mut self, from: Rank, len: usize) -> io::Result<Vec<u8>> {
        let arrived = self.comm.recv(from, CHUNK).map_err(Error::from).and_then(|bytes| {
            let problem = "do not have the length of a part of a tensor";
            let message = || format!("the weights that {from} sent for the checkpoint");
            if bytes.len() != len * size_of::<f32>() {
                return Err(Error::Message { message: message(), problem });
            }
            self.comm.start_send(from, ANSWER, Answer::Taken.to_bytes()).wait()?;
            self.go_on()?;
            Ok(bytes)
        });
        arrived.map_err(|error| {
            let text = error.to_string();
            self.failed = Some(error);
            io::Error::other(text)
        })
    }

    /// Tells the other ranks from time to time that it goes on, also while this rank's own tensors are written.
    ///
    /// Errors: those of links.
    pub(in crate::train) fn go_on(&mut self) -> Result<()> {
        let now = self.comm.now();
        if now.saturating_sub(self.told).0.saturating_mul(SIGNS_PER_DEADLINE) < self.comm.deadline().0 {
            return Ok(());
        }
        self.told = now;
        self.tell(Answer::Busy)
    }

    fn tell(&self, answer: Answer) -> Result<()> {
        let tell = |&to: &Rank| Ok(self.comm.start_send(to, ANSWER, answer.to_bytes()).wait()?);
        self.others.iter().try_for_each(tell)
    }

    /// Receives the tensors of `rest` that were not written, after a failure of the disk, and lets the other
    /// ranks go on.
    ///
    /// Errors: the failure of a link, if there was one.
    pub(in crate::train) fn finish<'p>(mut self, rest: impl Iterator<Item = &'p Piece<'p>>) -> Result<()> {
        for piece in rest {
            match &piece.values {
                PieceValues::Elsewhere(from) if self.failed.is_none() => {
                    let _ = self.write(*from, piece.len(), &mut io::sink());
                }
                PieceValues::Divided(divided) if self.failed.is_none() => drop(self.join(divided)),
                _ => {}
            }
        }
        match self.failed.take() {
            Some(error) => Err(error),
            None => self.tell(Answer::Over),
        }
    }
}
