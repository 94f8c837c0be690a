//! Files of one JSON object to a line.

use std::path::Path;

use serde_json::{Map, Value};

use crate::data::source::unpacked_name;

/// What a line has.
#[derive(Debug, PartialEq)]
pub(super) enum Line {
    Text(String),
    Pair {
        prompt: String,
        completion: String,
    },
    /// A conversation, whose messages are read again where they are rendered, so that their keys keep their
    /// order.
    Messages,
}

/// Returns whether a file has lines of JSON by its name: `.jsonl` or `.ndjson`, also compressed.
#[must_use]
pub fn is_file_of_examples(path: &Path) -> bool {
    let endings = ["jsonl", "ndjson"];
    let name = unpacked_name(path);
    name.extension().is_some_and(|e| endings.iter().any(|known| e.eq_ignore_ascii_case(known)))
}

/// Returns whether files are examples by their names: lines of JSON, and beside them only descriptions.
pub(in crate::data) fn are_examples<'f>(files: impl Iterator<Item = &'f Path> + Clone) -> bool {
    files.clone().any(is_file_of_examples)
        && files.into_iter().all(|file| is_file_of_examples(file) || describes(file))
}

/// Returns whether a file's name is that of a description of a data set.
fn describes(path: &Path) -> bool {
    let name = path.file_name().map(|name| name.to_string_lossy().to_uppercase()).unwrap_or_default();
    let is_prose = path.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("md"));
    is_prose || name.starts_with("README") || name.starts_with("LICENSE")
}

/// Returns what is said in the conversation of a line, message by message.
pub(super) fn said(line: &str) -> String {
    let object: Value = serde_json::from_str(line).unwrap_or_default();
    let messages = object["messages"].as_array().into_iter().flatten();
    let said: Vec<&str> = messages.filter_map(|message| message["content"].as_str()).collect();
    said.join("\n")
}

/// Returns the lines of a text that are not empty, with their numbers, counted from 1.
pub(in crate::data) fn objects(text: &[u8]) -> impl Iterator<Item = (usize, &[u8])> {
    let lines = text.split(|&byte| byte == b'\n').map(<[u8]>::trim_ascii);
    (1..).zip(lines).filter(|(_, line)| !line.is_empty())
}

impl Line {
    /// Errors: a text that says what is wrong with the line, and what was expected.
    pub(super) fn parse(line: &str) -> Result<Self, String> {
        const EXPECTED: &str =
            "expected an object with `messages`, with `prompt` and `completion`, or with `text`";
        let mut object = match serde_json::from_str(line) {
            Ok(Value::Object(object)) => object,
            Ok(other) => return Err(format!("it is {}, {EXPECTED}", kind(&other))),
            Err(error) => return Err(format!("it is no JSON ({error}), {EXPECTED}")),
        };
        let text = |object: &mut Map<String, Value>, field: &str| match object.remove(field) {
            Some(Value::String(text)) => Ok(text),
            Some(other) => Err(format!("its `{field}` is {}, expected a text", kind(&other))),
            None => Err(format!("it has no `{field}`, {EXPECTED}")),
        };
        if let Some(messages) = object.remove("messages") {
            let Value::Array(messages) = messages else {
                return Err(format!("its `messages` are {}, expected a list", kind(&messages)));
            };
            for (number, message) in messages.iter().enumerate() {
                for field in ["role", "content"] {
                    if !message[field].is_string() {
                        let found = kind(&message[field]);
                        return Err(format!("`{field}` of message {number} is {found}, expected a text"));
                    }
                }
            }
            return Ok(Self::Messages);
        }
        if object.contains_key("prompt") || object.contains_key("completion") {
            let prompt = text(&mut object, "prompt")?;
            return Ok(Self::Pair { prompt, completion: text(&mut object, "completion")? });
        }
        if object.contains_key("text") {
            return Ok(Self::Text(text(&mut object, "text")?));
        }
        let mut found: Vec<String> = object.keys().take(8).map(|key| format!("`{key}`")).collect();
        if found.is_empty() {
            found.push("nothing".to_owned());
        }
        Err(format!("it has {}, {EXPECTED}", found.join(", ")))
    }
}

const fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "nothing",
        Value::Bool(_) => "true or false",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_what_their_fields_say() {
        let text = |text: &str| text.to_owned();
        assert_eq!(Line::parse(r#"{"text": "a", "id": 7}"#), Ok(Line::Text(text("a"))));
        let pair = Line::Pair { prompt: text("a"), completion: text("b\u{1F600}") };
        assert_eq!(Line::parse(r#"{"prompt": "a", "completion": "b\ud83d\ude00"}"#), Ok(pair));
        let messages = Line::parse(r#"{"messages": [{"role": "user", "content": "x"}]}"#).unwrap();
        assert_eq!(messages, Line::Messages);
        for (line, said) in [
            ("[1]", "it is a list"),
            ("{", "it is no JSON"),
            (r#"{"prompt": "a\ud800", "completion": "b"}"#, "it is no JSON"),
            ("{}", "it has nothing"),
            (r#"{"instruction": "a", "output": "b"}"#, "it has `instruction`, `output`"),
            (r#"{"prompt": "a"}"#, "it has no `completion`"),
            (r#"{"completion": "a"}"#, "it has no `prompt`"),
            (r#"{"prompt": "a", "completion": ["b"]}"#, "its `completion` is a list"),
            (r#"{"messages": {}}"#, "its `messages` are an object"),
            (r#"{"messages": [{"role": "user"}]}"#, "`content` of message 0 is nothing"),
            (r#"{"messages": [{"role": 1, "content": "x"}]}"#, "`role` of message 0 is a number"),
            (r#"{"text": null}"#, "its `text` is nothing"),
        ] {
            let error = Line::parse(line).unwrap_err();
            assert!(error.contains(said), "{line}: {error}");
        }
    }

    #[test]
    fn empty_lines_and_the_ends_of_other_systems_are_no_matter() {
        let found: Vec<(usize, &[u8])> = objects(b"{}\r\n\n  \n{\"a\": 1}\n").collect();
        assert_eq!(found, [(1, &b"{}"[..]), (4, b"{\"a\": 1}")]);
        for (name, is) in [("a.jsonl", true), ("a.JSONL.gz", true), ("a.ndjson.zst", true), ("a.json", false)]
        {
            assert_eq!(is_file_of_examples(Path::new(name)), is, "{name}");
        }
    }
}
