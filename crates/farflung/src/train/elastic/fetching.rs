//! Which chunk is asked of which donor next: each holder of a blob is asked for as much as it can send, and a
//! chunk that is wrong or late is asked of another. A state machine without a clock or a network of its own.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use farflung_base::{Nanos, Rank};

use super::shelf::{Hash, Item, Label, Reply, chunk_range, chunk_size, chunks_of, hash_of, root_of};

/// The fewest and the most chunks that are asked of a donor at a time.
const WINDOW: std::ops::RangeInclusive<usize> = 2..=64;
/// More are asked for while answers take less than this: enough for a line around the world to be busy.
const QUICK: Nanos = Nanos::from_millis(250);
/// Fewer are asked for when they take more.
const SLOW: Nanos = Nanos::from_millis(750);
/// Of a donor that has answered nothing yet, a chunk is late after so long.
const FIRST: Nanos = Nanos::from_millis(1_000);
/// A donor that could not send a chunk in this many times what all together need for the rest gets no more.
const TAIL: f64 = 1.5;
/// Weight of the newest measurement of a donor's rate.
const NEWEST: f64 = 0.25;

/// Shorter answers say nothing of the rate.
const LEAST: usize = 8 << 10;

/// A blob to be fetched.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Wanted {
    /// Which.
    pub(super) label: Label,
    /// Who has it.
    pub(super) holders: BTreeSet<Rank>,
}

/// Chunks that have come and are right, by blob: what stays of a fetch that was broken off.
#[derive(Debug, Clone, Default)]
pub(super) struct Store(BTreeMap<Hash, Stored>);

#[derive(Debug, Clone, Default)]
struct Stored {
    /// None until they are known.
    hashes: Option<Vec<Hash>>,
    chunks: BTreeMap<u32, Vec<u8>>,
}

impl Store {
    /// Drops what is not of these blobs.
    pub(super) fn keep(&mut self, wanted: &[Wanted]) {
        self.0.retain(|root, _| wanted.iter().any(|wanted| wanted.label.root == *root));
    }

    /// The bytes of a blob all of whose chunks are there.
    pub(super) fn take(&mut self, label: &Label) -> Option<Vec<u8>> {
        let stored = self.0.remove(&label.root)?;
        let bytes = stored.chunks.into_values().collect::<Vec<_>>().concat();
        (bytes.len() as u64 == label.len).then_some(bytes)
    }
}

/// What is asked of a donor and how it answers.
#[derive(Debug, Default)]
struct Donor {
    window: usize,
    asked: VecDeque<(Item, Nanos)>,
    /// What its last answer took.
    latency: Option<Nanos>,
    /// Bytes a second, as measured between its answers.
    rate: Option<f64>,
    /// When it last answered.
    answered: Nanos,
    /// It has sent something wrong.
    is_wrong: bool,
    /// Bytes of chunks that it gave.
    gave: u64,
}

/// A blob on its way.
#[derive(Debug)]
struct Blob {
    wanted: Wanted,
    queue: VecDeque<Item>,
    is_whole: bool,
}

/// A fetch under way.
#[derive(Debug)]
pub(super) struct Fetching<'a> {
    store: &'a mut Store,
    blobs: Vec<Blob>,
    donors: BTreeMap<Rank, Donor>,
    /// Chunks to come in all.
    missing: u64,
    /// Bytes of the largest.
    chunk: u64,
}

/// No member that is left can give a blob.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct NoHolder;

impl<'a> Fetching<'a> {
    /// Of blobs of which some chunks may be there already.
    pub(super) fn new(wanted: Vec<Wanted>, store: &'a mut Store) -> Self {
        store.keep(&wanted);
        let chunk = wanted.iter().map(|wanted| chunk_size(wanted.label.len)).max().unwrap_or(1);
        let holders = wanted.iter().flat_map(|wanted| &wanted.holders);
        let donor = |&rank: &Rank| (rank, Donor { window: *WINDOW.start(), ..Donor::default() });
        let donors = holders.map(donor).collect();
        let blobs = wanted.into_iter().map(|wanted| Blob {
            queue: VecDeque::from([Item::Hashes { root: wanted.label.root }]),
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

    /// The hashes of a blob's chunks are known, or it has but one chunk, whose hash follows from the name.
    fn queue_chunks(&mut self, number: usize) {
        let blob = &mut self.blobs[number];
        let Label { root, len } = blob.wanted.label;
        let Some(stored) = self.store.0.get(&root) else { return };
        let numbers = (0..chunks_of(len) as u32).filter(|number| !stored.chunks.contains_key(number));
        blob.queue = numbers.map(|number| Item::Chunk { root, number }).collect();
        blob.is_whole = blob.queue.is_empty();
    }

    /// Whether all blobs are there.
    pub(super) fn is_done(&self) -> bool {
        self.blobs.iter().all(|blob| blob.is_whole)
    }

    /// Donors that may still be asked.
    pub(super) fn donors(&self) -> Vec<Rank> {
        self.donors.iter().filter(|(_, donor)| !donor.is_wrong).map(|(&rank, _)| rank).collect()
    }

    /// How many donors gave chunks.
    pub(super) fn gave(&self) -> usize {
        self.donors.values().filter(|donor| donor.gave > 0).count()
    }

    /// The donor that has left a question unanswered for longest.
    pub(super) fn latest(&self) -> Option<Rank> {
        let first = |(&rank, donor): (&Rank, &Donor)| donor.asked.front().map(|&(_, at)| (at, rank));
        self.donors.iter().filter(|(_, donor)| !donor.is_wrong).filter_map(first).min().map(|(_, rank)| rank)
    }

    /// What to ask a donor for now; nothing where it has enough to do, or where others are faster with the
    /// rest.
    pub(super) fn next(&mut self, rank: Rank, now: Nanos) -> Option<Item> {
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

    /// Donors that answer in time, with their rates.
    fn busy(&self, now: Nanos) -> impl Iterator<Item = (Rank, f64)> + '_ {
        let busy = move |(&rank, donor): (&Rank, &Donor)| {
            let is_late = donor.asked.front().is_some_and(|&(_, at)| donor.is_late(at, now));
            donor.rate.filter(|_| !donor.is_wrong && !is_late).map(|rate| (rank, rate))
        };
        self.donors.iter().filter_map(busy)
    }

    /// Whether the others have the rest together before this one has sent one more chunk.
    fn is_too_slow(&self, donor: &Donor, now: Nanos) -> bool {
        let Some(rate) = donor.rate else { return false };
        let rates: f64 = self.busy(now).map(|(_, rate)| rate).sum();
        let chunks = |count: u64, rate: f64| (count * self.chunk) as f64 / rate;
        chunks(donor.asked.len() as u64 + 1, rate) > TAIL * chunks(self.missing + 1, rates)
    }

    /// Something that another donor is late with.
    fn late(&self, rank: Rank, now: Nanos) -> Option<Item> {
        let holds = |item: &Item| {
            let blob = self.number_of(item).map(|number| &self.blobs[number]);
            blob.is_some_and(|blob| !blob.is_whole && blob.wanted.holders.contains(&rank))
        };
        let is_asked = |item: &Item| self.donors[&rank].asked.iter().any(|(asked, _)| asked == item);
        let others = self.donors.iter().filter(|&(&other, _)| other != rank);
        // Late is also what this one would have sent twice by now: it has nothing else to do.
        let twice = self.donors[&rank].latency.map_or(Nanos::MAX, |own| own.saturating_add(own));
        let is_due = |donor: &Donor, at| donor.is_late(at, now) || now.saturating_sub(at) > twice;
        let due = others.flat_map(|(_, donor)| donor.asked.iter().filter(move |(_, at)| is_due(donor, *at)));
        due.map(|&(item, _)| item).find(|item| self.is_missing(item) && holds(item) && !is_asked(item))
    }

    /// The blob that something is of.
    fn number_of(&self, item: &Item) -> Option<usize> {
        let root = item.root()?;
        self.blobs.iter().position(|blob| blob.wanted.label.root == *root)
    }

    fn is_missing(&self, item: &Item) -> bool {
        let stored = item.root().and_then(|root| self.store.0.get(root));
        match item {
            Item::Probe { .. } => false,
            Item::Hashes { .. } => stored.is_none_or(|stored| stored.hashes.is_none()),
            Item::Chunk { number, .. } => stored.is_none_or(|stored| !stored.chunks.contains_key(number)),
        }
    }

    /// Takes up what a donor has sent.
    ///
    /// Errors: [`NoHolder`] where a blob has no holder left that can be asked.
    pub(super) fn arrived(&mut self, rank: Rank, bytes: &[u8], now: Nanos) -> Result<(), NoHolder> {
        let Some(donor) = self.donors.get_mut(&rank) else { return Ok(()) };
        let reply = Reply::from_bytes(bytes);
        let place =
            reply.as_ref().and_then(|reply| donor.asked.iter().position(|(item, _)| *item == reply.item));
        let (Some(reply), Some(place)) = (reply, place) else {
            // Nobody asked it for that.
            return self.distrust(rank);
        };
        let at = donor.asked.remove(place).map_or(now, |(_, at)| at);
        donor.measure(at, now, reply.bytes.as_ref().map_or(0, Vec::len));
        let Some(number) = self.number_of(&reply.item) else { return Ok(()) };
        let Some(bytes) = reply.bytes else {
            // It does not have it any more.
            self.blobs[number].wanted.holders.remove(&rank);
            self.ask_again(number, reply.item);
            return self.check(number);
        };
        if !self.is_missing(&reply.item) {
            return Ok(());
        }
        let right = match reply.item {
            Item::Hashes { .. } => self.take_hashes(number, &bytes),
            Item::Chunk { number: chunk, .. } => self.take_chunk(number, chunk, bytes, rank),
            Item::Probe { .. } => true,
        };
        if right {
            return Ok(());
        }
        tracing::error!(rank = rank.0, "a chunk of the run's state is wrong: another member is asked for it");
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

    fn ask_again(&mut self, number: usize, item: Item) {
        let is_asked = self.donors.values().flat_map(|donor| &donor.asked).any(|(asked, _)| *asked == item);
        if self.is_missing(&item) && !is_asked && !self.blobs[number].queue.contains(&item) {
            self.blobs[number].queue.push_front(item);
        }
    }

    /// A donor is asked no more; what it was asked for is asked of others.
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
    /// Whether what it was asked for at some time should be here.
    fn is_late(&self, at: Nanos, now: Nanos) -> bool {
        let patience = self.latency.map_or(FIRST, |usual| usual.saturating_add(usual).max(QUICK));
        now.saturating_sub(at) > patience
    }

    /// An answer of so many bytes to a question of `at` is here.
    fn measure(&mut self, at: Nanos, now: Nanos, bytes: usize) {
        let latency = now.saturating_sub(at);
        self.latency = Some(latency);
        let (fewest, most) = (*WINDOW.start(), *WINDOW.end());
        if latency < QUICK {
            self.window = most.min(self.window + 1);
        } else if latency > SLOW {
            self.window = fewest.max(self.window - 1);
        }
        // Between two answers it sent all the time, if it had been asked before the first of them.
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
