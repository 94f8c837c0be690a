//! Blobs that a member offers to others, identified by hash and sent in chunks that can be verified. It is a
//! service, so chunks are sent even while the rank computes.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use farflung_comm::{Answer, FRAME_BYTES, Question, Service};
use serde::{Deserialize, Serialize};

use crate::train::fault::Fault;

/// Minimum and maximum bytes of a chunk. The last chunk of a blob may be shorter. An answer with a chunk is one
/// frame, so that a service that is restarted cannot leave half of an answer behind.
const CHUNK_BYTES: std::ops::RangeInclusive<u64> = 16 << 10..=FRAME_BYTES as u64 - 1024;
/// Number of chunks of a blob, if the limits in `CHUNK_BYTES` allow it. It is large enough that donors of
/// unequal rates finish together.
const CHUNKS: u64 = 256;

/// Maximum bytes of a probe.
pub(super) const PROBE: u32 = 64 << 10;

/// A BLAKE3 hash.
pub(super) type Hash = [u8; 32];

/// Name and length of a blob.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) struct Label {
    /// Hash of the concatenated hashes of its chunks.
    pub(super) root: Hash,
    /// Length in bytes.
    pub(super) len: u64,
}

/// Returns the bytes of each chunk of a blob of `len` bytes.
pub(super) fn chunk_size(len: u64) -> u64 {
    (len / CHUNKS).clamp(*CHUNK_BYTES.start(), *CHUNK_BYTES.end())
}

/// Returns the number of chunks of a blob of `len` bytes: at least one.
pub(super) fn chunks_of(len: u64) -> u64 {
    len.div_ceil(chunk_size(len)).max(1)
}

/// Returns the byte range of chunk `number` in a blob of `len` bytes; `None` if there is no such chunk.
pub(super) fn chunk_range(len: u64, number: u32) -> Option<Range<usize>> {
    let number = u64::from(number);
    let start = number.checked_mul(chunk_size(len))?;
    let end = len.min(start.saturating_add(chunk_size(len)));
    let range = usize::try_from(start).ok()?..usize::try_from(end).ok()?;
    (number < chunks_of(len)).then_some(range)
}

/// Returns the hash of some bytes.
pub(super) fn hash_of(bytes: &[u8]) -> Hash {
    *blake3::hash(bytes).as_bytes()
}

/// Returns the hashes of the chunks of a blob.
fn hashes_of(bytes: &[u8]) -> Vec<Hash> {
    let len = bytes.len() as u64;
    let chunks = (0..chunks_of(len) as u32).filter_map(|number| chunk_range(len, number));
    chunks.map(|range| hash_of(&bytes[range])).collect()
}

/// Returns the name and length of a blob.
pub(super) fn label_of(bytes: &[u8]) -> Label {
    Label { root: root_of(&hashes_of(bytes)), len: bytes.len() as u64 }
}

/// Returns the name of a blob whose chunks have these hashes.
pub(super) fn root_of(hashes: &[Hash]) -> Hash {
    hash_of(hashes.as_flattened())
}

/// Request for a blob that another member offers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) enum BlobRequest {
    /// The hashes of a blob's chunks.
    Hashes {
        /// Name of the blob.
        root: Hash,
    },
    /// One chunk of a blob.
    Chunk {
        /// Name of the blob.
        root: Hash,
        /// Index of the chunk in the blob.
        number: u32,
    },
    /// Zero bytes that measure the rate of the connection.
    Probe {
        /// Number of bytes, at most [`PROBE`].
        len: u32,
        /// Index of this probe among several.
        number: u32,
    },
}

impl BlobRequest {
    /// Returns the name of the blob that is requested; `None` for a probe.
    pub(super) const fn root(&self) -> Option<&Hash> {
        match self {
            Self::Hashes { root } | Self::Chunk { root, .. } => Some(root),
            Self::Probe { .. } => None,
        }
    }

    /// Encodes the request.
    pub(super) fn to_bytes(self) -> Vec<u8> {
        postcard::to_stdvec(&self).expect("an item is plain data")
    }
}

/// Answer to a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct BlobReply {
    /// The item that was requested.
    pub(super) item: BlobRequest,
    /// Its bytes; `None` if the member does not offer it.
    pub(super) bytes: Option<Vec<u8>>,
}

impl BlobReply {
    /// Encodes the answer: a byte with the item's length, a byte that says whether the member offers it, the
    /// item, and its bytes.
    fn to_bytes(&self) -> Vec<u8> {
        let head = self.item.to_bytes();
        let body = self.bytes.as_deref().unwrap_or_default();
        let mut bytes = Vec::with_capacity(2 + head.len() + body.len());
        bytes.push(head.len() as u8);
        bytes.push(u8::from(self.bytes.is_some()));
        bytes.extend(head);
        bytes.extend(body);
        bytes
    }

    /// Decodes an answer; `None` if it is malformed.
    pub(super) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (&[len, there], rest) = bytes.split_first_chunk::<2>()?;
        let (head, body) = rest.split_at_checked(usize::from(len))?;
        let item = postcard::from_bytes(head).ok()?;
        match there {
            0 => body.is_empty().then_some(Self { item, bytes: None }),
            1 => Some(Self { item, bytes: Some(body.to_vec()) }),
            _ => None,
        }
    }
}

/// Bytes that others may fetch, and the hashes of their chunks.
#[derive(Debug)]
pub(super) struct Blob {
    bytes: Vec<u8>,
    hashes: Vec<Hash>,
}

impl Blob {
    /// Returns its bytes.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

/// All blobs that a member offers.
#[derive(Debug, Default)]
pub(super) struct OfferedBlobs {
    blobs: BTreeMap<Hash, Arc<Blob>>,
    /// For tests: the bit to flip in the next chunk that is sent.
    pub(super) fault: Option<Fault>,
}

impl OfferedBlobs {
    /// Adds a blob, and returns its name and length.
    pub(super) fn put(&mut self, bytes: Vec<u8>) -> Label {
        let hashes = hashes_of(&bytes);
        let label = Label { root: root_of(&hashes), len: bytes.len() as u64 };
        self.blobs.insert(label.root, Arc::new(Blob { bytes, hashes }));
        label
    }

    /// Returns a blob, so that it can be offered in another set, too.
    pub(super) fn get_shared(&self, label: &Label) -> Option<Arc<Blob>> {
        self.blobs.get(&label.root).cloned()
    }

    /// Adds a blob of another set.
    pub(super) fn put_shared(&mut self, label: &Label, blob: Arc<Blob>) {
        self.blobs.insert(label.root, blob);
    }

    /// Removes a blob.
    pub(super) fn remove(&mut self, label: &Label) {
        self.blobs.remove(&label.root);
    }

    fn get(&mut self, item: &BlobRequest) -> Option<Vec<u8>> {
        match *item {
            BlobRequest::Probe { len, .. } => Some(vec![0; len.min(PROBE) as usize]),
            BlobRequest::Hashes { root } => Some(self.blobs.get(&root)?.hashes.as_flattened().to_vec()),
            BlobRequest::Chunk { root, number } => {
                let blob = self.blobs.get(&root)?;
                let mut bytes = blob.bytes[chunk_range(blob.bytes.len() as u64, number)?].to_vec();
                if let Some(fault) = self.fault.take() {
                    fault.flip_bit_in_bytes(&mut bytes);
                }
                Some(bytes)
            }
        }
    }
}

impl Service for OfferedBlobs {
    fn receive(&mut self, Question { from, bytes, .. }: Question) -> Vec<Answer> {
        let Ok(item) = postcard::from_bytes::<BlobRequest>(&bytes) else {
            tracing::warn!(from = from.0, "a message about the run's state cannot be parsed");
            return Vec::new();
        };
        let bytes = self.get(&item);
        vec![Answer::new(from, BlobReply { item, bytes }.to_bytes())]
    }
}

#[cfg(test)]
mod tests {
    use farflung_base::{Nanos, Rank};

    use super::*;
    use crate::train::fault::FaultyValue;

    /// Bytes of the smallest and of the largest chunks.
    const CHUNK: usize = 16 << 10;
    const LARGE: usize = FRAME_BYTES - 1024;

    #[test]
    fn chunks_cover_a_blob_once() {
        let small = [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 3 * CHUNK + 7];
        for len in small.into_iter().chain([256 * CHUNK + 300, 700 * CHUNK, 256 * LARGE + 1]) {
            let count = chunks_of(len as u64) as u32;
            let mut end = 0;
            for range in (0..count).map(|number| chunk_range(len as u64, number).unwrap()) {
                assert!(range.start == end && range.len() <= LARGE);
                end = range.end;
            }
            assert_eq!(end, len);
            assert_eq!(chunk_range(len as u64, count), None);
            assert_eq!(chunk_range(len as u64, u32::MAX), None);
        }
        assert_eq!(chunk_range(u64::MAX, u32::MAX).map(|range| range.len()), Some(LARGE));
    }

    #[test]
    fn an_answer_with_a_chunk_is_one_frame() {
        let item = BlobRequest::Chunk { root: [0xFF; 32], number: u32::MAX };
        let reply = BlobReply { item, bytes: Some(vec![0; LARGE]) };
        assert!(reply.to_bytes().len() < FRAME_BYTES);
    }

    #[test]
    fn blobs_are_sent_if_offered_and_reported_missing_if_not() {
        let mut blobs = OfferedBlobs::default();
        let bytes: Vec<u8> = (0..CHUNK + 5).map(|n| (n % 251) as u8).collect();
        let Label { root, len } = blobs.put(bytes.clone());
        assert_eq!(len, bytes.len() as u64);
        let mut ask = |bytes: Vec<u8>| {
            let answers = blobs.receive(Question { from: Rank(3), at: Nanos(0), bytes });
            answers.into_iter().map(|answer| BlobReply::from_bytes(&answer.bytes).unwrap().bytes).next()
        };
        let hashes = ask(BlobRequest::Hashes { root }.to_bytes()).unwrap().unwrap();
        assert_eq!((hashes.len(), hash_of(&hashes)), (64, root));
        let chunk = |number| BlobRequest::Chunk { root, number }.to_bytes();
        assert_eq!(ask(chunk(0)).unwrap().unwrap(), bytes[..CHUNK]);
        assert_eq!(ask(chunk(1)).unwrap().unwrap(), bytes[CHUNK..]);
        assert_eq!(ask(chunk(2)), Some(None));
        assert_eq!(ask(BlobRequest::Hashes { root: [0; 32] }.to_bytes()), Some(None));
        assert_eq!(ask(BlobRequest::Probe { len: 9, number: 1 }.to_bytes()), Some(Some(vec![0; 9])));
        let most = ask(BlobRequest::Probe { len: u32::MAX, number: 1 }.to_bytes()).unwrap().unwrap();
        assert_eq!(most.len(), PROBE as usize);
        // A malformed request gets no answer.
        assert_eq!(ask(vec![0xFF; 50]), None);
    }

    #[test]
    fn a_fault_flips_its_bit_in_one_chunk() {
        let bytes: Vec<u8> = (0..CHUNK + 6).map(|n| (n % 251) as u8).collect();
        let mut blobs = OfferedBlobs::default();
        let root = blobs.put(bytes.clone()).root;
        let mut flipped = |number: u32, element: usize, bit: u32| {
            let value = FaultyValue::Chunk;
            blobs.fault = Some(Fault { rank: 0, step: 1, value, element, bit });
            let mut get = || blobs.get(&BlobRequest::Chunk { root, number }).unwrap();
            let (wrong, right) = (get(), get());
            assert_eq!(right, bytes[chunk_range(bytes.len() as u64, number).unwrap()]);
            let changed = wrong.iter().zip(&right).map(|(wrong, right)| wrong ^ right).enumerate();
            changed.filter(|(_, bits)| *bits != 0).collect::<Vec<_>>()
        };
        assert_eq!(flipped(0, 0, 0), [(0, 1)]);
        assert_eq!(flipped(0, 7, 20), [(30, 1 << 4)]);
        assert_eq!(flipped(0, CHUNK / 4 + 1, 31), [(7, 1 << 7)]);
        // The second chunk has six bytes: its last word has two.
        assert_eq!(flipped(1, 1, 9), [(5, 1 << 1)]);
        assert_eq!(flipped(1, 1, 20), [(4, 1 << 4)]);
        assert_eq!(flipped(1, 2, 0), [(0, 1)]);
    }

    #[test]
    fn replies_come_back_and_other_bytes_are_none() {
        let item = BlobRequest::Chunk { root: [7; 32], number: 300 };
        for bytes in [None, Some(Vec::new()), Some(vec![1, 2, 3])] {
            let reply = BlobReply { item, bytes };
            assert_eq!(BlobReply::from_bytes(&reply.to_bytes()), Some(reply));
        }
        let whole = BlobReply { item, bytes: None }.to_bytes();
        for end in 0..whole.len() {
            assert_eq!(BlobReply::from_bytes(&whole[..end]), None);
        }
        assert_eq!(BlobReply::from_bytes(&[&whole[..], &[0]].concat()), None);
        assert_eq!(BlobReply::from_bytes(&[0xFF; 400]), None);
    }
}
