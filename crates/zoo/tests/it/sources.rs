//! Tests of which files of a data set are read, which are skipped, and which end with an error.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::fs;
use std::path::Path;

use farflung_zoo::data::{ReadOptions, TokenType};
use farflung_zoo::tokenizer::Byte;
use farflung_zoo::{Corpus, HoldOut, Tokenizer};

/// Returns the training and the held-out text of a path, read with the byte tokenizer.
fn texts(path: &Path) -> (String, String) {
    let (training, held_out) = Corpus::open(path, &Byte).unwrap().split(HoldOut::Standard).unwrap();
    let text = |split: farflung_zoo::Split| {
        let mut ids = Vec::new();
        split.append_to(0, split.len(), &mut ids);
        String::from_utf8(Byte.decode(&ids).unwrap()).unwrap()
    };
    (text(training), text(held_out))
}

fn both(path: &Path) -> String {
    let (training, held_out) = texts(path);
    training + &held_out
}

fn write(folder: &Path, name: &str, bytes: &[u8]) {
    let path = folder.join(name);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, bytes).unwrap();
}

/// Returns what a corpus says was left out, as `path: why`.
fn left_out(path: &Path) -> Vec<String> {
    let corpus = Corpus::open(path, &Byte).unwrap();
    let skipped = corpus.reading().skipped.iter();
    skipped.map(|file| format!("{}: {}", file.path.display(), file.why)).collect()
}

fn refusal(path: &Path) -> String {
    Corpus::open(path, &Byte).unwrap_err().to_string()
}

#[cfg(feature = "compressed")]
fn gzip(bytes: &[u8]) -> Vec<u8> {
    use std::io::Write;

    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::new(6));
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

#[test]
fn what_tools_leave_in_folders_is_left_out_and_said() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), "book.txt", b"the book");
    write(dir.path(), ".ipynb_checkpoints/book-checkpoint.txt", b"the book");
    write(dir.path(), ".git/packed-refs", b"refs");
    write(dir.path(), "._book.txt", b"resource fork");
    write(dir.path(), "book.txt~", b"the old book");
    write(dir.path(), "next.txt.part", b"the ne");
    write(dir.path(), "empty.txt", b"");
    write(dir.path(), "cover.png", b"\x89PNG\r\n\x1a\n\0");
    write(dir.path(), "data.raw", b"a\0b");
    write(dir.path(), "deeper/book.pdf", b"%PDF-1.7\n");
    write(dir.path(), "old/books.zip", b"PK\x03\x04");
    assert_eq!(both(dir.path()), "the book");
    assert_eq!(
        left_out(dir.path()),
        [
            "._book.txt: hidden",
            ".git: hidden",
            ".ipynb_checkpoints: hidden",
            "book.txt~: a backup copy",
            "cover.png: a PNG picture",
            "data.raw: not text (zero bytes)",
            "deeper/book.pdf: a PDF document",
            "empty.txt: empty",
            "next.txt.part: an unfinished download",
            "old/books.zip: a zip archive",
        ]
    );
    let line = Corpus::open(dir.path(), &Byte).unwrap().reading().to_string();
    assert!(line.starts_with("1 file, 8 bytes, 0 % no text, 10 left out: "), "{line}");
    assert!(line.contains("`._book.txt`, `.git`, `.ipynb_checkpoints` (hidden)"), "{line}");
    // A folder whose own name is hidden is what the user gave.
    assert_eq!(both(&dir.path().join(".git")), "refs");
}

#[cfg(unix)]
#[test]
fn links_are_followed_and_no_file_is_read_twice() {
    use std::os::unix::fs::symlink;

    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    write(dir.path(), "real/a.txt", b"first ");
    write(dir.path(), "real/b.txt", b"second ");
    fs::create_dir(at("mix")).unwrap();
    fs::copy(at("real/a.txt"), at("mix/a.txt")).unwrap();
    symlink("../real/b.txt", at("mix/b.txt")).unwrap();
    fs::create_dir(at("all")).unwrap();
    for name in ["a.txt", "b.txt"] {
        symlink(format!("../real/{name}"), at("all").join(name)).unwrap();
    }
    symlink("real", at("folder")).unwrap();
    let hash = Corpus::open(&at("real"), &Byte).unwrap().hash();
    for folder in ["mix", "all", "folder"] {
        assert_eq!(Corpus::open(&at(folder), &Byte).unwrap().hash(), hash, "{folder}");
        assert_eq!(left_out(&at(folder)), [""; 0], "{folder}");
    }
    // Loops, links to folders that contain the data, a second way to a file, and a link to nothing.
    symlink("..", at("real/up")).unwrap();
    symlink(".", at("real/here")).unwrap();
    symlink("/", at("real/root")).unwrap();
    symlink("itself", at("real/itself")).unwrap();
    symlink("a.txt", at("real/z.txt")).unwrap();
    symlink("gone", at("real/gone.txt")).unwrap();
    assert_eq!(both(&at("real")), "first second ");
    assert_eq!(
        left_out(&at("real")),
        [
            "gone.txt: a link whose target is missing or which leads to itself",
            "here: a link to a folder that contains it",
            "itself: a link whose target is missing or which leads to itself",
            "root: a link to a folder that contains it",
            "up: a link to a folder that contains it",
            "z.txt: the same as `a.txt`",
        ]
    );
}

#[test]
fn files_for_training_validation_and_tests_are_the_parts() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    write(dir.path(), "flat/wiki.train.tokens", b"to train on ");
    write(dir.path(), "flat/wiki.valid.tokens", b"held out");
    write(dir.path(), "flat/wiki.test.tokens", b"for later");
    write(dir.path(), "flat/README", b"about");
    assert_eq!(texts(&at("flat")), ("to train on ".to_owned(), "held out".to_owned()));
    assert_eq!(
        left_out(&at("flat")),
        ["README: in none of the parts train, valid and test", "wiki.test.tokens: the test part"]
    );
    write(dir.path(), "deep/train/0.txt", b"to train on ");
    write(dir.path(), "deep/train/1.txt", b"more ");
    write(dir.path(), "deep/test/0.txt", b"tests");
    assert_eq!(texts(&at("deep")), ("to train on more ".to_owned(), "tests".to_owned()));
    // Without a part for training, names say nothing: a program has tests.
    write(dir.path(), "code/lib.rs", b"fn main() {}");
    write(dir.path(), "code/tests/test.rs", b"fn test() {}");
    assert_eq!(both(&at("code")), "fn main() {}fn test() {}");
    // Files of ids: whatever is not held out is trained on.
    write(dir.path(), "ids/shard.bin", &[b'a', 0, b'b', 0]);
    write(dir.path(), "ids/val.bin", &[b'v', 0]);
    write(dir.path(), "ids/test.bin", &[b't', 0]);
    write(dir.path(), "ids/notes.txt", b"about");
    assert_eq!(texts(&at("ids")), ("ab".to_owned(), "v".to_owned()));
    assert_eq!(left_out(&at("ids")), ["notes.txt: beside .bin files", "test.bin: the test part"]);
}

#[cfg(feature = "compressed")]
#[test]
fn compressed_texts_are_what_they_hold() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    write(dir.path(), "d/a.txt.gz", &gzip(b"first "));
    write(dir.path(), "d/b.txt", b"second");
    assert_eq!(both(&at("d")), "first second");
    let corpus = Corpus::open(&at("d"), &Byte).unwrap();
    assert_eq!(corpus.hash(), Corpus::from_bytes("same", b"first second", &Byte).unwrap().hash());
    assert_eq!(corpus.reading().to_string(), "2 files (1 compressed), 12 bytes, 0 % no text");
    // Files of ids too, and text in other encodings.
    write(dir.path(), "train.bin.gz", &gzip(&[b'a', 0, b'b', 0]));
    assert_eq!(both(&at("train.bin.gz")), "ab");
    write(dir.path(), "wide.txt.gz", &gzip(b"\xff\xfea\0b\0"));
    assert_eq!(both(&at("wide.txt.gz")), "ab");
    let mut tar = vec![b'n'; 257];
    tar.extend(b"ustar\x0000");
    write(dir.path(), "books.tar.gz", &gzip(&tar));
    assert!(refusal(&at("books.tar.gz")).contains("a tar archive"));
    write(dir.path(), "twice.gz", &gzip(&gzip(b"text")));
    assert!(refusal(&at("twice.gz")).contains("compressed twice"));
    let whole = gzip(&b"some text, and more of it ".repeat(50));
    write(dir.path(), "cut.txt.gz", &whole[..whole.len() - 9]);
    let error = refusal(&at("cut.txt.gz"));
    assert!(error.contains("cut.txt.gz") && error.contains("gzip"), "{error}");
}

#[test]
fn files_that_are_no_text_are_refused_by_what_they_are() {
    let dir = tempfile::tempdir().unwrap();
    let cases: [(&str, &[u8], &str); 8] = [
        ("book.zip", b"PK\x03\x04rest", "a zip archive"),
        ("part.parquet", b"PAR1rest", "a Parquet file"),
        ("tok.npy", b"\x93NUMPY\x01\0", "a NumPy array"),
        ("book.pdf", b"%PDF-1.7\n", "a PDF document"),
        ("base.db", b"SQLite format 3\0", "an SQLite database"),
        ("book.txt", b"version https://git-lfs.github.com/spec/v1\noid sha256:4d\n", "git lfs pull"),
        ("page.txt", b"<!DOCTYPE html><html><head>", "a page in HTML"),
        ("pytorch_model.bin", b"PK\x03\x04rest", "a zip archive"),
    ];
    for (name, bytes, expected) in cases {
        write(dir.path(), name, bytes);
        let error = refusal(&dir.path().join(name));
        assert!(error.contains(expected) && error.contains(name), "{error}");
    }
    // In a folder, a pointer stands for text that the user wants.
    write(dir.path(), "lfs/a.txt", b"text");
    write(dir.path(), "lfs/b.txt", b"version https://git-lfs.github.com/spec/v1\noid sha256:4d\n");
    assert!(refusal(&dir.path().join("lfs")).contains("b.txt"));
    // A folder without any text tells why.
    write(dir.path(), "none/book.pdf", b"%PDF-1.7\n");
    write(dir.path(), "none/.hidden", b"text");
    let error = refusal(&dir.path().join("none"));
    assert!(error.contains("`book.pdf` (a PDF document)") && error.contains("`.hidden` (hidden)"), "{error}");
}

#[test]
fn what_stands_beside_files_of_ids_is_heeded() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let wide = |text: &str| text.bytes().flat_map(|b| u32::from(b).to_le_bytes()).collect::<Vec<_>>();
    write(dir.path(), "ours/train.bin", &wide("of four bytes each"));
    write(
        dir.path(),
        "ours/tokens.json",
        br#"{"token_type": "u32", "tokenizer": "byte", "vocab_size": 256}"#,
    );
    assert_eq!(both(&at("ours")), "of four bytes each");
    assert_eq!(left_out(&at("ours")), [""; 0]);
    write(dir.path(), "ours/tokens.json", br#"{"tokenizer": "gpt2"}"#);
    let error = refusal(&at("ours"));
    assert!(error.contains("tokens.json") && error.contains("gpt2"), "{error}");
    // Without such a file, the user says it.
    write(dir.path(), "alone/train.bin", &wide(&"of four bytes each ".repeat(9)));
    assert!(refusal(&at("alone")).contains("--token-type u32"));
    let options = ReadOptions { token_type: Some(TokenType::U32), ..ReadOptions::default() };
    assert_eq!(Corpus::open_with(&at("alone"), &Byte, options).unwrap().len(), 171);

    // `pickle.dumps({'vocab_size': 3, 'itos': {0: '\n', 1: 'a', 2: 'é'}}, 4)` of Python 3.11.
    let meta =
        b"\x80\x04\x951\0\0\0\0\0\0\0}\x94(\x8c\nvocab_size\x94K\x03\x8c\x04itos\x94}\x94(K\0\x8c\x01\n\x94\
        K\x01\x8c\x01a\x94K\x02\x8c\x02\xc3\xa9\x94uu.";
    write(dir.path(), "char/train.bin", &[1, 0, 2, 0, 0, 0, 1, 0]);
    write(dir.path(), "char/meta.pkl", meta);
    assert_eq!(both(&at("char")), "aé\na");
    let line = Corpus::open(&at("char"), &Byte).unwrap().reading().to_string();
    assert!(line.contains("ids decoded by") && line.contains("meta.pkl"), "{line}");
    write(dir.path(), "char/train.bin", &[1, 0, 3, 0]);
    assert!(refusal(&at("char")).contains("id 3 at position 1"));
    write(dir.path(), "char/meta.pkl", b"cos\nsystem\n(S'touch owned'\ntR.");
    let error = refusal(&at("char"));
    assert!(error.contains("os.system") && error.contains("meta.pkl"), "{error}");
}

#[test]
fn bytes_that_are_no_text_are_counted_and_placed() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), "a.txt", b"caf\xe9, na\xefve text of Latin 1, as it was");
    let corpus = Corpus::open(&dir.path().join("a.txt"), &Byte).unwrap();
    assert_eq!(corpus.reading().no_text, 2);
    let line = corpus.reading().to_string();
    assert!(line.contains("5.26 % no text (first at byte 3 of"), "{line}");
    write(dir.path(), "b.txt", b"one<|endoftext|>two<|endoftext|>");
    let reading = Corpus::open(&dir.path().join("b.txt"), &Byte).unwrap().reading().clone();
    assert_eq!((reading.plain_special_tokens[0].count, reading.plain_special_tokens[0].is_known), (2, false));
}

#[cfg(feature = "encodings")]
#[test]
fn an_encoding_that_is_named_is_decoded() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), "a.txt", b"caf\xe9");
    let encoding = Some("windows-1252".parse().unwrap());
    let corpus = Corpus::open_with(
        &dir.path().join("a.txt"),
        &Byte,
        ReadOptions { encoding, ..ReadOptions::default() },
    );
    let corpus = corpus.unwrap();
    assert_eq!(corpus.hash(), Corpus::from_bytes("same", "café".as_bytes(), &Byte).unwrap().hash());
    assert_eq!(corpus.reading().to_string(), "1 file (1 in windows-1252), 5 bytes, 0 % no text");
}

#[cfg(feature = "bpe")]
#[test]
fn special_tokens_of_a_text_divide_it_where_the_user_asks() {
    use farflung_zoo::tokenizer::Gpt2;

    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), "stories.txt", b"Hello world<|endoftext|>Hello world<|endoftext|>");
    let read = |special_tokens| {
        let options = ReadOptions { special_tokens, ..ReadOptions::default() };
        Corpus::open_with(dir.path(), &Gpt2, options).unwrap()
    };
    // The text's own last token ends the file.
    let (split, _) = read(true).split(HoldOut::Tokens(0)).unwrap();
    assert_eq!((split.len(), split.documents()), (6, vec![0..3, 3..6]));
    assert_eq!(read(true).reading().plain_special_tokens, []);
    let plain = read(false);
    assert_eq!(plain.len(), 2 + 7 + 2 + 7 + 1);
    assert!(plain.reading().plain_special_tokens[0].is_known);
}

#[cfg(unix)]
#[test]
fn a_hugging_face_cache_is_read_by_the_names_of_its_snapshots() {
    use std::os::unix::fs::symlink;

    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), "blobs/1111", b"to train on ");
    write(dir.path(), "blobs/2222", b"held out");
    write(dir.path(), "refs/main", b"abc123");
    fs::create_dir_all(dir.path().join("snapshots/abc123")).unwrap();
    for (blob, name) in [("1111", "train.txt"), ("2222", "validation.txt")] {
        symlink(format!("../../blobs/{blob}"), dir.path().join("snapshots/abc123").join(name)).unwrap();
    }
    assert_eq!(texts(dir.path()), ("to train on ".to_owned(), "held out".to_owned()));
}

#[cfg(unix)]
#[test]
fn devices_are_refused_and_hard_links_are_read_once() {
    let dir = tempfile::tempdir().unwrap();
    assert!(refusal(Path::new("/dev/zero")).contains("is a device"));
    write(dir.path(), "a.txt", b"once");
    fs::hard_link(dir.path().join("a.txt"), dir.path().join("b.txt")).unwrap();
    assert_eq!(both(dir.path()), "once");
}

#[test]
fn what_is_in_a_folder_does_not_change_how_other_files_are_read() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), "train.txt", b"to train on ");
    write(dir.path(), "valid.txt", b"held out");
    write(dir.path(), "deeper/old.bin", &[1, 0]);
    write(dir.path(), "deeper/old.bin.gz", b"\x1f\x8b\x08\0");
    write(dir.path(), "logo.png", b"version https://git-lfs.github.com/spec/v1\noid sha256:4d\n");
    assert_eq!(texts(dir.path()), ("to train on ".to_owned(), "held out".to_owned()));
    // Empty files of ids neither.
    write(dir.path(), "ids/empty.bin", b"");
    write(dir.path(), "ids/train.bin", &[b'a', 0]);
    assert_eq!(both(&dir.path().join("ids")), "a");
}

#[test]
fn corpora_that_train_alike_have_one_identity() {
    let dir = tempfile::tempdir().unwrap();
    let read = |name: &str| Corpus::open(&dir.path().join(name), &Byte).unwrap();
    write(dir.path(), "whole.txt", b"to train on held out");
    write(dir.path(), "cut/a.txt", b"to train on ");
    write(dir.path(), "cut/b.txt", b"held out");
    write(dir.path(), "parts/train.txt", b"to train on ");
    write(dir.path(), "parts/valid.txt", b"held out");
    let (whole, cut, parts) = (read("whole.txt"), read("cut"), read("parts"));
    assert_eq!((whole.hash(), cut.hash()), (cut.hash(), parts.hash()));
    assert_eq!(whole.identity(false), cut.identity(false));
    assert_ne!(whole.identity(true), cut.identity(true), "documents count where they are divided");
    assert_ne!(whole.identity(false), parts.identity(false), "what is held out counts");
}

#[cfg(feature = "compressed")]
#[test]
fn compressed_files_that_hold_no_text_are_left_out_of_a_folder() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), "a.txt", b"text");
    write(dir.path(), "b.pdf.gz", &gzip(b"%PDF-1.7\n"));
    write(dir.path(), "c.dat.gz", &gzip(b"a\0b"));
    assert_eq!(both(dir.path()), "text");
    assert_eq!(
        left_out(dir.path()),
        ["b.pdf.gz: a PDF document, compressed", "c.dat.gz: not text (zero bytes), compressed"]
    );
    // Megatron's index stands beside a compressed file of ids too.
    let mut index = b"MMIDIDX\0\0\x01\0\0\0\0\0\0\0\x01".to_vec();
    index.extend([1_u64, 0].iter().flat_map(|n| n.to_le_bytes()));
    index.extend([2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    write(dir.path(), "ids/train.idx", &index);
    write(dir.path(), "ids/train.bin.gz", &gzip(b"ab"));
    assert_eq!(both(&dir.path().join("ids")), "ab", "ids of one byte");
    assert_eq!(left_out(&dir.path().join("ids")), [""; 0]);
}
