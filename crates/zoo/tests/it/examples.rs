//! Examples to learn answers from: which tokens count, how rows are filled, and what is wrong with lines.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

use farflung_zoo::data::{ExampleRows, LossOn, Packing, ReadOptions};
use farflung_zoo::tokenizer::Byte;
use farflung_zoo::{Batch, Corpus, HoldOut, Sampler, Shard, Tokenizer};

struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.0.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, text).unwrap();
        path
    }

    /// Returns the error of a folder of these files.
    fn error(files: &[(&str, &str)]) -> String {
        let folder = Self::new();
        for (name, text) in files {
            folder.write(name, text);
        }
        let path = match files {
            [(name, _)] => folder.0.path().join(name),
            _ => folder.0.path().to_owned(),
        };
        Corpus::open(&path, &Byte).unwrap_err().to_string()
    }
}

fn pair(prompt: &str, completion: &str) -> String {
    format!("{}\n", serde_json::json!({ "prompt": prompt, "completion": completion }))
}

fn opened(text: &str, tokenizer: &dyn Tokenizer, loss_on: LossOn) -> Corpus {
    let path = Folder::new();
    let path = (path.write("x.jsonl", text), path);
    Corpus::open_with(&path.0, tokenizer, ReadOptions { loss_on, ..ReadOptions::default() }).unwrap()
}

fn rows(corpus: &Corpus, length: usize, packing: Packing, prefixed: bool) -> Arc<ExampleRows> {
    let (training, _) = corpus.split(HoldOut::Tokens(0)).unwrap();
    Arc::new(ExampleRows::new(training, length, packing, prefixed).unwrap())
}

/// Returns all rows in their order.
fn all(rows: &Arc<ExampleRows>) -> Batch {
    let count = rows.count();
    let shard = Shard::whole(count);
    let sampler = Sampler::evaluation_of_examples(Arc::clone(rows), shard, count).unwrap();
    sampler.batch(0).unwrap()
}

/// Returns the text of the targets that count.
fn learnt(batch: &Batch) -> String {
    let weights = batch.weights.as_ref().unwrap();
    let targets = batch.targets.iter().zip(weights).filter(|(_, weight)| **weight > 0.0);
    let bytes: Vec<u8> = targets.map(|(&target, _)| target as u8).collect();
    String::from_utf8(bytes).unwrap()
}

#[test]
fn completions_are_learnt_and_prompts_are_not() {
    let text = [pair("ab", "cde"), pair("", "f"), pair("gh", ""), pair("i", "jk")].concat();
    let corpus = opened(&text, &Byte, LossOn::Answers);
    assert_eq!((corpus.reading().examples, corpus.len()), (4, 11));
    for packing in [Packing::Packed, Packing::Alone] {
        let rows = rows(&corpus, 8, packing, false);
        let batch = all(&rows);
        // `f` is the first token of its example, which nothing predicts, and `gh` has no answer.
        assert_eq!((learnt(&batch).as_str(), rows.dropped(), rows.cut()), ("cdejk", 2, 0));
        assert_eq!((rows.examples(), rows.targets()), (2, 5));
        assert!((batch.counted() - 5.0).abs() < 1e-9);
    }
    let packed = all(&rows(&corpus, 8, Packing::Packed, false));
    let bytes = |text: &[u8; 8]| text.map(u32::from).to_vec();
    assert_eq!(packed.inputs, bytes(b"abcdeijk"));
    assert_eq!(packed.documents.unwrap(), [0, 0, 0, 0, 0, 5, 5, 5]);
    assert_eq!(packed.weights.unwrap(), [0.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 0.0]);
    let read_both_ways = all(&rows(&corpus, 8, Packing::Packed, true));
    assert_eq!(read_both_ways.prefixes.unwrap(), [2, 2, 2, 2, 2, 6, 6, 6]);
    let every = opened(&text, &Byte, LossOn::All);
    assert_eq!(learnt(&all(&rows(&every, 8, Packing::Alone, false))), "bcdehjk");
    assert_ne!(every.identity(false), corpus.identity(false));
    // Of a short row, what fits is learnt.
    let short = rows(&corpus, 4, Packing::Packed, false);
    assert_eq!((learnt(&all(&short)).as_str(), short.cut(), short.dropped()), ("cdjk", 1, 2));
    let none = ExampleRows::new(corpus.split(HoldOut::Tokens(0)).unwrap().0, 1, Packing::Alone, false);
    assert!(none.is_err());
}

#[test]
fn each_row_comes_once_an_epoch_whatever_the_ranks_are() {
    let text: String = (0..37).map(|i| pair(&"p".repeat(i % 5 + 1), &"c".repeat(i % 7 + 1))).collect();
    let corpus = opened(&text, &Byte, LossOn::Answers);
    let rows = rows(&corpus, 16, Packing::Packed, false);
    let sampler = |rank, world, batch| {
        Sampler::examples(Arc::clone(&rows), 5, Shard { rank, world, batch }, 1).unwrap()
    };
    let (count, one) = (rows.count() as u64, sampler(0, 1, 1));
    let mut often = BTreeMap::<u64, usize>::new();
    (0..3 * count).for_each(|sequence| *often.entry(one.window(sequence).unwrap()).or_default() += 1);
    assert!(often.len() as u64 == count && often.values().all(|&times| times == 3), "{often:?}");
    for (rank, step) in [(0, 0), (1, 4), (2, 9)] {
        let found = sampler(rank, 3, 2).batch(step).unwrap();
        let first = (step as usize * 3 + rank) as u64 * 2;
        assert_eq!(found, one.sequences(first, 2).unwrap());
        assert_eq!(one.counted(first, 2).unwrap().to_bits(), found.counted().to_bits());
        let late = one.clone().without_first_targets(3);
        let counted = late.sequences(first, 2).unwrap().counted();
        assert_eq!(late.counted(first, 2).unwrap().to_bits(), counted.to_bits());
    }
    let half = Sampler::evaluation_of_examples(Arc::clone(&rows), Shard { rank: 1, world: 2, batch: 3 }, 4);
    let missing = half.unwrap().batch(0).unwrap();
    assert_eq!(missing.weights.unwrap()[16..], [0.0; 32], "the fifth and the sixth of four rows");
    let message =
        Sampler::examples(Arc::clone(&rows), 5, Shard::whole(1), count + 1).unwrap_err().to_string();
    assert!(message.contains("the number of rows of examples"), "{message}");
}

#[test]
fn a_tenth_of_the_examples_is_held_out_or_the_files_that_say_so() {
    let text: String = (0..20).map(|i| pair("p", &"c".repeat(i + 1))).collect();
    let corpus = opened(&text, &Byte, LossOn::Answers);
    let (training, held_out) = corpus.split(HoldOut::Standard).unwrap();
    assert_eq!((training.documents().len(), held_out.documents().len()), (18, 2));
    let one = opened(&pair("p", "c"), &Byte, LossOn::Answers);
    let (training, held_out) = one.split(HoldOut::Standard).unwrap();
    assert_eq!((training.documents().len(), held_out.len()), (1, 0));
    let folder = Folder::new();
    folder.write("train.jsonl", &text);
    folder.write("valid.jsonl", &pair("v", "w"));
    let (training, held_out) =
        Corpus::open(folder.0.path(), &Byte).unwrap().split(HoldOut::Standard).unwrap();
    assert_eq!((training.documents().len(), held_out.documents().len()), (20, 1));
}

#[test]
fn lines_of_texts_are_documents() {
    let corpus = opened("{\"text\": \"abc\"}\n{\"text\": \"de\"}\n", &Byte, LossOn::Answers);
    let (training, _) = corpus.split(HoldOut::Tokens(0)).unwrap();
    assert_eq!((training.documents(), training.has_examples()), (vec![0..3, 3..5], false));
}

/// Descriptions beside examples are left out; beside other texts, lines of JSON are text.
#[test]
fn a_folder_is_examples_or_texts() {
    use farflung_zoo::data::has_examples;

    let folder = Folder::new();
    folder.write("data.jsonl", &pair("a", "b"));
    folder.write("README.md", "what it is");
    assert!(has_examples(folder.0.path()));
    let corpus = Corpus::open(folder.0.path(), &Byte).unwrap();
    assert_eq!((corpus.reading().examples, corpus.reading().skipped.len(), corpus.len()), (1, 1, 2));
    folder.write("book.txt", "a text");
    assert!(!has_examples(folder.0.path()));
    let corpus = Corpus::open(folder.0.path(), &Byte).unwrap();
    assert_eq!((corpus.reading().examples, corpus.reading().files), (0, 3));
    // As texts, a tokenizer is trained on what is said.
    let options = ReadOptions { as_texts: true, ..ReadOptions::default() };
    let chat = r#"{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}"#;
    let path = folder.write("chat/x.jsonl", &format!("{chat}\n{}", pair("c", "d")));
    let said = Corpus::open_with(&path, &Byte, options).unwrap();
    assert_eq!((said.len(), said.split(HoldOut::Tokens(0)).unwrap().0.documents()), (7, vec![0..5, 5..7]));
}

#[test]
fn what_is_wrong_has_its_file_and_its_line() {
    let good = pair("a", "b");
    for (files, said) in [
        (&[("x.jsonl", "\n{\"prompt\": \"a\"}\n")][..], "x.jsonl`, line 2: it has no `completion`"),
        (
            &[("x.jsonl", &format!("{good}{{\"text\": \"c\"}}"))],
            "line 2: it has a `text`, and others are examples",
        ),
        (
            &[("x.jsonl", &format!("{{\"text\": \"c\"}}\n{good}"))],
            "line 2: it is an example, and others are texts",
        ),
        (&[("x.jsonl", &format!("{good}\r\n[]\r\n"))], "line 3: it is a list"),
        (&[("x.jsonl", " \n\n")], "contains no data"),
        (
            &[("a.jsonl", &good), ("b.jsonl", "{\"text\": \"c\"}")],
            "b.jsonl`, line 1: it has a `text`, and others",
        ),
        (
            &[("x.jsonl", "{\"messages\": [{\"role\": \"user\", \"content\": \"x\"}]}")],
            "line 1: it has `messages`, and",
        ),
    ] {
        let error = Folder::error(files);
        assert!(error.contains(said), "{error}\n{said}");
    }
}

/// Keys of messages keep their order, as `tojson` writes them, and a template's date is always the same.
#[cfg(all(feature = "chat", feature = "tokenizers"))]
#[test]
fn messages_are_rendered_as_they_are_written() {
    use farflung_zoo::tokenizer::FileTokenizer;

    let (folder, fixtures) =
        (Folder::new(), PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures"));
    let to = folder.0.path().join("tokenizer.json");
    fs::copy(fixtures.join("tokenizers/gpt2/tokenizer.json"), to).unwrap();
    folder.write(
        "chat_template.jinja",
        "{{ strftime_now('%d %b %Y') }}{% for m in messages %}{{ m | tojson }}{% endfor %}",
    );
    let tokenizer = FileTokenizer::open(folder.0.path()).unwrap();
    let line = r#"{"messages": [{"role": "user", "zebra": 1, "content": "x", "apple": 2}]}"#;
    let corpus = opened(line, &tokenizer, LossOn::All);
    let batch = all(&rows(&corpus, corpus.len(), Packing::Alone, false));
    let text = String::from_utf8(tokenizer.decode(&batch.inputs).unwrap()).unwrap();
    assert_eq!(text, r#"26 Jul 2024{"role": "user", "zebra": 1, "content": "x", "apple": 2}"#);
}

/// The assistant's tokens as transformers tells them, where the template marks them and where it does not.
#[cfg(all(feature = "chat", feature = "tokenizers"))]
#[test]
fn of_conversations_the_assistants_tokens_count() {
    use farflung_zoo::tokenizer::FileTokenizer;
    use serde_json::Value;

    let fixtures = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    for (chat, tokenizer, marks) in [
        ("chatml", "gpt2", true),
        ("chatml", "gpt2", false),
        ("headers", "llama3", true),
        ("headers", "llama3", false),
    ] {
        let (folder, chat) = (Folder::new(), fixtures.join("chat").join(chat));
        for (from, to) in [
            (fixtures.join("tokenizers").join(tokenizer).join("tokenizer.json"), "tokenizer.json"),
            (chat.join("tokenizer_config.json"), "tokenizer_config.json"),
        ] {
            fs::copy(from, folder.0.path().join(to)).unwrap();
        }
        let mut template = fs::read_to_string(chat.join("chat_template.jinja")).unwrap();
        if !marks {
            for tag in ["generation", "endgeneration"] {
                for tag in [format!("{{% {tag} %}}"), format!("{{%- {tag} %}}"), format!("{{%- {tag} -%}}")] {
                    template = template.replace(&tag, "");
                }
            }
            assert!(!template.contains("generation %") && !template.contains("generation -%"));
        }
        folder.write("chat_template.jinja", &template);
        let tokenizer = FileTokenizer::open(folder.0.path()).unwrap();
        let expected: Value = serde_json::from_slice(&fs::read(chat.join("expected.json")).unwrap()).unwrap();
        let mut compared = 0;
        for case in expected["cases"].as_array().unwrap() {
            let line = serde_json::json!({ "messages": case["messages"] });
            let of = |case: &Value| serde_json::from_value::<Vec<i64>>(case.clone()).unwrap();
            let (ids, labels) = (of(&case["ids"]), of(&case["labels"]));
            if case["add_generation_prompt"] == true || labels.iter().all(|&label| label < 0) {
                continue;
            }
            compared += 1;
            let corpus = opened(&line.to_string(), &tokenizer, LossOn::Answers);
            let batch = all(&rows(&corpus, ids.len(), Packing::Alone, false));
            assert!(batch.inputs.iter().zip(&ids).all(|(a, b)| i64::from(*a) == *b), "{}", case["title"]);
            let weights = batch.weights.unwrap();
            let want: Vec<f32> =
                labels[1..].iter().map(|&label| if label < 0 { 0.0 } else { 1.0 }).chain([0.0]).collect();
            assert_eq!(weights, want, "{} {marks}", case["title"]);
        }
        assert!(compared >= 3, "{compared}");
    }
}
