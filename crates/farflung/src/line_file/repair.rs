//! Opens a file of lines for appending. If lines in it are damaged, it is put aside under another name, and its
//! good lines are copied to a new file.

use std::fs::{self, File};
use std::io::{self, BufWriter, ErrorKind, Seek, Write};
use std::path::{Path, PathBuf};

use super::{LineRead, Lines, StepOf, check_kind};
use crate::{Error, Result};

/// An open file.
#[derive(Debug)]
pub(super) struct Opened {
    pub(super) file: File,
    /// The step of the last line.
    pub(super) last: Option<u64>,
}

/// What is in a file.
#[derive(Debug, Default, PartialEq, Eq)]
struct Content {
    /// Number of lines that are good and of the wanted steps.
    good: u64,
    /// Number of lines that do not belong in the file.
    damaged: u64,
    /// Length of the file without what follows the last good line.
    end: u64,
    last: Option<u64>,
}

/// Opens a file for appending, and creates it if it does not exist. Lines of steps after `up_to`, and what a
/// crash has left of a line at the end, are removed. If other lines are damaged, the file is put aside, with a
/// warning.
///
/// Errors: [`Error::NotAFile`], [`Error::Io`].
pub(super) fn open(path: &Path, step_of: StepOf, up_to: u64) -> Result<Opened> {
    check_kind(path)?;
    let file = appending(path)?;
    let content = content(&file, step_of, up_to, |_| Ok(())).map_err(Error::io("read", path))?;
    if content.damaged == 0 {
        let length = file.metadata().map_err(Error::io("read", path))?.len();
        if content.end < length {
            file.set_len(content.end).map_err(Error::io("cut", path))?;
        }
        return Ok(Opened { file, last: content.last });
    }
    let Aside { path: aside, good: kept } =
        put_aside(path, &file, step_of, up_to).map_err(Error::io("put aside", path))?;
    let Content { damaged, good, last, .. } = content;
    let (path_shown, aside) = (path.display(), aside.display());
    let lines = if damaged == 1 { "a line" } else { &format!("{damaged} lines") };
    let goes_on = if kept {
        format!("the {good} good ones are kept")
    } else {
        "there is no room for the good ones, and a new file begins".to_owned()
    };
    tracing::warn!("{path_shown} is damaged in {lines}: it is now {aside}, and {goes_on}");
    Ok(Opened { file: appending(path)?, last: last.filter(|_| kept) })
}

fn appending(path: &Path) -> Result<File> {
    let file = File::options().create(true).append(true).read(true).open(path);
    file.map_err(Error::io("open", path))
}

/// Reads a file, and passes its good lines of steps up to `up_to` to `take`.
fn content(
    file: &File,
    step_of: StepOf,
    up_to: u64,
    mut take: impl FnMut(&[u8]) -> io::Result<()>,
) -> io::Result<Content> {
    let mut from = file.try_clone()?;
    from.rewind()?;
    let mut lines = Lines::of(from);
    let mut content = Content::default();
    let (mut at, mut is_past) = (0, false);
    while let Some(line) = lines.next()? {
        at += line.bytes().len() as u64;
        let step = match line {
            LineRead::Whole(line) => step_of(line),
            LineRead::Open(_) | LineRead::TooLong(_) => None,
        };
        match step {
            Some(step) if step <= up_to => {
                take(line.bytes())?;
                content.good += 1;
                content.last = Some(step);
                // A line behind those of later steps: they cannot be removed by cutting the file.
                content.damaged += u64::from(is_past);
                content.end = at;
            }
            Some(_) => is_past = true,
            None if is_left_by_crash(line) => {}
            None => content.damaged += 1,
        }
    }
    Ok(content)
}

/// Returns whether a piece of a file may be what a crash has left at its end: the beginning of a line, or
/// zeros.
fn is_left_by_crash(line: LineRead<'_>) -> bool {
    matches!(line, LineRead::Open(bytes) if bytes[0] == b'{' || bytes.iter().all(|&byte| byte == 0))
}

/// A damaged file that was put aside.
struct Aside {
    /// Its path now.
    path: PathBuf,
    /// Whether there was room for its good lines in a new file.
    good: bool,
}

/// Gives a file another name, `NAME.damaged-N`, and makes a new one with its good lines.
fn put_aside(path: &Path, file: &File, step_of: StepOf, up_to: u64) -> io::Result<Aside> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let fresh = path.with_file_name(format!(".{name}.tmp"));
    let copy = || {
        let mut out = BufWriter::new(File::create(&fresh)?);
        content(file, step_of, up_to, |line| out.write_all(line))?;
        out.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()
    };
    let copied = copy();
    let mut number = 1_u64;
    let aside = loop {
        let aside = path.with_file_name(format!("{name}.damaged-{number}"));
        match fs::hard_link(path, &aside) {
            Ok(()) => break aside,
            Err(error) if error.kind() == ErrorKind::AlreadyExists => number += 1,
            // A file system without links.
            Err(_) if !aside.exists() => {
                fs::rename(path, &aside)?;
                break aside;
            }
            Err(error) => return Err(error),
        }
    };
    if copied.is_ok() {
        fs::rename(&fresh, path)?;
        return Ok(Aside { path: aside, good: true });
    }
    for left in [&fresh, path] {
        match fs::remove_file(left) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(Aside { path: aside, good: false })
}
