//! The files of a data set: which ones are read, in which order and as which part, and which ones are not.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use super::SourceError;
use super::form::{Form, LOOK, has_token_name};
use super::options::ReadOptions;
use super::part::Part;
use super::sidecar;
use super::skipped::Skipped;
use crate::ZooError;

/// A file that is read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DataFile {
    /// Its path.
    pub path: PathBuf,
    /// Its length in bytes; 0 if it is a pipe.
    pub bytes: u64,
    /// The part that it belongs to.
    pub part: Part,
    /// Whether it holds ids of tokens rather than text.
    pub tokens: bool,
    /// Whether it is compressed.
    pub packed: bool,
}

/// The files of a data set.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Listing {
    /// The files that are read, in this order: those of the training part, then those that are held out.
    pub files: Vec<DataFile>,
    /// The others, ordered by path.
    pub skipped: Vec<Skipped>,
    /// Whether the source has files of its own for the held-out part.
    pub has_held_out: bool,
}

impl Listing {
    /// Lists the files of a data set:
    ///
    /// - a file: itself;
    /// - a folder that directly contains `.bin` files: only these, ordered by name. Files whose names contain
    ///   the word `val`, `valid`, `validation`, `dev` or `eval` are the held-out part (`train.bin` and
    ///   `val.bin`, `fineweb_val_000000.bin`);
    /// - any other folder: all text files in it and its subfolders, ordered by relative path. If the paths of
    ///   some contain the word `train`, and those of others that of a held-out part, then these are the parts,
    ///   and files that belong to none are left out.
    ///
    /// Files for tests (`test`) are held out if there are none for validation, and else left out. Hidden files
    /// and folders, backup copies, unfinished downloads, empty files and files that hold no text are left out.
    /// Links are followed, but no file is read twice.
    ///
    /// Errors: [`ZooError::Io`]; [`SourceError::NotText`] for a file that holds no plain text, and for a
    /// pointer of Git LFS in a folder; [`SourceError::NothingToRead`].
    pub fn of(path: &Path, options: &ReadOptions) -> Result<Self, ZooError> {
        let metadata = fs::metadata(path).map_err(ZooError::io("read", path))?;
        refuse_device(path, &metadata)?;
        if !metadata.is_dir() {
            let form = if metadata.is_file() { form_of(path)? } else { name_of_pipe(path) };
            refused(path, &form)?;
            let file = DataFile::new(path, metadata.len(), &form);
            return Ok(Self { files: vec![file], ..Self::default() });
        }
        let mut walk = Walk::new(path, options);
        if list(path)?.iter().any(|p| has_token_name(p) && p.is_file() && left_out_by_name(p).is_none()) {
            walk.token_files(path)?;
        } else {
            walk.texts(path)?;
        }
        let listing = walk.finish();
        if listing.files.is_empty() {
            return Err(SourceError::NothingToRead { path: path.to_owned(), skipped: listing.skipped }.into());
        }
        Ok(listing)
    }
}

impl DataFile {
    fn new(path: &Path, bytes: u64, form: &Form) -> Self {
        let packed = matches!(form, Form::Packed(_));
        let tokens = *form == Form::Tokens || packed && has_token_name(path);
        Self { path: path.to_owned(), bytes, part: Part::Training, tokens, packed }
    }
}

/// Returns an error if a file of this form cannot be read. A single file may hold any bytes.
pub(in crate::data) fn refused(path: &Path, form: &Form) -> Result<(), SourceError> {
    let (what, advice) = match form {
        Form::Text | Form::Tokens | Form::Packed(_) | Form::Binary => return Ok(()),
        Form::Pointer(kind) => (kind.to_string(), kind.advice()),
        Form::Html => (
            "a page in HTML (a download that failed?)".to_owned(),
            "fetch it again, or rename it to .html to train on the page",
        ),
        Form::Other(kind) => (kind.to_string(), "extract its text and give that"),
    };
    Err(SourceError::NotText { path: path.to_owned(), what, advice })
}

/// Returns an error for a device, which never ends.
#[cfg(unix)]
fn refuse_device(path: &Path, metadata: &fs::Metadata) -> Result<(), SourceError> {
    use std::os::unix::fs::FileTypeExt;

    let kind = metadata.file_type();
    if kind.is_block_device() || kind.is_char_device() {
        let (path, what) = (path.to_owned(), "a device".to_owned());
        return Err(SourceError::NotText { path, what, advice: "give a file, a folder or a pipe" });
    }
    Ok(())
}

#[cfg(not(unix))]
fn refuse_device(_: &Path, _: &fs::Metadata) -> Result<(), SourceError> {
    Ok(())
}

/// Returns why a file of a folder is left out because of its contents. In an encoding that the user gives, text
/// may have zero bytes.
pub(in crate::data) fn left_out_by_form(form: &Form, options: &ReadOptions) -> Option<String> {
    match form {
        Form::Text | Form::Tokens | Form::Packed(_) | Form::Pointer(_) => None,
        Form::Binary if options.encoding.is_some() => None,
        Form::Binary => Some("not text (zero bytes)".to_owned()),
        Form::Html => Some("a page in HTML".to_owned()),
        Form::Other(kind) => Some(kind.to_string()),
    }
}

/// Endings of names of files that tools leave beside others.
const LEFT_BY_TOOLS: [(&str, &str); 8] = [
    ("~", "a backup copy"),
    (".bak", "a backup copy"),
    (".swp", "a backup copy"),
    (".part", "an unfinished download"),
    (".partial", "an unfinished download"),
    (".crdownload", "an unfinished download"),
    (".incomplete", "an unfinished download"),
    (".aria2", "an unfinished download"),
];

/// Endings of files that hold no text, so that a pointer in place of one stands for no text.
const NO_TEXT: [&str; 20] = [
    "png",
    "jpg",
    "jpeg",
    "gif",
    "webp",
    "svg",
    "ico",
    "pdf",
    "zip",
    "mp3",
    "mp4",
    "wav",
    "ogg",
    "safetensors",
    "pt",
    "pth",
    "ckpt",
    "onnx",
    "npy",
    "parquet",
];

/// Returns why a file or folder is left out because of its name.
fn left_out_by_name(path: &Path) -> Option<&'static str> {
    let name = path.file_name()?.to_string_lossy();
    if name.starts_with('.') {
        return Some("hidden");
    }
    LEFT_BY_TOOLS.iter().find(|(ending, _)| name.ends_with(ending)).map(|(_, why)| *why)
}

/// What tells a file from all others, whatever its names are.
#[cfg(unix)]
type Identity = (u64, u64);
#[cfg(not(unix))]
type Identity = PathBuf;

#[cfg(unix)]
fn identity(_: &Path, metadata: &fs::Metadata) -> Identity {
    use std::os::unix::fs::MetadataExt;

    (metadata.dev(), metadata.ino())
}

#[cfg(not(unix))]
fn identity(path: &Path, _: &fs::Metadata) -> Identity {
    fs::canonicalize(path).unwrap_or_else(|_| path.to_owned())
}

/// The files found so far in a folder.
struct Walk<'a> {
    root: &'a Path,
    options: &'a ReadOptions,
    /// The folder itself and those that contain it.
    above: BTreeSet<Identity>,
    /// The files and folders seen, each with the path by which it was first found.
    seen: BTreeMap<Identity, PathBuf>,
    files: Vec<DataFile>,
    skipped: Vec<Skipped>,
}

impl<'a> Walk<'a> {
    fn new(root: &'a Path, options: &'a ReadOptions) -> Self {
        let real = fs::canonicalize(root).unwrap_or_else(|_| root.to_owned());
        let identity = |path: &Path| fs::metadata(path).ok().map(|metadata| identity(path, &metadata));
        let above = real.ancestors().filter_map(identity).collect();
        Self { root, options, above, seen: BTreeMap::new(), files: Vec::new(), skipped: Vec::new() }
    }

    fn relative(&self, path: &Path) -> PathBuf {
        path.strip_prefix(self.root).unwrap_or(path).to_owned()
    }

    fn skip(&mut self, path: &Path, why: impl Into<String>) {
        let path = self.relative(path);
        self.skipped.push(Skipped { path, why: why.into() });
    }

    /// Resolves links; `None` if the path is left out.
    fn visit(&mut self, path: &Path) -> Result<Option<fs::Metadata>, ZooError> {
        if let Some(why) = left_out_by_name(path) {
            self.skip(path, why);
            return Ok(None);
        }
        let metadata = match fs::metadata(path) {
            Ok(metadata) => metadata,
            Err(_) if fs::symlink_metadata(path).is_ok_and(|link| link.is_symlink()) => {
                self.skip(path, "a link whose target is missing or which leads to itself");
                return Ok(None);
            }
            Err(error) => return Err(ZooError::io("read", path)(error)),
        };
        let identity = identity(path, &metadata);
        if metadata.is_dir() && self.above.contains(&identity) {
            self.skip(path, "a link to a folder that contains it");
            return Ok(None);
        }
        if let Some(first) = self.seen.get(&identity) {
            let why = format!("the same as `{}`", first.display());
            self.skip(path, why);
            return Ok(None);
        }
        let relative = self.relative(path);
        self.seen.insert(identity, relative);
        Ok(Some(metadata))
    }

    /// Adds the `.bin` files that the folder contains directly.
    fn token_files(&mut self, folder: &Path) -> Result<(), ZooError> {
        for path in list(folder)? {
            let Some(metadata) = self.visit(&path)? else { continue };
            if !has_token_name(&path) || !metadata.is_file() {
                if !sidecar::is_sidecar(&path) {
                    self.skip(&path, "beside .bin files");
                }
                continue;
            }
            if metadata.len() == 0 {
                self.skip(&path, "empty");
                continue;
            }
            let form = form_of(&path)?;
            refused(&path, &form)?;
            let part = Part::of(&self.relative(&path)).unwrap_or(Part::Training);
            self.files.push(DataFile { part, ..DataFile::new(&path, metadata.len(), &form) });
        }
        Ok(())
    }

    /// Adds all text files in `folder` and its subfolders.
    fn texts(&mut self, folder: &Path) -> Result<(), ZooError> {
        let is_cache = ["blobs", "snapshots"].iter().all(|name| folder.join(name).is_dir());
        for path in list(folder)? {
            if is_cache && ["blobs", "refs"].iter().any(|name| path.ends_with(name)) {
                self.skip(&path, "of a Hugging Face cache, whose files are named in `snapshots`");
                continue;
            }
            let Some(metadata) = self.visit(&path)? else { continue };
            if metadata.is_dir() {
                self.texts(&path)?;
            } else if !metadata.is_file() {
                self.skip(&path, "no regular file");
            } else if metadata.len() == 0 {
                self.skip(&path, "empty");
            } else {
                let form = form_of(&path)?;
                if let Some(why) = left_out_by_form(&form, self.options) {
                    self.skip(&path, why);
                    continue;
                }
                if has_token_name(&path) {
                    self.skip(&path, "a .bin file below a folder of text: give its own folder");
                    continue;
                }
                let ending = path.extension().unwrap_or_default();
                if matches!(form, Form::Pointer(_)) && NO_TEXT.iter().any(|known| ending == *known) {
                    self.skip(&path, "a pointer to a file that is no text");
                    continue;
                }
                refused(&path, &form)?;
                self.files.push(DataFile::new(&path, metadata.len(), &form));
            }
        }
        Ok(())
    }

    fn finish(mut self) -> Listing {
        let tokens = self.files.iter().any(|file| file.tokens);
        if !tokens {
            self.divide_texts();
        }
        let has = |part| self.files.iter().any(|file| file.part == part);
        if has(Part::Validation) && has(Part::Test) {
            let (kept, tests): (Vec<_>, Vec<_>) =
                std::mem::take(&mut self.files).into_iter().partition(|file| file.part != Part::Test);
            self.files = kept;
            for file in tests {
                self.skip(&file.path, "the test part");
            }
        }
        // The order within a part stays that of the paths.
        self.files.sort_by_key(|file| file.part);
        self.skipped.sort_by(|a, b| a.path.cmp(&b.path));
        let has_held_out = self.files.iter().any(|file| file.part != Part::Training);
        Listing { files: self.files, skipped: self.skipped, has_held_out }
    }

    /// Assigns texts to parts, if some are for training and some are held out by their names.
    fn divide_texts(&mut self) {
        let parts: Vec<_> = self.files.iter().map(|file| Part::of(&self.relative(&file.path))).collect();
        let held_out = parts.iter().flatten().any(|part| *part != Part::Training);
        if !held_out || !parts.contains(&Some(Part::Training)) {
            return;
        }
        for (mut file, part) in std::mem::take(&mut self.files).into_iter().zip(parts) {
            match part {
                Some(part) => {
                    file.part = part;
                    self.files.push(file);
                }
                None => self.skip(&file.path, "in none of the parts train, valid and test"),
            }
        }
    }
}

/// Returns what a regular file is.
fn form_of(path: &Path) -> Result<Form, ZooError> {
    let mut start = Vec::with_capacity(LOOK);
    let file = File::open(path).map_err(ZooError::io("read", path))?;
    file.take(LOOK as u64).read_to_end(&mut start).map_err(ZooError::io("read", path))?;
    Ok(Form::of(path, &start))
}

/// A pipe can be read only once, so what it holds is found when it is read.
fn name_of_pipe(path: &Path) -> Form {
    if has_token_name(path) { Form::Tokens } else { Form::Text }
}

/// Returns the entries of a folder, ordered by name.
fn list(folder: &Path) -> Result<Vec<PathBuf>, ZooError> {
    let entries = fs::read_dir(folder).map_err(ZooError::io("read folder", folder))?;
    let mut paths = entries
        .map(|entry| entry.map(|e| e.path()).map_err(ZooError::io("read folder", folder)))
        .collect::<Result<Vec<_>, _>>()?;
    paths.sort();
    Ok(paths)
}
