//! The lines that a run and `eval` print about their data, and the errors for data that cannot be used.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::fs;
use std::process::Output;

use serde_json::Value;

use crate::tiny::farflung;

struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Self {
        let folder = Self(tempfile::tempdir().unwrap());
        folder.write("book.txt", "the quick brown fox jumps over the lazy dog ".repeat(30).as_bytes());
        folder
    }

    fn write(&self, name: &str, bytes: &[u8]) {
        let path = self.0.path().join("data").join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }

    fn run(&self, args: &str) -> Output {
        let mut command = farflung();
        command.current_dir(self.0.path()).env("FARFLUNG_HOME", self.0.path().join("home"));
        command.args(args.split(' ')).output().unwrap()
    }

    fn train(&self, args: &str) -> Output {
        let small = "train --layers 1 --heads 2 --dim 16 --context 16 --batch 1 --steps 1 --eval-batches 1 \
                     --sample-tokens 0 --data data";
        self.run(&format!("{small} {args}"))
    }
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

#[test]
fn a_run_says_what_it_reads_and_its_report_lists_what_it_does_not() {
    let folder = Folder::new();
    folder.write(".git/config", b"hidden");
    folder.write("cover.png", b"\x89PNG\r\n\x1a\n\0");
    let output = folder.train("--workers 1 --out run");
    let said = stderr(&output);
    let line = "data: 1 file, 1320 bytes, 0 % no text, 2 left out: `cover.png` (a PNG picture); `.git` (hidden); \
                1188 tokens to train on and 132 held out";
    assert!(said.contains(line), "{said}");
    let report = fs::read_to_string(folder.0.path().join("run/report.json")).unwrap();
    let data = serde_json::from_str::<Value>(&report).unwrap()["data"].clone();
    assert_eq!((data["bytes"].as_u64(), data["held_out_tokens"].as_u64()), (Some(1320), Some(132)));
    assert_eq!(data["skipped"][1]["path"], "cover.png");
    assert_eq!(data["skipped"][1]["why"], "a PNG picture");
    let said = stderr(&folder.run("eval run --data data --batches 1"));
    assert!(said.contains(line), "{said}");
}

#[test]
fn data_that_cannot_be_meant_ends_a_run_with_2_before_it_begins() {
    let folder = Folder::new();
    folder.write("more.txt", b"version https://git-lfs.github.com/spec/v1\noid sha256:4d\n");
    let output = folder.train("--workers 1 --out run");
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(stderr(&output).contains("more.txt") && stderr(&output).contains("git lfs pull"));
    assert!(!folder.0.path().join("run").exists());
    let unknown = folder.train("--workers 1 --encoding utf-7");
    assert_eq!(unknown.status.code(), Some(2));
    assert!(stderr(&unknown).contains("windows-1252"), "{}", stderr(&unknown));
    assert!(stderr(&folder.train("--token-type u64")).contains("expected u8, u16, u32, i32 or i64"));
}

#[cfg(feature = "bpe")]
#[test]
fn a_text_with_special_tokens_divides_into_documents_where_the_user_asks() {
    let folder = Folder::new();
    let story = "Once upon a time there was a slow link between two machines, far away from each other. ";
    folder.write("book.txt", format!("{story}<|endoftext|>\n").repeat(20).as_bytes());
    let args = "--tokenizer gpt2 --workers 2 --shards files --out";
    let refused = folder.train(&format!("{args} first"));
    let said = stderr(&refused);
    assert_eq!(refused.status.code(), Some(2), "{said}");
    assert!(said.contains("`<|endoftext|>` stands in the text 20 times"), "{said}");
    assert!(said.contains("--special-tokens true"), "{said}");
    let output = folder.train(&format!("{args} second --special-tokens true"));
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(!stderr(&output).contains("endoftext"), "{}", stderr(&output));
}
