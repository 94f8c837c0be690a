//! GGUF files, as llama.cpp writes them: a description of the model and its tensors in one file. The
//! description becomes the fields of a `config.json`, and tensors get the names of Hugging Face's models.
//!
//! Files come from anywhere: each length is checked against the file before anything is allocated by it.

mod description;
mod reader;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::dtype::Dtype;
use super::quantized::Encoding;
use crate::ZooError;
use description::{DIVISORS, Description, renamed};
pub(crate) use reader::{Field, Lists, fields};
use reader::{Opened, Reader};

/// The first bytes of a file.
pub(super) const MAGIC: &[u8; 4] = b"GGUF";
/// Fewest bytes of a tensor's entry.
const LEAST_TENSOR: u64 = 32;
/// Most divisors of rotary frequencies: heads are narrower than twice that.
const MOST_DIVISORS: usize = 1 << 12;
/// Values decoded at a time: whole blocks of every encoding.
const CHUNK: usize = 1 << 16;

/// An open file whose description is read and whose tensors lie within it.
#[derive(Debug)]
pub(super) struct GgufFile {
    path: PathBuf,
    file: File,
    /// The fields of a `config.json`.
    config: Map<String, Value>,
    /// Whether queries and keys have values that are rotated together as neighbours.
    pub(super) interleaves_heads: bool,
    /// The tensors by the names of Hugging Face's models.
    tensors: BTreeMap<String, Entry>,
}

/// A tensor.
#[derive(Debug)]
struct Entry {
    /// The dimensions, the slowest first.
    shape: Vec<usize>,
    /// Number of its type.
    kind: u32,
    /// Where its data begins in the file.
    start: u64,
}

impl GgufFile {
    /// Opens a file and checks its description and its tensors' places.
    ///
    /// Errors: [`ZooError::Io`], [`ZooError::Gguf`], [`ZooError::TensorEntry`]; [`ZooError::JsonField`] for an
    /// architecture that is not read.
    pub(super) fn open(path: &Path) -> Result<Self, ZooError> {
        let file = File::open(path).map_err(ZooError::open(path))?;
        let length = file.metadata().map_err(ZooError::open(path))?.len();
        let Opened { mut reader, tensors, fields } = Reader::open(path, &file, Lists::Skip)?;
        reader.expect(tensors.saturating_mul(LEAST_TENSOR), "tensors")?;
        let mut found = BTreeMap::new();
        for _ in 0..tensors {
            let (name, entry) = entry(&mut reader)?;
            if found.insert(name.clone(), entry).is_some() {
                return Err(reader.wrong(format!("has the tensor `{name}` twice")));
            }
        }
        let alignment = match fields.get("general.alignment") {
            None => 32,
            Some(Field::Number(n)) if *n >= 1.0 && *n <= 65536.0 && (*n as u64).is_power_of_two() => {
                *n as u64
            }
            Some(_) => return Err(reader.wrong("has a `general.alignment` that is no power of two")),
        };
        let data = reader.at.next_multiple_of(alignment);
        check_places(path, &mut found, (data, length))?;
        let divisors = divisors(path, &file, found.remove(DIVISORS))?;
        let rows = |name: &str| found.get(name).and_then(|entry| entry.shape.first().copied());
        let description = Description::new(path, &fields, &rows, &divisors)?;
        let (config, interleaves_heads) = (description.config()?, description.interleaves_heads());
        let mut tensors = BTreeMap::new();
        for (name, entry) in found.into_iter().flat_map(by_expert) {
            if tensors.insert(renamed(&name), entry).is_some() {
                return Err(ZooError::Gguf {
                    path: path.to_owned(),
                    problem: format!("has `{name}` under two names"),
                });
            }
        }
        Ok(Self { path: path.to_owned(), file, config, interleaves_heads, tensors })
    }

    pub(super) const fn config(&self) -> &Map<String, Value> {
        &self.config
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &String> {
        self.tensors.keys()
    }

    pub(super) fn shape(&self, name: &str) -> Option<&[usize]> {
        Some(&self.tensors.get(name)?.shape)
    }

    /// Checks that a tensor has this shape and a type that is read.
    ///
    /// Errors: [`ZooError::NoTensor`], [`ZooError::TensorShape`], [`ZooError::TensorDtype`].
    pub(super) fn expect(&self, name: &str, shape: &[usize]) -> Result<Encoding, ZooError> {
        let (path, tensor) = (self.path.clone(), name.to_owned());
        let Some(entry) = self.tensors.get(name) else { return Err(ZooError::NoTensor { path, tensor }) };
        if entry.shape != shape {
            let (found, expected) = (entry.shape.clone(), shape.to_vec());
            return Err(ZooError::TensorShape { path, tensor, found, expected });
        }
        Encoding::of(entry.kind).ok_or_else(|| ZooError::TensorDtype {
            path,
            tensor,
            found: Encoding::name_of(entry.kind),
            expected: Encoding::READ,
        })
    }

    /// Reads a tensor as `f32`.
    ///
    /// Errors: as [`GgufFile::expect`]; [`ZooError::Io`].
    pub(super) fn read(&mut self, name: &str, shape: &[usize], out: &mut [f32]) -> Result<(), ZooError> {
        let encoding = self.expect(name, shape)?;
        if out.len() != shape.iter().product::<usize>() {
            let (path, tensor) = (self.path.clone(), name.to_owned());
            let (found, expected) = (shape.to_vec(), vec![out.len()]);
            return Err(ZooError::TensorShape { path, tensor, found, expected });
        }
        let mut at = self.tensors[name].start;
        let mut buffer = Vec::new();
        for part in out.chunks_mut(CHUNK) {
            buffer.resize(encoding.bytes(part.len() as u64).unwrap_or(0) as usize, 0);
            let read = self.file.seek(SeekFrom::Start(at)).and_then(|_| self.file.read_exact(&mut buffer));
            read.map_err(ZooError::io("read", &self.path))?;
            at += buffer.len() as u64;
            encoding.decode(&buffer, part);
        }
        Ok(())
    }
}

/// Reads the divisors of rotary frequencies, if they are there.
fn divisors(path: &Path, mut file: &File, entry: Option<Entry>) -> Result<Vec<f32>, ZooError> {
    let Some(Entry { shape, kind, start }) = entry else { return Ok(Vec::new()) };
    if Encoding::of(kind) != Some(Encoding::F32) || shape.len() != 1 || shape[0] > MOST_DIVISORS {
        let (path, tensor) = (path.to_owned(), DIVISORS.to_owned());
        let problem = format!("has the shape {shape:?} and the type {}", Encoding::name_of(kind));
        return Err(ZooError::TensorEntry { path, tensor, problem });
    }
    let (mut bytes, mut values) = (vec![0; 4 * shape[0]], vec![0.0; shape[0]]);
    let read = file.seek(SeekFrom::Start(start)).and_then(|_| file.read_exact(&mut bytes));
    read.map_err(ZooError::io("read", path))?;
    Dtype::F32.decode(&bytes, &mut values);
    Ok(values)
}

/// Reads a tensor's entry. Its start is relative to the data.
fn entry(reader: &mut Reader<'_>) -> Result<(String, Entry), ZooError> {
    let (name, dimensions) = (reader.name("the name of a tensor")?, reader.u32()?);
    let wrong = |problem: String, path: &Path| ZooError::TensorEntry {
        path: path.to_owned(),
        tensor: name.clone(),
        problem,
    };
    if !(1..=4).contains(&dimensions) {
        return Err(wrong(format!("has {dimensions} dimensions, expected 1 to 4"), reader.path));
    }
    let mut shape = Vec::new();
    for _ in 0..dimensions {
        let length = reader.u64()?;
        shape.push(
            usize::try_from(length)
                .map_err(|_| wrong(format!("has a dimension of {length}"), reader.path))?,
        );
    }
    // The fastest dimension comes first.
    shape.reverse();
    let (kind, start) = (reader.u32()?, reader.u64()?);
    Ok((name, Entry { shape, kind, start }))
}

/// Most experts of a block.
const MOST_EXPERTS: usize = 1 << 12;

/// Makes an entry for each expert of a tensor that has those of a whole block, `[E, ...]`. Other tensors stay
/// as they are.
fn by_expert((name, entry): (String, Entry)) -> Vec<(String, Entry)> {
    let stacked = name.strip_suffix("_exps.weight").map(str::to_owned);
    let (Some(stem), [experts @ 1..=MOST_EXPERTS, one @ ..]) = (stacked, &entry.shape[..]) else {
        return vec![(name, entry)];
    };
    let values: u64 = one.iter().map(|&length| length as u64).product();
    // A tensor of a type that is not read is refused by its name.
    let bytes = Encoding::of(entry.kind).and_then(|encoding| encoding.bytes(values)).unwrap_or(0);
    let of = |expert: u64| {
        let (shape, start) = (one.to_vec(), entry.start.saturating_add(expert.saturating_mul(bytes)));
        (format!("{stem}.{expert}.weight"), Entry { shape, kind: entry.kind, start })
    };
    (0..*experts as u64).map(of).collect()
}

/// Checks that tensors lie within the file and do not overlap, and makes their starts those in the file.
fn check_places(
    path: &Path,
    tensors: &mut BTreeMap<String, Entry>,
    (data, length): (u64, u64),
) -> Result<(), ZooError> {
    let mut by_place: Vec<(&String, &mut Entry)> = tensors.iter_mut().collect();
    by_place.sort_by_key(|(_, entry)| entry.start);
    let mut end = data;
    for (name, entry) in by_place {
        let wrong = |problem: String| {
            Err(ZooError::TensorEntry { path: path.to_owned(), tensor: name.clone(), problem })
        };
        let count = entry.shape.iter().try_fold(1_u64, |all, &length| all.checked_mul(length as u64));
        let Some(count) = count else { return wrong(format!("has the shape {:?}", entry.shape)) };
        let Some(start) = data.checked_add(entry.start) else {
            return wrong(format!("begins at byte {}", entry.start));
        };
        if start < end {
            return wrong("overlaps the one before it".to_owned());
        }
        entry.start = start;
        // Of types that are not read, the length is not known.
        let Some(encoding) = Encoding::of(entry.kind) else { continue };
        let row = entry.shape.last().copied().unwrap_or(0) as u64;
        let Some(bytes) = encoding.bytes(count).filter(|_| encoding.bytes(row).is_some()) else {
            return wrong(format!("has rows of {row} values, which are no whole blocks of its type"));
        };
        end = start.saturating_add(bytes);
        if end > length {
            return wrong(format!("ends at byte {end} of {length}: the file is not complete"));
        }
    }
    Ok(())
}
