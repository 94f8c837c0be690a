//! Where pieces and records are in a store's file.

/// Bytes of a block: headers, arrays and records are multiples of it, for direct reads and writes.
pub const BLOCK: usize = 4096;

/// What a store holds: pieces, each of which has the same number of arrays.
///
/// ```
/// use farflung_store::{BLOCK, Layout};
///
/// // Two arrays of 3 blocks, cut into a piece of 2 blocks and one of 1 block.
/// let layout = Layout::new([0; 32], 2, [2 * BLOCK as u64, BLOCK as u64], 1000);
/// // A header of the file, two records, and twice the pieces with a header each.
/// assert_eq!(layout.file_bytes(), (1 + 2 + 2 * (1 + 2 * 2) + 2 * (1 + 2)) * BLOCK as u64);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    identity: [u8; 32],
    arrays: usize,
    pieces: Vec<u64>,
    record: u64,
    /// Offset of each piece's first slot, and the end of the file.
    offsets: Vec<u64>,
}

impl Layout {
    /// Returns the layout of `pieces`, given by the bytes of each array of each piece. `identity` tells stores
    /// of different contents apart; a generation's record has at most `record` bytes.
    ///
    /// # Panics
    /// If an array's bytes are no multiple of [`BLOCK`], or if there are more than [`Layout::MOST_ARRAYS`].
    #[must_use]
    pub fn new(
        identity: [u8; 32],
        arrays: usize,
        pieces: impl IntoIterator<Item = u64>,
        record: usize,
    ) -> Self {
        assert!(arrays <= Self::MOST_ARRAYS, "a piece's header has no room for {arrays} arrays");
        let pieces: Vec<u64> = pieces.into_iter().collect();
        let block = BLOCK as u64;
        assert!(pieces.iter().all(|bytes| bytes % block == 0), "arrays are whole blocks");
        let record = (record as u64 + Self::RECORD_HEAD).next_multiple_of(block);
        let mut offsets = vec![block + 2 * record];
        for bytes in &pieces {
            let begin = offsets[offsets.len() - 1];
            offsets.push(begin + 2 * (block + arrays as u64 * bytes));
        }
        Self { identity, arrays, pieces, record, offsets }
    }

    /// The most arrays of a piece.
    pub const MOST_ARRAYS: usize = 512;
    /// Bytes of a record besides its contents.
    pub(crate) const RECORD_HEAD: u64 = 128;

    /// Returns the number of pieces.
    #[must_use]
    pub const fn pieces(&self) -> usize {
        self.pieces.len()
    }

    /// Returns the number of arrays of each piece.
    #[must_use]
    pub const fn arrays(&self) -> usize {
        self.arrays
    }

    /// Returns the bytes of each array of a piece.
    ///
    /// # Panics
    /// If there is no such piece.
    #[must_use]
    pub fn array_bytes(&self, piece: usize) -> u64 {
        self.pieces[piece]
    }

    /// Returns the bytes of the file: two slots for each piece and record.
    #[must_use]
    pub fn file_bytes(&self) -> u64 {
        self.offsets[self.pieces.len()]
    }

    /// Returns the bytes that are written for a generation: all arrays, headers, and a record of one block.
    #[must_use]
    pub fn generation_bytes(&self) -> u64 {
        (self.file_bytes() - BLOCK as u64) / 2 - self.record + BLOCK as u64
    }

    /// Returns the most bytes of a record.
    pub(crate) const fn record_bytes(&self) -> usize {
        (self.record - Self::RECORD_HEAD) as usize
    }

    /// Returns the offset of a generation's record.
    pub(crate) const fn record_at(&self, generation: u64) -> u64 {
        BLOCK as u64 + (generation % 2) * self.record
    }

    /// Returns the bytes that a record takes.
    pub(crate) const fn record_slot(&self) -> usize {
        self.record as usize
    }

    /// Returns the offset of the header of a piece of a generation; its arrays follow.
    pub(crate) fn piece_at(&self, generation: u64, piece: usize) -> u64 {
        let slot = BLOCK as u64 + self.arrays as u64 * self.pieces[piece];
        self.offsets[piece] + (generation % 2) * slot
    }

    /// Returns the offset of an array of a piece of a generation.
    pub(crate) fn array_at(&self, generation: u64, piece: usize, array: usize) -> u64 {
        self.piece_at(generation, piece) + BLOCK as u64 + array as u64 * self.pieces[piece]
    }

    /// Returns a hash of the layout and the identity.
    pub(crate) fn hash(&self) -> [u8; 32] {
        let mut hash = blake3::Hasher::new();
        hash.update(&self.identity);
        let numbers = [self.arrays as u64, self.record].into_iter().chain(self.pieces.iter().copied());
        for number in numbers {
            hash.update(&number.to_le_bytes());
        }
        hash.finalize().into()
    }
}
