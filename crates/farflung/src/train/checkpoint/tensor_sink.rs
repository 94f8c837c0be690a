//! Reads a safetensors file as its bytes arrive: of its tensors only those that are wanted are in memory.

use std::collections::VecDeque;
use std::io::{self, Write};

use safetensors::Dtype;
use safetensors::tensor::Metadata;

/// Bytes of the length of the header.
const LENGTH: usize = 8;

/// A tensor of a file.
#[derive(Debug, PartialEq)]
pub(super) struct StoredTensor {
    pub(super) name: String,
    pub(super) shape: Vec<usize>,
    pub(super) values: Vec<f32>,
}

/// A tensor of the file that has not been read yet.
struct Expected {
    name: String,
    shape: Vec<usize>,
    /// Its bytes that are missing.
    left: usize,
    wanted: bool,
}

/// Takes the bytes of a file of `f32` tensors in order.
pub(super) struct TensorSink<F> {
    /// Bytes of the whole file.
    total: u64,
    wanted: F,
    /// Bytes of the header, or of the tensor that is being read.
    held: Vec<u8>,
    /// `None` until the header is complete.
    expected: Option<VecDeque<Expected>>,
    read: Vec<StoredTensor>,
    problem: Option<&'static str>,
}

/// What is wrong with a file that has another form.
const INVALID: &str = "it is not a valid safetensors file";

impl<F: FnMut(&str, usize) -> bool> TensorSink<F> {
    /// Creates one for a file of `total` bytes. Tensors whose names and bytes are not `wanted` are skipped.
    pub(super) const fn new(total: u64, wanted: F) -> Self {
        Self { total, wanted, held: Vec::new(), expected: None, read: Vec::new(), problem: None }
    }

    /// Returns the tensors once all bytes were written.
    ///
    /// Errors: what is wrong with the file.
    pub(super) fn finish(self) -> Result<Vec<StoredTensor>, &'static str> {
        match (self.problem, self.expected) {
            (Some(problem), _) => Err(problem),
            (None, Some(expected)) if expected.is_empty() => Ok(self.read),
            (None, _) => Err(INVALID),
        }
    }

    /// Takes bytes of the header and returns the rest.
    fn header<'a>(&mut self, bytes: &'a [u8]) -> Result<&'a [u8], &'static str> {
        let missing = |held: &[u8]| match held.first_chunk::<LENGTH>() {
            None => Some(LENGTH - held.len()),
            Some(&len) => {
                let len = u64::from_le_bytes(len);
                let all = len.checked_add(LENGTH as u64).filter(|&all| all <= self.total)?;
                Some(usize::try_from(all).ok()? - held.len())
            }
        };
        let mut rest = bytes;
        // First the length of the header, then the header.
        for _ in 0..2 {
            let (taken, left) = rest.split_at(missing(&self.held).ok_or(INVALID)?.min(rest.len()));
            self.held.extend(taken);
            rest = left;
        }
        if self.held.len() < LENGTH || missing(&self.held) != Some(0) {
            return Ok(rest);
        }
        let metadata: Metadata = serde_json::from_slice(&self.held[LENGTH..]).map_err(|_| INVALID)?;
        let mut tensors: Vec<_> = metadata.tensors().into_iter().collect();
        tensors.sort_by_key(|(_, info)| info.data_offsets);
        let mut expected = VecDeque::new();
        let mut end = 0;
        for (name, info) in tensors {
            let (from, to) = info.data_offsets;
            let values = info.shape.iter().try_fold(1_usize, |all, &size| all.checked_mul(size));
            let bytes = values.and_then(|values| values.checked_mul(size_of::<f32>()));
            if info.dtype != Dtype::F32 || from != end || to.checked_sub(from) != bytes {
                return Err(INVALID);
            }
            end = to;
            let wanted = (self.wanted)(&name, to - from);
            expected.push_back(Expected { name, shape: info.shape.clone(), left: to - from, wanted });
        }
        if self.held.len().checked_add(end).is_none_or(|all| all as u64 != self.total) {
            return Err(INVALID);
        }
        self.held = Vec::new();
        self.expected = Some(expected);
        self.complete();
        Ok(rest)
    }

    /// Moves the tensors that are complete to those that were read.
    fn complete(&mut self) {
        let Some(expected) = &mut self.expected else { return };
        while let Some(Expected { name, shape, wanted, .. }) = expected.pop_front_if(|next| next.left == 0) {
            let bytes = std::mem::take(&mut self.held);
            if wanted {
                let (words, _) = bytes.as_chunks::<4>();
                let values = words.iter().map(|&word| f32::from_le_bytes(word)).collect();
                self.read.push(StoredTensor { name, shape, values });
            }
        }
    }

    fn take(&mut self, mut bytes: &[u8]) -> Result<(), &'static str> {
        if self.expected.is_none() {
            bytes = self.header(bytes)?;
        }
        while !bytes.is_empty() {
            let next = self.expected.as_mut().and_then(VecDeque::front_mut).ok_or(INVALID)?;
            let (taken, rest) = bytes.split_at(next.left.min(bytes.len()));
            if next.wanted {
                // The file is as long as its tensors need, so that this is not more than it has.
                self.held.reserve_exact(next.left);
                self.held.extend(taken);
            }
            next.left -= taken.len();
            bytes = rest;
            self.complete();
        }
        Ok(())
    }
}

impl<F: FnMut(&str, usize) -> bool> Write for TensorSink<F> {
    /// Takes all bytes, even if the file is known to be invalid.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.problem.is_none() {
            self.problem = self.take(bytes).err();
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use farflung_zoo::weights::{TensorData, TensorView, write_tensors_to};

    use super::*;

    fn file() -> Vec<u8> {
        let view = |name, shape, values| TensorView { name, shape, data: TensorData::F32(values) };
        let mut bytes = Vec::new();
        let views = [
            view("b", &[2, 2][..], &[1.0, 2.0, 3.0, 4.0][..]),
            view("a", &[3], &[5.0, 6.0, 7.0]),
            view("e", &[0], &[]),
        ];
        write_tensors_to(&mut bytes, &views, &BTreeMap::new()).unwrap();
        bytes
    }

    fn read(bytes: &[u8], step: usize, total: usize) -> Result<Vec<StoredTensor>, &'static str> {
        let mut sink = TensorSink::new(total as u64, |name: &str, _| name != "b");
        bytes.chunks(step).for_each(|chunk| sink.write_all(chunk).unwrap());
        sink.finish()
    }

    #[test]
    fn wanted_tensors_are_read_however_the_bytes_arrive() {
        let bytes = file();
        for step in 1..bytes.len() {
            let read = read(&bytes, step, bytes.len()).unwrap();
            let found: Vec<_> = read.iter().map(|t| (t.name.as_str(), t.values.clone())).collect();
            assert_eq!(found, [("a", vec![5.0, 6.0, 7.0]), ("e", vec![])]);
        }
    }

    #[test]
    fn files_that_are_cut_or_changed_are_refused() {
        let bytes = file();
        for end in 0..bytes.len() {
            assert_eq!(read(&bytes[..end], 5, bytes.len()), Err(INVALID));
            assert_eq!(read(&bytes[..end], 5, end), Err(INVALID));
        }
        assert_eq!(read(&[&bytes[..], b"more"].concat(), 7, bytes.len()), Err(INVALID));
        for at in 0..bytes.len() {
            let mut changed = bytes.clone();
            changed[at] ^= 0x81;
            // Must not panic; a changed value is found by the file's hash.
            let _ = read(&changed, 9, changed.len());
        }
    }
}
