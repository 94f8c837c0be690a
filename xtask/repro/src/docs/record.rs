//! The record of a bench: its rows, and the lists that it added to them.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::{Value, json};

/// The results of a bench.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Record {
    pub name: String,
    pub claim: String,
    pub source: String,
    /// Rows with a metric, its value, unit, condition and verdict.
    pub rows: Vec<[String; 5]>,
    /// Lists by name, such as `published` and `arms`.
    pub added: BTreeMap<String, Value>,
}

/// The results of an arm of the lab, as stored in records.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ArmRecord {
    pub name: String,
    pub what: String,
    pub command: String,
    pub seeds: u64,
    /// Loss above the reference's, in percent, and its standard deviation.
    pub gap: [f64; 2],
    /// Bytes that a rank sends per step: without frames, and with them in `sent`.
    pub payload: f64,
    pub sent: f64,
    /// Mean seconds of a step of the whole run over the links of [`crate::lab::LINKS`].
    pub step_times: Vec<f64>,
    /// Points of the loss curve: step, bytes sent, seconds and loss.
    pub curve: Vec<[f64; 4]>,
}

impl Record {
    fn path(folder: &Path, name: &str) -> PathBuf {
        folder.join("reproductions").join(format!("{name}.json"))
    }

    /// Writes the record into a folder.
    ///
    /// Errors: the file cannot be written.
    pub(crate) fn save(&self, folder: &Path) -> Result<()> {
        let path = Self::path(folder, &self.name);
        fs::create_dir_all(folder.join("reproductions")).context("failed to create the folder of records")?;
        let Self { name, claim, source, rows, added } = self;
        let value = json!({ "name": name, "claim": claim, "source": source, "rows": rows, "added": added });
        let text = serde_json::to_string_pretty(&value)? + "\n";
        fs::write(&path, text).with_context(|| format!("failed to write {}", path.display()))
    }

    /// Reads the records of these benches from a folder, in their order. Benches without a record are skipped.
    ///
    /// Errors: a file is not a record.
    pub(crate) fn all(folder: &Path, benches: &[&str]) -> Result<Vec<Self>> {
        let paths = benches.iter().map(|name| Self::path(folder, name)).filter(|path| path.is_file());
        paths
            .map(|path| Self::read(&path).with_context(|| format!("failed to read {}", path.display())))
            .collect()
    }

    fn read(path: &Path) -> Result<Self> {
        let value: Value = serde_json::from_slice(&fs::read(path)?)?;
        let row = |row: &Value| -> Result<[String; 5]> {
            let cells = row.as_array().context("a row is not a list")?;
            let cells: Vec<String> = cells.iter().filter_map(Value::as_str).map(str::to_owned).collect();
            cells.try_into().ok().context("a row does not have five texts")
        };
        let rows = value["rows"].as_array().context("`rows` is not a list")?.iter().map(row);
        let added = value["added"].as_object().context("`added` is not an object")?.clone();
        Ok(Self {
            name: text(&value, "name")?,
            claim: text(&value, "claim")?,
            source: text(&value, "source")?,
            rows: rows.collect::<Result<_>>()?,
            added: added.into_iter().collect(),
        })
    }

    /// Returns a list that the bench added, or an empty list.
    pub(super) fn list(&self, name: &str) -> &[Value] {
        self.added.get(name).and_then(Value::as_array).map_or(&[], Vec::as_slice)
    }
}

/// Returns a text field of an object.
pub(super) fn text(value: &Value, name: &str) -> Result<String> {
    Ok(value[name].as_str().with_context(|| format!("`{name}` is not a text"))?.to_owned())
}

fn number(value: &Value, name: &str) -> Result<f64> {
    value[name].as_f64().with_context(|| format!("`{name}` is not a number"))
}

fn numbers(value: &Value, name: &str) -> Result<Vec<f64>> {
    let list = value.as_array().with_context(|| format!("`{name}` is not a list"))?;
    list.iter()
        .map(|x| x.as_f64().with_context(|| format!("`{name}` has a value that is not a number")))
        .collect()
}

/// The results of an arm on unequal machines.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct UnequalRecord {
    pub name: String,
    pub what: String,
    pub command: String,
    /// Description of the machines.
    pub machines: String,
    /// Tokens per hour, relative to averaging at each step.
    pub rate: f64,
    /// Loss above that of averaging at each step, in percent, and its standard deviation.
    pub gap: [f64; 2],
    /// Bytes that a rank sends per step, without frames.
    pub payload: f64,
}

/// Returns all arms on unequal machines.
///
/// Errors: an entry lacks a field.
pub(super) fn unequal(records: &[Record]) -> Result<Vec<UnequalRecord>> {
    let read = |value: &Value| {
        Ok(UnequalRecord {
            name: text(value, "name")?,
            what: text(value, "what")?,
            command: text(value, "command")?,
            machines: text(value, "machines")?,
            rate: number(value, "rate")?,
            gap: [number(value, "gap")?, number(value, "gap_sigma")?],
            payload: number(value, "payload")?,
        })
    };
    records.iter().flat_map(|record| record.list("unequal")).map(read).collect()
}

/// Returns all arms of the records. An arm that is in several records is taken from the first.
///
/// Errors: an entry lacks a field.
pub(super) fn arms(records: &[Record]) -> Result<Vec<ArmRecord>> {
    let mut found: Vec<ArmRecord> = Vec::new();
    for value in records.iter().flat_map(|record| record.list("arms")) {
        let name = text(value, "name")?;
        if found.iter().any(|arm| arm.name == name) {
            continue;
        }
        let point = |point: &Value| -> Result<[f64; 4]> {
            numbers(point, "curve")?.try_into().ok().context("a point of `curve` does not have four numbers")
        };
        let curve = value["curve"].as_array().context("`curve` is not a list")?.iter().map(point);
        found.push(ArmRecord {
            name,
            what: text(value, "what")?,
            command: text(value, "command")?,
            seeds: value["seeds"].as_u64().context("`seeds` is not a number")?,
            gap: [number(value, "gap")?, number(value, "gap_sigma")?],
            payload: number(value, "payload")?,
            sent: number(value, "sent")?,
            step_times: numbers(&value["step_times"], "step_times")?,
            curve: curve.collect::<Result<_>>()?,
        });
    }
    Ok(found)
}
