//! Texts of errors, and parts of them.

use farflung_comm::CommError;

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

impl Error {
    /// Returns the causes of the error, the nearest first, without those that the message before already
    /// contains.
    #[must_use]
    pub fn causes(&self) -> Vec<String> {
        let mut causes = Vec::new();
        let mut said = self.to_string();
        let mut cause = std::error::Error::source(self);
        while let Some(error) = cause {
            let text = error.to_string();
            if !said.contains(text.trim_end()) {
                causes.push(text.trim_end().to_owned());
            }
            said = text;
            cause = error.source();
        }
        causes
    }

    /// Returns what the user may do about the error, if its text and its causes do not say so.
    #[must_use]
    pub fn advice(&self) -> Option<&'static str> {
        let Self::PeerLost { source, .. } = self else { return None };
        let is_silent = matches!(source.downcast_ref(), Some(CommError::Deadline { .. }));
        is_silent
            .then_some("if it is alive, its message needs longer: give a longer --deadline or faster links")
    }
}

/// Returns an error and its causes on one line.
pub(crate) fn causes(error: &Error) -> String {
    std::iter::once(error.to_string()).chain(error.causes()).collect::<Vec<_>>().join(": ")
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::path::Path;

    use farflung_zoo::weights::Weights;

    use super::*;

    #[test]
    fn a_silent_peer_may_be_slow() {
        let lost = |error: CommError| Error::from(error).advice();
        let peer = farflung_base::PeerId(1);
        let after = farflung_base::Nanos(1);
        let advice = lost(CommError::Deadline { op: "recv", peer, after, cause: None }).unwrap();
        assert!(advice.contains("--deadline"), "{advice}");
        assert_eq!(lost(CommError::Deadlock { op: "recv", peer }), None);
    }

    #[test]
    fn each_cause_is_told_once() {
        let missing = Error::from(Weights::open(Path::new("no-such-folder")).unwrap_err());
        assert_eq!(missing.to_string(), "failed to read `no-such-folder/config.json`");
        assert_eq!((missing.causes().len(), causes(&missing).matches(&missing.causes()[0]).count()), (1, 1));
        // A message that contains its cause.
        let coder =
            CommError::Coder { op: "send", source: std::sync::Arc::new(io::Error::other("too long")) };
        assert_eq!(causes(&Error::Comm(coder)).matches("too long").count(), 1);
    }
}
