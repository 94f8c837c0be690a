//! Tokenizers of model folders and GGUF files: against the crate's own program in Python, against
//! `SentencePiece`'s rule, and hostile descriptions.

#![cfg(feature = "tokenizers")]
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::fs;
use std::path::{Path, PathBuf};

use farflung_zoo::Tokenizer;
use farflung_zoo::tokenizer::{Affixes, FileTokenizer, TextStream, TrainOptions};
use serde_json::{Value, json};

use crate::gguf::file::{Gguf, text};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tokenizers").join(name)
}

fn read(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

fn opened(description: &Value) -> Result<FileTokenizer, String> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokenizer.json");
    fs::write(&path, description.to_string()).unwrap();
    FileTokenizer::open(&path).map_err(|error| error.to_string())
}

/// Returns the text of ids that come one by one.
fn streamed(tokenizer: &dyn Tokenizer, ids: &[u32]) -> String {
    let mut stream = TextStream::new(tokenizer);
    let mut all: Vec<u8> = ids.iter().flat_map(|&id| stream.push(id).unwrap()).collect();
    all.extend(stream.finish().unwrap());
    String::from_utf8(all).unwrap()
}

/// Checks a tokenizer against what the crate's program in Python gives.
fn check(tokenizer: &FileTokenizer, expected: &Value) {
    assert_eq!(tokenizer.vocab_size() as u64, expected["vocab_size"].as_u64().unwrap());
    for (special, id) in expected["special"].as_object().unwrap() {
        let known = tokenizer.special_tokens();
        assert!(known.iter().any(|token| token.text == *special && Some(u64::from(token.id)) == id.as_u64()));
    }
    let Affixes { before, after } = tokenizer.affixes();
    for case in expected["cases"].as_array().unwrap() {
        let text = case["text"].as_str().unwrap();
        let ids: Vec<u32> = serde_json::from_value(case["ids"].clone()).unwrap();
        let own = tokenizer.encode_marked(text).unwrap();
        let own = if case["add_special_tokens"] == true {
            [&before, &own, &after].map(Clone::clone).concat()
        } else {
            own
        };
        assert_eq!(own, ids, "{text:?}");
        let decoded = String::from_utf8(tokenizer.decode(&ids).unwrap()).unwrap();
        assert_eq!(decoded, case["decoded"].as_str().unwrap());
        assert_eq!(streamed(tokenizer, &ids), decoded);
        let is_special = |id: &u32| tokenizer.special_tokens().iter().any(|token| token.id == *id);
        let plain: Vec<u32> = ids.into_iter().filter(|id| !is_special(id)).collect();
        let decoded = String::from_utf8(tokenizer.decode(&plain).unwrap()).unwrap();
        assert_eq!(decoded, case["decoded_without_special"].as_str().unwrap());
        // Special tokens as plain text come back, too.
        let plain = tokenizer.encode(text).unwrap();
        assert!(!plain.iter().any(is_special), "{text:?}");
    }
}

#[test]
fn ids_and_texts_are_those_of_the_reference() {
    for name in ["gpt2", "llama3"] {
        let tokenizer = FileTokenizer::open(&fixture(name)).unwrap();
        check(&tokenizer, &read(&fixture(name).join("expected.json")));
        // What it is written as is the same tokenizer.
        let folder = tempfile::tempdir().unwrap();
        for (name, bytes) in tokenizer.files() {
            fs::write(folder.path().join(name), bytes).unwrap();
        }
        let again = FileTokenizer::open(folder.path()).unwrap();
        check(&again, &read(&fixture(name).join("expected.json")));
    }
    let ends = ["gpt2", "llama3"].map(|name| FileTokenizer::open(&fixture(name)).unwrap().end_of_text());
    assert_eq!(ends, [Some(0), None]);
}

fn strings(all: &[&str]) -> Vec<u8> {
    let texts = all.iter().flat_map(|one| text(one));
    [&8_u32.to_le_bytes()[..], &(all.len() as u64).to_le_bytes()].concat().into_iter().chain(texts).collect()
}

fn numbers<T>(kind: u32, all: &[T], bytes: impl Fn(&T) -> [u8; 4]) -> Vec<u8> {
    let data = all.iter().flat_map(bytes);
    [&kind.to_le_bytes()[..], &(all.len() as u64).to_le_bytes()].concat().into_iter().chain(data).collect()
}

/// Writes the description of a tokenizer as a GGUF file does.
fn gguf(fields: Vec<(&str, u32, Vec<u8>)>) -> Gguf {
    let mut out = Gguf::default();
    for (name, kind, value) in fields {
        let name = if name.contains('.') { name.to_owned() } else { format!("tokenizer.ggml.{name}") };
        out.fields.push((name, kind, value));
    }
    out
}

fn open_gguf(file: &Gguf) -> Result<FileTokenizer, String> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    fs::write(&path, file.bytes()).unwrap();
    FileTokenizer::open(&path).map_err(|error| error.to_string())
}

/// The GGUF file of a fixture.
fn gguf_of(name: &str, pre: &str) -> Gguf {
    let json = read(&fixture(name).join("tokenizer.json"));
    let mut words: Vec<(u64, &str)> = json["model"]["vocab"]
        .as_object()
        .unwrap()
        .iter()
        .map(|(word, id)| (id.as_u64().unwrap(), word.as_str()))
        .collect();
    words.sort_unstable();
    let special: Vec<u64> =
        json["added_tokens"].as_array().unwrap().iter().map(|token| token["id"].as_u64().unwrap()).collect();
    let tokens: Vec<&str> = words.iter().map(|(_, word)| *word).collect();
    let kinds: Vec<i32> = words.iter().map(|(id, _)| if special.contains(id) { 3 } else { 1 }).collect();
    let merges: Vec<String> = json["model"]["merges"]
        .as_array()
        .unwrap()
        .iter()
        .map(|pair| format!("{} {}", pair[0].as_str().unwrap(), pair[1].as_str().unwrap()))
        .collect();
    let merges: Vec<&str> = merges.iter().map(String::as_str).collect();
    gguf(vec![
        ("model", 8, text("gpt2")),
        ("pre", 8, text(pre)),
        ("tokens", 9, strings(&tokens)),
        ("token_type", 9, numbers(5, &kinds, |kind| kind.to_le_bytes())),
        ("merges", 9, strings(&merges)),
        ("bos_token_id", 4, 0_u32.to_le_bytes().to_vec()),
        ("eos_token_id", 4, 1_u32.to_le_bytes().to_vec()),
        ("tokenizer.chat_template", 8, text("{{ messages }}")),
    ])
}

#[test]
fn a_gguf_file_holds_the_same_tokenizer() {
    for (name, pre) in [("gpt2", "gpt-2"), ("llama3", "llama-bpe")] {
        let tokenizer = open_gguf(&gguf_of(name, pre)).unwrap();
        check(&tokenizer, &read(&fixture(name).join("expected.json")));
        assert_eq!((tokenizer.end_of_text(), tokenizer.chat_template()), (Some(1), Some("{{ messages }}")));
    }
    let error = open_gguf(&gguf_of("gpt2", "mystery")).unwrap_err();
    assert!(error.contains("`tokenizer.ggml.pre` is mystery, expected one of gpt-2"), "{error}");
}

/// Pieces with scores as `SentencePiece` has them.
fn pieces() -> (Vec<String>, Vec<f32>, Vec<i32>) {
    let mut pieces = vec!["<unk>".to_owned(), "<s>".to_owned(), "</s>".to_owned()];
    let mut kinds = vec![2, 3, 3];
    pieces.extend((0..=255).map(|byte| format!("<0x{byte:02X}>")));
    kinds.extend([6; 256]);
    let words = [
        "▁t", "he", "▁the", "in", "er", "▁a", "▁w", "▁wa", "ter", "▁water", "re", "▁▁", "lo", "llo", "▁he",
        "▁hello",
    ];
    pieces.extend(words.map(str::to_owned));
    pieces.extend("▁abcdefghijklmnopqrstuvwxyzé".chars().map(String::from));
    kinds.resize(pieces.len(), 1);
    let scores = (0..pieces.len()).map(|at| if at < 259 { 0.0 } else { 259.0 - at as f32 }).collect();
    (pieces, scores, kinds)
}

/// `SentencePiece`'s rule for byte-pair encodings: of all neighbours that form a piece, the pair with the
/// highest score is joined, the first of equals; what is no piece is written as bytes.
fn by_rule(text: &str, pieces: &[String], scores: &[f32]) -> Vec<u32> {
    let id = |piece: &str| pieces.iter().position(|known| known == piece);
    let mut parts: Vec<String> = format!("▁{}", text.replace(' ', "▁")).chars().map(String::from).collect();
    loop {
        let mut best: Option<(usize, f32)> = None;
        for at in 1..parts.len() {
            if let Some(joined) = id(&format!("{}{}", parts[at - 1], parts[at]))
                && best.is_none_or(|(_, score)| scores[joined] > score)
            {
                best = Some((at, scores[joined]));
            }
        }
        let Some((at, _)) = best else { break };
        let right = parts.remove(at);
        parts[at - 1].push_str(&right);
    }
    let bytes = |part: &str| part.bytes().map(|byte| 3 + u32::from(byte)).collect();
    parts.iter().flat_map(|part| id(part).map_or_else(|| bytes(part), |id| vec![id as u32])).collect()
}

#[test]
fn sentence_piece_models_in_gguf_files_join_by_score() {
    let (pieces, scores, kinds) = pieces();
    let tokens: Vec<&str> = pieces.iter().map(String::as_str).collect();
    let file = gguf(vec![
        ("model", 8, text("llama")),
        ("tokens", 9, strings(&tokens)),
        ("scores", 9, numbers(6, &scores, |score| score.to_le_bytes())),
        ("token_type", 9, numbers(5, &kinds, |kind| kind.to_le_bytes())),
        ("bos_token_id", 4, 1_u32.to_le_bytes().to_vec()),
        ("eos_token_id", 4, 2_u32.to_le_bytes().to_vec()),
        ("unknown_token_id", 4, 0_u32.to_le_bytes().to_vec()),
    ]);
    let tokenizer = open_gguf(&file).unwrap();
    assert_eq!(tokenizer.affixes(), Affixes { before: vec![1], after: vec![] });
    assert_eq!((tokenizer.end_of_text(), tokenizer.marks().begin), (Some(2), "<s>"));
    for text in ["the water", "hello  there", " a", "aéb 字 🦀", "the\nwatered", "x", "THE"] {
        let ids = tokenizer.encode(text).unwrap();
        assert_eq!(ids, by_rule(text, &pieces, &scores), "{text:?}");
        assert_eq!(tokenizer.decode(&ids).unwrap(), text.as_bytes());
        assert_eq!(streamed(&tokenizer, &ids), text);
    }
    assert_eq!(tokenizer.encode_marked("a</s>").unwrap().last(), Some(&2));
    assert!(!tokenizer.encode("a<s></s>").unwrap().iter().any(|id| *id < 3), "as plain text");
    // What continues a text keeps its space.
    let (prompt, more) = (tokenizer.encode("hello").unwrap(), tokenizer.encode("water the").unwrap());
    let mut stream = TextStream::after(&tokenizer, &prompt);
    let all: Vec<u8> = more.iter().flat_map(|&id| stream.push(id).unwrap()).collect();
    assert_eq!(all, b" water the");
    // A run of bytes that is longer than what a stream looks back to.
    let bytes = "鿕鿖鿗鿘鿙鿚鿛鿜鿝鿞鿟鿠 the 🦀🦀🦀🦀🦀";
    assert_eq!(streamed(&tokenizer, &tokenizer.encode(bytes).unwrap()), bytes);
    // A long text is cut where that changes nothing.
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokenizer.json");
    fs::write(&path, &tokenizer.files()[0].1).unwrap();
    let reference = tokenizers::Tokenizer::from_file(&path).unwrap();
    for unit in
        ["the water was lower here than the other water in there\n", "of the ", "a1 2 3 the\n", "é字 "]
    {
        let long = unit.repeat(1_200_000 / unit.len());
        let whole = reference.encode_fast(long.as_str(), false).unwrap();
        assert_eq!(tokenizer.encode(&long).unwrap(), whole.get_ids(), "{unit:?}");
    }
}

#[test]
fn long_texts_are_cut_where_it_changes_nothing() {
    let words = ["Mouse", "is", "12 ", "naïve\n", "don't", "\n\n", "字字", "x = [y];", "  ", "a", "\t"];
    let mut state = 7_u64;
    let mut long = String::new();
    while long.len() < 400_000 {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        long.push_str(words[(state >> 33) as usize % words.len()]);
        long.push(' ');
    }
    for name in ["gpt2", "llama3"] {
        let own = FileTokenizer::open(&fixture(name)).unwrap().encode(&long).unwrap();
        let mut reference = tokenizers::Tokenizer::from_file(fixture(name).join("tokenizer.json")).unwrap();
        reference.set_encode_special_tokens(true);
        assert_eq!(own, reference.encode_fast(long.as_str(), false).unwrap().get_ids(), "{name}");
    }
    // Long runs neither fail nor lose anything.
    let tokenizer = FileTokenizer::open(&fixture("gpt2")).unwrap();
    for unit in [" ", "\t ", "!", "字"] {
        let text = unit.repeat(1_200_000 / unit.len()) + " foo 1234,a bar";
        let ids = tokenizer.encode(&text).unwrap();
        assert_eq!(tokenizer.decode(&ids).unwrap(), text.as_bytes(), "{unit:?}");
        assert!(ids.ends_with(&tokenizer.encode(" foo 1234,a bar").unwrap()), "{unit:?}");
    }
    // A special token is never cut.
    for unit in ["1 2 3 4 5 6 7 ", "a1", "x,"] {
        let text = unit.repeat(70_000 / unit.len()) + "<|endoftext|>" + &unit.repeat(9);
        let ids = tokenizer.encode_marked(&text).unwrap();
        assert_eq!(ids.iter().filter(|id| **id == 0).count(), 1, "{unit:?}");
    }
}

#[test]
fn a_tokenizer_can_be_trained() {
    let text = "the slow link carries the gradient, and the gradient is late\n".repeat(40);
    let options =
        TrainOptions { vocab: 280, special: vec!["<|end|>".to_owned(), "<|pad|>".to_owned()], least: 2 };
    let trained = || FileTokenizer::train([text.as_str()].into_iter(), &options, |_| ()).unwrap();
    let tokenizer = trained();
    assert_eq!((tokenizer.vocab_size(), tokenizer.end_of_text()), (280, Some(0)));
    let ids = tokenizer.encode(&text).unwrap();
    assert!(ids.len() * 2 < text.len(), "{} tokens of {} bytes", ids.len(), text.len());
    let all: String = "any text: é 字 🦀 \u{0}".to_owned() + &text;
    assert_eq!(tokenizer.decode(&tokenizer.encode(&all).unwrap()).unwrap(), all.as_bytes());
    assert_eq!(trained().files(), tokenizer.files(), "equal texts give equal files");
    let small = TrainOptions { vocab: 100, ..TrainOptions::default() };
    let error = FileTokenizer::train([""].into_iter(), &small, |_| ()).unwrap_err().to_string();
    assert!(error.contains("expected from 257"), "{error}");
}

#[test]
fn descriptions_that_are_wrong_are_refused() {
    let good = read(&fixture("gpt2").join("tokenizer.json"));
    let wrong = |change: &dyn Fn(&mut Value), expected: &str| {
        let mut description = good.clone();
        change(&mut description);
        let error = opened(&description).unwrap_err();
        assert!(error.contains(expected), "expected {expected:?}: {error}");
    };
    wrong(&|d| d["model"]["type"] = json!("Magic"), "expected BPE, Unigram, WordLevel, WordPiece");
    wrong(&|d| *d = json!([]), "no JSON object");
    wrong(&|d| d["model"] = json!(null), "no `model`");
    wrong(&|d| d["model"]["vocab"] = json!({}), "`model.vocab` is no object with words");
    wrong(&|d| d["model"]["vocab"]["new"] = json!(u32::MAX), "expected one below 16777216");
    wrong(&|d| d["model"]["vocab"]["new"] = json!(7), "two words");
    wrong(&|d| d["model"]["merges"][0] = json!(["Zq", "qZ"]), "`model.merges[0]` needs");
    wrong(&|d| d["model"]["merges"][3] = json!("alone"), "expected two tokens");
    wrong(&|d| d["model"]["continuing_subword_prefix"] = json!("#"), "continuing_subword_prefix");
    wrong(&|d| d["added_tokens"][0]["id"] = json!(9999), "has the id 9999, expected 0");
    wrong(&|d| d["added_tokens"][0]["content"] = json!(""), "`added_tokens[0]`");
    wrong(
        &|d| d["normalizer"] = json!({"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
        "Precompiled",
    );
    let grow = json!({"type": "Replace", "pattern": {"String": "a"}, "content": "aaaaaaaaaaaaaaaa"});
    let grow = json!({"type": "Sequence", "normalizers": [grow, grow, grow]});
    wrong(&|d| d["normalizer"] = grow.clone(), "4096 times as long");
    let empty = json!({"type": "Replace", "pattern": {"Regex": "x*"}, "content": "a".repeat(99)});
    wrong(&|d| d["normalizer"] = empty.clone(), "100 times as long");
    wrong(&|d| d["normalizer"] = json!({"type": "Sequence"}), "");
    let split = json!({"type": "Split", "pattern": {"Regex": "(("}, "behavior": "Isolated", "invert": false});
    wrong(&|d| d["pre_tokenizer"] = split.clone(), "");
    wrong(
        &|d| d["pre_tokenizer"] = json!({"type": "Whitespace"}),
        "neither `model.unk_token`, nor all bytes",
    );
    let words = json!({"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "?"});
    wrong(&|d| d["model"] = words.clone(), "`model.unk_token` \"?\" is not in its vocabulary");
    let unigram = json!({"type": "Unigram", "vocab": [["a", -1.0]], "unk_id": 5});
    wrong(&|d| d["model"] = unigram.clone(), "`model.unk_id` is 5, expected one below 1");
    wrong(&|d| d["model"]["end_of_word_suffix"] = json!("</w>"), "`model.end_of_word_suffix` is not read");
    let template = |single: Value, special: Value| json!({"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": special});
    let text = json!({"Sequence": {"id": "A", "type_id": 0}});
    let begin = json!({"SpecialToken": {"id": "<s>", "type_id": 0}});
    let far = json!({"<s>": {"id": "<s>", "ids": [4_000_000_000_u32], "tokens": ["<s>"]}});
    let twice = template(json!([text, text]), json!({}));
    wrong(&|d| d["post_processor"] = twice.clone(), "the text 2 times");
    let unknown = template(json!([begin, text]), json!({}));
    wrong(&|d| d["post_processor"] = unknown.clone(), "unknown piece");
    let other = template(json!([{"Sequence": {"id": "B", "type_id": 0}}]), json!({}));
    wrong(&|d| d["post_processor"] = other.clone(), "unknown piece");
    let far = template(json!([begin, text]), far);
    wrong(&|d| d["post_processor"] = far.clone(), "adds the id 4000000000");
    let strip = json!({"type": "Strip", "content": "a", "start": 0, "stop": 5});
    wrong(&|d| d["decoder"] = strip.clone(), "from the end");
    wrong(&|d| d["normalizer"] = json!({"type": "Prepend", "prepend": ""}), "nothing to prepend");
    let long = json!({"type": "Unigram", "vocab": [["a", -1.0], ["b".repeat(60_000), -2.0]], "unk_id": 0});
    wrong(&|d| d["model"] = long.clone(), "more than 256 bytes");
    let words = json!({"type": "WordPiece", "vocab": {"a": 0}, "unk_token": "a", "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 1_000_000_000});
    wrong(&|d| d["model"] = words.clone(), "expected at most 1000");
    // What the library panics on, in a text or at once.
    let nothing = json!({"type": "Replace", "pattern": {"Regex": "x*"}, "content": "b"});
    let mut description = good.clone();
    description["normalizer"] = nothing;
    let failed =
        opened(&description).and_then(|tokenizer| tokenizer.encode("axb c").map_err(|e| e.to_string()));
    assert!(failed.unwrap_err().contains("the library `tokenizers` failed on it"));
    // What would cut or fill texts, or vary, has no effect.
    let mut odd = good.clone();
    odd["truncation"] =
        json!({"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0});
    odd["padding"] = json!({"strategy": {"Fixed": 1_000_000_000_000_u64}, "direction": "Right",
        "pad_to_multiple_of": null, "pad_id": 0, "pad_type_id": 0, "pad_token": "x"});
    odd["model"]["dropout"] = json!(0.9);
    check(&opened(&odd).unwrap(), &read(&fixture("gpt2").join("expected.json")));
}

#[test]
fn a_name_tells_tokenizers_apart_wherever_they_lie() {
    let folder = tempfile::tempdir().unwrap();
    let written = |name: &str, text: String, end: Option<&str>| {
        let path = folder.path().join(name);
        fs::create_dir(&path).unwrap();
        fs::write(path.join("tokenizer.json"), text).unwrap();
        if let Some(end) = end {
            fs::write(path.join("tokenizer_config.json"), json!({"eos_token": end}).to_string()).unwrap();
        }
        FileTokenizer::open(&path).unwrap().name().to_owned()
    };
    let good = read(&fixture("gpt2").join("tokenizer.json"));
    let plain = written("a", good.to_string(), None);
    assert_eq!(written("b", format!("{good:#}"), None), plain);
    assert_eq!(written("c", good.to_string(), Some("<|endoftext|>")), plain);
    assert_ne!(written("d", good.to_string(), Some("<|im_end|>")), plain);
    let mut other = good.clone();
    other["model"]["merges"].as_array_mut().unwrap().pop();
    assert_ne!(written("e", other.to_string(), None), plain);
}

#[test]
fn bytes_without_a_token_are_counted() {
    let mut description = read(&fixture("gpt2").join("tokenizer.json"));
    drop(description["model"]["vocab"].as_object_mut().unwrap().remove("!"));
    let tokenizer = opened(&description).unwrap();
    let ids = tokenizer.encode("a! b!").unwrap();
    assert_eq!(tokenizer.decode(&ids).unwrap(), b"a b");
    assert_eq!((tokenizer.lost_bytes(b"a! b!"), tokenizer.lost_bytes(b"a b")), (2, 0));
    let corpus = farflung_zoo::Corpus::from_bytes("text", b"a! b!", &tokenizer).unwrap();
    assert_eq!(corpus.reading().lost, 2);
}

#[test]
fn damaged_files_are_read_or_refused() {
    let mut state = 3_u64;
    let mut next = |below: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % below
    };
    let folder = tempfile::tempdir().unwrap();
    let json = fs::read(fixture("llama3").join("tokenizer.json")).unwrap();
    let file = gguf_of("gpt2", "smollm").bytes();
    let mut refused = 0;
    for round in 0..200 {
        let (name, bytes) = if round % 2 == 0 { ("tokenizer.json", &json) } else { ("a.gguf", &file) };
        let mut bytes = bytes.clone();
        for _ in 0..=round % 3 {
            let at = next(bytes.len());
            bytes[at] = [b'0', b'9', b'"', b'}', 0, 0xFF, b'a'][next(7)];
        }
        if round % 5 == 0 {
            bytes.truncate(next(bytes.len()));
        }
        let path = folder.path().join(name);
        fs::write(&path, &bytes).unwrap();
        match FileTokenizer::open(&path) {
            Ok(tokenizer) => {
                let ids = tokenizer.encode("Any text. 字 <|begin|>\n").unwrap();
                tokenizer.decode(&ids).unwrap();
            }
            Err(error) => {
                assert!(!error.to_string().is_empty());
                refused += 1;
            }
        }
    }
    assert!((40..200).contains(&refused), "{refused}");
}
