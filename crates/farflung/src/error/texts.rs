//! Texts of errors, and parts of them.

use super::Error;

/// Returns a text on the ranks whose own gradients are not finite.
pub(super) fn not_finite(ranks: &[farflung_base::Rank]) -> String {
    match ranks {
        [] => "each rank's own gradients are finite, but their sum is not".to_owned(),
        [_] => format!("{} has gradients that are not finite", crate::train::Ranks(ranks)),
        _ => format!("{} have gradients that are not finite", crate::train::Ranks(ranks)),
    }
}

/// Returns a text on the ranks whose copies differ.
pub(super) fn diverged(what: &str, ranks: &[farflung_base::Rank], majority: bool) -> String {
    let shown = crate::train::Ranks(ranks);
    match (ranks, majority) {
        ([_], _) => format!("{shown} has a different copy of the {what} than the other ranks"),
        (_, true) => format!("{shown} have different copies of the {what} than most ranks"),
        (_, false) => format!("{shown} have different copies of the {what}, and no majority agrees"),
    }
}

/// Returns a text with the names of the other things that differ.
pub(super) fn and_also(names: &[String]) -> String {
    match names {
        [] => String::new(),
        [name] => format!(" (`{name}` differs too)"),
        names => {
            let quoted: Vec<_> = names.iter().map(|name| format!("`{name}`")).collect();
            format!(" ({} differ too)", quoted.join(", "))
        }
    }
}

/// Returns an error and its causes on one line.
pub(crate) fn causes(error: &Error) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}
