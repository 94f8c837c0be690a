//! Named tensors in one safetensors file: 8 bytes of header length, a JSON header, the data.
//!
//! The file is read by ranges, not memory-mapped. If another process truncates it meanwhile, the result is an
//! error instead of a signal, and no unsafe code is needed.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::{Cursor, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value, json};

use super::atomic::write_file;
use super::dtype::{Dtype, element_bytes};
use crate::ZooError;
use crate::file_kind::{FileKind, START};

/// Maximum length of a header in bytes, as in the reference implementation.
const LONGEST_HEADER: u64 = 100_000_000;
/// Number of bytes converted at a time.
const CHUNK: usize = 1 << 16;

/// One tensor's entry in a header.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorInfo {
    /// Element type in safetensors' notation: `F32`, `BF16`, `U8`, ...
    pub dtype: String,
    /// Shape of the tensor.
    pub shape: Vec<usize>,
    /// Start and end of the bytes, relative to the start of the data.
    data_offsets: (u64, u64),
}

/// Values of a tensor to write.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum TensorData<'a> {
    /// f32 values.
    F32(&'a [f32]),
    /// Bytes, stored as type U8.
    U8(&'a [u8]),
}

/// A tensor to write.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TensorView<'a> {
    /// Name of the tensor.
    pub name: &'a str,
    /// Shape of the tensor.
    pub shape: &'a [usize],
    /// Values; their number must match the shape.
    pub data: TensorData<'a>,
}

/// An open safetensors file with a checked header: tensors are within the file, do not overlap, and together
/// cover all data. Tensors of known types have the length of their shape.
#[derive(Debug)]
pub struct TensorFile {
    path: PathBuf,
    file: Content,
    data_start: u64,
    tensors: BTreeMap<String, TensorInfo>,
    metadata: BTreeMap<String, String>,
}

/// Where the bytes of a file are.
#[derive(Debug)]
enum Content {
    Disk(File),
    Memory(Cursor<Vec<u8>>),
}

impl Content {
    /// Fills `out` with the bytes from `start` on.
    fn read_at(&mut self, start: u64, out: &mut [u8]) -> std::io::Result<()> {
        match self {
            Self::Disk(file) => file.seek(SeekFrom::Start(start)).and_then(|_| file.read_exact(out)),
            Self::Memory(bytes) => bytes.seek(SeekFrom::Start(start)).and_then(|_| bytes.read_exact(out)),
        }
    }
}

/// The header as written, so that duplicate names are detected.
struct RawHeader(Vec<(String, Value)>);

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = RawHeader;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
                let mut entries = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    entries.push(entry);
                }
                Ok(RawHeader(entries))
            }
        }
        deserializer.deserialize_map(Entries)
    }
}

impl TensorFile {
    /// Opens a file and checks its header.
    ///
    /// Errors: [`ZooError::Io`], [`ZooError::DeadLink`], [`ZooError::Header`], [`ZooError::TensorEntry`];
    /// [`ZooError::WrongFile`] if it is a file of another known kind.
    pub fn open(path: &Path) -> Result<Self, ZooError> {
        let about = path.metadata().map_err(ZooError::open(path))?;
        // To open a named pipe would wait for its other end.
        if !about.is_file() && !about.is_dir() {
            let problem = "it is no regular file, such as a pipe or a device: copy it into a file".to_owned();
            return Err(ZooError::Header { path: path.to_owned(), problem });
        }
        let file = File::open(path).map_err(ZooError::open(path))?;
        Self::of(path, Content::Disk(file), about.len())
    }

    /// Checks the header of a file in memory. `path` is for messages.
    ///
    /// Errors: as [`TensorFile::open`].
    pub fn from_bytes(path: &Path, bytes: Vec<u8>) -> Result<Self, ZooError> {
        let length = bytes.len() as u64;
        Self::of(path, Content::Memory(Cursor::new(bytes)), length)
    }

    fn of(path: &Path, mut file: Content, length: u64) -> Result<Self, ZooError> {
        let mut start = vec![0; length.min(START as u64) as usize];
        file.read_at(0, &mut start).map_err(ZooError::io("read", path))?;
        let header = |problem: String| match FileKind::of(&start) {
            Some(kind) => ZooError::WrongFile { path: path.to_owned(), kind, expected: "a safetensors file" },
            None => ZooError::Header { path: path.to_owned(), problem },
        };
        let Some(&eight) = start.first_chunk() else {
            return Err(header(format!("needs 8 bytes, the file has {length}")));
        };
        let claimed = u64::from_le_bytes(eight);
        if claimed > (length - 8).min(LONGEST_HEADER) {
            return Err(header(format!(
                "claims {claimed} bytes, more than allowed or than fit in the file ({length} bytes)"
            )));
        }
        let mut text = vec![0; claimed as usize];
        file.read_at(8, &mut text).map_err(ZooError::io("read", path))?;
        let raw: RawHeader = serde_json::from_slice(&text)
            .map_err(|e| header(format!("is not a JSON object of tensors: {e}")))?;
        let (tensors, metadata) = entries(path, raw)?;
        let this = Self { path: path.to_owned(), file, data_start: 8 + claimed, tensors, metadata };
        this.check_layout(length - this.data_start)?;
        Ok(this)
    }

    /// Checks that the tensors cover the data without gaps or overlaps.
    fn check_layout(&self, data: u64) -> Result<(), ZooError> {
        let mut by_place: Vec<_> = self.tensors.iter().collect();
        by_place.sort_by_key(|(_, info)| info.data_offsets);
        let mut end = 0;
        for (name, info) in by_place {
            let wrong = |problem: String| Err(self.entry_error(name, problem));
            let (from, to) = info.data_offsets;
            if to < from || to > data {
                let cut = if to < from { "" } else { ": the file is not complete" };
                return wrong(format!("has invalid offsets, {from} to {to} of {data} bytes of data{cut}"));
            }
            if from != end {
                return wrong(format!("begins at byte {from}, but the tensor before it ends at {end}"));
            }
            end = to;
            let Some(element) = element_bytes(&info.dtype) else { continue };
            let count = info.shape.iter().try_fold(element, |n, &dim| n.checked_mul(dim as u64));
            if count != Some(to - from) {
                let (shape, dtype) = (&info.shape, &info.dtype);
                return wrong(format!(
                    "has shape {shape:?} and type {dtype}, but {} bytes of data",
                    to - from
                ));
            }
        }
        if end != data {
            return Err(ZooError::Header {
                path: self.path.clone(),
                problem: format!("describes {end} of {data} bytes of data"),
            });
        }
        Ok(())
    }

    fn entry_error(&self, tensor: &str, problem: String) -> ZooError {
        ZooError::TensorEntry { path: self.path.clone(), tensor: tensor.to_owned(), problem }
    }

    /// Returns the file's path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the tensors by name.
    #[must_use]
    pub const fn tensors(&self) -> &BTreeMap<String, TensorInfo> {
        &self.tensors
    }

    /// Returns the file's `__metadata__`.
    #[must_use]
    pub const fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    fn info(&self, name: &str) -> Result<&TensorInfo, ZooError> {
        let missing = || ZooError::NoTensor { path: self.path.clone(), tensor: name.to_owned() };
        self.tensors.get(name).ok_or_else(missing)
    }

    fn expect_shape(&self, name: &str, expected: &[usize]) -> Result<(), ZooError> {
        let found = &self.info(name)?.shape;
        if found == expected {
            return Ok(());
        }
        let (path, tensor) = (self.path.clone(), name.to_owned());
        Err(ZooError::TensorShape { path, tensor, found: found.clone(), expected: expected.to_vec() })
    }

    /// Checks that a tensor has this shape and a type that [`TensorFile::read_f32`] reads. Its data then has
    /// the length of its shape, as checked on opening.
    ///
    /// Errors: [`ZooError::NoTensor`], [`ZooError::TensorShape`], [`ZooError::TensorDtype`].
    pub(super) fn expect_f32(&self, name: &str, shape: &[usize]) -> Result<Dtype, ZooError> {
        self.expect_shape(name, shape)?;
        let info = self.info(name)?;
        Dtype::from_name(&info.dtype).ok_or_else(|| self.wrong_dtype(name, info, "F32, F16 or BF16"))
    }

    fn wrong_dtype(&self, name: &str, info: &TensorInfo, expected: &'static str) -> ZooError {
        let (path, found) = (self.path.clone(), info.dtype.clone());
        ZooError::TensorDtype { path, tensor: name.to_owned(), found, expected }
    }

    /// Reads a tensor of type F32, F16 or BF16 as `f32`.
    ///
    /// Errors: [`ZooError::NoTensor`], [`ZooError::TensorShape`] (also if the length of `out` does not match
    /// the shape), [`ZooError::TensorDtype`], [`ZooError::Io`].
    pub fn read_f32(&mut self, name: &str, shape: &[usize], out: &mut [f32]) -> Result<(), ZooError> {
        let dtype = self.expect_f32(name, shape)?;
        let (from, to) = self.info(name)?.data_offsets;
        if to - from != (out.len() * dtype.bytes()) as u64 {
            let (path, tensor) = (self.path.clone(), name.to_owned());
            return Err(ZooError::TensorShape {
                path,
                tensor,
                found: shape.to_vec(),
                expected: vec![out.len()],
            });
        }
        let mut buffer = vec![0; CHUNK.min((to - from) as usize)];
        let mut at = self.data_start + from;
        for part in out.chunks_mut(CHUNK / dtype.bytes()) {
            let bytes = &mut buffer[..part.len() * dtype.bytes()];
            self.file.read_at(at, bytes).map_err(ZooError::io("read", &self.path))?;
            at += bytes.len() as u64;
            dtype.decode(bytes, part);
        }
        Ok(())
    }

    /// Reads a tensor of type U8.
    ///
    /// Errors: [`ZooError::NoTensor`], [`ZooError::TensorDtype`], [`ZooError::Io`].
    pub fn read_u8(&mut self, name: &str) -> Result<Vec<u8>, ZooError> {
        let info = self.info(name)?;
        if info.dtype != "U8" {
            return Err(self.wrong_dtype(name, info, "U8"));
        }
        let (from, to) = info.data_offsets;
        // The range was checked against the file's actual length.
        let mut bytes = vec![0; (to - from) as usize];
        let read = self.file.read_at(self.data_start + from, &mut bytes);
        read.map_err(ZooError::io("read", &self.path))?;
        Ok(bytes)
    }
}

type Entries = (BTreeMap<String, TensorInfo>, BTreeMap<String, String>);

fn entries(path: &Path, raw: RawHeader) -> Result<Entries, ZooError> {
    let (mut tensors, mut metadata) = (BTreeMap::new(), BTreeMap::new());
    for (name, value) in raw.0 {
        let wrong =
            |problem: String| ZooError::TensorEntry { path: path.to_owned(), tensor: name.clone(), problem };
        if name == "__metadata__" {
            metadata = serde_json::from_value(value)
                .map_err(|e| wrong(format!("is not an object of strings: {e}")))?;
            continue;
        }
        let info = serde_json::from_value(value)
            .map_err(|e| wrong(format!("is not a valid description of a tensor: {e}")))?;
        if tensors.contains_key(&name) {
            return Err(wrong("occurs twice".to_owned()));
        }
        tensors.insert(name, info);
    }
    Ok((tensors, metadata))
}

/// Returns a safetensors header (with its length, padded to 8 bytes) for tensors stored in this order.
pub(super) fn header<'a>(
    tensors: impl Iterator<Item = (&'a str, &'a str, &'a [usize])>,
    metadata: &BTreeMap<String, String>,
) -> Vec<u8> {
    let mut all = Map::new();
    if !metadata.is_empty() {
        all.insert("__metadata__".to_owned(), json!(metadata));
    }
    let mut end = 0;
    for (name, dtype, shape) in tensors {
        let from = end;
        let element = element_bytes(dtype).expect("only known types are written");
        end += shape.iter().map(|&dim| dim as u64).product::<u64>() * element;
        let entry = json!({"dtype": dtype, "shape": shape, "data_offsets": [from, end]});
        all.insert(name.to_owned(), entry);
    }
    let mut text = Value::Object(all).to_string().into_bytes();
    text.resize(text.len().next_multiple_of(8), b' ');
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.extend(text);
    bytes
}

/// Writes named tensors and metadata to one safetensors file, atomically.
///
/// Errors: [`ZooError::Io`]; [`ZooError::TensorEntry`] for a duplicate or reserved name, or if a shape does not
/// match the length of its data.
pub fn write_tensors(
    path: &Path,
    tensors: &[TensorView<'_>],
    metadata: &BTreeMap<String, String>,
) -> Result<(), ZooError> {
    let mut names = std::collections::BTreeSet::from(["__metadata__"]);
    for t in tensors {
        let wrong = |problem: String| {
            Err(ZooError::TensorEntry { path: path.to_owned(), tensor: t.name.to_owned(), problem })
        };
        let count = t.data.kind().1;
        if t.shape.iter().try_fold(1_usize, |n, &dim| n.checked_mul(dim)) != Some(count) {
            return wrong(format!("has shape {:?}, but {count} values", t.shape));
        }
        if !names.insert(t.name) {
            return wrong("occurs twice or has a reserved name".to_owned());
        }
    }
    write_file(path, |out| write_tensors_to(out, tensors, metadata).map_err(ZooError::io("write", path)))
}

/// Writes named tensors and metadata as safetensors to any writer, in chunks. Names must be unique, and each
/// shape must match the length of its data; [`write_tensors`] checks both.
///
/// Errors: those of the writer.
pub fn write_tensors_to(
    out: &mut dyn Write,
    tensors: &[TensorView<'_>],
    metadata: &BTreeMap<String, String>,
) -> std::io::Result<()> {
    out.write_all(&header(tensors.iter().map(|t| (t.name, t.data.kind().0, t.shape)), metadata))?;
    for t in tensors {
        match t.data {
            TensorData::F32(values) => write_f32(out, Dtype::F32, values)?,
            TensorData::U8(bytes) => out.write_all(bytes)?,
        }
    }
    Ok(())
}

/// Writes named `f32` tensors of the given shapes as safetensors. `values` is called for each in order, with
/// its index, and must write its values ([`write_values`]): not all are in memory at the same time. Names must
/// be unique.
///
/// Errors: those of the writer and of `values`.
pub fn write_f32_tensors<'a>(
    out: &mut dyn Write,
    tensors: impl ExactSizeIterator<Item = (&'a str, &'a [usize])>,
    metadata: &BTreeMap<String, String>,
    mut values: impl FnMut(usize, &mut dyn Write) -> std::io::Result<()>,
) -> std::io::Result<()> {
    let count = tensors.len();
    out.write_all(&header(tensors.map(|(name, shape)| (name, "F32", shape)), metadata))?;
    (0..count).try_for_each(|index| values(index, out))
}

/// Writes values as little-endian `f32`, in chunks.
///
/// Errors: those of the writer.
pub fn write_values(out: &mut dyn Write, values: &[f32]) -> std::io::Result<()> {
    write_f32(out, Dtype::F32, values)
}

impl TensorData<'_> {
    /// Returns the name of the type in the file, and the number of values.
    const fn kind(&self) -> (&'static str, usize) {
        match self {
            Self::F32(values) => ("F32", values.len()),
            Self::U8(bytes) => ("U8", bytes.len()),
        }
    }
}

/// Writes numbers in the given type, in chunks.
pub(super) fn write_f32(out: &mut dyn Write, dtype: Dtype, values: &[f32]) -> std::io::Result<()> {
    let mut bytes = Vec::with_capacity(CHUNK);
    for part in values.chunks(CHUNK / 4) {
        bytes.clear();
        dtype.encode(part, &mut bytes);
        out.write_all(&bytes)?;
    }
    Ok(())
}
