//! The tokenizer files of model folders: GPT-2's are recognised, and others are described.

#![cfg(feature = "bpe")]
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use farflung_zoo::Tokenizer as _;
use farflung_zoo::tokenizer::{Gpt2, TokenizerFiles};
use serde_json::{Map, Value, json};

/// Returns GPT-2's vocabulary as the code published with it writes the words: printable bytes are themselves,
/// and the others are numbered from U+0100 on.
fn words() -> Vec<String> {
    let printable = |byte: &u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let others: Vec<u8> = (0..=255).filter(|byte| !printable(byte)).collect();
    let char = |byte: u8| match others.iter().position(|&other| other == byte) {
        Some(number) => char::from_u32(0x100 + number as u32).unwrap(),
        None => char::from(byte),
    };
    (0..50257).map(|id| Gpt2.decode(&[id]).unwrap().into_iter().map(char).collect()).collect()
}

/// Splits each word that a merge makes into two words.
fn merges(words: &[String]) -> Vec<(String, String)> {
    let known: BTreeMap<&str, usize> =
        words.iter().enumerate().map(|(id, word)| (word.as_str(), id)).collect();
    let pair = |(id, word): (usize, &String)| {
        let cuts = word.char_indices().skip(1).map(|(at, _)| word.split_at(at));
        let is_pair =
            |(a, b): &(&str, &str)| [a, b].iter().all(|&&half| known.get(half).is_some_and(|&i| i < id));
        let (a, b) = cuts.into_iter().find(is_pair).unwrap();
        (a.to_owned(), b.to_owned())
    };
    words.iter().enumerate().take(50256).skip(256).map(pair).collect()
}

fn vocab(words: &[String]) -> Map<String, Value> {
    words.iter().enumerate().map(|(id, word)| (word.clone(), json!(id))).collect()
}

fn write_pair(folder: &Path, words: &[String], names: (&str, &str), mark: &str, end: &str) {
    let lines = merges(words).into_iter().map(|(a, b)| format!("{a} {b}{end}"));
    let text: String = std::iter::once(format!("{mark}#version: 0.2{end}")).chain(lines).collect();
    fs::write(folder.join(names.1), text).unwrap();
    let vocab = Value::Object(vocab(words));
    fs::write(folder.join(names.0), format!("{mark}{vocab:#}").replace('\n', end)).unwrap();
}

fn tokenizer_json(words: &[String]) -> Value {
    json!({
        "added_tokens": [{"id": 50256, "content": "<|endoftext|>", "special": true}],
        "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true},
        "model": {
            "type": "BPE",
            "vocab": vocab(words),
            "merges": merges(words).iter().map(|(a, b)| format!("{a} {b}")).collect::<Vec<_>>(),
        },
    })
}

fn found(json: &Value) -> TokenizerFiles {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("tokenizer.json"), json.to_string()).unwrap();
    TokenizerFiles::of(folder.path()).unwrap()
}

#[track_caller]
fn differs(json: &Value, words: &str) {
    let found = found(json);
    let is_read = cfg!(feature = "tokenizers");
    let told = match &found {
        TokenizerFiles::Described { difference } => is_read && difference.contains(words),
        TokenizerFiles::Other { file: "tokenizer.json", difference } => {
            !is_read && difference.contains(words)
        }
        _ => false,
    };
    assert!(told, "{words}: {found:?}");
}

fn gpt2(added: &[(u64, &str)]) -> TokenizerFiles {
    TokenizerFiles::Gpt2 { added: added.iter().map(|&(id, word)| (id, word.to_owned())).collect() }
}

#[test]
fn gpt2s_vocabulary_and_merges_are_recognised() {
    let words = words();
    // Ids of the published vocabulary.
    for (word, id) in [("!", 0), ("\u{120}the", 262), ("\u{10A}", 198), ("<|endoftext|>", 50256)] {
        assert_eq!(words[id], word);
    }
    for (names, mark, end) in [
        (("vocab.json", "merges.txt"), "", "\n"),
        (("encoder.json", "vocab.bpe"), "", "\n"),
        (("vocab.json", "merges.txt"), "\u{FEFF}", "\r\n"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        write_pair(folder.path(), &words, names, mark, end);
        assert_eq!(TokenizerFiles::of(folder.path()).unwrap(), gpt2(&[]), "{names:?}");
    }
    let mut json = tokenizer_json(&words);
    assert_eq!(found(&json), gpt2(&[]));
    json["model"]["merges"] = merges(&words).into_iter().map(|(a, b)| json!([a, b])).collect();
    json["added_tokens"].as_array_mut().unwrap().push(json!({"id": 50257, "content": "[PAD]"}));
    let more = gpt2(&[(50257, "[PAD]")]);
    if cfg!(feature = "tokenizers") {
        differs(&json, "it adds 1 tokens");
    } else {
        assert_eq!(found(&json), more);
    }
}

#[test]
fn other_tokenizers_are_described() {
    let words = words();
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(TokenizerFiles::of(folder.path()).unwrap(), TokenizerFiles::None);
    fs::write(folder.path().join("meta.pkl"), "\u{80}").unwrap();
    let pickled = TokenizerFiles::of(folder.path()).unwrap();
    assert!(matches!(&pickled, TokenizerFiles::Other { file: "meta.pkl", .. }), "{pickled:?}");
    let json = tokenizer_json(&words);
    let with = |path: &str, value: Value| {
        let mut json = json.clone();
        *json.pointer_mut(path).unwrap() = value;
        json
    };
    differs(&with("/model/vocab/!", json!(1)), "its token 1 is \"!\", GPT-2's is \"\\\"\"");
    differs(&with("/model/type", json!("WordPiece")), "not a byte-pair encoding");
    differs(&with("/pre_tokenizer/type", json!("Split")), "splits texts in another way");
    differs(&with("/pre_tokenizer/add_prefix_space", json!(true)), "splits texts in another way");
    differs(&with("/normalizer", json!({"type": "NFC"})), "splits texts in another way");
    differs(&with("/model/merges/7", json!("a b")), "its 50000 merges are not GPT-2's");
    differs(&with("/added_tokens/0/content", json!("</s>")), "its token 50256 is \"</s>\"");
    differs(&with("/model/vocab", json!({"!": 0})), "it has 1 tokens, GPT-2's has 50257");
    differs(&with("/model/merges", json!([3])), "cannot be read");
    // A page in place of the file.
    fs::write(folder.path().join("tokenizer.json"), "<html></html>").unwrap();
    let message = TokenizerFiles::of(folder.path()).unwrap_err().to_string();
    assert!(message.contains("tokenizer.json") && message.contains("HTML"), "{message}");
}
