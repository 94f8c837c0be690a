//! The headers of a store's file, of its pieces and of its records, as bytes. Each ends with a checksum, and
//! bytes that do not fit are `None`.

use bytemuck::Zeroable as _;

use crate::layout::{BLOCK, Layout};

/// A block of memory that is aligned as direct reads and writes need it.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(4096))]
pub(crate) struct Block([u8; BLOCK]);

/// Returns whole blocks of zeros.
pub(crate) fn blocks(bytes: usize) -> Vec<Block> {
    vec![Block::zeroed(); bytes.div_ceil(BLOCK)]
}

/// Returns the bytes of blocks.
pub(crate) fn bytes_of(blocks: &[Block]) -> &[u8] {
    bytemuck::cast_slice(blocks)
}

/// Returns the bytes of blocks for writing.
pub(crate) fn bytes_of_mut(blocks: &mut [Block]) -> &mut [u8] {
    bytemuck::cast_slice_mut(blocks)
}

const FILE: &[u8; 16] = b"farflung-store 1";
const PIECE: &[u8; 16] = b"farflung-piece 1";
const RECORD: &[u8; 16] = b"farflung-record1";

/// Returns the header of a file.
pub(crate) fn file_header(layout: &Layout) -> Vec<Block> {
    let mut header = blocks(BLOCK);
    let bytes = bytes_of_mut(&mut header);
    bytes[..16].copy_from_slice(FILE);
    bytes[16..48].copy_from_slice(&layout.hash());
    header
}

/// What the first block of a file says.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum FileHeader {
    /// Nothing was written there yet.
    Empty,
    /// A store of this layout.
    Fits,
    /// A store of another layout.
    Differs,
    /// Another file.
    Other,
}

/// Reads the first block of a file.
pub(crate) fn read_file_header(bytes: &[u8], layout: &Layout) -> FileHeader {
    match bytes.split_first_chunk::<16>() {
        Some((FILE, rest)) if rest.starts_with(&layout.hash()) => FileHeader::Fits,
        Some((FILE, _)) => FileHeader::Differs,
        _ if bytes.iter().all(|&byte| byte == 0) => FileHeader::Empty,
        _ => FileHeader::Other,
    }
}

/// Returns the header of a piece, with the checksums of its arrays.
pub(crate) fn piece_header(generation: u64, piece: usize, sums: &[u32]) -> Vec<Block> {
    let mut header = blocks(BLOCK);
    let bytes = bytes_of_mut(&mut header);
    bytes[..16].copy_from_slice(PIECE);
    bytes[16..24].copy_from_slice(&generation.to_le_bytes());
    bytes[24..32].copy_from_slice(&(piece as u64).to_le_bytes());
    for (place, sum) in bytes[32..].chunks_exact_mut(4).zip(sums) {
        place.copy_from_slice(&sum.to_le_bytes());
    }
    let end = 32 + 4 * sums.len();
    let sum = crc32fast::hash(&bytes[..end]);
    bytes[end..end + 4].copy_from_slice(&sum.to_le_bytes());
    header
}

/// Reads the header of a piece: the checksums of its arrays. `None` if it is another piece's, of another
/// generation, or damaged.
pub(crate) fn read_piece_header(
    bytes: &[u8],
    generation: u64,
    piece: usize,
    arrays: usize,
) -> Option<Vec<u32>> {
    let end = 32 + 4 * arrays;
    let (known, sum) = (bytes.get(..end)?, bytes.get(end..end + 4)?);
    let (name, rest) = known.split_first_chunk::<16>()?;
    let (found, rest) = rest.split_first_chunk::<8>()?;
    let (number, sums) = rest.split_first_chunk::<8>()?;
    let fits = name == PIECE
        && u64::from_le_bytes(*found) == generation
        && u64::from_le_bytes(*number) == piece as u64
        && sum == crc32fast::hash(known).to_le_bytes();
    let word = |word: &[u8]| Some(u32::from_le_bytes(word.try_into().ok()?));
    if fits { sums.chunks_exact(4).map(word).collect() } else { None }
}

/// The record of a generation, as it is in the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct StoredRecord {
    pub(crate) generation: u64,
    /// A hash of the checksums of all arrays, in order.
    pub(crate) root: [u8; 32],
    pub(crate) contents: Vec<u8>,
}

impl StoredRecord {
    /// Returns its bytes, which begin a slot.
    pub(crate) fn to_blocks(&self) -> Vec<Block> {
        let mut slot = blocks(96 + self.contents.len());
        let bytes = bytes_of_mut(&mut slot);
        bytes[..16].copy_from_slice(RECORD);
        bytes[16..24].copy_from_slice(&self.generation.to_le_bytes());
        bytes[24..32].copy_from_slice(&(self.contents.len() as u64).to_le_bytes());
        bytes[32..64].copy_from_slice(&self.root);
        let end = 96 + self.contents.len();
        bytes[96..end].copy_from_slice(&self.contents);
        let sum = blake3::Hasher::new().update(&bytes[..64]).update(&self.contents).finalize();
        bytes[64..96].copy_from_slice(sum.as_bytes());
        slot
    }

    /// Reads a record; `None` if there is none.
    pub(crate) fn of_bytes(bytes: &[u8]) -> Option<Self> {
        let (head, contents) = bytes.split_at_checked(96)?;
        let length = u64::from_le_bytes(head[24..32].try_into().ok()?);
        let contents = contents.get(..usize::try_from(length).ok()?)?;
        let sum = blake3::Hasher::new().update(&head[..64]).update(contents).finalize();
        (head.starts_with(RECORD) && head[64..96] == *sum.as_bytes()).then_some(())?;
        Some(Self {
            generation: u64::from_le_bytes(head[16..24].try_into().ok()?),
            root: head[32..64].try_into().ok()?,
            contents: contents.to_vec(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_read_back_and_others_do_not() {
        let layout = Layout::new([7; 32], 2, [BLOCK as u64], 10);
        let header = file_header(&layout);
        let other = Layout::new([8; 32], 2, [BLOCK as u64], 10);
        let told = |bytes: &[u8], layout| read_file_header(bytes, layout);
        assert_eq!(told(bytes_of(&header), &layout), FileHeader::Fits);
        assert_eq!(told(bytes_of(&header), &other), FileHeader::Differs);
        assert_eq!(told(&[0; BLOCK], &layout), FileHeader::Empty);
        assert_eq!(told(b"thesis", &layout), FileHeader::Other);

        let header = piece_header(5, 3, &[1, u32::MAX]);
        let bytes = bytes_of(&header);
        assert_eq!(read_piece_header(bytes, 5, 3, 2), Some(vec![1, u32::MAX]));
        for (generation, piece, arrays) in [(6, 3, 2), (5, 2, 2), (5, 3, 1), (5, 3, 4000)] {
            assert_eq!(read_piece_header(bytes, generation, piece, arrays), None);
        }
        for at in 0..44 {
            let mut damaged = bytes.to_vec();
            damaged[at] ^= 1;
            assert_eq!(read_piece_header(&damaged, 5, 3, 2), None, "{at}");
        }
    }

    #[test]
    fn records_read_back_and_damaged_ones_are_none() {
        let record = StoredRecord { generation: 9, root: [3; 32], contents: b"step 9".to_vec() };
        let slot = record.to_blocks();
        assert_eq!(StoredRecord::of_bytes(bytes_of(&slot)), Some(record));
        for at in 0..102 {
            let mut damaged = bytes_of(&slot).to_vec();
            damaged[at] ^= 0x80;
            assert_eq!(StoredRecord::of_bytes(&damaged), None, "{at}");
        }
        for short in [0, 95, 100] {
            assert_eq!(StoredRecord::of_bytes(&bytes_of(&slot)[..short]), None);
        }
    }
}
