//! The messages with which ranks send rows of tokens to the experts of others, and the outputs back: numbers of
//! rows, then the rows as plain f32 or as a codec's payload.

use farflung_base::Rank;
use farflung_comm::MAX_MESSAGE;
use farflung_compress::link::{LinkCodec, LinkSpec, MemoryStore, SampleShape};
use farflung_compress::{CompressError, Payload, PayloadRef, RoundKey};
use farflung_zoo::exchange::row_message_bytes;

use crate::link_payload;

/// Writes and reads messages of rows with `cols` values each.
pub(crate) struct RowMessages {
    cols: usize,
    /// `None` for plain f32.
    codec: Option<Box<dyn LinkCodec>>,
    seed: u64,
}

/// Why a message of rows cannot be read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RowsError {
    /// It is not as long as it says.
    #[error("its numbers are not those of its rows")]
    Numbers,
    /// The codec's payload is wrong.
    #[error("its rows cannot be decoded")]
    Payload(#[from] CompressError),
}

impl RowMessages {
    /// Makes the messages of a codec.
    ///
    /// Errors: those of [`LinkSpec::build`].
    pub(crate) fn new(spec: LinkSpec, cols: usize, seed: u64) -> Result<Self, CompressError> {
        let shape = SampleShape { positions: 1, channels: cols };
        let build = || spec.build(shape, |samples| Ok(Box::new(MemoryStore::new(samples))));
        Ok(Self { cols, codec: (!spec.is_plain()).then(build).transpose()?, seed })
    }

    /// Returns the largest size in bytes of a message of `rows` rows with `counts` numbers.
    pub(crate) fn bytes(&self, rows: usize, counts: usize) -> usize {
        match &self.codec {
            Some(codec) if rows > 0 => row_message_bytes(0, self.cols, counts) + codec.max_payload(rows),
            _ => row_message_bytes(rows, self.cols, counts),
        }
    }

    /// Writes a message of rows, `[M, C]`, in these numbers.
    ///
    /// Values that a codec cannot encode, since they are not finite or too large, are sent as plain f32.
    pub(crate) fn write(&mut self, values: &[f32], counts: &[u32]) -> Result<Vec<u8>, CompressError> {
        let rows = values.len().checked_div(self.cols).unwrap_or(0);
        let mut message = Vec::with_capacity(self.bytes(rows, counts.len()));
        let numbers = std::iter::once(counts.len() as u32).chain(counts.iter().copied());
        message.extend(numbers.flat_map(u32::to_le_bytes));
        match &mut self.codec {
            _ if values.is_empty() => {}
            Some(codec) => {
                let mut payload = Payload::new();
                let key = key_of(self.seed, values);
                link_payload::encode(&mut **codec, &vec![0; rows], values, key, &mut payload)?;
                message.extend_from_slice(payload.as_bytes());
            }
            None => message.extend(values.iter().flat_map(|value| value.to_le_bytes())),
        }
        Ok(message)
    }

    /// Reads a message, and adds its rows to `all`. Returns the numbers of rows.
    pub(crate) fn read(&mut self, message: &[u8], all: &mut Vec<f32>) -> Result<Vec<u32>, RowsError> {
        let (count, rest) = message.split_first_chunk::<4>().ok_or(RowsError::Numbers)?;
        let len = (u32::from_le_bytes(*count) as usize).checked_mul(size_of::<u32>());
        let (numbers, values) = len.and_then(|len| rest.split_at_checked(len)).ok_or(RowsError::Numbers)?;
        let counts: Vec<u32> = numbers.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect();
        let rows: u64 = counts.iter().map(|&count| u64::from(count)).sum();
        let wanted = rows.checked_mul(self.cols as u64).and_then(|wanted| usize::try_from(wanted).ok());
        let wanted = wanted.ok_or(RowsError::Numbers)?;
        let Some(codec) = self.codec.as_mut().filter(|_| wanted > 0) else {
            let (words, rest) = values.as_chunks();
            if words.len() != wanted || !rest.is_empty() {
                return Err(RowsError::Numbers);
            }
            all.extend(words.iter().map(|word| f32::from_le_bytes(*word)));
            return Ok(counts);
        };
        let payload = PayloadRef::parse(values)?;
        // A payload of few bytes may stand for many values, but not for more than a plain message could have.
        let fits = wanted <= MAX_MESSAGE / size_of::<f32>() && all.try_reserve(wanted).is_ok();
        if payload.count() != wanted as u64 || !fits {
            return Err(RowsError::Numbers);
        }
        let start = all.len();
        all.resize(start + wanted, 0.0);
        link_payload::decode(&mut **codec, &vec![0; rows as usize], payload, &mut all[start..])?;
        Ok(counts)
    }
}

/// Returns the key of a message: of its values, so that a codec that draws random numbers draws the same again
/// when a pass is repeated.
fn key_of(seed: u64, values: &[f32]) -> RoundKey {
    let hash = blake3::hash(bytemuck::cast_slice(values));
    let round = u64::from_le_bytes(*hash.as_bytes().first_chunk().expect("a hash has 32 bytes"));
    RoundKey { seed, round, shard: 0, rank: Rank::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages(codec: &str) -> RowMessages {
        RowMessages::new(codec.parse().unwrap(), 2, 7).unwrap()
    }

    #[test]
    fn a_message_of_rows_that_lies_about_its_length_is_refused() {
        let words = |words: &[u32]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>();
        let read = |message: &[u8]| messages("none").read(message, &mut Vec::new()).ok();
        assert_eq!(read(&words(&[2, 1, 0, 7, 8])), Some(vec![1, 0]));
        assert_eq!(read(&words(&[0])), Some(Vec::new()));
        let wrong: [&[u32]; 6] =
            [&[], &[1], &[1, 1, 7], &[1, 1, 7, 8, 9], &[u32::MAX, 1], &[2, u32::MAX, u32::MAX]];
        for wrong in wrong {
            assert_eq!(read(&words(wrong)), None, "{wrong:?}");
        }
        assert_eq!(read(&words(&[1, 1, 7, 8])[..15]), None);
    }

    #[test]
    fn rows_pass_through_codecs_in_the_bytes_that_are_told() {
        let rows = [1.0, -0.5, 0.25, 2.0];
        for codec in ["none", "f16", "int8"] {
            let mut messages = messages(codec);
            let message = messages.write(&rows, &[1, 0, 1]).unwrap();
            assert_eq!(message.len(), messages.bytes(2, 3), "{codec}");
            let mut all = vec![9.0];
            assert_eq!(messages.read(&message, &mut all).unwrap(), [1, 0, 1]);
            assert_eq!(all.len(), 5);
            assert!(all[1..].iter().zip(rows).all(|(a, b)| (a - b).abs() < 0.02), "{codec}: {all:?}");
            let empty = messages.write(&[], &[0]).unwrap();
            assert_eq!(empty.len(), messages.bytes(0, 1));
            assert_eq!(messages.read(&empty, &mut all).unwrap(), [0]);
            // A claim of other numbers, and each cut.
            let mut lies = message.clone();
            lies[4..8].copy_from_slice(&u32::MAX.to_le_bytes());
            assert!(messages.read(&lies, &mut Vec::new()).is_err(), "{codec}");
            for end in 0..message.len() {
                assert!(messages.read(&message[..end], &mut Vec::new()).is_err(), "{codec}, {end}");
            }
        }
        // What cannot be encoded arrives as it is.
        let mut messages = messages("int8");
        let message = messages.write(&[f32::INFINITY, 1.0], &[1]).unwrap();
        let mut all = Vec::new();
        messages.read(&message, &mut all).unwrap();
        assert_eq!(all, [f32::INFINITY, 1.0]);
    }
}
