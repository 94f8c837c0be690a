//! Templates of conversations: how a model was trained to see messages, as a Jinja template beside its
//! tokenizer.
//!
//! Templates are rendered as transformers' `apply_chat_template` does: `trim_blocks` and `lstrip_blocks`,
//! Python's methods of strings, `raise_exception`, `strftime_now`, `tojson` as Python's `json.dumps` writes.
//! `{% generation %}` does not change the text; [`ChatTemplate::render_marked`] returns where it was. A
//! template is code from outside: it can open nothing, the number of its steps is limited, and so is the length
//! of what it writes.

mod date;
mod python_json;

use std::io::{self, Write};
use std::ops::Range;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde};
use minijinja::{Environment, ErrorKind, Value};
use serde::{Deserialize, Serialize};

use crate::ZooError;
use crate::tokenizer::Marks;
pub use date::Date;

/// Most bytes of a template. The longest of published models have about 20 thousand.
const LONGEST_TEMPLATE: usize = 1 << 16;
/// Most steps of a template.
const FUEL: u64 = 500_000;
/// Longest time of a template: some of its steps can take long.
const PATIENCE: Duration = Duration::from_secs(20);
/// Bytes of the stack on which a template is read and rendered: both go as deep as it nests.
const STACK: usize = 1 << 29;
/// Most bytes of a rendered conversation.
const LONGEST: usize = 1 << 26;
const TOO_LONG: &str = "it writes more than 67108864 bytes";
const NAME: &str = "chat template";

/// A message of a conversation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// Who says it: `system`, `user`, `assistant`.
    pub role: String,
    /// What is said.
    pub content: String,
}

impl Message {
    /// Returns a message of a user.
    #[must_use]
    pub fn user(content: impl Into<String>) -> Self {
        Self { role: "user".to_owned(), content: content.into() }
    }

    /// Returns a message that says how the assistant shall be.
    #[must_use]
    pub fn system(content: impl Into<String>) -> Self {
        Self { role: "system".to_owned(), content: content.into() }
    }
}

/// What a template is rendered with.
#[derive(Debug, Clone)]
pub struct Conversation<'a> {
    messages: Value,
    tools: Value,
    /// Whether the text ends with the beginning of the assistant's next message.
    pub asks: bool,
    /// The texts of the tokenizer's begin and end tokens.
    pub marks: Marks<'a>,
    /// The date that templates write which ask for it; without one they fail, so that equal conversations give
    /// equal texts.
    pub date: Option<Date>,
}

impl Conversation<'_> {
    /// Makes a conversation of messages.
    #[must_use]
    pub fn of(messages: &[Message]) -> Self {
        Self::new(Value::from(Serde(messages)))
    }

    /// Makes a conversation of a JSON list of messages, which may have other fields than [`Message`].
    ///
    /// Errors: [`ZooError::Chat`] if it is no list.
    pub fn from_json(messages: &str) -> Result<Self, ZooError> {
        let parsed: Value = serde_json::from_str(messages).map_err(|error| wrong("`messages`", error))?;
        if parsed.kind() != minijinja::value::ValueKind::Seq {
            return Err(wrong("`messages`", "it is no list"));
        }
        Ok(Self::new(parsed))
    }

    /// Makes a conversation of values that are messages.
    pub(crate) fn of_values(messages: &[Value]) -> Self {
        Self::new(Value::from(messages.to_vec()))
    }

    /// Asks for the assistant's next message.
    #[must_use]
    pub const fn asking(mut self) -> Self {
        self.asks = true;
        self
    }

    /// Adds a JSON list of tools.
    ///
    /// Errors: [`ZooError::Chat`] if it is no JSON.
    pub fn with_tools(mut self, tools: &str) -> Result<Self, ZooError> {
        self.tools = serde_json::from_str(tools).map_err(|error| wrong("`tools`", error))?;
        Ok(self)
    }

    fn new(messages: Value) -> Self {
        Self { messages, tools: Value::from(()), asks: false, marks: Marks::default(), date: None }
    }
}

fn wrong(what: &str, problem: impl std::fmt::Display) -> ZooError {
    ZooError::Chat { what: what.to_owned(), problem: problem.to_string() }
}

/// A template that was read.
#[derive(Debug, Clone)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    /// Whether it marks what the assistant says.
    marks_answers: bool,
}

/// What stands before and after a marked part of a rendered text, until it is taken out.
const MARKS: [&str; 2] = ["\u{E0B1}farflung:answer\u{E0B2}", "\u{E0B2}farflung:answer\u{E0B1}"];

/// Text that is written up to a length.
struct Limited(Vec<u8>);

impl Write for Limited {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > LONGEST {
            return Err(io::Error::other(TOO_LONG));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Replaces the tags of an extension of transformers, which mark what the assistant says, by those of a filter.
fn with_filter(template: &str) -> String {
    let mut out = String::with_capacity(template.len());
    let mut rest = template;
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at);
        out.push_str(before);
        let Some(end) = tag.find("%}").map(|end| end + 2) else { break };
        let (tag, after) = tag.split_at(end);
        let inner = tag
            .get(2..tag.len() - 2)
            .unwrap_or("")
            .trim_matches(|c: char| c == '-' || c == '+' || c.is_whitespace());
        match inner {
            "generation" => out.push_str(&tag.replacen(inner, "filter _answer", 1)),
            "endgeneration" => out.push_str(&tag.replacen(inner, "endfilter", 1)),
            _ => out.push_str(tag),
        }
        rest = after;
    }
    out.push_str(rest);
    out
}

impl ChatTemplate {
    /// Reads a template.
    ///
    /// Errors: [`ZooError::Chat`] with its line.
    pub fn new(template: &str) -> Result<Self, ZooError> {
        if template.len() > LONGEST_TEMPLATE {
            let found = template.len();
            return Err(wrong(NAME, format!("it has {found} bytes, expected at most {LONGEST_TEMPLATE}")));
        }
        let template = template.to_owned();
        apart(move || Self::read(&template))
    }

    fn read(template: &str) -> Result<Self, ZooError> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(|error| wrong(NAME, error))?);
        environment.set_fuel(Some(FUEL));
        environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_filter("tojson", |value: Value, options: Kwargs| {
            let indent: Option<usize> = options.get("indent")?;
            // Others change nothing in a conversation.
            for known in ["ensure_ascii", "separators"] {
                let _: Option<Value> = options.get(known)?;
            }
            options.assert_all_used()?;
            let too_long = || minijinja::Error::new(ErrorKind::InvalidOperation, TOO_LONG);
            python_json::dumps(&value, indent, LONGEST).ok_or_else(too_long)
        });
        environment.add_function("raise_exception", |message: String| -> Result<Value, minijinja::Error> {
            Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
        });
        environment.add_filter("_answer", |text: String| format!("{}{text}{}", MARKS[0], MARKS[1]));
        let filtered = with_filter(template);
        let marks_answers = filtered != template;
        environment.add_template_owned(NAME, filtered).map_err(|error| wrong(NAME, Shown(&error)))?;
        Ok(Self { environment, marks_answers })
    }

    /// Returns whether the template marks what the assistant says.
    #[must_use]
    pub const fn marks_answers(&self) -> bool {
        self.marks_answers
    }

    /// Renders a conversation.
    ///
    /// Errors: [`ZooError::Chat`] with what the template refuses, or how it fails.
    pub fn render(&self, conversation: &Conversation<'_>) -> Result<String, ZooError> {
        Ok(self.render_marked(conversation)?.0)
    }

    /// Renders a conversation. Returns the text, and where in it the parts are that the template marks as what
    /// the assistant says (`{% generation %}`); none if it marks none ([`ChatTemplate::marks_answers`]).
    ///
    /// Errors: as [`ChatTemplate::render`]; [`ZooError::Chat`] for a message with the marks that are used here.
    pub fn render_marked(
        &self,
        conversation: &Conversation<'_>,
    ) -> Result<(String, Vec<Range<usize>>), ZooError> {
        let marked = self.render_with_marks(conversation)?;
        taken_out(&marked).ok_or_else(|| wrong("a message", "it has a mark of this program"))
    }

    fn render_with_marks(&self, conversation: &Conversation<'_>) -> Result<String, ZooError> {
        let environment = self.environment.clone();
        let Conversation { messages, tools, asks, marks, date } = conversation.clone();
        let marks = [marks.begin.to_owned(), marks.end.to_owned()];
        apart(move || Self::rendered(environment, &messages, &tools, asks, &marks, date))
    }

    fn rendered(
        mut environment: Environment<'static>,
        messages: &Value,
        tools: &Value,
        asks: bool,
        [begin, end]: &[String; 2],
        date: Option<Date>,
    ) -> Result<String, ZooError> {
        environment.add_function("strftime_now", move |format: String| {
            let missing = "it writes the date, and none is given";
            let date = date.ok_or_else(|| minijinja::Error::new(ErrorKind::InvalidOperation, missing))?;
            date.format(&format)
                .map_err(|problem| minijinja::Error::new(ErrorKind::InvalidOperation, problem))
        });
        let template = environment.get_template(NAME).map_err(|error| wrong(NAME, Shown(&error)))?;
        let context = minijinja::context! {
            messages => messages,
            tools => tools,
            documents => Value::from(()),
            add_generation_prompt => asks,
            bos_token => begin,
            eos_token => end,
        };
        let mut out = Limited(Vec::new());
        template.render_captured_to(context, &mut out).map_err(|error| wrong(NAME, Shown(&error)))?;
        Ok(String::from_utf8(out.0).expect("templates write text"))
    }
}

/// Takes the marks out of a text. Returns where the marked parts are; `None` if the marks are not in pairs.
fn taken_out(marked: &str) -> Option<(String, Vec<Range<usize>>)> {
    let [begin, end] = MARKS;
    let (mut text, mut spans) = (String::with_capacity(marked.len()), Vec::new());
    let mut rest = marked;
    while let Some((before, after)) = rest.split_once(begin) {
        let (inside, after) = after.split_once(end)?;
        text.push_str(before);
        let start = text.len();
        text.push_str(inside);
        spans.push(start..text.len());
        rest = after;
    }
    text.push_str(rest);
    let is_clean = MARKS.iter().all(|mark| !text.contains(mark));
    is_clean.then_some((text, spans))
}

/// Works on a template in a thread with a large stack, for a limited time. A template that takes longer is left
/// behind.
fn apart<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ZooError> + Send + 'static,
) -> Result<T, ZooError> {
    let (done, answer) = channel();
    let thread = thread::Builder::new().name("template".to_owned()).stack_size(STACK);
    let started = thread.spawn(move || drop(done.send(work())));
    started.map_err(|error| wrong(NAME, format!("no thread can be started for it: {error}")))?;
    answer.recv_timeout(PATIENCE).map_err(|error| match error {
        RecvTimeoutError::Timeout => wrong(NAME, format!("it takes more than {} s", PATIENCE.as_secs())),
        RecvTimeoutError::Disconnected => wrong(NAME, "it cannot be rendered"),
    })?
}

/// An error with its line and its causes.
struct Shown<'a>(&'a minijinja::Error);

impl std::fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match (self.0.kind(), self.0.detail()) {
            (ErrorKind::OutOfFuel, _) => write!(f, "it takes more than {FUEL} steps")?,
            (_, Some(detail)) => write!(f, "{detail}")?,
            (kind, None) => write!(f, "{kind}")?,
        }
        if let Some(source) = std::error::Error::source(self.0) {
            write!(f, ": {source}")?;
        }
        self.0.line().map_or(Ok(()), |line| write!(f, " (line {line})"))
    }
}
