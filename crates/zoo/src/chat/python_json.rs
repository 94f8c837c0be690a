//! JSON as Python's `json.dumps(..., ensure_ascii=False)` writes it, which models were trained on.

use minijinja::Value;
use minijinja::value::ValueKind;

/// Returns a value as JSON. Keys keep their order. `indent` is the number of spaces of a level; without it,
/// all is on one line. `None` if it is longer than `longest` bytes.
pub(super) fn dumps(value: &Value, indent: Option<usize>, longest: usize) -> Option<String> {
    let mut out = String::new();
    write(value, indent, (0, longest), &mut out)?;
    Some(out)
}

fn line(indent: Option<usize>, depth: usize, out: &mut String) {
    if let Some(indent) = indent {
        out.push('\n');
        out.extend(std::iter::repeat_n(' ', indent.min(16) * depth));
    }
}

fn text(text: &str) -> String {
    serde_json::to_string(text).expect("a text can be written as JSON")
}

/// Writes items between brackets, each by `item`.
fn list(
    [open, close]: [char; 2],
    (indent, depth): (Option<usize>, usize),
    items: impl Iterator<Item = Value>,
    out: &mut String,
    item: impl Fn(&Value, &mut String) -> Option<()>,
) -> Option<()> {
    out.push(open);
    let mut is_empty = true;
    for value in items {
        if !is_empty {
            out.push_str(if indent.is_some() { "," } else { ", " });
        }
        is_empty = false;
        line(indent, depth + 1, out);
        item(&value, out)?;
    }
    if !is_empty {
        line(indent, depth, out);
    }
    out.push(close);
    Some(())
}

/// Writes a value at a depth, unless the text becomes too long.
fn write(
    value: &Value,
    indent: Option<usize>,
    (depth, longest): (usize, usize),
    out: &mut String,
) -> Option<()> {
    if out.len() > longest {
        return None;
    }
    let items = || value.try_iter().into_iter().flatten();
    let inner = |value: &Value, out: &mut String| write(value, indent, (depth + 1, longest), out);
    match value.kind() {
        ValueKind::Undefined | ValueKind::None => out.push_str("null"),
        ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
        ValueKind::Map => list(['{', '}'], (indent, depth), items(), out, |key, out| {
            out.push_str(&text(&key.to_string()));
            out.push_str(": ");
            inner(&value.get_item(key).unwrap_or_default(), out)
        })?,
        ValueKind::Seq | ValueKind::Iterable => list(['[', ']'], (indent, depth), items(), out, inner)?,
        ValueKind::Number => out.push_str(&value.to_string()),
        _ => out.push_str(&text(&value.to_string())),
    }
    (out.len() <= longest).then_some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_as_python_does() {
        let value: Value =
            serde_json::from_str(r#"{"b": [1, 2.5, null, true], "a": {"<é>": "\"\n"}, "e": [], "m": {}}"#)
                .unwrap();
        assert_eq!(
            dumps(&value, None, 1000).unwrap(),
            r#"{"b": [1, 2.5, null, true], "a": {"<é>": "\"\n"}, "e": [], "m": {}}"#
        );
        assert_eq!(dumps(&value, None, 20), None);
        let value: Value = serde_json::from_str(r#"{"b": [1], "e": []}"#).unwrap();
        assert_eq!(dumps(&value, Some(2), 99).unwrap(), "{\n  \"b\": [\n    1\n  ],\n  \"e\": []\n}");
    }
}
