//! Templates of conversations against transformers, and hostile ones.

#![cfg(all(feature = "chat", feature = "tokenizers"))]
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::fs;
use std::path::{Path, PathBuf};

use farflung_zoo::Tokenizer as _;
use farflung_zoo::chat::{ChatTemplate, Conversation, Date, Message};
use farflung_zoo::tokenizer::FileTokenizer;
use serde_json::Value;

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")
}

/// Returns the tokenizer of a model folder with a template of conversations, and what is expected of it.
fn folder(chat: &str, tokenizer: &str) -> (FileTokenizer, Value) {
    let folder = tempfile::tempdir().unwrap();
    let described = fixtures().join("tokenizers").join(tokenizer).join("tokenizer.json");
    fs::copy(described, folder.path().join("tokenizer.json")).unwrap();
    let chat = fixtures().join("chat").join(chat);
    for name in ["chat_template.jinja", "tokenizer_config.json"] {
        fs::copy(chat.join(name), folder.path().join(name)).unwrap();
    }
    let expected = fs::read(chat.join("expected.json")).unwrap();
    (FileTokenizer::open(folder.path()).unwrap(), serde_json::from_slice(&expected).unwrap())
}

#[test]
fn conversations_are_written_as_transformers_does() {
    for (chat, tokenizer) in [("chatml", "gpt2"), ("headers", "llama3")] {
        let (tokenizer, expected) = folder(chat, tokenizer);
        let template = ChatTemplate::new(tokenizer.chat_template().unwrap()).unwrap();
        let text = fs::read_to_string(fixtures().join("chat").join(chat).join("expected.json")).unwrap();
        for case in expected["cases"].as_array().unwrap() {
            let mut conversation = Conversation::from_json(&case["messages"].to_string()).unwrap();
            conversation.asks = case["add_generation_prompt"] == true;
            conversation.marks = tokenizer.marks();
            if let Some(at) = text.find("\"tools\":").filter(|_| !case["tools"].is_null()) {
                // Its keys in their order: `serde_json` sorts them.
                let mut parsed = serde_json::Deserializer::from_str(&text[at + 8..]).into_iter::<Value>();
                parsed.next().unwrap().unwrap();
                let tools = &text[at + 8..at + 8 + parsed.byte_offset()];
                conversation = conversation.with_tools(tools).unwrap();
            }
            let rendered = template.render(&conversation).unwrap();
            assert_eq!(rendered, case["text"].as_str().unwrap(), "{chat}: {}", case["title"]);
            let ids: Vec<u32> = serde_json::from_value(case["ids"].clone()).unwrap();
            assert_eq!(tokenizer.encode_marked(&rendered).unwrap(), ids, "{chat}: {}", case["title"]);
        }
        let refused = &expected["refused"];
        if !refused.is_null() {
            let mut conversation = Conversation::from_json(&refused["messages"].to_string()).unwrap();
            conversation.marks = tokenizer.marks();
            let error = template.render(&conversation).unwrap_err().to_string();
            assert!(error.contains(refused["error"].as_str().unwrap()), "{error}");
        }
    }
    assert_eq!(folder("chatml", "gpt2").0.end_of_text(), Some(2), "the `eos_token` of the folder");
}

fn rendered(template: &str) -> Result<String, String> {
    let template = ChatTemplate::new(template).map_err(|error| error.to_string())?;
    let mut conversation = Conversation::of(&[Message::system("be"), Message::user("hi")]);
    conversation.date = Some(Date::of_days(0));
    template.render(&conversation).map_err(|error| error.to_string())
}

#[test]
fn what_a_template_can_ask_for() {
    let names = "{%- for m in messages %}\n  {{- m.role }}={{ m['content'].strip() }};\n{%- endfor %}";
    assert_eq!(rendered(names).unwrap(), "system=be;user=hi;");
    assert_eq!(rendered("{{ strftime_now('%d %b %Y') }}").unwrap(), "01 Jan 1970");
    assert_eq!(rendered("{{ messages[0] | tojson }}").unwrap(), r#"{"role": "system", "content": "be"}"#);
    assert_eq!(rendered("{% if tools is none and documents is none %}no{% endif %}").unwrap(), "no");
    let tags = "{%- generation -%} a {%- endgeneration -%}";
    assert_eq!(rendered(tags).unwrap(), "a");
    let undated = ChatTemplate::new("{{ strftime_now('%Y') }}").unwrap();
    let error = undated.render(&Conversation::of(&[])).unwrap_err().to_string();
    assert!(error.contains("none is given"), "{error}");
}

#[test]
fn hostile_templates_are_errors() {
    for (template, expected) in [
        ("{% if %}", "line 1"),
        ("a\n{{ messages[", "line 2"),
        ("{{ nothing.at.all }}", "undefined"),
        ("{{ raise_exception('not me') }}", "not me"),
        ("{% for a in range(9999) %}{% for b in range(9999) %}{{ a }}{% endfor %}{% endfor %}", "steps"),
        ("{% for a in range(99999) %}{{ 'x' * 9999 }}{% endfor %}", "steps"),
        (
            "{% set n = namespace(s='12345678') %}{% for a in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
            "steps",
        ),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
        ("{% include 'secret' %}", ""),
        ("{{ 'x' * 99999999999 }}", "steps"),
    ] {
        let error = rendered(template).unwrap_err();
        assert!(error.contains(expected), "{template}: {error}");
    }
    // Deep ones are read on a stack that is large enough, or refused.
    let _ = rendered(&format!("{{{{ {}1 }}}}", "---".repeat(9000)));
    let nested =
        "{% set n = namespace(x=1) %}{% for i in range(90000) %}{% set n.x = [n.x] %}{% endfor %}{{ n.x }}";
    assert!(rendered(nested).unwrap_err().contains("steps"));
    let doubled =
        "{% set n = namespace(x=[1]) %}{% for i in range(28) %}{% set n.x = [n.x, n.x] %}{% endfor %}";
    let error = rendered(&format!("{doubled}{{{{ n.x | tojson }}}}")).unwrap_err();
    assert!(error.contains("bytes") || error.contains("steps"), "{error}");
    assert!(rendered(&" ".repeat(70_000)).unwrap_err().contains("expected at most 65536"));
    let long = Conversation::of(&[Message::user("x".repeat(1 << 20))]);
    let many = ChatTemplate::new("{% for a in range(99) %}{{ messages[0].content }}{% endfor %}").unwrap();
    let error = many.render(&long).unwrap_err().to_string();
    assert!(error.contains("bytes") || error.contains("steps"), "{error}");
    let error = Conversation::from_json("{\"role\": 1}").unwrap_err().to_string();
    assert!(error.contains("`messages`"), "{error}");
    // Cut anywhere and with any byte replaced, a template is read or refused.
    let template = fs::read(fixtures().join("chat/headers/chat_template.jinja")).unwrap();
    for at in 0..template.len() {
        let _ = rendered(&String::from_utf8_lossy(&template[..at]));
        let mut other = template.clone();
        other[at] = b"{%}-'|"[at % 6];
        let _ = rendered(&String::from_utf8_lossy(&other));
    }
}
