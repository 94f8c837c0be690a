//! Which tokens of a rendered conversation are the assistant's.
//!
//! A template that marks them (`{% generation %}`) decides. Of other templates, an answer is what rendering the
//! messages up to it adds to the messages before it and the beginning of an answer, without white space after
//! its end: its content and the token that ends it, not the header before it.
#![cfg(feature = "chat")]

use std::ops::Range;

use minijinja::Value;

use super::Example;
use crate::chat::{ChatTemplate, Conversation, Date};
use crate::{Tokenizer, ZooError};

/// Date that templates write which ask for it, 26 July 2024: what Llama's templates write without one. It is
/// the same on all machines and on all days.
const DATE: Date = Date::of_days(19_930);

/// Makes an example of the conversation of a line, of which the assistant's tokens count.
///
/// Errors: what the template refuses, and why its answers cannot be told.
pub(super) fn conversation(
    tokenizer: &dyn Tokenizer,
    template: &ChatTemplate,
    line: &str,
) -> Result<Example, String> {
    let told = |error: ZooError| error.to_string();
    let messages = messages_of(line).ok_or("its `messages` are no list")?;
    let render = |messages: &[Value], asks: bool| {
        let mut conversation = Conversation::of_values(messages);
        conversation.asks = asks;
        conversation.marks = tokenizer.marks();
        conversation.date = Some(DATE);
        template.render_marked(&conversation)
    };
    let (text, mut spans) = render(&messages, false).map_err(told)?;
    if !template.marks_answers() {
        spans = Vec::new();
        for (at, message) in messages.iter().enumerate() {
            if message.get_attr("role").is_ok_and(|role| role.as_str() == Some("assistant")) {
                let (before, _) = render(&messages[..at], true).map_err(told)?;
                let (with, _) = render(&messages[..=at], false).map_err(told)?;
                spans.push(added(&text, &before, &with).ok_or_else(|| untold(at))?);
            }
        }
    }
    let ids = tokenizer.encode_marked(&text).map_err(told)?;
    let mut counts = vec![false; ids.len()];
    for span in spans.into_iter().filter(|span| !span.is_empty()) {
        let (first, _) = tokens_of(tokenizer, &text[..span.start], &ids).map_err(told)?;
        let (same, whole) = tokens_of(tokenizer, &text[..span.end], &ids).map_err(told)?;
        // A token with an end of the answer and what follows it is the answer's.
        let end = (same + usize::from(same < whole)).min(ids.len());
        counts[first.min(end)..end].fill(true);
    }
    Ok(Example { ids, counts })
}

fn messages_of(line: &str) -> Option<Vec<Value>> {
    let object: Value = serde_json::from_str(line).ok()?;
    Some(object.get_attr("messages").ok()?.try_iter().ok()?.collect())
}

fn untold(message: usize) -> String {
    format!(
        "the template renders the messages before message {message} in another way if it follows, expected one that only \
         adds to them, or that marks answers with `{{% generation %}}`"
    )
}

/// Returns where the text that is added to `before` is, without white space at its end, if all of `text` begins
/// with `with`, and this with `before`.
fn added(text: &str, before: &str, with: &str) -> Option<Range<usize>> {
    let answer = with.strip_prefix(before).filter(|_| text.starts_with(with))?;
    Some(before.len()..before.len() + answer.trim_end().len())
}

/// Returns how many of the ids of a text are those of its beginning alone, and how many that has.
fn tokens_of(tokenizer: &dyn Tokenizer, beginning: &str, ids: &[u32]) -> Result<(usize, usize), ZooError> {
    let own = tokenizer.encode_marked(beginning)?;
    Ok((own.iter().zip(ids).take_while(|(own, id)| own == id).count(), own.len()))
}
