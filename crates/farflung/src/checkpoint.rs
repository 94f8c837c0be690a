//! A checkpoint: a folder of named files and a `manifest.json` with every file's length and BLAKE3 hash.
//!
//! A checkpoint is written to `.step-N.tmp`, synced, renamed, and verified when it is opened. All that needs
//! room on the disk is done before the first rename, so that a full disk changes nothing. A file `NAME` is
//! stored as `NAME`, or compressed with zstd as `NAME.zst`. Lengths and hashes are those of the uncompressed
//! bytes, so they do not depend on the compression.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

pub(crate) const MANIFEST: &str = "manifest.json";
/// The file in a run's folder with the name of the newest checkpoint.
pub(crate) const LATEST: &str = "latest";
/// The same file before the checkpoint is valid.
const NEXT_LATEST: &str = ".latest.tmp";
/// Largest manifest that is read, in bytes; enough for thousands of files.
const MANIFEST_LIMIT: u64 = 1 << 24;

/// Storage format of a checkpoint's files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Packing {
    /// Uncompressed: other programs can map the files into memory.
    Plain,
    /// Compressed with zstd, level 1.
    Zstd,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Manifest {
    version: u32,
    step: u64,
    packing: Packing,
    files: BTreeMap<String, Entry>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    bytes: u64,
    blake3: String,
}

/// Returns the name of a checkpoint's folder. Names sort by step, up to step 99,999,999.
pub(crate) fn folder(step: u64) -> String {
    format!("step-{step:08}")
}

/// Returns the step of the folder of a checkpoint with this name.
pub(crate) fn step_of(name: &str) -> Option<u64> {
    name.strip_prefix("step-")?.parse().ok()
}

/// Returns the name of the folder in which a checkpoint is written.
pub(crate) fn partial(step: u64) -> String {
    format!(".{}.tmp", folder(step))
}

/// Returns the name of the folder of a checkpoint that a new one of the same step replaces.
fn replaced(step: u64) -> String {
    format!(".{}-old.tmp", folder(step))
}

/// Finishes the replacements of checkpoints that a crash interrupted between the two renames of
/// [`CheckpointWriter::commit`]. The new checkpoint was complete and synced before the first rename, so it is
/// put in place if all its files are valid, and else the old one. `names` are the names in the run's folder.
pub(crate) fn finish_replacements(run: &Path, names: &[String]) -> Result<()> {
    let step_of = |name: &String| name.strip_prefix(".step-")?.strip_suffix("-old.tmp")?.parse().ok();
    for step in names.iter().filter_map(step_of) {
        let (path, new, old) = (run.join(folder(step)), run.join(partial(step)), run.join(replaced(step)));
        if path.exists() {
            continue;
        }
        let is_valid = Checkpoint::open(&new).is_ok_and(|checkpoint| checkpoint.step() == step);
        fs::rename(if is_valid { &new } else { &old }, &path)
            .and_then(|()| File::open(run)?.sync_all())
            .map_err(Error::io("restore the checkpoint", &path))?;
        tracing::info!(path = %path.display(), is_valid, "finished an interrupted replacement of a checkpoint");
    }
    Ok(())
}

/// A checkpoint that is being written. If it is dropped without a commit, its files are removed.
#[derive(Debug)]
pub struct CheckpointWriter {
    run: PathBuf,
    partial: PathBuf,
    manifest: Manifest,
    is_prepared: bool,
}

impl CheckpointWriter {
    pub(crate) fn begin(run: &Path, step: u64, packing: Packing) -> Result<Self> {
        let partial = run.join(partial(step));
        let create = || match fs::create_dir(&partial) {
            // An earlier attempt, whose files could not be removed then.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                fs::remove_dir_all(&partial)?;
                fs::create_dir(&partial)
            }
            created => created,
        };
        create().map_err(Error::io("create", &partial))?;
        let manifest = Manifest { version: 1, step, packing, files: BTreeMap::new() };
        Ok(Self { run: run.to_owned(), partial, manifest, is_prepared: false })
    }

    /// Adds a file.
    pub fn write(&mut self, name: &str, bytes: &[u8]) -> Result<()> {
        self.write_with(name, |out| out.write_all(bytes))
    }

    /// Adds a file that `fill` writes piece by piece, for content that should not be in memory as a whole.
    ///
    /// Errors: [`Error::FileName`] for a name that is no plain file name or is used already, [`Error::Io`].
    pub fn write_with(
        &mut self,
        name: &str,
        fill: impl FnOnce(&mut dyn Write) -> io::Result<()>,
    ) -> Result<()> {
        if !plain_name(name) || self.manifest.files.contains_key(name) {
            return Err(Error::FileName { name: name.to_owned() });
        }
        let path = self.partial.join(stored(name, self.manifest.packing));
        let write = || {
            let file = BufWriter::with_capacity(1 << 20, File::create(&path)?);
            let (file, entry) = match self.manifest.packing {
                Packing::Plain => {
                    let mut out = Hashing::new(file);
                    fill(&mut out)?;
                    out.finish()
                }
                Packing::Zstd => {
                    let mut out = Hashing::new(zstd::Encoder::new(file, 1)?);
                    fill(&mut out)?;
                    let (encoder, entry) = out.finish();
                    (encoder.finish()?, entry)
                }
            };
            file.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()?;
            Ok(entry)
        };
        let entry = write().map_err(Error::io("write", &path))?;
        self.manifest.files.insert(name.to_owned(), entry);
        Ok(())
    }

    /// Writes all that a commit needs, so that the commit itself needs no room: the manifest, and the next
    /// content of `latest`.
    pub(crate) fn prepare(&mut self) -> Result<()> {
        let mut at = self.partial.join(MANIFEST);
        let mut write = || {
            let mut file = File::create(&at)?;
            serde_json::to_writer_pretty(&mut file, &self.manifest)?;
            file.write_all(b"\n")?;
            file.sync_all()?;
            File::open(&self.partial)?.sync_all()?;
            at = self.run.join(NEXT_LATEST);
            let mut latest = File::create(&at)?;
            latest.write_all(format!("{}\n", folder(self.manifest.step)).as_bytes())?;
            latest.sync_all()
        };
        let written = write();
        written.map_err(Error::io("write", &at))?;
        self.is_prepared = true;
        Ok(())
    }

    /// Commits the checkpoint as `step-N`, by one atomic rename, and sets `latest` to it. If the step has a
    /// checkpoint already, it is renamed before that and removed afterwards: [`finish_replacements`] handles a
    /// crash between the two renames.
    pub(crate) fn commit(mut self) -> Result<PathBuf> {
        if !self.is_prepared {
            self.prepare()?;
        }
        let path = self.run.join(folder(self.manifest.step));
        let finish = || {
            if path.exists() {
                // A restart removes a folder with this name, as it removes half-written checkpoints.
                let old = self.run.join(replaced(self.manifest.step));
                fs::rename(&path, &old)?;
                if let Err(error) = fs::rename(&self.partial, &path) {
                    fs::rename(&old, &path)?;
                    return Err(error);
                }
                fs::remove_dir_all(&old)?;
            } else {
                fs::rename(&self.partial, &path)?;
            }
            // The checkpoint is valid without it: `latest` is for the user.
            if let Err(error) = fs::rename(self.run.join(NEXT_LATEST), self.run.join(LATEST)) {
                tracing::warn!(run = %self.run.display(), %error, "failed to set `{LATEST}` to the newest checkpoint");
            }
            File::open(&self.run)?.sync_all()
        };
        finish().map_err(Error::io("write the checkpoint", &path))?;
        Ok(path)
    }
}

impl Drop for CheckpointWriter {
    fn drop(&mut self) {
        // After a commit the folder has another name. A folder that cannot be removed now is removed at the
        // next start.
        for removed in [fs::remove_dir_all(&self.partial), fs::remove_file(self.run.join(NEXT_LATEST))] {
            if let Err(error) = removed
                && error.kind() != io::ErrorKind::NotFound
            {
                tracing::warn!(path = %self.partial.display(), %error, "failed to remove an incomplete checkpoint");
            }
        }
    }
}

/// A complete checkpoint whose files were verified.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    manifest: Manifest,
}

impl Checkpoint {
    /// Opens a `step-N` folder and verifies every file against the manifest.
    ///
    /// Errors: [`Error::Damaged`] with the file that differs, [`Error::FileName`] for a name in the manifest
    /// that is not a plain file name, [`Error::Io`].
    pub fn open(path: &Path) -> Result<Self> {
        let checkpoint = Self::described(path)?;
        checkpoint.manifest.files.keys().try_for_each(|name| checkpoint.check(name))?;
        Ok(checkpoint)
    }

    /// Verifies a file against the manifest, if the manifest has it.
    ///
    /// Errors: [`Error::Damaged`], [`Error::Io`].
    pub(crate) fn check(&self, name: &str) -> Result<()> {
        if !self.manifest.files.contains_key(name) {
            return Ok(());
        }
        self.copy(name, &mut io::sink()).map(drop)
    }

    /// Reads the manifest of a folder, and verifies no file.
    ///
    /// Errors: those of the manifest in [`Checkpoint::open`].
    pub(crate) fn described(path: &Path) -> Result<Self> {
        let file = path.join(MANIFEST);
        let mut text = Vec::new();
        File::open(&file)
            .and_then(|f| f.take(MANIFEST_LIMIT).read_to_end(&mut text))
            .map_err(Error::io("read the checkpoint's manifest", &file))?;
        let manifest: Manifest = serde_json::from_slice(&text)
            .map_err(|_| Error::Damaged { path: file.clone(), what: "it is not a valid manifest" })?;
        if manifest.version != 1 {
            return Err(Error::Damaged { path: file, what: "its version is not 1" });
        }
        let checkpoint = Self { path: path.to_owned(), manifest };
        for name in checkpoint.manifest.files.keys() {
            if !plain_name(name) {
                return Err(Error::FileName { name: name.clone() });
            }
        }
        Ok(checkpoint)
    }

    /// Returns the step after which it was saved.
    #[must_use]
    pub fn step(&self) -> u64 {
        self.manifest.step
    }

    /// Returns the path of its folder.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns how its files are stored.
    #[must_use]
    pub fn packing(&self) -> Packing {
        self.manifest.packing
    }

    /// Returns the names of its files, sorted.
    #[must_use]
    pub fn names(&self) -> Vec<&str> {
        self.manifest.files.keys().map(String::as_str).collect()
    }

    /// Returns a file's uncompressed bytes, verified again.
    ///
    /// Errors: [`Error::Damaged`] if the file is missing or differs from the manifest, [`Error::Io`].
    pub fn read(&self, name: &str) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        self.copy(name, &mut bytes)?;
        Ok(bytes)
    }

    /// Returns the uncompressed length of a file; 0 if there is none of this name.
    pub(crate) fn bytes_of(&self, name: &str) -> u64 {
        self.manifest.files.get(name).map_or(0, |entry| entry.bytes)
    }

    /// Copies a file to `out` and checks its length and hash.
    pub(crate) fn copy(&self, name: &str, out: &mut dyn Write) -> Result<()> {
        let path = self.path.join(stored(name, self.manifest.packing));
        let damaged = |what| Error::Damaged { path: path.clone(), what };
        let entry = self.manifest.files.get(name).ok_or_else(|| damaged("the manifest does not list it"))?;
        let file = File::open(&path).map_err(|e| match e.kind() {
            io::ErrorKind::NotFound => damaged("it is missing"),
            _ => Error::io("read", &path)(e),
        })?;
        let source: Box<dyn Read> = match self.manifest.packing {
            Packing::Plain => Box::new(file),
            Packing::Zstd => Box::new(zstd::Decoder::new(file).map_err(Error::io("unpack", &path))?),
        };
        let mut out = Hashing::new(out);
        // Reading one byte more than the manifest says detects a longer file, and limits what a decompression
        // bomb can write.
        io::copy(&mut source.take(entry.bytes.saturating_add(1)), &mut out)
            .map_err(Error::io("read", &path))?;
        let (_, found) = out.finish();
        if found.bytes != entry.bytes {
            return Err(damaged("its length differs from the manifest's"));
        }
        if found.blake3 != entry.blake3 {
            return Err(damaged("its hash differs from the manifest's"));
        }
        Ok(())
    }
}

/// Returns the name under which a file is stored.
fn stored(name: &str, packing: Packing) -> String {
    match packing {
        Packing::Plain => name.to_owned(),
        Packing::Zstd => format!("{name}.zst"),
    }
}

/// Returns whether a name is a plain file name on every system and is not the manifest's.
fn plain_name(name: &str) -> bool {
    let good = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    !name.is_empty()
        && name.len() <= 200
        && name.chars().all(good)
        && !name.starts_with('.')
        && name != MANIFEST
}

/// A writer that counts and hashes the bytes it passes on.
struct Hashing<W> {
    inner: W,
    bytes: u64,
    hasher: blake3::Hasher,
}

impl<W: Write> Hashing<W> {
    fn new(inner: W) -> Self {
        Self { inner, bytes: 0, hasher: blake3::Hasher::new() }
    }

    fn finish(self) -> (W, Entry) {
        let blake3 = self.hasher.finalize().to_hex().to_string();
        (self.inner, Entry { bytes: self.bytes, blake3 })
    }
}

impl<W: Write> Write for Hashing<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = self.inner.write(bytes)?;
        self.hasher.update(&bytes[..n]);
        self.bytes += n as u64;
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_stay_in_the_folder() {
        let dir = tempfile::tempdir().unwrap();
        let mut writer = CheckpointWriter::begin(dir.path(), 3, Packing::Plain).unwrap();
        for bad in ["", "../x", "a/b", ".hidden", "manifest.json", "a\\b"] {
            assert!(matches!(writer.write(bad, b""), Err(Error::FileName { .. })), "{bad}");
        }
        writer.write("a", b"1").unwrap();
        assert!(writer.write("a", b"2").is_err());
        drop(writer);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn saving_a_step_again_replaces_it() {
        let dir = tempfile::tempdir().unwrap();
        for content in [b"old", b"new"] {
            let mut writer = CheckpointWriter::begin(dir.path(), 3, Packing::Zstd).unwrap();
            writer.write("a", content).unwrap();
            writer.commit().unwrap();
        }
        let checkpoint = Checkpoint::open(&dir.path().join("step-00000003")).unwrap();
        assert_eq!(checkpoint.read("a").unwrap(), b"new");
        assert_eq!(names(dir.path()), ["latest", "step-00000003"]);
    }

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).unwrap();
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    /// A writer that fails after some bytes, as on a full disk.
    fn full_after(bytes: usize) -> impl FnOnce(&mut dyn Write) -> io::Result<()> {
        move |out| {
            out.write_all(&vec![1; bytes])?;
            Err(io::ErrorKind::StorageFull.into())
        }
    }

    #[test]
    fn a_write_that_fails_at_any_step_leaves_the_last_checkpoint_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let run = dir.path();
        let begin = |step, packing| CheckpointWriter::begin(run, step, packing).unwrap();
        let mut first = begin(1, Packing::Plain);
        first.write("a", b"good").unwrap();
        first.commit().unwrap();
        for packing in [Packing::Plain, Packing::Zstd] {
            // In a file, at its beginning and behind the first buffer.
            for bytes in [0, 3 << 20] {
                let mut writer = begin(2, packing);
                writer.write("a", b"new").unwrap();
                let error = writer.write_with("b", full_after(bytes)).unwrap_err();
                assert!(
                    error.is_disk_full() && error.to_string().contains(".step-00000002.tmp/b"),
                    "{error}"
                );
            }
        }
        // At the manifest, and at the next `latest`: a folder is in its place.
        for (path, name) in [
            (run.join(".step-00000002.tmp/manifest.json"), "manifest.json"),
            (run.join(NEXT_LATEST), NEXT_LATEST),
        ] {
            let mut writer = begin(2, Packing::Plain);
            fs::create_dir(&path).unwrap();
            let error = writer.prepare().unwrap_err().to_string();
            assert!(error.contains(name), "{error}");
            drop(writer);
            let _ = fs::remove_dir(&path);
        }
        assert_eq!(names(run), ["latest", "step-00000001"]);
        assert_eq!(fs::read_to_string(run.join(LATEST)).unwrap(), "step-00000001\n");
        // The rename of the folder: the step's place is taken by a file.
        fs::write(run.join("step-00000002"), "").unwrap();
        let mut writer = begin(2, Packing::Plain);
        writer.prepare().unwrap();
        fs::remove_dir_all(run.join(".step-00000002.tmp")).unwrap();
        assert!(writer.commit().is_err());
        fs::remove_file(run.join("step-00000002")).unwrap();
        // The rename of `latest`: the checkpoint is valid without it.
        fs::remove_file(run.join(LATEST)).unwrap();
        fs::create_dir(run.join(LATEST)).unwrap();
        let path = begin(3, Packing::Plain).commit().unwrap();
        assert_eq!(Checkpoint::open(&path).unwrap().step(), 3);
        assert_eq!(names(run), ["latest", "step-00000001", "step-00000003"]);
        Checkpoint::open(&run.join("step-00000001")).unwrap();
        // What could not be removed then is removed now.
        fs::create_dir_all(run.join(".step-00000004.tmp/left")).unwrap();
        begin(4, Packing::Plain).commit().unwrap();
    }

    #[test]
    fn a_lying_manifest_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let mut writer = CheckpointWriter::begin(dir.path(), 1, Packing::Zstd).unwrap();
        writer.write("a", &vec![0; 100_000]).unwrap();
        let path = writer.commit().unwrap();
        let file = path.join(MANIFEST);
        let good = fs::read_to_string(&file).unwrap();
        for (from, to) in [("100000", "99999"), ("100000", "18446744073709551615"), ("\"a\"", "\"../a\"")] {
            fs::write(&file, good.replace(from, to)).unwrap();
            assert!(Checkpoint::open(&path).is_err(), "{to}");
        }
        fs::write(&file, &good[..20]).unwrap();
        assert!(Checkpoint::open(&path).unwrap_err().to_string().contains("manifest.json"));
    }
}
