//! Finds the known name that is spelled most like a given one.

/// Returns the known name with the smallest edit distance to `given`; on a tie, the one with the most similar
/// length. `None` if the distance is above a third of the length of `given`, rounded up.
pub(crate) fn nearest<'a>(given: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let names = known.into_iter().map(|name| (edits(given, name), name.len().abs_diff(given.len()), name));
    let (distance, _, name) = names.min()?;
    (distance <= given.len().div_ceil(3)).then_some(name)
}

/// Returns `expected`, with a suggestion if one of `known` is similar to `given`. Of a known form such as
/// `int8[:BLOCK]`, the name `int8` is compared.
pub(crate) fn with_nearest(expected: String, given: &str, known: &[impl AsRef<str>]) -> String {
    let names = known.iter().filter_map(|name| name.as_ref().split(['[', ':']).next());
    // The text after the name, such as a block size, is kept as given.
    let head = given.split([':', '/', '+']).next().unwrap_or_default();
    let meant = nearest(head, names).map(|name| format!("{name}{}", &given[head.len()..]));
    match meant.filter(|meant| *meant != given) {
        Some(meant) => format!("{expected}; did you mean `{meant}`?"),
        None => expected,
    }
}

/// Returns the Levenshtein distance: the number of insertions, deletions and replacements of a byte that turn
/// `a` into `b`.
fn edits(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.bytes().enumerate() {
            let replace = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = replace.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use crate::config::value::Setting;
    use farflung_comm::Algorithm;
    use farflung_compress::CodecSpec;
    use farflung_compress::link::LinkSpec;
    use farflung_parallel::pipeline::Method;

    #[test]
    fn a_mistyped_name_is_answered_with_the_nearest() {
        let said = |answer: Result<(), String>| answer.unwrap_err();
        for (message, meant) in [
            (said(Method::from_flag("gpip").map(drop)), "`gpipe`"),
            (said(Method::from_flag("zb-h3").map(drop)), "`zb-h1`"),
            (said(CodecSpec::from_flag("imt8:64").map(drop)), "`int8:64`"),
            (said(CodecSpec::from_flag("topl:0.1/f16").map(drop)), "`topk:0.1/f16`"),
            (said(LinkSpec::from_flag("aqsdg:4").map(drop)), "`aqsgd:4`"),
            (said(Algorithm::from_flag("rng").map(drop)), "`ring`"),
        ] {
            assert!(message.ends_with(&format!("did you mean {meant}?")), "{message}");
        }
        for message in
            [said(Method::from_flag("nothing-like-it").map(drop)), said(u64::from_flag("three").map(drop))]
        {
            assert!(!message.contains("did you mean"), "{message}");
        }
    }
}
