//! The description at the start of a GGUF file.
//!
//! Files come from anywhere: each length is checked against the file before anything is allocated by it.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufReader, Read};
use std::path::Path;

use super::MAGIC;
use crate::ZooError;

/// Most bytes of a name, and of a text that is kept.
const LONGEST_TEXT: u64 = 1 << 16;
/// Fewest bytes of a value of the description.
const LEAST_VALUE: u64 = 13;

/// A value of the description.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Field {
    Number(f64),
    Flag(bool),
    Text(String),
    Texts(Vec<String>),
    Numbers(Vec<f64>),
    /// A list that was skipped, or a text that is too long to be kept.
    Other,
}

/// What is done with the lists of a description.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lists {
    Keep,
    Skip,
}

/// Reads a file from its start on.
pub(super) struct Reader<'a> {
    pub(super) path: &'a Path,
    from: BufReader<&'a File>,
    pub(super) at: u64,
    length: u64,
}

/// A file whose description was read.
pub(super) struct Opened<'a> {
    /// At the entries of the tensors.
    pub(super) reader: Reader<'a>,
    /// Number of tensors.
    pub(super) tensors: u64,
    pub(super) fields: BTreeMap<String, Field>,
}

impl<'a> Reader<'a> {
    /// Reads the description.
    ///
    /// Errors: [`ZooError::Io`], [`ZooError::Gguf`].
    pub(super) fn open(path: &'a Path, file: &'a File, lists: Lists) -> Result<Opened<'a>, ZooError> {
        let length = file.metadata().map_err(ZooError::open(path))?.len();
        let mut reader = Self { path, from: BufReader::new(file), at: 0, length };
        if &reader.bytes::<4>()? != MAGIC {
            return Err(reader.wrong("does not begin as a GGUF file"));
        }
        let version = reader.u32()?;
        if !(2..=3).contains(&version) {
            return Err(reader.wrong(format!("is of version {version}, expected 2 or 3")));
        }
        let (tensors, fields) = (reader.u64()?, reader.u64()?);
        reader.expect(fields.saturating_mul(LEAST_VALUE), "values")?;
        let mut described = BTreeMap::new();
        for _ in 0..fields {
            let (key, kind) = (reader.name("a key")?, reader.u32()?);
            let value = reader.field(kind, lists)?;
            if described.insert(key.clone(), value).is_some() {
                return Err(reader.wrong(format!("has the key `{key}` twice")));
            }
        }
        Ok(Opened { reader, tensors, fields: described })
    }
}

impl Reader<'_> {
    pub(super) fn wrong(&self, problem: impl Into<String>) -> ZooError {
        ZooError::Gguf { path: self.path.to_owned(), problem: problem.into() }
    }

    /// Checks that so many bytes follow.
    pub(super) fn expect(&self, bytes: u64, what: &str) -> Result<(), ZooError> {
        if bytes > self.length - self.at {
            let left = self.length - self.at;
            return Err(
                self.wrong(format!("claims {bytes} bytes of {what}, and {left} are left in the file"))
            );
        }
        Ok(())
    }

    fn bytes<const N: usize>(&mut self) -> Result<[u8; N], ZooError> {
        self.expect(N as u64, "its description")?;
        let mut bytes = [0; N];
        self.from.read_exact(&mut bytes).map_err(ZooError::io("read", self.path))?;
        self.at += N as u64;
        Ok(bytes)
    }

    pub(super) fn u32(&mut self) -> Result<u32, ZooError> {
        Ok(u32::from_le_bytes(self.bytes()?))
    }

    pub(super) fn u64(&mut self) -> Result<u64, ZooError> {
        Ok(u64::from_le_bytes(self.bytes()?))
    }

    fn skip(&mut self, bytes: u64, what: &str) -> Result<(), ZooError> {
        self.expect(bytes, what)?;
        let by = i64::try_from(bytes).map_err(|_| self.wrong("is longer than a file can be"))?;
        self.from.seek_relative(by).map_err(ZooError::io("read", self.path))?;
        self.at += bytes;
        Ok(())
    }

    /// Returns a text; `None`, and skips it, if it is too long to be kept.
    fn text(&mut self, what: &str) -> Result<Option<String>, ZooError> {
        let length = self.u64()?;
        self.expect(length, what)?;
        if length > LONGEST_TEXT {
            return self.skip(length, what).map(|()| None);
        }
        let mut bytes = vec![0; length as usize];
        self.from.read_exact(&mut bytes).map_err(ZooError::io("read", self.path))?;
        self.at += length;
        String::from_utf8(bytes).map(Some).map_err(|_| self.wrong(format!("has {what} that is no text")))
    }

    pub(super) fn name(&mut self, what: &str) -> Result<String, ZooError> {
        self.text(what)?.ok_or_else(|| self.wrong(format!("has {what} of more than {LONGEST_TEXT} bytes")))
    }

    /// Returns a value of a type.
    fn field(&mut self, kind: u32, lists: Lists) -> Result<Field, ZooError> {
        Ok(match kind {
            0 => Field::Number(self.bytes::<1>()?[0].into()),
            1 => Field::Number(i8::from_le_bytes(self.bytes()?).into()),
            2 => Field::Number(u16::from_le_bytes(self.bytes()?).into()),
            3 => Field::Number(i16::from_le_bytes(self.bytes()?).into()),
            4 => Field::Number(self.u32()?.into()),
            5 => Field::Number(i32::from_le_bytes(self.bytes()?).into()),
            6 => Field::Number(f32::from_le_bytes(self.bytes()?).into()),
            7 => Field::Flag(self.bytes::<1>()?[0] != 0),
            8 => self.text("a text")?.map_or(Field::Other, Field::Text),
            9 => self.list(lists)?,
            10 => Field::Number(self.u64()? as f64),
            11 => Field::Number(i64::from_le_bytes(self.bytes()?) as f64),
            12 => Field::Number(f64::from_le_bytes(self.bytes()?)),
            other => return Err(self.wrong(format!("has a value of the unknown type {other}"))),
        })
    }

    /// Returns a list, or skips it.
    fn list(&mut self, lists: Lists) -> Result<Field, ZooError> {
        let (kind, count) = (self.u32()?, self.u64()?);
        let each = match kind {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            10..=12 => 8,
            8 => {
                self.expect(count.saturating_mul(8), "a list of texts")?;
                let mut texts = Vec::new();
                for _ in 0..count {
                    match lists {
                        Lists::Keep => texts.push(self.name("a text of a list")?),
                        Lists::Skip => {
                            let length = self.u64()?;
                            self.skip(length, "a text")?;
                        }
                    }
                }
                return Ok(if lists == Lists::Keep { Field::Texts(texts) } else { Field::Other });
            }
            other => return Err(self.wrong(format!("has a list of the type {other}"))),
        };
        if lists == Lists::Skip {
            return self.skip(count.saturating_mul(each), "a list").map(|()| Field::Other);
        }
        self.expect(count.saturating_mul(each), "a list")?;
        let numbers = (0..count).map(|_| match self.field(kind, lists)? {
            Field::Number(n) => Ok(n),
            Field::Flag(flag) => Ok(f64::from(u8::from(flag))),
            _ => Err(self.wrong("has a list of lists")),
        });
        Ok(Field::Numbers(numbers.collect::<Result<_, _>>()?))
    }
}

/// Returns the fields of a file's description.
///
/// Errors: [`ZooError::Io`], [`ZooError::Gguf`].
pub(crate) fn fields(path: &Path, lists: Lists) -> Result<BTreeMap<String, Field>, ZooError> {
    let file = File::open(path).map_err(ZooError::open(path))?;
    Ok(Reader::open(path, &file, lists)?.fields)
}
