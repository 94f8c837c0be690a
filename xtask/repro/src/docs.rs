//! Writes the results of benches into a folder, for `--report FOLDER`.
//!
//! Each bench that ran without an error writes its record to `reproductions/NAME.json`; other records stay. The
//! pages and charts are made from the records and from the table of methods alone. A test fails if one of them
//! was edited by hand.

mod chart;
mod choosing;
mod record;
mod reproductions;

use std::path::Path;

use anyhow::{Context, Result};

pub(crate) use record::{ArmRecord, Record, UnequalRecord};

/// Returns a command that can be typed: of a flag that is given twice, only the last value is kept. Recorded
/// commands have the flags of the setting followed by those of the arm.
fn command(recorded: &str) -> String {
    let words: Vec<&str> = recorded.split_whitespace().collect();
    let again = |i: usize| words[i].starts_with("--") && words[i + 1..].contains(&words[i]);
    let mut kept = Vec::new();
    let mut dropped = false;
    for (i, word) in words.iter().enumerate() {
        if word.starts_with("--") {
            dropped = again(i);
        }
        if !dropped {
            kept.push(*word);
        }
    }
    kept.join(" ")
}

/// Returns the pages and charts of the records, with their file names.
fn pages(records: &[Record]) -> Result<Vec<(&'static str, String)>> {
    let arms = record::arms(records)?;
    Ok(vec![
        ("reproductions.md", reproductions::page(records)),
        ("choosing.md", choosing::page(&arms, &record::unequal(records)?)),
        ("loss-by-bytes.svg", chart::svg(&arms, chart::XAxis::Bytes)?),
        ("loss-by-time.svg", chart::svg(&arms, chart::XAxis::Time)?),
    ])
}

/// Writes the pages of the records in a folder, in the order of `benches`.
///
/// Errors: a record cannot be read, or a page cannot be written.
pub(crate) fn write(folder: &Path, benches: &[&str]) -> Result<()> {
    for (name, text) in pages(&Record::all(folder, benches)?)? {
        std::fs::write(folder.join(name), text).with_context(|| format!("failed to write {name}"))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks that the committed pages match the committed records.
    #[test]
    fn nobody_changed_the_pages_by_hand() {
        let folder = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs"));
        let benches: Vec<_> = crate::BENCHES.iter().map(|bench| bench.name).collect();
        let records = Record::all(folder, &benches).unwrap();
        assert!(!records.is_empty());
        for (name, text) in pages(&records).unwrap() {
            let found = std::fs::read_to_string(folder.join(name)).unwrap();
            assert!(
                found == text,
                "docs/{name} is not what the records say: `cargo xtask bench --all --report`"
            );
        }
    }

    #[test]
    fn a_flag_stands_in_a_command_once() {
        let recorded = "farflung train --codec none --batch 4 --quiet --lr 1e-3 --codec int8 --lr -1 --quiet";
        assert_eq!(command(recorded), "farflung train --batch 4 --codec int8 --lr -1 --quiet");
        assert_eq!(command("8 workers, nano"), "8 workers, nano");
    }

    #[test]
    fn what_is_saved_is_read_again_and_strangers_are_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let record = Record {
            name: "diloco".to_owned(),
            claim: "a claim".to_owned(),
            source: "a paper".to_owned(),
            rows: vec![["loss", "2.5", "nats", "<= 3", "ok"].map(str::to_owned)],
            added: [("published".to_owned(), serde_json::json!([]))].into(),
        };
        record.save(folder.path()).unwrap();
        assert_eq!(Record::all(folder.path(), &["diloco", "bagua"]).unwrap(), [record]);
        assert!(Record::all(folder.path(), &["bagua"]).unwrap().is_empty());
    }
}
