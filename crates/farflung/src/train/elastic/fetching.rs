//! Decides which chunk is requested from which donor next. Each holder of a blob gets as many requests as it
//! can answer, and a chunk that is wrong or late is requested from another holder. A state machine without a
//! clock or network of its own.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use farflung_base::{Nanos, Rank};

use super::blobs::{
    BlobReply, BlobRequest, Hash, Label, chunk_range, chunk_size, chunks_of, hash_of, root_of,
};

/// Minimum and maximum number of open requests to one donor.
const WINDOW: std::ops::RangeInclusive<usize> = 2..=64;
/// Below this time of an answer the number of open requests grows. It is long enough to keep a link around the
/// world busy.
const QUICK: Nanos = Nanos::from_millis(250);
/// Above this time of an answer the number of open requests shrinks.
const SLOW: Nanos = Nanos::from_millis(750);
/// Time after which a chunk is late if its donor has not answered any request yet.
const FIRST: Nanos = Nanos::from_millis(1_000);
/// A donor gets no more requests if its next chunk would take more than this many times the time in which all
/// donors together send the rest.
const TAIL: f64 = 1.5;
/// Weight of the newest measurement in the average of a donor's rate.
const NEWEST: f64 = 0.25;

/// Minimum bytes of an answer from which a rate is measured.
const LEAST: usize = 8 << 10;

/// A blob to be fetched.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Wanted {
    /// Name and length of the blob.
    pub(super) label: Label,
    /// Ranks that have it.
    pub(super) holders: BTreeSet<Rank>,
}

/// Received and verified chunks of each blob. They are kept if a fetch is interrupted.
#[derive(Debug, Clone, Default)]
pub(super) struct ChunkStore(BTreeMap<Hash, Stored>);

#[derive(Debug, Clone, Default)]
struct Stored {
    /// Hashes of the chunks; `None` until they have been received.
    hashes: Option<Vec<Hash>>,
    chunks: BTreeMap<u32, Vec<u8>>,
}

impl ChunkStore {
    /// Drops chunks of all other blobs.
    pub(super) fn keep(&mut self, wanted: &[Wanted]) {
        self.0.retain(|root, _| wanted.iter().any(|wanted| wanted.label.root == *root));
    }

    /// Removes a blob and returns its bytes; `None` if chunks are missing.
    pub(super) fn take(&mut self, label: &Label) -> Option<Vec<u8>> {
        let stored = self.0.remove(&label.root)?;
        let bytes = stored.chunks.into_values().collect::<Vec<_>>().concat();
        (bytes.len() as u64 == label.len).then_some(bytes)
    }
}

/// Open requests to a donor, and measurements of its answers.
#[derive(Debug, Default)]
struct Donor {
    window: usize,
    asked: VecDeque<(BlobRequest, Nanos)>,
    /// Time that its last answer took.
    latency: Option<Nanos>,
    /// Bytes a second, measured between its answers.
    rate: Option<f64>,
    /// Time of its last answer.
    answered: Nanos,
    /// Whether it has sent wrong data.
    is_wrong: bool,
    /// Bytes of the chunks received from it.
    gave: u64,
}

/// A blob that is being fetched.
#[derive(Debug)]
struct Blob {
    wanted: Wanted,
    queue: VecDeque<BlobRequest>,
    is_whole: bool,
}

/// A fetch in progress.
#[derive(Debug)]
pub(super) struct Fetching<'a> {
    store: &'a mut ChunkStore,
    blobs: Vec<Blob>,
    donors: BTreeMap<Rank, Donor>,
    /// Number of chunks still to be received.
    missing: u64,
    /// Bytes of the largest chunk.
    chunk: u64,
}

/// Error: no remaining donor can send a blob.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct NoHolder;

impl<'a> Fetching<'a> {
    /// Starts a fetch. `store` may already contain some chunks of the blobs.
    pub(super) fn new(wanted: Vec<Wanted>, store: &'a mut ChunkStore) -> Self {
        store.keep(&wanted);
        let chunk = wanted.iter().map(|wanted| chunk_size(wanted.label.len)).max().unwrap_or(1);
        let holders = wanted.iter().flat_map(|wanted| &wanted.holders);
        let donor = |&rank: &Rank| (rank, Donor { window: *WINDOW.start(), ..Donor::default() });
        let donors = holders.map(donor).collect();
        let blobs = wanted.into_iter().map(|wanted| Blob {
            queue: VecDeque::from([BlobRequest::Hashes { root: wanted.label.root }]),
            wanted,
            is_whole: false,
        });
        let mut fetching = Self { store, blobs: blobs.collect(), donors, missing: 0, chunk };
        for number in 0..fetching.blobs.len() {
            let Label { root, len } = fetching.blobs[number].wanted.label;
            let stored = fetching.store.0.entry(root).or_default();
            fetching.missing += chunks_of(len) - (stored.chunks.len() as u64).min(chunks_of(len));
            if stored.hashes.is_some() || chunks_of(len) == 1 {
                fetching.queue_chunks(number);
            }
        }
        fetching
    }

    /// Queues the missing chunks of a blob. Called when the hashes of its chunks are known, or if it has only
    /// one chunk: the blob's name is enough to verify that one.
    fn queue_chunks(&mut self, number: usize) {
        let blob = &mut self.blobs[number];
        let Label { root, len } = blob.wanted.label;
        let Some(stored) = self.store.0.get(&root) else { return };
        let numbers = (0..chunks_of(len) as u32).filter(|number| !stored.chunks.contains_key(number));
        blob.queue = numbers.map(|number| BlobRequest::Chunk { root, number }).collect();
        blob.is_whole = blob.queue.is_empty();
    }

    /// Returns whether all blobs are complete.
    pub(super) fn is_done(&self) -> bool {
        self.blobs.iter().all(|blob| blob.is_whole)
    }

    /// Returns the bytes of the chunks still to be received, rounded up to whole chunks.
    pub(super) fn left(&self) -> u64 {
        self.missing * self.chunk
    }

    /// Returns the bytes of the answer to a request.
    pub(super) fn size_of(&self, item: &BlobRequest) -> u64 {
        let Some(number) = self.number_of(item) else { return 0 };
        let len = self.blobs[number].wanted.label.len;
        match *item {
            BlobRequest::Chunk { number, .. } => {
                chunk_range(len, number).map_or(0, |range| range.len() as u64)
            }
            BlobRequest::Hashes { .. } => chunks_of(len) * size_of::<Hash>() as u64,
            BlobRequest::Probe { len, .. } => u64::from(len),
        }
    }

    /// Returns whether a donor was asked for what it has sent: false for an answer to an earlier fetch. True
    /// for bytes that cannot be parsed, which [`Fetching::arrived`] handles.
    pub(super) fn is_asked(&self, rank: Rank, bytes: &[u8]) -> bool {
        let asked = self.donors.get(&rank).map(|donor| &donor.asked);
        BlobReply::from_bytes(bytes)
            .is_none_or(|reply| asked.is_some_and(|asked| asked.iter().any(|(item, _)| *item == reply.item)))
    }

    /// Returns the donors that may still be asked.
    pub(super) fn donors(&self) -> Vec<Rank> {
        self.donors.iter().filter(|(_, donor)| !donor.is_wrong).map(|(&rank, _)| rank).collect()
    }

    /// Returns the number of donors that sent chunks.
    pub(super) fn gave(&self) -> usize {
        self.donors.values().filter(|donor| donor.gave > 0).count()
    }

    /// Returns the donor whose oldest open request is the oldest of all.
    pub(super) fn latest(&self) -> Option<Rank> {
        let first = |(&rank, donor): (&Rank, &Donor)| donor.asked.front().map(|&(_, at)| (at, rank));
        self.donors.iter().filter(|(_, donor)| !donor.is_wrong).filter_map(first).min().map(|(_, rank)| rank)
    }

    /// Returns the next item to request from a donor, and records the request. `None` if the donor has enough
    /// open requests, or if the other donors will send the rest sooner.
    pub(super) fn next(&mut self, rank: Rank, now: Nanos) -> Option<BlobRequest> {
        let donor = self.donors.get(&rank).filter(|donor| !donor.is_wrong)?;
        if donor.asked.len() >= donor.window {
            return None;
        }
        let is_slow = self.is_too_slow(donor, now);
        let others: BTreeSet<Rank> = self.busy(now).map(|(rank, _)| rank).filter(|&r| r != rank).collect();
        let gives = |blob: &&mut Blob| {
            let holders = &blob.wanted.holders;
            holders.contains(&rank) && !(is_slow && holders.iter().any(|holder| others.contains(holder)))
        };
        let mut blobs = self.blobs.iter_mut().filter(gives);
        let item = blobs.find_map(|blob| blob.queue.pop_front());
        let item = item.or_else(|| self.late(rank, now))?;
        self.donors.get_mut(&rank)?.asked.push_back((item, now));
        Some(item)
    }

    /// Returns the donors without late answers, with their rates.
    fn busy(&self, now: Nanos) -> impl Iterator<Item = (Rank, f64)> + '_ {
        let busy = move |(&rank, donor): (&Rank, &Donor)| {
            let is_late = donor.asked.front().is_some_and(|&(_, at)| donor.is_late(at, now));
            donor.rate.filter(|_| !donor.is_wrong && !is_late).map(|rate| (rank, rate))
        };
        self.donors.iter().filter_map(busy)
    }

    /// Returns whether all donors together will send the rest well before this donor could send one more chunk;
    /// see [`TAIL`].
    fn is_too_slow(&self, donor: &Donor, now: Nanos) -> bool {
        let Some(rate) = donor.rate else { return false };
        let rates: f64 = self.busy(now).map(|(_, rate)| rate).sum();
        let chunks = |count: u64, rate: f64| (count * self.chunk) as f64 / rate;
        chunks(donor.asked.len() as u64 + 1, rate) > TAIL * chunks(self.missing + 1, rates)
    }

    /// Returns an item that another donor is late with and that this donor has.
    fn late(&self, rank: Rank, now: Nanos) -> Option<BlobRequest> {
        let holds = |item: &BlobRequest| {
            let blob = self.number_of(item).map(|number| &self.blobs[number]);
            blob.is_some_and(|blob| !blob.is_whole && blob.wanted.holders.contains(&rank))
        };
        let is_asked = |item: &BlobRequest| self.donors[&rank].asked.iter().any(|(asked, _)| asked == item);
        let others = self.donors.iter().filter(|&(&other, _)| other != rank);
        // An item is also late if this donor could have sent it twice by now, since this donor has nothing else
        // to do.
        let twice = self.donors[&rank].latency.map_or(Nanos::MAX, |own| own.saturating_add(own));
        let is_due = |donor: &Donor, at| donor.is_late(at, now) || now.saturating_sub(at) > twice;
        let due = others.flat_map(|(_, donor)| donor.asked.iter().filter(move |(_, at)| is_due(donor, *at)));
        due.map(|&(item, _)| item).find(|item| self.is_missing(item) && holds(item) && !is_asked(item))
    }

    /// Returns the index of the blob to which an item belongs.
    fn number_of(&self, item: &BlobRequest) -> Option<usize> {
        let root = item.root()?;
        self.blobs.iter().position(|blob| blob.wanted.label.root == *root)
    }

    fn is_missing(&self, item: &BlobRequest) -> bool {
        let stored = item.root().and_then(|root| self.store.0.get(root));
        match item {
            BlobRequest::Probe { .. } => false,
            BlobRequest::Hashes { .. } => stored.is_none_or(|stored| stored.hashes.is_none()),
            BlobRequest::Chunk { number, .. } => {
                stored.is_none_or(|stored| !stored.chunks.contains_key(number))
            }
        }
    }

    /// Processes an answer of a donor.
    ///
    /// Errors: [`NoHolder`] if a blob has no holder left that can be asked.
    pub(super) fn arrived(&mut self, rank: Rank, bytes: &[u8], now: Nanos) -> Result<(), NoHolder> {
        let Some(donor) = self.donors.get_mut(&rank) else { return Ok(()) };
        let reply = BlobReply::from_bytes(bytes);
        let place =
            reply.as_ref().and_then(|reply| donor.asked.iter().position(|(item, _)| *item == reply.item));
        let (Some(reply), Some(place)) = (reply, place) else {
            // The answer matches no request, so the donor is not trusted any more.
            return self.distrust(rank);
        };
        let at = donor.asked.remove(place).map_or(now, |(_, at)| at);
        donor.measure(at, now, reply.bytes.as_ref().map_or(0, Vec::len));
        let Some(number) = self.number_of(&reply.item) else { return Ok(()) };
        let Some(bytes) = reply.bytes else {
            // The donor no longer has it.
            self.blobs[number].wanted.holders.remove(&rank);
            self.ask_again(number, reply.item);
            return self.check(number);
        };
        if !self.is_missing(&reply.item) {
            return Ok(());
        }
        let right = match reply.item {
            BlobRequest::Hashes { .. } => self.take_hashes(number, &bytes),
            BlobRequest::Chunk { number: chunk, .. } => self.take_chunk(number, chunk, bytes, rank),
            BlobRequest::Probe { .. } => true,
        };
        if right {
            return Ok(());
        }
        tracing::error!(
            rank = rank.0,
            "a chunk of the run's state has a wrong hash: it is requested from another member"
        );
        self.ask_again(number, reply.item);
        self.distrust(rank)
    }

    fn take_hashes(&mut self, number: usize, bytes: &[u8]) -> bool {
        let Label { root, len } = self.blobs[number].wanted.label;
        let (hashes, rest) = bytes.as_chunks::<32>();
        let right = rest.is_empty() && hashes.len() as u64 == chunks_of(len) && root_of(hashes) == root;
        if right {
            self.store.0.entry(root).or_default().hashes = Some(hashes.to_vec());
            self.queue_chunks(number);
        }
        right
    }

    fn take_chunk(&mut self, number: usize, chunk: u32, bytes: Vec<u8>, from: Rank) -> bool {
        let Label { root, len } = self.blobs[number].wanted.label;
        let stored = self.store.0.entry(root).or_default();
        let (own, hashes) = (hash_of(&bytes), stored.hashes.as_ref());
        let agrees = match hashes {
            Some(hashes) => hashes.get(chunk as usize) == Some(&own),
            None => root_of(&[own]) == root,
        };
        let right = agrees && chunk_range(len, chunk).is_some_and(|range| range.len() == bytes.len());
        if right {
            let size = bytes.len() as u64;
            stored.chunks.insert(chunk, bytes);
            self.missing = self.missing.saturating_sub(1);
            self.blobs[number].is_whole = stored.chunks.len() as u64 == chunks_of(len);
            if let Some(donor) = self.donors.get_mut(&from) {
                donor.gave += size;
            }
        }
        right
    }

    fn ask_again(&mut self, number: usize, item: BlobRequest) {
        let is_asked = self.donors.values().flat_map(|donor| &donor.asked).any(|(asked, _)| *asked == item);
        if self.is_missing(&item) && !is_asked && !self.blobs[number].queue.contains(&item) {
            self.blobs[number].queue.push_front(item);
        }
    }

    /// Excludes a donor, and requests its open items from other donors.
    fn distrust(&mut self, rank: Rank) -> Result<(), NoHolder> {
        let Some(donor) = self.donors.get_mut(&rank) else { return Ok(()) };
        donor.is_wrong = true;
        let asked = std::mem::take(&mut donor.asked);
        for (item, _) in asked {
            if let Some(number) = self.number_of(&item) {
                self.ask_again(number, item);
            }
        }
        (0..self.blobs.len()).try_for_each(|number| self.check(number))
    }

    fn check(&self, number: usize) -> Result<(), NoHolder> {
        let blob = &self.blobs[number];
        let can = |rank: &Rank| self.donors.get(rank).is_some_and(|donor| !donor.is_wrong);
        if blob.is_whole || blob.wanted.holders.iter().any(can) { Ok(()) } else { Err(NoHolder) }
    }
}

impl Donor {
    /// Returns whether a request made at `at` should have been answered by now.
    fn is_late(&self, at: Nanos, now: Nanos) -> bool {
        let patience = self.latency.map_or(FIRST, |usual| usual.saturating_add(usual).max(QUICK));
        now.saturating_sub(at) > patience
    }

    /// Updates the measurements with an answer of `bytes` bytes to a request made at `at`.
    fn measure(&mut self, at: Nanos, now: Nanos, bytes: usize) {
        let latency = now.saturating_sub(at);
        self.latency = Some(latency);
        let (fewest, most) = (*WINDOW.start(), *WINDOW.end());
        if latency < QUICK {
            self.window = most.min(self.window + 1);
        } else if latency > SLOW {
            self.window = fewest.max(self.window - 1);
        }
        // If the request was made before the previous answer arrived, the donor was sending during the whole
        // time between the two answers.
        let busy = now.saturating_sub(self.answered.max(at)).as_secs_f64();
        if bytes >= LEAST && at < self.answered && busy > 0.0 {
            let rate = bytes as f64 / busy;
            self.rate = Some(self.rate.map_or(rate, |before| before + NEWEST * (rate - before)));
        }
        self.answered = now;
    }
}

#[cfg(test)]
mod tests;
